//! The backend of this binary as a [`Device`]: one source, which `crate::backend` makes that of the CPU or of the GPU.

use std::{
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use aril::{
    Slot,
    adapter::SlotImage,
    error::{LoadError, SlotError},
    group::{ChannelError, GroupPool, InProcess, Message, Ranks},
    model::{LinearId, Model, TpRank},
    pool::{self, AdapterId, Lease, PoolConfig, PoolError, Source, StreamId},
    routing::Batch,
};

use half::bf16;

use super::{
    ADAPTERS, BYTES, Captured, DTYPE, Device, FEATURES, Fails, Of, PENDING, Refused, SLOTS, STREAMS, Table, Tensors,
    adapter, capacity, routing_capacity, spec,
};
use crate::{
    backend::{
        self, AdapterPool, Backend, Elements, Error, Filled, Graph, LoraLinear, Matrix, MatrixMut, Reservation,
        Routing, Stack, Staging, Step, Tiers, WeightTable, Workspace, refused,
    },
    common::adding,
};

/// Rows of the operands, more than any batch has.
pub const ROWS: usize = 16;

/// The same of either pool.
macro_rules! of {
    ($all:expr, $pool:ident => $of:expr) => {
        match $all {
            Pool::Alone($pool) => $of,
            Pool::OfGroup($pool, _) => $of,
        }
    };
}

pub struct Machine {
    backend: Backend,
    model: Model,
    id: LinearId,
    plain: WeightTable,
    pool: Pool,
    streams: Vec<StreamId>,
    /// Of the plain table, and of the pool's streams. The CPU has none.
    stack: Option<Stack>,
    stacks: Vec<Option<Stack>>,
    lanes: Vec<Lane>,
    staging: Staging,
    elsewhere: Elsewhere,
}

/// Another table, with an adapter in each slot, and another pool, all of whose slots are leased.
struct Elsewhere {
    slots: Vec<Slot>,
    _table: WeightTable,
    _pool: AdapterPool,
    _leases: Vec<Lease>,
}

impl Elsewhere {
    /// The table has more slots than the others.
    fn new(backend: &Backend, model: &Model) -> Self {
        const LOADED: usize = SLOTS + 2;
        let adapter = Arc::new(adapter(8, 0.5, false));
        let capacity = capacity().slots(LOADED);
        let table = backend.table(model, DTYPE, capacity, (LOADED + 1) * (BYTES + backend::ROW_BYTES)).unwrap();
        let image = adapter.plan(model, DTYPE).unwrap();
        let mut slots: Vec<_> = (0..LOADED).map(|slot| table.load(slot, &image).unwrap()).collect();
        let (Pool::Alone(mut pool), _) = new_pool(backend, model, false) else { unreachable!("it is of no group") };
        let source = || Source::memory(Arc::clone(&adapter), model, DTYPE).unwrap();
        let ids: Vec<_> = (0..SLOTS).map(|_| pool.register(source()).unwrap()).collect();
        let leases: Vec<_> = ids.into_iter().map(|id| acquire(&mut pool, id, StreamId::FIRST).unwrap()).collect();
        slots.extend(leases.iter().map(Lease::slot));
        Self { slots, _table: table, _pool: pool, _leases: leases }
    }
}

enum Pool {
    Alone(AdapterPool),
    OfGroup(GroupPool<Failing, Tiers>, Arc<Mutex<Option<Fails>>>),
}

/// A channel that fails once it is to.
struct Failing {
    channel: InProcess,
    fails: Arc<Mutex<Option<Fails>>>,
}

impl Ranks for Failing {
    fn tp(&self) -> TpRank {
        self.channel.tp()
    }

    fn all_gather(&mut self, message: &Message) -> Result<Vec<Message>, ChannelError> {
        let mut messages = self.channel.all_gather(message)?;
        // Not within the lock, which a panic would poison.
        let fails = *self.fails.lock().unwrap();
        match fails {
            None => {}
            Some(Fails::Panics) => panic::resume_unwind(Box::new(())),
            Some(Fails::Lies) => {
                let mut bytes = *message.as_bytes();
                // Of a number, a name or the end.
                let place = bytes.iter().rposition(u8::is_ascii_digit).unwrap_or(0);
                bytes[place] ^= 1;
                messages[0] = Message::from_bytes(bytes);
            }
            Some(Fails::Empty) => messages.clear(),
        }
        Ok(messages)
    }
}

/// What the steps of a stream have in common.
struct Lane {
    routings: Vec<Routing>,
    workspace: Workspace,
    x: Elements<bf16>,
    y: Elements<bf16>,
}

/// Operations on a step: its own delta, or a replay.
enum Work<'a> {
    AddDelta,
    Replay(&'a mut Graph),
}

impl Machine {
    pub fn new(backend: Backend) -> Self {
        let (model, id) = spec();
        let table =
            |adapters| backend.table(&model, DTYPE, capacity(), adapters * (BYTES + backend::ROW_BYTES)).unwrap();
        // Room for what is loaded beside what a step keeps, and for what is not committed yet.
        let plain = table(2 * SLOTS + 1 + PENDING);
        let (pool, streams) = new_pool(&backend, &model, false);
        let lanes = (0..STREAMS).map(|stream| Lane {
            routings: (0..backend::ROUTINGS).map(|i| backend.routing(stream, routing_capacity(i)).unwrap()).collect(),
            workspace: backend.workspace(stream, &plain),
            x: backend.elements(stream, &[bf16::ONE; ROWS * FEATURES]),
            y: backend.elements(stream, &[bf16::ZERO; ROWS * FEATURES]),
        });
        let (lanes, staging) = (lanes.collect(), plain.staging().unwrap());
        let elsewhere = Elsewhere::new(&backend, &model);
        let stack = Stack::new(&plain, id, Of::Table(Table::Plain).positions());
        let stacks = new_stacks(&pool, &streams, id);
        Self { id, plain, pool, streams, stack, stacks, lanes, staging, elsewhere, backend, model }
    }

    fn table(&self, table: Table) -> &WeightTable {
        match table {
            Table::Plain => &self.plain,
            Table::Pool => of!(&self.pool, pool => pool.weights(StreamId::FIRST).unwrap()),
        }
    }

    /// What a step adds to each row, with a stack or without.
    fn run(
        &mut self,
        of: Of,
        routing: usize,
        slots: &[Slot],
        is_stacked: bool,
        work: Work<'_>,
    ) -> Result<Vec<f32>, Error> {
        let Self { plain, pool, lanes, streams, stack, stacks, .. } = self;
        let (table, stack, lane) = match of {
            Of::Table(Table::Plain) => (&*plain, stack, 0),
            Of::Table(Table::Pool) => (of!(&*pool, pool => pool.weights(streams[0]).unwrap()), &mut stacks[0], 0),
            Of::Pool(stream) => {
                (of!(&*pool, pool => pool.weights(streams[stream]).unwrap()), &mut stacks[stream], stream)
            }
        };
        let mut stack = stack.as_mut().filter(|_| is_stacked);
        let layer = LoraLinear::new(table, self.id).unwrap();
        let Lane { routings, workspace, x, y } = &mut lanes[lane];
        backend::write(y, &[bf16::ZERO; ROWS * FEATURES]);
        let batch = routings[routing].update(&Batch::new(slots))?;
        let mut step = match of {
            Of::Table(_) => table.step(&batch, workspace)?,
            Of::Pool(stream) => of!(&*pool, pool => pool.step(streams[stream], &batch, workspace)?),
        };
        if let Some(stack) = &mut stack {
            stack.multiply(&mut step)?;
        }
        match (work, &mut stack) {
            (Work::AddDelta, None) => add_delta(&layer, &mut step, x, y)?,
            (Work::AddDelta, Some(stack)) => stack.add_delta(&layer, &mut step)?,
            (Work::Replay(graph), _) => backend::replay(graph, &mut step)?,
        }
        drop(step);
        let y = stack.map_or_else(|| backend::elements_of(y), |stack| stack.y());
        let y: Vec<f32> = y.into_iter().map(bf16::to_f32).collect();
        let mut added = adding::added(&y, FEATURES);
        let others = added.split_off(slots.len());
        assert!(others.iter().all(|added| *added == 0.0), "rows beyond the batch of {} have {others:?}", slots.len());
        Ok(added)
    }
}

/// A pool with a table for each stream, of a group or not.
fn new_pool(backend: &Backend, model: &Model, is_of_group: bool) -> (Pool, Vec<StreamId>) {
    // Whatever blocks of the arena are in use, there is room for another: the slots alone say whether the pool is full.
    let [device, host] = [4 * SLOTS, ADAPTERS].map(|count| AdapterPool::arena_bytes(model, DTYPE, 8, count));
    let config = PoolConfig::arena_bytes(device).host_bytes(host).loaders(1);
    let mut pool = backend.pool(model, DTYPE, capacity(), config);
    let others = (1..STREAMS).map(|stream| backend.add_stream(&mut pool, stream));
    let streams = [StreamId::FIRST].into_iter().chain(others).collect();
    if !is_of_group {
        return (Pool::Alone(pool), streams);
    }
    let ranks = InProcess::group(1, Duration::from_secs(60)).pop().unwrap();
    let fails = Arc::new(Mutex::new(None));
    let ranks = Failing { channel: ranks, fails: Arc::clone(&fails) };
    (Pool::OfGroup(GroupPool::new(ranks, pool).unwrap(), fails), streams)
}

fn new_stacks(pool: &Pool, streams: &[StreamId], id: LinearId) -> Vec<Option<Stack>> {
    let weights = |stream| of!(pool, pool => pool.weights(stream).unwrap());
    let stacks = streams.iter().enumerate();
    stacks.map(|(number, &stream)| Stack::new(weights(stream), id, Of::Pool(number).positions())).collect()
}

/// The step loop of an engine, for one layer.
fn add_delta(layer: &LoraLinear, step: &mut Step<'_>, x: &Elements<bf16>, y: &mut Elements<bf16>) -> Result<(), Error> {
    let rows = step.num_tokens();
    layer.add_delta(step, Matrix::<bf16>::new(x, rows, FEATURES)?, MatrixMut::<bf16>::new(y, rows, FEATURES)?)
}

/// The loader of an engine.
fn load(weights: &WeightTable, slot: usize, image: &SlotImage<'_>) -> Result<Slot, LoadError> {
    let filled = weights.reserve(image)?.fill(image, &mut weights.staging()?)?;
    filled.wait()?;
    assert!(filled.is_ready());
    weights.commit(slot, filled)
}

/// Leases an adapter once it is loaded.
fn acquire<B: pool::Backend>(
    pool: &mut pool::AdapterPool<B>,
    id: AdapterId,
    stream: StreamId,
) -> Result<Lease, PoolError> {
    let start = Instant::now();
    loop {
        match pool.acquire(id, stream) {
            Err(PoolError::Loading { .. }) => drop(pool.wait(Duration::from_secs(30))),
            result => return result,
        }
        assert!(start.elapsed() < Duration::from_secs(30), "nothing loads");
    }
}

/// A result, or that the call panicked. With `panics`, the callback that it gets panics.
fn panicking<T>(
    panics: bool,
    call: impl FnOnce(&mut dyn FnMut(usize)) -> Result<T, LoadError>,
) -> Result<T, LoadError> {
    let mut progress = |_| {
        if panics {
            panic::resume_unwind(Box::new(()))
        }
    };
    let panicked = |_| Err(LoadError::Panicked { message: String::new() });
    panic::catch_unwind(AssertUnwindSafe(|| call(&mut progress))).unwrap_or_else(panicked)
}

impl Device for Machine {
    type Reservation = Reservation;
    type Filled = Filled;
    type Graph = Graph;

    const HAS_GRAPHS: bool = backend::HAS_GRAPHS;
    const ROW_BYTES: usize = backend::ROW_BYTES;
    const ROUTINGS: usize = backend::ROUTINGS;

    fn model(&self) -> &Model {
        &self.model
    }

    fn tensors(&self, tensors: Tensors) -> Tensors {
        self.backend.tensors(tensors)
    }

    fn load(&mut self, to: Table, slot: usize, image: &SlotImage<'_>, panics: bool) -> Result<Slot, LoadError> {
        panicking(panics, |progress| self.table(to).load_with_progress(slot, image, progress))
    }

    fn reserve(&mut self, image: &SlotImage<'_>) -> Result<Reservation, LoadError> {
        self.plain.reserve(image)
    }

    fn fill(&mut self, room: Reservation, image: &SlotImage<'_>, panics: bool) -> Result<Filled, LoadError> {
        panicking(panics, |progress| room.fill_with_progress(image, &mut self.staging, progress))
    }

    fn commit_filled(&mut self, to: Table, slot: usize, filled: Filled) -> Result<Slot, LoadError> {
        self.table(to).commit(slot, filled)
    }

    fn unload(&mut self, from: Table, slot: usize) -> Result<(), LoadError> {
        self.table(from).unload(slot)
    }

    fn check(&self, slots: &[Slot]) -> Result<(), SlotError> {
        self.plain.check(slots.iter().copied())
    }

    fn strangers(&self) -> &[Slot] {
        &self.elsewhere.slots
    }

    fn used(&self) -> [usize; 2] {
        [self.plain.usage().used, self.plain.loaded().iter().map(|info| info.bytes).sum()]
    }

    fn step(&mut self, of: Of, routing: usize, slots: &[Slot], is_stacked: bool) -> Result<Vec<f32>, Refused> {
        self.run(of, routing, slots, is_stacked, Work::AddDelta).map_err(refused)
    }

    fn capture(&mut self, of: Of, captured: Captured) -> Result<Graph, Refused> {
        let stream = if let Of::Pool(stream) = of { stream } else { 0 };
        let Self { plain, pool, lanes, streams, stack, stacks, .. } = self;
        let (table, stack) = match of {
            Of::Table(Table::Plain) => (&*plain, stack),
            Of::Table(Table::Pool) | Of::Pool(_) => {
                (of!(&*pool, pool => pool.weights(streams[stream]).unwrap()), &mut stacks[stream])
            }
        };
        let mut stack = stack.as_mut().filter(|_| captured.is_stacked);
        let layer = LoraLinear::new(table, self.id).unwrap();
        let Lane { routings, workspace, x, y } = &mut lanes[stream];
        let (routing, weights) = (&routings[captured.routing], table);
        let record = |step: &mut Step<'_>| {
            backend::call_beside(captured.beside, step, weights, routing);
            match &mut stack {
                Some(stack) => stack.add_delta(&layer, step)?,
                None => add_delta(&layer, step, x, y)?,
            }
            backend::call_beside(captured.beside, step, weights, routing);
            Ok(())
        };
        backend::capture(table, routing, captured, workspace, record).map_err(refused)
    }

    fn replay(
        &mut self,
        graph: &mut Graph,
        of: Of,
        routing: usize,
        slots: &[Slot],
        is_stacked: bool,
    ) -> Result<Vec<f32>, Refused> {
        self.run(of, routing, slots, is_stacked, Work::Replay(graph)).map_err(refused)
    }

    fn copy(&mut self, of: usize, on: usize) -> Result<(), Refused> {
        backend::copy(&self.backend, of, on).map_err(refused)
    }

    fn step_beside(
        &mut self,
        slots: &[Slot],
        to: usize,
        image: &SlotImage<'_>,
    ) -> (Result<Vec<f32>, Refused>, Result<Slot, LoadError>) {
        let plain = self.plain.clone();
        thread::scope(|threads| {
            let loader = threads.spawn(move || load(&plain, to, image));
            let added = self.run(Of::Table(Table::Plain), 0, slots, false, Work::AddDelta).map_err(refused);
            (added, loader.join().unwrap())
        })
    }

    fn register(&mut self, source: Source) -> Result<AdapterId, PoolError> {
        match &mut self.pool {
            Pool::Alone(pool) => pool.register(source),
            Pool::OfGroup(pool, _) => pool.register(Ok(source)),
        }
    }

    fn fail_channel(&mut self, how: Fails) -> bool {
        let Pool::OfGroup(_, fails) = &self.pool else { return false };
        fails.lock().unwrap().get_or_insert(how);
        true
    }

    fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
        of!(&mut self.pool, pool => pool.unregister(id))
    }

    fn acquire(&mut self, id: AdapterId, stream: usize) -> Result<Lease, PoolError> {
        of!(&mut self.pool, pool => acquire(pool, id, self.streams[stream]))
    }

    fn end_step(&mut self, stream: usize) -> Result<(), PoolError> {
        of!(&mut self.pool, pool => pool.end_step(self.streams[stream]))
    }

    fn leases(&mut self) -> usize {
        of!(&mut self.pool, pool => {
            pool.poll();
            pool.snapshot().leases
        })
    }

    fn left(&mut self) -> [usize; 2] {
        of!(&mut self.pool, pool => {
            while pool.wait(Duration::from_secs(30)) {}
            while pool.snapshot().copying > 0 {
                pool.poll();
            }
            pool.poll();
            let snapshot = pool.snapshot();
            [snapshot.device_memory.used, snapshot.host_memory.used]
        })
    }

    fn renew_pool(&mut self) {
        let is_of_group = matches!(self.pool, Pool::Alone(_));
        (self.pool, self.streams) = new_pool(&self.backend, &self.model, is_of_group);
        self.stacks = new_stacks(&self.pool, &self.streams, self.id);
    }
}
