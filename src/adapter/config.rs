//! `adapter_config.json`: the scaling of factors, the modules that they belong to, and features that are not plain
//! LoRA.
//!
//! A field that is present has the meaning that PEFT gives it, and tensors that contradict it are rejected. The tensors
//! stand in for an absent field; only `peft_type` and `lora_alpha` are required. Invariant: every unknown field has a
//! value that enables nothing.

use std::collections::{HashMap, HashSet};

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value};

use super::{
    error::{AdapterError, TensorName},
    invocation::Invocation,
    module::{Module, ModuleKind},
    names,
    pattern::{Anchor, Failure, MAX_REGEX_BYTES, MAX_REGEXES, MAX_WORK, Pattern, Work, plain},
};
use crate::digest;

/// File name of the configuration in an adapter's directory.
pub(super) const FILE: &str = "adapter_config.json";

/// The parts of the configuration that the tensors do not determine.
#[derive(Debug)]
pub(super) struct Config {
    /// Of the text.
    pub(super) digest: u64,
    alpha: f64,
    alpha_pattern: Keys<f64>,
    rank: Option<usize>,
    rank_pattern: Keys<usize>,
    rslora: bool,
    target_modules: Option<Targets>,
    exclude_modules: Option<Targets>,
    layers: Option<Layers>,
    target_parameters: Option<HashSet<String>>,
    /// Whether PEFT gives the head and the embedding of a model that ties them the same factors.
    pub(super) ties: bool,
    /// Taken by engines that heed it.
    pub(super) invocation: Option<Invocation>,
    /// The ids of trained rows, by the end of a module's path; those of the input embedding without one.
    pub(super) token_ids: Vec<TokenIds>,
    /// The ends of the paths of embeddings and heads whose weights are the adapter's own.
    pub(super) saved: Vec<String>,
    /// Whether PEFT treats a parameter `[experts, m, n]` as mapping n to m features, rather than m to n, if
    /// `peft_version` says so.
    pub(super) swaps_features: Option<bool>,
}

/// The end of a module's path, which the input embedding may lack, and token ids.
type TokenIds = (Option<String>, Vec<u32>);

/// A set of modules, in PEFT's notation.
#[derive(Debug)]
enum Targets {
    /// `all-linear`: every linear layer except the head.
    AllLinear,
    /// Modules whose whole path matches.
    Pattern(Pattern),
    /// Modules whose path is one of these names, or ends in a dot and one of them.
    Names(HashSet<String>),
}

/// `layers_to_transform`, and `layers_pattern` if it is set.
#[derive(Debug)]
struct Layers {
    numbers: HashSet<u64>,
    /// The names, and their places in the list.
    names: HashMap<String, usize>,
    /// The number in a path that is the layer's, if `peft_version` says it.
    number: Option<Number>,
}

/// The number in a path that PEFT takes for that of the layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Number {
    /// Since 0.20.
    First,
    /// Before, which is an expert's number where experts are modules.
    Last,
}

/// The values of a field whose keys are patterns of modules. The first key in the file that matches wins.
#[derive(Debug)]
struct Keys<V> {
    field: &'static str,
    /// Plain keys by their length. There may be one for each module.
    plain: HashMap<usize, Forms<V>>,
    /// The other keys and their places in the file.
    regexes: Vec<(usize, Pattern, V)>,
    num_plain: usize,
}

/// The order of the keys of patterns, which a [`Map`] does not keep.
#[derive(Deserialize)]
struct Order {
    #[serde(default)]
    alpha_pattern: Places,
    #[serde(default)]
    rank_pattern: Places,
}

/// The places of an object's keys in the file. As in Python, a key that is there twice is where it is first.
#[derive(Default)]
struct Places(HashMap<String, usize>);

/// Plain keys of one length by their form, and then by their bytes, which are 0 at wildcards: their places in the file
/// and their values.
type Forms<V> = HashMap<Form, HashMap<Vec<u8>, (usize, V)>>;

/// What plain keys have in common.
#[derive(Debug, Eq, Hash, PartialEq)]
struct Form {
    /// Whether only whole paths match.
    whole: bool,
    /// The places of bytes that match any.
    wildcards: Vec<usize>,
}

const ALPHA_PATTERN: &str = "alpha_pattern";
const RANK_PATTERN: &str = "rank_pattern";
const TARGET_MODULES: &str = "target_modules";
const TARGET_PARAMETERS: &str = "target_parameters";
const EXCLUDE_MODULES: &str = "exclude_modules";
const LAYERS_TO_TRANSFORM: &str = "layers_to_transform";
const LAYERS_PATTERN: &str = "layers_pattern";
const TIES: &str = "ensure_weight_tying";
const INVOCATION: &str = "alora_invocation_tokens";
const TOKEN_IDS: &str = "trainable_token_indices";
const SAVED: &str = "modules_to_save";
/// The work of looking for a path among keys of one form.
const LOOKUP: usize = 256;
/// A field of MLX-LM's `adapter_config.json`.
const MLX: &str = "fine_tune_type";

impl Config {
    pub(super) fn parse(text: &str) -> Result<Self, AdapterError> {
        let json = |error: serde_json::Error| AdapterError::json(FILE, text, &error);
        let fields: Map<String, Value> = serde_json::from_str(text).map_err(json)?;
        if let Some(value) = fields.get(MLX).filter(|_| !fields.contains_key("peft_type")) {
            return Err(unsupported(MLX, value));
        }
        let order: Order = serde_json::from_str(text).map_err(json)?;
        let required = |field| fields.get(field).ok_or(AdapterError::MissingField { field });
        lora(required("peft_type")?)?;
        for (field, value) in &fields {
            check(field, value)?;
        }
        let field = |field| fields.get(field);
        check_regexes(&fields)?;
        let number = |alpha: &Value, field: &str| finite(field, alpha);
        let rank = |rank: &Value, field: &str| positive(field, rank);
        let version = field("peft_version").and_then(Value::as_str).and_then(version);
        let config = Self {
            digest: digest::of_bytes(text.as_bytes()),
            alpha: finite("lora_alpha", required("lora_alpha")?)?,
            alpha_pattern: Keys::parse(ALPHA_PATTERN, field(ALPHA_PATTERN), &order.alpha_pattern, number)?,
            rank: field("r").map(|value| positive("r", value)).transpose()?,
            rank_pattern: Keys::parse(RANK_PATTERN, field(RANK_PATTERN), &order.rank_pattern, rank)?,
            rslora: field("use_rslora").map_or(Ok(false), |value| flag("use_rslora", value))?,
            target_modules: target_modules(&fields)?,
            exclude_modules: match field(EXCLUDE_MODULES) {
                Some(value) if !is_neutral(value) => Some(Targets::parse(EXCLUDE_MODULES, value)?),
                _ => None,
            },
            layers: Layers::parse(&fields, version.and_then(Number::of))?,
            target_parameters: field(TARGET_PARAMETERS)
                .map(|value| list(TARGET_PARAMETERS, value).map(HashSet::from_iter))
                .transpose()?,
            ties: field(TIES) == Some(&Value::Bool(true)),
            invocation: field(INVOCATION).map_or(Ok(None), invocation)?,
            token_ids: field(TOKEN_IDS).map_or(Ok(Vec::new()), token_ids)?,
            saved: field(SAVED).map_or(Ok(Vec::new()), saved)?,
            swaps_features: version.and_then(swaps_features),
        };
        if matches!(config.target_modules, Some(Targets::Pattern(_) | Targets::AllLinear)) {
            for name in [LAYERS_TO_TRANSFORM, LAYERS_PATTERN] {
                if let Some(value) = field(name).filter(|value| !value.is_null()) {
                    return Err(invalid(name, value, "null unless `target_modules` is a list"));
                }
            }
        }
        Ok(config)
    }

    /// Rejects factors that PEFT does not load, or cannot compute, in an adapter with an invocation: those of an
    /// embedding and of parameters, and of layers whose inputs have no sequences.
    pub(super) fn check_invoked<'a>(
        &self,
        mut factors: impl Iterator<Item = (&'a str, ModuleKind, &'a TensorName)>,
    ) -> Result<(), AdapterError> {
        if self.invocation.is_none() {
            return Ok(());
        }
        let is_parameter = |path: &str| names::is_parameter(path) || self.weight_among_parameters(path).is_some();
        let is_other =
            |path: &str, kind| kind == ModuleKind::Embedding || is_parameter(path) || names::is_of_mixture(path);
        let other = factors.find(|(path, kind, _)| is_other(path, *kind));
        other.map_or(Ok(()), |(.., tensor)| Err(AdapterError::NotInvocable { tensor: tensor.clone() }))
    }

    /// The ids of the rows of the module at this path, and where they are in the field; `None` if it has none there.
    pub(super) fn token_ids_of(&self, path: &str) -> Option<(usize, &[u32])> {
        let is_of = |module: &Option<String>| match module {
            Some(module) => ends_in(path, module),
            None => names::is_embedding(path),
        };
        let mut places = self.token_ids.iter().enumerate().filter(|(_, (module, _))| is_of(module));
        let (place, (_, ids)) = places.next()?;
        // PEFT has the rows of one of both.
        places.next().is_none().then_some((place, ids))
    }

    /// Where `modules_to_save` names the module at this path.
    pub(super) fn place_saved(&self, path: &str) -> Option<usize> {
        self.saved.iter().position(|name| ends_in(path, name))
    }

    /// Rejects factors of the head or of the embedding alone if PEFT ties them, and factors of a tied head that are not
    /// the embedding's.
    pub(super) fn check_tied(&self, modules: &[Module], work: &Work) -> Result<(), AdapterError> {
        let of = |kind| modules.iter().find(move |module| module.kind == kind && self.is_tied(&module.path));
        let (embedding, head) = match (of(ModuleKind::Embedding), of(ModuleKind::Linear)) {
            (None, None) => return Ok(()),
            (Some(embedding), Some(head)) => (embedding, head),
            _ => return Err(unsupported(TIES, &Value::Bool(true))),
        };
        self.check_selected(&embedding.path, embedding.kind, work)?;
        // PEFT removes a tied head from the list. The base model of one that is there is not tied.
        let is_listed = matches!(&self.target_modules, Some(Targets::Names(names)) if have_ending(names, &head.path));
        if is_listed || head.is_transpose_of(embedding)? {
            return Ok(());
        }
        Err(AdapterError::Untied { tensor: head.a.name.clone(), other: embedding.a.name.clone() })
    }

    fn is_tied(&self, path: &str) -> bool {
        self.ties && names::is_embedding_or_head(path)
    }

    /// Decides between PEFT's readings of the layers' numbers by the paths that have factors, if `peft_version` does
    /// not.
    pub(super) fn settle_layers<'a>(&mut self, mut paths: impl Iterator<Item = &'a String>) {
        let Some(layers) = self.layers.as_ref().filter(|layers| layers.number.is_none()) else { return };
        let is_parameter = |path: &str| names::is_parameter(path) || self.weight_among_parameters(path).is_some();
        let is_free = |path: &str| is_parameter(path) || self.is_tied(path) || self.is_listed_whole(path);
        let are_first = paths.all(|path| is_free(path) || layers.have(path));
        let number = if are_first { Number::First } else { Number::Last };
        self.layers = self.layers.take().map(|layers| Layers { number: Some(number), ..layers });
    }

    /// Whether `target_modules` has this path, which then may be in any layer.
    fn is_listed_whole(&self, path: &str) -> bool {
        matches!(&self.target_modules, Some(Targets::Names(names)) if names.contains(path))
    }

    /// Rejects a configuration whose patterns could take too long to match with these module paths.
    pub(super) fn check_work<'a>(&self, paths: impl Iterator<Item = &'a String>) -> Result<(), AdapterError> {
        let (modules, bytes) = paths.fold((0, 0), |(paths, bytes), path| (paths + 1, bytes + path.len() as u64));
        let work = self.regexes().fold(0_u64, |work, pattern| work.saturating_add(pattern.work(bytes)));
        if work <= MAX_WORK { Ok(()) } else { Err(AdapterError::Patterns { patterns: self.patterns(), modules }) }
    }

    /// The patterns that are not keys of plain paths.
    fn regexes(&self) -> impl Iterator<Item = &Pattern> {
        let targets = [&self.target_modules, &self.exclude_modules].into_iter().filter_map(|targets| match targets {
            Some(Targets::Pattern(pattern)) => Some(pattern),
            _ => None,
        });
        let alphas = self.alpha_pattern.regexes.iter().map(|(_, pattern, _)| pattern);
        alphas.chain(self.rank_pattern.regexes.iter().map(|(_, pattern, _)| pattern)).chain(targets)
    }

    /// The number of patterns in all fields.
    fn patterns(&self) -> usize {
        let plain = [self.alpha_pattern.num_plain, self.rank_pattern.num_plain];
        self.regexes().count() + plain.iter().sum::<usize>()
    }

    /// The error for a path that cannot be matched with a pattern.
    fn unmatched(&self, (field, key, failure): Unmatched<'_>, work: &Work) -> AdapterError {
        match failure {
            Failure::NoWork => AdapterError::Patterns { patterns: self.patterns(), modules: work.modules },
            Failure::Slow(reason) => AdapterError::Pattern { field, key: key.to_owned(), reason },
        }
    }

    /// Rejects a module whose factors PEFT would drop. Where they are tied, [`check_tied`](Self::check_tied) does it.
    pub(super) fn check_target(&self, path: &str, kind: ModuleKind, work: &Work) -> Result<(), AdapterError> {
        // No other field excludes a parameter.
        if self.is_tied(path) || kind == ModuleKind::Linear && self.weight_among_parameters(path).is_some() {
            return Ok(());
        }
        self.check_selected(path, kind, work)
    }

    /// Rejects a module that is not selected as such.
    fn check_selected(&self, path: &str, kind: ModuleKind, work: &Work) -> Result<(), AdapterError> {
        let unmatched = |unmatched| self.unmatched(unmatched, work);
        let not = |field| AdapterError::NotTargeted { module: path.to_owned(), field };
        if let Some(excluded) = &self.exclude_modules
            && excluded.have(EXCLUDE_MODULES, path, kind, work).map_err(unmatched)?
        {
            return Err(not(EXCLUDE_MODULES));
        }
        let Some(targets) = &self.target_modules else { return Ok(()) };
        if !targets.have(TARGET_MODULES, path, kind, work).map_err(unmatched)? {
            return Err(not(TARGET_MODULES));
        }
        match &self.layers {
            Some(layers) if !self.is_listed_whole(path) && !layers.have(path) => Err(not(LAYERS_TO_TRANSFORM)),
            _ => Ok(()),
        }
    }

    /// Whether `target_parameters` may select the parameter at this path.
    pub(super) fn targets_parameter(&self, path: &str) -> bool {
        self.target_parameters.as_ref().is_none_or(|names| have_ending(names, path))
    }

    /// The path of a linear layer's weight, if `target_parameters` has it.
    fn weight_among_parameters(&self, module: &str) -> Option<String> {
        let path = self.target_parameters.as_ref().map(|_| format!("{module}.weight"));
        path.filter(|path| self.targets_parameter(path))
    }

    /// The scaling of a module: α/r, or α/√r with `use_rslora`. As in PEFT, α is the value of the first key of
    /// `alpha_pattern` that matches the end of the path after a dot, else `lora_alpha`. The path of a layer whose
    /// weight is a parameter is that of the weight. The required rank is looked up likewise, and `a` names the factor
    /// in the error.
    pub(super) fn scaling(&self, module: &str, rank: usize, a: &TensorName, work: &Work) -> Result<f32, AdapterError> {
        let unmatched = |unmatched| self.unmatched(unmatched, work);
        let weight = self.weight_among_parameters(module);
        let path = weight.as_deref().unwrap_or(module);
        let want = match self.rank_pattern.first(path, work).map_err(unmatched)? {
            Some(rank) => Some((RANK_PATTERN, rank)),
            None => self.rank.map(|rank| ("r", rank)),
        };
        if let Some((field, want)) = want.filter(|(_, want)| *want != rank) {
            return Err(AdapterError::RankField { tensor: a.clone(), rank, field, want });
        }
        let alpha = self.alpha_pattern.first(path, work).map_err(unmatched)?.unwrap_or(self.alpha);
        let divisor = if self.rslora { (rank as f64).sqrt() } else { rank as f64 };
        #[expect(clippy::cast_possible_truncation, reason = "rounds to nearest; values out of range are refused")]
        let scaling = (alpha / divisor) as f32;
        if scaling.is_normal() || alpha == 0.0 {
            return Ok(scaling);
        }
        Err(AdapterError::Scaling { module: module.to_owned(), alpha, rank })
    }
}

/// Compiles a pattern of this field.
fn pattern(field: &'static str, text: &str, anchor: Anchor) -> Result<Pattern, AdapterError> {
    Pattern::new(text, anchor).map_err(|reason| AdapterError::Pattern { field, key: text.to_owned(), reason })
}

/// The field and the pattern that a path could not be matched with, and why.
type Unmatched<'a> = (&'static str, &'a str, Failure);

/// Whether a path matches a pattern of this field.
fn matches<'a>(field: &'static str, pattern: &'a Pattern, path: &str, work: &Work) -> Result<bool, Unmatched<'a>> {
    pattern.matches(path, work).map_err(|failure| (field, pattern.text(), failure))
}

impl<'de> Deserialize<'de> for Places {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Field {
            Keys(#[serde(deserialize_with = "places")] HashMap<String, usize>),
            Other(IgnoredAny),
        }

        fn places<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HashMap<String, usize>, D::Error> {
            struct Keys;

            impl<'de> Visitor<'de> for Keys {
                type Value = HashMap<String, usize>;

                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("an object")
                }

                fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
                    let mut places = HashMap::new();
                    while let Some((key, IgnoredAny)) = entries.next_entry()? {
                        let next = places.len();
                        places.entry(key).or_insert(next);
                    }
                    Ok(places)
                }
            }

            deserializer.deserialize_map(Keys)
        }

        Ok(match Field::deserialize(deserializer)? {
            Field::Keys(places) => Self(places),
            Field::Other(IgnoredAny) => Self::default(),
        })
    }
}

impl<V: Copy> Keys<V> {
    fn parse(
        field: &'static str,
        value: Option<&Value>,
        places: &Places,
        read: impl Fn(&Value, &str) -> Result<V, AdapterError>,
    ) -> Result<Self, AdapterError> {
        let mut keys = Self { field, plain: HashMap::new(), regexes: Vec::new(), num_plain: 0 };
        let entries = match value {
            None | Some(Value::Null) => return Ok(keys),
            Some(Value::Object(entries)) => entries,
            Some(value) => return Err(invalid(field, value, "an object of numbers")),
        };
        let mut entries: Vec<_> = entries.iter().map(|(key, value)| (places.0.get(key), key, value)).collect();
        entries.sort_unstable_by_key(|(place, ..)| *place);
        for (place, &(_, key, value)) in entries.iter().enumerate() {
            let value = read(value, &format!("{field}.{key}"))?;
            match plain(key) {
                Some(bytes) => keys.insert(&bytes, key.starts_with('^'), (place, value)),
                None => keys.regexes.push((place, pattern(field, key, Anchor::End)?, value)),
            }
        }
        keys.num_plain = entries.len() - keys.regexes.len();
        Ok(keys)
    }

    fn insert(&mut self, key: &[Option<u8>], whole: bool, value: (usize, V)) {
        let wildcards = (0..key.len()).filter(|&at| key[at].is_none()).collect();
        let keys = self.plain.entry(key.len()).or_default().entry(Form { whole, wildcards }).or_default();
        keys.entry(key.iter().map(|byte| byte.unwrap_or(0)).collect()).or_insert(value);
    }

    /// The value of the first key that matches the end of a path after a dot, or the whole path.
    fn first(&self, path: &str, work: &Work) -> Result<Option<V>, Unmatched<'_>> {
        let mut first: Option<(usize, V)> = None;
        for ending in endings(path) {
            for (form, keys) in self.plain.get(&ending.len()).into_iter().flatten() {
                work.take(LOOKUP).map_err(|failure| (self.field, "", failure))?;
                if form.whole && ending.len() != path.len() {
                    continue;
                }
                let mut bytes = ending.as_bytes().to_vec();
                form.wildcards.iter().for_each(|&at| bytes[at] = 0);
                let found = keys.get(&bytes).copied();
                first = first.into_iter().chain(found).min_by_key(|(place, _)| *place);
            }
        }
        for (place, pattern, value) in &self.regexes {
            if first.is_some_and(|(first, _)| first < *place) {
                break;
            }
            if matches(self.field, pattern, path, work)? {
                return Ok(Some(*value));
            }
        }
        Ok(first.map(|(_, value)| value))
    }
}

/// Rejects more, or longer, regular expressions than can be compiled in a moment.
fn check_regexes(fields: &Map<String, Value>) -> Result<(), AdapterError> {
    let keys = [ALPHA_PATTERN, RANK_PATTERN].into_iter().filter_map(|field| fields.get(field)?.as_object());
    let targets = [TARGET_MODULES, EXCLUDE_MODULES].into_iter().filter_map(|field| fields.get(field)?.as_str());
    let texts = keys.flat_map(Map::keys).map(String::as_str).chain(targets);
    let lengths: Vec<_> = texts.filter(|text| plain(text).is_none()).map(str::len).collect();
    let (regexes, bytes) = (lengths.len(), lengths.iter().sum());
    if regexes > MAX_REGEXES || bytes > MAX_REGEX_BYTES {
        return Err(AdapterError::Regexes { regexes, bytes });
    }
    Ok(())
}

impl Targets {
    fn parse(field: &'static str, value: &Value) -> Result<Self, AdapterError> {
        match value {
            Value::String(text) if field == TARGET_MODULES && text.eq_ignore_ascii_case("all-linear") => {
                Ok(Self::AllLinear)
            }
            Value::String(text) => Ok(Self::Pattern(pattern(field, text, Anchor::Whole)?)),
            _ => Ok(Self::Names(list(field, value)?.into_iter().collect())),
        }
    }

    fn have(&self, field: &'static str, path: &str, kind: ModuleKind, work: &Work) -> Result<bool, Unmatched<'_>> {
        match self {
            Self::AllLinear => Ok(kind == ModuleKind::Linear && !ends_in(path, "lm_head")),
            Self::Pattern(pattern) => matches(field, pattern, path, work),
            Self::Names(names) => Ok(have_ending(names, path)),
        }
    }
}

/// A path, and each part of it that follows a dot.
fn endings(path: &str) -> impl Iterator<Item = &str> {
    let after_dots = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
    std::iter::once(path).chain(after_dots)
}

/// Whether a path is one of these names, or ends in a dot and one of them.
fn have_ending(names: &HashSet<String>, path: &str) -> bool {
    endings(path).any(|ending| names.contains(ending))
}

pub(super) fn ends_in(path: &str, ending: &str) -> bool {
    path.strip_suffix(ending).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

impl Layers {
    fn parse(fields: &Map<String, Value>, number: Option<Number>) -> Result<Option<Self>, AdapterError> {
        let names = match fields.get(LAYERS_PATTERN) {
            Some(Value::String(name)) if !name.is_empty() => vec![name.clone()],
            Some(value) if !is_neutral(value) => list(LAYERS_PATTERN, value)?,
            _ => Vec::new(),
        };
        let is_name =
            |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if let Some(name) = names.iter().find(|name| !is_name(name)) {
            return Err(invalid(LAYERS_PATTERN, &name.as_str().into(), "the name of a module"));
        }
        let want = "a layer's number or a list of them";
        let layer = |value: &Value| value.as_u64().ok_or_else(|| invalid(LAYERS_TO_TRANSFORM, value, want));
        let numbers = match fields.get(LAYERS_TO_TRANSFORM) {
            None | Some(Value::Null) => {
                return match fields.get(LAYERS_PATTERN) {
                    Some(value) if !names.is_empty() => {
                        Err(invalid(LAYERS_PATTERN, value, "absent unless `layers_to_transform` is set"))
                    }
                    _ => Ok(None),
                };
            }
            Some(Value::Array(numbers)) if numbers.is_empty() => return Ok(None),
            Some(Value::Array(numbers)) => numbers.iter().map(layer).collect::<Result<_, _>>()?,
            Some(value) => HashSet::from([layer(value)?]),
        };
        let mut places = HashMap::new();
        for (place, name) in names.into_iter().enumerate() {
            places.entry(name).or_insert(place);
        }
        Ok(Some(Self { numbers, names: places, number }))
    }

    /// Whether a path is in one of the layers. The layer's number is the first or the last numeric component that is
    /// followed by another component and preceded by one of the names, or, without names, by any two components. A name
    /// may begin the path since PEFT 0.21.
    fn have(&self, path: &str) -> bool {
        let components: Vec<_> = path.split('.').collect();
        let is_number = |window: &[&str]| !window[1].is_empty() && window[1].bytes().all(|byte| byte.is_ascii_digit());
        let is_last = self.number == Some(Number::Last);
        let numbered = components.windows(3).enumerate().filter(|(_, window)| is_number(window));
        // Those that PEFT may take, in the order of its preference.
        let mut places: Vec<_> = if self.names.is_empty() {
            numbered.filter(|(at, _)| *at > 0).map(|(_, window)| (0, window)).collect()
        } else {
            let named = numbered.filter(|(at, _)| *at > 0 || !is_last);
            named.filter_map(|(_, window)| Some((*self.names.get(window[0])?, window))).collect()
        };
        if is_last {
            places.reverse();
        }
        // The first of equals.
        let found = places.into_iter().min_by_key(|(name, _)| *name);
        let found = found.and_then(|(_, window)| window[1].parse().ok());
        found.is_some_and(|number| self.numbers.contains(&number))
    }
}

impl Number {
    /// What a version of PEFT reads. Development versions between 0.19 and 0.20 may read either.
    fn of(version: Version) -> Option<Self> {
        match version {
            Version { minor: (0, 19), is_dev: true } | Version { minor: (0, 20), is_dev: true } => None,
            Version { minor, .. } => Some(if minor < (0, 20) { Self::Last } else { Self::First }),
        }
    }
}

/// `target_modules`, if it is present.
fn target_modules(fields: &Map<String, Value>) -> Result<Option<Targets>, AdapterError> {
    match fields.get(TARGET_MODULES) {
        None => Ok(None),
        Some(Value::Null) if fields.get(TARGET_PARAMETERS).is_none_or(Value::is_null) => {
            let want = "set, because PEFT would choose by the model's type";
            Err(invalid(TARGET_MODULES, &Value::Null, want))
        }
        Some(Value::Null) => Ok(Some(Targets::Names(HashSet::new()))),
        Some(value) => Targets::parse(TARGET_MODULES, value).map(Some),
    }
}

/// Rejects a field that requests an unsupported feature, or has a value that PEFT does not accept.
fn check(field: &str, value: &Value) -> Result<(), AdapterError> {
    match field {
        _ if is_read(field) || is_informational(field) => Ok(()),
        "lora_dropout" => match value.as_f64() {
            Some(dropout) if dropout <= 1.0 => Ok(()),
            _ => Err(invalid(field, value, "a number up to 1")),
        },
        "megatron_config" | "loftq_config" | "eva_config" | "corda_config" | "lora_ga_config" => match value {
            Value::Null | Value::Object(_) => Ok(()),
            _ => Err(invalid(field, value, "an object or null")),
        },
        // PEFT takes any object for one whose other fields have their defaults.
        "arrow_config" | "kasa_config" | "monteclora_config" | "use_bdlora" | "velora_config" if value.is_object() => {
            Err(unsupported(field, value))
        }
        // What has a bias has a tensor of it, and is refused by that.
        "bias" if ["none", "all", "lora_only"].iter().any(|bias| value == bias) => Ok(()),
        "bias" => Err(invalid(field, value, "`none`, `all` or `lora_only`")),
        "init_lora_weights" if keeps_base_weights(value) => Ok(()),
        // What it ties is known from the tensors.
        TIES if value.is_boolean() => Ok(()),
        _ if is_neutral(value) => Ok(()),
        _ => Err(unsupported(field, value)),
    }
}

/// Fields that `Config::parse` reads.
fn is_read(field: &str) -> bool {
    matches!(
        field,
        "peft_type"
            | "peft_version"
            | "lora_alpha"
            | "r"
            | "use_rslora"
            | INVOCATION
            | TOKEN_IDS
            | SAVED
            | ALPHA_PATTERN
            | RANK_PATTERN
            | TARGET_MODULES
            | TARGET_PARAMETERS
            | EXCLUDE_MODULES
            | LAYERS_TO_TRANSFORM
            | LAYERS_PATTERN
    )
}

/// Fields that describe the training, or the programs that it used, and do not affect the weights. The first are
/// PEFT's.
fn is_informational(field: &str) -> bool {
    matches!(
        field,
        "base_model_name_or_path"
            | "revision"
            | "auto_mapping"
            | "task_type"
            | "inference_mode"
            | "fan_in_fan_out"
            | "qalora_group_size"
            | "runtime_config"
            | "megatron_core"
            // ms-swift 4.6, swift/tuners/lora.py: the tuner's name, what factors were trained in, and LoRA+'s learning
            // rates.
            | "swift_type"
            | "lora_dtype"
            | "lorap_lr_ratio"
            | "lorap_emb_lr"
            // PEFT's `create_loraplus_optimizer`, and LLaMA-Factory's arguments of the same names.
            | "loraplus_lr_ratio"
            | "loraplus_lr_embedding"
            | "loraplus_weight_decay"
            // PEFT before 0.5, and levanter: whether the training's model merged the factors when it was evaluated.
            | "merge_weights"
    ) || field.ends_with("_version")
}

/// Whether a value enables nothing. PEFT writes every field that it knows, mostly with such values.
fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(_) => false,
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// Whether PEFT 0.21 adds the factors to the base model's own weights when it loads an adapter with this
/// initialisation, which `LoraLayer.update_layer` and `Embedding.update_layer` (peft/tuners/lora/layer.py) decide.
/// PiSSA, CorDA, OLoRA and LoftQ change the base weights there. Without its gradients, which no saved adapter has,
/// LoRA-GA does not. What PEFT does not know is an error there. An adapter that PEFT converted when it saved it says
/// `true`.
fn keeps_base_weights(init: &Value) -> bool {
    match init {
        Value::Bool(_) => true,
        Value::String(name) => {
            ["gaussian", "mica"].iter().any(|kept| name.eq_ignore_ascii_case(kept))
                || matches!(&**name, "eva" | "orthogonal" | "lora_ga")
        }
        _ => false,
    }
}

fn changes_base_weights(init: &Value) -> bool {
    let known = ["pissa", "corda", "olora", "loftq"];
    init.as_str().is_some_and(|name| known.iter().any(|known| name.to_ascii_lowercase().starts_with(known)))
}

fn lora(peft_type: &Value) -> Result<(), AdapterError> {
    match peft_type.as_str() {
        Some(name) if name.eq_ignore_ascii_case("LORA") => Ok(()),
        _ => Err(unsupported("peft_type", peft_type)),
    }
}

fn unsupported(field: &str, value: &Value) -> AdapterError {
    let reason = match field {
        "peft_type" => "only LORA is",
        "lora_bias" => "biases cannot be adapted",
        "use_dora" => "DoRA rescales the base weights",
        SAVED => "of whole modules, only the embedding and the head can be replaced",
        "init_lora_weights" if changes_base_weights(value) => "this initialisation changes the base weights",
        "init_lora_weights" => "PEFT does not know this initialisation",
        TIES => "it ties the head and the embedding, of which only one has factors",
        MLX => "the folder has an adapter of MLX-LM, whose factors are others than PEFT's",
        "use_qalora" => "QALoRA pools the inputs of a layer",
        "use_bdlora" => "the factors are block-diagonal",
        "layer_replication" => "the model's layers cannot be replicated",
        _ => "the field is unknown and may change the meaning of the weights",
    };
    AdapterError::UnsupportedField { field: field.to_owned(), value: value.to_string(), reason }
}

fn invalid(field: &str, value: &Value, want: &'static str) -> AdapterError {
    AdapterError::InvalidField { field: field.to_owned(), value: value.to_string(), want }
}

fn finite(field: &str, value: &Value) -> Result<f64, AdapterError> {
    value.as_f64().filter(|number| number.is_finite()).ok_or_else(|| invalid(field, value, "a number"))
}

fn positive(field: &str, value: &Value) -> Result<usize, AdapterError> {
    let number = value.as_u64().and_then(|number| usize::try_from(number).ok()).filter(|&number| number > 0);
    number.ok_or_else(|| invalid(field, value, "a positive integer"))
}

fn flag(field: &str, value: &Value) -> Result<bool, AdapterError> {
    match value {
        Value::Null => Ok(false),
        Value::Bool(on) => Ok(*on),
        _ => Err(invalid(field, value, "true or false")),
    }
}

/// `alora_invocation_tokens`, if it has any.
fn invocation(value: &Value) -> Result<Option<Invocation>, AdapterError> {
    if is_neutral(value) {
        return Ok(None);
    }
    let tokens = Vec::<u32>::deserialize(value).map_err(|_| invalid(INVOCATION, value, "a list of token ids"))?;
    Ok(Invocation::new(tokens))
}

/// `trainable_token_indices`: a list, or a list of each module.
fn token_ids(value: &Value) -> Result<Vec<TokenIds>, AdapterError> {
    let ids = |value: &Value| {
        let want = "token ids, none of them twice, or lists of them by module";
        let ids = Vec::<u32>::deserialize(value).map_err(|_| invalid(TOKEN_IDS, value, want))?;
        let are_distinct = ids.iter().collect::<HashSet<_>>().len() == ids.len();
        if are_distinct { Ok(ids) } else { Err(invalid(TOKEN_IDS, value, want)) }
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Object(modules) => {
            modules.iter().map(|(module, value)| Ok((Some(module.clone()), ids(value)?))).collect()
        }
        _ => Ok(vec![(None, ids(value)?)]),
    }
}

/// `modules_to_save`: the embedding and the head.
fn saved(value: &Value) -> Result<Vec<String>, AdapterError> {
    if is_neutral(value) {
        return Ok(Vec::new());
    }
    let names = list(SAVED, value)?;
    if names.iter().all(|name| names::is_embedding_or_head(name)) { Ok(names) } else { Err(unsupported(SAVED, value)) }
}

fn list(field: &str, value: &Value) -> Result<Vec<String>, AdapterError> {
    serde_json::from_value::<Option<Vec<String>>>(value.clone())
        .map(Option::unwrap_or_default)
        .map_err(|_| invalid(field, value, "a list of names"))
}

/// A version of PEFT.
#[derive(Clone, Copy, Debug)]
struct Version {
    /// The first two numbers.
    minor: (u32, u32),
    is_dev: bool,
}

fn version(text: &str) -> Option<Version> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    Some(Version { minor: (numbers.next()??, numbers.next()??), is_dev: text.contains("dev") })
}

/// Whether this PEFT version maps n to m features for a parameter `[experts, m, n]`: yes from 0.19, unless the module
/// is transposed. Development versions between 0.18 and 0.19 may do either.
fn swaps_features(version: Version) -> Option<bool> {
    match version {
        Version { minor: (0, 18), is_dev: true } => None,
        Version { minor, .. } => Some(minor >= (0, 19)),
    }
}
