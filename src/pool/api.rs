//! The API of an adapter pool, which both backends have.

/// Defines the pool of a backend. `$docs` says what is particular to it.
macro_rules! adapter_pool {
    ($(#[$docs:meta])* $backend:ty) => {
        /// Adapters in three tiers: on the device, in host memory, and in their files. One thread owns the pool; loader threads of
        /// the pool read the files.
        ///
        /// A step is: [`prepare`](Self::prepare) its adapters, [`step`](Self::step), drop the leases of requests that have ended, and
        /// [`commit`](Self::commit) its stream. No call waits for a file or for the device, except [`wait`](Self::wait). [`pool`](crate::pool) has the
        /// whole story.
        $(#[$docs])*
        #[doc(alias = "LoRAModelManager")]
        pub struct AdapterPool {
            pool: Pool<$backend>,
        }

        impl std::fmt::Debug for AdapterPool {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct("AdapterPool").field("snapshot", &self.snapshot()).finish_non_exhaustive()
            }
        }

        impl AdapterPool {
            /// Makes an adapter known, under an id of its own. Loads nothing.
            ///
            /// # Errors
            /// [`PoolError::Slot`] if the source does not match the table, [`PoolError::TooLarge`] if it exceeds a tier.
            pub fn register(&mut self, source: Source) -> Result<AdapterId, PoolError> {
                self.pool.register(source)
            }

            /// Forgets an adapter: at once for new requests. Its memory returns when its last lease has ended and been committed.
            /// Requests that hold a lease keep it.
            ///
            /// # Errors
            /// [`PoolError::Unknown`].
            pub fn unregister(&mut self, id: AdapterId) -> Result<(), PoolError> {
                self.pool.unregister(id)
            }

            /// Size of an arena in bytes in which `count` adapters of ranks up to `max_rank` fit, even if they have factors for all
            /// modules of the model: for [`PoolConfig::arena_bytes`], or for the host tier.
            pub fn arena_bytes(model: &Model, dtype: DType, max_rank: usize, count: usize) -> usize {
                arena_bytes::<$backend>(model, dtype, max_rank, count)
            }

            /// Starts to bring an adapter to the device, and counts as a use.
            ///
            /// A prefetch evicts only adapters that were used before it. If later ones fill the device, it ends in the host tier.
            ///
            /// # Errors
            /// [`PoolError::Failed`] if the last load failed: [`retry`](Self::retry) tries again. [`PoolError::Unknown`].
            pub fn prefetch(&mut self, id: AdapterId) -> Result<(), PoolError> {
                self.pool.prefetch(id)
            }

            /// Like [`prefetch`](Self::prefetch), and forgets that the last load failed.
            ///
            /// # Errors
            /// [`PoolError::Unknown`].
            pub fn retry(&mut self, id: AdapterId) -> Result<(), PoolError> {
                self.pool.retry(id)
            }

            /// How a load ended, once for each: of registered adapters, in the order in which they ended. If an adapter is loaded again
            /// meanwhile, only its last load is reported. Calling this is optional.
            pub fn next_outcome(&mut self) -> Option<Outcome> {
                self.pool.next_outcome()
            }

            /// Keeps an adapter on the device once it is there. Does not load it.
            ///
            /// # Errors
            /// [`PoolError::Pinned`] if no slot, or no room for the largest of the other adapters, would be left. `Unknown`.
            pub fn pin(&mut self, id: AdapterId) -> Result<(), PoolError> {
                self.pool.set_pinned(id, true)
            }

            /// Undoes [`pin`](Self::pin).
            ///
            /// # Errors
            /// [`PoolError::Unknown`].
            pub fn unpin(&mut self, id: AdapterId) -> Result<(), PoolError> {
                self.pool.set_pinned(id, false)
            }

            /// Leases all adapters of a batch for launches on `stream`, or none: one lease for each id, in order. Ids may repeat.
            /// No adapter is evicted for another one of the batch. Launches wait on the device for adapters that are being copied.
            ///
            /// # Errors
            /// [`PoolError::Loading`] and [`PoolError::Full`]: retry later. [`PoolError::Failed`]: [`retry`](Self::retry)
            /// the adapter.
            /// [`PoolError::TooLarge`]: the batch never fits. [`PoolError::Unknown`], [`PoolError::NoSuchStream`].
            pub fn prepare(&mut self, ids: &[AdapterId], stream: StreamId) -> Result<Vec<Lease>, PoolError> {
                self.pool.prepare(ids, stream)
            }

            /// Leases one adapter, as [`prepare`](Self::prepare) does. Another adapter of the same batch may be evicted for it,
            /// unless it is leased.
            ///
            /// # Errors
            /// As for `prepare`.
            pub fn acquire(&mut self, id: AdapterId, stream: StreamId) -> Result<Lease, PoolError> {
                let mut leases = self.pool.prepare(&[id], stream)?;
                leases.pop().ok_or(PoolError::Unknown { id })
            }

            /// Marks the end of a step's launches on `stream`. Slots whose last lease ended before may be overwritten after it, and later
            /// steps of the stream refuse them. Enqueues nothing.
            ///
            /// An engine that drops leases after its last step commits once more, so that their memory can be used.
            ///
            /// # Errors
            /// [`PoolError::NoSuchStream`].
            pub fn commit(&mut self, stream: StreamId) -> Result<(), PoolError> {
                self.pool.commit(stream)
            }

            /// Takes note of reads, copies and leases that have ended, frees memory and continues prefetches. Every other call
            /// but reports does so, too.
            pub fn poll(&mut self) {
                self.pool.poll();
            }

            /// Blocks this thread until a loader thread has finished, or for `timeout`. Returns whether one has. Returns `false` at
            /// once if none is busy.
            pub fn wait(&mut self, timeout: Duration) -> bool {
                self.pool.wait(timeout)
            }

            /// The state of the pool and its counters. Takes time for each slot.
            pub fn snapshot(&self) -> Snapshot {
                self.pool.snapshot()
            }

            /// Where an adapter is; `None` if it is not registered.
            pub fn residency(&self, id: AdapterId) -> Option<Residency> {
                self.pool.residency(id)
            }

            /// Where all registered adapters are, by id. For routers that place requests.
            pub fn residencies(&self) -> Vec<Residency> {
                self.pool.residencies()
            }
        }
    };
}

pub(crate) use adapter_pool;
