use super::{abi::int, routing::RoutedBatch};
use crate::{
    error::{LaunchError, OperandError},
    ffi,
    plan::RouteCapacity,
    routing::Weighed,
};

/// A router's choice for a step, in device memory. See [`routing::TopK`](crate::routing::TopK).
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
    /// The address of local expert ids, `i32 [tokens, top_k]`. Any other value, such as -1, makes the route non-local.
    pub const fn new(ids: u64, top_k: usize) -> Self {
        Self { ids, weights: 0, rows: 0, top_k, weighed: Weighed::Combine, factor: 1.0 }
    }

    /// Sets the address of the router's weights, `f32 [tokens, top_k]`. The default is 1.
    #[must_use]
    pub const fn weights(self, weights: u64) -> Self {
        Self { weights, ..self }
    }

    /// Sets the address of the row of each route in `[routes, ..]` matrices, `i32 [tokens, top_k]`. By default, route `r` has row
    /// `r`. A value outside `0..routes` means that the route has no row and is not local.
    #[must_use]
    #[doc(alias = "row_of_route")]
    pub const fn rows(self, rows: u64) -> Self {
        Self { rows, ..self }
    }

    /// Applies the router's weights to the input of the experts instead of in the combine. The deltas of gate and up are multiplied
    /// by them.
    #[must_use]
    pub const fn on_input(self) -> Self {
        Self { weighed: Weighed::Input, ..self }
    }

    /// Declares that the engine's GEMM applies the router's weights to the output rows of down. The deltas of down are multiplied
    /// by them.
    #[must_use]
    pub const fn on_rows(self) -> Self {
        Self { weighed: Weighed::Rows, ..self }
    }

    /// Converts the choice to the C ABI, within the capacity.
    pub(in crate::cuda) fn expect(
        &self,
        batch: RoutedBatch,
        capacity: RouteCapacity,
    ) -> Result<ffi::aril_top_k, LaunchError> {
        let RouteCapacity { max_tokens, top_k: max_top_k, num_experts } = capacity;
        OperandError::within("the batch's tokens", batch.num_tokens, max_tokens)?;
        OperandError::within("the routes of a token", self.top_k, max_top_k)?;
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

    /// Scales the combine weights (`routed_scaling_factor`).
    #[must_use]
    pub const fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }
}
