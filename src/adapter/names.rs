//! The grammar of tensor keys: the module and factor that a key names, and how other frameworks spell the same module.
//!
//! It sees neither shapes nor models. Invariants: names are compared by whole path components, never by substring; and
//! a key is a factor, a known exception or an error.

use super::{
    error::{AdapterError, TensorName},
    module::ModuleKind,
};

/// A parsed key of a factor.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Key {
    /// Path of the module, without wrappers.
    pub(super) module: String,
    pub(super) kind: ModuleKind,
    pub(super) side: Side,
    /// The adapter's name, in state dicts that include it.
    pub(super) adapter: Option<String>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Side {
    A,
    B,
}

/// A parsed key.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Named {
    Factor(Key),
    /// The weight of the embedding or head at this path, which PEFT saves with every adapter of either, and with others
    /// if it is told to.
    BaseWeight(String),
    /// Trained rows of the module at this path, and the adapter's name, in state dicts that include it.
    Rows(String, Option<String>),
}

/// Parses a key.
pub(super) fn parse(name: &TensorName) -> Result<Named, AdapterError> {
    let components: Vec<&str> = name.key.split('.').collect();
    if !name.key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(AdapterError::UnknownTensor { tensor: name.clone() });
    }
    if let [path @ .., "base_layer", "weight"] | [path @ .., "weight"] = &components[..]
        && let [.., "embed_tokens" | "lm_head"] = path
    {
        return Ok(Named::BaseWeight(unwrapped(path).join(".")));
    }
    if let [path @ .., "token_adapter", "trainable_tokens_delta"]
    | [path @ .., "token_adapter", "trainable_tokens_delta", _] = &components[..]
    {
        let adapter = components.get(path.len() + 2).map(|&adapter| adapter.to_owned());
        return Ok(Named::Rows(unwrapped(path).join("."), adapter));
    }
    if let Some(what) = unsupported(&components) {
        return Err(AdapterError::UnsupportedTensor { tensor: name.clone(), what });
    }
    let (path, factor, adapter) = match &components[..] {
        [path @ .., factor @ ("lora_A" | "lora_B" | "lora_embedding_A" | "lora_embedding_B"), "weight"] => {
            (path, *factor, None)
        }
        [path @ .., factor @ ("lora_A" | "lora_B"), adapter, "weight"] => (path, *factor, Some(*adapter)),
        [path @ .., factor @ ("lora_embedding_A" | "lora_embedding_B"), adapter] => (path, *factor, Some(*adapter)),
        [path @ .., factor] => (path, *factor, None),
        [] => (&[][..], "", None),
    };
    let (kind, side) = match factor {
        "lora_A" => (ModuleKind::Linear, Side::A),
        "lora_B" => (ModuleKind::Linear, Side::B),
        "lora_embedding_A" => (ModuleKind::Embedding, Side::A),
        "lora_embedding_B" => (ModuleKind::Embedding, Side::B),
        _ => return Err(AdapterError::UnknownTensor { tensor: name.clone() }),
    };
    let module = unwrapped(path);
    if module.is_empty() || components.contains(&"") {
        return Err(AdapterError::UnknownTensor { tensor: name.clone() });
    }
    Ok(Named::Factor(Key { module: module.join("."), kind, side, adapter: adapter.map(str::to_owned) }))
}

/// Describes a tensor of an unsupported feature.
fn unsupported(components: &[&str]) -> Option<&'static str> {
    let has = |names: &[&str]| components.iter().any(|component| names.contains(component));
    if has(&["lora_magnitude_vector", "weight_m_wdecomp"]) {
        return Some("a magnitude vector of DoRA");
    }
    if has(&["lora_E", "ranknum"]) {
        return Some("part of an AdaLoRA adapter");
    }
    if has(&["modules_to_save", "original_module"]) {
        return Some("a copy of a whole module (modules_to_save) under a name that PEFT does not save");
    }
    if has(&["token_adapter", "trainable_tokens_delta", "trainable_tokens_original"]) {
        return Some("part of an adapter of single tokens (trainable_token_indices) that PEFT does not save");
    }
    match components {
        [.., "input_embeddings" | "output_embeddings"] => Some("embeddings of added tokens"),
        [.., "bias"] => Some("a bias"),
        [.., "score" | "classifier", "weight"] => Some("the whole weight of a module"),
        _ => None,
    }
}

/// Removes the components that training wrappers add: PEFT's and DDP's in front, those of `torch.compile`, FSDP and
/// checkpointing anywhere.
fn unwrapped<'a>(path: &[&'a str]) -> Vec<&'a str> {
    const INSIDE: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];
    let path: Vec<_> = path.iter().copied().filter(|component| !INSIDE.contains(component)).collect();
    let mut rest = &path[..];
    while let ["base_model", "model", inner @ ..] | ["base_model" | "module", inner @ ..] = rest {
        rest = inner;
    }
    rest.to_vec()
}

/// Prefixes of a language model's modules in different frameworks, versions and wrappers.
const STEMS: [&str; 9] = [
    "",
    "model",
    "model.model",
    "language_model",
    "language_model.model",
    "model.language_model",
    "thinker",
    "thinker.model",
    "transformer",
];

/// Alternative names of modules that exist once in a model. Meta's names (`wq`, `w1` and so on) are not listed: Meta
/// orders the features of q and k differently, so such adapters must be rejected.
const ALIASES: [(&str, &str); 9] = [
    ("unembed_tokens", "lm_head"),
    ("output", "lm_head"),
    ("embed_out", "lm_head"),
    ("vocab_emb", "embed_tokens"),
    ("embeddings", "embed_tokens"),
    ("word_embeddings", "embed_tokens"),
    ("tok_embeddings", "embed_tokens"),
    ("wte", "embed_tokens"),
    ("embed_in", "embed_tokens"),
];

/// Whether a path is that of an embedding or of a head, in any spelling.
pub(super) fn is_embedding_or_head(path: &str) -> bool {
    let name = path.rsplit('.').next().unwrap_or(path);
    ALIASES.iter().any(|(alias, usual)| [*alias, *usual].contains(&name))
}

/// Whether a path is that of an embedding.
pub(super) fn is_embedding(path: &str) -> bool {
    is_embedding_or_head(path) && !is_head(path)
}

/// Whether a path is that of a head.
pub(super) fn is_head(path: &str) -> bool {
    path.rsplit('.').next() == Some("lm_head")
}

/// Alternative spellings of a module's path.
pub(super) fn spellings(module: &str) -> impl Iterator<Item = String> {
    let below = |stem: &str| match stem {
        "" => Some(module),
        _ => module.strip_prefix(stem)?.strip_prefix('.'),
    };
    let rest = STEMS.iter().filter_map(|stem| below(stem)).min_by_key(|rest| rest.len()).unwrap_or(module);
    let rest = ALIASES.iter().find(|(alias, _)| *alias == rest).map_or(rest, |(_, usual)| usual);
    let rests = [Some(rest.to_owned()), other_parent(rest)];
    let spell = |stem: &str, rest: &str| if stem.is_empty() { rest.to_owned() } else { format!("{stem}.{rest}") };
    STEMS.iter().flat_map(move |stem| rests.clone().into_iter().flatten().map(move |rest| spell(stem, &rest)))
}

/// The parent of a layer's experts, before and since transformers 5.
const PARENTS: [&str; 2] = ["block_sparse_moe", "mlp"];

/// The path with the other name of the parent of experts and their router.
fn other_parent(path: &str) -> Option<String> {
    let mut components: Vec<_> = path.split('.').collect();
    let is_inside = |name: &str| is_fms(name) || name == ROUTER;
    let inside = match components.iter().rposition(|component| *component == EXPERTS) {
        Some(experts) => experts,
        None => components.len().checked_sub(1).filter(|last| is_inside(components[*last]))?,
    };
    let parent = inside.checked_sub(1)?;
    let known = PARENTS.iter().position(|name| *name == components[parent])?;
    components[parent] = PARENTS[1 - known];
    Some(components.join("."))
}

const EXPERTS: &str = "experts";
const ROUTER: &str = "gate";

/// Module names of an expert. `w1`, `w2` and `w3` are gate, down and up.
const MODULES: [&str; 7] = ["gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"];

/// A path into the experts of a layer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct InExperts {
    /// Path of the experts.
    pub(super) experts: String,
    /// The expert's index, or `None` for all experts.
    pub(super) expert: Option<usize>,
    pub(super) item: Item,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Item {
    /// A module.
    Module(&'static str),
    /// A module in fms's format, whose factors may be transposed.
    Fms(&'static str),
    /// A parameter wrapped by PEFT. The path does not tell which one.
    Parameter,
}

/// Parses a path as one of or into experts, if it has that form.
pub(super) fn in_experts(path: &str) -> Option<InExperts> {
    let components: Vec<_> = path.split('.').collect();
    let inside = |experts: &[&str], expert, item| Some(InExperts { experts: experts.join("."), expert, item });
    let (last, parent) = components.split_last()?;
    let Some(name) = MODULES.into_iter().find(|name| name == last) else {
        return inside(unwrapped_parameter(&components), None, Item::Parameter);
    };
    match parent {
        [.., parent_name] if is_fms(name) && PARENTS.contains(parent_name) => {
            inside(&[parent, &[EXPERTS]].concat(), None, Item::Fms(name))
        }
        [experts @ .., number] if number.bytes().all(|digit| digit.is_ascii_digit()) => {
            let expert = number.parse().ok().filter(|expert: &usize| expert.to_string() == **number)?;
            inside(experts, Some(expert), Item::Module(name))
        }
        experts => inside(experts, None, Item::Module(name)),
    }
}

/// Whether fms uses this name for a module of all experts without an `experts` component.
fn is_fms(name: &str) -> bool {
    matches!(name, "w1" | "w2" | "w3")
}

/// Removes the `base_layer` components that PEFT adds for each further parameter of a module.
fn unwrapped_parameter<'a, 'b>(mut path: &'a [&'b str]) -> &'a [&'b str] {
    while let [inner @ .., "base_layer"] = path {
        path = inner;
    }
    path
}

/// Whether factors with these numbers of dimensions can only be those of several experts.
pub(super) fn is_stack(path: &str, dims: [usize; 2]) -> bool {
    let components: Vec<_> = path.split('.').collect();
    match unwrapped_parameter(&components) {
        [.., EXPERTS] => true,
        [.., last] => dims.contains(&3) && MODULES.contains(last),
        [] => false,
    }
}

/// Whether a path is that of a parameter that holds all experts.
pub(super) fn is_parameter(path: &str) -> bool {
    let components: Vec<_> = path.split('.').collect();
    matches!(unwrapped_parameter(&components), [.., EXPERTS])
}

/// Whether a path leads to a part of a mixture of experts: to a router, or into experts, also shared ones.
pub(super) fn is_of_mixture(path: &str) -> bool {
    path.split('.').any(|component| [EXPERTS, ROUTER].contains(&component) || component.starts_with("shared_expert"))
}

/// Whether a path leads into experts.
pub(super) fn is_of_experts(path: &str) -> bool {
    path.split('.').any(|component| component == EXPERTS)
}
