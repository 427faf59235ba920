//! One fused layer, two adapters and the base model in one batch on the GPU: every call that an engine needs.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "an example may allocate and wait where it likes")]

use std::error::Error;

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{Kernels, LoraLinear, Matrix, MatrixMut, Queue, Routing, WeightTable, Workspace, driver_is_present},
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use cudarc::driver::CudaContext;

const HIDDEN: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    if !driver_is_present() {
        return Err("this example needs a GPU".into());
    }
    let context = CudaContext::new(0)?;
    let stream = context.default_stream();

    // The adapted layers, as this rank holds them.
    let mut spec = ModelSpec::new();
    let gate_up = Linear::new("mlp", Parallel::Column, HIDDEN).slice("gate_proj", HIDDEN).slice("up_proj", HIDDEN);
    let gate_up = spec.linear(gate_up)?;
    let model = spec.shard(TpRank::SINGLE)?;

    // Once: memory for the adapters and the routing, and each layer's plan.
    let capacity = Capacity::tokens(16).slots(4).rank(16);
    let queue = Queue::new(&Kernels::load_into(&context)?, &stream)?;
    let weights = WeightTable::new(&queue, &model, DType::F32, capacity, 1 << 20)?;
    let layer = LoraLinear::new(&weights, gate_up)?;
    let mut routing = Routing::new(&queue, capacity, 2)?;
    let mut workspace = Workspace::new(&weights)?;
    println!("{}", layer.plan());

    // At any time: adapters of different ranks. The second leaves gate_proj alone.
    let both = adapter(8, &["gate_proj", "up_proj"], 0.5)?;
    let both = weights.load(0, &both.plan(&model, DType::F32)?)?;
    let up = adapter(2, &["up_proj"], -1.0)?;
    let up = weights.load(1, &up.plan(&model, DType::F32)?)?;

    // Every step: a slot for each token; then each layer, after the engine's own matrix multiplication.
    let slots = [both, Slot::BASE, up, both];
    let x = stream.clone_htod(&[1.0_f32; 4 * HIDDEN])?;
    let mut y = stream.clone_htod(&[100.0_f32; 4 * 2 * HIDDEN])?;
    let batch = routing.update(&Batch::new(&slots))?;
    let mut step = weights.step(&batch, &mut workspace)?;
    layer.add_delta(&mut step, Matrix::new(&x, 4, HIDDEN)?, MatrixMut::new(&mut y, 4, 2 * HIDDEN)?)?;

    for (slot, y) in slots.iter().zip(stream.clone_dtoh(&y)?.chunks(2 * HIDDEN)) {
        println!("{slot}: gate {}, up {}", y[0], y[HIDDEN]);
    }
    Ok(())
}

/// An adapter in memory whose A's are ones and whose B's are `value`. `Adapter::open` reads a directory as PEFT saves
/// it.
fn adapter(rank: usize, modules: &[&str], value: f32) -> Result<Adapter, Box<dyn Error>> {
    let filled = |shape: [usize; 2], value: f32| {
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&vec![value; shape[0] * shape[1]]).to_vec())
    };
    let mut tensors = Vec::new();
    for module in modules {
        tensors.push((format!("mlp.{module}.lora_A.weight"), filled([rank, HIDDEN], 1.0)?));
        tensors.push((format!("mlp.{module}.lora_B.weight"), filled([HIDDEN, rank], value)?));
    }
    Ok(Adapter::from_tensors(&format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#), tensors)?)
}
