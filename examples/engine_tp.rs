//! Tensor parallelism: groups of 2, 4 and 8 ranks, each a thread of one process, compute what a single rank computes.
//!
//! The ranks load the adapter in a pool of their group: all of them, or none.
//!
//! The model is the projections of an attention layer. q, k and v are column-parallel; where a group has more ranks
//! than key-value heads, neighbouring ranks hold the same head. o is row-parallel: each rank adds its delta to its
//! partial sum, and the all-reduce adds up the partial sums. Every rank cuts its base weights by the ranges of the
//! model. All numbers are small integers, so that sums are exact in any order.

#![forbid(unsafe_code)]

use std::{ops::Range, sync::Arc, thread, time::Duration};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{AdapterPool, LoraLinear, Matrix, MatrixMut, Workspace},
    group::{GroupPool, InProcess, Ranks},
    model::{Linear, LinearId, ModelSpec, Parallel},
    plan::Capacity,
    pool::{PoolConfig, Source, StreamId},
    routing::Batch,
};

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Error>;

const HIDDEN: usize = 12;
const HEAD_DIM: usize = 3;
const Q_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const RANK: usize = 2;
const TOKENS: usize = 3;
/// How long a rank waits for another.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Modules, with their inputs and outputs.
const MODULES: [(&str, usize, usize); 4] = [
    ("q_proj", HIDDEN, Q_HEADS * HEAD_DIM),
    ("k_proj", HIDDEN, KV_HEADS * HEAD_DIM),
    ("v_proj", HIDDEN, KV_HEADS * HEAD_DIM),
    ("o_proj", Q_HEADS * HEAD_DIM, HIDDEN),
];

/// Integers from -2 to 2.
fn integers(seed: usize, len: usize) -> Vec<f32> {
    let integer = |i: usize| (i + seed).wrapping_mul(2_654_435_761) >> 7;
    (0..len).map(|i| [-2.0, -1.0, 0.0, 1.0, 2.0][integer(i) % 5]).collect()
}

/// Rows and columns of a module's base weight `[out, in]`.
fn base(module: usize, rows: &[Range<usize>], cols: Range<usize>) -> Vec<f32> {
    let (_, inputs, outputs) = MODULES[module];
    let whole = integers(module, outputs * inputs);
    rows.iter().cloned().flatten().flat_map(|row| whole[row * inputs..][cols.clone()].to_vec()).collect()
}

fn adapter() -> Result<Adapter> {
    let mut tensors = Vec::new();
    for (seed, (module, inputs, outputs)) in (10..).step_by(2).zip(MODULES) {
        for (seed, side, shape) in [(seed, "A", [RANK, inputs]), (seed + 1, "B", [outputs, RANK])] {
            let values = integers(seed, shape[0] * shape[1]);
            let tensor = Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec())?;
            tensors.push((format!("attn.{module}.lora_{side}.weight"), tensor));
        }
    }
    Ok(Adapter::from_tensors(&format!(r#"{{"peft_type": "LORA", "r": {RANK}, "lora_alpha": {RANK}}}"#), tensors)?)
}

/// `x Wᵀ`; `x` and `w` have rows of `cols`.
fn gemm(x: &[f32], w: &[f32], cols: usize) -> Vec<f32> {
    let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| x * w).sum();
    x.chunks(cols).flat_map(|x| w.chunks(cols).map(|w| dot(x, w)).collect::<Vec<_>>()).collect()
}

/// The results of one rank: each slice of q, k and v with its ranges of the whole output, and the partial sum of o.
struct Outputs {
    qkv: Vec<(Vec<Range<usize>>, Vec<f32>)>,
    o: Vec<f32>,
}

/// Computes the layers on one rank.
fn run(spec: &ModelSpec, [qkv, o]: [LinearId; 2], ranks: InProcess) -> Result<Outputs> {
    let model = spec.shard(ranks.tp())?;
    let capacity = Capacity::tokens(TOKENS).slots(1).rank(RANK);
    let config = PoolConfig::arena_bytes(AdapterPool::arena_bytes(&model, DType::F32, RANK, 1));
    let mut pool = GroupPool::new(ranks, AdapterPool::new(&model, DType::F32, capacity, config)?)?;
    let id = pool.register(Source::memory(Arc::new(adapter()?), &model, DType::F32))?;
    let load = pool.prefetch(id)?;
    pool.wait_for(&load, TIME_LIMIT)?;
    let lease = pool.acquire(id, StreamId::FIRST)?;
    let slots = [lease.slot(), Slot::BASE, lease.slot()];
    let weights = pool.weights(StreamId::FIRST).ok_or("the pool has its first stream")?;
    let mut workspace = Workspace::default();
    let mut step = pool.step(StreamId::FIRST, &Batch::new(&slots), &mut workspace)?;
    let mut layer = |id: LinearId, first_module: usize, x: &[f32]| {
        let site = &model[id];
        let (inputs, outputs) = (site.in_features(), site.out_features());
        let slices = site.slices().iter().zip(first_module..);
        let w: Vec<_> = slices.flat_map(|(slice, module)| base(module, slice.ranges(), site.in_range())).collect();
        let mut y = gemm(x, &w, inputs);
        let (x, y_matrix) = (Matrix::new(x, TOKENS, inputs)?, MatrixMut::new(&mut y, TOKENS, outputs)?);
        LoraLinear::new(weights, id)?.add_delta(&mut step, x, y_matrix)?;
        Ok::<_, Error>(y)
    };

    let y = layer(qkv, 0, &integers(30, TOKENS * HIDDEN))?;
    let (mut first, width) = (0, model[qkv].out_features());
    let slices = model[qkv].slices().iter().map(|slice| {
        let columns = first..first + slice.out_features();
        first = columns.end;
        (slice.ranges().to_vec(), y.chunks(width).flat_map(|row| row[columns.clone()].to_vec()).collect())
    });
    let slices: Vec<(Vec<Range<usize>>, Vec<f32>)> = slices.collect();
    // The attention is left out: o takes the rank's heads of q.
    let o = layer(o, 3, &slices[0].1)?;
    Ok(Outputs { qkv: slices, o })
}

/// The outputs of all ranks of a group.
fn run_group(spec: &ModelSpec, layers: [LinearId; 2], size: usize) -> Result<Vec<Outputs>> {
    let ranks = InProcess::group(size, TIME_LIMIT);
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(spec, layers, rank))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a rank panicked")?).collect()
    })
}

fn main() -> Result<()> {
    let mut spec = ModelSpec::new();
    let qkv = Linear::new("attn", Parallel::Column, HIDDEN).heads("q_proj", Q_HEADS, HEAD_DIM);
    let qkv = spec.linear(qkv.kv_heads("k_proj", KV_HEADS, HEAD_DIM).kv_heads("v_proj", KV_HEADS, HEAD_DIM))?;
    let o = spec.linear(Linear::new("attn", Parallel::Row, Q_HEADS * HEAD_DIM).slice("o_proj", HIDDEN))?;

    let single = run_group(&spec, [qkv, o], 1)?.remove(0);
    for size in [2, 4, 8] {
        let mut all_reduced = vec![0.0; TOKENS * HIDDEN];
        for (rank, outputs) in run_group(&spec, [qkv, o], size)?.into_iter().enumerate() {
            for ((ranges, part), (_, whole)) in outputs.qkv.iter().zip(&single.qkv) {
                let of = |row: &[f32]| ranges.iter().flat_map(|range| row[range.clone()].to_vec()).collect::<Vec<_>>();
                let columns = whole.chunks(whole.len() / TOKENS).flat_map(of);
                assert!(columns.eq(part.iter().copied()), "rank {rank} of {size}");
            }
            all_reduced.iter_mut().zip(outputs.o).for_each(|(sum, partial)| *sum += partial);
        }
        assert_eq!(all_reduced, single.o, "{size} ranks");
        println!("{size} ranks compute what one computes.");
    }
    Ok(())
}

#[test]
fn runs() -> Result<()> {
    main()
}
