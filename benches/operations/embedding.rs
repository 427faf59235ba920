//! Embeddings on the GPU: the time of one operation in a captured graph, with B from memory.

use std::time::Duration;

use aril::{
    DType, Slot,
    cuda::raw,
    model::{ModelSpec, TpRank},
    plan::Capacity,
    reference::{self, Factors},
    routing::Batch,
};
use criterion::{Criterion, Throughput, criterion_group};
use half::bf16;

use crate::common::{
    Result,
    data::{Data, SMALL},
    device::{Gpu, Memory},
};

const VOCAB: usize = 151_936;
const HIDDEN: usize = 4096;
const RANK: usize = 16;
const SLOTS: usize = 8;
/// So many B's take turns that no cache holds them; the few rows of A that a batch reads need not.
const SETS: usize = 128;
const MAX_ERROR: f64 = 2e-2;
/// So that the deltas are not lost in the rounding of what they are added to.
const SCALING: f32 = 256.0;

fn embedding(criterion: &mut Criterion) {
    let gpu = Gpu::new().expect("there is a GPU");
    let mut group = criterion.benchmark_group("embedding/bf16");
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    for tokens in [1, 64, 2048] {
        let bytes = tokens.min(SLOTS) * HIDDEN * RANK * 2 + tokens * (RANK * 2 + HIDDEN * 4);
        group.throughput(Throughput::Bytes(bytes as u64));
        let bench = Bench::new(&gpu, tokens).expect("there is memory for it");
        let error = bench.check().expect("it runs");
        assert!(error < MAX_ERROR, "{tokens} tokens: relative error {error}");
        let graph = gpu.capture(|| (0..SETS).try_for_each(|set| bench.add_delta(set))).expect("it can be captured");
        group.bench_function(format!("embed-qwen3-8b/r{RANK}/t{tokens}/a{SLOTS}/uniform"), |bencher| {
            bencher.iter_custom(|iterations| gpu.time_operations(&graph, SETS, iterations).expect("it runs"));
        });
    }
}

struct Bench<'a> {
    gpu: &'a Gpu,
    data: Data,
    layer: raw::LoraEmbedding,
    batch: raw::RoutedBatch,
    slots: Vec<Slot>,
    ids: Vec<i32>,
    device_ids: Memory,
    y: Memory,
    tables: Memory,
    _weights: Memory,
    _routing: raw::Routing,
    _routing_memory: Memory,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu, tokens: usize) -> Result<Self> {
        let mut model = ModelSpec::new(TpRank::SINGLE);
        let id = model.embedding("embed_tokens", VOCAB, HIDDEN)?;
        let capacity = Capacity { max_tokens: tokens, num_slots: SLOTS, max_rank: RANK };
        let layer = raw::LoraEmbedding::new(&gpu.kernels, &model, id, DType::BF16, capacity)?;

        let data = Data::new(SMALL);
        let weights = gpu.fill(&data.weights, b_elem(SETS, 0))?;
        let at = |elem: usize| weights.address + (elem * size_of::<bf16>()) as u64;
        let descriptor = |set, slot| raw::Descriptor {
            a: at(a_elem(slot)),
            b: at(b_elem(set, slot)),
            rank: RANK as i32,
            scaling: SCALING,
        };
        let tables: Vec<_> = (0..SETS).flat_map(|set| (0..SLOTS).map(move |slot| (set, slot))).collect();
        let tables: Vec<_> = tables.into_iter().map(|(set, slot)| descriptor(set, slot)).collect();

        let slots: Vec<Slot> = (0..tokens).map(|token| Slot::new((token % SLOTS) as u16)).collect();
        let ids: Vec<i32> = (0..tokens).map(|token| (token * 7919 % VOCAB) as i32).collect();
        let routing_memory = gpu.alloc(raw::Routing::device_bytes(capacity)?)?;
        // SAFETY: the memory lives as long as the routing, and is its own.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, routing_memory.region()) }?;
        // SAFETY: the stream is alive and not capturing.
        let batch = unsafe { routing.update(&Batch::new(&slots), gpu.raw_stream()) }?;
        Ok(Self {
            gpu,
            layer,
            batch,
            device_ids: gpu.upload(&ids)?,
            y: gpu.fill(&data.bases, tokens * HIDDEN)?,
            tables: gpu.upload(&tables)?,
            data,
            slots,
            ids,
            _weights: weights,
            _routing: routing,
            _routing_memory: routing_memory,
        })
    }

    fn add_delta(&self, set: usize) -> Result<()> {
        let y = raw::MatrixMut::new::<bf16>(self.y.address, self.slots.len(), HIDDEN);
        let table = self.tables.address + (set * SLOTS * size_of::<raw::Descriptor>()) as u64;
        let weights = raw::LayerWeights::new(table, SLOTS, 1, 0, RANK);
        let stream = self.gpu.raw_stream();
        // SAFETY: all of it is this type's, used on this stream only, and outlives the graphs made here.
        Ok(unsafe { self.layer.add_delta(self.device_ids.address, y, weights, self.batch, stream) }?)
    }

    /// The relative error of the last token's delta. For once: it changes y.
    fn check(&self) -> Result<f64> {
        let (set, token) = (SETS - 1, self.slots.len() - 1);
        self.add_delta(set)?;
        let got: Vec<bf16> = self.gpu.read(self.y.address + (token * HIDDEN * 2) as u64, HIDDEN)?;
        let (slot, id) = (self.slots[token].index().unwrap_or(0), usize::try_from(self.ids[token])?);
        let a: Vec<f64> = self.data.weights.range(a_elem(slot) + id * RANK, RANK).map(f64::from).collect();
        let b: Vec<f64> = self.data.b(b_elem(set, slot), HIDDEN, RANK).map(f64::from).collect();
        let factors = Factors { a: &a, b: &b, rank: RANK, scaling: f64::from(SCALING) };
        let deltas = reference::embedding(0, 1, factors);
        let bases = self.data.bases.range(token * HIDDEN, HIDDEN);
        let (mut error, mut norm) = (0.0, 0.0);
        for ((got, base), delta) in got.iter().zip(bases).zip(deltas) {
            error += (got.to_f64() - f64::from(base) - delta.value).powi(2);
            norm += delta.value.powi(2);
        }
        Ok((error / norm).sqrt())
    }
}

/// Where a slot's A `[vocab, rank]` begins, the same in all sets.
fn a_elem(slot: usize) -> usize {
    slot * VOCAB * RANK
}

/// Where a slot's B begins in a set.
fn b_elem(set: usize, slot: usize) -> usize {
    a_elem(SLOTS) + (set * SLOTS + slot) * HIDDEN * RANK
}

criterion_group!(benches, embedding);
