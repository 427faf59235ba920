//! The operations of linear layers on the CPU.

use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};

use super::{Matrix, MatrixMut, Step, WeightTable, experts::activated};
use crate::{
    Element, IntoSlices, contract,
    error::OperandError,
    model::{Activation, EmbeddingId, LinearId},
    plan::{Device, LinearPlan, PlanError},
};

/// The LoRA operations of one linear layer.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    contract: contract::Linear,
}

impl LoraLinear {
    /// The layer `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError::Foreign`] if the id belongs to another model, [`PlanError::FullySharded`] if the layer is fully
    /// sharded, [`PlanError::Limit`] if the kernels of a GPU do not support a size.
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let contract = contract::Linear::new(weights.model(), id, weights.dtype(), weights.capacity(), Device::H100)?;
        Ok(Self { contract })
    }

    /// The layer with one of its slices alone, whose outputs are the columns of `y`; `None` if there is no such slice.
    /// For outputs that cannot be borrowed at once. Each operation has the same bits as that of all slices.
    pub fn with_slice(&self, index: usize) -> Option<Self> {
        Some(Self { contract: self.contract.with_slice(index)? })
    }

    /// The launch configuration on a GPU.
    pub fn plan(&self) -> &LinearPlan {
        &self.contract.plan
    }

    #[doc = doc_of!(linear_add_delta)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step. `y` is then unchanged.
    #[doc(alias = "punica")]
    pub fn add_delta<'a, T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'a, T>>,
    ) -> Result<(), OperandError> {
        let y = y.into_slices();
        self.contract.check(step.shape(), Some(x.shape()), Some(&y.map(MatrixMut::shape)))?;
        self.shrink(step, x)?.expand(y)
    }

    #[doc = doc_of!(linear_write_delta)]
    ///
    /// # Errors
    /// As for [`add_delta`](Self::add_delta).
    pub fn write_delta<'a, T: Element>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'a, T>>,
    ) -> Result<(), OperandError> {
        let mut y = y.into_slices();
        self.contract.check(step.shape(), Some(x.shape()), Some(&y.map(MatrixMut::shape)))?;
        let shrunk = self.shrink(step, x)?;
        y.for_rows(self.contract.site.slices(), &|_, _, outputs| outputs.fill(T::default()));
        shrunk.expand(y)
    }

    /// The first half of [`add_delta`](Self::add_delta): computes `v = A x[t]` into the workspace. What this returns
    /// expands `v`. It borrows the step, so that no other operation uses the workspace between the halves.
    ///
    /// ```
    /// # use aril::{cpu::{LoraLinear, Matrix, MatrixMut, Step}, error::OperandError};
    /// # fn run(
    /// #     layers: &[LoraLinear; 2], step: &mut Step<'_>, x: Matrix<'_, f32>, y: [MatrixMut<'_, f32>; 2],
    /// # ) -> Result<(), OperandError> {
    /// let [first, second] = y;
    /// layers[0].shrink(step, x)?.expand(first)?;
    /// layers[1].shrink(step, x)?.expand(second)
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0499
    /// # use aril::{cpu::{LoraLinear, Matrix, MatrixMut, Step}, error::OperandError};
    /// # fn run(
    /// #     layers: &[LoraLinear; 2], step: &mut Step<'_>, x: Matrix<'_, f32>, y: [MatrixMut<'_, f32>; 2],
    /// # ) -> Result<(), OperandError> {
    /// let [first, second] = y;
    /// let shrunk = layers[0].shrink(step, x)?;
    /// layers[1].shrink(step, x)?.expand(second)?;
    /// shrunk.expand(first)
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step.
    pub fn shrink<'b, 's, T: Element>(
        &'b self,
        step: &'b mut Step<'s>,
        x: Matrix<'_, T>,
    ) -> Result<Shrunk<'b, 's>, OperandError> {
        self.contract.check(step.shape(), Some(x.shape()), None)?;
        let v_stride = self.v_stride(step);
        let mut sums = std::mem::take(&mut step.workspace.v);
        sums.clear();
        sums.resize(step.num_tokens() * v_stride, 0.0);
        sums.par_chunks_mut(v_stride).enumerate().for_each(|(token, v)| {
            for (slice, v) in v.chunks_mut(step.max_rank).enumerate() {
                if let Some(factors) = step.factors(step.batch.slots()[token], self.contract.site.first_entry() + slice)
                {
                    factors.shrink(x.row(token), v);
                }
            }
        });
        step.workspace.v = sums;
        Ok(Shrunk { layer: self, step })
    }

    /// Calls `put` with each output of a slice and its element of a token's delta, if the token has an adapter of the
    /// slice.
    fn delta<T: Element>(&self, step: &Step<'_>, token: usize, slice: usize, put: impl FnMut(usize, f32)) {
        let site = &self.contract.site;
        if let Some(factors) = step.factors::<T>(step.batch.slots()[token], site.first_entry() + slice) {
            let v = &step.workspace.v[token * self.v_stride(step) + slice * step.max_rank..];
            factors.delta(v, step.batch.scale(token), site.slices()[slice].out_features(), put);
        }
    }

    fn v_stride(&self, step: &Step<'_>) -> usize {
        self.contract.site.slices().len() * step.max_rank
    }
}

/// `v = A x[t]` of a step's tokens in its workspace, from [`LoraLinear::shrink`]. One operation expands it.
#[derive(Debug)]
#[must_use = "the delta is added by the operation that expands it"]
pub struct Shrunk<'b, 's> {
    layer: &'b LoraLinear,
    step: &'b mut Step<'s>,
}

impl Shrunk<'_, '_> {
    /// The second half of [`add_delta`](LoraLinear::add_delta): `y[t] += scaling · B v`.
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step. `y` is then unchanged.
    pub fn expand<'a, T: Element>(self, y: impl IntoSlices<MatrixMut<'a, T>>) -> Result<(), OperandError> {
        let (Self { layer, step }, mut y) = (self, y.into_slices());
        layer.contract.check(step.shape(), None, Some(&y.map(MatrixMut::shape)))?;
        y.for_rows(layer.contract.site.slices(), &|token, slice, y| {
            layer.delta::<T>(step, token, slice, |out, delta| y[out] = T::from_f32(y[out].to_f32() + delta));
        });
        Ok(())
    }

    #[doc = doc_of!(linear_silu_mul)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step, or the slices are not gate and up. `out`
    /// is then unchanged.
    #[doc(alias = "silu_and_mul")]
    pub fn silu_mul<'a, T: Element>(
        self,
        y: impl IntoSlices<Matrix<'a, T>>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        let (Self { layer, step }, y) = (self, y.into_slices());
        let features = layer.contract.check_silu_mul(step.shape(), &y.map(Matrix::shape), out.shape())?;
        out.for_rows(&|token, out| {
            let mut sums: Vec<f32> = y.row(token).map(|y| y.to_f32()).collect();
            for (slice, sums) in sums.chunks_mut(features).enumerate() {
                layer.delta::<T>(step, token, slice, |out, delta| sums[out] += delta);
            }
            let (gate, up) = sums.split_at(features);
            for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
                *out = T::from_f32(activated(Activation::Silu, Some(gate), up));
            }
        });
        Ok(())
    }
}

/// The LoRA operation of one embedding.
#[derive(Clone, Debug)]
pub struct LoraEmbedding {
    contract: contract::Embedding,
}

impl LoraEmbedding {
    /// The embedding `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError::Foreign`] if the id belongs to another model, [`PlanError::Limit`] if the kernels of a GPU do not
    /// support a size.
    pub fn new(weights: &WeightTable, id: EmbeddingId) -> Result<Self, PlanError> {
        let contract = contract::Embedding::new(weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { contract })
    }

    #[doc = doc_of!(embedding_add_delta)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the embedding and the step. `y` is then unchanged.
    pub fn add_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        token_ids: &[i32],
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        self.contract.check(step.shape(), token_ids.len(), y.shape())?;
        let site = &self.contract.site;
        y.for_rows(&|token, y| {
            let Some(id) = usize::try_from(token_ids[token]).ok().filter(|&id| id < site.vocab()) else { return };
            let Some(factors) = step.factors(step.batch.slots()[token], site.entry()) else { return };
            factors.expand(&factors.look_up(site.vocab(), id), step.batch.scale(token), y);
        });
        Ok(())
    }
}
