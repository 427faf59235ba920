//! Adapters in host memory, on candle's vectors.

use aril::{
    Slot,
    adapter::Adapter,
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable},
    model::{LinearId, ModelSpec},
    plan::Capacity,
    routing::Batch,
};
use candle_core::{CpuStorage, Error, Layout, Result, bail};

use super::{Backend, Rows, matrix};

pub(super) struct Cpu<T> {
    weights: WeightTable<T>,
    layers: Vec<LoraLinear>,
    tokens: Vec<Slot>,
    last_tokens: Vec<Slot>,
}

impl<T: Element> Cpu<T> {
    pub(super) fn new(spec: &ModelSpec, ids: &[LinearId], capacity: Capacity) -> Self {
        Self {
            weights: WeightTable::new(spec, capacity.num_slots, capacity.max_rank),
            layers: ids.iter().map(|&id| LoraLinear::new(spec, id)).collect(),
            tokens: Vec::new(),
            last_tokens: Vec::new(),
        }
    }
}

impl<T: Element> Backend for Cpu<T> {
    fn load(&mut self, slot: Slot, spec: &ModelSpec, adapter: &Adapter) -> Result<()> {
        let image = adapter.plan(spec, T::DTYPE).map_err(Error::wrap)?;
        self.weights.load(slot, &image).map_err(Error::wrap)
    }

    fn unload(&mut self, slot: Slot) -> Result<()> {
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
        let batch = Batch::new(match rows {
            Rows::Tokens => &self.tokens,
            Rows::LastTokens => &self.last_tokens,
        });
        let (Some(y), Some(x)) = (T::slice_mut(y), T::slice(x)) else {
            bail!("the model is not in {}, as its adapters are", T::DTYPE)
        };
        let ((x_start, x_rows, x_cols), (y_start, y_rows, y_cols)) = (matrix(x_layout)?, matrix(y_layout)?);
        let x = Matrix::new(&x[x_start..], x_rows, x_cols).map_err(Error::wrap)?;
        let y = MatrixMut::new(&mut y[y_start..], y_rows, y_cols).map_err(Error::wrap)?;
        self.layers[site].add_delta(x, y, &self.weights, &batch).map_err(Error::wrap)
    }
}

/// An element type, and where candle keeps it.
pub(super) trait Element: aril::Element {
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! element {
    ($element:ty, $variant:ident) => {
        impl Element for $element {
            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                if let CpuStorage::$variant(values) = storage { Some(values) } else { None }
            }

            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                if let CpuStorage::$variant(values) = storage { Some(values) } else { None }
            }
        }
    };
}

element!(half::bf16, BF16);
element!(half::f16, F16);
element!(f32, F32);
