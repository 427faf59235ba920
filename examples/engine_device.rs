//! One program for the CPU and, with `--features cuda` and a driver, the GPU: the same adapters, the same steps, the
//! same bits.
//!
//! [`Device`] contains every difference between the two: a GPU also has a queue, a routing, and operands in its own
//! memory. The model, the adapters' images and the batches are the same objects for both.
#![forbid(unsafe_code)]

use std::error::Error;

use aril::{
    DType, Slot,
    adapter::{Adapter, SlotImage, Tensor},
    cpu,
    error::LoadError,
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const HIDDEN: usize = 64;
const MAX_TOKENS: usize = 4;
const ARENA_BYTES: usize = 1 << 20;

/// The operations of a device.
trait Device {
    /// Loads an adapter, replacing the slot's previous one.
    fn load(&self, slot: usize, image: &SlotImage<'_>) -> std::result::Result<Slot, LoadError>;

    /// Adds the delta of each token to its row of `y`. Both are `[tokens, HIDDEN]`.
    fn add_delta(&mut self, batch: &Batch<'_>, x: &[f32], y: &mut [f32]) -> Result<()>;
}

fn main() -> Result<()> {
    let mut spec = ModelSpec::new();
    let o_proj = spec.linear(Linear::new("attn", Parallel::Row, HIDDEN).slice("o_proj", HIDDEN))?;
    let model = spec.shard(TpRank::SINGLE)?;
    let capacity = Capacity::tokens(MAX_TOKENS).slots(2).rank(16);

    let on_cpu = run(&mut Cpu::new(&model, o_proj, capacity)?, &model)?;
    print("CPU", &on_cpu);
    if on_cpu != expected() {
        return Err("The CPU adds something else than the adapters.".into());
    }
    let Some(mut gpu) = gpu(&model, o_proj, capacity)? else {
        println!("There is no GPU, or the feature `cuda` is off.");
        return Ok(());
    };
    let on_gpu = run(&mut *gpu, &model)?;
    print("GPU", &on_gpu);
    if on_cpu.iter().flatten().map(|y| y.to_bits()).ne(on_gpu.iter().flatten().map(|y| y.to_bits())) {
        return Err("The CPU and the GPU differ.".into());
    }
    println!("The CPU and the GPU agree bit for bit.");
    Ok(())
}

/// The program: three steps, and an adapter that is replaced before the last. Returns the steps' outputs.
fn run(device: &mut dyn Device, model: &Model) -> Result<[Vec<f32>; 3]> {
    let first = load(device, model, 0, 8)?;
    let second = load(device, model, 1, 3)?;
    let (mixed, single) = (step(device, &[first, Slot::BASE, second])?, step(device, &[second])?);
    let first = load(device, model, 0, 16)?;
    Ok([mixed, single, step(device, &[Slot::BASE, first, first, second])?])
}

fn load(device: &dyn Device, model: &Model, slot: usize, rank: usize) -> Result<Slot> {
    let adapter = adapter(rank)?;
    Ok(device.load(slot, &adapter.plan(model, DType::F32)?)?)
}

fn step(device: &mut dyn Device, slots: &[Slot]) -> Result<Vec<f32>> {
    let x = eighths(slots.len() * HIDDEN, 7);
    // The output of the engine's own matrix multiplication.
    let mut y = eighths(slots.len() * HIDDEN, 5);
    device.add_delta(&Batch::new(slots), &x, &mut y)?;
    Ok(y)
}

struct Cpu {
    weights: cpu::WeightTable,
    layer: cpu::LoraLinear,
    workspace: cpu::Workspace,
}

impl Cpu {
    fn new(model: &Model, id: LinearId, capacity: Capacity) -> Result<Self> {
        let weights = cpu::WeightTable::new(model, DType::F32, capacity, ARENA_BYTES)?;
        Ok(Self { layer: cpu::LoraLinear::new(&weights, id)?, workspace: cpu::Workspace::default(), weights })
    }
}

impl Device for Cpu {
    fn load(&self, slot: usize, image: &SlotImage<'_>) -> std::result::Result<Slot, LoadError> {
        self.weights.load(slot, image)
    }

    fn add_delta(&mut self, batch: &Batch<'_>, x: &[f32], y: &mut [f32]) -> Result<()> {
        let tokens = batch.num_tokens();
        let (x, y) = (cpu::Matrix::new(x, tokens, HIDDEN)?, cpu::MatrixMut::new(y, tokens, HIDDEN)?);
        let mut step = self.weights.step(batch, &mut self.workspace)?;
        Ok(self.layer.add_delta(&mut step, x, y)?)
    }
}

#[cfg(feature = "cuda")]
use gpu::gpu;

/// The GPU, if there is one.
#[cfg(not(feature = "cuda"))]
fn gpu(_: &Model, _: LinearId, _: Capacity) -> Result<Option<Box<dyn Device>>> {
    Ok(None)
}

#[cfg(feature = "cuda")]
mod gpu {
    use aril::{
        cuda::{
            Buffer, Kernels, LoraLinear, Matrix, MatrixMut, Queue, Routing, WeightTable, Workspace, driver_is_present,
        },
        error::LoadError,
    };
    use cudarc::driver::CudaContext;

    use super::*;

    struct Gpu {
        weights: WeightTable,
        layer: LoraLinear,
        /// The adapter of each token, on the device.
        routing: Routing,
        workspace: Workspace,
        x: Buffer<f32>,
        y: Buffer<f32>,
    }

    /// The GPU, if there is one.
    pub(super) fn gpu(model: &Model, id: LinearId, capacity: Capacity) -> Result<Option<Box<dyn Device>>> {
        if !driver_is_present() {
            return Ok(None);
        }
        let context = CudaContext::new(0)?;
        let queue = Queue::new(&Kernels::load_into(&context)?, &context.default_stream())?;
        let weights = WeightTable::new(&queue, model, DType::F32, capacity, ARENA_BYTES)?;
        Ok(Some(Box::new(Gpu {
            layer: LoraLinear::new(&weights, id)?,
            routing: Routing::new(&queue, capacity, 1)?,
            workspace: Workspace::new(&weights)?,
            x: Buffer::zeros(&queue, MAX_TOKENS * HIDDEN)?,
            y: Buffer::zeros(&queue, MAX_TOKENS * HIDDEN)?,
            weights,
        })))
    }

    impl Device for Gpu {
        fn load(&self, slot: usize, image: &SlotImage<'_>) -> std::result::Result<Slot, LoadError> {
            self.weights.load(slot, image)
        }

        fn add_delta(&mut self, batch: &Batch<'_>, x: &[f32], y: &mut [f32]) -> Result<()> {
            self.x.write(x)?;
            self.y.write(y)?;
            let tokens = batch.num_tokens();
            let (x, to) = (Matrix::new(&self.x, tokens, HIDDEN)?, MatrixMut::new(&mut self.y, tokens, HIDDEN)?);
            let batch = self.routing.update(batch)?;
            let mut step = self.weights.step(&batch, &mut self.workspace)?;
            self.layer.add_delta(&mut step, x, to)?;
            Ok(self.y.read(y)?)
        }
    }
}

/// An adapter in memory; `Adapter::open` reads a directory as PEFT saves it.
fn adapter(rank: usize) -> Result<Adapter> {
    let tensor = |shape: [usize; 2], stride| {
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&eighths(shape[0] * shape[1], stride)).to_vec())
    };
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {}}}"#, 2 * rank);
    let (a, b) = (tensor([rank, HIDDEN], 3)?, tensor([HIDDEN, rank], 11)?);
    let tensors = [("attn.o_proj.lora_A.weight".to_owned(), a), ("attn.o_proj.lora_B.weight".to_owned(), b)];
    Ok(Adapter::from_tensors(&config, tensors)?)
}

/// Numbers of a few bits, so that all sums are exact. The last bits of other sums may differ, because the CPU and the
/// GPU add in different orders.
fn eighths(len: usize, stride: u8) -> Vec<f32> {
    (0..17_u8).cycle().step_by(stride.into()).map(|value| f32::from(value) / 8.0 - 1.0).take(len).collect()
}

/// What the program's steps give, by the formula: `y + scaling · B (A x)` with the factors as they are stored.
fn expected() -> [Vec<f32>; 3] {
    let row = |token: usize, rank: usize| {
        let [x, mut y] = [7, 5].map(|stride| eighths((token + 1) * HIDDEN, stride).split_off(token * HIDDEN));
        let (a, b) = (eighths(rank * HIDDEN, 3), eighths(HIDDEN * rank, 11));
        let dot = |row: &[f32], other: &[f32]| row.iter().zip(other).map(|(a, b)| a * b).sum::<f32>();
        let v: Vec<f32> = a.chunks(HIDDEN).map(|row| dot(row, &x)).collect();
        for (y, b) in y.iter_mut().zip(b.chunks(rank.max(1))) {
            *y += 2.0 * dot(b, &v);
        }
        y
    };
    // The rank of each token's adapter; 0 without one.
    let step = |ranks: &[usize]| ranks.iter().enumerate().flat_map(|(token, &rank)| row(token, rank)).collect();
    [step(&[8, 0, 3]), step(&[3]), step(&[0, 16, 16, 3])]
}

fn print(device: &str, outputs: &[Vec<f32>]) {
    for (step, y) in outputs.iter().enumerate() {
        let firsts: Vec<f32> = y.chunks(HIDDEN).map(|row| row[0]).collect();
        println!("{device}, step {step}: {firsts:?}");
    }
}

#[test]
fn runs() -> Result<()> {
    main()
}
