//! The kernels of `kernels.cu`, compiled, and the sizes of their launches.

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

/// Launches of `draw` of `sampling.cuh`.
pub mod sampling {
    /// Threads of a block: `kDrawThreads`.
    pub const THREADS: u32 = 512;

    /// Blocks of a row: `kDrawBlocks`.
    pub const BLOCKS: usize = 8;
}

/// Launches of `route_tokens` of `experts.cuh`, which does what `choose_experts` and `sort_routes` do, and of `route_few`, which also
/// computes the router's scores.
pub mod route {
    /// Threads of the block of `route_tokens`: `kRouteThreads`.
    pub const THREADS: u32 = 1024;

    /// Threads of a block of `route_few`: `kRouterThreads`.
    pub const FEW_THREADS: u32 = 512;

    /// Whether `route_tokens` has room for them: a thread for each route.
    pub fn fits(tokens: usize, experts: usize, top_k: usize) -> bool {
        tokens * top_k <= THREADS as usize && has_room(experts, top_k)
    }

    /// Whether `route_few` has room for them and takes rows of `cols` elements of 16 bits: `kRouterTiles`.
    pub fn fits_few(tokens: usize, experts: usize, top_k: usize, cols: usize) -> bool {
        let is_few = tokens <= 32 && tokens * top_k <= FEW_THREADS as usize;
        is_few && has_room(experts, top_k) && cols > 0 && cols.is_multiple_of(16)
    }

    /// Blocks of `route_few`: each has `kRouterExperts`.
    pub fn few_blocks(experts: usize) -> usize {
        experts.div_ceil(16)
    }

    /// `kMaxRouteExperts`, and a lane for each expert of a token.
    fn has_room(experts: usize, top_k: usize) -> bool {
        experts <= 256 && top_k <= 32
    }
}

/// Launches of the grouped GEMMs of `experts.cuh` and `stream.cuh`.
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

    /// Of `grouped_gemm` and `grouped_gemm_int4`: `kTileRows` and `kTileOuts`.
    pub const SIMPLE: Tile = Tile { rows: 32, outs: 64, threads: super::THREADS, shared_bytes: 0 };

    /// Of `grouped_gemm_16`, `_64` and `_128`: `NarrowGemm`, `MiddleGemm` and `WideGemm`.
    pub const TENSOR: [Tile; 3] = [tile(16, 64, 128, 5), tile(64, 128, 128, 3), tile(128, 128, 256, 3)];

    /// Launches of `stream_gemm` and `stream_gemm_silu`: `StreamGemm`. Each multiprocessor has one block.
    pub mod stream {
        /// Threads of a block: `kThreadsPerBlock`.
        pub const THREADS: u32 = 128;

        /// Bytes of dynamic shared memory of a block: `kSharedBytes`.
        pub const SHARED_BYTES: usize = 4 * 8 * (16 + 32) * 128;

        /// Bytes of all its shared memory, at most.
        pub const ALL_SHARED_BYTES: usize = SHARED_BYTES + (10 << 10);

        /// The most experts: `kMaxExperts`.
        const MAX_EXPERTS: usize = 1024;

        /// Rows of an expert, on average, up to which an expert rarely has more than a tile's 16.
        const ROWS: usize = 8;

        /// Whether it is for so many routes, if those to all ranks are spread evenly over `experts`.
        pub fn is_for(routes: usize, experts: usize) -> bool {
            experts <= MAX_EXPERTS && routes <= ROWS * experts
        }
    }

    /// Elements of 16 bits that `TENSOR` and `stream` copy at a time: rows must be whole multiples.
    pub const VECTOR: usize = 8;

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
