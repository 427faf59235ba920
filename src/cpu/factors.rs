//! Products with a module's factors, in the layout of an adapter's block.

use crate::{
    Element,
    adapter::{
        ImageEntry,
        layout::{B, CORE, CORE_ELEMS, EmbeddingA, LinearA, TILE_ELEMS, TILE_FEATURES, TILE_RANKS},
    },
};

/// The factors of a module, in the layout of [`adapter::layout`](crate::adapter::layout).
#[derive(Clone, Copy)]
pub(super) struct Factors<'a, T> {
    a: &'a [T],
    b: &'a [T],
    /// Rows of A on this tensor-parallel rank.
    a_rank: usize,
    rank: usize,
    scaling: f32,
}

impl<'a, T: Element> Factors<'a, T> {
    /// The factors of an entry.
    pub(super) fn new(block: &'a [T], entry: &ImageEntry) -> Self {
        let &ImageEntry { a_elems, a_rank, b_elems, rank, scaling, .. } = entry;
        Self { a: &block[a_elems..], b: &block[b_elems..], a_rank, rank, scaling }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn scaling(&self) -> f32 {
        self.scaling
    }

    /// Whether both refer to the same A, rather than to equal ones.
    pub(super) fn share_a(&self, other: &Self) -> bool {
        std::ptr::eq(self.a, other.a)
    }

    /// Whether both refer to the same B, rather than to equal ones.
    pub(super) fn share_b(&self, other: &Self) -> bool {
        std::ptr::eq(self.b, other.b)
    }

    /// Writes `A x`, one element for each row of A on this rank.
    pub(super) fn shrink(&self, x: &[T], v: &mut [f32]) {
        let layout = LinearA { rank: self.a_rank, in_features: x.len() };
        for (i, v) in v[..self.a_rank].chunks_mut(TILE_RANKS).enumerate() {
            // Eight interleaved sums per rank, so that the loop vectorizes.
            let mut sums = [[0.0; CORE]; TILE_RANKS];
            for (k, x) in x.chunks(CORE).enumerate() {
                let x = padded(x.iter().map(|x| x.to_f32()));
                add_products(&self.a[layout.at(i * TILE_RANKS, k * CORE)..][..CORE_ELEMS], &x, &mut sums);
            }
            v.iter_mut().zip(sums).for_each(|(v, sums)| *v = sums.iter().sum());
        }
    }

    /// `A[:, id]` of an embedding.
    pub(super) fn look_up(&self, vocab: usize, id: usize) -> Vec<f32> {
        let row = EmbeddingA { vocab, rank: self.rank }.at(id, 0);
        self.a[row..][..self.rank].iter().map(|a| a.to_f32()).collect()
    }

    /// `y += scale · scaling · B v`.
    pub(super) fn expand(&self, v: &[f32], scale: f32, y: &mut [T]) {
        self.delta(v, scale, y.len(), |output, delta| y[output] = T::from_f32(y[output].to_f32() + delta));
    }

    /// Calls `put` with each output and its element of `scale · scaling · B v`.
    pub(super) fn delta(&self, v: &[f32], scale: f32, out_features: usize, mut put: impl FnMut(usize, f32)) {
        let scale = scale * self.scaling;
        self.product(v, out_features, |output, product| put(output, scale * product));
    }

    /// Calls `put` with each output and its element of `B v`.
    pub(super) fn product(&self, v: &[f32], out_features: usize, mut put: impl FnMut(usize, f32)) {
        let layout = B { out_features, rank: self.rank };
        for begin in (0..out_features).step_by(TILE_FEATURES) {
            // Outputs in the order of the cores' rows, with eight interleaved sums each.
            let mut sums = [[0.0; CORE]; TILE_FEATURES];
            for (i, v) in v[..self.rank].chunks(TILE_RANKS).enumerate() {
                let v = padded(v.iter().copied());
                add_products(&self.b[layout.at(begin, i * TILE_RANKS)..][..TILE_ELEMS], &v, &mut sums);
            }
            for output in 0..TILE_FEATURES.min(out_features - begin) {
                put(begin + output, sums[layout.at(output, 0) / CORE].iter().sum());
            }
        }
    }
}

/// Adds the products of each row with `x` to the row's eight partial sums.
fn add_products<T: Element>(rows: &[T], x: &[f32; CORE], sums: &mut [[f32; CORE]]) {
    for (row, sums) in rows.as_chunks::<CORE>().0.iter().zip(sums) {
        for lane in 0..CORE {
            sums[lane] += row[lane].to_f32() * x[lane];
        }
    }
}

/// The values, followed by zeros.
fn padded(values: impl Iterator<Item = f32>) -> [f32; CORE] {
    let mut padded = [0.0; CORE];
    padded.iter_mut().zip(values).for_each(|(padded, value)| *padded = value);
    padded
}
