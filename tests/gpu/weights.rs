//! The weight table: loading, replacing, running out of room.

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace},
    error::{LoadError, SlotError},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    residency::Resident,
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
    model: Model,
    id: LinearId,
    weights: WeightTable,
}

impl Setup {
    fn new(arena_bytes: usize) -> Self {
        let gpu = Gpu::new();
        let mut spec = ModelSpec::new();
        let id = spec.linear(Linear::new("m", Parallel::Replicated, FEATURES).slice("q", FEATURES)).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let capacity = Capacity::tokens(4).slots(4).rank(64);
        let weights = WeightTable::new(&gpu.queue, &model, DType::F32, capacity, arena_bytes).unwrap();
        Self { gpu, model, id, weights }
    }

    fn load(&self, slot: u16, rank: usize, value: f32) -> Result<Resident, LoadError> {
        let adapter = adapter(rank, value);
        self.weights.load(Slot::new(slot), &adapter.plan(&self.model, DType::F32).unwrap())
    }

    /// What each slot adds for an x of ones, over the number of features.
    fn deltas(&self) -> [f32; 4] {
        let Self { gpu: Gpu { queue, .. }, id, weights, .. } = self;
        let slots = [0, 1, 2, 3].map(Slot::new);
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

#[test]
#[ignore = "needs a GPU"]
fn a_slot_holds_what_was_loaded_last() {
    let setup = Setup::new(1 << 20);
    assert_eq!(setup.deltas(), [0.0; 4]);
    setup.load(1, 64, 3.0).unwrap();
    setup.load(3, 2, 5.0).unwrap();
    assert_eq!(setup.deltas(), [0.0, 3.0, 0.0, 5.0]);
    setup.load(1, 4, 7.0).unwrap();
    assert_eq!(setup.deltas(), [0.0, 7.0, 0.0, 5.0]);
    setup.weights.unload(Slot::new(3)).unwrap();
    assert_eq!(setup.deltas(), [0.0, 7.0, 0.0, 0.0]);
}

/// What the arena hands out again never shows through: neither in another slot, nor where the next adapter is smaller.
#[test]
#[ignore = "needs a GPU"]
fn memory_is_reused_cleanly() {
    // Room for two of the largest.
    let setup = Setup::new(2 * 64 * FEATURES * 2 * 4);
    for round in 1..200_u16 {
        let (slot, rank) = (round % 3, usize::from(round * 7 % 64) + 1);
        let value = f32::from(round);
        setup.weights.unload(Slot::new(slot)).unwrap();
        let before = setup.deltas();
        match setup.load(slot, rank, value) {
            Ok(_) => {
                let mut after = before;
                after[usize::from(slot)] = value;
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
fn what_does_not_fit_changes_nothing() {
    let setup = Setup::new(64 * FEATURES * 2 * 4);
    setup.load(2, 32, 9.0).unwrap();
    assert!(matches!(setup.load(2, 64, 1.0), Err(LoadError::Full { .. })));
    assert!(matches!(setup.load(4, 1, 1.0), Err(LoadError::Slot(SlotError::NoSuchSlot { .. }))));
    let wide = adapter(65, 1.0);
    let image = wide.plan(&setup.model, DType::F32).unwrap();
    let error = setup.weights.load(Slot::new(0), &image).unwrap_err();
    assert!(matches!(error, LoadError::Slot(SlotError::Rank { rank: 65, max_rank: 64 })), "{error}");
    let image = wide.plan(&setup.model, DType::F16).unwrap();
    let error = setup.weights.load(Slot::new(0), &image).unwrap_err();
    assert!(matches!(error, LoadError::Slot(SlotError::DType { .. })), "{error}");
    assert!(setup.weights.unload(Slot::BASE).is_err());
    assert_eq!(setup.deltas(), [0.0, 0.0, 9.0, 0.0]);
}
