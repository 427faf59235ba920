//! Launch configurations of linear layers and embeddings.

use std::fmt;

#[cfg(any(feature = "cuda", test))]
mod launch;

#[cfg(feature = "cuda")]
pub(crate) use self::launch::embedding_launch;
use super::{
    Device, WorkspaceBytes,
    capacity::Capacity,
    error::PlanError,
    forward::ForwardPlan,
    thresholds::{
        K_TILE, K_TILES_PER_SLAB, K_TILES_PER_SPAN, MAX_GRID_X, MAX_GRID_Y, RANK_TILE, SMALL_M, WIDE_TILE, is_staged,
        linear::{
            LARGE_M_OUTS, LARGE_M_RANK_TILES, LARGE_M_TOKENS, LARGE_M_WORK, MIN_SPAN_BLOCKS, SMALL_M_OUTS,
            SMALL_M_RANK_TILES,
        },
        time_beside,
    },
};
use crate::{
    DType,
    model::{LinearSite, SliceSite},
    sizes::product,
};

/// Launch configuration of a linear layer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LinearPlan {
    dtype: DType,
    in_features: usize,
    out_features: Vec<usize>,
    capacity: Capacity,
    device: Device,
}

/// Rows of a layer's stack.
pub(crate) fn stacked_rows(slices: usize, positions: usize, rank: usize) -> usize {
    product(&[slices, positions, rank.div_ceil(RANK_TILE), RANK_TILE])
}

impl LinearPlan {
    /// Plans a layer for batches within `capacity`, on an H100.
    ///
    /// # Errors
    /// [`PlanError::Limit`] if the kernels do not support a size or a bound, [`PlanError::FullySharded`] if the layer
    /// is fully sharded.
    pub fn new(site: &LinearSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        if site.exchange().is_some() {
            return Err(PlanError::FullySharded);
        }
        let capacity = capacity.checked()?;
        let out_features: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
        let (value, max) = (site.in_features(), MAX_GRID_Y * K_TILE);
        if value > max {
            return Err(PlanError::Limit { what: "in_features", value, max });
        }
        let plan = Self { dtype, in_features: site.in_features(), out_features, capacity, device: Device::H100 };
        check_outputs(&plan.out_features, capacity, plan.rank_tiles().div_ceil(SMALL_M_RANK_TILES) * plan.num_slabs())?;
        Ok(plan)
    }

    /// The layer with this slice alone. What fits the grids of all slices fits one.
    pub(crate) fn with_slice(&self, index: usize) -> Option<Self> {
        Some(Self { out_features: vec![*self.out_features.get(index)?], ..self.clone() })
    }

    /// The same layer on another device, whose multiprocessors the grids fill. Neither the results nor the workspace
    /// depend on it.
    #[must_use]
    pub fn on(self, device: Device) -> Self {
        Self { device: device.sizable(), ..self }
    }

    /// Rows of a stack that has room for so many adapters of up to `rank`: the layer's part of
    /// `cuda::raw::Stack`. The base weight has them behind its own.
    pub fn stacked_rows(&self, positions: usize, rank: usize) -> usize {
        stacked_rows(self.out_features.len(), positions, rank)
    }

    /// Whether the layer works on wide tiles. Both ways are bit-identical.
    pub(crate) fn is_large_m(&self, num_tokens: usize) -> bool {
        num_tokens > self.small_m_tokens()
    }

    /// The largest number of tokens that the layer works on in small tiles.
    fn small_m_tokens(&self) -> usize {
        let features = 2 * self.in_features * self.out_features.len() + self.out_features.iter().sum::<usize>();
        let has_much_work = self.capacity.max_rank * features >= LARGE_M_WORK;
        if self.dtype != DType::F32 && is_staged(self.capacity.max_rank) && has_much_work {
            LARGE_M_TOKENS - 1
        } else {
            SMALL_M
        }
    }

    /// Whether one launch computes both shrink and expand.
    fn is_one_launch(&self, num_tokens: usize) -> bool {
        self.dtype != DType::F32 && !self.is_large_m(num_tokens)
    }

    /// K tiles of [`K_TILE`] input features of a split: a slab or a span. Both are bit-identical.
    pub(crate) fn k_tiles_per_split(&self, num_tokens: usize) -> usize {
        let rank_blocks = self.rank_tiles().div_ceil(LARGE_M_RANK_TILES);
        let blocks = product(&[num_tokens.div_ceil(WIDE_TILE), rank_blocks, self.num_spans()]);
        if self.is_one_launch(num_tokens) || blocks < MIN_SPAN_BLOCKS { K_TILES_PER_SLAB } else { K_TILES_PER_SPAN }
    }

    /// Outputs of one slice per expand block.
    pub(crate) fn outs_per_block(&self, num_tokens: usize, max_tiles: usize) -> usize {
        let wide_tokens = self.is_large_m(num_tokens).then_some(num_tokens);
        outs_per_block(&self.out_features, self.capacity.max_rank, wide_tokens, max_tiles, self.device)
    }

    /// Splits of a token's input features, whose sums expand adds up.
    pub fn num_splits(&self, num_tokens: usize) -> usize {
        self.num_k_tiles().div_ceil(self.k_tiles_per_split(num_tokens))
    }

    /// Workspace for a batch of `num_tokens` tokens.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> WorkspaceBytes {
        let sums = product(&[self.num_splits(num_tokens), num_tokens, self.sums_per_token()]);
        if self.is_one_launch(num_tokens) {
            WorkspaceBytes { mailbox: WorkspaceBytes::mailbox_of(sums), partials: 0 }
        } else {
            WorkspaceBytes { mailbox: 0, partials: product(&[sums, size_of::<f32>()]) }
        }
    }

    /// Workspace for any batch within the capacity.
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        let max_tokens = self.capacity.max_tokens;
        let sums = product(&[self.num_slabs(), max_tokens.min(SMALL_M), self.sums_per_token()]);
        let mailbox = if self.dtype == DType::F32 { 0 } else { WorkspaceBytes::mailbox_of(sums) };
        if self.dtype != DType::F32 && max_tokens < LARGE_M_TOKENS {
            return WorkspaceBytes { mailbox, partials: 0 };
        }
        // At the lowest rank, splits are slabs up to this many tokens. Higher ranks change to spans earlier, and may
        // have wide tiles from fewer tokens on, which these bounds ignore, so that a larger capacity never needs less.
        let last_in_slabs = (MIN_SPAN_BLOCKS - 1) / self.num_spans() * WIDE_TILE;
        let in_slabs = product(&[self.num_slabs(), max_tokens.min(last_in_slabs)]);
        let sums = in_slabs.max(product(&[self.num_spans(), max_tokens]));
        WorkspaceBytes { mailbox, partials: product(&[sums, self.sums_per_token(), size_of::<f32>()]) }
    }

    fn sums_per_token(&self) -> usize {
        self.out_features.len() * self.capacity.max_rank.next_multiple_of(RANK_TILE)
    }

    /// Rank tiles of all slices.
    fn rank_tiles(&self) -> usize {
        self.out_features.len() * self.capacity.max_rank.div_ceil(RANK_TILE)
    }

    pub(super) fn in_features(&self) -> usize {
        self.in_features
    }

    /// Of each slice.
    pub(super) fn out_features(&self) -> &[usize] {
        &self.out_features
    }

    /// The capacity of the plan.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The element type of activations and factors.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    fn num_k_tiles(&self) -> usize {
        self.in_features.div_ceil(K_TILE)
    }

    fn num_slabs(&self) -> usize {
        self.num_k_tiles().div_ceil(K_TILES_PER_SLAB)
    }

    fn num_spans(&self) -> usize {
        self.num_k_tiles().div_ceil(K_TILES_PER_SPAN)
    }
}

impl fmt::Display for LinearPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Capacity { max_tokens, num_slots, max_rank } = self.capacity;
        let large_m = self.is_large_m(max_tokens);
        let tiles =
            if large_m { self.capacity.max_wide_tiles(max_tokens) } else { self.capacity.max_small_tiles(max_tokens) };
        let outs = self.outs_per_block(max_tokens, tiles);
        let launches = if self.is_one_launch(max_tokens) { "one launch" } else { "two launches" };
        let WorkspaceBytes { mailbox, partials } = self.workspace_bytes();
        write!(
            f,
            "linear {}, up to {max_tokens} tokens of {num_slots} slots, rank {max_rank}: {tiles} tiles, {launches}, shrink {} splits of \
             {} K tiles, expand {} blocks of {outs} outputs, {mailbox} + {partials} bytes of workspace",
            self.dtype,
            self.num_splits(max_tokens),
            self.num_k_tiles(),
            out_blocks(&self.out_features, outs),
        )
    }
}

/// Outputs of one slice per expand block, in a batch in up to `tiles` tiles; wide ones if there are `wide_tokens`. All
/// choices are bit-identical.
///
/// Large blocks amortise the start of a block; small blocks fill the device.
pub(crate) fn outs_per_block(
    out_features: &[usize],
    max_rank: usize,
    wide_tokens: Option<usize>,
    tiles: usize,
    device: Device,
) -> usize {
    if let Some(tokens) = wide_tokens.filter(|_| is_staged(max_rank)) {
        let resident = device.measured().resident_expand(max_rank);
        return wide_outs(out_features, resident, max_rank, tokens, tiles, device);
    }
    small_outs(out_features, (SMALL_M_OUTS, b_bytes(SMALL_M_OUTS, max_rank)), tiles, device)
}

/// The outputs per block that take least time on wide tiles, of which up to so many blocks are resident on each
/// multiprocessor.
fn wide_outs(
    out_features: &[usize],
    resident: usize,
    max_rank: usize,
    tokens: usize,
    max_tiles: usize,
    device: Device,
) -> usize {
    let (measured, places) = (device.measured(), (device.sizable().multiprocessors, resident));
    let tiles = likely_tiles(tokens, max_tiles);
    let time = |outs: usize| -> usize {
        let blocks_of_tile = out_blocks(out_features, outs);
        let wave = |resident: usize| {
            measured.large_m_start + max_rank + outs / LARGE_M_OUTS * time_beside(measured.large_m_outs, resident)
        };
        tiles.map(|tiles| time_of_waves(tiles * blocks_of_tile, places, wave)).iter().sum()
    };
    let sizes = (LARGE_M_OUTS..=measured.max_large_m_outs).step_by(LARGE_M_OUTS);
    sizes.min_by_key(|&outs| time(outs)).expect("there is a size")
}

/// Three likely numbers of wide tiles of a batch in up to `max_tiles`. A slot's last tile is partly full, half on
/// average.
fn likely_tiles(tokens: usize, max_tiles: usize) -> [usize; 3] {
    let full_tiles = tokens.div_ceil(WIDE_TILE);
    let slots = max_tiles.saturating_sub(full_tiles);
    [3, 4, 5].map(|eighths| (full_tiles + slots * eighths / 8).max(slots))
}

/// The time of blocks that run in waves of as many as the device holds: on so many multiprocessors, up to so many on
/// each. `wave` is the time of a wave with so many blocks on a multiprocessor.
fn time_of_waves(
    blocks: usize,
    (multiprocessors, per_multiprocessor): (usize, usize),
    wave: impl Fn(usize) -> usize,
) -> usize {
    let places = per_multiprocessor * multiprocessors;
    let (full, rest) = (blocks / places, blocks % places);
    full * wave(per_multiprocessor) + if rest > 0 { wave(rest.div_ceil(multiprocessors)) } else { 0 }
}

/// The outputs per block on small tiles: a multiple of `step` outputs, which have `step_bytes` of B.
fn small_outs(out_features: &[usize], (step, step_bytes): (usize, usize), tiles: usize, device: Device) -> usize {
    let measured = device.measured();
    let min_blocks = measured.min_expand_blocks * device.sizable().multiprocessors;
    let mut steps = (measured.max_b_bytes / step_bytes).max(1);
    while steps > 1 && out_blocks(out_features, steps * step) * tiles < min_blocks {
        steps /= 2;
    }
    steps * step
}

/// Bytes of B for so many outputs.
fn b_bytes(outs: usize, max_rank: usize) -> usize {
    outs * max_rank.next_multiple_of(RANK_TILE) * DType::BF16.bytes()
}

fn out_blocks(out_features: &[usize], outs_per_block: usize) -> usize {
    out_features.iter().map(|out| out.div_ceil(outs_per_block)).sum()
}

/// Rejects outputs whose expand blocks, together with `shrink_blocks` per tile, exceed the largest grid.
pub(crate) fn check_outputs(out_features: &[usize], capacity: Capacity, shrink_blocks: usize) -> Result<(), PlanError> {
    let [small, wide] = [capacity.max_tokens.min(SMALL_M), capacity.max_tokens].map(|n| capacity.max_tiles(n));
    let max = (MAX_GRID_X / small.max(wide)).saturating_sub(shrink_blocks);
    // The smallest blocks make the largest grid.
    let blocks = out_blocks(out_features, LARGE_M_OUTS);
    if blocks > max {
        let value = blocks * LARGE_M_OUTS;
        return Err(PlanError::Limit { what: "out_features", value, max: max * LARGE_M_OUTS });
    }
    Ok(())
}

/// How the delta of a linear layer is computed beside its base GEMM. The documentation of `cuda` describes the modes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Mode {
    /// `write_delta` before the GEMM, which accumulates; or `add_delta` after one that cannot.
    First,
    /// `FusedLinear::forward` instead of the GEMM.
    Fused,
    /// The GEMM by all rows of W and a stack, then `add_stacked_delta`.
    Stacked,
}

impl LinearPlan {
    /// The mode with which the layer takes least time in a batch of `num_tokens` tokens. `ranks` is the sum of the
    /// ranks of the distinct adapters in the batch. `fused` is the layer's fused linear, if it has one. `stack_rank` is
    /// the rank of the stack that the layer is in, if it has room for the batch.
    ///
    /// The choice comes from measurements on an H200 in bf16, beside cuBLASLt's GEMMs
    /// (`benches/record/h200/layer.json`): in each of them, the layer takes at most 5 % longer than with the best mode,
    /// and 9 % if it has a stack; on an H100 (`benches/record/h100/layer.json`) at most 7 %. An expand within the
    /// operation behind the layer is not chosen, because it depends on that operation.
    pub fn fastest_mode(
        &self,
        num_tokens: usize,
        ranks: usize,
        fused: Option<&ForwardPlan>,
        stack_rank: Option<usize>,
    ) -> Mode {
        let measured = self.device.measured();
        let (in_features, out_features) = (self.in_features(), self.out_features().iter().sum::<usize>());
        let factors = product(&[ranks, self.out_features().len() * in_features + out_features]);
        let has_base_of = |times: usize| product(&[factors, times]) <= in_features * out_features;
        let is_fastest_fused = |fused: &ForwardPlan| {
            let is_down = in_features >= 2 * out_features;
            let has_stack = stack_rank.is_some();
            let times = measured.base_to_factors(num_tokens, fused.reads_input_once(), is_down, has_stack);
            num_tokens <= fused.max_tokens() && has_base_of(times)
        };
        if fused.is_some_and(is_fastest_fused) {
            Mode::Fused
        } else if stack_rank.is_some_and(|rank| measured.is_fastest_stacked(num_tokens, rank)) {
            Mode::Stacked
        } else {
            Mode::First
        }
    }
}
