use super::{Matrix, MatrixMut, Step, WeightTable};
use crate::{
    Element, contract,
    error::OperandError,
    model::LinearId,
    plan::{Device, ForwardPlan},
};

/// A linear layer with its base weight and its adapters: `y = x Wᵀ + bias + scaling · B (A x)`.
///
/// The CPU counterpart of `cuda::FusedLinear`, for tests of engines. It refuses what that refuses, by the same errors: `f32`, numbers of
/// input features and row strides of W and `x` that are not multiples of 8, and batches of more than
/// [`plan().max_tokens()`](ForwardPlan::max_tokens) tokens. Only addresses may be anywhere.
#[derive(Clone, Debug)]
pub struct FusedLinear<'a, T> {
    contract: contract::FusedLinear,
    slices: Vec<Matrix<'a, T>>,
    bias: Option<&'a [T]>,
}

impl<'a, T: Element> FusedLinear<'a, T> {
    /// The layer `id` of the table's model, with a base weight W `[out_features, in_features]` for each of its slices.
    ///
    /// # Errors
    /// [`OperandError::Plan`] if the id belongs to another model ([`PlanError::Foreign`](crate::plan::PlanError::Foreign)), or
    /// [`ForwardPlan::new`] refuses the layer, the table's element type or its capacity. Another [`OperandError`] if there is not one W
    /// per slice, of the right shape and type and with rows that begin at multiples of 16 bytes.
    pub fn new(
        weights: &WeightTable,
        id: LinearId,
        slices: impl IntoIterator<Item = Matrix<'a, T>>,
    ) -> Result<Self, OperandError> {
        let slices: Vec<_> = slices.into_iter().collect();
        let shapes: Vec<_> = slices.iter().map(Matrix::shape).collect();
        let (model, dtype, capacity) = (weights.model(), weights.dtype(), weights.capacity());
        let contract = contract::FusedLinear::new(model, id, dtype, capacity, Device::H100, &shapes)?;
        Ok(Self { contract, slices, bias: None })
    }

    /// Adds `bias` `[out_features]` to every row.
    ///
    /// # Errors
    /// [`OperandError`] if it has another length.
    pub fn with_bias(self, bias: &'a [T]) -> Result<Self, OperandError> {
        self.contract.check_bias(bias.len())?;
        Ok(Self { bias: Some(bias), ..self })
    }

    /// The launch configuration on a GPU. It also gives the largest batch.
    pub fn plan(&self) -> &ForwardPlan {
        &self.contract.plan
    }

    #[doc = include_str!("../docs/operations/fused_linear_forward.md")]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step, or the step has more than
    /// [`plan().max_tokens()`](ForwardPlan::max_tokens) tokens. `y` is then unchanged.
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
        self.contract.check(step.shape(), x.shape(), y.shape())?;
        y.for_rows(&|token, y| {
            for (y, sum) in y.iter_mut().zip(self.sums(step, token, x.row(token))) {
                *y = T::from_f32(put(*y, sum));
            }
        });
        Ok(())
    }

    /// The outputs of a token.
    fn sums(&self, step: &Step<'_>, token: usize, x: &[T]) -> Vec<f32> {
        let site = &self.contract.site;
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let mut sums =
            self.bias.map_or(vec![0.0; site.out_features()], |bias| bias.iter().map(|bias| bias.to_f32()).collect());
        let mut rest = &mut sums[..];
        for (slice, (w, of_slice)) in self.slices.iter().zip(site.slices()).enumerate() {
            let (sums, behind) = rest.split_at_mut(of_slice.out_features());
            rest = behind;
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum += w.row(row).iter().zip(&wide).map(|(w, x)| w.to_f32() * x).sum::<f32>();
            }
            if let Some(factors) = step.factors::<T>(step.batch.slots()[token], site.first_entry() + slice) {
                let mut v = vec![0.0; factors.rank()];
                factors.shrink(x, &mut v);
                factors.delta(&v, step.batch.scale(token), of_slice.out_features(), |out, delta| sums[out] += delta);
            }
        }
        sums
    }
}
