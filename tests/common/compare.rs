//! The expected contents of a buffer after an operation, and their check.

use aril::{
    DType, Element,
    model::Activation,
    reference::{self, Delta},
};
use proptest::prelude::*;
use rand::rngs::StdRng;

use super::values::Values;

/// The place of a matrix in its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub offset: usize,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

impl Place {
    /// A buffer of these values, with NaN before, between and after the rows.
    pub fn buffer<T: Element>(&self, values: Values, rng: &mut StdRng) -> Vec<T> {
        const GUARD: usize = 64;
        let mut buffer = vec![T::from_f32(f32::NAN); self.offset + self.rows * self.stride + GUARD];
        for row in buffer[self.offset..].chunks_mut(self.stride.max(1)).take(self.rows) {
            row[..self.cols].fill_with(|| T::from_f32(values.value(rng)));
        }
        buffer
    }

    /// The index of an element.
    pub fn at(&self, row: usize, col: usize) -> usize {
        self.offset + row * self.stride + col
    }

    pub fn row<T: Element>(&self, buffer: &[T], row: usize) -> Vec<f64> {
        buffer[self.at(row, 0)..][..self.cols].iter().map(|value| f64::from(value.to_f32())).collect()
    }
}

/// The expected value of an element.
#[derive(Clone, Copy, Debug)]
pub enum Expected<T> {
    /// These bits, or zero of the other sign: the sign of an exact sum of zero depends on the order.
    Exactly(T),
    /// These bits; the element must not be written.
    Untouched(T),
    /// This value, up to an error.
    Within(f64, f64),
    /// Any NaN.
    Nan,
}

/// The expectation for `y + delta`, with the roundings that any implementation may do in f32 and that of the store.
pub fn expect_sum<T: Element>(values: Values, y: f64, delta: Delta, roundings: usize) -> Expected<T> {
    let sum = y + delta.value;
    if values == Values::Exact {
        // Exact in f32: only the store rounds.
        assert!(delta.magnitude < f64::from(1 << 24) && f64::from(sum as f32) == sum, "the case is not exact");
        return Expected::Exactly(T::from_f32(sum as f32));
    }
    expect_within(sum, error_of_sum::<T>(Delta { magnitude: y.abs() + delta.magnitude, ..delta }, roundings))
}

/// The largest error of a sum in f32. Kernels of the 16-bit types split `A x` into two bf16 terms, which round once
/// each.
pub fn error_of_sum<T: Element>(sum: Delta, roundings: usize) -> f64 {
    let terms = if T::DTYPE == DType::F32 { 0.0 } else { DType::BF16.unit_roundoff().powi(2) };
    (roundings as f64 * DType::F32.unit_roundoff() + terms) * sum.magnitude
}

/// The expectation for a value with this error, after rounding to the nearest T (subnormals included).
pub fn expect_within<T: Element>(value: f64, error: f64) -> Expected<T> {
    let store = T::DTYPE.unit_roundoff() * (value.abs() + error);
    let smallest = if T::DTYPE == DType::F16 { 2.0_f64.powi(-25) } else { 2.0_f64.powi(-134) };
    Expected::Within(value, error + store + smallest)
}

/// The expectation for an activation of gate, if there is one, and up: sums that had `roundings` each.
pub fn expect_activation<T: Element>(
    values: Values,
    activation: Activation,
    gate: Option<Delta>,
    up: Delta,
    roundings: usize,
) -> Expected<T> {
    let exact = |value: f64| f64::from(value as f32) == value;
    // The gate's function, its argument, and the factor on its result.
    let (x, factor) = (gate.unwrap_or(up), gate.map(|_| up));
    // From here on the sigmoid is 1 in f32, and up to there 0.
    const ONE: f64 = 20.0;
    const ZERO: f64 = -128.0;
    let exact_value = match activation {
        Activation::Relu2 if exact(x.value.powi(2)) => Some(x.value.max(0.0).powi(2)),
        Activation::Silu if x.value >= ONE => Some(x.value),
        Activation::Silu if x.value <= ZERO => Some(0.0),
        _ => None,
    };
    let exact_value = exact_value.map(|value| value * factor.map_or(1.0, |up| up.value)).filter(|&value| exact(value));
    if let (Values::Exact, Some(value)) = (values, exact_value) {
        return Expected::Exactly(T::from_f32(value as f32));
    }
    let value = reference::experts::activation(activation, gate.map(|gate| gate.value), up.value);
    // The error of each, and a bound on its magnitude.
    let error = |sum: Delta| if values == Values::Exact { 0.0 } else { error_of_sum::<T>(sum, roundings) };
    let x_error = error(x);
    let (factor, factor_error) = factor.map_or((1.0, 0.0), |up| (up.value.abs() + error(up) + 1.0, error(up)));
    // The functions' slope is at most 1.13, and their magnitude at most the argument's. A square exceeds both.
    let largest = x.value.abs() + x_error;
    let (steepest, result) = match activation {
        Activation::Relu2 => (2.0 * largest, largest.powi(2)),
        _ => (1.13, largest),
    };
    // The error of the sigmoid's argument, and a few roundings of the sigmoid and the rest.
    let computed = (16.0 + 4.0 * 1.702 * largest) * DType::F32.unit_roundoff() * result * factor;
    expect_within(value, steepest * x_error * factor + result * factor_error + computed)
}

/// Checks a whole buffer, whose matrix is at `place`, against the expectation.
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
            Expected::Nan => got.to_f32().is_nan(),
            Expected::Within(value, bound) => {
                // Values near the largest number may round to infinity.
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
                Expected::Nan => "NaN".to_owned(),
            };
            return Err(TestCaseError::fail(format!("[{row}, {col}] is {got}, not {expected}\n{replay}")));
        }
    }
    Ok(())
}
