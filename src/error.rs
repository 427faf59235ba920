//! What can be wrong with the operands of an operation, on either backend.

use crate::DType;

/// An operand that does not fit. Nothing was computed or enqueued.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandError {
    /// The experts have no gate, and the activation is none without.
    #[error("{activation:?} needs a gate, which the experts do not have")]
    Activation {
        /// The activation given.
        activation: crate::model::Activation,
    },
    /// The weights are of another element type than the operation.
    #[error("`{operand}` is {got}, but the operation computes on {want}")]
    DType {
        /// Which operand.
        operand: &'static str,
        /// Its element type.
        got: DType,
        /// The operation's.
        want: DType,
    },
    /// The matrix reaches past the memory given for it.
    #[error(
        "`{operand}` of {rows} rows of {cols}, {row_stride} apart, does not fit in the {len} elements given for it"
    )]
    Extent {
        /// Which operand.
        operand: &'static str,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Distance between rows, in elements.
        row_stride: usize,
        /// Elements of the memory.
        len: usize,
    },
    /// Two lengths that must agree do not.
    #[error("`{operand}` has {got} elements, but the batch has {want} tokens")]
    Length {
        /// Which operand.
        operand: &'static str,
        /// Its length.
        got: usize,
        /// The batch's tokens.
        want: usize,
    },
    /// The weights were made for a model with other layers.
    #[error("the weights were made for a model that does not have this layer in this place")]
    Model,
    /// The rows of the matrix overlap.
    #[error("`{operand}` has rows of {cols} elements only {row_stride} apart")]
    Overlap {
        /// Which operand.
        operand: &'static str,
        /// Columns.
        cols: usize,
        /// Distance between rows, in elements.
        row_stride: usize,
    },
    /// The router's choices do not say the same of each route.
    #[error("`{operand}` has {got} elements, but there are {want} routes")]
    Routes {
        /// Which operand.
        operand: &'static str,
        /// Its length.
        got: usize,
        /// Tokens times the experts that each has chosen.
        want: usize,
    },
    /// The matrix has another shape than the layer and the batch ask for.
    #[error("`{operand}` is [{rows}, {cols}], but must be [{want_rows}, {want_cols}]")]
    Shape {
        /// Which operand.
        operand: &'static str,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// Rows it must have.
        want_rows: usize,
        /// Columns it must have.
        want_cols: usize,
    },
    /// The router chose for other tokens than the batch has.
    #[error("the router chose for {got} tokens, but the batch has {want}")]
    Tokens {
        /// Tokens of the choices.
        got: usize,
        /// Tokens of the batch.
        want: usize,
    },
    /// The router's choices are not of whole tokens.
    #[error("{ids} expert ids are not those of whole tokens with {top_k} each")]
    TopK {
        /// The ids given.
        ids: usize,
        /// How many a token has.
        top_k: usize,
    },
}

/// An adapter that cannot be loaded into a slot, or a table that cannot be made so.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// There is no such slot, or it is the base model's.
    #[error("slot {slot:?} is not one of the table's {num_slots}")]
    NoSuchSlot {
        /// The slot given.
        slot: crate::Slot,
        /// Slots of the table.
        num_slots: usize,
    },
    /// The adapter was planned for a model with other layers, or for another tensor-parallel rank.
    #[error("the adapter was planned for another model or tensor-parallel rank than the table was made for")]
    Model,
    /// The adapter was planned for another element type.
    #[error("the adapter was planned as {got}, but the table holds {want}")]
    DType {
        /// The adapter's element type.
        got: DType,
        /// The table's.
        want: DType,
    },
    /// A factor has a larger rank than the table was made for.
    #[error("the adapter has a factor of rank {rank}, but the table was made for ranks up to {max_rank}")]
    Rank {
        /// The adapter's largest rank.
        rank: usize,
        /// The table's limit.
        max_rank: usize,
    },
}
