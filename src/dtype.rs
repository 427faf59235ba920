//! Element types of activations and factors.

use half::{bf16, f16};

/// An element type, at run time.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum DType {
    /// `bfloat16`, 2 bytes.
    BF16,
    /// IEEE 754 binary16, 2 bytes.
    F16,
    /// IEEE 754 binary32, 4 bytes.
    F32,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::BF16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// The largest relative error of rounding to nearest: half the distance from 1 to the next larger value.
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

/// An element type, at compile time: `bf16`, `f16` or `f32`.
pub trait Element: sealed::Sealed + bytemuck::Pod + Default + PartialEq + Send + Sync {
    /// The same type as a [`DType`].
    const DTYPE: DType;

    /// Converts to `f32`, exactly.
    fn to_f32(self) -> f32;

    /// Rounds to nearest, ties to even. Values out of range become infinite.
    fn from_f32(value: f32) -> Self;

    /// Whether the value is neither infinite nor NaN.
    fn is_finite(self) -> bool;
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

            #[inline]
            fn to_f32(self) -> f32 {
                $to(self)
            }

            #[inline]
            fn from_f32(value: f32) -> Self {
                $from(value)
            }

            #[inline]
            fn is_finite(self) -> bool {
                self.is_finite()
            }
        }
    };
}

element!(bf16, BF16, bf16::to_f32, bf16::from_f32);
element!(f16, F16, f16::to_f32, f16::from_f32);
element!(f32, F32, std::convert::identity, std::convert::identity);
