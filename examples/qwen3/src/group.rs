//! The ranks of a tensor-parallel group: how they find each other, and what they exchange through the host.
//!
//! The ranks are threads of one process, or processes that are started as NCCL's are, with `RANK`, `WORLD_SIZE`,
//! `MASTER_ADDR` and `MASTER_PORT`. Either way they have one operation, [`Rank::gather`]. Adapters are loaded by it
//! ([`Ranks`]), NCCL starts by it, and the CPU adds up activations by it.
//!
//! Invariant: no rank waits for ever. If a rank ends, the others get an error at once; if it does nothing, after a time
//! limit.

mod sockets;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fmt,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use aril::{
    group::{ChannelError, InProcess, Message, Ranks},
    model::TpRank,
};

use self::sockets::Sockets;
use crate::error::{Context, Error, Result, bail};

/// The port of rank 0 unless `MASTER_PORT` names another, as PyTorch has it.
const DEFAULT_PORT: u16 = 29_500;

/// One rank of a group, connected to the others. Clones are the same rank, which leaves the group with the last of
/// them.
#[derive(Clone)]
pub struct Rank {
    tp: TpRank,
    /// Absent in a group of one.
    link: Option<Arc<dyn Link>>,
    /// The rank's number among those of its host.
    local: usize,
    limit: Duration,
    is_finished: Arc<AtomicBool>,
}

/// A rank's connection to the others. It is broken after an error.
trait Link: Send + Sync {
    /// As [`Rank::gather`].
    fn gather(&self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, ChannelError>;
    /// Fails if a rank has ended.
    fn check(&self) -> std::result::Result<(), ChannelError>;
}

impl Link for InProcess<Vec<u8>> {
    fn gather(&self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, ChannelError> {
        Self::gather(self, bytes.to_vec())
    }

    fn check(&self) -> std::result::Result<(), ChannelError> {
        Self::check(self)
    }
}

impl Default for Rank {
    /// The rank of a group of one.
    fn default() -> Self {
        Self { tp: TpRank::SINGLE, link: None, local: 0, limit: Duration::MAX, is_finished: Arc::default() }
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank").field("tp", &self.tp).finish_non_exhaustive()
    }
}

impl Rank {
    /// The ranks of a group of threads, by rank. Each waits for the others up to `limit`.
    ///
    /// # Errors
    ///
    /// If no group has so many ranks.
    pub fn threads(size: usize, limit: Duration) -> Result<Vec<Self>> {
        let most = InProcess::<Message>::MAX_RANKS;
        if size > most {
            bail!("a group of one process has up to {most} ranks, not {size}");
        }
        let links = InProcess::<Vec<u8>>::group(size, limit).into_iter().enumerate();
        links.map(|(rank, link)| Ok(Self::new(TpRank::new(rank, size)?, limit, link))).collect()
    }

    /// This process's rank of a group of `size` processes, if the environment says that it is one.
    ///
    /// # Errors
    ///
    /// If a variable of the environment is missing or wrong, or the ranks do not meet within `limit`.
    pub fn process(size: usize, limit: Duration) -> Result<Option<Self>> {
        let Some(processes) = variable::<usize>("WORLD_SIZE")? else { return Ok(None) };
        if processes != size {
            bail!("WORLD_SIZE is {processes}, but the group is to have {size} ranks");
        }
        let Some(rank) = variable("RANK")? else { bail!("WORLD_SIZE is set without RANK") };
        let tp = TpRank::new(rank, size).context("RANK")?;
        let Some(address) = variable::<String>("MASTER_ADDR")? else { bail!("WORLD_SIZE is set without MASTER_ADDR") };
        let port = variable("MASTER_PORT")?.unwrap_or(DEFAULT_PORT);
        let link = Sockets::connect(tp, (&address, port), limit).context(format_args!("rank {rank} of {size}"))?;
        let local = variable("LOCAL_RANK")?.unwrap_or(rank);
        Ok(Some(Self { local, ..Self::new(tp, limit, link) }))
    }

    fn new(tp: TpRank, limit: Duration, link: impl Link + 'static) -> Self {
        Self { tp, link: Some(Arc::new(link)), local: tp.rank(), limit, is_finished: Arc::default() }
    }

    /// The rank, and how many there are.
    pub fn tp(&self) -> TpRank {
        self.tp
    }

    /// How long the rank waits for another.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// The rank's number among those of its host, which is that of its device.
    pub fn local(&self) -> usize {
        self.local
    }

    /// Sends bytes to all ranks, and returns those of all ranks, by rank. Blocks until they have arrived. The n-th
    /// calls of all ranks belong together, and have equally many bytes.
    ///
    /// # Errors
    ///
    /// If a rank does not send in time, has ended, or sends another number of bytes.
    pub fn gather(&self, bytes: &[u8]) -> std::result::Result<Vec<Vec<u8>>, ChannelError> {
        let Some(link) = &self.link else { return Ok(vec![bytes.to_vec()]) };
        let of_ranks = link.gather(bytes)?;
        let differs = |(_, other): &(usize, &Vec<u8>)| other.len() != bytes.len();
        let ranks: Vec<usize> = of_ranks.iter().enumerate().filter(differs).map(|(rank, _)| rank).collect();
        if !ranks.is_empty() {
            let reason = format!("of another size than the {} bytes of rank {}", bytes.len(), self.tp.rank());
            return Err(ChannelError { ranks, reason });
        }
        Ok(of_ranks)
    }

    /// Fails if only some of the ranks were started with one of these switches.
    pub(crate) fn agree(&self, switches: &[(&str, bool)]) -> Result<()> {
        let own: Vec<u8> = switches.iter().map(|&(_, is_set)| is_set.into()).collect();
        for (other, set) in self.gather(&own)?.iter().enumerate() {
            if let Some(at) = (0..own.len()).find(|&at| set[at] != own[at]) {
                let (switch, is_set) = switches[at];
                let (with, without) = if is_set { (self.tp.rank(), other) } else { (other, self.tp.rank()) };
                bail!("rank {with} was started with {switch}, and rank {without} without it");
            }
        }
        Ok(())
    }

    /// The largest value of all ranks.
    ///
    /// # Errors
    ///
    /// If a rank does not send in time, or has ended.
    pub fn largest(&self, value: usize) -> Result<usize> {
        let of_ranks = self.gather(bytemuck::bytes_of(&value))?;
        Ok(of_ranks.iter().map(|bytes| bytemuck::pod_read_unaligned(bytes)).fold(value, usize::max))
    }

    /// Waits until no rank needs another one any more.
    ///
    /// # Errors
    ///
    /// If a rank does not come in time, or has ended.
    pub fn finish(&self) -> Result<()> {
        self.gather(&[])?;
        self.is_finished.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the rank has [finished](Self::finish).
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "the CPU has no communicator to abort"))]
    pub(crate) fn is_finished(&self) -> bool {
        self.is_finished.load(Ordering::Relaxed)
    }

    /// Fails if another rank has ended.
    ///
    /// # Errors
    ///
    /// With the ranks that have ended.
    pub fn check(&self) -> std::result::Result<(), ChannelError> {
        self.link.as_ref().map_or(Ok(()), |link| link.check())
    }
}

impl Ranks for Rank {
    fn tp(&self) -> TpRank {
        self.tp
    }

    fn all_gather(&mut self, message: &Message) -> std::result::Result<Vec<Message>, ChannelError> {
        let of_ranks = self.gather(message.as_bytes())?;
        Ok(of_ranks.iter().map(|bytes| bytemuck::pod_read_unaligned(bytes)).collect())
    }
}

/// The errors of the ranks of a group, by rank. All ranks refuse what none can run with the same error, which is given
/// once.
pub fn errors_of_ranks(errors: &BTreeMap<usize, String>, size: usize) -> String {
    let distinct: BTreeSet<&String> = errors.values().collect();
    match Vec::from_iter(distinct)[..] {
        [error] if errors.len() == size => error.clone(),
        _ => {
            let errors: Vec<String> = errors.iter().map(|(rank, error)| format!("rank {rank}: {error}")).collect();
            errors.join("; ")
        }
    }
}

/// A variable of the environment.
fn variable<V: FromStr<Err: Into<Error>>>(name: &str) -> Result<Option<V>> {
    let Some(value) = env::var_os(name) else { return Ok(None) };
    let value = value.to_string_lossy();
    value.parse().map(Some).context(format_args!("{name} is `{value}`"))
}
