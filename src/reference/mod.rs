//! The reference: one token at a time, in `f64`, written to be obviously correct. It shares no code with the backends that tests
//! compare with it.

pub mod experts;

/// The factors of one module, in PEFT's layout.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    /// A `[rank, in]`, row-major.
    pub a: &'a [f64],
    /// B `[out, rank]`, row-major.
    pub b: &'a [f64],
    /// The rank.
    pub rank: usize,
    /// The scaling, α/r or α/√r, times any scale of the token.
    pub scaling: f64,
}

/// One output of a delta or of a sum with one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Delta {
    /// The value: `s · Σ B A x`.
    pub value: f64,
    /// The sum of absolute values, `|s| · Σ |B| |A| |x|`. Bounds on rounding errors are proportional to it.
    pub magnitude: f64,
}

/// The delta of one token in a linear layer: `s · B (A x)`, by output.
pub fn linear(x: &[f64], factors: Factors<'_>) -> Vec<Delta> {
    let Factors { a, rank, .. } = factors;
    let v = |r: usize, of: fn(f64) -> f64| (0..x.len()).map(|k| of(a[r * x.len() + k] * x[k])).sum();
    let values: Vec<f64> = (0..rank).map(|r| v(r, |product| product)).collect();
    let magnitudes: Vec<f64> = (0..rank).map(|r| v(r, f64::abs)).collect();
    expand(&values, &magnitudes, factors)
}

/// The delta of one token in an embedding of `vocab` rows: `s · B A[:, id]`, by feature.
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
