//! Adapters as PEFT stores them, and what they become in a slot.
//!
//! [`Adapter::open`] maps the files of a directory and [`Adapter::read`] copies them; [`Adapter::from_safetensors`] takes the bytes of
//! such files and [`Adapter::from_tensors`] tensors. All of them read `adapter_config.json` and the tensors' names and shapes, and
//! refuse, by name, whatever cannot be served exactly. [`Adapter::plan`] finds the adapter's place in a [`Model`](crate::model::Model) and what this
//! rank needs of it; [`SlotImage::write_to`] then reads the weights, once. Not for training, merging into base weights, or residency.
//!
//! ```no_run
//! # use aril::{DType, adapter::{Adapter, AdapterError}, model::Model};
//! # fn pack(model: &Model) -> Result<Vec<u8>, AdapterError> {
//! let adapter = Adapter::read("adapters/pirate")?;
//! let image = adapter.plan(model, DType::BF16)?;
//! let mut block = vec![0; image.bytes()];
//! image.write_to(&mut block)?;
//! # Ok(block)
//! # }
//! ```
//!
//! Invariant: every tensor of an adapter is in its modules and stacks, is a base weight, or was refused, and each of those is in a plan
//! or was refused. Those without elements are in none, and only for what experts without a gate do not have.
//!
//! # What PEFT does
//!
//! An adapter has the effect that it has in PEFT 0.21, or it is refused. For `adapter_config.json` this means:
//!
//! | field | rule |
//! |---|---|
//! | `lora_alpha`, `alpha_pattern`, `use_rslora` | The scaling of a module is α/r, or α/√r. `lora_alpha` is required. |
//! | `r`, `rank_pattern` | The factors of a module must have this rank. PEFT does not load others. |
//! | `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern` | The factors must be of modules that these fields select. PEFT drops others without an error. `target_modules: null` needs `target_parameters`; PEFT would choose by the model's type. `layers_pattern` must be plain names. |
//! | `target_parameters` | The same for parameters that hold all experts. |
//! | patterns in these fields | Python's `re`. Constructs that Python lacks, or that our engine reads differently, are refused: POSIX classes, set operators, `\<`, `\N{…}`, inline flags, possessive quantifiers. A configuration may have 64 regular expressions, besides any number of plain paths; their compiled size and their work on all modules are bounded. |
//! | `modules_to_save`, `bias`, `use_dora` and others | Refused if they switch anything on. So is an unknown field, unless it is null, false or empty. |
//!
//! These differ from PEFT on purpose:
//!
//! - If `r`, `target_modules` or `target_parameters` is absent, the tensors decide. PEFT uses defaults. Trainers that send adapters from
//!   memory often write only `peft_type` and `lora_alpha`.
//! - With `"target_modules": "all-linear"`, factors of `lm_head` or of an embedding are refused, because PEFT drops them. A head named
//!   `unembed_tokens` is served: the trainers that write this name train it.
//! - A key may carry wrappers (`base_model.model`, `module`, `_orig_mod`, FSDP's), the adapter's name, or a model's outer names from
//!   another version or framework, and may lack them. PEFT drops every key that is not exactly its own. A module that the model lacks
//!   is refused, and so are an embedding's factors for a linear layer and a linear layer's for an embedding.
//! - PEFT saves the `base_layer.weight` of an embedding or a head with every adapter of it, and loads it over the base model's weight.
//!   Such an adapter is refused until the engine has compared the two: [`Adapter::compare_base_weights`].
//! - `peft_type` may be lower case.
//!
//! # Experts
//!
//! The factors of a mixture of experts come expert by expert, or all in one pair of tensors, in several forms; those are [`Stack`]s
//! until a model says how many experts there are. Each of these is read, of the experts of a path that the model has, each `{proj}`
//! one of `gate_proj`, `up_proj`, `down_proj` and `gate_up_proj`, or of `w1`, `w3` and `w2`:
//!
//! | form | keys | A | B | made by |
//! |---|---|---|---|---|
//! | an expert's | `experts.{e}.{proj}` | `[r, in]` | `[out, r]` | PEFT on lists of modules; prime-rl |
//! | stacked | `experts.{proj}` | `[E, r, in]` | `[E, out, r]` | Tinker, Megatron-Bridge, SkyRL; E is 1 where all share one |
//! | fms | `block_sparse_moe.w1` | `[E, in, r]` or as stacked | `[E, r, out]` or as stacked | fms-acceleration |
//! | side by side | `shared_experts.{proj}` | `[r, in]`; of down `[r, E in]` | `[E out, r]`; of down `[out, r]` | Inkling's shared experts |
//! | parameters | `experts`, `experts.base_layer` | `[E r, in]`, by expert | `[out, r E]`, expert fastest | PEFT's `target_parameters` |
//!
//! Of a parameter the factors may also be those of the transposed delta, with `in` and `out` exchanged ([`Orientation`]). What
//! cannot be told from `peft_version`, `target_parameters` and the shapes is refused. A stacked gate_up may have an A for each of its
//! halves, one after the other. Gate and up in one are taken apart as the checkpoint has them
//! ([`Experts::stored_halves`](crate::model::Experts::stored_halves)).
//!
//! However an adapter spells it, its block is the same: factors that all experts have alike are there once
//! ([`SlotImage::shared`]), and only those of the experts that this rank holds.

mod config;
mod error;
mod experts;
mod files;
mod image;
pub mod layout;
mod module;
mod names;
mod open;
mod pattern;
mod place;
mod rectangle;
mod shown;
mod tensor;

pub use self::{
    error::{AdapterError, TensorName},
    experts::Orientation,
    image::{ImageEntry, MIN_STAGING_BYTES, Piece, SharedEntry, SlotImage},
    module::{BaseWeight, Module, ModuleKind, Stack},
    open::Adapter,
    tensor::Tensor,
};
