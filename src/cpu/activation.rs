use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

use crate::model::Activation;

/// Applies an activation to one feature of gate (if there is one) and up. NaN propagates.
pub(super) fn apply(activation: Activation, gate: Option<f32>, up: f32) -> f32 {
    // Ungated experts activate `up`.
    let (x, up) = gate.map_or((up, 1.0), |gate| (gate, up));
    match activation {
        Activation::Gelu => 0.5 * x * (1.0 + libm::erff(x * FRAC_1_SQRT_2)) * up,
        Activation::GeluTanh => {
            let inner = FRAC_2_PI.sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh()) * up
        }
        Activation::Relu2 => {
            let x = at_least(x, 0.0);
            x * x * up
        }
        Activation::Silu => x * sigmoid(x) * up,
        Activation::SwigluOai { alpha, limit } => {
            let (x, up) = (at_most(x, limit), at_least(at_most(up, limit), -limit));
            x * sigmoid(alpha * x) * (up + 1.0)
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}
