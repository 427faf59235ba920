//! A pool in simulated time.

use std::{
    collections::{HashSet, VecDeque},
    ops::Range,
    time::Duration,
};

use super::{
    AdapterId, AdapterPool, PoolConfig, PoolError, StreamId,
    backend::{Backend, Copy, Read},
    core::Granted,
};
use crate::{
    Slot,
    blocks::whole_granules,
    error::{LoadError, OperandError},
    plan::{MAX_SLOTS, limit},
    routing::Batch,
};

/// The decisions of a GPU's adapter pool, without adapters, threads or a device. For simulations of replicas, and for tests of schedulers
/// and routers.
///
/// Adapters are sizes in bytes, rounded up to whole granules of 256 bytes. Every decision is that of `cuda::AdapterPool`; the reads and
/// copies that it would start are [`Work`], which the caller takes, gives any time, and [ends](Self::end). Nothing here depends on a
/// clock, so the same calls give the same results. [`wait`](Self::wait) returns `false` at once.
///
/// ```
/// use std::time::Duration;
/// use aril::pool::{PoolConfig, PoolError, SimulatedPool, StreamId, Tier, Work};
///
/// // A slot and 256 bytes on the device, and two adapters of this size in host memory.
/// let mut pool = SimulatedPool::new(1, PoolConfig::arena_bytes(256).host_bytes(512))?;
/// let [a, b] = [pool.register(256)?, pool.register(256)?];
/// assert!(matches!(pool.acquire(a, StreamId::FIRST), Err(PoolError::Loading { .. })));
/// let read = pool.next_work().expect("the pool reads the adapter");
/// assert!(matches!(read, Work::Read { id, is_copied: true, .. } if id == a));
/// pool.end(read, Duration::from_millis(4))?;
/// let lease = pool.acquire(a, StreamId::FIRST)?;
/// assert!(matches!(pool.acquire(b, StreamId::FIRST), Err(PoolError::Full)));
///
/// drop(lease);
/// pool.end_step(StreamId::FIRST)?;
/// pool.prefetch(b)?; // evicts the other
/// assert_eq!(pool.residency(a).map(|a| a.tier), Some(Tier::Host));
/// # Ok::<(), PoolError>(())
/// ```
pub type SimulatedPool = AdapterPool<Simulated>;

/// The memory and the streams of a [`SimulatedPool`], which are work that was started.
#[derive(Debug, Default)]
pub struct Simulated {
    started: VecDeque<Work>,
    /// What the caller has taken and not ended: an adapter, and of a copy its number.
    taken: HashSet<(AdapterId, Option<u64>)>,
    /// Copies that ended with their reads.
    copied: VecDeque<u64>,
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

impl Work {
    fn key(&self) -> (AdapterId, Option<u64>) {
        match *self {
            Self::Read { id, .. } => (id, None),
            Self::Copy { id, number, .. } => (id, Some(number)),
        }
    }
}

impl SimulatedPool {
    /// A pool with `num_slots` slots and one stream. Of `config`, the sizes of the tiers and the number of loaders matter.
    ///
    /// # Errors
    /// [`PoolError::Plan`] if there is no slot or more than [`MAX_SLOTS`], or a size is too large.
    pub fn new(num_slots: usize, config: PoolConfig) -> Result<Self, PoolError> {
        limit("num_slots", num_slots, MAX_SLOTS)?;
        Self::with(Simulated::default(), num_slots, config)
    }

    /// The next of the reads and copies that have started, in the order of their starts. Each is returned once.
    pub fn next_work(&mut self) -> Option<Work> {
        let work = self.backend.started.pop_front()?;
        self.backend.taken.insert(work.key());
        Some(work)
    }

    /// Ends a read or a copy. `took` is the time of a read, for the counters.
    ///
    /// # Errors
    /// [`PoolError::Unknown`] if the work is another pool's.
    pub fn end(&mut self, work: Work, took: Duration) -> Result<(), PoolError> {
        let key = work.key();
        if !self.backend.taken.remove(&key) {
            return Err(PoolError::Unknown { id: key.0 });
        }
        match work {
            Work::Read { id, .. } => self.take(Read { id, time: took, fingerprint: 0, result: Ok(()) }),
            Work::Copy { number, .. } => self.core.has_copied(number),
        }
        // Copies that have ended with it, and those who wait for a load.
        self.notice();
        Ok(())
    }
}

impl Backend for Simulated {
    type Source = usize;
    type Weights = ();
    type Batch<'a> = Batch<'a>;
    type Workspace = ();
    type Step<'a> = ();
    type Error = OperandError;

    fn add(&mut self, _id: AdapterId, bytes: usize) -> Result<usize, PoolError> {
        Ok(whole_granules(bytes.max(1)))
    }

    fn remove(&mut self, _id: AdapterId) {}

    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Copy>) -> bool {
        self.started.push_back(Work::Read { id, bytes: to.len(), is_copied: copy.is_some() });
        copy.is_some()
    }

    fn notice(&mut self, _wait: Option<Duration>) {}

    fn next_read(&mut self) -> Option<Read> {
        None
    }

    fn copies_parts(&self) -> bool {
        true
    }

    /// The last part is enqueued when the read ends.
    fn revoke(&mut self, _copy: &Copy) -> bool {
        true
    }

    fn abandon(&mut self, _copy: &Copy) -> bool {
        false
    }

    fn finish(&mut self, copy: &Copy) {
        self.copied.push_back(copy.number);
    }

    fn copy(&mut self, copy: &Copy) -> Result<(), LoadError> {
        self.started.push_back(Work::Copy { id: copy.id, bytes: copy.from.len(), number: copy.number });
        Ok(())
    }

    fn next_copied(&mut self) -> Option<u64> {
        self.copied.pop_front()
    }

    fn settle(&mut self) {}

    fn point(&mut self, _granted: &[Granted], _stream: StreamId) -> Result<(), PoolError> {
        Ok(())
    }

    fn may_evict(&mut self) -> bool {
        true
    }

    fn evict(&mut self, _slot: usize) {}

    fn forget(&mut self, _id: AdapterId) {}

    fn weights(&self, _stream: StreamId) -> Option<&()> {
        Some(&())
    }

    fn slots<'b>(batch: &'b Batch<'_>) -> &'b [Slot] {
        batch.slots()
    }

    /// A simulation has no operations.
    fn step(&self, _stream: StreamId, _batch: &Batch<'_>, (): &mut ()) -> Result<(), OperandError> {
        Ok(())
    }
}
