//! The base model's kernels, which `build.rs` compiled from `kernels/kernels.cu`, and the sizes of their launches.

/// A fat binary with code for every architecture that aril was compiled for. Empty if aril was built without kernels.
pub const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// Threads of a block of `kernels.cu`.
pub const THREADS: u32 = 256;

/// Heads of a block of `rotate_and_append`: `kThreads / kHeadLanes`.
pub const HEADS: usize = THREADS as usize / 8;

/// Blocks of `kernels.cu` for a row of `bytes` bytes: each thread has 16.
pub fn parts(bytes: usize) -> usize {
    bytes.div_ceil(THREADS as usize * 16)
}

/// Launches of `attention.cuh`, for elements of 16 bits.
pub mod attention {
    /// The features of a head that there are kernels for.
    pub const DIMS: [usize; 3] = [32, 64, 128];

    /// Query heads of a kv head, at most: `kMaxGroup`.
    pub const MAX_GROUP: usize = 16;

    /// Threads of a block: `kDecodeThreads` and `kPrefillThreads`.
    pub const THREADS: u32 = 128;

    /// Rows of a tile: `kPrefillRows`.
    const PREFILL_ROWS: usize = 128;

    /// Splits of a sequence and keys of a split: `kMaxSplits` and `kMinSplitKeys`.
    const MAX_SPLITS: usize = 32;
    const MIN_SPLIT_KEYS: usize = 512;

    /// A kernel for heads of `dim` features.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    pub enum Kernel {
        /// For tokens that are the only ones of their sequence in a step.
        Decode,
        /// The same with more copies in flight, for so few blocks that one has a multiprocessor for itself.
        DeepDecode,
        /// For all other tokens.
        Prefill,
    }

    impl Kernel {
        /// All kernels.
        pub const ALL: [Self; 3] = [Self::Decode, Self::DeepDecode, Self::Prefill];

        /// Its name in `IMAGE`, without the element type.
        pub fn name(self, dim: usize) -> String {
            let name = match self {
                Self::Decode => "attend_decode",
                Self::DeepDecode => "attend_deep_decode",
                Self::Prefill => "attend_prefill",
            };
            format!("{name}_{dim}")
        }

        /// Dynamic shared memory of a block: `kDecodeSharedBytes` and `kPrefillSharedBytes`.
        pub fn shared_bytes(self, dim: usize) -> usize {
            dim * match self {
                Self::Decode => 512,
                Self::DeepDecode => 1280,
                Self::Prefill => 768,
            }
        }

        /// The decode kernel for a grid. Both give the same bits.
        pub fn for_decode((heads, splits): (usize, usize)) -> Self {
            // One for each multiprocessor of an H200.
            const FEW_BLOCKS: usize = 132;
            if heads * splits <= FEW_BLOCKS { Self::DeepDecode } else { Self::Decode }
        }
    }

    /// The most splits of a sequence of up to so many positions.
    pub fn max_splits(positions: usize) -> usize {
        positions.div_ceil(MIN_SPLIT_KEYS).min(MAX_SPLITS)
    }

    /// The grid of `attend_decode`. A block takes splits in turns, so any number of blocks gives the same bits.
    pub fn decode_grid(tokens: usize, kv_heads: usize, max_splits: usize) -> (usize, usize) {
        const BLOCKS: usize = 4096;
        const MIN_BLOCKS_PER_HEAD: usize = 4;
        let heads = tokens * kv_heads;
        (heads, BLOCKS.div_ceil(heads.max(1)).max(MIN_BLOCKS_PER_HEAD).min(max_splits))
    }

    /// The grid of `attend_prefill`.
    pub fn prefill_grid(tokens: usize, kv_heads: usize, group: usize) -> (usize, usize) {
        (kv_heads, tokens.div_ceil(PREFILL_ROWS / group))
    }
}

/// Launches of `delta_rule` of `delta_net.cuh`, whose blocks are those of sequences and value heads.
pub mod delta_net {
    /// Threads of a block: whole warps with a thread for each feature of a value, of which there are up to
    /// [`THREADS`](super::THREADS).
    pub fn threads(value_dim: usize) -> u32 {
        u32::try_from(value_dim.next_multiple_of(32)).unwrap_or(u32::MAX)
    }

    /// Dynamic shared memory of a block: the state of a value head, a query, a key, and a result.
    pub fn shared_bytes(key_dim: usize, value_dim: usize) -> usize {
        (key_dim * value_dim + 2 * key_dim + value_dim) * size_of::<f32>()
    }
}

/// Launches of `draw` of `sampling.cuh`.
pub mod sampling {
    /// Threads of a block: `kDrawThreads`.
    pub const THREADS: u32 = 512;

    /// Blocks of a row: `kDrawBlocks`.
    pub const BLOCKS: usize = 8;
}

/// Launches of `route_few` of `experts.cuh`: the router, `choose_experts` and `sort_routes` in one.
pub mod route {
    /// Threads of a block: `kRouterThreads`.
    pub const THREADS: u32 = 512;

    /// Eight for each of `kRouterTiles`. With more, the separate kernels are faster.
    const TOKENS: usize = 16;

    /// Whether it is for so many tokens, each with a row of `cols` elements of 16 bits: a thread for each route,
    /// `kFewExperts` and `kFewTopK`.
    pub fn fits(tokens: usize, experts: usize, top_k: usize, cols: usize) -> bool {
        let is_few = tokens <= TOKENS && tokens * top_k <= THREADS as usize && experts <= 256 && top_k <= 32;
        is_few && cols > 0 && cols.is_multiple_of(16)
    }

    /// Blocks: each has `kRouterExperts`.
    pub fn blocks(experts: usize) -> usize {
        experts.div_ceil(16)
    }
}

/// Launches of the grouped GEMMs of `experts.cuh`.
pub mod grouped_gemm {
    /// What a block of a kernel has.
    #[derive(Clone, Copy, Debug)]
    pub struct Tile {
        /// Rows, all of one expert.
        pub rows: usize,
        /// Outputs.
        pub outs: usize,
        /// Threads.
        pub threads: u32,
        /// Bytes of dynamic shared memory.
        pub shared_bytes: usize,
    }

    /// Of `grouped_gemm`, `grouped_gemm_int4` and `grouped_gemm_int8`: `kTileRows` and `kTileOuts`.
    pub const SIMPLE: Tile = Tile { rows: 32, outs: 64, threads: super::THREADS, shared_bytes: 0 };

    /// Of `grouped_gemm_16x32` and so on, by rows and outputs: `FewGemm`, `NarrowGemm`, `MiddleGemm` and `WideGemm`.
    /// All give the same bits.
    pub const TENSOR: [Tile; 4] =
        [tile(16, 32, 64, 6), tile(16, 64, 128, 5), tile(64, 128, 128, 3), tile(128, 128, 256, 3)];

    /// The first tiles of `TENSOR`, which have kernels with the activation, `grouped_gemm_silu_16x32` and `_16x64`.
    pub const ACTIVATED: usize = 2;

    /// Elements of 16 bits that `TENSOR` copies at a time: rows must be whole multiples.
    pub const VECTOR: usize = 8;

    /// The place in `TENSOR` of the kernel for so many routes: the one with the fewest rows of a tile that has room for
    /// the routes of an expert, if those to all ranks are spread evenly over `experts`.
    pub fn tensor_for(routes: usize, experts: usize) -> usize {
        // The blocks of the first one fill the device with few experts.
        const FEW_ROUTES: usize = 32;
        let fits = |tile: &Tile| routes <= tile.rows * experts;
        match routes {
            0..=FEW_ROUTES => 0,
            _ => 1 + TENSOR[1..].iter().position(fits).unwrap_or(TENSOR.len() - 2),
        }
    }

    /// Stages have 64 columns of 2 bytes.
    const fn tile(rows: usize, outs: usize, threads: u32, stages: usize) -> Tile {
        Tile { rows, outs, threads, shared_bytes: stages * (rows + outs) * 128 }
    }

    impl Tile {
        /// The grid for so many routes, of which only each expert's last tile may be partly filled.
        pub fn grid(&self, routes: usize, experts: usize, out_features: usize) -> (usize, usize) {
            (routes / self.rows + routes.min(experts), out_features.div_ceil(self.outs))
        }
    }
}
