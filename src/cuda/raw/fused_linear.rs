//! The fused linear, by addresses.

use std::ffi::c_void;

use super::{
    memory::{MatrixMut, MatrixRef, RawMatrix, Stream, check_alignment, dtype_code, int},
    step::Step,
};
use crate::{
    DType, IntoSlices, Slices, contract,
    cuda::{Kernels, kernels::check},
    error::{LaunchError, OperandError},
    ffi,
    model::{LinearId, MAX_SLICES, Model},
    plan::{Capacity, ForwardPlan},
};

/// A linear layer with its base weight and its adapters in one launch, for decode: `y = x Wᵀ + bias + scaling · B (A
/// x)`. It supports up to [`MAX_FORWARD_TOKENS`](crate::plan::MAX_FORWARD_TOKENS) tokens in `bf16` and `f16`, from
/// compute capability 9.0 on.
///
/// W is read in PyTorch's layout. A token's result depends only on its own `x`, adapter and scale and on the layer. For
/// batches of more than [`plan().max_tokens()`](ForwardPlan::max_tokens) tokens, use a GEMM and
/// [`LoraLinear`](crate::cuda::LoraLinear). They sum in another order and may differ in the last bits.
#[derive(Clone, Debug)]
pub struct FusedLinear {
    kernels: Kernels,
    contract: contract::FusedLinear,
    out_features: [i32; MAX_SLICES],
    map: ffi::aril_forward_map,
    bias: u64,
    withholds: bool,
}

impl FusedLinear {
    /// Plans the layer `id` of `model` for batches within `capacity`, with a base weight W `[out_features,
    /// in_features]` for each of its slices.
    ///
    /// Each W and each of its rows must be aligned to 16 bytes. The slices may be in one allocation or in several. W is
    /// not read yet.
    ///
    /// # Errors
    /// [`LaunchError`] if the device is older than compute capability 9.0, the id belongs to another model, there is
    /// not one W per slice of the right shape, type and alignment, or the kernels or the device's shared memory do not
    /// support the element type, a size or the capacity. Where shared memory is short,
    /// [`plan().max_tokens()`](ForwardPlan::max_tokens) is lower.
    pub fn new(
        kernels: &Kernels,
        model: &Model,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
        slices: &[MatrixRef],
    ) -> Result<Self, LaunchError> {
        kernels.check_thread()?;
        let shapes = slices.iter().map(|MatrixRef(w)| w.shape("W")).collect::<Result<Vec<_>, _>>()?;
        let contract = contract::FusedLinear::new(model, id, dtype, capacity, kernels.device(), &shapes)?;
        let contract::FusedLinear { site, plan, .. } = &contract;
        let mut out_features = [0; MAX_SLICES];
        let (mut ptrs, mut strides) = ([std::ptr::null(); MAX_SLICES], [0; MAX_SLICES]);
        for (i, (MatrixRef(w), slice)) in slices.iter().zip(site.slices()).enumerate() {
            w.check_alignment("W", contract::FusedLinear::ALIGNMENT_BYTES)?;
            let (ptr, stride) = w.place();
            (ptrs[i], strides[i], out_features[i]) = (ptr.cast_const(), stride, int(slice.out_features())?);
        }
        let plan = plan.launch();
        let weights = ffi::aril_base_weights {
            dtype: dtype_code(dtype),
            in_features: int(site.in_features())?,
            num_slices: int(slices.len())?,
            out_features,
            slices: ptrs,
            strides,
            plan,
        };
        let mut map = ffi::aril_forward_map { tensor_maps: [[0; 16]; MAX_SLICES], plan };
        // SAFETY: both pointers are valid for the call. The call does not dereference the addresses of W.
        check(unsafe { ffi::aril_forward_maps(&raw const weights, &raw mut map) })?;
        Ok(Self { kernels: kernels.clone(), contract, out_features, map, bias: 0, withholds: false })
    }

    /// Adds the `[out_features]` elements at this address to every row.
    #[must_use]
    pub fn with_bias(self, bias: u64) -> Self {
        Self { bias, ..self }
    }

    /// Makes every thread block compute the sums that it would otherwise take from others. For tests; the result is
    /// bit-identical.
    #[doc(hidden)]
    #[must_use]
    pub fn withholding(self) -> Self {
        Self { withholds: true, ..self }
    }

    /// The launch configuration. It also gives the largest batch.
    pub fn plan(&self) -> &ForwardPlan {
        &self.contract.plan
    }

    #[doc = doc_of!(fused_linear_forward)]
    ///
    /// The rows of `x` are aligned to 16 bytes, and the step's workspace has at least
    /// [`plan().workspace_bytes()`](ForwardPlan::workspace_bytes). Rows of a captured batch beyond the last update have
    /// no adapter. Enqueues the work, and neither allocates nor waits. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step. Nothing was enqueued.
    ///
    /// # Safety
    /// As for [`LoraLinear::add_delta_raw`](crate::cuda::LoraLinear::add_delta_raw). Its requirements on the adapters'
    /// weights, including their order, also hold for W and the bias, because kernels fetch both before they wait for
    /// their predecessors.
    pub unsafe fn forward(&self, step: &Step, x: MatrixRef, y: impl IntoSlices<MatrixMut>) -> Result<(), LaunchError> {
        let args = self.args(step, x, &y.into_slices().into())?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(&args, step.stream) }
    }

    /// Like [`forward`](Self::forward), but adds to `y`.
    ///
    /// # Errors
    /// As for `forward`.
    ///
    /// # Safety
    /// As for `forward`.
    pub unsafe fn accumulate(
        &self,
        step: &Step,
        x: MatrixRef,
        y: impl IntoSlices<MatrixMut>,
    ) -> Result<(), LaunchError> {
        let args = self.args(step, x, &y.into_slices().into())?;
        let args = ffi::aril_forward_args { accumulates: 1, ..args };
        // SAFETY: the caller's obligations.
        unsafe { self.launch(&args, step.stream) }
    }

    /// Rejects a bias of another length.
    pub(in crate::cuda) fn check_bias(&self, len: usize) -> Result<(), OperandError> {
        self.contract.check_bias(len)
    }

    /// Where the outputs of each slice are, in matrices that [`args`](Self::args) accepts, at these addresses.
    pub(in crate::cuda) fn places_at(
        &self,
        addresses: [u64; MAX_SLICES],
        y: &Slices<RawMatrix>,
    ) -> [ffi::aril_outputs; MAX_SLICES] {
        y.places_at(addresses, self.contract.site.slices())
    }

    /// Rejects an `x` whose address is not aligned.
    pub(in crate::cuda) fn check_x(address: u64) -> Result<(), LaunchError> {
        check_alignment("x", address, contract::FusedLinear::ALIGNMENT_BYTES)
    }

    pub(in crate::cuda) fn args(
        &self,
        step: &Step,
        MatrixRef(x): MatrixRef,
        y: &Slices<RawMatrix>,
    ) -> Result<ffi::aril_forward_args, LaunchError> {
        let Step { table, batch, workspace, .. } = step;
        let contract::FusedLinear { site, plan, .. } = &self.contract;
        self.contract.check(step.shape(), x.shape("x")?, &y.shapes()?)?;
        x.check_alignment("x", contract::FusedLinear::ALIGNMENT_BYTES)?;
        let (num_tokens, (x, x_stride)) = (batch.num_tokens, x.place());
        workspace.check(plan.workspace_bytes_for(num_tokens))?;
        Ok(ffi::aril_forward_args {
            dtype: dtype_code(plan.dtype()),
            num_tokens: int(num_tokens)?,
            accumulates: 0,
            polls: if self.withholds { 0 } else { int(ForwardPlan::POLLS)? },
            withholds: self.withholds.into(),
            in_features: int(site.in_features())?,
            num_slices: int(site.slices().len())?,
            out_features: self.out_features,
            map: &raw const self.map,
            x,
            x_stride,
            bias: self.bias as *const c_void,
            y: y.places(site.slices()),
            mailbox: workspace.mailbox.ptr as *mut c_void,
            mailbox_bytes: workspace.mailbox.bytes as u64,
            weights: table.at(site.first_entry())?,
            routing: batch.routing,
        })
    }

    pub(in crate::cuda) unsafe fn launch(
        &self,
        args: &ffi::aril_forward_args,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_linear_forward, args, args.num_tokens, stream.as_raw()) }
    }
}
