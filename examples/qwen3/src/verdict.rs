//! Compares the logits of a batch with expected ones and judges the outcome. It needs no model.

#[cfg(test)]
mod tests;

use aril::DType;

/// The comparison of a request with the merged model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verdict {
    /// The largest difference of any logit of any step.
    pub(crate) difference: f32,
    /// The largest allowed difference.
    pub(crate) tolerance: f32,
    /// Whether the merged model chooses the same tokens.
    pub(crate) tokens_agree: bool,
}

impl Verdict {
    /// Compares the logits `[steps, vocab]` of a request, which chose `tokens`, with those of the merged model.
    pub(crate) fn new(logits: &[f32], merged: &[f32], vocab: usize, tokens: &[u32], roundings: Roundings) -> Self {
        let chosen = merged.chunks_exact(vocab).map(|logits| {
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter().position(|&logit| logit == largest)
        });
        Self {
            difference: largest_difference(logits, merged),
            tolerance: roundings.tolerance(merged),
            tokens_agree: chosen.eq(tokens.iter().map(|&token| Some(token as usize))),
        }
    }

    pub(crate) fn passes(self) -> bool {
        self.difference <= self.tolerance
    }
}

/// How a request's logits compare with those of a run without adapters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moved {
    pub(crate) difference: f32,
    /// Whether all logits are bit-identical.
    pub(crate) identical: bool,
}

impl Moved {
    pub(crate) fn between(with: &[f32], without: &[f32]) -> Self {
        let identical = with.iter().map(|logit| logit.to_bits()).eq(without.iter().map(|logit| logit.to_bits()));
        Self { difference: largest_difference(with, without), identical }
    }
}

/// Whether a request passes: without an adapter it is bit-identical to a run without adapters, and it passes `--verify`
/// if that ran.
pub(crate) fn is_as_it_should_be(has_adapter: bool, moved: Option<Moved>, verdict: Option<Verdict>) -> bool {
    let base_is_untouched = has_adapter || moved.is_none_or(|moved| moved.identical);
    base_is_untouched && verdict.is_none_or(Verdict::passes)
}

/// The largest difference of two runs' logits; infinite where one is not a number, or one run has more of them.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() {
        return f32::INFINITY;
    }
    let difference = |(a, b): (&f32, &f32)| match (a - b).abs() {
        nan if nan.is_nan() => f32::INFINITY,
        difference => difference,
    };
    a.iter().zip(b).map(difference).fold(0.0, f32::max)
}

/// The sizes that determine a model's rounding errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Roundings {
    pub(crate) layers: usize,
    /// Terms of the longest sum.
    pub(crate) terms: usize,
    pub(crate) dtype: DType,
}

impl Roundings {
    /// The difference from the merged model's logits that rounding alone explains.
    ///
    /// This is a model, not a bound: a worst-case bound would let any adapter pass. It assumes that roundings are
    /// independent, that their root mean square is under half the unit roundoff `u` of the dtype relative to the
    /// rounded value, and that no rounded value exceeds the residual stream. A layer has 28 roundings: 17 in the
    /// attention half (2 norm, 2 weights, 2 deltas, 2 products, 2 head norm, 3 rope, 2 scores, 1 softmax, 1 sum) and 11
    /// in the other (2 norm, 2 weights, 2 deltas, 2 products, 2 activation, 1 sum). They add up to `½ u √(28 layers)`
    /// of the hidden state, and to as much of the largest logit, whose own rounding adds at most `u`. Experts have at
    /// most 2 more, of the router's weights and of the combine, but most of theirs average out over several experts. A
    /// gated delta net has no more than attention; those of a shared expert are of a part of the sum.
    /// The model does not hold if rounding sends a token to another expert. Every product also sums up to `k` terms in
    /// `f32`, in both models: `2k` more roundings of `f32` for each product.
    #[expect(clippy::cast_possible_truncation, reason = "a tolerance")]
    fn tolerance(self, logits: &[f32]) -> f32 {
        let largest = logits.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
        let roundings = 28.0 * self.layers as f64;
        let (u, u_f32) = (self.dtype.unit_roundoff(), DType::F32.unit_roundoff());
        let hidden = 0.5 * (roundings * (u * u + 2.0 * self.terms as f64 * u_f32 * u_f32)).sqrt();
        (f64::from(largest) * (hidden + u)) as f32
    }
}
