//! The CPU's `silu_mul` behind a layer of gate and up, against the reference.

use crate::{
    common::{
        adapters::{self, Lora},
        case::Subject,
        compare::Expected,
        consumers::{Case, Consumed, World, cases},
        cpu::{matrix, matrix_mut, table},
        dense::Sizes,
        slices::SliceBuffers,
    },
    for_dtype,
};
use aril::{
    DType, Element, Slot,
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
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let (batch, mut workspace) = (world.batch_of(&slots), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let layer = LoraLinear::new(&weights, world.id).unwrap();
        let shrunk = layer.shrink(&mut step, matrix(&world.x, case.x())).unwrap();
        let inputs = SliceBuffers::new(&world.y, case.y(), &case.dense.slices(), case.separate);
        let buffers = inputs.buffers();
        let y = inputs.matrices(&buffers, |buffer, place| matrix(buffer, place));
        shrunk.silu_mul(y, matrix_mut(&mut out, case.out())).unwrap();
        out
    }
}

proptest! {
    #[test]
    fn consumers_agree_with_the_reference(case in cases(Sizes::SMALL)) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case.check(&mut Cpu))?;
    }

    #[test]
    fn gate_and_up_apart_have_the_bits_of_one_matrix(case in cases(Sizes::SMALL)) {
        for_dtype!(case.check_separate(&mut Cpu))?;
    }

    /// A token's result has the same bits alone as in any batch, and a base token's as in a batch without adapters.
    #[test]
    fn consumers_are_batch_invariant(case in cases(Sizes { max_tokens: 8, ..Sizes::SMALL })) {
        fn run<T: Element>(case: &Case) -> Result<(), TestCaseError> {
            let world = case.world::<T>();
            let together = Cpu.run(case, &world);
            for token in 0..case.num_tokens() {
                let (alone, part) = case.part(&world, token..token + 1);
                let row = Cpu.run(&alone, &part);
                prop_assert!(case.written(&together, token) == alone.written(&row, 0), "token {token}\n{}", case.replay());
            }
            Ok(())
        }
        for_dtype!(case, run(&case))?;
    }
}

/// Integers whose sigmoid is 1 or 0 agree bit for bit.
#[test]
fn exact_gates_give_exact_products() {
    let case = Case::consumed(24, 40, &[[2, 3], [0, 1], [1, 0]], vec![0, 1, -1, 2, 0]);
    let exact = case.world::<f32>().expected(&case);
    let exact = exact.iter().filter(|value| matches!(value, Expected::Exactly(_))).count();
    assert!(exact > 100, "only {exact} of 200 results are exact");
    case.check::<f32>(&mut Cpu).unwrap();
    case.check::<half::bf16>(&mut Cpu).unwrap();
    case.check::<half::f16>(&mut Cpu).unwrap();
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
    let weights = WeightTable::new(&model, DType::F32, Capacity::tokens(2).slots(1).rank(8), 1 << 16).unwrap();
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
    let adapter = adapters::adapter(&[Lora::linear("pair.m0", 8, 4, 1)]);
    let slot = weights.load(0, &adapter.plan(&model, DType::F32).unwrap()).unwrap();
    assert_eq!(run(pair, 8, 4, &[slot; 2]), Ok(()));
}
