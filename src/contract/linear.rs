use super::{Shape, StepShape};
use crate::{
    DType, Slices,
    error::OperandError,
    model::{LinearId, LinearSite, Model, ModelId, SliceSite},
    plan::{Capacity, Device, LinearPlan, PlanError},
};

/// A linear layer.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    model: ModelId,
    pub(crate) site: LinearSite,
    pub(crate) plan: LinearPlan,
}

impl Linear {
    pub(crate) fn new(
        model: &Model,
        id: LinearId,
        dtype: DType,
        capacity: Capacity,
        device: Device,
    ) -> Result<Self, PlanError> {
        let site = model.linear(id).ok_or(PlanError::Foreign)?.clone();
        let plan = LinearPlan::new(&site, dtype, capacity)?.on(device);
        Ok(Self { model: model.id(), site, plan })
    }

    /// Of shrink `x`, of expand `y`, of both in one both.
    pub(crate) fn check(
        &self,
        step: StepShape,
        x: Option<Shape>,
        y: Option<&Slices<Shape>>,
    ) -> Result<(), OperandError> {
        let (dtype, tokens) = (self.check_step(step)?, step.num_tokens);
        x.map_or(Ok(()), |x| x.expect("x", dtype, tokens, self.site.in_features()))?;
        y.map_or(Ok(()), |y| y.expect(dtype, tokens, self.site.slices()))
    }

    /// Returns the features of gate and of up.
    pub(crate) fn check_silu_mul(&self, step: StepShape, y: &Slices<Shape>, out: Shape) -> Result<usize, OperandError> {
        let (dtype, tokens) = (self.check_step(step)?, step.num_tokens);
        let features = match self.site.slices() {
            [gate, up] if gate.out_features() == up.out_features() => gate.out_features(),
            slices => {
                return Err(OperandError::GateUp { outputs: slices.iter().map(SliceSite::out_features).collect() });
            }
        };
        y.expect(dtype, tokens, self.site.slices())?;
        out.expect("out", dtype, tokens, features)?;
        Ok(features)
    }

    /// Returns the element type of the operands.
    fn check_step(&self, step: StepShape) -> Result<DType, OperandError> {
        let capacity = self.plan.capacity();
        step.check(self.model, self.plan.dtype(), capacity, capacity.max_tokens)?;
        Ok(self.plan.dtype())
    }
}
