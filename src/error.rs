//! Errors of operations and weight tables on either backend.
//!
//! [`AdapterError`], [`PlanError`] and [`SpecError`](crate::model::SpecError) are in the modules that return them.
//!
//! A message is whole: it has the text of its cause, which the fields of the variant hold. So
//! [`source`](std::error::Error::source) returns `None`, and a report of the chain shows no text twice.

use std::any::Any;

#[cfg(feature = "cuda")]
mod launch;

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub use self::launch::LaunchError;
use crate::{
    DType, Slot, adapter::AdapterError, group::GroupError, model::Activation, plan::PlanError, pool::StreamId,
};

/// The message of a panic that was caught. A payload without one is not dropped, because that could panic, too.
pub(crate) fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let text = payload.downcast::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|payload| payload.downcast::<String>().map(|text| *text));
    text.unwrap_or_else(|payload| {
        std::mem::forget(payload);
        String::new()
    })
}

/// A failed load. The slot and the table are unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A weight cannot be read, or has no finite value in the table's element type.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The CUDA driver or a launch failed.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[error(transparent)]
    Device(#[from] LaunchError),
    /// The arena has no free block of the adapter's size.
    #[error(
        "the adapter needs {bytes} contiguous bytes, but the largest free block of the weight table has {largest_gap}"
    )]
    Full {
        /// Size of the adapter, in bytes.
        bytes: usize,
        /// Size of the largest free block, in bytes.
        largest_gap: usize,
    },
    /// The ranks of a group did not load the adapter.
    #[error(transparent)]
    Group(Box<GroupError>),
    /// The thread that read the adapter panicked.
    #[error("the thread that read the adapter panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The kernels do not support the table or a layer. For engines that create them while they load.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The slot does not exist, or the adapter does not match the table.
    #[error(transparent)]
    Slot(#[from] SlotError),
}

/// A slot that does not exist or has changed, or an adapter that does not match the table.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The adapter has been unloaded or replaced.
    #[error("the adapter of {slot} has been unloaded or replaced, or is in another table or pool")]
    Gone {
        /// The slot that it was in.
        slot: Slot,
    },
    /// A pool takes only a table without adapters.
    #[error("the table has {adapters} adapters, but that of a pool must be empty when the pool is made")]
    Loaded {
        /// Number of loaded slots.
        adapters: usize,
    },
    /// The slot is not below the number of slots.
    #[error("slot {slot} is not one of the table's {num_slots} slots")]
    NoSuchSlot {
        /// Index of the slot given.
        slot: usize,
        /// Slots of the table.
        num_slots: usize,
    },
    /// The reservation was made for the image of another adapter, or of another size.
    #[error("the image, of {bytes} bytes, is not the one that {reserved} bytes were reserved for")]
    OtherImage {
        /// Size of the image, in bytes.
        bytes: usize,
        /// Size of the reservation, in bytes.
        reserved: usize,
    },
    /// The reservation was made in another table.
    #[error("the adapter was loaded into memory reserved in another table")]
    OtherTable,
    /// The table belongs to an adapter pool, which alone loads and unloads.
    #[error("the table belongs to an adapter pool, which alone loads and unloads adapters")]
    Pooled,
    /// The adapter was planned for another model, or for another tensor-parallel rank.
    #[error("the adapter was planned for another model or tensor-parallel rank than the table's")]
    Model,
    /// The adapter was planned for another element type.
    #[error("the adapter was planned as {got}, but the table holds {want}")]
    DType {
        /// The adapter's element type.
        got: DType,
        /// The table's element type.
        want: DType,
    },
    /// The adapter's largest rank exceeds the table's.
    #[error("the adapter has rank {rank}, but the table accepts ranks up to {max_rank}")]
    Rank {
        /// The adapter's largest rank.
        rank: usize,
        /// The largest rank that the table accepts.
        max_rank: usize,
    },
}

/// An operand that does not match the layer or the step. Nothing was computed or enqueued.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OperandError {
    /// The activation requires a gate, and the experts are ungated.
    #[error("{activation:?} requires a gate, but the experts are ungated")]
    Activation {
        /// The activation given.
        activation: Activation,
    },
    /// The bias does not have one element for each output of the layer.
    #[error("`bias` has {got} elements, but the layer has {want} outputs")]
    Bias {
        /// Its length.
        got: usize,
        /// Outputs of all slices of the layer.
        want: usize,
    },
    /// A batch, its routes or a buffer exceeds the size that the layer was planned or memory was allocated for.
    #[error("{what} must be at most {max}, not {got}")]
    Capacity {
        /// What is too large.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The largest allowed size.
        max: usize,
    },
    /// The element type of an operand is not that of the table.
    #[error("`{operand}` is {got}, but must be {want}")]
    DType {
        /// Name of the operand.
        operand: &'static str,
        /// Its element type.
        got: DType,
        /// The table's element type.
        want: DType,
    },
    /// The matrix extends past the end of its buffer.
    #[error("`{operand}` is [{rows}, {cols}] with row stride {row_stride}, but its buffer has only {len} elements")]
    Extent {
        /// Name of the operand.
        operand: &'static str,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Distance between rows, in elements.
        row_stride: usize,
        /// Length of the buffer, in elements.
        len: usize,
    },
    /// The layer is not a gate and an up of equal size.
    #[error(
        "an activation needs a layer of two slices of equal size, gate and up, but the slices have {outputs:?} outputs"
    )]
    GateUp {
        /// Outputs of each slice.
        outputs: Vec<usize>,
    },
    /// An operand does not have one element per token.
    #[error("`{operand}` has {got} elements, but the batch has {want} tokens")]
    Length {
        /// Name of the operand.
        operand: &'static str,
        /// Its number of elements.
        got: usize,
        /// Tokens in the batch.
        want: usize,
    },
    /// The rows of an operand are not sufficiently aligned.
    #[error("each row of `{operand}` must begin at a multiple of {alignment} bytes, but rows are {stride_bytes} apart")]
    MisalignedRows {
        /// Name of the operand.
        operand: &'static str,
        /// The required alignment in bytes.
        alignment: usize,
        /// Distance between the beginnings of two rows, in bytes.
        stride_bytes: usize,
    },
    /// The batch has adapters, which `cuda::Stack::place` has not brought into the stack in this step.
    #[error("the adapters of the step's batch are not in the stack, or not placed there in this step")]
    NotPlaced,
    /// The stack is of another table than the step.
    #[error("the stack is of another table than the step")]
    OtherTable,
    /// The layer is not one of the stack's.
    #[error("the layer is not in the stack")]
    NotStacked,
    /// A token's slot is not one of the table's.
    #[error("the batch names {slot}, which is not one of the {num_slots} slots")]
    NoSuchSlot {
        /// The slot.
        slot: Slot,
        /// Slots of the routing and the table.
        num_slots: usize,
    },
    /// The stream belongs to another pool.
    #[error("the pool has no stream {stream:?}")]
    NoSuchStream {
        /// The stream given.
        stream: StreamId,
    },
    /// The batch of a pool's step names a slot that no lease of the stream holds: its lease has ended, also if another
    /// adapter is leased there now, or it is a slot of another pool or of a table.
    #[error(
        "the batch names {slot}, which no lease of the pool's stream holds: its lease has ended, or is of another pool"
    )]
    NotLeased {
        /// The slot.
        slot: Slot,
    },
    /// The batch names a slot whose adapter has been unloaded or replaced, or that another table or a pool has handed
    /// out.
    ///
    /// `cuda::WeightTable::step` says when an operation returns this.
    #[error("the batch names {slot}, whose adapter has been unloaded or replaced, or is in another table or pool")]
    NotLoaded {
        /// The slot.
        slot: Slot,
    },
    /// The layer and the weights belong to different models, or to different tensor-parallel ranks. Ids belong to the
    /// one [`ModelSpec`](crate::model::ModelSpec) object that they were added to, even if another one describes equal
    /// layers.
    #[error(
        "the layer and the weights belong to different models or tensor-parallel ranks: a layer belongs to the one \
         `ModelSpec` object that it was added to"
    )]
    Model,
    /// The rows of the matrix overlap.
    #[error("`{operand}` has row stride {row_stride}, but must have at least its {cols} columns")]
    Overlap {
        /// Name of the operand.
        operand: &'static str,
        /// Columns.
        cols: usize,
        /// Distance between rows, in elements.
        row_stride: usize,
    },
    /// The kernels do not support the layer or the capacity.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The routing was made for tables of another number of slots.
    #[error("the routing has {routing} slots, but the table has {table}")]
    NumSlots {
        /// Slots of the routing.
        routing: usize,
        /// Slots of the table.
        table: usize,
    },
    /// The table belongs to a pool, whose steps keep its adapters in their slots.
    #[error("the table belongs to an adapter pool, which alone starts steps: call `step` of the pool")]
    Pooled,
    /// The operand is given twice.
    #[error("{operand} is given twice")]
    Twice {
        /// Name of the operand.
        operand: &'static str,
    },
    /// An operand does not have one element per route.
    #[error("`{operand}` has {got} elements, but there are {want} routes")]
    Routes {
        /// Name of the operand.
        operand: &'static str,
        /// Its number of elements.
        got: usize,
        /// Routes of the router's choice.
        want: usize,
    },
    /// The shape of an operand does not match the layer and the batch.
    #[error("`{operand}` is [{rows}, {cols}], but must be [{want_rows}, {want_cols}]")]
    Shape {
        /// Name of the operand.
        operand: &'static str,
        /// Its rows.
        rows: usize,
        /// Its columns.
        cols: usize,
        /// Required rows.
        want_rows: usize,
        /// Required columns.
        want_cols: usize,
    },
    /// An operand is not one matrix for each slice of the layer, nor, unless it is W, one of all slices.
    #[error("`{operand}` is {got} matrices, but the layer has {want} slices")]
    Slices {
        /// Name of the operand.
        operand: &'static str,
        /// Number of matrices given.
        got: usize,
        /// Number of slices.
        want: usize,
    },
    /// The router's choice and the batch differ in their number of tokens.
    #[error("the router chose experts for {got} tokens, but the batch has {want}")]
    Tokens {
        /// Tokens of the router's choice.
        got: usize,
        /// Tokens of the batch.
        want: usize,
    },
    /// The number of expert ids is not a multiple of the experts per token.
    #[error("{ids} expert ids cannot be split into tokens of {top_k} each")]
    TopK {
        /// Number of expert ids.
        ids: usize,
        /// Experts per token.
        top_k: usize,
    },
}

impl OperandError {
    /// Rejects a size above `max`.
    pub(crate) fn within(what: &'static str, got: usize, max: usize) -> Result<(), Self> {
        if got > max { Err(Self::Capacity { what, got, max }) } else { Ok(()) }
    }
}
