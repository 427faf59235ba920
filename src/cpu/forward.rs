use rayon::{iter::IndexedParallelIterator, iter::ParallelIterator};

use super::{Matrix, MatrixMut, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{LinearId, LinearSite, ModelSpec},
    routing::Batch,
};

/// A linear layer and its adapters: `y = x Wᵀ + bias + scaling · B (A x)`. The plain product, for the tests of engines.
#[derive(Clone, Debug)]
pub struct FusedLinear<'a, T> {
    site: LinearSite,
    slices: Vec<Matrix<'a, T>>,
    bias: Option<&'a [T]>,
}

impl<'a, T: Element> FusedLinear<'a, T> {
    /// The layer `id` of `model`, with the W `[out_features, in_features]` of each of its slices.
    ///
    /// # Errors
    /// If there is not one of that shape for each slice.
    pub fn new(model: &ModelSpec, id: LinearId, slices: &[Matrix<'a, T>]) -> Result<Self, OperandError> {
        let site = model[id].clone();
        if slices.len() != site.slices().len() {
            return Err(OperandError::Length { operand: "W", got: slices.len(), want: site.slices().len() });
        }
        for (w, slice) in slices.iter().zip(site.slices()) {
            w.check_as("W", slice.out_features(), site.in_features())?;
        }
        Ok(Self { site, slices: slices.to_vec(), bias: None })
    }

    /// Adds `bias [out_features]` to every row.
    ///
    /// # Errors
    /// If it is of another length.
    pub fn with_bias(self, bias: &'a [T]) -> Result<Self, OperandError> {
        let want = self.site.out_features();
        if bias.len() != want {
            return Err(OperandError::Length { operand: "bias", got: bias.len(), want });
        }
        Ok(Self { bias: Some(bias), ..self })
    }

    /// Sets `y[t]` to `x[t] Wᵀ + bias + scaling · B (A x[t])`, for every token `t`; those of the base model have no delta.
    ///
    /// `x` is `[tokens, in_features]` and `y` is `[tokens, out_features]`. Sums are `f32`, and rounded once.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the batch; then `y` is as it was.
    pub fn forward(
        &self,
        x: Matrix<'_, T>,
        y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
    ) -> Result<(), OperandError> {
        self.run(x, y, weights, batch, false)
    }

    /// As [`forward`](Self::forward), but adds to what `y` holds.
    ///
    /// # Errors
    /// As for `forward`.
    pub fn accumulate(
        &self,
        x: Matrix<'_, T>,
        y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
    ) -> Result<(), OperandError> {
        self.run(x, y, weights, batch, true)
    }

    fn run(
        &self,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
        weights: &WeightTable<T>,
        batch: &Batch<'_>,
        accumulates: bool,
    ) -> Result<(), OperandError> {
        x.check(batch.num_tokens(), self.site.in_features())?;
        y.check(batch.num_tokens(), self.site.out_features())?;
        if !self.site.is_in(weights.model()) {
            return Err(OperandError::Model);
        }
        y.rows_mut().enumerate().for_each(|(token, y)| {
            let sums = self.row(x.row(token), token, weights, batch);
            for (y, sum) in y.iter_mut().zip(sums) {
                *y = T::from_f32(if accumulates { y.to_f32() + sum } else { sum });
            }
        });
        Ok(())
    }

    /// A token's outputs.
    fn row(&self, x: &[T], token: usize, weights: &WeightTable<T>, batch: &Batch<'_>) -> Vec<f32> {
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let mut sums = Vec::with_capacity(self.site.out_features());
        for (slice, w) in self.slices.iter().enumerate() {
            let first = sums.len();
            let out_features = self.site.slices()[slice].out_features();
            for out in 0..out_features {
                let product: f32 = w.row(out).iter().zip(&wide).map(|(w, x)| w.to_f32() * x).sum();
                sums.push(product + self.bias.map_or(0.0, |bias| bias[first + out].to_f32()));
            }
            if let Some(factors) = weights.factors(batch.slots()[token], self.site.first_entry() + slice) {
                let mut v = vec![0.0; weights.max_rank().max(1)];
                factors.shrink(x, &mut v);
                factors.delta(&v, batch.scale(token), out_features, |out, delta| sums[first + out] += delta);
            }
        }
        sums
    }
}
