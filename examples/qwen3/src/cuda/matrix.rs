//! Matrices in device memory.

use std::{fmt::Display, result};

use aril::{
    Element,
    cuda::{self, Buffer, LaunchError},
};
use cudarc::driver::{CudaSlice, DeviceRepr, result::memset_d8_async};

use super::{Cuda, arena::Memory};
use crate::error::{Error, Result};

/// A row-major matrix in device memory, at the start of an allocation. All its uses are on one stream.
pub struct Matrix<T: 'static> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Elements between the beginnings of rows: more than `cols` if v follows.
    pub(super) stride: usize,
    /// Of a base weight, the rows of the stack behind its own.
    pub(super) stacked: usize,
    pub(super) data: Memory<T>,
    /// For the example's own kernels.
    pub address: u64,
}

impl<V> Matrix<V> {
    /// Elements.
    #[expect(clippy::len_without_is_empty, reason = "a matrix has elements")]
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub(super) fn view(&self) -> cuda::View<'_, V> {
        self.data.slice(0..self.len())
    }

    /// All elements, with those between rows.
    pub(super) fn extent(&self) -> usize {
        self.rows * self.stride
    }

    /// The matrix as the library's operand.
    pub(super) fn operand(&self) -> Result<cuda::Matrix<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::Matrix::strided(self.data.slice(0..self.extent()), self.rows, self.cols, self.stride)?)
    }

    pub(super) fn operand_mut(&mut self) -> Result<cuda::MatrixMut<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::MatrixMut::strided(&mut *self.data, self.rows, self.cols, self.stride)?)
    }

    /// The matrix with its columns of v.
    pub(super) fn stacked(&self) -> Result<cuda::Matrix<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::Matrix::new(self.data.slice(0..self.extent()), self.rows, self.stride)?)
    }

    pub(super) fn stacked_mut(&mut self) -> Result<cuda::MatrixMut<'_, V>>
    where
        V: Element,
    {
        Ok(cuda::MatrixMut::new(&mut *self.data, self.rows, self.stride)?)
    }
}

impl<T: Element + DeviceRepr> Cuda<T> {
    /// The uninitialized output of a layer. With `stacked`, its rows have room for v.
    pub(super) fn output(&self, rows: usize, base: &Matrix<T>, stacked: bool) -> Result<Matrix<T>> {
        let stride = base.rows + if stacked { base.stacked } else { 0 };
        Ok(Matrix { cols: base.rows, ..self.alloc(rows, stride)? })
    }

    /// An uninitialized matrix, which must be written before it is read.
    pub(super) fn alloc<V: DeviceRepr>(&self, rows: usize, cols: usize) -> Result<Matrix<V>> {
        if !self.is_on_arena.get() {
            return self.matrix(rows, cols, self.slice(rows, cols)?);
        }
        let len = (rows * cols).max(1);
        let data = match self.arena.take(len) {
            Some(data) => data,
            None => self.arena.own(Buffer::from_slice(&self.queue, self.slice(rows, cols)?)?, len),
        };
        let address = data.device_ptr();
        Ok(Matrix { rows, cols, stride: cols, stacked: 0, data, address })
    }

    /// A matrix of zeros, which keeps its memory.
    pub(super) fn zeroed<V: DeviceRepr>(&self, rows: usize, cols: usize) -> Result<Matrix<V>> {
        let zeros = self.matrix(rows, cols, self.slice::<V>(rows, cols)?)?;
        let (bytes, stream) = (zeros.len() * size_of::<V>(), self.queue.stream());
        // SAFETY: the memory has this many bytes and is used on this stream only. Zeros are a valid value.
        unsafe { memset_d8_async(zeros.address, 0, bytes, stream.cu_stream()) }?;
        Ok(zeros)
    }

    pub(super) fn upload<V: DeviceRepr>(&self, rows: usize, cols: usize, values: &[V]) -> Result<Matrix<V>> {
        let mut slice = self.slice(rows, cols)?;
        self.queue.stream().memcpy_htod(values, &mut slice)?;
        self.matrix(rows, cols, slice)
    }

    /// The memory of a matrix.
    pub(super) fn slice<V: DeviceRepr>(&self, rows: usize, cols: usize) -> Result<CudaSlice<V>> {
        // Allocations cannot be empty.
        let len = (rows * cols).max(1);
        // SAFETY: the elements are numbers, for which any bits are a valid value.
        let slice = unsafe { self.queue.stream().alloc(len) };
        let megabytes = (len * size_of::<V>()).div_ceil(1_000_000);
        slice.memory_for(format_args!("{megabytes} MB more: {rows} x {cols}"))
    }

    pub(super) fn matrix<V: DeviceRepr>(&self, rows: usize, cols: usize, slice: CudaSlice<V>) -> Result<Matrix<V>> {
        let data = Buffer::from_slice(&self.queue, slice)?;
        let address = data.device_ptr();
        Ok(Matrix { rows, cols, stride: cols, stacked: 0, data: data.into(), address })
    }

    /// Waits for all enqueued work.
    pub(super) fn download<V: DeviceRepr + Clone + Default>(&self, matrix: &Matrix<V>) -> Result<Vec<V>> {
        self.wait()?;
        let mut values = vec![V::default(); matrix.rows * matrix.cols];
        matrix.data.read(&mut values)?;
        Ok(values)
    }
}

/// Names the allocation that failed.
pub(super) trait MemoryFor<V> {
    fn memory_for(self, what: impl Display) -> Result<V>;
}

impl<V, E: Into<LaunchError>> MemoryFor<V> for result::Result<V, E> {
    fn memory_for(self, what: impl Display) -> Result<V> {
        self.map_err(|error| match error.into() {
            error if error.is_out_of_memory() => Error::new(format!("the GPU has not enough memory for {what}")),
            error => error.into(),
        })
    }
}
