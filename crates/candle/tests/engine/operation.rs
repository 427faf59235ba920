//! The operation on tensors of every layout and type, and what it refuses. Numbers are small integers, so that every
//! sum is exact.

use aril::{
    DType as ArilDType, Slot,
    adapter::Adapter,
    model::{Linear, LinearId, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::Lease,
};
use aril_candle::Adapters;
use candle_core::{DType, Device, Tensor};

use crate::{device, lease, of_candle, pool};

const IN: usize = 4;
/// Of two slices.
const OUT: [usize; 2] = [3, 2];
/// By token: the adapter, if it has one.
const ADAPTERS: [Option<usize>; 3] = [Some(1), None, Some(0)];

/// Factors of rank 1: A of ones, and B whose rows are `value` and the numbers after it.
fn factors(value: usize) -> Adapter {
    let factor = |shape: [usize; 2], values| Tensor::from_vec(values, &shape, &device()).unwrap();
    let tensors = ["q", "v"].iter().zip(OUT).flat_map(|(slice, out)| {
        let b = (0..out).map(|row| (value + row) as f32).collect();
        [
            (format!("attn.{slice}.lora_A.weight"), factor([1, IN], vec![1.0; IN])),
            (format!("attn.{slice}.lora_B.weight"), factor([out, 1], b)),
        ]
    });
    aril_candle::adapter(r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 2}"#, tensors).unwrap()
}

/// Two adapters of a layer, the layer of another model, and the slots of `ADAPTERS`, which the leases keep.
fn adapters(dtype: ArilDType) -> (Adapters, [LinearId; 2], [Slot; 3], [Lease; 2]) {
    let fused = || Linear::new("attn", Parallel::Column, IN).slice("q", OUT[0]).slice("v", OUT[1]);
    let (mut spec, other) = (ModelSpec::new(), ModelSpec::new().linear(fused()).unwrap());
    let id = spec.linear(fused()).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let adapters = pool(&model, dtype, Capacity::tokens(4).slots(2).rank(8));
    // The last one takes the place of another, whose lease has ended.
    let [first, replaced] = [1, 2].map(|value| lease(&adapters, &model, dtype, factors(value)));
    let gone = replaced.slot();
    drop(replaced);
    let (step, y, x) =
        (adapters.step(&[gone; 3]).unwrap(), sevens(3, 5, of_candle(dtype)), x(of_candle(dtype), &device()));
    y.inplace_op2(&x, &step.delta(id)).unwrap();
    let second = lease(&adapters, &model, dtype, factors(5));
    for refused in [adapters.step(&[gone]).map(drop), y.inplace_op2(&x, &step.delta(id))] {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("no lease of the pool's stream holds"), "{refused}");
    }
    let leases = [first, second];
    let slots = ADAPTERS.map(|adapter| adapter.map_or(Slot::BASE, |adapter| leases[adapter].slot()));
    (adapters, [id, other], slots, leases)
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

fn sevens(rows: usize, cols: usize, dtype: DType) -> Tensor {
    Tensor::full(7f32, (rows, cols), &device()).unwrap().to_dtype(dtype).unwrap()
}

fn rows(y: &Tensor) -> Vec<Vec<f32>> {
    y.reshape(((), y.dim(y.rank() - 1).unwrap())).unwrap().to_dtype(DType::F32).unwrap().to_vec2().unwrap()
}

#[test]
fn rows_may_be_any_distance_apart() {
    let device = device();
    for dtype in [ArilDType::F32, ArilDType::F16, ArilDType::BF16] {
        let (adapters, [id, _], slots, _leases) = adapters(dtype);
        let (dtype, step) = (of_candle(dtype), adapters.step(&slots).unwrap());
        let (x, sevens) = (x(dtype, &device), sevens(3, 5, dtype));
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
        // Some rows of the step.
        let y = sevens.narrow(0, 1, 2).unwrap().copy().unwrap();
        y.inplace_op2(&x.narrow(0, 1, 2).unwrap(), &step.rows(1..3).unwrap().delta(id)).unwrap();
        assert_eq!(rows(&y), expected()[1..], "{dtype:?}");
        let (y, order) = (sevens.copy().unwrap(), [2, 0, 1]);
        let x = x.index_select(&Tensor::new(&order.map(|row| row as u32), &device).unwrap(), 0).unwrap();
        y.inplace_op2(&x, &step.rows(order).unwrap().delta(id)).unwrap();
        assert_eq!(rows(&y), order.map(|row| expected()[row].clone()), "{dtype:?}");
        // A row of some rows, four times.
        let (y, x) =
            (Tensor::cat(&[&sevens, &sevens.narrow(0, 0, 1).unwrap()], 0).unwrap(), x.narrow(0, 1, 1).unwrap());
        let repeated = step.rows(order).unwrap().rows([1; 4]).unwrap();
        y.inplace_op2(&x.repeat((4, 1)).unwrap(), &repeated.delta(id)).unwrap();
        assert_eq!(rows(&y), vec![expected()[0].clone(); 4], "{dtype:?}");
    }
}

#[test]
fn operands_that_are_not_rows_of_the_step_are_refused() {
    let device = device();
    let (adapters, [id, other], slots, _leases) = adapters(ArilDType::F32);
    let step = adapters.step(&slots).unwrap();
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
        (y(), half.clone(), "`y` is in F32 and `x` in F16, but must be in F32 and F32"),
        (y().to_dtype(DType::F16).unwrap(), half, "`y` is in F16 and `x` in F16, but must be in F32 and F32"),
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
    assert!(refused.contains("another model"), "{refused}");
    for (rows, error) in
        [(vec![1, 3], "the step has no row 3, but 3"), (vec![0; 5], "the batch's tokens must be at most 4, not 5")]
    {
        let refused = step.rows(rows).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused}");
    }
    let none = step.rows([]).unwrap();
    let refused = y().inplace_op2(&x, &none.delta(id)).unwrap_err().to_string();
    assert!(refused.contains("`x` is [3, 4], but must be [0, 4]"), "{refused}");
    let (others, ..) = self::adapters(ArilDType::F32);
    assert!(others.step(&slots[..1]).is_err());
    assert!(adapters.step(&[Slot::BASE; 5]).is_err());
}

#[test]
fn each_slice_may_have_an_output_of_its_own() {
    let device = device();
    for dtype in [ArilDType::F32, ArilDType::F16, ArilDType::BF16] {
        let (adapters, [id, _], slots, _leases) = adapters(dtype);
        let (dtype, step) = (of_candle(dtype), adapters.step(&slots).unwrap());
        let (x, sevens) = (x(dtype, &device), |cols| sevens(3, cols, dtype));
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
    let (adapters, [id, _], slots, _leases) = adapters(ArilDType::F32);
    let step = adapters.step(&slots).unwrap();
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

/// Its stream is another one on each thread.
#[cfg(feature = "cuda")]
#[test]
fn the_default_stream_of_each_thread_is_refused() {
    let model = ModelSpec::new().shard(TpRank::SINGLE).unwrap();
    let (device, capacity) = (Device::new_cuda(0).unwrap(), Capacity::tokens(4).slots(2).rank(8));
    let config = aril::pool::PoolConfig::arena_bytes(1 << 20);
    let refused = Adapters::new(&model, ArilDType::F32, &device, capacity, config).unwrap_err().to_string();
    assert!(refused.contains("Device::new_cuda_with_stream"), "{refused}");
}
