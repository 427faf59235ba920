//! The kernels against the reference, through the safe and the raw API.

use aril::{
    DType, Element, IntoSlices as _, Slices,
    adapter::Adapter,
    cuda::{
        self, LaunchError, LoraEmbedding, LoraLinear, Matrix, MatrixMut, Queue, Routing, Step, TrainedRows,
        WeightTable, Workspace, raw,
    },
    model::Model,
    plan::Capacity,
    routing::Batch,
};
use cudarc::driver::{CudaView, CudaViewMut};
use proptest::prelude::*;

use crate::{
    backend::Value,
    common::{
        case::{self, Layer, Subject},
        compare::{Place, compare},
        dense::{Case, Dense, Op, Site, Sizes, World, cases, check_overwriting},
        slices::SliceBuffers,
        small::{self, choose},
        values::{Dtype, Values},
    },
    device::{Buffer, Gpu, load_slots},
    for_dtype,
};

/// The safe API: `add_delta`, or shrink and expand.
pub struct Safe<'a> {
    pub gpu: &'a Gpu,
    pub apart: bool,
}

/// The raw API, in memory that is NaN outside the operands: unused slots, padded rows, workspace, guards.
pub struct Raw<'a> {
    pub gpu: &'a Gpu,
    /// Rows of the batch beyond the live ones, as in a captured graph; and slots of the routing beyond the table's.
    pub padded_tokens: usize,
    /// Launch from a captured graph.
    pub captured: bool,
}

/// The same, of separate outputs one after the other, each by the layer with its slice alone.
struct OneByOne<'a>(Safe<'a>);

impl Subject<Dense> for Safe<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        self.run_on(case, world, false)
    }
}

impl Subject<Dense> for OneByOne<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        self.0.run_on(case, world, case.separate)
    }
}

impl Safe<'_> {
    fn run_on<T: Element>(&mut self, case: &Case, world: &World<T>, one_by_one: bool) -> Vec<T> {
        let queue = &self.gpu.queue;
        let (tokens, model) = (case.num_tokens(), &world.model);
        let capacity = world.capacity(tokens);
        let weights = table(queue, model, T::DTYPE, capacity, &world.adapters);
        let mut routing = Routing::new(queue, capacity, 1).unwrap();
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let batch = routing.update(&world.batch_of(&slots)).unwrap();

        let (x, ids) = (self.gpu.upload(&world.x), self.gpu.upload(&case.token_ids()));
        let x_view = x.view::<T>();
        let outputs = SliceBuffers::new(&world.y, case.y(), &case.slices(), case.separate && case.is_linear());
        let mut buffers = upload_all(self.gpu, &outputs);
        let mut views: Vec<_> = buffers.iter_mut().map(Buffer::view_mut::<T>).collect();
        let mut workspace = Workspace::new(&weights).unwrap();
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        match world.id {
            Site::Embedding(id) => {
                let layer = LoraEmbedding::new(&weights, id).unwrap();
                layer.add_delta(&mut step, ids.view(), matrix_mut(&mut views[0], case.y())).unwrap();
            }
            Site::RowEmbeddings(id) => {
                let rows = TrainedRows::new(&weights, id).unwrap();
                rows.replace_embeddings(&mut step, ids.view(), matrix_mut(&mut views[0], case.y())).unwrap();
            }
            Site::RowLogits(id) => {
                let (rows, x) = (TrainedRows::new(&weights, id).unwrap(), matrix(&x_view, case.x()));
                rows.replace_logits(&mut step, x, matrix_mut(&mut views[0], case.y())).unwrap();
            }
            Site::Linear(id) => {
                let layer = LoraLinear::new(&weights, id).unwrap();
                let mut run = |layer: &LoraLinear, y: Slices<MatrixMut<'_, T>>| {
                    let x = matrix(&x_view, case.x());
                    if self.apart {
                        layer.shrink(&mut step, x).unwrap().expand(y).unwrap();
                    } else {
                        layer.add_delta(&mut step, x, y).unwrap();
                    }
                };
                if one_by_one {
                    for (slice, y) in outputs.each(&mut views, matrix_mut).into_iter().enumerate() {
                        run(&layer.with_slice(slice).unwrap(), y.into_slices());
                    }
                } else {
                    run(&layer, outputs.matrices(&mut views, matrix_mut));
                }
            }
        }
        outputs.merged(read_all(&buffers))
    }
}

/// A descriptor table and blocks that the test owns, in memory that is NaN outside the blocks.
pub struct PoisonedTable {
    table: Buffer,
    _blocks: Vec<Buffer>,
}

impl PoisonedTable {
    pub fn new<T: Element, L: Layer>(gpu: &Gpu, world: &case::World<T, L>, num_slots: usize) -> Self {
        let num_entries = world.model.num_entries();
        let nowhere = gpu.poisoned(1 << 12);
        let absent = raw::Descriptor { a: nowhere.address(), b: nowhere.address(), rank: 0, scaling: f32::NAN };
        let mut table = vec![absent; num_slots * num_entries];
        let mut blocks = vec![nowhere];
        for (slot, adapter) in world.adapters.iter().enumerate() {
            let image = adapter.plan(&world.model, T::DTYPE).unwrap();
            let mut block = vec![T::default(); image.bytes() / size_of::<T>()];
            image.write_to(bytemuck::cast_slice_mut(&mut block)).unwrap();
            // The contents after it must not matter.
            block.resize(block.len() + 1024, T::from_f32(f32::NAN));
            let block = gpu.upload(&block);
            let row = raw::Descriptor::row(&image, block.address());
            for (to, from) in table[slot * num_entries..].iter_mut().zip(row) {
                if from.rank > 0 {
                    *to = from;
                }
            }
            blocks.push(block);
        }
        Self { table: gpu.upload(&table), _blocks: blocks }
    }

    pub fn address(&self) -> u64 {
        self.table.address()
    }

    pub fn descriptors(&self) -> Vec<raw::Descriptor> {
        self.table.read()
    }
}

/// A routing of a batch, in memory that held no index before.
pub struct PoisonedRouting {
    pub routing: raw::Routing,
    _memory: Buffer,
}

impl PoisonedRouting {
    /// Routes tokens of these slots and scales.
    pub fn new(gpu: &Gpu, capacity: Capacity, (slots, scales): (&[i32], Option<&[f32]>)) -> Self {
        let memory = gpu.without_indices(raw::Routing::device_bytes(capacity).unwrap());
        // SAFETY: the memory outlives the routing and is used on one stream.
        let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 2, memory.region()) }.unwrap();
        // SAFETY: the stream is alive and not capturing.
        unsafe { routing.update(slots, scales, gpu.raw_stream()) }.unwrap();
        Self { routing, _memory: memory }
    }
}

/// A table with these adapters in its first slots.
pub fn table(queue: &Queue, model: &Model, dtype: DType, capacity: Capacity, adapters: &[Adapter]) -> WeightTable {
    let weights = WeightTable::new(queue, model, dtype, capacity, 1 << 26).unwrap();
    for (slot, adapter) in adapters.iter().enumerate() {
        weights.load(slot, &adapter.plan(model, dtype).unwrap()).unwrap();
    }
    weights
}

pub fn matrix<'a, T: Element>(buffer: &CudaView<'a, T>, place: Place) -> Matrix<'a, T> {
    Matrix::strided(buffer.slice(place.offset..), place.rows, place.cols, place.stride).unwrap()
}

pub fn matrix_mut<'a, T: Element>(buffer: &'a mut CudaViewMut<'_, T>, place: Place) -> MatrixMut<'a, T> {
    MatrixMut::strided(buffer.slice_mut(place.offset..), place.rows, place.cols, place.stride).unwrap()
}

pub fn upload_all<T: Element>(gpu: &Gpu, outputs: &SliceBuffers<T>) -> Vec<Buffer> {
    outputs.buffers().iter().map(|buffer| gpu.upload(buffer)).collect()
}

pub fn read_all<T: Element>(buffers: &[Buffer]) -> Vec<Vec<T>> {
    buffers.iter().map(Buffer::read).collect()
}

pub fn raw_matrix<T: Element>(buffer: &Buffer, place: Place) -> raw::MatrixRef {
    let address = buffer.address() + (place.offset * size_of::<T>()) as u64;
    raw::MatrixRef::new::<T>(address, place.rows, place.cols).row_stride(place.stride)
}

pub fn raw_matrix_mut<T: Element>(buffer: &Buffer, place: Place) -> raw::MatrixMut {
    let address = buffer.address() + (place.offset * size_of::<T>()) as u64;
    raw::MatrixMut::new::<T>(address, place.rows, place.cols).row_stride(place.stride)
}

/// A workspace's mailbox of `bytes` bytes. Only its header is initialized; tags of no launch are ignored.
pub fn mailbox_of_garbage(gpu: &Gpu, bytes: usize) -> Buffer {
    let mut mailbox = vec![0xff_u8; bytes];
    mailbox.iter_mut().take(128).for_each(|byte| *byte = 0);
    gpu.upload(&mailbox)
}

/// The same with `write_delta` instead of `add_delta`.
struct Overwriting<'a>(Raw<'a>);

/// The same with a shrink for another stream, and expand.
struct Beside<'a>(Raw<'a>);

/// What a launch does with the delta of a linear layer.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Adds,
    Overwrites,
    Apart,
}

impl Subject<Dense> for Raw<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        self.launch(case, world, Form::Adds)
    }
}

impl Subject<Dense> for Overwriting<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        self.0.launch(case, world, Form::Overwrites)
    }
}

impl Subject<Dense> for Beside<'_> {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        self.0.launch(case, world, Form::Apart)
    }
}

impl Raw<'_> {
    fn launch<T: Element>(&self, case: &Case, world: &World<T>, form: Form) -> Vec<T> {
        let gpu = self.gpu;
        let (live, model, stream) = (case.num_tokens(), &world.model, gpu.raw_stream());
        let tokens = live + self.padded_tokens;
        let capacity = world.capacity(tokens);
        let routed = PoisonedRouting::new(
            gpu,
            capacity.slots(capacity.num_slots + self.padded_tokens),
            (&world.slots, world.scales.as_deref()),
        );
        let batch = routed.routing.capture_batch(tokens).unwrap();
        let table = PoisonedTable::new(gpu, world, capacity.num_slots);

        // Padded rows hold NaN and must not change.
        let padding = |stride: usize| vec![T::from_f32(f32::NAN); self.padded_tokens * stride];
        let x = gpu.upload(&[&world.x[..], &padding(case.x().stride)].concat());
        let ids = gpu.upload(&[&case.token_ids()[..], &vec![0; self.padded_tokens]].concat());
        let grown = |place: Place| Place { rows: tokens, ..place };
        let x_matrix = raw_matrix::<T>(&x, grown(case.x()));
        let y = [&world.y[..], &padding(case.y().stride)].concat();
        let separate = case.separate && case.is_linear();
        let outputs = SliceBuffers::new(&y, grown(case.y()), &case.slices(), separate);
        let buffers = upload_all(gpu, &outputs);
        let y = outputs.matrices(&buffers, raw_matrix_mut::<T>);
        let weights = raw::Table::new(model, T::DTYPE, table.address(), capacity.num_slots, capacity.max_rank);
        let step = |region| raw::Step::new(weights, batch, region, stream);
        let workspace;
        let nowhere = raw::DeviceRegion { ptr: 0, bytes: 0 };
        let without_workspace = step(raw::Workspace { mailbox: nowhere, partials: nowhere });
        let first_y = raw_matrix_mut::<T>(&buffers[0], grown(case.y()));
        let launch: Box<dyn Fn()> = match world.id {
            Site::RowEmbeddings(id) => {
                let (ids, step) = (&ids, without_workspace);
                let rows = TrainedRows::for_model(&gpu.kernels, model, id, T::DTYPE, capacity).unwrap();
                Box::new(move || {
                    // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
                    unsafe { rows.replace_embeddings_raw(&step, ids.address(), first_y) }.unwrap();
                })
            }
            Site::RowLogits(id) => {
                let step = without_workspace;
                let rows = TrainedRows::for_model(&gpu.kernels, model, id, T::DTYPE, capacity).unwrap();
                Box::new(move || {
                    // SAFETY: as above.
                    unsafe { rows.replace_logits_raw(&step, x_matrix, first_y) }.unwrap();
                })
            }
            Site::Embedding(id) => {
                let (ids, y, step) = (&ids, first_y, without_workspace);
                let embedding = LoraEmbedding::for_model(&gpu.kernels, model, id, T::DTYPE, capacity).unwrap();
                Box::new(move || {
                    // SAFETY: the test owns all operands and keeps them alive until the stream is synchronized.
                    unsafe { embedding.add_delta_raw(&step, ids.address(), y) }.unwrap();
                })
            }
            Site::Linear(id) => {
                let linear = LoraLinear::for_model(&gpu.kernels, model, id, T::DTYPE, capacity).unwrap();
                let bytes = linear.plan().workspace_bytes();
                workspace = [mailbox_of_garbage(gpu, bytes.mailbox), gpu.poisoned(bytes.partials)];
                let [mailbox, partials] = workspace.each_ref().map(Buffer::region);
                let step = step(raw::Workspace { mailbox, partials });
                Box::new(move || {
                    match form {
                        // SAFETY: as above.
                        Form::Adds => unsafe { linear.add_delta_raw(&step, x_matrix, y) },
                        // SAFETY: as above.
                        Form::Overwrites => unsafe { linear.write_delta_raw(&step, x_matrix, y) },
                        Form::Apart => {
                            // SAFETY: as above.
                            unsafe { linear.shrink_raw(&step, x_matrix) }.unwrap();
                            // SAFETY: as above.
                            unsafe { linear.expand_raw(&step, y) }
                        }
                    }
                    .unwrap();
                })
            }
        };
        if self.captured {
            gpu.capture(launch).replay()
        } else {
            launch()
        }
        let mut result = outputs.merged(read_all::<T>(&buffers));
        let padded = result.split_off(world.y.len());
        assert!(padded.iter().all(|value| value.to_f32().is_nan()), "a padded row was written\n{}", case.replay());
        result
    }
}

/// Slots of the tables of [`check_replays`].
pub const REPLAYED_SLOTS: i32 = 4;

/// Steps of a captured batch of `tokens` tokens: `case` makes each of a seed, the ranks of its adapters in two slices,
/// and the slots of its live tokens.
pub fn replayed<L: Layer>(
    tokens: usize,
    case: impl Fn(u64, &[[usize; 2]], Vec<i32>) -> case::Case<L>,
) -> [case::Case<L>; 6] {
    let step = |seed: u64, adapters: &[[usize; 2]], live: usize| {
        let slot = |token: i32| (token * 5 + token / 3 + seed as i32) % (REPLAYED_SLOTS + 1) - 1;
        case(seed, adapters, (0..live as i32).map(slot).collect())
    };
    [
        step(1, &[[16, 8], [1, 0], [64, 64]], tokens),
        step(2, &[[17, 0], [1, 30], [3, 128]], tokens - 1),
        step(3, &[[128, 128], [0, 5]], tokens / 2),
        step(4, &[], tokens),
        step(5, &[[8, 8]], 1),
        step(6, &[[33, 2], [100, 7], [5, 5]], tokens),
    ]
}

/// A captured step follows its memory, to the bit: adapters of other ranks, other slots and fewer tokens between
/// replays. `layer` makes of a table and a layer's id what records the operation, with x, y and the matrix that it
/// writes.
pub fn check_replays<T: Value, L: Layer, F>(
    gpu: &Gpu,
    steps: &[case::Case<L>],
    tokens: usize,
    layer: impl FnOnce(&WeightTable, L::Id) -> F,
) where
    F: FnMut(&mut Step<'_>, Matrix<'_, T>, Matrix<'_, T>, MatrixMut<'_, T>) -> Result<(), LaunchError>,
{
    let (queue, first) = (&gpu.queue, steps[0].world::<T>());
    let capacity = Capacity::tokens(tokens).slots(REPLAYED_SLOTS as usize).rank(128);
    let weights = WeightTable::new(queue, &first.model, T::DTYPE, capacity, 1 << 24).unwrap();
    let mut routing = Routing::new(queue, capacity, 2).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let mut record = layer(&weights, first.id);
    let cols = [steps[0].x(), steps[0].y(), steps[0].target()].map(|place| place.cols);
    let [mut x, mut y, mut target] = cols.map(|cols| cuda::Buffer::<T>::zeros(queue, tokens * cols).unwrap());
    let mut graph = weights
        .capture(&routing, tokens, &mut workspace, |step| {
            let (x, y) = (Matrix::new(&x, tokens, cols[0])?, Matrix::new(&y, tokens, cols[1])?);
            record(step, x, y, MatrixMut::new(&mut target, tokens, cols[2])?)
        })
        .unwrap();
    for case in steps {
        let (world, live) = (case.world::<T>(), case.num_tokens());
        load_slots(&weights, &world.adapters);
        // Rows without a token hold NaN, which stays NaN.
        for (buffer, values) in [(&mut x, &world.x[..]), (&mut y, &world.y), (&mut target, world.target(case))] {
            let len = buffer.len() / tokens * live;
            let mut padded = vec![T::from_f32(f32::NAN); buffer.len()];
            padded[..len].copy_from_slice(&values[..len]);
            buffer.write(&padded).unwrap();
        }
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let batch = routing.update(&Batch::new(&slots)).unwrap();
        graph.replay(&mut weights.step(&batch, &mut workspace).unwrap()).unwrap();
        let mut got = vec![T::default(); target.len()];
        target.read(&mut got).unwrap();
        let (behind, mut expected) = (got.split_off(live * cols[2]), world.expected(case));
        let context = format!("{tokens} tokens, step {}", case.seed);
        assert!(behind.iter().all(|value| value.to_f32().is_nan()), "{context}: a row behind the tokens is not NaN");
        expected.truncate(got.len());
        compare(case.target(), &got, &expected, &context).unwrap();
    }
}

/// The bits to compare, so that NaN equals NaN.
pub fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

pub fn config(cases_wanted: u32) -> ProptestConfig {
    let cases = small::random_cases(cases_wanted);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Runs a property over random cases, or over the one that `ARIL_CASE` names.
pub fn property<L: Layer>(
    cases_wanted: u32,
    cases: impl Strategy<Value = case::Case<L>>,
    test: impl Fn(case::Case<L>) -> Result<(), TestCaseError>,
) {
    let result = match case::Case::from_environment() {
        Some(case) => test(case).map_err(|error| error.to_string()),
        None => proptest::test_runner::TestRunner::new(config(cases_wanted))
            .run(&cases, test)
            .map_err(|error| error.to_string()),
    };
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_safe_api_agrees_with_the_reference() {
    let gpu = Gpu::new();
    property(200, cases(Sizes::large()), |case| {
        let apart = case.seed % 2 == 0;
        for_dtype!(case.check(&mut Safe { gpu: &gpu, apart }))
    });
}

#[test]
#[ignore = "needs a GPU"]
fn the_raw_door_agrees_with_the_reference() {
    let gpu = Gpu::new();
    property(200, cases(Sizes::large()), |case| {
        let (padded_tokens, captured) = ((case.seed % 5) as usize * 7, case.seed % 2 == 0);
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured }))
    });
}

/// A `y` for each slice gives the bits of one for all, in every kernel, and no operation writes around them.
#[test]
#[ignore = "needs a GPU"]
fn separate_outputs_have_the_bits_of_a_fused_one() {
    fn run<T: Element>(gpu: &Gpu, case: &Case, padded_tokens: usize) -> Result<(), TestCaseError> {
        let raw = |captured| Raw { gpu, padded_tokens, captured };
        let safe = || Safe { gpu, apart: case.seed.is_multiple_of(2) };
        case.check_separate::<T>(&mut safe())?;
        case.check_separate::<T>(&mut OneByOne(safe()))?;
        case.check_separate::<T>(&mut raw(true))?;
        case.check_separate::<T>(&mut Overwriting(raw(false)))?;
        case.check_separate::<T>(&mut Beside(raw(false)))
    }
    let gpu = Gpu::new();
    let linears = |sizes: Sizes| cases(sizes).prop_filter("embeddings have no slices", |case| case.is_linear());
    property(100, linears(Sizes::large()), |case| for_dtype!(case, run(&gpu, &case, 0)));
    property(40, linears(Sizes::of_many_tokens()), |case| for_dtype!(case, run(&gpu, &case, 0)));
    // Aligned and misaligned, up to the most slices, in small_m, large_m and the kernels of high ranks.
    let corners = Case::of_many_slices(choose(&[1, 19, 64, 513], &[1, 19]));
    for case in corners.into_iter().chain([16, 64, 200].map(qkv)) {
        for padded_tokens in [0, choose(600, 520)] {
            for_dtype!(case, run(&gpu, &case, padded_tokens)).unwrap();
        }
    }
}

/// Aligned q, k and v of adapters up to this rank.
fn qkv(rank: usize) -> Case {
    let slots = (0..40).map(|token| token % 4 - 1).collect();
    Case::linear(264, &[512, 128, 128], &[&[rank, rank, 8], &[0, rank, 1], &[3, 0, rank]], slots)
}

/// More tokens than one launch takes, in the large_m kernels, with all scales and strides.
#[test]
#[ignore = "needs a GPU"]
fn many_tokens_agree_with_the_reference() {
    let gpu = Gpu::new();
    property(40, cases(Sizes::of_many_tokens()), |case| {
        for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }))
    });
}

/// Results have the same bits when repeated or captured, in any batch, and however the input is split over blocks.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_bits_depend_on_nothing_else() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let world = case.world::<T>();
        let mut eager = Raw { gpu, padded_tokens: 0, captured: false };
        // Without the tokens after them: 512 rows run as small_m, and 513 as large_m.
        let first = case.check_invariance::<T>(&mut eager, &[1, 16, 17, 512], case.num_tokens() / 3 + 1)?;
        prop_assert!(bits(&first) == bits(&eager.run(case, &world)), "twice differs\n{}", case.replay());
        // More than 512 rows take two launches, on wide tiles.
        let mut others = [
            ("captured", Raw { gpu, padded_tokens: 3, captured: true }),
            ("as one of many", Raw { gpu, padded_tokens: choose(1100, 520), captured: false }),
        ];
        for (name, subject) in &mut others {
            prop_assert!(bits(&first) == bits(&subject.run(case, &world)), "{name} differs\n{}", case.replay());
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(60, cases(Sizes { max_tokens: 80, ..Sizes::large() }), |case| for_dtype!(case, run(&gpu, &case)));
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        let slots = (0..513).map(|token| token % 7 - 1).collect();
        let adapters: [&[usize]; 5] = [&[16, 8], &[1, 128], &[64, 0], &[33, 7], &[100, 3]];
        let linear = Case::linear(choose(1300, 264), &[72, 40], &adapters, slots);
        let case = Case { dtype, values: Values::Rounded, ..linear };
        for_dtype!(case, run(&gpu, &case)).unwrap();
    }
}

/// NaN in one token's rows does not reach other tokens.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_nan_is_its_own() {
    let gpu = Gpu::new();
    let sizes = Sizes { max_tokens: 80, ..Sizes::large() };
    for padded_tokens in [0, choose(1100, 520)] {
        let subject = || Raw { gpu: &gpu, padded_tokens, captured: false };
        property(80, cases(sizes), |case| for_dtype!(case.check_nan(&mut subject())));
    }
}

/// In all kernels that split `A x` in two terms: those of few tokens and of many, of ranks up to 128 and of more.
#[test]
#[ignore = "needs a GPU"]
fn infinite_sums_stay_infinite() {
    let gpu = Gpu::new();
    for case in [16, 64, 200].into_iter().flat_map(|most| Case::of_infinities(40, most)) {
        for padded_tokens in [0, choose(600, 520)] {
            let mut subject = Raw { gpu: &gpu, padded_tokens, captured: false };
            for_dtype!(case.check_infinities(&mut subject)).unwrap();
        }
    }
}

/// `write_delta` gives what `add_delta` adds to zeros, in small_m and in large_m.
#[test]
#[ignore = "needs a GPU"]
fn overwriting_is_adding_to_zero() {
    let gpu = Gpu::new();
    let sizes = Sizes { max_tokens: 80, ..Sizes::large() };
    for padded_tokens in [3, choose(1100, 520)] {
        let adds = || Raw { gpu: &gpu, padded_tokens, captured: false };
        property(40, cases(sizes), |case| {
            for_dtype!(case, check_overwriting(&mut adds(), &mut Overwriting(adds()), &case))
        });
    }
}

/// Shapes where indexing has gone wrong before, elsewhere.
#[test]
#[ignore = "needs a GPU"]
fn corners() {
    let gpu = Gpu::new();
    let repeated = |runs: &[(i32, usize)]| -> Vec<i32> {
        runs.iter().flat_map(|&(slot, times)| std::iter::repeat_n(slot, times)).collect()
    };
    let corners = [
        // K of gpt-oss, of a sharded down projection, and one past a chunk.
        Case::linear(2880, &[64], &[&[8], &[16]], repeated(&[(0, 5), (1, 9)])),
        Case::linear(1344, &[7], &[&[3]], repeated(&[(0, 17)])),
        Case::linear(257, &[257], &[&[1]], repeated(&[(0, 1)])),
        // Skewed segments like those that deadlocked Punica.
        Case::linear(64, &[40, 8, 8], &[&[4, 4, 4], &[5, 0, 7]], repeated(&[(0, 1), (1, 500)])),
        Case::linear(64, &[40, 8, 8], &[&[4, 4, 4], &[5, 0, 7]], repeated(&[(1, 65)])),
        Case::linear(32, &[16], &(0..128).map(|_| &[2_usize][..]).collect::<Vec<_>>(), (0..128).rev().collect()),
        // The largest rank beside rank 1.
        Case::linear(96, &[300, 20], &[&[512, 1], &[1, 512]], repeated(&[(0, 20), (1, 20), (-1, 3)])),
        // No tokens, none with an adapter, no adapters.
        Case::linear(40, &[40], &[&[4]], vec![]),
        Case::linear(40, &[40], &[&[4]], vec![-1; 30]),
        Case::linear(40, &[40], &[], vec![0, 5, -1]),
    ];
    for case in corners {
        for (padded_tokens, captured) in [(0, false), (20, true)] {
            case.check::<half::bf16>(&mut Raw { gpu: &gpu, padded_tokens, captured }).unwrap();
            case.check::<f32>(&mut Safe { gpu: &gpu, apart: captured }).unwrap();
        }
    }
}

/// Where a table has many slots, a launch has blocks for some of the tiles that a routing may have, and they take
/// turns.
#[test]
#[ignore = "needs a GPU"]
fn tables_of_many_slots() {
    let gpu = Gpu::new();
    // Room for rank 64, which makes a launch for 100 tokens on tiles of their own several thousand blocks.
    let ranks: Vec<[usize; 3]> = (0..130).map(|slot| [3 + slot % 11, slot % 5 * 4, 8]).chain([[64, 64, 64]]).collect();
    let adapters: Vec<&[usize]> = ranks.iter().map(<[usize; 3]>::as_slice).collect();
    let of = |tokens: i32, slot: fn(i32) -> i32| (0..tokens).map(slot).collect::<Vec<_>>();
    let batches = [
        of(100, |token| token),
        of(100, |token| 130 - token % 8),
        // The most tiles that count as few, and one more; a base row in between.
        of(100, |token| token % 15 * 7),
        of(100, |token| token % 16 * 7),
        of(130, |token| if token % 3 == 0 { -1 } else { token }),
        of(300, |token| token * token % 131),
        of(300, |_| 130),
        of(300, |_| -1),
    ];
    for slots in batches.into_iter().take(choose(8, 2)) {
        let case = Case::linear(2100, &[600, 40, 300], &adapters, slots);
        let raw = |padded_tokens, captured| Raw { gpu: &gpu, padded_tokens, captured };
        case.check::<half::bf16>(&mut raw(0, false)).unwrap();
        case.check::<half::f16>(&mut raw(20, true)).unwrap();
        case.check::<half::bf16>(&mut Beside(raw(3, true))).unwrap();
        case.check::<half::f16>(&mut Safe { gpu: &gpu, apart: true }).unwrap();
        check_overwriting::<half::bf16>(&mut raw(3, false), &mut Overwriting(raw(3, false)), &case).unwrap();
    }
    // B in place.
    let high: Vec<&[usize]> = vec![&[200, 130]; 60];
    let case = Case::linear(1500, &[300, 40], &high, of(60, |token| token));
    case.check::<half::bf16>(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: true }).unwrap();
}

/// Layers with much work on 320 to 512 tokens have wide tiles, as those of more tokens.
#[test]
#[ignore = "needs a GPU"]
fn wide_tiles_of_few_tokens() {
    let gpu = Gpu::new();
    for &tokens in choose(&[319, 320, 512][..], &[320]) {
        let slots = (0..tokens).map(|token| token % 7 * (token % 3) - 1).collect();
        let case = Case::linear(4000, &[3000, 4000], &[&[128, 60], &[5, 128], &[0, 64]], slots);
        case.check::<half::bf16>(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }).unwrap();
        case.check::<half::f16>(&mut Beside(Raw { gpu: &gpu, padded_tokens: 7, captured: true })).unwrap();
    }
}

/// Blocks of shrink that reduce several splits (as `src/plan/linear.rs` plans them), slabs and spans.
#[test]
#[ignore = "needs a GPU"]
fn several_splits_of_a_block() {
    let gpu = Gpu::new();
    let cases = [(1400, 9000, &[100][..], &[&[72][..], &[9], &[0]][..]), {
        let ranks: &[&[usize]] = &[&[72, 1, 0, 2, 1, 1, 8, 3], &[1, 3, 72, 1, 0, 0, 1, 1]];
        (900, 13_000, &[64, 8, 8, 8, 8, 8, 8, 8], ranks)
    }];
    for (tokens, in_features, out_features, ranks) in cases {
        let slots = (0..tokens).map(|token| (token * ranks.len() / tokens) as i32).collect();
        let case = Case::linear(in_features, out_features, ranks, slots);
        case.check::<half::bf16>(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }).unwrap();
        case.check::<half::f16>(&mut Raw { gpu: &gpu, padded_tokens: 7, captured: true }).unwrap();
    }
}

/// Exact sums over all of a layer's input, whose last features fill no block or begin another one.
#[test]
#[ignore = "needs a GPU"]
fn many_features_are_all_summed_up() {
    let gpu = Gpu::new();
    for case in Case::of_many_features(choose(&[1, 16, 40, 512, 600], &[16, 520])) {
        for (padded_tokens, captured) in [(0, false), (20, true)] {
            for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured })).unwrap();
        }
        for_dtype!(case.check(&mut Safe { gpu: &gpu, apart: true })).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_slice_has_its_delta() {
    let gpu = Gpu::new();
    for case in Case::of_many_slices(choose(&[1, 19, 300, 520, 64], &[19, 520])) {
        for (padded_tokens, captured) in [(0, false), (20, true)] {
            for_dtype!(case.check(&mut Raw { gpu: &gpu, padded_tokens, captured })).unwrap();
        }
        for_dtype!(case.check(&mut Safe { gpu: &gpu, apart: true })).unwrap();
    }
}

/// One segment with nearly all tokens, and small ones with ranks from 1 to the largest.
#[test]
#[ignore = "needs a GPU"]
fn skewed_segments() {
    let gpu = Gpu::new();
    let up_to_128: [&[usize]; 4] = [&[128, 1, 17], &[1, 128, 64], &[33, 2, 100], &[8, 0, 5]];
    let up_to_512: [&[usize]; 4] = [&[3, 512, 16], &[512, 1, 300], &[1, 0, 512], &[128, 129, 2]];
    for &tokens in choose(&[17, 512, 513, 1025][..], &[17, 513]) {
        for &largest in choose(&[0, 1][..], &[1]) {
            // Single tokens at the beginning, in the middle and at the end.
            let mut few_apart = vec![largest; tokens];
            for (slot, token) in (0..4).filter(|&slot| slot != largest).zip([0, tokens / 2, tokens - 1]) {
                few_apart[token] = slot;
            }
            let mut one_apart = vec![largest; tokens];
            one_apart[tokens / 3] = 2;
            for (adapters, slots) in [(&up_to_128, &few_apart), (&up_to_128, &one_apart), (&up_to_512, &few_apart)] {
                let case = Case::linear(64, &[40, 8, 8], adapters, slots.clone());
                // With padding, 512 tokens run as large_m.
                case.check::<half::bf16>(&mut Raw { gpu: &gpu, padded_tokens: 0, captured: false }).unwrap();
                case.check::<half::f16>(&mut Raw { gpu: &gpu, padded_tokens: 20, captured: true }).unwrap();
                case.check::<half::bf16>(&mut Safe { gpu: &gpu, apart: true }).unwrap();
            }
        }
    }
}

/// Whatever x holds, such a batch changes nothing. An engine that skips the operations gets the same bits.
#[test]
#[ignore = "needs a GPU"]
fn a_batch_without_adapters_may_be_skipped() {
    fn run<T: Element>(gpu: &Gpu, case: &Case) {
        let mut world = case.world::<T>();
        world.x.fill(T::from_f32(f32::NAN));
        assert!(world.slots.iter().all(|&slot| slot < 0));
        let unchanged = |y: &[T]| assert!(bits(y) == bits(&world.y), "a base row was written\n{}", case.replay());
        for flag in [false, true] {
            unchanged(&Safe { gpu, apart: flag }.run(case, &world));
            unchanged(&Raw { gpu, padded_tokens: 3 * usize::from(flag), captured: flag }.run(case, &world));
        }
    }
    let gpu = Gpu::new();
    for tokens in [1, 30, 512, 513] {
        let slots = [-1, -2, i32::MIN].into_iter().cycle().take(tokens).collect();
        let linear = Case { gaps: [0, 3, 0], ..Case::linear(600, &[300, 40], &[&[64, 8], &[1, 128]], slots) };
        let op = Op::Embedding { vocab: 50, hidden: 72 };
        let others = [op, Op::RowEmbeddings { vocab: 50, hidden: 72 }, Op::RowLogits { vocab: 50, hidden: 72 }];
        let others = others.map(|op| linear.with(|layer| *layer = Dense { op, adapters: vec![vec![5], vec![16]] }));
        for case in others.into_iter().chain([linear]) {
            for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
                let case = Case { dtype, ..case.clone() };
                for_dtype!(case, run(&gpu, &case));
            }
        }
    }
}

/// Rows whose offsets exceed 2^31 elements.
#[test]
#[ignore = "needs a GPU with 20 GB"]
fn offsets_are_64_bits_wide() {
    let gpu = Gpu::new();
    let case = Case::linear(24, &[16, 8], &[&[4, 2], &[0, 9]], vec![0, 1, -1, 1, 0]);
    let world = case.world::<half::bf16>();
    let expected = Raw { gpu: &gpu, padded_tokens: 0, captured: false }.run(&case, &world);

    const STRIDE: usize = (1 << 30) + 8;
    let (tokens, cols) = (case.num_tokens(), 24);
    let (capacity, model) = (world.capacity(tokens), &world.model);
    let Site::Linear(id) = world.id else { unreachable!() };
    let rows = tokens * STRIDE;
    // SAFETY: every element is written before it is read.
    let mut x = unsafe { gpu.stream.alloc::<half::bf16>(rows) }.unwrap();
    // SAFETY: as above.
    let mut y = unsafe { gpu.stream.alloc::<half::bf16>(rows) }.unwrap();
    for token in 0..tokens {
        let at = token * STRIDE..token * STRIDE + cols;
        gpu.stream.memcpy_htod(&world.x[token * cols..][..cols], &mut x.slice_mut(at.clone())).unwrap();
        gpu.stream.memcpy_htod(&world.y[token * cols..][..cols], &mut y.slice_mut(at)).unwrap();
    }
    let weights = WeightTable::new(&gpu.queue, model, aril::DType::BF16, capacity, 1 << 20).unwrap();
    for (slot, adapter) in world.adapters.iter().enumerate() {
        let image = adapter.plan(model, aril::DType::BF16).unwrap();
        weights.load(slot, &image).unwrap();
    }
    let mut routing = Routing::new(&gpu.queue, capacity, 1).unwrap();
    let slots = world.loaded_slots(|slot| weights.get(slot));
    let batch = routing.update(&world.batch_of(&slots)).unwrap();
    let layer = LoraLinear::new(&weights, id).unwrap();
    let mut workspace = Workspace::new(&weights).unwrap();
    let x_matrix = Matrix::strided(&x, tokens, cols, STRIDE).unwrap();
    let y_matrix = MatrixMut::strided(&mut y, tokens, cols, STRIDE).unwrap();
    layer.add_delta(&mut weights.step(&batch, &mut workspace).unwrap(), x_matrix, y_matrix).unwrap();
    for token in 0..tokens {
        let row = gpu.stream.clone_dtoh(&y.slice(token * STRIDE..token * STRIDE + cols)).unwrap();
        gpu.synchronize();
        assert_eq!(row, &expected[token * cols..][..cols], "token {token}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_replay_sees_what_changed() {
    fn run<T: Value>(gpu: &Gpu, dtype: Dtype, tokens: usize) {
        let steps = replayed(tokens, |seed, ranks, slots| {
            // The first slice twice.
            let ranks: Vec<_> = ranks.iter().map(|&[first, second]| [first, second, first]).collect();
            let adapters: Vec<_> = ranks.iter().map(|ranks| &ranks[..]).collect();
            Case { dtype, seed, ..Case::linear(choose(1100, 264), &[264, 72, 40], &adapters, slots) }
        });
        check_replays::<T, _, _>(gpu, &steps, tokens, |weights, id| {
            let Site::Linear(id) = id else { unreachable!("the layer is linear") };
            let layer = LoraLinear::new(weights, id).unwrap();
            move |step, x, _, y| layer.add_delta(step, x, y)
        });
    }
    let gpu = Gpu::new();
    for &tokens in choose(&[16, 40, 512, 600][..], &[40, 520]) {
        run::<half::bf16>(&gpu, Dtype::BF16, tokens);
        run::<half::f16>(&gpu, Dtype::F16, tokens);
    }
}
