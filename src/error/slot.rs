use crate::{DType, Slot};

/// A slot that does not exist or has changed, or an adapter that no slot of the table takes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The adapter is no longer in the slot: it was unloaded, or another was loaded.
    #[error("the adapter of {slot} (generation {generation}) has been unloaded or replaced")]
    Gone {
        /// The slot it was in.
        slot: Slot,
        /// The generation of the slot's content that was meant.
        generation: u64,
    },
    /// There is no such slot, or it is the base model's.
    #[error("{slot} is not one of the table's {num_slots}")]
    NoSuchSlot {
        /// The slot given.
        slot: Slot,
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
