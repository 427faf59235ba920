//! What cannot be loaded is an error of that adapter alone.

use std::{
    fs::{self, OpenOptions},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use aril::{
    DType,
    adapter::AdapterError,
    error::LoadError,
    pool::{AdapterId, PoolConfig, PoolError, Source, StreamId, Version},
};

use crate::{
    common::adapters::{tensor, write, write_sharded},
    setup::{BYTES, FEATURES, Setup, adapter, adding, from_handle, slow},
};

const WEIGHTS: &str = "adapter_model.safetensors";

/// The error of an adapter that cannot be loaded.
fn failure(setup: &mut Setup, id: AdapterId) -> Arc<LoadError> {
    match setup.prepare(&[id]) {
        Err(PoolError::Failed { id: failed, error }) if failed == id => error,
        other => panic!("{other:?}"),
    }
}

fn is_changed(error: &LoadError, file: &str) -> bool {
    matches!(error, LoadError::Adapter(AdapterError::Changed { path }) if path.ends_with(file))
}

/// An adapter in a directory beside a good one, which `damage` must not affect.
fn damaged(damage: impl FnOnce(&Path)) -> (Setup, AdapterId, tempfile::TempDir) {
    let mut setup = Setup::new(2, 2);
    let (good, dir) = (setup.adding(1.0), tempfile::tempdir().unwrap());
    let id = setup.directory(dir.path(), 2.0);
    damage(dir.path());
    assert_eq!(setup.use_once(good), 1.0);
    let load = setup.pool.prefetch(id).unwrap();
    failure(&mut setup, id);
    let batch = setup.prepare(&[good, id]);
    assert!(matches!(batch, Err(PoolError::Failed { id: failed, .. }) if failed == id));
    assert_eq!(setup.pool.snapshot().leases, 0, "a refused batch holds leases");
    assert_eq!(setup.use_once(good), 1.0);
    let snapshot = setup.pool.snapshot();
    assert_eq!((snapshot.counters.failures, snapshot.waiting, snapshot.reading), (1, 0, 0));
    // A prefetch does not forget it.
    let failed = |error: Option<PoolError>| matches!(error, Some(PoolError::Failed { id: failed, .. }) if failed == id);
    assert!(failed(setup.pool.prefetch(id).err()) && failed(setup.pool.prepare(&[id], StreamId::FIRST).err()));
    let failure = setup.pool.residency(id).unwrap().failure.unwrap();
    assert!(load.id() == id && setup.pool.loading(id).is_none());
    let ended = load.has_ended();
    assert!(
        matches!(&ended, Err(PoolError::Failed { id: failed, error }) if *failed == id && Arc::ptr_eq(error, &failure))
    );
    (setup, id, dir)
}

#[test]
fn a_file_that_vanished_is_tried_again_by_a_retry() {
    let (mut setup, id, dir) = damaged(|dir| fs::rename(dir.join(WEIGHTS), dir.join("away")).unwrap());
    let error = failure(&mut setup, id);
    assert!(matches!(&*error, LoadError::Adapter(AdapterError::NoWeights { .. })), "{error}");
    fs::rename(dir.path().join("away"), dir.path().join(WEIGHTS)).unwrap();
    failure(&mut setup, id);
    let load = setup.pool.retry(id).unwrap();
    assert_eq!(setup.use_once(id), 2.0);
    assert!(load.has_ended().unwrap() && setup.pool.residency(id).unwrap().failure.is_none());
    setup.finish();
}

#[test]
fn a_truncated_file() {
    let (mut setup, id, _dir) = damaged(|dir| {
        let file = OpenOptions::new().write(true).open(dir.join(WEIGHTS)).unwrap();
        file.set_len(file.metadata().unwrap().len() - 4).unwrap();
    });
    let error = failure(&mut setup, id);
    assert!(matches!(&*error, LoadError::Adapter(AdapterError::Safetensors { .. })), "{error}");
    setup.finish();
}

#[test]
fn another_adapter_in_the_same_file() {
    // Replaced by renaming, and overwritten in place: the same shapes, and other weights.
    let (mut setup, id, dir) = damaged(|dir| {
        let other = tempfile::tempdir().unwrap();
        write(other.path(), &adding(8, 3.0));
        fs::copy(other.path().join(WEIGHTS), dir.join("other")).unwrap();
        fs::rename(dir.join("other"), dir.join(WEIGHTS)).unwrap();
    });
    assert!(is_changed(&failure(&mut setup, id), WEIGHTS));
    // Under an id of its own, it is served.
    let source = Source::directory(dir.path(), &setup.model, DType::F32).unwrap();
    let new = setup.pool.register(source).unwrap();
    assert_eq!(setup.use_once(new), 3.0);
    setup.finish();
    let (mut setup, id, _dir) = damaged(|dir| {
        let file = OpenOptions::new().write(true).open(dir.join(WEIGHTS)).unwrap();
        let time = file.metadata().unwrap().modified().unwrap();
        file.set_modified(time + std::time::Duration::from_millis(1)).unwrap();
    });
    assert!(is_changed(&failure(&mut setup, id), WEIGHTS));
    setup.finish();
}

#[test]
fn another_configuration() {
    let (mut setup, id, _dir) = damaged(|dir| {
        let config = fs::read_to_string(dir.join("adapter_config.json")).unwrap();
        fs::write(dir.join("adapter_config.json"), config.replace("\"lora_alpha\":8", "\"lora_alpha\":16")).unwrap();
    });
    assert!(is_changed(&failure(&mut setup, id), "adapter_config.json"));
    setup.finish();
}

#[test]
fn shards_are_read() {
    let (mut setup, dir) = (Setup::new(1, 1), tempfile::tempdir().unwrap());
    write_sharded(dir.path(), &adding(8, 6.0));
    let source = Source::directory(dir.path(), &setup.model, DType::F32).unwrap();
    let id = setup.pool.register(source).unwrap();
    assert_eq!(setup.use_once(id), 6.0);
    setup.finish();
}

#[test]
fn what_cannot_be_an_adapter_has_no_source() {
    let (setup, dir) = (Setup::new(1, 1), tempfile::tempdir().unwrap());
    let source = || Source::directory(dir.path(), &setup.model, DType::F32);
    assert!(matches!(source(), Err(AdapterError::NoConfig { .. })));
    write(dir.path(), &adding(8, 1.0));
    let file = OpenOptions::new().write(true).open(dir.path().join(WEIGHTS)).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    assert!(matches!(source(), Err(AdapterError::Safetensors { .. })));
}

/// Weights that cannot be read once it is set.
struct Panicking(Vec<u8>, Arc<AtomicBool>);

impl AsRef<[u8]> for Panicking {
    fn as_ref(&self) -> &[u8] {
        assert!(!self.1.load(Ordering::SeqCst), "no weights today");
        &self.0
    }
}

#[test]
fn a_loader_that_panics_fails_one_adapter() {
    let mut setup = Setup::new(2, 2);
    let panics = Arc::new(AtomicBool::new(false));
    let ones = bytemuck::cast_slice(&[1.0_f32; FEATURES]).to_vec();
    let id = setup.memory(from_handle(Panicking(ones, Arc::clone(&panics))));
    let good = setup.adding(1.0);
    panics.store(true, Ordering::SeqCst);
    for _ in 0..4 {
        let error = failure(&mut setup, id);
        assert!(matches!(&*error, LoadError::Panicked { message } if message.contains("no weights today")), "{error}");
        assert_eq!(setup.use_once(good), 1.0);
        setup.pool.retry(id).unwrap();
        setup.settle();
    }
    panics.store(false, Ordering::SeqCst);
    setup.pool.retry(id).unwrap();
    assert_eq!(setup.use_once(id), FEATURES as f32);
    setup.finish();
}

/// An adapter whose read takes long does not delay those of the other loader, whatever threads wait for it.
#[test]
fn a_slow_read_delays_no_other() {
    let mut setup = Setup::with(3, PoolConfig::arena_bytes(3 * BYTES).loaders(2).packers(1));
    let lock = Arc::new(Mutex::new(()));
    let slow = setup.memory(slow(&lock));
    let others = [1.0, 2.0].map(|value| setup.adding(value));
    let held = lock.lock().unwrap();
    setup.pool.prefetch(slow).unwrap();
    for (id, value) in others.into_iter().zip([1.0, 2.0]) {
        assert_eq!(setup.use_once(id), value);
    }
    assert_eq!(setup.pool.snapshot().reading, 1);
    drop(held);
    assert_eq!(setup.use_once(slow), FEATURES as f32);
    setup.finish();
}

#[test]
fn weights_without_a_finite_value() {
    let mut setup = Setup::new(1, 1);
    let mut values = [1.0_f32; FEATURES];
    values[3] = f32::NAN;
    let id = setup.memory(from_handle(tensor(DType::F32, &[FEATURES], &values).bytes().to_vec()));
    let error = failure(&mut setup, id);
    assert!(matches!(&*error, LoadError::Adapter(AdapterError::Unrepresentable { .. })), "{error}");
    assert_eq!(setup.pool.snapshot().host_memory.used, 0);
    setup.finish();
}

/// Each is called once, in the same call, and its version stays or goes as it says.
#[test]
fn a_callback_that_panics_keeps_no_other_from_its_version() {
    let mut setup = Setup::new(2, 4);
    let kept = Arc::new(Mutex::new(Vec::new()));
    let loads: Vec<_> = (0..4)
        .map(|number| {
            let source = Source::memory(adapter(8, 1.0), &setup.model, DType::F32).unwrap();
            let kept = Arc::clone(&kept);
            let then = move |loaded: Result<Version, PoolError>| {
                let version = loaded.unwrap();
                if number % 2 == 0 {
                    std::panic::panic_any(number);
                }
                kept.lock().unwrap().push(version);
            };
            setup.pool.load_then(source, then).unwrap()
        })
        .collect();
    for load in &loads {
        assert!(setup.pool.wait_for(load, Duration::from_secs(30)).unwrap());
    }
    setup.pool.poll();
    let ids: Vec<_> = kept.lock().unwrap().iter().map(Version::id).collect();
    assert_eq!(ids, [1, 3].map(|number: usize| loads[number].id()));
    assert_eq!(setup.pool.snapshot().adapters, 2);
    assert_eq!(setup.use_once(ids[0]), 1.0);
}
