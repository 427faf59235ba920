use std::time::Duration;

/// What a batch may hold, and when a request is overdue.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    pub(super) max_adapters: usize,
    pub(super) max_wait: Duration,
}

impl Limits {
    /// Batches of up to `max_adapters` adapters. Requests are overdue when they have waited for
    /// `max_wait`; with [`Duration::ZERO`], adapters enter the batch strictly by the age of their requests.
    ///
    /// A pool with more slots than `max_adapters` can load the adapters that are next while the batch runs.
    #[doc(alias = "max_loras")]
    #[doc(alias = "max_loras_per_batch")]
    pub const fn new(max_adapters: usize, max_wait: Duration) -> Self {
        Self { max_adapters, max_wait }
    }
}
