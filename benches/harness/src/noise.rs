//! Random numbers that repeat: a short sequence on the host stands for a long one on the device.

use half::bf16;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rayon::prelude::*;

/// An endless sequence of `bf16` numbers, uniform around zero.
pub struct Noise {
    values: Vec<bf16>,
}

impl Noise {
    /// Repeats after `period` numbers. A prime keeps the rows of a matrix different.
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

    /// The numbers of one period.
    pub fn period(&self) -> &[bf16] {
        &self.values
    }

    /// The number at `index`.
    pub fn at(&self, index: usize) -> bf16 {
        self.values[index % self.values.len()]
    }

    /// `len` numbers from `start` on.
    pub fn range(&self, start: usize, len: usize) -> impl Iterator<Item = bf16> {
        let start = start % self.values.len();
        self.values[start..].iter().chain(self.values.iter().cycle()).take(len).copied()
    }
}
