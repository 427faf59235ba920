//! Wrong results must not pass.

use aril::DType;

use super::{Moved, Roundings, Verdict, is_as_it_should_be};

const VOCAB: usize = 4;
/// The logits of two steps, and the tokens they choose.
const LOGITS: [f32; 2 * VOCAB] = [1.0, -8.0, 3.0, 0.5, 6.0, 2.0, -1.0, 4.0];
const TOKENS: [u32; 2] = [2, 0];
const ROUNDINGS: Roundings = Roundings { layers: 2, terms: 96, dtype: DType::BF16 };

fn judge(logits: &[f32]) -> Verdict {
    Verdict::new(logits, &LOGITS, VOCAB, &TOKENS, ROUNDINGS)
}

/// `LOGITS` with one of them changed.
fn perturbed(by: f32) -> Vec<f32> {
    let mut logits = LOGITS.to_vec();
    logits[5] += by;
    logits
}

#[test]
fn logits_that_differ_by_more_than_the_tolerance_fail() {
    let same = judge(&LOGITS);
    assert!(same.passes() && same.tokens_agree && same.difference == 0.0);
    let tolerance = same.tolerance;
    for sign in [1.0, -1.0] {
        assert!(judge(&perturbed(sign * 0.99 * tolerance)).passes());
        assert!(!judge(&perturbed(sign * 1.01 * tolerance)).passes());
    }
    let at = |difference| Verdict { difference, ..same }.passes();
    assert!(at(tolerance) && !at(tolerance.next_up()) && !at(f32::INFINITY) && !at(f32::NAN));
    let other_token = Verdict::new(&LOGITS, &LOGITS, VOCAB, &[2, 3], ROUNDINGS);
    assert!(!other_token.tokens_agree);
}

#[test]
fn logits_that_are_not_numbers_or_not_there_fail() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let verdict = judge(&perturbed(bad));
        assert!(verdict.difference == f32::INFINITY && !verdict.passes(), "{bad}");
    }
    assert!(!judge(&LOGITS[..VOCAB]).passes());
    assert!(!judge(&[]).passes());
    assert!(!Verdict::new(&[f32::NAN; VOCAB], &[f32::NAN; VOCAB], VOCAB, &[0], ROUNDINGS).passes());
}

/// Computed by hand, with `u` the unit roundoff and `v` that of f32:
/// `8 (½ √(28 · 2 · (u² + 2 · 96 · v²)) + u)`.
#[test]
fn the_tolerance_is_that_of_its_model() {
    for (dtype, expected) in [(DType::BF16, 0.148_176_8), (DType::F16, 0.018_522_12), (DType::F32, 2.526_32e-5)] {
        let verdict = Verdict::new(&LOGITS, &LOGITS, VOCAB, &TOKENS, Roundings { dtype, ..ROUNDINGS });
        assert!((verdict.tolerance / expected - 1.0).abs() < 1e-5, "{dtype}: {}", verdict.tolerance);
    }
}

#[test]
fn a_base_row_that_changed_is_not_as_it_should_be() {
    let [same, last_bit] = [Moved::between(&LOGITS, &LOGITS), Moved::between(&perturbed(2.0_f32.powi(-22)), &LOGITS)];
    assert!(same.identical && !last_bit.identical && last_bit.difference > 0.0);
    let shorter = Moved::between(&LOGITS[..VOCAB], &LOGITS);
    assert!(!shorter.identical && shorter.difference == f32::INFINITY);
    let [passes, fails] = [judge(&LOGITS), judge(&perturbed(1.0))];
    let cases = [
        (false, Some(same), Some(passes), true),
        (false, Some(last_bit), Some(passes), false),
        (false, Some(last_bit), None, false),
        (true, Some(last_bit), Some(passes), true),
        (true, Some(last_bit), Some(fails), false),
        (false, None, Some(fails), false),
        (false, None, None, true),
    ];
    for (has_adapter, moved, verdict, expected) in cases {
        assert_eq!(is_as_it_should_be(has_adapter, moved, verdict), expected, "{has_adapter} {moved:?} {verdict:?}");
    }
}
