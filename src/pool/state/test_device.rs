//! A device for tests: streams whose work runs in any legal order, and memory that knows whose bytes it has.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{HashMap, VecDeque},
    ops::Range,
    time::Duration,
};

use crate::{
    Slot,
    arena::blocks::GRANULE_BYTES,
    error::{LoadError, OperandError, SlotError},
    pool::{
        AdapterId, PoolError, StreamId,
        backend::{Backend, Executor},
        messages::{Granted, ReadEnd, Transfer},
    },
};

/// What a granule has while it is written.
const TORN: u64 = u64::MAX;
/// What a granule has of an adapter in the place of another.
const OTHER: u64 = u64::MAX - 1;

/// Obligations of a backend, to break on purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Obligation {
    /// The stream of a lease waits for the copy.
    CopyFirst,
    /// Every stream has its own row of descriptors of a slot.
    RowOfStream,
    /// The row of an adapter that was evicted is emptied, and a copy waits for it.
    ClearFirst,
    /// A read that fails, or whose copy was revoked, ends after the parts that it has enqueued.
    PartsFirst,
    /// A read enqueues no part of a copy that was revoked.
    Revoked,
}

/// Work in a stream.
#[derive(Clone, Debug)]
enum Work {
    WaitForCopy(u64),
    /// Waits until a stream has emptied this many rows.
    WaitForClear(StreamId, usize),
    BeginCopy(Transfer),
    /// Copies a granule of an adapter that is being read.
    Part(Transfer, usize),
    EndCopy(Transfer),
    EndParts(Transfer),
    /// Points the slot's row of this stream to a block, which has this adapter.
    Point(usize, Range<usize>, AdapterId),
    /// Empties the slot's row of this stream.
    Clear(usize),
    /// Reads the slot, which must have this adapter.
    Kernel(usize, AdapterId),
    /// Reads the slot without a lease: the adapter that the row points to, or none.
    StaleKernel(usize),
}

/// A read that has not ended.
struct Reading {
    id: AdapterId,
    /// What it writes.
    content: u64,
    fingerprint: u64,
    to: Range<usize>,
    /// Granules that are packed.
    packed: usize,
    /// The copy that it makes meanwhile.
    copy: Option<Transfer>,
    is_revoked: bool,
    /// How it ended, once it has.
    end: Option<bool>,
}

/// The block that a row points to, and its adapter.
type Row = (Range<usize>, AdapterId);

pub(super) struct TestDevice {
    /// The compute streams, then the transfer stream.
    streams: Vec<VecDeque<Work>>,
    reads: Vec<Reading>,
    device: Vec<u64>,
    host: Vec<u64>,
    /// By stream and slot.
    rows: Vec<Vec<Option<Row>>>,
    /// By stream: rows that were to be emptied, and that have been.
    clears: Vec<[usize; 2]>,
    /// By stream and slot: the copy that was enqueued last for the row.
    pointed: Vec<Vec<u64>>,
    copies: Vec<Transfer>,
    /// Whether the end of a copy has been enqueued, by number from 1.
    enqueued: Vec<bool>,
    /// Whether a copy has run, by number from 1.
    copied: Vec<bool>,
    /// Reads that have ended, and copies that have run, for the pool to notice.
    told: VecDeque<ReadEnd>,
    news: VecDeque<u64>,
    pub(super) broken: Option<Obligation>,
    /// Whether a stream is being captured, so that no slot can be emptied.
    pub(super) is_capturing: bool,
    /// Whether copies cannot be enqueued.
    pub(super) refuses_copies: bool,
    /// Whether slots cannot be pointed to adapters.
    pub(super) refuses_points: bool,
    /// What reads find in place of adapters, if it is not 0.
    pub(super) other: u64,
    /// Bytes that an adapter takes on this rank beside those of its source.
    pub(super) extra_bytes: usize,
    /// Of adapters on this rank.
    sizes: HashMap<AdapterId, usize>,
    /// Whether reads copy adapters part by part.
    copies_parts: bool,
    /// The first wrong read.
    pub(super) wrong: Option<String>,
}

impl TestDevice {
    pub(super) fn new(
        streams: usize,
        slots: usize,
        [device_granules, host_granules]: [usize; 2],
        copies_parts: bool,
    ) -> Self {
        Self {
            streams: vec![VecDeque::new(); streams + 1],
            reads: Vec::new(),
            device: vec![0; device_granules],
            host: vec![0; host_granules],
            rows: vec![vec![None; slots]; streams],
            clears: vec![[0; 2]; streams],
            pointed: vec![vec![0; slots]; streams],
            copies: Vec::new(),
            enqueued: Vec::new(),
            copied: Vec::new(),
            told: VecDeque::new(),
            news: VecDeque::new(),
            broken: None,
            is_capturing: false,
            refuses_copies: false,
            refuses_points: false,
            other: 0,
            extra_bytes: 0,
            sizes: HashMap::new(),
            copies_parts,
            wrong: None,
        }
    }

    pub(super) fn num_streams(&self) -> usize {
        self.rows.len()
    }

    /// Enqueues what a lease needs.
    fn lease(&mut self, stream: StreamId, granted: Granted) {
        let Granted { slot, number, .. } = granted;
        if self.pointed[stream.0][slot] == number {
            return;
        }
        let row = if self.keeps(Obligation::RowOfStream) { stream.0 } else { 0 };
        self.pointed[row][slot] = number;
        let copy = &self.copies[index(number)];
        let point = Work::Point(slot, granules(&copy.to), copy.id);
        // A stream does not wait for an event that has not been recorded.
        if self.keeps(Obligation::CopyFirst) && self.enqueued[index(number)] {
            self.streams[stream.0].push_back(Work::WaitForCopy(number));
        }
        self.streams[stream.0].push_back(point);
    }

    pub(super) fn launch(&mut self, stream: StreamId, slot: usize, id: AdapterId) {
        self.streams[stream.0].push_back(Work::Kernel(slot, id));
    }

    pub(super) fn launch_without_lease(&mut self, stream: StreamId, slot: usize) {
        self.streams[stream.0].push_back(Work::StaleKernel(slot));
    }

    /// The reads whose ends have not been told.
    pub(super) fn num_reads(&self) -> usize {
        self.reads.len()
    }

    /// Packs the next granule of a read, which copies it. Returns whether there was one.
    pub(super) fn pack(&mut self, read: usize) -> bool {
        let keeps = self.keeps(Obligation::Revoked);
        let Reading { content, to, packed, copy, is_revoked, end, .. } = &mut self.reads[read];
        let Some(granule) = granules(to).nth(*packed).filter(|_| end.is_none()) else { return false };
        self.host[granule] = *content;
        if let (Some(copy), Some(transfer)) = (copy, self.streams.last_mut())
            && !(*is_revoked && keeps)
        {
            transfer.push_back(Work::Part(copy.clone(), *packed));
        }
        *packed += 1;
        true
    }

    /// Ends a read, unless it has ended. The pool does not hear of it yet.
    pub(super) fn end_read(&mut self, read: usize, is_good: bool) {
        if self.reads[read].end.is_some() {
            return;
        }
        while is_good && self.pack(read) {}
        let Reading { copy, is_revoked, end, .. } = &mut self.reads[read];
        *end = Some(is_good);
        let Some(copy) = copy.clone() else { return };
        if is_good && !*is_revoked {
            self.enqueued[index(copy.number)] = true;
            self.streams.last_mut().into_iter().for_each(|transfer| transfer.push_back(Work::EndParts(copy.clone())));
        } else if self.keeps(Obligation::PartsFirst) {
            self.wait_for_parts(copy.number);
        }
    }

    /// Runs the device until no part of a copy is left.
    fn wait_for_parts(&mut self, number: u64) {
        let is_part = |work: &Work| matches!(work, Work::Part(copy, _) if copy.number == number);
        while self.streams.last().is_some_and(|transfer| transfer.iter().any(is_part)) {
            for stream in 0..self.streams.len() {
                self.run(stream);
            }
        }
    }

    /// Ends a read, unless it has ended, and tells the pool.
    pub(super) fn tell_read(&mut self, read: usize, is_good: bool) {
        self.end_read(read, is_good);
        let Reading { id, fingerprint, end, .. } = self.reads.swap_remove(read);
        let result = if end.unwrap() { Ok(()) } else { Err(SlotError::OtherTable.into()) };
        self.told.push_back(ReadEnd { id, time: Duration::ZERO, fingerprint, result });
    }

    /// Runs the next work of a stream, unless it must wait. Returns whether it ran.
    pub(super) fn run(&mut self, stream: usize) -> bool {
        let may_run = match self.streams[stream].front() {
            None => false,
            Some(Work::WaitForCopy(number)) => self.copied[index(*number)],
            Some(Work::WaitForClear(stream, number)) => self.clears[stream.0][1] >= *number,
            Some(_) => true,
        };
        if !may_run {
            return false;
        }
        match self.streams[stream].pop_front() {
            None | Some(Work::WaitForCopy(_) | Work::WaitForClear(..)) => {}
            Some(Work::Point(slot, range, id)) => self.rows[stream][slot] = Some((range, id)),
            Some(Work::Clear(slot)) => {
                self.rows[stream][slot] = None;
                self.clears[stream][1] += 1;
            }
            Some(Work::Kernel(slot, id)) => {
                let row = if self.keeps(Obligation::RowOfStream) { stream } else { 0 };
                let row = self.rows[row][slot].clone();
                let found = row.map(|(range, _)| self.device[range].to_vec()).unwrap_or_default();
                self.expect(id, &found, "a kernel");
            }
            Some(Work::StaleKernel(slot)) => {
                if let Some((range, id)) = self.rows[stream][slot].clone() {
                    let found = self.device[range].to_vec();
                    self.expect(id, &found, "a kernel without a lease");
                }
            }
            Some(Work::BeginCopy(copy)) => {
                let found = self.host[granules(&copy.from)].to_vec();
                self.expect_copied(copy.id, &found, "a copy");
                self.device[granules(&copy.to)].fill(TORN);
            }
            Some(Work::Part(copy, part)) => {
                let found = granules(&copy.from).nth(part).map(|granule| self.host[granule]);
                self.expect_copied(copy.id, found.as_slice(), "a copy of a part");
                if let (Some(granule), Some(found)) = (granules(&copy.to).nth(part), found) {
                    self.device[granule] = found;
                }
            }
            Some(Work::EndCopy(copy)) => {
                let found = self.host[granules(&copy.from)].to_vec();
                self.expect_copied(copy.id, &found, "a copy");
                self.device[granules(&copy.to)].fill(found[0]);
                self.has_run(copy.number);
            }
            Some(Work::EndParts(copy)) => self.has_run(copy.number),
        }
        true
    }

    /// Takes note of a copy that has run.
    fn has_run(&mut self, number: u64) {
        self.copied[index(number)] = true;
        self.news.push_back(number);
    }

    /// Takes note of a copy. Returns whether it can be enqueued.
    fn number(&mut self, copy: &Transfer) -> bool {
        assert_eq!(index(copy.number), self.copies.len(), "copies are numbered");
        self.copies.push(copy.clone());
        self.enqueued.push(false);
        self.copied.push(false);
        !self.refuses_copies
    }

    fn expect(&mut self, id: AdapterId, found: &[u64], who: &str) {
        if found.is_empty() || found.iter().any(|&found| found != id.get()) {
            self.is_wrong(format!("{who} of {id} read {found:?}"));
        }
    }

    /// As [`expect`](Self::expect), of a copy, which may be of another adapter that was read.
    fn expect_copied(&mut self, id: AdapterId, found: &[u64], who: &str) {
        if found.is_empty() || found.iter().any(|&found| found != OTHER) {
            self.expect(id, found, who);
        }
    }

    /// Takes note of what went wrong first.
    pub(super) fn is_wrong(&mut self, what: String) {
        self.wrong.get_or_insert(what);
    }

    fn keeps(&self, obligation: Obligation) -> bool {
        self.broken != Some(obligation)
    }
}

/// Tests register adapters with the [state](super::State).
impl Backend for TestDevice {
    /// The size of its block in bytes.
    type Source = usize;
    type Weights = ();
    type Batch<'a> = ();
    type Workspace = ();
    type Step<'a> = ();
    type Error = OperandError;

    fn shard(&self, source: &usize) -> Result<usize, LoadError> {
        Ok(source + self.extra_bytes)
    }

    fn add(&mut self, id: AdapterId, bytes: usize) -> Result<usize, PoolError> {
        self.sizes.insert(id, bytes);
        Ok(bytes)
    }

    fn weights(&self, _stream: StreamId) -> Option<&()> {
        None
    }

    fn slots((): &()) -> &[Slot] {
        &[]
    }

    fn step(&self, _stream: StreamId, (): &(), (): &mut ()) -> Result<(), OperandError> {
        Ok(())
    }
}

impl Executor for TestDevice {
    fn remove(&mut self, id: AdapterId) {
        self.sizes.remove(&id);
    }

    fn notice(&mut self, _wait: Option<Duration>) {}

    fn next_read(&mut self) -> Option<ReadEnd> {
        self.told.pop_front()
    }

    fn next_copied(&mut self) -> Option<u64> {
        self.news.pop_front()
    }

    fn read(&mut self, id: AdapterId, to: Range<usize>, copy: Option<&Transfer>) -> bool {
        if self.sizes.get(&id).is_some_and(|bytes| *bytes > to.len()) {
            self.is_wrong(format!("{id} is larger than its block, which has {} bytes", to.len()));
        }
        self.host[granules(&to)].fill(TORN);
        let (content, fingerprint) = if self.other == 0 { (id.get(), 0) } else { (OTHER, self.other) };
        let copy = copy.filter(|copy| self.number(copy)).cloned();
        let is_copied = copy.is_some();
        self.reads.push(Reading { id, content, fingerprint, to, packed: 0, copy, is_revoked: false, end: None });
        is_copied
    }

    fn copies_parts(&self) -> bool {
        self.copies_parts
    }

    fn revoke(&mut self, copy: &Transfer) -> bool {
        let is_of = |read: &&mut Reading| read.copy.as_ref().is_some_and(|other| other.number == copy.number);
        let Some(read) = self.reads.iter_mut().find(is_of) else { return false };
        read.is_revoked = read.end != Some(true);
        read.is_revoked
    }

    /// The end of the copy has not been told yet.
    fn abandon(&mut self, copy: &Transfer) -> bool {
        self.enqueued[index(copy.number)]
    }

    fn finish(&mut self, copy: &Transfer) {
        if !self.enqueued[index(copy.number)] {
            self.is_wrong(format!("the copy of {} is finished, but not enqueued", copy.id));
        }
    }

    fn copy(&mut self, copy: &Transfer) -> Result<(), LoadError> {
        if !self.number(copy) {
            return Err(SlotError::OtherTable.into());
        }
        self.enqueued[index(copy.number)] = true;
        let Some(transfer) = self.streams.last_mut() else { return Ok(()) };
        transfer.extend([Work::BeginCopy(copy.clone()), Work::EndCopy(copy.clone())]);
        Ok(())
    }

    /// Other streams run, too.
    fn settle(&mut self) {
        while self.streams.last().is_some_and(|transfer| !transfer.is_empty()) {
            for stream in 0..self.streams.len() {
                self.run(stream);
            }
        }
    }

    fn point(&mut self, granted: &[Granted], stream: StreamId) -> Result<(), PoolError> {
        if self.refuses_points {
            return Err(PoolError::Full);
        }
        granted.iter().for_each(|&granted| self.lease(stream, granted));
        Ok(())
    }

    fn may_evict(&mut self) -> bool {
        !self.is_capturing
    }

    fn evict(&mut self, slot: usize) {
        if self.is_capturing {
            self.is_wrong("a slot was emptied during a capture".to_owned());
        }
        let keeps = self.keeps(Obligation::ClearFirst);
        let Some((transfer, lanes)) = self.streams.split_last_mut() else { return };
        for (stream, (lane, pointed)) in lanes.iter_mut().zip(&mut self.pointed).enumerate() {
            if std::mem::take(&mut pointed[slot]) != 0 && keeps {
                let [enqueued, _] = &mut self.clears[stream];
                *enqueued += 1;
                lane.push_back(Work::Clear(slot));
                transfer.push_back(Work::WaitForClear(StreamId(stream), *enqueued));
            }
        }
    }

    fn forget(&mut self, _id: AdapterId) {}
}

/// The place of a copy in a list of all.
fn index(number: u64) -> usize {
    usize::try_from(number).unwrap() - 1
}

/// The granules of a byte range.
fn granules(bytes: &Range<usize>) -> Range<usize> {
    bytes.start / GRANULE_BYTES..bytes.end.div_ceil(GRANULE_BYTES)
}
