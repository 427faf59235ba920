//! How a thread block of a fused linear divides its shared memory: a ring of stages, which copies of W and `x` fill
//! ahead, and behind it what else the block needs. No result depends on it.

use super::{
    int,
    thresholds::{
        K_TILE, RANK_TILE,
        forward::{
            ALIGNMENT_BYTES, BATCH_BYTES, BOX_FEATURES, DELTA_WARPS, MAX_STAGES, OUT_UNIT, SEGMENT_TOKENS,
            STATIC_BYTES, STRIP_ROWS, STRIPS,
        },
    },
};
use crate::ffi;

/// Tokens of `mma.sync`'s N.
const TOKEN_TILE: usize = 8;
/// Boxes of features that two splits share the features by, and the most of a stage.
const STEP_BOXES: usize = 2;
/// Bytes of a box of features of a strip of W, of a token tile of x, and of the sums of a strip and a token tile.
const STRIP_BOX_BYTES: usize = STRIP_ROWS * BOX_FEATURES * 2;
const TOKEN_BOX_BYTES: usize = TOKEN_TILE * BOX_FEATURES * 2;
const STRIP_SUMS_BYTES: usize = STRIP_ROWS * TOKEN_TILE * size_of::<f32>();
/// Bytes of a warp's buffer of A, which is one of B, too.
const A_BYTES: usize = RANK_TILE * K_TILE * 2;
const A_PLACES: usize = 2;
/// Bytes of the sums of two partials of v, whose rows have 20 elements.
const SUMS_BYTES: usize = 2 * DELTA_WARPS * SEGMENT_TOKENS * 20 * size_of::<f32>();
/// Ranks of a panel of B, and ranks whose products are added up before others join them.
const PANEL_RANKS: usize = 32;
const SUM_RANKS: usize = 64;
/// The most bytes of v at once.
const MAX_V_BYTES: usize = 16 << 10;

/// With more than 8 tokens, a ring holds at most this share of a block's stream: its loads in flight delay loads of A
/// and B. Blocks of fewer tokens request A first (`requests_a_first` of `csrc/linear/fused/layout.cuh`). (H200, decode
/// steps of Qwen3-8B without adapters at 1 and 8 tokens: 1 % less with all that fits and A first. At 16 tokens of 8
/// adapters: 0.7 % more with all that fits, 2 % with A first.)
const MAX_SHARE: usize = 4;
/// A larger ring delays the last loads of the launch before. (H200, chain of layers without adapters: 1 % slower with
/// all of shared memory.)
const MAX_RING_BYTES: usize = 176 << 10;
/// With up to 8 tokens, this share of the stages is requested only when A has been found. (H200, decode steps of
/// Qwen3-8B and 30B-A3B at 1 and 8 tokens: 0.1 to 1.3 % less than with all stages at once; with half of them, and with
/// 16 tokens, more.)
const HELD_BACK: usize = 4;
/// Stages that a ring needs to load ahead of the multipliers, and the fewest.
const GOOD_STAGES: usize = 4;
const MIN_STAGES: usize = 2;

/// How the blocks of a launch share the work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) in_features: usize,
    pub(super) num_slices: usize,
    pub(super) splits: usize,
    /// Strips of a cluster.
    pub(super) strips: usize,
    /// Passes that a block takes its strips in.
    pub(super) passes: usize,
    pub(super) max_rank: usize,
}

impl Grid {
    /// Passes from the fewest on: more of them need less shared memory, and read x more often.
    pub(super) fn passes(strips: usize) -> impl Iterator<Item = usize> {
        // Only those that differ in the strips of a pass.
        (strips.div_ceil(STRIPS)..=strips).filter(move |&passes| strips.div_ceil(strips.div_ceil(passes)) == passes)
    }

    fn pass_strips(&self) -> usize {
        self.strips.div_ceil(self.passes)
    }

    fn stage_bytes(&self, token_tiles: usize, stage_boxes: usize) -> usize {
        stage_boxes * (self.pass_strips() * STRIP_BOX_BYTES + token_tiles * TOKEN_BOX_BYTES)
    }

    /// Boxes of the features of a block.
    fn split_boxes(&self) -> usize {
        let steps = self.in_features.div_ceil(BOX_FEATURES).div_ceil(STEP_BOXES);
        steps.div_ceil(self.splits) * STEP_BOXES
    }

    /// The most units of outputs that a thread block stores, of `strips` strips.
    fn own_units(&self, strips: usize) -> usize {
        let begins_even = self.strips.is_multiple_of(2) && self.pass_strips().is_multiple_of(2);
        (if begins_even { strips.div_ceil(2) } else { strips / 2 + 1 }).div_ceil(self.splits)
    }
}

/// As many stages as fit in the shared memory of a block, of two boxes or, if these are too few, of one: for batches of
/// up to 8 `token_tiles` tokens. Otherwise how many bytes the block would need.
pub(super) fn ring(grid: &Grid, token_tiles: usize, shared_bytes: usize) -> Result<ffi::aril_forward_ring, usize> {
    for stage_boxes in (1..=STEP_BOXES).rev() {
        let stage_bytes = grid.stage_bytes(token_tiles, stage_boxes);
        let room = shared_bytes.saturating_sub(bytes(&of(grid, token_tiles, stage_boxes, 0))) / stage_bytes;
        let items = grid.passes * grid.split_boxes().div_ceil(stage_boxes);
        let is_whole = token_tiles == 1 || items < MAX_SHARE * GOOD_STAGES;
        let wanted = if is_whole { items } else { items / MAX_SHARE };
        let stages = [MAX_STAGES, wanted, MAX_RING_BYTES / stage_bytes, room].into_iter().fold(usize::MAX, usize::min);
        let fewest = if stage_boxes == 1 { MIN_STAGES } else { GOOD_STAGES };
        if stages >= fewest.min(items) {
            return Ok(of(grid, token_tiles, stage_boxes, stages));
        }
    }
    Err(bytes(&of(grid, token_tiles, 1, MIN_STAGES)))
}

/// Shared memory of a block.
pub(super) fn bytes(ring: &ffi::aril_forward_ring) -> usize {
    ring.total.cast_unsigned() as usize + ALIGNMENT_BYTES + STATIC_BYTES
}

/// The division with so many stages.
fn of(grid: &Grid, token_tiles: usize, stage_boxes: usize, stages: usize) -> ffi::aril_forward_ring {
    let (pass_strips, tokens) = (grid.pass_strips(), token_tiles * TOKEN_TILE);
    let strip_sums = token_tiles * STRIP_SUMS_BYTES;
    // With 17 to 32 tokens, two teams of multipliers halve the features of a box, and hand sums over.
    let has_teams = token_tiles == 4;

    let stage_bytes = grid.stage_bytes(token_tiles, stage_boxes);
    let inbox = stages * stage_bytes;
    let has_inbox = grid.splits > 1;
    let deltas = inbox + if has_inbox { grid.own_units(grid.strips) * 2 * strip_sums } else { 0 };
    // An odd number of token tiles spreads a warp's rows over all banks.
    let delta_pitch = TOKEN_TILE * (token_tiles | 1);
    let v = deltas + grid.own_units(pass_strips) * OUT_UNIT * delta_pitch * size_of::<f32>();
    let handed_over = if has_teams { pass_strips.div_ceil(2) * 2 * strip_sums } else { 0 };
    let most_ranks = MAX_V_BYTES / (tokens * 2 * 2) / SUM_RANKS * SUM_RANKS;
    let v_ranks = most_ranks.min(grid.max_rank.next_multiple_of(PANEL_RANKS));
    let v_pitch = v_ranks * 2 + 16;
    let a = v + SUMS_BYTES.max(2 * tokens * v_pitch);
    let batch = (a + DELTA_WARPS * A_PLACES * A_BYTES).max(v + handed_over);
    let modules = batch + BATCH_BYTES;
    let module_bytes = size_of::<ffi::aril_descriptor>() + size_of::<i32>();
    let total = modules + tokens * grid.num_slices * module_bytes + 8;
    ffi::aril_forward_ring {
        stage_boxes: int(stage_boxes),
        stages: int(stages),
        first_stages: int(if token_tiles == 1 { stages - stages / HELD_BACK } else { stages }),
        stage_bytes: int(stage_bytes),
        inbox: int(inbox),
        deltas: int(deltas),
        handover: int(v),
        v: int(v),
        sums: int(v),
        a: int(a),
        batch: int(batch),
        modules: int(modules),
        total: int(total),
        delta_pitch: int(delta_pitch),
        v_pitch: int(v_pitch),
        v_ranks: int(v_ranks),
    }
}
