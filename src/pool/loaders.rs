//! The threads that read adapters and pack them into host memory.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use super::Source;
use crate::{adapter::SlotImage, error::LoadError};

/// Loader threads, each of which reads one adapter at a time, and the threads that pack for all of them. They are apart from rayon's
/// other ones, which the engine may use.
pub(crate) struct Loaders<K, P> {
    threads: ThreadPool,
    packers: Arc<ThreadPool>,
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
    pub(crate) fn new(loaders: usize, packers: usize) -> Result<Self, ThreadPoolBuildError> {
        let pool = |threads: usize, name: &'static str| {
            ThreadPoolBuilder::new().num_threads(threads).thread_name(move |i| format!("aril-{name}-{i}")).build()
        };
        let (sender, results) = channel();
        Ok(Self { threads: pool(loaders, "loader")?, packers: Arc::new(pool(packers, "packer")?), sender, results })
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
        let (sender, packers) = (self.sender.clone(), Arc::clone(&self.packers));
        self.threads.spawn(move || {
            let start = Instant::now();
            let pack = |image: &SlotImage<'_>| packers.install(|| pack(image));
            let result = catch_unwind(AssertUnwindSafe(|| source.read(pack).and_then(end)));
            let result = result.unwrap_or_else(|panic| Err(LoadError::Panicked { message: message(&*panic) }));
            // Without a receiver, the pool is gone, and what was packed is dropped.
            let _ = sender.send(Loaded { id, time: start.elapsed(), result });
        });
    }

    /// Calls `pack` on the packing threads, and blocks this thread meanwhile.
    pub(crate) fn install<R: Send>(&self, pack: impl FnOnce() -> R + Send) -> R {
        self.packers.install(pack)
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

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}
