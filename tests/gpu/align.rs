//! The kernel that arranges routes in blocks, against the host's result.

use aril::{
    Slot,
    cuda::{self, Alignment, LaunchError, Routing, TopK, raw},
    error::OperandError,
    plan::{AlignCapacity, Capacity, MAX_SLOTS, RouteCapacity},
    routing::Batch,
};
use cudarc::driver::CudaView;
use proptest::prelude::*;

use crate::{
    common::{
        align::{Case, steps},
        small::choose,
    },
    device::{Buffer, Gpu},
};

/// The arrays as an engine's kernel reads them.
struct Found {
    routes: Vec<i32>,
    block_experts: Vec<i32>,
    block_slots: Vec<i32>,
    num_padded: i32,
}

/// The host's result, padded with -1 to the largest number of blocks.
fn check(found: &Found, case: &Case) -> Result<(), TestCaseError> {
    let aligned = case.aligned();
    let routes: Vec<i32> = aligned.routes().iter().map(|&route| route as i32).collect();
    prop_assert_eq!(found.num_padded, routes.len() as i32);
    prop_assert_eq!(&found.routes[..routes.len()], &routes[..]);
    let blocks = aligned.block_slots().len();
    let (experts, behind) = found.block_experts.split_at(blocks);
    prop_assert!(experts.iter().map(|&expert| expert as usize).eq(aligned.block_experts().iter().copied()));
    prop_assert!(behind.iter().all(|&expert| expert == -1), "{behind:?}");
    let (slots, behind) = found.block_slots.split_at(blocks);
    prop_assert_eq!(slots, bytemuck::cast_slice::<Slot, i32>(aligned.block_slots()));
    prop_assert!(behind.iter().all(|&slot| slot == -1), "{behind:?}");
    Ok(())
}

/// Memory for all of them, one after the other.
fn capacity(steps: &[Case]) -> AlignCapacity {
    let most = |f: fn(&Case) -> usize| steps.iter().map(f).max().unwrap();
    let first = steps[0].capacity();
    let routes = RouteCapacity::tokens(most(Case::num_tokens).max(1)).top_k(most(|case| case.top_k));
    AlignCapacity::new(routes.experts(first.routes.num_experts), first.num_slots, first.block_size)
}

/// More slots than the alignment has, so that some are out of its range.
fn batches(capacity: AlignCapacity) -> Capacity {
    let num_slots = (capacity.num_slots + 3).min(MAX_SLOTS);
    Capacity::tokens(capacity.routes.max_tokens).slots(num_slots).rank(1)
}

/// The raw API, in memory followed by a guard.
struct Raw<'a> {
    gpu: &'a Gpu,
    routing: raw::Routing,
    _routing_memory: Buffer,
    alignment: raw::Alignment,
    memory: Buffer,
    bytes: usize,
}

const GUARD: [u8; 256] = [0xa5; 256];

impl<'a> Raw<'a> {
    fn new(gpu: &'a Gpu, capacity: AlignCapacity) -> Self {
        let routing_memory = gpu.without_indices(raw::Routing::device_bytes(batches(capacity)).unwrap());
        // SAFETY: the memory outlives the routing and is used on one stream.
        let routing = unsafe { raw::Routing::new(&gpu.kernels, batches(capacity), 2, routing_memory.region()) };
        let bytes = raw::Alignment::device_bytes(capacity).unwrap();
        let memory = gpu.upload(&[&vec![0; bytes][..], &GUARD].concat());
        let region = raw::DeviceRegion { bytes, ..memory.region() };
        // SAFETY: the memory is zero, outlives the alignment and is used on one stream.
        let alignment = unsafe { raw::Alignment::new(&gpu.kernels, capacity, region) };
        let (routing, alignment) = (routing.unwrap(), alignment.unwrap());
        Self { gpu, routing, _routing_memory: routing_memory, alignment, memory, bytes }
    }

    fn route(&mut self, slots: &[Slot]) {
        self.gpu.synchronize();
        // SAFETY: the stream is alive and not capturing.
        unsafe { self.routing.update(&Batch::new(slots), self.gpu.raw_stream()) }.unwrap();
    }

    /// The choices, which must outlive the enqueued work.
    fn upload(&self, case: &Case) -> (Buffer, Option<Buffer>) {
        (self.gpu.upload(&case.ids), case.rows.as_ref().map(|rows| self.gpu.upload(rows)))
    }

    fn align(&mut self, top_k: usize, (ids, rows): &(Buffer, Option<Buffer>), num_tokens: usize) -> raw::AlignedRoutes {
        let top_k = raw::TopK::new(ids.address(), top_k).rows(rows.as_ref().map_or(0, Buffer::address));
        let batch = self.routing.capture_batch(num_tokens).unwrap();
        // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
        unsafe { self.alignment.align(batch, top_k, self.gpu.raw_stream()) }.unwrap()
    }

    fn read(&self, routes: raw::AlignedRoutes) -> Found {
        let bytes = self.memory.read::<u8>();
        assert_eq!(bytes[self.bytes..], GUARD, "what is behind the memory was written");
        let at = |address: u64, len: usize| -> Vec<i32> {
            let first = (address - self.memory.address()) as usize;
            bytes[first..][..4 * len].chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
        };
        Found {
            routes: at(routes.routes(), routes.max_padded()),
            block_experts: at(routes.block_experts(), routes.max_blocks()),
            block_slots: at(routes.block_slots(), routes.max_blocks()),
            num_padded: at(routes.num_padded(), 1)[0],
        }
    }

    fn run(&mut self, case: &Case) -> Result<(), TestCaseError> {
        self.route(&case.slots());
        let choices = self.upload(case);
        let routes = self.align(case.top_k, &choices, case.num_tokens());
        check(&self.read(routes), case)
    }
}

fn read(gpu: &Gpu, view: &CudaView<'_, i32>) -> Vec<i32> {
    let values = gpu.stream.clone_dtoh(view).unwrap();
    gpu.synchronize();
    values
}

fn run_through_the_safe_api(gpu: &Gpu, steps: &[Case]) -> Result<(), TestCaseError> {
    let queue = &gpu.queue;
    let mut routing = Routing::new(queue, batches(capacity(steps)), steps.len()).unwrap();
    let mut alignment = Alignment::new(queue, capacity(steps)).unwrap();
    for case in steps {
        let slots = case.known_slots();
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        let (ids, rows) = (gpu.upload(&case.ids), case.rows.as_ref().map(|rows| gpu.upload(rows)));
        let mut top_k = TopK::new(ids.view(), case.top_k).unwrap();
        if let Some(rows) = &rows {
            top_k = top_k.with_rows(rows.view()).unwrap();
        }
        let routes = alignment.update(&batch, &top_k).unwrap();
        let found = Found {
            routes: read(gpu, &routes.routes()),
            block_experts: read(gpu, &routes.block_experts()),
            block_slots: read(gpu, &routes.block_slots()),
            num_padded: read(gpu, &routes.num_padded())[0],
        };
        check(&found, case)?;
    }
    Ok(())
}

fn property(cases_wanted: u32, max_tokens: usize, test: impl Fn(Vec<Case>) -> Result<(), TestCaseError>) {
    let mut runner = proptest::test_runner::TestRunner::new(crate::operations::config(cases_wanted));
    runner.run(&steps(3, max_tokens), test).unwrap();
}

/// Steps of any size follow each other in the same memory.
#[test]
#[ignore = "needs a GPU"]
fn blocks_are_those_of_the_host() {
    let gpu = Gpu::new();
    property(150, 60, |steps| {
        let mut raw = Raw::new(&gpu, capacity(&steps));
        steps.iter().try_for_each(|case| raw.run(case))
    });
    property(60, 60, |steps| run_through_the_safe_api(&gpu, &steps));
}

/// More routes than one pass reads at a time.
#[test]
#[ignore = "needs a GPU"]
fn blocks_of_many_routes_are_those_of_the_host() {
    let gpu = Gpu::new();
    property(40, choose(3000, 700), |steps| {
        let mut raw = Raw::new(&gpu, capacity(&steps));
        steps.iter().try_for_each(|case| raw.run(case))
    });
}

/// A graph is replayed with fewer tokens and with other slots and experts.
#[test]
#[ignore = "needs a GPU"]
fn a_replay_aligns_what_it_finds() {
    let gpu = Gpu::new();
    property(60, 300, |steps| {
        let (capacity, num_experts) = (capacity(&steps), steps[0].num_experts as i32);
        let RouteCapacity { max_tokens, top_k, .. } = capacity.routes;
        let mut raw = Raw::new(&gpu, capacity);
        let mut choices = (gpu.upload(&vec![0; max_tokens * top_k]), None);
        let mut aligned = None;
        let graph = gpu.capture(|| aligned = Some(raw.align(top_k, &choices, max_tokens)));
        for step in &steps {
            // Rows that are not routed keep values of an earlier step.
            let ids: Vec<i32> = (0..max_tokens * top_k)
                .map(|i| step.ids.get(i).copied().unwrap_or(i as i32 % num_experts.max(1)))
                .collect();
            choices.0.write(&ids);
            raw.route(&step.slots());
            graph.replay();
            let slots = step.slots.iter().copied().chain(std::iter::repeat(-1)).take(max_tokens).collect();
            check(&raw.read(aligned.unwrap()), &Case { slots, top_k, ids, rows: None, ..step.clone() })?;
        }
        Ok(())
    });
}

/// A step of `num_tokens` tokens with `top_k` routes each. Slots and experts are functions of the token and the route.
fn case(num_tokens: usize, top_k: usize, slot: fn(usize) -> usize, expert: fn(usize) -> usize) -> Case {
    Case {
        slots: (0..num_tokens).map(|token| slot(token) as i32).collect(),
        top_k,
        ids: (0..num_tokens * top_k).map(|route| expert(route) as i32).collect(),
        rows: None,
        num_experts: 1024,
        num_slots: MAX_SLOTS,
        block_size: 16,
    }
}

fn scatter(i: usize) -> usize {
    (i as u32).wrapping_mul(2_654_435_761) as usize >> 7
}

#[test]
#[ignore = "needs a GPU"]
fn the_most_experts_slots_and_many_routes() {
    let gpu = Gpu::new();
    let tokens = choose(5000, 600);
    let steps = [
        case(tokens, 8, |_| 0, |_| 0),
        case(tokens, 8, |token| token, |_| 1023),
        case(tokens, 8, |token| scatter(token) % MAX_SLOTS, |route| scatter(route) % 1024),
        case(tokens, 8, |_| MAX_SLOTS - 1, |route| route % 1024),
        case(1, 8, |_| MAX_SLOTS - 1, |route| 1023 - route),
        case(tokens, 8, |_| MAX_SLOTS, |route| route % 1024),
        case(0, 1, |_| 0, |_| 0),
    ];
    let mut raw = Raw::new(&gpu, capacity(&steps));
    for step in &steps {
        raw.run(step).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn what_there_is_no_room_for_is_refused() {
    let gpu = Gpu::new();
    let (kernels, queue) = (&gpu.kernels, &gpu.queue);
    let routes = RouteCapacity::tokens(4).top_k(2).experts(3);
    let capacity = AlignCapacity::new(routes, 2, 4);
    let mut routing = Routing::new(queue, Capacity::tokens(5).slots(2).rank(1), 1).unwrap();
    let mut alignment = Alignment::new(queue, capacity).unwrap();
    let ids = gpu.upload(&[0_i32; 15]);
    let mut update = |num_tokens: usize, num_ids: usize, top_k: usize| {
        gpu.synchronize();
        let slots = vec![Slot::new(0); num_tokens];
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        let top_k = TopK::new(ids.view::<i32>().slice(..num_ids), top_k).unwrap();
        alignment.update(&batch, &top_k).map(|routes| read(&gpu, &routes.num_padded())[0])
    };
    assert_eq!(update(4, 8, 2).unwrap(), 8);
    let error = update(4, 6, 2).unwrap_err();
    assert!(matches!(error, LaunchError::Operand(OperandError::Tokens { got: 3, want: 4 })), "{error}");
    assert!(matches!(update(5, 10, 2), Err(LaunchError::Operand(OperandError::Capacity { got: 5, max: 4, .. }))));
    assert!(matches!(update(4, 12, 3), Err(LaunchError::Operand(OperandError::Capacity { got: 3, max: 2, .. }))));

    let bytes = raw::Alignment::device_bytes(capacity).unwrap();
    let memory = gpu.upload(&vec![0_u8; bytes + 256]);
    for (offset, bytes) in [(0, bytes - 1), (128, bytes)] {
        let region = raw::DeviceRegion { ptr: memory.address() + offset, bytes };
        // SAFETY: the memory is zero and outlives the refused calls.
        assert!(unsafe { raw::Alignment::new(kernels, capacity, region) }.is_err());
    }
    let other = Gpu::new();
    let slots = [Slot::new(0)];
    let mut other_routing = Routing::new(&other.queue, Capacity::tokens(1).slots(2).rank(1), 1).unwrap();
    let other_batch = other_routing.update(&Batch::new(&slots)).unwrap();
    let top_k = TopK::new(ids.view::<i32>().slice(..2), 2).unwrap();
    let error = alignment.update(&other_batch, &top_k).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "the batch" }), "{error}");
    let other_ids = cuda::Buffer::zeros(&other.queue, 2).unwrap();
    gpu.synchronize();
    let batch = routing.update(&Batch::new(&slots)).unwrap();
    let error = alignment.update(&batch, &TopK::new(&other_ids, 2).unwrap()).unwrap_err();
    assert!(matches!(error, LaunchError::WrongStream { operand: "ids" }), "{error}");
}
