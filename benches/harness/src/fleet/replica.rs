use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use aril::pool::{AdapterId, Lease, PoolConfig, SimulatedPool, StreamId, Tier, Work};
use aril_serving::admission::{Admission, Answer, Limits, Request as Waiting};

use super::Settings;
use crate::{
    Result,
    serving::{Adapter, Hardware, Request, Room, Server, Time},
};

/// Size of an adapter in a simulated pool. All have the same, and only the number that fits matters.
const BYTES: usize = 256;

/// A replica's pool and admission, which are the library's, used as `aril-serve` uses them.
#[derive(Debug)]
pub struct Replica {
    hardware: Hardware,
    ahead: usize,
    pool: SimulatedPool,
    admission: Admission<usize, AdapterId>,
    /// The adapters that requests have named. An engine registers them when they are first named.
    ids: HashMap<Adapter, AdapterId>,
    adapters: HashMap<AdapterId, Adapter>,
    /// The requests that have arrived and not ended.
    requests: BTreeMap<usize, Request>,
    leases: HashMap<usize, Lease>,
    /// Reads and copies: their beginnings and their ends.
    work: Vec<(Time, Time, Work)>,
    link_is_free: Time,
    disk_is_free: Time,
}

impl Replica {
    pub fn new(settings: &Settings) -> Result<Self> {
        let Settings { hardware, ahead, max_wait_ms, .. } = *settings;
        let config = PoolConfig::arena_bytes(hardware.slots * BYTES).host_bytes(hardware.host_adapters * BYTES);
        let limits = Limits::new(hardware.slots - ahead, Duration::from_millis(max_wait_ms));
        Ok(Self {
            hardware,
            ahead,
            pool: SimulatedPool::new(hardware.slots, config)?,
            admission: Admission::new(limits),
            ids: HashMap::new(),
            adapters: HashMap::new(),
            requests: BTreeMap::new(),
            leases: HashMap::new(),
            work: Vec::new(),
            link_is_free: 0,
            disk_is_free: 0,
        })
    }

    /// The fastest tier that an adapter is in.
    pub fn tier(&self, adapter: Adapter) -> Tier {
        let residency = self.ids.get(&adapter).and_then(|id| self.pool.residency(*id));
        residency.map_or(Tier::Source, |residency| residency.tier)
    }

    /// The adapters on the device and in host memory.
    pub fn report(&self) -> Vec<(Adapter, Tier)> {
        let all = self.pool.residencies().into_iter().filter(|residency| residency.tier != Tier::Source);
        all.map(|residency| (self.adapters[&residency.id], residency.tier)).collect()
    }

    /// Reads from the disk, and copies to the device, so far.
    pub fn loads(&self) -> [u64; 2] {
        let counters = self.pool.snapshot().counters;
        [counters.reads, counters.copies]
    }

    /// The requests that have arrived and not ended.
    pub fn requests(&self) -> impl Iterator<Item = usize> {
        self.requests.keys().copied()
    }

    /// Begins what the pool has started.
    fn begin_work(&mut self, now: Time) {
        while let Some(work) = self.pool.next_work() {
            let is_copied = matches!(work, Work::Copy { .. } | Work::Read { is_copied: true, .. });
            let mut end = now;
            if let Work::Read { .. } = work {
                self.disk_is_free = self.disk_is_free.max(now) + self.hardware.read_us;
                end = self.disk_is_free;
            }
            if is_copied {
                self.link_is_free = self.link_is_free.max(now) + self.hardware.copy_us;
                end = end.max(self.link_is_free);
            }
            self.work.push((now, end, work));
        }
    }
}

impl Server for Replica {
    fn arrive(&mut self, number: usize, request: &Request) {
        let Self { pool, ids, adapters, .. } = self;
        let id = *ids.entry(request.adapter).or_insert_with(|| {
            let id = pool.register(BYTES).expect("an adapter fits");
            adapters.insert(id, request.adapter);
            id
        });
        let arrival = Duration::from_micros(request.arrival);
        self.admission.enqueue(Waiting::new(number, id, BYTES, arrival)).expect("requests are numbered");
        self.requests.insert(number, *request);
    }

    fn advance(&mut self, now: Time) {
        while let Some(next) =
            (0..self.work.len()).filter(|at| self.work[*at].1 <= now).min_by_key(|at| self.work[*at].1)
        {
            let (begin, end, work) = self.work.remove(next);
            self.pool.end(work, Duration::from_micros(end - begin)).expect("the work is the pool's");
            self.begin_work(now);
        }
    }

    fn admit(&mut self, now: Time, room: &mut Room) -> Vec<usize> {
        let mut started = Vec::new();
        if self.admission.num_waiting() == 0 {
            return started;
        }
        for id in self.admission.prefetch().take(self.ahead) {
            self.pool.prefetch(id).expect("no adapter is unregistered, and no load fails");
        }
        let Self { admission, pool, requests, leases, .. } = self;
        admission.admit(Duration::from_micros(now), |waiting| {
            if !room.is_left() {
                return Answer::Stop;
            }
            let id = waiting.adapter.expect("no request is for the base model");
            let Ok(lease) = pool.acquire(id, StreamId::FIRST) else { return Answer::Skip };
            room.take(&requests[&waiting.id]);
            leases.insert(waiting.id, lease);
            started.push(waiting.id);
            Answer::Take
        });
        self.begin_work(now);
        started
    }

    fn is_ready(&self, adapter: Adapter, now: Time) -> bool {
        let id = self.ids[&adapter];
        self.work
            .iter()
            .all(|(_, end, work)| !matches!(work, Work::Copy { id: copied, .. } if *copied == id) || *end <= now)
    }

    fn next_ready(&self, now: Time) -> Option<Time> {
        self.work.iter().map(|(_, end, _)| *end).filter(|end| *end > now).min()
    }

    fn finish(&mut self, number: usize, _: Adapter) {
        self.admission.finish(&number).expect("the request runs");
        self.requests.remove(&number);
        self.leases.remove(&number);
    }

    fn end_step(&mut self) {
        self.pool.end_step(StreamId::FIRST).expect("every pool has its first stream");
    }
}
