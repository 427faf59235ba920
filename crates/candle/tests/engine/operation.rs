//! The operation on tensors of every layout and type, and what it refuses. Numbers are small integers, so that every
//! sum is exact.

use aril::{
    DType as ArilDType, Slot,
    adapter::{Adapter, Tensor as Factor},
    model::{Linear, LinearId, ModelSpec, Parallel, TpRank},
    plan::Capacity,
};
use aril_candle::Adapters;
use candle_core::{DType, Device, Tensor};

use crate::device;

const IN: usize = 4;
/// Of two slices.
const OUT: [usize; 2] = [3, 2];
/// By token: the adapter, if it has one.
const ADAPTERS: [Option<usize>; 3] = [Some(1), None, Some(0)];

/// Factors of rank 1: A of ones, and B whose rows are `value` and the numbers after it.
fn factors(value: usize) -> Adapter {
    let factor = |shape: [usize; 2], values: Vec<f32>| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Factor::new(ArilDType::F32, shape, bytes).unwrap()
    };
    let tensors = ["q", "v"].iter().zip(OUT).flat_map(|(slice, out)| {
        let b = (0..out).map(|row| (value + row) as f32).collect();
        [
            (format!("attn.{slice}.lora_A.weight"), factor([1, IN], vec![1.0; IN])),
            (format!("attn.{slice}.lora_B.weight"), factor([out, 1], b)),
        ]
    });
    Adapter::from_tensors(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 2}"#, tensors).unwrap()
}

/// Two adapters for the first of two layers.
fn adapters(dtype: DType, device: &Device) -> (Adapters, [LinearId; 2], [Slot; 3]) {
    let mut spec = ModelSpec::new();
    let fused = |parent| Linear::new(parent, Parallel::Column, IN).slice("q", OUT[0]).slice("v", OUT[1]);
    let ids = ["attn", "other"].map(|parent| spec.linear(fused(parent)).unwrap());
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let capacity = Capacity::tokens(4).slots(2).rank(8);
    let arena = Adapters::arena_bytes_for(&model, dtype, capacity).unwrap();
    let mut adapters = Adapters::new(&model, ids[..1].iter().copied(), dtype, device, capacity, arena).unwrap();
    // The last one replaces another, for which there is room.
    let [first, replaced, second] =
        [(0, 1), (1, 2), (1, 5)].map(|(slot, value)| adapters.load(slot, &factors(value)).unwrap());
    assert!(adapters.step(&[replaced], &[]).is_err());
    let slots = ADAPTERS.map(|adapter| adapter.map_or(Slot::BASE, |adapter| [first, second][adapter]));
    (adapters, ids, slots)
}

/// Row `t` of x is `t + 1` in each column, so that `A x` is `4 (t + 1)`.
fn x(dtype: DType, device: &Device) -> Tensor {
    let rows: Vec<f32> = (1..=3).flat_map(|row| [row as f32; IN]).collect();
    Tensor::from_vec(rows, (3, IN), device).unwrap().to_dtype(dtype).unwrap()
}

/// y of 7s with the deltas of `ADAPTERS`.
fn expected() -> Vec<Vec<f32>> {
    let row = |(t, adapter): (usize, &Option<usize>)| {
        let value = adapter.map(|adapter| [1.0, 5.0][adapter]);
        let delta = |row: usize| value.map_or(0.0, |value| 2.0 * (value + row as f32) * 4.0 * (t + 1) as f32);
        OUT.iter().flat_map(|&out| (0..out).map(delta)).map(|delta| 7.0 + delta).collect()
    };
    ADAPTERS.iter().enumerate().map(row).collect()
}

fn rows(y: &Tensor) -> Vec<Vec<f32>> {
    y.reshape(((), y.dim(y.rank() - 1).unwrap())).unwrap().to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

#[test]
fn rows_may_be_any_distance_apart() {
    let device = device();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (mut adapters, [id, _], slots) = adapters(dtype, &device);
        let step = adapters.step(&slots, &slots[1..]).unwrap();
        let (x, sevens) = (x(dtype, &device), (Tensor::ones((3, 5), dtype, &device).unwrap() * 7.0).unwrap());
        // A part of a wider tensor, between columns of 9s.
        let nines = |cols| (Tensor::ones((3, cols), dtype, &device).unwrap() * 9.0).unwrap();
        let wide = |tensor: &Tensor| Tensor::cat(&[&nines(3), tensor, &nines(2)], 1).unwrap();
        let wide_x = wide(&x);
        let xs = [
            x.clone(),
            x.reshape((3, 1, IN)).unwrap(),
            x.reshape((1, 3, 1, IN)).unwrap(),
            wide_x.narrow(1, 3, IN).unwrap(),
            wide_x.reshape((1, 3, IN + 5)).unwrap().narrow(2, 3, IN).unwrap(),
        ];
        for x in &xs {
            let y = sevens.copy().unwrap();
            y.inplace_op2(x, &step.delta(id)).unwrap();
            assert_eq!(rows(&y), expected(), "{dtype:?}, {:?}", x.layout());
            let all = wide(&sevens);
            all.narrow(1, 3, 5).unwrap().inplace_op2(x, &step.delta(id)).unwrap();
            let expected = expected().into_iter().map(|row| [vec![9.0; 3], row, vec![9.0; 2]].concat());
            assert_eq!(rows(&all), expected.collect::<Vec<_>>(), "{dtype:?}, {:?}", x.layout());
        }
        // The rows of the step's outputs: of the last two tokens.
        let y = sevens.narrow(0, 1, 2).unwrap().copy().unwrap();
        y.inplace_op2(&x.narrow(0, 1, 2).unwrap(), &step.output_delta(id)).unwrap();
        assert_eq!(rows(&y), expected()[1..], "{dtype:?}");
    }
}

#[test]
fn operands_that_are_not_rows_of_the_step_are_refused() {
    let device = device();
    let (mut adapters, [id, other], slots) = adapters(DType::F32, &device);
    let step = adapters.step(&slots, &[]).unwrap();
    let x = x(DType::F32, &device);
    let tensor = |shape: &[usize]| Tensor::ones(shape, DType::F32, &device).unwrap();
    let y = || tensor(&[3, 5]);
    let half = x.to_dtype(DType::F16).unwrap();
    // Rows at distances 4, 12, 4.
    let uneven = tensor(&[2, 3, 4]).narrow(1, 0, 2).unwrap();
    for (y, x, error) in [
        (y(), tensor(&[4, 3]).t().unwrap(), "the elements of a row of `x` are not adjacent"),
        (tensor(&[5, 3]).t().unwrap(), x.clone(), "the elements of a row of `y` are not adjacent"),
        (tensor(&[4, 5]), uneven, "the rows of `x` are not at equal distances"),
        (y(), half.clone(), "`y` is in F32 and `x` in F16, and their adapters are in f32"),
        (y().to_dtype(DType::F16).unwrap(), half, "`x` is f16, but must be f32"),
        (y(), x.narrow(0, 0, 2).unwrap(), "`x` is [2, 4], but must be [3, 4]"),
        (tensor(&[2, 5]), x.clone(), "`y` is [2, 5], but must be [3, 5]"),
        (y(), tensor(&[3, 5]), "`x` is [3, 5], but must be [3, 4]"),
        (tensor(&[3, 4]), x.clone(), "`y` is [3, 4], but must be [3, 5]"),
        (y(), tensor(&[1, 4]).broadcast_as((3, 4)).unwrap(), "`x` has row stride 0"),
    ] {
        let before = y.copy().unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let refused = y.inplace_op2(&x, &step.delta(id)).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused:?} instead of {error:?}");
        let after = y.copy().unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(before, after, "{error}");
    }
    let refused = y().inplace_op2(&x, &step.delta(other)).unwrap_err().to_string();
    assert!(refused.contains("none of the layers"), "{refused}");
    let refused = y().inplace_op2(&x, &step.output_delta(id)).unwrap_err().to_string();
    assert!(refused.contains("`x` is [3, 4], but must be [0, 4]"), "{refused}");
    let (mut others, ..) = self::adapters(DType::F32, &device);
    assert!(others.step(&slots[..1], &[]).is_err() && others.step(&[], &slots[..1]).is_err());
    assert!(adapters.step(&[Slot::BASE; 5], &[]).is_err());
}

#[test]
fn each_slice_may_have_an_output_of_its_own() {
    let device = device();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (mut adapters, [id, _], slots) = adapters(dtype, &device);
        let step = adapters.step(&slots, &[]).unwrap();
        let (x, sevens) = (x(dtype, &device), |cols| (Tensor::ones((3, cols), dtype, &device).unwrap() * 7.0).unwrap());
        let (q, wide) = (sevens(OUT[0]), sevens(OUT[1] + 4));
        let v = wide.narrow(1, 3, OUT[1]).unwrap().unsqueeze(0).unwrap();
        step.delta(id).add_to([&q, &v], &x).unwrap();
        let expected = expected();
        let (want_q, want_v): (Vec<_>, Vec<_>) = expected.iter().map(|row| row.split_at(OUT[0])).unzip();
        assert_eq!(rows(&q), want_q, "{dtype:?}");
        let want_wide = want_v.iter().map(|row| [&[7.0; 3], *row, &[7.0]].concat());
        assert_eq!(rows(&wide), want_wide.collect::<Vec<_>>(), "{dtype:?}");
        // One output for all slices, and its parts.
        let [y, parts] = [(); 2].map(|()| sevens(OUT[0] + OUT[1]));
        step.delta(id).add_to([&y], &x).unwrap();
        assert_eq!(rows(&y), expected, "{dtype:?}");
        let [q, v] = [(0, OUT[0]), (OUT[0], OUT[1])].map(|(first, out)| parts.narrow(1, first, out).unwrap());
        step.delta(id).add_to([&q, &v], &x).unwrap();
        assert_eq!(rows(&parts), expected, "{dtype:?}");
    }
}

#[test]
fn outputs_that_are_not_those_of_the_slices_are_refused() {
    let device = device();
    let (mut adapters, [id, _], slots) = adapters(DType::F32, &device);
    let step = adapters.step(&slots, &[]).unwrap();
    let x = x(DType::F32, &device);
    let tensor = |cols| Tensor::ones((3, cols), DType::F32, &device).unwrap();
    let (row, of_x) = (tensor(2).narrow(0, 0, 1).unwrap(), Tensor::cat(&[&x, &tensor(2)], 1).unwrap());
    let part = |tensor: &Tensor, at, cols| tensor.narrow(1, at, cols).unwrap();
    for (y, x, error) in [
        (vec![], &x, "there is no output"),
        (vec![tensor(3), part(&of_x, 4, 2)], &part(&of_x, 0, IN), "`y[1]` and `x` share a storage"),
        (vec![tensor(3), tensor(2).to_dtype(DType::F16).unwrap()], &x, "`y[1]` is in F16 and `x` in F32"),
        (vec![tensor(3), tensor(3)], &x, "`y[1]` is [3, 3], but must be [3, 2]"),
        (vec![tensor(3), part(&tensor(2), 0, 1).broadcast_as((3, 2)).unwrap()], &x, "a row of `y[1]` are not adjacent"),
        (vec![tensor(3), tensor(2).t().unwrap()], &x, "the elements of a row of `y[1]` are not adjacent"),
        (vec![tensor(3), row.broadcast_as((3, 2)).unwrap()], &x, "`y[1]` has row stride 0, but 2 columns"),
        (vec![tensor(3), tensor(1), tensor(1)], &x, "`y` is 3 matrices, but the layer has 2 slices"),
    ] {
        let before: Vec<_> = y.iter().map(|y| y.copy().unwrap()).collect();
        let refused = step.delta(id).add_to(&y, x).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused:?} instead of {error:?}");
        for (y, before) in y.iter().zip(&before) {
            assert_eq!(rows(&y.copy().unwrap()), rows(before), "{error}");
        }
    }
}

#[test]
fn types_without_adapters_are_refused() {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("attn", Parallel::Column, IN).slice("q", 1)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let new = |dtype, device: &Device| {
        let capacity = Capacity::tokens(4).slots(2).rank(8);
        Adapters::new(&model, [id], dtype, device, capacity, 1 << 20).map(drop)
    };
    let refused = new(DType::F64, &device()).unwrap_err().to_string();
    assert!(refused.contains("F64"), "{refused}");
    // Its stream is another one on each thread.
    #[cfg(feature = "cuda")]
    {
        let refused = new(DType::F32, &Device::new_cuda(0).unwrap()).unwrap_err().to_string();
        assert!(refused.contains("Device::new_cuda_with_stream"), "{refused}");
    }
}
