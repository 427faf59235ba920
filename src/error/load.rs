use crate::{DType, Slot, adapter::AdapterError, group::GroupError, plan::PlanError};

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
    Device(#[from] super::LaunchError),
    /// The factors of a module in device memory do not match it.
    #[cfg(feature = "cuda")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
    #[error("the factors of `{module}`: {error}")]
    Factors {
        /// Path of the module.
        module: String,
        /// Why.
        error: Box<super::LaunchError>,
    },
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
