//! What the operations of experts demand of their operands, on every backend.

use super::{Shape, StepShape};
use crate::{
    DType,
    error::OperandError,
    model::{Activation, ExpertsId, ExpertsSite, Model, ModelId},
    plan::{Capacity, Device, ExpertsPlan, PlanError},
};

/// The experts of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Experts {
    model: ModelId,
    pub(crate) site: ExpertsSite,
    pub(crate) plan: ExpertsPlan,
}

/// What an operation does with the deltas.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExpertsForm {
    AddGateUp,
    WriteGateUp,
    Activate(Activation),
    AddDown,
    WriteDown,
    AddCombined,
    Combine,
}

impl ExpertsForm {
    /// Whether the deltas are of gate-up, not of down.
    pub(crate) fn is_before_activation(self) -> bool {
        matches!(self, Self::AddGateUp | Self::WriteGateUp | Self::Activate(_))
    }
}

impl Experts {
    pub(crate) fn new(
        model: &Model,
        id: ExpertsId,
        dtype: DType,
        capacity: Capacity,
        device: Device,
    ) -> Result<Self, PlanError> {
        let site = model.experts(id).ok_or(PlanError::Foreign)?.clone();
        let plan = ExpertsPlan::new(&site, dtype, capacity)?.on(device);
        Ok(Self { model: model.id(), site, plan })
    }

    /// With a router's choice of `top_k` experts for each of `num_tokens` tokens. `out` is that of an operation that
    /// does not write `y`.
    pub(crate) fn check(
        &self,
        step: StepShape,
        [num_tokens, top_k]: [usize; 2],
        form: ExpertsForm,
        [x, y]: [Shape; 2],
        out: Option<Shape>,
    ) -> Result<(), OperandError> {
        let (dtype, capacity) = (self.plan.dtype(), self.plan.capacity());
        step.check(self.model, dtype, capacity, capacity.max_tokens)?;
        check_tokens(num_tokens, step.num_tokens)?;
        OperandError::within("the routes of a token", top_k, self.plan.top_k())?;
        let (routes, gate_up, down) = (num_tokens * top_k, self.site.gate_up(), self.site.down());
        if let ExpertsForm::Activate(activation) = form
            && !self.site.allows(activation)
        {
            return Err(OperandError::Activation { activation });
        }
        let (site, rows_of_x) = if form.is_before_activation() { (gate_up, num_tokens) } else { (down, routes) };
        let rows_of_y = if matches!(form, ExpertsForm::AddCombined) { num_tokens } else { routes };
        x.expect("x", dtype, rows_of_x, site.in_features())?;
        y.expect("y", dtype, rows_of_y, site.out_features())?;
        match (form, out) {
            (ExpertsForm::Activate(_), Some(out)) => out.expect("out", dtype, routes, down.in_features()),
            (_, Some(out)) => out.expect("out", dtype, num_tokens, down.out_features()),
            (_, None) => Ok(()),
        }
    }
}

/// Rejects a router's choice for another number of tokens than the batch's.
pub(crate) fn check_tokens(got: usize, want: usize) -> Result<(), OperandError> {
    if got == want { Ok(()) } else { Err(OperandError::Tokens { got, want }) }
}

/// Rejects ids that are not `top_k` for each token.
pub(crate) fn check_top_k(ids: usize, top_k: usize) -> Result<(), OperandError> {
    if top_k == 0 || !ids.is_multiple_of(top_k) { Err(OperandError::TopK { ids, top_k }) } else { Ok(()) }
}

/// Rejects an operand that does not have one element per route.
pub(crate) fn check_of_routes(operand: &'static str, got: usize, want: usize) -> Result<(), OperandError> {
    if got == want { Ok(()) } else { Err(OperandError::Routes { operand, got, want }) }
}
