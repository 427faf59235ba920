use super::{abi::int, routing::RoutedBatch};
use crate::{
    error::{LaunchError, OperandError},
    ffi,
    plan::RouteCapacity,
    routing::Weighed,
};

/// What a layer's router chose for a step, in device memory: [`routing::TopK`](crate::routing::TopK) has it on the host, and says
/// what a route is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopK {
    pub(in crate::cuda) ids: u64,
    pub(in crate::cuda) weights: u64,
    pub(in crate::cuda) rows: u64,
    pub(in crate::cuda) top_k: usize,
    pub(in crate::cuda) weighed: Weighed,
    pub(in crate::cuda) factor: f32,
}

impl TopK {
    /// The address of local expert ids, `i32 [tokens, top_k]`. -1 and whatever else is no local id is not here.
    pub const fn new(ids: u64, top_k: usize) -> Self {
        Self { ids, weights: 0, rows: 0, top_k, weighed: Weighed::Combine, factor: 1.0 }
    }

    /// The address of the router's weights, `f32 [tokens, top_k]`: 1 without them.
    #[must_use]
    pub const fn weights(self, weights: u64) -> Self {
        Self { weights, ..self }
    }

    /// The address of each route's row in the `[routes, ..]` matrices, `i32 [tokens, top_k]`. Without it, a route has the row of its
    /// number. Below 0 or from the number of routes on, the route has no row, and is not here.
    #[must_use]
    #[doc(alias = "row_of_route")]
    pub const fn rows(self, rows: u64) -> Self {
        Self { rows, ..self }
    }

    /// The router's weights are applied to the experts' input: the deltas of gate and up are multiplied by them, and the combine
    /// does without.
    #[must_use]
    pub const fn on_input(self) -> Self {
        Self { weighed: Weighed::Input, ..self }
    }

    /// The router's weights are applied to the rows of down: the deltas of down are multiplied by them.
    #[must_use]
    pub const fn on_rows(self) -> Self {
        Self { weighed: Weighed::Rows, ..self }
    }

    /// What kernels take of it, within the bounds.
    pub(super) fn expect(&self, batch: RoutedBatch, capacity: RouteCapacity) -> Result<ffi::aril_top_k, LaunchError> {
        let RouteCapacity { max_tokens, top_k: max_top_k, num_experts } = capacity;
        LaunchError::within("the batch's tokens", batch.num_tokens, max_tokens)?;
        LaunchError::within("the routes of a token", self.top_k, max_top_k)?;
        if self.top_k == 0 {
            return Err(OperandError::TopK { ids: 0, top_k: 0 }.into());
        }
        Ok(ffi::aril_top_k {
            ids: self.ids as *const i32,
            weights: self.weights as *const f32,
            rows: self.rows as *const i32,
            top_k: int(self.top_k)?,
            num_experts: int(num_experts)?,
        })
    }

    /// Multiplies what every route weighs in the combine, where a model has a factor for its routed experts.
    #[must_use]
    pub const fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }
}
