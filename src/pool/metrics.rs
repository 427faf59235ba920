//! Export through the `metrics` facade.

use metrics::{counter, gauge};

use super::Snapshot;
use crate::slots::Usage;

impl Snapshot {
    /// Sets the counters and gauges of a pool, with `pool` as their label of that name. Costs a look-up for each of
    /// them, so call it as often as they are read.
    ///
    /// | counters | |
    /// |---|---|
    /// | `aril_pool_hits_total`, `.._misses_total`, `.._waits_total` | leases, as in [`Counters`](super::Counters) |
    /// | `aril_pool_refusals_total` | refused batches, by `reason`: `loading` or `full` |
    /// | `aril_pool_evictions_total` | by `tier`: `device` or `host` |
    /// | `aril_pool_moves_total` | adapters copied anew because memory was in pieces |
    /// | `aril_pool_loads_total`, `aril_pool_load_bytes_total` | by `tier`: copies to `device`, reads to `host` |
    /// | `aril_pool_read_microseconds_total` | time of the loader threads |
    /// | `aril_pool_failures_total` | failed reads and copies |
    ///
    /// | gauges | |
    /// |---|---|
    /// | `aril_pool_adapters` | by `state`: `registered`, `resident`, `copying`, `host`, `reading`, `waiting`, `leased`, `pinned` |
    /// | `aril_pool_leases` | |
    /// | `aril_pool_memory_bytes` | by `tier`, and by `state`: `used` or `free` |
    /// | `aril_pool_fragmentation` | by `tier`, from 0 to 1 |
    #[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
    pub fn export(&self, pool: &str) {
        let pool = || pool.to_owned();
        let all = &self.counters;
        for (name, value) in [
            ("aril_pool_hits_total", all.hits),
            ("aril_pool_misses_total", all.misses),
            ("aril_pool_waits_total", all.waits),
            ("aril_pool_moves_total", all.moves),
            ("aril_pool_failures_total", all.failures),
            ("aril_pool_read_microseconds_total", u64::try_from(all.read_time.as_micros()).unwrap_or(u64::MAX)),
        ] {
            counter!(name, "pool" => pool()).absolute(value);
        }
        for (reason, value) in [("loading", all.loading), ("full", all.full)] {
            counter!("aril_pool_refusals_total", "pool" => pool(), "reason" => reason).absolute(value);
        }
        let tiers = [
            ("device", self.device_memory, all.evictions, all.copies, all.copied_bytes),
            ("host", self.host_memory, all.host_evictions, all.reads, all.read_bytes),
        ];
        for (tier, memory, evictions, loads, bytes) in tiers {
            counter!("aril_pool_evictions_total", "pool" => pool(), "tier" => tier).absolute(evictions);
            counter!("aril_pool_loads_total", "pool" => pool(), "tier" => tier).absolute(loads);
            counter!("aril_pool_load_bytes_total", "pool" => pool(), "tier" => tier).absolute(bytes);
            export_memory(&pool(), tier, &memory);
        }
        for (state, value) in [
            ("registered", self.adapters),
            ("resident", self.resident),
            ("copying", self.copying),
            ("host", self.host),
            ("reading", self.reading),
            ("waiting", self.waiting),
            ("leased", self.leased),
            ("pinned", self.pinned),
        ] {
            gauge!("aril_pool_adapters", "pool" => pool(), "state" => state).set(number(value));
        }
        gauge!("aril_pool_leases", "pool" => pool()).set(number(self.leases));
    }
}

fn export_memory(pool: &str, tier: &'static str, memory: &Usage) {
    let pool = || pool.to_owned();
    for (state, bytes) in [("used", memory.used), ("free", memory.free())] {
        gauge!("aril_pool_memory_bytes", "pool" => pool(), "tier" => tier, "state" => state).set(number(bytes));
    }
    gauge!("aril_pool_fragmentation", "pool" => pool(), "tier" => tier).set(memory.fragmentation());
}

#[expect(clippy::cast_precision_loss, reason = "gauges are f64")]
fn number(value: usize) -> f64 {
    value as f64
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{Arc, Mutex, atomic::AtomicU64, atomic::Ordering},
    };

    use metrics::{
        Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit, with_local_recorder,
    };

    use crate::pool::{
        AdapterId,
        state::{Limits, State},
    };

    /// The values by name and labels.
    #[derive(Default)]
    struct Values(Mutex<BTreeMap<String, Arc<AtomicU64>>>);

    impl Values {
        fn of(&self, key: &Key) -> Arc<AtomicU64> {
            let labels: Vec<_> = key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
            let name = format!("{} {}", key.name(), labels.join(" "));
            Arc::clone(self.0.lock().unwrap().entry(name).or_default())
        }
    }

    impl Recorder for Values {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.of(key))
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.of(key))
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn counters_and_gauges_are_those_of_the_snapshot() {
        let limits = Limits { num_slots: 2, arena_bytes: 1 << 20, host_bytes: 1 << 21, max_reads: 1 };
        let mut state = State::new(limits).unwrap();
        let id = AdapterId::unique();
        state.register(id, 1000).unwrap();
        state.set_pinned(id, true).unwrap();
        state.counters.hits = 7;
        state.counters.full = 3;
        state.counters.host_evictions = 5;
        let values = Values::default();
        with_local_recorder(&values, || state.snapshot().export("rank 0"));
        let values = values.0.into_inner().unwrap();
        let bits = |name: &str| values[name].load(Ordering::SeqCst);
        assert_eq!(bits("aril_pool_hits_total pool=rank 0"), 7);
        assert_eq!(bits("aril_pool_refusals_total pool=rank 0 reason=full"), 3);
        assert_eq!(bits("aril_pool_evictions_total pool=rank 0 tier=host"), 5);
        let gauge = |name: &str| f64::from_bits(bits(name));
        assert_eq!(gauge("aril_pool_adapters pool=rank 0 state=registered").to_bits(), 1.0_f64.to_bits());
        assert_eq!(gauge("aril_pool_adapters pool=rank 0 state=pinned").to_bits(), 1.0_f64.to_bits());
        let free = f64::from(1 << 21);
        assert_eq!(gauge("aril_pool_memory_bytes pool=rank 0 tier=host state=free").to_bits(), free.to_bits());
        assert_eq!(values.len(), 6 + 2 + 6 + 6 + 8 + 1);
    }
}
