//! One fused layer, two adapters and the base model in one batch, on the GPU: the whole of what an engine calls.
#![forbid(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "an example may allocate and wait where it likes")]

use std::error::Error;

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{Kernels, LoraLinear, Matrix, MatrixMut, Routing, WeightTable, Workspace, driver_is_present},
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

    // Once: what the engine adapts, and how much room there shall be.
    let mut model = ModelSpec::new(TpRank::SINGLE);
    let gate_up = Linear::new("mlp", Parallel::Column, HIDDEN).slice("gate_proj", HIDDEN).slice("up_proj", HIDDEN);
    let gate_up = model.linear(gate_up)?;
    let capacity = Capacity { max_tokens: 16, num_slots: 4, max_rank: 16 };
    let kernels = Kernels::load_into(&context)?;
    let layer = LoraLinear::new(&kernels, &model, gate_up, capacity)?;
    let mut weights = WeightTable::new(&kernels, &model, capacity, 1 << 20, &stream)?;
    let mut routing = Routing::new(&kernels, capacity, 2, &stream)?;
    let mut workspace = Workspace::new(&kernels, layer.plan().workspace_bytes(), &stream)?;
    println!("{}", layer.plan());

    // Adapters of different ranks; the second leaves gate_proj alone.
    for (slot, adapter) in
        [adapter(8, &["gate_proj", "up_proj"], 0.5)?, adapter(2, &["up_proj"], -1.0)?].iter().enumerate()
    {
        weights.load(Slot::new(u16::try_from(slot)?), &adapter.plan(&model, DType::F32)?, &stream)?;
    }

    // A step: one slot per token, once; then each layer, after the engine's own matrix multiplication.
    let slots = [Slot::new(0), Slot::BASE, Slot::new(1), Slot::new(0)];
    let x = stream.clone_htod(&[1.0_f32; 4 * HIDDEN])?;
    let mut y = stream.clone_htod(&[100.0_f32; 4 * 2 * HIDDEN])?;
    let batch = routing.update(&Batch::new(&slots), &stream)?;
    layer.add_delta(
        Matrix::new(x.as_view(), slots.len(), HIDDEN)?,
        MatrixMut::new(y.as_view_mut(), slots.len(), 2 * HIDDEN)?,
        &weights,
        &batch,
        &mut workspace,
        &stream,
    )?;
    let y = stream.clone_dtoh(&y)?;
    for (slot, y) in slots.iter().zip(y.chunks(2 * HIDDEN)) {
        println!(
            "slot {:>4}: gate {:>6}, up {:>6}",
            slot.index().map_or("base".into(), |slot| slot.to_string()),
            y[0],
            y[HIDDEN]
        );
    }
    Ok(())
}

/// An adapter in memory, of A's of ones and B's of `value`; `Adapter::open` reads a directory as PEFT saves it.
fn adapter(rank: usize, modules: &[&str], value: f32) -> Result<Adapter, Box<dyn Error>> {
    let filled = |shape: [usize; 2], value: f32| {
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&vec![value; shape[0] * shape[1]]).to_vec())
    };
    let mut tensors = Vec::new();
    for module in modules {
        tensors.push((format!("mlp.{module}.lora_A.weight"), filled([rank, HIDDEN], 1.0)?));
        tensors.push((format!("mlp.{module}.lora_B.weight"), filled([HIDDEN, rank], value)?));
    }
    Ok(Adapter::from_tensors(&format!(r#"{{"peft_type": "LORA", "lora_alpha": {rank}}}"#), tensors)?)
}
