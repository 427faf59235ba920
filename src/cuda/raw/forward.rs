use std::ffi::c_void;

use cudarc::driver::sys;

use super::{LayerWeights, MatrixMut, MatrixRef, RawMatrix, RoutedBatch, Stream, Workspace, dtype_code, int};
use crate::{
    DType,
    cuda::{Kernels, LaunchError, kernels::check},
    error::OperandError,
    ffi,
    model::{LinearId, LinearSite, MAX_SLICES, ModelSpec},
    plan::{Capacity, ForwardPlan},
};

/// What W, its rows and those of `x` are aligned to.
const ALIGNMENT_BYTES: usize = ffi::ARIL_FORWARD_ALIGNMENT as usize;
/// How often a block looks for what others owe it before it computes that itself: for about a millisecond.
const POLLS: i32 = 1024;

/// A linear layer and its adapters in one launch, for decode: `y = x Wᵀ + bias + scaling · B (A x)`, of up to
/// [`MAX_FORWARD_TOKENS`](crate::plan::MAX_FORWARD_TOKENS) tokens in `bf16` and `f16`, from compute capability 9.0 on.
///
/// W is read where it is, as PyTorch stores it. A token's bits depend on its own `x`, adapter and scale and on the layer alone,
/// whatever the batch; a larger batch is for the engine's GEMM and [`LoraLinear`](super::LoraLinear), which round otherwise.
#[derive(Clone, Debug)]
pub struct FusedLinear {
    kernels: Kernels,
    site: LinearSite,
    num_entries: usize,
    plan: ForwardPlan,
    map: ffi::aril_forward_map,
    bias: u64,
    withholds: bool,
}

// SAFETY: device addresses, which are data.
unsafe impl Send for FusedLinear {}
// SAFETY: as above.
unsafe impl Sync for FusedLinear {}

impl FusedLinear {
    /// Plans the layer `id` of `model` for batches within `capacity`, with W `[out_features, in_features]` of each of its slices:
    /// one allocation or several, of any row stride that is a multiple of 16 bytes. A slice of a fused W is a matrix that begins
    /// at its first row.
    ///
    /// # Errors
    /// If the device is older than compute capability 9.0, W is not of the layer's shape and type or misaligned, or no kernel
    /// takes the type, the shape or the bounds.
    pub fn new(
        kernels: &Kernels,
        model: &ModelSpec,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
        slices: &[MatrixRef],
    ) -> Result<Self, LaunchError> {
        kernels.check_thread()?;
        check_device()?;
        let site = model[id].clone();
        let plan = ForwardPlan::new(&site, dtype, capacity)?;
        if slices.len() != site.slices().len() {
            return Err(OperandError::Length { operand: "W", got: slices.len(), want: site.slices().len() }.into());
        }
        let mut weights = ffi::aril_base_weights {
            dtype: dtype_code(dtype),
            in_features: int(site.in_features())?,
            splits: int(plan.splits())?,
            units: int(plan.units())?,
            num_slices: int(slices.len())?,
            out_features: out_features(&site)?,
            slices: [std::ptr::null(); MAX_SLICES],
            strides: [0; MAX_SLICES],
        };
        for (i, (MatrixRef(w), slice)) in slices.iter().zip(site.slices()).enumerate() {
            let (ptr, stride) = aligned(w, "W", dtype, slice.out_features(), site.in_features())?;
            weights.slices[i] = ptr;
            weights.strides[i] = stride;
        }
        let mut map = ffi::aril_forward_map { tensor_maps: [[0; 16]; MAX_SLICES], splits: 0, units: 0 };
        // SAFETY: both are alive; addresses are not followed.
        check(unsafe { ffi::aril_forward_maps(&weights, &mut map) })?;
        let num_entries = model.num_entries();
        Ok(Self { kernels: kernels.clone(), site, num_entries, plan, map, bias: 0, withholds: false })
    }

    /// Adds the `[out_features]` elements at that address to every row.
    #[must_use]
    pub fn with_bias(self, bias: u64) -> Self {
        Self { bias, ..self }
    }

    /// Has every block compute all of what it would otherwise wait for. For tests: the bits are the same.
    #[doc(hidden)]
    #[must_use]
    pub fn withholding(self) -> Self {
        Self { withholds: true, ..self }
    }

    /// What will be launched; for logs.
    pub fn plan(&self) -> &ForwardPlan {
        &self.plan
    }

    /// Enqueues `y[t] = x[t] Wᵀ + bias + scaling · B (A x[t])` on `stream`, for every row of the batch: those without an adapter, and
    /// rows of a captured batch that the last update did not have, are the base layer's.
    ///
    /// `x` is `[tokens, in_features]`, with rows aligned to 16 bytes; `y` is `[tokens, out_features]`; `workspace` has
    /// [`plan().workspace_bytes()`](ForwardPlan::workspace_bytes). Allocates nothing, waits for nothing, and may be captured in a
    /// CUDA graph.
    ///
    /// # Errors
    /// If the operands don't fit the plan; then nothing was enqueued.
    ///
    /// # Safety
    /// As for [`LoraLinear::add_delta`](super::LoraLinear::add_delta), and W and the bias are operands like the adapters' weights:
    /// they are fetched before the kernels enqueued earlier are waited for.
    pub unsafe fn forward(
        &self,
        x: MatrixRef,
        y: MatrixMut,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let args = self.args(x, y, weights, batch, workspace)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(&args, stream) }
    }

    /// As [`forward`](Self::forward), but adds to what `y` holds.
    ///
    /// # Errors
    /// As for `forward`.
    ///
    /// # Safety
    /// As for `forward`.
    pub unsafe fn accumulate(
        &self,
        x: MatrixRef,
        y: MatrixMut,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let args = self.args(x, y, weights, batch, workspace)?;
        let args = ffi::aril_forward_args { accumulates: 1, ..args };
        // SAFETY: the caller's obligations.
        unsafe { self.launch(&args, stream) }
    }

    fn args(
        &self,
        MatrixRef(x): MatrixRef,
        MatrixMut(y): MatrixMut,
        weights: LayerWeights,
        batch: RoutedBatch,
        workspace: Workspace,
    ) -> Result<ffi::aril_forward_args, LaunchError> {
        let (dtype, num_tokens, max) = (self.plan.dtype(), batch.num_tokens, self.plan.max_tokens());
        if num_tokens > max {
            return Err(LaunchError::Capacity { what: "the batch's tokens", got: num_tokens, max });
        }
        let (x, x_stride) = aligned(&x, "x", dtype, num_tokens, self.site.in_features())?;
        let (y, y_stride) = y.expect("y", dtype, num_tokens, self.site.out_features())?;
        workspace.check(self.plan.workspace_bytes_for(num_tokens))?;
        Ok(ffi::aril_forward_args {
            dtype: dtype_code(dtype),
            num_tokens: int(num_tokens)?,
            accumulates: 0,
            polls: if self.withholds { 0 } else { POLLS },
            withholds: i32::from(self.withholds),
            in_features: int(self.site.in_features())?,
            num_slices: int(self.site.slices().len())?,
            out_features: out_features(&self.site)?,
            map: &raw const self.map,
            x,
            x_stride,
            bias: self.bias as *const c_void,
            y,
            y_stride,
            exchange: workspace.exchange.ptr as *mut c_void,
            weights: weights.expect(&self.plan.capacity(), self.num_entries)?,
            routing: batch.routing,
        })
    }

    unsafe fn launch(&self, args: &ffi::aril_forward_args, stream: Stream) -> Result<(), LaunchError> {
        self.kernels.check_thread()?;
        if args.num_tokens == 0 {
            return Ok(());
        }
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        check(unsafe { ffi::aril_linear_forward(args, stream.as_raw()) })
    }
}

fn out_features(site: &LinearSite) -> Result<[i32; MAX_SLICES], LaunchError> {
    let mut out_features = [0; MAX_SLICES];
    for (out, slice) in out_features.iter_mut().zip(site.slices()) {
        *out = int(slice.out_features())?;
    }
    Ok(out_features)
}

/// As [`RawMatrix::expect`], of a matrix whose rows the copy engine reads.
fn aligned(
    matrix: &RawMatrix,
    operand: &'static str,
    dtype: DType,
    rows: usize,
    cols: usize,
) -> Result<(*const c_void, i64), LaunchError> {
    let (ptr, stride) = matrix.expect(operand, dtype, rows, cols)?;
    let row_bytes = matrix.row_stride.checked_mul(dtype.bytes());
    let is_aligned = matrix.ptr.is_multiple_of(ALIGNMENT_BYTES as u64)
        && row_bytes.is_some_and(|bytes| bytes.is_multiple_of(ALIGNMENT_BYTES));
    if !is_aligned {
        return Err(LaunchError::Misaligned { operand, alignment: ALIGNMENT_BYTES });
    }
    Ok((ptr.cast_const(), stride))
}

/// Refuses devices that have no copy engine for tensors.
fn check_device() -> Result<(), LaunchError> {
    use sys::CUdevice_attribute as Attribute;
    let mut device = 0;
    // SAFETY: a context is current.
    unsafe { sys::cuCtxGetDevice(&mut device) }.result()?;
    let attribute = |attribute| {
        // SAFETY: the device is that of the current context.
        unsafe { cudarc::driver::result::device::get_attribute(device, attribute) }
    };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if major < 9 { Err(LaunchError::ComputeCapability { major, minor }) } else { Ok(()) }
}
