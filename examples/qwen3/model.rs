//! The model: the base weights on the device, what of it adapters may change, and the adapters in their slots.

use aril::{
    Element, Slot,
    adapter::Adapter,
    model::{EmbeddingId, Linear, LinearId, ModelSpec, Parallel, TpRank},
};

use crate::{
    checkpoint::Weights,
    config::Config,
    device::{Capacity, Device},
    error::{Context, Result},
};

/// A base model and the adapters that run on it.
pub(crate) struct Model<'d, D: Device> {
    pub(crate) device: &'d D,
    pub(crate) config: Config,
    pub(crate) capacity: Capacity,
    pub(crate) embed: D::Weight,
    pub(crate) embed_lora: D::LoraEmbedding,
    pub(crate) layers: Vec<(Layer<D>, LoraLayer<D>)>,
    pub(crate) norm: D::Tensor,
    /// Absent where it is the embedding. Its adapters and those of the embedding are apart either way.
    pub(crate) head: Option<D::Weight>,
    pub(crate) head_lora: D::LoraLinear,
    pub(crate) adapters: D::Adapters,
}

/// A layer of the base model.
pub(crate) struct Layer<D: Device> {
    pub(crate) input_norm: D::Tensor,
    pub(crate) qkv: D::Weight,
    pub(crate) q_norm: D::Tensor,
    pub(crate) k_norm: D::Tensor,
    pub(crate) o: D::Weight,
    pub(crate) post_norm: D::Tensor,
    pub(crate) gate_up: D::Weight,
    pub(crate) down: D::Weight,
}

/// What the adapters add to a layer.
pub(crate) struct LoraLayer<D: Device> {
    pub(crate) qkv: D::LoraLinear,
    pub(crate) o: D::LoraLinear,
    pub(crate) gate_up: D::LoraLinear,
    pub(crate) down: D::LoraLinear,
}

impl<'d, D: Device> Model<'d, D> {
    /// Builds the base model, and loads the adapters into the slots 0, 1, ...
    pub(crate) fn new<'a>(
        device: &'d D,
        config: &Config,
        mut weights: Weights<'_>,
        adapters: impl IntoIterator<Item = (&'a str, &'a Adapter)>,
        capacity: Capacity,
    ) -> Result<Self> {
        let Config { vocab, hidden, .. } = *config;
        let embed = device.weight(vocab, hidden, weights.module(EMBED, vocab, hidden)?)?;
        let layers = (0..config.layers)
            .map(|layer| Layer::new(device, config, &mut weights, &format!("model.layers.{layer}")))
            .collect::<Result<Vec<_>>>()?;
        let norm = device.tensor(1, hidden, &weights.norm("model.norm", hidden)?)?;
        let head = if !config.tied {
            Some(weights.module(HEAD, vocab, hidden)?)
        } else if weights.adapts(EMBED) || weights.adapts(HEAD) {
            Some(weights.module_from(HEAD, EMBED, vocab, hidden)?)
        } else {
            None
        };
        let head = head.map(|values| device.weight(vocab, hidden, values)).transpose()?;
        if config.tied {
            // Some savers store the tied head a second time; transformers does not read it either.
            weights.ignore("lm_head.weight");
        }
        weights.finish()?;

        let (spec, sites) = describe(config)?;
        let lora_linear = |id| device.lora_linear(&spec, id, capacity);
        let layers = layers.into_iter().zip(sites.layers).map(|(layer, [qkv, o, gate_up, down])| {
            let lora = LoraLayer {
                qkv: lora_linear(qkv)?,
                o: lora_linear(o)?,
                gate_up: lora_linear(gate_up)?,
                down: lora_linear(down)?,
            };
            Ok((layer, lora))
        });

        let adapters: Vec<_> = adapters.into_iter().collect();
        let images = adapters
            .iter()
            .map(|(name, adapter)| adapter.plan(&spec, D::Elem::DTYPE).context(format_args!("adapter `{name}`")));
        let images = images.collect::<Result<Vec<_>>>()?;
        let mut table = device.adapters(&spec, capacity, &images)?;
        for (index, ((name, _), image)) in adapters.iter().zip(&images).enumerate() {
            let slot = Slot::new(u16::try_from(index).context("too many adapters")?);
            device.load(&mut table, slot, image).context(format_args!("adapter `{name}`"))?;
        }

        Ok(Self {
            device,
            config: config.clone(),
            capacity,
            embed,
            embed_lora: device.lora_embedding(&spec, sites.embed, capacity)?,
            layers: layers.collect::<Result<_>>()?,
            norm,
            head,
            head_lora: lora_linear(sites.head)?,
            adapters: table,
        })
    }
}

impl<D: Device> Layer<D> {
    fn new(device: &D, config: &Config, weights: &mut Weights<'_>, path: &str) -> Result<Self> {
        let Config { hidden, intermediate, heads, .. } = *config;
        let query = heads.query_features();
        let kv = heads.kv_features();
        let mut linear = |in_features: usize, slices: &[(&str, usize)]| {
            let mut values = Vec::new();
            for &(module, out_features) in slices {
                values.extend(weights.module::<D::Elem>(&format!("{path}.{module}"), out_features, in_features)?);
            }
            device.weight(values.len() / in_features, in_features, values)
        };
        let qkv = linear(hidden, &[("self_attn.q_proj", query), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)])?;
        let o = linear(query, &[("self_attn.o_proj", hidden)])?;
        let gate_up = linear(hidden, &[("mlp.gate_proj", intermediate), ("mlp.up_proj", intermediate)])?;
        let down = linear(intermediate, &[("mlp.down_proj", hidden)])?;
        let mut norm = |name: &str, len| device.tensor(1, len, &weights.norm(&format!("{path}.{name}"), len)?);
        Ok(Self {
            input_norm: norm("input_layernorm", hidden)?,
            qkv,
            q_norm: norm("self_attn.q_norm", heads.dim)?,
            k_norm: norm("self_attn.k_norm", heads.dim)?,
            o,
            post_norm: norm("post_attention_layernorm", hidden)?,
            gate_up,
            down,
        })
    }
}

const EMBED: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// Where the adapted layers are in the [`ModelSpec`].
struct Sites {
    embed: EmbeddingId,
    /// Of each layer: q, k, v; o; gate, up; down.
    layers: Vec<[LinearId; 4]>,
    head: LinearId,
}

/// Says which layers the engine adapts, and which of PEFT's modules are fused into them.
fn describe(config: &Config) -> Result<(ModelSpec, Sites)> {
    let Config { vocab, hidden, intermediate, heads, .. } = *config;
    let mut spec = ModelSpec::new(TpRank::SINGLE);
    let embed = spec.embedding(EMBED, vocab, hidden)?;
    let mut layers = Vec::with_capacity(config.layers);
    for layer in 0..config.layers {
        let attention = format!("model.layers.{layer}.self_attn");
        let mlp = format!("model.layers.{layer}.mlp");
        let qkv = Linear::new(&attention, Parallel::Column, hidden)
            .slice("q_proj", heads.query_features())
            .slice("k_proj", heads.kv_features())
            .slice("v_proj", heads.kv_features());
        let o = Linear::new(&attention, Parallel::Row, heads.query_features()).slice("o_proj", hidden);
        let gate_up =
            Linear::new(&mlp, Parallel::Column, hidden).slice("gate_proj", intermediate).slice("up_proj", intermediate);
        let down = Linear::new(&mlp, Parallel::Row, intermediate).slice("down_proj", hidden);
        layers.push([spec.linear(qkv)?, spec.linear(o)?, spec.linear(gate_up)?, spec.linear(down)?]);
    }
    let head = spec.linear(Linear::new("", Parallel::Column, hidden).slice(HEAD, vocab))?;
    Ok((spec, Sites { embed, layers, head }))
}
