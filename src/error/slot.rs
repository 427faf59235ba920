use crate::{DType, Slot};

/// A slot that does not exist or has changed, or an adapter that does not match the table.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// The adapter has been unloaded or replaced.
    #[error("the adapter of {slot} (generation {generation}) has been unloaded or replaced")]
    Gone {
        /// The slot that it was in.
        slot: Slot,
        /// The generation of the slot's content that was expected.
        generation: u64,
    },
    /// A pool takes only a table without adapters.
    #[error("the table has {adapters} adapters, but that of a pool must be empty when the pool is made")]
    Loaded {
        /// Number of loaded slots.
        adapters: usize,
    },
    /// The slot is [`Slot::BASE`] or not below the number of slots.
    #[error("{slot} is not one of the table's {num_slots} slots")]
    NoSuchSlot {
        /// The slot given.
        slot: Slot,
        /// Slots of the table.
        num_slots: usize,
    },
    /// The reservation was made for an image of another size.
    #[error("the image has {bytes} bytes, but {reserved} bytes were reserved")]
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
