//! A pool of adapters that add a number to every output, which identifies them.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{AdapterPool, LoraLinear, Matrix, MatrixMut, Workspace},
    model::{LinearId, Model},
    plan::Capacity,
    pool::{AdapterId, Lease, PoolConfig, PoolError, Source, StreamId},
    routing::Batch,
};

use crate::common::{
    adapters::{Parts, parts, write},
    adding,
};

pub const FEATURES: usize = 256;
/// Size of an adapter of rank 1 or 8: A and B are padded to 8 ranks.
pub const BYTES: usize = 2 * 8 * FEATURES * size_of::<f32>();
const STREAM: StreamId = StreamId::FIRST;

pub struct Setup {
    pub pool: AdapterPool,
    pub model: Model,
    layer: LoraLinear,
}

pub fn model() -> (Model, LinearId) {
    let (model, ids) = adding::model(1, FEATURES);
    (model, ids[0])
}

/// The parts of an adapter that adds `value` where x is ones. `rank` is a power of two.
pub fn adding(rank: usize, value: f32) -> Parts {
    parts(1.0, &adding::modules(1, FEATURES, rank, |_| value))
}

pub fn adapter(rank: usize, value: f32) -> Arc<Adapter> {
    Arc::new(adding::adapter(1, FEATURES, rank, value))
}

/// An adapter whose weights, all ones, are only there once a lock is free.
pub fn slow(lock: &Arc<Mutex<()>>) -> Arc<Adapter> {
    struct Slow(Vec<u8>, Arc<Mutex<()>>);

    impl AsRef<[u8]> for Slow {
        fn as_ref(&self) -> &[u8] {
            drop(self.1.lock().unwrap());
            &self.0
        }
    }

    from_handle(Slow(bytemuck::cast_slice(&[1.0_f32; FEATURES]).to_vec(), Arc::clone(lock)))
}

/// An adapter whose weights come from this handle, `[FEATURES]` ones for each factor of rank 1.
pub fn from_handle(handle: impl AsRef<[u8]> + Send + Sync + 'static) -> Arc<Adapter> {
    let handle: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(handle);
    let part = |shape: [usize; 2]| Tensor::part(DType::F32, shape, Arc::clone(&handle), 0..FEATURES * 4).unwrap();
    let tensors = [("A", [1, FEATURES]), ("B", [FEATURES, 1])]
        .map(|(side, shape)| (format!("layers.0.m.lora_{side}.weight"), part(shape)));
    Arc::new(Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, tensors).unwrap())
}

impl Setup {
    /// A pool with room for `slots` adapters on the device, and for `host` in host memory.
    pub fn new(slots: usize, host: usize) -> Self {
        Self::with(slots, PoolConfig::arena_bytes(slots * BYTES).host_bytes(host * BYTES))
    }

    pub fn with(slots: usize, config: PoolConfig) -> Self {
        let (model, id) = model();
        let capacity = Capacity::tokens(8).slots(slots).rank(64);
        let pool = AdapterPool::new(&model, DType::F32, capacity, config).unwrap();
        let layer = LoraLinear::new(pool.weights(STREAM).unwrap(), id).unwrap();
        Self { pool, model, layer }
    }

    pub fn memory(&mut self, adapter: Arc<Adapter>) -> AdapterId {
        let source = Source::memory(adapter, &self.model, DType::F32).unwrap();
        self.pool.register(source).unwrap()
    }

    /// An adapter in memory that adds `value`.
    pub fn adding(&mut self, value: f32) -> AdapterId {
        self.memory(adapter(8, value))
    }

    /// An adapter that adds `value`, written to a directory.
    pub fn directory(&mut self, dir: &Path, value: f32) -> AdapterId {
        write(dir, &adding(8, value));
        let source = Source::directory(dir, &self.model, DType::F32).unwrap();
        self.pool.register(source).unwrap()
    }

    /// Leases a batch once its adapters are loaded.
    pub fn prepare(&mut self, ids: &[AdapterId]) -> Result<Vec<Lease>, PoolError> {
        loop {
            match self.pool.prepare(ids, STREAM) {
                Err(PoolError::Loading { .. }) => assert!(self.pool.wait(Duration::from_secs(30)), "nothing loads"),
                result => return result,
            }
        }
    }

    pub fn lease(&mut self, id: AdapterId) -> Lease {
        self.prepare(&[id]).unwrap().pop().unwrap()
    }

    /// Leases an adapter, steps with it, and releases it. Returns what it adds.
    pub fn use_once(&mut self, id: AdapterId) -> f32 {
        let lease = self.lease(id);
        let added = self.step(&[&lease])[0];
        drop(lease);
        self.pool.end_step(STREAM).unwrap();
        added
    }

    /// Waits until an adapter's read has ended.
    pub fn settle(&mut self) {
        while self.pool.wait(Duration::from_secs(30)) {}
        assert_eq!(self.pool.snapshot().reading, 0);
    }

    /// What a step adds for each lease.
    pub fn step(&self, leases: &[&Lease]) -> Vec<f32> {
        let slots: Vec<Slot> = leases.iter().map(|lease| lease.slot()).collect();
        let rows = slots.len();
        let (x, mut y) = (vec![1.0_f32; rows * FEATURES], vec![0.0; rows * FEATURES]);
        let (batch, mut workspace) = (Batch::new(&slots), Workspace::default());
        let mut step = self.pool.step(STREAM, &batch, &mut workspace).unwrap();
        let y_matrix = MatrixMut::new(&mut y, rows, FEATURES).unwrap();
        self.layer.add_delta(&mut step, Matrix::new(&x, rows, FEATURES).unwrap(), y_matrix).unwrap();
        adding::added(&y, FEATURES)
    }

    /// Unregisters all adapters. Then every byte and slot is free.
    pub fn finish(mut self) {
        for residency in self.pool.residencies() {
            self.pool.unregister(residency.id).unwrap();
        }
        self.settle();
        self.pool.end_step(STREAM).unwrap();
        let end = self.pool.snapshot();
        let left = (end.adapters, end.resident, end.host, end.leases, end.pinned, end.waiting);
        assert_eq!(left, (0, 0, 0, 0, 0, 0));
        assert_eq!(
            (end.device_memory.used, end.host_memory.used, self.pool.weights(STREAM).unwrap().usage().used),
            (0, 0, 0)
        );
        assert!(self.pool.weights(STREAM).unwrap().loaded().is_empty());
    }
}
