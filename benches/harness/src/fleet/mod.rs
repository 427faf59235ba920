//! A simulation of many replicas with many adapters: which router places requests best.
//!
//! Nothing here is measured on a device. A [`Trace`](crate::serving::Trace) of requests is placed on replicas by a [`Router`]; only the
//! router differs between the runs of a [`Scenario`]. Each [`Replica`] decides with the library's own state machines: a
//! [`SimulatedPool`](aril::pool::SimulatedPool) and an [`Admission`](aril_serving::admission::Admission), called in the order in which
//! `aril-serve` calls them. Its engine is that of [`serving`](crate::serving). Time is in whole microseconds, so that a seed gives the
//! same figures again.
//!
//! # Assumptions
//!
//! Those of [`serving`](crate::serving), with these differences:
//!
//! - Times are [`Hardware::MEASURED`](crate::serving::Hardware::MEASURED): a load from host memory has 0.99 of the copy's rate, a load
//!   from the page cache 0.39. The 8.7 TB of all adapters exceed a page cache, so most scenarios read from a disk of 3 GB/s, which is an
//!   assumption. Two loaders take turns on the disk, and a read copies parts to the device meanwhile.
//! - A replica has 32 slots, of which batches leave 4, and host memory for 256 adapters (22 GB), which the first third of a run fills.
//!   Figures begin after it.
//! - A replica notices the end of reads and copies between steps. A step waits for the copies of its adapters.
//! - A router knows how many requests of each replica have not ended. Each replica reports the tiers of its adapters once a second.
//!   To place a request takes no time.
//! - An adapter is on a replica's disk before its first request.
//!
//! # Routers
//!
//! | router | a request goes to |
//! |---|---|
//! | [`Random`], [`RoundRobin`] | any replica, or the next one |
//! | [`LeastLoaded`] | the replica with the fewest requests |
//! | [`Modulo`] | the replica that the hash of its adapter names |
//! | [`Ring`] | the same on a ring, so that a replica that leaves moves its adapters alone; this is vLLM production-stack's session router with the adapter as the session |
//! | [`Ring`] with a bound | the next replica on the ring whose requests do not exceed the mean by more than the bound |
//! | [`Resident`] | the replica whose requests are fewest, of which those without the adapter count some more |
//! | [`Resident`], untold | the same, but a replica has the adapters that were placed there last |

mod figures;
mod replica;
mod router;
mod show;
mod simulation;

pub use self::{
    figures::{Figures, Kind, Record, Run, Settings, scenarios},
    replica::Replica,
    router::{LeastLoaded, Modulo, Random, Resident, Ring, RoundRobin, Router},
    show::{events, plot, shown, table},
    simulation::{Counters, Event, Mark, Outcome, Scenario, run},
};

/// The record, in the repository.
pub const FILE: &str = "benches/record/fleet.json";
