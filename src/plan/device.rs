/// What plans ask of a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Device {
    /// Major and minor compute capability.
    pub compute_capability: (i32, i32),
    /// Multiprocessors: `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`. Grids of linear layers and experts are sized for so many.
    pub multiprocessors: usize,
    /// The most shared memory that a thread block may have, in bytes: `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
    pub shared_bytes: usize,
}

impl Device {
    /// NVIDIA H100 SXM and H200.
    pub const H100: Self = Self { compute_capability: (9, 0), multiprocessors: 132, shared_bytes: 227 << 10 };

    /// With one multiprocessor, if it has none.
    pub(super) fn with_one(self) -> Self {
        Self { multiprocessors: self.multiprocessors.max(1), ..self }
    }
}
