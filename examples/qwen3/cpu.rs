//! The forward's operations on the CPU.
//!
//! A token's result does not depend on what else is in the batch, bit for bit: every operation works on rows apart, and the GEMM
//! always has the same shape. Weights are kept as `f32`, which is what the GEMM takes, whatever type they were rounded to: four
//! bytes each.

use std::{iter, marker::PhantomData, ops::Range};

use aril::{
    Element, Slot,
    adapter::SlotImage,
    cpu,
    model::{EmbeddingId, LinearId, ModelSpec},
    routing::Batch,
};
use rayon::prelude::*;

use crate::{
    config::Heads,
    device::{Cache, Capacity, Device, Places, Rope},
    error::Result,
};

/// The CPU, computing on `T`.
#[derive(Debug, Default)]
pub(crate) struct Cpu<T>(PhantomData<T>);

/// A row-major matrix.
#[derive(Debug)]
pub(crate) struct Tensor<T> {
    cols: usize,
    data: Vec<T>,
}

impl<T: Element> Tensor<T> {
    fn rows(&self) -> usize {
        self.data.len() / self.cols
    }

    fn row(&self, row: u32) -> &[T] {
        &self.data[row as usize * self.cols..][..self.cols]
    }

    fn row_mut(&mut self, row: u32) -> &mut [T] {
        &mut self.data[row as usize * self.cols..][..self.cols]
    }

    /// A matrix of as many rows, each computed from the row of this one.
    fn map_rows(&self, cols: usize, compute: impl Fn(&[T], &mut [T]) + Sync) -> Self {
        let mut data = vec![T::default(); self.rows() * cols];
        data.par_chunks_mut(cols).zip(self.data.par_chunks(self.cols)).for_each(|(out, row)| compute(row, out));
        Self { cols, data }
    }
}

impl<T: Element> Device for Cpu<T> {
    type Elem = T;
    type Tensor = Tensor<T>;
    type Weight = Tensor<f32>;
    type Indices = Vec<u32>;

    fn tensor(&self, _rows: usize, cols: usize, values: &[T]) -> Result<Tensor<T>> {
        Ok(Tensor { cols, data: values.to_vec() })
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<Tensor<T>> {
        Ok(Tensor { cols, data: vec![T::default(); rows * cols] })
    }

    fn weight(&self, _rows: usize, cols: usize, values: Vec<T>) -> Result<Tensor<f32>> {
        Ok(Tensor { cols, data: values.into_par_iter().map(T::to_f32).collect() })
    }

    fn indices(&self, values: &[u32]) -> Result<Vec<u32>> {
        Ok(values.to_vec())
    }

    type Adapters = cpu::WeightTable<T>;
    type LoraLinear = cpu::LoraLinear;
    type LoraEmbedding = cpu::LoraEmbedding;
    type Routing = ();
    type Routed<'a> = Batch<'a>;

    fn adapters(&self, model: &ModelSpec, capacity: Capacity, _: &[SlotImage<'_>]) -> Result<Self::Adapters> {
        Ok(cpu::WeightTable::new(model, capacity.slots, capacity.rank))
    }

    fn load(&self, adapters: &mut Self::Adapters, slot: Slot, image: &SlotImage<'_>) -> Result<()> {
        Ok(adapters.load(slot, image)?)
    }

    fn lora_linear(&self, model: &ModelSpec, id: LinearId, _: Capacity) -> Result<cpu::LoraLinear> {
        Ok(cpu::LoraLinear::new(model, id))
    }

    fn lora_embedding(&self, model: &ModelSpec, id: EmbeddingId, _: Capacity) -> Result<cpu::LoraEmbedding> {
        Ok(cpu::LoraEmbedding::new(model, id))
    }

    fn routing(&self, _: Capacity) -> Result<()> {
        Ok(())
    }

    fn route<'a>(&self, (): &'a mut (), slots: &'a [Slot], scales: &'a [f32]) -> Result<Batch<'a>> {
        Ok(Batch::new(slots).with_scales(scales)?)
    }

    fn add_delta(
        &self,
        layer: &cpu::LoraLinear,
        x: &Tensor<T>,
        y: &mut Tensor<T>,
        adapters: &Self::Adapters,
        batch: &Batch<'_>,
    ) -> Result<()> {
        let (rows, cols) = (y.rows(), y.cols);
        let x = cpu::Matrix::new(&x.data, x.rows(), x.cols)?;
        let y = cpu::MatrixMut::new(&mut y.data, rows, cols)?;
        Ok(layer.add_delta(x, y, adapters, batch)?)
    }

    fn add_embedding_delta(
        &self,
        layer: &cpu::LoraEmbedding,
        ids: &Vec<u32>,
        y: &mut Tensor<T>,
        adapters: &Self::Adapters,
        batch: &Batch<'_>,
    ) -> Result<()> {
        let (rows, cols) = (y.rows(), y.cols);
        let y = cpu::MatrixMut::new(&mut y.data, rows, cols)?;
        Ok(layer.add_delta(bytemuck::cast_slice(ids), y, adapters, batch)?)
    }

    fn embed(&self, table: &Tensor<f32>, ids: &Vec<u32>) -> Result<Tensor<T>> {
        let data = ids.iter().flat_map(|&id| table.row(id)).map(|&value| T::from_f32(value)).collect();
        Ok(Tensor { cols: table.cols, data })
    }

    fn gemm(&self, x: &Tensor<T>, weight: &Tensor<f32>) -> Result<Tensor<T>> {
        let tiles = x.rows().div_ceil(TILE_ROWS);
        let mut wide = vec![0.0; tiles * TILE_ROWS * x.cols];
        wide.par_iter_mut().zip(&x.data).for_each(|(wide, value)| *wide = value.to_f32());
        let cols = weight.rows();
        let mut y = vec![0.0; tiles * TILE_ROWS * cols];
        for (x, y) in wide.chunks_exact(TILE_ROWS * x.cols).zip(y.chunks_exact_mut(TILE_ROWS * cols)) {
            multiply_tile(x, weight, y);
        }
        y.truncate(x.rows() * cols);
        Ok(Tensor { cols, data: y.into_par_iter().map(T::from_f32).collect() })
    }

    fn rms_norm(&self, x: &Tensor<T>, weight: &Tensor<T>, eps: f32) -> Result<Tensor<T>> {
        Ok(x.map_rows(x.cols, |x, out| {
            out.copy_from_slice(x);
            normalize(out, &weight.data, eps);
        }))
    }

    fn head_norm(&self, qkv: &mut Tensor<T>, heads: Range<usize>, weight: &Tensor<T>, eps: f32) -> Result<()> {
        let dim = weight.cols;
        qkv.data.par_chunks_mut(qkv.cols).for_each(|row| {
            for head in row[heads.start * dim..heads.end * dim].chunks_exact_mut(dim) {
                normalize(head, &weight.data, eps);
            }
        });
        Ok(())
    }

    fn rope(&self, qkv: &mut Tensor<T>, heads: Range<usize>, rope: &Rope<Self>, places: &Places<Self>) -> Result<()> {
        let dim = 2 * rope.cos.cols;
        qkv.data.par_chunks_mut(qkv.cols).zip(&places.positions).for_each(|(row, &position)| {
            let (cos, sin) = (rope.cos.row(position), rope.sin.row(position));
            for head in row[heads.start * dim..heads.end * dim].chunks_exact_mut(dim) {
                let (low, high) = head.split_at_mut(dim / 2);
                for pair in 0..dim / 2 {
                    let (l, h) = (low[pair].to_f32(), high[pair].to_f32());
                    let (c, s) = (cos[pair].to_f32(), sin[pair].to_f32());
                    low[pair] = T::from_f32(round::<T>(l * c) - round::<T>(h * s));
                    high[pair] = T::from_f32(round::<T>(h * c) + round::<T>(l * s));
                }
            }
        });
        Ok(())
    }

    fn append(&self, qkv: &Tensor<T>, heads: Heads, places: &Places<Self>, cache: &mut Cache<Self>) -> Result<()> {
        for (qkv, &row) in qkv.data.chunks_exact(qkv.cols).zip(&places.rows) {
            let (keys, values) = qkv[heads.query_features()..].split_at(heads.kv_features());
            cache.keys.row_mut(row).copy_from_slice(keys);
            cache.values.row_mut(row).copy_from_slice(values);
        }
        Ok(())
    }

    fn attention(
        &self,
        qkv: &Tensor<T>,
        heads: Heads,
        places: &Places<Self>,
        cache: &Cache<Self>,
    ) -> Result<Tensor<T>> {
        let scale = (heads.dim as f32).sqrt().recip();
        let cols = heads.query_features();
        let mut data = vec![T::default(); qkv.rows() * cols];
        data.par_chunks_mut(heads.dim).enumerate().for_each(|(index, out)| {
            let (token, head) = (index / heads.query, index % heads.query);
            let query = &qkv.data[token * qkv.cols + head * heads.dim..][..heads.dim];
            let kv_features = head / (heads.query / heads.kv) * heads.dim..;
            let rows = places.first_rows[token]..=places.rows[token];
            let mut weights: Vec<f32> = rows
                .clone()
                .map(|row| {
                    let key = &cache.keys.row(row)[kv_features.clone()];
                    round::<T>(round::<T>(query.iter().zip(key).map(|(q, k)| q.to_f32() * k.to_f32()).sum()) * scale)
                })
                .collect();
            softmax(&mut weights);
            let mut sums = vec![0.0; heads.dim];
            for (weight, row) in iter::zip(weights, rows) {
                let weight = round::<T>(weight);
                let value = &cache.values.row(row)[kv_features.clone()];
                sums.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value.to_f32());
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::from_f32(sum));
        });
        Ok(Tensor { cols, data })
    }

    fn silu_mul(&self, gate_up: &Tensor<T>) -> Result<Tensor<T>> {
        Ok(gate_up.map_rows(gate_up.cols / 2, |row, out| {
            let (gate, up) = row.split_at(out.len());
            for ((gate, up), out) in gate.iter().zip(up).zip(out) {
                let gate = gate.to_f32();
                *out = T::from_f32(round::<T>(gate / (1.0 + (-gate).exp())) * up.to_f32());
            }
        }))
    }

    fn add(&self, y: &mut Tensor<T>, x: &Tensor<T>) -> Result<()> {
        y.data.par_iter_mut().zip(&x.data).for_each(|(y, x)| *y = T::from_f32(y.to_f32() + x.to_f32()));
        Ok(())
    }

    fn gather(&self, x: &Tensor<T>, rows: &Vec<u32>) -> Result<Tensor<T>> {
        Ok(Tensor { cols: x.cols, data: rows.iter().flat_map(|&row| x.row(row)).copied().collect() })
    }

    fn argmax(&self, x: &Tensor<T>) -> Result<Vec<Option<u32>>> {
        Ok(x.data.chunks_exact(x.cols).map(largest).collect())
    }

    fn read(&self, x: &Tensor<T>) -> Result<Vec<f32>> {
        Ok(x.data.iter().map(|value| value.to_f32()).collect())
    }
}

/// Rows of every GEMM. The order in which `gemm` sums depends on the shape, so a fixed one, padded with zeros, is what makes a
/// token's result the same in any company.
const TILE_ROWS: usize = 16;

/// `x Wᵀ` of one tile.
fn multiply_tile(x: &[f32], weight: &Tensor<f32>, y: &mut [f32]) {
    let (out_features, in_features) = (weight.rows(), weight.cols);
    assert_eq!((x.len(), y.len()), (TILE_ROWS * in_features, TILE_ROWS * out_features));
    let [in_stride, out_stride] = [in_features, out_features].map(usize::cast_signed);
    // SAFETY: `y`, `weight` and `x` are dense matrices of exactly the extents given: W is [out, in], x is [TILE_ROWS, in] and y,
    // which nothing else refers to, is [TILE_ROWS, out], by the assertion above. y is only written.
    unsafe {
        gemm::gemm(
            out_features,
            TILE_ROWS,
            in_features,
            y.as_mut_ptr(),
            out_stride,
            1,
            false,
            weight.data.as_ptr(),
            1,
            in_stride,
            x.as_ptr(),
            in_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}

/// The value that `T` holds for it.
fn round<T: Element>(value: f32) -> f32 {
    T::from_f32(value).to_f32()
}

fn normalize<T: Element>(x: &mut [T], weight: &[T], eps: f32) {
    let squares: f32 = x.iter().map(|x| x.to_f32() * x.to_f32()).sum();
    let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
    for (x, weight) in x.iter_mut().zip(weight) {
        *x = T::from_f32(round::<T>(x.to_f32() * scale) * weight.to_f32());
    }
}

fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - max).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}

fn largest<T: Element>(row: &[T]) -> Option<u32> {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, value) in (0..).zip(row) {
        let value = value.to_f32();
        if value.is_nan() {
            return None;
        }
        if value > best.1 {
            best = (index, value);
        }
    }
    Some(best.0)
}
