use cudarc::driver::SyncOnDrop;

use super::{LaunchError, Queue, Step, View, raw, region::Kept};
use crate::{error::OperandError, routing::Weighed};

/// What a layer's router chose for a step, in device memory: [`routing::TopK`](crate::routing::TopK) has it on the host, and says
/// what a route is.
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
    /// `ids` is `[tokens, top_k]`: local expert ids. -1 and whatever else is no local id is not here.
    ///
    /// # Errors
    /// If `top_k` is zero or does not divide the ids.
    pub fn new(ids: impl Into<View<'a, i32>>, top_k: usize) -> Result<Self, OperandError> {
        let ids = ids.into();
        if top_k == 0 || !ids.len().is_multiple_of(top_k) {
            return Err(OperandError::TopK { ids: ids.len(), top_k });
        }
        Ok(Self { ids, weights: None, rows: None, top_k, weighed: Weighed::Combine, factor: 1.0 })
    }

    /// The router's weights, `[tokens, top_k]`: 1 without them.
    ///
    /// # Errors
    /// If there is not one for each route.
    pub fn with_weights(self, weights: impl Into<View<'a, f32>>) -> Result<Self, OperandError> {
        let weights = weights.into();
        self.check("weights", weights.len())?;
        Ok(Self { weights: Some(weights), ..self })
    }

    /// The row that each route has in the `[routes, ..]` matrices, `[tokens, top_k]`. Without it, a route has the row of its number.
    /// Below 0 or from the number of routes on, the route has no row, and is not here. Where two routes have the same row, it gets
    /// the delta of one or the other.
    ///
    /// # Errors
    /// If there is not one for each route.
    #[doc(alias = "row_of_route")]
    pub fn with_rows(self, rows: impl Into<View<'a, i32>>) -> Result<Self, OperandError> {
        let rows = rows.into();
        self.check("rows", rows.len())?;
        Ok(Self { rows: Some(rows), ..self })
    }

    /// The router's weights are applied to the experts' input: the deltas of gate and up are multiplied by them, and the combine
    /// does without.
    #[must_use]
    #[doc(alias = "apply_router_weight_on_input")]
    pub fn on_input(self) -> Self {
        Self { weighed: Weighed::Input, ..self }
    }

    /// The router's weights are applied to the rows of down, not in the combine: the deltas of down are multiplied by them.
    #[must_use]
    #[doc(alias = "mul_routed_weight")]
    pub fn on_rows(self) -> Self {
        Self { weighed: Weighed::Rows, ..self }
    }

    /// Multiplies what every route weighs in the combine, where a model has a factor for its routed experts.
    #[must_use]
    #[doc(alias = "routed_scaling_factor")]
    pub fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// Tokens that the router chose for.
    pub fn num_tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    fn check(&self, operand: &'static str, got: usize) -> Result<(), OperandError> {
        let want = self.ids.len();
        if got == want { Ok(()) } else { Err(OperandError::Routes { operand, got, want }) }
    }

    /// Refuses a batch of other tokens.
    pub(super) fn check_tokens(&self, want: usize) -> Result<(), OperandError> {
        let got = self.num_tokens();
        if got == want { Ok(()) } else { Err(OperandError::Tokens { got, want }) }
    }

    /// Refuses choices in another context or, of buffers, of another stream.
    pub(super) fn check_queue(&self, queue: &Queue) -> Result<(), LaunchError> {
        self.ids.check_queue("ids", queue)?;
        self.weights.as_ref().map_or(Ok(()), |view| view.check_queue("weights", queue))?;
        self.rows.as_ref().map_or(Ok(()), |view| view.check_queue("rows", queue))
    }

    /// As `check_queue`, for a step: one that is captured keeps them.
    pub(super) fn check_step(&self, step: &Step<'_>) -> Result<(), LaunchError> {
        self.ids.check("ids", step)?;
        self.weights.as_ref().map_or(Ok(()), |view| view.check("weights", step))?;
        self.rows.as_ref().map_or(Ok(()), |view| view.check("rows", step))
    }

    pub(super) fn kept(&self) -> [Option<Kept>; 3] {
        let [weights, rows] = [self.weights.as_ref().and_then(View::kept), self.rows.as_ref().and_then(View::kept)];
        [self.ids.kept(), weights, rows]
    }

    /// Has the queue's stream wait for what writes them. The guards are to be dropped once the launch is enqueued.
    pub(super) fn on<'s>(&'s self, queue: &'s Queue) -> (raw::TopK, [Option<SyncOnDrop<'s>>; 3]) {
        let (ids, ids_guard) = self.ids.on(queue);
        let (weights, weights_guard) = self.weights.as_ref().map(|view| view.on(queue)).unzip();
        let (rows, rows_guard) = self.rows.as_ref().map(|view| view.on(queue)).unzip();
        let raw =
            raw::TopK::new(ids, self.top_k).weights(weights.unwrap_or(0)).rows(rows.unwrap_or(0)).scaled(self.factor);
        (raw::TopK { weighed: self.weighed, ..raw }, [ids_guard, weights_guard.flatten(), rows_guard.flatten()])
    }
}
