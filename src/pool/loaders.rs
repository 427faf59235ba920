//! The threads that read adapters and pack them into host memory.

use std::{
    any::Any,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::Source;
use crate::{adapter::SlotImage, error::LoadError};

type Read = Box<dyn FnOnce(&ThreadPool) + Send>;

/// Loader threads, each of which reads one adapter at a time with threads of its own that pack, so that a slow read delays no other
/// loader. Loaders are not threads of rayon, which would take up another read while they wait for their packers. Packers are apart from
/// rayon's other threads, which the engine may use.
pub(crate) struct Loaders<K, P> {
    reads: Sender<Read>,
    sender: Sender<Loaded<K, P>>,
    results: Receiver<Loaded<K, P>>,
}

/// The end of a read.
pub(crate) struct Loaded<K, P> {
    pub(crate) id: K,
    pub(crate) time: Duration,
    pub(crate) result: Result<P, LoadError>,
}

impl<K: Send + 'static, P: Send + 'static> Loaders<K, P> {
    pub(crate) fn new(loaders: usize, packers: usize) -> io::Result<Self> {
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

    /// Starts to read an adapter. `end` is called with what `pack` returned, once the source is known not to have changed meanwhile. A
    /// panic is an error of this adapter.
    pub(crate) fn start(
        &self,
        id: K,
        source: Arc<Source>,
        pack: impl FnOnce(&SlotImage<'_>) -> Result<P, LoadError> + Send + 'static,
        end: impl FnOnce(P) -> Result<P, LoadError> + Send + 'static,
    ) {
        let sender = self.sender.clone();
        let read = move |packers: &ThreadPool| {
            let start = Instant::now();
            let pack = |image: &SlotImage<'_>| packers.install(|| pack(image));
            let result = catch_unwind(AssertUnwindSafe(|| source.read(pack).and_then(end)));
            let result = result.unwrap_or_else(|panic| Err(LoadError::Panicked { message: message(&*panic) }));
            // Without a receiver, the pool is gone, and what was packed is dropped.
            let _ = sender.send(Loaded { id, time: start.elapsed(), result });
        };
        self.reads.send(Box::new(read)).expect("loaders end after this");
    }

    /// A read that has ended.
    pub(crate) fn next(&self) -> Option<Loaded<K, P>> {
        self.results.try_recv().ok()
    }

    /// Blocks this thread until a read ends, or for `timeout`.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<Loaded<K, P>> {
        self.results.recv_timeout(timeout).ok()
    }
}

/// The threads that pack for an owner with this number.
pub(crate) fn packers_of(owner: usize, threads: usize) -> io::Result<ThreadPool> {
    let threads = ThreadPoolBuilder::new().num_threads(threads);
    threads.thread_name(move |packer| format!("aril-packer-{owner}-{packer}")).build().map_err(io::Error::other)
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}
