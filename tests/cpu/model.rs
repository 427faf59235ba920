//! Sharding: the ranks of a tensor-parallel group together hold the whole model, and nothing twice.
#![expect(clippy::single_range_in_vec_init, reason = "a slice may hold one range of rows")]

use aril::{
    DType,
    adapter::{
        Adapter, SlotImage, Tensor,
        layout::{B, LinearA},
    },
    cpu::{LoraEmbedding, LoraExperts, LoraLinear, WeightTable},
    error::{LoadError, SlotError},
    model::{
        Experts, ExpertsId, Halves, Linear, LinearId, MAX_SLICES, Model, ModelSpec, Parallel, Shard, SpecError, TpRank,
    },
    plan::{Capacity, PlanError},
};
use proptest::prelude::*;

/// The model of a rank of `size`.
fn shard(spec: &ModelSpec, rank: usize, size: usize) -> Result<Model, SpecError> {
    spec.shard(TpRank::new(rank, size).unwrap())
}

/// The model of every rank.
fn shards(spec: &ModelSpec, size: usize) -> Vec<Model> {
    (0..size).map(|rank| shard(spec, rank, size).unwrap()).collect()
}

/// The description of one layer.
fn one(layer: Linear) -> (ModelSpec, LinearId) {
    let mut spec = ModelSpec::new();
    let id = spec.linear(layer).unwrap();
    (spec, id)
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
fn parts(image: &SlotImage<'_>, model: &Model, id: LinearId, slice: usize) -> [Vec<usize>; 2] {
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

/// Checks that a rank's part of an adapter matches the part of the base weights that the site names.
fn check_cuts(adapter: &Adapter, model: &Model, id: LinearId) -> Result<(), TestCaseError> {
    let image = adapter.plan(model, DType::F32).unwrap();
    for (slice, site) in model[id].slices().iter().enumerate() {
        let [a, b] = parts(&image, model, id, slice);
        prop_assert_eq!(a, model[id].in_range().collect::<Vec<_>>());
        let b_len = b.len();
        prop_assert_eq!(b, site.ranges().iter().cloned().flatten().collect::<Vec<_>>());
        prop_assert_eq!(site.out_features(), b_len);
    }
    prop_assert_eq!(model[id].in_features(), model[id].in_range().len());
    Ok(())
}

proptest! {
    /// Column-parallel: the ranks' rows of B, one after the other, are B; each has all of A.
    #[test]
    fn column_shards_make_the_whole(
        size in 1..6_usize, q in 1..10_usize, v in 1..10_usize, in_features in 1..20_usize,
    ) {
        let adapter = counting(in_features, &[("q", q * size), ("v", v * size)]);
        let layer = Linear::new("m", Parallel::Column, in_features).slice("q", q * size).slice("v", v * size);
        let (spec, id) = one(layer);
        for (rank, model) in shards(&spec, size).iter().enumerate() {
            prop_assert_eq!((model[id].in_range(), model[id].out_features()), (0..in_features, q + v));
            for (slice, part) in [q, v].into_iter().enumerate() {
                prop_assert_eq!(model[id].slices()[slice].ranges(), [rank * part..(rank + 1) * part]);
            }
            check_cuts(&adapter, model, id)?;
        }
    }

    /// Row-parallel: the ranks' columns of A, one after the other, are A; each has all of B.
    #[test]
    fn row_shards_make_the_whole(size in 1..6_usize, part in 1..10_usize, out_features in 1..20_usize) {
        let adapter = counting(part * size, &[("o", out_features)]);
        let (spec, id) = one(Linear::new("m", Parallel::Row, part * size).slice("o", out_features));
        for (rank, model) in shards(&spec, size).iter().enumerate() {
            prop_assert_eq!(model[id].in_range(), rank * part..(rank + 1) * part);
            prop_assert_eq!(model[id].slices()[0].ranges(), [0..out_features]);
            check_cuts(&adapter, model, id)?;
        }
    }

    /// Heads are never divided. With fewer key-value heads than ranks, neighbouring ranks hold the same head.
    #[test]
    fn ranks_hold_whole_heads(
        size in 1..7_usize, q_heads in 1..4_usize, kv_heads in 1..13_usize, dim in 1..9_usize,
    ) {
        let q_heads = q_heads * size;
        let layer = Linear::new("m", Parallel::Column, 3).heads("q", q_heads, dim).kv_heads("k", kv_heads, dim);
        let (spec, id) = one(layer);
        if !size.is_multiple_of(kv_heads) && !kv_heads.is_multiple_of(size) {
            let error = SpecError::Heads { module: "m.k".into(), heads: kv_heads, size };
            prop_assert_eq!(shard(&spec, 0, size).unwrap_err(), error);
            return Ok(());
        }
        let adapter = counting(3, &[("q", q_heads * dim), ("k", kv_heads * dim)]);
        for (rank, model) in shards(&spec, size).iter().enumerate() {
            let heads = |heads: std::ops::Range<usize>| heads.start * dim..heads.end * dim;
            let of_q = q_heads / size;
            let kv = if kv_heads < size {
                let copies = size / kv_heads;
                rank / copies..rank / copies + 1
            } else {
                rank * (kv_heads / size)..(rank + 1) * (kv_heads / size)
            };
            let ranges = model[id].slices().iter().flat_map(|slice| slice.ranges().to_vec());
            prop_assert_eq!(ranges.collect::<Vec<_>>(), [heads(rank * of_q..(rank + 1) * of_q), heads(kv)]);
            check_cuts(&adapter, model, id)?;
        }
    }
}

#[test]
fn replicated_layers_and_embeddings_are_whole_on_every_rank() {
    let (mut spec, id) = one(Linear::new("m", Parallel::Replicated, 5).slice("gate", 7));
    let embedding = spec.embedding("embed", 11, 5).unwrap();
    for model in shards(&spec, 3) {
        assert_eq!((model[id].in_range(), model[id].slices()[0].ranges()), (0..5, &[0..7][..]));
        assert_eq!((model[embedding].vocab(), model[embedding].hidden()), (11, 5));
    }
}

/// Shards of one description accept its ids, and no other model does, not even an equal one.
#[test]
fn ids_are_of_one_description() {
    let describe = || {
        let mut spec = ModelSpec::new();
        let linear = spec.linear(Linear::new("m", Parallel::Column, 4).slice("q", 4)).unwrap();
        let embedding = spec.embedding("embed", 8, 4).unwrap();
        let experts = spec.experts(Experts::new("experts", 2, 4, 4).top_k(1)).unwrap();
        (spec, (linear, embedding, experts))
    };
    let [(spec, own), (equal, others)] = [(); 2].map(|()| describe());
    for model in [shard(&spec, 0, 1), shard(&spec, 1, 2), shard(&equal, 0, 1)].map(Result::unwrap) {
        let (ids, foreign) = if model == shard(&equal, 0, 1).unwrap() { (others, own) } else { (own, others) };
        let table = WeightTable::new(&model, DType::F32, Capacity::tokens(1).slots(1).rank(1), 0).unwrap();
        assert!(model.linear(ids.0).is_some() && model.linear(foreign.0).is_none());
        assert!(model.embedding(ids.1).is_some() && model.embedding(foreign.1).is_none());
        assert!(model.experts(ids.2).is_some() && model.experts(foreign.2).is_none());
        assert!(LoraLinear::new(&table, ids.0).is_ok());
        assert!(LoraEmbedding::new(&table, ids.1).is_ok());
        assert!(LoraExperts::new(&table, ids.2).is_ok());
        assert_eq!(LoraLinear::new(&table, foreign.0).unwrap_err(), PlanError::Foreign);
        assert_eq!(LoraEmbedding::new(&table, foreign.1).unwrap_err(), PlanError::Foreign);
        assert_eq!(LoraExperts::new(&table, foreign.2).unwrap_err(), PlanError::Foreign);
    }
}

#[test]
#[should_panic(expected = "the linear layer's id belongs to another model")]
fn an_index_by_another_descriptions_id_panics() {
    let layer = || Linear::new("m", Parallel::Column, 4).slice("q", 4);
    let [(spec, _), (_, id)] = [(); 2].map(|()| one(layer()));
    let _ = &shard(&spec, 0, 1).unwrap()[id];
}

#[test]
fn models_are_equal_if_they_are_the_same_shard() {
    let layer = || Linear::new("m", Parallel::Column, 4).slice("q", 4);
    let [(spec, _), (equal, _)] = [(); 2].map(|()| one(layer()));
    let model = shard(&spec, 0, 2).unwrap();
    assert_eq!(model, model.clone());
    assert_eq!(model, shard(&spec, 0, 2).unwrap());
    assert_ne!(model, shard(&spec, 1, 2).unwrap());
    assert_ne!(model, shard(&spec, 0, 1).unwrap());
    assert_ne!(model, shard(&equal, 0, 2).unwrap());
    assert_eq!((model.tp().rank(), model.tp().size()), (0, 2));
}

/// A frozen model does not change. The extended model has the old ids and one more.
#[test]
fn a_layer_may_be_added_after_a_shard() {
    let (mut spec, old_id) = one(Linear::new("m", Parallel::Column, 2).slice("q", 4));
    let before = shard(&spec, 0, 1).unwrap();
    let new_id = spec.linear(Linear::new("n", Parallel::Column, 2).slice("q", 4)).unwrap();
    let after = shard(&spec, 0, 1).unwrap();
    assert_ne!(before, after);
    assert_eq!((before.num_entries(), after.num_entries()), (1, 2));
    assert_eq!((before.linears().len(), after.linears().len()), (1, 2));
    assert!(before.linear(new_id).is_none());
    assert_eq!(before[old_id].first_entry(), after[old_id].first_entry());
    assert_eq!(after[new_id].slices()[0].module(), "n.q");
    // An image planned before does not cover the new layer.
    let adapter = counting(2, &[("q", 4)]);
    let images = [&before, &after].map(|model| adapter.plan(model, DType::F32).unwrap());
    let table = WeightTable::new(&after, DType::F32, Capacity::tokens(1).slots(1).rank(1), images[1].bytes()).unwrap();
    assert!(matches!(table.load(0, &images[0]), Err(LoadError::Slot(SlotError::Model))));
    table.load(0, &images[1]).unwrap();
}

#[test]
fn entries_follow_each_other() {
    let layer = Linear::new("l.0", Parallel::Column, 4).slice("q", 4).slice("k", 2).slice("v", 2).fused("qkv");
    let (mut spec, qkv) = one(layer);
    let embed = spec.embedding("embed", 8, 4).unwrap();
    let head = spec.linear(Linear::new("", Parallel::Column, 4).slice("lm_head", 8)).unwrap();
    let model = shard(&spec, 0, 1).unwrap();
    assert_eq!((model[qkv].first_entry(), model[embed].entry(), model[head].first_entry()), (0, 3, 4));
    assert_eq!(model.num_entries(), 5);
    assert_eq!(model[qkv].slices()[1].module(), "l.0.k");
    assert_eq!((model[embed].module(), model[head].slices()[0].module()), ("embed", "lm_head"));
}

#[test]
fn modules_described_twice_are_refused() {
    let linear = |path: &str| Linear::new(path, Parallel::Column, 4);
    let (mut spec, _) = one(linear("l").slice("q", 4).fused("qkv"));
    spec.embedding("embed", 8, 4).unwrap();
    let model = shard(&spec, 0, 1).unwrap();
    let refused = |result: Result<(), SpecError>, path: &str| {
        assert_eq!(result, Err(SpecError::Duplicate { module: path.into() }));
    };
    refused(spec.linear(linear("l").slice("q", 4)).map(drop), "l.q");
    refused(spec.linear(linear("l").slice("k", 4).slice("k", 4)).map(drop), "l.k");
    refused(spec.linear(linear("l").slice("qkv", 4)).map(drop), "l.qkv");
    refused(spec.linear(linear("l").slice("k", 4).fused("q")).map(drop), "l.q");
    refused(spec.linear(linear("").slice("embed", 4)).map(drop), "embed");
    refused(spec.embedding("l.q", 8, 4).map(drop), "l.q");
    // A refused call changes nothing.
    assert_eq!(shard(&spec, 0, 1).unwrap(), model);
    spec.linear(linear("l").slice("k", 4)).unwrap();
}

#[test]
fn sizes_that_no_layer_has_are_refused() {
    for features in [0, 1 << 31, usize::MAX] {
        let refused = |result: Result<(), SpecError>, path: &str| {
            assert_eq!(result, Err(SpecError::Features { path: path.into(), features }));
        };
        let layer = |in_features| Linear::new("l", Parallel::Column, in_features);
        refused(ModelSpec::new().linear(layer(features).slice("q", 4)).map(drop), "l");
        refused(ModelSpec::new().linear(layer(4).slice("q", features)).map(drop), "l.q");
        refused(ModelSpec::new().linear(layer(4).heads("q", features, 1)).map(drop), "l.q");
        refused(ModelSpec::new().linear(layer(4).kv_heads("k", 1, features)).map(drop), "l.k");
        refused(ModelSpec::new().embedding("embed", features, 4).map(drop), "embed");
        refused(ModelSpec::new().embedding("embed", 4, features).map(drop), "embed");
    }
    let layer = Linear::new("l", Parallel::Column, 4).heads("q", usize::MAX / 2, 3);
    assert_eq!(ModelSpec::new().linear(layer), Err(SpecError::Features { path: "l.q".into(), features: usize::MAX }));
}

#[test]
fn layers_of_no_slices_or_too_many_are_refused() {
    for slices in [0, MAX_SLICES + 1] {
        let layer = (0..slices).fold(Linear::new("l", Parallel::Column, 4), |layer, i| layer.slice(format!("m{i}"), 4));
        assert_eq!(ModelSpec::new().linear(layer), Err(SpecError::Slices { path: "l".into(), slices }));
    }
    let layer = Linear::new("l", Parallel::Column, 4);
    one((0..MAX_SLICES).fold(layer, |layer, i| layer.slice(format!("m{i}"), 4)));
}

#[test]
fn ranks_outside_the_group_are_refused() {
    assert_eq!(TpRank::new(2, 2), Err(SpecError::TpRank { rank: 2, size: 2 }));
    assert_eq!(TpRank::new(0, 0), Err(SpecError::TpRank { rank: 0, size: 0 }));
    assert_eq!(TpRank::new(0, 1), Ok(TpRank::SINGLE));
}

/// The sharding refuses these, and leaves the description as it was.
#[test]
fn uneven_cuts_are_refused() {
    let refused = |layer: Linear, error: SpecError| {
        let (spec, _) = one(layer);
        for rank in 0..4 {
            assert_eq!(shard(&spec, rank, 4).unwrap_err(), error);
        }
        shard(&spec, 1, 2).unwrap();
    };
    let uneven = |path: &str| SpecError::Uneven { path: path.into(), features: 6, shards: 4, size: 4 };
    let heads = |module: &str| SpecError::Heads { module: module.into(), heads: 6, size: 4 };
    let column = || Linear::new("l", Parallel::Column, 6);
    refused(column().slice("q", 6), uneven("l.q"));
    refused(Linear::new("l", Parallel::Row, 6).slice("o", 8), uneven("l"));
    // 6 heads of 2 features could be cut into 4 parts, but not into whole heads.
    refused(column().heads("q", 6, 2), heads("l.q"));
    refused(column().kv_heads("k", 6, 2), heads("l.k"));
    // Only heads of keys and values are held by several ranks.
    let (spec, _) = one(column().heads("q", 2, 4));
    assert_eq!(shard(&spec, 0, 4).unwrap_err(), SpecError::Heads { module: "l.q".into(), heads: 2, size: 4 });
}

#[test]
fn only_a_column_parallel_layer_has_heads() {
    for parallel in [Parallel::Row, Parallel::Replicated] {
        let layer = || Linear::new("m", parallel, 8);
        for layer in [layer().heads("k", 4, 2), layer().kv_heads("k", 4, 2)] {
            let mut spec = ModelSpec::new();
            assert_eq!(spec.linear(layer), Err(SpecError::NotColumn { module: "m.k".into() }));
            assert_eq!(shard(&spec, 0, 1).unwrap().num_entries(), 0);
        }
    }
}

#[test]
fn experts_have_an_entry_for_each_module_and_for_what_they_share() {
    let mut spec = ModelSpec::new();
    let embed = spec.embedding("embed", 8, 4).unwrap();
    let id = spec.experts(Experts::new("l.0.experts", 6, 4, 10).top_k(3)).unwrap();
    let head = spec.linear(Linear::new("", Parallel::Column, 4).slice("lm_head", 8)).unwrap();
    let model = spec.shard(Shard::new(TpRank::new(1, 2).unwrap()).held(id, [4, 1, 2])).unwrap();
    let site = &model[id];
    assert_eq!((site.top_k(), site.inter_range(), model.expert_layers().len()), (3, 5..10, 1));
    assert_eq!((site.num_experts(), site.held(), site.halves()), (6, &[4, 1, 2][..], Some(Halves::GateUp)));
    let (gate_up, down) = (site.gate_up(), site.down());
    // The ranks divide the intermediate features.
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
    let mut spec = ModelSpec::new();
    let whole = spec.experts(Experts::new("a", 2, 4, 6).ungated()).unwrap();
    let none = spec.experts(Experts::new("b", 2, 4, 8).halves(Halves::UpGate)).unwrap();
    let q = spec.linear(Linear::new("l", Parallel::Column, 4).slice("q", 8)).unwrap();
    let view = Shard::new(TpRank::new(3, 4).unwrap()).experts_tp(TpRank::new(1, 2).unwrap()).held(none, []);
    let model = spec.shard(view).unwrap();
    assert_eq!((model[whole].inter_range(), model[none].inter_range()), (3..6, 4..8));
    assert_eq!((model[q].slices()[0].ranges(), model.tp().rank(), model.tp().size()), (&[6..8][..], 3, 4));
    assert_eq!((model[whole].gate_up().out_features(), model[whole].gate_up().num_slices()), (3, 1));
    assert_eq!((model[whole].halves(), model[whole].held()), (None, &[0, 1][..]));
    assert_eq!((model[none].held(), model[none].halves()), (&[][..], Some(Halves::UpGate)));
    // No expert has factors, but the entries of shared factors exist.
    assert_eq!(model[none].down().shared_entry() - model[none].gate_up().shared_entry(), 2);
}

/// One description gives every rank its view. Two views are the same model if they are equal.
#[test]
fn ranks_have_views_of_one_description() {
    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("a", 8, 4, 8)).unwrap();
    let single = || Shard::new(TpRank::SINGLE);
    let views: [fn(Shard, ExpertsId) -> Shard; 6] = [
        |shard, _| shard,
        |shard, id| shard.held(id, 0..4),
        |shard, id| shard.held(id, 4..8),
        |shard, id| shard.held(id, (0..4).rev()),
        |shard, _| shard.experts_tp(TpRank::new(1, 2).unwrap()),
        |shard, id| shard.experts_tp(TpRank::new(1, 2).unwrap()).held(id, 0..4),
    ];
    let models: Vec<_> = views.iter().map(|view| spec.shard(view(single(), id)).unwrap()).collect();
    for (i, view) in views.iter().enumerate() {
        let again = spec.shard(view(single(), id)).unwrap();
        for (j, model) in models.iter().enumerate() {
            assert_eq!(again == *model, i == j, "views {i} and {j}");
        }
    }
    assert_eq!(models[0], shard(&spec, 0, 1).unwrap());
    assert_eq!(models[3][id].held(), [3, 2, 1, 0]);
    // The last setting of a layer counts.
    assert_eq!(spec.shard(single().held(id, [7]).held(id, 4..8)).unwrap(), models[2]);
}

#[test]
fn experts_that_cannot_be_are_refused() {
    let path = || "l.experts".to_owned();
    let layer = |num_experts, hidden, inter| Experts::new(path(), num_experts, hidden, inter);
    let (mut spec, _) = one(Linear::new("l", Parallel::Column, 4).slice("q", 4));
    let model = shard(&spec, 0, 1).unwrap();
    let mut refused = |layer: Experts, error: SpecError| {
        assert_eq!(spec.experts(layer), Err(error));
        assert_eq!(shard(&spec, 0, 1).unwrap(), model);
    };
    let too_many = 1 << 31;
    for num_experts in [0, too_many] {
        refused(layer(num_experts, 4, 8), SpecError::Experts { path: path(), num_experts });
    }
    for features in [0, too_many] {
        refused(layer(2, features, 8), SpecError::Features { path: path(), features });
        refused(layer(2, 4, features), SpecError::Features { path: path(), features });
    }
    refused(Experts::new("l.q", 2, 4, 8), SpecError::Duplicate { module: "l.q".into() });

    let id = spec.experts(layer(2, 4, 6)).unwrap();
    for (held, expert) in [([0, 2], 2), ([1, 1], 1)] {
        let error = spec.shard(Shard::new(TpRank::SINGLE).held(id, held)).unwrap_err();
        assert_eq!(error, SpecError::Held { path: path(), expert, num_experts: 2 });
    }
    let (other, _) = one(Linear::new("l", Parallel::Column, 4).slice("q", 4));
    assert_eq!(other.shard(Shard::new(TpRank::SINGLE).held(id, [0])).unwrap_err(), SpecError::Foreign);
    let duplicate = SpecError::Duplicate { module: path() };
    assert_eq!(spec.experts(layer(2, 4, 8)), Err(duplicate.clone()));
    assert_eq!(spec.embedding(path(), 8, 4), Err(duplicate));
    let uneven = SpecError::Uneven { path: path(), features: 6, shards: 4, size: 4 };
    assert_eq!(shard(&spec, 0, 4).unwrap_err(), uneven);
}
