//! Which mode adds least to a linear layer.

use super::{
    forward::ForwardPlan,
    linear::LinearPlan,
    thresholds::mode::{BASE_TO_FACTORS, BASE_TO_FACTORS_DOWN, FEW, FEW_ONCE},
};

/// How the delta of a linear layer is computed beside its base GEMM. The documentation of `cuda` describes the modes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Mode {
    /// `write_delta` before the GEMM, which accumulates; or `add_delta` after one that cannot.
    First,
    /// `FusedLinear::forward` instead of the GEMM.
    Fused,
}

impl LinearPlan {
    /// The mode with which the layer takes least time in a batch of `num_tokens` tokens. `ranks` is the sum of the ranks of the distinct
    /// adapters in the batch. `fused` is the layer's fused linear, if it has one.
    ///
    /// The choice comes from measurements on an H200 in bf16, beside cuBLASLt's GEMMs (`benches/record/h200/layer.json`): in each of
    /// them, the layer takes at most 5 % longer than with the best mode, on an H100 (`benches/record/h100/layer.json`) at most 7 %. An
    /// expand within the operation behind the layer is not chosen, because it depends on that operation.
    pub fn fastest_mode(&self, num_tokens: usize, ranks: usize, fused: Option<&ForwardPlan>) -> Mode {
        let (in_features, out_features) = (self.in_features(), self.out_features().iter().sum::<usize>());
        let factors = ranks * (self.out_features().len() * in_features + out_features);
        let has_base_of = |times: usize| factors * times <= in_features * out_features;
        let is_fastest_fused = |fused: &ForwardPlan| {
            let (few_tokens, of_few) = if fused.reads_input_once() { FEW_ONCE } else { FEW };
            let base_to_factors = match num_tokens <= few_tokens {
                true => of_few,
                false if in_features > out_features => BASE_TO_FACTORS_DOWN,
                false => BASE_TO_FACTORS,
            };
            num_tokens <= fused.max_tokens() && has_base_of(base_to_factors)
        };
        if fused.is_some_and(is_fastest_fused) { Mode::Fused } else { Mode::First }
    }
}
