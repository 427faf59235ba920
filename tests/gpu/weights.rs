//! The weight table: loading, replacing, running out of memory.

use aril::{
    DType, Slot,
    adapter::Adapter,
    cuda::{LaunchError, LoraLinear, Matrix, MatrixMut, Routing, Staging, WeightTable, Workspace},
    error::LoadError,
    model::{LinearId, Model},
    plan::Capacity,
    routing::Batch,
};

use crate::{
    common::{adding, small::choose},
    device::Gpu,
    setup::{Spin, slots_of},
};

const FEATURES: usize = 128;

/// An adapter that adds `value` times the sum of x.
fn adapter(rank: usize, value: f32) -> Adapter {
    adding::adapter(1, FEATURES, rank, value * FEATURES as f32)
}

struct Setup {
    gpu: Gpu,
    model: Model,
    id: LinearId,
    weights: WeightTable,
}

impl Setup {
    fn new(arena_bytes: usize) -> Self {
        let gpu = Gpu::new();
        let (model, ids) = adding::model(1, FEATURES);
        let capacity = Capacity::tokens(4).slots(4).rank(64);
        let weights = WeightTable::new(&gpu.queue, &model, DType::F32, capacity, arena_bytes).unwrap();
        Self { gpu, model, id: ids[0], weights }
    }

    fn load(&self, slot: usize, rank: usize, value: f32) -> Result<Slot, LoadError> {
        let adapter = adapter(rank, value);
        self.weights.load(slot, &adapter.plan(&self.model, DType::F32).unwrap())
    }

    /// What each slot adds for an x of ones, divided by the number of features.
    fn deltas(&self) -> [f32; 4] {
        let Self { gpu: Gpu { queue, .. }, id, weights, .. } = self;
        let slots = slots_of(weights, &[0, 1, 2, 3]);
        let mut routing = Routing::new(queue, weights.capacity(), 1).unwrap();
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        let layer = LoraLinear::new(weights, *id).unwrap();
        let mut workspace = Workspace::new(weights).unwrap();
        let x = self.gpu.upload(&[1.0_f32; 4 * FEATURES]);
        let mut y = self.gpu.upload(&[0.0_f32; 4 * FEATURES]);
        let x_matrix = Matrix::new(x.view::<f32>(), 4, FEATURES).unwrap();
        let y_matrix = MatrixMut::new(y.view_mut(), 4, FEATURES).unwrap();
        layer.add_delta(&mut weights.step(&batch, &mut workspace).unwrap(), x_matrix, y_matrix).unwrap();
        let y = y.read::<f32>();
        [0, 1, 2, 3].map(|token| y[token * FEATURES] / FEATURES as f32)
    }
}

/// An arena sized for adapters holds them in any order, and not one more as large as the smallest.
#[test]
#[ignore = "needs a GPU"]
fn a_counted_arena_holds_its_adapters() {
    const RANKS: [usize; 4] = [64, 5, 33, 17];
    let mut setup = Setup::new(1);
    let adapters: Vec<_> = RANKS.iter().map(|&rank| adapter(rank, rank as f32)).collect();
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(&setup.model, DType::F32).unwrap()).collect();
    let bytes = WeightTable::arena_bytes(&images);
    let exact: usize = images.iter().map(|image| image.bytes()).sum();
    assert!((exact..exact * 5 / 4).contains(&bytes), "{bytes} for {exact}");
    for first in 0..RANKS.len() {
        let capacity = setup.weights.capacity();
        setup.weights = WeightTable::new(&setup.gpu.queue, &setup.model, DType::F32, capacity, bytes).unwrap();
        for number in 0..RANKS.len() {
            let index = (first + number) % RANKS.len();
            setup.weights.load(index, &images[index]).unwrap();
        }
        assert!(!setup.weights.fits(&images[0]));
        let near = setup.deltas().into_iter().zip(RANKS).all(|(got, rank)| (got - rank as f32).abs() <= 1e-3);
        assert!(near, "{:?}", setup.deltas());
    }
}

/// Old contents of reused arena memory never show: neither in another slot, nor past a smaller adapter.
#[test]
#[ignore = "needs a GPU"]
fn memory_is_reused_cleanly() {
    // Room for two of the largest adapters.
    let setup = Setup::new(2 * 64 * FEATURES * 2 * 4);
    for round in 1..choose(200_u16, 40) {
        let (slot, rank) = (usize::from(round % 3), usize::from(round * 7 % 64) + 1);
        let value = f32::from(round);
        setup.weights.unload(slot).unwrap();
        let before = setup.deltas();
        match setup.load(slot, rank, value) {
            Ok(_) => {
                let mut after = before;
                after[slot] = value;
                // Sums of rank terms value / rank are not exact.
                let near = setup.deltas().into_iter().zip(after).all(|(got, want)| (got - want).abs() <= want * 1e-5);
                assert!(near, "round {round}");
            }
            Err(LoadError::Full { .. }) => assert_eq!(setup.deltas(), before, "round {round}"),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn room_is_filled_by_a_staging_of_the_same_context() {
    let (setup, other) = (Setup::new(1 << 20), Gpu::new());
    let adapter = adapter(4, 6.0);
    let image = adapter.plan(&setup.model, DType::F32).unwrap();
    let mut elsewhere = Staging::new(&other.queue).unwrap();
    let filled = setup.weights.reserve(&image).unwrap().fill(&image, &mut elsewhere).unwrap();
    setup.weights.clone().commit(2, filled).unwrap();
    assert_eq!(setup.deltas(), [0.0, 0.0, 6.0, 0.0]);
    let mut elsewhere = Staging::new(&setup.gpu.foreign()).unwrap();
    let error = setup.weights.reserve(&image).unwrap().fill(&image, &mut elsewhere).unwrap_err();
    assert!(matches!(error, LoadError::Device(LaunchError::WrongContext { operand: "the staging" })), "{error}");
    assert_eq!(setup.deltas(), [0.0, 0.0, 6.0, 0.0]);
}

/// Progress counts the image's bytes and ends with all of them.
#[test]
#[ignore = "needs a GPU"]
fn progress_ends_with_every_byte() {
    let setup = Setup::new(1 << 20);
    let adapter = adapter(64, 2.0);
    let image = adapter.plan(&setup.model, DType::F32).unwrap();
    let mut seen = Vec::new();
    setup.weights.load_with_progress(1, &image, |bytes| seen.push(bytes)).unwrap();
    assert!(seen.is_sorted() && seen.last() == Some(&image.bytes()), "{seen:?}");
    assert_eq!(setup.deltas(), [0.0, 2.0, 0.0, 0.0]);
}

/// A host that runs ahead gets an error, and may wait for a buffer.
#[test]
#[ignore = "needs a GPU"]
fn a_busy_routing_may_be_waited_for() {
    let setup = Setup::new(1 << 20);
    let slots = [setup.load(0, 2, 3.0).unwrap(); 4];
    let mut routing = Routing::new(&setup.gpu.queue, setup.weights.capacity(), 2).unwrap();
    let spin = Spin::new(&setup.gpu);
    let spun = spin.run(200);
    for _ in 0..2 {
        assert!(routing.is_ready().unwrap());
        routing.update(&Batch::new(&slots)).unwrap();
    }
    assert!(!routing.is_ready().unwrap());
    let error = routing.update(&Batch::new(&slots)).unwrap_err();
    assert!(matches!(error, LaunchError::Busy { steps_in_flight: 2 }), "{error}");
    assert!(!spun.is_complete(), "the test takes longer than the queue was kept busy for");
    routing.wait().unwrap();
    assert!(spun.is_complete() && routing.is_ready().unwrap());
    let batch = routing.update(&Batch::new(&slots)).unwrap();
    assert_eq!(batch.num_tokens(), 4);
}
