//! The outputs of a layer's slices, in one buffer or in one for each.

use aril::{Element, Slices};

use super::compare::Place;

/// A matrix of all slices in its buffer or, if they are separate, a matrix of each in a buffer of its own.
pub struct SliceBuffers<T> {
    parts: Vec<(Place, Vec<T>)>,
    /// The matrix of all slices, and its buffer.
    fused: (Place, Vec<T>),
    separate: bool,
}

impl<T: Element> SliceBuffers<T> {
    /// Of the matrix in `buffer`, whose slices have so many columns. Buffers of separate slices are NaN outside the
    /// matrices, which begin at other alignments and have other strides than the columns of the fused one.
    pub fn new(buffer: &[T], place: Place, slices: &[usize], separate: bool) -> Self {
        let fused = (place, buffer.to_vec());
        if !separate {
            return Self { parts: vec![fused.clone()], fused, separate };
        }
        let mut first = 0;
        let parts = slices.iter().enumerate().map(|(i, &cols)| {
            const GUARD: usize = 64;
            let stride = [cols, cols.next_multiple_of(8), cols.next_multiple_of(8) + 8, cols + 5][i % 4];
            let own = Place { offset: GUARD + place.offset * (i % 2), cols, stride, ..place };
            let mut part = vec![T::from_f32(f32::NAN); own.at(own.rows, 0) + GUARD];
            for row in 0..own.rows {
                part[own.at(row, 0)..][..cols].copy_from_slice(&buffer[place.at(row, first)..][..cols]);
            }
            first += cols;
            (own, part)
        });
        Self { parts: parts.collect(), fused, separate }
    }

    /// Copies of the buffers.
    pub fn buffers(&self) -> Vec<Vec<T>> {
        self.parts.iter().map(|(_, buffer)| buffer.clone()).collect()
    }

    /// What `matrix` makes of each matrix's place and its buffer in `buffers`.
    pub fn matrices<B, M>(&self, buffers: impl IntoIterator<Item = B>, matrix: impl Fn(B, Place) -> M) -> Slices<M> {
        self.each(buffers, matrix).into_iter().collect()
    }

    /// [`matrices`](Self::matrices), one after the other.
    pub fn each<B, M>(&self, buffers: impl IntoIterator<Item = B>, matrix: impl Fn(B, Place) -> M) -> Vec<M> {
        self.parts.iter().zip(buffers).map(|((place, _), buffer)| matrix(buffer, *place)).collect()
    }

    /// The fused buffer with the outputs that an operation has left in these buffers.
    ///
    /// # Panics
    /// If the operation has written outside the matrices.
    pub fn merged(self, written: Vec<Vec<T>>) -> Vec<T> {
        if !self.separate {
            return written.concat();
        }
        let (fused, mut merged) = self.fused;
        let mut first = 0;
        for ((place, mut part), written) in self.parts.into_iter().zip(written) {
            let cols = place.cols;
            for row in 0..place.rows {
                let (own, at) = (place.at(row, 0)..place.at(row, cols), fused.at(row, first));
                part[own.clone()].copy_from_slice(&written[own.clone()]);
                merged[at..at + cols].copy_from_slice(&written[own]);
            }
            let bits = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
            assert!(bits(&part) == bits(&written), "the memory around a slice was written");
            first += cols;
        }
        merged
    }
}
