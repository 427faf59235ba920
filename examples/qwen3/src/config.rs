//! `config.json` of a Qwen3, dense or with experts, as transformers 4 (`rope_theta`, `torch_dtype`, `num_experts`) and
//! 5 (`rope_parameters`, `dtype`, `num_local_experts`) write it, or of a Qwen3.5 with experts, alone or as the
//! `text_config` of the model that also sees images.
//!
//! Invariant: a [`Config`] describes a model that the forward computes exactly. Unsupported fields are rejected by
//! name.

use std::{collections::BTreeSet, path::Path};

use aril::DType;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{
    error::{Context, Result, bail},
    experts::{Integers, Packing},
    files,
};

/// The largest configuration in MiB.
const MAX_MIB: u64 = 4;

/// The largest size that the kernels can index.
const MAX_SIZE: usize = i32::MAX as usize;

/// Groups of packed weights must be a multiple of this, the depth of a step of the GPU's kernel.
const GROUP_UNIT: usize = 32;

/// The sizes and constants of a Qwen3 or Qwen3.5.
#[derive(Clone, Debug)]
pub struct Config {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Features between layers.
    pub hidden: usize,
    /// Intermediate size of a dense layer's MLP, or of the expert that all tokens share.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Of a `qwen3_moe` or a `qwen3_5_moe`.
    pub moe: Option<Moe>,
    /// Of a `qwen3_5_moe`.
    pub hybrid: Option<Hybrid>,
    /// If weights may be packed: how.
    pub packing: Option<Packing>,
    /// The heads of attention.
    pub heads: Heads,
    /// Added to the mean square in each norm.
    pub eps: f32,
    /// The features of a head that are rotated, from the first on.
    pub rotary: usize,
    /// The base of the rotary frequencies.
    pub rope_theta: f64,
    /// Positions of the longest text that the model was trained for.
    pub max_positions: usize,
    /// Whether the language-model head is the embedding.
    pub tied: bool,
    /// The type that the checkpoint declares.
    pub dtype: Option<DType>,
    /// The tokens that end a text.
    pub eos: Vec<u32>,
}

/// The experts of a model, and the layers that have them.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Experts of a layer.
    pub experts: usize,
    /// Intermediate size of an expert.
    pub intermediate: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub(crate) normalized: bool,
    /// The interval of layers with experts. The others have a dense MLP.
    every: usize,
    /// Layers that always have a dense MLP.
    dense: BTreeSet<usize>,
}

/// The layers of a `qwen3_5_moe` that have a gated delta net instead of attention. Such a model also has a gate behind
/// each query, an expert that all tokens share, and norms that multiply by 1 more than their weights.
#[derive(Clone, Debug)]
pub struct Hybrid {
    /// The sizes of the gated delta nets.
    pub heads: DeltaHeads,
    /// Whether each layer has one.
    has_delta_net: Vec<bool>,
}

/// The heads of a row of the fused q, k, v, z, b, a projection of a gated delta net, in this order.
#[derive(Clone, Copy, Debug)]
pub struct DeltaHeads {
    /// Key heads, and as many query heads: each serves `value / key` value heads.
    pub key: usize,
    /// Value heads, and as many heads of z, with a feature each of b and a.
    pub value: usize,
    /// Features of a query and of a key.
    pub key_dim: usize,
    /// Features of a value, and of a head of z.
    pub value_dim: usize,
    /// Positions that the convolution of q, k and v adds up: a token's own, and those in front of it.
    pub taps: usize,
}

impl DeltaHeads {
    /// Features of all values, which is the output size.
    pub fn value_features(self) -> usize {
        self.value * self.value_dim
    }

    /// Features of all queries, keys and values, which are convolved.
    pub fn convolved_features(self) -> usize {
        2 * self.key * self.key_dim + self.value_features()
    }

    /// Elements of the matrix that a value head keeps.
    pub fn state_elems(self) -> usize {
        self.key_dim * self.value_dim
    }
}

/// The heads of a row of the fused q, k, v projection, in this order.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// Key heads, and as many value heads: each serves `query / kv` query heads.
    pub kv: usize,
    /// Features of a head.
    pub dim: usize,
    /// Whether each query is followed by a gate of as many features.
    pub is_gated: bool,
}

impl Heads {
    /// Features of the projection of all queries.
    pub fn projected_features(self) -> usize {
        self.query_features() * if self.is_gated { 2 } else { 1 }
    }

    /// Features of all queries, which is the output size of attention.
    pub fn query_features(self) -> usize {
        self.query * self.dim
    }

    /// Features of all keys, or of all values, which is the size of a row of the cache.
    pub fn kv_features(self) -> usize {
        self.kv * self.dim
    }
}

impl Config {
    /// Reads `config.json`, and the tokens that end a text from `generation_config.json` alone if it exists.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, or describes another model than a Qwen3 that is implemented.
    pub fn read(model: &Path) -> Result<Self> {
        let path = model.join("config.json");
        let fields = Fields::read(&path)?;
        let mut config = Self::parse(&fields).context(path.display())?;
        let generation = model.join("generation_config.json");
        if generation.exists() {
            config.eos = Fields::read(&generation)?.eos().context(generation.display())?.unwrap_or_default();
        }
        Ok(config)
    }

    /// The sizes of a layer's gated delta net; `None` if it has attention.
    pub fn delta_net_in(&self, layer: usize) -> Option<DeltaHeads> {
        self.hybrid.as_ref().filter(|hybrid| hybrid.has_delta_net[layer]).map(|hybrid| hybrid.heads)
    }

    /// The layers that have keys and values.
    pub fn attention_layers(&self) -> usize {
        (0..self.layers).filter(|&layer| self.delta_net_in(layer).is_none()).count()
    }

    /// The experts of a layer; `None` if it is dense.
    pub fn experts_in(&self, layer: usize) -> Option<&Moe> {
        self.moe.as_ref().filter(|moe| (layer + 1).is_multiple_of(moe.every) && !moe.dense.contains(&layer))
    }

    fn parse(fields: &Fields) -> Result<Self> {
        let kind = fields.kind()?;
        let of_text;
        let fields = match fields.get::<Map<String, Value>>("text_config")?.filter(|_| kind == Kind::Hybrid) {
            Some(text) => {
                of_text = fields.with_text(text)?;
                &of_text
            }
            None => fields,
        };
        fields.refuse_unimplemented()?;
        // transformers' own default for Qwen3 is 128, whatever the hidden size.
        let dim = fields.optional_size("head_dim")?.unwrap_or(128);
        let query = fields.size("num_attention_heads")?;
        let kv = fields.size("num_key_value_heads")?;
        if !query.is_multiple_of(kv) {
            bail!("`num_attention_heads` {query} is not a multiple of `num_key_value_heads` {kv}");
        }
        if !dim.is_multiple_of(2) {
            bail!("`head_dim` {dim} is odd, so that rotary embedding cannot pair its features");
        }
        let is_gated = kind == Kind::Hybrid;
        if query.checked_mul(dim).is_none_or(|features| features > MAX_SIZE / 2) {
            bail!("`num_attention_heads` {query} of `head_dim` {dim} have more than {} features", MAX_SIZE / 2);
        }
        let eps: f32 = fields.require("rms_norm_eps")?;
        if !(eps.is_finite() && eps >= 0.0) {
            bail!("`rms_norm_eps` {eps} is not a small positive number");
        }
        let layers = fields.size("num_hidden_layers")?;
        let layer_types: Option<Vec<String>> = fields.get("layer_types")?;
        if kind != Kind::Hybrid {
            refuse_layers(layer_types.iter().flatten(), &["full_attention"])?;
        }
        let (intermediate, rotary) = match kind {
            Kind::Hybrid => ("shared_expert_intermediate_size", fields.rotary(dim)?),
            Kind::Dense | Kind::Moe => ("intermediate_size", dim),
        };
        Ok(Self {
            vocab: fields.size("vocab_size")?,
            hidden: fields.size("hidden_size")?,
            intermediate: fields.size(intermediate)?,
            layers,
            moe: (kind != Kind::Dense).then(|| fields.moe(kind)).transpose()?,
            hybrid: (kind == Kind::Hybrid).then(|| fields.hybrid(layers, layer_types)).transpose()?,
            packing: fields.packing()?,
            heads: Heads { query, kv, dim, is_gated },
            eps,
            rotary,
            rope_theta: fields.rope_theta(kind, rotary)?,
            max_positions: fields.size("max_position_embeddings")?,
            tied: fields.get("tie_word_embeddings")?.unwrap_or(false),
            dtype: fields.dtype()?,
            eos: fields.eos()?.unwrap_or_default(),
        })
    }
}

/// What a `model_type` stands for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Dense,
    Moe,
    Hybrid,
}

fn refuse_layers<'a>(mut types: impl Iterator<Item = &'a String>, known: &[&str]) -> Result<()> {
    match types.find(|kind| !known.contains(&kind.as_str())) {
        Some(kind) => bail!("`layer_types` names `{kind}`; only `{}` is implemented", known.join("` or `")),
        None => Ok(()),
    }
}

/// The fields of a JSON object. `null` counts as absent, as in transformers.
struct Fields(Map<String, Value>);

impl Fields {
    fn read(path: &Path) -> Result<Self> {
        let text = files::read_text(path, MAX_MIB)?;
        Ok(Self(serde_json::from_str(&text).context(path.display())?))
    }

    fn get<V: DeserializeOwned>(&self, name: &str) -> Result<Option<V>> {
        match self.0.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value.clone()).map(Some).context(format_args!("`{name}`")),
        }
    }

    fn require<V: DeserializeOwned>(&self, name: &str) -> Result<V> {
        match self.get(name)? {
            Some(value) => Ok(value),
            None => bail!("`{name}` is missing"),
        }
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        match self.get::<usize>(name)? {
            Some(0) => bail!("`{name}` is 0"),
            Some(size) if size > MAX_SIZE => bail!("`{name}` is {size}; sizes are up to {MAX_SIZE}"),
            size => Ok(size),
        }
    }

    fn size(&self, name: &str) -> Result<usize> {
        match self.optional_size(name)? {
            Some(size) => Ok(size),
            None => bail!("`{name}` is missing"),
        }
    }

    /// The kind of model; all others are refused.
    fn kind(&self) -> Result<Kind> {
        let model_type: String = self.require("model_type")?;
        let (kind, runs) = match &*model_type {
            "qwen3" => (Kind::Dense, "Qwen3ForCausalLM"),
            "qwen3_moe" => (Kind::Moe, "Qwen3MoeForCausalLM"),
            "qwen3_5_moe_text" => (Kind::Hybrid, "Qwen3_5MoeForCausalLM"),
            "qwen3_5_moe" => (Kind::Hybrid, "Qwen3_5MoeForConditionalGeneration"),
            _ => bail!(
                "`model_type` is `{model_type}`; it must be `qwen3`, `qwen3_moe`, `qwen3_5_moe` or `qwen3_5_moe_text`"
            ),
        };
        for architecture in self.get::<Vec<String>>("architectures")?.unwrap_or_default() {
            if architecture != runs {
                bail!("`architectures` names `{architecture}`; it must be `{runs}`, the forward of `{model_type}`");
            }
        }
        Ok(kind)
    }

    /// These fields, with those of the text model in front of them.
    fn with_text(&self, text: Map<String, Value>) -> Result<Self> {
        let tied = "tie_word_embeddings";
        if let (Some(outer), Some(inner)) = (self.0.get(tied), text.get(tied))
            && outer != inner
        {
            bail!("`{tied}` is {outer}, but {inner} in `text_config`");
        }
        let mut fields = self.0.clone();
        fields.extend(text.into_iter().filter(|(_, value)| !value.is_null()));
        Ok(Self(fields))
    }

    fn moe(&self, kind: Kind) -> Result<Moe> {
        let names = ["num_local_experts", "num_experts"];
        let [newer, older] = names.map(|name| self.optional_size(name));
        let experts = match (newer?, older?) {
            (Some(newer), Some(older)) if newer != older => {
                bail!("`{}` is {newer}, but `{}` is {older}", names[0], names[1])
            }
            (Some(experts), _) | (None, Some(experts)) => experts,
            (None, None) => bail!("`{}` or `{}` is missing", names[0], names[1]),
        };
        let top_k = self.size("num_experts_per_tok")?;
        if top_k > experts {
            bail!("`num_experts_per_tok` is {top_k}, but there are {experts} experts");
        }
        Ok(Moe {
            experts,
            intermediate: self.size("moe_intermediate_size")?,
            top_k,
            normalized: kind == Kind::Hybrid || self.get("norm_topk_prob")?.unwrap_or(false),
            every: if kind == Kind::Hybrid { 1 } else { self.optional_size("decoder_sparse_step")?.unwrap_or(1) },
            dense: if kind == Kind::Hybrid {
                BTreeSet::new()
            } else {
                self.get("mlp_only_layers")?.unwrap_or_default()
            },
        })
    }

    fn hybrid(&self, layers: usize, layer_types: Option<Vec<String>>) -> Result<Hybrid> {
        const DELTA_NET: &str = "linear_attention";
        if self.get::<bool>("attn_output_gate")? == Some(false) {
            bail!("`attn_output_gate` is false, which is not implemented");
        }
        let has_delta_net: Vec<bool> = match layer_types {
            Some(types) => {
                refuse_layers(types.iter(), &["full_attention", DELTA_NET])?;
                types.iter().map(|kind| kind == DELTA_NET).collect()
            }
            None => {
                let interval = self.optional_size("full_attention_interval")?.unwrap_or(4);
                (1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect()
            }
        };
        if has_delta_net.len() != layers {
            bail!("`layer_types` names {} layers, but `num_hidden_layers` is {layers}", has_delta_net.len());
        }
        if has_delta_net.iter().all(|&has| has) {
            bail!("no layer has attention, which is not implemented");
        }
        let heads = DeltaHeads {
            key: self.size("linear_num_key_heads")?,
            value: self.size("linear_num_value_heads")?,
            key_dim: self.size("linear_key_head_dim")?,
            value_dim: self.size("linear_value_head_dim")?,
            taps: self.size("linear_conv_kernel_dim")?,
        };
        let DeltaHeads { key, value, key_dim, value_dim, taps } = heads;
        if !value.is_multiple_of(key) {
            bail!("`linear_num_value_heads` {value} is not a multiple of `linear_num_key_heads` {key}");
        }
        // What is kept of a sequence, whose elements are counted.
        let sizes = [[2 * value, key_dim, value_dim], [2 * value, key_dim + value_dim, 1], [2 * value, key_dim, taps]];
        let is_small = |sizes: &[usize; 3]| {
            sizes.iter().try_fold(1_usize, |all, &size| all.checked_mul(size)).is_some_and(|all| all <= MAX_SIZE)
        };
        if !sizes.iter().all(is_small) {
            bail!("the `linear_` heads and their dimensions have more than {MAX_SIZE} features");
        }
        Ok(Hybrid { heads, has_delta_net })
    }

    /// The features of a head that are rotated.
    fn rotary(&self, dim: usize) -> Result<usize> {
        let rope = self.get::<Map<String, Value>>("rope_parameters")?.map(Self);
        let of_rope = rope.map(|rope| rope.get::<f64>("partial_rotary_factor")).transpose()?.flatten();
        let factor = of_rope.or(self.get("partial_rotary_factor")?).unwrap_or(0.25);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "as transformers does")]
        let rotary = (dim as f64 * factor) as usize;
        if rotary == 0 || rotary > dim || !rotary.is_multiple_of(2) {
            bail!("`partial_rotary_factor` {factor} of `head_dim` {dim} are no pairs of features");
        }
        Ok(rotary)
    }

    fn refuse_unimplemented(&self) -> Result<()> {
        let act: String = self.require("hidden_act")?;
        if act != "silu" {
            bail!("`hidden_act` is `{act}`; only `silu` is implemented");
        }
        for switch in ["attention_bias", "use_sliding_window"] {
            if self.get::<bool>(switch)? == Some(true) {
                bail!("`{switch}` is true, which is not implemented");
            }
        }
        if self.get::<bool>("is_causal")? == Some(false) {
            bail!("`is_causal` is false: attention in both directions is not implemented");
        }
        Ok(())
    }

    /// The form of weights in 4 or 8 bits, with sign and without a zero point, as compressed-tensors packs them. Which
    /// weights are packed, their tensors say.
    fn packing(&self) -> Result<Option<Packing>> {
        let Some(config) = self.get::<Map<String, Value>>("quantization_config")?.map(Fields) else { return Ok(None) };
        config.scheme().context("`quantization_config`").map(Some)
    }

    fn scheme(&self) -> Result<Packing> {
        self.expect("quant_method", &["compressed-tensors".into()])?;
        self.expect("format", &["pack-quantized".into()])?;
        for absent in ["kv_cache_scheme", "sparsity_config", "transform_config"] {
            self.expect(absent, &[Value::Null, Value::Object(Map::new())])?;
        }
        let groups: Map<String, Value> = self.require("config_groups")?;
        let mut groups = groups.into_iter();
        let (Some((name, group)), None) = (groups.next(), groups.next()) else {
            bail!("`config_groups` are not one, which is what is implemented");
        };
        let group = Self(serde_json::from_value(group).context(format_args!("`config_groups.{name}`"))?);
        group.packed_weights().context(format_args!("`config_groups.{name}`"))
    }

    fn packed_weights(&self) -> Result<Packing> {
        self.expect("format", &[Value::Null, "pack-quantized".into()])?;
        for absent in ["input_activations", "output_activations"] {
            self.expect(absent, &[Value::Null])?;
        }
        Self(self.require("weights")?).packed().context("`weights`")
    }

    fn packed(&self) -> Result<Packing> {
        self.expect("num_bits", &[4.into(), 8.into()])?;
        let integers = if self.size("num_bits")? == 4 { Integers::Int4 } else { Integers::Int8 };
        self.expect("type", &["int".into()])?;
        self.expect("symmetric", &[true.into()])?;
        self.expect("strategy", &["group".into()])?;
        self.expect("dynamic", &[Value::Null, false.into()])?;
        // These keep the order of weights; `group` does not.
        self.expect("actorder", &[Value::Null, false.into(), "static".into(), "weight".into()])?;
        let group = self.size("group_size")?;
        if !group.is_multiple_of(GROUP_UNIT) {
            bail!("`group_size` is {group}; multiples of {GROUP_UNIT} are implemented");
        }
        Ok(Packing { integers, group })
    }

    /// Refuses a field with any other value. An absent field is null.
    fn expect(&self, name: &str, values: &[Value]) -> Result<()> {
        let value = self.0.get(name).unwrap_or(&Value::Null);
        if !values.contains(value) {
            bail!("`{name}` is {value}, which is not implemented");
        }
        Ok(())
    }

    /// The base of the rotary frequencies, in either form. Every kind of scaling is refused. The sections of a
    /// `qwen3_5_moe` are for the positions of images: a text has one position in all of them.
    fn rope_theta(&self, kind: Kind, rotary: usize) -> Result<f64> {
        let is_set =
            |name| self.0.get(name).is_some_and(|value| !value.is_null() && value != &Value::Object(Map::new()));
        if is_set("rope_scaling") && is_set("rope_parameters") {
            bail!("`rope_scaling` is set beside `rope_parameters`, which transformers then drops");
        }
        let mut thetas = vec![("rope_theta", self.get::<f64>("rope_theta")?)];
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(rope) = self.get::<Map<String, Value>>(name)?.map(Fields) else { continue };
            for (field, value) in &rope.0 {
                let neutral = match field.as_str() {
                    "rope_type" | "type" => value == "default",
                    "mrope_section" | "mrope_interleaved" | "partial_rotary_factor" if kind == Kind::Hybrid => true,
                    "partial_rotary_factor" | "factor" => value.as_f64() == Some(1.0),
                    "rope_theta" => true,
                    _ => value.is_null(),
                };
                if !neutral {
                    bail!("`{name}.{field}` is {value}: rope scaling is not implemented");
                }
            }
            thetas.push((name, rope.get("rope_theta").context(format_args!("`{name}`"))?));
        }
        if let Some(factor) = self.get::<f64>("partial_rotary_factor")?.filter(|&factor| factor != 1.0)
            && kind != Kind::Hybrid
        {
            bail!("`partial_rotary_factor` is {factor}, which is not implemented");
        }
        let mut given = thetas.iter().filter_map(|&(name, theta)| Some((name, theta?)));
        let Some((name, theta)) = given.next() else { bail!("`rope_theta` is missing") };
        if !(theta.is_finite() && theta > 0.0) {
            bail!("`rope_theta` {theta} is not a positive number");
        }
        #[expect(clippy::cast_possible_truncation, reason = "computed with in f32")]
        let base = theta as f32;
        // If the base is below 1, the last pair of a head turns fastest.
        let fastest = base.powf((2.0 - rotary as f32) / rotary as f32).max(1.0);
        if !base.is_normal() || !(fastest * MAX_SIZE as f32).is_finite() {
            bail!("`rope_theta` {theta} gives angles that are no numbers in f32");
        }
        if let Some((other, differing)) = given.find(|&(_, other)| other != theta) {
            bail!("`{name}` gives a `rope_theta` of {theta}, but `{other}` one of {differing}");
        }
        Ok(theta)
    }

    fn dtype(&self) -> Result<Option<DType>> {
        for name in ["dtype", "torch_dtype"] {
            return Ok(Some(match self.get::<String>(name)?.as_deref() {
                None => continue,
                Some("bfloat16") => DType::BF16,
                Some("float16") => DType::F16,
                Some("float32") => DType::F32,
                Some(other) => bail!("`{name}` is `{other}`; bfloat16, float16 and float32 are implemented"),
            }));
        }
        Ok(None)
    }

    /// One or several tokens that end a text.
    fn eos(&self) -> Result<Option<Vec<u32>>> {
        match self.0.get("eos_token_id") {
            Some(Value::Number(_)) => Ok(self.get("eos_token_id")?.map(|id| vec![id])),
            _ => self.get("eos_token_id"),
        }
    }
}
