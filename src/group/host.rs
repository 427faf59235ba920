//! The host tier of a group's pool on one rank: packed adapters, of which the least recently used ones leave first.

use std::{
    borrow::{Borrow, Cow},
    collections::HashMap,
    fmt,
    sync::Arc,
    time::Duration,
};

use rayon::ThreadPool;

use super::{
    error::Phase,
    load::Progress,
    table::{HostTable, Table},
};
use crate::{
    Slot,
    adapter::{Adapter, AdapterError, SlotImage},
    error::{LoadError, SlotError},
    pool::{Counters, Loaded, Loaders, PoolError, Source, packers_of},
    residency::Usage,
};

/// Prefetches that are read at the same time.
const LOADERS: usize = 2;
/// How long this thread waits for a read before it looks again.
const WAIT: Duration = Duration::from_secs(1);

/// Where a rank reads an adapter from.
pub(super) trait Origin {
    /// Calls `pack` with the rank's image of the adapter.
    fn read<T: Table, R>(
        &self,
        table: &T,
        pack: impl FnOnce(&SlotImage<'_>) -> Result<R, LoadError>,
    ) -> Result<R, LoadError>;
}

/// An adapter that a function opens.
pub(super) struct Opened<F>(pub(super) F);

impl<A: Borrow<Adapter>, F: Fn() -> Result<A, AdapterError>> Origin for Opened<F> {
    fn read<T: Table, R>(
        &self,
        table: &T,
        pack: impl FnOnce(&SlotImage<'_>) -> Result<R, LoadError>,
    ) -> Result<R, LoadError> {
        let adapter = (self.0)()?;
        pack(&adapter.borrow().plan(table.model(), table.dtype())?)
    }
}

impl Origin for Source {
    fn read<T: Table, R>(
        &self,
        table: &T,
        pack: impl FnOnce(&SlotImage<'_>) -> Result<R, LoadError>,
    ) -> Result<R, LoadError> {
        shard(table, self)?.read(pack)
    }
}

/// The source of a table's rank.
fn shard<'s>(table: &impl Table, source: &'s Source) -> Result<Cow<'s, Source>, LoadError> {
    if source.dtype() != table.dtype() {
        return Err(SlotError::DType { got: source.dtype(), want: table.dtype() }.into());
    }
    if *source.model() == *table.model() {
        return Ok(Cow::Borrowed(source));
    }
    Ok(Cow::Owned(source.shard(table.model())?))
}

/// The adapters of one rank in host memory. Other ranks may hold other ones: what a rank lacks, it reads.
pub(super) struct HostTier<T: HostTable> {
    memory: Arc<T::Host>,
    /// By version.
    entries: HashMap<u64, Entry<T::Packed>>,
    loaders: Loaders<u64, Option<T::Packed>>,
    /// Of loads that were not prefetched, which wait for no loader.
    packers: ThreadPool,
    /// Number of the last use. It orders adapters by use.
    uses: u64,
    /// Reads that have not ended.
    reads: usize,
    counters: Counters,
}

struct Entry<P> {
    last_use: u64,
    state: State<P>,
}

/// An adapter in its slot's memory, unless that has no room, and in host memory, if that has room.
type Packed<T> = (Result<<T as Table>::Filled, LoadError>, Option<<T as HostTable>::Packed>);

enum State<P> {
    Reading,
    Ready(P),
    Failed(LoadError),
}

impl<T: HostTable> fmt::Debug for HostTier<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTier").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl<T: HostTable> HostTier<T> {
    /// An empty tier of `bytes` bytes. `packers` threads pack an adapter.
    pub(super) fn new(table: &T, bytes: usize, packers: usize) -> Result<Self, PoolError> {
        let loaders = Loaders::new(LOADERS, packers.max(1)).map_err(PoolError::Threads)?;
        let packers = packers_of(LOADERS, packers.max(1)).map_err(PoolError::Threads)?;
        Ok(Self {
            memory: table.host(bytes)?,
            entries: HashMap::new(),
            loaders,
            packers,
            uses: 0,
            reads: 0,
            counters: Counters::default(),
        })
    }

    pub(super) fn usage(&self) -> Usage {
        T::host_usage(&self.memory)
    }

    /// Whether an adapter is in the tier.
    pub(super) fn has(&self, version: u64) -> bool {
        self.entries.get(&version).is_some_and(|entry| matches!(entry.state, State::Ready(_)))
    }

    /// Number of adapters in the tier.
    pub(super) fn len(&self) -> usize {
        self.entries.values().filter(|entry| matches!(entry.state, State::Ready(_))).count()
    }

    /// Reads that have not ended.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    pub(super) fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether an adapter is being read.
    pub(super) fn is_reading(&mut self, version: u64) -> bool {
        self.notice();
        self.entries.get(&version).is_some_and(|entry| matches!(entry.state, State::Reading))
    }

    /// Forgets an adapter. If it is being read, what has been read is dropped.
    pub(super) fn remove(&mut self, version: u64) {
        self.entries.remove(&version);
    }

    /// Blocks this thread until a read ends, or for `timeout`. Returns whether one has; `false` at once if none is under way.
    pub(super) fn wait(&mut self, timeout: Duration) -> bool {
        let loaded = if self.reads == 0 { None } else { self.loaders.wait(timeout) };
        loaded.map(|loaded| self.take(loaded)).is_some()
    }

    /// Starts to read an adapter, unless it is there, is being read or could not be read.
    pub(super) fn prefetch(&mut self, table: &T, version: u64, source: &Source) -> Result<(), LoadError> {
        let source = shard(table, source)?;
        self.notice();
        self.uses += 1;
        if let Some(entry) = self.entries.get_mut(&version) {
            entry.last_use = self.uses;
            return Ok(());
        }
        self.make_room(source.bytes());
        self.entries.insert(version, Entry { last_use: self.uses, state: State::Reading });
        let memory = Arc::clone(&self.memory);
        self.reads += 1;
        self.loaders.start(version, Arc::new(source.into_owned()), move |image| T::pack(&memory, image), Ok);
        Ok(())
    }

    /// Fills the memory of a slot with an adapter: from this tier, or from its origin, and leaves it in this tier if it fits. The error
    /// of a failed prefetch is returned, and forgotten.
    pub(super) fn fill(
        &mut self,
        table: &T,
        (slot, version): (Slot, u64),
        origin: &impl Origin,
        progress: &mut Progress,
    ) -> Result<T::Filled, LoadError> {
        self.wait_for(version);
        if self.entries.get(&version).is_some_and(|entry| matches!(entry.state, State::Failed(_)))
            && let Some(Entry { state: State::Failed(error), .. }) = self.entries.remove(&version)
        {
            return Err(error);
        }
        self.uses += 1;
        if let Some(Entry { last_use, state: State::Ready(packed) }) = self.entries.get_mut(&version) {
            *last_use = self.uses;
            *progress = Progress { phase: Phase::Reserve, can_hold: table.can_hold_packed(packed) };
            let reservation = table.reserve_packed(slot, packed)?;
            progress.phase = Phase::Fill;
            return table.fill_packed(reservation, packed);
        }
        let (filled, packed) = origin.read(table, |image| self.fill_from(table, slot, image, progress))?;
        if let Some(packed) = packed {
            self.entries.insert(version, Entry { last_use: self.uses, state: State::Ready(packed) });
        }
        filled
    }

    /// Fills the memory of a slot with an image. Returns it packed, too, if this tier has room: also if the slot's memory has none, so
    /// that the next attempt finds it there.
    fn fill_from(
        &mut self,
        table: &T,
        slot: Slot,
        image: &SlotImage<'_>,
        progress: &mut Progress,
    ) -> Result<Packed<T>, LoadError> {
        *progress = Progress { phase: Phase::Reserve, can_hold: table.can_hold(image) };
        let reservation = match table.reserve(slot, image) {
            Err(error) if !progress.can_hold || !matches!(error, LoadError::Full { .. }) => return Err(error),
            reservation => reservation,
        };
        progress.phase = Phase::Fill;
        self.make_room(image.bytes());
        let memory = &self.memory;
        let packed = self.packers.install(|| T::pack(memory, image))?;
        self.counters.reads += 1;
        self.counters.read_bytes += image.bytes() as u64;
        let filled = match (reservation, &packed) {
            (Err(error), _) => {
                progress.phase = Phase::Reserve;
                Err(error)
            }
            (Ok(reservation), None) => table.fill(reservation, image),
            (Ok(reservation), Some(packed)) => table.fill_packed(reservation, packed),
        };
        Ok((filled, packed))
    }

    /// Evicts the least recently used adapters until one of `bytes` bytes fits, if it can fit at all.
    fn make_room(&mut self, bytes: usize) {
        while bytes <= self.usage().capacity && bytes > self.usage().largest_gap {
            let ready = self.entries.iter().filter(|(_, entry)| matches!(entry.state, State::Ready(_)));
            let Some(victim) = ready.min_by_key(|(_, entry)| entry.last_use).map(|(&version, _)| version) else {
                break;
            };
            self.entries.remove(&victim);
            self.counters.host_evictions += 1;
        }
    }

    /// Blocks this thread while an adapter is being read.
    fn wait_for(&mut self, version: u64) {
        self.notice();
        while self.entries.get(&version).is_some_and(|entry| matches!(entry.state, State::Reading)) {
            let loaded = self.loaders.wait(WAIT);
            loaded.into_iter().for_each(|loaded| self.take(loaded));
        }
    }

    /// Takes note of reads that have ended.
    fn notice(&mut self) {
        while let Some(loaded) = self.loaders.next() {
            self.take(loaded);
        }
    }

    fn take(&mut self, Loaded { id, result, time }: Loaded<u64, Option<T::Packed>>) {
        self.reads -= 1;
        self.counters.read_time += time;
        let state = match result {
            Ok(Some(packed)) => State::Ready(packed),
            Err(error) => State::Failed(error),
            // Other reads were there first.
            Ok(None) => {
                self.entries.remove(&id);
                return;
            }
        };
        if let Some(entry) = self.entries.get_mut(&id) {
            match &state {
                State::Failed(_) => self.counters.failures += 1,
                _ => self.counters.reads += 1,
            }
            entry.state = state;
        }
    }
}
