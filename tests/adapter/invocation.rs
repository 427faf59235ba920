//! Adapters that apply from their invocation on: no engine applies one to whole sequences, and what PEFT does not
//! compute is refused.

use std::sync::Arc;

use aril::{
    DType,
    adapter::{Adapter, AdapterError, SlotImage},
    cpu::AdapterPool,
    model::{Linear, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    pool::{PoolConfig, Source},
};
use serde_json::{Value, json};

use crate::{load, refused};

fn model() -> Model {
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("", Parallel::Replicated, 8).slice("q_proj", 8)).unwrap();
    spec.shard(TpRank::SINGLE).unwrap()
}

/// An adapter of a module from 8 to 8 features, with these values of fields.
fn with(path: &str, kind: &str, fields: &Value) -> Result<Adapter, AdapterError> {
    let mut config = json!({ "peft_type": "LORA", "lora_alpha": 4 });
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let suffix = if kind == "lora" { ".weight" } else { "" };
    let [a, b] = ["A", "B"].map(|side| format!("{path}.{kind}_{side}{suffix}"));
    load(&config.to_string(), [(&*a, &[2, 8][..]), (&*b, &[8, 2])])
}

fn invoked(tokens: &[u32]) -> Adapter {
    with("q_proj", "lora", &json!({ "alora_invocation_tokens": tokens })).unwrap()
}

#[test]
fn an_invocation_is_a_list_of_tokens() {
    for nothing in [json!(null), json!([]), json!(false), json!({})] {
        let mut adapter = with("q_proj", "lora", &json!({ "alora_invocation_tokens": nothing })).unwrap();
        assert_eq!(adapter.take_invocation(), None);
    }
    for odd in [json!(7), json!("7"), json!(true), json!({"a": 7}), json!([-1]), json!([1.5]), json!([1_u64 << 32])] {
        let refused = with("q_proj", "lora", &json!({ "alora_invocation_tokens": odd }));
        refused!(refused, InvalidField, "`alora_invocation_tokens`", odd.to_string(), "token ids");
    }
}

/// What does not take an invocation does not load its adapter.
#[test]
fn an_invocation_has_to_be_taken() {
    let (model, mut adapter) = (model(), invoked(&[7, 8]));
    refused!(adapter.plan(&model, DType::F32), Invocation, "`alora_invocation_tokens` is [7, 8]", "take_invocation");
    let plain = with("q_proj", "lora", &json!({})).unwrap();
    refused!(SlotImage::combined(&[(&plain, 1.0), (&adapter, 1.0)], &model, DType::F32), Invocation, "[7, 8]");
    let taken = adapter.take_invocation().unwrap();
    assert_eq!((taken.tokens(), adapter.take_invocation()), (&[7, 8][..], None));
    assert!(adapter.plan(&model, DType::F32).is_ok());

    let capacity = Capacity::tokens(1).slots(1).rank(8);
    let bytes = AdapterPool::arena_bytes(&model, DType::F32, 8, 4);
    let config = PoolConfig::arena_bytes(bytes).host_bytes(bytes);
    let mut pool = AdapterPool::new(&model, DType::F32, capacity, config).unwrap();
    let mut source = Source::memory(Arc::new(invoked(&[7, 8])), &model, DType::F32).unwrap();
    let refused = pool.register(source.clone()).unwrap_err().to_string();
    assert!(refused.starts_with("`alora_invocation_tokens` is [7, 8]"), "{refused}");
    assert_eq!((source.take_invocation(), source.take_invocation()), (Some(taken), None));
    assert!(pool.register(source).is_ok());
}

#[test]
fn adapters_with_the_same_invocation_can_be_combined() {
    let model = model();
    let source = |adapter: Adapter| Source::memory(adapter.into(), &model, DType::F32).unwrap();
    let (one, other) = (source(invoked(&[7, 8])), source(invoked(&[8, 7])));
    let plain = source(with("q_proj", "lora", &json!({})).unwrap());
    let combined = |parts: &[&Source]| Source::combined(parts.iter().map(|part| ((*part).clone(), 0.5)));
    for parts in [[&one, &other], [&one, &plain], [&plain, &one]] {
        refused!(combined(&parts), Invocations, "`alora_invocation_tokens` differ");
    }
    for parts in [&[&one][..], &[&one, &one]] {
        let nested = Source::combined([(combined(parts).unwrap(), 2.0)]);
        assert_eq!(nested.unwrap().take_invocation().unwrap().tokens(), [7, 8]);
    }
}

/// PEFT does not load factors of embeddings and of parameters then. A router or an expert that is a module gets its
/// inputs without the sequences that they are of, so that PEFT fails in the first step.
#[test]
fn modules_that_an_invocation_does_not_reach_are_refused() {
    let fields = json!({ "alora_invocation_tokens": [7, 8] });
    for (path, kind) in [
        ("model.embed_tokens", "lora_embedding"),
        ("model.layers.0.mlp.experts.0.up_proj", "lora"),
        ("model.layers.0.mlp.experts", "lora"),
        ("model.layers.0.mlp.gate", "lora"),
        ("model.layers.0.mlp.shared_expert.up_proj", "lora"),
        ("model.layers.0.mlp.shared_expert_gate", "lora"),
    ] {
        assert!(with(path, kind, &json!({})).is_ok());
        refused!(with(path, kind, &fields), NotInvocable, path, "`alora_invocation_tokens`");
    }
    let of_parameter = json!({ "alora_invocation_tokens": [7, 8], "target_parameters": ["q_proj.weight"] });
    refused!(with("q_proj", "lora", &of_parameter), NotInvocable, "`q_proj.lora_A.weight`");
    for path in ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.0.linear_attn.in_proj_qkv"] {
        assert!(with(path, "lora", &fields).is_ok());
    }
}
