#![expect(unsafe_code, reason = "calls the raw door")]

use std::marker::PhantomData;

use cudarc::driver::{CudaStream, CudaView, DevicePtr, DeviceSlice};

use super::{Kernels, LaunchError, MatrixMut, RoutedBatch, WeightTable, raw};
use crate::{
    Element,
    error::OperandError,
    model::{EmbeddingId, ModelSpec},
    plan::Capacity,
};

/// The adapters of an embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding<T> {
    raw: raw::LoraEmbedding,
    kernels: Kernels,
    element: PhantomData<T>,
}

impl<T: Element> LoraEmbedding<T> {
    /// Plans the embedding `id` of `model` for batches within `capacity`.
    ///
    /// # Errors
    /// If no kernel takes these bounds.
    pub fn new(kernels: &Kernels, model: &ModelSpec, id: EmbeddingId, capacity: Capacity) -> Result<Self, LaunchError> {
        let raw = raw::LoraEmbedding::new(kernels, model, id, T::DTYPE, capacity)?;
        Ok(Self { raw, kernels: kernels.clone(), element: PhantomData })
    }

    /// Enqueues `y[t] += scaling · B A[:, token_ids[t]]` on `stream`, for every token `t` that has an adapter and an id in the
    /// vocabulary. All other rows of `y` keep every bit.
    ///
    /// `y` is `[tokens, hidden]`. Allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// If the operands don't fit; then nothing was enqueued.
    pub fn add_delta(
        &self,
        token_ids: &CudaView<'_, i32>,
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &RoutedBatch<'_>,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        self.kernels.check_context("the stream", stream.context())?;
        self.kernels.check_context("token_ids", token_ids.stream().context())?;
        y.check_context(&self.kernels)?;
        weights.check(stream)?;
        batch.check(stream)?;
        if token_ids.len() != batch.num_tokens() {
            let (operand, got) = ("token_ids", token_ids.len());
            return Err(OperandError::Length { operand, got, want: batch.num_tokens() }.into());
        }
        if !self.raw.site().is_in(weights.model()) {
            return Err(OperandError::Model.into());
        }
        let layer = weights.layer(self.raw.site().entry());
        self.raw.args(0, y.at(0), layer, batch.raw)?;
        let (token_ids, _ids_guard) = token_ids.device_ptr(stream);
        let (y, _y_guard) = y.on(stream);
        // SAFETY: every operand is large enough and in the kernels' context; the weights and the routing are of this stream, and
        // the guards order the others.
        unsafe { self.raw.add_delta(token_ids, y, layer, batch.raw, stream.into()) }
    }
}
