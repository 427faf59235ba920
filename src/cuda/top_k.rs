use super::{View, buffer::Memory, raw, step::Operand};
use crate::{contract, error::OperandError, routing::Weighed};

/// A router's choice for a step, in device memory. See [`routing::TopK`](crate::routing::TopK).
#[derive(Debug)]
#[doc(alias = "topk_ids")]
pub struct TopK<'a> {
    ids: View<'a, i32>,
    weights: Option<View<'a, f32>>,
    rows: Option<View<'a, i32>>,
    top_k: usize,
    weighed: Weighed,
    factor: f32,
}

impl<'a> TopK<'a> {
    /// Local expert ids `[tokens, top_k]`. Any other value, such as -1, makes the route non-local.
    ///
    /// # Errors
    /// [`OperandError::TopK`] if `top_k` is zero or does not divide the number of ids.
    pub fn new(ids: impl Into<View<'a, i32>>, top_k: usize) -> Result<Self, OperandError> {
        let ids = ids.into();
        contract::check_top_k(ids.len(), top_k)?;
        Ok(Self { ids, weights: None, rows: None, top_k, weighed: Weighed::Combine, factor: 1.0 })
    }

    /// Sets the router's weights `[tokens, top_k]`. The default is 1.
    ///
    /// # Errors
    /// [`OperandError::Routes`] if there is not one weight per route.
    pub fn with_weights(self, weights: impl Into<View<'a, f32>>) -> Result<Self, OperandError> {
        let weights = weights.into();
        contract::check_of_routes("weights", weights.len(), self.ids.len())?;
        Ok(Self { weights: Some(weights), ..self })
    }

    /// Sets the row of each route in `[routes, ..]` matrices, `[tokens, top_k]`. By default, route `r` has row `r`. A value outside
    /// `0..routes` means that the route has no row and is not local. A row that two routes have gets the delta of either.
    ///
    /// # Errors
    /// [`OperandError::Routes`] if there is not one row per route.
    #[doc(alias = "row_of_route")]
    pub fn with_rows(self, rows: impl Into<View<'a, i32>>) -> Result<Self, OperandError> {
        let rows = rows.into();
        contract::check_of_routes("rows", rows.len(), self.ids.len())?;
        Ok(Self { rows: Some(rows), ..self })
    }

    /// Applies the router's weights to the input of the experts instead of in the combine. The deltas of gate and up are multiplied
    /// by them.
    #[must_use]
    #[doc(alias = "apply_router_weight_on_input")]
    pub fn on_input(self) -> Self {
        Self { weighed: Weighed::Input, ..self }
    }

    /// Declares that the engine's GEMM applies the router's weights to the output rows of down, so that the combine only adds rows.
    /// The deltas of down are multiplied by them.
    #[must_use]
    #[doc(alias = "mul_routed_weight")]
    pub fn on_rows(self) -> Self {
        Self { weighed: Weighed::Rows, ..self }
    }

    /// Scales the combine weights (`routed_scaling_factor`).
    #[must_use]
    #[doc(alias = "routed_scaling_factor")]
    pub fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// Tokens in the step.
    pub fn num_tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    /// Rejects a batch with another number of tokens.
    pub(super) fn check_tokens(&self, want: usize) -> Result<(), OperandError> {
        contract::experts::check_tokens(self.num_tokens(), want)
    }

    /// The ids, the weights and the rows.
    pub(super) fn operands(&mut self) -> [Option<Operand<'_>>; 3] {
        [
            Some(("ids", &mut self.ids)),
            self.weights.as_mut().map(|view| ("weights", view as &mut dyn Memory)),
            self.rows.as_mut().map(|view| ("rows", view as &mut dyn Memory)),
        ]
    }

    /// The choice in the raw API, at these addresses of the [`operands`](Self::operands).
    pub(super) fn at(&self, [ids, weights, rows]: [u64; 3]) -> raw::TopK {
        let &Self { top_k, weighed, factor, .. } = self;
        raw::TopK { ids, weights, rows, top_k, weighed, factor }
    }
}
