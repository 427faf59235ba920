//! The numbers in cases. Exact ones are small integers whose sums have no rounding error before the store, so that
//! answers must agree bit for bit. Rounded ones are normals, whose answers must agree within a bound derived from the
//! formats.

use rand::{RngExt, rngs::StdRng};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Dtype {
    BF16,
    F16,
    F32,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize, Deserialize)]
pub enum Values {
    Exact,
    Rounded,
}

/// Calls a function or a method that is generic over the element type, for the case's.
#[macro_export]
macro_rules! for_dtype {
    ($case:expr, $function:ident($($argument:expr),*)) => {
        match $case.dtype {
            $crate::common::values::Dtype::BF16 => $function::<half::bf16>($($argument),*),
            $crate::common::values::Dtype::F16 => $function::<half::f16>($($argument),*),
            $crate::common::values::Dtype::F32 => $function::<f32>($($argument),*),
        }
    };
    ($case:ident.$method:ident($($argument:expr),*)) => {
        match $case.dtype {
            $crate::common::values::Dtype::BF16 => $case.$method::<half::bf16>($($argument),*),
            $crate::common::values::Dtype::F16 => $case.$method::<half::f16>($($argument),*),
            $crate::common::values::Dtype::F32 => $case.$method::<f32>($($argument),*),
        }
    };
}

impl Values {
    pub fn value(self, rng: &mut StdRng) -> f32 {
        match self {
            // Zeros have both signs.
            Self::Exact => f32::from(rng.random_range(-2..=2_i8)).copysign(if rng.random() { 1.0 } else { -1.0 }),
            // The sum of four uniforms is normal enough.
            Self::Rounded => (0..4).map(|_| rng.random_range(-0.25..0.25_f32)).sum(),
        }
    }
}
