//! Any calls on the CPU, against the model.

use std::{
    panic::{self, AssertUnwindSafe},
    thread,
    time::Duration,
};

use aril::{
    DType, Slot,
    adapter::SlotImage,
    cpu::{AdapterPool, LoraLinear, Matrix, MatrixMut, Step, WeightTable, Workspace},
    error::{LoadError, OperandError, SlotError},
    group::{Group, GroupError, GroupPool, InProcess},
    model::{LinearId, Model},
    pool::{AdapterId, Lease, PoolConfig, PoolError, Source, StreamId},
    residency::Resident,
    routing::Batch,
};
use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

use crate::model::{
    ADAPTERS, BYTES, Broken, Device, Expected, FEATURES, Of, PROMISES, Promise, SLOTS, STREAMS, Table, calls, capacity,
    spec,
};

struct Cpu {
    model: Model,
    id: LinearId,
    plain: WeightTable,
    pool: AdapterPool,
    streams: Vec<StreamId>,
    group: GroupPool<InProcess, WeightTable>,
    workspace: Workspace,
}

impl Cpu {
    fn new() -> Self {
        let (model, id) = spec();
        let table = |adapters| WeightTable::new(&model, DType::F32, capacity(), adapters * BYTES).unwrap();
        let config = PoolConfig::arena_bytes(SLOTS * BYTES).host_bytes(ADAPTERS * BYTES).loaders(1);
        let mut pool = AdapterPool::new(&model, DType::F32, capacity(), config).unwrap();
        let others = (1..STREAMS).map(|_| pool.add_stream());
        let streams = [StreamId::FIRST].into_iter().chain(others).collect();
        let ranks = InProcess::group(1, Duration::from_secs(60)).pop().unwrap();
        let group = GroupPool::new(Group::new(ranks, table(SLOTS + 1)).unwrap()).unwrap();
        // Room for what is loaded beside what a step keeps.
        let plain = table(2 * SLOTS + 1);
        Self { id, plain, pool, streams, group, workspace: Workspace::default(), model }
    }

    fn table(&self, table: Table) -> &WeightTable {
        match table {
            Table::Plain => &self.plain,
            Table::Pool => self.pool.weights(),
            Table::Group => self.group.table(),
        }
    }
}

/// What a step adds to each row.
fn added(layer: &LoraLinear, mut step: Step<'_>) -> Result<Vec<f32>, OperandError> {
    let rows = step.num_tokens();
    let (x, mut y) = (vec![1.0_f32; rows * FEATURES], vec![0.0; rows * FEATURES]);
    layer.add_delta(&mut step, Matrix::new(&x, rows, FEATURES)?, MatrixMut::new(&mut y, rows, FEATURES)?)?;
    let rows = y.chunks(FEATURES);
    Ok(rows.inspect(|row| assert!(row.iter().all(|value| *value == row[0]))).map(|row| row[0]).collect())
}

impl Device for Cpu {
    fn model(&self) -> &Model {
        &self.model
    }

    fn load(&mut self, to: Table, slot: Slot, image: &SlotImage<'_>, panics: bool) -> Result<Resident, LoadError> {
        let progress = |_| {
            if panics {
                panic::resume_unwind(Box::new(()))
            }
        };
        let load = || self.table(to).load_with_progress(slot, image, progress);
        let panicked = |_| Err(LoadError::Panicked { message: String::new() });
        panic::catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(panicked)
    }

    fn unload(&mut self, from: Table, slot: Slot) -> Result<(), LoadError> {
        self.table(from).unload(slot)
    }

    fn check(&self, residents: &[Resident]) -> Result<(), SlotError> {
        self.plain.check(residents.iter().copied())
    }

    fn used(&self) -> [usize; 2] {
        [self.plain.usage().used, self.plain.loaded().iter().map(|info| info.bytes).sum()]
    }

    fn step(&mut self, of: Of, slots: &[Slot]) -> Result<Vec<f32>, OperandError> {
        let Self { plain, pool, group, workspace, .. } = self;
        let table = match of {
            Of::Table(Table::Plain) => &*plain,
            Of::Table(Table::Pool) | Of::Pool(_) => pool.weights(),
            Of::Table(Table::Group) | Of::Group => group.table(),
        };
        let (layer, batch) = (LoraLinear::new(table, self.id).unwrap(), Batch::new(slots));
        let step = match of {
            Of::Table(_) => table.step(&batch, workspace)?,
            Of::Pool(stream) => pool.step(self.streams[stream], &batch, workspace)?,
            Of::Group => group.step(&batch, workspace)?,
        };
        added(&layer, step)
    }

    fn step_beside(
        &mut self,
        slots: &[Slot],
        to: Slot,
        image: &SlotImage<'_>,
    ) -> (Vec<f32>, Result<Resident, LoadError>) {
        let (plain, layer) = (&self.plain, LoraLinear::new(&self.plain, self.id).unwrap());
        thread::scope(|threads| {
            let loader = threads.spawn(move || plain.load(to, image));
            let step = plain.step(&Batch::new(slots), &mut self.workspace).unwrap();
            (added(&layer, step).unwrap(), loader.join().unwrap())
        })
    }

    fn register(&mut self, source: Source) -> AdapterId {
        self.pool.register(source).unwrap()
    }

    fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.pool.unregister(id)
    }

    fn acquire(&mut self, id: AdapterId, stream: usize) -> Result<Lease, PoolError> {
        loop {
            match self.pool.acquire(id, self.streams[stream]) {
                Err(PoolError::Loading { .. }) => assert!(self.pool.wait(Duration::from_secs(30)), "nothing loads"),
                result => return result,
            }
        }
    }

    fn commit(&mut self, stream: usize) {
        self.pool.commit(self.streams[stream]).unwrap();
    }

    fn leases(&mut self) -> usize {
        self.pool.poll();
        self.pool.snapshot().leases
    }

    fn left(&mut self) -> [usize; 2] {
        while self.pool.wait(Duration::from_secs(30)) {}
        self.pool.poll();
        let snapshot = self.pool.snapshot();
        [snapshot.device_memory.used, snapshot.host_memory.used]
    }

    fn acquire_in_group(&mut self, version: u64, source: &Source) -> Result<Slot, GroupError> {
        self.group.acquire_from(version, source)
    }

    fn release_in_group(&mut self, version: u64) -> Result<(), GroupError> {
        self.group.release(version)
    }

    fn remove_from_group(&mut self, version: u64) -> Result<(), GroupError> {
        self.group.remove(version)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_calls_end_as_the_model_knows(calls in calls(60)) {
        let result = Expected::new(Cpu::new()).run(&calls);
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

/// The model sees each promise that is broken.
#[test]
fn every_promise_is_checked() {
    let breaks =
        |promise: Promise, calls: &[_]| Expected::new(Broken { device: Cpu::new(), promise }).run(calls).is_err();
    for promise in PROMISES {
        let mut runner = TestRunner::deterministic();
        let mut cases = (0..400).map(|_| calls(60).new_tree(&mut runner).unwrap().current());
        assert!(cases.any(|calls| breaks(promise, &calls)), "nobody notices that {promise:?} is broken");
    }
}
