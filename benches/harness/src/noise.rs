//! Random numbers on the host that stand for far more of them on the device: what is there repeats.

use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rayon::prelude::*;

/// `bf16` numbers without end, uniform around zero.
pub struct Noise {
    values: Vec<bf16>,
}

impl Noise {
    /// Repeats after `period` numbers: a prime, so that no two rows of a matrix are alike.
    pub fn new(seed: u64, period: usize, deviation: f32) -> Self {
        const CHUNK: usize = 1 << 16;
        let limit = deviation * 3.0_f32.sqrt();
        let mut values = vec![bf16::ZERO; period];
        values.par_chunks_mut(CHUNK).enumerate().for_each(|(index, chunk)| {
            let mut rng = StdRng::seed_from_u64(seed ^ ((index as u64) << 16));
            chunk.fill_with(|| bf16::from_f32(rng.random_range(-limit..limit)));
        });
        Self { values }
    }

    /// Those before they repeat.
    pub fn period(&self) -> &[bf16] {
        &self.values
    }

    /// The `index`th of them.
    pub fn at(&self, index: usize) -> bf16 {
        self.values[index % self.values.len()]
    }

    /// `len` of them from the `start`th on.
    pub fn range(&self, start: usize, len: usize) -> impl Iterator<Item = bf16> {
        let start = start % self.values.len();
        self.values[start..].iter().chain(self.values.iter().cycle()).take(len).copied()
    }
}
