use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Memory;
use crate::{
    Result,
    report::{Table, percentile},
    results::{self, Failure, PEER},
};

/// The targets of the tables.
const MIN_OF_COPY: f64 = 0.9;
const MIN_FROM_DISK: f64 = 0.7;
const MAX_STEP_US: f64 = 5.0;
const MAX_SLOWDOWN: f64 = 1.03;

/// The figures of an adapter pool.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Figures {
    pub meta: Meta,
    pub memory: Option<Memory>,
    pub load: Vec<Load>,
    #[serde(default)]
    pub reading: Vec<Reading>,
    pub steps: Vec<StepCost>,
    pub replays: Vec<Replays>,
    pub failures: Vec<Failure>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Meta {
    pub gpu: String,
    pub aril: String,
    /// The commit of the build, if its environment named one (`ARIL_COMMIT`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub seconds: f64,
}

/// Loads of one adapter: from the prefetch until the copy of its lease has run.
#[derive(Debug, Deserialize, Serialize)]
pub struct Load {
    /// Where the adapter is before.
    pub from: String,
    pub bytes: usize,
    pub loads: usize,
    /// The median time of a load.
    pub us: f64,
    /// The median time of a plain copy of as many bytes from page-locked memory, or of factors on the device from
    /// there, in turn with the loads.
    pub copy_us: f64,
}

impl Load {
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.us / 1e3
    }

    /// The load's rate over that of the plain copy.
    pub fn of_copy(&self) -> f64 {
        self.copy_us / self.us
    }
}

/// What a load from files cannot be faster than, on some threads: median times of its parts, each alone.
#[derive(Debug, Deserialize, Serialize)]
pub struct Reading {
    pub threads: usize,
    /// Size of the adapter.
    pub bytes: usize,
    /// Reading the configuration and the header of the file, on one thread.
    pub open_us: f64,
    /// Planning, on one thread.
    pub plan_us: f64,
    /// Reading the file from the page cache.
    pub read_us: f64,
    /// Packing weights in memory into page-locked memory.
    pub pack_us: f64,
}

/// The median and the 99th percentile, in µs.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Times {
    pub p50_us: f64,
    pub p99_us: f64,
}

impl Times {
    /// # Panics
    /// If there are no times.
    pub fn new(mut us: Vec<f64>) -> Self {
        us.sort_by(f64::total_cmp);
        let [p50_us, p99_us] = [50, 99].map(|percent| percentile(&us, percent));
        Self { p50_us, p99_us }
    }
}

/// Time on the host of one step's leases and its end.
#[derive(Debug, Deserialize, Serialize)]
pub struct StepCost {
    /// Adapters on the device.
    pub resident: usize,
    /// Adapters that a step leases.
    pub leased: usize,
    pub steps: usize,
    #[serde(flatten)]
    pub times: Times,
}

/// What the pool brings to the device meanwhile.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Neighbours {
    None,
    /// Adapters of the host tier.
    Host,
    /// Adapters of a directory.
    Disk,
    /// Adapters in device memory, 100 a second.
    Device,
}

impl Neighbours {
    pub const ALL: [Self; 4] = [Self::None, Self::Host, Self::Disk, Self::Device];

    const fn name(self) -> &'static str {
        match self {
            Self::None => "alone",
            Self::Host => "beside loads from host memory",
            Self::Disk => "beside loads from disk",
            Self::Device => "beside 100 loads a second from device memory",
        }
    }
}

/// Replays of a decode step.
#[derive(Debug, Deserialize, Serialize)]
pub struct Replays {
    pub beside: Neighbours,
    pub replays: usize,
    /// Between events around each replay, with replays enqueued ahead.
    pub device: Times,
    /// On the host, from the launch of a replay until it has ended.
    pub host: Times,
    /// Copies to the device meanwhile.
    pub copies: u64,
    pub copied_bytes: u64,
    /// The time of the replays, in seconds.
    pub seconds: f64,
}

impl Figures {
    pub fn save(&self, path: &Path) -> Result<()> {
        results::save(self, path)
    }

    pub fn fail(&mut self, id: &str, msg: String) {
        println!("error: {id}: {msg}");
        self.failures.push(Failure { id: id.to_owned(), peer: PEER.to_owned(), kind: "error".to_owned(), msg });
    }

    /// A table for each measurement that succeeded.
    pub fn tables(&self) -> Vec<Table> {
        let tables =
            [self.load_table(), self.reading_table(), self.step_table(), self.replay_table(), self.memory_table()];
        tables.into_iter().filter(|table| !table.is_empty()).collect()
    }

    fn load_table(&self) -> Table {
        let mut table = Table::new(&["load from", "MB", "µs", "GB/s", "plain copy, µs", "of its rate", "target"]);
        for load in &self.load {
            let target = match load.from.as_str() {
                "host" | "host, experts" => format!("at least {MIN_OF_COPY}"),
                "disk, experts" => format!("at least {MIN_FROM_DISK}"),
                _ => String::new(),
            };
            let megabytes = format!("{:.1}", load.bytes as f64 / 1e6);
            let [us, copy_us] = [load.us, load.copy_us].map(|us| format!("{us:.0}"));
            let [rate, of_copy] = [load.gb_per_s(), load.of_copy()].map(|value| format!("{value:.2}"));
            table.row(vec![load.from.clone(), megabytes, us, rate, copy_us, of_copy, target]);
        }
        table
    }

    fn reading_table(&self) -> Table {
        let header =
            ["threads", "MB", "open, µs", "plan, µs", "read, µs", "page cache, GB/s", "pack, µs", "packing, GB/s"];
        let mut table = Table::new(&header);
        for &Reading { threads, bytes, open_us, plan_us, read_us, pack_us } in &self.reading {
            let whole = |us: f64| format!("{us:.0}");
            let rate = |us: f64| format!("{:.1}", bytes as f64 / us / 1e3);
            let megabytes = format!("{:.1}", bytes as f64 / 1e6);
            let [open, plan, read, pack] = [open_us, plan_us, read_us, pack_us].map(whole);
            let [read_rate, pack_rate] = [read_us, pack_us].map(rate);
            table.row(vec![threads.to_string(), megabytes, open, plan, read, read_rate, pack, pack_rate]);
        }
        table
    }

    fn step_table(&self) -> Table {
        let mut table = Table::new(&["resident", "leased per step", "p50, µs", "p99, µs", "target"]);
        for &StepCost { resident, leased, times, .. } in &self.steps {
            let target = if leased == 1 { format!("at most {MAX_STEP_US}") } else { String::new() };
            let [p50, p99] = [times.p50_us, times.p99_us].map(|us| format!("{us:.2}"));
            table.row(vec![resident.to_string(), leased.to_string(), p50, p99, target]);
        }
        table
    }

    fn replay_table(&self) -> Table {
        let mut table = Table::new(&[
            "decode graph",
            "p50, µs",
            "p99, µs",
            "p99 over alone",
            "host p50, µs",
            "p99, µs",
            "p99 over alone",
            "copies",
            "GB/s",
            "target",
        ]);
        let alone = self.replays.iter().find(|replays| replays.beside == Neighbours::None);
        for replays in &self.replays {
            let times = |of: fn(&Replays) -> Times| {
                let Times { p50_us, p99_us } = of(replays);
                let over = alone.map_or_else(String::new, |alone| format!("{:.3}", p99_us / of(alone).p99_us));
                [format!("{p50_us:.1}"), format!("{p99_us:.1}"), over]
            };
            let mut row = vec![replays.beside.name().to_owned()];
            row.extend(times(|replays| replays.device));
            row.extend(times(|replays| replays.host));
            row.push(replays.copies.to_string());
            row.push(format!("{:.1}", replays.copied_bytes as f64 / replays.seconds / 1e9));
            let is_beside = replays.beside != Neighbours::None;
            row.push(if is_beside { format!("at most {MAX_SLOWDOWN}") } else { String::new() });
            table.row(row);
        }
        table
    }

    fn memory_table(&self) -> Table {
        let mut table = Table::new(&["adapters", "ranks", "exact, GB", "padded, GB", "padded/exact"]);
        if let Some(memory) = &self.memory {
            let Memory { adapters, ranks: [min, max], exact_bytes, padded_bytes } = memory;
            let gigabytes = |bytes: &usize| format!("{:.2}", *bytes as f64 / 1e9);
            let ratio = format!("{:.2}", memory.ratio());
            let sizes = [exact_bytes, padded_bytes].map(gigabytes);
            table.row([vec![adapters.to_string(), format!("{min}..{max}")], sizes.to_vec(), vec![ratio]].concat());
        }
        table
    }
}
