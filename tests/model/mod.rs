//! Any calls of the safe API, legal or not, against a model that knows which of them succeed and what each row of a
//! step is.
//!
//! A plain table and an adapter pool with two streams are driven together, and graphs and stacks where the backend has
//! them. Every other pool is that of a group of one rank. All of them have the same model, whose adapters add a number to every
//! output. A [`Device`] is all of this on a backend, as [`machine`] makes it; [`Broken`] breaks one promise of it at a
//! time, to show that the model sees it.
#![allow(dead_code, unreachable_pub, reason = "not every binary breaks promises")]

pub mod combined;
pub mod machine;
pub mod misuse;
pub mod wrong;

use std::{collections::BTreeSet, sync::Arc};

use aril::{
    DType, Slot,
    adapter::{Adapter, SlotImage, Tensor},
    error::{LoadError, OperandError, SlotError},
    group::GroupError,
    model::{LinearId, Model},
    plan::Capacity,
    pool::{AdapterId, Lease, PoolError, Source},
};
use half::bf16;
use proptest::prelude::*;

use crate::common::{adapters, adding};

pub const FEATURES: usize = 256;
/// Slots of each table.
pub const SLOTS: usize = 3;
pub const STREAMS: usize = 2;
/// Adapters that a pool's host tier holds, and the most that are registered.
pub const ADAPTERS: usize = 8;
pub const MAX_TOKENS: usize = 6;
/// The most reservations that are not committed.
pub const PENDING: usize = 2;
/// The most graphs.
const GRAPHS: usize = 4;
pub const MAX_RANK: usize = 8;
/// Size of an adapter: A and B are padded to 8 ranks.
pub const BYTES: usize = 2 * 8 * FEATURES * size_of::<bf16>();
pub const DTYPE: DType = DType::BF16;

pub fn capacity() -> Capacity {
    Capacity::tokens(MAX_TOKENS).slots(SLOTS).rank(MAX_RANK)
}

/// The capacity of a stream's routings: that of the tables, and others.
pub fn routing_capacity(routing: usize) -> Capacity {
    match routing {
        0 => capacity(),
        1 => Capacity::tokens(2 * MAX_TOKENS).slots(SLOTS).rank(MAX_RANK),
        2 => Capacity::tokens(2).slots(SLOTS).rank(MAX_RANK),
        _ => Capacity::tokens(MAX_TOKENS).slots(SLOTS + 2).rank(MAX_RANK),
    }
}

pub fn spec() -> (Model, LinearId) {
    let (model, ids) = adding::model(1, FEATURES);
    (model, ids[0])
}

/// Weights, or a panic of whoever reads them.
struct Weights(Vec<u8>, bool);

impl AsRef<[u8]> for Weights {
    fn as_ref(&self) -> &[u8] {
        assert!(!self.1 || std::thread::current().name().is_none_or(|name| !name.starts_with("aril-")), "on purpose");
        &self.0
    }
}

/// An adapter that adds `value` where x is ones.
fn adapter(rank: usize, value: f32, panics: bool) -> Adapter {
    adapters::owned_by(&adding::modules(1, FEATURES, rank, |_| value), |_, bytes| Weights(bytes, panics))
}

/// The names and tensors of an adapter.
pub type Tensors = Vec<(String, Tensor)>;

/// The tables.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Table {
    Plain,
    /// Of the pool's first stream.
    Pool,
}

/// What starts a step.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    Table(Table),
    Pool(usize),
}

impl Of {
    /// Adapters for which its stack has room.
    pub fn positions(self) -> usize {
        match self {
            Of::Table(Table::Plain) => 1,
            Of::Table(Table::Pool) | Of::Pool(_) => 2,
        }
    }
}

/// Why a step or a replay is refused.
#[derive(Debug, PartialEq)]
pub enum Refused {
    Operand(OperandError),
    /// The step is of another table, routing or workspace than the graph.
    OtherGraph,
    WithoutAdapters,
    OtherStream,
    Other(String),
}

/// What a graph is captured for.
#[derive(Clone, Copy, Debug)]
pub struct Captured {
    pub routing: usize,
    pub tokens: usize,
    pub has_adapters: bool,
    /// Whether its operation is that of a stack.
    pub is_stacked: bool,
    pub beside: Beside,
}

/// What is called while a step is recorded, beside its operation. It has nothing to do with the graph.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Beside {
    Nothing,
    /// The end of a capture of the queue's stream, by cudarc.
    End,
    /// Copies, by cudarc and by the queue.
    Copies,
    /// An allocation, by cudarc.
    Allocation,
    /// Another capture.
    Capture,
}

/// A plain table and a pool on a backend.
pub trait Device {
    type Reservation;
    type Filled;
    type Graph;

    const HAS_GRAPHS: bool;
    /// What a reservation takes beside the adapter.
    const ROW_BYTES: usize;
    /// Routings of a stream.
    const ROUTINGS: usize;

    fn model(&self) -> &Model;
    /// The same tensors in the memory of the device.
    fn tensors(&self, tensors: Tensors) -> Tensors;
    /// Loads; with `panics`, the callback for the progress panics.
    fn load(&mut self, to: Table, slot: usize, image: &SlotImage<'_>, panics: bool) -> Result<Slot, LoadError>;
    /// The parts of a load of the plain table.
    fn reserve(&mut self, image: &SlotImage<'_>) -> Result<Self::Reservation, LoadError>;
    fn fill(&mut self, room: Self::Reservation, image: &SlotImage<'_>, panics: bool)
    -> Result<Self::Filled, LoadError>;
    fn commit_filled(&mut self, to: Table, slot: usize, filled: Self::Filled) -> Result<Slot, LoadError>;
    fn unload(&mut self, from: Table, slot: usize) -> Result<(), LoadError>;
    /// Whether the plain table still has all of these.
    fn check(&self, slots: &[Slot]) -> Result<(), SlotError>;
    /// Slots of another table, and of leases of another pool.
    fn strangers(&self) -> &[Slot];
    /// The bytes that the plain table's arena counts, and those of its slots.
    fn used(&self) -> [usize; 2];
    /// What a step adds to each row, with a stack or without.
    fn step(&mut self, of: Of, routing: usize, slots: &[Slot], is_stacked: bool) -> Result<Vec<f32>, Refused>;
    /// Captures such a step.
    fn capture(&mut self, of: Of, captured: Captured) -> Result<Self::Graph, Refused>;
    /// What a step adds whose only operation is a replay, of a graph with a stack or without.
    fn replay(
        &mut self,
        graph: &mut Self::Graph,
        of: Of,
        routing: usize,
        slots: &[Slot],
        is_stacked: bool,
    ) -> Result<Vec<f32>, Refused>;
    /// Copies a slice that cudarc has allocated on a stream, on the queue of another.
    fn copy(&mut self, of: usize, on: usize) -> Result<(), Refused>;
    /// A step of the plain table while another thread loads.
    fn step_beside(
        &mut self,
        slots: &[Slot],
        to: usize,
        image: &SlotImage<'_>,
    ) -> (Result<Vec<f32>, Refused>, Result<Slot, LoadError>);
    fn register(&mut self, source: Source) -> Result<AdapterId, PoolError>;
    fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError>;
    /// Leases an adapter, once copies have ended and it has been read.
    fn acquire(&mut self, id: AdapterId, stream: usize) -> Result<Lease, PoolError>;
    fn end_step(&mut self, stream: usize) -> Result<(), PoolError>;
    /// If the pool is that of a group, its channel fails from now on. Returns whether it is.
    fn fail_channel(&mut self, how: Fails) -> bool;
    /// Leases that the pool knows of.
    fn leases(&mut self) -> usize;
    /// The bytes that the pool still has on the device and in host memory when all work has ended.
    fn left(&mut self) -> [usize; 2];
    /// Drops the pool, whatever is leased, and makes another, of the other kind.
    fn renew_pool(&mut self);
}

/// What is loaded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Image {
    Good,
    /// Another one, as large, than what room was reserved for.
    Other,
    OtherModel,
    OtherType,
    LargeRank,
    NotFinite,
    /// The callback for the progress panics.
    Panics,
}

/// How the channel of a group fails.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fails {
    Panics,
    /// It returns another message of its own rank.
    Lies,
    /// It returns no message.
    Empty,
}

/// The slot of a row.
#[derive(Clone, Copy, Debug)]
pub enum Row {
    Base,
    /// What the plain table has, or that of a lease of the pool, which may have ended: steps may follow until the next
    /// end of a step.
    Own(usize),
    /// That of a lease on the plain table, or of the plain table in the pool.
    Other(usize),
    /// Of an adapter that the plain table has no longer.
    Outdated(usize),
    /// That of an earlier lease, also of a pool that is gone.
    Ended(usize),
    /// Of another table, or of another pool.
    Stranger(usize),
}

#[derive(Clone, Debug)]
pub enum Call {
    Load(Table, usize, Image),
    Reserve(Image),
    /// The reservations that are not filled, or filled and not committed, are counted from the oldest one.
    Fill(usize, Image),
    CommitFilled(Table, usize, usize),
    DropPending(usize),
    LoadBeside(usize, Vec<Row>),
    Unload(Table, usize),
    /// Of one adapter, or of two that apply together.
    Register {
        panics: bool,
        is_combined: bool,
    },
    Unregister(usize),
    Acquire(usize, usize),
    /// On this thread or on another.
    DropLease(usize, bool),
    EndStep(usize),
    RenewPool,
    FailChannel(Fails),
    /// A lease of a pool that is gone, on this thread or on another.
    DropOrphan(bool),
    /// With a stack or without.
    Step(Of, usize, Vec<Row>, bool),
    Capture(Of, Captured),
    DropGraph(usize),
    Replay(usize, Replay),
    /// The stream of a slice, and that of the queue.
    Copy(usize, usize),
}

/// The step in which a graph is replayed.
#[derive(Clone, Debug)]
pub struct Replay {
    /// That of the graph, if none is given.
    of: Option<(Of, usize)>,
    rows: Vec<Row>,
}

/// Any calls, up to `most`, with those of graphs and streams if the device has them.
pub fn calls(most: usize, has_graphs: bool) -> impl Strategy<Value = Vec<Call>> {
    let table = || prop_oneof![4 => Just(Table::Plain), 2 => Just(Table::Pool)];
    let image = || {
        prop_oneof![
            8 => Just(Image::Good),
            1 => Just(Image::Other),
            1 => Just(Image::OtherModel),
            1 => Just(Image::OtherType),
            1 => Just(Image::LargeRank),
            1 => Just(Image::NotFinite),
            2 => Just(Image::Panics),
        ]
    };
    let slot = || 0..SLOTS + 1;
    let row = prop_oneof![
        4 => Just(Row::Base),
        24 => (0..20_usize).prop_map(Row::Own),
        1 => (0..20_usize).prop_map(Row::Other),
        1 => (0..20_usize).prop_map(Row::Outdated),
        1 => (0..20_usize).prop_map(Row::Ended),
        1 => (0..20_usize).prop_map(Row::Stranger),
    ];
    let rows = || prop::collection::vec(row.clone(), 0..=MAX_TOKENS + 1);
    let of = || {
        prop_oneof![
            2 => table().prop_map(Of::Table),
            6 => (0..STREAMS).prop_map(Of::Pool),
        ]
    };
    let routing = || prop_oneof![6 => Just(0_usize), 1 => 1..4_usize];
    let beside = prop::sample::select(vec![
        Beside::Nothing,
        Beside::Nothing,
        Beside::End,
        Beside::Copies,
        Beside::Allocation,
        Beside::Capture,
    ]);
    let is_stacked = || prop::bool::weighted(if has_graphs { 0.4 } else { 0.0 });
    let captured = (routing(), 1..MAX_TOKENS + 2, prop::bool::weighted(0.8), is_stacked(), beside);
    let captured = captured.prop_map(|(routing, tokens, has_adapters, is_stacked, beside)| Captured {
        routing,
        tokens,
        has_adapters,
        // Without adapters, that operation enqueues nothing.
        is_stacked: is_stacked && has_adapters,
        beside,
    });
    let replay = (prop::option::weighted(0.3, (of(), routing())), rows()).prop_map(|(of, rows)| Replay { of, rows });
    let call = prop_oneof![
        3 => (table(), slot(), image()).prop_map(|(table, slot, image)| Call::Load(table, slot, image)),
        2 => image().prop_map(Call::Reserve),
        3 => (0..PENDING, image()).prop_map(|(pending, image)| Call::Fill(pending, image)),
        3 => (table(), 0..PENDING, slot()).prop_map(|(table, pending, slot)| Call::CommitFilled(table, pending, slot)),
        1 => (0..PENDING).prop_map(Call::DropPending),
        1 => (slot(), rows()).prop_map(|(slot, rows)| Call::LoadBeside(slot, rows)),
        2 => (table(), slot()).prop_map(|(table, slot)| Call::Unload(table, slot)),
        3 => (prop::bool::weighted(0.1), prop::bool::weighted(0.3))
            .prop_map(|(panics, is_combined)| Call::Register { panics, is_combined }),
        1 => (0..20_usize).prop_map(Call::Unregister),
        6 => (0..20_usize, 0..STREAMS).prop_map(|(id, stream)| Call::Acquire(id, stream)),
        4 => (0..20_usize, any::<bool>()).prop_map(|(lease, elsewhere)| Call::DropLease(lease, elsewhere)),
        4 => (0..STREAMS).prop_map(Call::EndStep),
        2 => prop_oneof![
            2 => Just(Call::RenewPool),
            3 => any::<bool>().prop_map(Call::DropOrphan),
            2 => prop::sample::select(vec![Fails::Panics, Fails::Lies, Fails::Empty]).prop_map(Call::FailChannel),
        ],
        10 => (of(), routing(), rows(), is_stacked())
            .prop_map(|(of, routing, rows, is_stacked)| Call::Step(of, routing, rows, is_stacked)),
    ];
    let of_graphs = prop_oneof![
        2 => (of(), captured).prop_map(|(of, captured)| Call::Capture(of, captured)),
        1 => (0..GRAPHS).prop_map(Call::DropGraph),
        5 => (0..GRAPHS, replay).prop_map(|(graph, replay)| Call::Replay(graph, replay)),
        1 => (0..STREAMS, 0..STREAMS).prop_map(|(of, on)| Call::Copy(of, on)),
    ];
    let call = prop_oneof![4 => call, u32::from(has_graphs) => of_graphs];
    prop::collection::vec(call, 1..most)
}

/// An adapter of the pool.
struct Registered {
    id: AdapterId,
    value: f32,
    panics: bool,
    is_gone: bool,
    /// Streams that it was leased for since it was idle, and those of which no step has ended since its last lease did.
    streams: BTreeSet<usize>,
    waits_for: BTreeSet<usize>,
}

/// A lease, and what it stands for.
struct Held {
    adapter: usize,
    slot: Slot,
    stream: usize,
    /// `None` once it has ended. Steps may follow until the next end of a step of its stream.
    lease: Option<Lease>,
}

/// Room that was reserved in the plain table.
enum Room<D: Device> {
    /// For this adapter, whose weights are finite or not, and which adds this number.
    Reserved(D::Reservation, Box<Adapter>, (bool, f32)),
    Filled(D::Filled, f32),
}

/// A graph, and what it was captured for: the pool that it belongs to, if any, is the `pool`th.
struct Recorded<D: Device> {
    graph: D::Graph,
    of: Of,
    pool: usize,
    captured: Captured,
}

/// What must be true of a device after some calls.
pub struct Expected<D: Device> {
    /// Dropped before the device, or after it.
    graphs: Vec<Recorded<D>>,
    pending: Vec<Room<D>>,
    device: D,
    /// Pools so far.
    pools: usize,
    /// Whether the pool's channel fails, and whether a call has said so.
    channel_fails: bool,
    is_over: bool,
    /// Leases of earlier pools.
    orphans: Vec<Lease>,
    other: (Model, Adapter),
    /// The next adapter adds this number.
    next: f32,
    plain: [Option<(Slot, f32)>; SLOTS],
    outdated: Vec<Slot>,
    adapters: Vec<Registered>,
    held: Vec<Held>,
    /// Slots of leases after which a step has ended, and of those of earlier pools.
    ended: Vec<Slot>,
}

type Outcome = Result<(), String>;

/// Fails with a text unless the result matches.
macro_rules! expect {
    ($is_right:expr, $($text:tt)+) => {
        if !$is_right {
            return Err(format!($($text)+));
        }
    };
}

impl<D: Device> Expected<D> {
    pub fn new(device: D) -> Self {
        let other = (spec().0, adapter(8, 1.0, false));
        let plain = [const { None }; SLOTS];
        Self {
            graphs: Vec::new(),
            pending: Vec::new(),
            device,
            pools: 1,
            channel_fails: false,
            is_over: false,
            orphans: Vec::new(),
            other,
            next: 1.0,
            plain,
            outdated: Vec::new(),
            adapters: Vec::new(),
            held: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Makes the calls, each of which must end as it should, and then lets everything end.
    pub fn run(mut self, calls: &[Call]) -> Outcome {
        for call in calls {
            self.call(call).and_then(|()| self.check()).map_err(|wrong| format!("{call:?}: {wrong}"))?;
        }
        self.finish()
    }

    fn number(&mut self) -> f32 {
        self.next += 1.0;
        self.next
    }

    fn call(&mut self, call: &Call) -> Outcome {
        match *call {
            Call::Load(table, slot, image) => self.load(table, slot, image),
            Call::Reserve(image) => self.reserve(image),
            Call::Fill(index, image) => self.fill(index, image),
            Call::CommitFilled(table, index, slot) => self.commit_filled(table, index, slot),
            Call::DropPending(index) => {
                if let Some(index) = of(index, self.pending.len()) {
                    drop(self.pending.remove(index));
                }
                Ok(())
            }
            Call::LoadBeside(slot, ref rows) => self.load_beside(slot % SLOTS, rows),
            Call::Unload(table, slot) => {
                let result = self.device.unload(table, slot);
                match (table, slot < SLOTS) {
                    (Table::Plain, true) => {
                        expect!(result.is_ok(), "{result:?}");
                        self.outdated.extend(self.plain[slot].take().map(|(slot, _)| slot));
                    }
                    (Table::Plain, false) => {
                        expect!(matches!(result, Err(LoadError::Slot(SlotError::NoSuchSlot { .. }))), "{result:?}");
                    }
                    _ => expect!(matches!(result, Err(LoadError::Slot(SlotError::Pooled))), "{result:?}"),
                }
                Ok(())
            }
            Call::Register { panics, is_combined } => {
                if self.adapters.iter().filter(|adapter| !adapter.is_gone).count() < ADAPTERS {
                    let value = self.number();
                    let source = |rank, value, panics| {
                        let adapter = if panics { adapter(rank, value, true) } else { self.adapter(rank, value) };
                        Source::memory(Arc::new(adapter), self.device.model(), DTYPE).unwrap()
                    };
                    let source = if is_combined {
                        let parts = [source(4, value - 1.0, false), source(4, 1.0, panics)];
                        Source::combined(parts.map(|part| (part, 1.0))).unwrap()
                    } else {
                        source(8, value, panics)
                    };
                    let registered = self.device.register(source);
                    let Some(id) = self.unless_over(registered)? else { return Ok(()) };
                    let (streams, waits_for) = (BTreeSet::new(), BTreeSet::new());
                    self.adapters.push(Registered { id, value, panics, is_gone: false, streams, waits_for });
                }
                Ok(())
            }
            Call::Unregister(index) => {
                let Some(index) = of(index, self.adapters.len()) else { return Ok(()) };
                let result = self.device.unregister(self.adapters[index].id);
                let was_gone = std::mem::replace(&mut self.adapters[index].is_gone, true);
                expect!(matches!(result, Err(PoolError::Unknown { .. })) == was_gone, "{result:?}");
                expect!(result.is_ok() != was_gone, "{result:?}");
                Ok(())
            }
            Call::Acquire(index, stream) => self.acquire(index, stream),
            Call::DropLease(index, elsewhere) => {
                let mut leased: Vec<_> = self.held.iter_mut().filter(|held| held.lease.is_some()).collect();
                let Some(index) = of(index, leased.len()) else { return Ok(()) };
                let (lease, adapter) = (leased[index].lease.take(), leased[index].adapter);
                if elsewhere {
                    std::thread::spawn(move || drop(lease)).join().map_err(|_| "the drop of a lease panicked")?;
                } else {
                    drop(lease);
                }
                if !self.is_leased(adapter) {
                    let adapter = &mut self.adapters[adapter];
                    adapter.waits_for = adapter.streams.clone();
                }
                Ok(())
            }
            Call::EndStep(stream) => {
                let ended = self.device.end_step(stream);
                if self.unless_over(ended)?.is_none() {
                    return Ok(());
                }
                let is_over = |held: &mut Held| held.lease.is_none() && held.stream == stream;
                self.ended.extend(self.held.extract_if(.., is_over).map(|held| held.slot));
                self.adapters.iter_mut().for_each(|adapter| adapter.waits_for.retain(|&other| other != stream));
                Ok(())
            }
            Call::RenewPool => {
                self.device.renew_pool();
                self.pools += 1;
                (self.channel_fails, self.is_over) = (false, false);
                self.ended.extend(self.held.iter().map(|held| held.slot));
                self.orphans.extend(self.held.drain(..).filter_map(|held| held.lease));
                for adapter in &mut self.adapters {
                    adapter.is_gone = true;
                    adapter.streams.clear();
                    adapter.waits_for.clear();
                }
                Ok(())
            }
            Call::FailChannel(how) => {
                self.channel_fails |= self.device.fail_channel(how);
                Ok(())
            }
            Call::DropOrphan(elsewhere) => {
                let orphan = self.orphans.pop();
                if elsewhere {
                    std::thread::spawn(move || drop(orphan)).join().map_err(|_| "the drop of a lease panicked")?;
                }
                Ok(())
            }
            Call::Step(of, routing, ref rows, is_stacked) => self.step(of, routing, rows, is_stacked),
            Call::Capture(of, captured) => self.capture(of, captured),
            Call::DropGraph(index) => {
                if let Some(index) = of(index, self.graphs.len()) {
                    drop(self.graphs.remove(index));
                }
                Ok(())
            }
            Call::Replay(index, ref replay) => self.replay(index, replay),
            Call::Copy(of, on) => {
                let result = self.device.copy(of, on);
                let is_right = if of == on { result.is_ok() } else { matches!(result, Err(Refused::OtherStream)) };
                expect!(is_right, "{result:?}");
                Ok(())
            }
        }
    }

    /// An adapter that adds `value` where x is ones. It is in the memory of the device, unless the value is odd.
    fn adapter(&self, rank: usize, value: f32) -> Adapter {
        let (config, tensors) = adapters::parts(1.0, &adding::modules(1, FEATURES, rank, |_| value));
        let tensors = if value % 2.0 == 1.0 { tensors } else { self.device.tensors(tensors) };
        Adapter::from_tensors(&config, tensors).unwrap()
    }

    /// An adapter and what it adds, planned for the model that `image` says.
    fn planned<T>(&mut self, image: Image, call: impl FnOnce(&mut D, &SlotImage<'_>) -> T) -> (T, Adapter, f32) {
        let value = self.number();
        let adapter = match image {
            Image::LargeRank => self.adapter(2 * MAX_RANK, value),
            Image::NotFinite => self.adapter(8, f32::INFINITY),
            _ => self.adapter(8, value),
        };
        let model = self.device.model().clone();
        let planned = match image {
            Image::OtherModel => self.other.1.plan(&self.other.0, DTYPE),
            Image::OtherType => adapter.plan(&model, DType::F16),
            _ => adapter.plan(&model, DTYPE),
        };
        let result = call(&mut self.device, &planned.unwrap());
        (result, adapter, value)
    }

    fn reserve(&mut self, image: Image) -> Outcome {
        if self.pending.len() == PENDING {
            return Ok(());
        }
        let (result, adapter, value) = self.planned(image, |device, image| device.reserve(image));
        match image {
            Image::OtherModel | Image::OtherType | Image::LargeRank => {
                expect!(matches!(result, Err(LoadError::Slot(_))), "the reservation for {image:?} is not refused");
            }
            _ => {
                let reserved = result.map_err(|error| format!("{error:?}"))?;
                self.pending.push(Room::Reserved(reserved, Box::new(adapter), (image != Image::NotFinite, value)));
            }
        }
        Ok(())
    }

    /// Fills a reservation with the adapter that it was made for, or with another one.
    fn fill(&mut self, index: usize, image: Image) -> Outcome {
        let Some(index) = of(index, self.pending.len()) else { return Ok(()) };
        let (room, own, (is_finite, value)) = match self.pending.remove(index) {
            Room::Reserved(room, adapter, number) => (room, adapter, number),
            filled @ Room::Filled(..) => {
                self.pending.insert(index, filled);
                return Ok(());
            }
        };
        let is_own = matches!(image, Image::Good | Image::Panics);
        let result = if is_own {
            let model = self.device.model().clone();
            // Planned again, it is the same.
            self.device.fill(room, &own.plan(&model, DTYPE).unwrap(), image == Image::Panics)
        } else {
            self.planned(image, |device, image| device.fill(room, image, false)).0
        };
        let error = match result {
            Ok(filled) if image == Image::Good && is_finite => {
                self.pending.push(Room::Filled(filled, value));
                return Ok(());
            }
            Ok(_) => return Err(format!("{image:?} was filled")),
            Err(error) => error,
        };
        let is_right = match image {
            Image::Good => !is_finite && matches!(error, LoadError::Adapter(_)),
            Image::Panics => {
                matches!(error, LoadError::Panicked { .. }) || !is_finite && matches!(error, LoadError::Adapter(_))
            }
            Image::Other | Image::NotFinite => matches!(error, LoadError::Slot(SlotError::OtherImage { .. })),
            _ => matches!(error, LoadError::Slot(_)),
        };
        expect!(is_right, "{error:?}");
        Ok(())
    }

    fn commit_filled(&mut self, table: Table, index: usize, slot: usize) -> Outcome {
        let Some(index) = of(index, self.pending.len()) else { return Ok(()) };
        let (filled, value) = match self.pending.remove(index) {
            Room::Filled(filled, value) => (filled, value),
            reserved @ Room::Reserved(..) => {
                self.pending.insert(index, reserved);
                return Ok(());
            }
        };
        let result = self.device.commit_filled(table, slot, filled);
        let place = self.plain.get_mut(slot).filter(|_| table == Table::Plain);
        match place {
            Some(place) => {
                let slot = result.map_err(|error| format!("{error:?}"))?;
                self.outdated.extend(place.replace((slot, value)).map(|(slot, _)| slot));
            }
            None => expect!(matches!(result, Err(LoadError::Slot(_))), "{result:?}"),
        }
        Ok(())
    }

    fn capture(&mut self, of: Of, captured: Captured) -> Outcome {
        let captured = Captured { routing: captured.routing % D::ROUTINGS, ..captured };
        let capacity = routing_capacity(captured.routing);
        let is_right = capacity.num_slots == SLOTS && captured.tokens <= capacity.max_tokens.min(MAX_TOKENS);
        match self.device.capture(of, captured) {
            Ok(graph) => {
                expect!(is_right, "a graph of {captured:?} is not refused");
                if self.graphs.len() == GRAPHS {
                    self.graphs.remove(0);
                }
                self.graphs.push(Recorded { graph, of, pool: self.pools, captured });
            }
            Err(error) => expect!(!is_right, "{error:?}"),
        }
        Ok(())
    }

    fn replay(&mut self, index: usize, replay: &Replay) -> Outcome {
        let Some(index) = of(index, self.graphs.len()) else { return Ok(()) };
        let mut recorded = self.graphs.remove(index);
        let Recorded { of: own, pool, captured, .. } = recorded;
        // The tables of pools start steps in their pools alone.
        let own = match own {
            Of::Table(Table::Pool) => Of::Pool(0),
            own => own,
        };
        let (of, routing) = replay.of.map_or((own, captured.routing), |(of, routing)| (of, routing % D::ROUTINGS));
        let slots = self.slots(of, &replay.rows);
        let result = self.device.replay(&mut recorded.graph, of, routing, &slots, captured.is_stacked);
        self.graphs.insert(index, recorded);
        let is_own = match (of, own) {
            (Of::Pool(stream), Of::Pool(other)) => stream == other && pool == self.pools,
            (Of::Table(Table::Plain), Of::Table(Table::Plain)) => true,
            _ => false,
        };
        let has_adapters = slots.iter().any(|slot| *slot != Slot::BASE);
        let values = match self.rows(of, routing, &slots) {
            Rows::Refused(_) | Rows::Stray(_) => {
                expect!(result.is_err(), "{slots:?}: the step is not refused: {result:?}");
                return Ok(());
            }
            Rows::Are(values) => values,
        };
        match result {
            Ok(added) => {
                expect!(is_own && routing == captured.routing, "a graph is replayed in a step of others: {added:?}");
                expect!(slots.len() <= captured.tokens, "{} tokens are replayed by {captured:?}", slots.len());
                expect!(captured.has_adapters || !has_adapters, "adapters are replayed by {captured:?}");
                expect!(!captured.is_stacked || fits(of, &slots), "the stack has no room for {slots:?}");
                expect!(added == values, "{added:?} instead of {values:?}");
            }
            Err(Refused::Operand(OperandError::Capacity { .. })) => {
                expect!(slots.len() > captured.tokens, "{} tokens do not fit in {captured:?}", slots.len());
            }
            Err(Refused::WithoutAdapters) => expect!(!captured.has_adapters && has_adapters, "{slots:?}, {captured:?}"),
            Err(Refused::Operand(OperandError::NotPlaced)) => {
                expect!(captured.is_stacked && (!is_own || !fits(of, &slots)), "{slots:?} are placed");
            }
            Err(Refused::OtherGraph) => {
                expect!(!is_own || routing != captured.routing, "the step is that of the graph");
            }
            Err(error) => expect!(false, "{error:?}"),
        }
        Ok(())
    }

    fn load(&mut self, table: Table, slot: usize, image: Image) -> Outcome {
        let panics = image == Image::Panics;
        let (result, _, value) = self.planned(image, |device, image| device.load(table, slot, image, panics));
        let place = self.plain.get_mut(slot).filter(|_| table == Table::Plain);
        match (place, image) {
            (Some(place), Image::Good | Image::Other) => {
                let slot = result.map_err(|error| format!("{error:?}"))?;
                self.outdated.extend(place.replace((slot, value)).map(|(slot, _)| slot));
                return Ok(());
            }
            (Some(_), Image::Panics) => expect!(matches!(result, Err(LoadError::Panicked { .. })), "{result:?}"),
            (Some(_), Image::NotFinite) => expect!(matches!(result, Err(LoadError::Adapter(_))), "{result:?}"),
            // Several reasons, of which any is named.
            _ => expect!(matches!(result, Err(LoadError::Slot(_))), "{result:?}"),
        }
        Ok(())
    }

    /// The rows have the adapters that their slots name, or the step is refused for that which is replaced.
    fn load_beside(&mut self, to: usize, rows: &[Row]) -> Outcome {
        let slots: Vec<_> = self.slots(Of::Table(Table::Plain), rows).into_iter().take(MAX_TOKENS).collect();
        let Rows::Are(values) = self.rows(Of::Table(Table::Plain), 0, &slots) else { return Ok(()) };
        let value = self.number();
        let adapter = self.adapter(8, value);
        let model = self.device.model().clone();
        let image = adapter.plan(&model, DTYPE).unwrap();
        let (added, result) = self.device.step_beside(&slots, to, &image);
        let loaded = result.map_err(|error| format!("{error:?}"))?;
        let old = self.plain[to].replace((loaded, value)).map(|(slot, _)| slot);
        self.outdated.extend(old);
        match added {
            Ok(added) => expect!(added == values, "{added:?} instead of {values:?}"),
            Err(Refused::Operand(OperandError::NotLoaded { slot })) => {
                expect!(old == Some(slot) && slots.contains(&slot), "{slot:?} was not replaced");
            }
            Err(error) => expect!(false, "{error:?}"),
        }
        Ok(())
    }

    fn acquire(&mut self, index: usize, stream: usize) -> Outcome {
        let Some(index) = of(index, self.adapters.len()) else { return Ok(()) };
        let is_busy: Vec<_> = (0..self.adapters.len()).map(|adapter| self.is_busy(adapter)).collect();
        let mut result = self.device.acquire(self.adapters[index].id, stream);
        if self.channel_fails {
            result = match result {
                // Another answer says nothing of the channel, or of why the adapter is not there.
                Err(error) if !matches!(error, PoolError::Load(_)) && !self.is_over => return Ok(()),
                result => match self.unless_over(result)? {
                    Some(lease) => Ok(lease),
                    None => return Ok(()),
                },
            };
        }
        let adapter = &self.adapters[index];
        let others = is_busy.iter().enumerate().filter(|&(other, is_busy)| other != index && *is_busy).count();
        if adapter.is_gone {
            expect!(matches!(result, Err(PoolError::Unknown { .. })), "{result:?}");
        } else if adapter.panics {
            let is_full = matches!(result, Err(PoolError::Full)) && others == SLOTS;
            expect!(is_full || matches!(result, Err(PoolError::Failed { .. })), "{result:?}");
        } else if !is_busy[index] && others == SLOTS {
            expect!(matches!(result, Err(PoolError::Full)), "{result:?}");
        } else {
            let lease = result.map_err(|error| format!("{error:?}"))?;
            let is_own = |held: &Held| {
                let is_same = held.adapter == index;
                is_same == (held.slot == lease.slot()) && is_same == (held.slot.index() == lease.slot().index())
            };
            expect!(self.held.iter().all(is_own), "{} is that of another adapter", lease.slot());
            let adapter = &mut self.adapters[index];
            if !is_busy[index] {
                adapter.streams.clear();
            }
            adapter.streams.insert(stream);
            self.held.push(Held { adapter: index, slot: lease.slot(), stream, lease: Some(lease) });
        }
        Ok(())
    }

    /// What a call of the pool returned; `None` if the ranks of its group cannot agree any more. From then on, they
    /// cannot.
    fn unless_over<T: std::fmt::Debug>(&mut self, result: Result<T, PoolError>) -> Result<Option<T>, String> {
        match result {
            Err(PoolError::Load(LoadError::Group(error))) if self.channel_fails => {
                self.is_over = true;
                expect!(matches!(*error, GroupError::Channel(_)), "{error:?}");
                Ok(None)
            }
            Ok(value) if !self.is_over => Ok(Some(value)),
            result => Err(format!("the pool is over: {}, but {result:?}", self.is_over)),
        }
    }

    fn step(&mut self, of: Of, routing: usize, rows: &[Row], is_stacked: bool) -> Outcome {
        let (slots, routing) = (self.slots(of, rows), routing % D::ROUTINGS);
        let result = self.device.step(of, routing, &slots, is_stacked);
        match self.rows(of, routing, &slots) {
            Rows::Refused(is_too_long) => {
                expect!(result.is_err(), "the step of {slots:?} is not refused: {result:?}");
                let is_named = matches!(result, Err(Refused::Operand(OperandError::Capacity { .. })));
                expect!(!is_too_long || is_named, "{result:?}");
            }
            Rows::Stray(strays) => {
                let Err(Refused::Operand(error)) = &result else { return Err(format!("{strays:?}: {result:?}")) };
                let named = match (of, error) {
                    (_, OperandError::NoSuchSlot { slot, .. }) => {
                        slot.index().is_some_and(|index| index >= SLOTS).then_some(slot)
                    }
                    (Of::Table(_), OperandError::NotLoaded { slot }) => Some(slot),
                    (Of::Pool(_), OperandError::NotLeased { slot }) => Some(slot),
                    _ => None,
                };
                expect!(named.is_some_and(|named| strays.contains(named)), "{strays:?}: {error:?}");
            }
            Rows::Are(_) if is_stacked && !fits(of, &slots) => {
                expect!(matches!(result, Err(Refused::Operand(OperandError::NotPlaced))), "{result:?}");
            }
            Rows::Are(values) => expect!(result.as_ref() == Ok(&values), "{result:?} instead of {values:?}"),
        }
        Ok(())
    }

    /// What the rows of a step must be.
    fn rows(&self, of: Of, routing: usize, slots: &[Slot]) -> Rows {
        let of_lease = |stream: usize, slot: Slot| {
            let held = self.held.iter().find(|held| (held.stream, held.slot) == (stream, slot));
            held.map(|held| self.adapters[held.adapter].value)
        };
        // What a row is; `None` where the step is refused for it.
        let value = |slot: Slot| match of {
            _ if slot == Slot::BASE => Some(0.0),
            Of::Table(_) => self.plain.iter().flatten().find(|(loaded, _)| *loaded == slot).map(|(_, value)| *value),
            Of::Pool(stream) => of_lease(stream, slot),
        };
        let (is_pooled, capacity) = (matches!(of, Of::Table(Table::Pool)), routing_capacity(routing));
        let strays: Vec<_> = slots.iter().copied().filter(|&slot| value(slot).is_none()).collect();
        if is_pooled || capacity.num_slots != SLOTS {
            Rows::Refused(false)
        } else if slots.len() > MAX_TOKENS.min(capacity.max_tokens) {
            Rows::Refused(routing == 0 && strays.is_empty())
        } else if strays.is_empty() {
            Rows::Are(slots.iter().filter_map(|&slot| value(slot)).collect())
        } else {
            Rows::Stray(strays)
        }
    }

    fn slots(&self, of_step: Of, rows: &[Row]) -> Vec<Slot> {
        let loaded: Vec<_> = self.plain.iter().flatten().map(|(slot, _)| *slot).collect();
        let leased: Vec<_> = self.held.iter().map(|held| held.slot).collect();
        let (own, other) = match of_step {
            Of::Table(_) => (&loaded, &leased),
            Of::Pool(_) => (&leased, &loaded),
        };
        let any = |slots: &[Slot], index| of(index, slots.len()).map_or(Slot::BASE, |index| slots[index]);
        let slot = |row: &Row| match *row {
            Row::Base => Slot::BASE,
            Row::Own(index) => any(own, index),
            Row::Other(index) => any(other, index),
            Row::Outdated(index) => any(&self.outdated, index),
            Row::Ended(index) => any(&self.ended, index),
            Row::Stranger(index) => any(self.device.strangers(), index),
        };
        rows.iter().map(slot).collect()
    }

    fn is_leased(&self, adapter: usize) -> bool {
        self.held.iter().any(|held| held.adapter == adapter && held.lease.is_some())
    }

    /// Whether an adapter's slot may not be overwritten.
    fn is_busy(&self, adapter: usize) -> bool {
        self.is_leased(adapter) || !self.adapters[adapter].waits_for.is_empty()
    }

    fn check(&mut self) -> Outcome {
        let loaded: Vec<_> = self.plain.iter().flatten().map(|(slot, _)| *slot).collect();
        expect!(self.device.check(&loaded).is_ok(), "an adapter is gone");
        let mut stale = self.outdated.iter().chain(self.device.strangers());
        let stale = stale.find(|slot| self.device.check(&[**slot]).is_ok());
        expect!(stale.is_none(), "{stale:?} is there");
        let [used, in_slots] = self.device.used();
        let pending = self.pending.len() * (BYTES + D::ROW_BYTES);
        let expected = loaded.len() * BYTES;
        expect!((used, in_slots) == (expected + pending, expected), "{used} bytes, of which {in_slots} are loaded");
        Ok(())
    }

    /// Ends all leases, and then no memory is in use.
    fn finish(mut self) -> Outcome {
        let leases = self.held.iter().filter(|held| held.lease.is_some()).count();
        let known = self.device.leases();
        expect!(known == leases, "{known} leases of {leases}");
        self.held.clear();
        for adapter in self.adapters.iter().filter(|adapter| !adapter.is_gone) {
            self.device.unregister(adapter.id).map_err(|error| error.to_string())?;
        }
        let ended: Result<Vec<_>, _> = (0..STREAMS).map(|stream| self.device.end_step(stream)).collect();
        if self.unless_over(ended)?.is_none() || self.channel_fails {
            // What is under way does not end.
            return Ok(());
        }
        let left = self.device.left();
        expect!(left == [0; 2], "{left:?} are left");
        Ok(())
    }
}

/// The rows of a step.
enum Rows {
    /// There are none: the step is refused, for its length alone if this says so.
    Refused(bool),
    /// Nor here: it is refused for one of these slots, by its name.
    Stray(Vec<Slot>),
    Are(Vec<f32>),
}

/// Whether the stack has room for the adapters.
fn fits(of: Of, slots: &[Slot]) -> bool {
    slots.iter().filter(|slot| **slot != Slot::BASE).collect::<BTreeSet<_>>().len() <= of.positions()
}

/// An index into a list of this length.
fn of(index: usize, len: usize) -> Option<usize> {
    (len > 0).then(|| index % len)
}

/// A promise of the API.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Promise {
    /// A step refuses what it may not use.
    RefusesSteps,
    /// It refuses the slots of others, of adapters that are gone and of leases that have ended, and does not take what
    /// is there now.
    RefusesSlots,
    /// Room is for the adapter that it was reserved for.
    OwnRoom,
    /// A replay refuses what it may not use.
    RefusesReplays,
    /// A row is its own token's.
    OwnRow,
    /// A stack refuses a batch for which it has no room.
    RefusesStacks,
    /// An adapter that was replaced or unloaded is gone.
    Unloads,
    /// A load that panics or fails changes nothing.
    LoadsWhole,
    /// A pool's table belongs to the pool.
    Owner,
    /// A lease keeps its slot on every stream until a step of that stream ends.
    EveryStream,
    /// An adapter that is unregistered cannot be leased again.
    Unregisters,
    /// A graph has the operations of its step, whatever is called beside them.
    CapturesAlone,
    /// The memory of a stream is used on no other.
    OwnStream,
}

pub const PROMISES: [Promise; 13] = [
    Promise::RefusesSteps,
    Promise::RefusesSlots,
    Promise::OwnRoom,
    Promise::RefusesReplays,
    Promise::OwnRow,
    Promise::RefusesStacks,
    Promise::Unloads,
    Promise::LoadsWhole,
    Promise::Owner,
    Promise::EveryStream,
    Promise::Unregisters,
    Promise::CapturesAlone,
    Promise::OwnStream,
];

/// The promises of devices without graphs, stacks and streams.
pub fn promises_without_graphs() -> impl Iterator<Item = Promise> {
    let of_graphs = [Promise::RefusesReplays, Promise::RefusesStacks, Promise::CapturesAlone, Promise::OwnStream];
    PROMISES.into_iter().filter(move |promise| !of_graphs.contains(promise))
}

/// A device that breaks a promise.
pub struct Broken<D> {
    pub device: D,
    pub promise: Promise,
}

impl<D: Device> Broken<D> {
    fn breaks(&self, promise: Promise) -> bool {
        self.promise == promise
    }
}

impl<D: Device> Device for Broken<D> {
    type Reservation = D::Reservation;
    type Filled = D::Filled;
    type Graph = D::Graph;

    const HAS_GRAPHS: bool = D::HAS_GRAPHS;
    const ROW_BYTES: usize = D::ROW_BYTES;
    const ROUTINGS: usize = D::ROUTINGS;

    fn model(&self) -> &Model {
        self.device.model()
    }

    fn tensors(&self, tensors: Tensors) -> Tensors {
        self.device.tensors(tensors)
    }

    fn load(&mut self, to: Table, slot: usize, image: &SlotImage<'_>, panics: bool) -> Result<Slot, LoadError> {
        let to = if self.breaks(Promise::Owner) { Table::Plain } else { to };
        let result = self.device.load(to, slot, image, panics);
        if result.is_err() && self.breaks(Promise::LoadsWhole) {
            // The slot is emptied, or there is none.
            let _ = self.device.unload(to, slot);
        }
        result
    }

    fn reserve(&mut self, image: &SlotImage<'_>) -> Result<D::Reservation, LoadError> {
        self.device.reserve(image)
    }

    fn fill(&mut self, room: D::Reservation, image: &SlotImage<'_>, panics: bool) -> Result<D::Filled, LoadError> {
        if self.breaks(Promise::OwnRoom) {
            drop(room);
            let room = self.device.reserve(image)?;
            return self.device.fill(room, image, panics);
        }
        self.device.fill(room, image, panics)
    }

    fn commit_filled(&mut self, to: Table, slot: usize, filled: D::Filled) -> Result<Slot, LoadError> {
        self.device.commit_filled(to, slot, filled)
    }

    fn unload(&mut self, from: Table, slot: usize) -> Result<(), LoadError> {
        if self.breaks(Promise::Unloads) && from == Table::Plain && slot < SLOTS {
            return Ok(());
        }
        self.device.unload(from, slot)
    }

    fn check(&self, slots: &[Slot]) -> Result<(), SlotError> {
        self.device.check(slots)
    }

    fn strangers(&self) -> &[Slot] {
        self.device.strangers()
    }

    fn used(&self) -> [usize; 2] {
        self.device.used()
    }

    fn step(&mut self, of: Of, routing: usize, slots: &[Slot], is_stacked: bool) -> Result<Vec<f32>, Refused> {
        let result = self.device.step(of, routing, slots, is_stacked);
        match result {
            Err(Refused::Operand(OperandError::NotPlaced)) if self.breaks(Promise::RefusesStacks) => {
                Ok(vec![0.0; slots.len()])
            }
            Err(_) if self.breaks(Promise::RefusesSteps) => Ok(vec![0.0; slots.len()]),
            Err(Refused::Operand(OperandError::NotLoaded { .. } | OperandError::NotLeased { .. }))
                if self.breaks(Promise::RefusesSlots) =>
            {
                Ok(vec![0.0; slots.len()])
            }
            Ok(mut added) if self.breaks(Promise::OwnRow) => {
                added.reverse();
                Ok(added)
            }
            result => result,
        }
    }

    fn capture(&mut self, of: Of, captured: Captured) -> Result<D::Graph, Refused> {
        if captured.beside == Beside::End && self.breaks(Promise::CapturesAlone) {
            return Err(Refused::Other("the capture has ended".to_owned()));
        }
        self.device.capture(of, captured)
    }

    fn copy(&mut self, of: usize, on: usize) -> Result<(), Refused> {
        if self.breaks(Promise::OwnStream) { Ok(()) } else { self.device.copy(of, on) }
    }

    fn replay(
        &mut self,
        graph: &mut D::Graph,
        of: Of,
        routing: usize,
        slots: &[Slot],
        is_stacked: bool,
    ) -> Result<Vec<f32>, Refused> {
        let result = self.device.replay(graph, of, routing, slots, is_stacked);
        let is_refused = matches!(result, Err(Refused::OtherGraph | Refused::WithoutAdapters));
        if is_refused && self.breaks(Promise::RefusesReplays) { Ok(vec![0.0; slots.len()]) } else { result }
    }

    fn step_beside(
        &mut self,
        slots: &[Slot],
        to: usize,
        image: &SlotImage<'_>,
    ) -> (Result<Vec<f32>, Refused>, Result<Slot, LoadError>) {
        self.device.step_beside(slots, to, image)
    }

    fn register(&mut self, source: Source) -> Result<AdapterId, PoolError> {
        self.device.register(source)
    }

    fn fail_channel(&mut self, how: Fails) -> bool {
        self.device.fail_channel(how)
    }

    fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
        if self.breaks(Promise::Unregisters) {
            return Ok(());
        }
        self.device.unregister(id)
    }

    fn acquire(&mut self, id: AdapterId, stream: usize) -> Result<Lease, PoolError> {
        self.device.acquire(id, stream)
    }

    fn end_step(&mut self, stream: usize) -> Result<(), PoolError> {
        if self.breaks(Promise::EveryStream) {
            (0..STREAMS).try_for_each(|stream| self.device.end_step(stream))?;
        }
        self.device.end_step(stream)
    }

    fn leases(&mut self) -> usize {
        self.device.leases()
    }

    fn left(&mut self) -> [usize; 2] {
        self.device.left()
    }

    fn renew_pool(&mut self) {
        self.device.renew_pool();
    }
}
