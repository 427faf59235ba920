//! Linear layers and embeddings.

use super::{Shape, StepShape};
use crate::{
    DType, Slices,
    error::OperandError,
    ffi,
    model::{EmbeddingId, EmbeddingSite, Exchange, LinearId, LinearSite, Model, ModelId, RowsId, RowsSite, SliceSite},
    plan::{Capacity, Device, ForwardPlan, LinearPlan, PlanError, check_outputs},
};

/// A linear layer.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    model: ModelId,
    pub(crate) site: LinearSite,
    pub(crate) plan: LinearPlan,
}

impl Linear {
    /// Alignment of the rows of a stack, of y with its columns of v, and of what replaces it, and of each of their
    /// rows, in bytes.
    #[cfg(feature = "cuda")]
    pub(crate) const STACKED_ALIGNMENT_BYTES: usize = 16;

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

    /// The layer with this slice alone.
    pub(crate) fn with_slice(&self, index: usize) -> Option<Self> {
        Some(Self { model: self.model, site: self.site.with_slice(index)?, plan: self.plan.with_slice(index)? })
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

    /// The features of gate and of up.
    pub(crate) fn gate_up(&self) -> Result<usize, OperandError> {
        match self.site.slices() {
            [gate, up] if gate.out_features() == up.out_features() => Ok(gate.out_features()),
            slices => Err(OperandError::GateUp { outputs: slices.iter().map(SliceSite::out_features).collect() }),
        }
    }

    /// Returns the features of gate and of up.
    pub(crate) fn check_silu_mul(&self, step: StepShape, y: &Slices<Shape>, out: Shape) -> Result<usize, OperandError> {
        let (dtype, tokens) = (self.check_step(step)?, step.num_tokens);
        let features = self.gate_up()?;
        y.expect(dtype, tokens, self.site.slices())?;
        out.expect("out", dtype, tokens, features)?;
        Ok(features)
    }

    /// Of what replaces y behind a layer in a stack.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_stacked_out(&self, step: StepShape, out: Shape) -> Result<(), OperandError> {
        out.expect("out", self.plan.dtype(), step.num_tokens, self.gate_up()?)?;
        out.expect_aligned_rows("out", Self::STACKED_ALIGNMENT_BYTES)
    }

    /// Rejects rows of a stack that are not `rows` of the layer's input features.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_stack(site: &LinearSite, dtype: DType, shape: Shape, rows: usize) -> Result<(), OperandError> {
        shape.expect("the stack's rows", dtype, rows, site.in_features())?;
        shape.expect_aligned_rows("the stack's rows", Self::STACKED_ALIGNMENT_BYTES)
    }

    /// Of a layer in a stack: y with its columns of v. Returns the column that v begins at.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_stacked(&self, step: StepShape, y: Shape, stacked: usize) -> Result<usize, OperandError> {
        let (dtype, outs) = (self.check_step(step)?, self.site.out_features());
        y.expect("y", dtype, step.num_tokens, outs + stacked)?;
        y.expect_aligned_rows("y", Self::STACKED_ALIGNMENT_BYTES)?;
        Ok(outs)
    }

    /// Returns the element type of the operands.
    fn check_step(&self, step: StepShape) -> Result<DType, OperandError> {
        let capacity = self.plan.capacity();
        step.check(self.model, self.plan.dtype(), capacity, capacity.max_tokens)?;
        Ok(self.plan.dtype())
    }
}

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
        // Shrink has a thread block for each rank tile, which are no more than the ranks.
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

/// An embedding.
#[derive(Clone, Debug)]
pub(crate) struct Embedding {
    model: ModelId,
    pub(crate) site: EmbeddingSite,
    pub(crate) dtype: DType,
    pub(crate) capacity: Capacity,
}

impl Embedding {
    pub(crate) fn new(model: &Model, id: EmbeddingId, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let site = model.embedding(id).ok_or(PlanError::Foreign)?.clone();
        let capacity = capacity.checked()?;
        check_outputs(&[site.hidden()], capacity, 0)?;
        Ok(Self { model: model.id(), site, dtype, capacity })
    }

    pub(crate) fn check(&self, step: StepShape, num_ids: usize, y: Shape) -> Result<(), OperandError> {
        let tokens = step.num_tokens;
        step.check(self.model, self.dtype, self.capacity, self.capacity.max_tokens)?;
        if num_ids != tokens {
            return Err(OperandError::Length { operand: "token_ids", got: num_ids, want: tokens });
        }
        y.expect("y", self.dtype, tokens, self.site.hidden())
    }
}

/// Trained rows of an embedding and of the head.
#[derive(Clone, Debug)]
pub(crate) struct TrainedRows {
    model: ModelId,
    pub(crate) site: RowsSite,
    pub(crate) dtype: DType,
    pub(crate) capacity: Capacity,
}

impl TrainedRows {
    pub(crate) fn new(model: &Model, id: RowsId, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        let site = model.rows(id).ok_or(PlanError::Foreign)?.clone();
        Ok(Self { model: model.id(), site, dtype, capacity: capacity.checked()? })
    }

    /// Of the embedding.
    pub(crate) fn check_embeddings(&self, step: StepShape, num_ids: usize, y: Shape) -> Result<(), OperandError> {
        let tokens = self.check_step(step)?;
        if num_ids != tokens {
            return Err(OperandError::Length { operand: "token_ids", got: num_ids, want: tokens });
        }
        y.expect("y", self.dtype, tokens, self.site.hidden())
    }

    /// Of the head.
    pub(crate) fn check_logits(&self, step: StepShape, x: Shape, y: Shape) -> Result<(), OperandError> {
        let tokens = self.check_step(step)?;
        x.expect("x", self.dtype, tokens, self.site.hidden())?;
        y.expect("y", self.dtype, tokens, self.site.outputs())
    }

    /// Returns the tokens.
    fn check_step(&self, step: StepShape) -> Result<usize, OperandError> {
        step.check(self.model, self.dtype, self.capacity, self.capacity.max_tokens)?;
        Ok(step.num_tokens)
    }
}
