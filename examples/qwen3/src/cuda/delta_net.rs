//! Gated delta nets on the GPU: the launches of `delta_net.cuh`.

use std::{result, sync::Arc};

use aril::{DType, Element};
use cudarc::driver::{CudaFunction, CudaModule, DeviceRepr, DriverError, sys::CUfunction_attribute_enum};

use super::{
    Cuda, Matrix,
    launch::{launch, launch_blocks},
};
use crate::{
    config::DeltaHeads,
    device::{DeltaNet, Places},
    error::{Context as _, Result, bail},
    kernels::{THREADS, delta_net},
};

/// The kernels for an element type, under their names there.
pub(super) struct DeltaNetFunctions {
    pub(super) without_gates: CudaFunction,
    pub(super) gate: CudaFunction,
    convolve: CudaFunction,
    delta_rule: CudaFunction,
}

impl DeltaNetFunctions {
    pub(super) fn load(dtype: DType, module: &Arc<CudaModule>) -> result::Result<Self, DriverError> {
        let function = |name: &str| module.load_function(&format!("{name}_{dtype}"));
        Ok(Self {
            without_gates: function("without_gates")?,
            gate: function("gate")?,
            convolve: function("convolve")?,
            delta_rule: function("delta_rule")?,
        })
    }
}

/// What a gated delta net keeps of sequences. It stays where it is, for captured steps.
#[derive(Debug)]
pub struct States<T: 'static> {
    /// The last inputs of the convolution: `[sequences, (taps - 1) * convolved features]`.
    inputs: Matrix<T>,
    /// `[sequences, value heads * key_dim * value_dim]`
    matrices: Matrix<f32>,
}

impl<T: Element + DeviceRepr> States<T> {
    pub(super) fn new(device: &Cuda<T>, sequences: usize, heads: DeltaHeads) -> Result<Self> {
        if heads.value_dim > THREADS as usize {
            bail!("value heads of {} features: the kernel takes {THREADS}", heads.value_dim);
        }
        // All layers have heads of the same sizes.
        let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let bytes = delta_net::shared_bytes(heads.key_dim, heads.value_dim);
        let set = device.functions.delta_net.delta_rule.set_attribute(attribute, i32::try_from(bytes)?);
        set.context(format_args!("{bytes} bytes of shared memory for a value head"))?;
        Ok(Self {
            inputs: device.zeroed(sequences, (heads.taps - 1) * heads.convolved_features())?,
            matrices: device.zeroed(sequences, heads.value * heads.state_elems())?,
        })
    }

    pub(super) fn run(
        &self,
        device: &Cuda<T>,
        x: &Matrix<T>,
        net: &DeltaNet<Cuda<T>>,
        places: &Places<Cuda<T>>,
    ) -> Result<Matrix<T>> {
        let heads @ DeltaHeads { key, value, key_dim, value_dim, taps } = net.heads;
        let functions = &device.functions.delta_net;
        let [positions, sequences] = [&places.positions, &places.sequences].map(|indices| indices.address);
        let states = &places.table.states;
        let qkv = device.alloc::<T>(x.rows, heads.convolved_features())?;
        let mut kernel = device.kernel(&functions.convolve);
        kernel.arg(&x.address).arg(&net.taps.address).arg(&self.inputs.address);
        kernel.arg(&positions).arg(&sequences).arg(&states.address).arg(&qkv.address);
        kernel.arg(&x.stride).arg(&qkv.cols).arg(&taps);
        launch(kernel, qkv.rows, qkv.cols.div_ceil(THREADS as usize))?;

        let out = device.alloc::<T>(x.rows, heads.value_features())?;
        let mut kernel = device.kernel(&functions.delta_rule);
        kernel.arg(&x.address).arg(&qkv.address).arg(&net.a_log.address).arg(&net.dt_bias.address);
        kernel.arg(&net.norm.weight.address).arg(&positions).arg(&sequences).arg(&states.address);
        kernel.arg(&self.inputs.address).arg(&self.matrices.address).arg(&out.address);
        kernel.arg(&x.rows).arg(&x.stride).arg(&net.norm.eps);
        kernel.arg(&key).arg(&value).arg(&key_dim).arg(&value_dim).arg(&taps);
        let shared_bytes = delta_net::shared_bytes(key_dim, value_dim);
        launch_blocks(kernel, (states.rows, value), delta_net::threads(value_dim), shared_bytes)?;
        Ok(out)
    }
}
