use super::{Shape, StepShape};
use crate::{
    DType, Slices,
    error::OperandError,
    model::{Exchange, LinearId, LinearSite, Model, ModelId, SliceSite},
    plan::{Capacity, PlanError, check_outputs},
};

/// A fully sharded linear layer.
#[derive(Clone, Debug)]
pub(crate) struct FullyShardedLinear {
    model: ModelId,
    pub(crate) site: LinearSite,
    pub(crate) exchange: Exchange,
    pub(crate) dtype: DType,
    capacity: Capacity,
}

impl FullyShardedLinear {
    pub(crate) fn new(model: &Model, id: LinearId, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let site = model.linear(id).ok_or(PlanError::Foreign)?.clone();
        let exchange = site.exchange().ok_or(PlanError::NotFullySharded)?;
        let capacity = capacity.checked()?;
        let outs: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
        // Shrink has a block for each rank tile, which are no more than the ranks.
        check_outputs(&outs, capacity, site.slices().len() * exchange.width(capacity.max_rank))?;
        Ok(Self { model: model.id(), site, exchange, dtype, capacity })
    }

    pub(crate) fn check_shrink(&self, step: StepShape, x: Shape, v: Shape) -> Result<(), OperandError> {
        self.check_step(step)?;
        x.expect("x", self.dtype, step.num_tokens, self.site.in_features())?;
        let [rows, cols] = self.exchange.sent(step.num_tokens, step.max_rank);
        v.expect("v", DType::F32, rows, cols)
    }

    pub(crate) fn check_expand(&self, step: StepShape, v: Shape, y: &Slices<Shape>) -> Result<(), OperandError> {
        self.check_step(step)?;
        let [rows, cols] = self.exchange.received(step.num_tokens, step.max_rank);
        v.expect("v", DType::F32, rows, cols)?;
        y.expect(self.dtype, step.num_tokens, self.site.slices())
    }

    fn check_step(&self, step: StepShape) -> Result<(), OperandError> {
        step.check(self.model, self.dtype, self.capacity, self.capacity.max_tokens)
    }
}
