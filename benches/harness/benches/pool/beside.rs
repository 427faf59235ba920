//! What a thread does beside replays: loads, and each part of a load.

use std::{
    result,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType,
    adapter::SlotImage,
    cuda::{AdapterPool, Buffer, Filled, PinnedBuffer, Queue, Staging, WeightTable},
    plan::Capacity,
    pool::{AdapterId, PoolConfig, Source, Tier},
};
use aril_bench::{Result, device::Event};
use cudarc::driver::result as driver;
use rayon::ThreadPoolBuilder;

use crate::{
    LIMIT, packers, room,
    stalls::{RANK, TOKENS},
};

/// The work begins this long after the first replay.
const ALONE_FIRST: Duration = Duration::from_millis(50);
const STAGING_BYTES: usize = 16 << 20;
const POLL: Duration = Duration::from_micros(200);

/// What another thread may return.
type Sent<T> = result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
/// One run of the work.
pub(crate) type Work<'a> = Box<dyn FnMut() -> Sent<()> + Send + 'a>;

/// The runs of a work.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    pub(crate) count: u32,
    busy: Duration,
}

impl Runs {
    /// The mean time of a run.
    pub(crate) fn mean_ms(&self) -> f64 {
        self.busy.as_secs_f64() * 1e3 / f64::from(self.count.max(1))
    }
}

/// What works need.
pub(crate) struct Setup<'a> {
    pub(crate) weights: &'a WeightTable,
    pub(crate) image: &'a SlotImage<'a>,
    pub(crate) memory: &'a Source,
    pub(crate) disk: &'a Source,
    /// Another stream of the context.
    pub(crate) queue: Queue,
}

/// Makes a work before its replays begin.
pub(crate) type Make = for<'a> fn(&Setup<'a>) -> Result<Option<Work<'a>>>;

pub(crate) const WORKS: [(&str, Make); 17] = [
    ("alone", |_| Ok(None)),
    ("first and later WeightTable::load", |setup| load(setup, None)),
    ("WeightTable::load with 4 packers", |setup| load(setup, Some(4))),
    ("reserve, fill, wait and commit", |setup| {
        fill(setup, |weights, filled| {
            filled.wait()?;
            Ok(weights.commit(spare(), filled).map(drop)?)
        })
    }),
    ("reserve, fill and drop", |setup| {
        fill(setup, |_, filled| {
            drop(filled);
            Ok(())
        })
    }),
    ("pool, from disk", |setup| pooled(setup, false)),
    ("pool, from host memory", |setup| pooled(setup, true)),
    ("16 MiB page-locked memory zeroed", |setup| {
        let mut memory = PinnedBuffer::<u8>::zeros(&setup.queue, STAGING_BYTES)?;
        work(move || Ok(memory.elements().map(|bytes| bytes.fill(0))?))
    }),
    ("100 events made and destroyed", |setup| {
        let context = Arc::clone(setup.queue.stream().context());
        work(move || {
            context.bind_to_thread()?;
            (0..100).try_for_each(|_| Event::new().map(drop)).map_err(|error| error.to_string().into())
        })
    }),
    ("packing on rayon's threads", |setup| pack(setup, None)),
    ("packing on 4 threads", |setup| pack(setup, Some(4))),
    ("copies of 8 MiB", |setup| copy(setup, 8 << 20)),
    ("copies of 1 MiB", |setup| copy(setup, 1 << 20)),
    ("copies of the whole adapter", |setup| copy(setup, setup.image.bytes())),
    ("alone again", |_| Ok(None)),
    ("Staging: new and drop", |setup| {
        let queue = setup.queue.clone();
        work(move || Ok(Staging::new(&queue).map(drop)?))
    }),
    ("16 MiB page-locked and freed", |setup| {
        let context = Arc::clone(setup.queue.stream().context());
        work(move || {
            context.bind_to_thread()?;
            // SAFETY: the context is current, and nothing uses the memory.
            let memory = unsafe { driver::malloc_host(STAGING_BYTES, 0) }?;
            // SAFETY: as above.
            Ok(unsafe { driver::free_host(memory) }?)
        })
    }),
];

/// Runs the work over and over on a thread of its own until `replay` returns.
pub(crate) fn run_beside<T>(work: Option<Work<'_>>, replay: impl FnOnce() -> Result<T>) -> Result<(T, Runs)> {
    let mut beside = Runs::default();
    let Some(mut work) = work else { return Ok((replay()?, beside)) };
    let is_done = AtomicBool::new(false);
    let (replayed, ran) = thread::scope(|threads| {
        let ran = threads.spawn(|| {
            thread::sleep(ALONE_FIRST);
            while !is_done.load(Ordering::Relaxed) {
                let start = Instant::now();
                work()?;
                beside.busy += start.elapsed();
                beside.count += 1;
            }
            Sent::Ok(())
        });
        let replayed = replay();
        is_done.store(true, Ordering::Relaxed);
        (replayed, ran.join())
    });
    ran.map_err(|_| "the thread beside the replays panicked")?.map_err(|error| error.to_string())?;
    Ok((replayed?, beside))
}

/// The slot that no token of the step has.
fn spare() -> usize {
    TOKENS
}

fn work<'a>(run: impl FnMut() -> Sent<()> + Send + 'a) -> Result<Option<Work<'a>>> {
    Ok(Some(Box::new(run)))
}

fn load<'a>(setup: &Setup<'a>, packers: Option<usize>) -> Result<Option<Work<'a>>> {
    let (weights, image) = (setup.weights, setup.image);
    let threads = packers.map(|threads| ThreadPoolBuilder::new().num_threads(threads).build()).transpose()?;
    work(move || {
        let load = || weights.load(spare(), image).map(drop);
        Ok(match &threads {
            Some(threads) => threads.install(load),
            None => load(),
        }?)
    })
}

/// Fills a reservation with a staging of the loader's own, and does `end` with it.
fn fill<'a>(setup: &Setup<'a>, end: impl Fn(&WeightTable, Filled) -> Sent<()> + Send + 'a) -> Result<Option<Work<'a>>> {
    let (weights, image, mut staging) = (setup.weights, setup.image, setup.weights.staging()?);
    work(move || end(weights, weights.reserve(image)?.fill(image, &mut staging)?))
}

/// Packs the adapter into memory that is not page-locked.
fn pack<'a>(setup: &Setup<'a>, packers: Option<usize>) -> Result<Option<Work<'a>>> {
    let (image, mut block) = (setup.image, vec![0; setup.image.bytes()]);
    let threads = packers.map(|threads| ThreadPoolBuilder::new().num_threads(threads).build()).transpose()?;
    work(move || {
        let mut pack = || image.write_to(&mut block);
        Ok(match &threads {
            Some(threads) => threads.install(pack),
            None => pack(),
        }?)
    })
}

/// Copies an adapter's bytes in pieces from page-locked memory that is ready, as many at a time as a [`Staging`] has
/// room for, or one.
fn copy<'a>(setup: &Setup<'a>, piece: usize) -> Result<Option<Work<'a>>> {
    let memory = (0..(STAGING_BYTES / piece).max(1)).map(|_| Ok(PinnedBuffer::<u8>::zeros(&setup.queue, piece)?));
    let mut memory = memory.collect::<Result<Vec<_>>>()?;
    let (mut to, count) = (Buffer::<u8>::zeros(&setup.queue, piece)?, setup.image.bytes().div_ceil(piece));
    work(move || {
        for copy in 0..count {
            let buffers = memory.len();
            let from = &mut memory[copy % buffers];
            from.elements()?;
            to.enqueue_write(from, piece)?;
        }
        Ok(())
    })
}

/// Brings adapters to the device of a pool, one at a time.
fn pooled<'a>(setup: &Setup<'a>, from_host: bool) -> Result<Option<Work<'a>>> {
    let (model, memory, disk) = (setup.weights.model(), setup.memory, setup.disk);
    let capacity = Capacity::tokens(TOKENS).slots(1).rank(RANK);
    let config = PoolConfig::arena_bytes(room(model, memory, 1)).host_bytes(room(model, memory, 4)).packers(packers());
    let mut pool = AdapterPool::new(&setup.queue, model, DType::BF16, capacity, config)?;
    if !from_host {
        return work(move || {
            let id = pool.register(disk.clone())?;
            bring(&mut pool, id)?;
            Ok(pool.unregister(id)?)
        });
    }
    let pair = [pool.register(memory.clone())?, pool.register(memory.clone())?];
    let mut turn = pair.into_iter().cycle();
    for id in pair {
        bring(&mut pool, id).map_err(|error| error.to_string())?;
    }
    work(move || turn.next().map_or(Ok(()), |id| bring(&mut pool, id)))
}

/// Returns when the adapter is on the device.
fn bring(pool: &mut AdapterPool, id: AdapterId) -> Sent<()> {
    let start = Instant::now();
    while start.elapsed() < LIMIT {
        pool.prefetch(id)?;
        pool.poll();
        if pool.residency(id).is_some_and(|residency| residency.tier == Tier::Device) && pool.snapshot().copying == 0 {
            return Ok(());
        }
        thread::sleep(POLL);
    }
    Err(format!("not on the device after {LIMIT:?}: {:?}", pool.snapshot()).into())
}
