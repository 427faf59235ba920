//! The reference forward: where the multi-LoRA calls go in a Qwen3.
//!
//! Each stands right behind the base operation whose output it adds to: the embedding, the four GEMMs of a layer (q, k, v in
//! one; o; gate, up in one; down), and the language-model head. They all take the same [`Routed`](Device::Routed) batch, made
//! once per step from one slot per token; only the head, which sees just the sampled rows, has a batch of its own. Nothing else
//! in the forward knows that there are adapters.

use aril::{
    Element, Slot,
    adapter::Adapter,
    model::{Linear, ModelSpec, Parallel, TpRank},
};

use crate::{
    checkpoint::Weights,
    config::{Config, Heads},
    device::{Cache, Capacity, Device, Places, Rope},
    error::{Context, Result},
};

/// A base model and the adapters that run on it.
pub(crate) struct Model<'d, D: Device> {
    pub(crate) device: &'d D,
    config: Config,
    capacity: Capacity,
    embed: D::Weight,
    embed_lora: D::LoraEmbedding,
    layers: Vec<(Layer<D>, LoraLayer<D>)>,
    norm: D::Tensor,
    /// Absent where it is the embedding. Its adapters and those of the embedding are apart either way.
    head: Option<D::Weight>,
    head_lora: D::LoraLinear,
    adapters: D::Adapters,
}

/// A layer of the base model.
struct Layer<D: Device> {
    input_norm: D::Tensor,
    qkv: D::Weight,
    q_norm: D::Tensor,
    k_norm: D::Tensor,
    o: D::Weight,
    post_norm: D::Tensor,
    gate_up: D::Weight,
    down: D::Weight,
}

/// What the adapters add to a layer.
struct LoraLayer<D: Device> {
    qkv: D::LoraLinear,
    o: D::LoraLinear,
    gate_up: D::LoraLinear,
    down: D::LoraLinear,
}

/// The tokens of all requests that run in one pass, packed without padding.
#[derive(Debug, Default)]
pub(crate) struct Step {
    pub(crate) ids: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    /// The cache row of the first token of each token's sequence.
    pub(crate) first_rows: Vec<u32>,
    /// The adapter of each token: what makes requests of different adapters one batch.
    pub(crate) slots: Vec<Slot>,
    /// A factor on the adapter's own scaling, for each token.
    pub(crate) scales: Vec<f32>,
    /// The rows whose next token is wanted.
    pub(crate) sampled: Vec<u32>,
}

/// What is kept from step to step.
pub(crate) struct Session<D: Device> {
    caches: Vec<Cache<D>>,
    rope: Rope<D>,
    routing: D::Routing,
    head_routing: D::Routing,
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

        // The engine's part of the deal: saying once which layers there are, and which modules of PEFT are fused into them.
        let Config { heads, intermediate, .. } = *config;
        let mut spec = ModelSpec::new(TpRank::SINGLE);
        let embed_id = spec.embedding(EMBED, vocab, hidden)?;
        let mut layer_ids = Vec::with_capacity(layers.len());
        for layer in 0..layers.len() {
            let attention = format!("model.layers.{layer}.self_attn");
            let mlp = format!("model.layers.{layer}.mlp");
            layer_ids.push([
                spec.linear(
                    Linear::new(&attention, Parallel::Column, hidden)
                        .slice("q_proj", heads.query_features())
                        .slice("k_proj", heads.kv_features())
                        .slice("v_proj", heads.kv_features()),
                )?,
                spec.linear(Linear::new(&attention, Parallel::Row, heads.query_features()).slice("o_proj", hidden))?,
                spec.linear(
                    Linear::new(&mlp, Parallel::Column, hidden)
                        .slice("gate_proj", intermediate)
                        .slice("up_proj", intermediate),
                )?,
                spec.linear(Linear::new(&mlp, Parallel::Row, intermediate).slice("down_proj", hidden))?,
            ]);
        }
        let head_id = spec.linear(Linear::new("", Parallel::Column, hidden).slice(HEAD, vocab))?;

        let lora_linear = |id| device.lora_linear(&spec, id, capacity);
        let layers = layers.into_iter().zip(layer_ids).map(|(layer, [qkv, o, gate_up, down])| {
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
            embed_lora: device.lora_embedding(&spec, embed_id, capacity)?,
            layers: layers.collect::<Result<_>>()?,
            norm,
            head,
            head_lora: lora_linear(head_id)?,
            adapters: table,
        })
    }

    /// Sets up a run of sequences that take `rows` rows of the cache together, the longest of them `positions`.
    pub(crate) fn session(&self, rows: usize, positions: usize) -> Result<Session<D>> {
        let Self { device, config, capacity, .. } = self;
        let features = config.heads.kv_features();
        let cache = || Ok(Cache { keys: device.zeros(rows, features)?, values: device.zeros(rows, features)? });
        Ok(Session {
            caches: (0..config.layers).map(|_| cache()).collect::<Result<_>>()?,
            rope: self.rope(positions)?,
            routing: device.routing(*capacity)?,
            head_routing: device.routing(*capacity)?,
        })
    }

    /// Runs a step of all requests, and gives the logits of the sampled rows: `[sampled, vocab]`.
    pub(crate) fn forward(&self, session: &mut Session<D>, step: &Step) -> Result<D::Tensor> {
        let Self { device, config: Config { heads, eps, .. }, .. } = *self;
        let ids = device.indices(&step.ids)?;
        let rows: Vec<u32> = step.first_rows.iter().zip(&step.positions).map(|(first, at)| first + at).collect();
        let places = Places {
            positions: device.indices(&step.positions)?,
            first_rows: device.indices(&step.first_rows)?,
            rows: device.indices(&rows)?,
        };
        let batch = device.route(&mut session.routing, &step.slots, &step.scales)?;

        let mut h = device.embed(&self.embed, &ids)?;
        device.add_embedding_delta(&self.embed_lora, &ids, &mut h, &self.adapters, &batch)?;

        for ((layer, lora), cache) in self.layers.iter().zip(&mut session.caches) {
            let x = device.rms_norm(&h, &layer.input_norm, eps)?;
            let mut qkv = self.linear(&x, &layer.qkv, &lora.qkv, &batch)?;
            device.head_norm(&mut qkv, heads.queries(), &layer.q_norm, eps)?;
            device.head_norm(&mut qkv, heads.keys(), &layer.k_norm, eps)?;
            device.rope(&mut qkv, heads.queries().start..heads.keys().end, &session.rope, &places)?;
            device.append(&qkv, heads, &places, cache)?;
            let x = device.attention(&qkv, heads, &places, cache)?;
            let y = self.linear(&x, &layer.o, &lora.o, &batch)?;
            device.add(&mut h, &y)?;

            let x = device.rms_norm(&h, &layer.post_norm, eps)?;
            let gate_up = self.linear(&x, &layer.gate_up, &lora.gate_up, &batch)?;
            let x = device.silu_mul(&gate_up)?;
            let y = self.linear(&x, &layer.down, &lora.down, &batch)?;
            device.add(&mut h, &y)?;
        }

        let sampled = |row: &u32| *row as usize;
        let slots: Vec<Slot> = step.sampled.iter().map(|row| step.slots[sampled(row)]).collect();
        let scales: Vec<f32> = step.sampled.iter().map(|row| step.scales[sampled(row)]).collect();
        let batch = device.route(&mut session.head_routing, &slots, &scales)?;
        let h = device.gather(&h, &device.indices(&step.sampled)?)?;
        let x = device.rms_norm(&h, &self.norm, eps)?;
        self.linear(&x, self.head.as_ref().unwrap_or(&self.embed), &self.head_lora, &batch)
    }

    /// The base model's GEMM, then every token's adapter on top of it: all that multi-LoRA asks of a linear layer.
    fn linear(
        &self,
        x: &D::Tensor,
        weight: &D::Weight,
        lora: &D::LoraLinear,
        batch: &D::Routed<'_>,
    ) -> Result<D::Tensor> {
        let mut y = self.device.gemm(x, weight)?;
        self.device.add_delta(lora, x, &mut y, &self.adapters, batch)?;
        Ok(y)
    }

    /// Frequencies and angles in `f32`, their cosines and sines rounded to the element type, all as transformers has them.
    #[expect(clippy::cast_possible_truncation, reason = "where transformers rounds")]
    fn rope(&self, positions: usize) -> Result<Rope<D>> {
        let Heads { dim, .. } = self.config.heads;
        let theta = self.config.rope_theta as f32;
        let frequencies: Vec<f32> =
            (0..dim).step_by(2).map(|feature| 1.0 / theta.powf(feature as f32 / dim as f32)).collect();
        let angles: Vec<f32> = (0..positions)
            .flat_map(|position| frequencies.iter().map(move |frequency| position as f32 * frequency))
            .collect();
        let table = |function: fn(f64) -> f64| {
            let round = |&angle: &f32| D::Elem::from_f32(function(f64::from(angle)) as f32);
            let values: Vec<_> = angles.iter().map(round).collect();
            self.device.tensor(positions, frequencies.len(), &values)
        };
        Ok(Rope { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }
}

const EMBED: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

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
