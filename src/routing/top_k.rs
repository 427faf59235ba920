use crate::error::OperandError;

/// What a layer's router chose for a step: `top_k` experts for each token, and what they weigh.
///
/// A (token, expert) pair is a route, numbered `token * top_k + k`. A token may have chosen an expert more than once. A route is
/// *here* if this rank holds its expert and it has a row; the others are other ranks' or padding, and no operation computes them.
///
/// ```
/// use aril::routing::TopK;
///
/// // Two tokens with two experts each, one of which is another rank's.
/// let (ids, weights) = ([5, 0, -1, 2], [0.75, 0.25, 0.5, 0.5]);
/// let top_k = TopK::new(&ids, 2)?.with_weights(&weights)?.scaled(2.5);
/// assert_eq!((top_k.num_tokens(), top_k.num_routes()), (2, 4));
/// assert_eq!(top_k.expert(0, 8), Some(5));
/// assert_eq!(top_k.expert(2, 8), None);
/// # Ok::<(), aril::error::OperandError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[doc(alias = "topk_ids")]
#[doc(alias = "selected_experts")]
pub struct TopK<'a> {
    ids: &'a [i32],
    top_k: usize,
    weights: Option<&'a [f32]>,
    rows: Option<&'a [i32]>,
    weighed: Weighed,
    factor: f32,
}

/// Where the router's weights are applied.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Weighed {
    /// On what the experts take.
    Input,
    /// On the rows of down.
    Rows,
    Combine,
}

impl<'a> TopK<'a> {
    /// `ids` is `[tokens, top_k]`: local expert ids, those of [`ExpertsSite::held`](crate::model::ExpertsSite::held). -1 and
    /// whatever else is no local id is not here.
    ///
    /// # Errors
    /// If `top_k` is zero or does not divide the ids.
    pub fn new(ids: &'a [i32], top_k: usize) -> Result<Self, OperandError> {
        if top_k == 0 || !ids.len().is_multiple_of(top_k) {
            return Err(OperandError::TopK { ids: ids.len(), top_k });
        }
        Ok(Self { ids, top_k, weights: None, rows: None, weighed: Weighed::Combine, factor: 1.0 })
    }

    /// The router's weights, `[tokens, top_k]`: 1 without them.
    ///
    /// # Errors
    /// If there is not one for each route.
    #[doc(alias = "topk_weights")]
    pub fn with_weights(self, weights: &'a [f32]) -> Result<Self, OperandError> {
        self.check("weights", weights.len())?;
        Ok(Self { weights: Some(weights), ..self })
    }

    /// The row that each route has in the engine's `[routes, ..]` matrices, `[tokens, top_k]`: for engines that sort routes by
    /// expert. Without it, a route has the row of its number. Below 0 or from the number of routes on, the route has no row, and
    /// is not here.
    ///
    /// Two routes must not have the same row: what such a row then holds is not defined. Nothing else is touched.
    ///
    /// # Errors
    /// If there is not one for each route.
    #[doc(alias = "row_of_route")]
    #[doc(alias = "permuted_idx")]
    pub fn with_rows(self, rows: &'a [i32]) -> Result<Self, OperandError> {
        self.check("rows", rows.len())?;
        Ok(Self { rows: Some(rows), ..self })
    }

    /// The router's weights are applied to the experts' input, not in the combine: Llama 4.
    #[must_use]
    #[doc(alias = "apply_router_weight_on_input")]
    pub const fn on_input(self) -> Self {
        Self { weighed: Weighed::Input, ..self }
    }

    /// The router's weights are applied to the rows of down, by the engine's GEMM, not in the combine, which only sums them up: the
    /// deltas of down are multiplied by them.
    #[must_use]
    #[doc(alias = "mul_routed_weight")]
    pub const fn on_rows(self) -> Self {
        Self { weighed: Weighed::Rows, ..self }
    }

    /// Multiplies what every route weighs in the combine, where a model has a factor for its routed experts.
    #[must_use]
    #[doc(alias = "routed_scaling_factor")]
    pub const fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// The expert ids, `[tokens, top_k]`.
    pub const fn ids(&self) -> &'a [i32] {
        self.ids
    }

    /// Experts that each token has chosen.
    pub const fn top_k(&self) -> usize {
        self.top_k
    }

    /// Tokens in the step.
    pub const fn num_tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    /// Routes, and rows of the engine's `[routes, ..]` matrices.
    pub const fn num_routes(&self) -> usize {
        self.ids.len()
    }

    /// The router's weights, if any were given.
    pub const fn weights(&self) -> Option<&'a [f32]> {
        self.weights
    }

    /// The rows of the routes, if any were given.
    pub const fn rows(&self) -> Option<&'a [i32]> {
        self.rows
    }

    /// Whether the weights are applied to the experts' input.
    pub const fn is_on_input(&self) -> bool {
        matches!(self.weighed, Weighed::Input)
    }

    /// Whether the weights are applied to the rows of down.
    pub const fn is_on_rows(&self) -> bool {
        matches!(self.weighed, Weighed::Rows)
    }

    /// What every route's weight is multiplied by in the combine.
    pub const fn factor(&self) -> f32 {
        self.factor
    }

    /// The local id of a route's expert, if this rank, which holds `num_held`, has it.
    pub fn expert(&self, route: usize, num_held: usize) -> Option<usize> {
        usize::try_from(self.ids[route]).ok().filter(|&expert| expert < num_held)
    }

    /// The row of a route, if it has one.
    pub fn row(&self, route: usize) -> Option<usize> {
        let Some(rows) = self.rows else { return Some(route) };
        usize::try_from(rows[route]).ok().filter(|&row| row < self.num_routes())
    }

    /// What the input of a route's expert is multiplied by: its weight if those are [on the input](Self::on_input), else 1.
    pub fn input_weight(&self, route: usize) -> f32 {
        self.weight_at(Weighed::Input, route)
    }

    /// What the row of a route holds of the output of its expert: its weight if those are [on the rows](Self::on_rows), else 1.
    pub fn row_weight(&self, route: usize) -> f32 {
        self.weight_at(Weighed::Rows, route)
    }

    /// What the row of a route is multiplied by in the combine: the factor, and its weight unless those are
    /// [on the input](Self::on_input) or [on the rows](Self::on_rows).
    pub fn output_weight(&self, route: usize) -> f32 {
        self.factor * self.weight_at(Weighed::Combine, route)
    }

    /// Refuses a batch of other tokens.
    pub(crate) fn check_tokens(&self, want: usize) -> Result<(), OperandError> {
        let got = self.num_tokens();
        if got == want { Ok(()) } else { Err(OperandError::Tokens { got, want }) }
    }

    fn weight_at(&self, place: Weighed, route: usize) -> f32 {
        self.weights.filter(|_| self.weighed == place).map_or(1.0, |weights| weights[route])
    }

    fn check(&self, operand: &'static str, got: usize) -> Result<(), OperandError> {
        let want = self.num_routes();
        if got == want { Ok(()) } else { Err(OperandError::Routes { operand, got, want }) }
    }
}
