//! The skeleton of an engine on the CPU: adapters by name, batches that mix adapters, and a loader thread beside the
//! steps.
//!
//! The model is one layer whose base computes `y = x`. A request keeps the [`Slot`] of its adapter from its admission
//! on. A step serves this adapter or reports that it is gone; it never serves the adapter that took its slot.

#![forbid(unsafe_code)]

use std::{collections::BTreeMap, error::Error, sync::Mutex, thread};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    error::SlotError,
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const FEATURES: usize = 4;
const NUM_SLOTS: usize = 2;
const POISONED: &str = "a thread that loaded has panicked";

struct Engine {
    weights: WeightTable,
    layer: LoraLinear,
    adapters: Mutex<BTreeMap<String, Slot>>,
}

/// One token and its adapter.
struct Request {
    slot: Slot,
    x: [f32; FEATURES],
}

impl Engine {
    fn new() -> Result<Self> {
        let mut spec = ModelSpec::new();
        let proj = spec.linear(Linear::new("", Parallel::Replicated, FEATURES).slice("proj", FEATURES))?;
        let capacity = Capacity::tokens(8).slots(NUM_SLOTS).rank(8);
        let weights = WeightTable::new(&spec.shard(TpRank::SINGLE)?, DType::F32, capacity, 1 << 20)?;
        Ok(Self { layer: LoraLinear::new(&weights, proj)?, weights, adapters: Mutex::default() })
    }

    /// Loads an adapter into a free slot. An adapter of the same name is replaced.
    fn load(&self, name: &str, adapter: &Adapter) -> Result<()> {
        let image = adapter.plan(self.weights.model(), DType::F32)?;
        // Packing takes long. It holds no lock, and no step waits for it.
        let filled = self.weights.reserve(&image)?.fill(&image, &mut self.weights.staging()?)?;
        let mut adapters = self.adapters.lock().map_err(|_| POISONED)?;
        let free = || (0..NUM_SLOTS).find(|&slot| self.weights.get(slot).is_none());
        let slot = adapters.get(name).and_then(|old| old.index()).or_else(free).ok_or("all slots are taken")?;
        adapters.insert(name.to_owned(), self.weights.commit(slot, filled)?);
        Ok(())
    }

    fn unload(&self, name: &str) -> Result<()> {
        let mut adapters = self.adapters.lock().map_err(|_| POISONED)?;
        let slot = adapters.remove(name).and_then(Slot::index).ok_or("there is no such adapter")?;
        Ok(self.weights.unload(slot)?)
    }

    fn admit(&self, adapter: Option<&str>, x: [f32; FEATURES]) -> Result<Request> {
        let adapters = self.adapters.lock().map_err(|_| POISONED)?;
        let slot = |name| adapters.get(name).copied().ok_or("there is no such adapter");
        Ok(Request { slot: adapter.map_or(Ok(Slot::BASE), slot)?, x })
    }

    /// The output of each request, or an error if its adapter is gone.
    fn step(&self, requests: &[Request], workspace: &mut Workspace) -> Result<Vec<Result<[f32; FEATURES], SlotError>>> {
        // A step refuses a batch that names an adapter which is gone. From its start on, it keeps its adapters,
        // whatever the loader does.
        let is_there: Vec<_> = requests.iter().map(|request| self.weights.check([request.slot])).collect();
        let slots = requests
            .iter()
            .zip(&is_there)
            .map(|(request, there)| if there.is_ok() { request.slot } else { Slot::BASE });
        let slots: Vec<Slot> = slots.collect();
        let x: Vec<_> = requests.iter().map(|request| request.x).collect();
        let mut y = x.clone();
        let mut step = self.weights.step(&Batch::new(&slots), workspace)?;
        let rows = requests.len();
        let (x, y_matrix) = (x.as_flattened(), MatrixMut::new(y.as_flattened_mut(), rows, FEATURES)?);
        self.layer.add_delta(&mut step, Matrix::new(x, rows, FEATURES)?, y_matrix)?;
        Ok(is_there.into_iter().zip(y).map(|(there, y)| there.map(|()| y)).collect())
    }
}

/// An adapter that adds `value` times the sum of `x` to every output.
fn adding(value: f32) -> Result<Adapter> {
    let tensor = |shape, value| Tensor::new(DType::F32, shape, bytemuck::cast_slice(&[value; FEATURES]).to_vec());
    let (a, b) = (tensor([1, FEATURES], 1.0)?, tensor([FEATURES, 1], value)?);
    let tensors = [("proj.lora_A.weight".to_owned(), a), ("proj.lora_B.weight".to_owned(), b)];
    Ok(Adapter::from_tensors(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#, tensors)?)
}

fn main() -> Result<()> {
    let (engine, x) = (Engine::new()?, [1.0, 2.0, 3.0, 4.0]);
    let added = |value: f32| x.map(|x| x + value * 10.0);
    engine.load("pirate", &adding(1.0)?)?;
    let mut workspace = Workspace::default();
    let mut batch = vec![engine.admit(None, x)?, engine.admit(Some("pirate"), x)?];
    thread::scope(|scope| {
        let loader = scope.spawn(|| engine.load("poet", &adding(2.0)?));
        while !loader.is_finished() {
            assert_eq!(engine.step(&batch, &mut workspace)?, [Ok(x), Ok(added(1.0))]);
        }
        loader.join().map_err(|_| "the loader panicked")?
    })?;
    batch.push(engine.admit(Some("poet"), x)?);
    assert_eq!(engine.step(&batch, &mut workspace)?, [Ok(x), Ok(added(1.0)), Ok(added(2.0))]);
    assert!(engine.load("novelist", &adding(3.0)?).is_err(), "there are two slots");

    // A request never gets the adapter that replaced its own.
    let gone = |request: &Request| Err(SlotError::Gone { slot: request.slot });
    engine.load("pirate", &adding(-1.0)?)?;
    batch.push(engine.admit(Some("pirate"), x)?);
    let replaced = engine.step(&batch, &mut workspace)?;
    assert_eq!(replaced, [Ok(x), gone(&batch[1]), Ok(added(2.0)), Ok(added(-1.0))]);
    engine.unload("poet")?;
    engine.load("novelist", &adding(3.0)?)?;
    batch.push(engine.admit(Some("novelist"), x)?);
    let unloaded = engine.step(&batch, &mut workspace)?;
    assert_eq!(unloaded, [Ok(x), gone(&batch[1]), gone(&batch[2]), Ok(added(-1.0)), Ok(added(3.0))]);
    assert!(engine.admit(Some("poet"), x).is_err());
    println!("Every request had its own adapter in every step, or was told that it is gone.");
    Ok(())
}

#[test]
fn runs() -> Result<()> {
    main()
}
