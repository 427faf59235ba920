use super::{
    abi::{dtype_code, int},
    matrix::MatrixMut,
    memory::Stream,
    step::Step,
};
use crate::{
    DType, contract,
    cuda::Kernels,
    error::LaunchError,
    ffi,
    model::{EmbeddingId, Model},
    plan::{self, Capacity, PlanError},
};

/// The LoRA operation of one embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    kernels: Kernels,
    contract: contract::Embedding,
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
        Ok(Self { kernels: kernels.clone(), contract: contract::Embedding::new(model, id, dtype, capacity)? })
    }

    /// The capacity of the plan.
    pub fn capacity(&self) -> Capacity {
        self.contract.capacity
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
        let args = self.args(step, token_ids, step.batch.num_tokens, y)?;
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
        num_ids: usize,
        y: MatrixMut,
    ) -> Result<ffi::aril_embedding_args, LaunchError> {
        let Step { table, batch, .. } = step;
        let contract::Embedding { site, dtype, capacity, .. } = &self.contract;
        self.contract.check(step.shape(), num_ids, y.0.shape("y")?)?;
        let (hidden, (y, y_stride)) = (site.hidden(), y.0.place());
        let wide_tokens = (!plan::is_small_m(batch.num_tokens)).then_some(batch.num_tokens);
        let outs = plan::outs_per_block(&[hidden], capacity.max_rank, wide_tokens, batch.max_tiles);
        Ok(ffi::aril_embedding_args {
            dtype: dtype_code(*dtype),
            num_tokens: int(batch.num_tokens)?,
            max_tiles: int(batch.max_tiles)?,
            outs_per_block: int(outs)?,
            vocab: int(site.vocab())?,
            hidden: int(hidden)?,
            token_ids: token_ids as *const i32,
            y,
            y_stride,
            weights: table.at(site.entry())?,
            routing: batch.routing,
        })
    }
}
