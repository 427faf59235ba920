//! A device for tests: streams whose work runs in any legal order, and memory that knows whose bytes it has.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::VecDeque, ops::Range};

use crate::{
    blocks::GRANULE_BYTES,
    error::{LoadError, SlotError},
    pool::{
        AdapterId, StreamId,
        core::Granted,
        transfer::{Copy, Transfer},
    },
};

/// What a granule has while it is written.
const TORN: u64 = u64::MAX;

/// Obligations of a backend, to break on purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Obligation {
    /// The stream of a lease waits for the copy.
    CopyFirst,
    /// Every stream has its own row of descriptors of a slot.
    RowOfStream,
    /// The row of an adapter that was evicted is emptied, and a copy waits for it.
    ClearFirst,
}

/// Work in a stream.
#[derive(Clone, Debug)]
enum Work {
    WaitForCopy(u64),
    /// Waits until a stream has emptied this many rows.
    WaitForClear(StreamId, usize),
    BeginCopy(Copy),
    EndCopy(Copy),
    /// Points the slot's row of this stream to a block, which has this adapter.
    Flip(usize, Range<usize>, AdapterId),
    /// Empties the slot's row of this stream.
    Clear(usize),
    /// Reads the slot, which must have this adapter.
    Kernel(usize, AdapterId),
    /// Reads the slot without a lease: the adapter that the row points to, or none.
    StaleKernel(usize),
}

/// The block that a row points to, and its adapter.
type Row = (Range<usize>, AdapterId);

pub(super) struct World {
    /// The compute streams, then the transfer stream.
    streams: Vec<VecDeque<Work>>,
    /// Reads that have not ended.
    reads: Vec<(AdapterId, Range<usize>)>,
    device: Vec<u64>,
    host: Vec<u64>,
    /// By stream and slot.
    rows: Vec<Vec<Option<Row>>>,
    /// By stream and slot: whether steps may use it.
    pub(super) open: Vec<Vec<bool>>,
    /// By stream: rows that were to be emptied, and that have been.
    clears: Vec<[usize; 2]>,
    /// By stream and slot: the copy that was enqueued last for the row.
    flipped: Vec<Vec<u64>>,
    copies: Vec<Copy>,
    /// Whether a copy has run, by number from 1.
    copied: Vec<bool>,
    /// Copies that have run, for the pool to notice.
    pub(super) news: Vec<u64>,
    pub(super) broken: Option<Obligation>,
    /// Whether a stream is being captured, so that no slot can be emptied.
    pub(super) is_capturing: bool,
    /// Whether copies cannot be enqueued.
    pub(super) refuses_copies: bool,
    /// The first wrong read.
    pub(super) wrong: Option<String>,
}

impl World {
    pub(super) fn new(streams: usize, slots: usize, device_granules: usize, host_granules: usize) -> Self {
        Self {
            streams: vec![VecDeque::new(); streams + 1],
            reads: Vec::new(),
            device: vec![0; device_granules],
            host: vec![0; host_granules],
            rows: vec![vec![None; slots]; streams],
            open: vec![vec![false; slots]; streams],
            clears: vec![[0; 2]; streams],
            flipped: vec![vec![0; slots]; streams],
            copies: Vec::new(),
            copied: Vec::new(),
            news: Vec::new(),
            broken: None,
            is_capturing: false,
            refuses_copies: false,
            wrong: None,
        }
    }

    pub(super) fn num_streams(&self) -> usize {
        self.rows.len()
    }

    /// Enqueues what a lease needs.
    pub(super) fn lease(&mut self, stream: StreamId, granted: Granted) {
        let Granted { slot, number, .. } = granted;
        self.open[stream.0][slot] = true;
        if self.flipped[stream.0][slot] == number {
            return;
        }
        let row = if self.keeps(Obligation::RowOfStream) { stream.0 } else { 0 };
        self.flipped[row][slot] = number;
        let copy = &self.copies[usize::try_from(number).unwrap() - 1];
        let flip = Work::Flip(slot, granules(&copy.to), copy.id);
        if self.keeps(Obligation::CopyFirst) {
            self.streams[stream.0].push_back(Work::WaitForCopy(number));
        }
        self.streams[stream.0].push_back(flip);
    }

    pub(super) fn launch(&mut self, stream: StreamId, slot: usize, id: AdapterId) {
        self.streams[stream.0].push_back(Work::Kernel(slot, id));
    }

    pub(super) fn launch_without_lease(&mut self, stream: StreamId, slot: usize) {
        self.streams[stream.0].push_back(Work::StaleKernel(slot));
    }

    /// The reads that have not ended.
    pub(super) fn num_reads(&self) -> usize {
        self.reads.len()
    }

    /// Ends a read.
    pub(super) fn end_read(&mut self, read: usize, is_good: bool) -> (AdapterId, usize) {
        let (id, to) = self.reads.swap_remove(read);
        if is_good {
            self.host[granules(&to)].fill(id.get());
        }
        (id, to.len())
    }

    /// Runs the next work of a stream, unless it must wait. Returns whether it ran.
    pub(super) fn run(&mut self, stream: usize) -> bool {
        let may_run = match self.streams[stream].front() {
            None => false,
            Some(Work::WaitForCopy(number)) => self.copied[usize::try_from(*number).unwrap() - 1],
            Some(Work::WaitForClear(stream, number)) => self.clears[stream.0][1] >= *number,
            Some(_) => true,
        };
        if !may_run {
            return false;
        }
        match self.streams[stream].pop_front() {
            None | Some(Work::WaitForCopy(_) | Work::WaitForClear(..)) => {}
            Some(Work::Flip(slot, range, id)) => self.rows[stream][slot] = Some((range, id)),
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
                self.expect(copy.id, &found, "a copy");
                self.device[granules(&copy.to)].fill(TORN);
            }
            Some(Work::EndCopy(copy)) => {
                let found = self.host[granules(&copy.from)].to_vec();
                self.expect(copy.id, &found, "a copy");
                self.device[granules(&copy.to)].fill(copy.id.get());
                self.copied[usize::try_from(copy.number).unwrap() - 1] = true;
                self.news.push(copy.number);
            }
        }
        true
    }

    fn expect(&mut self, id: AdapterId, found: &[u64], who: &str) {
        if found.is_empty() || found.iter().any(|&found| found != id.get()) {
            self.wrong.get_or_insert_with(|| format!("{who} of {id} read {found:?}"));
        }
    }

    fn keeps(&self, obligation: Obligation) -> bool {
        self.broken != Some(obligation)
    }
}

impl Transfer for World {
    fn read(&mut self, id: AdapterId, to: Range<usize>) {
        self.host[granules(&to)].fill(TORN);
        self.reads.push((id, to));
    }

    fn copy(&mut self, copy: &Copy) -> Result<(), LoadError> {
        assert_eq!(usize::try_from(copy.number).unwrap(), self.copies.len() + 1, "copies are numbered");
        self.copies.push(copy.clone());
        self.copied.push(false);
        if self.refuses_copies {
            return Err(SlotError::OtherTable.into());
        }
        let Some(transfer) = self.streams.last_mut() else { return Ok(()) };
        transfer.extend([Work::BeginCopy(copy.clone()), Work::EndCopy(copy.clone())]);
        Ok(())
    }

    fn close(&mut self, slot: usize, stream: StreamId) {
        self.open[stream.0][slot] = false;
    }

    fn may_evict(&self) -> bool {
        !self.is_capturing
    }

    fn evict(&mut self, slot: usize) {
        assert!(!self.is_capturing, "a slot was emptied during a capture");
        let keeps = self.keeps(Obligation::ClearFirst);
        let Some((transfer, lanes)) = self.streams.split_last_mut() else { return };
        for (stream, (lane, flipped)) in lanes.iter_mut().zip(&mut self.flipped).enumerate() {
            if std::mem::take(&mut flipped[slot]) != 0 && keeps {
                let [enqueued, _] = &mut self.clears[stream];
                *enqueued += 1;
                lane.push_back(Work::Clear(slot));
                transfer.push_back(Work::WaitForClear(StreamId(stream), *enqueued));
            }
        }
    }

    fn forget(&mut self, _id: AdapterId) {}
}

/// The granules of a byte range.
fn granules(bytes: &Range<usize>) -> Range<usize> {
    bytes.start / GRANULE_BYTES..bytes.end.div_ceil(GRANULE_BYTES)
}
