//! The operation of an embedding.

#![expect(unsafe_code, reason = "launches kernels")]

use std::ffi::c_void;

use crate::{
    DType, Element, contract,
    cuda::{
        Kernels, LaunchError, MatrixMut, Step, View, WeightTable,
        raw::{self, dtype_code, int},
    },
    ffi,
    model::{EmbeddingId, Model},
    plan::{Capacity, PlanError, embedding_launch},
};

/// The LoRA operation of one embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    kernels: Kernels,
    contract: contract::Embedding,
}

impl LoraEmbedding {
    /// Plans the embedding `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// As for [`for_model`](Self::for_model).
    pub fn new(weights: &WeightTable, id: EmbeddingId) -> Result<Self, PlanError> {
        Self::for_model(weights.queue().kernels(), weights.model(), id, weights.dtype(), weights.capacity())
    }

    /// Plans the embedding `id` of `model`, for tables of this element type and batches within `capacity`.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support the capacity.
    pub fn for_model(
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

    #[doc = doc_of!(embedding_add_delta)]
    ///
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the embedding and the step. Nothing was enqueued.
    pub fn add_delta<'a, T: Element>(
        &self,
        step: &mut Step<'_>,
        token_ids: impl Into<View<'a, i32>>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let mut token_ids = token_ids.into();
        let mut args = self.args(&step.raw(), token_ids.len(), y.shape())?;
        step.check([Some(("token_ids", &mut token_ids)), y.operand()])?.enqueue(|[token_ids, y], stream| {
            (args.token_ids, args.y) = (token_ids as *const i32, y as *mut c_void);
            // SAFETY: the operands fit the plan (checked), and are as `Checked::enqueue` says.
            unsafe { self.enqueue(&args, stream) }
        })
    }

    /// [`add_delta`](Self::add_delta) on memory that the engine owns. `token_ids` is an address of `i32`.
    ///
    /// Enqueues the work, and neither allocates nor waits. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`LaunchError`] if `y` does not match the embedding and the step. Nothing was enqueued.
    ///
    /// # Safety
    /// As for [`LoraLinear::add_delta_raw`](super::LoraLinear::add_delta_raw), with `token_ids` in the place of `x`.
    pub unsafe fn add_delta_raw(&self, step: &raw::Step, token_ids: u64, y: raw::MatrixMut) -> Result<(), LaunchError> {
        let mut args = self.args(step, step.batch.num_tokens, y)?;
        args.token_ids = token_ids as *const i32;
        // SAFETY: the caller's obligations.
        unsafe { self.enqueue(&args, step.stream) }
    }

    /// Checks the operands and returns the arguments of the C ABI, without ids.
    fn args(
        &self,
        step: &raw::Step,
        num_ids: usize,
        raw::MatrixMut(y): raw::MatrixMut,
    ) -> Result<ffi::aril_embedding_args, LaunchError> {
        let raw::Step { table, batch, .. } = step;
        let contract::Embedding { site, dtype, capacity, .. } = &self.contract;
        self.contract.check(step.shape(), num_ids, y.shape("y")?)?;
        let (hidden, (y, y_stride)) = (site.hidden(), y.place());
        Ok(ffi::aril_embedding_args {
            dtype: dtype_code(*dtype),
            num_tokens: int(batch.num_tokens)?,
            plan: embedding_launch(hidden, *capacity, self.kernels.device(), step.bounds()),
            vocab: int(site.vocab())?,
            hidden: int(hidden)?,
            token_ids: std::ptr::null(),
            y,
            y_stride,
            weights: table.at(site.entry())?,
            routing: batch.routing,
        })
    }

    unsafe fn enqueue(&self, args: &ffi::aril_embedding_args, stream: raw::Stream) -> Result<(), LaunchError> {
        // SAFETY: the operands fit, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_embedding, args, args.num_tokens, stream.as_raw()) }
    }
}
