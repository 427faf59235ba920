#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use std::{collections::BTreeMap, fmt};

use aril::{
    Slot,
    adapter::{Adapter, SlotImage},
    model::{LinearId, Model},
    plan::{Capacity, PlanError},
};
use candle_core::{CpuStorage, CudaStorage, DType, Device, Error, InplaceOp2, Layout, Result, Tensor, bail};

/// Adapters in the slots of a table on a candle device, and the linear layers that they adapt.
///
/// It may be used on any thread, one at a time: a [step](Self::step) borrows it, so that no slot changes before the
/// step's last operation.
pub struct Adapters {
    model: Model,
    dtype: aril::DType,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Cpu(cpu::Cpu),
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::Cuda>),
}

impl fmt::Debug for Adapters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adapters").field("dtype", &self.dtype).finish_non_exhaustive()
    }
}

impl Adapters {
    /// Empty slots for adapters of the linear layers `layers` of `model`, whose activations are in `dtype` (`BF16`,
    /// `F16` or `F32`) on `device`, with an arena of `arena_bytes` bytes for their factors, which
    /// [`arena_bytes_for`](Self::arena_bytes_for) computes.
    ///
    /// On a GPU, memory for the largest step is allocated here. Its device is one of `Device::new_cuda_with_stream`.
    ///
    /// # Errors
    /// If the element type or the device is another, an id belongs to another model, a bound of the capacity is
    /// invalid, the kernels do not support a layer, memory is exhausted, or the device is one of `Device::new_cuda`,
    /// whose stream is another on each thread.
    pub fn new(
        model: &Model,
        layers: impl IntoIterator<Item = LinearId>,
        dtype: DType,
        device: &Device,
        capacity: Capacity,
        arena_bytes: usize,
    ) -> Result<Self> {
        let dtype = element_type(dtype)?;
        let ids: Vec<_> = layers.into_iter().collect();
        let backend = match device {
            Device::Cpu => Backend::Cpu(cpu::Cpu::new(model, &ids, dtype, capacity, arena_bytes)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                Backend::Cuda(Box::new(cuda::Cuda::new(model, &ids, dtype, capacity, arena_bytes, device)?))
            }
            device => bail!("there are no adapters on {device:?} in this build"),
        };
        Ok(Self { model: model.clone(), dtype, backend })
    }

    /// Size of an arena in bytes, on any device, in which adapters of ranks up to `capacity.max_rank` fit into all
    /// slots, and one more, which replaces another. Smaller adapters take less.
    ///
    /// # Errors
    /// If the element type is another than `BF16`, `F16` and `F32`.
    pub fn arena_bytes_for(model: &Model, dtype: DType, capacity: Capacity) -> Result<usize> {
        #[cfg(not(feature = "cuda"))]
        use aril::cpu::WeightTable;
        // No less than on the CPU.
        #[cfg(feature = "cuda")]
        use aril::cuda::WeightTable;
        Ok(WeightTable::arena_bytes_for(model, element_type(dtype)?, capacity))
    }

    /// Loads an adapter into the slot with this index and replaces the previous one. Blocks until it is on the device.
    /// Returns the slot, as steps name it. On an error, the slot is unchanged.
    ///
    /// # Errors
    /// If the adapter does not fit the model (the error names the tensor or the field), a rank exceeds the capacity,
    /// the slot does not exist, the arena has no room for both, or a weight has no finite value in the element type.
    pub fn load(&mut self, slot: usize, adapter: &Adapter) -> Result<Slot> {
        let image = adapter.plan(&self.model, self.dtype).map_err(Error::wrap)?;
        self.backend.load(slot, &image)
    }

    /// Empties a slot. Steps that name its adapter are refused from then on.
    ///
    /// # Errors
    /// If the slot does not exist.
    pub fn unload(&mut self, slot: usize) -> Result<()> {
        match &self.backend {
            Backend::Cpu(cpu) => cpu.unload(slot),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => cuda.unload(slot),
        }
    }

    /// Starts a forward of one batch: the slot of each token, in the order of the rows of activations, and the slots of
    /// the rows whose logits are computed, such as the last token of each sequence. `outputs` may be empty if no layer
    /// behind that choice is adapted.
    ///
    /// # Errors
    /// If there are more tokens than the capacity allows, or the adapter that a slot names is not there any more. On a
    /// GPU also if its stream is being captured.
    pub fn step(&mut self, tokens: &[Slot], outputs: &[Slot]) -> Result<Step<'_>> {
        let routed = match &mut self.backend {
            Backend::Cpu(cpu) => Routed::Cpu(cpu.step(tokens, outputs)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Routed::Cuda(Box::new(cuda.step(tokens, outputs)?)),
        };
        Ok(Step { model: &self.model, routed })
    }
}

impl Backend {
    fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot> {
        match self {
            Self::Cpu(cpu) => cpu.load(slot, image),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.load(slot, image),
        }
    }
}

/// A forward of one batch. Threads may share it: operations do not wait for each other on the CPU, and are enqueued one
/// after the other on a GPU.
#[derive(Debug)]
pub struct Step<'a> {
    model: &'a Model,
    routed: Routed<'a>,
}

#[derive(Debug)]
enum Routed<'a> {
    Cpu(cpu::Routed<'a>),
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::Routed<'a>>),
}

impl Step<'_> {
    /// The deltas of the layer `id`, for `y` and `x` with a row for each token of the step.
    pub fn delta(&self, id: LinearId) -> Delta<'_> {
        Delta { step: self, place: Place { id, slice: None, rows: Rows::Tokens } }
    }

    /// The same for `y` and `x` with a row for each of the step's `outputs`.
    pub fn output_delta(&self, id: LinearId) -> Delta<'_> {
        Delta { step: self, place: Place { id, slice: None, rows: Rows::Outputs } }
    }

    fn num_rows(&self, rows: Rows) -> usize {
        match &self.routed {
            Routed::Cpu(cpu) => cpu.num_rows(rows),
            #[cfg(feature = "cuda")]
            Routed::Cuda(cuda) => cuda.num_rows(rows),
        }
    }
}

/// A candle in-place operation: `y.inplace_op2(&x, &delta)` adds `scaling · B (A x[t])` of each row's adapter to
/// `y[t]`.
///
/// `y` is `[.., out_features]`, the output of the base layer, whose slices lie side by side; `x` is `[..,
/// in_features]`. Both have the element type of the [`Adapters`] and as many rows as the step, all dimensions but the
/// last taken together. Elements of a row are adjacent; rows may be any distance apart, as in a part of a wider tensor
/// that `narrow` gives. Rows without an adapter keep every bit.
///
/// It fails, and leaves `y` unchanged, if an operand is none of these, is on another device, or if `x` shares its
/// storage with `y`.
///
/// Outputs in tensors of their own, one for each slice, are for [`add_to`](Self::add_to).
#[derive(Clone, Copy, Debug)]
pub struct Delta<'a> {
    step: &'a Step<'a>,
    place: Place,
}

/// Which outputs of a step an operation adds to.
#[derive(Clone, Copy, Debug)]
struct Place {
    id: LinearId,
    /// All slices, or one.
    slice: Option<usize>,
    rows: Rows,
}

/// Which rows of a step a matrix has.
#[derive(Clone, Copy, Debug)]
enum Rows {
    Tokens,
    Outputs,
}

impl Delta<'_> {
    /// Adds the deltas of all slices of the layer to a tensor `[.., out_features]` for each slice, in their order, one
    /// after the other. Each is as `y` is for the in-place operation; their rows may be at different distances. One
    /// tensor is the output of all slices.
    ///
    /// # Errors
    /// As for the in-place operation. All outputs are then unchanged, unless the driver failed in between.
    pub fn add_to<'t>(&self, y: impl IntoIterator<Item = &'t Tensor>, x: &Tensor) -> Result<()> {
        let y: Vec<_> = y.into_iter().collect();
        match y[..] {
            [] => bail!("there is no output"),
            [y] => return y.inplace_op2(x, self),
            _ => {}
        }
        let Some(site) = self.step.model.linear(self.place.id) else { return Err(unknown(self.place.id)) };
        if y.len() != site.slices().len() {
            bail!("`y` is {} matrices, but the layer has {} slices", y.len(), site.slices().len())
        }
        // Before one of them is changed.
        for (index, (y, slice)) in y.iter().zip(site.slices()).enumerate() {
            self.check(&format!("y[{index}]"), y, slice.out_features(), x)?;
        }
        // Each has its storage to itself, as in candle's own operations: no two are waited for at once.
        let of_slice = |slice| Delta { place: Place { slice: Some(slice), ..self.place }, ..*self };
        y.iter().enumerate().try_for_each(|(slice, y)| y.inplace_op2(x, &of_slice(slice)))
    }

    /// Rejects an output that the operation would reject.
    fn check(&self, name: &str, y: &Tensor, cols: usize, x: &Tensor) -> Result<()> {
        if y.dtype() != x.dtype() {
            bail!("`{name}` is in {:?} and `x` in {:?}", y.dtype(), x.dtype())
        }
        if !y.device().same_device(x.device()) {
            bail!("`{name}` is on {:?} and `x` on {:?}", y.device().location(), x.device().location())
        }
        if storage(y) == storage(x) {
            bail!("`{name}` and `x` share a storage")
        }
        let at = Matrix::of(name, y.layout())?;
        let (got, want) = ([at.rows, at.cols], [self.step.num_rows(self.place.rows), cols]);
        if got != want {
            bail!("`{name}` is {got:?}, but must be {want:?}")
        }
        if at.row_stride < at.cols {
            bail!("`{name}` has row stride {}, but {} columns", at.row_stride, at.cols)
        }
        Ok(())
    }
}

/// The address of a tensor's storage.
fn storage(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

impl InplaceOp2 for Delta<'_> {
    fn name(&self) -> &'static str {
        "lora-delta"
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, y_layout: &Layout, x: &CpuStorage, x_layout: &Layout) -> Result<()> {
        #[cfg_attr(not(feature = "cuda"), expect(irrefutable_let_patterns, reason = "the only backend"))]
        let Routed::Cpu(cpu) = &self.step.routed else { bail!("these adapters are not on the CPU") };
        cpu.add_delta(self.place, (y, y_layout), (x, x_layout))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, y: &mut CudaStorage, y_layout: &Layout, x: &CudaStorage, x_layout: &Layout) -> Result<()> {
        let Routed::Cuda(cuda) = &self.step.routed else { bail!("these adapters are not on a GPU") };
        cuda.add_delta(self.place, (y, y_layout), (x, x_layout))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<()> {
        bail!("aril-candle was built without its feature `cuda`")
    }
}

/// The operations of the adapted layers: of all slices, followed by those of each.
#[derive(Debug)]
struct Layers<L>(BTreeMap<LinearId, Vec<L>>);

impl<L> Layers<L> {
    fn new(
        ids: &[LinearId],
        layer: impl Fn(LinearId) -> std::result::Result<L, PlanError>,
        with_slice: impl Fn(&L, usize) -> Option<L>,
    ) -> Result<Self> {
        let layers = ids.iter().map(|&id| {
            let mut all = vec![layer(id).map_err(Error::wrap)?];
            all.extend((0..).map_while(|slice| with_slice(&all[0], slice)).collect::<Vec<_>>());
            Ok((id, all))
        });
        Ok(Self(layers.collect::<Result<_>>()?))
    }

    fn get(&self, Place { id, slice, .. }: Place) -> Result<&L> {
        let layer = self.0.get(&id).and_then(|layers| layers.get(slice.map_or(0, |slice| slice + 1)));
        layer.ok_or_else(|| unknown(id))
    }
}

/// Rows at equal distances in a storage.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    /// Elements before the first row.
    start: usize,
    rows: usize,
    cols: usize,
    /// Elements between the starts of rows.
    row_stride: usize,
}

impl Matrix {
    /// The rows of a tensor: all its dimensions but the last.
    fn of(operand: &str, layout: &Layout) -> Result<Self> {
        let (Some((&cols, dims)), Some((&stride, strides))) =
            (layout.dims().split_last(), layout.stride().split_last())
        else {
            bail!("`{operand}` is a scalar")
        };
        if stride != 1 && cols > 1 {
            bail!("the elements of a row of `{operand}` are not adjacent: {layout:?}")
        }
        if dims.contains(&0) {
            return Ok(Self { start: layout.start_offset(), rows: 0, cols, row_stride: cols });
        }
        let (mut rows, mut row_stride) = (1, None);
        // From the innermost dimension on. One of size 1 has any stride.
        for (&dim, &stride) in dims.iter().zip(strides).rev().filter(|(dim, _)| **dim != 1) {
            let row_stride = *row_stride.get_or_insert(stride);
            if stride != row_stride * rows {
                bail!("the rows of `{operand}` are not at equal distances: {layout:?}")
            }
            rows *= dim;
        }
        Ok(Self { start: layout.start_offset(), rows, cols, row_stride: row_stride.unwrap_or(cols) })
    }
}

/// The element type of adapters.
fn element_type(dtype: DType) -> Result<aril::DType> {
    Ok(match dtype {
        DType::BF16 => aril::DType::BF16,
        DType::F16 => aril::DType::F16,
        DType::F32 => aril::DType::F32,
        dtype => bail!("there are no adapters in {dtype:?}: BF16, F16 and F32 are supported"),
    })
}

/// The error for operands of several element types.
fn mixed(y: DType, x: DType, adapters: aril::DType) -> Error {
    Error::Msg(format!("`y` is in {y:?} and `x` in {x:?}, and their adapters are in {adapters}"))
}

/// The error for a layer that was not named.
fn unknown(id: LinearId) -> Error {
    Error::Msg(format!("{id:?} is none of the layers that the adapters were made for"))
}
