//! A Qwen3 on candle that serves many LoRA adapters at once.
//!
//! - One forward runs a batch in which every sequence names any adapter or none, whether it is at its prompt or at its
//!   next token ([`generate::step`]).
//! - Adapters are registered, replaced and removed while the model stays loaded ([`lora::Adapters`]).
//! - Sequences without an adapter get the base model's logits, bit for bit.
//!
//! `lora.rs` has every call of aril. `qwen3.rs` is a model as one writes it on candle-nn, except that its linear layers are
//! [`lora::LoraLinear`].

pub mod generate;
pub mod lora;
pub mod qwen3;
