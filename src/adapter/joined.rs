//! The factors of a module, of one adapter or of several that apply together.
//!
//! Those of several adapters are joined along the rank, in the order of the adapters: rows of A, and columns of B. So
//! `B A` is the sum of their products, and their sums of one output are one sum.

use std::ops::Range;

use super::{
    error::AdapterError,
    tensor::{View, all},
};
use crate::{Element, model::MAX_RANK};

/// The factors of a module, one after the other along the rank.
#[derive(Clone, Debug)]
pub(super) struct Pair<'a> {
    factors: Vec<Factors<'a>>,
}

/// The factors of a module in one adapter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors<'a> {
    /// Path of the module, as the adapter spells it.
    pub(super) path: &'a str,
    /// `[rank, in_features]`
    pub(super) a: View<'a>,
    /// `[out_features, rank]`
    pub(super) b: View<'a>,
    /// Times what the adapter itself is multiplied by.
    pub(super) scaling: f32,
}

impl Factors<'_> {
    /// The same, of an adapter that is multiplied by `scale`.
    pub(super) fn scaled(self, scale: f32) -> Result<Self, AdapterError> {
        #[expect(clippy::cast_possible_truncation, reason = "rounds to nearest; values out of range are refused")]
        let scaling = (f64::from(self.scaling) * f64::from(scale)) as f32;
        if scaling.is_normal() || self.scaling == 0.0 || scale == 0.0 {
            return Ok(Self { scaling, ..self });
        }
        Err(AdapterError::CombinedScaling { module: self.path.to_owned(), scaling: self.scaling, scale })
    }
}

impl<'a> Pair<'a> {
    pub(super) fn new(factors: Factors<'a>) -> Self {
        Self { factors: vec![factors] }
    }

    /// Joins those of the next adapter.
    pub(super) fn join(&mut self, next: Factors<'a>) -> Result<(), AdapterError> {
        self.factors.push(next);
        let rank = self.rank();
        if rank > MAX_RANK {
            return Err(AdapterError::CombinedRank { module: next.path.to_owned(), rank });
        }
        Ok(())
    }

    pub(super) fn is_of_one(&self) -> bool {
        self.factors.len() == 1
    }

    pub(super) fn rank(&self) -> usize {
        self.factors.iter().map(|factors| factors.b.cols).sum()
    }

    /// These ranks of A, in each adapter.
    pub(super) fn a(&self, ranks: Range<usize>) -> impl Iterator<Item = View<'a>> {
        let mut next = 0;
        self.factors.iter().map(move |&Factors { a, .. }| {
            let first = next;
            next += a.rows;
            let of_adapter = |rank: usize| rank.clamp(first, next) - first;
            a.rows(of_adapter(ranks.start)..of_adapter(ranks.end))
        })
    }

    /// B of each adapter.
    pub(super) fn b(&self) -> impl Iterator<Item = View<'a>> {
        self.factors.iter().map(|factors| factors.b)
    }

    /// What `B A x` is multiplied by: the scaling, if all adapters have the same. If not, the elements of A are
    /// multiplied, and this is the power of two that leaves them as large as they are.
    pub(super) fn scaling(&self) -> f32 {
        let scalings = || self.factors.iter().map(|factors| factors.scaling);
        let first = scalings().next().unwrap_or_default();
        if scalings().all(|scaling| scaling == first) {
            return first;
        }
        let largest = scalings().fold(0.0, |largest: f32, scaling| largest.max(scaling.abs()));
        f32::from_bits(largest.to_bits() & f32::INFINITY.to_bits())
    }

    /// What A of each adapter is multiplied by, none of one adapter alone.
    pub(super) fn multipliers(&self) -> Vec<f32> {
        let scaling = self.scaling();
        let multiplier =
            |factors: &Factors<'_>| if factors.scaling == scaling { 1.0 } else { factors.scaling / scaling };
        let factors = self.factors.iter().filter(|_| !self.is_of_one());
        factors.map(multiplier).collect()
    }

    /// Whether both have the same A, because it is stored once.
    pub(super) fn has_stored_a_of(&self, other: &Self) -> bool {
        self.has_like(other, |factors, other| Ok(factors.a.is_stored_as(&other.a))).unwrap_or(false)
    }

    /// Whether both have the same A, bit for bit. Reads them as far as they are equal.
    pub(super) fn has_a_of(&self, other: &Self) -> Result<bool, AdapterError> {
        self.has_like(other, |factors, other| factors.a.same(&other.a))
    }

    /// As [`has_a_of`](Self::has_a_of), of B.
    pub(super) fn has_b_of(&self, other: &Self) -> Result<bool, AdapterError> {
        let factors = self.factors.iter().zip(&other.factors);
        let is_same = self.factors.len() == other.factors.len();
        Ok(is_same && all(factors.map(|(factors, other)| factors.b.same(&other.b)))?)
    }

    /// Whether the factors of all adapters are alike, and A is multiplied by the same.
    fn has_like(
        &self,
        other: &Self,
        is_like: impl Fn(&Factors<'a>, &Factors<'a>) -> Result<bool, AdapterError>,
    ) -> Result<bool, AdapterError> {
        let factors = self.factors.iter().zip(&other.factors);
        let is_same = self.factors.len() == other.factors.len() && self.multipliers() == other.multipliers();
        Ok(is_same && all(factors.map(|(factors, other)| is_like(factors, other)))?)
    }
}

/// The product, rounded once.
#[inline]
pub(super) fn multiplied<S: Element, T: Element>(value: S, multiplier: f32) -> T {
    if multiplier == 1.0 {
        return T::from_f32(value.to_f32());
    }
    // Exact, as is what follows but for the last rounding.
    let product = f64::from(value.to_f32()) * f64::from(multiplier);
    #[expect(clippy::cast_possible_truncation, reason = "rounds to the nearest")]
    let nearest = product as f32;
    if T::DTYPE == crate::DType::F32 || f64::from(nearest) == product || product.is_nan() {
        return T::from_f32(nearest);
    }
    // Cut off, and odd: it is rounded as what it was cut from.
    let is_larger = f64::from(nearest).abs() > product.abs();
    T::from_f32(f32::from_bits((nearest.to_bits() - u32::from(is_larger)) | 1))
}
