//! A matrix of all slices of a linear layer, or one of each.

use crate::model::MAX_SLICES;

/// The outputs of a linear layer: one matrix of all slices, slice after slice, or a matrix of each slice.
///
/// Operations on linear layers take [what is made into this](IntoSlices): a matrix, an array of matrices, or a
/// collected iterator. Both forms take one launch and give the same bits. The matrices may be in buffers of their own,
/// with row strides of their own, and cannot overlap.
///
/// ```
/// use aril::{cpu::{LoraLinear, Matrix, MatrixMut, Step}, error::OperandError};
///
/// /// Adds the deltas of q, k and v, with 4096, 1024 and 1024 outputs.
/// fn add(
///     qkv: &LoraLinear, step: &mut Step<'_>, x: Matrix<'_, f32>, [q, k, v]: [&mut [f32]; 3],
/// ) -> Result<(), OperandError> {
///     let tokens = step.num_tokens();
///     let y = [MatrixMut::new(q, tokens, 4096)?, MatrixMut::new(k, tokens, 1024)?, MatrixMut::new(v, tokens, 1024)?];
///     qkv.add_delta(step, x, y)
/// }
///
/// /// The same in one buffer.
/// fn add_fused(qkv: &LoraLinear, step: &mut Step<'_>, x: Matrix<'_, f32>, y: &mut [f32]) -> Result<(), OperandError> {
///     let tokens = step.num_tokens();
///     qkv.add_delta(step, x, MatrixMut::new(y, tokens, 6144)?)
/// }
/// ```
///
/// ```compile_fail,E0499
/// # use aril::{cpu::{LoraLinear, Matrix, MatrixMut, Step}, error::OperandError};
/// fn overlap(layer: &LoraLinear, step: &mut Step<'_>, x: Matrix<'_, f32>, y: &mut [f32]) -> Result<(), OperandError> {
///     layer.add_delta(step, x, [MatrixMut::new(&mut y[..8], 1, 8)?, MatrixMut::new(&mut y[4..], 1, 8)?])
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Slices<M> {
    /// The first matrices that were given, up to the first `None`.
    matrices: [Option<M>; MAX_SLICES],
    /// How many were given. No layer has more slices than the array has room for, so it refuses them by their number.
    len: usize,
}

/// The matrices up to the iterator's first `None`. An iterator is not asked again after it, where some would have more.
impl<M> FromIterator<M> for Slices<M> {
    fn from_iter<I: IntoIterator<Item = M>>(given: I) -> Self {
        let (mut matrices, mut len) = ([const { None }; MAX_SLICES], 0);
        for matrix in given {
            if let Some(place) = matrices.get_mut(len) {
                *place = Some(matrix);
            }
            len += 1;
        }
        Self { matrices, len }
    }
}

/// What an operation of a linear layer takes as [`Slices`]: a matrix, an array of matrices, or `Slices`.
#[diagnostic::on_unimplemented(
    message = "`y` is `{Self}`, but must be `{M}`, or one for each slice of the layer",
    label = "`y` has another type than this operation writes: check its element type against that of `x`"
)]
pub trait IntoSlices<M> {
    /// The matrices.
    fn into_slices(self) -> Slices<M>;
}

impl<M> IntoSlices<M> for M {
    fn into_slices(self) -> Slices<M> {
        Slices::from_iter([self])
    }
}

impl<M, const N: usize> IntoSlices<M> for [M; N] {
    fn into_slices(self) -> Slices<M> {
        Slices::from_iter(self)
    }
}

impl<M> IntoSlices<M> for Slices<M> {
    fn into_slices(self) -> Slices<M> {
        self
    }
}

impl<M> Slices<M> {
    /// How many matrices were given.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The matrices, each with its name in errors.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &M)> {
        let names = self.names();
        self.matrices.iter().map_while(Option::as_ref).enumerate().map(move |(slice, matrix)| (names[slice], matrix))
    }

    /// [`named`](Self::named), to be changed.
    pub(crate) fn named_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut M)> {
        let names = self.names();
        self.matrices
            .iter_mut()
            .map_while(Option::as_mut)
            .enumerate()
            .map(move |(slice, matrix)| (names[slice], matrix))
    }

    /// What `to` makes of each matrix and its name.
    #[cfg(feature = "cuda")]
    pub(crate) fn try_map<N, E>(&self, mut to: impl FnMut(&'static str, &M) -> Result<N, E>) -> Result<Slices<N>, E> {
        let matrices = self.named().map(|(name, matrix)| to(name, matrix)).collect::<Result<Slices<N>, E>>()?;
        Ok(Slices { len: self.len, ..matrices })
    }

    /// What `to` makes of each matrix.
    pub(crate) fn map<N>(&self, mut to: impl FnMut(&M) -> N) -> Slices<N> {
        let matrices = self.matrices.each_ref().map(|matrix| matrix.as_ref().map(&mut to));
        Slices { matrices, len: self.len }
    }

    fn names(&self) -> [&'static str; MAX_SLICES] {
        match self.len {
            1 => ["y"; MAX_SLICES],
            _ => ["y[0]", "y[1]", "y[2]", "y[3]", "y[4]", "y[5]", "y[6]", "y[7]"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_SLICES, Slices};

    /// An iterator that has more behind its end gives what is before it. Of too many matrices, all are counted.
    #[test]
    fn matrices_end_where_the_iterator_first_does() {
        for given in [&[][..], &[7], &[7, 8, 9]] {
            let mut rest = given.iter().map(Some).chain([None, Some(&1), None, Some(&2)]);
            let slices: Slices<_> = std::iter::from_fn(|| rest.next().flatten()).collect();
            assert_eq!(slices.len(), given.len());
            assert!(slices.named().map(|(_, matrix)| *matrix).eq(given));
            assert!(slices.map(|matrix| **matrix).named().map(|(_, matrix)| matrix).eq(given));
        }
        let many: Slices<_> = (0..MAX_SLICES + 3).collect();
        assert_eq!((many.len(), many.named().count()), (MAX_SLICES + 3, MAX_SLICES));
    }
}
