//! The reference: one token at a time, in `f64`, written to be obviously correct. It shares no code with the backends
//! that tests compare with it.

/// The factors of one module, in PEFT's layout.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    /// A `[rank, in]`, row-major.
    pub a: &'a [f64],
    /// B `[out, rank]`, row-major.
    pub b: &'a [f64],
    /// The rank.
    pub rank: usize,
    /// The scaling, α/r or α/√r, times any scale of the token.
    pub scaling: f64,
}

/// One output of a delta or of a sum with one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta {
    /// The value: `s · Σ B A x`.
    pub value: f64,
    /// The sum of absolute values, `|s| · Σ |B| |A| |x|`. Bounds on rounding errors are proportional to it.
    pub magnitude: f64,
}

/// The delta of one token in a linear layer: `s · B (A x)`, by output.
pub fn linear(x: &[f64], factors: Factors<'_>) -> Vec<Delta> {
    let Factors { a, rank, .. } = factors;
    let v = |r: usize, of: fn(f64) -> f64| (0..x.len()).map(|k| of(a[r * x.len() + k] * x[k])).sum();
    let values: Vec<f64> = (0..rank).map(|r| v(r, |product| product)).collect();
    let magnitudes: Vec<f64> = (0..rank).map(|r| v(r, f64::abs)).collect();
    expand(&values, &magnitudes, factors)
}

/// The delta of one token in an embedding of `vocab` rows: `s · B A[:, id]`, by feature.
pub fn embedding(id: usize, vocab: usize, factors: Factors<'_>) -> Vec<Delta> {
    let values: Vec<f64> = (0..factors.rank).map(|r| factors.a[r * vocab + id]).collect();
    let magnitudes: Vec<f64> = values.iter().map(|value| value.abs()).collect();
    expand(&values, &magnitudes, factors)
}

fn expand(values: &[f64], magnitudes: &[f64], Factors { b, rank, scaling, .. }: Factors<'_>) -> Vec<Delta> {
    b.chunks(rank)
        .map(|b| Delta {
            value: scaling * (0..rank).map(|r| b[r] * values[r]).sum::<f64>(),
            magnitude: scaling.abs() * (0..rank).map(|r| b[r].abs() * magnitudes[r]).sum::<f64>(),
        })
        .collect()
}

/// The parts of the reference that only experts need: column order, activations and the combine. Deltas are those of
/// [`linear`].
pub mod experts {
    use std::f64::consts::{FRAC_1_SQRT_2, PI};

    use super::Delta;
    use crate::model::{Activation, Halves};

    /// The columns of gate feature and up feature `feature`, of `inter` each, in the output of gate-up.
    pub fn columns(halves: Halves, inter: usize, feature: usize) -> [usize; 2] {
        match halves {
            Halves::GateUp => [feature, inter + feature],
            Halves::UpGate => [inter + feature, feature],
            Halves::Interleaved => [2 * feature, 2 * feature + 1],
        }
    }

    /// The activation of one feature, by the formulas at [`Activation`]. Ungated experts activate `up`.
    pub fn activation(activation: Activation, gate: Option<f64>, up: f64) -> f64 {
        let Some(gate) = gate else { return gate_function(activation, up) };
        match activation {
            Activation::SwigluOai { limit, .. } => {
                let limit = f64::from(limit);
                gate_function(activation, gate) * (up.min(limit).max(-limit) + 1.0)
            }
            _ => gate_function(activation, gate) * up,
        }
    }

    /// The weighted sum of the outputs of several experts for one token.
    pub fn combine(weights: &[f64], outputs: &[Vec<Delta>]) -> Vec<Delta> {
        let sum = |feature: usize| {
            let terms = || weights.iter().zip(outputs).map(|(weight, output)| (weight, output[feature]));
            Delta {
                value: terms().map(|(weight, output)| weight * output.value).sum(),
                magnitude: terms().map(|(weight, output)| weight.abs() * output.magnitude).sum(),
            }
        };
        (0..outputs.first().map_or(0, Vec::len)).map(sum).collect()
    }

    fn gate_function(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Gelu => x * (1.0 + erf(x * FRAC_1_SQRT_2)) / 2.0,
            Activation::GeluTanh => x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()) / 2.0,
            Activation::Relu2 => x.max(0.0).powi(2),
            Activation::Silu => x * sigmoid(x),
            Activation::SwigluOai { alpha, limit } => {
                let x = x.min(f64::from(limit));
                x * sigmoid(f64::from(alpha) * x)
            }
        }
    }

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    /// The error function, by `2 / √π · exp(-x²) · Σ 2ⁿ x²ⁿ⁺¹ / (1 · 3 · … · (2n + 1))` (Abramowitz and Stegun 7.1.6),
    /// whose terms all have the same sign. In `f64` it is 1 for `x > 6`.
    fn erf(x: f64) -> f64 {
        if x.abs() > 6.0 {
            return x.signum();
        }
        let terms =
            (1..200).scan(x, |term, n| Some(std::mem::replace(term, *term * 2.0 * x * x / f64::from(2 * n + 1))));
        2.0 / PI.sqrt() * (-x * x).exp() * terms.sum::<f64>()
    }
}
