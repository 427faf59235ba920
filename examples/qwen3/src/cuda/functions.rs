//! The example's kernels in `kernels.cu`, and the launches of those that operations share.

use std::{result, sync::Arc};

use aril::{DType, Element};
use cudarc::driver::{CudaFunction, CudaModule, DeviceRepr, DriverError, sys::CUfunction_attribute_enum};

use super::{
    Cuda, Draws, Matrix, Routes,
    delta_net::DeltaNetFunctions,
    experts::{GroupedGemms, Tiled},
    launch::launch,
};
use crate::{
    device::Norm,
    error::Result,
    forward::Inputs,
    kernels::{THREADS, grouped_gemm, parts},
};

/// The example's kernels in `kernels.cu` for an element type, under their names there.
pub(super) struct Functions {
    /// Of a Qwen3, and of a Qwen3.5.
    pub(super) add_rms_norm: [CudaFunction; 2],
    pub(super) rotate_and_append: [CudaFunction; 2],
    pub(super) silu_mul: CudaFunction,
    pub(super) add: CudaFunction,
    pub(super) gather: CudaFunction,
    pub(super) draw: CudaFunction,
    pub(super) subtract: CudaFunction,
    pub(super) take_drawn: CudaFunction,
    pub(super) set_inputs: CudaFunction,
    pub(super) choose_experts: CudaFunction,
    pub(super) sort_routes: CudaFunction,
    /// Of 16 bits.
    pub(super) route_few: Option<CudaFunction>,
    pub(super) grouped_gemm: GroupedGemms,
    pub(super) grouped_gemm_int4: Tiled,
    pub(super) grouped_gemm_int8: Tiled,
    pub(super) combine: CudaFunction,
    pub(super) delta_net: DeltaNetFunctions,
}

impl Functions {
    pub(super) fn load(dtype: DType, module: &Arc<CudaModule>) -> result::Result<Self, DriverError> {
        let function = |name: &str| module.load_function(&format!("{name}_{dtype}"));
        Ok(Self {
            add_rms_norm: [function("add_rms_norm")?, function("qwen3_5_add_rms_norm")?],
            rotate_and_append: [function("rotate_and_append")?, function("qwen3_5_rotate_and_append")?],
            silu_mul: function("silu_mul")?,
            add: function("add")?,
            gather: function("gather")?,
            draw: function("draw")?,
            subtract: module.load_function("subtract")?,
            take_drawn: module.load_function("take_drawn")?,
            set_inputs: module.load_function("set_inputs")?,
            choose_experts: function("choose_experts")?,
            sort_routes: function("sort_routes")?,
            route_few: (dtype != DType::F32).then(|| function("route_few")).transpose()?,
            grouped_gemm: GroupedGemms::load(dtype, module)?,
            grouped_gemm_int4: Tiled { function: function("grouped_gemm_int4")?, tile: grouped_gemm::SIMPLE },
            grouped_gemm_int8: Tiled { function: function("grouped_gemm_int8")?, tile: grouped_gemm::SIMPLE },
            combine: function("combine")?,
            delta_net: DeltaNetFunctions::load(dtype, module)?,
        })
    }
}

/// Loads a kernel that uses this much dynamic shared memory.
pub(super) fn load_with_shared(
    module: &Arc<CudaModule>,
    name: &str,
    bytes: usize,
) -> result::Result<CudaFunction, DriverError> {
    let function = module.load_function(name)?;
    let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, i32::try_from(bytes).unwrap_or(i32::MAX))?;
    Ok(function)
}

impl<T: Element + DeviceRepr> Cuda<T> {
    /// Copies inputs of a captured step, and changes of its block table, from where the host has staged them: as the
    /// kernel has it.
    ///
    /// # Errors
    ///
    /// If the launch fails.
    pub fn copy_inputs(
        &self,
        Inputs { ids, places }: &mut Inputs<Self>,
        staged: u64,
        (tokens, changes): (usize, usize),
        last: Option<&Draws>,
    ) -> Result<()> {
        let drawn = last.map_or(0, Draws::address);
        let mut kernel = self.kernel(&self.functions.set_inputs);
        kernel.arg(&staged).arg(&drawn).arg(&ids.address).arg(&places.positions.address).arg(&places.rows.address);
        kernel.arg(&places.table.states.address).arg(&places.table.first_rows.address).arg(&tokens).arg(&changes);
        launch(kernel, tokens.max(changes).div_ceil(THREADS as usize), 1)
    }

    pub(super) fn silu_mul_into(
        &self,
        gate_up: &Matrix<T>,
        routes: Option<&Routes>,
        out: &mut Matrix<T>,
    ) -> Result<()> {
        let tokens = routes.map_or(0, |routes| routes.tokens.address);
        let mut kernel = self.consumer(&self.functions.silu_mul);
        kernel.arg(&gate_up.address).arg(&tokens).arg(&out.address).arg(&out.cols);
        launch(kernel, gate_up.rows, parts(out.cols * size_of::<T>()))
    }

    /// Adds `y` to `x`, and normalizes the sum.
    pub(super) fn normalize(
        &self,
        x: &Matrix<T>,
        y: Option<&Matrix<T>>,
        Norm { weight, offset, eps }: &Norm<Self>,
    ) -> Result<Matrix<T>> {
        let out = self.alloc(x.rows, x.cols)?;
        let (of_y, stride) = y.map_or((0, x.cols), |y| (y.address, y.stride));
        let mut kernel = self.consumer(&self.functions.add_rms_norm[usize::from(*offset != 0.0)]);
        kernel.arg(&x.address).arg(&of_y).arg(&weight.address).arg(&out.address).arg(&x.cols).arg(&stride);
        kernel.arg(eps).arg(offset);
        launch(kernel, x.rows, 1)?;
        Ok(out)
    }

    /// The sum of a token's rows, each times its route's weight.
    pub(super) fn combine_into(&self, down: &Matrix<T>, routes: &Routes, out: &mut Matrix<T>) -> Result<()> {
        let (tokens, top_k) = (routes.weights.rows, routes.weights.cols);
        let mut kernel = self.early(&self.functions.combine);
        kernel.arg(&down.address).arg(&routes.weights.address).arg(&routes.row_of_route.address).arg(&out.address);
        kernel.arg(&down.cols).arg(&top_k);
        launch(kernel, tokens, parts(down.cols * size_of::<T>()))?;
        self.lets_next_start.set(true);
        Ok(())
    }
}
