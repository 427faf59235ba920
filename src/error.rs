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
    /// An operand is of another element type than the table.
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
    /// The layer and the step's weights are of different models.
    #[error("the layer and the weights were made for different models or tensor-parallel ranks")]
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

/// An adapter that could not be loaded. The slot and the table are as they were.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A weight cannot be read or represented.
    #[error(transparent)]
    Adapter(#[from] crate::adapter::AdapterError),
    /// The device or its driver refused.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[error(transparent)]
    Device(#[from] crate::cuda::LaunchError),
    /// The table's memory has no room for the adapter.
    #[error("the weight table has no {bytes} contiguous bytes free for the adapter; the largest gap is {largest_gap}")]
    Full {
        /// Bytes that the adapter takes.
        bytes: usize,
        /// Bytes of the largest free region.
        largest_gap: usize,
    },
    /// No kernel takes the problem: for an engine that makes its table and its layers as it loads.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
    /// The adapter does not fit the table.
    #[error(transparent)]
    Slot(#[from] SlotError),
}

/// A slot that does not exist or has changed, or an adapter that no slot of the table takes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The adapter is no longer in the slot: it was unloaded, or another was loaded.
    #[error("the adapter of {slot} (generation {generation}) has been unloaded or replaced")]
    Gone {
        /// The slot it was in.
        slot: crate::Slot,
        /// The generation of the slot's content that was meant.
        generation: u64,
    },
    /// There is no such slot, or it is the base model's.
    #[error("{slot} is not one of the table's {num_slots}")]
    NoSuchSlot {
        /// The slot given.
        slot: crate::Slot,
        /// Slots of the table.
        num_slots: usize,
    },
    /// The memory was reserved for another adapter.
    #[error("the image has {bytes} bytes, but {reserved} were reserved for it")]
    OtherImage {
        /// Bytes of the image given.
        bytes: usize,
        /// Bytes reserved.
        reserved: usize,
    },
    /// The memory was reserved in another table.
    #[error("the adapter was filled into the memory of another table")]
    OtherTable,
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
