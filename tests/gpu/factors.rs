//! Factors in device memory, packed into a slot: the bytes that the host packs, and what is refused.

use aril::{
    DType, Element,
    adapter::{Adapter, Tensor, layout},
    cuda::{
        Buffer, Factors, LaunchError, Matrix, Queue, WeightTable,
        raw::{self, Descriptor, MatrixRef},
    },
    error::{LoadError, OperandError},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, PlanError},
};
use cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits, result};
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::device::Gpu;

const CAPACITY: Capacity = Capacity::tokens(8).slots(2).rank(80);
const SCALING: f32 = 2.0;

/// Layers of sizes that are multiples of tiles and that are not, the last with so many slices that one launch cannot
/// pack all modules.
fn model() -> (Model, Vec<LinearId>) {
    let mut spec = ModelSpec::new();
    let qkv = Linear::new("qkv", Parallel::Column, 512).slice("q", 256).slice("k", 64).slice("v", 72);
    let mut ids = vec![
        spec.linear(qkv).unwrap(),
        spec.linear(Linear::new("o", Parallel::Row, 300).slice("o", 37)).unwrap(),
        spec.linear(Linear::new("one", Parallel::Replicated, 1).slice("one", 1)).unwrap(),
    ];
    ids.extend(
        (0..50).map(|i| spec.linear(Linear::new(format!("l{i}"), Parallel::Replicated, 24).slice("m", 8)).unwrap()),
    );
    (spec.shard(TpRank::SINGLE).unwrap(), ids)
}

/// The modules of the model, with a rank each: multiples of 8 and others.
fn modules<'a>(model: &'a Model, ids: &'a [LinearId]) -> impl Iterator<Item = (LinearId, usize, usize, &'a str)> {
    let slices = ids.iter().flat_map(|&id| (0..model[id].slices().len()).map(move |slice| (id, slice)));
    let ranks = [16, 8, 1, 80, 13, 24].into_iter().cycle();
    slices.zip(ranks).map(|((id, slice), rank)| (id, slice, rank, model[id].slices()[slice].module()))
}

/// A module's factors in device memory, with rows further apart than their columns, and on the host.
struct Module<T> {
    layer: LinearId,
    slice: usize,
    a: (CudaSlice<T>, [usize; 2]),
    b: (Buffer<T>, [usize; 2]),
}

/// Elements between the end of a row and the next one: 0 and 8 leave rows aligned, 3 does not.
fn gap(rank: usize) -> usize {
    [0, 8, 3][rank % 3]
}

impl<T: Element> Module<T> {
    fn matrices(&self) -> (Matrix<'_, T>, Matrix<'_, T>) {
        let ((a, [rank, inputs]), (b, [outputs, _])) = (&self.a, &self.b);
        let gap = gap(*rank);
        let a = Matrix::strided(a, *rank, *inputs, inputs + gap).unwrap();
        (a, Matrix::strided(b, *outputs, *rank, rank + gap).unwrap())
    }

    fn factors(&self) -> Factors<'_, T> {
        let (a, b) = self.matrices();
        Factors { layer: self.layer, slice: self.slice, scaling: SCALING, a, b }
    }
}

/// Random factors of all modules, on the device and as the adapter that PEFT would have saved.
fn random<T: Element + DeviceRepr + ValidAsZeroBits>(
    gpu: &Gpu,
    model: &Model,
    ids: &[LinearId],
) -> (Vec<Module<T>>, Adapter) {
    let mut rng = StdRng::seed_from_u64(7);
    let (mut all, mut tensors, mut ranks, mut alphas) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (layer, slice, rank, module) in modules(model, ids) {
        let (inputs, outputs) = (model[layer].in_features(), model[layer].slices()[slice].out_features());
        let mut factor = |side: &str, [rows, cols]: [usize; 2]| {
            // Also subnormal numbers, and zeros of both signs.
            let mut number = || match rng.random_range(0..16) {
                0 => 0.0,
                1 => -0.0,
                2 => 1e-7,
                _ => rng.random_range(-2.0..2.0_f32),
            };
            let values: Vec<T> = (0..rows * cols).map(|_| T::from_f32(number())).collect();
            let bytes = bytemuck::cast_slice(&values).to_vec();
            tensors.push((format!("{module}.lora_{side}.weight"), Tensor::new(T::DTYPE, [rows, cols], bytes).unwrap()));
            // NaN between rows.
            let gap = gap(rank);
            values.chunks(cols).flat_map(|row| [row, &vec![T::from_f32(f32::NAN); gap]].concat()).collect::<Vec<T>>()
        };
        let (a, b) = (factor("A", [rank, inputs]), factor("B", [outputs, rank]));
        let mut on_device = Buffer::zeros(&gpu.queue, b.len()).unwrap();
        on_device.write(&b).unwrap();
        let a = (gpu.stream.clone_htod(&a).unwrap(), [rank, inputs]);
        all.push(Module { layer, slice, a, b: (on_device, [outputs, rank]) });
        ranks.push(format!(r#""{module}": {rank}"#));
        alphas.push(format!(r#""{module}": {}"#, rank as f32 * SCALING));
    }
    let (ranks, alphas) = (ranks.join(","), alphas.join(","));
    let config = format!(
        r#"{{"peft_type": "LORA", "r": 1, "lora_alpha": 1,
             "rank_pattern": {{{ranks}}}, "alpha_pattern": {{{alphas}}}}}"#
    );
    (all, Adapter::from_tensors(&config, tensors).unwrap())
}

fn read<T: bytemuck::Pod>(gpu: &Gpu, address: u64, len: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); len];
    gpu.synchronize();
    // SAFETY: the memory at the address has as many elements.
    unsafe { result::memcpy_dtoh_sync(&mut values, address) }.unwrap();
    values
}

/// The table's descriptors of a slot.
fn row(gpu: &Gpu, weights: &WeightTable, slot: usize) -> Vec<Descriptor> {
    let entries = weights.model().num_entries();
    read(gpu, weights.raw().address() + (slot * entries * size_of::<Descriptor>()) as u64, entries)
}

/// Compares the bytes of two slots, and what their descriptors say beside addresses.
fn slots_are_equal(gpu: &Gpu, weights: &WeightTable, ids: &[LinearId]) {
    let (host, device) = (row(gpu, weights, 0), row(gpu, weights, 1));
    let bytes = weights.dtype().bytes();
    for (layer, slice, rank, module) in modules(weights.model(), ids) {
        let site = &weights.model()[layer];
        let entry = site.first_entry() + slice;
        let (host, device) = (host[entry], device[entry]);
        assert_eq!((device.rank, device.scaling), (host.rank, host.scaling), "{module}");
        let a = layout::LinearA { rank, in_features: site.in_features() }.elems();
        let b = layout::B { out_features: site.slices()[slice].out_features(), rank }.elems();
        for (name, elems, [host, device]) in [("A", a, [host.a, device.a]), ("B", b, [host.b, device.b])] {
            let [host, device] = [host, device].map(|address| read::<u8>(gpu, address, elems * bytes));
            assert!(host == device, "{name} of {module}, rank {rank}");
        }
    }
}

fn all_types_of_a_table<T: Element + DeviceRepr + ValidAsZeroBits>(gpu: &Gpu, dtype: DType) {
    let (model, ids) = model();
    let bytes = WeightTable::arena_bytes_for(&model, dtype, CAPACITY);
    let weights = WeightTable::new(&gpu.queue, &model, dtype, CAPACITY, bytes).unwrap();
    let (modules, adapter) = random::<T>(gpu, &model, &ids);
    weights.load(0, &adapter.plan(&model, dtype).unwrap()).unwrap();
    for _ in 0..2 {
        weights.load_factors(1, modules.iter().map(Module::factors)).unwrap();
        slots_are_equal(gpu, &weights, &ids);
    }
    let infos = [0, 1].map(|slot| weights.get(slot).unwrap());
    assert_eq!((infos[0].bytes, infos[0].max_rank), (infos[1].bytes, infos[1].max_rank));
}

#[test]
#[ignore = "needs a GPU"]
fn the_device_packs_what_the_host_packs() {
    let gpu = Gpu::new();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        all_types_of_a_table::<bf16>(&gpu, dtype);
        all_types_of_a_table::<f16>(&gpu, dtype);
        all_types_of_a_table::<f32>(&gpu, dtype);
    }
}

/// The table of the refusals: one layer of two slices.
fn small(queue: &Queue) -> (WeightTable, LinearId) {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("attn", Parallel::Column, 16).slice("q", 8).slice("v", 8)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(1).slots(1).rank(8);
    (WeightTable::new(queue, &model, DType::F16, capacity, 1 << 16).unwrap(), id)
}

#[test]
#[ignore = "needs a GPU"]
fn factors_that_are_not_the_modules_are_refused_by_its_name() {
    let gpu = Gpu::new();
    let (weights, layer) = small(&gpu.queue);
    let ones = gpu.stream.clone_htod(&[1.0_f32; 1024]).unwrap();
    let mut values = [1.0_f32; 1024];
    // Beyond f16, in the last row of four; then NaN in the first.
    values[3 * 16 + 15] = 7e4;
    let large = gpu.stream.clone_htod(&values).unwrap();
    values[0] = f32::NAN;
    let nan = gpu.stream.clone_htod(&values).unwrap();
    let of = |memory, rows, cols| Matrix::new(memory, rows, cols).unwrap();
    let q = |a, b| Factors { layer, slice: 0, scaling: 1.0, a, b };
    let loaded = weights.load_factors(0, [q(of(&ones, 4, 16), of(&ones, 8, 4))]).unwrap();
    let before = row(&gpu, &weights, 0);
    assert_eq!((before[0].rank, before[1].rank), (4, 0));

    let (foreign, foreign_layer) = small(&gpu.queue);
    drop(foreign);
    let refused = |factors: Vec<Factors<'_, f32>>, module: &str, error: LaunchError| {
        let refused = weights.load_factors(0, factors).unwrap_err();
        assert!(matches!(&refused, LoadError::Factors { .. }), "{refused}");
        assert_eq!(refused.to_string(), format!("the factors of `{module}`: {error}"));
    };
    let shape = |operand, [rows, cols]: [usize; 2], [want_rows, want_cols]: [usize; 2]| {
        LaunchError::from(OperandError::Shape { operand, rows, cols, want_rows, want_cols })
    };
    let not_finite = |operand, dtype| LaunchError::from(OperandError::NotFinite { operand, dtype });
    let good = || q(of(&ones, 4, 16), of(&ones, 8, 4));
    refused(vec![q(of(&ones, 4, 15), of(&ones, 8, 4))], "attn.q", shape("A", [4, 15], [4, 16]));
    refused(vec![q(of(&ones, 4, 16), of(&ones, 8, 3))], "attn.q", shape("B", [8, 3], [8, 4]));
    refused(vec![q(of(&ones, 4, 16), of(&ones, 4, 8))], "attn.q", shape("B", [4, 8], [8, 4]));
    for rank in [0, 9] {
        let limit = PlanError::Limit { what: "the rank", value: rank, max: 8 };
        refused(vec![q(of(&ones, rank, 16), of(&ones, 8, rank))], "attn.q", limit.into());
    }
    refused(
        vec![good(), Factors { slice: 1, ..q(of(&large, 4, 16), of(&ones, 8, 4)) }],
        "attn.v",
        not_finite("A", DType::F16),
    );
    refused(vec![q(of(&ones, 4, 16), of(&nan, 8, 4))], "attn.q", not_finite("B", DType::F16));
    refused(vec![Factors { scaling: f32::INFINITY, ..good() }], "attn.q", not_finite("the scaling", DType::F32));
    refused(vec![good(), good()], "attn.q", OperandError::Twice { operand: "the module" }.into());
    let what = "the slice";
    refused(
        vec![Factors { slice: 2, ..good() }],
        &format!("slice 2 of {layer:?}"),
        OperandError::Capacity { what, got: 2, max: 1 }.into(),
    );
    let layer = foreign_layer;
    refused(vec![Factors { layer, ..good() }], &format!("slice 0 of {layer:?}"), PlanError::Foreign.into());

    // Nothing has changed, and no room is lost: the table loads as before.
    assert_eq!(row(&gpu, &weights, 0), before);
    weights.check([loaded]).unwrap();
    let used = weights.usage().used;
    weights.load_factors(0, [good()]).unwrap();
    assert_eq!(weights.usage().used, used);
    assert!(weights.load_factors(1, [good()]).is_err());
    assert!(weights.check([loaded]).is_err());
}

/// Types that differ, which only the raw call can have.
#[test]
#[ignore = "needs a GPU"]
fn factors_of_two_types_are_refused() {
    let gpu = Gpu::new();
    let (weights, layer) = small(&gpu.queue);
    let memory = gpu.upload(&[0_u8; 4096]);
    let a = MatrixRef::new::<bf16>(memory.address(), 4, 16);
    let b = MatrixRef::new::<f16>(memory.address(), 8, 4);
    // SAFETY: the memory is larger than both.
    let error = unsafe { weights.load_factors_raw(0, &[raw::Factors { layer, slice: 0, scaling: 1.0, a, b }]) };
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "the factors of `attn.q`: `B` is f16, but must be bf16");
    assert!(weights.get(0).is_none());
}

/// The packing waits for what the queue has in front of it: here a copy of the factors, of which they are the first and
/// the last.
#[test]
#[ignore = "needs a GPU"]
fn factors_may_be_written_right_before() {
    let gpu = Gpu::new();
    let (weights, layer) = small(&gpu.queue);
    let mut factors = gpu.stream.alloc_zeros::<f32>(64 << 20).unwrap();
    for value in [1.0_f32, 2.0] {
        gpu.stream.memcpy_htod(&vec![value; 64 << 20], &mut factors).unwrap();
        let (a, b) = (
            Matrix::new(factors.slice(0..64), 4, 16).unwrap(),
            Matrix::new(factors.slice((64 << 20) - 32..64 << 20), 8, 4).unwrap(),
        );
        weights.load_factors(0, [Factors { layer, slice: 0, scaling: 1.0, a, b }]).unwrap();
        let b = row(&gpu, &weights, 0)[0].b;
        assert_eq!(read::<f16>(&gpu, b, 4), [f16::from_f32(value); 4]);
    }
}
