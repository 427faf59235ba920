//! Adapters in host memory, on candle's vectors.

use std::cell::RefCell;

use aril::{
    DType, Element, Slot,
    adapter::SlotImage,
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{LinearId, Model},
    plan::Capacity,
    routing::Batch,
};
use candle_core::{CpuStorage, Error, Layout, Result, bail};

use super::{Backend, Rows, matrix};

pub(super) struct Cpu {
    weights: WeightTable,
    layers: Vec<LoraLinear>,
    workspace: RefCell<Workspace>,
    tokens: Vec<Slot>,
    last_tokens: Vec<Slot>,
}

impl Cpu {
    pub(super) fn new(model: &Model, ids: &[LinearId], dtype: DType, capacity: Capacity, bytes: usize) -> Result<Self> {
        let weights = WeightTable::new(model, dtype, capacity, bytes).map_err(Error::wrap)?;
        let layers = ids.iter().map(|&id| LoraLinear::new(&weights, id)).collect::<std::result::Result<_, _>>();
        let (tokens, last_tokens) = (Vec::new(), Vec::new());
        Ok(Self { layers: layers.map_err(Error::wrap)?, weights, workspace: RefCell::default(), tokens, last_tokens })
    }

    fn add_delta<T: Element>(
        &self,
        site: usize,
        slots: &[Slot],
        (y, y_layout): (&mut [T], &Layout),
        (x, x_layout): (&[T], &Layout),
    ) -> Result<()> {
        let ((x_start, x_rows, x_cols), (y_start, y_rows, y_cols)) = (matrix(x_layout)?, matrix(y_layout)?);
        let x = Matrix::new(&x[x_start..], x_rows, x_cols).map_err(Error::wrap)?;
        let y = MatrixMut::new(&mut y[y_start..], y_rows, y_cols).map_err(Error::wrap)?;
        let mut workspace = self.workspace.borrow_mut();
        let mut step = self.weights.step(&Batch::new(slots), &mut workspace).map_err(Error::wrap)?;
        self.layers[site].add_delta(&mut step, x, y).map_err(Error::wrap)
    }
}

impl Backend for Cpu {
    fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<()> {
        self.weights.load(slot, image).map(drop).map_err(Error::wrap)
    }

    fn unload(&self, slot: Slot) -> Result<()> {
        self.weights.unload(slot).map_err(Error::wrap)
    }

    fn route(&mut self, rows: Rows, slots: Vec<Slot>) -> Result<()> {
        match rows {
            Rows::Tokens => self.tokens = slots,
            Rows::LastTokens => self.last_tokens = slots,
        }
        Ok(())
    }

    fn add_delta_cpu(
        &self,
        site: usize,
        rows: Rows,
        (y, y_layout): (&mut CpuStorage, &Layout),
        (x, x_layout): (&CpuStorage, &Layout),
    ) -> Result<()> {
        let slots = match rows {
            Rows::Tokens => &self.tokens,
            Rows::LastTokens => &self.last_tokens,
        };
        match (y, x) {
            (CpuStorage::BF16(y), CpuStorage::BF16(x)) => self.add_delta(site, slots, (y, y_layout), (x, x_layout)),
            (CpuStorage::F16(y), CpuStorage::F16(x)) => self.add_delta(site, slots, (y, y_layout), (x, x_layout)),
            (CpuStorage::F32(y), CpuStorage::F32(x)) => self.add_delta(site, slots, (y, y_layout), (x, x_layout)),
            _ => bail!("the model is not in {}, as its adapters are", self.weights.dtype()),
        }
    }
}
