use cudarc::driver::SyncOnDrop;

use super::{LaunchError, Queue, Step, View, raw, region::Kept};
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

    /// Rejects operands of another context or, for buffers, of another stream. A captured step also rejects borrowed operands.
    pub(super) fn check_step(&self, step: &Step<'_>) -> Result<(), LaunchError> {
        self.ids.check("ids", step)?;
        self.weights.as_ref().map_or(Ok(()), |view| view.check("weights", step))?;
        self.rows.as_ref().map_or(Ok(()), |view| view.check("rows", step))
    }

    pub(super) fn kept(&self) -> [Option<Kept>; 3] {
        let [weights, rows] = [self.weights.as_ref().and_then(View::kept), self.rows.as_ref().and_then(View::kept)];
        [self.ids.kept(), weights, rows]
    }

    /// Makes the queue's stream wait for writes to the operands. Drop the guards after the launch is enqueued.
    pub(super) fn on<'s>(&'s self, queue: &'s Queue) -> (raw::TopK, [Option<SyncOnDrop<'s>>; 3]) {
        let (ids, ids_guard) = self.ids.on(queue);
        let (weights, weights_guard) = self.weights.as_ref().map(|view| view.on(queue)).unzip();
        let (rows, rows_guard) = self.rows.as_ref().map(|view| view.on(queue)).unzip();
        let raw =
            raw::TopK::new(ids, self.top_k).weights(weights.unwrap_or(0)).rows(rows.unwrap_or(0)).scaled(self.factor);
        (raw::TopK { weighed: self.weighed, ..raw }, [ids_guard, weights_guard.flatten(), rows_guard.flatten()])
    }
}
