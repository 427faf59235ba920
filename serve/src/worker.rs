//! The thread that owns the engine, and the handle through which the server talks to it.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use aril::{
    DType,
    plan::Capacity,
    pool::{AdapterId, PoolConfig, PoolError, Snapshot, Source, Tier},
};
use half::{bf16, f16};
use tokio::sync::{
    mpsc::{UnboundedReceiver, unbounded_channel},
    oneshot,
};

#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::{
    checkpoint::{Checkpoint, Weights},
    config::Config,
    cpu::Cpu,
    engine::{Capture, Engine, Event, Failure, HostTime, Request, RequestId, Sizes, State},
    error::{Context, Result, bail},
    model::{Described, Model},
    options::DeviceArg,
};

/// How long the engine waits for adapters before it looks for commands.
const WAIT: Duration = Duration::from_millis(1);

/// What an engine is made of.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) device: DeviceArg,
    pub(crate) dtype: DType,
    pub(crate) config: Config,
    pub(crate) described: Arc<Described>,
    pub(crate) sizes: Sizes,
    pub(crate) max_rank: usize,
    pub(crate) slots: usize,
    pub(crate) pool: PoolConfig,
}

enum Command {
    Load(Source, oneshot::Sender<std::result::Result<Version, PoolError>>),
    Unload(AdapterId),
    Submit(Request, oneshot::Sender<std::result::Result<Submission, Failure>>),
    Cancel(RequestId),
    Report(oneshot::Sender<Report>),
    Stop,
}

/// What an engine reports of itself.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) state: State,
    pub(crate) pool: Snapshot,
    pub(crate) host_time: HostTime,
    /// Where the weights of each adapter are.
    pub(crate) tiers: HashMap<AdapterId, Tier>,
}

/// A handle to an engine's thread.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    commands: Sender<Command>,
}

/// A request in the engine. Dropping it cancels the request.
#[derive(Debug)]
pub(crate) struct Submission {
    id: RequestId,
    events: UnboundedReceiver<Event>,
    handle: Handle,
}

/// A loaded version of an adapter. Dropping it unloads the version, unless it is [kept](Self::keep).
#[derive(Debug)]
pub(crate) struct Version {
    id: AdapterId,
    is_kept: bool,
    handle: Handle,
}

impl Submission {
    /// The next event; `None` if the engine has ended.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        self.handle.send(Command::Cancel(self.id));
    }
}

impl Version {
    pub(crate) fn id(&self) -> AdapterId {
        self.id
    }

    /// Leaves the version loaded.
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Version {
    fn drop(&mut self) {
        if !self.is_kept {
            self.handle.unload(self.id);
        }
    }
}

impl Handle {
    /// Loads an adapter. `None` if the engine has ended.
    pub(crate) async fn load(&self, source: Source) -> Option<std::result::Result<Version, PoolError>> {
        let (reply, result) = oneshot::channel();
        self.send(Command::Load(source, reply));
        result.await.ok()
    }

    /// Refuses new requests for a version, and unloads it after its last request.
    pub(crate) fn unload(&self, id: AdapterId) {
        self.send(Command::Unload(id));
    }

    /// Submits a request. `None` if the engine has ended.
    pub(crate) async fn submit(&self, request: Request) -> Option<std::result::Result<Submission, Failure>> {
        let (reply, result) = oneshot::channel();
        self.send(Command::Submit(request, reply));
        result.await.ok()
    }

    /// The state of the engine and of its pool. `None` if the engine has ended.
    pub(crate) async fn report(&self) -> Option<Report> {
        let (reply, result) = oneshot::channel();
        self.send(Command::Report(reply));
        result.await.ok()
    }

    /// Ends the engine, and with it all requests.
    pub(crate) fn stop(&self) {
        self.send(Command::Stop);
    }

    fn send(&self, command: Command) {
        // The replies of an engine that has ended are dropped, which their receivers see.
        let _ = self.commands.send(command);
    }
}

/// Starts an engine on a checkpoint. Returns once its model is loaded.
pub(crate) fn start(checkpoint: Arc<Checkpoint>, setup: Setup) -> Result<(Handle, JoinHandle<()>)> {
    let (commands, received) = channel();
    let (ready, is_ready) = channel();
    let handle = Handle { commands };
    let worker = Worker { handle: handle.clone(), received, start: Instant::now(), loading: Vec::new() };
    let own = move || {
        let result = worker.own(&checkpoint, setup, &ready);
        if let Err(error) = result {
            tracing::error!(%error, "the engine has ended");
            // It may have been ready before.
            let _ = ready.send(Err(error));
        }
    };
    let thread = thread::Builder::new().name("engine".into()).spawn(own)?;
    is_ready.recv().context("the engine ended while it loaded the model")??;
    Ok((handle, thread))
}

/// The engine's thread.
struct Worker {
    handle: Handle,
    received: Receiver<Command>,
    start: Instant,
    /// Adapters whose first load has not ended.
    loading: Vec<(Version, oneshot::Sender<std::result::Result<Version, PoolError>>)>,
}

impl Worker {
    /// Serves on the device and in the element type of the setup.
    fn own(self, checkpoint: &Checkpoint, setup: Setup, ready: &Sender<Result<()>>) -> Result<()> {
        match setup.device {
            DeviceArg::Cpu => match setup.dtype {
                DType::BF16 => self.own_on(&Cpu::<bf16>::default(), checkpoint, setup, ready),
                DType::F16 => self.own_on(&Cpu::<f16>::default(), checkpoint, setup, ready),
                DType::F32 => self.own_on(&Cpu::<f32>::default(), checkpoint, setup, ready),
                dtype => bail!("{dtype} is not implemented"),
            },
            device @ DeviceArg::Cuda(ordinal) => {
                self.own_on_cuda(ordinal, checkpoint, setup, ready).context(format_args!("--device {device}"))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn own_on_cuda(
        self,
        ordinal: usize,
        checkpoint: &Checkpoint,
        setup: Setup,
        ready: &Sender<Result<()>>,
    ) -> Result<()> {
        match setup.dtype {
            DType::BF16 => self.own_on(&Cuda::<bf16>::new(ordinal)?, checkpoint, setup, ready),
            DType::F16 => self.own_on(&Cuda::<f16>::new(ordinal)?, checkpoint, setup, ready),
            DType::F32 => self.own_on(&Cuda::<f32>::new(ordinal)?, checkpoint, setup, ready),
            dtype => bail!("{dtype} is not implemented"),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn own_on_cuda(self, _: usize, _: &Checkpoint, _: Setup, _: &Sender<Result<()>>) -> Result<()> {
        bail!("this build has no CUDA; build it with `--features cuda`")
    }

    /// Loads the model and serves until it is told to stop.
    fn own_on<D: Capture>(
        mut self,
        device: &D,
        checkpoint: &Checkpoint,
        setup: Setup,
        ready: &Sender<Result<()>>,
    ) -> Result<()> {
        let Setup { config, described, sizes, max_rank, slots, pool, .. } = setup;
        let tokens = sizes.limits.step_tokens;
        let capacity = Capacity::tokens(tokens).slots(slots).rank(max_rank);
        let (pool, table) = device.pool(&described.model, capacity, pool)?;
        let weights = Weights::new(checkpoint, config.int4_group);
        let model = Model::new(device, &config, &described, weights, table, tokens)?;
        let mut engine = Engine::new(&model, pool, sizes)?;
        ready.send(Ok(())).context("the server has ended")?;
        while self.take_commands(&mut engine)? {
            if !engine.step(self.start.elapsed())? && !engine.wait_for_adapters(WAIT) {
                // Nothing is being read, and nothing can run: room for an adapter is on its way.
                thread::sleep(WAIT);
            }
            self.answer_loads(&mut engine);
        }
        Ok(())
    }

    /// Carries out the commands that have arrived. Waits for one if there is nothing else to do. Returns `false` at the last.
    fn take_commands<D: Capture>(&mut self, engine: &mut Engine<'_, D>) -> Result<bool> {
        loop {
            let is_idle = engine.is_idle() && self.loading.is_empty();
            if is_idle {
                engine.settle()?;
            }
            let command = if is_idle { self.received.recv().ok() } else { self.received.try_recv().ok() };
            match command {
                None => return Ok(true),
                Some(Command::Stop) => return Ok(false),
                Some(Command::Load(source, reply)) => match engine.add_adapter(source) {
                    Ok(id) => {
                        let handle = self.handle.clone();
                        self.loading.push((Version { id, is_kept: false, handle }, reply));
                    }
                    Err(error) => drop(reply.send(Err(error))),
                },
                Some(Command::Unload(id)) => engine.remove_adapter(id),
                Some(Command::Submit(request, reply)) => {
                    let (sender, events) = unbounded_channel();
                    let id = engine.submit(request, sender, self.start.elapsed());
                    let handle = self.handle.clone();
                    // If nobody takes the submission, it is dropped, which cancels it.
                    drop(reply.send(id.map(|id| Submission { id, events, handle })));
                }
                Some(Command::Cancel(id)) => engine.cancel(id),
                Some(Command::Report(reply)) => drop(reply.send(Report {
                    state: engine.state(),
                    pool: engine.pool(),
                    host_time: engine.host_time(),
                    tiers: engine.tiers(),
                })),
            }
        }
    }

    /// Answers the loads that have ended. A version that could not be loaded is dropped, which unloads it.
    fn answer_loads<D: Capture>(&mut self, engine: &mut Engine<'_, D>) {
        for (version, reply) in std::mem::take(&mut self.loading) {
            match engine.is_loaded(version.id) {
                Ok(false) => self.loading.push((version, reply)),
                Ok(true) => drop(reply.send(Ok(version))),
                Err(error) => drop(reply.send(Err(error))),
            }
        }
    }
}
