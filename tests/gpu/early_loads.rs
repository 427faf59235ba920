//! Kernels load the routing and the adapters' descriptors before they wait for earlier kernels (csrc/ptx/pdl.cuh). In
//! these tests each step has other ones at the same addresses, which a slow kernel of one block writes.

use aril::{
    DType,
    cuda::{Kernels, LoraLinear, raw},
};
use cudarc::{
    driver::{CudaFunction, LaunchConfig, PushKernelArg, sys},
    nvrtc::Ptx,
};
use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    common::{
        dense::{Case, Site, World},
        small::choose,
        values::Values,
    },
    device::{Buffer, Gpu},
    operations::{PoisonedTable, mailbox_of_garbage},
};

const IN: usize = 1024;
const OUT: [usize; 2] = [256, 72];
const OUTS: usize = OUT[0] + OUT[1];
/// Contents that take turns.
const SETS: u32 = 3;
/// Launches behind the one that writes.
const LAUNCHES: usize = 2;

/// What the kernel of one block writes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Written {
    /// The slots of the tokens, which the library then routes.
    Slots,
    /// The whole routing.
    Routing,
    /// The descriptors of all slots.
    Descriptors,
}

/// Writes the next contents late, and compares results with those of the contents that were written last.
struct Turns {
    rewrite: CudaFunction,
    compare: CudaFunction,
    turn: Buffer,
    mismatches: Buffer,
}

impl Turns {
    const NANOSECONDS: u64 = 3000;
    const THREADS: u32 = 256;
    const PTX: &str = r"
        .version 7.0
        .target sm_80
        .address_size 64
        .visible .entry rewrite(.param .u64 turn, .param .u64 from, .param .u64 to, .param .u32 words, .param .u32 sets,
                                .param .u64 nanoseconds)
        {
            .reg .pred %again, %more, %first;
            .reg .b32 %i, %size, %number, %num_sets, %count, %value, %at;
            .reg .b64 %turns, %source, %target, %offset, %address, %time, %start, %now, %past;
            mov.u64 %start, %globaltimer;
            ld.param.u64 %turns, [turn];
            ld.param.u64 %source, [from];
            ld.param.u64 %target, [to];
            ld.param.u32 %count, [words];
            ld.param.u32 %num_sets, [sets];
            ld.param.u64 %time, [nanoseconds];
            mov.u32 %i, %tid.x;
            mov.u32 %size, %ntid.x;
            ld.volatile.global.u32 %number, [%turns];
            bar.sync 0;
            setp.eq.u32 %first, %i, 0;
            add.u32 %at, %number, 1;
            @%first st.global.u32 [%turns], %at;
            rem.u32 %number, %number, %num_sets;
            mul.lo.u32 %number, %number, %count;
        spin:
            mov.u64 %now, %globaltimer;
            sub.u64 %past, %now, %start;
            setp.lt.u64 %again, %past, %time;
            @%again bra spin;
        next:
            setp.lt.u32 %more, %i, %count;
            @!%more bra done;
            add.u32 %at, %number, %i;
            mul.wide.u32 %offset, %at, 4;
            add.u64 %address, %source, %offset;
            ld.global.u32 %value, [%address];
            mul.wide.u32 %offset, %i, 4;
            add.u64 %address, %target, %offset;
            st.global.u32 [%address], %value;
            add.u32 %i, %i, %size;
            bra next;
        done:
            membar.gl;
            ret;
        }
        .visible .entry compare(.param .u64 turn, .param .u64 expected, .param .u64 got, .param .u32 words,
                                .param .u32 sets, .param .u64 mismatches)
        {
            .reg .pred %more, %differs;
            .reg .b32 %i, %size, %block, %number, %num_sets, %count, %value, %other, %at;
            .reg .b64 %turns, %source, %target, %offset, %address, %counter;
            ld.param.u64 %turns, [turn];
            ld.param.u64 %source, [expected];
            ld.param.u64 %target, [got];
            ld.param.u32 %count, [words];
            ld.param.u32 %num_sets, [sets];
            ld.param.u64 %counter, [mismatches];
            mov.u32 %i, %tid.x;
            mov.u32 %size, %ntid.x;
            mov.u32 %block, %ctaid.x;
            mad.lo.u32 %i, %block, %size, %i;
            mov.u32 %block, %nctaid.x;
            mul.lo.u32 %size, %size, %block;
            ld.volatile.global.u32 %number, [%turns];
            sub.u32 %number, %number, 1;
            rem.u32 %number, %number, %num_sets;
            mul.lo.u32 %number, %number, %count;
        next:
            setp.lt.u32 %more, %i, %count;
            @!%more bra done;
            add.u32 %at, %number, %i;
            mul.wide.u32 %offset, %at, 4;
            add.u64 %address, %source, %offset;
            ld.global.u32 %value, [%address];
            mul.wide.u32 %offset, %i, 4;
            add.u64 %address, %target, %offset;
            ld.volatile.global.u32 %other, [%address];
            setp.ne.u32 %differs, %value, %other;
            @%differs red.global.add.u32 [%counter], 1;
            add.u32 %i, %i, %size;
            bra next;
        done:
            ret;
        }
    ";

    fn new(gpu: &Gpu) -> Self {
        let module = gpu.context.load_module(Ptx::from_src(Self::PTX)).unwrap();
        let [rewrite, compare] = ["rewrite", "compare"].map(|name| module.load_function(name).unwrap());
        Self { rewrite, compare, turn: gpu.upload(&[0_u32]), mismatches: gpu.upload(&[0_u32]) }
    }

    /// Enqueues a kernel on `words` words of `from`, which has [`SETS`] times as many, and of `to`.
    fn launch(&self, gpu: &Gpu, kernel: &CudaFunction, blocks: u32, [from, to]: [&Buffer; 2], last: u64) {
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (Self::THREADS, 1, 1), shared_mem_bytes: 0 };
        let (turn, from, words) = (self.turn.address(), from.address(), (to.region().bytes / 4) as u32);
        let to = to.address();
        let mut builder = gpu.stream.launch_builder(kernel);
        builder.arg(&turn).arg(&from).arg(&to).arg(&words).arg(&SETS).arg(&last);
        // SAFETY: the kernel has these parameters, and the test keeps the memory until the stream is synchronized.
        unsafe { builder.launch(config) }.unwrap();
    }
}

/// Steps of one write, and launches that each read what was written.
struct Steps<'a> {
    gpu: &'a Gpu,
    written: Written,
    tokens: usize,
    layer: LoraLinear,
    table: raw::Table,
    descriptors: Buffer,
    _adapters: PoisonedTable,
    routing: raw::Routing,
    routing_memory: Buffer,
    slots: Buffer,
    x: Buffer,
    y: Buffer,
    workspace: raw::Workspace,
    _workspace: [Buffer; 2],
    /// All sets of what is written, and of the results.
    sets: Buffer,
    expected: Buffer,
    turns: Turns,
}

impl<'a> Steps<'a> {
    fn new(gpu: &'a Gpu, written: Written, tokens: usize) -> Self {
        let adapters: [&[usize]; 4] = [&[16, 9], &[64, 1], &[3, 12], &[33, 8]];
        let case = Case { values: Values::Rounded, ..Case::linear(IN, &OUT, &adapters, vec![0; tokens]) };
        let world: World<bf16> = case.world();
        let capacity = world.capacity(tokens);
        let Site::Linear(id) = world.id else { panic!("the case is a linear layer") };
        let layer = LoraLinear::for_model(&gpu.kernels, &world.model, id, DType::BF16, capacity).unwrap();
        let adapters = PoisonedTable::new(gpu, &world, capacity.num_slots);
        let descriptors = gpu.upload(&adapters.descriptors());
        let (slots_of_table, entries) = (capacity.num_slots, world.model.num_entries());
        let routing_memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap().next_multiple_of(4));
        // SAFETY: the memory is kept as long as the routing, and used on one stream.
        let routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, routing_memory.region()) }.unwrap();
        let mut rng = StdRng::seed_from_u64(21);
        let slots: Vec<i32> = (0..tokens).map(|_| rng.random_range(-1..slots_of_table as i32)).collect();
        let values: Vec<bf16> =
            (0..LAUNCHES * tokens * IN).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect();
        let bytes = layer.plan().workspace_bytes();
        let workspace = [mailbox_of_garbage(gpu, bytes.mailbox), gpu.poisoned(bytes.partials)];
        let mut steps = Self {
            gpu,
            written,
            tokens,
            layer,
            table: raw::Table::new(&world.model, DType::BF16, descriptors.address(), slots_of_table, capacity.max_rank),
            descriptors,
            _adapters: adapters,
            routing,
            routing_memory,
            slots: gpu.upload(&slots),
            x: gpu.upload(&values),
            y: gpu.upload(&vec![bf16::ZERO; LAUNCHES * tokens * OUTS]),
            workspace: raw::Workspace { mailbox: workspace[0].region(), partials: workspace[1].region() },
            _workspace: workspace,
            sets: gpu.upload(&[0_u32]),
            expected: gpu.upload(&[0_u32]),
            turns: Turns::new(gpu),
        };
        let mut sets = Vec::new();
        let mut expected: Vec<Vec<u32>> = Vec::new();
        let rows = steps.descriptors.read::<[u64; 3]>();
        for set in 0..SETS as usize {
            let moved: Vec<i32> =
                slots.iter().map(|slot| (slot + 1 + set as i32) % (slots_of_table as i32 + 1) - 1).collect();
            if written != Written::Descriptors {
                steps.slots.write(&moved);
            } else {
                let mut rows = rows.clone();
                rows.rotate_left(set * entries);
                steps.descriptors.write(&rows);
            }
            steps.route();
            gpu.synchronize();
            sets.extend(steps.target().read::<u32>());
            steps.launch();
            gpu.synchronize();
            expected.push(steps.y.read());
        }
        assert!(expected[0] != expected[1] && expected[1] != expected[2] && expected[2] != expected[0]);
        steps.sets = gpu.upload(&sets);
        steps.expected = gpu.upload(&expected.concat());
        gpu.synchronize();
        steps
    }

    /// What is written in each step.
    fn target(&self) -> &Buffer {
        match self.written {
            Written::Slots => &self.slots,
            Written::Routing => &self.routing_memory,
            Written::Descriptors => &self.descriptors,
        }
    }

    fn route(&mut self) {
        let (slots, stream) = (self.slots.address(), self.gpu.raw_stream());
        // SAFETY: the slots and the routing live until the stream is synchronized.
        unsafe { self.routing.update_on_device(slots, None, self.tokens, stream) }.unwrap();
    }

    fn launch(&self) {
        let batch = self.routing.capture_batch(self.tokens).unwrap();
        let step = raw::Step::new(self.table, batch, self.workspace, self.gpu.raw_stream());
        for launch in 0..LAUNCHES {
            let at = |buffer: &Buffer, cols: usize| buffer.address() + (launch * self.tokens * cols * 2) as u64;
            let x = raw::MatrixRef::new::<bf16>(at(&self.x, IN), self.tokens, IN);
            let y = raw::MatrixMut::new::<bf16>(at(&self.y, OUTS), self.tokens, OUTS);
            // SAFETY: the operands live until the stream is synchronized.
            unsafe { self.layer.write_delta_raw(&step, x, y) }.unwrap();
        }
    }

    fn enqueue(&mut self) {
        self.turns.launch(self.gpu, &self.turns.rewrite, 1, [&self.sets, self.target()], Turns::NANOSECONDS);
        if self.written == Written::Slots {
            self.route();
        }
        self.launch();
        let mismatches = self.turns.mismatches.address();
        self.turns.launch(self.gpu, &self.turns.compare, 16, [&self.expected, &self.y], mismatches);
    }

    /// Runs so many steps as a graph. Returns how many words of the results were wrong.
    fn run(mut self, steps: u32) -> u32 {
        const IN_GRAPH: u32 = 10;
        let gpu = self.gpu;
        let graph = gpu.capture(|| (0..IN_GRAPH).for_each(|_| self.enqueue()));
        (0..steps / IN_GRAPH).for_each(|_| graph.replay());
        gpu.synchronize();
        assert_eq!(self.turns.turn.read::<u32>(), [steps / IN_GRAPH * IN_GRAPH]);
        self.turns.mismatches.read::<u32>()[0]
    }
}

/// The routing and the descriptors that a launch reads are those of its step: in 10^5 steps, in the cache that kernels
/// have by default, and in the largest.
#[test]
#[ignore = "needs a GPU"]
fn a_launch_reads_what_its_step_has_written() {
    let gpu = Gpu::new();
    let has_early_starts = gpu.kernels.device().compute_capability >= (9, 0);
    assert_eq!(Kernels::start_early(), has_early_starts, "the test at load fails on this device");
    let (default, largest) = (sys::CUfunc_cache::CU_FUNC_CACHE_PREFER_NONE, sys::CUfunc_cache::CU_FUNC_CACHE_PREFER_L1);
    for cache in [default, largest] {
        // SAFETY: a context is current.
        unsafe { sys::cuCtxSetCacheConfig(cache) }.result().unwrap();
        for (written, tokens, steps) in [
            (Written::Routing, 64, choose(100_000, 30)),
            (Written::Descriptors, 64, choose(100_000, 30)),
            (Written::Slots, 64, choose(30_000, 30)),
            (Written::Routing, 600, choose(30_000, 30)),
            (Written::Descriptors, 600, choose(30_000, 30)),
        ] {
            let wrong = Steps::new(&gpu, written, tokens).run(steps);
            assert_eq!(wrong, 0, "{written:?}, {tokens} tokens, {cache:?}");
        }
    }
    // SAFETY: as above.
    unsafe { sys::cuCtxSetCacheConfig(default) }.result().unwrap();
}

/// The comparison above sees a step that has read the contents of another.
#[test]
#[ignore = "needs a GPU"]
fn contents_of_another_step_are_noticed() {
    let gpu = Gpu::new();
    let mut steps = Steps::new(&gpu, Written::Descriptors, 64);
    // The descriptors are those of the last set.
    steps.turns.turn.write(&[1_u32]);
    steps.launch();
    let mismatches = steps.turns.mismatches.address();
    steps.turns.launch(&gpu, &steps.turns.compare, 16, [&steps.expected, &steps.y], mismatches);
    assert!(steps.turns.mismatches.read::<u32>()[0] > 0);
}
