use super::{Matrix, MatrixMut, Step, WeightTable};
use crate::{
    Element,
    error::OperandError,
    model::{LinearId, LinearSite, ModelId},
};

/// A linear layer with its base weight and its adapters: `y = x Wᵀ + bias + scaling · B (A x)`.
///
/// The CPU counterpart of `cuda::FusedLinear`, for tests of engines. It accepts any element type, shape and number of tokens.
#[derive(Clone, Debug)]
pub struct FusedLinear<'a, T> {
    model: ModelId,
    site: LinearSite,
    slices: Vec<Matrix<'a, T>>,
    bias: Option<&'a [T]>,
}

impl<'a, T: Element> FusedLinear<'a, T> {
    /// The layer `id` of the table's model, with a base weight W `[out_features, in_features]` for each of its slices.
    ///
    /// # Errors
    /// [`PlanError::Foreign`](crate::plan::PlanError::Foreign) if the id belongs to another model, or an [`OperandError`] if the
    /// table has another element type, the layer is fully sharded or there is not one W of the right shape per slice.
    pub fn new(
        weights: &WeightTable,
        id: LinearId,
        slices: impl IntoIterator<Item = Matrix<'a, T>>,
    ) -> Result<Self, OperandError> {
        let site = weights.model().linear(id).ok_or(OperandError::Model)?.clone();
        if site.exchange().is_some() {
            return Err(OperandError::FullySharded);
        }
        if T::DTYPE != weights.dtype() {
            return Err(OperandError::DType { operand: "W", got: T::DTYPE, want: weights.dtype() });
        }
        let slices: Vec<_> = slices.into_iter().collect();
        if slices.len() != site.slices().len() {
            return Err(OperandError::Slices { got: slices.len(), want: site.slices().len() });
        }
        for (w, slice) in slices.iter().zip(site.slices()) {
            w.check_as("W", slice.out_features(), site.in_features())?;
        }
        Ok(Self { model: weights.model().id(), site, slices, bias: None })
    }

    /// Adds `bias` `[out_features]` to every row.
    ///
    /// # Errors
    /// [`OperandError`] if it has another length.
    pub fn with_bias(self, bias: &'a [T]) -> Result<Self, OperandError> {
        let (got, want) = (bias.len(), self.site.out_features());
        if got != want {
            return Err(OperandError::Bias { got, want });
        }
        Ok(Self { bias: Some(bias), ..self })
    }

    #[doc = include_str!("../docs/operations/fused_linear_forward.md")]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step. `y` is then unchanged.
    pub fn forward(&self, step: &mut Step<'_>, x: Matrix<'_, T>, y: MatrixMut<'_, T>) -> Result<(), OperandError> {
        self.run(step, x, y, |_, sum| sum)
    }

    /// Like [`forward`](Self::forward), but adds to `y`.
    ///
    /// # Errors
    /// As for `forward`.
    pub fn accumulate(&self, step: &mut Step<'_>, x: Matrix<'_, T>, y: MatrixMut<'_, T>) -> Result<(), OperandError> {
        self.run(step, x, y, |y, sum| y.to_f32() + sum)
    }

    /// Stores `put(y, sum)` for each element of `y`.
    fn run(
        &self,
        step: &Step<'_>,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
        put: impl Fn(T, f32) -> f32 + Sync,
    ) -> Result<(), OperandError> {
        x.check(step.num_tokens(), self.site.in_features())?;
        y.check(step.num_tokens(), self.site.out_features())?;
        step.check::<T>("x", self.model)?;
        y.for_rows(&|token, y| {
            for (y, sum) in y.iter_mut().zip(self.sums(step, token, x.row(token))) {
                *y = T::from_f32(put(*y, sum));
            }
        });
        Ok(())
    }

    /// The outputs of a token.
    fn sums(&self, step: &Step<'_>, token: usize, x: &[T]) -> Vec<f32> {
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let mut sums = self
            .bias
            .map_or(vec![0.0; self.site.out_features()], |bias| bias.iter().map(|bias| bias.to_f32()).collect());
        let mut rest = &mut sums[..];
        for (slice, (w, site)) in self.slices.iter().zip(self.site.slices()).enumerate() {
            let (sums, behind) = rest.split_at_mut(site.out_features());
            rest = behind;
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum += w.row(row).iter().zip(&wide).map(|(w, x)| w.to_f32() * x).sum::<f32>();
            }
            if let Some(factors) = step.factors::<T>(step.batch.slots()[token], self.site.first_entry() + slice) {
                let mut v = vec![0.0; factors.rank()];
                factors.shrink(x, &mut v);
                factors.delta(&v, step.batch.scale(token), site.out_features(), |out, delta| sums[out] += delta);
            }
        }
        sums
    }
}
