//! A model as the ranks of a tensor-parallel group hold it: together the whole of it, and nothing twice.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

use aril::{
    DType,
    adapter::{
        Adapter, SlotImage, Tensor,
        layout::{B, LinearA},
    },
    model::{Experts, Halves, Linear, LinearId, MAX_SLICES, ModelSpec, Parallel, SpecError, TpRank},
};
use proptest::prelude::*;

fn single() -> ModelSpec {
    ModelSpec::new(TpRank::SINGLE)
}

fn at(rank: usize, size: usize) -> ModelSpec {
    ModelSpec::new(TpRank::new(rank, size).unwrap())
}

/// An adapter of rank 1 for modules `m.NAME`: A counts its columns, B its rows.
fn counting(in_features: usize, modules: &[(&str, usize)]) -> Adapter {
    let count = |shape: [usize; 2]| {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|i| i as f32).collect();
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap()
    };
    let tensors = modules.iter().flat_map(|(module, out_features)| {
        [
            (format!("m.{module}.lora_A.weight"), count([1, in_features])),
            (format!("m.{module}.lora_B.weight"), count([*out_features, 1])),
        ]
    });
    Adapter::from_tensors(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#, tensors).unwrap()
}

/// The columns of A and the rows of B that a rank gets of one slice.
fn parts(image: &SlotImage<'_>, model: &ModelSpec, id: LinearId, slice: usize) -> [Vec<usize>; 2] {
    let mut block = vec![0_f32; image.bytes() / 4];
    image.write_to(bytemuck::cast_slice_mut(&mut block)).unwrap();
    let site = &model[id];
    let entry = *image.entries().iter().find(|entry| entry.entry == site.first_entry() + slice).unwrap();
    let a = LinearA { rank: 1, in_features: site.in_features() };
    let b = B { out_features: site.slices()[slice].out_features(), rank: 1 };
    let weight = |elem: usize| block[elem] as usize;
    [
        (0..a.in_features).map(|feature| weight(entry.a_elems + a.at(0, feature))).collect(),
        (0..b.out_features).map(|output| weight(entry.b_elems + b.at(output, 0))).collect(),
    ]
}

proptest! {
    /// Column-parallel: the ranks' rows of B, one after the other, are B; each has all of A.
    #[test]
    fn column_shards_make_the_whole(size in 1..6_usize, q in 1..10_usize, v in 1..10_usize, in_features in 1..20_usize) {
        let modules = [("q", q * size), ("v", v * size)];
        let adapter = counting(in_features, &modules);
        let mut rows = [Vec::new(), Vec::new()];
        for rank in 0..size {
            let mut model = at(rank, size);
            let layer = Linear::new("m", Parallel::Column, in_features).slice("q", q * size).slice("v", v * size);
            let id = model.linear(layer).unwrap();
            prop_assert_eq!((model[id].in_features(), model[id].out_features()), (in_features, q + v));
            let image = adapter.plan(&model, DType::F32).unwrap();
            for (slice, rows) in rows.iter_mut().enumerate() {
                let [a, b] = parts(&image, &model, id, slice);
                prop_assert_eq!(a, (0..in_features).collect::<Vec<_>>());
                rows.extend(b);
            }
        }
        for ((_, out_features), rows) in modules.iter().zip(rows) {
            prop_assert_eq!(rows, (0..*out_features).collect::<Vec<_>>());
        }
    }

    /// Row-parallel: the ranks' columns of A, one after the other, are A; each has all of B.
    #[test]
    fn row_shards_make_the_whole(size in 1..6_usize, part in 1..10_usize, out_features in 1..20_usize) {
        let adapter = counting(part * size, &[("o", out_features)]);
        let mut columns = Vec::new();
        for rank in 0..size {
            let mut model = at(rank, size);
            let id = model.linear(Linear::new("m", Parallel::Row, part * size).slice("o", out_features)).unwrap();
            prop_assert_eq!((model[id].in_features(), model[id].out_features()), (part, out_features));
            let [a, b] = parts(&adapter.plan(&model, DType::F32).unwrap(), &model, id, 0);
            columns.extend(a);
            prop_assert_eq!(b, (0..out_features).collect::<Vec<_>>());
        }
        prop_assert_eq!(columns, (0..part * size).collect::<Vec<_>>());
    }

    /// A slice of fewer parts than ranks: neighbours hold the same part, and the parts make the whole.
    #[test]
    fn replicated_shards_are_held_by_neighbours(shards in 1..4_usize, copies in 1..4_usize, part in 1..10_usize) {
        let (size, out_features) = (shards * copies, shards * part);
        let adapter = counting(3, &[("k", out_features)]);
        for rank in 0..size {
            let mut model = at(rank, size);
            let layer = Linear::new("m", Parallel::Column, 3).slice("q", size).replicated_slice("k", out_features, shards);
            let id = model.linear(layer).unwrap();
            prop_assert_eq!(model[id].slices()[0].out_features(), 1);
            let [_, b] = parts(&adapter.plan(&model, DType::F32).unwrap(), &model, id, 1);
            let first = rank / copies * part;
            prop_assert_eq!(b, (first..first + part).collect::<Vec<_>>());
        }
    }
}

#[test]
fn replicated_layers_and_embeddings_are_whole_on_every_rank() {
    for rank in 0..3 {
        let mut model = at(rank, 3);
        let id = model.linear(Linear::new("m", Parallel::Replicated, 5).slice("gate", 7)).unwrap();
        let embedding = model.embedding("embed", 11, 5).unwrap();
        assert_eq!((model[id].in_features(), model[id].out_features()), (5, 7));
        assert_eq!((model[embedding].vocab(), model[embedding].hidden()), (11, 5));
    }
}

#[test]
fn entries_follow_each_other() {
    let mut model = single();
    let qkv = Linear::new("l.0", Parallel::Column, 4).slice("q", 4).slice("k", 2).slice("v", 2).fused("qkv");
    let qkv = model.linear(qkv).unwrap();
    let embed = model.embedding("embed", 8, 4).unwrap();
    let head = model.linear(Linear::new("", Parallel::Column, 4).slice("lm_head", 8)).unwrap();
    assert_eq!((model[qkv].first_entry(), model[embed].entry(), model[head].first_entry()), (0, 3, 4));
    assert_eq!(model.num_entries(), 5);
    assert_eq!(model[qkv].slices()[1].module(), "l.0.k");
    assert_eq!((model[embed].module(), model[head].slices()[0].module()), ("embed", "lm_head"));
}

#[test]
fn modules_described_twice_are_refused() {
    let mut model = single();
    model.linear(Linear::new("l", Parallel::Column, 4).slice("q", 4).fused("qkv")).unwrap();
    model.embedding("embed", 8, 4).unwrap();
    let entries = model.num_entries();
    let refused = |result: Result<(), SpecError>, path: &str| {
        assert_eq!(result, Err(SpecError::Duplicate { module: path.into() }));
    };
    let linear = |path: &str| Linear::new(path, Parallel::Column, 4);
    refused(model.linear(linear("l").slice("q", 4)).map(|_| ()), "l.q");
    refused(model.linear(linear("l").slice("k", 4).slice("k", 4)).map(|_| ()), "l.k");
    refused(model.linear(linear("l").slice("qkv", 4)).map(|_| ()), "l.qkv");
    refused(model.linear(linear("l").slice("k", 4).fused("q")).map(|_| ()), "l.q");
    refused(model.linear(linear("").slice("embed", 4)).map(|_| ()), "embed");
    refused(model.embedding("l.q", 8, 4).map(|_| ()), "l.q");
    // What was refused has left nothing behind.
    assert_eq!(model.num_entries(), entries);
    model.linear(linear("l").slice("k", 4)).unwrap();
}

#[test]
fn sizes_that_no_layer_has_are_refused() {
    let too_large = 1 << 31;
    for features in [0, too_large] {
        let refused = |result: Result<(), SpecError>, path: &str| {
            assert_eq!(result, Err(SpecError::Features { path: path.into(), features }));
        };
        let linear = |in_features, out| Linear::new("l", Parallel::Column, in_features).slice("q", out);
        refused(single().linear(linear(features, 4)).map(|_| ()), "l");
        refused(single().linear(linear(4, features)).map(|_| ()), "l.q");
        refused(single().embedding("embed", features, 4).map(|_| ()), "embed");
        refused(single().embedding("embed", 4, features).map(|_| ()), "embed");
    }
}

#[test]
fn layers_of_no_slices_or_too_many_are_refused() {
    for slices in [0, MAX_SLICES + 1] {
        let layer = (0..slices).fold(Linear::new("l", Parallel::Column, 4), |layer, i| layer.slice(format!("m{i}"), 4));
        assert_eq!(single().linear(layer), Err(SpecError::Slices { path: "l".into(), slices }));
    }
    let layer = Linear::new("l", Parallel::Column, 4);
    let layer = (0..MAX_SLICES).fold(layer, |layer, i| layer.slice(format!("m{i}"), 4));
    single().linear(layer).unwrap();
}

#[test]
fn ranks_outside_the_group_are_refused() {
    assert_eq!(TpRank::new(2, 2), Err(SpecError::TpRank { rank: 2, size: 2 }));
    assert_eq!(TpRank::new(0, 0), Err(SpecError::TpRank { rank: 0, size: 0 }));
    assert_eq!(TpRank::new(0, 1), Ok(TpRank::SINGLE));
}

#[test]
fn uneven_cuts_are_refused() {
    let uneven = |layer: Linear, path: &str, features, shards| {
        let (path, size) = (path.to_owned(), 4);
        assert_eq!(at(1, size).linear(layer), Err(SpecError::Uneven { path, features, shards, size }));
    };
    let column = || Linear::new("l", Parallel::Column, 6);
    uneven(column().slice("q", 6), "l.q", 6, 4);
    uneven(Linear::new("l", Parallel::Row, 6).slice("o", 8), "l", 6, 4);
    // Parts that do not divide over the ranks, of which there are none, or that do not divide the slice.
    uneven(column().replicated_slice("k", 6, 3), "l.k", 6, 3);
    uneven(column().replicated_slice("k", 6, 0), "l.k", 6, 0);
    uneven(column().replicated_slice("k", 5, 2), "l.k", 5, 2);
}

#[test]
fn only_a_column_parallel_layer_has_replicated_slices() {
    for parallel in [Parallel::Row, Parallel::Replicated] {
        let mut model = ModelSpec::new(TpRank::new(1, 4).unwrap());
        let error = model.linear(Linear::new("m", parallel, 8).replicated_slice("k", 8, 2)).unwrap_err();
        assert_eq!(error, SpecError::Replicated { module: "m.k".into() });
        assert_eq!(model.num_entries(), 0);
    }
}

#[test]
fn experts_have_an_entry_for_each_module_and_for_what_they_share() {
    let mut model = at(1, 2);
    let embed = model.embedding("embed", 8, 4).unwrap();
    let id = model.experts(Experts::new("l.0.experts", 6, 4, 10).held([4, 1, 2])).unwrap();
    let head = model.linear(Linear::new("", Parallel::Column, 4).slice("lm_head", 8)).unwrap();
    let site = &model[id];
    assert_eq!((site.num_experts(), site.held(), site.halves()), (6, &[4, 1, 2][..], Some(Halves::GateUp)));
    let (gate_up, down) = (site.gate_up(), site.down());
    // The ranks share out what is between the projections.
    assert_eq!((gate_up.in_features(), gate_up.out_features(), gate_up.num_slices()), (4, 2 * 5, 2));
    assert_eq!((down.in_features(), down.out_features(), down.num_slices()), (5, 4, 1));
    let entries = |local: usize| [gate_up.expert_entry(local), down.expert_entry(local)];
    let first = model[embed].entry() + 1;
    assert_eq!([gate_up.shared_entry(), down.shared_entry()], [first, first + 8]);
    assert_eq!([0, 1, 2].map(entries), [[first + 2, first + 9], [first + 4, first + 10], [first + 6, first + 11]]);
    assert_eq!(model[head].first_entry(), first + 12);
    assert_eq!(model.num_entries(), first + 13);
}

#[test]
fn experts_may_be_whole_absent_or_without_a_gate() {
    let mut model = at(3, 4);
    let whole = model.experts(Experts::new("a", 2, 4, 6).tensor_parallel(TpRank::SINGLE).ungated()).unwrap();
    assert_eq!((model[whole].gate_up().out_features(), model[whole].gate_up().num_slices()), (6, 1));
    assert_eq!((model[whole].halves(), model[whole].held()), (None, &[0, 1][..]));
    let none = model.experts(Experts::new("b", 2, 4, 8).held([]).halves(Halves::UpGate)).unwrap();
    assert_eq!((model[none].held(), model[none].halves()), (&[][..], Some(Halves::UpGate)));
    // Nobody has factors, but the places of what is shared are there.
    assert_eq!(model[none].down().shared_entry() - model[none].gate_up().shared_entry(), 2);
}

#[test]
fn experts_that_cannot_be_are_refused() {
    let path = || "l.experts".to_owned();
    let refused = |layer: Experts, error: SpecError| {
        let mut model = at(0, 4);
        model.linear(Linear::new("l", Parallel::Column, 4).slice("q", 4)).unwrap();
        let entries = model.num_entries();
        assert_eq!(model.experts(layer), Err(error));
        assert_eq!(model.num_entries(), entries);
    };
    let layer = |num_experts, hidden, inter| Experts::new(path(), num_experts, hidden, inter);
    let too_many = 1 << 31;
    for num_experts in [0, too_many] {
        refused(layer(num_experts, 4, 8), SpecError::Experts { path: path(), num_experts });
    }
    for features in [0, too_many] {
        refused(layer(2, features, 8), SpecError::Features { path: path(), features });
        refused(layer(2, 4, features), SpecError::Features { path: path(), features });
    }
    refused(layer(2, 4, 6), SpecError::Uneven { path: path(), features: 6, shards: 4, size: 4 });
    for (held, expert) in [([0, 2], 2), ([1, 1], 1)] {
        refused(layer(2, 4, 8).held(held), SpecError::Held { path: path(), expert, num_experts: 2 });
    }
    refused(Experts::new("l.q", 2, 4, 8), SpecError::Duplicate { module: "l.q".into() });

    let mut model = single();
    model.experts(layer(2, 4, 8)).unwrap();
    let duplicate = SpecError::Duplicate { module: path() };
    assert_eq!(model.experts(layer(2, 4, 8)), Err(duplicate.clone()));
    assert_eq!(model.embedding(path(), 8, 4), Err(duplicate));
}
