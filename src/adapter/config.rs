//! `adapter_config.json`: what scales the factors, and what would make them mean something else than LoRA.
//!
//! It trusts the tensors for everything that they say themselves: `r`, `rank_pattern`, `target_modules` and the layers are not
//! read. (`target_parameters` and `peft_version` are: the tensors of such parameters do not say what they are of.) Invariant: a field that we do not know is at a value that switches nothing on.

use fancy_regex::Regex;
use serde_json::{Map, Value};

use super::AdapterError;

/// Where the configuration is in an adapter's directory.
pub(super) const FILE: &str = "adapter_config.json";

/// What the configuration says that the tensors do not.
#[derive(Debug)]
pub(super) struct Config {
    alpha: f64,
    alpha_pattern: Vec<Pattern>,
    rslora: bool,
    target_parameters: Vec<String>,
    /// Whether PEFT took a parameter `[experts, m, n]` for one from n to m features, not from m to n, if its version says so.
    pub(super) swaps_features: Option<bool>,
}

#[derive(Debug)]
struct Pattern {
    key: String,
    regex: Regex,
    alpha: f64,
}

impl Config {
    pub(super) fn parse(text: &str) -> Result<Self, AdapterError> {
        let json = |source: serde_json::Error| AdapterError::Json { path: FILE.into(), source: source.into() };
        let fields: Map<String, Value> = serde_json::from_str(text).map_err(json)?;
        let required = |field| fields.get(field).ok_or(AdapterError::MissingField { field });
        lora(required("peft_type")?)?;
        let alpha = number("lora_alpha", required("lora_alpha")?)?;
        let mut config = Self {
            alpha,
            alpha_pattern: Vec::new(),
            rslora: false,
            target_parameters: Vec::new(),
            swaps_features: fields.get("peft_version").and_then(Value::as_str).and_then(swaps_features),
        };
        for (field, value) in &fields {
            match field.as_str() {
                "use_rslora" => config.rslora = flag(field, value)?,
                "alpha_pattern" => config.alpha_pattern = patterns(field, value)?,
                "target_parameters" => config.target_parameters = names(field, value)?,
                _ if is_informational(field) || is_neutral(value) => {}
                "bias" if value == "none" => {}
                "init_lora_weights" if keeps_base_weights(value) => {}
                _ => return Err(unsupported(field, value)),
            }
        }
        Ok(config)
    }

    /// Whether a parameter of this name may have been a target: if none are named, any.
    pub(super) fn targets_parameter(&self, name: &str) -> bool {
        let mut names = self.target_parameters.iter().map(|path| path.rsplit('.').next());
        self.target_parameters.is_empty() || names.any(|target| target == Some(name))
    }

    /// α/r, or α/√r for rank-stabilised adapters, of a module of rank `rank`. As in PEFT, α is that of the first key of
    /// `alpha_pattern` that matches the end of the path from a dot on, else `lora_alpha`.
    pub(super) fn scaling(&self, module: &str, rank: usize) -> Result<f32, AdapterError> {
        let mut alpha = self.alpha;
        for pattern in &self.alpha_pattern {
            if pattern.matches(module)? {
                alpha = pattern.alpha;
                break;
            }
        }
        let divisor = if self.rslora { (rank as f64).sqrt() } else { rank as f64 };
        #[expect(clippy::cast_possible_truncation, reason = "rounded to nearest; what is out of range is refused")]
        let scaling = (alpha / divisor) as f32;
        if scaling.is_normal() || alpha == 0.0 {
            return Ok(scaling);
        }
        Err(AdapterError::Scaling { module: module.to_owned(), alpha, rank })
    }
}

impl Pattern {
    fn new(key: &str, alpha: f64) -> Result<Self, AdapterError> {
        // PEFT's `re.match(rf"(.*\.)?({key})$", path)`, groups and all, so that back references mean the same.
        let regex = Regex::new(&format!(r"\A(?:(.*\.)?({key})$)")).map_err(|source| unusable(key, source))?;
        Ok(Self { key: key.to_owned(), regex, alpha })
    }

    fn matches(&self, module: &str) -> Result<bool, AdapterError> {
        self.regex.is_match(module).map_err(|source| unusable(&self.key, source))
    }
}

/// What says how an adapter was trained, or repeats what the tensors say.
fn is_informational(field: &str) -> bool {
    matches!(
        field,
        "peft_type" | "lora_alpha" // read already
            | "r" | "rank_pattern"
            | "target_modules" | "exclude_modules" | "layers_to_transform" | "layers_pattern"
            | "base_model_name_or_path" | "revision" | "peft_version" | "auto_mapping" | "task_type" | "inference_mode"
            | "lora_dropout" | "fan_in_fan_out" | "qalora_group_size" | "runtime_config"
            | "megatron_config" | "megatron_core" | "loftq_config" | "eva_config" | "corda_config"
    )
}

/// Whether a value switches nothing on: PEFT writes every field it knows, most of them so.
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

/// Whether the base model's weights are still those of the adapter's training: PiSSA, OLoRA, CorDA and LoftQ move a part of
/// them into the factors. (Adapters that PEFT converted as it saved them say `true`.)
fn keeps_base_weights(init: &Value) -> bool {
    match init {
        Value::Bool(_) => true,
        Value::String(name) => matches!(&*name.to_ascii_lowercase(), "gaussian" | "eva" | "orthogonal"),
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
        "peft_type" => "only LORA adapters are",
        "bias" | "lora_bias" => "an adapter adds no bias",
        "use_dora" => "DoRA rescales the base model's weights",
        "modules_to_save" => "whole modules cannot be replaced",
        "trainable_token_indices" => "rows of the embedding cannot be replaced",
        "init_lora_weights" => "the adapter belongs to base weights that were changed as it was made",
        "alora_invocation_tokens" => "an adapter is on for every token of a request, not from a certain one on",
        "use_qalora" => "QALoRA pools the inputs of a layer",
        "use_bdlora" => "the factors would be block-diagonal",
        "layer_replication" => "the model's layers cannot be replicated",
        _ => "we do not know the field, and it may change what the weights mean",
    };
    AdapterError::UnsupportedField { field: field.to_owned(), value: value.to_string(), reason }
}

fn invalid(field: &str, value: &Value, want: &'static str) -> AdapterError {
    AdapterError::InvalidField { field: field.to_owned(), value: value.to_string(), want }
}

fn unusable(key: &str, source: fancy_regex::Error) -> AdapterError {
    AdapterError::Pattern { key: key.to_owned(), source: source.into() }
}

fn number(field: &str, value: &Value) -> Result<f64, AdapterError> {
    value.as_f64().filter(|number| number.is_finite()).ok_or_else(|| invalid(field, value, "a number"))
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

/// As PEFT does from 0.19 on, unless the module says that it is transposed. What was between 0.18 and 0.19 may or may not.
fn swaps_features(version: &str) -> Option<bool> {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next()??, numbers.next()??) {
        (0, 18) if version.contains("dev") => None,
        version => Some(version >= (0, 19)),
    }
}

fn patterns(field: &str, value: &Value) -> Result<Vec<Pattern>, AdapterError> {
    match value {
        Value::Null => Ok(Vec::new()),
        // In the order of the file: the first key that matches wins.
        Value::Object(patterns) => {
            patterns.iter().map(|(key, alpha)| Pattern::new(key, number(&format!("{field}.{key}"), alpha)?)).collect()
        }
        _ => Err(invalid(field, value, "an object of numbers")),
    }
}
