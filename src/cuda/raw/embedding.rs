use super::{
    abi::{dtype_code, int},
    matrix::MatrixMut,
    memory::Stream,
    step::Step,
};
use crate::{
    DType,
    cuda::Kernels,
    error::LaunchError,
    ffi,
    model::{EmbeddingId, EmbeddingSite, Model, ModelId},
    plan::{self, Capacity, PlanError},
};

/// The LoRA operation of one embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    kernels: Kernels,
    model: ModelId,
    site: EmbeddingSite,
    dtype: DType,
    capacity: Capacity,
}

impl LoraEmbedding {
    /// Plans the embedding `id` of `model` for batches within `capacity`.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support the capacity.
    pub fn new(
        kernels: &Kernels,
        model: &Model,
        id: EmbeddingId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        let site = model.embedding(id).ok_or(PlanError::Foreign)?.clone();
        let capacity = capacity.checked()?;
        plan::check_outputs(&[site.hidden()], capacity, 0)?;
        Ok(Self { kernels: kernels.clone(), model: model.id(), site, dtype, capacity })
    }

    /// The capacity of the plan.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    #[doc = include_str!("../../docs/operations/embedding_add_delta.md")]
    ///
    /// `token_ids` is an address of `i32`. Enqueues the work, and neither allocates nor waits. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`LaunchError`] if `y` does not match the embedding and the step. Nothing was enqueued.
    ///
    /// # Safety
    /// As for [`LoraLinear::add_delta`](super::LoraLinear::add_delta), with `token_ids` in the place of `x`.
    pub unsafe fn add_delta(&self, step: &Step, token_ids: u64, y: MatrixMut) -> Result<(), LaunchError> {
        let args = self.args(step, token_ids, y)?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(&args, step.stream) }
    }

    pub(in crate::cuda) unsafe fn launch(
        &self,
        args: &ffi::aril_embedding_args,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_embedding, args, args.num_tokens, stream.as_raw()) }
    }

    pub(in crate::cuda) fn args(
        &self,
        step: &Step,
        token_ids: u64,
        y: MatrixMut,
    ) -> Result<ffi::aril_embedding_args, LaunchError> {
        let Step { table, batch, .. } = step;
        let (y, y_stride) = y.0.expect("y", self.dtype, batch.num_tokens, self.site.hidden())?;
        let hidden = self.site.hidden();
        let wide_tokens = (!plan::is_small_m(batch.num_tokens)).then_some(batch.num_tokens);
        let outs = plan::outs_per_block(&[hidden], self.capacity.max_rank, wide_tokens, batch.max_tiles);
        Ok(ffi::aril_embedding_args {
            dtype: dtype_code(self.dtype),
            num_tokens: int(batch.num_tokens)?,
            max_tiles: int(batch.max_tiles)?,
            outs_per_block: int(outs)?,
            vocab: int(self.site.vocab())?,
            hidden: int(self.site.hidden())?,
            token_ids: token_ids as *const i32,
            y,
            y_stride,
            weights: table.expect(self.model, self.dtype, &self.capacity, self.site.entry())?,
            routing: batch.routing,
        })
    }
}
