//! Plans: bounds for every batch, checked against brute force.

use aril::{
    DType,
    model::{Experts, Halves, Linear, LinearSite, MAX_RANK, ModelSpec, Parallel, TpRank},
    plan::{
        Capacity, Device, ExpertsPlan, ForwardPlan, LinearPlan, MAX_FORWARD_TOKENS, MAX_SLOTS, PlanError, RouteCapacity,
    },
};
use proptest::prelude::*;

/// Bytes of a mailbox in front of its words: `ARIL_MAILBOX_HEADER`.
const HEADER: usize = 4224;

fn site(in_features: usize, slices: &[usize]) -> LinearSite {
    let mut spec = ModelSpec::new();
    let layer = Linear::new("layer", Parallel::Replicated, in_features);
    let layer = slices.iter().enumerate().fold(layer, |layer, (i, &out)| layer.slice(format!("m{i}"), out));
    let id = spec.linear(layer).unwrap();
    spec.shard(TpRank::SINGLE).unwrap()[id].clone()
}

fn plan(in_features: usize, slices: &[usize], dtype: DType, capacity: Capacity) -> Result<LinearPlan, PlanError> {
    LinearPlan::new(&site(in_features, slices), dtype, capacity)
}

fn plan_forward(
    in_features: usize,
    slices: &[usize],
    dtype: DType,
    capacity: Capacity,
) -> Result<ForwardPlan, PlanError> {
    ForwardPlan::new(&site(in_features, slices), dtype, capacity)
}

/// Tokens of a full tile, in an operation on `num_tokens` tokens.
fn tokens_per_tile(num_tokens: usize) -> usize {
    if num_tokens > 512 { 64 } else { 16 }
}

fn capacities() -> impl Strategy<Value = Capacity> {
    (1..=5000_usize, 1..=MAX_SLOTS, 1..=MAX_RANK)
        .prop_map(|(max_tokens, num_slots, max_rank)| Capacity::tokens(max_tokens).slots(num_slots).rank(max_rank))
}

proptest! {
    /// For every spread of tokens over slots, the number of tiles is within the bound.
    #[test]
    fn max_tiles_bounds_every_spread(tokens in prop::collection::vec(0..100_usize, 1..40)) {
        let num_tokens = tokens.iter().sum();
        let per_tile = tokens_per_tile(num_tokens);
        let capacity = Capacity::tokens(4000).slots((tokens.len() - 1).max(1)).rank(8);
        // The last tokens have no slot.
        let tiles: usize = tokens.iter().map(|tokens| tokens.div_ceil(per_tile)).sum();
        prop_assert!(tiles <= capacity.max_tiles(num_tokens), "{tiles} > {}", capacity.max_tiles(num_tokens));
        // At most one empty tile for each slot, and one for the tokens without a slot.
        prop_assert!(capacity.max_tiles(num_tokens) - tiles <= num_tokens.min(capacity.num_slots + 1));
    }

    /// The worst spread reaches the bound: one token in each slot, one without a slot, and the rest in one slot.
    #[test]
    fn max_tiles_is_reached(num_tokens in prop_oneof![1..5000_usize, 511..514_usize], num_slots in 1..300_usize) {
        let slots = (num_slots + 1).min(num_tokens);
        let worst = slots - 1 + (num_tokens - (slots - 1)).div_ceil(tokens_per_tile(num_tokens));
        let capacity = Capacity::tokens(5000).slots(num_slots).rank(8);
        prop_assert_eq!(capacity.max_tiles(num_tokens), worst);
    }

    /// No batch within the capacity needs more than the whole workspace. Each has a float for every split, token and
    /// rank, and a tag if shrink and expand are one launch: up to 512 tokens, or less than 320 of a layer with much
    /// work.
    #[test]
    fn the_workspace_is_large_enough(
        capacity in capacities(), in_features in 1..20_000_usize, slices in prop::collection::vec(1..5000_usize, 1..=8),
    ) {
        let plan = plan(in_features, &slices, DType::BF16, capacity).unwrap();
        for num_tokens in 0..=capacity.max_tokens {
            let sums = num_tokens * slices.len() * capacity.max_rank.next_multiple_of(8);
            let floats = plan.num_splits(num_tokens) * sums;
            let needed = plan.workspace_bytes_for(num_tokens);
            let work = capacity.max_rank * (2 * in_features * slices.len() + slices.iter().sum::<usize>());
            let small_m = if work >= 1_700_000 && capacity.max_rank <= 128 { 319 } else { 512 };
            let wanted = if num_tokens <= small_m { (HEADER + 8 * floats, 0) } else { (0, 4 * floats) };
            prop_assert_eq!((needed.mailbox, needed.partials), wanted);
            prop_assert_eq!(plan.workspace_bytes().max(needed), plan.workspace_bytes());
        }
    }

    /// A larger capacity never needs less memory.
    #[test]
    fn the_workspace_grows_with_the_capacity(
        capacity in capacities(), in_features in 1..20_000_usize,
        dtype in prop::sample::select(vec![DType::F32, DType::F16]),
    ) {
        let bytes = |capacity| plan(in_features, &[64], dtype, capacity).unwrap().workspace_bytes();
        let Capacity { max_tokens, max_rank, .. } = capacity;
        let more_tokens = Capacity::tokens(max_tokens + 1).slots(capacity.num_slots).rank(capacity.max_rank);
        let larger_ranks = capacity.rank((max_rank + 1).min(MAX_RANK));
        for larger in [more_tokens, larger_ranks] {
            prop_assert_eq!(bytes(capacity).max(bytes(larger)), bytes(larger), "{:?} needs less", larger);
        }
    }

    /// No step within the capacity needs more than the whole workspace of experts. Each has a float and a tag for every
    /// slab of 1024 input features, row of sums, slice and rank. Many routes need another float each.
    #[test]
    fn the_workspace_of_experts_is_large_enough(
        max_tokens in 1..400_usize, top_k in 1..=10_usize, max_rank in 1..=MAX_RANK,
        hidden in 1..9000_usize, inter in 1..9000_usize,
    ) {
        let plan = experts(hidden, inter, Capacity::tokens(max_tokens).slots(3).rank(max_rank), top_k).unwrap();
        let ranks = max_rank.next_multiple_of(8);
        for (num_tokens, top_k) in [(max_tokens, top_k), (max_tokens / 2, top_k), (max_tokens, 1), (0, 1)] {
            // gate_up, where tokens may share sums, and down.
            let gate_up = hidden.div_ceil(1024) * num_tokens * (top_k + 1) * 2 * ranks;
            let down = inter.div_ceil(1024) * num_tokens * top_k * ranks;
            for (projection, sums) in [(plan.gate_up(), gate_up), (plan.down(), down)] {
                let needed = projection.workspace_bytes_for(num_tokens, top_k);
                let is_wide = num_tokens * top_k > 1024 && max_rank <= 128;
                let partials = if is_wide { 4 * sums } else { 0 };
                prop_assert_eq!((needed.mailbox, needed.partials), (HEADER + 8 * sums, partials));
                prop_assert_eq!(plan.workspace_bytes().max(needed), plan.workspace_bytes());
            }
        }
    }

    /// No batch of a fused linear needs more than the whole workspace. Each has a float and a tag for each of four
    /// parts of the input, token, slice and rank. A larger capacity never needs less.
    #[test]
    fn the_workspace_of_a_fused_linear_is_large_enough(
        capacity in capacities(), eighths in 1..3000_usize, slices in prop::collection::vec(1..5000_usize, 1..=8),
    ) {
        let plan = plan_forward(8 * eighths, &slices, DType::F16, capacity).unwrap();
        prop_assert_eq!(plan.max_tokens(), capacity.max_tokens.min(MAX_FORWARD_TOKENS));
        for num_tokens in 0..=plan.max_tokens() {
            let floats = 4 * num_tokens * slices.len() * capacity.max_rank.next_multiple_of(16);
            let needed = plan.workspace_bytes_for(num_tokens);
            prop_assert_eq!((needed.mailbox, needed.partials), (HEADER + 8 * floats, 0));
            prop_assert_eq!(plan.workspace_bytes().max(needed), plan.workspace_bytes());
        }
    }

    /// The number of blocks that share a row depends on the shape alone: the order of sums must not depend on the
    /// capacity.
    #[test]
    fn the_order_of_sums_is_of_the_shape_alone(
        capacities in [capacities(), capacities()], eighths in [1..3000_usize, 1..3000],
        slices in prop::collection::vec(1..40_000_usize, 1..=8),
    ) {
        let plan = |i: usize| plan_forward(8 * eighths[i], &slices, DType::BF16, capacities[i]).unwrap();
        let [first, second] = [0, 1].map(plan);
        prop_assert_eq!(first.splits(), second.splits());
        prop_assert_eq!(first.blocks(), second.blocks());
        // A strip has 16 rows, slices have whole units of two strips, and two blocks have up to 12 strips.
        let strips: usize = slices.iter().map(|out| out.div_ceil(32) * 2).sum();
        prop_assert_eq!(first.splits(), if strips > 66 * 12 { 1 } else { 2 });
        prop_assert!(first.blocks() >= slices.len() * first.splits());
        // All blocks are resident at once, unless partly filled clusters make this impossible for two blocks with 12
        // strips.
        let most = if first.splits() == 1 { 132 } else { 132 + 2 * slices.len() };
        prop_assert!(first.blocks() <= most, "{} blocks", first.blocks());
    }

    #[test]
    fn the_same_problem_has_the_same_plan(
        capacity in capacities(), in_features in 1..20_000_usize, out in 1..20_000_usize,
    ) {
        let [first, second] = [(); 2].map(|()| plan(in_features, &[out], DType::F16, capacity));
        prop_assert_eq!(&first, &second);
        let plan = first.unwrap();
        prop_assert_eq!((plan.capacity(), plan.dtype()), (capacity, DType::F16));
    }
}

fn experts(hidden: usize, inter: usize, capacity: Capacity, top_k: usize) -> Result<ExpertsPlan, PlanError> {
    plan_experts(Experts::new("experts", 4, hidden, inter).top_k(top_k), DType::BF16, capacity)
}

fn plan_experts(experts: Experts, dtype: DType, capacity: Capacity) -> Result<ExpertsPlan, PlanError> {
    let mut spec = ModelSpec::new();
    let id = spec.experts(experts).unwrap();
    ExpertsPlan::new(&spec.shard(TpRank::SINGLE).unwrap()[id], dtype, capacity)
}

#[test]
fn ranks_that_experts_cannot_have_are_refused_by_name() {
    let capacity = |max_rank| Capacity::tokens(1).slots(1).rank(max_rank);
    assert!(experts(8, 8, capacity(MAX_RANK), 1).is_ok());
    let refused = experts(8, 8, capacity(MAX_RANK + 1), 1);
    let (value, max) = (MAX_RANK + 1, MAX_RANK);
    assert_eq!(refused, Err(PlanError::Limit { what: "max_rank", value, max }));
    let refused = experts(8, 8, capacity(1), 0);
    assert_eq!(refused, Err(PlanError::NoTopK));
}

#[test]
fn bounds_outside_the_limits_are_refused_by_name() {
    let good = Capacity::tokens(1).slots(1).rank(1);
    let refused = |capacity: Capacity| match capacity.checked() {
        Err(PlanError::Limit { what, value, max }) => (what, value, max),
        other => panic!("{other:?}"),
    };
    assert_eq!(good.checked(), Ok(good));
    let largest = Capacity::tokens(1 << 20).slots(MAX_SLOTS).rank(MAX_RANK);
    assert_eq!(largest.checked(), Ok(largest));
    for value in [0, MAX_SLOTS + 1] {
        assert_eq!(refused(good.slots(value)), ("num_slots", value, MAX_SLOTS));
    }
    for value in [0, MAX_RANK + 1] {
        assert_eq!(refused(good.rank(value)), ("max_rank", value, MAX_RANK));
    }
    for value in [0, usize::MAX] {
        let (what, got, max) = refused(Capacity::tokens(value).slots(good.num_slots).rank(good.max_rank));
        assert_eq!((what, got), ("max_tokens", value));
        // Rows of the smallest tiles are counted by an `i32`.
        assert_eq!(max, i32::MAX as usize / 16);
        assert!(Capacity::tokens(max).slots(good.num_slots).rank(good.max_rank).checked().is_ok());
        assert_eq!(refused(Capacity::tokens(max + 1).slots(good.num_slots).rank(good.max_rank)).0, "max_tokens");
    }
}

#[test]
fn bounds_on_routes_outside_the_limits_are_refused_by_name() {
    let routes = |max_tokens, top_k, num_experts| RouteCapacity::tokens(max_tokens).top_k(top_k).experts(num_experts);
    let refused = |what, value, max| PlanError::Limit { what, value, max };
    // Rows of the smallest tiles are counted by an `i32`.
    let most = i32::MAX as usize / 16;
    for good in [routes(1, 1, 0), routes(most, 1, 1024), routes(1, most, 1), routes(1000, most / 1000, 2)] {
        assert_eq!(good.checked(), Ok(good));
    }
    assert_eq!(routes(1, 1, 1025).checked(), Err(refused("num_experts", 1025, 1024)));
    assert_eq!(routes(0, 1, 1).checked(), Err(refused("max_tokens", 0, most)));
    assert_eq!(routes(most + 1, 1, 1).checked(), Err(refused("max_tokens", most + 1, most)));
    assert_eq!(routes(1000, 0, 1).checked(), Err(refused("top_k", 0, most / 1000)));
    assert_eq!(routes(1000, most / 1000 + 1, 1).checked(), Err(refused("top_k", most / 1000 + 1, most / 1000)));
}

#[test]
fn layers_too_large_for_a_grid_are_refused_by_name() {
    let plan = |max_tokens, in_features, slices: &[usize]| {
        let capacity = Capacity::tokens(max_tokens).slots(1).rank(1);
        plan(in_features, slices, DType::BF16, capacity).map(|_| ())
    };
    let refused = |result, what, value, max| assert_eq!(result, Err(PlanError::Limit { what, value, max }));
    let largest = 65_535 * 256;
    assert_eq!(plan(1, largest, &[1]), Ok(()));
    refused(plan(1, largest + 1, &[1]), "in_features", largest + 1, largest);
    // So many tiles that each has room for two thousand blocks.
    let (tokens, largest) = (i32::MAX as usize / 2002 * 64, 2000 * 128);
    assert_eq!(plan(tokens, 1, &[largest]), Ok(()));
    // A block of 128 outputs belongs to one slice.
    for slices in [&[largest + 1][..], &[largest, 1]] {
        refused(plan(tokens, 1, slices), "out_features", largest + 128, largest);
    }
}

#[test]
fn a_plan_says_what_it_will_launch() {
    let decode = Capacity::tokens(64).slots(32).rank(16);
    let prefill = Capacity::tokens(8192).slots(4).rank(64);
    let plans = [
        plan(4096, &[4096, 1024, 1024], DType::BF16, decode),
        plan(4096, &[4096, 1024, 1024], DType::BF16, prefill),
        plan(100, &[7], DType::F32, Capacity::tokens(1).slots(1).rank(1)),
    ];
    let shown: Vec<String> = plans.into_iter().map(|plan| plan.unwrap().to_string()).collect();
    assert_eq!(
        shown,
        [
            "linear bf16, up to 64 tokens of 32 slots, rank 16: 34 tiles, one launch, shrink 4 splits of 16 K tiles, \
             expand 12 blocks of \
             512 outputs, 102528 + 0 bytes of workspace",
            "linear bf16, up to 8192 tokens of 4 slots, rank 64: 132 tiles, two launches, shrink 4 splits of 16 K \
             tiles, expand 6 blocks of \
             1024 outputs, 3149952 + 25165824 bytes of workspace",
            "linear f32, up to 1 tokens of 1 slots, rank 1: 1 tiles, two launches, shrink 1 splits of 1 K tiles, \
             expand 1 blocks of 256 \
             outputs, 0 + 32 bytes of workspace",
        ]
    );
}

/// A smaller device has fewer blocks, each of more outputs. The splits and the workspace are those of an H100.
#[test]
fn the_blocks_of_expand_fill_the_multiprocessors() {
    let few = plan(4096, &[4096], DType::BF16, Capacity::tokens(16).slots(1).rank(16)).unwrap();
    let many = plan(4096, &[4096], DType::BF16, Capacity::tokens(2048).slots(8).rank(64)).unwrap();
    let on = |plan: &LinearPlan, multiprocessors| plan.clone().on(Device { multiprocessors, ..Device::H100 });
    let expand = |plan: LinearPlan| {
        let printed = plan.to_string();
        let (_, expand) = printed.split_once(", expand ").unwrap();
        expand.split_once(" outputs").unwrap().0.to_owned()
    };
    assert_eq!(
        [132, 8, 4, 1, 0].map(|multiprocessors| expand(on(&few, multiprocessors))),
        ["16 blocks of 256", "8 blocks of 512", "4 blocks of 1024", "2 blocks of 2048", "2 blocks of 2048"]
    );
    assert_eq!(
        [132, 148].map(|multiprocessors| expand(on(&many, multiprocessors))),
        ["7 blocks of 640", "8 blocks of 512"]
    );
    for plan in [few, many] {
        let tokens = plan.capacity().max_tokens;
        for multiprocessors in [1, 16, 148] {
            let other = on(&plan, multiprocessors);
            assert_eq!(other.workspace_bytes(), plan.workspace_bytes());
            assert_eq!(other.num_splits(tokens), plan.num_splits(tokens));
            assert_eq!(other.workspace_bytes_for(tokens), plan.workspace_bytes_for(tokens));
        }
        assert_eq!(on(&plan, Device::H100.multiprocessors), plan);
    }
}

/// Adding is faster only with wide tiles, which need more than 1024 routes, ranks up to 128, and no interleaved gate
/// and up.
#[test]
fn fused_operations_are_preferred_without_wide_tiles() {
    let plan = |max_rank, halves| {
        let mut spec = ModelSpec::new();
        let id = spec.experts(Experts::new("experts", 8, 256, 128).top_k(4).halves(halves)).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let capacity = Capacity::tokens(4096).slots(4).rank(max_rank);
        ExpertsPlan::new(&model[id], DType::BF16, capacity).unwrap()
    };
    let prefers = |max_rank, halves, num_routes| {
        let plan = plan(max_rank, halves);
        [plan.gate_up(), plan.down()].map(|projection| projection.prefers_fused(num_routes))
    };
    for (num_routes, fused) in [(0, true), (1, true), (1024, true), (1025, false), (16_384, false)] {
        assert_eq!(prefers(128, Halves::GateUp, num_routes), [fused; 2], "{num_routes}");
    }
    assert_eq!(prefers(129, Halves::GateUp, 1025), [true; 2]);
    assert_eq!(prefers(128, Halves::Interleaved, 1025), [true, false]);
}

/// Both sides of each threshold: small_m and large_m, staged ranks and higher ones, slabs and spans, and sizes of
/// expand blocks.
#[test]
fn plans_are_those_that_were_measured() {
    let whole = plan(12_288, &[4096], DType::BF16, Capacity::tokens(319).slots(4).rank(128)).unwrap().to_string();
    let text = "24 tiles, one launch, shrink 12 splits of 48 K tiles, expand 16 blocks of 256 outputs, \
                3924096 + 0 bytes of workspace";
    assert_eq!(whole.split_once(": ").unwrap().1, text);
    // Tokens, slots, rank and input features; slices; and the numbers of the text.
    for ([max_tokens, num_slots, max_rank, in_features], slices, expected) in [
        ([319, 4, 128, 12_288], &[4096][..], [24, 1, 12, 48, 16, 256, 3_924_096, 0]),
        ([320, 4, 128, 12_288], &[4096], [9, 2, 12, 48, 32, 128, 3_936_384, 1_966_080]),
        ([513, 4, 128, 12_288], &[4096], [12, 2, 12, 48, 16, 256, 6_295_680, 3_151_872]),
        ([513, 4, 129, 12_288], &[4096], [12, 2, 12, 48, 16, 256, 6_688_896, 3_348_864]),
        ([64, 64, 8, 4096], &[12_288, 12_288], [64, 1, 4, 16, 6, 4096, 36_992, 0]),
        ([64, 64, 64, 4096], &[12_288, 12_288], [64, 1, 4, 16, 48, 512, 266_368, 0]),
        ([1, 1, 512, 4096], &[151_936], [1, 1, 4, 16, 594, 256, 20_608, 0]),
        ([7936, 1, 64, 14_336], &[4096], [125, 2, 14, 56, 2, 2048, 3_674_240, 28_442_624]),
        ([7937, 1, 64, 14_336], &[4096], [125, 2, 4, 56, 2, 2048, 3_674_240, 28_442_624]),
        ([3968, 1, 64, 14_336], &[2048, 2048], [63, 2, 14, 56, 4, 1024, 7_344_256, 28_442_624]),
        ([3969, 1, 64, 14_336], &[2048, 2048], [63, 2, 4, 56, 4, 1024, 7_344_256, 28_449_792]),
        ([1024, 1, 16, 1025], &[33_792], [17, 2, 2, 5, 24, 1408, 135_296, 131_072]),
        ([1024, 1, 16, 1025], &[33_793], [17, 2, 2, 5, 23, 1536, 135_296, 131_072]),
        ([256, 1, 16, 1024], &[8192], [17, 1, 1, 4, 16, 512, 36_992, 0]),
        ([496, 1, 16, 1024], &[8192], [32, 1, 1, 4, 16, 512, 67_712, 31_744]),
        ([512, 1, 16, 1024], &[8192], [33, 1, 1, 4, 8, 1024, 69_760, 32_768]),
    ] {
        let capacity = Capacity::tokens(max_tokens).slots(num_slots).rank(max_rank);
        let text = plan(in_features, slices, DType::BF16, capacity).unwrap().to_string();
        let text = text.split_once(": ").unwrap().1.replace("one", "1").replace("two", "2");
        let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty());
        let numbers: Vec<usize> = numbers.map(|number| number.parse().unwrap()).collect();
        assert_eq!(numbers, expected, "{max_tokens} tokens, rank {max_rank}, {in_features} to {slices:?}");
    }
}

/// One block to a row where there are rows enough, else two; and as few rows to a cluster as 132 blocks can have.
#[test]
fn the_rows_of_a_fused_linear_are_spread_over_blocks() {
    let shown = |max_tokens, max_rank, slices: &[usize]| {
        let capacity = Capacity::tokens(max_tokens).slots(4).rank(max_rank);
        plan_forward(4096, slices, DType::BF16, capacity).unwrap().to_string()
    };
    assert_eq!(
        shown(8, 17, &[4096]),
        "fused linear bf16, up to 8 tokens, rank 17: 128 blocks, 2 to a row, 64 rows to a cluster, 12416 bytes of \
         workspace"
    );
    let blocks =
        |slices: &[usize]| shown(1, 1, slices).split_once(": ").unwrap().1.rsplit_once(", ").unwrap().0.to_owned();
    for (slices, expected) in [
        (&[4096, 1024, 1024][..], "130 blocks, 2 to a row, 96 rows to a cluster"),
        (&[12_672], "132 blocks, 2 to a row, 192 rows to a cluster"),
        (&[12_640, 32], "134 blocks, 2 to a row, 192 rows to a cluster"),
        (&[12_673], "114 blocks, 1 to a row, 112 rows to a cluster"),
        (&[151_936], "132 blocks, 1 to a row, 1152 rows to a cluster"),
        (&[151_936, 32], "132 blocks, 1 to a row, 1168 rows to a cluster"),
    ] {
        assert_eq!(blocks(slices), expected, "{slices:?}");
    }
    assert_eq!([(8, 9), (9, 0), (10, 3)].map(ForwardPlan::is_for), [false, true, true]);
}

#[test]
fn layers_without_a_fused_linear_are_refused_by_name() {
    let capacity = Capacity::tokens(1).slots(1).rank(1);
    let refused = |in_features, out_features, dtype| plan_forward(in_features, &[out_features], dtype, capacity);
    assert_eq!(refused(8, 1, DType::F32), Err(PlanError::DType { operation: "the fused linear", got: DType::F32 }));
    assert_eq!(refused(12, 1, DType::BF16), Err(PlanError::Multiple { what: "in_features", value: 12, of: 8 }));
    // Bytes of a row, and features, are counted by an `i32`.
    let max = i32::MAX as usize / 4;
    let limit = |what| Err(PlanError::Limit { what, value: max + 1, max });
    assert_eq!(refused(max + 1, 1, DType::F16), limit("in_features"));
    assert_eq!(refused(8, max + 1, DType::F16), limit("out_features"));
    assert!(refused(max - max % 8, max, DType::F16).is_ok());
}

/// Shrink and expand have separate launches only if wide tiles are possible.
#[test]
fn a_plan_of_experts_says_how_many_launches_there_are() {
    let launches = |dtype, halves, max_tokens, max_rank| {
        let capacity = Capacity::tokens(max_tokens).slots(4).rank(max_rank);
        let plan = plan_experts(Experts::new("experts", 4, 64, 32).top_k(8).halves(halves), dtype, capacity).unwrap();
        plan.to_string().split(", ").find(|part| part.starts_with("three")).map(str::to_owned)
    };
    let (bf16, f32) = (DType::BF16, DType::F32);
    let three = "three that add or write more than 1024 routes";
    assert_eq!(launches(bf16, Halves::GateUp, 129, 128).unwrap(), three);
    assert_eq!(launches(bf16, Halves::Interleaved, 129, 128).unwrap(), format!("{three} of down"));
    assert_eq!(launches(bf16, Halves::GateUp, 128, 128), None);
    assert_eq!(launches(bf16, Halves::GateUp, 129, 129), None);
    assert_eq!(launches(f32, Halves::GateUp, 129, 128), None);
}
