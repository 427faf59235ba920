//! Combinations: what A is multiplied by, how it is rounded, and what is refused by name.

use aril::{
    DType, Element,
    adapter::{Adapter, SlotImage, layout::LinearA},
    cpu::WeightTable,
    error::{LoadError, SlotError},
    model::{Linear, MAX_RANK, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::{
    common::adapters::{Lora, adapter},
    refused,
};

const FEATURES: usize = 8;

fn model() -> Model {
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("m", Parallel::Replicated, FEATURES).slice("q", 3)).unwrap();
    spec.shard(TpRank::SINGLE).unwrap()
}

/// An adapter of rank 1 with this scaling, whose A has these elements.
fn of_a(a: [f32; FEATURES], scaling: f64) -> Adapter {
    let module = Lora::linear("m.q", FEATURES, 3, 1).dtype(DType::F32).alpha(scaling);
    adapter(&[Lora { a: a.to_vec(), b: vec![1.0; 3], ..module }])
}

/// The scaling of the only module in an image, and its A.
fn scaling_and_a<T: Element>(parts: &[(&Adapter, f32)]) -> (f32, Vec<[T; FEATURES]>) {
    let model = model();
    let image = SlotImage::combined(parts, &model, T::DTYPE).unwrap();
    let mut block = vec![0; image.bytes()];
    image.write_to(&mut block).unwrap();
    let block: Vec<T> = block.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
    let entry = image.entries()[0];
    let layout = LinearA { rank: entry.rank, in_features: FEATURES };
    let row = |row| std::array::from_fn(|col| block[entry.a_elems + layout.at(row, col)]);
    (entry.scaling, (0..entry.rank).map(row).collect())
}

fn is_nearest<T: Element>(rounded: T, exact: f64) -> bool {
    let distance = |value: T| (f64::from(value.to_f32()) - exact).abs();
    let neighbours = [rounded.to_f32().next_up(), rounded.to_f32().next_down()].map(|near| {
        // The next value of T beyond one of f32.
        let bits = if T::DTYPE == DType::BF16 { -7 } else { -10 };
        let step = 2.0_f32.powi(bits) * near.abs().max(f32::MIN_POSITIVE);
        T::from_f32(if near > rounded.to_f32() { near + step } else { near - step })
    });
    neighbours.into_iter().all(|near| distance(rounded) <= distance(near))
}

fn check_products<T: Element>(a: [f32; FEATURES], scales: [f32; 2]) -> Result<(), TestCaseError> {
    let (one, other) = (of_a(a, 0.75), of_a(a, 3.0));
    let (scaling, rows) = scaling_and_a::<T>(&[(&one, scales[0]), (&other, scales[1])]);
    for (row, whole) in rows.iter().zip([0.75 * f64::from(scales[0]), 3.0 * f64::from(scales[1])]) {
        #[expect(clippy::cast_possible_truncation, reason = "as f32 as the library's")]
        let multiplier = f64::from(whole as f32) / f64::from(scaling);
        for (got, a) in row.iter().zip(a) {
            prop_assert!(is_nearest(*got, f64::from(a) * multiplier), "{} is not {a} times {multiplier}", got.to_f32());
        }
    }
    Ok(())
}

proptest! {
    /// The products are rounded once, whatever the type.
    #[test]
    fn products_are_rounded_once(a in prop::array::uniform8(-8.0_f32..8.0), scales in prop::array::uniform2(0.01_f32..4.0)) {
        check_products::<bf16>(a, scales)?;
        check_products::<f16>(a, scales)?;
        check_products::<f32>(a, scales)?;
    }
}

#[test]
fn a_tie_is_decided_by_what_f32_cannot_hold() {
    // 259/256 is between two numbers of bf16, and goes to the larger one. The product is less by 2⁻²⁶ of it.
    let tie = 259.0 / 256.0;
    let (a, scale) = (tie * (1.0 - 2.0_f32.powi(-13)), 1.0 + 2.0_f32.powi(-13));
    assert_eq!((a * scale, bf16::from_f32(tie).to_f32()), (tie, 260.0 / 256.0));
    let one = of_a([a; FEATURES], 1.0);
    let (_, rows) = scaling_and_a::<bf16>(&[(&one, scale), (&one, 1.5)]);
    assert_eq!(rows[0][0].to_f32(), 258.0 / 256.0);
}

#[test]
fn factors_are_kept_where_the_scales_are_one() {
    let a = std::array::from_fn(|i| 0.1 + i as f32);
    let (one, other) = (of_a(a, 3.0), of_a(a, 1.5));
    let (scaling, rows) = scaling_and_a::<f32>(&[(&one, 0.7), (&other, 1.4)]);
    assert_eq!((scaling, &rows[..]), (3.0 * 0.7, &[a, a][..]));
    // One adapter keeps its factors with any scale.
    assert_eq!(scaling_and_a::<f32>(&[(&one, -0.3)]), (3.0 * -0.3, vec![a]));
    // The larger scale's power of two is that of the image. Zero drops a part.
    let (scaling, rows) = scaling_and_a::<f32>(&[(&one, 4.0), (&other, 0.0)]);
    assert_eq!((scaling, rows), (8.0, vec![a.map(|a| a * 1.5), [0.0; FEATURES]]));
}

#[test]
fn what_cannot_be_combined_is_refused() {
    let model = model();
    let one = of_a([1.0; FEATURES], 1.0);
    let combined = |parts: &[(&Adapter, f32)]| SlotImage::combined(parts, &model, DType::F16).map(|_| ());
    refused!(combined(&[]), Parts, "a combination of 0 adapters", "1 to 4");
    refused!(combined(&[(&one, 1.0); 5]), Parts, "a combination of 5 adapters");
    assert!(combined(&[(&one, 1.0); 4]).is_ok());
    for scale in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        refused!(combined(&[(&one, 1.0), (&one, scale)]), PartScale, "adapter 1", &scale.to_string());
    }
    refused!(combined(&[(&of_a([1.0; FEATURES], 1e30), 1e30)]), CombinedScaling, "`m.q`", "scale 1");
    refused!(combined(&[(&of_a([1.0; FEATURES], 1e-30), 1e-30)]), CombinedScaling, "`m.q`");
    let wide = adapter(&[Lora::linear("m.q", FEATURES, 3, MAX_RANK)]);
    assert!(combined(&[(&wide, 1.0)]).is_ok());
    refused!(combined(&[(&wide, 1.0), (&one, 1.0)]), CombinedRank, "`m.q`", "rank 513", "at most 512");
    let elsewhere = adapter(&[Lora::linear("m.k", FEATURES, 3, 1)]);
    refused!(combined(&[(&one, 1.0), (&elsewhere, 1.0)]), NoPlace, "`m.k`");
    // A weight that is too large when it is multiplied.
    let large = of_a([60_000.0; FEATURES], 1.0);
    let parts = [(&one, 1.0), (&large, 1.5)];
    let image = SlotImage::combined(&parts, &model, DType::F16).unwrap();
    refused!(image.write_to(&mut vec![0; image.bytes()]), Unrepresentable, "m.q.lora_A", "90000", "f16");
}

/// A table for adapters of rank 3 takes no combination of rank 4.
#[test]
fn ranks_together_above_a_tables_are_refused() {
    let model = model();
    let two = adapter(&[Lora::linear("m.q", FEATURES, 3, 2)]);
    let table = WeightTable::new(&model, DType::F32, Capacity::tokens(1).slots(1).rank(3), 1 << 16).unwrap();
    let image = SlotImage::combined(&[(&two, 1.0), (&two, 2.0)], &model, DType::F32).unwrap();
    let refused = table.load(0, &image).unwrap_err();
    assert!(matches!(refused, LoadError::Slot(SlotError::Rank { rank: 4, .. })), "{refused:?}");
}
