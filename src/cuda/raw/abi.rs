//! Conversions to the types of the C ABI (`csrc/aril.h`).

use crate::{
    DType,
    error::{LaunchError, OperandError},
    ffi,
};

/// Converts a count.
pub(in crate::cuda) fn int(value: usize) -> Result<i32, LaunchError> {
    let max = i32::MAX as usize;
    i32::try_from(value).map_err(|_| OperandError::Capacity { what: "a count", got: value, max }.into())
}

/// Converts an element type.
pub(in crate::cuda) fn dtype_code(dtype: DType) -> i32 {
    let ffi::aril_dtype(code) = match dtype {
        DType::BF16 => ffi::aril_dtype::ARIL_BF16,
        DType::F16 => ffi::aril_dtype::ARIL_F16,
        DType::F32 => ffi::aril_dtype::ARIL_F32,
    };
    code.cast_signed()
}
