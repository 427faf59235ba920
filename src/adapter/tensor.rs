use super::AdapterError;
use crate::DType;

/// STUB
#[derive(Debug)]
pub struct Tensor;

impl Tensor {
    pub(super) fn get(&self, row: usize, col: usize) -> f32 {
        unimplemented!("{row} {col}")
    }
    pub(super) fn unrepresentable(&self, value: f32, dtype: DType) -> AdapterError {
        unimplemented!("{value} {dtype}")
    }
}
