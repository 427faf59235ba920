/// What plans ask of a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Device {
    /// Major and minor compute capability.
    pub compute_capability: (i32, i32),
    /// Multiprocessors: `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`. Grids of linear layers and experts are sized for so many.
    pub multiprocessors: usize,
    /// The most shared memory that a thread block may have, in bytes: `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
    pub shared_bytes: usize,
    /// Shared memory of a multiprocessor, in bytes: `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR`.
    pub shared_bytes_per_multiprocessor: usize,
    /// Of which the system takes so many for each thread block: `CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK`.
    pub reserved_shared_bytes: usize,
}

impl Device {
    /// NVIDIA H100 SXM and H200.
    pub const H100: Self = Self {
        compute_capability: (9, 0),
        multiprocessors: 132,
        shared_bytes: 227 << 10,
        shared_bytes_per_multiprocessor: 228 << 10,
        reserved_shared_bytes: 1 << 10,
    };

    /// With one multiprocessor, if it has none.
    pub(super) fn with_one(self) -> Self {
        Self { multiprocessors: self.multiprocessors.max(1), ..self }
    }
}
