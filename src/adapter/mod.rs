//! LoRA adapters in PEFT's format, and their images in a slot.
//!
//! [`Adapter::open`] reads the files of a directory, and [`Adapter::map`] maps them. [`Adapter::from_safetensors`]
//! takes the bytes of such files, and [`Adapter::from_tensors`] takes tensors. Each reads `adapter_config.json` and the
//! names and shapes of the tensors, and rejects by name whatever cannot be served exactly. [`Adapter::plan`] places the
//! adapter in a [`Model`](crate::model::Model) and selects what this rank needs. [`SlotImage::write_to`] then reads
//! each weight once. [`SlotImage::combined`] makes one image of several adapters. Training, merging into base weights and
//! residency are out of scope.
//!
//! ```no_run
//! # use aril::{DType, adapter::{Adapter, AdapterError}, model::Model};
//! # fn pack(model: &Model) -> Result<Vec<u8>, AdapterError> {
//! let adapter = Adapter::open("adapters/pirate")?;
//! let image = adapter.plan(model, DType::BF16)?;
//! let mut block = vec![0; image.bytes()];
//! image.write_to(&mut block)?;
//! # Ok(block)
//! # }
//! ```
//!
//! Invariant: every tensor of an adapter is used or rejected. Only an empty tensor may go unused, as the factor of a
//! gate that ungated experts lack.
//!
//! # Compatibility with PEFT
//!
//! An adapter has the same effect as in PEFT 0.21, or it is rejected. Rules for `adapter_config.json`:
//!
//! | field | rule |
//! |---|---|
//! | `lora_alpha`, `alpha_pattern`, `use_rslora` | The scaling of a module is α/r, or α/√r with `use_rslora`. `lora_alpha` is required. |
//! | `r`, `rank_pattern` | The factors of a module must have this rank. PEFT does not load others. |
//! | `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern` | These fields must select every module that has factors. PEFT silently drops the others. `target_modules: null` requires `target_parameters`; PEFT would choose by model type. `layers_pattern` must be plain names. The layer's number is the first one in a path, or the last one if `peft_version` is below 0.20; if it is absent, the one that selects all modules. |
//! | `target_parameters` | The same for parameters that hold all experts. The factors of a parameter that is the weight of a linear layer, such as a router's `gate.weight`, are those of the layer: no other field excludes it, and patterns match the path of the weight. |
//! | patterns in these fields | Python's `re` syntax. Constructs that Python lacks, or that the regex engine used here interprets differently, are rejected: POSIX classes, set operators, `\<`, `\N{…}`, inline flags, possessive quantifiers. A configuration may have up to 64 regular expressions, of 32 KiB together, and any number of plain paths. Their nesting, their compiled size and the total matching work are bounded. |
//! | `init_lora_weights` | Rejected if PEFT changes the base weights when it loads such an adapter: PiSSA, CorDA, OLoRA and LoftQ, unless PEFT converted the adapter when it saved it. |
//! | `ensure_weight_tying` | The embedding and the head must both have factors, or neither. Those of the head must be those of the embedding, with A and B exchanged, unless `target_modules` lists the head: PEFT removes a head that is tied. |
//! | `alora_invocation_tokens` | The adapter applies from the last occurrence of these tokens in a prompt on ([`Invocation`]). It is rejected until the engine has taken them ([`Adapter::take_invocation`], [`Source::take_invocation`](crate::pool::Source::take_invocation)). Factors of embeddings and of mixtures of experts, which PEFT does not compute then, are rejected. |
//! | `trainable_token_indices` | The rows replace those of the embedding, and of a head that the model ties to it, for a model whose engine applies them ([`ModelSpec::trained_rows`](crate::model::ModelSpec::trained_rows)). Of a map of lists, the head of an untied model has its own; the head of a tied one has them if its ids are others. Rejected: rows without ids, ids without rows or twice, ids beyond the vocabulary, rows of any other module or of one that has factors, in a combination, and with an invocation. |
//! | `modules_to_save` | The weights of the embedding and of the head are rows, too: all of them. As in PEFT, a tied head keeps the base's weight unless it is named, or `ensure_weight_tying` is set. Weights that the list does not name are copies of the base's (below). Any other module is rejected. |
//! | `bias` | Ignored. An adapter with a bias has a tensor of it, which is rejected. |
//! | fields of trainers | What describes the training alone is ignored: `swift_type`, `lora_dtype`, `lorap_*` of ms-swift, `loraplus_*`, `merge_weights`, versions of programs. |
//! | `lora_bias`, `use_dora` and others | Rejected if they enable anything. So is an unknown field, unless it is null, false or empty. |
//!
//! Deliberate differences from PEFT:
//!
//! - If `r`, `target_modules` or `target_parameters` is absent, the tensors decide; PEFT uses defaults. Trainers that
//!   send adapters from memory often write only `peft_type` and `lora_alpha`.
//! - With `"target_modules": "all-linear"`, factors of `lm_head` or of an embedding are rejected, because PEFT drops
//!   them. A head named `unembed_tokens` is accepted, because the trainers that use this name train it.
//! - Keys may carry or lack wrappers (`base_model.model`, `module`, `_orig_mod`, FSDP's), the adapter's name (all or
//!   none), and outer module names of other versions or frameworks. PEFT drops every key that is not exactly its own. A
//!   module that the model lacks is rejected, as are an embedding's factors for a linear layer and a linear layer's for
//!   an embedding. Factors named `lm_head.lora_embedding_A` and `_B`, as tokenspeed writes them, are a head's if they
//!   have its shapes, `[r, hidden]` and `[vocab, r]`.
//! - PEFT saves the weight of an adapted embedding or head (`base_layer.weight`), or of both (`save_embedding_layers`),
//!   and loads it over the base model's weight. Such an adapter is rejected until the engine has compared the two:
//!   [`Adapter::compare_base_weights`].
//! - `peft_type` may be lower case.
//!
//! Factors in files are BF16, F16, F32, F64 or F8_E4M3. F64 is rounded to F32 when it is read: PEFT loads such factors
//! into F32, and torch rounds F64 to F32 on the way to 16 bits, too. F8_E4M3, without scales as PEFT reads it, becomes
//! BF16, which is exact.
//!
//! # Experts
//!
//! Factors of experts come one expert at a time, or stacked in one pair of tensors in several formats. The latter are
//! [`Stack`]s until a model determines the number of experts. `{proj}` is `gate_proj`, `up_proj`, `down_proj` or
//! `gate_up_proj`, or `w1`, `w3` or `w2`. `E` is the number of experts:
//!
//! | format | keys | A | B | written by |
//! |---|---|---|---|---|
//! | per expert | `experts.{e}.{proj}` | `[r, in]` | `[out, r]` | PEFT on lists of modules; prime-rl |
//! | stacked | `experts.{proj}` | `[E, r, in]` | `[E, out, r]` | Tinker, Megatron-Bridge, SkyRL; `E` is 1 for shared factors |
//! | fms | `block_sparse_moe.w1` | `[E, in, r]` or as stacked | `[E, r, out]` or as stacked | fms-acceleration |
//! | side by side | `shared_experts.{proj}` | `[r, in]`; for down `[r, E in]` | `[E out, r]`; for down `[out, r]` | Inkling's shared experts |
//! | parameters | `experts`, `experts.base_layer` | `[E r, in]`, expert slowest | `[out, r E]`, expert fastest | PEFT's `target_parameters` |
//!
//! The factors of a parameter may also be those of the transposed delta, with `in` and `out` exchanged
//! ([`Orientation`]). If `peft_version`, `target_parameters` and the shapes do not determine the format, the adapter is
//! rejected. A stacked gate-up may have one A for each half. Gate-up factors are split in the checkpoint's order
//! ([`Experts::stored_halves`](crate::model::Experts::stored_halves)).
//!
//! All formats give the same image. It stores shared factors once ([`SlotImage::shared`]), and other factors only for
//! the experts on this rank.

mod config;
mod directory;
mod error;
mod escaped;
mod experts;
mod files;
mod fingerprint;
mod image;
mod invocation;
mod joined;
pub mod layout;
mod module;
mod names;
mod nested;
mod open;
mod pattern;
mod place;
mod planned;
mod rectangle;
mod tensor;

pub use self::escaped::Escaped;
pub(crate) use self::{
    directory::{Directory, Parsed},
    planned::Planned,
};
pub use self::{
    error::{AdapterError, TensorName},
    experts::Orientation,
    files::Opener,
    image::{ImageEntry, MIN_STAGING_BYTES, Piece, RowsEntry, SharedEntry, SlotImage},
    invocation::Invocation,
    module::{BaseWeight, Module, ModuleKind, Stack, TrainedRows},
    open::Adapter,
    place::MAX_PARTS,
    tensor::Tensor,
};
#[cfg(feature = "cuda")]
pub(crate) use self::{
    rectangle::{FactorKind, FactorOnDevice},
    tensor::Remote,
};
