//! Adapters in host memory, on candle's vectors.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use aril::{
    DType, Element, Slices, Slot,
    adapter::SlotImage,
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{LinearId, Model},
    plan::Capacity,
    routing::Batch,
    slots::Resident,
};
use candle_core::{CpuStorage, Error, Layout, Result, backend::BackendStorage};

use super::{Outputs, Rows, mixed, unknown};

#[derive(Debug)]
pub(super) struct Cpu {
    weights: WeightTable,
    layers: BTreeMap<LinearId, LoraLinear>,
    workspace: Mutex<Workspace>,
    tokens: Vec<Slot>,
    outputs: Vec<Slot>,
}

impl Cpu {
    pub(super) fn new(
        model: &Model,
        ids: &[LinearId],
        dtype: DType,
        capacity: Capacity,
        arena_bytes: usize,
    ) -> Result<Self> {
        let weights = WeightTable::new(model, dtype, capacity, arena_bytes).map_err(Error::wrap)?;
        let layer = |&id| Ok((id, LoraLinear::new(&weights, id).map_err(Error::wrap)?));
        let layers = ids.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { weights, layers, workspace: Mutex::default(), tokens: Vec::new(), outputs: Vec::new() })
    }

    pub(super) fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<Resident> {
        self.weights.load(slot, image).map_err(Error::wrap)
    }

    pub(super) fn unload(&self, slot: Slot) -> Result<()> {
        self.weights.unload(slot).map_err(Error::wrap)
    }

    pub(super) fn route(&mut self, rows: Rows, slots: &[Slot]) -> Result<()> {
        // The slots exist, and are not too many.
        self.weights.step(&Batch::new(slots), &mut Workspace::default()).map_err(Error::wrap)?;
        let of_rows = match rows {
            Rows::Tokens => &mut self.tokens,
            Rows::Outputs => &mut self.outputs,
        };
        slots.clone_into(of_rows);
        Ok(())
    }

    pub(super) fn add_delta(
        &self,
        id: LinearId,
        rows: Rows,
        y: Outputs<'_, CpuStorage>,
        (x, x_layout): (&CpuStorage, &Layout),
    ) -> Result<()> {
        /// The elements of all outputs, if they are of the variant of `x`.
        macro_rules! add {
            ($variant:ident, $x:ident) => {{
                let y = y.into_iter().map(|(y, layout)| match y {
                    CpuStorage::$variant(y) => Ok((&mut y[..], layout)),
                    y => Err(mixed(y.dtype(), x.dtype(), self.weights.dtype())),
                });
                self.add(id, rows, y.collect::<Result<_>>()?, ($x, x_layout))
            }};
        }
        match x {
            CpuStorage::BF16(values) => add!(BF16, values),
            CpuStorage::F16(values) => add!(F16, values),
            CpuStorage::F32(values) => add!(F32, values),
            x => Err(mixed(y.first().map_or(x.dtype(), |(y, _)| y.dtype()), x.dtype(), self.weights.dtype())),
        }
    }

    fn add<T: Element>(
        &self,
        id: LinearId,
        rows: Rows,
        y: Vec<(&mut [T], &Layout)>,
        (x, x_layout): (&[T], &Layout),
    ) -> Result<()> {
        let x_at = super::Matrix::of("x", x_layout)?;
        let x = Matrix::strided(&x[x_at.start..], x_at.rows, x_at.cols, x_at.row_stride).map_err(Error::wrap)?;
        let y = y.into_iter().map(|(y, layout)| {
            let at = super::Matrix::of("y", layout)?;
            MatrixMut::strided(&mut y[at.start..], at.rows, at.cols, at.row_stride).map_err(Error::wrap)
        });
        let y = y.collect::<Result<Slices<_>>>()?;
        let slots = match rows {
            Rows::Tokens => &self.tokens,
            Rows::Outputs => &self.outputs,
        };
        // A panic leaves scratch memory, whose contents do not matter.
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let mut step = self.weights.step(&Batch::new(slots), &mut workspace).map_err(Error::wrap)?;
        let layer = self.layers.get(&id).ok_or_else(|| unknown(id))?;
        layer.add_delta(&mut step, x, y).map_err(Error::wrap)
    }
}
