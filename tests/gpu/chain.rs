//! Operations in sequence, as an engine enqueues them: each reads what the earlier ones wrote, although kernels start
//! before earlier kernels have ended.

use aril::{
    DType,
    adapter::Adapter,
    cuda::{LoraEmbedding, LoraLinear, WeightTable, Workspace, raw},
    model::{EmbeddingId, Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
};
use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::adapters::{Lora, parts},
    device::{Buffer, Gpu},
    late::Late,
};

/// Layers in bf16 with adapters in one table, an embedding without adapters, and the operands of a step.
pub struct Stack {
    pub gpu: Gpu,
    pub capacity: Capacity,
    model: Model,
    layers: Vec<(LinearId, usize, usize)>,
    embedding: (EmbeddingId, usize),
    weights: WeightTable,
}

impl Stack {
    /// Layers of these input features and slices. `rank` gives an adapter's rank in a layer, 0 if it has no such
    /// module.
    pub fn new(
        layers: &[(usize, &[usize])],
        capacity: Capacity,
        adapters: usize,
        rank: impl Fn(usize, usize) -> usize,
    ) -> Self {
        let gpu = Gpu::new();
        let mut rng = StdRng::seed_from_u64(11);
        let mut spec = ModelSpec::new();
        let path = |layer: usize, slice: usize| format!("layers.{layer}.m{slice}");
        let ids = layers.iter().enumerate().map(|(layer, &(in_features, slices))| {
            let linear = Linear::new("", Parallel::Replicated, in_features);
            let slices_of = slices.iter().enumerate();
            let linear = slices_of.fold(linear, |linear, (i, out)| linear.slice(path(layer, i), *out));
            (spec.linear(linear).unwrap(), in_features, slices.iter().sum())
        });
        let ids = ids.collect();
        let hidden = layers[0].0;
        let embedding = (spec.embedding("embed", 10, hidden).unwrap(), hidden);
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let weights = WeightTable::new(&gpu.queue, &model, DType::BF16, capacity, 64 << 20).unwrap();
        for adapter in 0..adapters {
            let mut modules = Vec::new();
            for (layer, &(in_features, slices)) in
                layers.iter().enumerate().filter(|(layer, _)| rank(adapter, *layer) > 0)
            {
                for (slice, &out_features) in slices.iter().enumerate() {
                    let rank = (rank(adapter, layer) / (slice + 1)).max(1);
                    let module = Lora::linear(path(layer, slice), in_features, out_features, rank);
                    modules.push(module.fill(|| rng.random_range(-0.1..0.1)));
                }
            }
            let (config, tensors) = parts(16.0, &modules);
            let image = Adapter::from_tensors(&config, tensors).unwrap();
            weights.load(adapter, &image.plan(&model, DType::BF16).unwrap()).unwrap();
        }
        gpu.synchronize();
        Self { gpu, capacity, model, layers: ids, embedding, weights }
    }

    pub fn raw_layer(&self, layer: usize) -> LoraLinear {
        let id = self.layers[layer].0;
        LoraLinear::for_model(&self.gpu.kernels, &self.model, id, DType::BF16, self.capacity).unwrap()
    }

    /// Workspace for any of the layers.
    pub fn workspace(&self) -> Workspace {
        let bytes = (0..self.layers.len()).map(|layer| self.raw_layer(layer).plan().workspace_bytes());
        let bytes = bytes.reduce(aril::plan::WorkspaceBytes::max).unwrap();
        Workspace::with_bytes(&self.gpu.queue, bytes).unwrap()
    }

    /// A routing and its memory.
    pub fn routing(&self) -> (raw::Routing, Buffer) {
        let memory = self.gpu.without_indices(raw::Routing::device_bytes(self.capacity).unwrap());
        // SAFETY: the caller keeps the memory as long as the routing, and uses both on one stream.
        let routing = unsafe { raw::Routing::new(&self.gpu.kernels, self.capacity, 1, memory.region()) }.unwrap();
        (routing, memory)
    }

    pub fn route(&self, routing: &mut raw::Routing, slots: u64, tokens: usize) -> raw::RoutedBatch {
        // SAFETY: the test owns the slots and the routing and keeps them alive until the stream is synchronized.
        unsafe { routing.update_on_device(slots, None, tokens, self.gpu.raw_stream()) }.unwrap()
    }

    /// Adds a layer's deltas.
    pub fn launch(
        &self,
        layer: usize,
        [x, y]: [u64; 2],
        tokens: usize,
        batch: raw::RoutedBatch,
        workspace: raw::Workspace,
    ) {
        let (_, in_features, out_features) = self.layers[layer];
        let x = raw::MatrixRef::new::<bf16>(x, tokens, in_features);
        let y = raw::MatrixMut::new::<bf16>(y, tokens, out_features);
        let step = raw::Step::new(self.weights.raw(), batch, workspace, self.gpu.raw_stream());
        // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
        unsafe { self.raw_layer(layer).add_delta_raw(&step, x, y) }.unwrap();
    }

    /// The shrink of a layer's deltas.
    fn shrink(&self, layer: usize, x: u64, tokens: usize, batch: raw::RoutedBatch, workspace: raw::Workspace) {
        let x = raw::MatrixRef::new::<bf16>(x, tokens, self.layers[layer].1);
        let step = raw::Step::new(self.weights.raw(), batch, workspace, self.gpu.raw_stream());
        // SAFETY: as above.
        unsafe { self.raw_layer(layer).shrink_raw(&step, x) }.unwrap();
    }

    /// Adds the deltas of the embedding, which no adapter has: a launch without work.
    fn launch_embedding(&self, ids: u64, y: u64, tokens: usize, batch: raw::RoutedBatch, workspace: raw::Workspace) {
        let (id, hidden) = self.embedding;
        let kernels = &self.gpu.kernels;
        let embedding = LoraEmbedding::for_model(kernels, &self.model, id, DType::BF16, self.capacity).unwrap();
        let y = raw::MatrixMut::new::<bf16>(y, tokens, hidden);
        let step = raw::Step::new(self.weights.raw(), batch, workspace, self.gpu.raw_stream());
        // SAFETY: as above.
        unsafe { embedding.add_delta_raw(&step, ids, y) }.unwrap();
    }
}

fn values(rng: &mut StdRng, count: usize) -> Vec<bf16> {
    (0..count).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect()
}

/// Features before each layer of the chain and after the last one.
const HIDDEN: usize = 2048;
const INNER: usize = 4096;
/// The layers of the chain, and layers without adapters, some of which are launched between any two of the chain.
const CHAIN: [(usize, &[usize]); 4] =
    [(HIDDEN, &[1024, 512, 512]), (HIDDEN, &[INNER]), (INNER, &[1500, 548]), (HIDDEN, &[HIDDEN])];
const IDLE: [(usize, &[usize]); 2] = [(HIDDEN, &[512]), (INNER, &[256, 1024])];

/// All layers share one routing and one workspace, and `y` of a layer is `x` of the next. Between two layers are
/// launches without work, which must not let the next layer start before the previous one has ended.
#[test]
#[ignore = "needs a GPU"]
fn a_layer_reads_what_the_one_before_wrote() {
    const REPEATS: usize = 3;
    let layers = [&CHAIN[..], &IDLE].concat();
    let capacity = Capacity::tokens(1100).slots(4).rank(64);
    // In each layer of the chain except the first, one adapter has no module.
    let ranks = [16, 64, 7];
    let stack = Stack::new(&layers, capacity, ranks.len(), |adapter, layer| match layer {
        layer if layer >= CHAIN.len() || layer % 4 == adapter + 1 => 0,
        _ => ranks[adapter],
    });
    let gpu = &stack.gpu;
    let mut rng = StdRng::seed_from_u64(12);
    for tokens in [1, 5, 16, 64, 200, 512, 513, 1100] {
        let slots: Vec<i32> = (0..tokens as i32).map(|token| (token * 7 + token / 5) % 5 - 1).collect();
        let slots = gpu.upload(&if tokens == 1 { vec![0] } else { slots });
        let ids = gpu.upload(&vec![3_i32; tokens]);
        let widths = [HIDDEN, HIDDEN, INNER, HIDDEN, HIDDEN];
        let initial = widths.map(|width| values(&mut rng, tokens * width));
        let mut buffers = initial.each_ref().map(|values| gpu.upload(values));
        let idle = gpu.upload(&vec![bf16::ONE; tokens * INNER]);
        let addresses = buffers.each_ref().map(Buffer::address);
        let (mut routing, _memory) = stack.routing();

        let enqueue_idle = |number: usize, batch: raw::RoutedBatch, workspace: &Workspace| match number % 3 {
            2 => stack.launch_embedding(ids.address(), idle.address(), tokens, batch, workspace.raw()),
            layer => {
                let operands = [addresses[2], idle.address()];
                stack.launch(CHAIN.len() + layer, operands, tokens, batch, workspace.raw());
            }
        };
        let enqueue = |layer: usize, batch: raw::RoutedBatch, workspace: &Workspace| {
            stack.launch(layer, [addresses[layer], addresses[layer + 1]], tokens, batch, workspace.raw());
        };
        let take = |buffers: &mut [Buffer]| -> Vec<Vec<u16>> {
            let results = buffers.iter().map(Buffer::read::<u16>).collect();
            buffers.iter_mut().zip(&initial).for_each(|(buffer, values)| buffer.write(values));
            gpu.synchronize();
            results
        };

        // Each launch alone.
        let batch = stack.route(&mut routing, slots.address(), tokens);
        gpu.synchronize();
        for layer in 0..CHAIN.len() {
            let workspace = stack.workspace();
            gpu.synchronize();
            enqueue(layer, batch, &workspace);
            gpu.synchronize();
        }
        let expected = take(&mut buffers);
        let changed =
            expected.iter().zip(&initial).filter(|(got, initial)| **got != bytemuck::cast_slice::<_, u16>(initial));
        // A single token has an adapter that one of the layers lacks.
        assert!(changed.count() >= CHAIN.len() - usize::from(tokens == 1), "{tokens} tokens: there are no deltas");

        let workspace = stack.workspace();
        gpu.synchronize();
        for idle_launches in 0..4 {
            let mut step = || {
                let batch = stack.route(&mut routing, slots.address(), tokens);
                for layer in 0..CHAIN.len() {
                    enqueue(layer, batch, &workspace);
                    (0..idle_launches).for_each(|number| enqueue_idle(layer + number, batch, &workspace));
                }
            };
            let graph = gpu.capture(&mut step);
            for repeat in 0..REPEATS {
                step();
                let eager = take(&mut buffers);
                graph.replay();
                let captured = take(&mut buffers);
                for (got, how) in [(eager, "eager"), (captured, "captured")] {
                    for (layer, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        assert!(
                            got == expected,
                            "{tokens} tokens, {idle_launches} idle launches between, {how}, {repeat}: buffer {layer} \
                             differs"
                        );
                    }
                }
            }
        }
        assert!(idle.read::<bf16>().iter().all(|&y| y == bf16::ONE), "{tokens} tokens: an idle launch has written");
    }
}

/// A foreign kernel lets its dependents start at once and writes `x` late. Launches without work are behind it, and
/// then a layer that reads `x`.
#[test]
#[ignore = "needs a GPU"]
fn idle_launches_wait_for_a_late_kernel() {
    const MICROSECONDS: u64 = 300;
    let layers: [(usize, &[usize]); 2] = [(HIDDEN, &[512]), (HIDDEN, &[256])];
    let capacity = Capacity::tokens(1100).slots(4).rank(64);
    let stack = Stack::new(&layers, capacity, 3, |adapter, layer| if layer == 1 { 0 } else { [16, 64, 7][adapter] });
    let (gpu, late, mut rng) = (&stack.gpu, Late::new(&stack.gpu), StdRng::seed_from_u64(15));
    let workspace = stack.workspace();
    for tokens in [1, 16, 64, 512, 513, 1100] {
        let slots: Vec<i32> = (0..tokens as i32).map(|token| token % 3).collect();
        let (slots, ids) = (gpu.upload(&slots), gpu.upload(&vec![3_i32; tokens]));
        let mut x = gpu.upload(&vec![bf16::ZERO; tokens * HIDDEN]);
        let [mut y, idle] = [512, HIDDEN].map(|width| gpu.upload(&vec![bf16::ONE; tokens * width]));
        let (mut routing, _memory) = stack.routing();
        let batch = stack.route(&mut routing, slots.address(), tokens);
        let operands = [x.address(), y.address()];
        let late_x = gpu.upload(&values(&mut rng, tokens * HIDDEN));
        x.write(&late_x.read::<bf16>());
        stack.launch(0, operands, tokens, batch, workspace.raw());
        let expected = y.read::<u16>();
        for idle_launches in 1..4 {
            x.write(&vec![bf16::ZERO; tokens * HIDDEN]);
            y.write(&vec![bf16::ONE; tokens * 512]);
            gpu.synchronize();
            late.copy(&late_x, &x, MICROSECONDS);
            for number in 0..idle_launches {
                match (number + idle_launches) % 2 {
                    0 => stack.launch_embedding(ids.address(), idle.address(), tokens, batch, workspace.raw()),
                    _ => stack.launch(1, [x.address(), idle.address()], tokens, batch, workspace.raw()),
                }
            }
            stack.launch(0, operands, tokens, batch, workspace.raw());
            assert!(y.read::<u16>() == expected, "{tokens} tokens behind {idle_launches} idle launches");
        }
    }
}

/// If the second launch of an operation is refused, only shrink runs. It leaves `y` as it was, and the workspace can be
/// used again, by the one launch of small_m and by the two launches of large_m.
#[test]
#[ignore = "needs a GPU"]
fn a_shrink_without_its_expand_leaves_no_trace() {
    let capacity = Capacity::tokens(1100).slots(4).rank(64);
    let stack = Stack::new(&[(2100, &[512, 64])], capacity, 3, |adapter, _| [64, 16, 5][adapter]);
    let (gpu, mut rng) = (&stack.gpu, StdRng::seed_from_u64(14));
    let shared = stack.workspace();
    for tokens in [1, 40, 512, 513, 1100] {
        // If there are more tokens than slots, some have no slot.
        let slots: Vec<i32> = (0..tokens as i32).map(|token| (token + 1) % 5 - 1).collect();
        let slots = gpu.upload(&slots);
        let [x, other_x] = [(); 2].map(|()| gpu.upload(&values(&mut rng, tokens * 2100)));
        let initial = values(&mut rng, tokens * 576);
        let mut y = gpu.upload(&initial);
        let (mut routing, _memory) = stack.routing();
        let batch = stack.route(&mut routing, slots.address(), tokens);
        let operands = [x.address(), y.address()];
        let own = stack.workspace();
        stack.launch(0, operands, tokens, batch, own.raw());
        let expected = y.read::<u16>();
        assert!(expected != bytemuck::cast_slice::<_, u16>(&initial), "{tokens} tokens: there are no deltas");
        for _ in 0..2 {
            y.write(&initial);
            stack.shrink(0, other_x.address(), tokens, batch, shared.raw());
            assert!(y.read::<u16>() == bytemuck::cast_slice::<_, u16>(&initial), "{tokens} tokens: shrink wrote y");
            stack.launch(0, operands, tokens, batch, shared.raw());
            assert!(y.read::<u16>() == expected, "{tokens} tokens: the next operation differs");
        }
    }
}

/// Each step is a routing and one operation right after it. The operation reads its own step's routing, although it
/// starts before the routing has ended, and the memory held an earlier step's routing.
#[test]
#[ignore = "needs a GPU"]
fn an_operation_right_behind_its_routing() {
    const STEPS: usize = 60;
    let capacity = Capacity::tokens(700).slots(4).rank(16);
    let stack = Stack::new(&[(512, &[256, 64]), (500, &[100])], capacity, 3, |adapter, _| [16, 1, 5][adapter]);
    let gpu = &stack.gpu;
    let mut rng = StdRng::seed_from_u64(13);
    for (layer, in_features, out_features) in [(0, 512, 320), (1, 500, 100)] {
        for tokens in [1, 16, 60, 512, 600] {
            // All tokens of a step are in one slot, or spread over all.
            let slots: Vec<i32> = (0..STEPS)
                .flat_map(|step| {
                    let slot = step as i32 % 5 - 1;
                    let of_step: Vec<i32> = match step % 2 {
                        0 => vec![slot; tokens],
                        _ => (0..tokens).map(|_| rng.random_range(-1..4)).collect(),
                    };
                    of_step
                })
                .collect();
            let slots = gpu.upload(&slots);
            let x = gpu.upload(&values(&mut rng, tokens * in_features));
            let initial = values(&mut rng, tokens * out_features).repeat(STEPS);
            let mut y = gpu.upload(&initial);
            let step_bytes = tokens * out_features * size_of::<bf16>();
            let (x_at, first_y) = (x.address(), y.address());
            let (mut routing, _memory) = stack.routing();
            let workspace = stack.workspace();
            gpu.synchronize();
            let mut enqueue = |step: usize| {
                let slots = slots.address() + (step * tokens * size_of::<i32>()) as u64;
                let batch = stack.route(&mut routing, slots, tokens);
                let operands = [x_at, first_y + (step * step_bytes) as u64];
                stack.launch(layer, operands, tokens, batch, workspace.raw());
            };
            for step in 0..STEPS {
                enqueue(step);
                gpu.synchronize();
            }
            let expected = y.read::<u16>();
            assert!(expected != bytemuck::cast_slice::<_, u16>(&initial));
            let graph = gpu.capture(|| (0..STEPS).for_each(&mut enqueue));
            for repeat in 0..3 {
                y.write(&initial);
                (0..STEPS).for_each(&mut enqueue);
                assert!(y.read::<u16>() == expected, "layer {layer}, {tokens} tokens, eager, {repeat}");
                y.write(&initial);
                graph.replay();
                assert!(y.read::<u16>() == expected, "layer {layer}, {tokens} tokens, captured, {repeat}");
            }
        }
    }
}
