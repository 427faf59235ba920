//! Routers: which replica a request goes to.

use std::collections::{BTreeMap, HashMap};

use aril::pool::Tier;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use crate::serving::Adapter;

/// Chooses a replica for each request. `loads` has the requests of each replica that have not ended, and `None` for one that has left.
pub trait Router {
    /// The replica of a request.
    fn place(&mut self, adapter: Adapter, loads: &[Option<usize>]) -> usize;

    /// A request has ended.
    fn finish(&mut self, _adapter: Adapter, _replica: usize) {}

    /// A replica reports the adapters on its device and in its host memory.
    fn report(&mut self, _replica: usize, _adapters: &[(Adapter, Tier)]) {}

    /// A replica has left.
    fn leave(&mut self, _replica: usize) {}

    /// The router starts anew. It is not told of the ends of earlier requests.
    fn restart(&mut self) {}
}

/// The replicas that have not left, with their loads.
fn up(loads: &[Option<usize>]) -> impl Iterator<Item = (usize, usize)> + Clone {
    loads.iter().enumerate().filter_map(|(replica, load)| Some((replica, (*load)?)))
}

/// Mixes a key and a number (the finalizer of SplitMix64).
fn hash(key: u32, number: usize) -> u64 {
    let mix = |value: u64, shift: u32, factor: u64| (value ^ (value >> shift)).wrapping_mul(factor);
    let value = (u64::from(key) << 32 | number as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = mix(mix(value, 30, 0xbf58_476d_1ce4_e5b9), 27, 0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Any replica.
#[derive(Debug)]
pub struct Random(StdRng);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }
}

impl Router for Random {
    fn place(&mut self, _: Adapter, loads: &[Option<usize>]) -> usize {
        let nth = self.0.random_range(0..up(loads).count());
        up(loads).nth(nth).expect("the number is below the count").0
    }
}

/// The replicas in turn.
#[derive(Debug, Default)]
pub struct RoundRobin(usize);

impl Router for RoundRobin {
    fn place(&mut self, _: Adapter, loads: &[Option<usize>]) -> usize {
        self.0 += 1;
        up(loads).nth(self.0 % up(loads).count()).expect("the number is below the count").0
    }
}

/// The replica with the fewest requests.
#[derive(Debug)]
pub struct LeastLoaded;

impl Router for LeastLoaded {
    fn place(&mut self, adapter: Adapter, loads: &[Option<usize>]) -> usize {
        up(loads).min_by_key(|&(replica, load)| (load, hash(adapter, replica))).expect("a replica is up").0
    }
}

/// The hash of the adapter, modulo the number of replicas.
#[derive(Debug)]
pub struct Modulo;

impl Router for Modulo {
    #[expect(clippy::cast_possible_truncation, reason = "a hash")]
    fn place(&mut self, adapter: Adapter, loads: &[Option<usize>]) -> usize {
        let nth = hash(adapter, 0) as usize % up(loads).count();
        up(loads).nth(nth).expect("the number is below the count").0
    }
}

/// A ring of points, 100 for each replica: the first one behind the hash of the adapter whose replica is up.
///
/// With a bound, replicas are passed over that have more than `bound` times the mean of the requests (Mirrokni, Thorup and Zadimoghaddam,
/// *Consistent Hashing with Bounded Loads*, arXiv 1608.01350).
#[derive(Debug)]
pub struct Ring {
    points: BTreeMap<u64, usize>,
    bound: Option<f64>,
}

impl Ring {
    pub fn new(replicas: usize, bound: Option<f64>) -> Self {
        let points = (0..replicas).flat_map(|replica| (0..100).map(move |point| (hash(point, replica + 1), replica)));
        Self { points: points.collect(), bound }
    }
}

impl Router for Ring {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of requests")]
    fn place(&mut self, adapter: Adapter, loads: &[Option<usize>]) -> usize {
        let (replicas, requests) = up(loads).fold((0, 1), |(replicas, sum), (_, load)| (replicas + 1, sum + load));
        let max = self.bound.map_or(usize::MAX, |bound| (bound * requests as f64 / replicas as f64).ceil() as usize);
        let from = hash(adapter, 0);
        let mut points = self.points.range(from..).chain(self.points.range(..from)).map(|(_, replica)| *replica);
        points.find(|replica| loads[*replica].is_some_and(|load| load < max)).expect("not all replicas have the most")
    }
}

/// Places a request where its adapter is: by what replicas report ([`Residency`](aril::pool::Residency)), and by the requests that were
/// placed since.
///
/// It goes to the replica with the lowest cost: the number of its requests, and more if the adapter is in host memory or not there at
/// all. So a replica that has the adapter may have as many requests more than the others.
#[derive(Debug)]
pub struct Resident {
    /// By replica.
    places: Vec<HashMap<Adapter, Place>>,
    host_cost: usize,
    source_cost: usize,
    /// Whether reports count.
    is_told: bool,
}

/// An adapter on a replica.
#[derive(Clone, Copy, Debug)]
struct Place {
    tier: Tier,
    /// Requests for it that have not ended: it is on the device, or on its way.
    requests: usize,
}

impl Resident {
    /// Costs are in requests.
    pub fn new(replicas: usize, host_cost: usize, source_cost: usize) -> Self {
        Self { places: vec![HashMap::new(); replicas], host_cost, source_cost, is_told: true }
    }

    /// Ignores reports: an adapter is where its last requests were placed.
    #[must_use]
    pub fn untold(self) -> Self {
        Self { is_told: false, ..self }
    }
}

impl Router for Resident {
    fn place(&mut self, adapter: Adapter, loads: &[Option<usize>]) -> usize {
        let cost = |replica: usize| match self.places[replica].get(&adapter).map(|place| place.tier) {
            Some(Tier::Device) => 0,
            Some(Tier::Host) => self.host_cost,
            _ => self.source_cost,
        };
        let best = up(loads).min_by_key(|&(replica, load)| (load + cost(replica), load, hash(adapter, replica)));
        let (replica, _) = best.expect("a replica is up");
        let place = self.places[replica].entry(adapter).or_insert(Place { tier: Tier::Device, requests: 0 });
        place.tier = Tier::Device;
        place.requests += 1;
        replica
    }

    fn finish(&mut self, adapter: Adapter, replica: usize) {
        let place = self.places[replica].get_mut(&adapter).expect("the request was placed");
        place.requests -= 1;
    }

    fn report(&mut self, replica: usize, adapters: &[(Adapter, Tier)]) {
        if !self.is_told {
            return;
        }
        let places = &mut self.places[replica];
        places.retain(|_, place| place.requests > 0);
        for &(adapter, tier) in adapters {
            places.entry(adapter).or_insert(Place { tier, requests: 0 });
        }
    }

    fn leave(&mut self, replica: usize) {
        self.places[replica].clear();
    }

    fn restart(&mut self) {
        self.places.iter_mut().for_each(HashMap::clear);
    }
}
