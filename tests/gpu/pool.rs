//! The adapter pool: real copies beside steps on two streams. Blocks are filled with NaN before they are overwritten,
//! so a kernel that reads a wrong or unfinished adapter is seen.

use std::{
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::Adapter,
    cuda::{AdapterPool, Buffer, Graph, LaunchError, LoraLinear, Routing, WeightTable, Workspace},
    error::{LoadError, OperandError, SlotError},
    model::{LinearId, Model},
    plan::Capacity,
    pool::{AdapterId, Lease, PoolConfig, PoolError, Source, StreamId, Tier},
    routing::Batch,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::{adapters, adding, small::choose},
    device::Gpu,
    setup::{Spin, TOKENS, add_deltas},
};

const LAYERS: usize = 4;
const FEATURES: usize = 512;
/// Size of an adapter of rank 16, and of its descriptors.
const ADAPTER_BYTES: usize = LAYERS * 2 * 16 * FEATURES * size_of::<f32>() + 256;
/// Steps that are enqueued before the host looks at the first one.
const DEPTH: usize = 6;

/// A compute stream with a pool's table, and the operands of its steps.
struct Lane {
    gpu: Gpu,
    stream: StreamId,
    weights: WeightTable,
    layers: Vec<LoraLinear>,
    routing: Routing,
    workspace: Workspace,
    x: Buffer<f32>,
    /// One for each step that may be in flight.
    y: Vec<Buffer<f32>>,
    spin: Spin,
}

impl Lane {
    fn new(pool: &AdapterPool, gpu: Gpu, stream: StreamId, ids: &[LinearId]) -> Self {
        let weights = pool.weights(stream).unwrap().clone();
        let mut x = Buffer::zeros(&gpu.queue, TOKENS * FEATURES).unwrap();
        x.write(&vec![1.0; TOKENS * FEATURES]).unwrap();
        let y = || Buffer::zeros(&gpu.queue, ids.len() * TOKENS * FEATURES).unwrap();
        Self {
            layers: ids.iter().map(|&id| LoraLinear::new(&weights, id).unwrap()).collect(),
            routing: Routing::new(&gpu.queue, weights.capacity(), DEPTH).unwrap(),
            workspace: Workspace::new(&weights).unwrap(),
            x,
            y: (0..DEPTH).map(|_| y()).collect(),
            spin: Spin::new(&gpu),
            stream,
            weights,
            gpu,
        }
    }

    /// Enqueues a step whose tokens have these slots in turn.
    fn enqueue(&mut self, pool: &AdapterPool, at: usize, slots: &[Slot]) {
        let slots: Vec<_> = slots.iter().copied().cycle().take(TOKENS).collect();
        let batch = self.routing.update(&Batch::new(&slots)).unwrap();
        let mut step = pool.step(self.stream, &batch, &mut self.workspace).unwrap();
        add_deltas(&self.layers, FEATURES, &mut step, &self.x, &mut self.y[at]).unwrap();
    }

    /// Enqueues a step with slots in device memory.
    fn enqueue_on_device(&mut self, pool: &AdapterPool, at: usize, slots: &Buffer<i32>) {
        let batch = self.routing.update_on_device(slots.slice(0..TOKENS), None).unwrap();
        let mut step = pool.step(self.stream, &batch, &mut self.workspace).unwrap();
        add_deltas(&self.layers, FEATURES, &mut step, &self.x, &mut self.y[at]).unwrap();
    }

    fn capture(&mut self) -> Graph {
        let Self { weights, layers, routing, workspace, x, y, .. } = self;
        weights.capture(routing, TOKENS, workspace, |step| add_deltas(layers, FEATURES, step, x, &mut y[0])).unwrap()
    }

    /// Replays a graph for a step whose tokens have these slots.
    fn replay(&mut self, pool: &AdapterPool, graph: &mut Graph, slots: &[Slot]) -> Result<(), LaunchError> {
        let batch = self.routing.update(&Batch::new(slots))?;
        graph.replay(&mut pool.step(self.stream, &batch, &mut self.workspace)?)
    }

    /// The same with slots in device memory.
    fn replay_on_device(
        &mut self,
        pool: &AdapterPool,
        graph: &mut Graph,
        slots: &Buffer<i32>,
    ) -> Result<(), LaunchError> {
        let batch = self.routing.update_on_device(slots.slice(0..TOKENS), None)?;
        graph.replay(&mut pool.step(self.stream, &batch, &mut self.workspace)?)
    }

    /// The number of a slot for each token, in device memory.
    fn on_device(&self, slot: Slot) -> Buffer<i32> {
        Buffer::from_slice(&self.gpu.queue, self.gpu.stream.clone_htod(&[slot.number(); TOKENS]).unwrap()).unwrap()
    }

    /// What a step added for each of `values`, after a check that it is the same in all layers. Zeroes its output.
    fn check(&mut self, at: usize, values: &[f32], what: &str) {
        let mut y = vec![f32::NAN; self.y[at].len()];
        self.y[at].read(&mut y).unwrap();
        for (row, outputs) in y.chunks(FEATURES).enumerate() {
            let value = values[row % TOKENS % values.len()];
            let wrong = outputs.iter().find(|&&output| output != value);
            assert!(wrong.is_none(), "{what}, row {row}: {wrong:?} instead of {value}");
        }
        y.fill(0.0);
        self.y[at].write(&y).unwrap();
    }
}

struct Setup {
    pool: AdapterPool,
    lanes: Vec<Lane>,
    model: Model,
}

impl Setup {
    /// A pool with two streams, and room for `arena` adapters of rank 16 on the device and `host` in host memory.
    fn new(slots: usize, arena: usize, host: usize) -> Self {
        Self::of(LAYERS, slots, [arena, host].map(|adapters| adapters * ADAPTER_BYTES))
    }

    /// The same for a model of this many layers, with bytes on the device and in host memory.
    fn of(layers: usize, slots: usize, [arena, host]: [usize; 2]) -> Self {
        let first = Gpu::new();
        let second = Gpu::in_context(Arc::clone(&first.context));
        let (model, ids) = adding::model(layers, FEATURES);
        let capacity = Capacity::tokens(TOKENS).slots(slots).rank(64);
        let config = PoolConfig::arena_bytes(arena).host_bytes(host).poisoning();
        let mut pool = AdapterPool::new(&first.queue, &model, DType::F32, capacity, config).unwrap();
        let other = pool.add_queue(&second.queue).unwrap();
        let lanes = [(first, StreamId::FIRST), (second, other)];
        let lanes = lanes.into_iter().map(|(gpu, stream)| Lane::new(&pool, gpu, stream, &ids)).collect();
        Self { pool, lanes, model }
    }

    fn adding(&mut self, rank: usize, value: f32) -> AdapterId {
        let adapter = Arc::new(adding::adapter(LAYERS, FEATURES, rank, value));
        self.pool.register(Source::memory(adapter, &self.model, DType::F32).unwrap()).unwrap()
    }

    /// Leases a batch, once there is room for it and its adapters are in host memory.
    fn prepare(&mut self, ids: &[AdapterId], lane: usize) -> Vec<Lease> {
        let start = Instant::now();
        loop {
            match self.pool.prepare(ids, self.lanes[lane].stream) {
                Err(PoolError::Loading { .. }) => drop(self.pool.wait(Duration::from_millis(100))),
                Err(PoolError::Full) => self.end_steps(),
                leases => return leases.unwrap(),
            }
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", self.pool.snapshot());
        }
    }

    fn end_steps(&mut self) {
        for lane in &self.lanes {
            self.pool.end_step(lane.stream).unwrap();
        }
    }

    /// Loads an adapter and leases it.
    fn lease(&mut self, id: AdapterId, lane: usize) -> Lease {
        self.prepare(&[id], lane).pop().unwrap()
    }
}

/// 48 adapters of four ranks over four slots, batches on two streams that are behind the host, versions that are
/// replaced. Every output of every step is checked.
#[test]
#[ignore = "needs a GPU"]
fn many_adapters_share_few_slots_on_two_streams() {
    const ADAPTERS: usize = 48;
    let rounds = choose(250, 25);
    let mut setup = Setup::new(4, 6, 24);
    let mut rng = StdRng::seed_from_u64(11);
    let rank = |number: usize| [16, 8, 32, 16][number % 4];
    let mut adapters: Vec<(AdapterId, f32)> =
        (0..ADAPTERS).map(|i| (setup.adding(rank(i), 1.0 + i as f32), 1.0 + i as f32)).collect();
    let mut running: Vec<Lease> = Vec::new();
    for round in 0..rounds {
        let mut steps = Vec::new();
        for at in 0..DEPTH {
            let lane = rng.random_range(0..2);
            // A Zipf-like choice: half of the batches use the first few adapters.
            let most = if rng.random_ratio(1, 2) { 6 } else { ADAPTERS };
            let batch: Vec<_> = (0..rng.random_range(1..3)).map(|_| adapters[rng.random_range(0..most)]).collect();
            let ids: Vec<_> = batch.iter().map(|(id, _)| *id).collect();
            // A request that runs longer than its step would leave room for no other batch.
            running.clear();
            let leases = setup.prepare(&ids, lane);
            if rng.random_ratio(1, 3) {
                setup.lanes[lane].spin.run(rng.random_range(0..4));
            }
            let slots: Vec<_> = leases.iter().map(Lease::slot).collect();
            setup.lanes[lane].enqueue(&setup.pool, at, &slots);
            if rng.random_ratio(1, 2) {
                // Kept over the end of the step.
                running.extend(leases);
            } else {
                drop(leases);
            }
            setup.pool.end_step(setup.lanes[lane].stream).unwrap();
            steps.push((lane, at, batch.iter().map(|(_, value)| *value).collect::<Vec<_>>()));
            let next = adapters[rng.random_range(0..ADAPTERS)].0;
            setup.pool.prefetch(next).unwrap();
        }
        for (lane, at, values) in steps {
            setup.lanes[lane].check(at, &values, &format!("round {round}, step {at}"));
        }
        let (number, value) = (rng.random_range(0..ADAPTERS), 1000.0 + round as f32);
        let new = setup.adding(rank(number), value);
        setup.pool.unregister(std::mem::replace(&mut adapters[number], (new, value)).0).unwrap();
    }
    drop(running);
    let counters = setup.pool.snapshot().counters;
    println!("{counters:?}");
    assert!(counters.evictions > rounds && counters.hits > rounds / 5, "{counters:?}");
    for (id, _) in adapters {
        setup.pool.unregister(id).unwrap();
    }
    setup.end_steps();
    while setup.pool.wait(Duration::from_secs(10)) {}
    setup.lanes.iter().for_each(|lane| lane.gpu.synchronize());
    let end = Instant::now();
    while setup.pool.snapshot().device_memory.used > 0 && end.elapsed() < Duration::from_secs(10) {
        setup.pool.poll();
    }
    let end = setup.pool.snapshot();
    assert_eq!((end.device_memory.used, end.host_memory.used, end.resident, end.adapters), (0, 0, 0, 0));
}

/// Nothing waits on the host: with one stream far behind, another adapter takes its slot. Its copy runs when the stream
/// has left it.
#[test]
#[ignore = "needs a GPU"]
fn a_slot_is_overwritten_after_the_last_step_that_reads_it() {
    let mut setup = Setup::new(1, 2, 4);
    let ids = [1.0, 2.0].map(|value| setup.adding(16, value));
    for round in 0..5 {
        for id in ids {
            setup.pool.prefetch(id).unwrap();
            while setup.pool.wait(Duration::from_secs(10)) {}
        }
        let old = setup.lease(ids[0], 0);
        setup.lanes[0].gpu.synchronize();
        let spun = setup.lanes[0].spin.run(200);
        setup.lanes[0].enqueue(&setup.pool, 0, &[old.slot()]);
        drop(old);
        setup.pool.end_step(StreamId::FIRST).unwrap();
        let new = setup.pool.acquire(ids[1], setup.lanes[1].stream).unwrap();
        setup.lanes[1].enqueue(&setup.pool, 1, &[new.slot()]);
        setup.pool.end_step(setup.lanes[1].stream).unwrap();
        assert!(!spun.is_complete(), "round {round}: the host waited");
        assert_eq!(setup.pool.snapshot().copying, 1, "round {round}: the copy waited for nothing");
        setup.lanes[0].check(0, &[1.0], &format!("round {round}, old"));
        setup.lanes[1].check(1, &[2.0], &format!("round {round}, new"));
        drop(new);
        setup.end_steps();
    }
    assert!(setup.pool.snapshot().counters.waits >= 5);
}

/// Graphs on both streams follow the slots, while adapters come and go.
#[test]
#[ignore = "needs a GPU"]
fn graphs_follow_the_pool() {
    let mut setup = Setup::new(3, 4, 8);
    let ids: Vec<_> = (1..=12).map(|i| (setup.adding(16, i as f32), i as f32)).collect();
    let mut graphs: Vec<_> = setup.lanes.iter_mut().map(Lane::capture).collect();
    for round in 0..choose(60, 20) {
        let lane = round % 2;
        let batch = [ids[(round * 5) % 12], ids[(round * 7 + 3) % 12]];
        let leases = setup.prepare(&batch.map(|(id, _)| id), lane);
        let slots: Vec<_> = leases.iter().map(Lease::slot).cycle().take(TOKENS).collect();
        setup.lanes[lane].replay(&setup.pool, &mut graphs[lane], &slots).unwrap();
        drop(leases);
        setup.pool.end_step(setup.lanes[lane].stream).unwrap();
        setup.lanes[lane].check(0, &batch.map(|(_, value)| value), &format!("round {round}"));
    }
    assert!(setup.pool.snapshot().counters.evictions > choose(20, 5));
}

/// A captured stream refuses what would add work to it, and nothing is lost. Another thread's tables refuse what the
/// pool alone does.
#[test]
#[ignore = "needs a GPU"]
fn what_cannot_be_enqueued_is_refused() {
    let mut setup = Setup::new(2, 3, 4);
    let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(16, value));
    drop(setup.lease(ids[0], 0));
    setup.end_steps();
    // One after the other, so that the second is on the device, and the third where the first was.
    for &id in &ids[1..] {
        setup.pool.prefetch(id).unwrap();
        while setup.pool.wait(Duration::from_secs(10)) {}
        let start = Instant::now();
        while setup.pool.residency(id).unwrap().tier != Tier::Device || setup.pool.snapshot().copying > 0 {
            assert!(start.elapsed() < Duration::from_secs(10), "no copy ends");
            setup.pool.poll();
        }
    }
    let Setup { pool, lanes, .. } = &mut setup;
    lanes[0].gpu.capture(|| {
        let refused = pool.acquire(ids[1], StreamId::FIRST).unwrap_err();
        assert!(matches!(refused, PoolError::Device(LaunchError::Capturing)), "{refused}");
        // One of three has no slot. The row of an evicted adapter could not be emptied.
        let outside = ids.into_iter().find(|&id| pool.residency(id).unwrap().tier != Tier::Device).unwrap();
        let evictions = pool.snapshot().counters.evictions;
        let refused = pool.acquire(outside, StreamId::FIRST).unwrap_err();
        assert!(matches!(refused, PoolError::Full), "{refused}");
        assert_eq!(pool.snapshot().counters.evictions, evictions);
        pool.end_step(StreamId::FIRST).unwrap();
        pool.poll();
    });
    assert_eq!(setup.pool.snapshot().leases, 0);
    let lease = setup.lease(ids[1], 0);
    setup.lanes[0].enqueue(&setup.pool, 0, &[lease.slot()]);
    setup.lanes[0].check(0, &[2.0], "after a capture");
    assert_eq!(setup.pool.residency(ids[1]).unwrap().tier, Tier::Device);
    let weights = &setup.lanes[0].weights;
    assert!(matches!(weights.unload(0), Err(LoadError::Slot(SlotError::Pooled))));
    let adapter = adding::adapter(LAYERS, FEATURES, 8, 9.0);
    let image = adapter.plan(&setup.model, DType::F32).unwrap();
    assert!(matches!(weights.load(0, &image), Err(LoadError::Slot(SlotError::Pooled))));
    assert!(!weights.fits(&image));
}

/// Slots in device memory are not checked. Without a lease, they give their old adapter as a whole, and then the base
/// model.
#[test]
#[ignore = "needs a GPU"]
fn a_slot_without_a_lease_never_reads_another_adapter() {
    let mut setup = Setup::new(1, 2, 4);
    let ids = [1.0, 2.0].map(|value| setup.adding(16, value));
    for round in 0..40 {
        // The lane that has the old adapter, and the one that gets the new one.
        let (stale, fresh) = (round / 2 % 2, 1 - round / 2 % 2);
        let old = setup.lease(ids[0], stale);
        let slots = setup.lanes[stale].on_device(old.slot());
        drop(old);
        setup.pool.end_step(setup.lanes[stale].stream).unwrap();
        let late = round % 2 == 0;
        if late {
            setup.lanes[stale].spin.run(20);
        }
        setup.lanes[stale].enqueue_on_device(&setup.pool, 0, &slots);
        // Its copy overwrites the block, after the step above.
        let new = setup.lease(ids[1], fresh);
        setup.lanes[stale].enqueue_on_device(&setup.pool, 1, &slots);
        setup.lanes[fresh].enqueue(&setup.pool, 2, &[new.slot()]);
        let what = |when| format!("round {round}, stale lane {stale}, {when}");
        setup.lanes[stale].check(0, &[1.0], &what("before the eviction"));
        setup.lanes[stale].check(1, &[0.0], &what("after the eviction"));
        setup.lanes[fresh].check(2, &[2.0], &what("the new adapter"));
        drop(new);
        setup.end_steps();
    }
}

/// A batch is checked for its own slots: those of the host's last batch do not count against slots in device memory,
/// nor the other way round.
#[test]
#[ignore = "needs a GPU"]
fn batches_of_the_host_and_of_the_device_alternate() {
    let mut setup = Setup::new(2, 3, 4);
    let ids = [1.0, 2.0].map(|value| setup.adding(16, value));
    let mut graph = setup.lanes[0].capture();
    for round in 0..8 {
        let what = |when| format!("round {round}, {when}");
        let [old, kept] = [ids[round % 2], ids[1 - round % 2]].map(|id| setup.lease(id, 0));
        let [old_value, kept_value] = [[1.0, 2.0], [2.0, 1.0]][round % 2];
        let [old_slots, kept_slots] = [&old, &kept].map(|lease| [lease.slot(); TOKENS]);
        let on_device = setup.lanes[0].on_device(kept.slot());
        let Setup { pool, lanes, .. } = &mut setup;
        lanes[0].replay(pool, &mut graph, &old_slots).unwrap();
        lanes[0].check(0, &[old_value], &what("on the host"));
        drop(old);
        pool.end_step(StreamId::FIRST).unwrap();
        // The host's last batch has a slot that nobody leases any more.
        let refused = lanes[0].replay(pool, &mut graph, &old_slots).unwrap_err();
        let is_of_slot =
            matches!(refused, LaunchError::Operand(OperandError::NotLeased { slot }) if slot == old_slots[0]);
        assert!(is_of_slot, "{}: {refused}", what("without a lease"));
        lanes[0].replay_on_device(pool, &mut graph, &on_device).unwrap();
        lanes[0].check(0, &[kept_value], &what("replayed on the device"));
        lanes[0].enqueue_on_device(pool, 1, &on_device);
        lanes[0].check(1, &[kept_value], &what("on the device"));
        let refused = lanes[0].replay(pool, &mut graph, &old_slots).unwrap_err();
        assert!(matches!(refused, LaunchError::Operand(OperandError::NotLeased { .. })), "{refused}");
        lanes[0].replay(pool, &mut graph, &kept_slots).unwrap();
        lanes[0].check(0, &[kept_value], &what("on the host again"));
        drop(kept);
        setup.end_steps();
    }
}

/// A pool is dropped while copies and steps are pending. Its memory returns after them.
#[test]
#[ignore = "needs a GPU"]
fn a_pool_may_be_dropped_at_any_time() {
    let gpu = Gpu::new();
    gpu.synchronize();
    let used = gpu.used_bytes();
    for round in 0..4 {
        let mut setup = Setup::new(2, 3, 8);
        let ids = [1.0, 2.0, 3.0].map(|value| setup.adding(16, value));
        let leases = setup.prepare(&ids[..2], 1);
        setup.lanes[1].spin.run(20);
        setup.lanes[1].enqueue(&setup.pool, 0, &[leases[0].slot(), leases[1].slot()]);
        setup.pool.prefetch(ids[2]).unwrap();
        let Setup { pool, mut lanes, .. } = setup;
        drop(pool);
        drop(leases);
        lanes[1].check(0, &[1.0, 2.0], &format!("round {round}"));
        let streams: Vec<_> = lanes.iter().map(|lane| Arc::clone(&lane.gpu.stream)).collect();
        drop(lanes);
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
    }
    assert_eq!(gpu.used_bytes(), used);
}

/// Whether weights can be read.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn set(&self, is_open: bool) {
        *self.is_open.lock().unwrap() = is_open;
        self.changed.notify_all();
    }
}

/// Weights, behind a gate if they have one.
struct Gated(Vec<u8>, Option<Arc<Gate>>);

impl AsRef<[u8]> for Gated {
    fn as_ref(&self) -> &[u8] {
        if let Some(gate) = &self.1 {
            let is_open = gate.is_open.lock().unwrap();
            drop(gate.changed.wait_while(is_open, |is_open| !*is_open).unwrap());
        }
        &self.0
    }
}

/// Layers and rank of an adapter of 6 MiB, which is copied in several parts.
const MANY_LAYERS: usize = 24;
const MAX_RANK: usize = 64;
const LARGE_BYTES: usize = MANY_LAYERS * 2 * MAX_RANK * FEATURES * size_of::<f32>() + 1024;

/// A large adapter that adds `value`, and `last` in its last layer, whose B is behind the gate.
fn gated(value: f32, last: f32, gate: &Arc<Gate>) -> Adapter {
    let value = |layer| if layer + 1 == MANY_LAYERS { last } else { value };
    let behind_gate = format!("layers.{}.m.lora_B.weight", MANY_LAYERS - 1);
    adapters::owned_by(&adding::modules(MANY_LAYERS, FEATURES, MAX_RANK, value), |name, bytes| {
        Gated(bytes, name.ends_with(&behind_gate).then(|| Arc::clone(gate)))
    })
}

impl Setup {
    /// Registers a large adapter and starts to read all of it but its last factor, if the device has room. The gate is
    /// closed then.
    fn reading(&mut self, value: f32, last: f32, gate: &Arc<Gate>) -> AdapterId {
        gate.set(true);
        let source = Source::memory(Arc::new(gated(value, last, gate)), &self.model, DType::F32).unwrap();
        gate.set(false);
        let id = self.pool.register(source).unwrap();
        self.pool.prefetch(id).unwrap();
        id
    }

    /// A step with all of these adapters adds the value of each.
    fn serves(&mut self, adapters: &[(AdapterId, f32)], what: &str) {
        let (ids, values): (Vec<_>, Vec<_>) = adapters.iter().copied().unzip();
        let leases = self.prepare(&ids, 0);
        let slots: Vec<_> = leases.iter().map(Lease::slot).collect();
        self.lanes[0].enqueue(&self.pool, 0, &slots);
        drop(leases);
        self.end_steps();
        self.lanes[0].check(0, &values, what);
    }
}

/// An adapter takes its room on the device when its read starts, and is leased when it has ended. A batch that needs
/// the room gets it, a read that fails gives it back, and no step sees a part of an adapter.
#[test]
#[ignore = "needs a GPU"]
fn adapters_are_copied_while_they_are_read() {
    let mut setup = Setup::of(MANY_LAYERS, 2, [5 * LARGE_BYTES, 8 * LARGE_BYTES]);
    let gate = Arc::new(Gate::default());
    let plain = [1.0, 2.0].map(|value| {
        let adapter = Arc::new(adding::adapter(MANY_LAYERS, FEATURES, MAX_RANK, value));
        (setup.pool.register(Source::memory(adapter, &setup.model, DType::F32).unwrap()).unwrap(), value)
    });
    for round in 0..choose(10, 4) {
        let what = |when| format!("round {round}, {when}");
        // The batch of both takes its room.
        let id = setup.reading(5.0, 5.0, &gate);
        let snapshot = setup.pool.snapshot();
        assert_eq!((snapshot.reading, snapshot.copying), (1, 1), "{}", what("an adapter is being read"));
        assert_eq!(setup.pool.residency(id).unwrap().tier, Tier::Source);
        assert!(matches!(setup.pool.acquire(id, StreamId::FIRST), Err(PoolError::Loading { .. })));
        setup.serves(&plain[..1], &what("beside the read"));
        setup.serves(&plain, &what("in its place"));
        gate.set(true);
        while setup.pool.wait(Duration::from_secs(10)) {}
        setup.serves(&[(id, 5.0)], &what("after the read"));
        setup.pool.unregister(id).unwrap();

        // It keeps its room.
        let id = setup.reading(6.0, 6.0, &gate);
        setup.serves(&plain[1..], &what("beside the next read"));
        gate.set(true);
        while setup.pool.wait(Duration::from_secs(10)) {}
        assert_eq!(setup.pool.residency(id).unwrap().tier, Tier::Device);
        setup.serves(&[plain[1], (id, 6.0)], &what("after the next read"));
        setup.pool.unregister(id).unwrap();

        // Its last part fails.
        let id = setup.reading(7.0, f32::NAN, &gate);
        setup.serves(&plain[..1], &what("beside a read that fails"));
        gate.set(true);
        while setup.pool.wait(Duration::from_secs(10)) {}
        assert!(setup.pool.residency(id).unwrap().failure.is_some());
        setup.serves(&plain, &what("after a read that failed"));
        setup.pool.unregister(id).unwrap();
    }
    for (id, _) in plain {
        setup.pool.unregister(id).unwrap();
    }
    setup.end_steps();
    setup.lanes.iter().for_each(|lane| lane.gpu.synchronize());
    let end = Instant::now();
    while setup.pool.snapshot().resident > 0 && end.elapsed() < Duration::from_secs(10) {
        setup.pool.poll();
    }
    let end = setup.pool.snapshot();
    assert_eq!((end.device_memory.used, end.host_memory.used, end.resident, end.adapters), (0, 0, 0, 0));
}

/// A pool that is dropped while an adapter is read and copied does not wait for the read, and its memory comes back.
#[test]
#[ignore = "needs a GPU"]
fn a_pool_may_be_dropped_while_an_adapter_is_copied() {
    let gpu = Gpu::new();
    gpu.synchronize();
    let (used, gate) = (gpu.used_bytes(), Arc::new(Gate::default()));
    for _ in 0..4 {
        let mut setup = Setup::of(MANY_LAYERS, 2, [5 * LARGE_BYTES, 8 * LARGE_BYTES]);
        setup.reading(5.0, 5.0, &gate);
        assert_eq!(setup.pool.snapshot().copying, 1);
        std::thread::sleep(Duration::from_millis(20));
        let Setup { pool, lanes, .. } = setup;
        drop(pool);
        let streams: Vec<_> = lanes.iter().map(|lane| Arc::clone(&lane.gpu.stream)).collect();
        drop(lanes);
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        assert_eq!(gpu.used_bytes(), used);
        gate.set(true);
    }
}
