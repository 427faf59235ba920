use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator, slice::ParallelSliceMut};

use super::{Matrix, MatrixMut, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{LinearId, LinearSite, ModelSpec},
    routing::Batch,
};

/// The adapters of one linear layer.
#[derive(Clone, Debug)]
pub struct LoraLinear {
    site: LinearSite,
}

/// What [`LoraLinear::shrink`] leaves for [`LoraLinear::expand`].
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// `[tokens, slices, max_rank]`
    v: Vec<f32>,
}

impl LoraLinear {
    /// The layer `id` of `model`.
    pub fn new(model: &ModelSpec, id: LinearId) -> Self {
        Self { site: model[id].clone() }
    }

    /// Adds `scaling · B (A x[t])` to `y[t]`, for every token `t` that has an adapter. Base tokens keep `y` bit for bit.
    ///
    /// `x` is `[tokens, in_features]` and `y` is `[tokens, out_features]`. With row-parallel layers `y` is this rank's partial
    /// sum: call this before the all-reduce.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the batch; then `y` is as it was.
    #[doc(alias = "punica")]
    pub fn add_delta<T: Element>(
        &self,
        x: Matrix<'_, T>,
        y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
    ) -> Result<(), OperandError> {
        y.check(batch.num_tokens(), self.site.out_features())?;
        let mut workspace = Workspace::default();
        self.shrink(x, weights, batch, &mut workspace)?;
        self.expand(y, weights, batch, &workspace)
    }

    /// `y[t] = scaling · B (A x[t])`, and zero for every token and slice that has no adapter: for a base GEMM that adds its product to
    /// what `y` holds.
    ///
    /// # Errors
    /// As for [`add_delta`](Self::add_delta).
    pub fn write_delta<T: Element>(
        &self,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
    ) -> Result<(), OperandError> {
        y.check(batch.num_tokens(), self.site.out_features())?;
        let mut workspace = Workspace::default();
        self.shrink(x, weights, batch, &mut workspace)?;
        y.clear();
        self.expand(y, weights, batch, &workspace)
    }

    /// The first half of [`add_delta`](Self::add_delta): `A x[t]` into the workspace.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the batch.
    pub fn shrink<T: Element>(
        &self,
        x: Matrix<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), OperandError> {
        x.check(batch.num_tokens(), self.site.in_features())?;
        self.check(weights)?;
        workspace.v.clear();
        workspace.v.resize(batch.num_tokens() * self.v_stride(weights), 0.0);
        workspace.v.par_chunks_mut(self.v_stride(weights)).enumerate().for_each(|(token, v)| {
            for (slice, v) in v.chunks_mut(weights.max_rank().max(1)).enumerate() {
                if let Some(factors) = weights.factors(batch.slots()[token], self.site.first_entry() + slice) {
                    factors.shrink(x.row(token), v);
                }
            }
        });
        Ok(())
    }

    /// The second half of [`add_delta`](Self::add_delta): adds `scaling · B v` to `y`, from what [`shrink`](Self::shrink) left
    /// for the same batch and weights.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the batch, or the workspace is not of this batch; then `y` is as it was.
    pub fn expand<T: Element>(
        &self,
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
        workspace: &Workspace,
    ) -> Result<(), OperandError> {
        y.check(batch.num_tokens(), self.site.out_features())?;
        self.check(weights)?;
        let v_stride = self.v_stride(weights);
        if workspace.v.len() != batch.num_tokens() * v_stride {
            let got = workspace.v.len().checked_div(v_stride).unwrap_or(0);
            return Err(OperandError::Length { operand: "workspace", got, want: batch.num_tokens() });
        }
        y.rows_mut().enumerate().for_each(|(token, mut y)| {
            for (slice, site) in self.site.slices().iter().enumerate() {
                let (y_slice, rest) = y.split_at_mut(site.out_features());
                y = rest;
                let v = &workspace.v[token * v_stride + slice * weights.max_rank()..];
                if let Some(factors) = weights.factors(batch.slots()[token], self.site.first_entry() + slice) {
                    factors.expand(v, batch.scale(token), y_slice);
                }
            }
        });
        Ok(())
    }

    fn v_stride<T: Element>(&self, weights: &WeightTable<T>) -> usize {
        (self.site.slices().len() * weights.max_rank()).max(1)
    }

    fn check<T: Element>(&self, weights: &WeightTable<T>) -> Result<(), OperandError> {
        if self.site.is_in(weights.model()) { Ok(()) } else { Err(OperandError::Model) }
    }
}
