//! The model: the base weights on the device, the layers that adapters may change, and the adapters in their slots.

use std::{borrow::Cow, cell::RefCell, ops::Range, sync::Arc};

use aril::{
    Element, Slot,
    adapter::{Adapter, SlotImage},
    model::{
        self, EmbeddingId, ExpertsId, ExpertsSite, LinearId, LinearSite, ModelSpec, Parallel, RowsId, Shard, TpRank,
    },
    plan::{Capacity, RouteCapacity},
};

use crate::{
    checkpoint::{Block, ExpertsProjection, Weights},
    config::{Config, DeltaHeads, Heads, Moe},
    device::{DeltaNet, Device, HeadNorms, Norm},
    error::{Context, Result, bail},
    experts::GroupedGemm,
    group::Rank,
    stderr::progress,
};

/// Adapters in the stack of a model, and their largest rank. It does not depend on the adapters that are there, so that
/// the base model has the same bits beside any.
pub const STACK: (usize, usize) = (8, 16);

/// A base model and the adapters that run on it.
pub struct Model<'d, D: Device> {
    /// Where the weights are.
    pub device: &'d D,
    /// The sizes of the whole model.
    pub config: Config,
    /// The heads on this rank.
    pub heads: Heads,
    /// The first token id whose row of the embedding is on this rank.
    pub(crate) first_token: u32,
    /// The bounds on the routes of a step.
    pub routes: RouteCapacity,
    /// The embedding `[vocab, hidden]`: the rows of this rank.
    pub embed: D::Weight,
    pub(crate) embed_lora: D::LoraEmbedding,
    /// The decoder layers.
    pub layers: Vec<Layer<D>>,
    /// The last norm.
    pub norm: Norm<D>,
    /// Absent if it is tied to the embedding. Its adapters and those of the embedding are separate in either case.
    pub head: Option<D::Weight>,
    pub(crate) head_id: LinearId,
    pub(crate) head_lora: D::LoraLinear,
    /// Those that adapters have in the place of the embedding's and of the head's.
    pub(crate) rows: D::TrainedRows,
    /// The table of the adapters.
    pub adapters: D::Adapters,
    /// That of the linear layers, if the device has one.
    pub stack: Option<RefCell<D::Stack>>,
}

/// A layer of the base model, with its operations for adapters.
pub struct Layer<D: Device> {
    pub(crate) input_norm: Norm<D>,
    /// The projections in front of the mixer, fused.
    pub(crate) input: Linear<D>,
    /// What lets a token see those in front of it.
    pub mixer: Mixer<D>,
    /// The projection behind it.
    pub(crate) output: Linear<D>,
    pub(crate) post_norm: Norm<D>,
    /// Behind the second norm.
    pub mlp: Mlp<D>,
}

/// What lets a token see those in front of it.
pub enum Mixer<D: Device> {
    /// Attention, whose projections are q, k and v.
    Attention(HeadNorms<D>),
    /// A gated delta net, whose projections are q, k and v in one, z, b and a.
    DeltaNet(DeltaNet<D>),
}

/// A linear layer of the base model, and its operations for adapters.
pub struct Linear<D: Device> {
    /// The layer in the library's model.
    pub id: LinearId,
    /// The base weight `[out, in]` of this rank.
    pub base: D::Weight,
    /// Its operations for adapters.
    pub lora: D::LoraLinear,
}

impl<D: Device> Linear<D> {
    /// The base weight, and the operations for adapters.
    pub fn parts(&self) -> (&D::Weight, &D::LoraLinear) {
        (&self.base, &self.lora)
    }
}

/// The MLP of a layer.
pub enum Mlp<D: Device> {
    /// One for all tokens.
    Dense(Dense<D>),
    /// Experts, of which a router chooses some for each token.
    Sparse(Experts<D>),
}

/// A dense MLP.
pub struct Dense<D: Device> {
    /// The projections before the activation, fused.
    pub gate_up: Linear<D>,
    /// The projection after it.
    pub down: Linear<D>,
}

/// The expert that all tokens share.
pub struct Shared<D: Device> {
    pub(crate) mlp: Dense<D>,
    /// Has one output, which gates the expert's. Every rank has all of it.
    pub(crate) gate: Linear<D>,
}

impl<D: Device> Mlp<D> {
    /// The MLP that all tokens go through.
    pub(crate) fn dense(&self) -> Option<&Dense<D>> {
        match self {
            Self::Dense(dense) => Some(dense),
            Self::Sparse(experts) => experts.shared.as_ref().map(|shared| &shared.mlp),
        }
    }

    fn dense_mut(&mut self) -> Option<&mut Dense<D>> {
        match self {
            Self::Dense(dense) => Some(dense),
            Self::Sparse(experts) => experts.shared.as_mut().map(|shared| &mut shared.mlp),
        }
    }
}

/// The experts of a layer of the base model, and their operations for adapters.
pub struct Experts<D: Device> {
    /// The router, whose outputs are the scores of all experts. Every rank has all of it.
    pub router: Linear<D>,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub(crate) normalized: bool,
    /// The experts on this rank.
    pub held: Range<usize>,
    pub(crate) gate_up: Box<dyn GroupedGemm<D>>,
    /// The projection after the activation.
    pub down: Box<dyn GroupedGemm<D>>,
    /// Their operations for adapters.
    pub lora: D::LoraExperts,
    /// Whose output is added to theirs.
    pub(crate) shared: Option<Shared<D>>,
}

impl<'d, D: Device> Model<'d, D> {
    /// Builds the device's part of the base model for steps of at most `tokens` tokens, whose adapters are in `table`.
    ///
    /// # Errors
    ///
    /// If the weights do not fit the configuration, or the device has no memory for them.
    pub fn new(
        device: &'d D,
        config: &Config,
        Described { model, sites }: &Described,
        mut weights: Weights<'_>,
        table: D::Adapters,
        tokens: usize,
    ) -> Result<Self> {
        if device.tp() != model.tp() {
            bail!("a device of {:?} cannot run the model of {:?}", device.tp(), model.tp());
        }
        // All layers with experts have equally many. The library's bounds are at least 1.
        let experts = model.expert_layers().first();
        let (experts, top_k) = experts.map_or((1, 1), |site| (site.held().len(), site.top_k()));
        let routes = RouteCapacity::tokens(tokens).top_k(top_k).experts(experts);

        let Config { vocab, hidden, .. } = *config;
        let whole = [vocab, hidden];
        // The embedding and the head have the same rows, and zeros below the last one of the vocabulary.
        let (site, of_vocab) = (&model[sites.head], Block::of_outputs(&model[sites.head], 0));
        let padded = |values: Cow<'_, [D::Elem]>| {
            let zeros = vec![D::Elem::default(); site.out_features() * hidden - values.len()];
            device.weight(site.out_features(), hidden, &[values, zeros.into()])
        };
        let embed = padded(weights.module(EMBED, whole, &of_vocab)?)?;
        let mut builder = Builder { device, config, model, adapters: &table, weights: &mut weights };
        let layers = sites.layers.iter().enumerate().map(|(layer, sites)| builder.layer(layer, sites));
        let layers = layers.collect::<Result<_>>()?;
        let norm = builder.norm("model.norm".into(), hidden)?;
        let head = if !config.tied {
            Some(weights.module(HEAD, whole, &of_vocab)?)
        } else if weights.adapts(EMBED) || weights.adapts(HEAD) {
            Some(weights.module_from(HEAD, EMBED, whole, &of_vocab)?)
        } else {
            None
        };
        let head = head.map(padded).transpose()?;
        if config.tied {
            // Some savers store the tied head a second time; transformers does not read it either.
            weights.ignore("lm_head.weight");
        }
        weights.finish()?;

        Ok(Self {
            device,
            config: config.clone(),
            heads: local_heads(config, model, &sites.layers),
            first_token: u32::try_from(model[sites.embed].range().start)?,
            routes,
            embed,
            embed_lora: device.lora_embedding(&table, sites.embed)?,
            layers,
            norm,
            head,
            head_id: sites.head,
            head_lora: device.lora_linear(&table, sites.head)?,
            rows: device.trained_rows(&table, sites.rows)?,
            adapters: table,
            stack: None,
        })
    }

    /// Gives the layers a stack for so many adapters of so high a rank, if the device has one.
    ///
    /// # Errors
    ///
    /// If the device has no memory for it.
    pub fn stacked(self, bounds: (usize, usize)) -> Result<Self> {
        let Self { device, adapters, mut layers, .. } = self;
        let linears = layers.iter_mut().flat_map(|Layer { input, output, mlp, .. }| {
            let of_mlp = mlp.dense_mut().map(|Dense { gate_up, down }| [gate_up, down]);
            let linears = [input, output].into_iter().chain(of_mlp.into_iter().flatten());
            linears.map(|Linear { base, id, lora }| (base, *id, &*lora))
        });
        let stack = device.stack(&adapters, bounds, linears)?.map(RefCell::new);
        Ok(Self { device, adapters, layers, stack, ..self })
    }
}

impl<D: Device> Model<'_, D> {
    /// The routers, as the library has them.
    pub fn routers(&self) -> impl Iterator<Item = LinearId> {
        self.layers.iter().filter_map(|layer| match &layer.mlp {
            Mlp::Dense(_) => None,
            Mlp::Sparse(experts) => Some(experts.router.id),
        })
    }
}

/// A table with these adapters, and the slot of each, for steps of at most `tokens` tokens. A rank that cannot load one
/// ends its group.
///
/// # Errors
///
/// If an adapter does not fit the model, or cannot be loaded.
pub fn load<D: Device>(
    device: &D,
    model: &model::Model,
    adapters: &[(String, Arc<Adapter>)],
    tokens: usize,
    rank: &Rank,
) -> Result<(D::Adapters, Vec<Slot>)> {
    let images = adapters
        .iter()
        .map(|(name, adapter)| adapter.plan(model, D::Elem::DTYPE).context(format_args!("adapter `{name}`")));
    let images = images.collect::<Result<Vec<_>>>()?;
    let capacity = capacity(tokens, images.iter().map(SlotImage::max_rank), rank)?;
    let table = device.adapters(model, capacity, D::arena_bytes(&images))?;
    let load = |(index, ((name, _), image)): (usize, (&(String, _), &SlotImage<'_>))| {
        let loaded = device.load(&table, index, image, progress(name, image.bytes()));
        loaded.context(format_args!("adapter `{name}`"))
    };
    let slots = adapters.iter().zip(&images).enumerate().map(load).collect::<Result<_>>()?;
    Ok((table, slots))
}

/// The bounds of a table for adapters whose factors on this rank have these ranks. They are equal on all ranks of the
/// group, which exchange matrices of such sizes.
///
/// # Errors
///
/// If another rank has ended.
pub fn capacity(tokens: usize, ranks: impl ExactSizeIterator<Item = usize>, rank: &Rank) -> Result<Capacity> {
    // The library's bounds are at least 1.
    let slots = ranks.len().max(1);
    Ok(Capacity::tokens(tokens).slots(slots).rank(rank.largest(ranks.max().unwrap_or(0).max(1))?))
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
        let path = format!("model.layers.{layer}");
        let (inputs, outputs, mixer) = match self.config.delta_net_in(layer) {
            None => {
                let attention = format!("{path}.self_attn");
                let [q, k] = ["q_norm", "k_norm"].map(|norm| self.norm(format!("{attention}.{norm}"), heads.dim));
                let kv = heads.kv_features();
                let inputs = vec![heads.projected_features(), kv, kv];
                (inputs, heads.query_features(), Mixer::Attention(HeadNorms { q: q?, k: k? }))
            }
            Some(heads) => {
                let inputs = vec![heads.convolved_features(), heads.value_features(), heads.value, heads.value];
                let net = self.delta_net(&format!("{path}.linear_attn"), heads, &self.model[sites.input])?;
                (inputs, heads.value_features(), Mixer::DeltaNet(net))
            }
        };
        Ok(Layer {
            input_norm: self.norm(format!("{path}.input_layernorm"), hidden)?,
            input: self.linear(hidden, &inputs, sites.input)?,
            mixer,
            output: self.linear(outputs, &[hidden], sites.output)?,
            post_norm: self.norm(format!("{path}.post_attention_layernorm"), hidden)?,
            mlp: self.mlp(&format!("{path}.mlp"), &sites.mlp)?,
        })
    }

    /// The weights of a gated delta net beside its projections, for the heads that its rank has of these.
    fn delta_net(&mut self, path: &str, heads: DeltaHeads, input: &LinearSite) -> Result<DeltaNet<D>> {
        let (qkv, of_heads) = (input.slices()[0].ranges(), input.slices()[3].ranges());
        let shape = [heads.convolved_features(), 1, heads.taps];
        let block = Block { rows: qkv.to_vec(), cols: 0..heads.taps };
        let taps = self.weights.tensor(&format!("{path}.conv1d.weight"), &shape, &block)?;
        let block = Block { rows: Block::whole(&[heads.value]).rows, cols: of_heads[0].clone() };
        let local = block.cols.len();
        let mut of_heads = |name: &str| {
            let values = self.weights.tensor(&format!("{path}.{name}"), &[heads.value], &block)?;
            self.device.tensor(1, local, &values)
        };
        let (a_log, dt_bias) = (of_heads("A_log")?, of_heads("dt_bias")?);
        let weight = self.weights.norm(&format!("{path}.norm"), heads.value_dim)?;
        let weight = self.device.tensor(1, heads.value_dim, &weight)?;
        let heads = DeltaHeads { key: heads.key * local / heads.value, value: local, ..heads };
        let taps = self.device.tensor(heads.convolved_features(), heads.taps, &taps)?;
        Ok(DeltaNet { heads, taps, a_log, dt_bias, norm: Norm { weight, offset: 0.0, eps: self.config.eps } })
    }

    fn mlp(&mut self, path: &str, sites: &MlpSites) -> Result<Mlp<D>> {
        let Config { hidden, .. } = *self.config;
        match *sites {
            MlpSites::Dense(dense) => Ok(Mlp::Dense(self.dense(dense)?)),
            MlpSites::Sparse { ref moe, router, experts, shared } => Ok(Mlp::Sparse(Experts {
                router: self.linear(hidden, &[moe.experts], router)?,
                top_k: moe.top_k,
                normalized: moe.normalized,
                held: held(&self.model[experts]),
                gate_up: self.experts(path, ExpertsProjection::GATE_UP, [moe.intermediate, hidden], experts)?,
                down: self.experts(path, ExpertsProjection::DOWN, [hidden, moe.intermediate], experts)?,
                lora: self.device.lora_experts(self.adapters, experts)?,
                shared: match shared {
                    Some((mlp, gate)) => Some(Shared { mlp: self.dense(mlp)?, gate: self.linear(hidden, &[1], gate)? }),
                    None => None,
                },
            })),
        }
    }

    fn dense(&mut self, DenseSites { gate_up, down }: DenseSites) -> Result<Dense<D>> {
        let Config { hidden, intermediate, .. } = *self.config;
        Ok(Dense {
            gate_up: self.linear(hidden, &[intermediate, intermediate], gate_up)?,
            down: self.linear(intermediate, &[hidden], down)?,
        })
    }

    fn experts(
        &mut self,
        path: &str,
        projection: ExpertsProjection<'_>,
        whole: [usize; 2],
        id: ExpertsId,
    ) -> Result<Box<dyn GroupedGemm<D>>> {
        let (shape, weights) = self.weights.experts(&format!("{path}.experts"), projection, whole, self.model, id)?;
        self.device.experts(shape, weights)
    }

    /// Reads the rank's part of the modules of a layer, which has these sizes before it is cut.
    fn linear(&mut self, in_features: usize, out_features: &[usize], id: LinearId) -> Result<Linear<D>> {
        let site = &self.model[id];
        let module = |(index, &rows): (usize, &usize)| {
            let module = site.slices()[index].module();
            self.weights.module(module, [rows, in_features], &Block::of_outputs(site, index))
        };
        let parts = out_features.iter().enumerate().map(module).collect::<Result<Vec<_>>>()?;
        let base = self.device.weight(site.out_features(), site.in_features(), &parts)?;
        Ok(Linear { id, base, lora: self.device.lora_linear(self.adapters, id)? })
    }

    fn norm(&mut self, path: String, len: usize) -> Result<Norm<D>> {
        let weight = self.device.tensor(1, len, &self.weights.norm(&path, len)?)?;
        Ok(Norm { weight, offset: if self.config.hybrid.is_some() { 1.0 } else { 0.0 }, eps: self.config.eps })
    }
}

impl Block {
    /// The part of a module's weight that the rank of a layer holds.
    fn of_outputs(site: &LinearSite, slice: usize) -> Self {
        Self { rows: site.slices()[slice].ranges().to_vec(), cols: site.in_range() }
    }
}

/// The experts of a layer on its rank, which [`describe`] has made one range.
pub fn held(site: &ExpertsSite) -> Range<usize> {
    let first = site.held().first().copied().unwrap_or(0);
    first..first + site.held().len()
}

/// The heads of q, k and v on this rank.
fn local_heads(config: &Config, model: &model::Model, layers: &[LayerSites]) -> Heads {
    let attention = (0..config.layers).find(|&layer| config.delta_net_in(layer).is_none());
    let Some(layer) = attention else { return config.heads };
    let [query, kv, ..] = model[layers[layer].input].slices() else { return config.heads };
    let one = Heads { query: 1, kv: 1, ..config.heads };
    Heads {
        query: query.out_features() / one.projected_features(),
        kv: kv.out_features() / one.kv_features(),
        ..config.heads
    }
}

const EMBED: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// The layers that adapters may change, and their places.
#[derive(Debug)]
pub struct Described {
    /// The layers as the library has them, on this rank.
    pub model: model::Model,
    sites: Sites,
}

/// The ids of the adapted layers in the [`model::Model`].
#[derive(Debug)]
struct Sites {
    embed: EmbeddingId,
    layers: Vec<LayerSites>,
    head: LinearId,
    rows: RowsId,
}

#[derive(Debug)]
struct LayerSites {
    input: LinearId,
    output: LinearId,
    mlp: MlpSites,
}

#[derive(Debug)]
enum MlpSites {
    Dense(DenseSites),
    Sparse { moe: Moe, router: LinearId, experts: ExpertsId, shared: Option<(DenseSites, LinearId)> },
}

#[derive(Clone, Copy, Debug)]
struct DenseSites {
    gate_up: LinearId,
    down: LinearId,
}

impl DenseSites {
    fn describe(spec: &mut ModelSpec, path: &str, Config { hidden, intermediate, .. }: &Config) -> Result<Self> {
        let gate_up = model::Linear::new(path, Parallel::Column, *hidden);
        let gate_up = gate_up.slice("gate_proj", *intermediate).slice("up_proj", *intermediate);
        let down = model::Linear::new(path, Parallel::Row, *intermediate).slice("down_proj", *hidden);
        Ok(Self { gate_up: spec.linear(gate_up)?, down: spec.linear(down)? })
    }
}

/// A rank, and how the ranks of its group split the model.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// The rank in its group.
    pub tp: TpRank,
    /// Whether each rank has some of the experts of a layer, instead of a part of each expert.
    pub expert_parallel: bool,
    /// Whether each rank has a part of both factors of a linear layer, instead of a part of one and all of the other.
    pub fully_sharded: bool,
}

impl From<TpRank> for Split {
    /// Tensor parallelism alone.
    fn from(tp: TpRank) -> Self {
        Self { tp, expert_parallel: false, fully_sharded: false }
    }
}

/// Describes the adapted layers and the PEFT modules fused into them, as a rank holds them.
///
/// # Errors
///
/// If the ranks cannot share the model's features or experts evenly.
pub fn describe(config: &Config, split: impl Into<Split>) -> Result<Described> {
    use aril::model::{Experts, Linear, Part};

    let Split { tp, expert_parallel, fully_sharded } = split.into();

    let Config { vocab, hidden, heads, .. } = *config;
    let mut spec = ModelSpec::new();
    let padded = vocab.next_multiple_of(tp.size());
    let embed = spec.vocab_parallel_embedding(EMBED, vocab, padded, hidden)?;
    let mut layers = Vec::with_capacity(config.layers);
    for layer in 0..config.layers {
        let mlp = format!("model.layers.{layer}.mlp");
        let (input, output) = match config.delta_net_in(layer) {
            None => {
                let attention = format!("model.layers.{layer}.self_attn");
                let input = Linear::new(&attention, Parallel::Column, hidden)
                    .heads("q_proj", heads.query, heads.projected_features() / heads.query)
                    .kv_heads("k_proj", heads.kv, heads.dim)
                    .kv_heads("v_proj", heads.kv, heads.dim);
                (input, Linear::new(&attention, Parallel::Row, heads.query_features()).slice("o_proj", hidden))
            }
            Some(heads) => {
                let net = format!("model.layers.{layer}.linear_attn");
                let (keys, values) = (Part::heads(heads.key, heads.key_dim), Part::heads(heads.value, heads.value_dim));
                let input = Linear::new(&net, Parallel::Column, hidden)
                    .merged("in_proj_qkv", [keys, keys, values])
                    .merged("in_proj_z", [values])
                    .heads("in_proj_b", heads.value, 1)
                    .heads("in_proj_a", heads.value, 1);
                (input, Linear::new(&net, Parallel::Row, heads.value_features()).slice("out_proj", hidden))
            }
        };
        let (input, output) = (spec.linear(input)?, spec.linear(output)?);
        let mlp = if let Some(moe) = config.experts_in(layer) {
            let router = Linear::new(&mlp, Parallel::Replicated, hidden).slice("gate", moe.experts);
            let experts = Experts::new(format!("{mlp}.experts"), moe.experts, hidden, moe.intermediate);
            let (router, experts) = (spec.linear(router)?, spec.experts(experts.top_k(moe.top_k))?);
            let shared = if config.hybrid.is_some() {
                let dense = DenseSites::describe(&mut spec, &format!("{mlp}.shared_expert"), config)?;
                let gate = Linear::new(&mlp, Parallel::Replicated, hidden).slice("shared_expert_gate", 1);
                Some((dense, spec.linear(gate)?))
            } else {
                None
            };
            MlpSites::Sparse { moe: moe.clone(), router, experts, shared }
        } else {
            MlpSites::Dense(DenseSites::describe(&mut spec, &mlp, config)?)
        };
        layers.push(LayerSites { input, output, mlp });
    }
    let head = spec.linear(Linear::new("", Parallel::Column, hidden).vocab(HEAD, vocab, padded))?;
    let rows = spec.trained_rows(embed, head, config.tied)?;
    let mut shard = if fully_sharded { Shard::new(tp).fully_sharded() } else { Shard::new(tp) };
    if expert_parallel {
        shard = shard.experts_tp(TpRank::SINGLE);
        for (layer, sites) in layers.iter().enumerate() {
            if let MlpSites::Sparse { moe, experts, .. } = &sites.mlp {
                let held = share(moe.experts, tp).context(format_args!("model.layers.{layer}.mlp.experts"))?;
                shard = shard.held(*experts, held);
            }
        }
    }
    Ok(Described { model: spec.shard(shard)?, sites: Sites { embed, layers, head, rows } })
}

/// The experts of a rank: consecutive ones, of which the first ranks have one more if they cannot be divided evenly.
fn share(experts: usize, tp: TpRank) -> Result<Range<usize>> {
    let (rank, ranks) = (tp.rank(), tp.size());
    if experts < ranks {
        bail!("{experts} experts cannot be spread over {ranks} ranks, each of which needs one");
    }
    let (each, more) = (experts / ranks, experts % ranks);
    let first = rank * each + rank.min(more);
    Ok(first..first + each + usize::from(rank < more))
}
