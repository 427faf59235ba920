//! The workloads: how many, of what kinds, and the bytes that each must move.

use std::collections::BTreeSet;

use aril_bench::{
    data::SetLayout,
    experts::{self, ExpertsLayout, ExpertsWorkload, Turns},
    own::{own, own_experts, with_base},
    workload::{BUILT_IN, Suite, Workload, parse, quick},
};

#[test]
fn the_committed_workloads_are_whole() {
    let workloads = parse(BUILT_IN).unwrap();
    assert_eq!(workloads.iter().filter(|workload| workload.suite == Suite::Decode).count(), 336);
    assert_eq!(workloads.iter().filter(|workload| workload.suite == Suite::Prefill).count(), 92);
    for workload in &workloads {
        let (model, id) = workload.linear_model().unwrap();
        assert_eq!(model[id].out_features(), workload.out_features(), "{}", workload.id);
        assert_eq!(workload.id.split('/').count(), 6, "{}", workload.id);
        // On the device the factors are noise, which must not be where kernels rely on padding.
        let elems_per_rank = workload.out_slices.len() * workload.in_features + workload.out_features();
        let elems = workload.ranks.iter().map(|rank| rank * elems_per_rank).sum::<usize>();
        assert_eq!(SetLayout::new(workload).elems, elems, "{}", workload.id);
    }
    let quick = quick(workloads);
    assert!((8..=24).contains(&quick.len()), "{} are not quick", quick.len());
}

#[test]
fn bytes_count_what_is_in_use_once() {
    let workloads = parse(BUILT_IN).unwrap();
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();

    let qkv = of("dec/qwen3-8b/qkv/r16/t16/uniform8");
    let bytes = qkv.bytes();
    assert_eq!(bytes.weights, 8 * (3 * 16 * 4096 + 6144 * 16) * 2);
    assert_eq!((bytes.x, bytes.y), (16 * 4096 * 2, 16 * 6144 * 4));
    assert_eq!(qkv.flops(), 2 * 16 * 16 * (3 * 4096 + 6144));
    assert_eq!(qkv.class(), "decode T<=16 few adapters");

    // Base tokens move nothing, unless with the base GEMM; resident adapters that nobody uses are not read.
    let none = of("dec/qwen3-8b/o/r16/t16/uniform8_none25");
    assert_eq!(none.bytes().x, 12 * 4096 * 2);
    let with_base = none.bytes_with_base();
    assert_eq!((with_base.x, with_base.y), (16 * 4096 * 2, 16 * 4096 * 2));
    assert_eq!(with_base.weights, 4096 * 4096 * 2 + none.bytes().weights);
    let pool = of("dec/qwen3-8b/o/r16/t1/one_pool64");
    assert_eq!((pool.num_slots(), pool.bytes().weights), (64, 16 * 8192 * 2));

    assert_eq!(of("pre/qwen3-8b/down/r64/t2048/seg8").class(), "prefill T=2048");
    assert_eq!(of("dec/qwen3-8b/down/r64/t64/distinct").class(), "decode T=32..64 distinct");
}

#[test]
fn our_own_workloads_are_of_many_kinds() {
    let workloads = own().unwrap();
    let ids: BTreeSet<&str> = workloads.iter().map(|workload| workload.id.as_str()).collect();
    assert_eq!(ids.len(), workloads.len(), "two have the same id");
    for workload in &workloads {
        assert_eq!((workload.suite, workload.id.split('/').count()), (Suite::Own, 6), "{}", workload.id);
        assert!(
            workload.slots.iter().all(|&slot| usize::try_from(slot).map_or(true, |slot| slot < workload.num_slots()))
        );
    }
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();

    // 16 adapters of ranks 8, 16, 32, 64, 128, 8, .. against the largest.
    let [mixed, padded] = ["mixed", "padded"].map(|ranks| of(&format!("own/qwen3-8b/qkv/{ranks}/t16/distinct")));
    assert_eq!(mixed.bytes().weights, (3 * 248 + 8) * (3 * 4096 + 6144) * 2);
    assert_eq!(padded.bytes().weights, 16 * 128 * (3 * 4096 + 6144) * 2);
    assert_eq!((mixed.bytes().y, mixed.slots == padded.slots), (padded.bytes().y, true));
    assert_eq!(mixed.class(), "ranks mixed, distinct");

    // Residents that nobody uses move nothing.
    let pools = [64, 1000].map(|slots| of(&format!("own/qwen3-8b/o/r16/t64/uniform8_pool{slots}")));
    assert_eq!(pools.map(Workload::num_slots), [64, 1000]);
    assert_eq!((pools[0].bytes(), &pools[0].slots), (pools[1].bytes(), &pools[1].slots));

    // An embedding reads a row of A and an id for each token.
    let embedding = of("own/qwen3-8b/embedding/r16/t64/uniform8").bytes();
    assert_eq!((embedding.weights, embedding.x), ((64 * 16 + 8 * 4096 * 16) * 2, 64 * 4));
    assert_eq!(of("own/qwen3-8b/qkv/r16/t4096/none").bytes().total(), 0);
    assert!((3..=12).contains(&quick(workloads).len()));
}

#[test]
fn layers_with_their_base_are_of_two_models_and_all_batch_sizes() {
    let workloads = with_base().unwrap();
    assert_eq!(workloads.len(), 2 * 4 * 14 * 2);
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();
    let (decode, prefill) = (of("layer/qwen3-32b/o/r16/t32/uniform8"), of("layer/qwen3-8b/down/r64/t8192/uniform8"));
    assert_eq!((decode.in_features, decode.out_features()), (8192, 5120));
    assert!(!decode.slots.is_sorted() && prefill.slots.is_sorted());
    assert_eq!(of("layer/qwen3-8b/qkv/r16/t1/uniform1").num_slots(), 1);
}

#[test]
fn floors_end_at_a_launch() {
    let workloads = parse(BUILT_IN).unwrap();
    let one = workloads[0].bytes();
    assert!((one.floor_us(3000.0) - 0.9).abs() < 1e-9);
    assert!((one.floor_us(1.0) - one.total() as f64 / 1e3).abs() < 1e-6);
}

/// What gen_workloads.py's rule gives.
#[test]
fn a_router_chooses_as_the_list_says() {
    let workloads = experts::parse(BUILT_IN).unwrap();
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();
    let one = of("moe/per_expert/r8/t1/a1");
    assert_eq!(one.chosen(0), [74, 34, 17, 67, 28, 42, 13, 70]);
    assert_eq!(one.chosen(124), [57, 121, 64, 111, 72, 92, 43, 62]);
    let eight = of("moe/shared_outer/r32/t8/a8").chosen(15);
    assert_eq!(eight[..8], [99, 67, 18, 74, 107, 6, 117, 8]);
    assert_eq!(eight[7 * 8..], [64, 114, 115, 67, 45, 70, 62, 85]);
    let many = of("moe/per_expert/r16/t4096/a8").chosen(3);
    assert_eq!(many[4095 * 8..], [105, 30, 12, 76, 37, 97, 53, 58]);
    assert_eq!(many.iter().sum::<i32>(), 2_087_006);

    // Others than 128 experts, and all tokens with those of one.
    let own = own_experts();
    let of = |id: &str| own.iter().find(|workload| workload.id == id).unwrap();
    let qwen = of("moe-own/qwen3.5-35b-a3b/per_expert/r16/t32/a1/uniform");
    assert_eq!(qwen.chosen(2)[..8], [218, 73, 155, 95, 240, 118, 53, 83]);
    let gpt = of("moe-own/gpt-oss-120b/per_expert/r16/t32/a1/uniform");
    assert_eq!(gpt.chosen(2)[..8], [90, 73, 27, 95, 112, 118, 53, 83]);
    let same = of("moe-own/qwen3-30b-a3b/per_expert/r16/t8/a8/same").chosen(15);
    assert_eq!(same, [99, 67, 18, 74, 107, 6, 117, 8].repeat(8));
}

/// What takes turns, and what must be moved: as other libraries' results say.
#[test]
fn experts_take_turns_as_those_of_others_do() {
    let workloads = experts::parse(BUILT_IN).unwrap();
    assert_eq!(workloads.len(), 96);
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();
    let turns = |id: &str| {
        let Turns { sets, choices } = of(id).turns();
        (sets, choices)
    };
    assert_eq!(turns("moe/per_expert/r8/t1/a1"), (125, 125));
    assert_eq!(turns("moe/shared_outer/r8/t1/a1"), (342, 342));
    assert_eq!(turns("moe/per_expert/r16/t8/a4"), (2, 16));
    assert_eq!(turns("moe/shared_outer/r16/t8/a1"), (34, 34));
    assert_eq!(turns("moe/shared_outer/r8/t32/a1"), (32, 32));
    assert_eq!(turns("moe/per_expert/r32/t128/a8"), (1, 16));
    assert_eq!(turns("moe/shared_outer/r32/t4096/a8"), (2, 4));

    let one = of("moe/per_expert/r16/t1/a1");
    let bytes = one.bytes(63);
    assert_eq!(bytes.weights, 8 * 16 * 3 * (2048 + 768) * 2);
    assert_eq!((bytes.x, bytes.y, one.flops()), (16_384, 114_688, 2_162_688));
    let shared = of("moe/shared_outer/r16/t8/a1");
    let bytes = shared.bytes(34);
    assert_eq!((bytes.weights, bytes.x, bytes.y, shared.flops()), (4_043_474, 131_072, 917_504, 9_961_472));
    assert!((bytes.floor_us(3000.0) - 1.697).abs() < 1e-3);
    assert!((one.bytes(1).floor_us(3000.0) - 0.9).abs() < 1e-9);

    let classes: BTreeSet<String> = workloads.iter().map(ExpertsWorkload::class).collect();
    let layouts = ["per_expert", "shared_outer"];
    let sizes = ["T<=32", "T=128", "T>=1024"];
    assert!(classes.into_iter().eq(layouts.iter().flat_map(|layout| sizes.map(|size| format!("{layout} {size}")))));
    assert_eq!(experts::quick(workloads).len(), 6);
}

#[test]
fn our_own_experts_are_of_many_kinds_and_fit_on_the_device() {
    let workloads = own_experts();
    let ids: BTreeSet<&str> = workloads.iter().map(|workload| workload.id.as_str()).collect();
    assert_eq!((workloads.len(), ids.len()), (46, 46), "two have the same id");
    for workload in workloads.iter().chain(&experts::parse(BUILT_IN).unwrap()) {
        let (turns, layout) = (workload.turns(), ExpertsLayout::new(workload));
        assert!(turns.sets > 0 && turns.sets * layout.elems <= 4_400_000_000, "{}", workload.id);
        assert!(
            workload.slots.iter().all(|&slot| usize::try_from(slot).is_ok_and(|slot| slot < workload.adapters.len()))
        );
        let (model, id) = workload.model().unwrap();
        assert_eq!(model[id].gate_up().in_features(), workload.shape.hidden);
    }
    // Each set is read whole before it is read again, or what is read of it is others' experts.
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();
    let same = of("moe-own/qwen3-30b-a3b/per_expert/r16/t1024/a1/same");
    let Turns { sets, choices } = same.turns();
    assert_eq!((sets, choices, same.bytes(choices).weights), (63, 63, 2_162_688));
    let mixed = of("moe-own/qwen3-30b-a3b/mixed/r16/t8/a8/uniform");
    assert!(mixed.adapters.iter().step_by(2).all(|adapter| !adapter.shared_outer));
    assert!(mixed.adapters.iter().skip(1).step_by(2).all(|adapter| adapter.shared_outer));
    let ranks = of("moe-own/qwen3-30b-a3b/per_expert/mixed/t8/a8/uniform");
    assert_eq!(ranks.adapters.iter().map(|adapter| adapter.rank).collect::<BTreeSet<_>>(), [8, 16, 24, 32].into());

    // Only GPT-OSS's hidden size leaves padding: three quarters of the last 256 features of each A.
    let padding = |workload: &ExpertsWorkload| {
        let padding = ExpertsLayout::new(workload).padding(workload);
        padding.iter().map(std::iter::ExactSizeIterator::len).sum::<usize>()
    };
    let gpt = of("moe-own/gpt-oss-120b/per_expert/r16/t1/a1/uniform");
    assert_eq!(padding(gpt), 128 * 3 * 16 * 192);
    assert!([same, mixed, ranks].into_iter().all(|workload| padding(workload) == 0));
}
