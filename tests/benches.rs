//! The benchmarks' own arithmetic, and the check that judges what they time.
#![allow(clippy::cast_possible_truncation, clippy::unwrap_used)]

#[path = "../benches/common/mod.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{LoraEmbedding, LoraExperts, LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{Halves, Model},
    routing::{Batch, TopK},
};
use common::{
    data::{Data, FactorLayout, SetLayout, checked_tokens},
    experts::{
        self, DOWN, ExpertsAdapter, ExpertsLayout, ExpertsWorkload, GATE, MODULES, Router, Shape, Spread, Turns, UP,
    },
    noise::Noise,
    own::{launched, own, own_experts, with_base},
    report::{Classes, Figures, Table, added, geometric_mean, host, median},
    results::{Added, Entry, HostCost, Others},
    workload::{BUILT_IN, Operation, Suite, Workload, parse, quick},
};
use half::bf16;

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

    // Base tokens move nothing; resident adapters that nobody uses are not read.
    let none = of("dec/qwen3-8b/o/r16/t16/uniform8_none25").bytes();
    assert_eq!(none.x, 12 * 4096 * 2);
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
        assert!(workload.slots.iter().all(|slot| slot.index().is_none_or(|slot| slot < workload.num_slots())));
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
    assert_eq!(workloads.len(), 2 * 4 * 10 * 2);
    let of = |id: &str| workloads.iter().find(|workload| workload.id == id).unwrap();
    let (decode, prefill) = (of("layer/qwen3-32b/o/r16/t32/uniform8"), of("layer/qwen3-8b/down/r64/t8192/uniform8"));
    assert_eq!((decode.in_features, decode.out_features()), (8192, 5120));
    assert!(!decode.slots.is_sorted() && prefill.slots.is_sorted());
    assert_eq!(of("layer/qwen3-8b/qkv/r16/t1/uniform1").num_slots(), 1);
    let table = added(&[
        (decode, &Added { id: String::new(), gemm_us: 20.0, added_us: [("after".to_owned(), 5.0)].into() }),
        (prefill, &Added { id: String::new(), gemm_us: 400.0, added_us: [("side".to_owned(), -1.0)].into() }),
    ]);
    let text = table.markdown();
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows[0], "| layer | T | rank | GEMM, µs | after, µs | after, % | side, µs | side, % |");
    assert_eq!(rows[2], "| qwen3-32b o | 32 | 16 | 20.0 | +5.0 | +25.0 |  |  |");
    assert_eq!(rows[3], "| qwen3-8b down | 8192 | 64 | 400.0 |  |  | -1.0 | -0.2 |");
}

#[test]
fn the_host_has_a_table_with_what_is_wanted() {
    let workloads = launched().unwrap();
    let cost = HostCost { id: String::new(), plan_us: 0.1, operands_us: 0.25, add_delta_us: 4.0 };
    let text = host(&[(&workloads[0], &cost)]).markdown();
    let rows: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(rows, ["| qwen3-8b qkv | 1 | 0.10 | 0.25 | 4.00 |", "| at most, wanted |  |  | 2 | 3 |"]);
    assert!(host(&[]).is_empty());
}

#[test]
fn floors_end_at_a_launch() {
    let workloads = parse(BUILT_IN).unwrap();
    let one = workloads[0].bytes();
    assert!((one.floor_us(3000.0) - 0.9).abs() < 1e-9);
    assert!((one.floor_us(1.0) - one.total() as f64 / 1e3).abs() < 1e-6);
}

#[test]
fn averages() {
    assert!((median(&mut [3.0, 1.0, 2.0]) - 2.0).abs() < 1e-12);
    assert!((median(&mut [4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-12);
    assert!((geometric_mean([1.0, 4.0]) - 2.0).abs() < 1e-12);
}

#[test]
fn the_table_has_a_row_per_class_and_one_for_all() {
    let of = |id: &str, us, fastest: Option<(&str, f64)>| Figures {
        id: id.to_owned(),
        us,
        floor_us: 1.0,
        fused_us: None,
        fastest: fastest.map(|(name, us)| (name.to_owned(), us)),
        deltas: None,
    };
    let mut classes = Classes::default();
    classes.add(Suite::Prefill, "b".to_owned(), of("b1", 2.0, None));
    assert_eq!(classes.table().markdown().lines().next(), Some("| class | n | µs | floor, µs | times the floor |"));
    classes.add(Suite::Decode, "a".to_owned(), of("a1", 8.0, Some(("x", 16.0))));
    classes.add(Suite::Decode, "a".to_owned(), of("a2", 2.0, Some(("y", 1.0))));
    classes.add(Suite::Decode, "a".to_owned(), of("a3", 4.0, Some(("y", 4.0))));
    classes.add(Suite::Own, "ours".to_owned(), of("o", 3.0, None));
    let text = classes.table().markdown();
    let rows: Vec<&str> = text.lines().skip(2).collect();
    assert_eq!(rows[1], "| a | 3 | 4.00 | 1.00 | 4.00 | 4.00 | 1.00 | 0.50 | a2 | y 2, x 1 |");
    assert_eq!(rows[0], "| b | 1 | 2.00 | 1.00 | 2.00 |  |  |  |  |  |");
    assert_eq!(rows[2], "| ours | 1 | 3.00 | 1.00 | 3.00 |  |  |  |  |  |");
    assert_eq!(rows[3], "| all of workloads.json | 4 | 3.36 | 1.00 | 3.36 | 4.00 | 1.00 | 0.50 | a2 | y 2, x 1 |");
}

#[test]
fn those_that_only_write_deltas_have_columns_of_their_own() {
    let of = |id: &str, us, fastest, deltas| Figures {
        id: id.to_owned(),
        us,
        floor_us: 2.0,
        fused_us: None,
        fastest: Some(("x".to_owned(), fastest)),
        deltas: Some(("sglang_v2_moe".to_owned(), deltas)),
    };
    let mut classes = Classes::default();
    classes.add(Suite::Moe, "per_expert T<=32".to_owned(), of("a", 4.0, 16.0, 8.0));
    classes.add(Suite::Moe, "per_expert T<=32".to_owned(), of("b", 16.0, 16.0, 8.0));
    let own = Figures { fastest: None, deltas: None, ..of("c", 5.0, 0.0, 0.0) };
    classes.add(Suite::MoeOwn, "ours".to_owned(), own);
    let text = classes.table().markdown();
    let rows: Vec<&str> = text.lines().collect();
    assert!(
        rows[0].ends_with("| at | fastest others | deltas only, µs | deltas only/ours | worst | at |"),
        "{}",
        rows[0]
    );
    let figures = "2 | 8.00 | 2.00 | 4.00 | 16.00 | 2.00 | 1.00 | b | x 2 | 8.00 | 1.00 | 0.50 | b |";
    assert_eq!(rows[2], format!("| per_expert T<=32 | {figures}"));
    assert_eq!(rows[3], "| ours | 1 | 5.00 | 2.00 | 2.50 |  |  |  |  |  |  |  |  |  |");
    assert_eq!(rows[4], format!("| all of workloads.json | {figures}"));
}

#[test]
fn what_was_timed_with_activation_and_combine_has_a_column() {
    let of = |id: &str, us, fused_us| Figures {
        id: id.to_owned(),
        us,
        floor_us: 2.0,
        fused_us,
        fastest: None,
        deltas: None,
    };
    let mut classes = Classes::default();
    classes.add(Suite::MoeOwn, "ours".to_owned(), of("a", 4.0, Some(2.0)));
    classes.add(Suite::MoeOwn, "ours".to_owned(), of("b", 4.0, Some(8.0)));
    classes.add(Suite::Moe, "per_expert T<=32".to_owned(), of("c", 4.0, None));
    let text = classes.table().markdown();
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows[0], "| class | n | µs | floor, µs | times the floor | with activation and combine, µs |");
    assert_eq!(rows[2], "| ours | 2 | 4.00 | 2.00 | 2.00 | 4.00 |");
    assert_eq!(rows[3], "| per_expert T<=32 | 1 | 4.00 | 2.00 | 2.00 |  |");
}

#[test]
fn tables_are_aligned() {
    let mut table = Table::new(&["name", "µs"]);
    table.row(vec!["longest".to_owned(), "10.5".to_owned()]);
    assert_eq!(table.to_string(), "name       µs\nlongest  10.5\n");
    assert_eq!(table.markdown(), "| name | µs |\n|---|---|\n| longest | 10.5 |\n");
}

#[test]
fn of_several_results_the_first_counts() {
    let entry = |id: &str, peer: &str, us| Entry {
        id: id.to_owned(),
        peer: peer.to_owned(),
        cold_us: Some(us),
        ..Entry::default()
    };
    let mut others = Others::default();
    others.add(vec![entry("w", "x", 5.0), entry("w", "aril", 1.0), entry("w", "torch_loop", 1.0)]);
    assert_eq!(others.fastest("w"), Some(("x".to_owned(), 5.0)));
    others.add(vec![entry("w", "x", 2.0), entry("w", "y", 4.0), entry("v", "x", 3.0)]);
    assert_eq!(others.fastest("w"), Some(("y".to_owned(), 4.0)));
    assert_eq!((others.fastest("v"), others.fastest("u")), (Some(("x".to_owned(), 3.0)), None));
    // What does less is a bar of its own.
    others.add(vec![entry("w", "sglang_v2_moe", 1.0), entry("u", "sglang_v2_moe", 2.0)]);
    assert_eq!((others.fastest("w"), others.fastest("u")), (Some(("y".to_owned(), 4.0)), None));
    assert_eq!(others.fastest_of_deltas("w"), Some(("sglang_v2_moe".to_owned(), 1.0)));
    assert_eq!(others.fastest_of_deltas("v"), None);
}

#[test]
fn noise_repeats_and_is_centred() {
    let noise = Noise::new(1, 10_007, 0.5);
    let values: Vec<f64> = noise.range(0, 20_014).map(f64::from).collect();
    assert!(values[..10_007] == values[10_007..]);
    assert!(noise.range(10_007 + 5, 3).map(f64::from).eq(values[5..8].iter().copied()));
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| value * value).sum::<f64>() / values.len() as f64;
    assert!(mean.abs() < 0.02 && (variance.sqrt() - 0.5).abs() < 0.01, "{mean} {variance}");
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
        assert!(workload.slots.iter().all(|slot| slot.index().is_some_and(|slot| slot < workload.adapters.len())));
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

/// The layout is that of packed adapters, padding and what is shared included; and the check finds no error in the CPU's results, but
/// notices another set, another choice, exchanged halves and NaN.
#[test]
fn the_check_of_experts_too() {
    let halves = [Halves::GateUp, Halves::Interleaved];
    for (shape, shared_outer) in halves.into_iter().zip([[false, true], [true, false]]) {
        let workload = tiny_experts(shape, shared_outer);
        let (data, layout) = (tiny_data(), ExpertsLayout::new(&workload));
        let set = 3 * layout.elems;
        let (model, id) = workload.model().unwrap();
        let arena_bytes = layout.elems * DType::BF16.bytes();
        let weights = WeightTable::new(&model, DType::BF16, workload.capacity(), arena_bytes).unwrap();
        let (mut first, mut padding) = (0, Vec::new());
        for slot in 0..workload.adapters.len() {
            let adapter = expert_adapter(&data, &workload, &layout, set, slot);
            let image = adapter.plan(&model, DType::BF16).unwrap();
            let site = &model[id];
            for entry in image.entries() {
                let [module, expert] = (0..workload.shape.num_experts)
                    .flat_map(|expert| MODULES.map(|module| [module, expert]))
                    .find(|&[module, expert]| match module {
                        DOWN => site.down().expert_entry(expert) == entry.entry,
                        _ => site.gate_up().expert_entry(expert) + module == entry.entry,
                    })
                    .unwrap();
                let got = layout.factors[slot][module][expert];
                assert_eq!(got, [first + entry.a_elems, first + entry.b_elems]);
            }
            let shared = if workload.adapters[slot].shared_outer { 3 } else { 0 };
            assert_eq!(image.shared().len(), shared);
            for shared in image.shared() {
                let is_down = shared.entry == site.down().shared_entry();
                assert_eq!((shared.a_elems.is_none(), shared.b_elems.is_none()), (is_down, !is_down));
            }
            let mut block = vec![0xff; image.bytes()];
            image.write_to(&mut block).unwrap();
            let elems: &[bf16] = bytemuck::cast_slice(&block);
            // Of noise hardly anything is zero.
            padding.extend((0..elems.len()).filter(|&elem| elems[elem] == bf16::ZERO).map(|elem| first + elem));
            first += elems.len();
            weights.load(Slot::new(slot as u16), &image).unwrap();
        }
        assert_eq!(first, layout.elems);
        let expected: BTreeSet<usize> = layout.padding(&workload).into_iter().flatten().collect();
        assert!(!expected.is_empty() && expected.iter().eq(&padding));

        let (ids, [inputs, outputs]) = (workload.chosen(1), workload.of_down());
        let Shape { hidden, inter, top_k, .. } = workload.shape;
        let (tokens, routes) = (workload.num_tokens(), workload.num_routes());
        let (batch, top) = (Batch::new(&workload.slots), TopK::new(&ids, top_k).unwrap());
        let (experts, mut workspace) = (LoraExperts::new(&weights, id).unwrap(), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let [x, h]: [Vec<bf16>; 2] = [(0, tokens * hidden), (inputs, routes * inter)]
            .map(|(first, len)| data.inputs.range(first, len).collect());
        let [mut y1, mut y2]: [Vec<bf16>; 2] = [(0, routes * 2 * inter), (outputs, routes * hidden)]
            .map(|(first, len)| data.bases.range(first, len).collect());
        let (x, y) = (Matrix::new(&x, tokens, hidden).unwrap(), MatrixMut::new(&mut y1, routes, 2 * inter).unwrap());
        experts.add_gate_up_delta(&mut step, &top, x, y).unwrap();
        let (x, y) = (Matrix::new(&h, routes, inter).unwrap(), MatrixMut::new(&mut y2, routes, hidden).unwrap());
        experts.add_down_delta(&mut step, &top, x, y).unwrap();

        let mut got: BTreeMap<usize, [Vec<bf16>; 2]> = checked_tokens(&workload.slots)
            .into_iter()
            .map(|token| {
                let rows = |y: &[bf16], cols: usize| y[token * top_k * cols..][..top_k * cols].to_vec();
                (token, [rows(&y1, 2 * inter), rows(&y2, hidden)])
            })
            .collect();
        assert!(got.keys().eq(&[0, 1, 3, 4, 5]));
        let errors = workload.errors(&data, set, &ids, &got);
        assert!(errors.iter().all(|&error| 0.0 < error && error < 1e-2), "{errors:?}");
        let all_wrong = |errors: [f64; 2]| errors.iter().all(|&error| error > 0.5);
        assert!(all_wrong(workload.errors(&data, set + layout.elems, &ids, &got)));
        assert!(all_wrong(workload.errors(&data, set, &workload.chosen(2), &got)));
        let other = match shape {
            Halves::Interleaved => Halves::GateUp,
            _ => Halves::Interleaved,
        };
        let other = ExpertsWorkload { shape: Shape { halves: other, ..workload.shape }, ..workload.clone() };
        let [gate_up, down] = other.errors(&data, set, &ids, &got);
        assert!(gate_up > 0.5 && down < 1e-2, "{gate_up} {down}");
        got.get_mut(&3).unwrap()[1][hidden] = bf16::NAN;
        assert!(workload.errors(&data, set, &ids, &got)[1].is_nan());
    }
}

/// Of a slot.
fn expert_adapter(data: &Data, workload: &ExpertsWorkload, layout: &ExpertsLayout, set: usize, slot: usize) -> Adapter {
    let (ExpertsAdapter { rank, shared_outer }, mut tensors) = (workload.adapters[slot], Vec::new());
    for (module, name) in [(GATE, "gate_proj"), (UP, "up_proj"), (DOWN, "down_proj")] {
        let (layouts, [cols, rows]) = (workload.factor_layouts(slot, module), workload.features(module));
        let shared = [module != DOWN, module == DOWN].map(|is_outer| is_outer && shared_outer);
        let factors = [("A", [rank, cols]), ("B", [rows, rank])];
        for (factor, (letter, [rows, cols])) in factors.into_iter().enumerate() {
            let experts = if shared[factor] { 1 } else { workload.shape.num_experts };
            let firsts = layout.factors[slot][module][..experts].iter().map(|firsts| set + firsts[factor]);
            let values: Vec<bf16> = firsts.flat_map(|first| data.factor(first, layouts[factor])).collect();
            let tensor = Tensor::new(DType::BF16, [experts, rows, cols], bytemuck::cast_slice(&values).to_vec());
            tensors.push((format!("experts.{name}.lora_{letter}.weight"), tensor.unwrap()));
        }
    }
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#);
    Adapter::from_tensors(&config, tensors).unwrap()
}

fn tiny_experts(halves: Halves, shared_outer: [bool; 2]) -> ExpertsWorkload {
    let [first, second] = shared_outer;
    let adapter = |rank, shared_outer| ExpertsAdapter { rank, shared_outer };
    ExpertsWorkload {
        id: "moe-own/tiny".to_owned(),
        suite: Suite::MoeOwn,
        tag: String::new(),
        shape: Shape { hidden: 100, inter: 56, num_experts: 5, top_k: 2, halves },
        adapters: vec![adapter(5, first), adapter(8, second), adapter(3, first)],
        slots: tiny_slots(),
        router: Router { seed: 1, spread: Spread::Uniform },
    }
}

#[test]
fn padding_is_what_no_element_is_at() {
    let [a, b] = FactorLayout::linear(3, 300, 64);
    let len = |layout: FactorLayout| layout.padding().iter().map(std::iter::ExactSizeIterator::len).sum::<usize>();
    assert_eq!((a.elems(), len(a)), (8 * 512, 8 * 512 - 3 * 300));
    assert_eq!((b.elems(), len(b)), (8 * 64, 5 * 64));
    assert!(FactorLayout::linear(16, 512, 128).iter().all(|layout| layout.padding().is_empty()));
}

/// What judges the device's results finds none in the CPU's, and notices a wrong adapter, a missing slice and NaN.
#[test]
fn the_check_tells_right_from_wrong() {
    let workload = tiny(Operation::Linear, 100, vec![56, 24], vec![5, 8, 3]);
    let (data, layout) = (tiny_data(), SetLayout::new(&workload));
    let set = 3 * layout.elems;
    let (model, id) = workload.linear_model().unwrap();
    let weights = loaded(&data, &workload, &model, set);
    let tokens = workload.num_tokens();
    let x: Vec<_> = data.inputs.range(0, tokens * 100).collect();
    let mut y: Vec<_> = data.bases.range(0, tokens * 80).collect();
    let (x, y_matrix) = (Matrix::new(&x, tokens, 100).unwrap(), MatrixMut::new(&mut y, tokens, 80).unwrap());
    let (batch, mut workspace) = (Batch::new(&workload.slots), Workspace::default());
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    LoraLinear::new(&weights, id).unwrap().add_delta(&mut step, x, y_matrix).unwrap();

    let mut got = checked(&workload, &y);
    assert!(got.keys().eq(&[0, 1, 3, 4, 5]));
    let error = data.error(&workload, set, &got);
    assert!(0.0 < error && error < 5e-3, "{error}");
    assert!(data.error(&workload, set + layout.elems, &got) > 0.5);
    got.get_mut(&3).unwrap()[56..].copy_from_slice(&data.bases.range(3 * 80 + 56, 24).collect::<Vec<_>>());
    assert!(data.error(&workload, set, &got) > 2e-2);
    got.get_mut(&3).unwrap()[0] = bf16::NAN;
    assert!(data.error(&workload, set, &got).is_nan());
}

#[test]
fn the_check_of_embeddings_too() {
    let workload = tiny(Operation::Embedding, 1000, vec![80], vec![5, 8, 3]);
    let (data, layout) = (tiny_data(), SetLayout::new(&workload));
    let set = 3 * layout.elems;
    let (model, id) = workload.embedding_model().unwrap();
    let weights = loaded(&data, &workload, &model, set);
    let tokens = workload.num_tokens();
    let ids: Vec<i32> = (0..tokens).map(|token| i32::try_from(workload.token_id(token)).unwrap()).collect();
    let mut y: Vec<_> = data.bases.range(0, tokens * 80).collect();
    let y_matrix = MatrixMut::new(&mut y, tokens, 80).unwrap();
    let (batch, mut workspace) = (Batch::new(&workload.slots), Workspace::default());
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    LoraEmbedding::new(&weights, id).unwrap().add_delta(&mut step, &ids, y_matrix).unwrap();

    let got = checked(&workload, &y);
    let error = data.error(&workload, set, &got);
    assert!(0.0 < error && error < 5e-3, "{error}");
    assert!(data.error(&workload, set + layout.elems, &got) > 0.5);
}

fn tiny(operation: Operation, in_features: usize, out_slices: Vec<usize>, ranks: Vec<usize>) -> Workload {
    Workload {
        id: "dec/tiny/layer/r8/t6/uniform3".to_owned(),
        suite: Suite::Decode,
        tag: String::new(),
        model: "tiny".to_owned(),
        layer: "layer".to_owned(),
        operation,
        in_features,
        out_slices,
        ranks,
        slots: tiny_slots(),
    }
}

fn tiny_slots() -> Vec<Slot> {
    [2, 0, -1, 1, 2, 0].map(|slot: i32| bytemuck::cast(slot)).to_vec()
}

fn tiny_data() -> Data {
    Data { weights: Noise::new(1, 10_007, 0.2), inputs: Noise::new(2, 10_007, 1.0), bases: Noise::new(3, 10_007, 0.1) }
}

/// The adapters of a set.
fn loaded(data: &Data, workload: &Workload, model: &Model, set: usize) -> WeightTable {
    let arena_bytes = SetLayout::new(workload).elems * DType::BF16.bytes();
    let weights = WeightTable::new(model, DType::BF16, workload.capacity(), arena_bytes).unwrap();
    for (slot, adapter) in data.adapters(workload, set).unwrap().iter().enumerate() {
        weights.load(Slot::new(slot as u16), &adapter.plan(model, DType::BF16).unwrap()).unwrap();
    }
    weights
}

/// The rows of y that are checked.
fn checked(workload: &Workload, y: &[bf16]) -> BTreeMap<usize, Vec<bf16>> {
    let cols = workload.out_features();
    let rows = checked_tokens(&workload.slots).into_iter();
    rows.map(|token| (token, y[token * cols..][..cols].to_vec())).collect()
}

#[test]
fn checked_tokens_are_spread_over_those_with_an_adapter() {
    let slots: Vec<Slot> = (0..1000).map(|token| bytemuck::cast(if token % 4 == 0 { -1 } else { token })).collect();
    let checked = checked_tokens(&slots);
    assert_eq!((checked.len(), checked[0], *checked.last().unwrap()), (32, 1, 999));
    assert!(checked.is_sorted() && checked.iter().all(|token| token % 4 != 0));
    assert_eq!(checked_tokens(&slots[..2]), [1]);
}
