//! The grammar of tensor keys: which factor of which module a key names, and how other frameworks spell the same module.
//!
//! It sees names only, neither shapes nor models. Invariant: names are compared by whole path components, never by substring, and
//! a key is a factor, a known exception or an error, nothing else.

use super::{
    error::{AdapterError, TensorName},
    module::ModuleKind,
};

/// A factor, as its key names it.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Key {
    /// The module's path, less what wrappers put before and into it.
    pub(super) module: String,
    pub(super) kind: ModuleKind,
    pub(super) side: Side,
    /// The adapter's name, in the state dicts that have it.
    pub(super) adapter: Option<String>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Side {
    A,
    B,
}

/// What a key names.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Named {
    Factor(Key),
    /// The weight of the embedding or the head of this path, which PEFT saves with an adapter of one of them.
    BaseWeight(String),
}

/// Reads a key.
pub(super) fn parse(name: &TensorName) -> Result<Named, AdapterError> {
    let components: Vec<&str> = name.key.split('.').collect();
    if !name.key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(AdapterError::UnknownTensor { tensor: name.clone() });
    }
    if let [path @ .., "base_layer", "weight"] = &components[..]
        && let [.., "embed_tokens" | "lm_head"] = path
    {
        return Ok(Named::BaseWeight(unwrapped(path).join(".")));
    }
    if let Some(what) = unsupported(&components) {
        return Err(AdapterError::UnsupportedTensor { tensor: name.clone(), what });
    }
    let (path, factor, adapter) = match &components[..] {
        [path @ .., factor @ ("lora_A" | "lora_B"), "weight"] => (path, *factor, None),
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

/// What a tensor is that training leaves in adapters and that changes the model in another way than LoRA does.
fn unsupported(components: &[&str]) -> Option<&'static str> {
    let has = |names: &[&str]| components.iter().any(|component| names.contains(component));
    if has(&["lora_magnitude_vector", "weight_m_wdecomp"]) {
        return Some("a magnitude vector of DoRA");
    }
    if has(&["lora_E", "ranknum"]) {
        return Some("a part of an AdaLoRA adapter");
    }
    if has(&["modules_to_save", "original_module"]) {
        return Some("a copy of a whole module (modules_to_save)");
    }
    if has(&["token_adapter", "trainable_tokens_delta", "trainable_tokens_original"]) {
        return Some("of an adapter of single tokens (trainable_token_indices)");
    }
    match components {
        [.., "input_embeddings" | "output_embeddings"] => Some("embeddings of added tokens"),
        [.., "bias"] => Some("a bias"),
        [.., "lm_head" | "embed_tokens" | "score" | "classifier", "weight"] => Some("the whole weight of a module"),
        _ => None,
    }
}

/// A path less what training wrappers add: PEFT and DDP in front, `torch.compile`, FSDP and checkpointing anywhere.
fn unwrapped<'a>(path: &[&'a str]) -> Vec<&'a str> {
    const INSIDE: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];
    let path: Vec<_> = path.iter().copied().filter(|component| !INSIDE.contains(component)).collect();
    let mut rest = &path[..];
    while let ["base_model", "model", inner @ ..] | ["base_model" | "module", inner @ ..] = rest {
        rest = inner;
    }
    rest.to_vec()
}

/// What stands before a language model's own module names, from one framework, version or wrapper to another.
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

/// Names that only one module can have, and its usual one. (Not `wq`, `w1` and the rest of Meta's own format: its q and k have
/// the features in another order, so such adapters are refused as modules without a place.)
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

/// The other paths that a module's path may stand for.
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

/// What the experts of a model are in, before and after transformers 5.
const PARENTS: [&str; 2] = ["block_sparse_moe", "mlp"];

/// A path into experts, by the other name of what they are in.
fn other_parent(path: &str) -> Option<String> {
    let mut components: Vec<_> = path.split('.').collect();
    let inside = match components.iter().rposition(|component| *component == EXPERTS) {
        Some(experts) => experts,
        None => components.len().checked_sub(1).filter(|last| is_fms(components[*last]))?,
    };
    let parent = inside.checked_sub(1)?;
    let known = PARENTS.iter().position(|name| *name == components[parent])?;
    components[parent] = PARENTS[1 - known];
    Some(components.join("."))
}

const EXPERTS: &str = "experts";

/// What an expert's modules are called; w1, w2 and w3 are gate, down and up.
const MODULES: [&str; 7] = ["gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"];

/// What a path names in the experts of a layer.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct InExperts {
    /// The path of the experts.
    pub(super) experts: String,
    /// One of them, or all.
    pub(super) expert: Option<usize>,
    pub(super) item: Item,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Item {
    /// A module, by its name.
    Module(&'static str),
    /// A module of fms, by its name, whose factors may be transposed.
    Fms(&'static str),
    /// A parameter that PEFT has wrapped; which of them, the path does not say.
    Parameter,
}

/// Reads a path as one of or into experts, if it can be.
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

/// Whether a module without `experts` above it may be one of all experts, as fms names them.
fn is_fms(name: &str) -> bool {
    matches!(name, "w1" | "w2" | "w3")
}

/// The path of a module less what PEFT adds for each of its parameters that it has wrapped before another.
fn unwrapped_parameter<'a, 'b>(mut path: &'a [&'b str]) -> &'a [&'b str] {
    while let [inner @ .., "base_layer"] = path {
        path = inner;
    }
    path
}

/// Whether the factors of a path, of these dimensions, are those of several experts, as far as its name and they say.
pub(super) fn is_stack(path: &str, dims: [usize; 2]) -> bool {
    let components: Vec<_> = path.split('.').collect();
    match unwrapped_parameter(&components) {
        [.., EXPERTS] => true,
        [.., last] => dims.contains(&3) && MODULES.contains(last),
        [] => false,
    }
}

/// Whether the factors of a path are those of a parameter that holds all experts.
pub(super) fn is_parameter(path: &str) -> bool {
    let components: Vec<_> = path.split('.').collect();
    matches!(unwrapped_parameter(&components), [.., EXPERTS])
}

/// Whether a path leads into experts.
pub(super) fn is_of_experts(path: &str) -> bool {
    path.split('.').any(|component| component == EXPERTS)
}
