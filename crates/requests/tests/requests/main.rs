//! A registry, an admission and a pool together: every request runs on the version that its name stood for when it
//! arrived, or is refused.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

mod admission;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{AdapterPool, LoraLinear, Matrix, MatrixMut, Workspace},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::{AdapterId, Lease, PoolConfig, PoolError, Source, StreamId, Version},
    routing::Batch,
};
use aril_requests::{
    admission::{Admission, AdmissionError, Answer, Limits, Request},
    registry::{Listed, LoadError, OnDuplicate, PendingLoad, Registry, RegistryError, Replaced, Served, Unloaded},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const FEATURES: usize = 8;
const STREAM: StreamId = StreamId::FIRST;
const BASE: &str = "base";
const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
/// Slots of the pool, adapters of a batch, and its requests.
const SLOTS: usize = 3;
const MAX_ADAPTERS: usize = 2;
const MAX_REQUESTS: usize = 6;
const STEPS: usize = 2000;
const LIMIT: Duration = Duration::from_secs(30);

fn model() -> (Model, LinearId) {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("m", Parallel::Replicated, FEATURES).slice("q", FEATURES)).unwrap();
    (spec.shard(TpRank::SINGLE).unwrap(), id)
}

/// An adapter of rank 1 that adds `value` to every output where x is ones.
fn adapter(value: f32) -> Arc<Adapter> {
    let tensor = |shape: [usize; 2], value: f32| {
        let values = vec![value; shape[0] * shape[1]];
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap()
    };
    let tensors = [
        ("m.q.lora_A.weight".to_owned(), tensor([1, FEATURES], 1.0)),
        ("m.q.lora_B.weight".to_owned(), tensor([FEATURES, 1], value / FEATURES as f32)),
    ];
    Arc::new(Adapter::from_tensors(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#, tensors).unwrap())
}

/// A request between its arrival and its end.
struct Live {
    served: Served,
    lease: Option<Lease>,
    is_running: bool,
    /// Steps that it still needs.
    steps: usize,
}

struct Engine {
    registry: Registry<Version>,
    pool: AdapterPool,
    admission: Admission<u32, AdapterId>,
    layer: LoraLinear,
    model: Model,
    /// What each version adds.
    values: HashMap<AdapterId, f32>,
    live: BTreeMap<u32, Live>,
    next: u32,
    now: Duration,
    served: usize,
    refused: usize,
}

impl Engine {
    fn new() -> Self {
        let (model, id) = model();
        let bytes = adapter(1.0).plan(&model, DType::F32).unwrap().bytes();
        let capacity = Capacity::tokens(MAX_REQUESTS).slots(SLOTS).rank(8);
        let config = PoolConfig::arena_bytes(SLOTS * bytes).host_bytes(4 * bytes);
        let pool = AdapterPool::new(&model, DType::F32, capacity, config).unwrap();
        let layer = LoraLinear::new(pool.weights(StreamId::FIRST).unwrap(), id).unwrap();
        let limits = Limits::new(MAX_ADAPTERS, Duration::from_millis(20));
        Self {
            registry: Registry::new([BASE]),
            admission: Admission::new(limits),
            pool,
            layer,
            model,
            values: HashMap::new(),
            live: BTreeMap::new(),
            next: 0,
            now: Duration::ZERO,
            served: 0,
            refused: 0,
        }
    }

    /// Loads an adapter, or its next version, unless one is being loaded.
    fn load(&mut self, name: &str) {
        let value = (self.values.len() + 1) as f32;
        let source = Source::memory(adapter(value), &self.model, DType::F32).unwrap();
        match self.registry.load(&mut self.pool, name, OnDuplicate::Replace, source) {
            Ok(load) => drop(self.values.insert(load.id(), value)),
            Err(error) => assert!(matches!(error, LoadError::Name(RegistryError::Loading { .. })), "{error}"),
        }
    }

    fn unload(&mut self, name: &str) {
        if let Err(error) = self.registry.unload(name) {
            assert_eq!(error, RegistryError::Unknown { name: name.into() });
        }
    }

    fn arrive(&mut self, name: &str, steps: usize) {
        let (id, now) = (self.next, self.now);
        let served = match self.registry.resolve(name) {
            Ok(served) => served,
            Err(error) => {
                assert!(matches!(error, RegistryError::Unknown { .. } | RegistryError::Loading { .. }), "{error}");
                self.refused += 1;
                return;
            }
        };
        let request = served.adapter().map_or(Request::base(id, now), |adapter| Request::new(id, adapter, now));
        self.admission.enqueue(request).unwrap();
        self.live.insert(id, Live { served, lease: None, is_running: false, steps });
        self.next += 1;
    }

    /// Admits requests, with leases on their adapters. Refuses those whose version is gone.
    fn admit(&mut self) {
        for adapter in self.admission.prefetch().take(SLOTS - MAX_ADAPTERS) {
            match self.pool.prefetch(adapter) {
                Ok(_) | Err(PoolError::Unknown { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        let mut room = MAX_REQUESTS - self.admission.num_running();
        self.admission.admit(self.now, |request| {
            if room == 0 {
                return Answer::Stop;
            }
            let live = self.live.get_mut(&request.id).unwrap();
            if let Some(adapter) = request.adapter {
                match self.pool.acquire(adapter, STREAM) {
                    Ok(lease) => live.lease = Some(lease),
                    Err(PoolError::Loading { .. } | PoolError::Full) => return Answer::Skip,
                    Err(PoolError::Unknown { id }) => {
                        assert_eq!(id, adapter);
                        self.live.remove(&request.id);
                        self.refused += 1;
                        return Answer::Fail;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            live.is_running = true;
            room -= 1;
            Answer::Take
        });
        if self.admission.num_running() == 0 {
            self.pool.wait(Duration::from_millis(10));
        }
    }

    /// Computes a token of each running request and checks it.
    fn step(&mut self, preempt: impl Fn(u32) -> bool) {
        let running: Vec<u32> = self.live.iter().filter(|(_, live)| live.is_running).map(|(id, _)| *id).collect();
        assert_eq!(running.len(), self.admission.num_running());
        let slot = |id: &u32| self.live[id].lease.as_ref().map_or(Slot::BASE, Lease::slot);
        let slots: Vec<Slot> = running.iter().map(slot).collect();
        let (rows, mut workspace) = (slots.len(), Workspace::default());
        if rows > 0 {
            let (x, mut y) = (vec![1.0_f32; rows * FEATURES], vec![0.0_f32; rows * FEATURES]);
            let batch = Batch::new(&slots);
            let mut step = self.pool.step(StreamId::FIRST, &batch, &mut workspace).unwrap();
            let y_matrix = MatrixMut::new(&mut y, rows, FEATURES).unwrap();
            self.layer.add_delta(&mut step, Matrix::new(&x, rows, FEATURES).unwrap(), y_matrix).unwrap();
            for (row, id) in y.chunks(FEATURES).zip(&running) {
                let expected = self.live[id].served.adapter().map_or(0.0, |adapter| self.values[&adapter]);
                assert_eq!(row, [expected; FEATURES], "request {id} ran on another version");
            }
        }
        for id in running {
            let live = self.live.get_mut(&id).unwrap();
            live.steps -= 1;
            if live.steps == 0 {
                self.live.remove(&id);
                self.admission.finish(&id).unwrap();
                self.served += 1;
            } else if preempt(id) {
                (live.lease, live.is_running) = (None, false);
                self.admission.preempt(&id).unwrap();
            }
        }
        self.pool.end_step(STREAM).unwrap();
        self.now += Duration::from_millis(1);
    }
}

#[test]
fn every_request_runs_on_its_own_version_or_is_refused() {
    let (mut engine, mut rng) = (Engine::new(), StdRng::seed_from_u64(3));
    for name in NAMES {
        engine.load(name);
    }
    for step in 0..STEPS {
        if step % 4 == 0 {
            // However slow the reads are, the same number of steps passes meanwhile at most.
            while engine.pool.wait(LIMIT) {}
        }
        match rng.random_range(0..100) {
            0..3 => engine.load(NAMES[rng.random_range(0..NAMES.len())]),
            3 => engine.unload(NAMES[rng.random_range(0..NAMES.len())]),
            _ => {}
        }
        if rng.random_range(0..3) == 0 {
            let names = [&NAMES[..], &[BASE]].concat();
            engine.arrive(names[rng.random_range(0..names.len())], rng.random_range(1..8));
        }
        engine.admit();
        let preempted = rng.random_range(0..20);
        engine.step(|id| id % 20 == preempted);
    }
    // Without arrivals, all that is left is served.
    let mut left = 0;
    while !engine.live.is_empty() {
        left += 1;
        assert!(left < 2000, "{} requests are never served", engine.live.len());
        engine.admit();
        engine.step(|_| false);
    }
    assert!(engine.served > 300 && engine.refused > 20, "{} served, {} refused", engine.served, engine.refused);
    assert_eq!((engine.admission.num_running(), engine.admission.num_waiting()), (0, 0));
    assert!(engine.values.len() > 2 * NAMES.len() && engine.pool.snapshot().counters.evictions > 20);
    // The pool has what is served, and nothing else.
    while engine.pool.wait(LIMIT) {}
    engine.pool.poll();
    assert_eq!(engine.pool.snapshot().adapters, engine.registry.list().len());
}

/// Whatever ends the load of another version, its name stands for the one that it stood for, and nothing else is in the
/// pool.
#[test]
fn a_version_that_is_not_served_leaves_the_pool() {
    let Engine { registry, mut pool, model, .. } = Engine::new();
    let source = |value| Source::memory(adapter(value), &model, DType::F32).unwrap();
    let first = registry.load(&mut pool, "a", OnDuplicate::Refuse, source(1.0)).unwrap();
    assert_eq!(registry.resolve("a"), Err(RegistryError::Loading { name: "a".into() }));
    assert!(pool.wait_for(&first, LIMIT).unwrap());
    let is_as_before = |pool: &AdapterPool| {
        assert_eq!((registry.resolve("a"), pool.snapshot().adapters), (Ok(Served::Adapter(first.id())), 1));
    };
    is_as_before(&pool);

    let refused = registry.load(&mut pool, "a", OnDuplicate::Refuse, source(2.0));
    assert!(matches!(refused, Err(LoadError::Name(RegistryError::Loaded { .. }))), "{refused:?}");
    is_as_before(&pool);
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("m", Parallel::Replicated, FEATURES).slice("q", FEATURES).slice("k", FEATURES)).unwrap();
    let other = Source::memory(adapter(2.0), &spec.shard(TpRank::SINGLE).unwrap(), DType::F32).unwrap();
    let refused = registry.load(&mut pool, "a", OnDuplicate::Replace, other);
    assert!(matches!(refused, Err(LoadError::Pool(PoolError::Slot(_)))), "{refused:?}");
    is_as_before(&pool);
    let load = registry.load(&mut pool, "a", OnDuplicate::Replace, source(f32::NAN)).unwrap();
    let failed = pool.wait_for(&load, LIMIT);
    assert!(matches!(failed, Err(PoolError::Failed { .. })), "{failed:?}");
    is_as_before(&pool);
    // Whether or not its read has ended.
    let load = registry.load(&mut pool, "a", OnDuplicate::Replace, source(2.0)).unwrap();
    pool.unregister(load.id()).unwrap();
    assert!(matches!(load.has_ended(), Err(PoolError::Unknown { .. })));
    is_as_before(&pool);

    // The name is unloaded meanwhile.
    let load = registry.load(&mut pool, "a", OnDuplicate::Replace, source(2.0)).unwrap();
    let refused = registry.load(&mut pool, "a", OnDuplicate::Replace, source(3.0));
    assert!(matches!(refused, Err(LoadError::Name(RegistryError::Loading { .. }))), "{refused:?}");
    drop(registry.unload("a").unwrap());
    assert!(pool.wait_for(&load, LIMIT).unwrap());
    assert_eq!((registry.list(), pool.snapshot().adapters), (vec![], 0));
    // The pool is dropped meanwhile.
    let load = registry.load(&mut pool, "a", OnDuplicate::Replace, source(2.0)).unwrap();
    drop(pool);
    assert!(matches!(load.has_ended(), Err(PoolError::Unknown { .. })));
    assert_eq!(registry.resolve("a"), Err(RegistryError::Unknown { name: "a".into() }));
}

/// It is noted by the next load of the name, whatever the pool is called for meanwhile.
#[test]
fn a_load_that_has_ended_stands_in_nobodys_way() {
    let Engine { registry, mut pool, model, .. } = Engine::new();
    let mut load = |value| {
        let end = Instant::now() + LIMIT;
        loop {
            let source = Source::memory(adapter(value), &model, DType::F32).unwrap();
            match registry.load(&mut pool, "a", OnDuplicate::Refuse, source) {
                Err(LoadError::Name(RegistryError::Loading { .. })) => thread::yield_now(),
                result => return result,
            }
            assert!(Instant::now() < end, "the end of a load is not noted");
        }
    };
    // The first fails, the second is served, and the third is refused for it.
    let failed = load(f32::NAN).unwrap();
    let served = load(1.0).unwrap();
    assert!(matches!(failed.has_ended(), Err(PoolError::Failed { .. })));
    let refused = load(2.0);
    assert!(matches!(refused, Err(LoadError::Name(RegistryError::Loaded { .. }))), "{refused:?}");
    assert!(served.has_ended().unwrap() && registry.resolve("a") == Ok(Served::Adapter(served.id())));
}

#[test]
fn types_may_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    fn error<T: std::error::Error + Send + Sync + 'static>() {}
    shared::<(Admission<u64, AdapterId>, Answer, Limits, Request<u64, AdapterId>)>();
    shared::<(Registry<AdapterId>, PendingLoad<AdapterId>, Replaced<AdapterId>, Unloaded<AdapterId>)>();
    shared::<(Listed, Served)>();
    error::<AdmissionError>();
    error::<RegistryError>();
}
