//! Which adapter each token of a batch has, and which experts.
//!
//! Host side and pure: [`Slot`] is what engines hand in, [`Segments`] groups a batch's tokens by slot. The CUDA side builds the
//! same grouping on the device (`cuda::Routing`); tests hold the two together. [`TopK`] is what a router chose, and
//! [`AlignedRoutes`] has its routes in blocks of one slot and one expert.

mod aligned;
mod top_k;

pub use aligned::AlignedRoutes;
pub use top_k::TopK;
#[cfg(feature = "cuda")]
pub(crate) use top_k::Weighed;

#[doc(no_inline)]
pub use crate::Slot;
use crate::error::OperandError;

/// The tokens of a batch grouped by slot, in the order of slots and, within one, of tokens. Base tokens are in no segment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Segments {
    slots: Vec<Slot>,
    indptr: Vec<usize>,
    tokens: Vec<usize>,
}

impl Segments {
    /// Groups `token_slots`, of which those at or above `num_slots` count as base.
    pub fn new(token_slots: &[Slot], num_slots: usize) -> Self {
        let mut tokens: Vec<usize> = (0..token_slots.len())
            .filter(|&token| token_slots[token].index().is_some_and(|slot| slot < num_slots))
            .collect();
        tokens.sort_by_key(|&token| token_slots[token]);
        let mut slots: Vec<Slot> = Vec::new();
        let mut indptr = Vec::new();
        for (row, &token) in tokens.iter().enumerate() {
            if slots.last() != Some(&token_slots[token]) {
                slots.push(token_slots[token]);
                indptr.push(row);
            }
        }
        indptr.push(tokens.len());
        Self { slots, indptr, tokens }
    }

    /// Each segment's slot and its tokens.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Slot, &[usize])> {
        self.slots.iter().zip(self.indptr.windows(2)).map(|(&slot, bounds)| (slot, &self.tokens[bounds[0]..bounds[1]]))
    }

    /// How many adapters are active in the batch.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether every token is the base model's.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}

/// A batch as the host describes it: one slot per token and, if asked for, one factor per token on its adapter's scaling.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    slots: &'a [Slot],
    scales: Option<&'a [f32]>,
}

impl<'a> Batch<'a> {
    /// Each token with its adapter's own scaling.
    pub const fn new(slots: &'a [Slot]) -> Self {
        Self { slots, scales: None }
    }

    /// Multiplies each token's scaling by a factor of its own.
    ///
    /// # Errors
    /// If there is not one factor per token.
    pub fn with_scales(self, scales: &'a [f32]) -> Result<Self, OperandError> {
        if scales.len() != self.slots.len() {
            return Err(OperandError::Length { operand: "scales", got: scales.len(), want: self.slots.len() });
        }
        Ok(Self { scales: Some(scales), ..self })
    }

    /// One slot per token.
    pub const fn slots(&self) -> &'a [Slot] {
        self.slots
    }

    /// One factor per token, if any was given.
    pub const fn scales(&self) -> Option<&'a [f32]> {
        self.scales
    }

    /// Tokens in the batch.
    pub const fn num_tokens(&self) -> usize {
        self.slots.len()
    }

    /// Whether any token has a slot. If none has, the operations leave every `y` as it is, and an engine may skip all of a step's:
    /// one that takes the place of a kernel of the engine's only for that kernel.
    ///
    /// A slot counts whether or not it holds an adapter.
    ///
    /// ```
    /// use aril::{Slot, routing::Batch};
    ///
    /// assert!(Batch::new(&[Slot::BASE, Slot::new(3)]).has_adapters());
    /// assert!(!Batch::new(&[Slot::BASE; 2]).has_adapters());
    /// ```
    pub fn has_adapters(&self) -> bool {
        self.slots.iter().any(|slot| slot.index().is_some())
    }

    /// A token's factor: 1 where none was given.
    pub fn scale(&self, token: usize) -> f32 {
        self.scales.map_or(1.0, |scales| scales[token])
    }
}
