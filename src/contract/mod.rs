//! What the operations demand of their layer, their step and their operands: once, for both backends.
//!
//! Each type here is a layer of a model, planned for an element type and a capacity. `new` refuses layers that no kernel supports,
//! `check` refuses operands. The checks have one order: the layer against the step, the batch's size, then the operands from input to
//! output; of an operand its element type, its shape, and the alignment of its rows.

mod dense;
pub(crate) mod experts;
#[macro_use]
mod operations;

pub(crate) use self::{
    dense::{Embedding, FullyShardedLinear, FusedLinear, Linear},
    experts::{Experts, ExpertsForm, check_of_routes, check_top_k},
};
use crate::{
    DType, Slices,
    error::OperandError,
    extent::Extent,
    model::{ModelId, SliceSite},
    plan::{Capacity, PlanError},
};

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
        OperandError::within("the batch's tokens", self.num_tokens, max_tokens)
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
        // Cannot overflow: the rows fit in memory. The stride of a single row is unused and may have any value.
        let stride_bytes = self.extent.row_stride * self.dtype.bytes();
        if self.extent.rows < 2 || stride_bytes.is_multiple_of(alignment) {
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
    use crate::model::{ModelSpec, TpRank};

    /// A table of an engine has the ranks that the engine says. Without any, a launch would have no blocks.
    #[test]
    fn tables_have_ranks_of_the_capacity() {
        let model = ModelSpec::new().shard(TpRank::SINGLE).unwrap().id();
        let capacity = Capacity::tokens(1).slots(1).rank(8);
        let check = |max_rank| {
            let step = StepShape { model, dtype: DType::BF16, num_slots: 1, max_rank, num_tokens: 1 };
            step.check(model, DType::BF16, capacity, 1).map_err(|error| error.to_string())
        };
        assert_eq!([1, 8].map(check), [Ok(()), Ok(())]);
        assert_eq!(check(0).unwrap_err(), "the weights' max_rank is 0, but must be 1 to 8");
        assert_eq!(check(9).unwrap_err(), "the weights' max_rank is 9, but must be at most 8");
    }
}
