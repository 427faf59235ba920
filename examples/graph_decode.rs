//! Decode with a captured CUDA graph, replayed in every step, while another thread replaces an adapter.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "an example may allocate and wait where it likes")]

use std::{error, sync::Mutex, thread, time::Duration};

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{
        Buffer, Filled, Kernels, LoraLinear, Matrix, MatrixMut, Queue, Routing, WeightTable, Workspace,
        driver_is_present,
    },
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use cudarc::driver::CudaContext;

type Error = Box<dyn error::Error + Send + Sync>;

const HIDDEN: usize = 64;
/// Rows of the graph: steps have as many tokens or fewer.
const ROWS: usize = 4;

fn main() -> Result<(), Error> {
    if !driver_is_present() {
        return Err("this example needs a GPU".into());
    }
    let context = CudaContext::new(0)?;
    let queue = Queue::new(&Kernels::load_into(&context)?, &context.new_stream()?)?;

    let mut spec = ModelSpec::new();
    let o_proj = spec.linear(Linear::new("attn", Parallel::Replicated, HIDDEN).slice("o_proj", HIDDEN))?;
    let model = spec.shard(TpRank::SINGLE)?;
    let capacity = Capacity::tokens(ROWS).slots(2).rank(16);
    let weights = WeightTable::new(&queue, &model, DType::F32, capacity, 1 << 20)?;
    let layer = LoraLinear::new(&weights, o_proj)?;
    let mut routing = Routing::new(&queue, capacity, 2)?;
    let mut workspace = Workspace::new(&weights)?;

    // Captured once. The graph keeps the buffers and all other memory that it accesses alive.
    let (mut x, mut y) = (Buffer::zeros(&queue, ROWS * HIDDEN)?, Buffer::zeros(&queue, ROWS * HIDDEN)?);
    let mut graph = weights.capture(&routing, ROWS, &mut workspace, |step| {
        layer.add_delta(step, Matrix::new(&x, ROWS, HIDDEN)?, MatrixMut::new(&mut y, ROWS, HIDDEN)?)
    })?;

    let (kept, replaced) = (load(&weights, 0, 1)?, Mutex::new(load(&weights, 1, 1)?));
    thread::scope(|threads| {
        let loader = threads.spawn(|| {
            (2..=5).try_for_each(|value| {
                thread::sleep(Duration::from_millis(10));
                // The lock spans no packing, and keeps a step from the old slot.
                let filled = fill(&weights, value)?;
                let mut replaced = replaced.lock().map_err(|_| "the stepping thread panicked")?;
                *replaced = weights.commit(1, filled)?;
                Ok::<_, Error>(())
            })
        });

        // Each step: which adapter each token has; x, and y of the base layer, as the engine computes them; then the
        // graph.
        let (mut steps, mut last) = (0, Vec::new());
        loop {
            let is_last = loader.is_finished();
            x.write(&[1.0; ROWS * HIDDEN])?;
            y.write(&[100.0; ROWS * HIDDEN])?;
            let replaced = replaced.lock().map_err(|_| "the loader panicked")?;
            let batch = routing.update(&Batch::new(&[kept, Slot::BASE, *replaced]))?;
            graph.replay(&mut weights.step(&batch, &mut workspace)?)?;
            drop(replaced);

            let mut rows = [0.0; ROWS * HIDDEN];
            y.read(&mut rows)?;
            let firsts: Vec<f32> = rows.chunks(HIDDEN).map(|row| row[0]).collect();
            if firsts != last {
                println!("from step {steps}: {firsts:?}");
                last = firsts;
            }
            steps += 1;
            if is_last {
                return loader.join().map_err(|_| "the loader panicked")?;
            }
        }
    })
}

fn load(weights: &WeightTable, slot: usize, value: u8) -> Result<Slot, Error> {
    Ok(weights.commit(slot, fill(weights, value)?)?)
}

/// Writes an adapter of rank 1 that adds `value` times the sum of x to every output.
fn fill(weights: &WeightTable, value: u8) -> Result<Filled, Error> {
    let filled =
        |shape: [usize; 2], value: f32| Tensor::new(DType::F32, shape, bytemuck::cast_slice(&[value; HIDDEN]).to_vec());
    let (a, b) = (filled([1, HIDDEN], 1.0)?, filled([HIDDEN, 1], value.into())?);
    let tensors = [("attn.o_proj.lora_A.weight".to_owned(), a), ("attn.o_proj.lora_B.weight".to_owned(), b)];
    let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#, tensors)?;
    let image = adapter.plan(weights.model(), weights.dtype())?;
    let filled = weights.reserve(&image)?.fill(&image, &mut weights.staging()?)?;
    filled.wait()?;
    Ok(filled)
}
