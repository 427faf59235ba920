//! The kernels of the base model against references on the CPU in f64.

use std::{ffi::c_void, fmt::Debug, ptr, sync::Arc, thread};

use aril::{DType, Element};
use aril_qwen3::kernels::{
    self as sizes,
    attention::{self, Kernel},
    grouped_gemm, route, sampling,
};
use bytemuck::{NoUninit, Pod, Zeroable};
use cudarc::{
    driver::{
        CudaFunction, CudaModule, LaunchArgs, LaunchConfig, PushKernelArg as _,
        sys::{
            CUfunction_attribute_enum, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
            cuLaunchKernelEx,
        },
    },
    nvrtc::Ptx,
};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom as _};

use super::{
    choose,
    device::{Buffer, Gpu},
};

/// An element type of 16 bits or `f32`.
pub(super) trait Float: Element + Pod + NoUninit + Debug {
    /// The largest relative error of a rounding: half the distance from 1 to the next number.
    const UNIT: f64;
}

impl Float for bf16 {
    const UNIT: f64 = 1.0 / 256.0;
}

impl Float for f16 {
    const UNIT: f64 = 1.0 / 2048.0;
}

impl Float for f32 {
    const UNIT: f64 = 1.0 / 16_777_216.0;
}

pub(super) fn round<T: Float>(value: f32) -> f32 {
    T::from_f32(value).to_f32()
}

pub(super) fn noise<T: Float>(rng: &mut StdRng, len: usize, limit: f32) -> Vec<T> {
    (0..len).map(|_| T::from_f32(rng.random_range(-limit..limit))).collect()
}

/// A device with the kernels.
pub(super) struct Kernels {
    pub(super) gpu: Gpu,
    module: Arc<CudaModule>,
}

impl Kernels {
    pub(super) fn new() -> Self {
        let gpu = Gpu::new();
        let module = gpu.context.load_module(Ptx::from_binary(sizes::IMAGE.to_vec())).unwrap();
        Self { gpu, module }
    }

    pub(super) fn function(&self, name: &str, shared_bytes: usize) -> CudaFunction {
        let function = self.module.load_function(name).unwrap();
        let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        function.set_attribute(attribute, shared_bytes as i32).unwrap();
        function
    }

    /// Launches a kernel with the arguments that `push` adds.
    pub(super) fn launch<'a>(
        &'a self,
        function: &'a CudaFunction,
        grid: (usize, usize),
        threads: u32,
        shared_bytes: usize,
        push: impl FnOnce(&mut LaunchArgs<'a>),
    ) {
        let mut kernel = self.gpu.stream.launch_builder(function);
        push(&mut kernel);
        let grid_dim = (grid.0 as u32, grid.1 as u32, 1);
        let config = LaunchConfig { grid_dim, block_dim: (threads, 1, 1), shared_mem_bytes: shared_bytes as u32 };
        // SAFETY: each test pushes what the kernel declares.
        unsafe { kernel.launch(config) }.unwrap();
    }

    /// Launches a kernel with these bits of its arguments; if `starts_early`, as soon as the kernel in front of it lets
    /// it start.
    fn launch_bits(
        &self,
        function: &CudaFunction,
        (x, y): (usize, usize),
        (threads, shared_bytes): (u32, usize),
        arguments: &[u64],
        starts_early: bool,
    ) {
        self.gpu.context.bind_to_thread().unwrap();
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes as u32,
            hStream: self.gpu.stream.cu_stream(),
            attrs: &raw mut attribute,
            numAttrs: starts_early.into(),
        };
        let mut arguments: Vec<*mut c_void> =
            arguments.iter().map(|bits| ptr::from_ref(bits).cast_mut().cast()).collect();
        // SAFETY: each test passes what the kernel declares; an argument of four bytes is the lower half of its bits.
        let status = unsafe {
            cuLaunchKernelEx(&raw const config, function.cu_function(), arguments.as_mut_ptr(), ptr::null_mut())
        };
        status.result().unwrap();
    }
}

pub(super) fn push_all<'a>(kernel: &mut LaunchArgs<'a>, addresses: &'a [u64]) {
    for address in addresses {
        kernel.arg(address);
    }
}

/// A step of sequences with paged caches whose unused rows are NaN.
struct Paged<T> {
    dim: usize,
    kv_heads: usize,
    group: usize,
    block_rows: usize,
    columns: usize,
    positions: Vec<i32>,
    sequences: Vec<i32>,
    first_rows: Vec<i32>,
    qkv: Vec<T>,
    keys: Vec<T>,
    values: Vec<T>,
}

/// The queries of a sequence in a step: from a position to its length.
type Part = (usize, usize);

impl<T: Float> Paged<T> {
    fn new(rng: &mut StdRng, dim: usize, kv_heads: usize, group: usize, block_rows: usize, parts: &[Part]) -> Self {
        let longest = parts.iter().map(|&(_, len)| len).max().unwrap();
        let columns = longest.div_ceil(block_rows) + 1;
        let mut first_rows: Vec<i32> =
            (0..parts.len() * columns + 3).map(|block| (block * block_rows) as i32).collect();
        let (rows, features) = (first_rows.len() * block_rows, kv_heads * dim);
        first_rows.shuffle(rng);
        first_rows.truncate(parts.len() * columns);
        let mut keys = vec![T::from_f32(f32::NAN); rows * features];
        let mut values = keys.clone();
        let (mut positions, mut sequences) = (Vec::new(), Vec::new());
        for (sequence, &(start, len)) in parts.iter().enumerate() {
            for position in 0..len {
                let row = first_rows[sequence * columns + position / block_rows] as usize + position % block_rows;
                keys[row * features..][..features].copy_from_slice(&noise(rng, features, 2.0));
                values[row * features..][..features].copy_from_slice(&noise(rng, features, 1.0));
            }
            positions.extend((start..len).map(|position| position as i32));
            sequences.extend((start..len).map(|_| sequence as i32));
        }
        let cols = (group + 2) * features;
        let qkv = noise(rng, positions.len() * cols, 2.0);
        Self { dim, kv_heads, group, block_rows, columns, positions, sequences, first_rows, qkv, keys, values }
    }

    fn tokens(&self) -> usize {
        self.positions.len()
    }

    fn query_heads(&self) -> usize {
        self.group * self.kv_heads
    }

    fn cols(&self) -> usize {
        (self.query_heads() + 2 * self.kv_heads) * self.dim
    }

    /// These tokens alone, on the same cache.
    fn tokens_in(&self, tokens: std::ops::Range<usize>) -> Self {
        Self {
            positions: self.positions[tokens.clone()].to_vec(),
            sequences: self.sequences[tokens.clone()].to_vec(),
            first_rows: self.first_rows.clone(),
            qkv: self.qkv[tokens.start * self.cols()..tokens.end * self.cols()].to_vec(),
            keys: self.keys.clone(),
            values: self.values.clone(),
            ..*self
        }
    }

    /// The first token of each run of a sequence, and how many it has.
    fn runs(&self) -> Vec<(usize, usize)> {
        let mut first = 0;
        let runs = self.sequences.chunk_by(|a, b| a == b).map(|run| {
            first += run.len();
            (first - run.len(), run.len())
        });
        runs.collect()
    }

    /// The attention of a token's head in f64, its weighted sum of absolute values, and its largest absolute score.
    fn expected(&self, token: usize, head: usize) -> (Vec<f64>, Vec<f64>, f64) {
        let (dim, features) = (self.dim, self.kv_heads * self.dim);
        let first = head / self.group * dim;
        let query = &self.qkv[token * self.cols() + head * dim..][..dim];
        let rows: Vec<usize> = (0..=self.positions[token] as usize)
            .map(|key| {
                let block = self.sequences[token] as usize * self.columns + key / self.block_rows;
                self.first_rows[block] as usize + key % self.block_rows
            })
            .collect();
        let wide = |value: &T| f64::from(value.to_f32());
        let score = |row: &usize| {
            let key = &self.keys[row * features + first..][..dim];
            query.iter().zip(key).map(|(q, k)| wide(q) * wide(k)).sum::<f64>() / (dim as f64).sqrt()
        };
        let scores: Vec<f64> = rows.iter().map(score).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (mut sum, mut out, mut size) = (0.0, vec![0.0; dim], vec![0.0; dim]);
        for (score, row) in scores.iter().zip(rows) {
            let weight = (score - largest).exp();
            sum += weight;
            for (feature, value) in self.values[row * features + first..][..dim].iter().enumerate() {
                out[feature] += weight * wide(value);
                size[feature] += weight * wide(value).abs();
            }
        }
        out.iter_mut().chain(&mut size).for_each(|value| *value /= sum);
        (out, size, scores.iter().fold(0.0, |largest, score| score.abs().max(largest)))
    }

    /// Asserts that results differ from the exact ones by no more than the rounding of the weights and of the result
    /// and, if `eager`, of the scores.
    fn check(&self, what: &str, out: &[T], eager: bool) {
        let threads = 8;
        thread::scope(|scope| {
            for thread in 0..threads {
                scope.spawn(move || {
                    for index in (thread..self.tokens() * self.query_heads()).step_by(threads) {
                        let (token, head) = (index / self.query_heads(), index % self.query_heads());
                        let (expected, size, largest) = self.expected(token, head);
                        // Both roundings of a score change its weight, and the sum of all weights, by at most this
                        // factor.
                        let scores = if eager { (4.0 * T::UNIT * largest).exp_m1() * 1.1 } else { 0.0 };
                        for (feature, (&expected, size)) in expected.iter().zip(size).enumerate() {
                            let bound = T::UNIT * expected.abs() + (T::UNIT * 1.01 + scores) * size + 2e-5;
                            let got = f64::from(out[index * self.dim + feature].to_f32());
                            assert!(
                                (got - expected).abs() <= bound,
                                "{what}, token {token} at {}, head {head}, feature {feature}: {got}, not {expected} ± \
                                 {bound}",
                                self.positions[token]
                            );
                        }
                    }
                });
            }
        });
    }
}

/// The kernels of attention for heads of one size, in the order of `Kernel::ALL`, and the simple one.
struct Attention<'k> {
    kernels: &'k Kernels,
    simple: CudaFunction,
    fast: Option<[CudaFunction; 3]>,
    arrivals: Buffer,
}

const ARRIVALS: usize = 1024;

impl<'k> Attention<'k> {
    fn new<T: Float>(kernels: &'k Kernels, dim: usize) -> Self {
        let dtype = T::DTYPE;
        let load =
            |kernel: Kernel| kernels.function(&format!("{}_{dtype}", kernel.name(dim)), kernel.shared_bytes(dim));
        Self {
            simple: kernels.function(&format!("attend_{dtype}"), 0),
            fast: (dtype != DType::F32 && attention::DIMS.contains(&dim)).then(|| Kernel::ALL.map(load)),
            arrivals: kernels.gpu.upload(&[0_i32; ARRIVALS]),
            kernels,
        }
    }

    /// Runs the fast kernels as the example does, or with this decode kernel and this many blocks for each head; or the
    /// simple one.
    fn run<T: Float>(&self, paged: &Paged<T>, is_fast: bool, decode: Option<(Kernel, usize)>) -> Vec<T> {
        let gpu = &self.kernels.gpu;
        let alone: Vec<i32> =
            paged.runs().iter().filter(|(_, len)| *len == 1).map(|&(first, _)| first as i32).collect();
        let [qkv, keys, values] = [&paged.qkv, &paged.keys, &paged.values].map(|values| gpu.upload(values));
        let [positions, sequences, first_rows, singles] =
            [&paged.positions, &paged.sequences, &paged.first_rows, &alone].map(|values| gpu.upload(values));
        let out = gpu.poisoned(paged.tokens() * paged.query_heads() * paged.dim * size_of::<T>());
        let inputs = [&qkv, &keys, &values, &positions, &sequences, &first_rows].map(Buffer::address);
        let (out_address, cols, query_heads) = (out.address(), paged.cols(), paged.query_heads());
        let scale = (1.0 / (paged.dim as f64).sqrt()) as f32;
        let max_splits = attention::max_splits(paged.columns * paged.block_rows);
        let pairs = paged.first_rows.len() / paged.columns * paged.kv_heads;
        assert!(pairs <= ARRIVALS);
        let rows = pairs * max_splits * paged.group;
        let (partials, stats) = (gpu.poisoned(rows * paged.dim * 4), gpu.poisoned(rows * 8));
        let scratch = [&partials, &stats, &self.arrivals].map(Buffer::address);
        let (are_all_alone, tokens) = (alone.len() == paged.tokens(), paged.tokens());
        let singles_address = if are_all_alone { 0 } else { singles.address() };
        macro_rules! push {
            ($kernel:ident) => {
                push_all($kernel, &inputs);
                $kernel.arg(&paged.columns).arg(&paged.block_rows).arg(&out_address);
                $kernel.arg(&cols).arg(&query_heads).arg(&paged.kv_heads).arg(&scale);
            };
        }
        if !is_fast {
            self.kernels.launch(&self.simple, (tokens, query_heads), sizes::THREADS, 0, |kernel| {
                push!(kernel);
                kernel.arg(&paged.dim);
            });
            return out.read();
        }
        let fast = self.fast.as_ref().unwrap();
        let own_grid = attention::decode_grid(alone.len(), paged.kv_heads, max_splits);
        let (decode, splits) = decode.unwrap_or((Kernel::for_decode(own_grid), own_grid.1));
        let shared_bytes = decode.shared_bytes(paged.dim);
        let grid = (own_grid.0, splits);
        if !alone.is_empty() {
            self.kernels.launch(&fast[decode as usize], grid, attention::THREADS, shared_bytes, |kernel| {
                push!(kernel);
                kernel.arg(&singles_address);
                push_all(kernel, &scratch);
                kernel.arg(&max_splits);
            });
        }
        if !are_all_alone {
            let grid = attention::prefill_grid(tokens, paged.kv_heads, paged.group);
            let shared_bytes = Kernel::Prefill.shared_bytes(paged.dim);
            let prefill = &fast[Kernel::Prefill as usize];
            self.kernels.launch(prefill, grid, attention::THREADS, shared_bytes, |kernel| {
                push!(kernel);
                kernel.arg(&tokens);
            });
        }
        let results = out.read();
        assert_eq!(self.arrivals.read::<i32>(), [0; ARRIVALS], "the counters are zero between launches");
        results
    }
}

/// Lengths around those of pages, tiles and splits; decode tokens and prefill chunks in one step, with and without keys
/// before them.
fn steps(rng: &mut StdRng) -> [Vec<Part>; 2] {
    let all = [1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 511, 513, 1300];
    let lens = choose(&all[..], &[1, 17, 64, 300]);
    let all = [(699, 700), (0, 2), (0, 40), (0, 64), (0, 130), (100, 229), (255, 257), (0, 1), (16, 17), (0, 65)];
    let mut mixed = choose(&all[..], &all[7..]).to_vec();
    mixed.extend((0..choose(4, 1)).map(|_| {
        let start = rng.random_range(0..300);
        (start, start + rng.random_range(1..80))
    }));
    mixed.shuffle(rng);
    [lens.iter().map(|&len| (len - 1, len)).collect(), mixed]
}

fn attention_holds<T: Float>(seed: u64) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    for dim in attention::DIMS {
        let attention = Attention::new::<T>(&kernels, dim);
        let all = [(1, 16), (2, 5), (4, 16), (8, 64), (5, 1), (16, 1000)];
        for &(group, block_rows) in choose(&all[..], &all[4..]) {
            for parts in steps(&mut rng) {
                let paged = Paged::<T>::new(&mut rng, dim, 2, group, block_rows, &parts);
                let what = format!("{dim} features, groups of {group}, pages of {block_rows}, {parts:?}");
                let out = attention.run(&paged, true, None);
                paged.check(&what, &out, false);
                paged.check(&format!("simple, {what}"), &attention.run(&paged, false, None), true);
                for decode in [(Kernel::Decode, 1), (Kernel::DeepDecode, 3)] {
                    let again = attention.run(&paged, true, Some(decode));
                    assert_eq!(bytes(&again), bytes(&out), "{decode:?}, {what}");
                }
            }
        }
    }
}

pub(super) fn bytes<T: Pod>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

#[test]
#[ignore = "needs a GPU"]
fn attention_in_bf16_differs_from_the_exact_by_its_roundings() {
    attention_holds::<bf16>(1);
}

#[test]
#[ignore = "needs a GPU"]
fn attention_in_f16_differs_from_the_exact_by_its_roundings() {
    attention_holds::<f16>(2);
}

/// Sizes of the small models' heads, and f32.
#[test]
#[ignore = "needs a GPU"]
fn simple_attention_takes_any_heads() {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(3));
    for (dim, group) in [(2, 1), (20, 5), (128, 4), (320, 3)] {
        for parts in steps(&mut rng) {
            let paged = Paged::<f32>::new(&mut rng, dim, 2, group, 7, &parts);
            let out = Attention::new::<f32>(&kernels, dim).run(&paged, false, None);
            paged.check(&format!("{dim} features, groups of {group}"), &out, true);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_sequence_gets_from_attention_alone_what_it_gets_in_a_step() {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(4));
    let attention = Attention::new::<bf16>(&kernels, 128);
    for parts in steps(&mut rng) {
        let paged = Paged::<bf16>::new(&mut rng, 128, 2, 4, 16, &parts);
        let out = attention.run(&paged, true, None);
        let width = paged.query_heads() * paged.dim;
        for (first, len) in paged.runs() {
            let alone = attention.run(&paged.tokens_in(first..first + len), true, None);
            let together = &out[first * width..(first + len) * width];
            assert_eq!(bytes(&alone), bytes(together), "{len} tokens at {}", paged.positions[first]);
        }
    }
}

/// Each of the two starts before the kernel in front has written what it reads: NaN until then.
#[test]
#[ignore = "needs a GPU"]
fn rotation_and_attention_wait_for_what_is_in_front() {
    const DIM: usize = 128;
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(12));
    let gpu = &kernels.gpu;
    let parts: Vec<Part> = (0..96).map(|_| rng.random_range(1..150)).map(|len| (len - 1, len)).collect();
    let mut paged = Paged::<bf16>::new(&mut rng, DIM, 2, 4, 16, &parts);
    let (tokens, cols, features) = (paged.tokens(), paged.cols(), paged.kv_heads * DIM);
    let at = |token: usize| {
        let position = paged.positions[token] as usize;
        paged.first_rows[token * paged.columns + position / 16] as usize + position % 16
    };
    let rows: Vec<i32> = (0..tokens).map(|token| at(token) as i32).collect();
    for &row in &rows {
        paged.keys[row as usize * features..][..features].fill(bf16::NAN);
        paged.values[row as usize * features..][..features].fill(bf16::NAN);
    }
    let gate_up = gpu.upload(&noise::<bf16>(&mut rng, tokens * 2 * cols, 3.0));
    let [q_norm, k_norm] = [(); 2].map(|()| gpu.upload(&noise::<bf16>(&mut rng, DIM, 2.0)));
    let [cos, sin] = [(); 2].map(|()| gpu.upload(&noise::<bf16>(&mut rng, 150 * DIM / 2, 1.0)));
    let [positions, sequences, first_rows, rows] =
        [&paged.positions, &paged.sequences, &paged.first_rows, &rows].map(|values| gpu.upload(values));
    let silu_mul = kernels.function("silu_mul_bf16", 0);
    let rotate = kernels.function("rotate_and_append_bf16", 0);
    let shared_bytes = Kernel::Decode.shared_bytes(DIM);
    let attend = kernels.function(&format!("{}_bf16", Kernel::Decode.name(DIM)), shared_bytes);
    let run = |starts_early: bool| {
        let qkv = gpu.upload(&vec![bf16::NAN; tokens * cols]);
        let [keys, values] = [&paged.keys, &paged.values].map(|values| gpu.upload(values));
        let out = gpu.poisoned(tokens * paged.query_heads() * DIM * size_of::<bf16>());
        let address = Buffer::address;
        let [dim, query_heads, kv_heads] = [DIM, paged.query_heads(), paged.kv_heads].map(|size| size as u64);
        let [columns, block_rows, cols] = [paged.columns, paged.block_rows, cols].map(|size| size as u64);
        let parts = sizes::parts(cols as usize * size_of::<bf16>());
        let threads = (sizes::THREADS, 0);
        kernels.launch_bits(&silu_mul, (tokens, parts), threads, &[address(&gate_up), 0, address(&qkv), cols], false);
        let inputs = [&qkv, &q_norm, &k_norm, &cos, &sin, &positions, &rows, &keys, &values].map(address);
        let of_rotation = [cols, query_heads, kv_heads, dim, dim / 2, EPS.to_bits().into(), 0];
        let arguments = [&inputs[..], &of_rotation].concat();
        let heads = (query_heads + 2 * kv_heads) as usize;
        kernels.launch_bits(&rotate, (tokens, heads.div_ceil(sizes::HEADS)), threads, &arguments, starts_early);
        let scale = (1.0 / (DIM as f64).sqrt()) as f32;
        let inputs = [&qkv, &keys, &values, &positions, &sequences, &first_rows].map(address);
        let sizes = [columns, block_rows, address(&out), cols, query_heads, kv_heads, scale.to_bits().into()];
        // All tokens are alone, and none has more than one split.
        let arguments = [&inputs[..], &sizes, &[0, 0, 0, 0, 1]].concat();
        let grid = (tokens * paged.kv_heads, 1);
        kernels.launch_bits(&attend, grid, (attention::THREADS, shared_bytes), &arguments, starts_early);
        [out, keys, values].map(|buffer| buffer.read::<bf16>())
    };
    let expected = run(false);
    assert!(expected[0].iter().all(|value| !value.is_nan()));
    for round in 0..50 {
        let results = run(true);
        assert!(results.iter().zip(&expected).all(|(got, expected)| bytes(got) == bytes(expected)), "round {round}");
    }
}

/// Asserts that two values rounded to `T` differ by no more than what another order of an f32 sum, before up to two
/// roundings, explains.
pub(super) fn assert_near<T: Float>(got: &[T], expected: &[f32], what: &str) {
    assert_eq!(got.len(), expected.len());
    for (index, (got, &expected)) in got.iter().zip(expected).enumerate() {
        let difference = f64::from((got.to_f32() - expected).abs());
        let bound = (4.0 * T::UNIT + 1e-6) * f64::from(expected.abs()) + 1e-6;
        assert!(difference <= bound, "{what}, element {index}: {got:?}, not {expected}");
    }
}

fn rms(row: &[f32], eps: f32) -> f32 {
    let squares: f64 = row.iter().map(|&value| f64::from(value).powi(2)).sum();
    (1.0 / (squares / row.len() as f64 + f64::from(eps)).sqrt()) as f32
}

/// A value divided by the root mean square of its row, times its weight, to which `offset` is added.
fn normalized<T: Float>(value: f32, weight: T, offset: f32) -> f32 {
    let value = if offset == 0.0 { round::<T>(value) } else { value };
    value * (weight.to_f32() + offset)
}

pub(super) fn floats<T: Float>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

pub(super) const EPS: f32 = 1e-6;

/// Elements behind each row of a matrix whose rows are apart.
pub(super) const GAP: usize = 24;

/// The same rows, with NaN behind each.
pub(super) fn spread<T: Float>(values: &[T], cols: usize) -> Vec<T> {
    values.chunks(cols).flat_map(|row| [row, &[T::from_f32(f32::NAN); GAP]].concat()).collect()
}

fn rows_hold<T: Float>(seed: u64) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    let (gpu, dtype) = (&kernels.gpu, T::DTYPE);
    for (rows, cols) in [(1, 1), (3, 60), (2, 1023), (5, 4096), (1, 10_248), (70, 64)] {
        let (what, stride) = (format!("{rows} rows of {cols} in {dtype}"), cols + GAP);
        let [x, y] = [(); 2].map(|()| noise::<T>(&mut rng, rows * cols, 3.0));
        let weight = noise::<T>(&mut rng, cols, 2.0);
        let parts = sizes::parts(cols * size_of::<T>());
        let weight_buffer = gpu.upload(&weight);
        for (name, has_y, offset) in
            [("", false, 0.0), ("", true, 0.0), ("qwen3_5_", true, 0.0), ("qwen3_5_", true, 1.0)]
        {
            let norm = kernels.function(&format!("{name}add_rms_norm_{dtype}"), 0);
            let (x_buffer, y_buffer, out) =
                (gpu.upload(&x), gpu.upload(&spread(&y, cols)), gpu.poisoned(rows * cols * size_of::<T>()));
            let y_address = if has_y { y_buffer.address() } else { 0 };
            let addresses = [x_buffer.address(), y_address, weight_buffer.address(), out.address()];
            kernels.launch(&norm, (rows, 1), sizes::THREADS, 0, |kernel| {
                push_all(kernel, &addresses);
                kernel.arg(&cols).arg(&stride).arg(&EPS).arg(&offset);
            });
            let sums: Vec<T> = x_buffer.read();
            let added = |(x, y): (&T, &T)| T::from_f32(x.to_f32() + if has_y { y.to_f32() } else { 0.0 });
            let expected: Vec<T> = x.iter().zip(&y).map(added).collect();
            assert_eq!(bytes(&sums), bytes(&expected), "the sums of {what}");
            let normalized: Vec<f32> = (floats(&sums).chunks_exact(cols))
                .flat_map(|row| {
                    let scale = rms(row, EPS);
                    row.iter()
                        .zip(&weight)
                        .map(move |(x, &weight)| normalized(x * scale, weight, offset))
                        .collect::<Vec<_>>()
                })
                .collect();
            assert_near::<T>(&out.read(), &normalized, &what);
        }

        let [gates, ups] = [&x, &y].map(|values| floats(values));
        let gate_up: Vec<T> =
            (x.chunks_exact(cols).zip(y.chunks_exact(cols))).flat_map(|(gate, up)| [gate, up].concat()).collect();
        let gate_up = gpu.upload(&gate_up);
        let silu_mul = kernels.function(&format!("silu_mul_{dtype}"), 0);
        let run = |tokens: u64| {
            let out = gpu.poisoned(rows * cols * size_of::<T>());
            let (from, to, before) = (gate_up.address(), out.address(), out.read::<T>());
            kernels.launch(&silu_mul, (rows, parts), sizes::THREADS, 0, |kernel| {
                kernel.arg(&from).arg(&tokens).arg(&to).arg(&cols);
            });
            (before, out.read::<T>())
        };
        let (_, all) = run(0);
        let silu = |(gate, up): (&f32, &f32)| round::<T>(gate / (1.0 + (-gate).exp())) * up;
        assert_near::<T>(&all, &gates.iter().zip(&ups).map(silu).collect::<Vec<_>>(), &what);

        // Rows of no token, as those of routes to other ranks, are left as they are.
        let tokens: Vec<i32> = (0..rows).map(|_| rng.random_range(-1..2)).collect();
        let token_buffer = gpu.upload(&tokens);
        let (before, some) = run(token_buffer.address());
        let of_tokens = tokens.iter().zip(before.chunks_exact(cols).zip(all.chunks_exact(cols)));
        let expected: Vec<T> =
            of_tokens.flat_map(|(&token, (before, all))| if token < 0 { before } else { all }.to_vec()).collect();
        assert_eq!(bytes(&some), bytes(&expected), "the rows of tokens of {what}");

        let mut indices: Vec<i32> = (0..9).map(|_| rng.random_range(0..rows as i32)).collect();
        indices.extend([-1, rows as i32, i32::MIN, i32::MAX]);
        let (table, index_buffer) = (gpu.upload(&x), gpu.upload(&indices));
        let out = gpu.poisoned(indices.len() * cols * size_of::<T>());
        let addresses = [table.address(), index_buffer.address(), out.address()];
        let gather = kernels.function(&format!("gather_{dtype}"), 0);
        kernels.launch(&gather, (indices.len(), parts), sizes::THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&rows).arg(&cols);
        });
        let row = |&row: &i32| match usize::try_from(row) {
            Ok(row) if row < rows => x[row * cols..][..cols].to_vec(),
            _ => vec![T::default(); cols],
        };
        let gathered: Vec<T> = indices.iter().flat_map(row).collect();
        assert_eq!(bytes(&out.read::<T>()), bytes(&gathered), "gathered {what}");

        let (y_buffer, x_buffer) = (gpu.upload(&y), gpu.upload(&spread(&x, cols)));
        let (to, from) = (y_buffer.address(), x_buffer.address());
        let add = kernels.function(&format!("add_{dtype}"), 0);
        kernels.launch(&add, (rows, parts), sizes::THREADS, 0, |kernel| {
            kernel.arg(&to).arg(&from).arg(&cols).arg(&stride);
        });
        let sums: Vec<T> = ups.iter().zip(&gates).map(|(y, x)| T::from_f32(y + x)).collect();
        assert_eq!(bytes(&y_buffer.read::<T>()), bytes(&sums), "added {what}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn row_kernels_are_those_of_the_cpu() {
    rows_hold::<f32>(5);
    rows_hold::<bf16>(6);
    rows_hold::<f16>(7);
}

fn rotations_hold<T: Float>(seed: u64) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    let (gpu, dtype) = (&kernels.gpu, T::DTYPE);
    for (tokens, query_heads, kv_heads, dim, angles, offset) in [
        (1, 1, 1, 2, 1, 0.0),
        (3, 5, 1, 20, 10, 0.0),
        (9, 32, 8, 128, 64, 0.0),
        (4, 3, 3, 320, 160, 0.0),
        // A part of a head, by the kernel of a Qwen3.5: in vectors, in several steps of a lane, and feature by feature.
        (3, 2, 1, 64, 8, 1.0),
        (5, 16, 2, 256, 32, 1.0),
        (2, 3, 1, 320, 96, 1.0),
        (4, 3, 2, 20, 3, 1.0),
    ] {
        let name = if offset == 0.0 { "" } else { "qwen3_5_" };
        let function = kernels.function(&format!("{name}rotate_and_append_{dtype}"), 0);
        let what = format!("{tokens} tokens, {query_heads} and {kv_heads} heads of {dim}, {angles} angles in {dtype}");
        let (positions, cache_rows) = (50, 64);
        let cols = (query_heads + 2 * kv_heads) * dim;
        let stride = cols + GAP;
        let qkv = noise::<T>(&mut rng, tokens * cols, 2.0);
        let [q_norm, k_norm] = [(); 2].map(|()| noise::<T>(&mut rng, dim, 2.0));
        let [cos, sin] = [(); 2].map(|()| noise::<T>(&mut rng, positions * angles, 1.0));
        let at: Vec<i32> = (0..tokens).map(|_| rng.random_range(0..positions as i32)).collect();
        let mut rows: Vec<i32> = (0..cache_rows).collect();
        rows.shuffle(&mut rng);
        rows.truncate(tokens);
        let inputs = [&spread(&qkv, cols), &q_norm, &k_norm, &cos, &sin].map(|values| gpu.upload(values));
        let indices = [&at, &rows].map(|values| gpu.upload(values));
        let cache_bytes = cache_rows as usize * kv_heads * dim * size_of::<T>();
        let caches = [(); 2].map(|()| gpu.poisoned(cache_bytes));
        let addresses: Vec<u64> = inputs.iter().chain(&indices).chain(&caches).map(Buffer::address).collect();
        let parts = (query_heads + 2 * kv_heads).div_ceil(sizes::HEADS);
        kernels.launch(&function, (tokens, parts), sizes::THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&stride).arg(&query_heads).arg(&kv_heads).arg(&dim).arg(&angles).arg(&EPS).arg(&offset);
        });
        let (rotated, [keys, values]) = (inputs[0].read::<T>(), caches.map(|cache| cache.read::<T>()));
        for token in 0..tokens {
            let row = &qkv[token * cols..][..cols];
            let first_angle = at[token] as usize * angles;
            let to = rows[token] as usize * kv_heads * dim;
            for (head, x) in row.chunks_exact(dim).enumerate() {
                let kv = |first| to + (head - first) * dim;
                if head >= query_heads + kv_heads {
                    let copied = &values[kv(query_heads + kv_heads)..][..dim];
                    assert_eq!(bytes(copied), bytes(x), "{what}, v of token {token}");
                    continue;
                }
                let norm = if head < query_heads { &q_norm } else { &k_norm };
                let x = floats(x);
                let scale = rms(&x, EPS);
                let x: Vec<f32> =
                    (x.iter().zip(norm)).map(|(x, &norm)| round::<T>(normalized(x * scale, norm, offset))).collect();
                let got =
                    if head < query_heads { &rotated[token * stride + head * dim..] } else { &keys[kv(query_heads)..] };
                assert_near(&got[2 * angles..dim], &x[2 * angles..], &format!("{what}, token {token}, head {head}"));
                for pair in 0..angles {
                    let (l, h) = (x[pair], x[pair + angles]);
                    let (c, s) = (cos[first_angle + pair].to_f32(), sin[first_angle + pair].to_f32());
                    let expected = [
                        (round::<T>(l * c) - round::<T>(h * s), l * c, h * s),
                        (round::<T>(h * c) + round::<T>(l * s), h * c, l * s),
                    ];
                    for (half, (expected, a, b)) in expected.into_iter().enumerate() {
                        let got = got[pair + half * angles].to_f32();
                        // A norm of another rounding changes the products, which may cancel.
                        let bound = (6.0 * T::UNIT + 1e-5) * f64::from(a.abs() + b.abs()) + 1e-6;
                        let difference = f64::from((got - expected).abs());
                        assert!(difference <= bound, "{what}, token {token}, head {head}: {got}, not {expected}");
                    }
                }
            }
        }
        let written = |values: &[T]| values.iter().filter(|value| !value.to_f32().is_nan()).count();
        assert_eq!([written(&keys), written(&values)], [tokens * kv_heads * dim; 2], "{what}: only the tokens' rows");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn rotations_are_those_of_the_cpu() {
    rotations_hold::<f32>(8);
    rotations_hold::<bf16>(9);
    rotations_hold::<f16>(10);
}

/// `Draw` of the kernel.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Draw {
    temperature: f32,
    top_p: f32,
    top_k: u64,
    place: f64,
}

const GREEDY: Draw = Draw { temperature: 0.0, top_p: 1.0, top_k: 0, place: 0.0 };

/// The tokens that rows of logits choose, -1 if there is none, and their log-probabilities.
fn draw<T: Float>(kernels: &Kernels, logits: &[T], vocab: usize, draws: &[Draw]) -> Vec<(i32, f32)> {
    let gpu = &kernels.gpu;
    let rows = draws.len();
    let (logits, draws) = (gpu.upload(logits), gpu.upload(draws));
    let (tokens, logprobs) = (gpu.poisoned(rows * 4), gpu.poisoned(rows * 4));
    let addresses = [&logits, &draws, &tokens, &logprobs].map(Buffer::address);
    let function = kernels.function(&format!("draw_{}", T::DTYPE), 0);
    kernels.launch(&function, (sampling::BLOCKS, rows), sampling::THREADS, 0, |kernel| {
        push_all(kernel, &addresses);
        kernel.arg(&vocab);
    });
    tokens.read::<i32>().into_iter().zip(logprobs.read::<f32>()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn a_greedy_draw_takes_the_first_of_the_largest_and_tells_nan() {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(11));
    for &vocab in choose(&[151_936, 4097][..], &[4097]) {
        let noise = noise::<f32>(&mut rng, vocab, 1.0);
        let with = |changes: &[(usize, f32)]| {
            let mut row = noise.clone();
            changes.iter().for_each(|&(at, value)| row[at] = value);
            row
        };
        let rows = [
            (with(&[(77, 2.0)]), 77),
            (with(&[(vocab - 1, 2.0), (vocab - 2, 2.0)]), vocab as i32 - 2),
            (with(&[(5, f32::INFINITY), (9, f32::INFINITY)]), 5),
            (with(&[(5, f32::INFINITY), (4000, f32::NAN)]), -1),
            (with(&[(vocab - 1, -f32::NAN)]), -1),
            (vec![f32::NEG_INFINITY; vocab], 0),
            ([vec![-1.0, -0.0, 0.0], vec![-2.0; vocab - 3]].concat(), 1),
        ];
        let logits: Vec<f32> = rows.iter().flat_map(|(row, _)| row.clone()).collect();
        let drawn = draw(&kernels, &logits, vocab, &[GREEDY; 7]);
        let tokens: Vec<i32> = drawn.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, rows.iter().map(|(_, token)| *token).collect::<Vec<_>>());
        assert!(drawn[3].1.is_nan());
        let sum: f64 = rows[0].0.iter().map(|&logit| f64::from(logit - 2.0).exp()).sum();
        assert!((f64::from(drawn[0].1) + sum.ln()).abs() < 1e-5, "{:?}", drawn[0]);
    }
}

/// The token of a draw in f64, and how near its place is to a boundary between tokens, as a part of the interval.
fn expected_draw<T: Float>(logits: &[T], draw: &Draw) -> (usize, f64) {
    let logits: Vec<f64> = logits.iter().map(|logit| f64::from(logit.to_f32())).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    if draw.top_k > 0 || draw.top_p < 1.0 {
        tokens.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    }
    if draw.top_k > 0 {
        tokens.truncate(draw.top_k as usize);
    }
    let weight = |&token: &usize| ((logits[token] - largest) / f64::from(draw.temperature)).exp();
    let mut near = f64::INFINITY;
    if draw.top_p < 1.0 {
        let total: f64 = tokens.iter().map(weight).sum();
        let (mut sum, mut kept) = (0.0, 0);
        while sum < f64::from(draw.top_p) * total && kept < tokens.len() {
            near = (f64::from(draw.top_p) - sum / total).abs();
            sum += weight(&tokens[kept]);
            kept += 1;
        }
        // Without a probability to reach, the first token is enough.
        if draw.top_p > 0.0 {
            near = near.min((sum / total - f64::from(draw.top_p)).abs());
        }
        tokens.truncate(kept.max(1));
    }
    let total: f64 = tokens.iter().map(weight).sum();
    let mut sum = 0.0;
    for token in &tokens {
        let before = sum;
        sum += weight(token);
        if sum > draw.place * total {
            return (*token, near.min(sum / total - draw.place).min(draw.place - before / total));
        }
    }
    (*tokens.last().unwrap(), 0.0)
}

fn draws_hold<T: Float>(seed: u64) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    let (mut compared, mut total) = (0, 0);
    for &vocab in choose(&[8, 389, 4096, 151_936][..], &[389]) {
        let mut draws = Vec::new();
        for &top_k in choose(&[0, 1, 40, 5000][..], &[0, 40]) {
            for &top_p in choose(&[1.0, 0.9, 0.1, 0.0][..], &[1.0, 0.9]) {
                let temperature = rng.random_range(0.2..2.0);
                draws.push(Draw { temperature, top_p, top_k, place: rng.random() });
            }
        }
        let logits = noise::<T>(&mut rng, draws.len() * vocab, 12.0);
        let drawn = draw(&kernels, &logits, vocab, &draws);
        for ((draw, row), (token, logprob)) in draws.iter().zip(logits.chunks_exact(vocab)).zip(&drawn) {
            let (expected, near) = expected_draw(row, draw);
            total += 1;
            // Weights of the kernel are within 1e-5 of the exact ones.
            if near > 1e-4 {
                compared += 1;
                assert_eq!(*token, expected as i32, "{draw:?} of {vocab}, {near} from a boundary");
            }
            let values = row.iter().map(|logit| f64::from(logit.to_f32()));
            let sum: f64 = values.map(f64::exp).sum();
            let expected = f64::from(row[*token as usize].to_f32()) - sum.ln();
            assert!((f64::from(*logprob) - expected).abs() < 1e-4, "{draw:?} of {vocab}: {logprob}, not {expected}");
        }
        // The same alone as in the batch.
        for (index, row) in logits.chunks_exact(vocab).enumerate().step_by(5) {
            assert_eq!(self::draw(&kernels, row, vocab, &draws[index..=index]), drawn[index..=index], "{vocab}");
        }
    }
    assert!(compared * 10 > total * 6, "{compared} of {total} draws are far enough from a boundary");
}

#[test]
#[ignore = "needs a GPU"]
fn draws_are_those_of_the_cpu() {
    draws_hold::<bf16>(14);
    draws_hold::<f16>(15);
    draws_hold::<f32>(16);
}

fn grouped_gemms_hold<T: Float>(seed: u64) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    let (gpu, dtype) = (&kernels.gpu, T::DTYPE);
    for (counts, outs, cols) in [
        (vec![3, 0, 4], 40, 72),
        (vec![1; choose(130, 20)], 96, 64),
        (choose(vec![0, 200, 16, 17, 0, 129], vec![0, 17, 129]), choose(200, 136), choose(776, 136)),
        (vec![33, 64], 130, 264),
        (vec![0, 0, 1], choose(2048, 264), choose(768, 136)),
        // All to one of many experts, and some to every fortieth.
        ((0..200).map(|expert| if expert == 77 { choose(40, 17) } else { 0 }).collect(), 34, 72),
        ((0..200).map(|expert| if expert % 40 == 3 { 8 + expert / 40 } else { 0 }).collect(), 62, 136),
        // None here: with expert parallelism, all may be to other ranks.
        (vec![0; 5], 32, 64),
    ] {
        let experts: usize = counts.len();
        let bounds: Vec<i32> = (0..=experts).map(|expert| counts[..expert].iter().sum()).collect();
        let routes = bounds[experts] as usize;
        let (x, weights) = (noise::<T>(&mut rng, routes * cols, 1.0), noise::<T>(&mut rng, experts * outs * cols, 1.0));
        let (x_buffer, w_buffer, b_buffer) = (gpu.upload(&x), gpu.upload(&weights), gpu.upload(&bounds));
        // The rows of x in another order, as those of tokens.
        let mut order: Vec<i32> = (0..routes as i32).collect();
        order.shuffle(&mut rng);
        let mut tokens = vec![T::from_f32(0.0); x.len()];
        for (row, &token) in order.iter().enumerate() {
            tokens[token as usize * cols..][..cols].copy_from_slice(&x[row * cols..][..cols]);
        }
        let (tokens_buffer, order_buffer) = (gpu.upload(&tokens), gpu.upload(&order));
        let run = |name: &str, tile: grouped_gemm::Tile, of_tokens: Option<bool>, width: usize| {
            let y = gpu.poisoned((routes + 1) * width * size_of::<T>());
            let (x, rows) = match of_tokens {
                Some(true) => (tokens_buffer.address(), order_buffer.address()),
                _ => (x_buffer.address(), 0),
            };
            let (w_address, bounds_are_old) = (w_buffer.address(), i32::from(of_tokens == Some(false)));
            let addresses = [b_buffer.address(), y.address()];
            let function = kernels.function(&format!("{name}_{dtype}"), tile.shared_bytes);
            let grid = tile.grid(routes.max(1), experts, outs);
            kernels.launch(&function, grid, tile.threads, tile.shared_bytes, |kernel| {
                kernel.arg(&x);
                if of_tokens.is_some() {
                    kernel.arg(&rows);
                }
                kernel.arg(&w_address);
                push_all(kernel, &addresses);
                kernel.arg(&experts).arg(&outs).arg(&cols);
                if of_tokens.is_some() {
                    kernel.arg(&bounds_are_old);
                }
            });
            y.read::<T>()
        };
        let tensor = grouped_gemm::TENSOR.map(|tile| {
            let name = format!("grouped_gemm_{}x{}", tile.rows, tile.outs);
            let y = run(&name, tile, Some(false), outs);
            assert_eq!(bytes(&y), bytes(&run(&name, tile, Some(true), outs)), "{counts:?}, {name}: rows of tokens");
            y
        });
        assert!(tensor.iter().all(|y| bytes(y) == bytes(&tensor[0])), "{counts:?}: all tiles have the same bits");
        let width = outs / 2;
        let activated = grouped_gemm::TENSOR[..grouped_gemm::ACTIVATED].iter().map(|&tile| {
            let name = format!("grouped_gemm_silu_{}x{}", tile.rows, tile.outs);
            run(&name, tile, Some(true), width)
        });
        let activated: Vec<_> = activated.collect();
        assert!(activated.iter().all(|y| bytes(y) == bytes(&activated[0])), "{counts:?}: activated");
        for (row, activated) in activated[0][..routes * width].chunks_exact(width).enumerate() {
            for (out, got) in activated.iter().enumerate() {
                let [gate, up] = [out, width + out].map(|out| f64::from(tensor[0][row * outs + out].to_f32()));
                let expected = gate / (1.0 + (-gate).exp()) * up;
                let bound = (T::UNIT + 1e-5) * expected.abs() + f64::from(f16::MIN_POSITIVE_SUBNORMAL);
                let got = f64::from(got.to_f32());
                assert!(
                    (got - expected).abs() <= bound,
                    "{counts:?}, row {row}, output {out}: {got}, not {expected}, activated"
                );
            }
        }
        assert!(activated[0][routes * width..].iter().all(|value| value.to_f32().is_nan()), "{counts:?}, activated");
        for (what, y) in
            [("simple", run("grouped_gemm", grouped_gemm::SIMPLE, None, outs)), ("tensor", tensor[0].clone())]
        {
            assert!(
                y[routes * outs..].iter().all(|value| value.to_f32().is_nan()),
                "{what} writes behind the last row"
            );
            for expert in 0..experts {
                for row in bounds[expert] as usize..bounds[expert + 1] as usize {
                    for out in (0..outs).step_by(7).chain([outs - 1]) {
                        let weight = &weights[(expert * outs + out) * cols..][..cols];
                        let products = x[row * cols..][..cols].iter().zip(weight);
                        let products = products.map(|(x, w)| f64::from(x.to_f32()) * f64::from(w.to_f32()));
                        let (sum, size) =
                            products.fold((0.0, 0.0), |(sum, size): (f64, f64), p| (sum + p, size + p.abs()));
                        let bound = T::UNIT * sum.abs() + size * cols as f64 * f64::from(f32::EPSILON);
                        let got = f64::from(y[row * outs + out].to_f32());
                        assert!(
                            (got - sum).abs() <= bound,
                            "{what}, {counts:?}, row {row}, output {out}: {got}, not {sum}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn grouped_gemms_are_those_of_the_cpu() {
    grouped_gemms_hold::<bf16>(12);
    grouped_gemms_hold::<f16>(13);
}

/// The routes to the experts of a rank: all of them, some in the middle, and the last one alone.
fn routes_hold<T: Float>(seed: u64, experts: usize) {
    const TOP_K: usize = 4;
    const COLS: usize = 40;
    /// Its scores have a NaN.
    const UNKNOWN: usize = 5;
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    let (gpu, dtype, tokens) = (&kernels.gpu, T::DTYPE, choose(150, 70));
    let routes = tokens * TOP_K;
    let mut scores: Vec<T> = (0..tokens)
        .flat_map(|_| {
            // A token's scores are distinct.
            let mut scores: Vec<T> = (0..experts).map(|place| T::from_f32(0.5 * place as f32 - 2.0)).collect();
            scores.shuffle(&mut rng);
            scores
        })
        .collect();
    scores[UNKNOWN * experts + 3] = T::from_f32(f32::NAN);
    let chosen: Vec<(usize, f64)> = scores
        .chunks_exact(experts)
        .flat_map(|scores| {
            let weights: Vec<f64> = scores.iter().map(|score| f64::from(score.to_f32()).exp()).collect();
            let mut chosen: Vec<(usize, f64)> = weights.into_iter().enumerate().collect();
            let is_known = chosen.iter().all(|(_, weight)| !weight.is_nan());
            chosen.sort_by(|a, b| if is_known { b.1.total_cmp(&a.1) } else { a.0.cmp(&b.0) });
            let sum: f64 = chosen[..TOP_K].iter().map(|(_, weight)| weight).sum();
            chosen
                .into_iter()
                .take(TOP_K)
                .map(move |(expert, weight)| (expert, if is_known { weight / sum } else { f64::NAN }))
        })
        .collect();
    let scores = gpu.upload(&scores);
    for held in [0..experts, 3..7, experts - 1..experts] {
        let (first, count, normalized) = (held.start, held.len(), 1_i32);
        let [ids, weights, rows, tokens_of_rows] = [(); 4].map(|()| gpu.poisoned(routes * 4));
        let bounds = gpu.poisoned((count + 1) * 4);
        let addresses = [scores.address(), ids.address(), weights.address()];
        let function = kernels.function(&format!("choose_experts_{dtype}"), 0);
        kernels.launch(&function, (tokens, 1), sizes::THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&experts).arg(&first).arg(&count).arg(&TOP_K).arg(&normalized);
        });
        let addresses = [ids.address(), rows.address(), tokens_of_rows.address(), bounds.address()];
        let function = kernels.function(&format!("sort_routes_{dtype}"), 0);
        kernels.launch(&function, (count + 1, 1), sizes::THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&routes).arg(&count).arg(&TOP_K);
        });
        let place = |expert: usize| if held.contains(&expert) { (expert - first) as i32 } else { -1 };
        let expected_ids: Vec<i32> = chosen.iter().map(|&(expert, _)| place(expert)).collect();
        assert_eq!(ids.read::<i32>(), expected_ids, "{held:?}");
        for (route, (weight, &(_, expected))) in weights.read::<f32>().into_iter().zip(&chosen).enumerate() {
            let is_near = (f64::from(weight) - expected).abs() <= (T::UNIT + 1e-5) * expected;
            assert!(
                is_near || weight.is_nan() && expected.is_nan(),
                "{held:?}, route {route}: {weight}, not {expected}"
            );
        }
        let mut sorted: Vec<usize> = (0..routes).filter(|&route| expected_ids[route] >= 0).collect();
        sorted.sort_by_key(|&route| expected_ids[route]);
        let (mut expected_rows, mut expected_tokens) = (vec![-1; routes], vec![-1; routes]);
        for (row, &route) in sorted.iter().enumerate() {
            (expected_rows[route], expected_tokens[row]) = (row as i32, (route / TOP_K) as i32);
        }
        assert_eq!(rows.read::<i32>(), expected_rows, "{held:?}");
        assert_eq!(tokens_of_rows.read::<i32>(), expected_tokens, "{held:?}");
        let before = |expert: i32| sorted.iter().filter(|&&route| expected_ids[route] < expert).count() as i32;
        assert_eq!(bounds.read::<i32>(), (0..=count as i32).map(before).collect::<Vec<_>>(), "{held:?}");

        let mut x = noise::<T>(&mut rng, routes * COLS, 1.0);
        x[sorted.len() * COLS..].fill(T::from_f32(f32::NAN));
        let (from, out) = (gpu.upload(&x), gpu.poisoned(tokens * COLS * size_of::<T>()));
        let addresses = [from.address(), weights.address(), rows.address(), out.address()];
        let function = kernels.function(&format!("combine_{dtype}"), 0);
        let parts = sizes::parts(COLS * size_of::<T>());
        kernels.launch(&function, (tokens, parts), sizes::THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&COLS).arg(&TOP_K);
        });
        let mut has_unknown = false;
        for (token, out) in out.read::<T>().chunks_exact(COLS).enumerate() {
            let here = (token * TOP_K..(token + 1) * TOP_K).filter(|&route| expected_rows[route] >= 0);
            for (col, out) in out.iter().enumerate() {
                let product =
                    |route: usize| chosen[route].1 * f64::from(x[expected_rows[route] as usize * COLS + col].to_f32());
                let sum: f64 = here.clone().map(product).sum();
                let got = f64::from(out.to_f32());
                has_unknown |= sum.is_nan();
                assert!(
                    (got - sum).abs() <= 3.0 * T::UNIT + 1e-5 || got.is_nan() && sum.is_nan() && token == UNKNOWN,
                    "{held:?}, token {token}, column {col}: {got}, not {sum}"
                );
            }
        }
        // Any experts do for the unknown token, and some rank has the first ones.
        assert_eq!(has_unknown, first < TOP_K, "{held:?}");
    }
}

/// The router's scores of few tokens, alone or added to deltas, and their routes: those of the kernels for any number
/// of tokens by the same scores.
fn few_routes_hold<T: Float>(seed: u64, adds: bool) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    let (gpu, dtype) = (&kernels.gpu, T::DTYPE);
    let arrivals = gpu.upload(&[0_i32]);
    for (tokens, experts, top_k, cols, held) in [
        (1, 128, 8, choose(2048, 272), 0_usize..128),
        (8, 128, 8, choose(2048, 272), 0..128),
        (15, 256, 32, 4112, 100..256),
        (9, 9, 3, 16, 0..9),
        (16, 40, 16, 144, 39..40),
    ] {
        assert!(route::fits(tokens, experts, top_k, cols));
        let (x, router) = (noise::<T>(&mut rng, tokens * cols, 1.0), noise::<T>(&mut rng, experts * cols, 0.1));
        let (x_buffer, router_buffer) = (gpu.upload(&x), gpu.upload(&router));
        let deltas = noise::<T>(&mut rng, tokens * experts, 1.0);
        let run = |first_token: usize, tokens: usize| {
            let scores = match adds {
                true => gpu.upload(&deltas[first_token * experts..][..tokens * experts]),
                false => gpu.poisoned(tokens * experts * size_of::<T>()),
            };
            let routes = [(); 4].map(|()| gpu.poisoned(tokens * top_k * 4));
            let bounds = gpu.poisoned((held.len() + 1) * 4);
            let router_address = router_buffer.address();
            let x_address = x_buffer.address() + (first_token * cols * size_of::<T>()) as u64;
            let [ids, weights, rows, tokens_of_rows] = &routes;
            let outputs = [&scores, ids, weights, rows, tokens_of_rows, &bounds, &arrivals].map(Buffer::address);
            let (first, count, normalized, adds) = (held.start, held.len(), 1_i32, i32::from(adds));
            let function = kernels.function(&format!("route_few_{dtype}"), 0);
            kernels.launch(&function, (route::blocks(experts), 1), route::THREADS, 0, |kernel| {
                kernel.arg(&x_address).arg(&router_address);
                push_all(kernel, &outputs);
                kernel.arg(&cols).arg(&tokens).arg(&experts).arg(&first).arg(&count).arg(&top_k).arg(&normalized);
                kernel.arg(&adds);
            });
            (scores, routes, bounds)
        };
        let what = format!("{tokens} tokens, {experts} experts, {cols} columns");
        let (scores, few, few_bounds) = run(0, tokens);
        assert_eq!(arrivals.read::<i32>(), [0], "{what}");
        let values = scores.read::<T>();
        for (token, values) in values.chunks_exact(experts).enumerate() {
            for (expert, value) in values.iter().enumerate() {
                let products = x[token * cols..][..cols].iter().zip(&router[expert * cols..][..cols]);
                let products = products.map(|(x, w)| f64::from(x.to_f32()) * f64::from(w.to_f32()));
                let delta = adds.then(|| f64::from(deltas[token * experts + expert].to_f32()));
                let products = products.chain(delta);
                let (sum, size) = products.fold((0.0, 0.0), |(sum, size): (f64, f64), p| (sum + p, size + p.abs()));
                let bound = T::UNIT * sum.abs() + size * (cols + 1) as f64 * f64::from(f32::EPSILON);
                let got = f64::from(value.to_f32());
                assert!((got - sum).abs() <= bound, "{what}, token {token}, expert {expert}: {got}, not {sum}");
            }
        }
        // A token's scores are the same alone.
        let last = run(tokens - 1, 1).0.read::<T>();
        assert_eq!(bytes(&last), bytes(&values[(tokens - 1) * experts..]), "{what}");

        let separate = [(); 4].map(|()| gpu.poisoned(tokens * top_k * 4));
        let bounds = gpu.poisoned((held.len() + 1) * 4);
        let [ids, weights, rows, tokens_of_rows] = &separate;
        let (first, count, normalized, routes) = (held.start, held.len(), 1_i32, tokens * top_k);
        let addresses = [&scores, ids, weights].map(Buffer::address);
        let function = kernels.function(&format!("choose_experts_{dtype}"), 0);
        kernels.launch(&function, (tokens, 1), sizes::THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&experts).arg(&first).arg(&count).arg(&top_k).arg(&normalized);
        });
        let addresses = [ids, rows, tokens_of_rows, &bounds].map(Buffer::address);
        let function = kernels.function(&format!("sort_routes_{dtype}"), 0);
        kernels.launch(&function, (count + 1, 1), sizes::THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&routes).arg(&count).arg(&top_k);
        });
        for (few, separate) in few.iter().chain([&few_bounds]).zip(separate.iter().chain([&bounds])) {
            assert_eq!(few.read::<u32>(), separate.read::<u32>(), "{what}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn routes_of_few_tokens_are_those_of_many() {
    for adds in [false, true] {
        few_routes_hold::<bf16>(20, adds);
        few_routes_hold::<f16>(21, adds);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn routes_of_a_rank_are_those_of_the_cpu() {
    routes_hold::<bf16>(17, 11);
    routes_hold::<f16>(18, 11);
    routes_hold::<f32>(19, 11);
    // More than a warp keeps in registers.
    routes_hold::<f32>(22, 300);
}
