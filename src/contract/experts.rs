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

/// Where an operation is among the base operations, and its operands besides `x`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExpertsForm {
    /// Adds to or writes `y`, the output of gate-up.
    GateUp {
        y: Shape,
    },
    Activate {
        y: Shape,
        out: Shape,
        activation: Activation,
    },
    /// Adds to or writes `y`, the output of down.
    Down {
        y: Shape,
    },
    AddCombined {
        y: Shape,
    },
    Combine {
        y: Shape,
        out: Shape,
    },
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

    /// With a router's choice of `top_k` experts for each of `num_tokens` tokens.
    pub(crate) fn check(
        &self,
        step: StepShape,
        [num_tokens, top_k]: [usize; 2],
        x: Shape,
        form: ExpertsForm,
    ) -> Result<(), OperandError> {
        let (dtype, capacity) = (self.plan.dtype(), self.plan.capacity());
        step.check(self.model, dtype, capacity, capacity.max_tokens)?;
        check_tokens(num_tokens, step.num_tokens)?;
        OperandError::within("the routes of a token", top_k, self.plan.top_k())?;
        let (routes, gate_up, down) = (num_tokens * top_k, self.site.gate_up(), self.site.down());
        let x = |rows, features| x.expect("x", dtype, rows, features);
        match form {
            ExpertsForm::GateUp { y } => {
                x(num_tokens, gate_up.in_features())?;
                y.expect("y", dtype, routes, gate_up.out_features())
            }
            ExpertsForm::Activate { y, out, activation } => {
                if !self.site.allows(activation) {
                    return Err(OperandError::Activation { activation });
                }
                x(num_tokens, gate_up.in_features())?;
                y.expect("y", dtype, routes, gate_up.out_features())?;
                out.expect("out", dtype, routes, down.in_features())
            }
            ExpertsForm::Down { y } => {
                x(routes, down.in_features())?;
                y.expect("y", dtype, routes, down.out_features())
            }
            ExpertsForm::AddCombined { y } => {
                x(routes, down.in_features())?;
                y.expect("y", dtype, num_tokens, down.out_features())
            }
            ExpertsForm::Combine { y, out } => {
                x(routes, down.in_features())?;
                y.expect("y", dtype, routes, down.out_features())?;
                out.expect("out", dtype, num_tokens, down.out_features())
            }
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
