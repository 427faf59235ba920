//! The adapter of each token in a batch, and the experts that a router chose for it.
//!
//! Pure host code. A [`Batch`] has a [`Slot`] per token. `cuda::Routing` groups the tokens by slot on the device;
//! [`Segments`] is the same grouping, and tests compare the two. [`TopK`] is a router's choice.
//!
//! # Speculative decoding
//!
#![doc = include_str!("docs/speculative.md")]

use crate::{Slot, contract, error::OperandError, plan::Capacity};

/// The tokens of a batch grouped by slot. Segments are sorted by slot, the tokens of a segment by position. Base tokens
/// are in no segment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Segments {
    slots: Vec<usize>,
    indptr: Vec<usize>,
    tokens: Vec<usize>,
}

impl Segments {
    /// Groups tokens by the [numbers](Slot::number) of their slots. Negative ones, and those at or above `num_slots`,
    /// count as base.
    pub fn new(token_slots: &[i32], num_slots: usize) -> Self {
        let slot = |token: usize| usize::try_from(token_slots[token]).ok().filter(|&slot| slot < num_slots);
        let mut tokens: Vec<usize> = (0..token_slots.len()).filter(|&token| slot(token).is_some()).collect();
        tokens.sort_by_key(|&token| token_slots[token]);
        let mut slots: Vec<usize> = Vec::new();
        let mut indptr = Vec::new();
        for (row, slot) in tokens.iter().filter_map(|&token| slot(token)).enumerate() {
            if slots.last() != Some(&slot) {
                slots.push(slot);
                indptr.push(row);
            }
        }
        indptr.push(tokens.len());
        Self { slots, indptr, tokens }
    }

    /// Index of the slot and tokens of each segment.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (usize, &[usize])> {
        self.slots.iter().zip(self.indptr.windows(2)).map(|(&slot, bounds)| (slot, &self.tokens[bounds[0]..bounds[1]]))
    }

    /// The number of segments, which is the number of slots in use.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether every token is a base token.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

/// The slot of each token in a batch and, optionally, a scale for each.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    slots: &'a [Slot],
    scales: Option<&'a [f32]>,
}

impl<'a> Batch<'a> {
    /// A batch without scales: each delta has the adapter's own scaling.
    pub const fn new(slots: &'a [Slot]) -> Self {
        Self { slots, scales: None }
    }

    /// Multiplies the scaling of token `t`'s adapter by `scales[t]`.
    ///
    /// # Errors
    /// [`OperandError::Length`] if there is not one scale per token.
    pub fn with_scales(self, scales: &'a [f32]) -> Result<Self, OperandError> {
        if scales.len() != self.slots.len() {
            return Err(OperandError::Length { operand: "scales", got: scales.len(), want: self.slots.len() });
        }
        Ok(Self { scales: Some(scales), ..self })
    }

    /// The slot of each token.
    pub const fn slots(&self) -> &'a [Slot] {
        self.slots
    }

    /// The scale of each token, if set.
    pub const fn scales(&self) -> Option<&'a [f32]> {
        self.scales
    }

    /// Tokens in the batch.
    pub const fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    /// Whether any token has a slot. A batch without may skip the operations that add to `y`: `add_delta`, `shrink` and
    /// `expand`, `add_gate_up_delta`, `add_down_delta` and `add_combined_delta`.
    ///
    /// All others write their output in every batch. `write_delta`, `write_gate_up_delta` and `write_down_delta` write
    /// zeros; `FusedLinear`, `silu_mul`, `activate` and `combine` compute what the base model needs.
    ///
    /// ```
    /// use aril::{Slot, pool::Lease, routing::Batch};
    ///
    /// fn decode(lease: &Lease) {
    ///     assert!(Batch::new(&[Slot::BASE, lease.slot()]).has_adapters());
    ///     assert!(!Batch::new(&[Slot::BASE; 2]).has_adapters());
    /// }
    /// ```
    pub fn has_adapters(&self) -> bool {
        self.slots.iter().any(|slot| slot.index().is_some())
    }

    /// Rejects a batch of more tokens than a step may have, and one that names a slot at or above the number of slots.
    pub(crate) fn check(&self, capacity: Capacity) -> Result<(), OperandError> {
        OperandError::within("the batch's tokens", self.num_tokens(), capacity.max_tokens)?;
        let num_slots = capacity.num_slots;
        let stray = self.slots.iter().find(|slot| slot.index().is_some_and(|index| index >= num_slots));
        stray.map_or(Ok(()), |&slot| Err(OperandError::NoSuchSlot { slot, num_slots }))
    }

    /// The scale of a token; 1 if no scales were set, or the batch has no such token.
    pub fn scale(&self, token: usize) -> f32 {
        self.scales.and_then(|scales| scales.get(token)).copied().unwrap_or(1.0)
    }
}

/// A router's choice for a step: `top_k` experts for each token, and their weights.
///
/// A route is one token's choice of one expert, numbered `token * top_k + k`. A token may choose an expert more than
/// once. A route is *local* if this rank holds its expert and the route has a row. Operations skip all other routes:
/// their experts are on other ranks, or they are padding.
///
/// ```
/// use aril::routing::TopK;
///
/// // Two tokens with two experts each. One of the experts is on another rank.
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
    weights_on: WeightsOn,
    factor: f32,
}

/// Where the router's weights are applied.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum WeightsOn {
    /// To the input of the experts.
    Input,
    /// To the output rows of down.
    Rows,
    Combine,
}

impl<'a> TopK<'a> {
    /// Local expert ids `[tokens, top_k]`: indices into [`ExpertsSite::held`](crate::model::ExpertsSite::held). Any
    /// other value, such as -1, makes the route non-local.
    ///
    /// # Errors
    /// [`OperandError::TopK`] if `top_k` is zero or does not divide the number of ids.
    pub fn new(ids: &'a [i32], top_k: usize) -> Result<Self, OperandError> {
        contract::check_top_k(ids.len(), top_k)?;
        Ok(Self { ids, top_k, weights: None, rows: None, weights_on: WeightsOn::Combine, factor: 1.0 })
    }

    /// Sets the router's weights `[tokens, top_k]`. The default is 1.
    ///
    /// # Errors
    /// [`OperandError::Routes`] if there is not one weight per route.
    #[doc(alias = "topk_weights")]
    pub fn with_weights(self, weights: &'a [f32]) -> Result<Self, OperandError> {
        contract::check_of_routes("weights", weights.len(), self.num_routes())?;
        Ok(Self { weights: Some(weights), ..self })
    }

    /// Sets the row of each route in `[routes, ..]` matrices, `[tokens, top_k]`, for engines that sort routes by
    /// expert. By default, route `r` has row `r`. A value outside `0..routes` means that the route has no row and is
    /// not local.
    ///
    /// Rows must be distinct. A row that two routes have ends up with an unspecified value; other rows are unaffected.
    ///
    /// # Errors
    /// [`OperandError::Routes`] if there is not one row per route.
    #[doc(alias = "row_of_route")]
    #[doc(alias = "permuted_idx")]
    pub fn with_rows(self, rows: &'a [i32]) -> Result<Self, OperandError> {
        contract::check_of_routes("rows", rows.len(), self.num_routes())?;
        Ok(Self { rows: Some(rows), ..self })
    }

    /// Applies the router's weights to the input of the experts instead of in the combine (Llama 4). The deltas of gate
    /// and up are multiplied by them.
    #[must_use]
    #[doc(alias = "apply_router_weight_on_input")]
    pub const fn on_input(self) -> Self {
        Self { weights_on: WeightsOn::Input, ..self }
    }

    /// Declares that the engine's GEMM applies the router's weights to the output rows of down, so that the combine
    /// only adds rows. The deltas of down are multiplied by them.
    #[must_use]
    #[doc(alias = "mul_routed_weight")]
    pub const fn on_rows(self) -> Self {
        Self { weights_on: WeightsOn::Rows, ..self }
    }

    /// Scales the combine weights (`routed_scaling_factor`).
    #[must_use]
    #[doc(alias = "routed_scaling_factor")]
    pub const fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// The expert ids, `[tokens, top_k]`.
    pub const fn ids(&self) -> &'a [i32] {
        self.ids
    }

    /// Experts per token.
    pub const fn top_k(&self) -> usize {
        self.top_k
    }

    /// Tokens in the step.
    pub const fn num_tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    /// Routes in the step, which is also the number of rows of `[routes, ..]` matrices.
    pub const fn num_routes(&self) -> usize {
        self.ids.len()
    }

    /// The router's weights, if set.
    pub const fn weights(&self) -> Option<&'a [f32]> {
        self.weights
    }

    /// The row of each route, if set.
    pub const fn rows(&self) -> Option<&'a [i32]> {
        self.rows
    }

    /// The factor on all combine weights.
    pub const fn factor(&self) -> f32 {
        self.factor
    }

    /// The local expert id of a route, if there is such a route and the id is below `num_held`.
    pub fn expert(&self, route: usize, num_held: usize) -> Option<usize> {
        usize::try_from(*self.ids.get(route)?).ok().filter(|&expert| expert < num_held)
    }

    /// The row of a route, if there is such a route and it has one.
    pub fn row(&self, route: usize) -> Option<usize> {
        let row = self.rows.map_or(Some(route), |rows| usize::try_from(*rows.get(route)?).ok());
        row.filter(|&row| row < self.num_routes())
    }

    /// The factor on the input of a route's expert: the router's weight with [`on_input`](Self::on_input), else 1, as
    /// of a route that does not exist.
    pub fn input_weight(&self, route: usize) -> f32 {
        self.weight_at(WeightsOn::Input, route)
    }

    /// The factor already in a route's output row of down: the router's weight with [`on_rows`](Self::on_rows), else 1,
    /// as of a route that does not exist.
    pub fn row_weight(&self, route: usize) -> f32 {
        self.weight_at(WeightsOn::Rows, route)
    }

    /// The combine weight of a route: [`factor`](Self::factor) times the router's weight, or `factor` alone with
    /// [`on_input`](Self::on_input) or [`on_rows`](Self::on_rows), or for a route that does not exist.
    pub fn output_weight(&self, route: usize) -> f32 {
        self.factor * self.weight_at(WeightsOn::Combine, route)
    }

    fn weight_at(&self, place: WeightsOn, route: usize) -> f32 {
        let weights = self.weights.filter(|_| self.weights_on == place);
        weights.and_then(|weights| weights.get(route)).copied().unwrap_or(1.0)
    }
}
