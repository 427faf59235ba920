//! Which waiting requests join the running batch, when a batch may only hold some adapters at a time.
//!
//! An [`Admission`] is told of requests as they arrive, and is asked before each step which of them to start. It is
//! pure: it neither loads anything nor looks at a clock, and its answers depend on nothing but the calls made.
//!
//! # Limits
//!
//! The adapters of all running requests, with those admitted in the same call, are at most [`Limits::new`]'s number. A
//! request runs from its admission until it finishes or is preempted, whether or not a step computes anything of it: a
//! chunked prefill is a running request between its chunks, is never offered again, and so is never skipped for lack of
//! room. Requests for the base model need no room.
//!
//! # Order
//!
//! [`Admission::admit`] offers requests in this order:
//!
//! 1. *Overdue* requests, which have waited for [`max_wait`](Limits::new) or longer, oldest first. One whose adapter
//!    does not fit *blocks*: no further adapter enters the batch before it.
//! 2. Requests for the base model and for adapters of the batch, oldest first. They cost no room and no load. While an
//!    overdue request is blocked, an adapter of the batch *drains* for it: it accepts no further request.
//! 3. If none is blocked, the adapters that fit, by their oldest request, each with all of its requests. So that an
//!    adapter that is still loading does not hold up others, up to as many adapters as a batch may hold are passed over.
//!
//! # No request starves
//!
//! Let a request have waited for `max_wait` when `k` older requests are waiting. Let every request run for at most
//! `longest`, let `admit` be called at least every `step`, and let it take what it is offered. Then the request waits
//! for at most
//!
//! ```text
//! max_wait + (k + 1) · (longest + step)
//! ```
//!
//! no matter how many younger requests arrive. For the oldest overdue request that is blocked, an adapter of the batch
//! drains, the same one until it is admitted. Its requests end within `longest`, no other adapter takes its room, and
//! the next `admit` takes it; the `k` older requests are admitted one after another in the same way. Preempted requests
//! keep their age, and count among the older ones.
//!
//! # Loading
//!
//! [`Admission::prefetch`] lists the adapters in the order in which they will enter. The engine takes a request when it
//! has a lease on its adapter, inside the call, so that nothing can evict it between check and use:
//!
//! ```
//! use std::time::Duration;
//!
//! use aril_requests::admission::{Admission, Answer, Limits, Request};
//!
//! // Batches of up to two adapters. After a second, a request is overdue.
//! let mut admission = Admission::new(Limits::new(2, Duration::from_secs(1)));
//! let ms = Duration::from_millis;
//! for (id, adapter, arrival) in [(0, "a", ms(0)), (1, "b", ms(1)), (2, "c", ms(2)), (3, "a", ms(3))] {
//!     admission.enqueue(Request::new(id, adapter, arrival))?;
//! }
//! admission.enqueue(Request::base(4, ms(4)))?;
//!
//! let next: Vec<_> = admission.prefetch().take(2).collect();
//! assert_eq!(next, ["a", "b"]); // which the engine starts to load
//!
//! // Before each step. Here, the pool has loaded all but b.
//! let mut started = vec![];
//! admission.admit(ms(5), |request| {
//!     if request.adapter == Some("b") {
//!         return Answer::Skip; // the pool says `Loading`
//!     }
//!     started.push(request.id); // with its lease
//!     Answer::Take
//! });
//! assert_eq!(started, [4, 0, 3, 2]);
//! assert_eq!(admission.batch(), ["a", "c"]);
//!
//! admission.finish(&2)?;
//! admission.admit(ms(6), |_| Answer::Take);
//! assert_eq!(admission.batch(), ["a", "b"]);
//! # Ok::<(), aril_requests::admission::AdmissionError>(())
//! ```

mod error;
mod limits;
mod queue;

use std::{
    hash::Hash,
    ops::Bound::{Excluded, Unbounded},
    time::Duration,
};

use self::queue::{Key, Queue};
pub use self::{error::AdmissionError, limits::Limits};

/// A request, as [`Admission::admit`] offers it.
///
/// `R` identifies the request. `A` identifies the version of its adapter: an [`AdapterId`](aril::pool::AdapterId), or a
/// key of an engine's own pool.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Request<R, A> {
    /// The request.
    pub id: R,
    /// Its adapter; `None` for the base model.
    pub adapter: Option<A>,
    /// When it arrived, since any moment that the engine chooses.
    pub arrival: Duration,
}

impl<R, A> Request<R, A> {
    /// A request for an adapter. `arrival` counts from any moment, the same one for all requests.
    pub const fn new(id: R, adapter: A, arrival: Duration) -> Self {
        Self { id, adapter: Some(adapter), arrival }
    }

    /// A request for the base model.
    pub const fn base(id: R, arrival: Duration) -> Self {
        Self { id, adapter: None, arrival }
    }
}

/// An engine's answer to an offered request.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Answer {
    /// The request starts: it counts as running from now on.
    Take,
    /// Not now, nor the other requests of its adapter: the adapter is being loaded, for example. If the request is
    /// overdue, the room for its adapter is kept.
    Skip,
    /// The request cannot run: its adapter could not be loaded, for example. It is forgotten.
    Fail,
    /// Nothing more in this call: the step's tokens or the KV cache are used up, for example.
    Stop,
}

/// Decides which waiting requests join the running batch. See the [module](self).
///
/// With a pool, before each step:
///
/// ```
/// use std::time::Duration;
///
/// use aril::{cpu::AdapterPool, pool::{AdapterId, Lease, PoolError, StreamId}};
/// use aril_requests::admission::{Admission, Answer};
///
/// /// The requests that start, with their leases, and those that fail.
/// type Started = (Vec<(u64, Option<Lease>)>, Vec<(u64, PoolError)>);
///
/// fn start(
///     admission: &mut Admission<u64, AdapterId>,
///     pool: &mut AdapterPool,
///     now: Duration,
///     has_room: &mut dyn FnMut(u64) -> bool, // the step's tokens and the KV cache
/// ) -> Started {
///     for adapter in admission.prefetch().take(4) {
///         // Of an adapter that was unregistered, or could not be loaded, the requests fail below.
///         let _ = pool.prefetch(adapter);
///     }
///     let (mut started, mut failed) = (vec![], vec![]);
///     admission.admit(now, |request| {
///         let lease = match request.adapter.map(|adapter| pool.acquire(adapter, StreamId::FIRST)).transpose() {
///             Ok(lease) => lease,
///             Err(PoolError::Loading { .. } | PoolError::Full) => return Answer::Skip,
///             Err(error) => {
///                 failed.push((request.id, error));
///                 return Answer::Fail;
///             }
///         };
///         if !has_room(request.id) {
///             return Answer::Stop;
///         }
///         started.push((request.id, lease));
///         Answer::Take
///     });
///     (started, failed)
/// }
/// # let _: fn(_, _, _, _) -> _ = start;
/// ```
#[derive(Clone, Debug)]
#[doc(alias = "max_loras")]
pub struct Admission<R, A> {
    limits: Limits,
    queue: Queue<R, A>,
}

/// What has been decided in one call of [`Admission::admit`].
struct Call<A> {
    /// Adapters of which a request was skipped; `None` for the base model.
    skipped: Vec<Option<A>>,
    /// Those of them whose room is kept.
    kept: Vec<A>,
    /// The adapter of the batch that accepts no further request, because a blocked one needs its room.
    draining: Option<A>,
}

/// [`Answer::Stop`].
struct Stopped;

/// The other answers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Offered {
    Taken,
    Skipped,
    Failed,
}

impl<R: Clone + Eq + Hash, A: Copy + Eq + Hash> Admission<R, A> {
    /// An admission without requests.
    pub fn new(limits: Limits) -> Self {
        Self { limits, queue: Queue::default() }
    }

    /// Adds a waiting request. Requests may be added in any order of their arrivals.
    ///
    /// # Errors
    /// [`AdmissionError::Duplicate`] or [`AdmissionError::NoAdapters`].
    pub fn enqueue(&mut self, request: Request<R, A>) -> Result<(), AdmissionError> {
        if request.adapter.is_some() && self.limits.max_adapters == 0 {
            return Err(AdmissionError::NoAdapters);
        }
        self.queue.add(request)
    }

    /// Offers waiting requests that fit, in the [order](self#order) of the module, until none is left or the engine
    /// answers [`Answer::Stop`]. `now` counts from the same moment as the arrivals.
    ///
    /// The time is that of the offers, each with at most a search among the adapters of a batch. Besides those that it
    /// takes or fails, an engine is offered at most `2 * max_adapters + 3` requests, however many are waiting.
    pub fn admit(&mut self, now: Duration, mut offer: impl FnMut(&Request<R, A>) -> Answer) {
        let mut call = Call { skipped: Vec::new(), kept: Vec::new(), draining: None };
        // Stopped is one of the ways in which a call ends.
        let _: Result<(), Stopped> = (|| {
            let is_blocked = self.admit_overdue(now, &mut call, &mut offer)?;
            if is_blocked {
                // The one whose youngest request has run for longest, and so the same one in the next calls.
                call.draining = self.queue.batch().iter().copied().min_by_key(|adapter| self.queue.last_start(adapter));
            }
            self.admit_to_batch(&mut call, &mut offer)?;
            if is_blocked { Ok(()) } else { self.admit_adapters(&mut call, &mut offer) }
        })();
    }

    /// Ends a running request.
    ///
    /// # Errors
    /// [`AdmissionError::Unknown`] or [`AdmissionError::NotRunning`].
    pub fn finish(&mut self, id: &R) -> Result<(), AdmissionError> {
        self.queue.stop(id)?;
        self.queue.remove(id)
    }

    /// Lets a running request wait again, as old as it is. It keeps its version of the adapter.
    ///
    /// # Errors
    /// [`AdmissionError::Unknown`] or [`AdmissionError::NotRunning`].
    #[doc(alias = "retract")]
    pub fn preempt(&mut self, id: &R) -> Result<(), AdmissionError> {
        self.queue.stop(id)
    }

    /// Forgets a request, waiting or running.
    ///
    /// # Errors
    /// [`AdmissionError::Unknown`].
    #[doc(alias = "abort")]
    pub fn cancel(&mut self, id: &R) -> Result<(), AdmissionError> {
        match self.queue.stop(id) {
            Ok(()) | Err(AdmissionError::NotRunning) => self.queue.remove(id),
            Err(error) => Err(error),
        }
    }

    /// The adapters of waiting requests that are not in the batch, in the order in which they will enter it. Take as
    /// many as there is room to load.
    pub fn prefetch(&self) -> impl Iterator<Item = A> {
        self.queue.heads().filter_map(|(_, adapter)| adapter).filter(|adapter| !self.queue.is_in_batch(adapter))
    }

    /// The adapters of the running requests, in the order in which they entered the batch.
    pub fn batch(&self) -> &[A] {
        self.queue.batch()
    }

    /// Running requests.
    pub fn num_running(&self) -> usize {
        self.queue.num_running()
    }

    /// Waiting requests.
    pub fn num_waiting(&self) -> usize {
        self.queue.num_waiting()
    }

    /// Offers overdue requests, oldest first, up to one whose adapter does not fit. Returns whether there is one.
    fn admit_overdue(
        &mut self,
        now: Duration,
        call: &mut Call<A>,
        offer: &mut impl FnMut(&Request<R, A>) -> Answer,
    ) -> Result<bool, Stopped> {
        let mut after = Unbounded;
        while let Some((key, adapter)) = self.queue.next_head(after) {
            if now.saturating_sub(key.arrival()) < self.limits.max_wait {
                break;
            }
            after = Excluded(key);
            let new = adapter.filter(|adapter| !self.queue.is_in_batch(adapter));
            if new.is_some() && !self.has_room(call) {
                return Ok(true);
            }
            if self.offer(key, adapter, call, offer)? == Offered::Skipped {
                call.kept.extend(new);
            }
        }
        Ok(false)
    }

    /// Offers requests that need no further adapter, oldest first.
    fn admit_to_batch(
        &mut self,
        call: &mut Call<A>,
        offer: &mut impl FnMut(&Request<R, A>) -> Answer,
    ) -> Result<(), Stopped> {
        loop {
            let adapters = self.queue.batch().iter().filter(|adapter| call.draining != Some(**adapter));
            let open = adapters.copied().map(Some).chain([None]).filter(|adapter| !call.skipped.contains(adapter));
            let oldest = open.filter_map(|adapter| Some((self.queue.head_of(adapter)?, adapter)));
            let Some((key, adapter)) = oldest.min_by_key(|(key, _)| *key) else { return Ok(()) };
            self.offer(key, adapter, call, offer)?;
        }
    }

    /// Offers all requests of further adapters, by the oldest request of each.
    fn admit_adapters(
        &mut self,
        call: &mut Call<A>,
        offer: &mut impl FnMut(&Request<R, A>) -> Answer,
    ) -> Result<(), Stopped> {
        let (mut after, mut passed_over) = (Unbounded, 0);
        while passed_over <= self.limits.max_adapters && self.has_room(call) {
            let Some((key, adapter)) = self.queue.next_head(after) else { break };
            after = Excluded(key);
            if adapter.is_none_or(|new| self.queue.is_in_batch(&new)) || call.skipped.contains(&adapter) {
                continue;
            }
            let mut offered = self.offer(key, adapter, call, offer)?;
            passed_over += usize::from(offered == Offered::Skipped);
            while offered != Offered::Skipped {
                let Some(next) = self.queue.head_of(adapter) else { break };
                offered = self.offer(next, adapter, call, offer)?;
            }
        }
        Ok(())
    }

    /// Offers the oldest waiting request of an adapter.
    fn offer(
        &mut self,
        key: Key,
        adapter: Option<A>,
        call: &mut Call<A>,
        offer: &mut impl FnMut(&Request<R, A>) -> Answer,
    ) -> Result<Offered, Stopped> {
        let request = self.queue.request(key, adapter);
        match offer(request) {
            Answer::Take => {
                self.queue.start(key, adapter);
                Ok(Offered::Taken)
            }
            Answer::Skip => {
                call.skipped.push(adapter);
                Ok(Offered::Skipped)
            }
            Answer::Fail => {
                let id = request.id.clone();
                let known = self.queue.remove(&id);
                debug_assert_eq!(known, Ok(()), "an offered request waits");
                Ok(Offered::Failed)
            }
            Answer::Stop => Err(Stopped),
        }
    }

    /// Whether a batch has room for one more adapter, beside those whose room is kept.
    fn has_room(&self, call: &Call<A>) -> bool {
        self.queue.batch().len() + call.kept.len() < self.limits.max_adapters
    }
}
