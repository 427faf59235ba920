//! Results do not depend, in any bit, on kernels that run at the same time or on earlier contents of the workspace.

mod experts;
mod fused_linear;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use aril::{
    DType,
    adapter::Adapter,
    cuda::{LoraLinear, WeightTable, Workspace, raw},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
};
use cudarc::{
    driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg, result, sys},
    nvrtc::Ptx,
};
use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::adapters::{Lora, parts},
    device::{Buffer, Gpu, Graph},
};

/// The last slot stays empty.
const CAPACITY: Capacity = Capacity::tokens(2048).slots(8).rank(128);

/// Input features and slices of each layer: the second's rows are not aligned.
const LAYERS: [(usize, &[usize]); 2] = [(2048, &[1024, 256, 128]), (1100, &[300])];

/// Layers whose adapters are in one table.
struct Layers {
    gpu: Gpu,
    model: Model,
    ids: [LinearId; LAYERS.len()],
    weights: WeightTable,
}

impl Layers {
    fn new() -> Self {
        let gpu = Gpu::new();
        let mut rng = StdRng::seed_from_u64(5);
        let mut spec = ModelSpec::new();
        let path = |layer: usize, slice: usize| format!("layers.{layer}.m{slice}");
        let ids = [0, 1].map(|layer| {
            let (in_features, slices) = LAYERS[layer];
            let linear = Linear::new("", Parallel::Replicated, in_features);
            let slices = slices.iter().enumerate();
            spec.linear(slices.fold(linear, |linear, (i, out)| linear.slice(path(layer, i), *out))).unwrap()
        });
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let weights = WeightTable::new(&gpu.queue, &model, DType::BF16, CAPACITY, 64 << 20).unwrap();
        for (slot, rank) in [16, 1, 128, 64, 8, 33, 100].into_iter().enumerate() {
            let mut modules = Vec::new();
            for (layer, (in_features, slices)) in LAYERS.into_iter().enumerate() {
                for (slice, &out_features) in slices.iter().enumerate() {
                    let module =
                        Lora::linear(path(layer, slice), in_features, out_features, 1 + (rank - 1) / (slice + 1));
                    modules.push(module.fill(|| rng.random_range(-0.1..0.1)));
                }
            }
            let (config, tensors) = parts(16.0, &modules);
            let adapter = Adapter::from_tensors(&config, tensors).unwrap();
            weights.load(slot, &adapter.plan(&model, DType::BF16).unwrap()).unwrap();
        }
        gpu.synchronize();
        Self { gpu, model, ids, weights }
    }
}

/// Launches for a batch: two of `add_delta`, and one of each of its halves.
const LAUNCHES: usize = 3;

/// Successive batches on one layer and stream. Each is routed on the device, and each launch has a separate y.
struct Steps<'a> {
    gpu: &'a Gpu,
    layer: LoraLinear,
    table: raw::Table,
    routing: raw::Routing,
    _routing_memory: Buffer,
    /// The tokens of each batch.
    tokens: Vec<usize>,
    in_features: usize,
    out_features: usize,
    slots: Buffer,
    x: Buffer,
    y: Buffer,
    initial_y: Vec<bf16>,
}

/// The bits of y, by step.
type Results = Vec<Vec<u16>>;

impl<'a> Steps<'a> {
    /// Batches for layer `layer`, on the stream of `gpu`.
    fn new(layers: &'a Layers, layer: usize, gpu: &'a Gpu, tokens: &[usize]) -> Self {
        let mut rng = StdRng::seed_from_u64(layer as u64);
        let (in_features, slices) = LAYERS[layer];
        let (id, out_features) = (layers.ids[layer], slices.iter().sum());
        let (total, most): (usize, usize) = (tokens.iter().sum(), *tokens.iter().max().unwrap());
        let slots: Vec<i32> = (0..total).map(|_| rng.random_range(-1..CAPACITY.num_slots as i32)).collect();
        let mut values =
            |count: usize| -> Vec<bf16> { (0..count).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect() };
        let (x, rows) = (values(most * in_features), values(most * out_features));
        let initial_y: Vec<bf16> =
            tokens.iter().flat_map(|&tokens| rows[..tokens * out_features].repeat(LAUNCHES)).collect();
        let routing_memory = gpu.without_indices(raw::Routing::device_bytes(CAPACITY).unwrap());
        let steps = Self {
            gpu,
            layer: LoraLinear::for_model(&gpu.kernels, &layers.model, id, DType::BF16, CAPACITY).unwrap(),
            table: layers.weights.raw(),
            // SAFETY: the memory lives as long as the routing and is used on one stream.
            routing: unsafe { raw::Routing::new(&gpu.kernels, CAPACITY, 1, routing_memory.region()) }.unwrap(),
            _routing_memory: routing_memory,
            tokens: tokens.to_vec(),
            in_features,
            out_features,
            slots: gpu.upload(&slots),
            x: gpu.upload(&x),
            y: gpu.upload(&initial_y),
            initial_y,
        };
        gpu.synchronize();
        steps
    }

    /// Workspace for any of the layers.
    fn workspace(&self, layers: &Layers) -> Workspace {
        let bytes = layers.ids.map(|id| {
            let layer = LoraLinear::for_model(&self.gpu.kernels, &layers.model, id, DType::BF16, CAPACITY).unwrap();
            layer.plan().workspace_bytes()
        });
        Workspace::with_bytes(&self.gpu.queue, bytes[0].max(bytes[1])).unwrap()
    }

    fn tokens_before(&self, step: usize) -> usize {
        self.tokens[..step].iter().sum()
    }

    fn route(&mut self, step: usize) -> raw::RoutedBatch {
        let slots = self.slots.address() + (self.tokens_before(step) * size_of::<i32>()) as u64;
        let stream = self.gpu.raw_stream();
        // SAFETY: the test owns the slots and the routing and keeps them alive until the stream is synchronized.
        unsafe { self.routing.update_on_device(slots, None, self.tokens[step], stream) }.unwrap()
    }

    fn launch(&self, step: usize, launch: usize, batch: raw::RoutedBatch, workspace: raw::Workspace) {
        let tokens = self.tokens[step];
        let row = LAUNCHES * self.tokens_before(step) + launch * tokens;
        let y = self.y.address() + (row * self.out_features * size_of::<bf16>()) as u64;
        let x = raw::MatrixRef::new::<bf16>(self.x.address(), tokens, self.in_features);
        let y = raw::MatrixMut::new::<bf16>(y, tokens, self.out_features);
        let step = raw::Step::new(self.table, batch, workspace, self.gpu.raw_stream());
        if launch + 1 < LAUNCHES {
            // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
            unsafe { self.layer.add_delta_raw(&step, x, y) }.unwrap();
        } else {
            // SAFETY: as above.
            unsafe { self.layer.shrink_raw(&step, x) }.unwrap();
            // SAFETY: as above.
            unsafe { self.layer.expand_raw(&step, y) }.unwrap();
        }
    }

    fn enqueue(&mut self, step: usize, workspace: &Workspace) {
        let batch = self.route(step);
        (0..LAUNCHES).for_each(|launch| self.launch(step, launch, batch, workspace.raw()));
    }

    /// What y is after every launch was made `times`, each with the device and a workspace to itself.
    fn alone(&mut self, layers: &Layers, times: usize) -> Results {
        for _ in 0..times {
            for step in 0..self.tokens.len() {
                for launch in 0..LAUNCHES {
                    let (batch, workspace) = (self.route(step), self.workspace(layers));
                    self.launch(step, launch, batch, workspace.raw());
                    self.gpu.synchronize();
                }
            }
        }
        let results = self.take_results();
        assert!(bytemuck::cast_slice::<_, u16>(&self.initial_y) != results.concat(), "the adapters change nothing");
        results
    }

    /// Takes y and restores its initial values.
    fn take_results(&mut self) -> Results {
        let mut all = self.y.read::<u16>().into_iter();
        self.y.write(&self.initial_y);
        self.gpu.synchronize();
        self.tokens.iter().map(|tokens| all.by_ref().take(LAUNCHES * tokens * self.out_features).collect()).collect()
    }

    fn check(&mut self, expected: &Results, what: &str) {
        for ((got, expected), tokens) in self.take_results().iter().zip(expected).zip(&self.tokens) {
            assert!(got == expected, "{what}: a step of {tokens} tokens differs from the same alone");
        }
    }
}

/// Another kernel occupies nearly all multiprocessors when the kernels start, as under MPS, and again while they run.
#[test]
#[ignore = "needs a GPU to itself"]
fn beside_a_kernel_that_takes_most_multiprocessors() {
    let layers = Layers::new();
    Hog::expect_gpu_to_itself(&layers.gpu);
    for (layer, tokens) in
        [0, 1].into_iter().flat_map(|layer| [1, 16, 64, 512, 513, 2048].map(|tokens| (layer, tokens)))
    {
        let mut steps = Steps::new(&layers, layer, &layers.gpu, &[tokens; 6]);
        let expected = steps.alone(&layers, 1);
        let workspace = steps.workspace(&layers);
        let ended_first = Hog::is_outrun(|microseconds| {
            let ended_first = Hog::runs_beside(&layers.gpu, Hog::LEFT, microseconds, || {
                (0..steps.tokens.len()).for_each(|step| steps.enqueue(step, &workspace));
            });
            steps.check(&expected, &format!("layer {layer} beside a kernel of {microseconds} µs"));
            ended_first
        });
        assert!(ended_first, "layer {layer}, {tokens} tokens: waits for multiprocessors that it need not have");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn two_streams_at_once() {
    const STEPS: usize = 70;
    const REPLAYS: usize = 3;
    let layers = Layers::new();
    let other = Gpu::in_context(layers.gpu.context.clone());
    let tokens: Vec<usize> = [1, 64, 513, 17, 512, 300, 40].into_iter().cycle().take(STEPS).collect();
    let reversed: Vec<usize> = tokens.iter().rev().copied().collect();
    let mut streams = [Steps::new(&layers, 0, &layers.gpu, &tokens), Steps::new(&layers, 1, &other, &reversed)];
    let workspaces = streams.each_ref().map(|steps| steps.workspace(&layers));

    let expected = streams.each_mut().map(|steps| steps.alone(&layers, 1));
    for step in 0..STEPS {
        streams.iter_mut().zip(&workspaces).for_each(|(steps, workspace)| steps.enqueue(step, workspace));
    }
    streams.iter_mut().zip(&expected).for_each(|(steps, expected)| steps.check(expected, "eager"));

    let expected = streams.each_mut().map(|steps| steps.alone(&layers, REPLAYS));
    let graphs: Vec<Graph> = streams
        .iter_mut()
        .zip(&workspaces)
        .map(|(steps, workspace)| steps.gpu.capture(|| (0..STEPS).for_each(|step| steps.enqueue(step, workspace))))
        .collect();
    for _ in 0..REPLAYS {
        graphs.iter().for_each(Graph::replay);
    }
    streams.iter_mut().zip(&expected).for_each(|(steps, expected)| steps.check(expected, "captured"));
}

/// Layers of different shapes and batch sizes share a workspace, eager and captured. No launch reads sums of another.
#[test]
#[ignore = "needs a GPU"]
fn a_workspace_remembers_nothing() {
    const ROUNDS: usize = 2;
    let layers = Layers::new();
    let tokens = [512, 513, 1, 2048, 17, 1025, 64, 3];
    let mut both = [0, 1].map(|layer| Steps::new(&layers, layer, &layers.gpu, &tokens));
    // A round launches the steps in order, in reverse order, and twice from the graph.
    let expected = both.each_mut().map(|steps| steps.alone(&layers, 4 * ROUNDS));
    let workspace = both[0].workspace(&layers);
    let steps: Vec<(usize, usize)> = (0..tokens.len()).flat_map(|step| [(0, step), (1, step)]).collect();
    let graph = layers.gpu.capture(|| {
        steps.iter().for_each(|&(layer, step)| both[layer].enqueue(step, &workspace));
    });
    for _ in 0..ROUNDS {
        steps.iter().for_each(|&(layer, step)| both[layer].enqueue(step, &workspace));
        graph.replay();
        steps.iter().rev().for_each(|&(layer, step)| both[layer].enqueue(step, &workspace));
        graph.replay();
    }
    both.iter_mut().zip(&expected).for_each(|(steps, expected)| steps.check(expected, "with one workspace"));
}

/// A kernel whose blocks occupy a multiprocessor each for a given time. It always ends, by the clock.
struct Hog {
    stream: Arc<CudaStream>,
    kernel: CudaFunction,
    shared_bytes: u32,
    blocks: usize,
    /// `[launch][begin, end][blocks]`, pinned: 1 once a block has reached the mark.
    marks: *mut AtomicU32,
}

impl Hog {
    const FIRST: usize = 0;
    const SECOND: usize = 2;
    const END: usize = 1;
    /// Multiprocessors left to other kernels.
    const LEFT: usize = 4;
    /// The longest pause of a kernel of one thread. Nothing else takes its multiprocessor, so it sees each time slice
    /// of another process.
    const LONGEST_PAUSE: &str = r"
        .version 7.0
        .target sm_80
        .address_size 64
        .visible .entry longest_pause(.param .u64 result, .param .u64 nanoseconds)
        {
            .reg .pred %again;
            .reg .b64 %result, %time, %start, %before, %now, %past, %pause, %longest;
            ld.param.u64 %result, [result];
            ld.param.u64 %time, [nanoseconds];
            mov.u64 %start, %globaltimer;
            mov.u64 %before, %start;
            mov.u64 %longest, 0;
        spin:
            mov.u64 %now, %globaltimer;
            sub.u64 %pause, %now, %before;
            max.u64 %longest, %longest, %pause;
            mov.u64 %before, %now;
            sub.u64 %past, %now, %start;
            setp.lt.u64 %again, %past, %time;
            @%again bra spin;
            st.global.u64 [%result], %longest;
            ret;
        }
    ";
    const PTX: &str = r"
        .version 7.0
        .target sm_80
        .address_size 64
        .visible .entry hog(.param .u64 begin_marks, .param .u64 end_marks, .param .u64 nanoseconds)
        {
            .reg .pred %again;
            .reg .b32 %block;
            .reg .b64 %begin, %end, %time, %start, %now, %past, %offset;
            mov.u64 %start, %globaltimer;
            ld.param.u64 %begin, [begin_marks];
            ld.param.u64 %end, [end_marks];
            ld.param.u64 %time, [nanoseconds];
            mov.u32 %block, %ctaid.x;
            mul.wide.u32 %offset, %block, 4;
            add.u64 %begin, %begin, %offset;
            add.u64 %end, %end, %offset;
            st.relaxed.sys.u32 [%begin], 1;
        spin:
            mov.u64 %now, %globaltimer;
            sub.u64 %past, %now, %start;
            setp.lt.u64 %again, %past, %time;
            @%again bra spin;
            st.relaxed.sys.u32 [%end], 1;
            ret;
        }
    ";

    /// These tests need the GPU to themselves: while another process has it, the kernels make no progress.
    fn expect_gpu_to_itself(gpu: &Gpu) {
        const LIMIT: Duration = Duration::from_micros(500);
        let kernel = gpu.context.load_module(Ptx::from_src(Self::LONGEST_PAUSE)).unwrap();
        let kernel = kernel.load_function("longest_pause").unwrap();
        let pauses = gpu.upload(&[0_u64]);
        let (result, nanoseconds) = (pauses.address(), 200_000_000_u64);
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        let mut builder = gpu.stream.launch_builder(&kernel);
        // SAFETY: the kernel has these parameters, and the result is alive until the stream is synchronized.
        unsafe { builder.arg(&result).arg(&nanoseconds).launch(config) }.unwrap();
        let longest = Duration::from_nanos(pauses.read::<u64>()[0]);
        assert!(longest < LIMIT, "this test needs the GPU to itself, and something else had it for {longest:?}");
    }

    fn new(gpu: &Gpu, left: usize) -> Self {
        let attribute = |attribute| gpu.context.attribute(attribute).unwrap();
        let shared_bytes = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
        let multiprocessors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) as usize;
        let blocks = multiprocessors - left;
        let kernel = gpu.context.load_module(Ptx::from_src(Self::PTX)).unwrap().load_function("hog").unwrap();
        let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        kernel.set_attribute(limit, shared_bytes).unwrap();
        // Its priority puts it first when both wait for a multiprocessor.
        let (_, highest) = result::stream::get_priority_range().unwrap();
        let kind = result::stream::StreamKind::NonBlocking;
        let stream = result::stream::create_with_priority(kind, highest).unwrap();
        // SAFETY: created in this context and destroyed last.
        let stream = unsafe { gpu.context.wrap_borrowed_stream(stream) };
        let all = 4 * blocks * size_of::<AtomicU32>();
        // SAFETY: a context is current; the memory is written below.
        let marks = unsafe { result::malloc_host(all, sys::CU_MEMHOSTALLOC_DEVICEMAP) }.unwrap().cast::<AtomicU32>();
        // SAFETY: just allocated with this size, and unshared.
        unsafe { marks.write_bytes(0, 4 * blocks) };
        Self { stream, kernel, shared_bytes: shared_bytes as u32, blocks, marks }
    }

    fn launch(&self, launch: usize, microseconds: u64) {
        let marks = |index: usize| (self.marks as usize + index * self.blocks * size_of::<AtomicU32>()) as u64;
        let (begin, end, nanoseconds) = (marks(launch), marks(launch + Self::END), microseconds * 1000);
        let config = LaunchConfig {
            grid_dim: (self.blocks as u32, 1, 1),
            block_dim: (1, 1, 1),
            shared_mem_bytes: self.shared_bytes,
        };
        let mut builder = self.stream.launch_builder(&self.kernel);
        // SAFETY: the kernel has these parameters, and the marks are alive until the stream is synchronized.
        unsafe { builder.arg(&begin).arg(&end).arg(&nanoseconds).launch(config) }.unwrap();
    }

    /// The number of blocks that have reached a mark.
    fn blocks_past(&self, mark: usize) -> usize {
        let marks = self.marks.wrapping_add(mark * self.blocks);
        // SAFETY: inside the marks, which the device writes atomically.
        let marks = unsafe { std::slice::from_raw_parts(marks, self.blocks) };
        marks.iter().filter(|mark| mark.load(Ordering::Relaxed) != 0).count()
    }

    /// Whether the work that `try_beside` runs beside kernels of this many microseconds ends before them.
    ///
    /// The kernels need no multiprocessor that the other kernel occupies, so they end before it. Streams may share a
    /// hardware queue, so there is more than one try.
    fn is_outrun(mut try_beside: impl FnMut(u64) -> bool) -> bool {
        let tries = [300, 3_000, 30_000, 300_000, 300_000, 300_000];
        tries.into_iter().any(|microseconds| try_beside(microseconds) && microseconds >= 3_000)
    }

    /// Whether the enqueued work ends before the first of two such kernels, which starts before it.
    fn runs_beside(gpu: &Gpu, left: usize, microseconds: u64, enqueue: impl FnOnce()) -> bool {
        let hog = Self::new(gpu, left);
        hog.launch(Self::FIRST, microseconds);
        hog.wait_until_begun();
        hog.launch(Self::SECOND, microseconds);
        enqueue();
        gpu.synchronize();
        hog.blocks_past(Self::FIRST + Self::END) == 0
    }

    fn wait_until_begun(&self) {
        let limit = Instant::now() + Duration::from_secs(10);
        while self.blocks_past(Self::FIRST) < self.blocks {
            assert!(Instant::now() < limit, "the other kernel does not begin");
            std::hint::spin_loop();
        }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.stream.synchronize().unwrap();
        // SAFETY: the kernels have ended, and nothing else has the stream.
        unsafe { result::stream::destroy(self.stream.cu_stream()) }.unwrap();
        // SAFETY: allocated by `new` and no longer used.
        unsafe { result::free_host(self.marks.cast()) }.unwrap();
    }
}
