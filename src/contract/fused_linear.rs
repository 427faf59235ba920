use super::{Shape, StepShape};
use crate::{
    DType, Slices,
    error::OperandError,
    ffi,
    model::{LinearId, LinearSite, Model, ModelId},
    plan::{Capacity, Device, ForwardPlan, PlanError},
};

/// A linear layer with its base weight.
#[derive(Clone, Debug)]
pub(crate) struct FusedLinear {
    model: ModelId,
    pub(crate) site: LinearSite,
    pub(crate) plan: ForwardPlan,
}

impl FusedLinear {
    /// Alignment of W and `x`, and of their rows, in bytes. On the CPU, the addresses may have any.
    pub(crate) const ALIGNMENT_BYTES: usize = ffi::ARIL_FORWARD_ALIGNMENT as usize;

    /// The layer `id` on a device, with a W for each of its slices.
    pub(crate) fn new(
        model: &Model,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
        device: Device,
        slices: &[Shape],
    ) -> Result<Self, OperandError> {
        let site = model.linear(id).ok_or(PlanError::Foreign)?.clone();
        let plan = ForwardPlan::new(&site, dtype, capacity)?.on(device)?;
        if slices.len() != site.slices().len() {
            return Err(OperandError::Slices { operand: "W", got: slices.len(), want: site.slices().len() });
        }
        for (w, slice) in slices.iter().zip(site.slices()) {
            w.expect("W", dtype, slice.out_features(), site.in_features())?;
            w.expect_aligned_rows("W", Self::ALIGNMENT_BYTES)?;
        }
        Ok(Self { model: model.id(), site, plan })
    }

    /// Rejects a bias of another length.
    pub(crate) fn check_bias(&self, got: usize) -> Result<(), OperandError> {
        let want = self.site.out_features();
        if got == want { Ok(()) } else { Err(OperandError::Bias { got, want }) }
    }

    pub(crate) fn check(&self, step: StepShape, x: Shape, y: &Slices<Shape>) -> Result<(), OperandError> {
        let (plan, dtype) = (&self.plan, self.plan.dtype());
        step.check(self.model, dtype, plan.capacity(), plan.max_tokens())?;
        x.expect("x", dtype, step.num_tokens, self.site.in_features())?;
        x.expect_aligned_rows("x", Self::ALIGNMENT_BYTES)?;
        y.expect(dtype, step.num_tokens, self.site.slices())
    }
}
