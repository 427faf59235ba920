use aril::DType;
use serde::{Deserialize, Serialize};

use super::{LAYERS, Layers};
use crate::{Result, data::SMALL, noise::Noise};

const ADAPTERS: usize = 100;
const MIN_RANK: usize = 8;
const MAX_RANK: usize = 64;

/// Device memory of adapters of Qwen3-8B, whose ranks are uniform from 8 to 64, in bytes. Without descriptors, of which
/// a slot has as many whatever its rank.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Memory {
    pub adapters: usize,
    pub ranks: [usize; 2],
    /// In blocks of their exact size.
    pub exact_bytes: usize,
    /// In slots of the largest rank.
    pub padded_bytes: usize,
}

impl Memory {
    /// The sizes of the adapters' images.
    pub fn of_qwen3_8b() -> Result<Self> {
        // All decoder layers have the same modules.
        let layers = Layers::qwen3_8b(1);
        let (model, _) = layers.model()?;
        let noise = Noise::new(1, SMALL, 0.02);
        let sizes = (MIN_RANK..=MAX_RANK)
            .map(|rank| Ok(LAYERS * layers.adapter(rank, &noise)?.plan(&model, DType::BF16)?.bytes()))
            .collect::<Result<Vec<_>>>()?;
        let exact_bytes = (0..ADAPTERS).map(|adapter| sizes[adapter * sizes.len() / ADAPTERS]).sum();
        let padded_bytes = ADAPTERS * sizes[sizes.len() - 1];
        Ok(Self { adapters: ADAPTERS, ranks: [MIN_RANK, MAX_RANK], exact_bytes, padded_bytes })
    }

    /// Memory of padded slots over that of exact blocks.
    pub fn ratio(&self) -> f64 {
        self.padded_bytes as f64 / self.exact_bytes as f64
    }
}
