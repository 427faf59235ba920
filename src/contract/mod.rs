//! What the operations demand of their layer, their step and their operands: once, for both backends.
//!
//! Each type here is a layer of a model, planned for an element type and a capacity. `new` refuses layers that no
//! kernel supports, `check` refuses operands. The checks have one order: the layer against the step, the batch's size,
//! then the operands from input to output; of an operand its element type, its shape, and the alignment of its rows.

mod dense;
pub(crate) mod experts;

pub(crate) use self::{
    dense::{Embedding, FullyShardedLinear, FusedLinear, Linear, TrainedRows},
    experts::{Experts, ExpertsForm, check_of_routes, check_top_k},
};
use crate::{
    DType, Slices,
    error::OperandError,
    extent::Extent,
    model::{ModelId, SliceSite},
    plan::{Capacity, PlanError},
};

/// What an operation computes, as the documentation of both backends says it.
macro_rules! doc_of {
    (linear_add_delta) => {
        r"`y[t] += scaling · B (A x[t])`, for every token `t` whose slot has an adapter of this layer. All other rows of
`y` keep every bit.

`x` is `[tokens, in_features]`. `y` is `[tokens, out_features]`, or a matrix `[tokens, outputs]` of each slice
([`Slices`](crate::Slices)): one launch either way. In a row-parallel layer, `y` is this rank's partial sum: call this
before the all-reduce."
    };
    (linear_write_delta) => {
        r"`y[t] = scaling · B (A x[t])`, or zero for tokens and slices without an adapter. For a base GEMM that
accumulates into `y` (`beta = 1`). Does not read `y`."
    };
    (linear_silu_mul) => {
        r"`out[t] = silu(gate) · up`, where gate and up are the slices of `y[t] + scaling · B v`, with `v` from the
layer's `shrink` in the step. For every token, with or without an adapter, in `f32` with one rounding. Replaces `expand`
and the base's activation, and saves a pass over `y`.

The layer has two slices of equal size, gate and up. `y` is `[tokens, out_features]`, or gate and up as matrices of
their own ([`Slices`](crate::Slices)). `out` is `[tokens, out_features / 2]`.

It is for batches of more than 512 tokens at ranks up to 128. Other batches have the same bits, and a plainer kernel: an
expand and the engine's own activation are as fast, or faster."
    };
    (fused_linear_forward) => {
        r"`y[t] = x[t] Wᵀ + bias + scaling · B (A x[t])`. The last term is omitted for tokens without an adapter. Does
not read `y`.

`x` is `[tokens, in_features]`. `y` is `[tokens, out_features]`, or a matrix `[tokens, outputs]` of each slice
([`Slices`](crate::Slices)). Sums are `f32`, rounded once. In a row-parallel layer, `y` is this rank's partial sum; only
one rank may have the bias."
    };
    (embedding_add_delta) => {
        r"`y[t] += scaling · B A[:, token_ids[t]]`, for every token `t` whose slot has an adapter of this embedding and
whose id is in the vocabulary. All other rows of `y` keep every bit.

`token_ids` is `[tokens]`, relative to the rank's first row
([`EmbeddingSite::range`](crate::model::EmbeddingSite::range)). `y` is `[tokens, hidden]`; of a vocabulary-parallel
embedding it is this rank's partial sum."
    };
    (rows_replace_embeddings) => {
        r"`y[t] = R[token_ids[t]]`, for every token `t` whose slot has a trained row `R` of this id. All other rows of
`y` keep every bit. A token's scale makes no difference.

Comes behind the base's embedding and its delta, and before the engine's all-reduce. `token_ids` is `[tokens]`, relative
to the rank's first row ([`EmbeddingSite::range`](crate::model::EmbeddingSite::range)). `y` is `[tokens, hidden]`; of a
vocabulary-parallel embedding it is this rank's partial sum."
    };
    (rows_replace_logits) => {
        r"`y[t, id] = x[t] · R[id]`, for every token `t` and every trained row `R` of the head that its slot has. All
other elements of `y` keep every bit. Sums are `f32`, rounded once. A token's scale makes no difference.

Comes behind the base's head and its delta. `x` is `[tokens, hidden]`. `y` has the columns of this rank's head,
`[tokens, outputs]`."
    };
    (experts_add_gate_up_delta) => {
        r"Adds the deltas of gate and up to the rows of local routes. Rows without an adapter keep every bit.

`x` is `[tokens, hidden]`. `y` is `[routes, gate_up]`, with gate and up in the order of
[`ExpertsSite::halves`](crate::model::ExpertsSite::halves). With [`TopK::on_input`](crate::routing::TopK::on_input), `x`
is not multiplied by the router's weights; the deltas are."
    };
    (experts_write_gate_up_delta) => {
        r"Like [`add_gate_up_delta`](Self::add_gate_up_delta), but overwrites `y`: with the delta, or with zero for
routes and slices that have no adapter or are not local. For a base GEMM that accumulates into `y`. Rows that belong to
no route are unchanged."
    };
    (experts_activate) => {
        r"`out[row] = activation(y[row] + delta)` for all local routes, with or without an adapter, in `f32` with one
rounding. Replaces the base's activation and saves a pass over `y`.

`x` is `[tokens, hidden]`. `y` is the output `[routes, gate_up]` of the base's gate-up, as for
[`add_gate_up_delta`](Self::add_gate_up_delta). `out` is `[routes, inter]`."
    };
    (experts_add_down_delta) => {
        r"Adds the deltas of down to the rows of local routes, before the combine. Rows without an adapter keep every
bit.

`x` is the activated input `[routes, inter]`. `y` is `[routes, hidden]`, without the router's weights. With
[`TopK::on_rows`](crate::routing::TopK::on_rows), `y` includes the weights, and the deltas are multiplied by them."
    };
    (experts_write_down_delta) => {
        r"Like [`add_down_delta`](Self::add_down_delta), but overwrites `y`: with the delta, or with zero for routes
that have no adapter or are not local. For a base GEMM that accumulates into `y`. Rows that belong to no route are
unchanged."
    };
    (experts_add_combined_delta) => {
        r"Adds the deltas of down after the base's combine: `y[t]` gets the sum over the local routes of token `t`, each
multiplied by [`output_weight`](crate::routing::TopK::output_weight) · [`row_weight`](crate::routing::TopK::row_weight).
Rows without an adapter keep every bit.

`x` is the activated input `[routes, inter]`, `y` is `[tokens, hidden]`."
    };
    (experts_combine) => {
        r"`out[t] = Σ output_weight · (y[row] + delta)` over the local routes of token `t`, or zero if there are none,
for every token with or without an adapter, in `f32` with one rounding. Replaces the base's combine. See
[`output_weight`](crate::routing::TopK::output_weight).

`x` is the activated input `[routes, inter]`. `y` is the output `[routes, hidden]` of the base's down, without the
router's weights; with [`TopK::on_rows`](crate::routing::TopK::on_rows), it includes them, and the deltas are multiplied
by them. `out` is `[tokens, hidden]`."
    };
}

/// The table and the batch of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShape {
    pub(crate) model: ModelId,
    pub(crate) dtype: DType,
    pub(crate) num_slots: usize,
    pub(crate) max_rank: usize,
    pub(crate) num_tokens: usize,
}

impl StepShape {
    /// Rejects a layer of another model, element type or capacity, and a batch of more than `max_tokens` tokens.
    fn check(&self, model: ModelId, dtype: DType, capacity: Capacity, max_tokens: usize) -> Result<(), OperandError> {
        if self.model != model {
            return Err(OperandError::Model);
        }
        if self.dtype != dtype {
            return Err(OperandError::DType { operand: "weights", got: self.dtype, want: dtype });
        }
        OperandError::within("the weights' num_slots", self.num_slots, capacity.num_slots)?;
        OperandError::within("the weights' max_rank", self.max_rank, capacity.max_rank)?;
        if self.max_rank == 0 {
            return Err(PlanError::Limit { what: "the weights' max_rank", value: 0, max: capacity.max_rank }.into());
        }
        OperandError::within("the batch's tokens for this layer", self.num_tokens, max_tokens)
    }
}

/// The element type and the extent of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) dtype: DType,
    pub(crate) extent: Extent,
}

impl Shape {
    /// Rejects another element type or shape.
    pub(crate) fn expect(
        &self,
        operand: &'static str,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<(), OperandError> {
        if self.dtype != dtype {
            return Err(OperandError::DType { operand, got: self.dtype, want: dtype });
        }
        self.extent.expect(operand, rows, cols)
    }

    /// Rejects rows that do not all begin at multiples of `alignment` bytes, if the first one does.
    fn expect_aligned_rows(&self, operand: &'static str, alignment: usize) -> Result<(), OperandError> {
        // The stride of a single row is unused and may have any value.
        if self.extent.rows < 2 {
            return Ok(());
        }
        // Cannot overflow: the rows fit in memory.
        let stride_bytes = self.extent.row_stride * self.dtype.bytes();
        if stride_bytes.is_multiple_of(alignment) {
            Ok(())
        } else {
            Err(OperandError::MisalignedRows { operand, alignment, stride_bytes })
        }
    }
}

impl Slices<Shape> {
    /// Rejects what is neither one matrix of all outputs of these slices, nor one of each slice's.
    fn expect(&self, dtype: DType, rows: usize, slices: &[SliceSite]) -> Result<(), OperandError> {
        let cols = |slice: &SliceSite| slice.out_features();
        match self.len() {
            1 => self.named().try_for_each(|(y, shape)| shape.expect(y, dtype, rows, slices.iter().map(cols).sum())),
            got if got == slices.len() => {
                self.named().zip(slices).try_for_each(|((y, shape), slice)| shape.expect(y, dtype, rows, cols(slice)))
            }
            got => Err(OperandError::Slices { operand: "y", got, want: slices.len() }),
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::model::{Linear, ModelSpec, Parallel, Shard, TpRank};

    /// A table of an engine has the slots and the ranks that the engine says. Without any rank, a launch would have no
    /// thread blocks.
    #[test]
    fn tables_have_slots_and_ranks_of_the_capacity() {
        let model = ModelSpec::new().shard(TpRank::SINGLE).unwrap().id();
        let capacity = Capacity::tokens(1).slots(2).rank(8);
        let check = |num_slots, max_rank| {
            let step = StepShape { model, dtype: DType::BF16, num_slots, max_rank, num_tokens: 1 };
            step.check(model, DType::BF16, capacity, 1).map_err(|error| error.to_string())
        };
        assert_eq!([check(1, 1), check(2, 8)], [Ok(()), Ok(())]);
        assert_eq!(check(1, 0).unwrap_err(), "the weights' max_rank is 0, but must be 1 to 8");
        assert_eq!(check(1, 9).unwrap_err(), "the weights' max_rank must be at most 8, not 9");
        assert_eq!(check(3, 8).unwrap_err(), "the weights' num_slots must be at most 2, not 3");
    }

    /// What ranks exchange has the width of the step's table, which may have lower ranks than the layer allows.
    #[test]
    fn exchanges_are_those_of_the_table() {
        let mut spec = ModelSpec::new();
        let id = spec.linear(Linear::new("", Parallel::Column, 8).slice("m", 8)).unwrap();
        let model = spec.shard(Shard::new(TpRank::new(0, 2).unwrap()).fully_sharded()).unwrap();
        let capacity = Capacity::tokens(3).slots(1).rank(8);
        let layer = FullyShardedLinear::new(&model, id, DType::BF16, capacity).unwrap();
        let step = StepShape { model: model.id(), dtype: DType::BF16, num_slots: 1, max_rank: 4, num_tokens: 3 };
        let shape = |dtype, rows, cols| Shape { dtype, extent: Extent { rows, cols, row_stride: cols } };
        let x = shape(DType::BF16, 3, 8);
        assert_eq!(layer.check_shrink(step, x, shape(DType::F32, 3, 2)), Ok(()));
        assert!(layer.check_shrink(step, x, shape(DType::F32, 3, 4)).is_err());
        let y = Slices::from_iter([shape(DType::BF16, 3, 4)]);
        assert_eq!(layer.check_expand(step, shape(DType::F32, 6, 2), &y), Ok(()));
        assert!(layer.check_expand(step, shape(DType::F32, 6, 4), &y).is_err());
    }
}
