//! The CPU, for what is written once for every backend (tests/model).

pub use aril::cpu::{
    AdapterPool, Filled, LoraLinear, Matrix, MatrixMut, Reservation, Staging, Step, Tiers, WeightTable, Workspace,
};
use aril::{
    DType,
    error::OperandError,
    model::Model,
    plan::Capacity,
    pool::{PoolConfig, StreamId},
    routing::Batch,
};

use crate::model::{Beside, Captured, Refused};

pub type Elements = Vec<f32>;
pub type Error = OperandError;

/// The CPU has no graphs.
pub enum Graph {}

pub const HAS_GRAPHS: bool = false;
pub const ROW_BYTES: usize = 0;
/// Batches need no routing.
pub const ROUTINGS: usize = 1;

pub struct Backend;

/// Where a GPU routes batches.
pub struct Routing;

impl Routing {
    pub fn update<'a>(&mut self, batch: &Batch<'a>) -> Result<Batch<'a>, Error> {
        Ok(*batch)
    }
}

impl Backend {
    pub fn new() -> Self {
        Self
    }

    pub fn table(&self, model: &Model, dtype: DType, capacity: Capacity, bytes: usize) -> WeightTable {
        WeightTable::new(model, dtype, capacity, bytes).unwrap()
    }

    pub fn pool(&self, model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> AdapterPool {
        AdapterPool::new(model, dtype, capacity, config).unwrap()
    }

    pub fn add_stream(&self, pool: &mut AdapterPool, _: usize) -> StreamId {
        pool.add_stream()
    }

    pub fn routing(&self, _: usize, _: Capacity) -> Routing {
        Routing
    }

    pub fn workspace(&self, _: usize, weights: &WeightTable) -> Workspace {
        Workspace::new(weights).unwrap()
    }

    pub fn elements(&self, _: usize, elements: &[f32]) -> Elements {
        elements.to_vec()
    }
}

pub fn write(to: &mut Elements, elements: &[f32]) {
    to.copy_from_slice(elements);
}

pub fn read(from: &Elements, elements: &mut [f32]) {
    elements.copy_from_slice(from);
}

pub fn capture(
    _: &WeightTable,
    _: &Routing,
    _: Captured,
    _: &mut Workspace,
    _: impl FnOnce(&mut Step<'_>) -> Result<(), Error>,
) -> Result<Graph, Error> {
    unreachable!("the CPU has no graphs")
}

pub fn call_beside(_: Beside, _: &mut Step<'_>, _: &WeightTable, _: &Routing) {}

pub fn copy(_: &Backend, _: usize, _: usize) -> Result<(), Error> {
    unreachable!("the CPU has no streams")
}

pub fn replay(graph: &mut Graph, _: &mut Step<'_>) -> Result<(), Error> {
    match *graph {}
}

pub fn refused(error: Error) -> Refused {
    Refused::Operand(error)
}
