//! Every call of aril: the adapted layers, the adapters in their slots, and the delta after a linear layer.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

use std::path::Path;

use aril::{
    Slot,
    adapter::{Adapter, SlotImage},
    model::{Linear as Fused, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
};
use candle_core::{CpuStorage, CudaStorage, DType, Device, Error, InplaceOp2, Layout, Result, Tensor, bail};
use candle_nn::{Linear, Module};

/// The layers that adapters may change, in the order in which the model adds them.
#[derive(Debug, Default)]
pub struct Sites {
    spec: ModelSpec,
    ids: Vec<LinearId>,
}

impl Sites {
    /// Adds a layer that computes the modules `slices` of `parent`, given with their numbers of outputs, in one multiplication by
    /// `base`, whose weight is `[sum of outputs, in_features]`.
    pub fn linear(&mut self, parent: &str, slices: &[(&str, usize)], base: Linear) -> Result<LoraLinear> {
        let in_features = base.weight().dim(1)?;
        let fused = Fused::new(parent, Parallel::Column, in_features);
        let fused = slices.iter().fold(fused, |fused, &(module, outputs)| fused.slice(module, outputs));
        self.ids.push(self.spec.linear(fused).map_err(Error::wrap)?);
        Ok(LoraLinear { base, site: self.ids.len() - 1 })
    }
}

/// A linear layer of the base model, followed by the deltas of a step's adapters.
#[derive(Debug)]
pub struct LoraLinear {
    base: Linear,
    site: usize,
}

impl LoraLinear {
    /// `y[t] = W x[t] + scaling · B (A x[t])` of `x` `[tokens, in_features]`, where token `t`'s sequence has an adapter.
    pub fn forward(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.add_delta(x, step, Rows::Tokens)
    }

    /// The same for `x` `[sequences, in_features]`, the last token of every sequence.
    pub fn forward_last(&self, x: &Tensor, step: &Step<'_>) -> Result<Tensor> {
        self.add_delta(x, step, Rows::LastTokens)
    }

    fn add_delta(&self, x: &Tensor, step: &Step<'_>, rows: Rows) -> Result<Tensor> {
        let y = self.base.forward(x)?;
        y.inplace_op2(x, &Delta { backend: &*step.adapters.backend, site: self.site, rows })?;
        Ok(y)
    }
}

/// The capacity.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens of all sequences in a step.
    pub max_tokens: usize,
    /// Adapters registered at the same time.
    pub max_adapters: usize,
    pub max_rank: usize,
    /// Memory for the factors of all adapters, in bytes.
    pub bytes: usize,
}

/// The adapters that are registered, by name, in the memory of a device.
pub struct Adapters {
    model: Model,
    dtype: aril::DType,
    /// The name of the adapter in each slot.
    names: Vec<Option<String>>,
    backend: Box<dyn Backend>,
}

impl Adapters {
    /// Room for adapters of the layers `sites`, of a model in `dtype` on `device`.
    pub fn new(sites: Sites, dtype: DType, device: &Device, limits: Limits) -> Result<Self> {
        let dtype = match dtype {
            DType::BF16 => aril::DType::BF16,
            DType::F16 => aril::DType::F16,
            DType::F32 => aril::DType::F32,
            dtype => bail!("there are no adapters in {dtype:?}"),
        };
        let Limits { max_tokens, max_adapters, max_rank, bytes } = limits;
        let capacity = Capacity::tokens(max_tokens).slots(max_adapters).rank(max_rank);
        let model = sites.spec.shard(TpRank::SINGLE).map_err(Error::wrap)?;
        let backend: Box<dyn Backend> = match device {
            Device::Cpu => Box::new(cpu::Cpu::new(&model, &sites.ids, dtype, capacity, bytes)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Box::new(cuda::Cuda::new(&model, &sites.ids, dtype, capacity, bytes, device)?),
            device => bail!("there are no adapters on {device:?}"),
        };
        Ok(Self { model, dtype, names: vec![None; max_adapters], backend })
    }

    /// Registers the adapter that PEFT saved in `directory`, or replaces the one of that name. On an error all is as it was.
    pub fn register(&mut self, name: &str, directory: &Path) -> Result<()> {
        let adapter = Adapter::open(directory).map_err(Error::wrap)?;
        let Some(slot) = self.slot_of(Some(name)).or_else(|| self.slot_of(None)) else {
            bail!("no room for the adapter `{name}`: there are {} already", self.names.len())
        };
        let image = adapter.plan(&self.model, self.dtype).map_err(Error::wrap)?;
        self.backend.load(index(slot)?, &image)?;
        self.names[slot] = Some(name.to_owned());
        Ok(())
    }

    /// Removes an adapter. Sequences that name it are refused from now on.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        let slot = self.registered(name)?;
        self.backend.unload(index(slot)?)?;
        self.names[slot] = None;
        Ok(())
    }

    /// Begins a step of sequences, each with its adapter and how many tokens it has in this step. While the step lives, no adapter
    /// changes.
    pub fn step(&mut self, sequences: &[(Option<&str>, usize)]) -> Result<Step<'_>> {
        let mut tokens = Vec::new();
        let mut last_tokens = Vec::with_capacity(sequences.len());
        for &(name, num_tokens) in sequences {
            let slot = name.map_or(Ok(Slot::BASE), |name| index(self.registered(name)?))?;
            tokens.resize(tokens.len() + num_tokens, slot);
            last_tokens.push(slot);
        }
        self.backend.route(Rows::Tokens, tokens)?;
        self.backend.route(Rows::LastTokens, last_tokens)?;
        Ok(Step { adapters: self })
    }

    fn registered(&self, name: &str) -> Result<usize> {
        let Some(slot) = self.slot_of(Some(name)) else { bail!("no adapter `{name}` is registered") };
        Ok(slot)
    }

    fn slot_of(&self, name: Option<&str>) -> Option<usize> {
        self.names.iter().position(|of_slot| of_slot.as_deref() == name)
    }
}

fn index(slot: usize) -> Result<Slot> {
    Ok(Slot::new(u16::try_from(slot).map_err(Error::wrap)?))
}

/// The sequences of a step, and the adapter of each.
pub struct Step<'a> {
    adapters: &'a Adapters,
}

/// The tokens that have a row in a matrix.
#[derive(Clone, Copy, Debug)]
enum Rows {
    Tokens,
    LastTokens,
}

/// aril on one kind of device.
trait Backend: Send {
    fn load(&self, slot: Slot, image: &SlotImage<'_>) -> Result<()>;
    fn unload(&self, slot: Slot) -> Result<()>;
    /// Sets the slot of each row of the following deltas.
    fn route(&mut self, rows: Rows, slots: Vec<Slot>) -> Result<()>;

    fn add_delta_cpu(
        &self,
        _site: usize,
        _rows: Rows,
        (_y, _): (&mut CpuStorage, &Layout),
        (_x, _): (&CpuStorage, &Layout),
    ) -> Result<()> {
        bail!("these adapters are not on the CPU")
    }

    fn add_delta_cuda(
        &self,
        _site: usize,
        _rows: Rows,
        (_y, _): (&mut CudaStorage, &Layout),
        (_x, _): (&CudaStorage, &Layout),
    ) -> Result<()> {
        bail!("these adapters are not on a GPU")
    }
}

/// A candle in-place operation: adds the delta of the input `x` to `y`, the base layer's output.
struct Delta<'a> {
    backend: &'a dyn Backend,
    site: usize,
    rows: Rows,
}

impl InplaceOp2 for Delta<'_> {
    fn name(&self) -> &'static str {
        "lora-delta"
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, y_layout: &Layout, x: &CpuStorage, x_layout: &Layout) -> Result<()> {
        self.backend.add_delta_cpu(self.site, self.rows, (y, y_layout), (x, x_layout))
    }

    fn cuda_fwd(&self, y: &mut CudaStorage, y_layout: &Layout, x: &CudaStorage, x_layout: &Layout) -> Result<()> {
        self.backend.add_delta_cuda(self.site, self.rows, (y, y_layout), (x, x_layout))
    }
}

/// A row-major matrix's offset in its storage, its rows and its columns.
fn matrix(layout: &Layout) -> Result<(usize, usize, usize)> {
    let (rows, cols) = layout.shape().dims2()?;
    let Some((start, _)) = layout.contiguous_offsets() else { bail!("a matrix is not contiguous") };
    Ok((start, rows, cols))
}
