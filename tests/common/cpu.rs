//! The CPU's weight table, with adapters in it.

use aril::{DType, Slot, adapter::Adapter, cpu::WeightTable, model::Model, plan::Capacity};

/// A table with the adapters in its first slots, and not a byte more in its arena.
pub fn table(model: &Model, dtype: DType, capacity: Capacity, adapters: &[Adapter]) -> WeightTable {
    let images: Vec<_> = adapters.iter().map(|adapter| adapter.plan(model, dtype).unwrap()).collect();
    let weights = WeightTable::new(model, dtype, capacity, WeightTable::arena_bytes(&images)).unwrap();
    for (slot, image) in images.iter().enumerate() {
        weights.load(Slot::new(slot as u16), image).unwrap();
    }
    weights
}
