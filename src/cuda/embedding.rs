#![expect(unsafe_code, reason = "calls the raw API")]

use super::{LaunchError, MatrixMut, Step, View, WeightTable, raw};
use crate::{
    Element,
    model::EmbeddingId,
    plan::{Capacity, PlanError},
};

/// The LoRA operation of one embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    raw: raw::LoraEmbedding,
}

impl LoraEmbedding {
    /// Plans the embedding `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support the capacity.
    pub fn new(weights: &WeightTable, id: EmbeddingId) -> Result<Self, PlanError> {
        let kernels = weights.queue().kernels();
        let raw = raw::LoraEmbedding::new(kernels, weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { raw })
    }

    /// The capacity of the plan.
    pub fn capacity(&self) -> Capacity {
        self.raw.capacity()
    }

    #[doc = include_str!("../docs/operations/embedding_add_delta.md")]
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
        let token_ids = token_ids.into();
        let mut args = self.raw.args(&step.raw(), 0, token_ids.len(), y.shape())?;
        token_ids.check("token_ids", step)?;
        y.check(step)?;
        let _entered = step.enter()?;
        step.keep([token_ids.kept(), y.kept()]);
        let queue = step.queue();
        let (token_ids, _ids_guard) = token_ids.on(queue);
        let (y, _y_guard) = y.on(queue);
        args.token_ids = token_ids as *const i32;
        args.y = y as *mut std::ffi::c_void;
        // SAFETY: every operand is large enough and in the queue's context (checked). The step's table and routing, and buffers, belong
        // to the queue; guards order the other operands. Graphs keep their operands alive.
        unsafe { self.raw.launch(&args, queue.raw()) }
    }
}
