//! The thread that owns an engine, and the handle through which others talk to it.

use std::{
    collections::{BTreeMap, HashMap},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SendError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use aril::{
    DType,
    plan::Capacity,
    pool::{AdapterId, Load, PoolConfig, PoolError, Snapshot, Source, Tier},
};
use aril_requests::registry;
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use metrics::Histogram;
use tokio::{
    sync::{
        mpsc::{UnboundedReceiver, unbounded_channel},
        oneshot,
    },
    time::timeout,
};

#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::{
    Engine, Event, Failure, HostTime, Request, RequestId, Sizes, State,
    checkpoint::{Checkpoint, Weights},
    config::Config,
    cpu::Cpu,
    device_arg::DeviceArg,
    error::{Context, Error, Result, bail},
    graph::Capture,
    group::{Rank, errors_of_ranks},
    model::{Described, Model, Split, describe},
    pool::{Pool, RankPool},
    ranks::{Order, Others, follow},
    runner::Runner,
};

/// How long the engine waits for adapters before it looks for commands.
const WAIT: Duration = Duration::from_millis(1);

/// How long a report is waited for before the last one is taken: those who ask wait for no long step.
const REPORTED: Duration = Duration::from_secs(1);

/// How often the progress of a load is drawn.
const DRAWN: Duration = Duration::from_millis(100);

/// What an engine is made of.
#[derive(Debug)]
pub struct Setup {
    /// That of the first rank. Those of the others follow.
    pub device: DeviceArg,
    /// The first rank's.
    pub split: Split,
    /// How long ranks wait for each other.
    pub tp_limit: Duration,
    /// What is computed in.
    pub dtype: DType,
    /// Its weights.
    pub checkpoint: Arc<Checkpoint>,
    /// Its configuration.
    pub config: Config,
    /// The model as the first rank has it, which the sources of adapters name.
    pub described: Arc<Described>,
    /// The engine's sizes.
    pub sizes: Sizes,
    /// The largest rank of an adapter.
    pub max_rank: usize,
    /// The slots of each rank.
    pub slots: usize,
    /// The adapters in the model's stack, and their largest rank; no adapters for no stack.
    pub stack: (usize, usize),
    /// The memory of each rank for adapters.
    pub pool: PoolConfig,
    /// Where the tokens of each step are recorded.
    pub step_tokens: Histogram,
}

/// How a load has ended.
pub type Loaded = std::result::Result<Version, PoolError>;

enum Command {
    /// An adapter, and whether it is pinned to the device.
    Load(Source, bool, oneshot::Sender<Loaded>),
    Unload(AdapterId),
    Submit(Vec<Request>, oneshot::Sender<std::result::Result<Vec<Submission>, Failure>>),
    Cancel(RequestId),
    Report(oneshot::Sender<Report>),
    Stop,
}

/// What an engine reports of itself.
#[derive(Debug)]
pub struct Report {
    /// The requests, and the blocks of the cache.
    pub state: State,
    /// The adapters' memory and loads.
    pub pool: Snapshot,
    /// The host's time between steps.
    pub host_time: HostTime,
    /// Where the weights of each adapter are.
    pub tiers: HashMap<AdapterId, Tier>,
}

impl Report {
    fn of<D: Capture>(engine: &Engine<'_, D>) -> Self {
        Self { state: engine.state(), pool: engine.pool(), host_time: engine.host_time(), tiers: engine.tiers() }
    }
}

/// A handle to an engine's thread.
#[derive(Clone, Debug)]
pub struct Handle {
    commands: Sender<Command>,
    seen: Arc<Seen>,
}

/// What is seen of an engine's thread without asking it.
#[derive(Debug)]
struct Seen {
    start: Instant,
    /// When it last began a step or took a command, in milliseconds from `start` on, or one of the two below.
    last: AtomicU64,
    report: Mutex<Option<Arc<Report>>>,
}

/// It waits for commands.
const IDLE: u64 = u64::MAX;
/// It has ended.
const ENDED: u64 = u64::MAX - 1;

impl Seen {
    fn new() -> Self {
        Self { start: Instant::now(), last: AtomicU64::new(IDLE), report: Mutex::new(None) }
    }

    /// The last report, if there has been one.
    fn report(&self) -> MutexGuard<'_, Option<Arc<Report>>> {
        // It is whole between its changes.
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(0);
        self.last.store(now, Ordering::Relaxed);
    }
}

/// Dropping it says that the thread has ended.
struct Ending(Arc<Seen>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.last.store(ENDED, Ordering::Relaxed);
    }
}

/// A request in the engine. Dropping it cancels the request.
#[derive(Debug)]
pub struct Submission {
    id: RequestId,
    events: UnboundedReceiver<Event>,
    handle: Handle,
}

/// A loaded version of an adapter. Dropping it refuses new requests for the version, and unloads it after its last
/// request.
#[derive(Debug)]
pub struct Version {
    id: AdapterId,
    handle: Handle,
}

impl Submission {
    /// The next event; `None` if the engine has ended.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.handle.send(Command::Cancel(self.id));
    }
}

impl registry::Version for Version {
    fn id(&self) -> AdapterId {
        self.id
    }
}

impl Drop for Version {
    fn drop(&mut self) {
        self.handle.send(Command::Unload(self.id));
    }
}

impl Handle {
    /// Loads an adapter; a pinned one is on the device then, and stays there. `None` if the engine has ended.
    pub async fn load(&self, source: Source, is_pinned: bool) -> Option<Loaded> {
        let (reply, result) = oneshot::channel();
        self.send(Command::Load(source, is_pinned, reply));
        result.await.ok()
    }

    /// Submits requests, all of them or none. `None` if the engine has ended.
    pub async fn submit(&self, requests: Vec<Request>) -> Option<std::result::Result<Vec<Submission>, Failure>> {
        let (reply, result) = oneshot::channel();
        self.send(Command::Submit(requests, reply));
        result.await.ok()
    }

    /// The state of the engine and of its pool, from before the step that it is in if that takes long. `None` if the
    /// engine has ended.
    pub async fn report(&self) -> Option<Arc<Report>> {
        let (reply, mut result) = oneshot::channel();
        self.send(Command::Report(reply));
        let report = match timeout(REPORTED, &mut result).await {
            Ok(report) => report,
            Err(_) => {
                let last = self.seen.report().clone();
                match last {
                    Some(report) => return Some(report),
                    None => result.await,
                }
            }
        };
        let report = Arc::new(report.ok()?);
        *self.seen.report() = Some(Arc::clone(&report));
        Some(report)
    }

    /// How long the engine has been in its step; `None` if it has ended.
    pub fn busy_for(&self) -> Option<Duration> {
        match self.seen.last.load(Ordering::Relaxed) {
            ENDED => None,
            IDLE => Some(Duration::ZERO),
            last => Some(self.seen.start.elapsed().saturating_sub(Duration::from_millis(last))),
        }
    }

    /// Ends the engine, and with it all requests.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    fn send(&self, command: Command) {
        // The replies of an engine that has ended are dropped, which their receivers see.
        let _ = self.commands.send(command);
    }
}

/// Starts an engine. Returns once its model is loaded. Until then there is a progress bar, if standard error is a
/// terminal.
///
/// # Errors
///
/// Why the model cannot be loaded, or the ranks cannot meet.
pub fn start(setup: Setup) -> Result<(Handle, JoinHandle<()>)> {
    let checkpoint = Arc::clone(&setup.checkpoint);
    let num_bytes = checkpoint.tensors.values().map(|tensor| tensor.bytes.len() as u64).sum::<u64>();
    let num_bytes = num_bytes * setup.split.tp.size() as u64;
    let (worker, is_ready) = Worker::new();
    let (handle, ready) = (worker.handle.clone(), worker.ready.clone());
    let own = move || {
        if let Err(error) = run(worker, setup)
            && let Err(SendError(error)) = ready.send(Err(error))
        {
            // It was ready before.
            tracing::error!(error = error.err().map(|error| error.to_string()), "the engine has ended");
        }
    };
    let thread = thread::Builder::new().name("engine".into()).spawn(own)?;
    let bar = ProgressBar::new(num_bytes);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {bytes} of {total_bytes}") {
        bar.set_style(style);
    }
    loop {
        match is_ready.recv_timeout(DRAWN) {
            Err(RecvTimeoutError::Timeout) => bar.set_position(checkpoint.read_bytes.load(Ordering::Relaxed)),
            loaded => {
                bar.finish_and_clear();
                loaded.context("the engine ended while it loaded the model")??;
                return Ok((handle, thread));
            }
        }
    }
}

/// Runs all ranks: the first one, which has the engine, on this thread, and each of the others on one of its own.
fn run(worker: Worker, setup: Setup) -> Result<()> {
    let size = setup.split.tp.size();
    if size == 1 {
        return on_device(&setup, &Rank::default(), First { worker, others: Others::default() });
    }
    let setup = Arc::new(setup);
    let mut ranks = Rank::threads(size, setup.tp_limit).context("--tp")?.into_iter();
    let Some(first) = ranks.next() else { bail!("--tp: a group has at least one rank") };
    let (others, orders) = Others::new(size - 1);
    let (sender, ends) = channel();
    for (rank, orders) in ranks.zip(orders) {
        let (setup, sender) = (Arc::clone(&setup), sender.clone());
        let index = rank.tp().rank();
        let run = move || {
            let run = AssertUnwindSafe(|| on_device(&setup, &rank, Follower { orders }));
            let end = catch_unwind(run).unwrap_or_else(|_| Err(Error::new("it panicked")));
            // Before the others learn of it by the end of `rank`. Without a receiver, nobody waits any more.
            let _ = sender.send((index, end));
            drop(rank);
        };
        thread::Builder::new().name(format!("rank {index}")).spawn(run)?;
    }
    drop(sender);
    let mut errors = BTreeMap::new();
    if let Err(error) = on_device(&setup, &first, First { worker, others }) {
        errors.insert(0, error.to_string());
    }
    drop(first);
    for _ in 1..size {
        match ends.recv_timeout(setup.tp_limit) {
            Ok((_, Ok(()))) => {}
            Ok((rank, Err(error))) => drop(errors.insert(rank, error.to_string())),
            Err(RecvTimeoutError::Timeout) => {
                bail!("a rank has not ended within {:?}; {}", setup.tp_limit, errors_of_ranks(&errors, size))
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    if errors.is_empty() { Ok(()) } else { bail!("{}", errors_of_ranks(&errors, size)) }
}

/// What a rank does on its device.
trait Task {
    fn run<D: Capture>(self, device: &D, rank: &Rank, setup: &Setup) -> Result<()>;
}

/// Runs a task on the device of a rank, in the element type of the setup.
fn on_device(setup: &Setup, rank: &Rank, task: impl Task) -> Result<()> {
    match setup.device {
        DeviceArg::Cpu => match setup.dtype {
            DType::BF16 => task.run(&Cpu::<bf16>::new(rank), rank, setup),
            DType::F16 => task.run(&Cpu::<f16>::new(rank), rank, setup),
            DType::F32 => task.run(&Cpu::<f32>::new(rank), rank, setup),
            dtype => bail!("{dtype} is not implemented"),
        },
        device @ DeviceArg::Cuda(first) => {
            on_cuda(first + rank.local(), setup, rank, task).context(format_args!("--device {device}"))
        }
    }
}

#[cfg(feature = "cuda")]
fn on_cuda(ordinal: usize, setup: &Setup, rank: &Rank, task: impl Task) -> Result<()> {
    match setup.dtype {
        DType::BF16 => task.run(&Cuda::<bf16>::of_rank(ordinal, rank)?, rank, setup),
        DType::F16 => task.run(&Cuda::<f16>::of_rank(ordinal, rank)?, rank, setup),
        DType::F32 => task.run(&Cuda::<f32>::of_rank(ordinal, rank)?, rank, setup),
        dtype => bail!("{dtype} is not implemented"),
    }
}

#[cfg(not(feature = "cuda"))]
fn on_cuda(_: usize, _: &Setup, _: &Rank, _: impl Task) -> Result<()> {
    bail!("this build has no CUDA; build it with `--features cuda`")
}

impl Setup {
    fn capacity(&self) -> Capacity {
        Capacity::tokens(self.sizes.limits.step_tokens).slots(self.slots).rank(self.max_rank)
    }

    /// A rank's part of the model, whose adapters are in `table`.
    fn model<'d, D: Capture>(&self, device: &'d D, described: &Described, table: D::Adapters) -> Result<Model<'d, D>> {
        let weights = Weights::new(&self.checkpoint, self.config.packing);
        let tokens = self.sizes.limits.step_tokens;
        let model = Model::new(device, &self.config, described, weights, table, tokens)?;
        if self.stack.0 > 0 { model.stacked(self.stack) } else { Ok(model) }
    }

    /// A rank's part of the group's pool, and the table whose slots it fills.
    fn rank_pool<D: Capture>(
        &self,
        device: &D,
        described: &Described,
        rank: &Rank,
    ) -> Result<(RankPool<D>, D::Adapters)> {
        let (pool, table) = device.pool(&described.model, self.capacity(), self.pool)?;
        Ok((RankPool::new(rank.clone(), pool)?, table))
    }
}

/// The task of the first rank, or of the only one.
struct First {
    worker: Worker,
    others: Others,
}

impl Task for First {
    /// Loads the model and serves until it is told to stop.
    fn run<D: Capture>(self, device: &D, rank: &Rank, setup: &Setup) -> Result<()> {
        let Self { mut worker, others } = self;
        let described = &setup.described;
        let (pool, table) = setup.rank_pool(device, described, rank)?;
        let model = setup.model(device, described, table)?;
        let runner = Runner::new(&model, pool.slots(), &setup.sizes)?;
        let mut engine = Engine::new(runner, Pool::new(pool, others), setup.sizes);
        engine.record_tokens(setup.step_tokens.clone());
        // All ranks have loaded theirs.
        rank.gather(&[])?;
        worker.ready.send(Ok(())).context("the server has ended")?;
        let served = worker.serve(&mut engine);
        if served.is_ok() {
            engine.stop();
        }
        let ended = leave(device, rank, served.is_ok());
        served.and(ended)
    }
}

/// The task of another rank.
struct Follower {
    orders: Receiver<Order>,
}

impl Task for Follower {
    fn run<D: Capture>(self, device: &D, rank: &Rank, setup: &Setup) -> Result<()> {
        let described = describe(&setup.config, Split { tp: rank.tp(), ..setup.split })?;
        let (mut pool, table) = setup.rank_pool(device, &described, rank)?;
        let model = setup.model(device, &described, table)?;
        let mut runner = Runner::new(&model, pool.slots(), &setup.sizes)?;
        rank.gather(&[])?;
        let followed = follow(&mut runner, &mut pool, &self.orders);
        let ended = leave(device, rank, followed.is_ok());
        followed.and(ended)
    }
}

/// Waits until the work of a rank's device has ended, or cannot, and then, unless it failed, until no other rank needs
/// it any more.
fn leave<D: Capture>(device: &D, rank: &Rank, is_whole: bool) -> Result<()> {
    device.wait()?;
    if is_whole { rank.finish() } else { Ok(()) }
}

/// An adapter on its way.
struct Loading {
    load: Load,
    version: Version,
    /// Whether it is to be brought to the device before it is served.
    is_awaited: bool,
    reply: oneshot::Sender<Loaded>,
}

/// The engine's thread.
pub(crate) struct Worker {
    pub(crate) handle: Handle,
    received: Receiver<Command>,
    /// Hears that the model is loaded.
    ready: Sender<Result<()>>,
    start: Instant,
    /// Adapters whose first load has not ended.
    loading: Vec<Loading>,
}

impl Worker {
    /// A worker, and where it says that its model is loaded.
    pub(crate) fn new() -> (Self, Receiver<Result<()>>) {
        let (commands, received) = channel();
        let (ready, is_ready) = channel();
        let handle = Handle { commands, seen: Arc::new(Seen::new()) };
        (Self { handle, received, ready, start: Instant::now(), loading: Vec::new() }, is_ready)
    }

    /// Steps until it is told to stop.
    pub(crate) fn serve<D: Capture>(&mut self, engine: &mut Engine<'_, D>) -> Result<()> {
        let ending = Ending(Arc::clone(&self.handle.seen));
        *ending.0.report() = Some(Arc::new(Report::of(engine)));
        while self.take_commands(engine)? {
            if !engine.step(self.start.elapsed())? && !engine.wait_for_adapters(WAIT) {
                // Nothing is being read, and nothing can run: room for an adapter is on its way.
                thread::sleep(WAIT);
            }
            self.answer_loads(engine);
        }
        Ok(())
    }

    /// Carries out the commands that have arrived. Waits for one if there is nothing else to do. Returns `false` at the
    /// last.
    fn take_commands<D: Capture>(&mut self, engine: &mut Engine<'_, D>) -> Result<bool> {
        loop {
            let is_idle = engine.is_idle() && self.loading.is_empty();
            if is_idle {
                engine.settle()?;
            }
            let command = if is_idle {
                self.handle.seen.last.store(IDLE, Ordering::Relaxed);
                self.received.recv().ok()
            } else {
                self.received.try_recv().ok()
            };
            self.handle.seen.begin();
            match command {
                None => return Ok(true),
                Some(Command::Stop) => return Ok(false),
                Some(Command::Load(source, is_pinned, reply)) => match engine.add_adapter(source, is_pinned) {
                    Ok(load) => {
                        let version = Version { id: load.id(), handle: self.handle.clone() };
                        self.loading.push(Loading { load, version, is_awaited: is_pinned, reply });
                    }
                    Err(error) => drop(reply.send(Err(error))),
                },
                Some(Command::Unload(id)) => engine.remove_adapter(id),
                Some(Command::Submit(requests, reply)) => {
                    let submitted = requests.into_iter().map(|request| {
                        let (sender, events) = unbounded_channel();
                        let id = engine.submit(request, sender, self.start.elapsed())?;
                        Ok(Submission { id, events, handle: self.handle.clone() })
                    });
                    // If one is refused, or nobody takes them, they are dropped, which cancels them.
                    drop(reply.send(submitted.collect()));
                }
                Some(Command::Cancel(id)) => engine.cancel(id),
                Some(Command::Report(reply)) => drop(reply.send(Report::of(engine))),
            }
        }
    }

    /// Answers the loads that have ended. A version that could not be loaded is dropped, which unloads it.
    fn answer_loads<D: Capture>(&mut self, engine: &mut Engine<'_, D>) {
        for loading in std::mem::take(&mut self.loading) {
            match loading.load.has_ended() {
                Ok(false) => self.loading.push(loading),
                // It is in host memory.
                Ok(true) if loading.is_awaited => match engine.prefetch(loading.version.id) {
                    Ok(load) => self.loading.push(Loading { load, is_awaited: false, ..loading }),
                    Err(error) => drop(loading.reply.send(Err(error))),
                },
                Ok(true) => drop(loading.reply.send(Ok(loading.version))),
                Err(error) => drop(loading.reply.send(Err(error))),
            }
        }
    }
}
