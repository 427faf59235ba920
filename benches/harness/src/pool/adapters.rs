use std::{fs, path::Path};

use aril::{
    DType,
    adapter::{Adapter, Tensor},
    model::{Experts, Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
};
use half::bf16;
use safetensors::{Dtype, tensor::TensorView};

use crate::{Result, noise::Noise};

/// The decoder layers of Qwen3-8B.
pub const LAYERS: usize = 36;

/// Those of Qwen3-30B-A3B.
pub const EXPERT_LAYERS: usize = 48;

/// A linear layer's path below a decoder layer, its input features, and its modules with their output features.
type Shape = (&'static str, usize, &'static [(&'static str, usize)]);

const QWEN3_8B: [Shape; 4] = [
    ("self_attn", 4096, &[("q_proj", 4096), ("k_proj", 1024), ("v_proj", 1024)]),
    ("self_attn", 4096, &[("o_proj", 4096)]),
    ("mlp", 4096, &[("gate_proj", 12288), ("up_proj", 12288)]),
    ("mlp", 12288, &[("down_proj", 4096)]),
];

const SMALL: [Shape; 1] = [("mlp", 64, &[("down_proj", 64)])];

/// Of each expert of Qwen3-30B-A3B.
const EXPERT: [Shape; 2] =
    [("mlp.experts", 2048, &[("gate_proj", 768), ("up_proj", 768)]), ("mlp.experts", 768, &[("down_proj", 2048)])];

/// The linear layers or the experts of a model, and bf16 adapters of all of them.
#[derive(Clone, Copy)]
pub struct Layers {
    shapes: &'static [Shape],
    /// In each layer; 0 if the shapes are those of linear layers.
    experts: usize,
    count: usize,
}

/// A factor: its name in PEFT's files, its shape and its elements.
type Factor = (String, [usize; 2], Vec<bf16>);

impl Layers {
    /// `count` decoder layers of Qwen3-8B.
    pub const fn qwen3_8b(count: usize) -> Self {
        Self { shapes: &QWEN3_8B, experts: 0, count }
    }

    /// The experts of `count` decoder layers of Qwen3-30B-A3B.
    pub const fn qwen3_30b_a3b(count: usize) -> Self {
        Self { shapes: &EXPERT, experts: 128, count }
    }

    /// One layer of 64 features, of which a thousand adapters fit anywhere.
    pub const fn small() -> Self {
        Self { shapes: &SMALL, experts: 0, count: 1 }
    }

    /// The model, and its linear layers in order.
    pub fn model(self) -> Result<(Model, Vec<LinearId>)> {
        let (mut spec, mut ids) = (ModelSpec::new(), Vec::new());
        for layer in 0..self.count {
            if let &[(path, hidden, modules), _] = self.shapes
                && self.experts > 0
            {
                let experts = Experts::new(format!("model.layers.{layer}.{path}"), self.experts, hidden, modules[0].1);
                spec.experts(experts.top_k(8))?;
                continue;
            }
            for &(path, in_features, modules) in self.shapes {
                let linear = Linear::new(format!("model.layers.{layer}.{path}"), Parallel::Replicated, in_features);
                let linear = modules.iter().fold(linear, |linear, &(module, features)| linear.slice(module, features));
                ids.push(spec.linear(linear)?);
            }
        }
        Ok((spec.shard(TpRank::SINGLE)?, ids))
    }

    /// An adapter in memory.
    pub fn adapter(self, rank: usize, noise: &Noise) -> Result<Adapter> {
        self.adapter_of(rank, noise, |shape, values| {
            Ok(Tensor::new(DType::BF16, shape, bytemuck::cast_slice(values).to_vec())?)
        })
    }

    /// The same, of tensors that `tensor` makes.
    pub fn adapter_of(
        self,
        rank: usize,
        noise: &Noise,
        tensor: impl Fn([usize; 2], &[bf16]) -> Result<Tensor>,
    ) -> Result<Adapter> {
        let tensors = self.factors(rank, noise).map(|(name, shape, values)| Ok((name, tensor(shape, &values)?)));
        Ok(Adapter::from_tensors(&config(rank), tensors.collect::<Result<Vec<_>>>()?)?)
    }

    /// Writes the same adapter to the folder `dir`, as PEFT saves it.
    pub fn write(self, rank: usize, noise: &Noise, dir: &Path) -> Result<()> {
        let factors: Vec<Factor> = self.factors(rank, noise).collect();
        let views = factors.iter().map(|(name, shape, values)| {
            Ok((name, TensorView::new(Dtype::BF16, shape.to_vec(), bytemuck::cast_slice(values))?))
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        safetensors::serialize_to_file(views, None, &dir.join("adapter_model.safetensors"))?;
        Ok(fs::write(dir.join("adapter_config.json"), config(rank))?)
    }

    /// A and B of all modules, of noise.
    fn factors(self, rank: usize, noise: &Noise) -> impl Iterator<Item = Factor> {
        let modules = move |layer: usize| {
            let experts = (0..self.experts.max(1))
                .map(move |expert| if self.experts > 0 { format!(".{expert}") } else { String::new() });
            let parents = experts.flat_map(move |expert| {
                self.shapes
                    .iter()
                    .map(move |&(path, in_features, modules)| (format!("{path}{expert}"), in_features, modules))
            });
            parents.flat_map(move |(path, in_features, modules)| {
                modules.iter().flat_map(move |&(module, out_features)| {
                    [("A", [rank, in_features]), ("B", [out_features, rank])].map(|(factor, shape)| {
                        (format!("base_model.model.model.layers.{layer}.{path}.{module}.lora_{factor}.weight"), shape)
                    })
                })
            })
        };
        (0..self.count).flat_map(modules).scan(0, |start, (name, shape)| {
            let elems = shape[0] * shape[1];
            let values = noise.range(*start, elems).collect();
            *start += elems;
            Some((name, shape, values))
        })
    }
}

fn config(rank: usize) -> String {
    format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#)
}
