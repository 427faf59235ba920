//! The CPU's `silu_mul` behind a layer of gate and up, against the reference.

use crate::{
    common::{
        case::Subject,
        compare::Expected,
        consumers::{Case, Consumed, World, cases},
        cpu::{matrix, matrix_mut, table},
        dense::Sizes,
        slices::SliceBuffers,
        small::more_cases,
    },
    for_dtype,
};
use aril::{
    Element,
    cpu::{LoraLinear, Workspace},
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
    #![proptest_config(ProptestConfig::with_cases(more_cases(32)))]

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
                let is_same = case.written(&together, token) == alone.written(&row, 0);
                prop_assert!(is_same, "token {token}\n{}", case.replay());
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
