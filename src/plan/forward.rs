//! The launch of a fused linear layer.

use std::fmt;

use super::{
    Device, WorkspaceBytes,
    capacity::{Capacity, limit},
    error::PlanError,
    ring::{self, Grid},
    thresholds::{
        MAX_FORWARD_TOKENS,
        forward::{
            ALIGNED_FEATURES, BLOCKS, MAX_FEATURES, OUT_UNIT, PARTS, RANK_TILE, SPLIT_STRIPS, STRIP_ROWS, STRIPS,
        },
    },
};
use crate::{
    DType, ffi,
    model::{LinearSite, SliceSite},
    sizes::product,
};

#[cfg(any(feature = "cuda", test))]
use super::{int, thresholds::forward::RINGS};

/// How a fused linear layer is launched: `y = x Wᵀ + bias + scaling · B (A x)`, of up to [`MAX_FORWARD_TOKENS`] tokens.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ForwardPlan {
    dtype: DType,
    out_features: Vec<usize>,
    in_features: usize,
    capacity: Capacity,
    splits: usize,
    strips: usize,
    passes: usize,
    trigger_boxes: usize,
    /// For batches of up to 8, 16 and 32 tokens, as far as the capacity and the device go.
    rings: Vec<ffi::aril_forward_ring>,
}

/// Tokens of the smallest batches with a ring of their own.
const FIRST_RING_TOKENS: usize = 8;

impl ForwardPlan {
    /// Plans a layer for batches within `capacity`, of up to [`max_tokens`](Self::max_tokens) tokens, on an H100 or
    /// H200. [`on`](Self::on) plans it for another device.
    ///
    /// # Errors
    /// If no kernel takes the element type, the shape or the bounds: `f32`, `in_features` that are not a multiple of 8,
    /// or a fully sharded layer.
    pub fn new(site: &LinearSite, dtype: DType, capacity: Capacity) -> Result<Self, PlanError> {
        if site.exchange().is_some() {
            return Err(PlanError::FullySharded);
        }
        let capacity = capacity.checked()?;
        if dtype == DType::F32 {
            return Err(PlanError::DType { operation: "the fused linear", got: dtype });
        }
        let in_features = site.in_features();
        limit("in_features", in_features, MAX_FEATURES)?;
        if !in_features.is_multiple_of(ALIGNED_FEATURES) {
            return Err(PlanError::Multiple { what: "in_features", value: in_features, of: ALIGNED_FEATURES });
        }
        let out_features: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
        limit("out_features", out_features.iter().sum(), MAX_FEATURES)?;
        let splits = splits(&out_features);
        let (strips, passes, trigger_boxes, rings) = (0, 0, 0, Vec::new());
        Self { dtype, out_features, in_features, capacity, splits, strips, passes, trigger_boxes, rings }
            .on(Device::H100)
    }

    /// The same layer on another device. Where shared memory is short, batches have fewer tokens, and blocks take their
    /// rows in more passes.
    ///
    /// # Errors
    /// [`PlanError::ComputeCapability`] and [`PlanError::SharedMemory`] if the device has no fused linear of the layer.
    /// Use a GEMM and `add_delta`.
    pub fn on(self, device: Device) -> Result<Self, PlanError> {
        let Device { compute_capability: (major, minor), shared_bytes, multiprocessors, .. } = device.sizable();
        if !Self::is_for((major, minor)) {
            return Err(PlanError::ComputeCapability { major, minor });
        }
        let grid = Grid {
            in_features: self.in_features,
            num_slices: self.out_features.len(),
            splits: self.splits,
            strips: 0,
            passes: 0,
            max_rank: self.capacity.max_rank,
        };
        let most = self.capacity.max_tokens.min(MAX_FORWARD_TOKENS);
        let end = 2 * most.max(FIRST_RING_TOKENS);
        let sizes = (0..).map(|size| 1 << size).take_while(|tiles| tiles * FIRST_RING_TOKENS < end);
        let mut needed = 0;
        // Fewer strips need less memory for sums of the other block.
        for strips in (1..=strips_on(&self.out_features, self.splits, multiprocessors)).rev() {
            for passes in Grid::passes(strips) {
                let grid = Grid { strips, passes, ..grid };
                let mut ring = |tiles| ring::ring(&grid, tiles, shared_bytes).map_err(|bytes| needed = bytes);
                let rings: Vec<_> = sizes.clone().map_while(|tiles| ring(tiles).ok()).collect();
                if !rings.is_empty() {
                    let trigger_boxes = device.measured().trigger_boxes;
                    return Ok(Self { rings, strips, passes, trigger_boxes, ..self });
                }
            }
        }
        Err(PlanError::SharedMemory { needed, available: shared_bytes })
    }

    /// Whether a device of that compute capability has the fused linear: from 9.0 on.
    pub const fn is_for((major, _minor): (i32, i32)) -> bool {
        major >= 9
    }

    /// The most tokens of a batch: the capacity's, up to [`MAX_FORWARD_TOKENS`] and to what the device has shared
    /// memory for. A larger batch is for a GEMM of the engine's and `add_delta`, which sum up in another order.
    pub fn max_tokens(&self) -> usize {
        let with_rings = (FIRST_RING_TOKENS << self.rings.len()) / 2;
        self.capacity.max_tokens.min(MAX_FORWARD_TOKENS).min(with_rings)
    }

    /// How often a block polls for another one's sum before it computes the sum itself.
    #[cfg(feature = "cuda")]
    pub(crate) const POLLS: usize = super::thresholds::forward::POLLS;

    /// How the launch of the layer divides it.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn launch(&self) -> ffi::aril_forward_plan {
        let mut rings = [ffi::aril_forward_ring::default(); RINGS];
        for (to, ring) in rings.iter_mut().zip(&self.rings) {
            *to = *ring;
        }
        ffi::aril_forward_plan {
            splits: int(self.splits),
            strips: int(self.strips),
            passes: int(self.passes),
            clusters: int(clusters(&self.out_features, self.strips)),
            trigger_boxes: int(self.trigger_boxes),
            rings,
        }
    }

    /// The most shared memory of a thread block, in bytes.
    pub fn shared_bytes(&self) -> usize {
        self.rings.iter().map(ring::bytes).fold(0, usize::max)
    }

    /// The workspace that a batch of `num_tokens` needs.
    pub fn workspace_bytes_for(&self, num_tokens: usize) -> WorkspaceBytes {
        let ranks = self.capacity.max_rank.next_multiple_of(RANK_TILE);
        let sums = product(&[PARTS, num_tokens, self.out_features.len(), ranks]);
        WorkspaceBytes { mailbox: WorkspaceBytes::mailbox_of(sums), partials: 0 }
    }

    /// A workspace for any batch of up to [`max_tokens`](Self::max_tokens).
    pub fn workspace_bytes(&self) -> WorkspaceBytes {
        self.workspace_bytes_for(self.max_tokens())
    }

    /// Blocks that share a row's input features. A function of the layer's shape alone, because the order of sums
    /// depends on it.
    pub fn splits(&self) -> usize {
        self.splits
    }

    /// Blocks of the launch.
    pub fn blocks(&self) -> usize {
        clusters(&self.out_features, self.strips) * self.splits
    }

    /// Whether two blocks share the features of a row, and load x once for all rows that they have.
    pub(super) fn reads_input_once(&self) -> bool {
        self.splits == 2 && self.strips <= STRIPS
    }

    /// The bounds it was planned for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// The element type it was planned for.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
}

/// The blocks that share a row: two, unless one block each has enough rows. A function of the shape alone.
fn splits(out_features: &[usize]) -> usize {
    let strips: usize = out_features.iter().map(|&out| slice_strips(out)).sum();
    if strips > BLOCKS / 2 * SPLIT_STRIPS { 1 } else { 2 }
}

/// The fewest strips of a cluster with which all clusters are resident at once.
fn strips_on(out_features: &[usize], splits: usize, multiprocessors: usize) -> usize {
    let strips: usize = out_features.iter().map(|&out| slice_strips(out)).sum();
    let most = (multiprocessors / splits).max(1);
    let last = if splits == 1 { strips } else { SPLIT_STRIPS };
    let fits = |&of_cluster: &usize| clusters(out_features, of_cluster) <= most;
    (strips.div_ceil(most)..last).find(fits).unwrap_or(last)
}

fn clusters(out_features: &[usize], strips: usize) -> usize {
    out_features.iter().map(|&out| slice_strips(out).div_ceil(strips)).sum()
}

/// Of whole units.
fn slice_strips(out_features: usize) -> usize {
    out_features.div_ceil(OUT_UNIT) * (OUT_UNIT / STRIP_ROWS)
}

impl fmt::Display for ForwardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "fused linear {}, up to {} tokens, rank {}: {} blocks, {} to a row, {} rows to a cluster, {} bytes of workspace",
            self.dtype,
            self.max_tokens(),
            self.capacity.max_rank,
            self.blocks(),
            self.splits,
            self.strips * STRIP_ROWS,
            self.workspace_bytes().mailbox,
        )
    }
}

#[cfg(test)]
#[expect(clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::{Capacity, Device, ForwardPlan, PlanError, STRIP_ROWS};
    use crate::{
        DType,
        model::{Linear, ModelSpec, Parallel, TpRank},
    };

    fn plan(in_features: usize, out_features: &[usize], max_rank: usize) -> ForwardPlan {
        let layer = Linear::new("layer", Parallel::Replicated, in_features);
        let slices = out_features.iter().enumerate();
        let layer = slices.fold(layer, |layer, (slice, &out)| layer.slice(format!("m{slice}"), out));
        let mut spec = ModelSpec::new();
        let id = spec.linear(layer).expect("the layer is described once");
        let model = spec.shard(TpRank::SINGLE).expect("one rank has all of it");
        let capacity = Capacity::tokens(512).slots(8).rank(max_rank);
        ForwardPlan::new(&model[id], DType::BF16, capacity).expect("an H100 has room for it")
    }

    fn device(kilobytes: usize) -> Device {
        Device { shared_bytes: kilobytes << 10, ..Device::H100 }
    }

    /// qkv, o, gate_up and down of Qwen3-0.6B, 8B and 32B, at ranks 16 and 64: the most tokens with 99, 163 and 227 KB
    /// (0: no fused linear), and, with 227 KB, stages with 8 tokens, stages and their boxes with 32, and the most
    /// shared memory.
    #[test]
    fn batches_have_as_many_tokens_as_fit() {
        type Layer = (usize, &'static [usize], [usize; 3], i32, [i32; 2], usize);
        let layers: [Layer; 12] = [
            (1024, &[2048, 1024, 1024], [8, 32, 32], 4, [4, 2], 189_672),
            (2048, &[1024], [16, 32, 32], 8, [8, 2], 187_880),
            (1024, &[3072, 3072], [8, 32, 32], 4, [4, 2], 230_760),
            (3072, &[1024], [16, 32, 32], 12, [11, 2], 224_744),
            (4096, &[4096, 1024, 1024], [8, 32, 32], 5, [4, 2], 231_656),
            (4096, &[4096], [8, 32, 32], 8, [4, 2], 229_192),
            (4096, &[12_288, 12_288], [8, 32, 32], 5, [4, 2], 227_688),
            (12_288, &[4096], [8, 32, 32], 8, [5, 2], 229_192),
            (5120, &[8192, 1024, 1024], [8, 32, 32], 6, [4, 2], 220_424),
            (8192, &[5120], [8, 32, 32], 6, [4, 2], 218_952),
            (5120, &[25_600, 25_600], [8, 32, 32], 6, [4, 2], 218_152),
            (25_600, &[5120], [8, 32, 32], 6, [4, 2], 218_952),
        ];
        let ranked = layers.into_iter().flat_map(|layer| [16, 64].map(|rank| (layer, rank)));
        for ((in_features, out_features, most_tokens, first_stages, ring, bytes), rank) in ranked {
            let what = format!("{in_features} to {out_features:?} at rank {rank}");
            let plan = plan(in_features, out_features, rank);
            assert_eq!(plan.shared_bytes(), bytes, "{what}");
            assert_eq!(plan.rings.first().map(|ring| ring.stages), Some(first_stages), "{what}");
            let last = plan.rings.last().map(|ring| [ring.stages, ring.stage_boxes]);
            assert_eq!(last, Some(ring), "{what}");
            for (kilobytes, most) in [99, 163, 227].into_iter().zip(most_tokens) {
                let on = plan.clone().on(device(kilobytes));
                match (&on, most) {
                    (Err(PlanError::SharedMemory { needed, available }), 0) => assert!(needed > available, "{what}"),
                    (Ok(on), most) => {
                        assert_eq!(on.max_tokens(), most, "{what}, {kilobytes} KB");
                        assert!(on.shared_bytes() <= kilobytes << 10, "{what}, {kilobytes} KB");
                        assert_eq!(on.rings.len(), most.ilog2() as usize - 2, "{what}, {kilobytes} KB");
                    }
                    (Err(error), _) => panic!("{what}, {kilobytes} KB: {error}"),
                }
            }
        }
    }

    /// The rings of a capacity of fewer tokens are those that its batches need.
    #[test]
    fn every_batch_has_a_ring() {
        for max_rank in [1, 16, 17, 64, 200, 512] {
            let plan = plan(4096, &[4096, 1024, 1024], max_rank);
            for max_tokens in [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65] {
                let plan =
                    ForwardPlan { capacity: Capacity::tokens(max_tokens).slots(8).rank(max_rank), ..plan.clone() };
                let plan = plan.on(Device::H100).expect("an H100 has room for it");
                assert_eq!(plan.max_tokens(), max_tokens.min(32));
                let rings = match plan.max_tokens() {
                    0..=8 => 1,
                    9..=16 => 2,
                    _ => 3,
                };
                assert_eq!(plan.rings.len(), rings, "{max_tokens} tokens");
            }
        }
    }

    /// The layers of Qwen3-8B: blocks, rows of a cluster and their passes. How many blocks share a row never changes.
    #[test]
    fn blocks_are_those_of_the_device() {
        let layers: [(usize, &[usize]); 4] =
            [(4096, &[4096, 1024, 1024]), (4096, &[4096]), (4096, &[12_288, 12_288]), (12_288, &[4096])];
        for (kilobytes, multiprocessors, expected) in [
            (227, 132, "130 of 96 in 1, 128 of 64 in 1, 128 of 192 in 2, 128 of 64 in 1"),
            (227, 148, "130 of 96 in 1, 128 of 64 in 1, 140 of 176 in 2, 128 of 64 in 1"),
            (99, 48, "68 of 192 in 4, 48 of 176 in 4, 48 of 512 in 8, 48 of 176 in 4"),
            (99, 170, "156 of 80 in 2, 128 of 64 in 1, 154 of 160 in 3, 128 of 64 in 1"),
            (99, 188, "156 of 80 in 2, 172 of 48 in 1, 172 of 144 in 3, 172 of 48 in 1"),
        ] {
            let device = Device { multiprocessors, ..device(kilobytes) };
            let plans = layers.map(|(in_features, out_features)| {
                let on_h100 = plan(in_features, out_features, 16);
                let plan = on_h100.clone().on(device).expect("it fits");
                assert_eq!(plan.splits, on_h100.splits);
                assert!(plan.shared_bytes() <= kilobytes << 10);
                let launch = plan.launch();
                assert_eq!(usize::try_from(launch.clusters * launch.splits), Ok(plan.blocks()));
                format!("{} of {} in {}", plan.blocks(), plan.strips * STRIP_ROWS, launch.passes)
            });
            assert_eq!(plans.join(", "), expected, "{kilobytes} KB, {multiprocessors} multiprocessors");
        }
    }

    #[test]
    fn devices_without_a_fused_linear_are_refused() {
        let plan = plan(4096, &[4096], 16);
        for (major, minor) in [(8, 0), (8, 6), (8, 9)] {
            let old = Device { compute_capability: (major, minor), ..Device::H100 };
            assert_eq!(plan.clone().on(old), Err(PlanError::ComputeCapability { major, minor }));
        }
        let refused = plan.clone().on(device(64)).expect_err("the first batch does not fit");
        assert_eq!(
            refused.to_string(),
            "the fused linear of this layer needs 87880 bytes of shared memory, and the device has 65536"
        );
    }
}
