//! The CPU's operations behind a linear layer, against the reference.

use crate::{
    common::{
        case::Subject,
        compare::{Expected, Place},
        consumers::{By, Case, Consumed, EPS, World, cases},
        cpu::{matrix, matrix_mut, table},
        dense::Sizes,
        values::Values,
    },
    for_dtype,
};
use aril::{
    DType, Element, Slot,
    adapter::{Adapter, Tensor},
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    error::OperandError,
    model::{Linear, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};
use proptest::prelude::*;

struct Cpu;

impl Subject<Consumed> for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let mut out = world.out.clone();
        let weights = table(&world.model, T::DTYPE, world.capacity(case.num_tokens()), &world.adapters);
        let slots = world.known_slots();
        let (batch, mut workspace) = (world.batch_of(&slots), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let layer = LoraLinear::new(&weights, world.id).unwrap();
        let shrunk = layer.shrink(&mut step, matrix(&world.x, case.x())).unwrap();
        let y = matrix(&world.y, case.y());
        match case.by {
            By::SiluMul => shrunk.silu_mul(y, matrix_mut(&mut out, case.out())).unwrap(),
            By::AddRmsNorm => {
                let place = Place { rows: case.num_tokens(), ..case.out() };
                let (residual, out) = out.split_at_mut(place.at(case.num_tokens(), 0));
                let (residual, out) = (matrix_mut(residual, place), matrix_mut(out, Place { offset: 0, ..place }));
                shrunk.add_rms_norm(y, residual, &case.weight::<T>(), EPS, out).unwrap();
            }
        }
        out
    }
}

proptest! {
    #[test]
    fn consumers_agree_with_the_reference(case in cases(Sizes::SMALL)) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case.check(&mut Cpu))?;
    }

    /// A token's result has the same bits alone as in any batch, and a base token's as in a batch without adapters.
    #[test]
    fn consumers_are_batch_invariant(case in cases(Sizes { max_tokens: 8, ..Sizes::SMALL })) {
        fn run<T: Element>(case: &Case) -> Result<(), TestCaseError> {
            let world = case.world::<T>();
            let together = Cpu.run(case, &world);
            for token in 0..case.num_tokens() {
                let (alone, part) = case.part(&world, token..token + 1);
                let row = alone.written(&Cpu.run(&alone, &part), 0);
                prop_assert!(case.written(&together, token) == row, "token {token}\n{}", case.replay());
            }
            Ok(())
        }
        for_dtype!(case, run(&case))?;
    }
}

/// Integers whose sigmoid is 1 or 0 agree bit for bit.
#[test]
fn exact_gates_give_exact_products() {
    let case = Case::consumed(By::SiluMul, 24, 40, &[[2, 3], [0, 1], [1, 0]], vec![0, 1, -1, 2, 0]);
    let exact = case.world::<f32>().expected(&case);
    let exact = exact.iter().filter(|value| matches!(value, Expected::Exactly(_))).count();
    assert!(exact > 100, "only {exact} of 200 results are exact");
    case.check::<f32>(&mut Cpu).unwrap();
    case.check::<half::bf16>(&mut Cpu).unwrap();
    case.check::<half::f16>(&mut Cpu).unwrap();
}

/// Worked by hand: residual [1, 2] and y [1, 1] with a delta of [1, 2] become [3, 5], whose mean square is 17.
#[test]
fn a_norm_worked_by_hand() {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("layer", Parallel::Replicated, 1).slice("m", 2)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let tensor = |shape, values: &[f32]| Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec()).unwrap();
    let adapter = Adapter::from_tensors(
        r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 1}"#,
        [
            ("layer.m.lora_A.weight".to_owned(), tensor([1, 1], &[1.0])),
            ("layer.m.lora_B.weight".to_owned(), tensor([2, 1], &[1.0, 2.0])),
        ],
    )
    .unwrap();
    let weights = WeightTable::new(&model, DType::F32, Capacity::tokens(1).slots(1).rank(8), 1 << 16).unwrap();
    weights.load(Slot::new(0), &adapter.plan(&model, DType::F32).unwrap()).unwrap();
    let (slots, mut workspace) = ([Slot::new(0)], Workspace::default());
    let batch = Batch::new(&slots);
    let mut step = weights.step(&batch, &mut workspace).unwrap();
    let layer = LoraLinear::new(&weights, id).unwrap();
    let shrunk = layer.shrink(&mut step, Matrix::new(&[1.0_f32], 1, 1).unwrap()).unwrap();
    let (mut residual, mut out) = ([1.0_f32, 2.0], [0.0; 2]);
    let (sums, outputs) = (MatrixMut::new(&mut residual, 1, 2).unwrap(), MatrixMut::new(&mut out, 1, 2).unwrap());
    let y = [1.0_f32; 2];
    shrunk.add_rms_norm(Matrix::new(&y, 1, 2).unwrap(), sums, &[10.0, -1.0], 47.0, outputs).unwrap();
    assert_eq!(residual, [3.0, 5.0]);
    assert_eq!(out, [10.0 * 3.0 / 8.0, -5.0 / 8.0]);
}

/// The norm's quotient is rounded to the element type before its product with the weight.
#[test]
fn a_norm_rounds_twice() {
    let mut differ = 0;
    for value in 1..=64_i16 {
        let case = Case::consumed(By::AddRmsNorm, 8, 3, &[], vec![-1]);
        let case = Case { values: Values::Rounded, seed: value.unsigned_abs().into(), ..case };
        let mut world = case.world::<half::bf16>();
        let residual = [f32::from(value), 1.0, 7.0];
        for (feature, residual) in residual.into_iter().enumerate() {
            world.y[case.y().at(0, feature)] = half::bf16::ZERO;
            world.out[case.out().at(0, feature)] = half::bf16::from_f32(residual);
        }
        let out = Cpu.run(&case, &world);
        let mean: f32 = residual.iter().map(|r| r * r).sum::<f32>() / 3.0;
        for (feature, weight) in case.weight::<half::bf16>().into_iter().enumerate() {
            let quotient = residual[feature] * (1.0 / (mean + EPS).sqrt());
            let twice = half::bf16::from_f32(half::bf16::from_f32(quotient).to_f32() * weight.to_f32());
            assert_eq!(out[case.out().at(1, feature)], twice, "{residual:?}");
            differ += usize::from(twice != half::bf16::from_f32(quotient * weight.to_f32()));
        }
    }
    assert!(differ > 20, "one rounding gives the same in all but {differ} of 192");
}

/// The mean square is that of the residual as it is stored: 256 + 1 is 256 in bf16, and 2048 + 1 is 2048 in f16.
#[test]
fn a_norm_is_of_the_rounded_residual() {
    fn check<T: Element>(residual: f32) {
        for features in [1, 3, 8, 40] {
            let case = Case::consumed(By::AddRmsNorm, 8, features, &[], vec![-1]);
            let mut world = case.world::<T>();
            for feature in 0..features {
                world.y[case.y().at(0, feature)] = T::from_f32(1.0);
                world.out[case.out().at(0, feature)] = T::from_f32(residual);
            }
            let out = Cpu.run(&case, &world);
            for (feature, weight) in case.weight::<T>().into_iter().enumerate() {
                assert_eq!(out[case.out().at(0, feature)].to_f32(), residual);
                // The root is a power of two, so that the quotient is 1.
                let (got, want) = (out[case.out().at(1, feature)].to_f32(), weight.to_f32());
                assert_eq!(got, want, "{residual} and {features} features");
            }
        }
    }
    check::<half::bf16>(256.0);
    check::<half::f16>(2048.0);
}

#[test]
fn silu_mul_refuses_other_layers_and_operands() {
    let mut spec = ModelSpec::new();
    let layer = |name: &str, outputs: &[usize]| {
        let layer = Linear::new(name, Parallel::Replicated, 8);
        outputs.iter().enumerate().fold(layer, |layer, (i, &out)| layer.slice(format!("m{i}"), out))
    };
    let [pair, uneven, single] = [("pair", &[4, 4][..]), ("uneven", &[4, 5]), ("single", &[8])]
        .map(|(name, outputs)| spec.linear(layer(name, outputs)).unwrap());
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let weights = WeightTable::new(&model, DType::F32, Capacity::tokens(2).slots(1).rank(8), 1 << 10).unwrap();
    let slots = [Slot::BASE; 2];
    let run = |id, y_cols: usize, out_cols: usize, slots: &[Slot]| {
        let (batch, mut workspace) = (Batch::new(slots), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let (y, mut out) = (vec![1.0_f32; 2 * y_cols], vec![7.0_f32; 2 * out_cols]);
        let out_matrix = MatrixMut::new(&mut out, 2, out_cols).unwrap();
        let layer = LoraLinear::new(&weights, id).unwrap();
        let shrunk = layer.shrink(&mut step, Matrix::new(&[1.0_f32; 2 * 8], 2, 8).unwrap()).unwrap();
        let result = shrunk.silu_mul(Matrix::new(&y, 2, y_cols).unwrap(), out_matrix);
        assert!(result.is_ok() || out.iter().all(|&value| value == 7.0), "a refused call has written");
        result
    };
    assert_eq!(run(pair, 8, 4, &slots), Ok(()));
    let refused = |outputs: &[usize]| Err(OperandError::GateUp { outputs: outputs.to_vec() });
    assert_eq!(run(uneven, 9, 4, &slots), refused(&[4, 5]));
    assert_eq!(run(single, 8, 4, &slots), refused(&[8]));
    let shape = |operand, cols, want_cols| Err(OperandError::Shape { operand, rows: 2, cols, want_rows: 2, want_cols });
    assert_eq!(run(pair, 7, 4, &slots), shape("y", 7, 8));
    assert_eq!(run(pair, 8, 3, &slots), shape("out", 3, 4));
    assert_eq!(run(pair, 8, 4, &[Slot::new(0); 2]), Ok(()));
}

#[test]
fn a_norm_refuses_other_layers_and_operands() {
    let mut spec = ModelSpec::new();
    let layer = |name: &str, outputs: &[usize]| {
        let layer = Linear::new(name, Parallel::Replicated, 8);
        outputs.iter().enumerate().fold(layer, |layer, (i, &out)| layer.slice(format!("m{i}"), out))
    };
    let [single, pair] =
        [("single", &[4][..]), ("pair", &[2, 2])].map(|(name, outputs)| spec.linear(layer(name, outputs)).unwrap());
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let weights = WeightTable::new(&model, DType::F32, Capacity::tokens(2).slots(1).rank(8), 1 << 10).unwrap();
    // Columns of y, residual, weight and out.
    let run = |id, [y_cols, residual_cols, weight_len, out_cols]: [usize; 4], slot: Slot| {
        let (slots, mut workspace) = ([slot; 2], Workspace::default());
        let batch = Batch::new(&slots);
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let (y, weight) = (vec![1.0_f32; 2 * y_cols], vec![1.0_f32; weight_len]);
        let (mut residual, mut out) = (vec![7.0_f32; 2 * residual_cols], vec![7.0_f32; 2 * out_cols]);
        let layer = LoraLinear::new(&weights, id).unwrap();
        let shrunk = layer.shrink(&mut step, Matrix::new(&[1.0_f32; 2 * 8], 2, 8).unwrap()).unwrap();
        let result = shrunk.add_rms_norm(
            Matrix::new(&y, 2, y_cols).unwrap(),
            MatrixMut::new(&mut residual, 2, residual_cols).unwrap(),
            &weight,
            EPS,
            MatrixMut::new(&mut out, 2, out_cols).unwrap(),
        );
        let written = residual.iter().chain(&out).any(|&value| value != 7.0);
        assert_eq!(result.is_ok(), written, "a refused call has written, or another has not");
        result
    };
    assert_eq!(run(single, [4; 4], Slot::BASE), Ok(()));
    assert_eq!(run(pair, [4; 4], Slot::BASE), Err(OperandError::NormSlices { slices: 2 }));
    assert_eq!(run(single, [4, 4, 3, 4], Slot::BASE), Err(OperandError::NormWeight { got: 3, want: 4 }));
    let shape = |operand| Err(OperandError::Shape { operand, rows: 2, cols: 5, want_rows: 2, want_cols: 4 });
    assert_eq!(run(single, [5, 4, 4, 4], Slot::BASE), shape("y"));
    assert_eq!(run(single, [4, 5, 4, 4], Slot::BASE), shape("residual"));
    assert_eq!(run(single, [4, 4, 4, 5], Slot::BASE), shape("out"));
    assert_eq!(run(single, [4; 4], Slot::new(0)), Ok(()));
}
