//! `Debug` of types whose fields are memory of a device, or handles to it: their names alone.

#[cfg(feature = "cuda")]
use crate::cuda::{self, Cuda};
use crate::{
    device::{Cache, Device, HeadNorms, Places, Rope, Slots},
    forward::{Inputs, Lora, Session, Stacked, State},
    model::{Experts, Layer, Linear, Mlp, Model},
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
    [D: Device] HeadNorms<'_, D>;
    [D: Device] Rope<D>;
    [D: Device] Slots<'_, D>;
    [D: Device] Inputs<D>;
    [D: Device] Lora<'_, '_, D>;
    [D: Device] Stacked<'_, D>;
    ['m, D: Device + 'm] Session<'m, D>;
    ['m, D: Device + 'm] State<'m, D>;
    [D: Device] Model<'_, D>;
    [D: Device] Layer<D>;
    [D: Device] Linear<D>;
    [D: Device] Mlp<D>;
    [D: Device] Experts<D>;
}

#[cfg(feature = "cuda")]
opaque! {
    [T] Cuda<T>;
    [T: 'static] cuda::Matrix<T>;
}
