//! The operations of trained rows.

#![expect(unsafe_code, reason = "launches kernels")]

use std::{ffi::c_void, ptr};

use crate::{
    DType, Element, contract,
    cuda::{
        Kernels, LaunchError, Matrix, MatrixMut, Step, View, WeightTable,
        kernels::Operation,
        raw::{self, dtype_code, int},
    },
    ffi,
    model::{Model, RowsId},
    plan::{Capacity, PlanError, rows_blocks},
};

/// The operations of [trained rows](crate::model::ModelSpec::trained_rows).
#[derive(Clone, Debug)]
#[doc(alias = "trainable_token_indices")]
pub struct TrainedRows {
    kernels: Kernels,
    contract: contract::TrainedRows,
}

impl TrainedRows {
    /// Plans the rows `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// As for [`for_model`](Self::for_model).
    pub fn new(weights: &WeightTable, id: RowsId) -> Result<Self, PlanError> {
        Self::for_model(weights.queue().kernels(), weights.model(), id, weights.dtype(), weights.capacity())
    }

    /// Plans the rows `id` of `model`, for tables of this element type and batches within `capacity`.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support the capacity.
    pub fn for_model(
        kernels: &Kernels,
        model: &Model,
        id: RowsId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        Ok(Self { kernels: kernels.clone(), contract: contract::TrainedRows::new(model, id, dtype, capacity)? })
    }

    #[doc = doc_of!(rows_replace_embeddings)]
    ///
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the model and the step. Nothing was enqueued.
    pub fn replace_embeddings<'a, T: Element>(
        &self,
        step: &mut Step<'_>,
        token_ids: impl Into<View<'a, i32>>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let mut token_ids = token_ids.into();
        let mut args = self.embeddings_args(&step.raw(), token_ids.len(), y.shape())?;
        step.check([Some(("token_ids", &mut token_ids)), y.operand()])?.enqueue(|[token_ids, y], stream| {
            (args.token_ids, args.y) = (token_ids as *const i32, y as *mut c_void);
            // SAFETY: the operands fit the plan (checked), and are as `Checked::enqueue` says.
            unsafe { self.enqueue(ffi::aril_replace_embeddings, &args, stream) }
        })
    }

    /// [`replace_embeddings`](Self::replace_embeddings) on memory that the engine owns. `token_ids` is an address of
    /// `i32`. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// As for `replace_embeddings`.
    ///
    /// # Safety
    /// As for [`LoraLinear::add_delta_raw`](super::LoraLinear::add_delta_raw), with `token_ids` in the place of `x`.
    pub unsafe fn replace_embeddings_raw(
        &self,
        step: &raw::Step,
        token_ids: u64,
        y: raw::MatrixMut,
    ) -> Result<(), LaunchError> {
        let mut args = self.embeddings_args(step, step.batch.num_tokens, y)?;
        args.token_ids = token_ids as *const i32;
        // SAFETY: the caller's obligations.
        unsafe { self.enqueue(ffi::aril_replace_embeddings, &args, step.stream) }
    }

    #[doc = doc_of!(rows_replace_logits)]
    ///
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the model and the step. Nothing was enqueued.
    pub fn replace_logits<T: Element>(
        &self,
        step: &mut Step<'_>,
        mut x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let mut args = self.logits_args(&step.raw(), x.shape(), y.shape())?;
        step.check([x.operand(), y.operand()])?.enqueue(|[x, y], stream| {
            (args.x, args.y) = (x as *const c_void, y as *mut c_void);
            // SAFETY: the operands fit the plan (checked), and are as `Checked::enqueue` says.
            unsafe { self.enqueue(ffi::aril_replace_logits, &args, stream) }
        })
    }

    /// [`replace_logits`](Self::replace_logits) on memory that the engine owns. May be captured in a CUDA graph.
    ///
    /// # Errors
    /// As for `replace_logits`.
    ///
    /// # Safety
    /// As for [`LoraLinear::add_delta_raw`](super::LoraLinear::add_delta_raw).
    pub unsafe fn replace_logits_raw(
        &self,
        step: &raw::Step,
        x: raw::MatrixRef,
        y: raw::MatrixMut,
    ) -> Result<(), LaunchError> {
        let args = self.logits_args(step, x, y)?;
        // SAFETY: the caller's obligations.
        unsafe { self.enqueue(ffi::aril_replace_logits, &args, step.stream) }
    }

    /// Checks the operands and returns the arguments of the C ABI, without ids.
    fn embeddings_args(
        &self,
        step: &raw::Step,
        num_ids: usize,
        raw::MatrixMut(y): raw::MatrixMut,
    ) -> Result<ffi::aril_rows_args, LaunchError> {
        self.contract.check_embeddings(step.shape(), num_ids, y.shape("y")?)?;
        let (y, y_stride) = y.place();
        Ok(ffi::aril_rows_args { y, y_stride, ..self.args(step, self.contract.site.embedding.entry)? })
    }

    /// Checks the operands and returns the arguments of the C ABI.
    fn logits_args(
        &self,
        step: &raw::Step,
        raw::MatrixRef(x): raw::MatrixRef,
        raw::MatrixMut(y): raw::MatrixMut,
    ) -> Result<ffi::aril_rows_args, LaunchError> {
        self.contract.check_logits(step.shape(), x.shape("x")?, y.shape("y")?)?;
        let ((x, x_stride), (y, y_stride)) = (x.place(), y.place());
        Ok(ffi::aril_rows_args { x, x_stride, y, y_stride, ..self.args(step, self.contract.site.head.entry)? })
    }

    /// The arguments without operands.
    fn args(&self, step: &raw::Step, entry: usize) -> Result<ffi::aril_rows_args, LaunchError> {
        let raw::Step { table, batch, .. } = step;
        let contract::TrainedRows { site, dtype, .. } = &self.contract;
        let max_tiles = step.bounds().small_tiles;
        Ok(ffi::aril_rows_args {
            dtype: dtype_code(*dtype),
            num_tokens: int(batch.num_tokens)?,
            hidden: int(site.hidden())?,
            outputs: int(site.outputs())?,
            max_tiles: int(max_tiles)?,
            blocks: int(rows_blocks(max_tiles, self.kernels.device()))?,
            token_ids: ptr::null(),
            x: ptr::null(),
            x_stride: 0,
            y: ptr::null_mut(),
            y_stride: 0,
            weights: table.at(entry)?,
            routing: batch.routing,
        })
    }

    unsafe fn enqueue(
        &self,
        operation: Operation<ffi::aril_rows_args>,
        args: &ffi::aril_rows_args,
        stream: raw::Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit, and the caller vouches for their memory.
        unsafe { self.kernels.launch(operation, args, args.num_tokens, stream.as_raw()) }
    }
}
