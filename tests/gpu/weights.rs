//! The weight table: loading, replacing, running out of room.

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{LaunchError, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace},
    error::SlotError,
    model::{Linear, LinearId, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};

use crate::device::Gpu;

const FEATURES: usize = 128;

/// An adapter that adds `value` times the sum of x.
fn adapter(rank: usize, value: f32) -> Adapter {
    let tensor = |shape: [usize; 2], value: f32| {
        let values = vec![value; shape[0] * shape[1]];
        Tensor::new(DType::F32, shape.to_vec(), bytemuck::cast_slice(&values).to_vec()).unwrap()
    };
    let tensors = [
        ("m.q.lora_A.weight".to_owned(), tensor([rank, FEATURES], 1.0)),
        ("m.q.lora_B.weight".to_owned(), tensor([FEATURES, rank], value / rank as f32)),
    ];
    Adapter::from_tensors(&format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#), tensors).unwrap()
}

struct Setup {
    gpu: Gpu,
    model: ModelSpec,
    id: LinearId,
    capacity: Capacity,
    weights: WeightTable<f32>,
}

impl Setup {
    fn new(arena_bytes: usize) -> Self {
        let gpu = Gpu::new();
        let mut model = ModelSpec::new(TpRank::SINGLE);
        let id = model.linear(Linear::new("m", Parallel::Replicated, FEATURES).slice("q", FEATURES)).unwrap();
        let capacity = Capacity { max_tokens: 4, num_slots: 4, max_rank: 64 };
        let weights = WeightTable::new(&gpu.kernels, &model, capacity, arena_bytes, &gpu.stream).unwrap();
        Self { gpu, model, id, capacity, weights }
    }

    fn load(&mut self, slot: u16, rank: usize, value: f32) -> Result<(), LaunchError> {
        let adapter = adapter(rank, value);
        self.weights.load(Slot::new(slot), &adapter.plan(&self.model, DType::F32).unwrap(), &self.gpu.stream)
    }

    /// What each slot adds for an x of ones, over the number of features.
    fn deltas(&self) -> [f32; 4] {
        let Self { gpu: Gpu { stream, kernels, .. }, model, id, capacity, weights } = self;
        let slots = [0, 1, 2, 3].map(Slot::new);
        let mut routing = Routing::new(kernels, *capacity, 1, stream).unwrap();
        let batch = routing.update(&Batch::new(&slots), stream).unwrap();
        let layer = LoraLinear::new(kernels, model, *id, *capacity).unwrap();
        let mut workspace = Workspace::new(kernels, layer.plan().workspace_bytes(), stream).unwrap();
        let x = self.gpu.upload(&[1.0_f32; 4 * FEATURES]);
        let mut y = self.gpu.upload(&[0.0_f32; 4 * FEATURES]);
        let x_matrix = Matrix::new(x.view(), 4, FEATURES).unwrap();
        let y_matrix = MatrixMut::new(y.view_mut(), 4, FEATURES).unwrap();
        layer.add_delta(x_matrix, y_matrix, weights, &batch, &mut workspace, stream).unwrap();
        let y = y.read::<f32>();
        [0, 1, 2, 3].map(|token| y[token * FEATURES] / FEATURES as f32)
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_slot_holds_what_was_loaded_last() {
    let mut setup = Setup::new(1 << 20);
    assert_eq!(setup.deltas(), [0.0; 4]);
    setup.load(1, 64, 3.0).unwrap();
    setup.load(3, 2, 5.0).unwrap();
    assert_eq!(setup.deltas(), [0.0, 3.0, 0.0, 5.0]);
    setup.load(1, 4, 7.0).unwrap();
    assert_eq!(setup.deltas(), [0.0, 7.0, 0.0, 5.0]);
    setup.weights.unload(Slot::new(3), &setup.gpu.stream).unwrap();
    assert_eq!(setup.deltas(), [0.0, 7.0, 0.0, 0.0]);
}

/// What the arena hands out again never shows through: neither in another slot, nor where the next adapter is smaller.
#[test]
#[ignore = "needs a GPU"]
fn memory_is_reused_cleanly() {
    // Room for two of the largest.
    let mut setup = Setup::new(2 * 64 * FEATURES * 2 * 4);
    for round in 1..200_u16 {
        let (slot, rank) = (round % 3, usize::from(round * 7 % 64) + 1);
        let value = f32::from(round);
        setup.weights.unload(Slot::new(slot), &setup.gpu.stream).unwrap();
        let before = setup.deltas();
        match setup.load(slot, rank, value) {
            Ok(()) => {
                let mut after = before;
                after[usize::from(slot)] = value;
                // Sums of rank terms value / rank are not exact.
                let near = setup.deltas().into_iter().zip(after).all(|(got, want)| (got - want).abs() <= want * 1e-5);
                assert!(near, "round {round}");
            }
            Err(LaunchError::Full { .. }) => assert_eq!(setup.deltas(), before, "round {round}"),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn what_does_not_fit_changes_nothing() {
    let mut setup = Setup::new(64 * FEATURES * 2 * 4);
    setup.load(2, 32, 9.0).unwrap();
    assert!(matches!(setup.load(2, 64, 1.0), Err(LaunchError::Full { .. })));
    assert!(matches!(setup.load(4, 1, 1.0), Err(LaunchError::Slot(SlotError::NoSuchSlot { .. }))));
    let wide = adapter(65, 1.0);
    let image = wide.plan(&setup.model, DType::F32).unwrap();
    let error = setup.weights.load(Slot::new(0), &image, &setup.gpu.stream).unwrap_err();
    assert!(matches!(error, LaunchError::Slot(SlotError::Rank { rank: 65, max_rank: 64 })), "{error}");
    let image = wide.plan(&setup.model, DType::F16).unwrap();
    let error = setup.weights.load(Slot::new(0), &image, &setup.gpu.stream).unwrap_err();
    assert!(matches!(error, LaunchError::Slot(SlotError::DType { .. })), "{error}");
    assert!(setup.weights.unload(Slot::BASE, &setup.gpu.stream).is_err());
    assert_eq!(setup.deltas(), [0.0, 0.0, 9.0, 0.0]);
}
