//! What each operation computes, as the documentation of both backends says it.

/// The text of an operation.
macro_rules! doc_of {
    (linear_add_delta) => {
        r"`y[t] += scaling · B (A x[t])`, for every token `t` whose slot has an adapter of this layer. All other rows of `y` keep every bit.

`x` is `[tokens, in_features]`. `y` is `[tokens, out_features]`, or a matrix `[tokens, outputs]` of each slice ([`Slices`](crate::Slices)):
one launch either way. In a row-parallel layer, `y` is this rank's partial sum: call this before the all-reduce."
    };
    (linear_write_delta) => {
        r"`y[t] = scaling · B (A x[t])`, or zero for tokens and slices without an adapter. For a base GEMM that accumulates into `y` (`beta = 1`).
Does not read `y`."
    };
    (linear_silu_mul) => {
        r"`out[t] = silu(gate) · up`, where gate and up are the slices of `y[t] + scaling · B v`, with `v` from the layer's `shrink` in
the step. For every token, with or without an adapter, in `f32` with one rounding. Replaces `expand` and the base's activation, and saves a pass over `y`.

The layer has two slices of equal size, gate and up. `y` is `[tokens, out_features]`, or gate and up as matrices of their own
([`Slices`](crate::Slices)). `out` is `[tokens, out_features / 2]`.

It is for batches of more than 512 tokens at ranks up to 128. Other batches have the same bits, and a plainer kernel: an expand and the
engine's own activation are as fast, or faster."
    };
    (fused_linear_forward) => {
        r"`y[t] = x[t] Wᵀ + bias + scaling · B (A x[t])`. The last term is omitted for tokens without an adapter. Does not read `y`.

`x` is `[tokens, in_features]`. `y` is `[tokens, out_features]`, or a matrix `[tokens, outputs]` of each slice ([`Slices`](crate::Slices)).
Sums are `f32`, rounded once. In a row-parallel layer, `y` is this rank's partial sum; only one rank may have the bias."
    };
    (embedding_add_delta) => {
        r"`y[t] += scaling · B A[:, token_ids[t]]`, for every token `t` whose slot has an adapter of this embedding and whose id is in the vocabulary.
All other rows of `y` keep every bit.

`token_ids` is `[tokens]`, relative to the rank's first row ([`EmbeddingSite::range`](crate::model::EmbeddingSite::range)). `y` is
`[tokens, hidden]`; of a vocabulary-parallel embedding it is this rank's partial sum."
    };
    (experts_add_gate_up_delta) => {
        r"Adds the deltas of gate and up to the rows of local routes. Rows without an adapter keep every bit.

`x` is `[tokens, hidden]`. `y` is `[routes, gate_up]`, with gate and up in the order of
[`ExpertsSite::halves`](crate::model::ExpertsSite::halves). With [`TopK::on_input`](crate::routing::TopK::on_input), `x` is not multiplied
by the router's weights; the deltas are."
    };
    (experts_write_gate_up_delta) => {
        r"Like [`add_gate_up_delta`](Self::add_gate_up_delta), but overwrites `y`: with the delta, or with zero for routes and slices that have no
adapter or are not local. For a base GEMM that accumulates into `y`. Rows that belong to no route are unchanged."
    };
    (experts_activate) => {
        r"`out[row] = activation(y[row] + delta)` for all local routes, with or without an adapter, in `f32` with one rounding. Replaces the base's
activation and saves a pass over `y`.

`x` is `[tokens, hidden]`. `y` is the output `[routes, gate_up]` of the base's gate-up, as for
[`add_gate_up_delta`](Self::add_gate_up_delta). `out` is `[routes, inter]`."
    };
    (experts_add_down_delta) => {
        r"Adds the deltas of down to the rows of local routes, before the combine. Rows without an adapter keep every bit.

`x` is the activated input `[routes, inter]`. `y` is `[routes, hidden]`, without the router's weights. With
[`TopK::on_rows`](crate::routing::TopK::on_rows), `y` includes the weights, and the deltas are multiplied by them."
    };
    (experts_write_down_delta) => {
        r"Like [`add_down_delta`](Self::add_down_delta), but overwrites `y`: with the delta, or with zero for routes that have no adapter or are not
local. For a base GEMM that accumulates into `y`. Rows that belong to no route are unchanged."
    };
    (experts_add_combined_delta) => {
        r"Adds the deltas of down after the base's combine: `y[t]` gets the sum over the local routes of token `t`, each multiplied by
[`output_weight`](crate::routing::TopK::output_weight) · [`row_weight`](crate::routing::TopK::row_weight). Rows without an adapter keep
every bit.

`x` is the activated input `[routes, inter]`, `y` is `[tokens, hidden]`."
    };
    (experts_combine) => {
        r"`out[t] = Σ output_weight · (y[row] + delta)` over the local routes of token `t`, or zero if there are none, for every token with or without
an adapter, in `f32` with one rounding. Replaces the base's combine. See [`output_weight`](crate::routing::TopK::output_weight).

`x` is the activated input `[routes, inter]`. `y` is the output `[routes, hidden]` of the base's down, without the router's weights; with
[`TopK::on_rows`](crate::routing::TopK::on_rows), it includes them, and the deltas are multiplied by them. `out` is `[tokens, hidden]`."
    };
}
