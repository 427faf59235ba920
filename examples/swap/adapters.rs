//! Random adapters, written as PEFT saves them.

use std::{fs, path::Path};

use aril::{
    DType,
    adapter::Adapter,
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    pool::{AdapterId, Source},
};
use half::bf16;
use rand::{RngExt, rngs::StdRng};
use safetensors::{Dtype, tensor::TensorView};
use tempfile::TempDir;

use super::{Result, device::Device};

pub(crate) const HIDDEN: usize = 256;
pub(crate) const LAYERS: usize = 2;
pub(crate) const MAX_RANK: usize = 64;
/// Outputs of a token in all layers.
pub(crate) const OUTPUTS: usize = LAYERS * 2 * HIDDEN;

/// A registered adapter, an input, and the output of this adapter alone.
pub(crate) struct Served {
    pub(crate) id: AdapterId,
    pub(crate) x: Vec<bf16>,
    pub(crate) y: Vec<bf16>,
}

/// All adapters, and the folder that they are in.
pub(crate) struct Library {
    pub(crate) served: Vec<Served>,
    _dir: TempDir,
}

/// Layers of two fused modules.
pub(crate) fn model() -> Result<(Model, Vec<LinearId>)> {
    let mut spec = ModelSpec::new();
    let layer =
        |i| Linear::new(format!("layers.{i}.attn"), Parallel::Column, HIDDEN).slice("q", HIDDEN).slice("v", HIDDEN);
    let ids = (0..LAYERS).map(|i| spec.linear(layer(i))).collect::<std::result::Result<_, _>>()?;
    Ok((spec.shard(TpRank::SINGLE)?, ids))
}

impl Library {
    /// Writes adapters of different ranks, registers them, and computes what each gives alone.
    pub(crate) fn write(device: &mut impl Device, adapters: usize, rng: &mut StdRng) -> Result<Self> {
        let (dir, model) = (tempfile::tempdir()?, device.model().clone());
        let mut served = Vec::with_capacity(adapters);
        for number in 0..adapters {
            let path = dir.path().join(number.to_string());
            write(&path, [8, 16, 16, 32, 64][number % 5], rng)?;
            let x: Vec<bf16> = (0..HIDDEN).map(|_| bf16::from_f32(rng.random_range(-1.0..1.0))).collect();
            let y = device.alone(&Adapter::open(&path)?, &x)?;
            let id = device.pool().register(Source::directory(&path, &model, DType::BF16)?)?;
            served.push(Served { id, x, y });
        }
        Ok(Self { served, _dir: dir })
    }
}

/// Writes an adapter of all modules.
fn write(dir: &Path, rank: usize, rng: &mut StdRng) -> Result<()> {
    fs::create_dir(dir)?;
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {}}}"#, 2 * rank);
    fs::write(dir.join("adapter_config.json"), config)?;
    let mut factors = Vec::new();
    for module in (0..LAYERS).flat_map(|layer| ["q", "v"].map(|slice| format!("layers.{layer}.attn.{slice}"))) {
        for (side, shape) in [("A", [rank, HIDDEN]), ("B", [HIDDEN, rank])] {
            let mut weight = || bf16::from_f32(rng.random_range(-0.1..0.1)).to_le_bytes();
            let bytes: Vec<u8> = (0..shape[0] * shape[1]).flat_map(|_| weight()).collect();
            factors.push((format!("base_model.model.{module}.lora_{side}.weight"), shape, bytes));
        }
    }
    let mut views = Vec::new();
    for (key, shape, bytes) in &factors {
        views.push((key, TensorView::new(Dtype::BF16, shape.to_vec(), bytes)?));
    }
    fs::write(dir.join("adapter_model.safetensors"), safetensors::serialize(views, None)?)?;
    Ok(())
}
