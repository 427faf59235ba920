//! Which mode adds least to a linear layer.

use super::{
    forward::ForwardPlan,
    linear::LinearPlan,
    thresholds::mode::{BASE_TO_FACTORS, BASE_TO_FACTORS_DOWN, FUSED_TOKENS, LEAST_BASE_TO_FACTORS},
};

/// How the delta of a linear layer is computed beside its base GEMM. The documentation of `cuda` describes the modes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Mode {
    /// `add_delta` after the GEMM.
    After,
    /// `write_delta` before the GEMM, which accumulates.
    First,
    /// `FusedLinear::forward` instead of the GEMM.
    Fused,
}

impl LinearPlan {
    /// The mode with which the layer takes least time in a batch of `num_tokens` tokens. `ranks` is the sum of the ranks of the distinct
    /// adapters in the batch. `fused` is the layer's fused linear, if it has one.
    ///
    /// The choice comes from measurements on an H200 in bf16, behind cuBLASLt's GEMMs (`benches/record/h200/layer.json`): in each of
    /// them, the layer takes at most 5 % longer than with the best mode, on an H100 (`benches/record/h100/layer.json`) at most 9 %. Shrink
    /// on a second stream adds least in few of them, by at most 2.2 % of the layer on the H200 and 3.5 % on the H100, so it is not chosen;
    /// nor is an expand within the operation behind the layer, which depends on that operation. An engine whose GEMM cannot accumulate
    /// takes [`Mode::After`] for [`Mode::First`].
    pub fn fastest_mode(&self, num_tokens: usize, ranks: usize, fused: Option<&ForwardPlan>) -> Mode {
        let (in_features, out_features) = (self.in_features(), self.out_features().iter().sum::<usize>());
        let factors = ranks * (self.out_features().len() * in_features + out_features);
        let has_base_of = |times: usize| factors * times <= in_features * out_features;
        let base_to_factors = if in_features > out_features { BASE_TO_FACTORS_DOWN } else { BASE_TO_FACTORS };
        let is_fastest_fused = |fused: &ForwardPlan| {
            let most = match fused.reads_input_once() {
                true if has_base_of(base_to_factors) => fused.max_tokens(),
                false if !has_base_of(LEAST_BASE_TO_FACTORS) => 0,
                _ => FUSED_TOKENS,
            };
            num_tokens <= most.min(fused.max_tokens())
        };
        if fused.is_some_and(is_fastest_fused) {
            Mode::Fused
        } else if out_features > 2 * in_features {
            // y is by far the larger operand. The GEMM reads it; `add_delta` would read and write it.
            Mode::First
        } else {
            Mode::After
        }
    }
}
