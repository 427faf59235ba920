//! The CPU's operations against the reference.

use crate::{
    common::{
        case::Subject,
        cpu::{matrix, matrix_mut, table},
        dense::{Case, Dense, Site, Sizes, World, cases, check_overwriting},
        slices::SliceBuffers,
    },
    for_dtype,
};
use aril::{
    DType, Element, IntoSlices as _, Slices,
    cpu::{LoraEmbedding, LoraLinear, Matrix, MatrixMut, TrainedRows, Workspace},
    error::OperandError,
    routing::Segments,
};
use proptest::prelude::*;

/// `add_delta`, its halves apart, or `write_delta`.
#[derive(Default)]
struct Cpu {
    apart: bool,
    overwrites: bool,
    /// Separate outputs one after the other, each by the layer with its slice alone.
    one_by_one: bool,
}

impl Subject<Dense> for Cpu {
    fn run<T: Element>(&mut self, case: &Case, world: &World<T>) -> Vec<T> {
        let tokens = case.num_tokens();
        let weights = table(&world.model, T::DTYPE, world.capacity(tokens), &world.adapters);
        let slots = world.loaded_slots(|slot| weights.get(slot));
        let (batch, mut workspace) = (world.batch_of(&slots), Workspace::default());
        let mut step = weights.step(&batch, &mut workspace).unwrap();
        let x = matrix(&world.x, case.x());
        match world.id {
            Site::Embedding(id) => {
                let (layer, mut buffer) = (LoraEmbedding::new(&weights, id).unwrap(), world.y.clone());
                layer.add_delta(&mut step, &case.token_ids(), matrix_mut(&mut buffer, case.y())).unwrap();
                buffer
            }
            Site::RowEmbeddings(id) => {
                let (rows, mut buffer) = (TrainedRows::new(&weights, id).unwrap(), world.y.clone());
                rows.replace_embeddings(&mut step, &case.token_ids(), matrix_mut(&mut buffer, case.y())).unwrap();
                buffer
            }
            Site::RowLogits(id) => {
                let (rows, mut buffer) = (TrainedRows::new(&weights, id).unwrap(), world.y.clone());
                rows.replace_logits(&mut step, x, matrix_mut(&mut buffer, case.y())).unwrap();
                buffer
            }
            Site::Linear(id) => {
                let outputs = SliceBuffers::new(&world.y, case.y(), &case.slices(), case.separate);
                let mut buffers = outputs.buffers();
                let layer = LoraLinear::new(&weights, id).unwrap();
                let mut run = |layer: &LoraLinear, y: Slices<MatrixMut<'_, T>>| {
                    if self.apart {
                        layer.shrink(&mut step, x).unwrap().expand(y).unwrap();
                    } else if self.overwrites {
                        layer.write_delta(&mut step, x, y).unwrap();
                    } else {
                        layer.add_delta(&mut step, x, y).unwrap();
                    }
                };
                if self.one_by_one && case.separate {
                    for (slice, y) in
                        outputs.each(&mut buffers, |buffer, at| matrix_mut(buffer, at)).into_iter().enumerate()
                    {
                        run(&layer.with_slice(slice).unwrap(), y.into_slices());
                    }
                    assert!(layer.with_slice(case.slices().len()).is_none());
                } else {
                    run(&layer, outputs.matrices(&mut buffers, |buffer, place| matrix_mut(buffer, place)));
                }
                outputs.merged(buffers)
            }
        }
    }
}

fn invariant<T: Element>(case: &Case) -> Result<(), TestCaseError> {
    case.check_invariance::<T>(&mut Cpu::default(), &[1, 5], 1).map(drop)
}

#[test]
fn infinite_sums_stay_infinite() {
    for case in Case::of_infinities(8, 16) {
        for_dtype!(case.check_infinities(&mut Cpu::default())).unwrap();
    }
}

proptest! {
    #[test]
    fn cpu_agrees_with_the_reference(case in cases(Sizes::SMALL), apart: bool) {
        let case = Case::from_environment().unwrap_or(case);
        for_dtype!(case.check(&mut Cpu { apart, ..Cpu::default() }))?;
    }

    #[test]
    fn separate_outputs_have_the_bits_of_a_fused_one(
        case in cases(Sizes::SMALL),
        apart: bool,
        overwrites: bool,
        one_by_one: bool,
    ) {
        for_dtype!(case.check_separate(&mut Cpu { apart, overwrites, one_by_one }))?;
    }

    #[test]
    fn cpu_overwrites(case in cases(Sizes::SMALL)) {
        let [mut adds, mut overwrites] = [false, true].map(|overwrites| Cpu { overwrites, ..Cpu::default() });
        for_dtype!(case, check_overwriting(&mut adds, &mut overwrites, &case))?;
    }

    /// A token's result has the same bits alone as in any batch.
    #[test]
    fn cpu_is_batch_invariant(case in cases(Sizes { max_tokens: 8, ..Sizes::SMALL })) {
        for_dtype!(case, invariant(&case))?;
    }

    /// A batch without adapters computes nothing, whatever x holds, so an engine may skip it.
    #[test]
    fn a_batch_without_adapters_may_be_skipped(case in cases(Sizes::SMALL), apart: bool) {
        fn run<T: Element>(case: &Case, apart: bool) -> Result<(), TestCaseError> {
            let mut world = case.world::<T>();
            world.x.fill(T::from_f32(f32::NAN));
            prop_assert!(world.slots.iter().all(|&slot| slot < 0));
            let y = Cpu { apart, ..Cpu::default() }.run(case, &world);
            let [got, expected] = [&y, &world.y].map(|y| bytemuck::cast_slice::<T, u8>(y));
            prop_assert!(got == expected, "{}", case.replay());
            Ok(())
        }
        let case = Case { slots: case.slots.iter().map(|slot| slot | i32::MIN).collect(), ..case };
        for_dtype!(case, run(&case, apart))?;
    }

    #[test]
    fn segments_are_a_stable_sort(slots in prop::collection::vec(-3..7_i32, 0..60), num_slots in 0..6_usize) {
        let mut expected: Vec<(usize, usize)> = Vec::new();
        for slot in 0..num_slots {
            expected.extend((0..slots.len()).filter(|&t| usize::try_from(slots[t]) == Ok(slot)).map(|t| (slot, t)));
        }
        let segments = Segments::new(&slots, num_slots);
        let got: Vec<_> = segments
            .iter()
            .flat_map(|(slot, tokens)| tokens.iter().map(move |&token| (slot, token)))
            .collect();
        prop_assert_eq!(got, expected);
        prop_assert!(segments.iter().all(|(_, tokens)| !tokens.is_empty()));
    }
}

/// Exact sums over all of a layer's input.
#[test]
fn many_features_are_all_summed_up() {
    for case in Case::of_many_features(&[1, 5]) {
        for apart in [false, true] {
            for_dtype!(case.check(&mut Cpu { apart, ..Cpu::default() })).unwrap();
        }
    }
}

#[test]
fn every_slice_has_its_delta() {
    for case in Case::of_many_slices(&[1, 6, 19]) {
        for apart in [false, true] {
            for_dtype!(case.check(&mut Cpu { apart, ..Cpu::default() })).unwrap();
        }
    }
}

/// A matrix is inside its memory, and its rows do not overlap.
#[test]
fn matrices_fit_in_their_memory() {
    let mut memory = [0.0_f32; 20];
    let mut make = |rows, cols, row_stride| {
        let read = Matrix::strided(&memory, rows, cols, row_stride).err();
        let written = MatrixMut::strided(&mut memory, rows, cols, row_stride).err();
        [("x", read), ("y", written)]
    };
    for (rows, cols, row_stride) in [(4, 5, 5), (3, 6, 7), (1, 20, 20), (1, 20, 90), (0, 5, usize::MAX), (7, 0, 3)] {
        assert!(make(rows, cols, row_stride).iter().all(|(_, error)| error.is_none()), "{rows} {cols} {row_stride}");
    }
    for (rows, cols, row_stride) in
        [(5, 5, 5), (4, 5, 6), (1, 21, 21), (3, 6, 8), (3, 1, usize::MAX), (usize::MAX, 1, 2)]
    {
        for (operand, error) in make(rows, cols, row_stride) {
            assert_eq!(error, Some(OperandError::Extent { operand, rows, cols, row_stride, len: 20 }));
        }
    }
    for (rows, cols, row_stride) in [(2, 5, 4), (1, 5, 0), (0, 5, 4)] {
        for (operand, error) in make(rows, cols, row_stride) {
            assert_eq!(error, Some(OperandError::Overlap { operand, cols, row_stride }));
        }
    }
}

/// Bounds, tolerances and tests use it: half the distance from 1 to the next larger number.
#[test]
fn unit_roundoffs_are_those_of_the_formats() {
    let above_one = |next: f64| (next - 1.0) / 2.0;
    let bf16 = half::bf16::from_bits(half::bf16::ONE.to_bits() + 1).to_f64();
    let f16 = half::f16::from_bits(half::f16::ONE.to_bits() + 1).to_f64();
    assert_eq!(DType::BF16.unit_roundoff(), above_one(bf16));
    assert_eq!(DType::F16.unit_roundoff(), above_one(f16));
    assert_eq!(DType::F32.unit_roundoff(), above_one(f64::from(1.0_f32.next_up())));
}
