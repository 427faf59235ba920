//! Replays of a decode step of Qwen3-8B, alone and while another thread's prefetches bring other adapters to the
//! device.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    cuda::{
        AdapterPool, Buffer, Graph, LaunchError, LoraLinear, Matrix, MatrixMut, Readback, RoutedBatch, Routing,
        WeightTable, Workspace,
    },
    model::LinearId,
    plan::Capacity,
    pool::{AdapterId, Lease, PoolConfig, Source, StreamId, Tier},
    routing::Batch,
};
use aril_bench::{
    Result,
    data::SMALL,
    device::Gpu,
    noise::Noise,
    pool::{Figures, LAYERS, Layers, Neighbours, Replays, Times},
};
use half::bf16;

use crate::{LIMIT, lease, load::on_device, room};

const RANK: usize = 16;
/// Tokens of the step, each with an adapter of its own.
const TOKENS: usize = 8;
/// Slots for the adapters that are brought up. One is copied while the next waits behind it.
const SPARE: usize = 2;
/// Adapters of the host tier that take turns in these slots.
const RING: usize = 4;
/// Between two looks of the loading thread at what it has prefetched. A copy takes longer.
const POLL: Duration = Duration::from_micros(200);
/// Alone and beside loads take turns, so that all run at the same clock rates.
const ROUNDS: usize = 4;
const REPLAYS_PER_ROUND: usize = 500;
const WARM_UP: usize = 200;

pub(crate) fn measure(gpu: &Gpu, figures: &mut Figures) -> Result<()> {
    let (layers, noise) = (Layers::qwen3_8b(LAYERS), Noise::new(1, SMALL, 0.02));
    let (model, linears) = layers.model()?;
    let dir = tempfile::tempdir()?;
    layers.write(RANK, &noise, dir.path())?;
    let memory = Source::memory(Arc::new(layers.adapter(RANK, &noise)?), &model, DType::BF16)?;
    let disk = Source::directory(dir.path(), &model, DType::BF16)?;
    let device = on_device(layers, RANK, &noise, &Readback::new(&gpu.queue()?)?)?;
    let device = Source::memory(Arc::new(device), &model, DType::BF16)?;

    let capacity = Capacity::tokens(TOKENS).slots(TOKENS + SPARE).rank(RANK);
    // Host memory for the ring, and for adapters of the directory that are read and copied.
    let config = PoolConfig::arena_bytes(room(&model, &memory, TOKENS + SPARE)).host_bytes(room(
        &model,
        &memory,
        RING + 2 * SPARE,
    ));
    let mut pool = AdapterPool::new(&gpu.queue()?, &model, DType::BF16, capacity, config)?;
    let mut register =
        |count| (0..count).map(|_| pool.register(memory.clone())).collect::<std::result::Result<Vec<_>, _>>();
    let (served, ring) = (register(TOKENS)?, register(RING)?);
    // The leases keep the step's adapters on the device.
    let leases = lease(&mut pool, &served)?;
    let weights = pool.weights(StreamId::FIRST).ok_or("the pool has no stream")?.clone();
    let slots: Vec<Slot> = leases.iter().map(Lease::slot).collect();
    let mut graph = Captured::new(gpu, &weights, &linears, slots)?;
    pool.end_step(StreamId::FIRST)?;
    for &id in &ring {
        drop(lease(&mut pool, &[id])?);
        pool.end_step(StreamId::FIRST)?;
    }
    let pool = Mutex::new(pool);
    let (replayed, batch, workspace) = graph.start()?;
    gpu.time_each(WARM_UP, || replay(&pool, replayed, &batch, workspace))?;

    let mut measured = Neighbours::ALL.map(|beside| (beside, Measured::default()));
    for _ in 0..ROUNDS {
        for (beside, measured) in &mut measured {
            let brought = match beside {
                Neighbours::None => None,
                Neighbours::Host => Some(Brought::Ring(&ring)),
                Neighbours::Disk => Some(Brought::New(&disk, Duration::ZERO)),
                Neighbours::Device => Some(Brought::New(&device, Duration::from_millis(10))),
            };
            measured.round(gpu, &mut graph, &pool, brought)?;
        }
    }
    drop(leases);
    locked(&pool).end_step(StreamId::FIRST)?;
    figures.replays.extend(measured.map(|(beside, measured)| measured.figures(beside)));
    Ok(())
}

/// A graph of a decode step, and what its steps share.
pub(crate) struct Captured {
    pub(crate) graph: Graph,
    pub(crate) routing: Routing,
    pub(crate) workspace: Workspace,
    pub(crate) slots: Vec<Slot>,
}

impl Captured {
    /// Captures a decode step of tokens in these slots.
    pub(crate) fn new(gpu: &Gpu, weights: &WeightTable, linears: &[LinearId], slots: Vec<Slot>) -> Result<Self> {
        let (queue, model) = (gpu.queue()?, weights.model());
        let layers = linears.iter().map(|&id| LoraLinear::new(weights, id));
        let layers = layers.collect::<std::result::Result<Vec<_>, _>>()?;
        let shapes: Vec<[usize; 2]> =
            linears.iter().map(|&id| [model[id].in_features(), model[id].out_features()]).collect();
        let most = |side: usize| slots.len() * shapes.iter().map(|shape| shape[side]).max().unwrap_or(0);
        let mut x = Buffer::<bf16>::zeros(&queue, most(0))?;
        x.write(&Noise::new(2, SMALL, 1.0).range(0, most(0)).collect::<Vec<_>>())?;
        let mut y = Buffer::<bf16>::zeros(&queue, most(1))?;
        let routing = Routing::new(&queue, weights.capacity(), 1)?;
        let mut workspace = Workspace::new(weights)?;
        let tokens = slots.len();
        let graph =
            weights.capture(&routing, tokens, &mut workspace, |step| -> std::result::Result<(), LaunchError> {
                for (layer, &[input, output]) in layers.iter().zip(&shapes) {
                    let x = Matrix::new(x.slice(0..tokens * input), tokens, input)?;
                    layer.add_delta(step, x, MatrixMut::new(y.slice_mut(0..tokens * output), tokens, output)?)?;
                }
                Ok(())
            })?;
        gpu.synchronize()?;
        Ok(Self { graph, routing, workspace, slots })
    }

    /// The graph, and what its steps are started with.
    pub(crate) fn start(&mut self) -> Result<(&mut Graph, RoutedBatch<'_>, &mut Workspace)> {
        let Self { graph, routing, workspace, slots } = self;
        routing.wait()?;
        Ok((graph, routing.update(&Batch::new(slots))?, workspace))
    }
}

/// What is brought to the device beside replays.
#[derive(Clone, Copy)]
enum Brought<'a> {
    /// Adapters of the host tier, in turn.
    Ring(&'a [AdapterId]),
    /// Adapters that are registered, read and forgotten, at most one in so much time.
    New(&'a Source, Duration),
}

/// Times of replays, in µs.
#[derive(Default)]
struct Measured {
    device: Vec<f64>,
    host: Vec<f64>,
    copies: u64,
    copied_bytes: u64,
    seconds: f64,
}

impl Measured {
    /// Replays the graph while another thread brings adapters to the pool. Each locks the pool for one call at a time.
    fn round(
        &mut self,
        gpu: &Gpu,
        graph: &mut Captured,
        pool: &Mutex<AdapterPool>,
        brought: Option<Brought<'_>>,
    ) -> Result<()> {
        let before = locked(pool).snapshot().counters;
        let start = Instant::now();
        match brought {
            None => self.replay(gpu, graph, pool)?,
            Some(brought) => {
                let (is_done, context) = (AtomicBool::new(false), Arc::clone(&gpu.context));
                let (replayed, loaded) = thread::scope(|threads| {
                    let loader = threads.spawn(|| {
                        context.bind_to_thread()?;
                        bring(pool, brought, &is_done)
                    });
                    let replayed = self.replay(gpu, graph, pool);
                    is_done.store(true, Ordering::Relaxed);
                    (replayed, loader.join())
                });
                replayed?;
                loaded.map_err(|_| "the loading thread panicked")?.map_err(|error| error.to_string())?;
            }
        }
        self.seconds += start.elapsed().as_secs_f64();
        let after = locked(pool).snapshot().counters;
        let copies = after.copies - before.copies;
        if brought.is_some() && copies == 0 {
            return Err("nothing was brought to the device beside the replays".into());
        }
        self.copies += copies;
        self.copied_bytes += after.copied_bytes - before.copied_bytes;
        Ok(())
    }

    fn replay(&mut self, gpu: &Gpu, graph: &mut Captured, pool: &Mutex<AdapterPool>) -> Result<()> {
        let (graph, batch, workspace) = graph.start()?;
        self.device.extend(gpu.time_each(REPLAYS_PER_ROUND, || replay(pool, graph, &batch, workspace))?);
        for _ in 0..REPLAYS_PER_ROUND {
            let start = Instant::now();
            replay(pool, graph, &batch, workspace)?;
            gpu.synchronize()?;
            self.host.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(())
    }

    fn figures(self, beside: Neighbours) -> Replays {
        let Self { device, host, copies, copied_bytes, seconds } = self;
        let replays = device.len();
        let [device, host] = [device, host].map(Times::new);
        Replays { beside, replays, device, host, copies, copied_bytes, seconds }
    }
}

/// The pool, for a short time.
fn locked(pool: &Mutex<AdapterPool>) -> MutexGuard<'_, AdapterPool> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Replays the graph in a step of the pool.
fn replay(
    pool: &Mutex<AdapterPool>,
    graph: &mut Graph,
    batch: &RoutedBatch<'_>,
    workspace: &mut Workspace,
) -> Result<()> {
    Ok(graph.replay(&mut locked(pool).step(StreamId::FIRST, batch, workspace)?)?)
}

/// A result that another thread may have.
type Sent<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Prefetches adapters one behind the other, and ends with no copy under way. An error says where the adapter is that
/// did not arrive, and the state of the pool.
fn bring(pool: &Mutex<AdapterPool>, brought: Brought<'_>, is_done: &AtomicBool) -> Sent<()> {
    let (turn, interval) = match brought {
        Brought::Ring(ids) => (ids, Duration::ZERO),
        Brought::New(_, interval) => (&[][..], interval),
    };
    let mut turn = turn.iter().copied().cycle();
    let (mut on_way, mut ended, mut next) = (VecDeque::new(), None, Instant::now());
    loop {
        while !is_done.load(Ordering::Relaxed) && on_way.len() < SPARE && next <= Instant::now() {
            next += interval;
            let id = match brought {
                Brought::New(source, _) => Some(locked(pool).register(source.clone())?),
                Brought::Ring(_) => turn.next(),
            };
            let Some(id) = id else { return Ok(()) };
            locked(pool).prefetch(id)?;
            on_way.push_back(id);
        }
        let mut pool = locked(pool);
        pool.poll();
        while let Some(residency) = on_way.front().and_then(|&id| pool.residency(id)) {
            if residency.tier != Tier::Device {
                // A later one may have evicted it. A load that failed is an error here.
                pool.prefetch(residency.id)?;
                break;
            }
            on_way.pop_front();
            if matches!(brought, Brought::New(..)) {
                pool.unregister(residency.id)?;
            }
        }
        if is_done.load(Ordering::Relaxed) {
            if on_way.is_empty() && pool.snapshot().copying == 0 {
                return Ok(());
            }
            if ended.get_or_insert_with(Instant::now).elapsed() > LIMIT {
                let places: Vec<_> = on_way.iter().map(|&id| pool.residency(id)).collect();
                return Err(format!("not on the device after {LIMIT:?}: {places:?}; {:?}", pool.snapshot()).into());
            }
        }
        drop(pool);
        thread::sleep(POLL);
    }
}
