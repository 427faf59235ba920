//! Numbers that tell objects of a process apart.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that no other call of this process returns, from 1. A process does not count to 2^64.
pub(crate) fn unique() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}
