//! The CPU, for what is written once for every backend (tests/model).

use std::convert::Infallible;

use aril::{
    DType,
    error::OperandError,
    model::{LinearId, Model},
    plan::{Capacity, RouteCapacity},
    pool::{PoolConfig, StreamId},
    routing::Batch,
};
pub use aril::{
    Element as Value,
    cpu::{
        AdapterPool, Filled, FullyShardedLinear, FusedLinear, LoraEmbedding, LoraExperts, LoraLinear, Matrix,
        MatrixMut, Reservation, Staging, Step, Tiers, TrainedRows, WeightTable, Workspace,
    },
    routing::TopK,
};

use half::bf16;

use crate::{
    common::experts::{Op, launch_on_cpu},
    model::{Beside, Captured, Refused, Tensors},
};

pub type Elements<T = f32> = Vec<T>;
pub type Error = OperandError;

/// The CPU has no graphs, and no stacks.
pub enum Graph {}

pub enum Stack {}

impl Stack {
    pub fn new(_: &WeightTable, _: LinearId, _: usize) -> Option<Self> {
        None
    }

    pub fn multiply(&mut self, _: &mut Step<'_>) -> Result<(), Error> {
        match *self {}
    }

    pub fn add_delta(&mut self, _: &LoraLinear, _: &mut Step<'_>) -> Result<(), Error> {
        match *self {}
    }

    pub fn y(&self) -> Vec<bf16> {
        match *self {}
    }
}

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

/// Where a GPU groups routes.
pub struct Grouping;

impl Grouping {
    pub fn update<'a>(&mut self, _: &mut Step<'_>, top_k: TopK<'a>) -> Result<TopK<'a>, Error> {
        Ok(top_k)
    }
}

impl Backend {
    pub fn new() -> Self {
        Self
    }

    pub fn table(&self, model: &Model, dtype: DType, capacity: Capacity, bytes: usize) -> Result<WeightTable, Error> {
        Ok(WeightTable::new(model, dtype, capacity, bytes)?)
    }

    pub fn pool(&self, model: &Model, dtype: DType, capacity: Capacity, config: PoolConfig) -> AdapterPool {
        AdapterPool::new(model, dtype, capacity, config).unwrap()
    }

    pub fn add_stream(&self, pool: &mut AdapterPool, _: usize) -> StreamId {
        pool.add_stream()
    }

    pub fn routing(&self, _: usize, _: Capacity) -> Result<Routing, Error> {
        Ok(Routing)
    }

    /// The host has the slots' numbers.
    pub fn update<'a>(&self, routing: &mut Routing, batch: &Batch<'a>, _: Option<&[i32]>) -> Result<Batch<'a>, Error> {
        routing.update(batch)
    }

    pub fn grouping(&self, _: RouteCapacity) -> Result<Grouping, Error> {
        Ok(Grouping)
    }

    pub fn workspace(&self, _: usize, weights: &WeightTable) -> Workspace {
        Workspace::new(weights).unwrap()
    }

    /// The CPU's grows.
    pub fn workspace_of(&self, _: [usize; 2]) -> Result<Workspace, Error> {
        Ok(Workspace::default())
    }

    pub fn elements<T: Copy>(&self, _: usize, elements: &[T]) -> Elements<T> {
        elements.to_vec()
    }

    pub fn tensors(&self, tensors: Tensors) -> Tensors {
        tensors
    }

    pub fn synchronize(&self) -> Result<(), Infallible> {
        Ok(())
    }
}

pub fn elements_of<T: Value>(elements: &Elements<T>) -> Elements<T> {
    elements.clone()
}

/// An operation on experts. That of a GPU changes the routes.
pub fn launch<T: Value>(
    experts: &LoraExperts,
    op: Op,
    step: &mut Step<'_>,
    routes: &mut TopK<'_>,
    inputs: [Matrix<'_, T>; 2],
    target: MatrixMut<'_, T>,
) -> Result<(), Error> {
    launch_on_cpu(experts, op, step, routes, inputs, target)
}

pub fn part<T>(elements: &Elements<T>, first: usize) -> &[T] {
    &elements[first..]
}

pub fn part_mut<T>(elements: &mut Elements<T>, first: usize) -> &mut [T] {
    &mut elements[first..]
}

/// The CPU has no device.
pub fn is_of_device(_: &(dyn std::error::Error + 'static)) -> bool {
    false
}

/// It has no other errors.
pub fn operand_error(_: &(dyn std::error::Error + 'static)) -> Option<OperandError> {
    None
}

pub fn write<T: Copy>(to: &mut Elements<T>, elements: &[T]) {
    to.copy_from_slice(elements);
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
