//! The threads that read adapters and pack them into host memory, and what they have packed.

use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::{AdapterId, PoolConfig, PoolError, ReadEnd, Source};
use crate::{
    DType,
    adapter::{SlotImage, layout::ALIGNMENT_BYTES},
    arena::blocks,
    error::{LoadError, SlotError, panic_message},
    model::{Model, TpRank},
    sizes::round_up,
    slots::Bounds,
};

type Read = Box<dyn FnOnce(&ThreadPool) + Send>;

/// Loader threads, each of which reads one adapter at a time with threads of its own that pack, so that a slow read
/// delays no other loader. Loaders are not threads of rayon, which would take up another read while they wait for their
/// packers. Packers are apart from rayon's other threads, which the engine may use.
struct Loaders<P> {
    reads: Sender<Read>,
    sender: Sender<Loaded<P>>,
    results: Receiver<Loaded<P>>,
}

/// The end of a read.
struct Loaded<P> {
    id: AdapterId,
    time: Duration,
    /// The packed adapter, and its [fingerprint](Source::fingerprint).
    result: Result<(P, u64), LoadError>,
}

impl<P: Send + 'static> Loaders<P> {
    fn new(loaders: usize, packers: usize) -> io::Result<Self> {
        let (reads, queue) = channel::<Read>();
        let queue = Arc::new(Mutex::new(queue));
        for loader in 0..loaders {
            let (queue, packers) = (Arc::clone(&queue), packers_of(loader, packers)?);
            thread::Builder::new().name(format!("aril-loader-{loader}")).spawn(move || {
                let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                // Ends when the pool is gone.
                while let Ok(read) = next() {
                    read(&packers);
                }
            })?;
        }
        let (sender, results) = channel();
        Ok(Self { reads, sender, results })
    }

    /// Starts to read an adapter. `end` is called with what `pack` returned, once the source is known not to have
    /// changed meanwhile. A panic is an error of this adapter.
    fn start(
        &self,
        id: AdapterId,
        source: Arc<Source>,
        pack: impl FnOnce(&SlotImage<'_>) -> Result<P, LoadError> + Send + 'static,
        end: impl FnOnce(P) -> Result<P, LoadError> + Send + 'static,
    ) {
        let sender = self.sender.clone();
        let read = move |packers: &ThreadPool| {
            let start = Instant::now();
            let pack = |image: &SlotImage<'_>| packers.install(|| pack(image));
            let read = || {
                let packed = source.read(pack)?;
                let fingerprint = packers.install(|| source.fingerprint())?;
                Ok((end(packed)?, fingerprint))
            };
            let result = catch_unwind(AssertUnwindSafe(read));
            let result = result.unwrap_or_else(|payload| Err(LoadError::Panicked { message: panic_message(payload) }));
            // Without a receiver, the pool is gone, and what was packed is dropped.
            let _ = sender.send(Loaded { id, time: start.elapsed(), result });
        };
        self.reads.send(Box::new(read)).expect("loaders end after this");
    }

    /// A read that has ended.
    fn next(&self) -> Option<Loaded<P>> {
        self.results.try_recv().ok()
    }

    /// Blocks this thread until a read ends, or for `timeout`.
    fn wait(&self, timeout: Duration) -> Option<Loaded<P>> {
        self.results.recv_timeout(timeout).ok()
    }
}

/// The adapters of a pool in host memory, which are packed as `P`, and their sources.
pub(crate) struct HostTier<P> {
    bounds: Bounds,
    /// What a block has behind the image, in bytes.
    row_bytes: usize,
    sources: HashMap<AdapterId, Arc<Source>>,
    packed: HashMap<AdapterId, P>,
    loaders: Loaders<P>,
    /// Reads whose ends were waited for.
    ended: VecDeque<Loaded<P>>,
}

impl<P> fmt::Debug for HostTier<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTier").field("adapters", &self.packed.len()).finish_non_exhaustive()
    }
}

impl<P: Send + 'static> HostTier<P> {
    /// A tier for adapters of a table with these bounds.
    pub(crate) fn new(bounds: Bounds, row_bytes: usize, config: PoolConfig) -> Result<Self, PoolError> {
        let loaders = Loaders::new(config.loaders.max(1), config.packers.max(1)).map_err(PoolError::Threads)?;
        Ok(Self { bounds, row_bytes, sources: HashMap::new(), packed: HashMap::new(), loaders, ended: VecDeque::new() })
    }

    pub(crate) fn tp(&self) -> TpRank {
        self.bounds.model.tp()
    }

    /// As [`Backend::shard`](super::Executor::shard).
    pub(crate) fn shard(&self, source: &Source) -> Result<Source, LoadError> {
        let is_own = *source.model() == self.bounds.model;
        let source = if is_own { source.clone() } else { source.shard(&self.bounds.model)? };
        Ok(if self.tp().size() > 1 { source.of_group() } else { source })
    }

    /// As [`Backend::add`](super::Executor::add).
    pub(crate) fn add(&mut self, id: AdapterId, source: Source) -> Result<usize, PoolError> {
        source.check(&self.bounds)?;
        let bytes = block_bytes(source.bytes(), self.row_bytes);
        self.sources.insert(id, Arc::new(source));
        Ok(bytes)
    }

    pub(crate) fn remove(&mut self, id: AdapterId) {
        self.sources.remove(&id);
    }

    /// Starts to read an adapter. A loader thread calls `pack` with its image, and then `seal`, once the source is
    /// known not to have changed meanwhile.
    pub(crate) fn read(
        &self,
        id: AdapterId,
        pack: impl FnOnce(&SlotImage<'_>) -> Result<P, LoadError> + Send + 'static,
        seal: impl FnOnce(P) -> Result<P, LoadError> + Send + 'static,
    ) {
        let source = self.sources.get(&id).expect("a registered adapter has a source");
        let reserved = source.bytes();
        let pack = move |image: &SlotImage<'_>| match image.bytes() {
            bytes if bytes == reserved => pack(image),
            bytes => Err(SlotError::OtherImage { bytes, reserved }.into()),
        };
        self.loaders.start(id, Arc::clone(source), pack, seal);
    }

    /// As [`Backend::notice`](super::Executor::notice).
    pub(crate) fn notice(&mut self, wait: Option<Duration>) {
        self.ended.extend(wait.and_then(|wait| self.loaders.wait(wait)));
    }

    /// As [`Backend::next_read`](super::Executor::next_read).
    pub(crate) fn next_read(&mut self) -> Option<ReadEnd> {
        let Loaded { id, time, result } = self.ended.pop_front().or_else(|| self.loaders.next())?;
        let fingerprint = result.as_ref().map_or(0, |(_, fingerprint)| *fingerprint);
        let result = result.map(|(packed, _)| drop(self.packed.insert(id, packed)));
        Some(ReadEnd { id, time, fingerprint, result })
    }

    /// An adapter that has been read, and is not forgotten.
    pub(crate) fn packed(&mut self, id: AdapterId) -> &mut P {
        self.packed.get_mut(&id).expect("an adapter in host memory is packed")
    }

    pub(crate) fn forget(&mut self, id: AdapterId) {
        self.packed.remove(&id);
    }
}

/// Size of an arena in which `count` adapters of rank `max_rank` fit, whatever modules they have. Their blocks end with
/// a row.
pub(crate) fn arena_bytes(model: &Model, dtype: DType, max_rank: usize, count: usize, row_bytes: usize) -> usize {
    let block = block_bytes(SlotImage::max_bytes(model, dtype, max_rank), row_bytes);
    blocks::bytes_for_equal(block, count, 0)
}

/// Size of the block of an image of `image_bytes` bytes, which are followed by an aligned row.
fn block_bytes(image_bytes: usize, row_bytes: usize) -> usize {
    round_up(image_bytes, ALIGNMENT_BYTES).saturating_add(row_bytes)
}

/// The threads that pack for an owner with this number.
fn packers_of(owner: usize, threads: usize) -> io::Result<ThreadPool> {
    let threads = ThreadPoolBuilder::new().num_threads(threads);
    threads.thread_name(move |packer| format!("aril-packer-{owner}-{packer}")).build().map_err(io::Error::other)
}
