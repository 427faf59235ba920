//! The model: the base weights on the device, the layers that adapters may change, and the adapters in their slots.

use std::sync::Arc;

use aril::{
    Element, Slot,
    adapter::{Adapter, SlotImage},
    model::{self, EmbeddingId, ExpertsId, LinearId, ModelSpec, Parallel, TpRank},
    plan::{Capacity, RouteCapacity},
};

use crate::{
    checkpoint::{ExpertsProjection, Weights},
    config::{Config, Moe},
    device::Device,
    error::{Context, Result},
    experts::GroupedGemm,
    stderr::progress,
};

/// A base model and the adapters that run on it.
pub(crate) struct Model<'d, D: Device> {
    pub(crate) device: &'d D,
    pub(crate) config: Config,
    pub(crate) routes: RouteCapacity,
    pub(crate) embed: D::Weight,
    pub(crate) embed_lora: D::LoraEmbedding,
    pub(crate) layers: Vec<Layer<D>>,
    pub(crate) norm: D::Tensor,
    /// Absent if it is tied to the embedding. Its adapters and those of the embedding are separate in either case.
    pub(crate) head: Option<D::Weight>,
    pub(crate) head_lora: D::LoraLinear,
    pub(crate) adapters: D::Adapters,
}

/// A layer of the base model, with its operations for adapters.
pub(crate) struct Layer<D: Device> {
    pub(crate) input_norm: D::Tensor,
    pub(crate) qkv: Linear<D>,
    pub(crate) q_norm: D::Tensor,
    pub(crate) k_norm: D::Tensor,
    pub(crate) o: Linear<D>,
    pub(crate) post_norm: D::Tensor,
    pub(crate) mlp: Mlp<D>,
}

/// A linear layer of the base model, and its operations for adapters.
pub(crate) struct Linear<D: Device> {
    pub(crate) id: LinearId,
    pub(crate) base: D::Weight,
    pub(crate) lora: D::LoraLinear,
}

pub(crate) enum Mlp<D: Device> {
    Dense { gate_up: Linear<D>, down: Linear<D> },
    Sparse(Experts<D>),
}

/// The experts of a layer of the base model, and their operations for adapters.
pub(crate) struct Experts<D: Device> {
    pub(crate) router: D::Weight,
    /// Experts per token.
    pub(crate) top_k: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub(crate) normalized: bool,
    pub(crate) gate_up: Box<dyn GroupedGemm<D>>,
    pub(crate) down: Box<dyn GroupedGemm<D>>,
    pub(crate) lora: D::LoraExperts,
}

impl<'d, D: Device> Model<'d, D> {
    /// Builds the base model for steps of at most `tokens` tokens, whose adapters are in `table`.
    pub(crate) fn new(
        device: &'d D,
        config: &Config,
        Described { model, sites }: &Described,
        mut weights: Weights<'_>,
        table: D::Adapters,
        tokens: usize,
    ) -> Result<Self> {
        // The library's bounds are at least 1.
        let (experts, top_k) = config.moe.as_ref().map_or((1, 1), |moe| (moe.experts, moe.top_k));
        let routes = RouteCapacity::tokens(tokens).top_k(top_k).experts(experts);

        let Config { vocab, hidden, .. } = *config;
        let embed = device.weight(vocab, hidden, &[weights.module(EMBED, vocab, hidden)?])?;
        let mut builder = Builder { device, config, model, adapters: &table, weights: &mut weights };
        let layers = sites.layers.iter().enumerate().map(|(layer, sites)| builder.layer(layer, sites));
        let layers = layers.collect::<Result<_>>()?;
        let norm = device.tensor(1, hidden, &weights.norm("model.norm", hidden)?)?;
        let head = if !config.tied {
            Some(weights.module(HEAD, vocab, hidden)?)
        } else if weights.adapts(EMBED) || weights.adapts(HEAD) {
            Some(weights.module_from(HEAD, EMBED, vocab, hidden)?)
        } else {
            None
        };
        let head = head.map(|values| device.weight(vocab, hidden, &[values])).transpose()?;
        if config.tied {
            // Some savers store the tied head a second time; transformers does not read it either.
            weights.ignore("lm_head.weight");
        }
        weights.finish()?;

        Ok(Self {
            device,
            config: config.clone(),
            routes,
            embed,
            embed_lora: device.lora_embedding(&table, sites.embed)?,
            layers,
            norm,
            head,
            head_lora: device.lora_linear(&table, sites.head)?,
            adapters: table,
        })
    }
}

/// A table with these adapters in the slots 0, 1, ..., for steps of at most `tokens` tokens.
pub(crate) fn load<D: Device>(
    device: &D,
    model: &model::Model,
    adapters: &[(String, Arc<Adapter>)],
    tokens: usize,
) -> Result<D::Adapters> {
    let images = adapters
        .iter()
        .map(|(name, adapter)| adapter.plan(model, D::Elem::DTYPE).context(format_args!("adapter `{name}`")));
    let images = images.collect::<Result<Vec<_>>>()?;
    let table = device.adapters(model, capacity(tokens, images.iter().map(SlotImage::max_rank)), &images)?;
    for (index, ((name, _), image)) in adapters.iter().zip(&images).enumerate() {
        let slot = Slot::new(u16::try_from(index).context("too many adapters")?);
        let progress = progress(name, image.bytes());
        device.load(&table, slot, image, progress).context(format_args!("adapter `{name}`"))?;
    }
    Ok(table)
}

/// The bounds of a table for adapters of these ranks.
pub(crate) fn capacity(tokens: usize, ranks: impl ExactSizeIterator<Item = usize>) -> Capacity {
    // The library's bounds are at least 1.
    let slots = ranks.len().max(1);
    Capacity::tokens(tokens).slots(slots).rank(ranks.max().unwrap_or(0).max(1))
}

/// The inputs from which layers are built.
struct Builder<'a, 'w, D: Device> {
    device: &'a D,
    config: &'a Config,
    model: &'a model::Model,
    adapters: &'a D::Adapters,
    weights: &'a mut Weights<'w>,
}

impl<D: Device> Builder<'_, '_, D> {
    fn layer(&mut self, layer: usize, sites: &LayerSites) -> Result<Layer<D>> {
        let Config { hidden, heads, .. } = *self.config;
        let (query, kv) = (heads.query_features(), heads.kv_features());
        let path = format!("model.layers.{layer}");
        let attention = format!("{path}.self_attn");
        Ok(Layer {
            input_norm: self.norm(format!("{path}.input_layernorm"), hidden)?,
            qkv: self.linear(&attention, hidden, &[("q_proj", query), ("k_proj", kv), ("v_proj", kv)], sites.qkv)?,
            q_norm: self.norm(format!("{attention}.q_norm"), heads.dim)?,
            k_norm: self.norm(format!("{attention}.k_norm"), heads.dim)?,
            o: self.linear(&attention, query, &[("o_proj", hidden)], sites.o)?,
            post_norm: self.norm(format!("{path}.post_attention_layernorm"), hidden)?,
            mlp: self.mlp(&format!("{path}.mlp"), &sites.mlp)?,
        })
    }

    fn mlp(&mut self, path: &str, sites: &MlpSites) -> Result<Mlp<D>> {
        let Config { hidden, intermediate, .. } = *self.config;
        match *sites {
            MlpSites::Dense { gate_up, down } => Ok(Mlp::Dense {
                gate_up: self.linear(
                    path,
                    hidden,
                    &[("gate_proj", intermediate), ("up_proj", intermediate)],
                    gate_up,
                )?,
                down: self.linear(path, intermediate, &[("down_proj", hidden)], down)?,
            }),
            MlpSites::Sparse { ref moe, experts } => {
                let router = self.weights.module(&format!("{path}.gate"), moe.experts, hidden)?;
                Ok(Mlp::Sparse(Experts {
                    router: self.device.weight(moe.experts, hidden, &[router])?,
                    top_k: moe.top_k,
                    normalized: moe.normalized,
                    gate_up: self.experts(path, ExpertsProjection::GATE_UP, experts)?,
                    down: self.experts(path, ExpertsProjection::DOWN, experts)?,
                    lora: self.device.lora_experts(self.adapters, experts)?,
                }))
            }
        }
    }

    fn experts(
        &mut self,
        path: &str,
        projection: ExpertsProjection<'_>,
        id: ExpertsId,
    ) -> Result<Box<dyn GroupedGemm<D>>> {
        let (shape, weights) = self.weights.experts(&format!("{path}.experts"), projection, self.model, id)?;
        self.device.experts(shape, weights)
    }

    fn linear(&mut self, path: &str, in_features: usize, slices: &[(&str, usize)], id: LinearId) -> Result<Linear<D>> {
        let module = |&(module, out_features): &(&str, usize)| {
            self.weights.module(&format!("{path}.{module}"), out_features, in_features)
        };
        let parts = slices.iter().map(module).collect::<Result<Vec<_>>>()?;
        let base = self.device.weight(slices.iter().map(|(_, rows)| rows).sum(), in_features, &parts)?;
        Ok(Linear { id, base, lora: self.device.lora_linear(self.adapters, id)? })
    }

    fn norm(&mut self, path: String, len: usize) -> Result<D::Tensor> {
        self.device.tensor(1, len, &self.weights.norm(&path, len)?)
    }
}

const EMBED: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// The layers that adapters may change, and their places.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) model: model::Model,
    sites: Sites,
}

/// The ids of the adapted layers in the [`model::Model`].
#[derive(Debug)]
struct Sites {
    embed: EmbeddingId,
    layers: Vec<LayerSites>,
    head: LinearId,
}

#[derive(Debug)]
struct LayerSites {
    qkv: LinearId,
    o: LinearId,
    mlp: MlpSites,
}

#[derive(Debug)]
enum MlpSites {
    Dense { gate_up: LinearId, down: LinearId },
    Sparse { moe: Moe, experts: ExpertsId },
}

/// Describes the adapted layers and the PEFT modules fused into them.
pub(crate) fn describe(config: &Config) -> Result<Described> {
    use aril::model::{Experts, Linear};

    let Config { vocab, hidden, intermediate, heads, .. } = *config;
    let mut spec = ModelSpec::new();
    let embed = spec.embedding(EMBED, vocab, hidden)?;
    let mut layers = Vec::with_capacity(config.layers);
    for layer in 0..config.layers {
        let attention = format!("model.layers.{layer}.self_attn");
        let mlp = format!("model.layers.{layer}.mlp");
        let qkv = Linear::new(&attention, Parallel::Column, hidden)
            .heads("q_proj", heads.query, heads.dim)
            .kv_heads("k_proj", heads.kv, heads.dim)
            .kv_heads("v_proj", heads.kv, heads.dim);
        let o = Linear::new(&attention, Parallel::Row, heads.query_features()).slice("o_proj", hidden);
        let (qkv, o) = (spec.linear(qkv)?, spec.linear(o)?);
        let mlp = if let Some(moe) = config.experts_in(layer) {
            let experts = Experts::new(format!("{mlp}.experts"), moe.experts, hidden, moe.intermediate);
            MlpSites::Sparse { moe: moe.clone(), experts: spec.experts(experts.top_k(moe.top_k))? }
        } else {
            let gate_up = Linear::new(&mlp, Parallel::Column, hidden);
            let gate_up = gate_up.slice("gate_proj", intermediate).slice("up_proj", intermediate);
            let down = Linear::new(&mlp, Parallel::Row, intermediate).slice("down_proj", hidden);
            MlpSites::Dense { gate_up: spec.linear(gate_up)?, down: spec.linear(down)? }
        };
        layers.push(LayerSites { qkv, o, mlp });
    }
    let head = spec.linear(Linear::new("", Parallel::Column, hidden).slice(HEAD, vocab))?;
    Ok(Described { model: spec.shard(TpRank::SINGLE)?, sites: Sites { embed, layers, head } })
}
