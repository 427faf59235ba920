//! Decoding by a captured CUDA graph: captured once, replayed with another routing and other adapters each time.
#![expect(clippy::disallowed_methods, reason = "an example may allocate and wait where it likes")]

use std::error::Error;

use aril::{
    DType, Slot,
    adapter::{Adapter, Tensor},
    cuda::{
        Kernels, Routing, WeightTable, Workspace, driver_is_present,
        raw::{LoraLinear, MatrixMut, MatrixRef, Stream},
    },
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use cudarc::driver::{
    CudaContext, DevicePtr, DevicePtrMut,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
};

const HIDDEN: usize = 64;
/// Rows of the captured graph: steps have as many tokens or fewer.
const BUCKET: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    if !driver_is_present() {
        return Err("this example needs a GPU".into());
    }
    let context = CudaContext::new(0)?;
    // Of several streams cudarc tracks every use with events, which a capture cannot have.
    // SAFETY: the engine captures on this one alone, and orders everything itself.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;

    let mut model = ModelSpec::new(TpRank::SINGLE);
    let o_proj = model.linear(Linear::new("attn", Parallel::Replicated, HIDDEN).slice("o_proj", HIDDEN))?;
    let capacity = Capacity { max_tokens: BUCKET, num_slots: 2, max_rank: 16 };
    let kernels = Kernels::load_into(&context)?;
    let layer = LoraLinear::new(&kernels, &model, o_proj, DType::F32, capacity)?;
    let mut weights = WeightTable::<f32>::new(&kernels, &model, capacity, 1 << 20, &stream)?;
    let mut routing = Routing::new(&kernels, capacity, 2, &stream)?;
    let workspace = Workspace::new(&kernels, layer.plan().workspace_bytes(), &stream)?;
    let x = stream.clone_htod(&[1.0_f32; BUCKET * HIDDEN])?;
    let mut y = stream.alloc_zeros::<f32>(BUCKET * HIDDEN)?;

    // Captured once, for as many rows as the bucket has: every address in it stays.
    let batch = routing.capture_batch(BUCKET)?;
    let layer_weights = weights.layer(model[o_proj].first_entry());
    let x_matrix = MatrixRef::new::<f32>(x.device_ptr(&stream).0, BUCKET, HIDDEN);
    let y_matrix = MatrixMut::new::<f32>(y.device_ptr_mut(&stream).0, BUCKET, HIDDEN);
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    // SAFETY: the operands live until after the last replay, and all that uses them is on this stream.
    unsafe { layer.add_delta(x_matrix, y_matrix, layer_weights, batch, workspace.region(), Stream::from(&*stream)) }?;
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.ok_or("nothing was captured")?;

    // Then, per step: adapters come and go, tokens are routed, the graph is replayed.
    let steps: [(u16, f32, &[Slot]); 3] = [
        (0, 1.0, &[Slot::new(0), Slot::BASE, Slot::new(1)]),
        (1, 2.0, &[Slot::new(1), Slot::new(0), Slot::BASE, Slot::new(1)]),
        (0, 3.0, &[Slot::new(0), Slot::new(1)]),
    ];
    for (slot, value, slots) in steps {
        weights.load(Slot::new(slot), &adapter(value)?.plan(&model, DType::F32)?, &stream)?;
        stream.memset_zeros(&mut y)?;
        routing.update(&Batch::new(slots), &stream)?;
        graph.launch()?;
        let y = stream.clone_dtoh(&y)?;
        stream.synchronize()?;
        let first: Vec<f32> = y.chunks(HIDDEN).map(|row| row[0]).collect();
        println!("{slots:?}: {first:?}");
    }
    Ok(())
}

/// An adapter of rank 1 that adds `value` times the sum of x to every output.
fn adapter(value: f32) -> Result<Adapter, Box<dyn Error>> {
    let filled =
        |shape: [usize; 2], value: f32| Tensor::new(DType::F32, shape, bytemuck::cast_slice(&[value; HIDDEN]).to_vec());
    let tensors = [
        ("attn.o_proj.lora_A.weight".to_owned(), filled([1, HIDDEN], 1.0)?),
        ("attn.o_proj.lora_B.weight".to_owned(), filled([HIDDEN, 1], value)?),
    ];
    Ok(Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, tensors)?)
}
