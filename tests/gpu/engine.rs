//! An engine on the safe API: adapters by name, a loader thread, and a captured decode step beside eager prefills on
//! one queue. Every number is a small integer, so its results equal the CPU's in every bit except the signs of zeros.

#![forbid(unsafe_code)]

use std::{collections::BTreeMap, error::Error, sync::Mutex, thread};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cpu,
    cuda::{
        Buffer, Graph, LaunchError, LoraLinear, Matrix, MatrixMut, Queue, Routing, Staging, Step, WeightTable,
        Workspace,
    },
    error::{OperandError, SlotError},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::device::Gpu;

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const FEATURES: usize = 64;
const CAPACITY: Capacity = Capacity::tokens(40).slots(3).rank(16);
/// Rows of the captured step.
const DECODE: usize = 8;

/// A loaded adapter and its version.
type Loaded = (Slot, usize);

/// The state that all threads share.
struct Engine {
    weights: WeightTable,
    layers: [LoraLinear; 2],
    adapters: Mutex<BTreeMap<String, Loaded>>,
}

impl Engine {
    fn new(queue: &Queue, model: &Model, ids: [LinearId; 2]) -> Result<Self> {
        let weights = WeightTable::new(queue, model, DType::F32, CAPACITY, 1 << 18)?;
        let [first, second] = ids.map(|id| LoraLinear::new(&weights, id));
        Ok(Self { layers: [first?, second?], weights, adapters: Mutex::default() })
    }

    fn adapters(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Loaded>> {
        self.adapters.lock().expect("a thread that loaded has panicked")
    }

    /// Loads a version of an adapter, replacing an adapter of the same name or into a free slot. Delays no step.
    fn load(&self, name: &str, version: usize, adapter: &Adapter, staging: &mut Staging) -> Result<Slot> {
        let image = adapter.plan(self.weights.model(), self.weights.dtype())?;
        let filled = self.weights.reserve(&image)?.fill(&image, staging)?;
        filled.wait()?;
        let mut adapters = self.adapters();
        let free = || (0..3).find(|&slot| self.weights.get(slot).is_none());
        let slot = adapters.get(name).and_then(|(old, _)| old.index()).or_else(free).ok_or("all slots are taken")?;
        let slot = self.weights.commit(slot, filled)?;
        adapters.insert(name.to_owned(), (slot, version));
        Ok(slot)
    }

    fn unload(&self, name: &str) -> Result<()> {
        let (slot, _) = self.adapters().remove(name).ok_or("there is no such adapter")?;
        Ok(self.weights.unload(slot.index().ok_or("an adapter has a slot")?)?)
    }
}

/// Tokens of requests, each with the adapter that its request was admitted with.
struct Tokens {
    adapters: Vec<Option<Loaded>>,
    x: Vec<f32>,
}

impl Tokens {
    /// What the layers give of each row: those of `y`, then those of `z`.
    fn answer(&self, valid: Vec<Result<(), SlotError>>, rows: &Rows) -> Result<Answer> {
        let (mut y, mut z) = (vec![0.0; self.x.len()], vec![0.0; self.x.len()]);
        rows.y.read(&mut y)?;
        rows.z.read(&mut z)?;
        Ok(Answer { valid, values: [y, z] })
    }

    /// Whether each adapter is still there, and the slots of those that are.
    fn slots(&self, engine: &Engine) -> (Vec<Result<(), SlotError>>, Vec<Slot>) {
        let slot = |adapter: &Option<Loaded>| adapter.map_or(Slot::BASE, |(slot, _)| slot);
        let there = |slot: Slot| (engine.weights.check([slot]), slot);
        let there = self.adapters.iter().map(slot).map(there);
        there.map(|(valid, slot)| if valid.is_ok() { (valid, slot) } else { (valid, Slot::BASE) }).unzip()
    }
}

/// Whether an adapter was replaced while a step of it was enqueued. Its rows are no one's.
fn is_overtaken(enqueued: &Result<(), LaunchError>) -> bool {
    matches!(enqueued, Err(LaunchError::Operand(OperandError::NotLoaded { .. })))
}

struct Answer {
    valid: Vec<Result<(), SlotError>>,
    values: [Vec<f32>; 2],
}

/// What steps of up to so many rows work on: `y = x`, and what the first layer adds; `z`, what the second makes of `y`.
struct Rows {
    x: Buffer<f32>,
    y: Buffer<f32>,
    z: Buffer<f32>,
}

impl Rows {
    fn new(queue: &Queue, rows: usize) -> Result<Self> {
        let buffer = || Buffer::zeros(queue, rows * FEATURES);
        Ok(Self { x: buffer()?, y: buffer()?, z: buffer()? })
    }

    fn put(&mut self, x: &[f32]) -> Result<(), LaunchError> {
        self.x.write(x)?;
        self.y.write(x)
    }

    fn enqueue(&mut self, layers: &[LoraLinear; 2], step: &mut Step<'_>) -> Result<(), LaunchError> {
        let (rows, end) = (step.num_tokens(), step.num_tokens() * FEATURES);
        let (x, y) = (self.x.slice(0..end), self.y.slice_mut(0..end));
        layers[0].add_delta(step, Matrix::new(x, rows, FEATURES)?, MatrixMut::new(y, rows, FEATURES)?)?;
        let (y, z) = (self.y.slice(0..end), self.z.slice_mut(0..end));
        layers[1].write_delta(step, Matrix::new(y, rows, FEATURES)?, MatrixMut::new(z, rows, FEATURES)?)
    }
}

/// The state of the stepping thread.
struct Stepper {
    routing: Routing,
    workspace: Workspace,
    prefill: Rows,
    decode: Rows,
    graph: Graph,
}

impl Stepper {
    fn new(engine: &Engine) -> Result<Self> {
        let queue = engine.weights.queue();
        let (routing, mut workspace) = (Routing::new(queue, CAPACITY, 1)?, Workspace::new(&engine.weights)?);
        let (prefill, mut decode) = (Rows::new(queue, CAPACITY.max_tokens)?, Rows::new(queue, DECODE)?);
        let record = |step: &mut Step<'_>| decode.enqueue(&engine.layers, step);
        let graph = engine.weights.capture(&routing, DECODE, &mut workspace, record)?;
        Ok(Self { routing, workspace, prefill, decode, graph })
    }

    fn prefill(&mut self, engine: &Engine, tokens: &Tokens) -> Result<Answer> {
        loop {
            self.prefill.put(&tokens.x)?;
            self.routing.wait()?;
            let (valid, slots) = tokens.slots(engine);
            let batch = self.routing.update(&Batch::new(&slots))?;
            let step = engine.weights.step(&batch, &mut self.workspace);
            let enqueued = step.and_then(|mut step| self.prefill.enqueue(&engine.layers, &mut step));
            if !is_overtaken(&enqueued) {
                enqueued?;
                return tokens.answer(valid, &self.prefill);
            }
        }
    }

    fn decode(&mut self, engine: &Engine, tokens: &Tokens) -> Result<Answer> {
        loop {
            self.decode.put(&tokens.x)?;
            self.routing.wait()?;
            let (valid, slots) = tokens.slots(engine);
            let batch = self.routing.update(&Batch::new(&slots))?;
            let step = engine.weights.step(&batch, &mut self.workspace);
            let enqueued = step.and_then(|mut step| self.graph.replay(&mut step));
            if !is_overtaken(&enqueued) {
                enqueued?;
                return tokens.answer(valid, &self.decode);
            }
        }
    }
}

/// All versions at once, by slot.
struct OnCpu {
    weights: cpu::WeightTable,
    layers: [cpu::LoraLinear; 2],
}

impl OnCpu {
    fn answer(&self, tokens: &Tokens) -> Result<[Vec<f32>; 2]> {
        let slot = |version: usize| self.weights.get(version).map_or(Slot::BASE, |info| info.slot);
        let slots = tokens.adapters.iter().map(|adapter| adapter.map_or(Slot::BASE, |(_, version)| slot(version)));
        let slots: Vec<Slot> = slots.collect();
        let (batch, mut workspace) = (Batch::new(&slots), cpu::Workspace::default());
        let mut step = self.weights.step(&batch, &mut workspace)?;
        let (rows, mut y, mut z) = (slots.len(), tokens.x.clone(), vec![0.0; tokens.x.len()]);
        let x = cpu::Matrix::new(&tokens.x, rows, FEATURES)?;
        self.layers[0].add_delta(&mut step, x, cpu::MatrixMut::new(&mut y, rows, FEATURES)?)?;
        let x = cpu::Matrix::new(&y, rows, FEATURES)?;
        self.layers[1].add_delta(&mut step, x, cpu::MatrixMut::new(&mut z, rows, FEATURES)?)?;
        Ok([y, z])
    }
}

const VERSIONS: usize = 60;
const NAMES: [&str; 3] = ["pirate", "poet", "novelist"];

fn integers(rng: &mut StdRng, len: usize) -> Vec<f32> {
    (0..len).map(|_| f32::from(rng.random_range(-1..=1_i8))).collect()
}

fn adapter(rng: &mut StdRng, rank: usize) -> Result<Adapter> {
    let factors = ["first", "second"].into_iter().flat_map(|layer| {
        [("A", [rank, FEATURES]), ("B", [FEATURES, rank])].map(|(side, shape)| {
            let values = integers(rng, rank * FEATURES);
            let tensor = Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec());
            Ok((format!("{layer}.lora_{side}.weight"), tensor?))
        })
    });
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#);
    Ok(Adapter::from_tensors(&config, factors.collect::<Result<Vec<_>>>()?)?)
}

/// Tokens of newly admitted requests, and one of the base model.
fn admit(engine: &Engine, rng: &mut StdRng, count: usize) -> Tokens {
    let loaded: Vec<Loaded> = engine.adapters().values().copied().collect();
    let mut one_of = |_| loaded.get(rng.random_range(0..=loaded.len())).copied();
    let adapters = (0..count).map(&mut one_of).collect();
    Tokens { adapters, x: integers(rng, count * FEATURES) }
}

/// Compares rows whose adapters were there with the CPU's. Returns how many had an adapter, and how many had lost it.
fn compare(tokens: &Tokens, answer: &Answer, on_cpu: &OnCpu) -> Result<[usize; 2]> {
    let expected = on_cpu.answer(tokens)?;
    let mut counts = [0; 2];
    for (row, valid) in answer.valid.iter().enumerate() {
        if let Err(error) = valid {
            assert!(matches!(error, SlotError::Gone { .. }), "{error}");
            counts[1] += 1;
            continue;
        }
        let row = row * FEATURES..(row + 1) * FEATURES;
        for (got, expected) in answer.values.iter().zip(&expected) {
            assert_eq!(got[row.clone()], expected[row.clone()], "of {:?}", tokens.adapters[row.start / FEATURES]);
        }
        counts[0] += usize::from(tokens.adapters[row.start / FEATURES].is_some());
    }
    Ok(counts)
}

#[test]
#[ignore = "needs a GPU"]
fn requests_get_their_own_adapter_while_adapters_come_and_go() -> Result<()> {
    let (gpu, mut rng) = (Gpu::new(), StdRng::seed_from_u64(8));
    let mut spec = ModelSpec::new();
    let layer = |name| Linear::new("", Parallel::Replicated, FEATURES).slice(name, FEATURES);
    let ids = [spec.linear(layer("first"))?, spec.linear(layer("second"))?];
    let model = spec.shard(TpRank::SINGLE)?;
    let engine = Engine::new(&gpu.queue, &model, ids)?;
    let cpu_capacity = Capacity::tokens(CAPACITY.max_tokens).slots(VERSIONS).rank(CAPACITY.max_rank);
    let weights = cpu::WeightTable::new(&model, DType::F32, cpu_capacity, 16 << 20)?;
    let [first, second] = ids.map(|id| cpu::LoraLinear::new(&weights, id));
    let on_cpu = OnCpu { layers: [first?, second?], weights };
    let adapters = (0..VERSIONS).map(|version| adapter(&mut rng, [1, 4, 16, 7][version % 4]));
    let adapters = adapters.collect::<Result<Vec<_>>>()?;
    for (version, adapter) in (0..).zip(&adapters) {
        on_cpu.weights.load(version, &adapter.plan(&model, DType::F32)?)?;
    }

    let mut stepper = Stepper::new(&engine)?;
    let mut counts = [0; 2];
    thread::scope(|scope| -> Result<()> {
        let loader = scope.spawn(|| -> Result<()> {
            let mut staging = Staging::new(engine.weights.queue())?;
            for (version, adapter) in (0..).zip(&adapters) {
                let name = NAMES[version % 3];
                if version % 7 == 6 {
                    engine.unload(name)?;
                }
                engine.load(name, version, adapter, &mut staging)?;
            }
            Ok(())
        });
        while !loader.is_finished() {
            // The decoded requests were admitted before the prefill.
            let (prompt, live) = (admit(&engine, &mut rng, 30), rng.random_range(1..=DECODE));
            let tokens = admit(&engine, &mut rng, live);
            for (tokens, answer) in
                [(&prompt, stepper.prefill(&engine, &prompt)?), (&tokens, stepper.decode(&engine, &tokens)?)]
            {
                let [served, gone] = compare(tokens, &answer, &on_cpu)?;
                counts = [counts[0] + served, counts[1] + gone];
            }
        }
        loader.join().map_err(|_| "the loader has panicked")?
    })?;
    assert!(counts[0] > 100, "{counts:?}: too few tokens had an adapter");

    // Requests admitted before their adapter was replaced are reported, and never served with the new adapter.
    let late = admit(&engine, &mut rng, DECODE);
    let mut staging = Staging::new(&gpu.queue)?;
    let replaced = engine.load("poet", 0, &adapters[0], &mut staging)?;
    engine.unload("pirate")?;
    for answer in [stepper.decode(&engine, &late)?, stepper.prefill(&engine, &late)?] {
        for (adapter, valid) in late.adapters.iter().zip(&answer.valid) {
            let index = adapter.and_then(|(slot, _)| slot.index());
            let is_gone = index.is_some() && index == replaced.index()
                || index.is_some_and(|index| engine.weights.get(index).is_none());
            assert_eq!(valid.is_err(), is_gone, "{adapter:?}");
        }
        compare(&late, &answer, &on_cpu)?;
    }
    let now = admit(&engine, &mut rng, DECODE);
    let both = [stepper.decode(&engine, &now)?, stepper.prefill(&engine, &now)?];
    for answer in &both {
        assert_eq!(compare(&now, answer, &on_cpu)?[1], 0);
    }
    let bits = |answer: &Answer| answer.values.clone().map(|values| bytemuck::cast_slice::<f32, u32>(&values).to_vec());
    assert_eq!(bits(&both[0]), bits(&both[1]), "captured and eager steps differ");
    Ok(())
}
