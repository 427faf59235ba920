//! The pool, generic over its backend.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, Sender, channel},
    time::Duration,
};

use super::{
    AdapterId, Lease, Load, PoolError, Residency, Snapshot, StreamId, Version,
    backend::Backend,
    handles::Dropped,
    messages::{Call, Granted, ReadEnd},
    state::{Limits, State},
};
use crate::{
    Slot,
    error::{OperandError, SlotError, panic_message},
};

/// Adapters in three tiers: on the device, in host memory, and in their files. One thread owns the pool; loader threads
/// of the pool read the files.
///
/// A step is: [`prepare`](Self::prepare) its adapters, [`step`](Self::step), drop the leases of requests that have
/// ended, and [end](Self::end_step) the step. No call waits for a file or for the device, except [`wait`](Self::wait)
/// and [`wait_for`](Self::wait_for). [`pool`](crate::pool) has the whole story.
///
/// Its backend makes it: [`cpu::AdapterPool`](crate::cpu::AdapterPool), `cuda::AdapterPool`, and
/// [`GroupPool`](crate::group::GroupPool) on the ranks of a group are pools of one backend each.
#[doc(alias = "LoRAModelManager")]
pub struct AdapterPool<B: Backend> {
    pub(super) state: State,
    pub(crate) backend: B,
    drops: Receiver<Dropped>,
    dropped: Sender<Dropped>,
    /// Loads under way, and what is done at their ends.
    loads: Vec<(Version, Then)>,
}

type Then = Box<dyn FnOnce(Result<Version, PoolError>) + Send>;

impl<B: Backend> fmt::Debug for AdapterPool<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdapterPool").field("snapshot", &self.snapshot()).finish_non_exhaustive()
    }
}

impl<B: Backend> AdapterPool<B> {
    /// A pool of `num_slots` slots. The backend has as much memory as the configuration says.
    pub(crate) fn with(backend: B, num_slots: usize, config: PoolConfig) -> Result<Self, PoolError> {
        let PoolConfig { arena_bytes, host_bytes, loaders, .. } = config;
        Self::within(backend, Limits { num_slots, arena_bytes, host_bytes, max_reads: loaders.max(1) })
    }

    pub(crate) fn within(backend: B, limits: Limits) -> Result<Self, PoolError> {
        let (dropped, drops) = channel();
        Ok(Self { state: State::new(limits)?, backend, drops, dropped, loads: Vec::new() })
    }

    /// The backend of a pool without adapters, its limits, and the number of its streams.
    pub(crate) fn into_backend(mut self) -> Result<(B, Limits, usize), PoolError> {
        self.poll();
        match self.state.num_adapters() {
            0 => Ok((self.backend, self.state.limits(), self.state.num_streams())),
            adapters => Err(SlotError::Loaded { adapters }.into()),
        }
    }

    /// Makes an adapter known, under an id of its own. Loads nothing.
    ///
    /// # Errors
    /// [`PoolError::Slot`] if the source does not match the table, [`PoolError::TooLarge`] if it exceeds a tier; on the
    /// ranks of a group, [`PoolError::Load`] if it does not match the table of each rank, or a rank has none.
    pub fn register(&mut self, source: B::Source) -> Result<AdapterId, PoolError> {
        self.notice();
        self.backend.check()?;
        let id = AdapterId::unique();
        let bytes = self.backend.add(id, source)?;
        self.state.register(id, bytes).inspect_err(|_| self.backend.remove(id))?;
        Ok(id)
    }

    /// Forgets an adapter: at once for new requests. Its memory returns when its last lease has ended, and then a step.
    /// Requests that hold a lease keep it. A load of it whose end no call has noted ends with [`PoolError::Unknown`].
    ///
    /// # Errors
    /// [`PoolError::Unknown`].
    pub fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.notice_drops();
        // Before the end of its read is noted, which would hand out a version of an adapter that is not there.
        let removed = self.remove(id);
        self.notice();
        self.state.sweep(&mut self.backend);
        removed
    }

    /// [Registers](Self::register) an adapter and starts to load it. Dropping the version
    /// [unregisters](Self::unregister) it, so that whoever gives up before others can ask for it leaves nothing in the
    /// pool.
    ///
    /// # Errors
    /// As for `register`.
    pub fn load(&mut self, source: B::Source) -> Result<Version, PoolError> {
        let id = self.register(source)?;
        let load = self.prefetch(id).inspect_err(|_| drop(self.remove(id)))?;
        Ok(Version { load, dropped: self.dropped.clone() })
    }

    /// [Loads](Self::load) an adapter, and calls `then` with the version once it is in host memory, or with the error
    /// of [`Load::has_ended`]: in the call that takes note of its end. Returns the load. A panic of `then` is caught,
    /// after the program's panic hook: the call and the loads of others go on.
    ///
    /// # Errors
    /// As for `load`. Then, and when the pool is dropped before the load has ended, `then` is dropped.
    pub fn load_then(
        &mut self,
        source: B::Source,
        then: impl FnOnce(Result<Version, PoolError>) + Send + 'static,
    ) -> Result<Load, PoolError> {
        let version = self.load(source)?;
        let load = version.load().clone();
        self.loads.push((version, Box::new(then)));
        Ok(load)
    }

    /// Starts to bring an adapter to the device, and counts as a use.
    ///
    /// A prefetch evicts only adapters that were used before it. If later ones fill the device, it ends in the host
    /// tier. Returns the load that is under way, or one that has ended if the adapter is in host memory or on the
    /// device.
    ///
    /// # Errors
    /// [`PoolError::Failed`] if the last load failed: [`retry`](Self::retry) tries again. [`PoolError::Unknown`].
    pub fn prefetch(&mut self, id: AdapterId) -> Result<Load, PoolError> {
        self.begin(Call::Prefetch(id))?;
        self.state.prefetch(id, &mut self.backend)
    }

    /// Like [`prefetch`](Self::prefetch), and forgets that the last load failed.
    ///
    /// # Errors
    /// [`PoolError::Unknown`].
    pub fn retry(&mut self, id: AdapterId) -> Result<Load, PoolError> {
        self.begin(Call::Retry(id))?;
        self.state.retry(id, &mut self.backend)
    }

    /// The load of an adapter that is under way, whoever has started it; `None` if there is none.
    pub fn loading(&self, id: AdapterId) -> Option<Load> {
        self.state.loading(id)
    }

    /// Keeps an adapter on the device once it is there. Does not load it.
    ///
    /// # Errors
    /// [`PoolError::Pinned`] if no slot, or no room for the largest of the other adapters, would be left. `Unknown`.
    pub fn pin(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.begin(Call::Pin(id, true))?;
        self.state.set_pinned(id, true)
    }

    /// Undoes [`pin`](Self::pin).
    ///
    /// # Errors
    /// [`PoolError::Unknown`].
    pub fn unpin(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.begin(Call::Pin(id, false))?;
        self.state.set_pinned(id, false)
    }

    /// Leases all adapters of a batch for launches on `stream`, or none: one lease for each id, in order. Ids may
    /// repeat. No adapter is evicted for another one of the batch. Launches wait on the device for adapters that are
    /// being copied.
    ///
    /// # Errors
    /// [`PoolError::Loading`] and [`PoolError::Full`]: retry later. [`PoolError::Failed`]: [`retry`](Self::retry) the
    /// adapter. [`PoolError::TooLarge`]: the batch never fits. [`PoolError::Unknown`], [`PoolError::NoSuchStream`].
    /// [`PoolError::Load`] on the ranks of a group that are not connected any more, or do different things.
    pub fn prepare(&mut self, ids: &[AdapterId], stream: StreamId) -> Result<Vec<Lease>, PoolError> {
        self.begin(Call::Prepare(ids, stream))?;
        self.state.poll(&mut self.backend);
        let granted = self.state.prepare(ids, stream, &mut self.backend)?;
        // All leases exist before anything is enqueued for them, so that an error ends them all.
        let lease = |(&id, granted): (&AdapterId, &Granted)| Lease {
            id,
            slot: granted.content,
            stream,
            dropped: self.dropped.clone(),
        };
        let leases = ids.iter().zip(&granted).map(lease).collect();
        self.backend.point(&granted, stream)?;
        granted.iter().for_each(|granted| self.state.open(granted.slot, stream));
        Ok(leases)
    }

    /// Leases one adapter, as [`prepare`](Self::prepare) does. Another adapter of the same batch may be evicted for it,
    /// unless it is leased.
    ///
    /// # Errors
    /// As for `prepare`.
    pub fn acquire(&mut self, id: AdapterId, stream: StreamId) -> Result<Lease, PoolError> {
        self.prepare(&[id], stream)?.pop().ok_or(PoolError::Unknown { id })
    }

    /// Marks the end of a step's launches on `stream`. Slots whose last lease ended before may be overwritten after it,
    /// and later steps of the stream refuse them. Enqueues nothing.
    ///
    /// An engine that drops leases after its last step calls it once more, so that their memory can be used.
    ///
    /// # Errors
    /// [`PoolError::NoSuchStream`]; [`PoolError::Load`], as for [`prepare`](Self::prepare).
    pub fn end_step(&mut self, stream: StreamId) -> Result<(), PoolError> {
        self.begin(Call::EndStep(stream))?;
        self.state.end_step(stream, &mut self.backend)
    }

    /// Takes note of reads, copies and leases that have ended, frees memory and continues prefetches. Every other call
    /// but reports does so, too.
    pub fn poll(&mut self) {
        self.notice();
        self.state.poll(&mut self.backend);
    }

    /// Blocks this thread until a read has ended, or for `timeout`. Returns whether one has. Returns `false` at once if
    /// none is under way, also while a copy to the device is. On the ranks of a group a read ends when it has on all of
    /// them, and this may take up to `timeout` for each step in which some come nearer to it.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        if self.state.reads() == 0 {
            // The next read may begin where a copy has ended.
            self.poll();
        }
        if self.state.reads() == 0 {
            return false;
        }
        let has_ended = self.notice_ends(Some(timeout));
        self.poll();
        has_ended
    }

    /// Waits for a load of this pool, and returns whether it has ended. Returns `false` if none of the reads under way
    /// ends within `timeout`, or at once if there are none: then the load waits for memory until a copy to the device
    /// has ended, or other adapters are released.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use aril::{cpu::AdapterPool, pool::{AdapterId, PoolError}};
    /// # fn load(pool: &mut AdapterPool, id: AdapterId) -> Result<(), PoolError> {
    /// let load = pool.prefetch(id)?;
    /// if !pool.wait_for(&load, Duration::from_secs(60))? {
    ///     println!("{id} is still being loaded");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`Load::has_ended`]; [`PoolError::Load`], as for [`prepare`](Self::prepare).
    pub fn wait_for(&mut self, load: &Load, timeout: Duration) -> Result<bool, PoolError> {
        loop {
            self.poll();
            self.backend.check()?;
            if load.has_ended()? || !self.wait(timeout) {
                return load.has_ended();
            }
        }
    }

    /// Starts a step of `batch` on `stream`. The step borrows the pool, so that no slot changes before its last
    /// operation; on a GPU, before that is enqueued.
    ///
    /// Slots in device memory cannot be checked: see `cuda::Routing::update_on_device`.
    ///
    /// ```
    /// # use aril::{cpu::{AdapterPool, Workspace}, pool::StreamId, routing::Batch};
    /// # use std::error::Error;
    /// # fn step(pool: &mut AdapterPool, batch: &Batch<'_>, workspace: &mut Workspace) -> Result<(), Box<dyn Error>> {
    /// let step = pool.step(StreamId::FIRST, batch, workspace)?;
    /// println!("{}", step.num_tokens());
    /// pool.end_step(StreamId::FIRST)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0502
    /// # use aril::{cpu::{AdapterPool, Workspace}, pool::StreamId, routing::Batch};
    /// # use std::error::Error;
    /// # fn step(pool: &mut AdapterPool, batch: &Batch<'_>, workspace: &mut Workspace) -> Result<(), Box<dyn Error>> {
    /// let step = pool.step(StreamId::FIRST, batch, workspace)?;
    /// pool.end_step(StreamId::FIRST)?;
    /// println!("{}", step.num_tokens());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`OperandError::NotLeased`] if no [lease](Lease) of the stream holds a slot of the batch with the adapter that
    /// it names, [`OperandError::NoSuchStream`], or as for the `step` of the backend's table.
    pub fn step<'a>(
        &'a self,
        stream: StreamId,
        batch: &B::Batch<'a>,
        workspace: &'a mut B::Workspace,
    ) -> Result<B::Step<'a>, B::Error> {
        let step = self.backend.step(stream, batch, workspace)?;
        self.check_leased(stream, B::slots(batch))?;
        Ok(step)
    }

    /// The table of a compute stream, to make layers of and, on CUDA, to capture; `None` if the stream belongs to
    /// another pool. On the CPU, all streams have it in common. The pool alone loads, unloads and [steps](Self::step).
    pub fn weights(&self, stream: StreamId) -> Option<&B::Weights> {
        if self.state.has_stream(stream) { self.backend.weights(stream) } else { None }
    }

    /// The state of the pool and its counters. Takes time for each slot.
    pub fn snapshot(&self) -> Snapshot {
        self.state.snapshot()
    }

    /// Where an adapter is; `None` if it is not registered.
    pub fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.state.residency_of(id)
    }

    /// Where all registered adapters are, by id. For routers that place requests.
    pub fn residencies(&self) -> Vec<Residency> {
        self.state.residencies()
    }

    pub(crate) fn new_stream(&mut self) -> StreamId {
        self.state.add_stream()
    }

    /// Rejects slots that no lease of the stream holds with the adapters that they name.
    fn check_leased(&self, stream: StreamId, slots: &[Slot]) -> Result<(), OperandError> {
        if !self.state.has_stream(stream) {
            return Err(OperandError::NoSuchStream { stream });
        }
        let stray = slots.iter().find(|slot| !self.state.is_open(**slot, stream));
        stray.map_or(Ok(()), |&slot| Err(OperandError::NotLeased { slot }))
    }

    /// Begins a call, unless the pool cannot go on.
    fn begin(&mut self, call: Call<'_>) -> Result<(), PoolError> {
        self.backend.called(call);
        self.notice();
        self.backend.check()
    }

    /// Takes note of leases, versions, reads, copies and loads that have ended.
    pub(super) fn notice(&mut self) {
        self.notice_drops();
        self.notice_ends(None);
        if let Err(error) = self.backend.check() {
            self.state.stop(error.into_load());
        }
        let has_ended = |(version, _): &mut (Version, Then)| !matches!(version.load().has_ended(), Ok(false));
        let ended: Vec<_> = self.loads.extract_if(.., has_ended).collect();
        if !ended.is_empty() {
            for (version, then) in ended {
                drop(catch_unwind(AssertUnwindSafe(|| then(version.loaded()))).map_err(panic_message));
            }
            self.notice_drops();
        }
    }

    fn notice_drops(&mut self) {
        while let Ok(dropped) = self.drops.try_recv() {
            match dropped {
                Dropped::Lease(slot, stream) => {
                    if let Some(slot) = slot.index() {
                        self.backend.called(Call::Release(slot, stream));
                        self.state.release(slot, stream);
                    }
                }
                // It may have been unregistered by its id.
                Dropped::Version(id) => drop(self.remove(id)),
            }
        }
    }

    fn remove(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.backend.called(Call::Unregister(id));
        self.state.unregister(id, &mut self.backend)?;
        self.backend.remove(id);
        Ok(())
    }

    /// Takes note of reads and copies that have ended. Returns whether a read has.
    fn notice_ends(&mut self, wait: Option<Duration>) -> bool {
        self.backend.notice(wait);
        while let Some(number) = self.backend.next_copied() {
            self.state.has_copied(number);
        }
        let mut has_ended = false;
        while let Some(read) = self.backend.next_read() {
            self.take(read);
            has_ended = true;
        }
        has_ended
    }

    /// Takes note of a read that has ended.
    pub(super) fn take(&mut self, read: ReadEnd) {
        self.state.has_read(read, &mut self.backend);
    }
}

/// Memory and threads of a pool.
///
/// ```
/// use aril::pool::PoolConfig;
///
/// let config = PoolConfig::arena_bytes(8 << 30).host_bytes(64 << 30).loaders(4);
/// # let _ = config;
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct PoolConfig {
    /// Device memory for adapters, in bytes.
    pub arena_bytes: usize,
    /// Host memory for adapters, in bytes. On CUDA it is page-locked and allocated at once.
    pub host_bytes: usize,
    /// Adapters that are read at the same time, at least 1.
    pub loaders: usize,
    /// Threads that read and convert weights, for each of these adapters, at least 1. One thread packs a few GB/s.
    pub packers: usize,
    /// Whether blocks on the GPU are filled with NaN before an adapter is copied into them.
    pub is_poisoning: bool,
}

impl PoolConfig {
    /// An arena of `arena_bytes` bytes, as much host memory, two adapters that are read at the same time, and eight
    /// threads to pack each.
    pub const fn arena_bytes(arena_bytes: usize) -> Self {
        Self { arena_bytes, host_bytes: arena_bytes, loaders: 2, packers: 8, is_poisoning: false }
    }

    /// Sets the size of the host tier.
    #[must_use]
    pub const fn host_bytes(self, host_bytes: usize) -> Self {
        Self { host_bytes, ..self }
    }

    /// Sets the number of adapters that are read at the same time.
    #[must_use]
    pub const fn loaders(self, loaders: usize) -> Self {
        Self { loaders, ..self }
    }

    /// Sets the number of threads that read and convert the weights of an adapter.
    #[must_use]
    pub const fn packers(self, packers: usize) -> Self {
        Self { packers, ..self }
    }

    /// Fills blocks on the GPU with NaN before an adapter is copied into them. For tests: a kernel that reads a block
    /// while it is overwritten then gives NaN.
    #[must_use]
    pub const fn poisoning(self) -> Self {
        Self { is_poisoning: true, ..self }
    }
}
