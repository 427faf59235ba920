/// Memory and threads of a pool.
///
/// ```
/// use aril::pool::PoolConfig;
///
/// let config = PoolConfig::arena_bytes(8 << 30).host_bytes(64 << 30).loaders(4);
/// # let _ = config;
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Device memory for adapters, in bytes.
    pub arena_bytes: usize,
    /// Host memory for adapters, in bytes. On CUDA it is page-locked and allocated at once.
    pub host_bytes: usize,
    /// Adapters that are read at the same time, at least 1.
    pub loaders: usize,
    /// Threads that read and convert weights, for each of these adapters, at least 1. One thread packs a few GB/s.
    pub packers: usize,
    /// Whether blocks on the GPU are filled with NaN before an adapter is copied into them.
    pub is_poisoning: bool,
}

impl PoolConfig {
    /// An arena of `arena_bytes` bytes, as much host memory, two adapters that are read at the same time, and eight threads to pack each.
    pub const fn arena_bytes(arena_bytes: usize) -> Self {
        Self { arena_bytes, host_bytes: arena_bytes, loaders: 2, packers: 8, is_poisoning: false }
    }

    /// Sets the size of the host tier.
    #[must_use]
    pub const fn host_bytes(self, host_bytes: usize) -> Self {
        Self { host_bytes, ..self }
    }

    /// Sets the number of adapters that are read at the same time.
    #[must_use]
    pub const fn loaders(self, loaders: usize) -> Self {
        Self { loaders, ..self }
    }

    /// Sets the number of threads that read and convert the weights of an adapter.
    #[must_use]
    pub const fn packers(self, packers: usize) -> Self {
        Self { packers, ..self }
    }

    /// Fills blocks on the GPU with NaN before an adapter is copied into them. For tests: a kernel that reads a block while it is
    /// overwritten then gives NaN.
    #[must_use]
    pub const fn poisoning(self) -> Self {
        Self { is_poisoning: true, ..self }
    }
}
