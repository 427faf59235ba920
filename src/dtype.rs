//! Element types that activations and factors come in.

use half::{bf16, f16};

/// The type of the elements of a matrix, where it is only known at run time.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum DType {
    /// `bfloat16`, two bytes.
    BF16,
    /// IEEE 754 binary16, two bytes.
    F16,
    /// IEEE 754 binary32, four bytes.
    F32,
}

impl DType {
    /// The size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::BF16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Half the distance from 1 to the next larger value: the largest relative error of one rounding.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::BF16 => 1.0 / 256.0,
            Self::F16 => 1.0 / 2048.0,
            Self::F32 => 1.0 / 16_777_216.0,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        })
    }
}

/// An element type that the kernels compute on: `bf16`, `f16` or `f32`.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default + PartialEq + Send + Sync {
    /// The same type as a value.
    const DTYPE: DType;

    /// Widens to `f32`, exactly.
    fn to_f32(self) -> f32;

    /// Rounds to the nearest value, ties to even; overflow gives an infinity.
    fn from_f32(value: f32) -> Self;
}

#[expect(unnameable_types, reason = "seals `Element`")]
mod sealed {
    pub trait Sealed {}
}

macro_rules! element {
    ($type:ty, $dtype:ident, $to:expr, $from:expr) => {
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;

            fn to_f32(self) -> f32 {
                $to(self)
            }

            fn from_f32(value: f32) -> Self {
                $from(value)
            }
        }
    };
}

element!(bf16, BF16, bf16::to_f32, bf16::from_f32);
element!(f16, F16, f16::to_f32, f16::from_f32);
element!(f32, F32, std::convert::identity, std::convert::identity);
