//! A gated delta net on the CPU: its short convolution and its recurrence, token by token.

use std::ops::Range;

use aril::Element;
use rayon::prelude::*;

use super::{Cpu, Tensor, dot, for_rows, normalize, round, sigmoid, silu};
use crate::{
    config::DeltaHeads,
    device::{DeltaNet, Places},
    error::Result,
};

/// Added to the squares of a query's and a key's length.
const LENGTH_EPS: f32 = 1e-6;

/// What a gated delta net keeps of sequences.
#[derive(Debug)]
pub struct States<T> {
    heads: DeltaHeads,
    /// The last inputs of the convolution: `[sequences, taps - 1, convolved features]`.
    inputs: Vec<T>,
    /// `[sequences, value heads, key_dim, value_dim]`
    matrices: Vec<f32>,
}

impl<T: Element> States<T> {
    pub(super) fn new(sequences: usize, heads: DeltaHeads) -> Result<Self> {
        let (mut inputs, mut matrices) = (Vec::new(), Vec::new());
        let lens = [(heads.taps - 1) * heads.convolved_features(), heads.value * heads.state_elems()];
        let [of_inputs, of_matrices] = lens.map(|len| sequences * len);
        inputs.try_reserve_exact(of_inputs)?;
        inputs.resize(of_inputs, T::default());
        matrices.try_reserve_exact(of_matrices)?;
        matrices.resize(of_matrices, 0.0);
        Ok(Self { heads, inputs, matrices })
    }

    pub(super) fn run(&mut self, x: &Tensor<T>, net: &DeltaNet<Cpu<T>>, places: &Places<Cpu<T>>) -> Tensor<T> {
        let cols = self.heads.value_features();
        let mut data = vec![T::default(); x.rows() * cols];
        let mut end = 0;
        for run in places.sequences.chunk_by(|a, b| a == b) {
            let tokens = end..end + run.len();
            end = tokens.end;
            let state = places.table.states[run[0] as usize] as usize;
            if places.positions[tokens.start] == 0 {
                self.clear(state);
            }
            self.run_sequence(x, net, tokens.clone(), state, &mut data[tokens.start * cols..tokens.end * cols]);
        }
        Tensor { cols, data }
    }

    fn clear(&mut self, state: usize) {
        let (inputs, matrices) = self.of(state);
        inputs.fill(T::default());
        matrices.fill(0.0);
    }

    /// What is kept of a sequence.
    fn of(&mut self, state: usize) -> (&mut [T], &mut [f32]) {
        let DeltaHeads { value, taps, .. } = self.heads;
        let [inputs, matrices] = [(taps - 1) * self.heads.convolved_features(), value * self.heads.state_elems()];
        (&mut self.inputs[state * inputs..][..inputs], &mut self.matrices[state * matrices..][..matrices])
    }

    /// Consecutive tokens of a sequence.
    fn run_sequence(
        &mut self,
        x: &Tensor<T>,
        net: &DeltaNet<Cpu<T>>,
        tokens: Range<usize>,
        state: usize,
        out: &mut [T],
    ) {
        let heads @ DeltaHeads { key, value, key_dim, value_dim, taps } = self.heads;
        let (convolved, values) = (heads.convolved_features(), heads.value_features());
        let row = |token: usize| &x.data[token * x.cols..][..x.cols];
        let (kept, matrices) = self.of(state);

        // The inputs in front of the tokens, and theirs.
        let mut inputs = kept.to_vec();
        tokens.clone().for_each(|token| inputs.extend_from_slice(&row(token)[..convolved]));
        kept.copy_from_slice(&inputs[tokens.len() * convolved..]);
        let mut qkv = vec![T::default(); tokens.len() * convolved];
        for_rows(&mut qkv, convolved, &|token, out| {
            for (feature, out) in out.iter_mut().enumerate() {
                let weights = &net.taps.data[feature * taps..][..taps];
                let inputs = inputs[token * convolved + feature..].iter().step_by(convolved);
                let sum: f32 = weights.iter().zip(inputs).map(|(weight, x)| weight.to_f32() * x.to_f32()).sum();
                *out = T::from_f32(silu(round::<T>(sum)));
            }
        });

        let of_head = |(head, matrix): (usize, &mut [f32])| {
            let (decay_rate, bias) = (net.a_log.data[head].to_f32().exp(), net.dt_bias.data[head].to_f32());
            let key_start = head / (value / key) * key_dim;
            let mut result = Vec::with_capacity(tokens.len() * value_dim);
            for (token, qkv) in tokens.clone().zip(qkv.chunks_exact(convolved)) {
                let (z, of_heads) = row(token)[convolved..].split_at(values);
                let query = unit(&qkv[key_start..][..key_dim], (key_dim as f32).sqrt().recip());
                let key = unit(&qkv[key * key_dim + key_start..][..key_dim], 1.0);
                let v = &qkv[2 * net.heads.key * key_dim + head * value_dim..][..value_dim];
                let beta = round::<T>(sigmoid(of_heads[head].to_f32()));
                let decay = (-decay_rate * softplus(of_heads[value + head].to_f32() + bias)).exp();
                let mut out = delta_rule(matrix, (&query, &key, v), beta, decay);
                normalize(&mut out, &net.norm);
                let z = &z[head * value_dim..];
                result.extend(out.iter().zip(z).map(|(out, z)| T::from_f32(out.to_f32() * silu(z.to_f32()))));
            }
            result
        };
        let results: Vec<Vec<T>> =
            matrices.par_chunks_exact_mut(key_dim * value_dim).enumerate().map(of_head).collect();
        for (token, out) in out.chunks_exact_mut(values).enumerate() {
            for (out, result) in out.chunks_exact_mut(value_dim).zip(&results) {
                out.copy_from_slice(&result[token * value_dim..][..value_dim]);
            }
        }
    }
}

/// A step of the recurrence of a value head, and its result.
fn delta_rule<T: Element>(
    matrix: &mut [f32],
    (query, key, value): (&[f32], &[f32], &[T]),
    beta: f32,
    decay: f32,
) -> Vec<T> {
    let dim = value.len();
    let mut known = vec![0.0; dim];
    for (row, key) in matrix.chunks_exact_mut(dim).zip(key) {
        for (element, known) in row.iter_mut().zip(&mut known) {
            *element *= decay;
            *known += *element * key;
        }
    }
    let delta: Vec<f32> = value.iter().zip(known).map(|(value, known)| (value.to_f32() - known) * beta).collect();
    let mut sums = vec![0.0; dim];
    for ((row, key), query) in matrix.chunks_exact_mut(dim).zip(key).zip(query) {
        for ((element, delta), sum) in row.iter_mut().zip(&delta).zip(&mut sums) {
            *element += key * delta;
            *sum += *element * query;
        }
    }
    sums.into_iter().map(T::from_f32).collect()
}

/// The vector divided by its length, times a factor.
fn unit<T: Element>(x: &[T], factor: f32) -> Vec<f32> {
    let scale = 1.0 / (dot(x, x) + LENGTH_EPS).sqrt();
    x.iter().map(|x| x.to_f32() * scale * factor).collect()
}

fn softplus(x: f32) -> f32 {
    // Beyond this, f32 has no digit for the difference.
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
