//! `Debug` of types whose fields are memory of a device, or handles to it: their names alone.

#[cfg(feature = "cuda")]
use crate::cuda::{self, Cuda};
use crate::{
    device::{Cache, DeltaNet, Device, HeadNorms, Norm, Places, Rope, Slots},
    forward::{Inputs, Kept, Lora, Session, Stacked, State},
    model::{Dense, Experts, Layer, Linear, Mixer, Mlp, Model, Shared},
};

/// Implements `Debug` of types by their names alone.
#[macro_export]
macro_rules! opaque {
    ($([$($generics:tt)*] $type:ty;)*) => {$(
        impl<$($generics)*> std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($type))
            }
        }
    )*};
}

opaque! {
    [D: Device] Cache<D>;
    [D: Device] Places<D>;
    [D: Device] HeadNorms<D>;
    [D: Device] Norm<D>;
    [D: Device] DeltaNet<D>;
    [D: Device] Rope<D>;
    [D: Device] Slots<'_, D>;
    [D: Device] Inputs<D>;
    [D: Device] Lora<'_, '_, D>;
    [D: Device] Stacked<'_, D>;
    ['m, D: Device + 'm] Session<'m, D>;
    ['m, D: Device + 'm] State<'m, D>;
    ['m, D: Device + 'm] Kept<'m, D>;
    [D: Device] Model<'_, D>;
    [D: Device] Layer<D>;
    [D: Device] Linear<D>;
    [D: Device] Mixer<D>;
    [D: Device] Mlp<D>;
    [D: Device] Dense<D>;
    [D: Device] Shared<D>;
    [D: Device] Experts<D>;
}

#[cfg(feature = "cuda")]
opaque! {
    [T] Cuda<T>;
    [T: 'static] cuda::Matrix<T>;
}
