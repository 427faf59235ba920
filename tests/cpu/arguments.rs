//! No number that a caller gives wraps, or is an index out of bounds: sizes end at `usize::MAX`, which nothing has.

use std::time::Duration;

use aril::{
    DType, Slot,
    adapter::{
        SlotImage,
        layout::{B, EmbeddingA, LinearA},
    },
    cpu::{AdapterPool, WeightTable},
    group::InProcess,
    model::{Experts, Linear, Model, ModelSpec, Parallel, Shard, TpRank},
    plan::{Capacity, Device, ExpertsPlan, ForwardPlan, LinearPlan, Mode},
    routing::{Batch, TopK},
};

const MOST: usize = usize::MAX;

/// A model whose adapters no memory could hold.
fn huge() -> Model {
    let mut spec = ModelSpec::new();
    for layer in 0..64 {
        spec.experts(Experts::new(format!("x{layer}"), 1 << 16, i32::MAX as usize, i32::MAX as usize)).unwrap();
    }
    spec.shard(TpRank::SINGLE).unwrap()
}

#[test]
fn memory_that_nothing_has_is_not_little() {
    let (model, capacity) = (huge(), Capacity::tokens(1).slots(MOST).rank(MOST));
    assert_eq!(SlotImage::max_bytes(&model, DType::F32, 512), MOST);
    assert_eq!(WeightTable::arena_bytes_for(&model, DType::F32, capacity), MOST);
    assert_eq!(AdapterPool::arena_bytes(&model, DType::F32, MOST, MOST), MOST);
    let sizes = [
        LinearA { rank: MOST, in_features: MOST }.elems(),
        EmbeddingA { vocab: MOST, rank: MOST }.elems(),
        B { out_features: MOST, rank: 8 }.elems(),
    ];
    assert_eq!(sizes, [MOST; 3]);
    let gate_up = model.expert_layers()[0].gate_up();
    assert_eq!((gate_up.expert_entry(1), gate_up.expert_entry(MOST)), (4, MOST));
}

/// As many adapters as there are numbers take no time to count.
#[test]
fn a_number_of_adapters_is_not_counted_one_by_one() {
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("m", Parallel::Replicated, 8).slice("q", 8)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    assert_eq!(AdapterPool::arena_bytes(&model, DType::F32, 8, MOST), MOST);
    let [one, many] = [1, 1000].map(|count| AdapterPool::arena_bytes(&model, DType::F32, 8, count));
    assert_eq!(many, 1000 * one);
}

#[test]
fn exchanges_of_any_size_do_not_wrap() {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Column, 8).replicated("a", 8).replicated("b", 8)).unwrap();
    let model = spec.shard(Shard::new(TpRank::new(MOST - 1, MOST).unwrap()).fully_sharded()).unwrap();
    let exchange = model[id].exchange().unwrap();
    assert_eq!(exchange.sent(2, 8), [2, 2]);
    assert_eq!(exchange.received(2, 8), [MOST, 2]);
    let row = spec.linear(Linear::new("n", Parallel::Row, 8).slice("a", 8).slice("b", 8)).unwrap();
    let model = spec.shard(Shard::new(TpRank::new(1, 2).unwrap()).fully_sharded()).unwrap();
    assert_eq!(model[row].exchange().unwrap().received(MOST, MOST), [MOST, MOST]);
}

#[test]
fn plans_of_any_batch_do_not_wrap() {
    let mut spec = ModelSpec::new();
    let linear = Linear::new("m", Parallel::Replicated, 1 << 20).slice("q", 1 << 10).slice("k", 1 << 10);
    let (linear, experts) =
        (spec.linear(linear).unwrap(), spec.experts(Experts::new("x", 8, 64, 64).top_k(2)).unwrap());
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1 << 20).slots(8).rank(512);
    let device = Device { multiprocessors: MOST, shared_bytes: MOST, ..Device::H100 };
    let plan = LinearPlan::new(&model[linear], DType::BF16, capacity).unwrap().on(device);
    assert_eq!(plan.workspace_bytes_for(MOST).partials, MOST);
    assert!(plan.num_splits(MOST) > 0 && !plan.to_string().is_empty());
    let fused = ForwardPlan::new(&model[linear], DType::BF16, capacity).unwrap().on(device).unwrap();
    assert_eq!(fused.workspace_bytes_for(MOST).mailbox, MOST);
    assert_eq!(plan.fastest_mode(1, 0, Some(&fused), None), Mode::Fused);
    assert_eq!(plan.fastest_mode(1, MOST, Some(&fused), None), Mode::First);
    let stacked = |tokens, rank| plan.fastest_mode(tokens, 1, None, Some(rank)) == Mode::Stacked;
    assert_eq!(
        [(15, 16), (16, 16), (512, MOST), (513, 32), (513, 33)].map(|(tokens, rank)| stacked(tokens, rank)),
        [false, true, true, true, false]
    );
    let plan = ExpertsPlan::new(&model[experts], DType::BF16, capacity).unwrap().on(device);
    let bytes = [plan.gate_up(), plan.down()].map(|plan| plan.workspace_bytes_for(MOST, MOST).mailbox);
    assert_eq!(bytes, [MOST; 2]);
    assert!(plan.gate_up().prefers_fused(MOST) && !plan.to_string().is_empty());
}

#[test]
fn tokens_and_routes_beyond_the_last_have_nothing() {
    let (ids, weights, rows) = ([0, 1], [3.0, 5.0], [1, 0]);
    let top_k = TopK::new(&ids, 2).unwrap().with_weights(&weights).unwrap().scaled(2.0);
    for route in [2, MOST] {
        for top_k in [top_k, top_k.with_rows(&rows).unwrap()] {
            assert_eq!((top_k.expert(route, 8), top_k.row(route)), (None, None));
            assert_eq!(top_k.output_weight(route), 2.0);
            assert_eq!((top_k.on_input().input_weight(route), top_k.on_rows().row_weight(route)), (1.0, 1.0));
        }
        let (slots, scales) = ([Slot::BASE; 2], [3.0; 2]);
        assert_eq!(Batch::new(&slots).with_scales(&scales).unwrap().scale(route), 1.0);
    }
}

#[test]
#[should_panic(expected = "a group of one process has up to 1024 ranks, not 18446744073709551615")]
fn a_group_has_as_many_ranks_as_threads() {
    let _: Vec<InProcess> = InProcess::group(MOST, Duration::from_secs(1));
}
