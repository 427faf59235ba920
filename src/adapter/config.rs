//! `adapter_config.json`: the scaling of factors, the modules that they belong to, and features that are not plain LoRA.
//!
//! A field that is present has the meaning that PEFT gives it, and tensors that contradict it are rejected. The tensors stand in
//! for an absent field; only `peft_type` and `lora_alpha` are required. Invariant: every unknown field has a value that enables
//! nothing.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::{
    error::{AdapterError, TensorName},
    module::ModuleKind,
    pattern::{Anchor, MAX_REGEXES, MAX_WORK, Pattern},
};

/// File name of the configuration in an adapter's directory.
pub(super) const FILE: &str = "adapter_config.json";

/// The parts of the configuration that the tensors do not determine.
#[derive(Debug)]
pub(super) struct Config {
    alpha: f64,
    alpha_pattern: Vec<(Pattern, f64)>,
    rank: Option<usize>,
    rank_pattern: Vec<(Pattern, usize)>,
    rslora: bool,
    target_modules: Option<Targets>,
    exclude_modules: Option<Targets>,
    layers: Option<Layers>,
    target_parameters: Option<Vec<String>>,
    /// Whether PEFT treats a parameter `[experts, m, n]` as mapping n to m features, rather than m to n, if `peft_version` says so.
    pub(super) swaps_features: Option<bool>,
}

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
    names: Vec<String>,
}

const ALPHA_PATTERN: &str = "alpha_pattern";
const RANK_PATTERN: &str = "rank_pattern";
const TARGET_MODULES: &str = "target_modules";
const TARGET_PARAMETERS: &str = "target_parameters";
const EXCLUDE_MODULES: &str = "exclude_modules";
const LAYERS_TO_TRANSFORM: &str = "layers_to_transform";
const LAYERS_PATTERN: &str = "layers_pattern";

impl Config {
    pub(super) fn parse(text: &str) -> Result<Self, AdapterError> {
        let json = |error: serde_json::Error| AdapterError::json(FILE, &error);
        let fields: Map<String, Value> = serde_json::from_str(text).map_err(json)?;
        let required = |field| fields.get(field).ok_or(AdapterError::MissingField { field });
        lora(required("peft_type")?)?;
        for (field, value) in &fields {
            check(field, value)?;
        }
        let field = |field| fields.get(field);
        let number = |alpha: &Value, field: &str| finite(field, alpha);
        let rank = |rank: &Value, field: &str| positive(field, rank);
        let config = Self {
            alpha: finite("lora_alpha", required("lora_alpha")?)?,
            alpha_pattern: patterns(ALPHA_PATTERN, field(ALPHA_PATTERN), number)?,
            rank: field("r").map(|value| positive("r", value)).transpose()?,
            rank_pattern: patterns(RANK_PATTERN, field(RANK_PATTERN), rank)?,
            rslora: field("use_rslora").map_or(Ok(false), |value| flag("use_rslora", value))?,
            target_modules: target_modules(&fields)?,
            exclude_modules: match field(EXCLUDE_MODULES) {
                Some(value) if !is_neutral(value) => Some(Targets::parse(EXCLUDE_MODULES, value)?),
                _ => None,
            },
            layers: Layers::parse(&fields)?,
            target_parameters: field(TARGET_PARAMETERS).map(|value| names(TARGET_PARAMETERS, value)).transpose()?,
            swaps_features: field("peft_version").and_then(Value::as_str).and_then(swaps_features),
        };
        if matches!(config.target_modules, Some(Targets::Pattern(_) | Targets::AllLinear)) {
            for name in [LAYERS_TO_TRANSFORM, LAYERS_PATTERN] {
                if let Some(value) = field(name).filter(|value| !value.is_null()) {
                    return Err(invalid(name, value, "null unless `target_modules` is a list"));
                }
            }
        }
        match config.patterns().filter(|pattern| pattern.is_regex()).count() {
            regexes if regexes > MAX_REGEXES => Err(AdapterError::Regexes { regexes }),
            _ => Ok(config),
        }
    }

    /// Rejects a configuration whose patterns could take too long to match with these module paths.
    pub(super) fn check_work<'a>(&self, paths: impl Iterator<Item = &'a String>) -> Result<(), AdapterError> {
        let (modules, bytes) = paths.fold((0, 0), |(paths, bytes), path| (paths + 1, bytes + path.len() as u64));
        let work = self.patterns().fold(0_u64, |work, pattern| work.saturating_add(pattern.work(modules, bytes)));
        if work <= MAX_WORK {
            Ok(())
        } else {
            Err(AdapterError::Patterns { patterns: self.patterns().count(), modules })
        }
    }

    fn patterns(&self) -> impl Iterator<Item = &Pattern> {
        let targets = [&self.target_modules, &self.exclude_modules].into_iter().filter_map(|targets| match targets {
            Some(Targets::Pattern(pattern)) => Some(pattern),
            _ => None,
        });
        let alphas = self.alpha_pattern.iter().map(|(pattern, _)| pattern);
        alphas.chain(self.rank_pattern.iter().map(|(pattern, _)| pattern)).chain(targets)
    }

    /// Rejects a module whose factors PEFT would drop.
    pub(super) fn check_target(&self, path: &str, kind: ModuleKind) -> Result<(), AdapterError> {
        let not = |field| AdapterError::NotTargeted { module: path.to_owned(), field };
        if let Some(excluded) = &self.exclude_modules
            && excluded.have(EXCLUDE_MODULES, path, kind)?
        {
            return Err(not(EXCLUDE_MODULES));
        }
        let Some(targets) = &self.target_modules else { return Ok(()) };
        if !targets.have(TARGET_MODULES, path, kind)? {
            return Err(not(TARGET_MODULES));
        }
        let by_whole_path = matches!(targets, Targets::Names(names) if names.contains(path));
        match &self.layers {
            Some(layers) if !by_whole_path && !layers.have(path) => Err(not(LAYERS_TO_TRANSFORM)),
            _ => Ok(()),
        }
    }

    /// Whether `target_parameters` may select the parameter at this path.
    pub(super) fn targets_parameter(&self, path: &str) -> bool {
        self.target_parameters.as_ref().is_none_or(|names| names.iter().any(|name| ends_in(path, name)))
    }

    /// The scaling of a module: α/r, or α/√r with `use_rslora`. As in PEFT, α is the value of the first key of `alpha_pattern` that
    /// matches the end of the path after a dot, else `lora_alpha`. The required rank is looked up likewise, and `a` names the
    /// factor in the error.
    pub(super) fn scaling(&self, module: &str, rank: usize, a: &TensorName) -> Result<f32, AdapterError> {
        let want = match first_match(RANK_PATTERN, &self.rank_pattern, module)? {
            Some(rank) => Some((RANK_PATTERN, rank)),
            None => self.rank.map(|rank| ("r", rank)),
        };
        if let Some((field, want)) = want.filter(|(_, want)| *want != rank) {
            return Err(AdapterError::RankField { tensor: a.clone(), rank, field, want });
        }
        let alpha = first_match(ALPHA_PATTERN, &self.alpha_pattern, module)?.unwrap_or(self.alpha);
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

/// Whether a path matches a pattern of this field.
fn matches(field: &'static str, pattern: &Pattern, path: &str) -> Result<bool, AdapterError> {
    let unusable = |reason| AdapterError::Pattern { field, key: pattern.text().to_owned(), reason };
    pattern.matches(path).map_err(unusable)
}

/// The value of the first matching pattern.
fn first_match<V: Copy>(field: &'static str, patterns: &[(Pattern, V)], path: &str) -> Result<Option<V>, AdapterError> {
    for (pattern, value) in patterns {
        if matches(field, pattern, path)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

impl Targets {
    fn parse(field: &'static str, value: &Value) -> Result<Self, AdapterError> {
        match value {
            Value::String(text) if field == TARGET_MODULES && text.eq_ignore_ascii_case("all-linear") => {
                Ok(Self::AllLinear)
            }
            Value::String(text) => Ok(Self::Pattern(pattern(field, text, Anchor::Whole)?)),
            _ => Ok(Self::Names(names(field, value)?.into_iter().collect())),
        }
    }

    fn have(&self, field: &'static str, path: &str, kind: ModuleKind) -> Result<bool, AdapterError> {
        match self {
            Self::AllLinear => Ok(kind == ModuleKind::Linear && !ends_in(path, "lm_head")),
            Self::Pattern(pattern) => matches(field, pattern, path),
            Self::Names(names) => Ok(endings(path).any(|ending| names.contains(ending))),
        }
    }
}

/// A path, and each part of it that follows a dot.
fn endings(path: &str) -> impl Iterator<Item = &str> {
    let after_dots = path.match_indices('.').map(|(dot, _)| &path[dot + 1..]);
    std::iter::once(path).chain(after_dots)
}

fn ends_in(path: &str, ending: &str) -> bool {
    path.strip_suffix(ending).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

impl Layers {
    fn parse(fields: &Map<String, Value>) -> Result<Option<Self>, AdapterError> {
        let names = match fields.get(LAYERS_PATTERN) {
            Some(Value::String(name)) if !name.is_empty() => vec![name.clone()],
            Some(value) if !is_neutral(value) => names(LAYERS_PATTERN, value)?,
            _ => Vec::new(),
        };
        let is_name =
            |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if let Some(name) = names.iter().find(|name| !is_name(name)) {
            return Err(invalid(LAYERS_PATTERN, &name.as_str().into(), "the name of a module"));
        }
        let want = "a layer's number or a list of them";
        let number = |value: &Value| value.as_u64().ok_or_else(|| invalid(LAYERS_TO_TRANSFORM, value, want));
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
            Some(Value::Array(numbers)) => numbers.iter().map(number).collect::<Result<_, _>>()?,
            Some(value) => HashSet::from([number(value)?]),
        };
        Ok(Some(Self { numbers, names }))
    }

    /// Whether a path is in one of the layers. The layer number is the first numeric component that is followed by another
    /// component and preceded by one of the names, or, without names, by any two components.
    fn have(&self, path: &str) -> bool {
        let components: Vec<_> = path.split('.').collect();
        let number = |name: &dyn Fn(usize) -> bool| {
            let numbered = components.windows(3).enumerate().find(|(at, window)| {
                name(*at) && !window[1].is_empty() && window[1].bytes().all(|byte| byte.is_ascii_digit())
            });
            numbered.and_then(|(_, window)| window[1].parse().ok())
        };
        let found = match &self.names[..] {
            [] => number(&|at| at > 0),
            names => names.iter().find_map(|name| number(&|at| components[at] == name)),
        };
        found.is_some_and(|number| self.numbers.contains(&number))
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
        "megatron_config" | "loftq_config" | "eva_config" | "corda_config" => match value {
            Value::Null | Value::Object(_) => Ok(()),
            _ => Err(invalid(field, value, "an object or null")),
        },
        "bias" if value.is_null() => Err(invalid(field, value, "a string")),
        "bias" if value == "none" => Ok(()),
        "init_lora_weights" if keeps_base_weights(value) => Ok(()),
        _ if is_neutral(value) && field != "bias" => Ok(()),
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
            | ALPHA_PATTERN
            | RANK_PATTERN
            | TARGET_MODULES
            | TARGET_PARAMETERS
            | EXCLUDE_MODULES
            | LAYERS_TO_TRANSFORM
            | LAYERS_PATTERN
    )
}

/// Fields that describe the training and do not affect the weights.
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
    )
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

/// Whether training left the base weights unchanged. PiSSA, OLoRA, CorDA and LoftQ move part of them into the factors. Adapters
/// that PEFT converted on saving say `true`.
fn keeps_base_weights(init: &Value) -> bool {
    match init {
        Value::Bool(_) => true,
        Value::String(name) => name.eq_ignore_ascii_case("gaussian") || matches!(&**name, "eva" | "orthogonal"),
        _ => false,
    }
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
        "bias" | "lora_bias" => "biases cannot be adapted",
        "use_dora" => "DoRA rescales the base weights",
        "modules_to_save" => "whole modules cannot be replaced",
        "trainable_token_indices" => "rows of the embedding cannot be replaced",
        "init_lora_weights" => "this initialisation changes the base weights",
        "alora_invocation_tokens" => "an adapter applies to every token of a request",
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

fn names(field: &str, value: &Value) -> Result<Vec<String>, AdapterError> {
    serde_json::from_value::<Option<Vec<String>>>(value.clone())
        .map(Option::unwrap_or_default)
        .map_err(|_| invalid(field, value, "a list of names"))
}

/// Whether this PEFT version maps n to m features for a parameter `[experts, m, n]`: yes from 0.19, unless the module is
/// transposed. Development versions between 0.18 and 0.19 may do either.
fn swaps_features(version: &str) -> Option<bool> {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next()??, numbers.next()??) {
        (0, 18) if version.contains("dev") => None,
        version => Some(version >= (0, 19)),
    }
}

/// The patterns of a field and their values in file order, in which the first match wins.
fn patterns<V>(
    field: &'static str,
    value: Option<&Value>,
    read: impl Fn(&Value, &str) -> Result<V, AdapterError>,
) -> Result<Vec<(Pattern, V)>, AdapterError> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Object(patterns)) => {
            let regexes = patterns.keys().filter(|key| !Pattern::is_plain(key)).count();
            if regexes > MAX_REGEXES {
                return Err(AdapterError::Regexes { regexes });
            }
            let read = |(key, value): (&String, &Value)| {
                let value = read(value, &format!("{field}.{key}"))?;
                Ok((pattern(field, key, Anchor::End)?, value))
            };
            patterns.iter().map(read).collect()
        }
        Some(value) => Err(invalid(field, value, "an object of numbers")),
    }
}
