//! The adapter of each token in a batch, and the experts that a router chose for it.
//!
//! Pure host code. A [`Batch`] has a [`Slot`] per token, which [`Segments`] groups by slot; `cuda::Routing` computes the same
//! grouping on the device, and tests compare the two. [`TopK`] is a router's choice.

mod top_k;

pub use top_k::TopK;
#[cfg(feature = "cuda")]
pub(crate) use top_k::WeightsOn;

#[doc(no_inline)]
pub use crate::Slot;
use crate::{error::OperandError, plan::Capacity};

/// The tokens of a batch grouped by slot. Segments are sorted by slot, the tokens of a segment by position. Base tokens are in no
/// segment.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Segments {
    slots: Vec<Slot>,
    indptr: Vec<usize>,
    tokens: Vec<usize>,
}

impl Segments {
    /// Groups tokens by slot. Slots at or above `num_slots` count as base.
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

    /// Slot and tokens of each segment.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Slot, &[usize])> {
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

    /// Whether any token has a slot. A batch without may skip the operations that add to `y`: `add_delta`, `shrink` and `expand`,
    /// `add_gate_up_delta`, `add_down_delta` and `add_combined_delta`.
    ///
    /// All others write their output in every batch. `write_delta`, `write_gate_up_delta` and `write_down_delta` write zeros;
    /// `FusedLinear`, `silu_mul`, `activate` and `combine` compute what the base model needs.
    ///
    /// A slot counts whether or not an adapter is loaded into it.
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

    /// Rejects a batch of more tokens than a step may have, and one that names a slot at or above the number of slots.
    pub(crate) fn check(&self, capacity: Capacity) -> Result<(), OperandError> {
        OperandError::within("the batch's tokens", self.num_tokens(), capacity.max_tokens)?;
        let num_slots = capacity.num_slots;
        let stray = self.slots.iter().find(|slot| slot.index().is_some_and(|index| index >= num_slots));
        stray.map_or(Ok(()), |&slot| Err(OperandError::NoSuchSlot { slot, num_slots }))
    }

    /// The scale of a token; 1 if no scales were set.
    pub fn scale(&self, token: usize) -> f32 {
        self.scales.map_or(1.0, |scales| scales[token])
    }
}
