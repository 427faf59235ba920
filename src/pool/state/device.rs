//! The device tier: slots and blocks, and the rules for overwriting them; and the host tier, a budget of bytes.

use std::collections::BTreeMap;

use crate::{
    Slot,
    arena::blocks::{self, Block, Blocks},
    plan::PlanError,
    pool::{
        AdapterId, StreamId,
        messages::{Granted, Transfer},
    },
};

/// The slots and the arena of the device.
///
/// Memory may be overwritten after the end of a step, on every stream that it was leased for, since its last lease
/// ended. A slot that meets this condition is *idle*. Its launches have been enqueued then, but may not have run: the
/// copy waits for them.
#[derive(Debug)]
pub(crate) struct Device {
    pub(super) blocks: Blocks,
    slots: Vec<SlotState>,
    /// Steps that have ended, by stream.
    ended: Vec<u64>,
    /// Slots that steps may use, by stream: those that have a lease of the stream, or had one after the last end of a
    /// step.
    open: Vec<Vec<usize>>,
    copies: u64,
}

/// A slot.
#[derive(Debug, Default)]
struct SlotState {
    content: Option<Content>,
    /// By stream.
    uses: Vec<Use>,
}

/// What is in a slot.
#[derive(Debug)]
struct Content {
    id: AdapterId,
    block: Block,
    /// Number of the copy that brought it.
    number: u64,
    /// The slot with this content, as batches name it.
    slot: Slot,
    is_copying: bool,
    leases: usize,
}

/// The use of a slot on one stream.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    leases: usize,
    /// Whether it has been leased since the slot was idle.
    leased: bool,
    /// The step that ends its last use, counted from 1; 0 if it was not used.
    end: u64,
    /// Whether steps may use it.
    is_open: bool,
}

/// The content of a slot, for reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Occupied {
    pub(crate) id: AdapterId,
    pub(crate) is_copying: bool,
    pub(crate) leases: usize,
}

impl Device {
    pub(super) fn new(num_slots: usize, arena_bytes: usize) -> Result<Self, PlanError> {
        Ok(Self {
            blocks: Blocks::new("the arena's bytes", arena_bytes)?,
            slots: (0..num_slots).map(|_| SlotState::default()).collect(),
            ended: Vec::new(),
            open: Vec::new(),
            copies: 0,
        })
    }

    pub(super) fn add_stream(&mut self) -> StreamId {
        let stream = StreamId(self.ended.len());
        self.ended.push(0);
        self.open.push(Vec::new());
        self.slots.iter_mut().for_each(|place| place.uses.push(Use::default()));
        stream
    }

    pub(super) fn num_streams(&self) -> usize {
        self.ended.len()
    }

    pub(super) fn has_stream(&self, stream: StreamId) -> bool {
        stream.0 < self.num_streams()
    }

    pub(super) fn num_slots(&self) -> usize {
        self.slots.len()
    }

    /// Takes note of the end of a step's launches. Later steps of the stream may not use slots whose leases have ended.
    pub(super) fn end_step(&mut self, stream: StreamId) {
        self.ended[stream.0] += 1;
        let Self { open, slots, .. } = self;
        open[stream.0].retain(|&slot| {
            let usage = &mut slots[slot].uses[stream.0];
            usage.is_open = usage.leases > 0;
            usage.is_open
        });
    }

    /// Steps of the stream may use the slot from now on.
    pub(super) fn open(&mut self, slot: usize, stream: StreamId) {
        if !std::mem::replace(&mut self.slots[slot].uses[stream.0].is_open, true) {
            self.open[stream.0].push(slot);
        }
    }

    /// Whether steps of the stream may use the slot, and the adapter that it names is there. Every step may use the
    /// base model.
    pub(super) fn is_open(&self, slot: Slot, stream: StreamId) -> bool {
        let Some(index) = slot.index() else { return true };
        self.slots.get(index).is_some_and(|place| {
            place.uses[stream.0].is_open && place.content.as_ref().is_some_and(|content| content.slot == slot)
        })
    }

    /// Leases of a slot.
    pub(super) fn leases(&self, slot: usize) -> usize {
        self.slots[slot].content.as_ref().map_or(0, |content| content.leases)
    }

    pub(super) fn lease(&mut self, slot: usize, stream: StreamId) -> Option<Granted> {
        let is_idle = self.is_idle(slot);
        let place = &mut self.slots[slot];
        let content = place.content.as_mut()?;
        if is_idle {
            place.uses.iter_mut().for_each(|usage| usage.leased = false);
        }
        let usage = &mut place.uses[stream.0];
        usage.leased = true;
        usage.leases += 1;
        content.leases += 1;
        Some(Granted { slot, content: content.slot, number: content.number, is_copying: content.is_copying })
    }

    /// Ends one lease for a stream.
    pub(super) fn release(&mut self, slot: usize, stream: StreamId) {
        let place = &mut self.slots[slot];
        let Some(content) = &mut place.content else { return };
        content.leases -= 1;
        place.uses[stream.0].leases -= 1;
        if content.leases == 0 {
            // Launches may follow the end of the lease until the next end of a step, on every stream that the slot was
            // leased for.
            let leased = place.uses.iter_mut().zip(&self.ended).filter(|(usage, _)| usage.leased);
            leased.for_each(|(usage, ended)| usage.end = ended + 1);
        }
    }

    /// Whether an adapter is in the slot, and may be evicted.
    pub(super) fn is_idle(&self, slot: usize) -> bool {
        !self.is_copying(slot) && self.is_unused(slot)
    }

    /// Whether an adapter is in the slot, and may be evicted once its copy has ended.
    fn is_unused(&self, slot: usize) -> bool {
        let SlotState { content: Some(content), uses } = &self.slots[slot] else { return false };
        content.leases == 0 && uses.iter().zip(&self.ended).all(|(usage, &ended)| ended >= usage.end)
    }

    /// Whether nothing on the device is in use.
    pub(super) fn is_idle_all(&self) -> bool {
        (0..self.slots.len()).all(|slot| self.slots[slot].content.is_none() || self.is_idle(slot))
    }

    /// Whether a copy is under way of an adapter that may be evicted once it has ended.
    pub(super) fn has_unused_copy(&self) -> bool {
        (0..self.slots.len()).any(|slot| self.is_copying(slot) && self.is_unused(slot))
    }

    /// The idle adapter of the lowest rank.
    pub(super) fn victim(&self, rank: impl Fn(AdapterId) -> Option<u64>) -> Option<AdapterId> {
        let idle = (0..self.slots.len()).filter(|&slot| self.is_idle(slot));
        let ids = idle.filter_map(|slot| Some(self.slots[slot].content.as_ref()?.id));
        ids.filter_map(|id| Some((rank(id)?, id))).min_by_key(|(rank, _)| *rank).map(|(_, id)| id)
    }

    /// Slots and bytes that are free, or would be without the adapters that `may_evict` accepts and that are idle: now,
    /// or once all copies have ended.
    pub(super) fn reclaimable(&self, once_copied: bool, may_evict: impl Fn(AdapterId) -> bool) -> (usize, usize) {
        let free = self.slots.iter().filter(|place| place.content.is_none()).count();
        let idle = |&slot: &usize| if once_copied { self.is_unused(slot) } else { self.is_idle(slot) };
        let contents = (0..self.slots.len()).filter(idle).filter_map(|slot| self.slots[slot].content.as_ref());
        let sum = |(slots, bytes), content: &Content| (slots + 1, bytes + content.block.bytes());
        contents.filter(|content| may_evict(content.id)).fold((free, self.blocks.usage().free()), sum)
    }

    /// Whether a slot and a block of this size would be free without the idle adapters that `may_evict` accepts.
    pub(super) fn could_hold(&self, bytes: usize, may_evict: impl Fn(AdapterId) -> bool) -> bool {
        let kept = |slot: usize| {
            let content = self.slots[slot].content.as_ref()?;
            (!self.is_idle(slot) || !may_evict(content.id)).then(|| content.block.range())
        };
        let mut kept: Vec<_> = (0..self.slots.len()).filter_map(kept).collect();
        if kept.len() == self.slots.len() {
            return false;
        }
        kept.sort_unstable_by_key(|range| range.start);
        let starts = kept.iter().map(|range| range.start).chain([self.blocks.usage().capacity]);
        let ends = [0].into_iter().chain(kept.iter().map(|range| range.end));
        starts.zip(ends).any(|(start, end)| blocks::fits(bytes, start - end))
    }

    /// Takes a free slot and block for an adapter, if there are any. Returns its copy without the source.
    pub(super) fn take(&mut self, id: AdapterId, bytes: usize) -> Option<Transfer> {
        let slot = self.slots.iter().position(|place| place.content.is_none())?;
        let block = self.blocks.allocate(bytes)?;
        self.copies += 1;
        let (to, number) = (block.range(), self.copies);
        let content = Content { id, block, number, slot: Slot::filled(slot), is_copying: true, leases: 0 };
        self.slots[slot].content = Some(content);
        Some(Transfer { id, from: 0..0, to, slot, number })
    }

    pub(super) fn has_copied(&mut self, number: u64) -> Option<AdapterId> {
        let mut contents = self.slots.iter_mut().filter_map(|place| place.content.as_mut());
        let content = contents.find(|content| content.number == number)?;
        content.is_copying = false;
        Some(content.id)
    }

    pub(super) fn is_copying(&self, slot: usize) -> bool {
        self.slots[slot].content.as_ref().is_some_and(|content| content.is_copying)
    }

    /// Empties a slot.
    pub(super) fn evict(&mut self, slot: usize) {
        let place = &mut self.slots[slot];
        place.uses.iter_mut().for_each(|usage| usage.leased = false);
        if let Some(content) = place.content.take() {
            self.blocks.free(content.block);
        }
    }

    /// The contents of the slots.
    pub(super) fn occupied(&self) -> impl Iterator<Item = Occupied> {
        let contents = self.slots.iter().filter_map(|place| place.content.as_ref());
        contents.map(|&Content { id, is_copying, leases, .. }| Occupied { id, is_copying, leases })
    }
}

/// The host's arena, and its adapters by their last use.
#[derive(Debug)]
pub(crate) struct Host {
    pub(super) blocks: Blocks,
    by_use: BTreeMap<u64, AdapterId>,
}

/// An adapter's place in the host tier.
#[derive(Debug, Default)]
pub(super) enum HostPlace {
    #[default]
    Absent,
    Reading {
        block: Block,
        /// The copy that the read makes meanwhile. Its slot has no leases yet.
        copy: Option<Transfer>,
    },
    Ready {
        block: Block,
    },
}

impl HostPlace {
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, Self::Ready { .. })
    }

    /// Whether it is being read, and has room on the device.
    pub(super) fn is_copied_meanwhile(&self) -> bool {
        matches!(self, Self::Reading { copy: Some(_), .. })
    }
}

impl Host {
    pub(super) fn new(bytes: usize) -> Result<Self, PlanError> {
        Ok(Self { blocks: Blocks::new("the host tier's bytes", bytes)?, by_use: BTreeMap::new() })
    }

    /// Adapters that are ready.
    pub(super) fn len(&self) -> usize {
        self.by_use.len()
    }

    /// Takes note of an adapter that is ready. Every use has another number.
    pub(super) fn insert(&mut self, last_use: u64, id: AdapterId) {
        self.by_use.insert(last_use, id);
    }

    pub(super) fn remove(&mut self, last_use: u64) {
        self.by_use.remove(&last_use);
    }

    pub(super) fn touch(&mut self, from: u64, to: u64) {
        if let Some(id) = self.by_use.remove(&from) {
            self.by_use.insert(to, id);
        }
    }

    /// The least recently used adapter that may be evicted.
    pub(super) fn victim(&self, may_evict: impl Fn(AdapterId) -> bool) -> Option<AdapterId> {
        self.by_use.values().copied().find(|&id| may_evict(id))
    }
}
