//! A pool in simulated time.

use std::{
    collections::VecDeque,
    fmt,
    ops::Range,
    sync::mpsc::{Receiver, Sender, channel},
    time::Duration,
};

use super::{
    AdapterId, Lease, Outcome, PoolConfig, PoolError, Residency, Snapshot, StreamId,
    core::{Core, Limits},
    pooled::slot_at,
    transfer::{Copy, Transfer},
};
use crate::{Slot, blocks::GRANULE_BYTES, error::LoadError};

/// The decisions of a GPU's adapter pool, without adapters, threads or a device. For simulations of replicas, and for tests of schedulers
/// and routers.
///
/// Adapters are sizes. Every decision is that of `cuda::AdapterPool`; the reads and copies that it would start are [`Work`], which the
/// caller takes, gives any time, and [ends](Self::end). Nothing here depends on a clock, so the same calls give the same results.
///
/// ```
/// use std::time::Duration;
/// use aril::pool::{PoolConfig, PoolError, SimulatedPool, Tier, Work};
///
/// // A slot and 256 bytes on the device, and two adapters of this size in host memory.
/// let mut pool = SimulatedPool::new(1, PoolConfig::arena_bytes(256).host_bytes(512))?;
/// let [a, b] = [pool.register(256)?, pool.register(256)?];
/// assert!(matches!(pool.acquire(a), Err(PoolError::Loading { .. })));
/// let read = pool.next_work().expect("the pool reads the adapter");
/// assert!(matches!(read, Work::Read { id, is_copied: true, .. } if id == a));
/// pool.end(read, Duration::from_millis(4));
/// let lease = pool.acquire(a)?;
/// assert!(matches!(pool.acquire(b), Err(PoolError::Full)));
///
/// drop(lease);
/// pool.commit();
/// pool.prefetch(b)?; // evicts the other
/// assert_eq!(pool.residency(a).map(|a| a.tier), Some(Tier::Host));
/// # Ok::<(), PoolError>(())
/// ```
pub struct SimulatedPool {
    core: Core,
    tiers: Tiers,
    releases: Receiver<(Slot, StreamId)>,
    releaser: Sender<(Slot, StreamId)>,
}

/// What a pool has started to do. Each is given back once, to the pool that it is from.
#[derive(Debug, Eq, PartialEq)]
#[must_use]
pub enum Work {
    /// A loader thread reads and packs an adapter into host memory.
    #[non_exhaustive]
    Read {
        /// The adapter.
        id: AdapterId,
        /// Size of its block in bytes.
        bytes: usize,
        /// Whether the read also copies each part to the device. A batch that needs the room may still revoke the copy.
        is_copied: bool,
    },
    /// An adapter is copied from host memory to the device. Copies run one after another.
    #[non_exhaustive]
    Copy {
        /// The adapter.
        id: AdapterId,
        /// Size of its block in bytes.
        bytes: usize,
        /// Number of the copy.
        number: u64,
    },
}

/// The work that was started, and the copies that ended with their reads.
#[derive(Default)]
struct Tiers {
    started: VecDeque<Work>,
    copied: Vec<u64>,
}

impl fmt::Debug for SimulatedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedPool").field("snapshot", &self.snapshot()).finish_non_exhaustive()
    }
}

impl SimulatedPool {
    /// A pool with `num_slots` slots. Of `config`, the sizes of the tiers and the number of loaders matter.
    ///
    /// # Errors
    /// [`PoolError::Plan`] if a size is too large.
    pub fn new(num_slots: usize, config: PoolConfig) -> Result<Self, PoolError> {
        let PoolConfig { arena_bytes, host_bytes, loaders, .. } = config;
        let core = Core::new(Limits { num_slots, arena_bytes, host_bytes, max_reads: loaders.max(1) })?;
        let (releaser, releases) = channel();
        Ok(Self { core, tiers: Tiers::default(), releases, releaser })
    }

    /// Makes an adapter of `bytes` bytes known, rounded up to whole granules of 256 bytes.
    ///
    /// # Errors
    /// [`PoolError::TooLarge`].
    pub fn register(&mut self, bytes: usize) -> Result<AdapterId, PoolError> {
        self.core.register(bytes.max(1).next_multiple_of(GRANULE_BYTES), true)
    }

    /// As [`AdapterPool::unregister`](crate::cpu::AdapterPool::unregister).
    ///
    /// # Errors
    /// [`PoolError::Unknown`].
    pub fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.notice();
        self.core.unregister(id, &mut self.tiers)
    }

    /// As [`AdapterPool::prefetch`](crate::cpu::AdapterPool::prefetch).
    ///
    /// # Errors
    /// [`PoolError::Unknown`].
    pub fn prefetch(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.notice();
        self.core.prefetch(id, &mut self.tiers)
    }

    /// As [`AdapterPool::pin`](crate::cpu::AdapterPool::pin).
    ///
    /// # Errors
    /// [`PoolError::Pinned`], [`PoolError::Unknown`].
    pub fn pin(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.core.set_pinned(id, true)
    }

    /// As [`AdapterPool::unpin`](crate::cpu::AdapterPool::unpin).
    ///
    /// # Errors
    /// [`PoolError::Unknown`].
    pub fn unpin(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.core.set_pinned(id, false)
    }

    /// As [`AdapterPool::prepare`](crate::cpu::AdapterPool::prepare), on the [first](StreamId::FIRST) stream. Launches would wait for
    /// copies that have not ended.
    ///
    /// # Errors
    /// As for `prepare`.
    pub fn prepare(&mut self, ids: &[AdapterId]) -> Result<Vec<Lease>, PoolError> {
        self.poll();
        let stream = StreamId::FIRST;
        let granted = self.core.prepare(ids, stream, &mut self.tiers)?;
        let slots = granted.into_iter().map(|granted| slot_at(granted.slot));
        let lease = |(&id, slot)| Lease { id, slot, stream, releases: self.releaser.clone() };
        Ok(ids.iter().zip(slots).map(lease).collect())
    }

    /// As [`AdapterPool::acquire`](crate::cpu::AdapterPool::acquire).
    ///
    /// # Errors
    /// As for [`prepare`](Self::prepare).
    pub fn acquire(&mut self, id: AdapterId) -> Result<Lease, PoolError> {
        self.prepare(&[id])?.pop().ok_or(PoolError::Unknown { id })
    }

    /// As [`AdapterPool::commit`](crate::cpu::AdapterPool::commit).
    pub fn commit(&mut self) {
        self.notice();
        let known = self.core.commit(StreamId::FIRST, &mut self.tiers);
        debug_assert!(known.is_ok(), "the first stream is known");
    }

    /// As [`AdapterPool::poll`](crate::cpu::AdapterPool::poll).
    pub fn poll(&mut self) {
        self.notice();
        self.core.poll(&mut self.tiers);
    }

    /// The next read or copy that has started since the last call, in order.
    pub fn next_work(&mut self) -> Option<Work> {
        self.tiers.started.pop_front()
    }

    /// Ends a read or a copy. `took` is the time of a read, for the counters.
    pub fn end(&mut self, work: Work, took: Duration) {
        match work {
            Work::Read { id, bytes, .. } => self.core.has_read(id, took, Ok(bytes), &mut self.tiers),
            Work::Copy { number, .. } => self.core.has_copied(number),
        }
        for number in std::mem::take(&mut self.tiers.copied) {
            self.core.has_copied(number);
        }
    }

    /// As [`AdapterPool::next_outcome`](crate::cpu::AdapterPool::next_outcome). Every load ends well.
    pub fn next_outcome(&mut self) -> Option<Outcome> {
        self.poll();
        self.core.next_outcome()
    }

    /// As [`AdapterPool::snapshot`](crate::cpu::AdapterPool::snapshot).
    pub fn snapshot(&self) -> Snapshot {
        self.core.snapshot()
    }

    /// As [`AdapterPool::residency`](crate::cpu::AdapterPool::residency).
    pub fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.core.residency_of(id)
    }

    /// As [`AdapterPool::residencies`](crate::cpu::AdapterPool::residencies).
    pub fn residencies(&self) -> Vec<Residency> {
        self.core.residencies()
    }

    /// Takes note of leases that have ended.
    fn notice(&mut self) {
        while let Ok((slot, stream)) = self.releases.try_recv() {
            slot.index().into_iter().for_each(|slot| self.core.release(slot, stream));
        }
    }
}

impl Transfer for Tiers {
    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Copy>) -> bool {
        self.started.push_back(Work::Read { id, bytes: to.len(), is_copied: copy.is_some() });
        copy.is_some()
    }

    fn copies_parts(&self) -> bool {
        true
    }

    /// The last part is enqueued when the read ends.
    fn revoke(&mut self, _copy: &Copy) -> bool {
        true
    }

    fn finish(&mut self, copy: &Copy) {
        self.copied.push(copy.number);
    }

    fn copy(&mut self, copy: &Copy) -> Result<(), LoadError> {
        self.started.push_back(Work::Copy { id: copy.id, bytes: copy.from.len(), number: copy.number });
        Ok(())
    }

    fn close(&mut self, _slot: usize, _stream: StreamId) {}

    fn may_evict(&self) -> bool {
        true
    }

    fn evict(&mut self, _slot: usize) {}

    fn forget(&mut self, _id: AdapterId) {}
}
