//! What a buffer must hold after an operation, and whether it does.

use aril::{DType, Element, reference};
use proptest::prelude::*;
use rand::rngs::StdRng;

use super::values::Values;

/// Where a matrix is in its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl Place {
    /// Of values, and NaN before, between and behind them.
    pub fn buffer<T: Element>(&self, values: Values, rng: &mut StdRng) -> Vec<T> {
        const GUARD: usize = 64;
        let mut buffer = vec![T::from_f32(f32::NAN); self.offset + self.rows * self.stride + GUARD];
        for row in buffer[self.offset..].chunks_mut(self.stride.max(1)).take(self.rows) {
            row[..self.cols].fill_with(|| T::from_f32(values.value(rng)));
        }
        buffer
    }

    /// Where an element is.
    pub fn at(&self, row: usize, col: usize) -> usize {
        self.offset + row * self.stride + col
    }

    pub fn row<T: Element>(&self, buffer: &[T], row: usize) -> Vec<f64> {
        buffer[self.at(row, 0)..][..self.cols].iter().map(|value| f64::from(value.to_f32())).collect()
    }
}

/// What an element of a buffer must hold.
#[derive(Clone, Copy, Debug)]
pub enum Expected<T> {
    /// These bits, or zero of the other sign: a sum of exact products is of either, depending on the order.
    Exactly(T),
    /// These bits, which are not to be written.
    Untouched(T),
    /// This value, give or take.
    Within(f64, f64),
}

/// What `y + delta` must be, after the roundings that whatever computes it may do in f32 and the one of the store.
pub fn expect_sum<T: Element>(values: Values, y: f64, delta: reference::Delta, roundings: usize) -> Expected<T> {
    let sum = y + delta.value;
    if values == Values::Exact {
        // Exact in f32, so that the only rounding is that of the store.
        assert!(delta.magnitude < f64::from(1 << 24) && f64::from(sum as f32) == sum, "the case is not exact");
        return Expected::Exactly(T::from_f32(sum as f32));
    }
    expect_within(sum, error_of_sum::<T>(reference::Delta { magnitude: y.abs() + delta.magnitude, ..delta }, roundings))
}

/// How far from it a sum in f32 may be. Of `A x`, kernels of the 16-bit types take two bf16 terms, each of which rounds once.
pub fn error_of_sum<T: Element>(sum: reference::Delta, roundings: usize) -> f64 {
    let terms = if T::DTYPE == DType::F32 { 0.0 } else { DType::BF16.unit_roundoff().powi(2) };
    (roundings as f64 * DType::F32.unit_roundoff() + terms) * sum.magnitude
}

/// What a value that is off by up to `error` must be, when it is rounded to T: to nearest, perhaps among T's smallest numbers.
pub fn expect_within<T: Element>(value: f64, error: f64) -> Expected<T> {
    let store = T::DTYPE.unit_roundoff() * (value.abs() + error);
    let smallest = if T::DTYPE == DType::F16 { 2.0_f64.powi(-25) } else { 2.0_f64.powi(-134) };
    Expected::Within(value, error + store + smallest)
}

/// Checks a whole buffer, whose matrix is at a place, against what it must hold.
pub fn compare<T: Element>(
    place: Place,
    got: &[T],
    expected: &[Expected<T>],
    replay: &str,
) -> Result<(), TestCaseError> {
    prop_assert_eq!(got.len(), expected.len());
    let bits = |value: &T| bytemuck::bytes_of(value).to_vec();
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let good = match expected {
            Expected::Exactly(expected) => {
                bits(got) == bits(expected) || [got, expected].map(|v| v.to_f32()) == [0.0; 2]
            }
            Expected::Untouched(expected) => bits(got) == bits(expected),
            Expected::Within(value, bound) => {
                // What is next to the largest number may become infinite.
                let end = T::from_f32((value + bound.copysign(*value)) as f32);
                (f64::from(got.to_f32()) - value).abs() <= *bound || end.to_f32().is_infinite() && *got == end
            }
        };
        if !good {
            let (at, stride) = (index as isize - place.offset as isize, place.stride as isize);
            let (row, col) = (at.div_euclid(stride), at.rem_euclid(stride));
            let got = got.to_f32();
            let expected = match expected {
                Expected::Exactly(value) => format!("exactly {}", value.to_f32()),
                Expected::Untouched(value) => format!("{} as it was", value.to_f32()),
                Expected::Within(value, bound) => format!("{value} ± {bound}"),
            };
            return Err(TestCaseError::fail(format!("[{row}, {col}] is {got}, not {expected}\n{replay}")));
        }
    }
    Ok(())
}
