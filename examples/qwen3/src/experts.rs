//! The experts of the base model: two formats of weights behind one trait that multiplies with them.
//!
//! LoRA does not depend on the format. Both bases get the same deltas, so their results differ only by the rounding of
//! the weights to 4 or 8 bits.

use std::borrow::Cow;

use crate::{device::Device, error::Result};

/// One projection of all experts on this rank. Its products fail as operations of a [`Device`] do.
#[expect(clippy::missing_errors_doc, reason = "the trait has it, once for all products")]
pub trait GroupedGemm<D: Device> {
    /// `x W[expert]ᵀ` of every route, rounded once. `x` and the result have a row for each route, sorted by expert.
    /// Rows of the result that belong to no route have any value.
    fn run(&self, device: &D, x: &D::Tensor, routes: &D::Routes) -> Result<D::Tensor>;

    /// [`run`](Self::run), with a row of `x` for each token.
    fn run_on_tokens(&self, device: &D, x: &D::Tensor, routes: &D::Routes) -> Result<D::Tensor> {
        self.run(device, &device.rows_of_routes(x, routes)?, routes)
    }

    /// [`Device::activate`] of [`run_on_tokens`](Self::run_on_tokens) without adapters, if one kernel does both.
    #[cfg(feature = "cuda")]
    fn run_activated(&self, _device: &D, _x: &D::Tensor, _routes: &D::Routes) -> Result<Option<D::Tensor>> {
        Ok(None)
    }
}

/// The number of experts on this rank, and the shape of each one's weight.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsShape {
    /// Experts on this rank.
    pub experts: usize,
    /// Output features of each.
    pub out_features: usize,
    /// Input features of each.
    pub in_features: usize,
}

/// The weights of one projection of all experts on this rank, `[experts, out, in]`.
#[derive(Debug)]
pub enum ExpertWeights<'a, T: Clone> {
    /// In parts that follow each other.
    Plain(Vec<Cow<'a, [T]>>),
    /// 4 or 8 bits each, with scales.
    Packed(Packed),
}

/// The integers of packed weights, which have a sign.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Integers {
    /// Of 4 bits.
    Int4 = 4,
    /// Of 8 bits.
    Int8 = 8,
}

/// How weights are packed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Packing {
    /// What stands for the elements.
    pub integers: Integers,
    /// Consecutive elements of a row that share a scale. Rows are whole groups.
    pub group: usize,
}

impl Packing {
    /// Elements in a word.
    pub(crate) const fn per_word(self) -> usize {
        u32::BITS as usize / self.integers as usize
    }
}

/// A matrix of integers with sign, which compressed-tensors calls "pack-quantized": an element is its integer times the
/// scale of its group, exactly, as no kernel rounds that product.
#[derive(Clone, Debug)]
pub struct Packed {
    /// Its form.
    pub packing: Packing,
    /// `[rows, cols / per_word]`: the first of a word in the lowest bits, each plus half of the integers' number.
    pub(crate) words: Vec<u32>,
    /// `[rows, cols / group]`
    pub scales: Vec<f32>,
}

impl Packed {
    /// The elements of consecutive groups.
    pub fn values(&self) -> impl Iterator<Item = f32> {
        let Packing { integers, group } = self.packing;
        let words = self.words.chunks_exact(group / self.packing.per_word());
        words.zip(&self.scales).flat_map(move |(words, &scale)| {
            words.iter().flat_map(move |&word| values_of(word, integers)).map(move |integer| integer * scale)
        })
    }

    /// The rows of both matrices, this one's first.
    pub fn append(&mut self, mut below: Self) {
        self.words.append(&mut below.words);
        self.scales.append(&mut below.scales);
    }

    /// Splits the matrix into matrices of `rows` rows each; the last one has the remaining rows.
    pub fn split(&self, rows: usize, cols: usize) -> impl Iterator<Item = Self> {
        let words = self.words.chunks(rows * cols / self.packing.per_word());
        let scales = self.scales.chunks(rows * cols / self.packing.group);
        words.zip(scales).map(|(words, scales)| Self {
            packing: self.packing,
            words: words.to_vec(),
            scales: scales.to_vec(),
        })
    }
}

fn values_of(word: u32, integers: Integers) -> impl Iterator<Item = f32> {
    let bits = integers as u32;
    let zero = (1 << (bits - 1)) as f32;
    (0..u32::BITS / bits).map(move |place| (word >> (bits * place) & ((1 << bits) - 1)) as f32 - zero)
}
