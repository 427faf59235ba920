//! The CPU's weight table, with adapters in it, and operands in buffers.

use aril::{
    DType, Element, Slot,
    adapter::Adapter,
    cpu::{Matrix, MatrixMut, WeightTable},
    model::Model,
    plan::Capacity,
};

use super::{case::loaded_slots, compare::Place};

/// A table with the adapters in its first slots, and not a byte more in its arena.
pub fn table(model: &Model, dtype: DType, capacity: Capacity, adapters: &[Adapter]) -> WeightTable {
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(model, dtype).unwrap()).collect();
    let weights = WeightTable::new(model, dtype, capacity, WeightTable::arena_bytes(&images)).unwrap();
    for (slot, image) in images.iter().enumerate() {
        weights.load(slot, image).unwrap();
    }
    weights
}

/// The slots with these numbers and the adapters that are there now. An empty one, and every other number, is the base
/// model.
pub fn slots<const N: usize>(weights: &WeightTable, numbers: [i32; N]) -> [Slot; N] {
    loaded_slots(&numbers, |slot| weights.get(slot)).try_into().unwrap()
}

pub fn matrix<T: Element>(buffer: &[T], place: Place) -> Matrix<'_, T> {
    Matrix::strided(&buffer[place.offset..], place.rows, place.cols, place.stride).unwrap()
}

pub fn matrix_mut<T: Element>(buffer: &mut [T], place: Place) -> MatrixMut<'_, T> {
    MatrixMut::strided(&mut buffer[place.offset..], place.rows, place.cols, place.stride).unwrap()
}
