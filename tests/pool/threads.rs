//! One thread owns the pool; others make sources, and drop leases.

use std::{
    sync::mpsc::channel,
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType,
    pool::{Lease, Source, StreamId},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::setup::{Setup, adapter};

/// Requests hold their leases on other threads for a few steps, while adapters come and go and none is ever another.
#[test]
fn leases_end_on_other_threads() {
    const ADAPTERS: usize = 24;
    let mut setup = Setup::new(5, 8);
    let mut rng = StdRng::seed_from_u64(7);
    let model = setup.model.clone();
    let (sources, made) = channel();
    let (sender, leases) = channel::<Vec<Lease>>();
    thread::scope(|threads| {
        threads.spawn(move || {
            for value in 1..=ADAPTERS {
                let source = Source::memory(adapter(8, value as f32), &model, DType::F32).unwrap();
                sources.send((source, value as f32)).unwrap();
            }
        });
        threads.spawn(move || {
            let mut held = Vec::new();
            for batch in leases {
                held.push(batch);
                if held.len() > 1 {
                    drop(held.remove(0));
                }
            }
        });
        let mut ids: Vec<_> =
            made.iter().map(|(source, value)| (setup.pool.register(source).unwrap(), value)).collect();
        let (mut served, mut step) = (0, 0);
        let limit = Instant::now() + Duration::from_secs(120);
        while served < 1000 {
            assert!(Instant::now() < limit, "{served} of {step} steps were served");
            let batch: Vec<_> = (0..2).map(|_| ids[rng.random_range(0..ids.len())]).collect();
            let wanted = batch.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            if let Ok(leases) = setup.prepare(&wanted) {
                let added = setup.step(&leases.iter().collect::<Vec<_>>());
                assert_eq!(added, batch.iter().map(|(_, value)| *value).collect::<Vec<_>>());
                sender.send(leases).unwrap();
                served += 1;
            } else {
                setup.pool.wait(Duration::from_millis(1));
            }
            setup.pool.end_step(StreamId::FIRST).unwrap();
            if step % 100 == 99 {
                // A new version of one of them.
                let at = rng.random_range(0..ids.len());
                let value = (100 + step) as f32;
                let new = setup.adding(value);
                setup.pool.unregister(std::mem::replace(&mut ids[at], (new, value)).0).unwrap();
            }
            step += 1;
        }
        drop(sender);
    });
    setup.pool.end_step(StreamId::FIRST).unwrap();
    let counters = setup.pool.snapshot().counters;
    assert!(counters.evictions > 100 && counters.host_evictions > 100, "{counters:?}");
    setup.finish();
}
