//! The fused linear on the CPU.

use super::{Matrix, MatrixMut, Step, WeightTable};
use crate::{
    Element, IntoSlices, Slices, contract,
    error::OperandError,
    model::{LinearId, SliceSite},
    plan::{Device, ForwardPlan},
};

/// A linear layer with its base weight and its adapters: `y = x Wᵀ + bias + scaling · B (A x)`.
///
/// The CPU counterpart of `cuda::FusedLinear`, for tests of engines. It refuses what that refuses, by the same errors:
/// `f32`, numbers of input features and row strides of W and `x` that are not multiples of 8, and batches of more than
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
    /// [`OperandError::Plan`] if the id belongs to another model
    /// ([`PlanError::Foreign`](crate::plan::PlanError::Foreign)), or [`ForwardPlan::new`] refuses the layer, the
    /// table's element type or its capacity. Another [`OperandError`] if there is not one W per slice, of the right
    /// shape and type and with rows that begin at multiples of 16 bytes.
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

    #[doc = doc_of!(fused_linear_forward)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step, or the step has more than
    /// [`plan().max_tokens()`](ForwardPlan::max_tokens) tokens. `y` is then unchanged.
    pub fn forward<'y>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'y, T>>,
    ) -> Result<(), OperandError>
    where
        T: 'y,
    {
        self.run(step, x, y.into_slices(), |_, sum| sum)
    }

    /// Like [`forward`](Self::forward), but adds to `y`.
    ///
    /// # Errors
    /// As for `forward`.
    pub fn accumulate<'y>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'y, T>>,
    ) -> Result<(), OperandError>
    where
        T: 'y,
    {
        self.run(step, x, y.into_slices(), |y, sum| y.to_f32() + sum)
    }

    /// Stores `put(y, sum)` for each element of `y`.
    fn run(
        &self,
        step: &Step<'_>,
        x: Matrix<'_, T>,
        mut y: Slices<MatrixMut<'_, T>>,
        put: impl Fn(T, f32) -> f32 + Sync,
    ) -> Result<(), OperandError> {
        self.contract.check(step.shape(), x.shape(), &y.map(MatrixMut::shape))?;
        y.for_rows(self.contract.site.slices(), &|token, slice, y| {
            for (y, sum) in y.iter_mut().zip(self.sums(step, token, slice, x.row(token))) {
                *y = T::from_f32(put(*y, sum));
            }
        });
        Ok(())
    }

    /// The outputs of a slice for a token.
    fn sums(&self, step: &Step<'_>, token: usize, slice: usize, x: &[T]) -> Vec<f32> {
        let site = &self.contract.site;
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let out_features = site.slices()[slice].out_features();
        let first = site.slices()[..slice].iter().map(SliceSite::out_features).sum::<usize>();
        let bias = |out: usize| self.bias.map_or(0.0, |bias| bias[first + out].to_f32());
        let row = |out| self.slices[slice].row(out).iter().zip(&wide).map(|(w, x)| w.to_f32() * x).sum::<f32>();
        let mut sums: Vec<f32> = (0..out_features).map(|out| bias(out) + row(out)).collect();
        if let Some(factors) = step.factors::<T>(step.batch.slots()[token], site.first_entry() + slice) {
            let mut v = vec![0.0; factors.rank()];
            factors.shrink(x, &mut v);
            factors.delta(&v, step.batch.scale(token), out_features, |out, delta| sums[out] += delta);
        }
        sums
    }
}
