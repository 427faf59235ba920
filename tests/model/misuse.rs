//! Mistakes that an engine makes, and the error by which each is refused: one source for every backend.
//!
//! What has no row here does not compile, and is a `compile_fail` doctest:
//!
//! | mistake | doctest |
//! |---|---|
//! | a step after the next update of its routing | `cuda::doctests::Stale` |
//! | a routing that is updated between a step and a replay | `UpdatedUnderReplay` |
//! | a captured step that outlives its capture, or is exchanged for that of another | `KeptStep`, `ExchangedSteps` |
//! | routes of another batch | `StaleRoutes` |
//! | an expand of another shrink's sums | `ExpandedAfterOthers`, `cpu::LoraLinear::shrink` |
//! | the end of a step of the pool under it | `EndedUnderStep`, `cpu::AdapterPool::step` |
//! | an adapter that is committed twice | `CommittedTwice` |
//! | x and y exchanged, of two types, or one matrix | `Swapped`, `OtherType` |
//! | W that is written or freed under its fused linear | `BorrowedW` |
//! | operations of a graph without a step | `Graph::replay` takes one |
//!
//! Those of graphs, streams and routings are in tests/gpu/misuse.rs, and wrong operands of each operation in wrong.rs.

use std::{error::Error, sync::Arc, time::Duration};

use aril::{
    DType, Slot,
    adapter::Adapter,
    error::{LoadError, SlotError},
    group::{GroupPool, InProcess},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::{AdapterId, PoolConfig, PoolError, Source, StreamId},
    routing::Batch,
};

use crate::{
    backend::{
        AdapterPool, Backend, Elements, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace, elements_of,
    },
    common::adding,
};

const FEATURES: usize = 64;
const TOKENS: usize = 2;
const SLOTS: usize = 2;
const RANK: usize = 8;
/// An adapter, in `f32`.
const BYTES: usize = 2 * RANK * FEATURES * 4;
const FIRST: StreamId = StreamId::FIRST;

pub type Outcome = Result<(), Box<dyn Error>>;

/// A table with an adapter in slot 0, which adds 3, and what a step needs.
pub struct World<'a> {
    pub backend: &'a Backend,
    pub model: Model,
    pub id: LinearId,
    pub weights: WeightTable,
    pub routing: Routing,
    pub workspace: Workspace,
    pub x: Elements,
    pub y: Elements,
}

pub fn model() -> (Model, LinearId) {
    let (model, ids) = adding::model(1, FEATURES);
    (model, ids[0])
}

pub fn capacity() -> Capacity {
    Capacity::tokens(TOKENS).slots(SLOTS).rank(RANK)
}

/// An adapter of this rank that adds `value` where x is ones.
pub fn adapter(rank: usize, value: f32) -> Adapter {
    adding::adapter(1, FEATURES, rank, value)
}

impl<'a> World<'a> {
    pub fn new(backend: &'a Backend) -> Self {
        let (model, id) = model();
        let weights = backend.table(&model, DType::F32, capacity(), 16 * BYTES).unwrap();
        let world = Self {
            routing: backend.routing(0, capacity()).unwrap(),
            workspace: backend.workspace(0, &weights),
            x: backend.elements(0, &[1.0; (TOKENS + 1) * FEATURES]),
            y: backend.elements(0, &[0.0; (TOKENS + 1) * FEATURES]),
            backend,
            model,
            id,
            weights,
        };
        world.load(&world.weights, 0, 3.0).unwrap();
        world
    }

    pub fn load(&self, weights: &WeightTable, slot: usize, value: f32) -> Result<Slot, LoadError> {
        let adapter = adapter(RANK, value);
        weights.load(slot, &adapter.plan(&self.model, DType::F32).unwrap())
    }

    /// That of the adapter in the table.
    pub fn slot(&self) -> Slot {
        self.weights.get(0).unwrap().slot
    }

    fn source(&self, value: f32) -> Source {
        Source::memory(Arc::new(adapter(RANK, value)), &self.model, DType::F32).unwrap()
    }

    fn pool(&self) -> AdapterPool {
        let bytes = AdapterPool::arena_bytes(&self.model, DType::F32, RANK, 4 * SLOTS);
        let config = PoolConfig::arena_bytes(bytes).host_bytes(bytes).loaders(1);
        self.backend.pool(&self.model, DType::F32, capacity(), config)
    }

    /// A step on the world's table.
    fn step(&mut self, slots: &[Slot]) -> Outcome {
        let layer = LoraLinear::new(&self.weights, self.id)?;
        let batch = self.routing.update(&Batch::new(slots))?;
        let mut step = self.weights.step(&batch, &mut self.workspace)?;
        let rows = step.num_tokens();
        let (x, y) =
            (Matrix::<f32>::new(&self.x, rows, FEATURES)?, MatrixMut::<f32>::new(&mut self.y, rows, FEATURES)?);
        Ok(layer.add_delta(&mut step, x, y)?)
    }

    /// A step on a pool's table.
    fn step_of(&mut self, pool: &AdapterPool, stream: StreamId, slots: &[Slot]) -> Outcome {
        let layer = LoraLinear::new(pool.weights(stream).ok_or("no such stream")?, self.id)?;
        let batch = self.routing.update(&Batch::new(slots))?;
        let mut step = pool.step(stream, &batch, &mut self.workspace)?;
        let rows = step.num_tokens();
        let (x, y) =
            (Matrix::<f32>::new(&self.x, rows, FEATURES)?, MatrixMut::<f32>::new(&mut self.y, rows, FEATURES)?);
        Ok(layer.add_delta(&mut step, x, y)?)
    }

    /// An operation with these rows and strides of x and y, and of a layer of the model that `id` is of.
    fn operands(&mut self, id: LinearId, x: [usize; 2], y: [usize; 2]) -> Outcome {
        let layer = LoraLinear::new(&self.weights, id)?;
        let slots = [self.slot(); TOKENS];
        let batch = self.routing.update(&Batch::new(&slots))?;
        let mut step = self.weights.step(&batch, &mut self.workspace)?;
        let x = Matrix::<f32>::strided(&self.x, x[0], FEATURES, x[1])?;
        Ok(layer.add_delta(&mut step, x, MatrixMut::<f32>::strided(&mut self.y, y[0], FEATURES, y[1])?)?)
    }
}

/// Slots of a larger table, with an adapter in each.
fn strangers<const N: usize>(world: &World<'_>, numbers: [usize; N]) -> Result<[Slot; N], Box<dyn Error>> {
    let larger = capacity().slots(SLOTS + 2);
    let table = world.backend.table(&world.model, DType::F32, larger, 16 * BYTES)?;
    Ok(numbers.map(|number| world.load(&table, number, 5.0).unwrap()))
}

/// Leases an adapter once it is loaded.
fn acquire<B: aril::pool::Backend>(
    pool: &mut aril::pool::AdapterPool<B>,
    id: AdapterId,
) -> Result<aril::pool::Lease, PoolError> {
    loop {
        match pool.acquire(id, FIRST) {
            Err(PoolError::Loading { .. }) => drop(pool.wait(Duration::from_secs(30))),
            result => return result,
        }
    }
}

/// A mistake, and the error, by a part of its text.
pub struct Mistake(pub &'static str, pub &'static str, pub fn(&mut World<'_>) -> Outcome);

const GONE: &str =
    "the batch names slot 0, whose adapter has been unloaded or replaced, or is in another table or pool";
const NOT_LEASED: &str = "the batch names slot 0, which no lease of the pool's stream holds";
const BEYOND: &str = "the batch names slot 2, which is not one of the 2 slots";
const OTHER_MODEL: &str = "the adapter was planned for another model or tensor-parallel rank than the table's";
const POOLED: &str = "the table belongs to an adapter pool, which alone loads and unloads adapters";
const NO_STREAM: &str = "the pool has no stream StreamId(1)";

const MISTAKES: &[Mistake] = &[
    Mistake("a slot is used after its adapter was replaced", GONE, |world| {
        let slot = world.slot();
        world.load(&world.weights, 0, 5.0)?;
        assert_eq!(world.weights.check([slot]), Err(SlotError::Gone { slot }));
        world.step(&[Slot::BASE, slot])
    }),
    Mistake("a slot is used after its adapter was unloaded", GONE, |world| {
        let slot = world.slot();
        world.weights.unload(0)?;
        assert_eq!(world.weights.check([slot]), Err(SlotError::Gone { slot }));
        world.step(&[Slot::BASE, slot])
    }),
    Mistake("an adapter is replaced between the update of the routing and the step", GONE, |world| {
        let slots = [world.slot()];
        let batch = Batch::new(&slots);
        let batch = world.routing.update(&batch)?;
        let adapter = adapter(RANK, 5.0);
        world.weights.load(0, &adapter.plan(&world.model, DType::F32)?)?;
        Ok(world.weights.step(&batch, &mut world.workspace).map(drop)?)
    }),
    Mistake("a batch names a slot beyond the table", BEYOND, |world| {
        let [own, slot] = [world.slot(), strangers(world, [2])?[0]];
        world.step(&[own, slot])
    }),
    Mistake(
        "a batch names two slots beyond the table, of which the error names the first",
        "the batch names slot 3, which is not one of the 2 slots",
        |world| {
            let slots = strangers(world, [3, 2])?;
            world.step(&slots)
        },
    ),
    Mistake("a batch names a slot beyond the table behind one of another table", BEYOND, |world| {
        let slots = strangers(world, [0, 2])?;
        world.step(&slots)
    }),
    Mistake("a batch names a slot of another table", GONE, |world| {
        let [slot] = strangers(world, [0])?;
        assert_eq!(world.weights.check([slot]), Err(SlotError::Gone { slot }));
        world.step(&[slot])
    }),
    Mistake("a batch of a table without a pool names the slot of a lease", GONE, |world| {
        let mut pool = world.pool();
        let id = pool.register(world.source(5.0))?;
        let lease = acquire(&mut pool, id)?;
        world.step(&[lease.slot()])
    }),
    Mistake("a batch of a pool names the slot of a table without one", NOT_LEASED, |world| {
        let (mut pool, slot) = (world.pool(), world.slot());
        let id = pool.register(world.source(5.0))?;
        let _lease = acquire(&mut pool, id)?;
        world.step_of(&pool, FIRST, &[slot])
    }),
    Mistake("a batch of a pool names the slot of another pool's lease", NOT_LEASED, |world| {
        let [mut pool, mut other] = [world.pool(), world.pool()];
        let ids = [pool.register(world.source(5.0))?, other.register(world.source(5.0))?];
        let (_own, lease) = (acquire(&mut pool, ids[0])?, acquire(&mut other, ids[1])?);
        world.step_of(&pool, FIRST, &[lease.slot()])
    }),
    Mistake("a layer belongs to another description of the same model", "ModelSpec", |world| {
        let (_, other) = model();
        world.operands(other, [TOKENS, FEATURES], [TOKENS, FEATURES])
    }),
    Mistake("a step is of another stream than the lease", NOT_LEASED, |world| {
        let mut pool = world.pool();
        let other = world.backend.add_stream(&mut pool, 0);
        let id = pool.register(world.source(5.0))?;
        let lease = acquire(&mut pool, id)?;
        world.step_of(&pool, other, &[lease.slot()])
    }),
    Mistake("a stream is one of another pool", NO_STREAM, |world| {
        let (mut pool, mut other) = (world.pool(), world.pool());
        let stream = world.backend.add_stream(&mut other, 0);
        let id = pool.register(world.source(5.0))?;
        Ok(pool.acquire(id, stream).map(drop)?)
    }),
    Mistake("a step is of a stream of another pool", NO_STREAM, |world| {
        let [pool, mut other] = [world.pool(), world.pool()];
        let stream = world.backend.add_stream(&mut other, 0);
        let batch = world.routing.update(&Batch::new(&[Slot::BASE]))?;
        Ok(pool.step(stream, &batch, &mut world.workspace).map(drop)?)
    }),
    Mistake("the operands have another element type than the table", "`x` is f32, but must be bf16", |world| {
        world.weights = world.backend.table(&world.model, DType::BF16, capacity(), 16 * BYTES)?;
        world.step(&[Slot::BASE])
    }),
    Mistake("a batch has more tokens than the capacity", "the batch's tokens must be at most 2, not 3", |world| {
        world.step(&[Slot::BASE; TOKENS + 1])
    }),
    Mistake(
        "a batch has more tokens than the capacity, of slots beyond the table",
        "the batch's tokens must be at most 2, not 3",
        |world| {
            let [slot] = strangers(world, [2])?;
            world.step(&[slot; TOKENS + 1])
        },
    ),
    Mistake("rows overlap", "`y` has row stride 32, but must have at least its 64 columns", |world| {
        world.operands(world.id, [TOKENS, FEATURES], [TOKENS, 32])
    }),
    Mistake(
        "rows are beyond the buffer",
        "`x` is [2, 64] with row stride 256, but its buffer has only 192 elements",
        |world| world.operands(world.id, [TOKENS, 256], [TOKENS, FEATURES]),
    ),
    Mistake("an operand has other rows than the batch has tokens", "`x` is [1, 64], but must be [2, 64]", |world| {
        world.operands(world.id, [1, FEATURES], [TOKENS, FEATURES])
    }),
    Mistake("an adapter is of another model", "layers.1.m", |world| {
        Ok(adding::adapter(2, FEATURES, RANK, 1.0).plan(&world.model, DType::F32).map(drop)?)
    }),
    Mistake("an adapter was planned for another description", OTHER_MODEL, |world| {
        let (adapter, (other, _)) = (adapter(RANK, 1.0), model());
        Ok(world.weights.load(0, &adapter.plan(&other, DType::F32)?).map(drop)?)
    }),
    Mistake("an adapter was planned for another rank", OTHER_MODEL, |world| {
        let mut spec = ModelSpec::new();
        spec.linear(Linear::new("layers.0", Parallel::Column, FEATURES).slice("m", FEATURES))?;
        let [own, other] = [0, 1].map(|rank| spec.shard(TpRank::new(rank, 2).unwrap()).unwrap());
        let weights = world.backend.table(&own, DType::F32, capacity(), 16 * BYTES)?;
        Ok(weights.load(0, &adapter(RANK, 1.0).plan(&other, DType::F32)?).map(drop)?)
    }),
    Mistake("a pool's source is of another description", OTHER_MODEL, |world| {
        let source = Source::memory(Arc::new(adapter(RANK, 1.0)), &model().0, DType::F32)?;
        Ok(world.pool().register(source).map(drop)?)
    }),
    Mistake(
        "an adapter is committed to another table than it was reserved in",
        "the adapter was loaded into memory reserved in another table",
        |world| {
            let other = world.backend.table(&world.model, DType::F32, capacity(), 16 * BYTES)?;
            let adapter = adapter(RANK, 1.0);
            let image = adapter.plan(&world.model, DType::F32)?;
            let filled = world.weights.reserve(&image)?.fill(&image, &mut world.weights.staging()?)?;
            Ok(other.commit(0, filled).map(drop)?)
        },
    ),
    Mistake(
        "room that was reserved for an adapter is filled with another one of the same size",
        "the image, of 10240 bytes, is not the one that 10240 bytes were reserved for",
        |world| {
            let [adapter, other] = [1.0, 2.0].map(|value| adapter(RANK, value));
            let room = world.weights.reserve(&adapter.plan(&world.model, DType::F32)?)?;
            let filled = room.fill(&other.plan(&world.model, DType::F32)?, &mut world.weights.staging()?);
            Ok(filled.map(drop)?)
        },
    ),
    Mistake(
        "an adapter is committed to a slot that does not exist",
        "slot 99 is not one of the table's 2 slots",
        |world| {
            let adapter = adapter(RANK, 1.0);
            let image = adapter.plan(&world.model, DType::F32)?;
            let filled = world.weights.reserve(&image)?.fill(&image, &mut world.weights.staging()?)?;
            Ok(world.weights.commit(99, filled).map(drop)?)
        },
    ),
    Mistake("the code that watches a load panics", "on purpose", |world| {
        let adapter = adapter(RANK, 1.0);
        let image = adapter.plan(&world.model, DType::F32)?;
        let load =
            || world.weights.load_with_progress(1, &image, |_| std::panic::resume_unwind(Box::new("on purpose")));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(load)).unwrap_err();
        Err((*panicked.downcast::<&str>().unwrap()).into())
    }),
    Mistake("an adapter is leased after it was unregistered", "is not registered", |world| {
        let mut pool = world.pool();
        let id = pool.register(world.source(5.0))?;
        let lease = acquire(&mut pool, id)?;
        pool.unregister(id)?;
        // The lease keeps it.
        world.step_of(&pool, FIRST, &[lease.slot()])?;
        world.y = world.backend.elements(0, &[0.0; (TOKENS + 1) * FEATURES]);
        Ok(acquire(&mut pool, id).map(drop)?)
    }),
    Mistake(
        "an adapter's rank is above the capacity",
        "the adapter has rank 16, but the table accepts ranks up to 8",
        |world| {
            let adapter = adapter(16, 1.0);
            Ok(world.weights.load(0, &adapter.plan(&world.model, DType::F32)?).map(drop)?)
        },
    ),
    Mistake(
        "an image has another element type than the table",
        "the adapter was planned as f16, but the table holds f32",
        |world| {
            let adapter = adapter(RANK, 1.0);
            Ok(world.weights.load(0, &adapter.plan(&world.model, DType::F16)?).map(drop)?)
        },
    ),
    Mistake(
        "an arena is too small",
        "contiguous bytes, but the largest free block of the weight table has 2048",
        |world| {
            let small = world.backend.table(&world.model, DType::F32, capacity(), 2048)?;
            Ok(world.load(&small, 0, 1.0).map(drop)?)
        },
    ),
    Mistake("a slot is beyond the table", "slot 2 is not one of the table's 2 slots", |world| {
        Ok(world.load(&world.weights, 2, 1.0).map(drop)?)
    }),
    Mistake("an engine loads into a pool's table", POOLED, |world| {
        let pool = world.pool();
        Ok(world.load(pool.weights(FIRST).ok_or("no first stream")?, 0, 1.0).map(drop)?)
    }),
    Mistake("an engine reserves room in a pool's table", POOLED, |world| {
        let (pool, adapter) = (world.pool(), adapter(RANK, 1.0));
        let image = adapter.plan(&world.model, DType::F32)?;
        Ok(pool.weights(FIRST).ok_or("no first stream")?.reserve(&image).map(drop)?)
    }),
    Mistake(
        "an engine steps on a pool's table",
        "the table belongs to an adapter pool, which alone starts steps: call `step` of the pool",
        |world| {
            let pool = world.pool();
            world.weights = pool.weights(FIRST).ok_or("no first stream")?.clone();
            world.step(&[Slot::BASE])
        },
    ),
    Mistake("a slot is used after the lease and the step", NOT_LEASED, |world| {
        let mut pool = world.pool();
        let id = pool.register(world.source(5.0))?;
        let slot = acquire(&mut pool, id)?.slot();
        pool.end_step(FIRST)?;
        world.step_of(&pool, FIRST, &[slot])
    }),
    Mistake("a slot is used after the lease and the step, when another adapter is leased there", NOT_LEASED, |world| {
        let mut pool = world.pool();
        let id = pool.register(world.source(5.0))?;
        let slot = acquire(&mut pool, id)?.slot();
        pool.end_step(FIRST)?;
        pool.unregister(id)?;
        // Where the slot is not free yet, the first gets the other one.
        let mut leases = Vec::new();
        while !leases.iter().any(|lease: &aril::pool::Lease| lease.slot().index() == slot.index()) {
            let id = pool.register(world.source(7.0))?;
            leases.push(acquire(&mut pool, id)?);
        }
        world.step_of(&pool, FIRST, &[slot])
    }),
    Mistake("ends of steps are forgotten", "the device has no room until other adapters are released", |world| {
        let mut pool = world.pool();
        for value in [1.0, 2.0, 3.0] {
            let id = pool.register(world.source(value))?;
            drop(acquire(&mut pool, id)?);
        }
        Ok(())
    }),
    Mistake("the table of a group's pool is unloaded behind its back", POOLED, |world| {
        let ranks = InProcess::group(1, Duration::from_secs(60)).pop().ok_or("no rank")?;
        let mut pool = GroupPool::new(ranks, world.pool())?;
        let id = pool.register(Ok(world.source(5.0)))?;
        let _lease = acquire(&mut pool, id)?;
        Ok(pool.weights(FIRST).ok_or("the first stream")?.unload(0)?)
    }),
];

/// Makes each mistake in a world of its own. None adds anything to y, or takes memory for good.
pub fn check(backend: &Backend, mistakes: &[Mistake]) {
    for Mistake(what, error, make) in mistakes {
        let mut world = World::new(backend);
        let result = make(&mut world);
        let text = result.err().map(|error| error.to_string());
        assert!(text.as_ref().is_some_and(|text| text.contains(error)), "{what}: {text:?}");
        assert!(elements_of(&world.y).iter().all(|value| *value == 0.0), "{what}: y was written");
        let used: usize = world.weights.loaded().iter().map(|info| info.bytes).sum();
        assert_eq!(world.weights.usage().used, used, "{what}: memory is lost");
    }
}

pub fn every_mistake_is_named(backend: &Backend) {
    check(backend, MISTAKES);
}
