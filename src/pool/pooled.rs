//! A pool of either backend: the state machine, the loader threads and the leases.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use super::{
    AdapterId, Lease, Outcome, PoolConfig, PoolError, Residency, Snapshot, Source, StreamId,
    backend::Backend,
    core::{Core, Limits},
    loaders::{Loaded, Loaders},
    transfer::{Copy, Transfer},
};
use crate::{
    DType, Slot,
    adapter::{SlotImage, layout::ALIGNMENT_BYTES},
    blocks,
    error::{LoadError, OperandError, SlotError},
    model::Model,
    residency::Bounds,
};

/// A pool on a backend.
pub(crate) struct Pool<B: Backend> {
    core: Core,
    tiers: Tiers<B>,
    bounds: Bounds,
    releases: Receiver<(Slot, StreamId)>,
    releaser: Sender<(Slot, StreamId)>,
}

/// What the state machine decides about.
struct Tiers<B: Backend> {
    backend: B,
    sources: HashMap<AdapterId, Arc<Source>>,
    /// The adapters in the host tier.
    packed: HashMap<AdapterId, B::Packed>,
    /// Whether a step may use a slot, by stream and slot.
    leased: Vec<Vec<bool>>,
    loaders: Loaders<AdapterId, (B::Packed, usize)>,
}

impl<B: Backend> Pool<B> {
    pub(crate) fn new(backend: B, bounds: Bounds, config: PoolConfig) -> Result<Self, PoolError> {
        let limits = Limits {
            num_slots: bounds.capacity.num_slots,
            arena_bytes: config.arena_bytes,
            host_bytes: config.host_bytes,
            max_reads: config.loaders.max(1),
        };
        let (releaser, releases) = channel();
        let loaders = Loaders::new(limits.max_reads, config.packers.max(1)).map_err(PoolError::Threads)?;
        let leased = vec![vec![false; limits.num_slots]];
        let tiers = Tiers { backend, sources: HashMap::new(), packed: HashMap::new(), leased, loaders };
        Ok(Self { core: Core::new(limits)?, tiers, bounds, releases, releaser })
    }

    pub(crate) fn backend(&self) -> &B {
        &self.tiers.backend
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn backend_mut(&mut self) -> &mut B {
        &mut self.tiers.backend
    }

    /// Rejects slots that no lease of the stream holds.
    pub(crate) fn check_leased(&self, stream: StreamId, slots: &[Slot]) -> Result<(), OperandError> {
        let leased = self.tiers.leased.get(stream.0).ok_or(OperandError::NoSuchStream { stream })?;
        let is_leased = |slot: &Slot| slot.index().is_none_or(|index| leased.get(index) == Some(&true));
        slots.iter().find(|slot| !is_leased(slot)).map_or(Ok(()), |&slot| Err(OperandError::NotLeased { slot }))
    }

    /// Whether the stream is one of the pool's.
    pub(crate) fn has_stream(&self, stream: StreamId) -> bool {
        stream.0 < self.tiers.leased.len()
    }

    pub(crate) fn add_stream(&mut self) -> StreamId {
        self.tiers.leased.push(vec![false; self.bounds.capacity.num_slots]);
        self.core.add_stream()
    }

    pub(crate) fn register(&mut self, source: Source) -> Result<AdapterId, PoolError> {
        source.check(&self.bounds)?;
        let bytes = block_bytes(source.bytes(), B::row_bytes(&self.bounds.model));
        let id = self.core.register(bytes, source.is_exact())?;
        self.tiers.sources.insert(id, Arc::new(source));
        Ok(id)
    }

    pub(crate) fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.notice();
        self.core.unregister(id, &mut self.tiers)?;
        self.tiers.sources.remove(&id);
        Ok(())
    }

    pub(crate) fn prefetch(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.notice();
        self.core.prefetch(id, &mut self.tiers)
    }

    pub(crate) fn retry(&mut self, id: AdapterId) -> Result<(), PoolError> {
        self.notice();
        self.core.retry(id, &mut self.tiers)
    }

    pub(crate) fn next_outcome(&mut self) -> Option<Outcome> {
        self.poll();
        self.core.next_outcome()
    }

    pub(crate) fn set_pinned(&mut self, id: AdapterId, is_pinned: bool) -> Result<(), PoolError> {
        self.core.set_pinned(id, is_pinned)
    }

    pub(crate) fn prepare(&mut self, ids: &[AdapterId], stream: StreamId) -> Result<Vec<Lease>, PoolError> {
        self.poll();
        let granted = self.core.prepare(ids, stream, &mut self.tiers)?;
        // All leases exist before the first is enqueued, so that an error ends them all.
        let lease = |(&id, slot): (&AdapterId, Slot)| Lease { id, slot, stream, releases: self.releaser.clone() };
        let leases = ids.iter().zip(granted.iter().map(|granted| slot_at(granted.slot))).map(lease).collect();
        for granted in granted {
            let slot = granted.slot;
            self.tiers.backend.point(granted, stream)?;
            self.tiers.leased[stream.0][slot] = true;
        }
        Ok(leases)
    }

    pub(crate) fn commit(&mut self, stream: StreamId) -> Result<(), PoolError> {
        self.notice();
        self.core.commit(stream, &mut self.tiers)
    }

    pub(crate) fn poll(&mut self) {
        self.notice();
        self.core.poll(&mut self.tiers);
    }

    /// Blocks this thread until a read ends, or for `timeout`. Returns whether one has ended.
    pub(crate) fn wait(&mut self, timeout: Duration) -> bool {
        if self.core.reads() == 0 {
            return false;
        }
        let loaded = self.tiers.loaders.wait(timeout);
        let has_ended = loaded.is_some();
        loaded.into_iter().for_each(|loaded| self.take(loaded));
        self.poll();
        has_ended
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.core.snapshot()
    }

    pub(crate) fn residency(&self, id: AdapterId) -> Option<Residency> {
        self.core.residency_of(id)
    }

    pub(crate) fn residencies(&self) -> Vec<Residency> {
        self.core.residencies()
    }

    /// Takes note of leases, reads and copies that have ended.
    fn notice(&mut self) {
        while let Ok((slot, stream)) = self.releases.try_recv() {
            slot.index().into_iter().for_each(|slot| self.core.release(slot, stream));
        }
        while let Some(number) = self.tiers.backend.next_copied() {
            self.core.has_copied(number);
        }
        while let Some(loaded) = self.tiers.loaders.next() {
            self.take(loaded);
        }
    }

    fn take(&mut self, Loaded { id, time, result }: Loaded<AdapterId, (B::Packed, usize)>) {
        let result = result.map(|(packed, bytes)| {
            self.tiers.packed.insert(id, packed);
            bytes
        });
        self.core.has_read(id, time, result, &mut self.tiers);
    }
}

impl<B: Backend> Transfer for Tiers<B> {
    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Copy>) -> bool {
        let source = self.sources.get(&id).expect("a registered adapter has a source");
        let (reserved, row_bytes) = (source.bytes(), B::row_bytes(source.model()));
        let (packer, is_copied) = self.backend.packer(copy);
        let pack = move |image: &SlotImage<'_>| {
            let bytes = image.bytes();
            if bytes > reserved {
                return Err(SlotError::OtherImage { bytes, reserved }.into());
            }
            let block_bytes = block_bytes(bytes, row_bytes);
            Ok((B::pack(packer, image, to.start..to.start + block_bytes)?, block_bytes))
        };
        self.loaders.start(id, Arc::clone(source), pack, |(packed, bytes)| Ok((B::seal(packed)?, bytes)));
        is_copied
    }

    fn copies_parts(&self) -> bool {
        self.backend.copies_parts()
    }

    fn revoke(&mut self, copy: &Copy) -> bool {
        self.backend.revoke(copy)
    }

    fn finish(&mut self, copy: &Copy) {
        self.backend.finish(&self.packed[&copy.id], copy);
    }

    fn copy(&mut self, copy: &Copy) -> Result<(), LoadError> {
        let packed = self.packed.get_mut(&copy.id).expect("an adapter in the host tier is packed");
        self.backend.copy(packed, copy)
    }

    fn close(&mut self, slot: usize, stream: StreamId) {
        self.leased[stream.0][slot] = false;
    }

    fn may_evict(&self) -> bool {
        self.backend.may_evict()
    }

    fn evict(&mut self, slot: usize) {
        self.backend.evict(slot);
    }

    fn forget(&mut self, id: AdapterId) {
        self.packed.remove(&id);
    }
}

/// Size of an arena in which `count` adapters of rank `max_rank` fit, whatever modules they have.
pub(crate) fn arena_bytes<B: Backend>(model: &Model, dtype: DType, max_rank: usize, count: usize) -> usize {
    let block = block_bytes(SlotImage::max_bytes(model, dtype, max_rank), B::row_bytes(model));
    blocks::bytes_for(std::iter::repeat_n(block, count), 0)
}

/// Size of the block of an image of `image_bytes` bytes, which are followed by an aligned row.
fn block_bytes(image_bytes: usize, row_bytes: usize) -> usize {
    image_bytes.next_multiple_of(ALIGNMENT_BYTES) + row_bytes
}

/// The slot of an index that is within a table.
pub(crate) fn slot_at(index: usize) -> Slot {
    Slot::new(u16::try_from(index).expect("a table has no more slots than this"))
}
