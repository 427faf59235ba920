//! The tokens from which on an adapter applies.

use std::sync::Arc;

/// The tokens from whose last occurrence in a prompt on an adapter applies: `alora_invocation_tokens` of PEFT's
/// *activated* LoRA (aLoRA). The tokens before it, and all tokens of a sequence whose prompt does not have it, are
/// those of the base model.
///
/// Only prompts are looked at: what a sequence goes on with does not move the place.
///
/// ```
/// # use aril::{DType, adapter::{Adapter, AdapterError, Tensor}};
/// # let tensor = |shape: [usize; 2]| Tensor::new(DType::F32, shape, vec![0; 32]);
/// # let tensors = [("m.lora_A.weight".to_owned(), tensor([1, 8])?), ("m.lora_B.weight".to_owned(), tensor([8, 1])?)];
/// let config = r#"{"peft_type": "LORA", "lora_alpha": 1, "alora_invocation_tokens": [7, 8]}"#;
/// let mut adapter = Adapter::from_tensors(config, tensors)?;
/// let invocation = adapter.take_invocation().expect("the configuration has one");
/// assert_eq!(invocation.start_in(&[1, 7, 8, 2, 7, 8, 3]), Some(4));
/// assert_eq!(invocation.start_in(&[1, 2, 3]), None);
/// # Ok::<(), AdapterError>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[doc(alias = "alora_invocation_tokens")]
pub struct Invocation {
    /// At least one.
    tokens: Arc<[u32]>,
    /// For each number of first tokens but 0, the most of them, and fewer than all, that are also the last of them.
    borders: Arc<[usize]>,
}

impl Invocation {
    /// `None` without tokens.
    pub(super) fn new(tokens: Vec<u32>) -> Option<Self> {
        let (_, rest) = tokens.split_first()?;
        let mut borders = vec![0];
        for (before, &token) in rest.iter().enumerate() {
            borders.push(extend(&tokens, &borders, borders[before], token));
        }
        Some(Self { tokens: tokens.into(), borders: borders.into() })
    }

    /// The tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where they are in a prompt for the last time: the position of the first token that the adapter applies to.
    /// `None` if they are not there. The time is that of reading the prompt once.
    pub fn start_in(&self, prompt: &[u32]) -> Option<usize> {
        let (mut matched, mut start) = (0, None);
        for (position, &token) in prompt.iter().enumerate() {
            if matched == self.tokens.len() {
                matched = self.borders[matched - 1];
            }
            matched = extend(&self.tokens, &self.borders, matched, token);
            if matched == self.tokens.len() {
                start = Some(position + 1 - matched);
            }
        }
        start
    }
}

/// The most first tokens that end with `token`, behind `matched` of them.
fn extend(tokens: &[u32], borders: &[usize], mut matched: usize, token: u32) -> usize {
    while tokens[matched] != token {
        if matched == 0 {
            return 0;
        }
        matched = borders[matched - 1];
    }
    matched + 1
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Of few different tokens, so that occurrences overlap.
        #[test]
        fn the_last_occurrence_is_that_of_a_naive_search(
            tokens in prop::collection::vec(0..3_u32, 1..8),
            prompt in prop::collection::vec(0..3_u32, 0..60),
        ) {
            let start = Invocation::new(tokens.clone()).unwrap().start_in(&prompt);
            prop_assert_eq!(start, prompt.windows(tokens.len()).rposition(|window| window == tokens));
        }
    }

    #[test]
    fn no_tokens_invoke_nothing() {
        assert_eq!(Invocation::new(Vec::new()), None);
    }
}
