//! Ground truth: one token at a time, in `f64`, as obvious as it can be. Shares no code with what it judges.

pub mod experts;

/// A module's factors, as PEFT stores them.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    /// A, `[rank, in]`, row-major.
    pub a: &'a [f64],
    /// B, `[out, rank]`, row-major.
    pub b: &'a [f64],
    /// The rank.
    pub rank: usize,
    /// What the product is multiplied by.
    pub scaling: f64,
}

/// What an adapter adds to one output, or a sum with it, and how large the numbers were that it was summed from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta {
    /// `s · Σ B A x`
    pub value: f64,
    /// `|s| · Σ |B| |A| |x|`: what bounds on rounding errors are proportional to.
    pub magnitude: f64,
}

/// What an adapter adds to one token of a linear layer: `s · B (A x)`, for each output.
pub fn linear(x: &[f64], factors: Factors<'_>) -> Vec<Delta> {
    let Factors { a, rank, .. } = factors;
    let v = |r: usize, of: fn(f64) -> f64| (0..x.len()).map(|k| of(a[r * x.len() + k] * x[k])).sum();
    let values: Vec<f64> = (0..rank).map(|r| v(r, |product| product)).collect();
    let magnitudes: Vec<f64> = (0..rank).map(|r| v(r, f64::abs)).collect();
    expand(&values, &magnitudes, factors)
}

/// What an adapter adds to one token of an embedding of `vocab` rows: `s · B A[:, id]`, for each feature.
pub fn embedding(id: usize, vocab: usize, factors: Factors<'_>) -> Vec<Delta> {
    let values: Vec<f64> = (0..factors.rank).map(|r| factors.a[r * vocab + id]).collect();
    let magnitudes: Vec<f64> = values.iter().map(|value| value.abs()).collect();
    expand(&values, &magnitudes, factors)
}

fn expand(values: &[f64], magnitudes: &[f64], Factors { b, rank, scaling, .. }: Factors<'_>) -> Vec<Delta> {
    b.chunks(rank)
        .map(|b| Delta {
            value: scaling * (0..rank).map(|r| b[r] * values[r]).sum::<f64>(),
            magnitude: scaling.abs() * (0..rank).map(|r| b[r].abs() * magnitudes[r]).sum::<f64>(),
        })
        .collect()
}
