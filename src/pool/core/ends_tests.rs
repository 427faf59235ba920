//! What has ended before a call that is the first to take note of it.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::mpsc::channel;

use super::{Limits, test_device::TestDevice};
use crate::{
    blocks::GRANULE_BYTES,
    pool::{AdapterPool, PoolError},
};

/// Whether its read is under way, has ended or has failed: nobody serves it, and its memory returns.
#[test]
fn an_adapter_that_is_unregistered_before_a_call_notes_its_end_is_not_loaded() {
    for end in [None, Some(true), Some(false)] {
        let limits = Limits { num_slots: 1, arena_bytes: GRANULE_BYTES, host_bytes: GRANULE_BYTES, max_reads: 1 };
        let mut pool = AdapterPool::within(TestDevice::new(1, 1, [1, 1], true), limits).unwrap();
        let (served, versions) = channel();
        let load = pool.load_then(GRANULE_BYTES, move |loaded| served.send(loaded).unwrap()).unwrap();
        end.into_iter().for_each(|is_good| pool.backend.tell_read(0, is_good));
        assert!(!load.has_ended().unwrap());
        pool.unregister(load.id()).unwrap();
        for ended in [versions.try_recv().unwrap().map(drop), load.has_ended().map(drop)] {
            assert!(matches!(ended, Err(PoolError::Unknown { id }) if id == load.id()), "{end:?}: {ended:?}");
        }
        if end.is_none() {
            pool.backend.tell_read(0, true);
        }
        while (0..=1).any(|stream| pool.backend.run(stream)) {}
        pool.poll();
        let snapshot = pool.snapshot();
        assert_eq!((snapshot.adapters, snapshot.device_memory.used, snapshot.host_memory.used), (0, 0, 0), "{end:?}");
    }
}
