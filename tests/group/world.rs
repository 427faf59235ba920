//! A model of one column-parallel layer, its adapters, and the threads of its ranks.

use std::{panic, thread, time::Duration};

use aril::{
    DType, Slot,
    adapter::Adapter,
    cpu::{AdapterPool, LoraLinear, Matrix, MatrixMut, Tiers, Workspace},
    error::OperandError,
    group::{GroupError, GroupPool, Phase, Ranks},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::{PoolConfig, StreamId},
    routing::Batch,
};

use crate::{
    common::adapters::{self, Lora, Parts},
    limit::Limit,
};

/// Long enough that no test reaches it.
pub(crate) const NEVER: Duration = Duration::from_secs(3_600);
pub(crate) const INPUTS: usize = 4;
/// Factors are padded to a multiple of 8 ranks.
const MAX_RANK: usize = 16;
/// Outputs of each rank.
pub(crate) const OUTPUTS: usize = 3;

pub(crate) struct World {
    spec: ModelSpec,
    id: LinearId,
    pub(crate) size: usize,
}

impl World {
    pub(crate) fn new(size: usize) -> Self {
        let mut spec = ModelSpec::new();
        let id = spec.linear(Linear::new("m", Parallel::Column, INPUTS).slice("q", size * OUTPUTS)).unwrap();
        Self { spec, id, size }
    }

    /// An adapter that adds `values` to the outputs of the ranks.
    pub(crate) fn adapter(&self, values: impl Fn(usize) -> f32) -> Adapter {
        adapters::adapter(&[self.module(values)])
    }

    /// The configuration and the tensors of an adapter that adds `values` to the outputs of the ranks.
    pub(crate) fn parts(&self, values: impl Fn(usize) -> f32) -> Parts {
        adapters::parts(1.0, &[self.module(values)])
    }

    fn module(&self, values: impl Fn(usize) -> f32) -> Lora {
        Lora::linear("m.q", INPUTS, self.size * OUTPUTS, 1).of_rows(|output| values(output / OUTPUTS) / INPUTS as f32)
    }

    /// The part of a rank.
    pub(crate) fn model(&self, rank: usize) -> Model {
        self.spec.shard(TpRank::new(rank, self.size).unwrap()).unwrap()
    }

    /// Size of an adapter on a rank.
    fn adapter_bytes(&self, rank: usize) -> usize {
        self.adapter(|_| 1.0).plan(&self.model(rank), DType::F32).unwrap().bytes()
    }

    /// The part of a rank in the pool of the group, with two slots and room for `device` adapters there, and for `host` in host memory.
    pub(crate) fn pool<R: Ranks>(&self, ranks: R, device: usize, host: usize) -> GroupPool<R, Tiers> {
        let pool = self.own_pool(ranks.tp().rank(), device, host);
        GroupPool::new(ranks, pool).unwrap()
    }

    /// The same, with another stream.
    pub(crate) fn pool_of_streams<R: Ranks>(
        &self,
        ranks: R,
        device: usize,
        host: usize,
    ) -> (GroupPool<R, Tiers>, StreamId) {
        let mut pool = self.own_pool(ranks.tp().rank(), device, host);
        let other = pool.add_stream();
        (GroupPool::new(ranks, pool).unwrap(), other)
    }

    fn own_pool(&self, rank: usize, device: usize, host: usize) -> AdapterPool {
        // A block has whole granules.
        let block = self.adapter_bytes(rank).next_multiple_of(256);
        let config = PoolConfig::arena_bytes(device * block).host_bytes(host * block).packers(1);
        let capacity = Capacity::tokens(1).slots(2).rank(MAX_RANK);
        AdapterPool::new(&self.model(rank), DType::F32, capacity, config).unwrap()
    }

    /// What a rank's pool adds to each output with the adapter of a slot, or why it refuses the step.
    pub(crate) fn delta_of<R: Ranks>(&self, pool: &GroupPool<R, Tiers>, slot: Slot) -> Result<f32, OperandError> {
        let (slots, mut workspace) = ([slot], Workspace::default());
        let weights = pool.weights(StreamId::FIRST).unwrap();
        let mut step = pool.step(StreamId::FIRST, &Batch::new(&slots), &mut workspace)?;
        let (x, mut y) = ([1.0_f32; INPUTS], [0.0; OUTPUTS]);
        let (x, y_matrix) = (Matrix::new(&x, 1, INPUTS).unwrap(), MatrixMut::new(&mut y, 1, OUTPUTS).unwrap());
        LoraLinear::new(weights, self.id).unwrap().add_delta(&mut step, x, y_matrix).unwrap();
        assert_eq!(y, [y[0]; OUTPUTS]);
        Ok(y[0])
    }
}

/// Runs each rank on a thread of its own. A panic of one is passed on. Ranks that wait for one another for ever end the tests.
pub(crate) fn each<R: Ranks + Send, O: Send>(ranks: Vec<R>, run: impl Fn(usize, R) -> O + Sync) -> Vec<O> {
    let _limit = Limit::new();
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank.tp().rank(), rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))).collect()
    })
}

/// Rank and phase of all failures in an error that no rank loaded an adapter.
pub(crate) fn refused(error: &GroupError) -> Vec<(usize, Phase)> {
    let GroupError::Refused { failures, .. } = error else { panic!("{error}") };
    for failure in failures {
        let text = format!("rank {} could not {}: {}", failure.rank, failure.phase, failure.reason);
        assert!(error.to_string().contains(&text), "{error}");
    }
    failures.iter().map(|failure| (failure.rank, failure.phase)).collect()
}
