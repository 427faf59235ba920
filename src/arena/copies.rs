//! Copies that may not have run yet, and the memory that they write to.
//!
//! Invariant: the memory is given back with an event behind its last copy, or after the copies have run. That holds on
//! every path: after a success, an error, a panic of the code between two copies, and a drop at any point.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::arena::blocks::Block;

/// A device stream.
pub(crate) trait CopyStream {
    type Event;
    type Error;

    /// Records an event behind the work so far.
    fn record(&self, event: &Self::Event) -> Result<(), Self::Error>;

    /// Blocks the calling thread until the work so far has run.
    fn synchronize(&self) -> Result<(), Self::Error>;

    /// Like [`record`](Self::record). If the driver refuses, blocks until the work has run: an event that was never
    /// recorded counts as complete.
    fn end(&self, event: &Self::Event) -> Result<(), Self::Error> {
        self.record(event).inspect_err(|_| {
            // On an error here the context is gone, and with it the work.
            let _ = self.synchronize();
        })
    }
}

/// Consecutive copies on a stream. They begin before the first copy is enqueued, and end with an event behind the last
/// one.
pub(crate) struct Copies<S: CopyStream> {
    stream: Arc<S>,
    end: Arc<S::Event>,
    is_ended: bool,
}

impl<S: CopyStream> fmt::Debug for Copies<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copies").field("is_ended", &self.is_ended).finish_non_exhaustive()
    }
}

impl<S: CopyStream> Copies<S> {
    /// Copies that are about to be enqueued on `stream`. `end` is recorded behind the last one.
    pub(crate) fn begin(stream: &Arc<S>, end: S::Event) -> Self {
        Self { stream: Arc::clone(stream), end: Arc::new(end), is_ended: false }
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    /// Ends the copies, after which none is enqueued. Does nothing if they have ended.
    pub(crate) fn end(&mut self) -> Result<(), S::Error> {
        if std::mem::replace(&mut self.is_ended, true) { Ok(()) } else { self.stream.end(&self.end) }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// The event behind the last copy, once the copies have ended.
    pub(crate) fn end_event(&self) -> &Arc<S::Event> {
        &self.end
    }
}

impl<S: CopyStream> Drop for Copies<S> {
    fn drop(&mut self) {
        // Without an event, the copies have run.
        let _ = self.end();
    }
}

/// Memory that blocks are allocated in.
pub(crate) trait Arena<E> {
    /// Frees blocks that work before `event` may still use.
    fn give_back(&self, blocks: impl IntoIterator<Item = Block>, event: Option<Arc<E>>);
}

/// Blocks for the factors and the descriptors of an adapter, and the copies into them. Dropping it frees the blocks.
pub(crate) struct Room<S: CopyStream, A: Arena<S::Event>> {
    arena: Arc<A>,
    /// `None` once they belong to a slot.
    blocks: Option<[Block; 2]>,
    copies: Option<Copies<S>>,
}

impl<S: CopyStream, A: Arena<S::Event>> fmt::Debug for Room<S, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Room").field("blocks", &self.blocks).field("copies", &self.copies).finish_non_exhaustive()
    }
}

impl<S: CopyStream, A: Arena<S::Event>> Room<S, A> {
    pub(crate) fn new(arena: &Arc<A>, blocks: [Block; 2]) -> Self {
        Self { arena: Arc::clone(arena), blocks: Some(blocks), copies: None }
    }

    pub(crate) fn arena(&self) -> &Arc<A> {
        &self.arena
    }

    pub(crate) fn blocks(&self) -> &[Block; 2] {
        self.blocks.as_ref().expect("room has its blocks until they belong to a slot")
    }

    /// Takes note of copies into the blocks, before the first of them.
    pub(crate) fn write(&mut self, copies: Copies<S>) {
        self.copies = Some(copies);
    }

    /// Ends the copies.
    pub(crate) fn end(&mut self) -> Result<(), S::Error> {
        self.copies.as_mut().map_or(Ok(()), Copies::end)
    }

    /// The event behind the last copy, if there are copies. They have ended.
    pub(crate) fn written(&self) -> Option<&Arc<S::Event>> {
        self.copies.as_ref().map(Copies::end_event)
    }

    /// Leaves the blocks to a slot. The caller has made later uses wait for [`written`](Self::written).
    pub(crate) fn into_blocks(mut self) -> [Block; 2] {
        self.blocks.take().expect("room has its blocks until they belong to a slot")
    }
}

impl<S: CopyStream, A: Arena<S::Event>> Drop for Room<S, A> {
    fn drop(&mut self) {
        // Without an event, the copies have run.
        let _ = self.end();
        if let Some(blocks) = self.blocks.take() {
            self.arena.give_back(blocks, self.written().cloned());
        }
    }
}

/// The parts of a memory that somebody has. No two of them overlap.
#[derive(Debug, Default)]
pub(crate) struct Lent(Mutex<BTreeMap<usize, usize>>);

impl Lent {
    /// Takes note that somebody has a part, of some bytes. Does nothing and returns `false` if somebody has some of it.
    pub(crate) fn lend(&self, part: &Range<usize>) -> bool {
        let mut ends = self.ends();
        let is_free = ends.range(..part.end).next_back().is_none_or(|(_, end)| *end <= part.start);
        if is_free {
            ends.insert(part.start, part.end);
        }
        is_free
    }

    /// Takes note that nobody has a part any more.
    pub(crate) fn give_back(&self, part: &Range<usize>) {
        self.ends().remove(&part.start);
    }

    /// The ends of the parts, by their starts.
    fn ends(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        // A panic cannot leave the map half-changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;
    use crate::arena::blocks::Blocks;

    /// A stream whose work runs only when somebody waits for it.
    #[derive(Debug, Default)]
    struct Device {
        enqueued: AtomicUsize,
        run: AtomicUsize,
        refuses_events: bool,
    }

    impl Device {
        fn copy(&self) {
            self.enqueued.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The work before the event; 0 if it was never recorded.
    type Recorded = AtomicUsize;

    impl CopyStream for Device {
        type Event = Recorded;
        type Error = ();

        fn record(&self, event: &Recorded) -> Result<(), ()> {
            if self.refuses_events {
                return Err(());
            }
            event.store(self.enqueued.load(Ordering::Relaxed), Ordering::Relaxed);
            Ok(())
        }

        fn synchronize(&self) -> Result<(), ()> {
            self.run.store(self.enqueued.load(Ordering::Relaxed), Ordering::Relaxed);
            Ok(())
        }
    }

    /// Frees blocks, and checks that whoever gets them next waits for all copies that have not run.
    struct Checked {
        free: Mutex<Blocks>,
        device: Arc<Device>,
    }

    impl Arena<Recorded> for Checked {
        fn give_back(&self, blocks: impl IntoIterator<Item = Block>, event: Option<Arc<Recorded>>) {
            let waited_for =
                event.map_or(0, |event| event.load(Ordering::Relaxed)).max(self.device.run.load(Ordering::Relaxed));
            assert_eq!(waited_for, self.device.enqueued.load(Ordering::Relaxed), "room was freed under a copy");
            let mut free = self.free.lock().unwrap();
            blocks.into_iter().for_each(|block| free.free(block));
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum End {
        Drop,
        Error,
        Panic,
        Ended,
    }

    fn fill(room: &mut Room<Device, Checked>, device: &Arc<Device>, copies: usize, end: End) -> Result<(), ()> {
        room.write(Copies::begin(device, Recorded::default()));
        for _ in 0..copies {
            device.copy();
        }
        match end {
            End::Drop => Ok(()),
            End::Error => Err(()),
            End::Panic => std::panic::resume_unwind(Box::new("user code")),
            End::Ended => room.end(),
        }
    }

    /// Whatever ends a fill, and after any number of its copies, the room is free again, and what gets it next waits
    /// for the copies.
    #[test]
    fn room_is_never_freed_under_a_copy() {
        for refuses_events in [false, true] {
            for end in [End::Drop, End::Error, End::Panic, End::Ended] {
                for copies in 0..4 {
                    let device = Arc::new(Device { refuses_events, ..Device::default() });
                    let mut blocks = Blocks::new("the arena", 4096).unwrap();
                    let pair = [512, 256].map(|bytes| blocks.allocate(bytes).unwrap());
                    let arena = Arc::new(Checked { free: Mutex::new(blocks), device: Arc::clone(&device) });
                    let mut room = Room::new(&arena, pair);
                    // A fill owns its room.
                    let filled = catch_unwind(AssertUnwindSafe(move || fill(&mut room, &device, copies, end)));
                    let is_refused = matches!(end, End::Ended) && refuses_events;
                    assert_eq!(filled.is_err(), matches!(end, End::Panic));
                    if let Ok(filled) = filled {
                        assert_eq!(filled.is_err(), matches!(end, End::Error) || is_refused);
                    }
                    let free = arena.free.lock();
                    assert_eq!(free.unwrap().usage().used, 0, "{end:?} after {copies} copies: room was lost");
                }
            }
        }
    }

    /// Room without copies is free at once, and blocks that belong to a slot are not freed.
    #[test]
    fn blocks_of_a_slot_stay() {
        let device = Arc::new(Device::default());
        let mut blocks = Blocks::new("the arena", 4096).unwrap();
        let [unused, used] = [(); 2].map(|()| [512, 256].map(|bytes| blocks.allocate(bytes).unwrap()));
        let arena = Arc::new(Checked { free: Mutex::new(blocks), device: Arc::clone(&device) });
        drop(Room::<Device, _>::new(&arena, unused));
        assert_eq!(arena.free.lock().unwrap().usage().used, 768);
        let mut room = Room::new(&arena, used);
        assert!(Arc::ptr_eq(room.arena(), &arena));
        assert_eq!(room.blocks().each_ref().map(Block::bytes), [512, 256]);
        fill(&mut room, &device, 2, End::Ended).unwrap();
        assert_eq!(room.written().unwrap().load(Ordering::Relaxed), 2);
        let of_slot = room.into_blocks();
        assert_eq!(arena.free.lock().unwrap().usage().used, 768);
        arena.give_back(of_slot, Some(Arc::new(Recorded::new(2))));
        assert_eq!(arena.free.lock().unwrap().usage().used, 0);
    }

    /// Of a small memory, any two parts, and then any one beside the second.
    #[test]
    fn no_byte_is_lent_twice() {
        let parts = || (0..6).flat_map(|start| (start + 1..=6).map(move |end| start..end));
        let are_apart = |a: &Range<usize>, b: &Range<usize>| a.end <= b.start || b.end <= a.start;
        for first in parts() {
            for second in parts() {
                let lent = Lent::default();
                assert!(lent.lend(&first));
                let has_second = lent.lend(&second);
                assert_eq!(has_second, are_apart(&first, &second), "{second:?} beside {first:?}");
                lent.give_back(&first);
                for third in parts() {
                    let is_free = !has_second || are_apart(&second, &third);
                    assert_eq!(lent.lend(&third), is_free, "{third:?} beside {second:?}");
                    if is_free {
                        lent.give_back(&third);
                    }
                }
            }
        }
    }

    /// Copies that have ended are not ended again: a second event would be behind the copies of others.
    #[test]
    fn copies_end_once() {
        let device = Arc::new(Device::default());
        let mut copies = Copies::begin(&device, Recorded::default());
        copies.stream().copy();
        assert!(!copies.is_ended());
        copies.end().unwrap();
        device.copy();
        copies.end().unwrap();
        let event = Arc::clone(copies.end_event());
        drop(copies);
        assert_eq!(event.load(Ordering::Relaxed), 1);
    }
}
