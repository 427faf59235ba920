//! Adapters made in memory, and written to disk as PEFT would.

use std::{collections::BTreeMap, fs, path::Path};

use aril::{
    DType, Element,
    adapter::{Adapter, ModuleKind, Tensor},
};
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use serde_json::json;

/// The text of an `adapter_config.json`, and its tensors.
pub(crate) type Parts = (String, Vec<(String, Tensor)>);

/// One module of an adapter, with its values.
#[derive(Clone, Debug)]
pub(crate) struct Lora {
    pub(crate) path: String,
    pub(crate) kind: ModuleKind,
    pub(crate) rank: usize,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    /// Its own alpha, in `alpha_pattern`.
    pub(crate) alpha: Option<f64>,
    pub(crate) dtype: DType,
    /// `[rank, in_features]`
    pub(crate) a: Vec<f32>,
    /// `[out_features, rank]`
    pub(crate) b: Vec<f32>,
}

impl Lora {
    /// A linear module of bf16 zeros.
    pub(crate) fn linear(path: impl Into<String>, in_features: usize, out_features: usize, rank: usize) -> Self {
        Self {
            path: path.into(),
            kind: ModuleKind::Linear,
            rank,
            in_features,
            out_features,
            alpha: None,
            dtype: DType::BF16,
            a: vec![0.0; rank * in_features],
            b: vec![0.0; out_features * rank],
        }
    }

    /// An embedding of bf16 zeros.
    pub(crate) fn embedding(path: impl Into<String>, vocab: usize, hidden: usize, rank: usize) -> Self {
        Self { kind: ModuleKind::Embedding, ..Self::linear(path, vocab, hidden, rank) }
    }

    /// A module of f32 that adds `value` to every output where x is ones: exactly, if `rank` and `in_features` are
    /// powers of two.
    pub(crate) fn adding(
        path: impl Into<String>,
        [in_features, out_features]: [usize; 2],
        rank: usize,
        value: f32,
    ) -> Self {
        Self::linear(path, in_features, out_features, rank).of_rows(|_| value / (rank * in_features) as f32)
    }

    /// A module of f32 whose A has ones, whose rows of B have one value each, and whose scaling is 1.
    pub(crate) fn of_rows(mut self, value: impl Fn(usize) -> f32) -> Self {
        self.a.fill(1.0);
        for (row, values) in self.b.chunks_exact_mut(self.rank).enumerate() {
            values.fill(value(row));
        }
        let alpha = self.rank as f64;
        self.dtype(DType::F32).alpha(alpha)
    }

    pub(crate) fn alpha(self, alpha: f64) -> Self {
        Self { alpha: Some(alpha), ..self }
    }

    pub(crate) fn dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Fills A, then B, with values, rounded to the module's type.
    pub(crate) fn fill(mut self, mut value: impl FnMut() -> f32) -> Self {
        for weight in self.a.iter_mut().chain(&mut self.b) {
            *weight = round(value(), self.dtype);
        }
        self
    }

    /// The names of A and B, after the module's path.
    pub(crate) fn factor_names(&self) -> [&'static str; 2] {
        match self.kind {
            ModuleKind::Linear => ["lora_A.weight", "lora_B.weight"],
            ModuleKind::Embedding => ["lora_embedding_A", "lora_embedding_B"],
        }
    }

    pub(crate) fn tensors(&self) -> [Tensor; 2] {
        [
            tensor(self.dtype, &[self.rank, self.in_features], &self.a),
            tensor(self.dtype, &[self.out_features, self.rank], &self.b),
        ]
    }
}

/// The adapter of these modules, with keys as PEFT writes them.
pub(crate) fn parts(lora_alpha: f64, modules: &[Lora]) -> Parts {
    let pattern = |module: &Lora| module.path.replace('.', r"\.");
    let alpha_pattern: BTreeMap<_, _> =
        modules.iter().filter_map(|module| Some((pattern(module), module.alpha?))).collect();
    let rank_pattern: BTreeMap<_, _> = modules.iter().map(|module| (pattern(module), module.rank)).collect();
    let config = json!({
        "peft_type": "LORA",
        "r": modules.iter().map(|module| module.rank).max(),
        "rank_pattern": rank_pattern,
        "lora_alpha": lora_alpha,
        "alpha_pattern": alpha_pattern,
        "bias": "none",
        "use_rslora": false,
    });
    let keyed = |module: &Lora| {
        let keys = module.factor_names().map(|factor| format!("base_model.model.{}.{factor}", module.path));
        keys.into_iter().zip(module.tensors())
    };
    (config.to_string(), modules.iter().flat_map(keyed).collect())
}

/// The adapter of these modules, whose alpha is 1 where they have none of their own.
pub(crate) fn adapter(modules: &[Lora]) -> Adapter {
    let (config, tensors) = parts(1.0, modules);
    Adapter::from_tensors(&config, tensors).expect("factors of one rank for each module")
}

/// The same with another owner of the bytes of each tensor, which is named.
pub(crate) fn owned_by<O: AsRef<[u8]> + Send + Sync + 'static>(
    modules: &[Lora],
    owner: impl Fn(&str, Vec<u8>) -> O,
) -> Adapter {
    let (config, tensors) = parts(1.0, modules);
    let owned = tensors.into_iter().map(|(name, tensor)| {
        let bytes = owner(&name, tensor.bytes().to_vec());
        (name, Tensor::new(tensor.dtype(), tensor.shape().to_vec(), bytes).expect("as many bytes as before"))
    });
    Adapter::from_tensors(&config, owned).expect("factors of one rank for each module")
}

pub(crate) fn tensor(dtype: DType, shape: &[usize], values: &[f32]) -> Tensor {
    fn bytes<T: Element>(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|&value| bytemuck::bytes_of(&T::from_f32(value)).to_vec()).collect()
    }
    let bytes = match dtype {
        DType::BF16 => bytes::<bf16>(values),
        DType::F16 => bytes::<f16>(values),
        _ => bytes::<f32>(values),
    };
    Tensor::new(dtype, shape, bytes).expect("as many values as the shape asks for")
}

pub(crate) fn round(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Writes an adapter's directory with a single weight file.
pub(crate) fn write(dir: &Path, (config, tensors): &Parts) {
    fs::write(dir.join("adapter_config.json"), config).expect("a writable directory");
    write_weights(&dir.join("adapter_model.safetensors"), tensors);
}

/// Writes an adapter's directory with its weights in two shards and an index.
pub(crate) fn write_sharded(dir: &Path, (config, tensors): &Parts) {
    fs::write(dir.join("adapter_config.json"), config).expect("a writable directory");
    let mut weight_map = BTreeMap::new();
    for (i, half) in tensors.chunks(tensors.len().div_ceil(2)).enumerate() {
        let shard = format!("adapter_model-{:05}-of-00002.safetensors", i + 1);
        write_weights(&dir.join(&shard), half);
        weight_map.extend(half.iter().map(|(key, _)| (key.clone(), shard.clone())));
    }
    let index = json!({ "metadata": { "total_size": 0 }, "weight_map": weight_map });
    fs::write(dir.join("adapter_model.safetensors.index.json"), index.to_string()).expect("a writable directory");
}

pub(crate) fn write_weights(path: &Path, tensors: &[(String, Tensor)]) {
    fs::write(path, safetensors_bytes(tensors)).expect("a writable directory");
}

pub(crate) fn safetensors_bytes(tensors: &[(String, Tensor)]) -> Vec<u8> {
    let views = tensors.iter().map(|(key, tensor)| {
        let dtype = match tensor.dtype() {
            DType::BF16 => safetensors::Dtype::BF16,
            DType::F16 => safetensors::Dtype::F16,
            _ => safetensors::Dtype::F32,
        };
        (key, TensorView::new(dtype, tensor.shape().to_vec(), tensor.bytes()).expect("a whole tensor"))
    });
    safetensors::serialize(views, None).expect("a valid file")
}
