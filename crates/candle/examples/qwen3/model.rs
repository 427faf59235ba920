//! A dense Qwen3. Sequences are packed: the tokens of all sequences are the rows of one matrix in every linear layer.
//! Attention runs for each sequence over its own keys and values.

use std::{fs, path::Path};

use candle_core::{DType, Device, Error, Module, Result, Tensor, bail};
use candle_nn::{Linear, RmsNorm, VarBuilder, embedding, kv_cache::ConcatKvCache, ops, rms_norm, rotary_emb::rope};
use serde::Deserialize;

use aril_candle::Step;

use crate::adapters::{LoraEmbedding, LoraLinear, Sites};

/// The fields of `config.json` that the forward needs.
#[derive(Clone, Debug, Deserialize)]
pub struct Config {
    pub model_type: String,
    pub hidden_act: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f64,
    pub max_position_embeddings: usize,
    pub rope_parameters: RopeParameters,
    pub tie_word_embeddings: bool,
    pub eos_token_id: u32,
}

#[derive(Clone, Debug, Deserialize)]
pub struct RopeParameters {
    pub rope_type: String,
    pub rope_theta: f64,
}

impl Config {
    fn check(&self) -> Result<()> {
        let Self { model_type, hidden_act, rope_parameters: RopeParameters { rope_type, .. }, .. } = self;
        if (&**model_type, &**hidden_act, &**rope_type) != ("qwen3", "silu", "default") {
            bail!("a {model_type} with {hidden_act} and {rope_type} rope is not what this example runs")
        }
        Ok(())
    }
}

/// The base model. Its weights are loaded once and do not depend on the adapters.
#[derive(Debug)]
pub struct Qwen3 {
    config: Config,
    embed: LoraEmbedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: LoraLinear,
    /// Cosines and sines, `[max_position_embeddings, head_dim / 2]`.
    rope: (Tensor, Tensor),
}

#[derive(Debug)]
struct Layer {
    input_norm: RmsNorm,
    qkv: LoraLinear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    o: LoraLinear,
    post_norm: RmsNorm,
    gate_up: LoraLinear,
    down: LoraLinear,
}

/// The keys and values of one sequence in every layer.
#[derive(Clone, Debug)]
pub struct Cache(Vec<ConcatKvCache>);

/// A sequence's part of a step: the tokens that are not in its cache.
#[derive(Debug)]
pub struct Row<'a> {
    pub tokens: &'a [u32],
    pub cache: &'a mut Cache,
}

impl Qwen3 {
    /// Opens `config.json` and the safetensors files of a directory, as they come from a hub.
    pub fn open(directory: &Path, dtype: DType, device: &Device) -> Result<(Self, Sites)> {
        let config = fs::read(directory.join("config.json"))?;
        let config = serde_json::from_slice(&config).map_err(Error::wrap)?;
        let files = fs::read_dir(directory)?.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
        let files: Vec<_> =
            files.into_iter().filter(|file| file.extension().is_some_and(|it| it == "safetensors")).collect();
        // SAFETY: nobody changes the files while they are read. Nothing stays mapped on return.
        let weights = unsafe { VarBuilder::from_mmaped_safetensors(&files, dtype, device) }?;
        Self::load(config, weights)
    }

    /// Reads the weights, and describes the layers that adapters may change.
    pub fn load(config: Config, vb: VarBuilder<'_>) -> Result<(Self, Sites)> {
        config.check()?;
        let Config { vocab_size, hidden_size, .. } = config;
        let mut sites = Sites::default();
        let model = vb.pp("model");
        let embed = embedding(vocab_size, hidden_size, model.pp("embed_tokens"))?;
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Layer::load(&config, &format!("model.layers.{layer}"), &vb, &mut sites))
            .collect::<Result<_>>()?;
        let norm = rms_norm(hidden_size, config.rms_norm_eps, model.pp("norm"))?;
        let head = if config.tie_word_embeddings {
            embed.embeddings().clone()
        } else {
            vb.get((vocab_size, hidden_size), "lm_head.weight")?
        };
        let head = sites.linear("", &[("lm_head", vocab_size)], Linear::new(head, None))?;
        let embed = sites.embedding("model.embed_tokens", embed)?;
        let rope = rope_tables(&config, vb.dtype(), vb.device())?;
        Ok((Self { config, embed, layers, norm, head, rope }, sites))
    }

    /// An empty cache.
    pub fn cache(&self) -> Cache {
        Cache(vec![ConcatKvCache::new(2); self.config.num_hidden_layers])
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// One forward for all sequences of the step, in order. Returns the logits after each one's last token:
    /// `[sequences, vocab]`.
    pub fn forward(&self, rows: &mut [Row<'_>], step: &Step) -> Result<Tensor> {
        let tokens: Vec<u32> = rows.iter().flat_map(|row| row.tokens).copied().collect();
        let tokens = Tensor::new(tokens, self.rope.0.device())?;
        let mut h = self.embed.forward(&tokens, step)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let qkv = layer.qkv.forward(&layer.input_norm.forward(&h)?, step)?;
            let mut begin = 0;
            let mut attended = Vec::with_capacity(rows.len());
            for row in &mut *rows {
                let qkv = qkv.narrow(0, begin, row.tokens.len())?;
                attended.push(self.attention(layer, &qkv, &mut row.cache.0[index])?);
                begin += row.tokens.len();
            }
            h = (h + layer.o.forward(&Tensor::cat(&attended, 0)?, step)?)?;

            let gate_up = layer.gate_up.forward(&layer.post_norm.forward(&h)?, step)?;
            let [gate, up] = gate_up.chunk(2, 1)?.try_into().expect("two halves");
            h = (h + layer.down.forward(&(gate.silu()? * up)?, step)?)?;
        }
        let lasts: Vec<u32> = rows
            .iter()
            .scan(0, |end, row| {
                *end += row.tokens.len();
                u32::try_from(*end - 1).ok()
            })
            .collect();
        let step = step.rows(lasts.iter().map(|&last| last as usize))?;
        let h = h.index_select(&Tensor::new(lasts, h.device())?, 0)?;
        self.head.forward(&self.norm.forward(&h)?, &step)
    }

    /// Attention of one sequence's new tokens, `qkv` `[tokens, q + k + v features]`, to all its tokens: `[tokens, q
    /// features]`.
    fn attention(&self, layer: &Layer, qkv: &Tensor, cache: &mut ConcatKvCache) -> Result<Tensor> {
        let Config { num_attention_heads: heads, num_key_value_heads: kv_heads, head_dim, .. } = self.config;
        let (num_tokens, past) = (qkv.dim(0)?, cache.current_seq_len());
        let heads_from = |first: usize, count: usize| {
            let features = qkv.narrow(1, first * head_dim, count * head_dim)?;
            features.reshape((1, num_tokens, count, head_dim))?.transpose(1, 2)?.contiguous()
        };
        let (cos, sin) = (self.rope.0.narrow(0, past, num_tokens)?, self.rope.1.narrow(0, past, num_tokens)?);
        let q = rope(&layer.q_norm.forward(&heads_from(0, heads)?)?, &cos, &sin)?;
        let k = rope(&layer.k_norm.forward(&heads_from(heads, kv_heads)?)?, &cos, &sin)?;
        let (k, v) = cache.append(&k, &heads_from(heads + kv_heads, kv_heads)?)?;

        // The query heads of a key head are adjacent.
        let q = q.reshape((kv_heads, heads / kv_heads * num_tokens, head_dim))?;
        let (k, v) = (k.squeeze(0)?, v.squeeze(0)?);
        let scores = (q.matmul(&k.t()?)? * (head_dim as f64).powf(-0.5))?;
        let scores = scores.reshape((heads, num_tokens, past + num_tokens))?;
        let scores = scores.broadcast_add(&causal_mask(num_tokens, past, q.dtype(), q.device())?)?;
        let weights = ops::softmax_last_dim(&scores)?;
        let weights = weights.reshape((kv_heads, heads / kv_heads * num_tokens, past + num_tokens))?;
        let y = weights.matmul(&v)?.reshape((heads, num_tokens, head_dim))?;
        y.transpose(0, 1)?.reshape((num_tokens, heads * head_dim))
    }
}

impl Layer {
    fn load(config: &Config, path: &str, vb: &VarBuilder<'_>, sites: &mut Sites) -> Result<Self> {
        let Config { hidden_size: hidden, intermediate_size: inter, head_dim, .. } = *config;
        let (q, kv) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let norm = |name: &str, size: usize| rms_norm(size, config.rms_norm_eps, vb.pp(format!("{path}.{name}")));
        let mut linear = |parent: &str, in_features: usize, slices: &[(&str, usize)]| {
            let parent = format!("{path}.{parent}");
            let weight =
                |&(name, outputs): &(&str, usize)| vb.get((outputs, in_features), &format!("{parent}.{name}.weight"));
            let weights = slices.iter().map(weight).collect::<Result<Vec<_>>>()?;
            sites.linear(&parent, slices, Linear::new(Tensor::cat(&weights, 0)?, None))
        };
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            qkv: linear("self_attn", hidden, &[("q_proj", q), ("k_proj", kv), ("v_proj", kv)])?,
            q_norm: norm("self_attn.q_norm", head_dim)?,
            k_norm: norm("self_attn.k_norm", head_dim)?,
            o: linear("self_attn", q, &[("o_proj", hidden)])?,
            post_norm: norm("post_attention_layernorm", hidden)?,
            gate_up: linear("mlp", hidden, &[("gate_proj", inter), ("up_proj", inter)])?,
            down: linear("mlp", inter, &[("down_proj", hidden)])?,
        })
    }
}

fn rope_tables(config: &Config, dtype: DType, device: &Device) -> Result<(Tensor, Tensor)> {
    let theta = config.rope_parameters.rope_theta;
    let frequency = |feature: usize| theta.powf(-(feature as f64) / config.head_dim as f64) as f32;
    let frequencies: Vec<f32> = (0..config.head_dim).step_by(2).map(frequency).collect();
    let positions: Vec<f32> = (0..config.max_position_embeddings).map(|position| position as f32).collect();
    let angles = Tensor::new(positions, device)?.unsqueeze(1)?.broadcast_mul(&Tensor::new(frequencies, device)?)?;
    Ok((angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?))
}

/// `[num_tokens, past + num_tokens]`: 0 up to a token's own position, minus infinity after it.
fn causal_mask(num_tokens: usize, past: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let mask = (0..num_tokens).flat_map(|token| {
        (0..past + num_tokens).map(move |position| if position > past + token { f32::NEG_INFINITY } else { 0.0 })
    });
    Tensor::from_iter(mask, device)?.reshape((num_tokens, past + num_tokens))?.to_dtype(dtype)
}
