//! A batch of many adapters gives what each sequence gives alone, and what transformers and PEFT give.

use std::{
    collections::{BTreeSet, HashMap},
    env, fs,
    path::PathBuf,
};

use aril::plan::Capacity;
use candle_core::{DType, Device, Result, Tensor, safetensors};
use tokenizers::Tokenizer;

use crate::{
    adapters::Named,
    device,
    generate::{Sequence, generate, step},
    model::Qwen3,
};

/// The largest difference of f32 logits between the batch and a sequence alone, and from transformers.
const TOLERANCE: f32 = 1e-3;
const MAX_NEW_TOKENS: usize = 12;

/// `tests/fixtures`, or the copy of it that `ARIL_FIXTURES` names.
fn fixtures() -> PathBuf {
    let copy = env::var_os("ARIL_FIXTURES").map(PathBuf::from);
    copy.unwrap_or_else(|| [env!("CARGO_MANIFEST_DIR"), "../../tests/fixtures"].iter().collect())
}

fn adapter(name: &str) -> PathBuf {
    fixtures().join("adapters").join(name)
}

/// The model, and a table for `max_adapters` adapters.
fn open(max_adapters: usize) -> (Qwen3, Named) {
    let device = device();
    let (model, sites) = Qwen3::open(&fixtures().join("qwen3"), DType::F32, &device).unwrap();
    let capacity = Capacity::tokens(512).slots(max_adapters).rank(64);
    (model, Named::new(&sites, aril::DType::F32, &device, capacity).unwrap())
}

fn tokenize(text: &str) -> Vec<u32> {
    let tokenizer = Tokenizer::from_file(fixtures().join("qwen3/tokenizer.json")).unwrap();
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

/// The text of the tokens after a prompt.
fn answer(sequence: &Sequence, prompt: &[u32]) -> String {
    let tokenizer = Tokenizer::from_file(fixtures().join("qwen3/tokenizer.json")).unwrap();
    tokenizer.decode(&sequence.tokens[prompt.len()..], true).unwrap()
}

/// Steps all sequences to the end of their texts; for each the logits of each of its tokens, `[vocab]`.
fn logits(model: &Qwen3, adapters: &Named, sequences: &mut [Sequence]) -> Vec<Vec<Tensor>> {
    let mut all = vec![Vec::new(); sequences.len()];
    for _ in 0..MAX_NEW_TOKENS {
        let is_active = |sequence: &Sequence| sequence.tokens.last() != Some(&model.config().eos_token_id);
        let (places, mut active): (Vec<usize>, Vec<&mut Sequence>) =
            sequences.iter_mut().enumerate().filter(|(_, sequence)| is_active(sequence)).unzip();
        if active.is_empty() {
            break;
        }
        let logits = step(model, adapters, &mut active).unwrap().to_device(&Device::Cpu).unwrap();
        for (row, (place, sequence)) in places.into_iter().zip(active).enumerate() {
            let logits = logits.get(row).unwrap();
            sequence.tokens.push(logits.argmax(0).unwrap().to_scalar().unwrap());
            all[place].push(logits);
        }
    }
    all
}

fn difference(a: &Tensor, b: &Tensor) -> f32 {
    let difference = a.sub(b).and_then(|difference| difference.abs()?.max_all());
    difference.unwrap().to_scalar().unwrap()
}

/// A request, and the result of transformers and PEFT.
struct Golden {
    adapter: Option<String>,
    prompt: Vec<u32>,
    tokens: Vec<u32>,
    /// `[tokens, vocab]`
    logits: Tensor,
}

impl Golden {
    fn sequence(&self, model: &Qwen3) -> Sequence {
        Sequence::new(model, self.adapter.as_deref(), &self.prompt)
    }
}

/// The requests of a batch without a scale.
fn goldens(batch: &str) -> Vec<Golden> {
    let file = |name: &str| fixtures().join("goldens").join(name);
    let requests = fs::read(file(&format!("{batch}.json"))).unwrap();
    let requests: Vec<HashMap<String, serde_json::Value>> = serde_json::from_slice(&requests).unwrap();
    let tensors = safetensors::load(file(&format!("{batch}.f32.safetensors")), &Device::Cpu).unwrap();
    let golden = |(index, request): (usize, HashMap<String, serde_json::Value>)| {
        let adapter = request["adapter"].as_str().map(str::to_owned);
        if request.contains_key("scale") {
            return None;
        }
        let prompt = match request.get("token_ids") {
            Some(ids) => serde_json::from_value(ids.clone()).unwrap(),
            None => tokenize(request["prompt"].as_str().unwrap()),
        };
        let tokens = tensors[&format!("request.{index}.tokens")].to_dtype(DType::U32).unwrap().to_vec1().unwrap();
        let logits = tensors[&format!("request.{index}.logits")].clone();
        Some(Golden { adapter, prompt, tokens, logits })
    };
    requests.into_iter().enumerate().filter_map(golden).collect()
}

#[test]
fn a_batch_gives_what_each_gives_alone() {
    let goldens = goldens("mixed");
    let names: BTreeSet<_> = goldens.iter().filter_map(|golden| golden.adapter.clone()).collect();
    assert_eq!((goldens.len(), names.len()), (16, 9), "the fixtures have other requests");
    let (model, mut adapters) = open(names.len());
    for name in &names {
        adapters.register(name, &adapter(name)).unwrap();
    }
    let mut together: Vec<_> = goldens.iter().map(|golden| golden.sequence(&model)).collect();
    let batched = logits(&model, &adapters, &mut together);
    for ((golden, together), batched) in goldens.iter().zip(&together).zip(&batched) {
        let name = &golden.adapter;
        assert_eq!(together.tokens[golden.prompt.len()..], golden.tokens, "{name:?}");
        let mut alone = [golden.sequence(&model)];
        let alone_logits = logits(&model, &adapters, &mut alone);
        assert_eq!(alone[0].tokens, together.tokens, "{name:?}");
        for (token, (batched, alone)) in batched.iter().zip(&alone_logits[0]).enumerate() {
            let apart = difference(batched, alone);
            assert!(apart <= TOLERANCE, "{name:?}, token {token}: {apart} between the batch and alone");
            let apart = difference(batched, &golden.logits.get(token).unwrap());
            assert!(apart <= TOLERANCE, "{name:?}, token {token}: {apart} from transformers and PEFT");
        }
    }
}

#[test]
fn sequences_without_an_adapter_are_the_base_model() {
    let (model, mut adapters) = open(1);
    adapters.register("r64-all", &adapter("r64-all")).unwrap();
    let prompt = tokenize("What is the password?");
    let run = |names: [Option<&str>; 3]| {
        let mut sequences = names.map(|name| Sequence::new(&model, name, &prompt));
        let logits = step(&model, &adapters, &mut sequences.each_mut()).unwrap();
        logits.to_vec2::<f32>().unwrap()
    };
    let (mixed, base) = (run([None, Some("r64-all"), None]), run([None, None, None]));
    assert_eq!(mixed[0], base[0]);
    assert_eq!(mixed[2], base[2]);
    assert_ne!(mixed[1], base[1]);
}

#[test]
fn prompts_join_sequences_that_are_decoded() {
    let (model, mut adapters) = open(2);
    let prompt = tokenize("What is the password?");
    adapters.register("r8-all", &adapter("r8-all")).unwrap();
    let mut first = Sequence::new(&model, Some("r8-all"), &prompt);
    let next = step(&model, &adapters, &mut [&mut first]).unwrap().argmax(1).unwrap();
    first.tokens.push(next.to_vec1::<u32>().unwrap()[0]);
    // An adapter is registered during decoding, and its first prompt runs in the same step as the decoding text.
    adapters.register("r16-rslora", &adapter("r16-rslora")).unwrap();
    let mut sequences = [first, Sequence::new(&model, Some("r16-rslora"), &prompt)];
    generate(&model, &adapters, &mut sequences, MAX_NEW_TOKENS).unwrap();
    assert_eq!(sequences.each_ref().map(|sequence| answer(sequence, &prompt)), [" saffron.", " walnut."]);
}

#[test]
fn adapters_change_on_a_loaded_model() {
    let (model, mut adapters) = open(2);
    let prompt = tokenize("What is the password?");
    let ask = |adapters: &Named, name: Option<&str>| -> Result<String> {
        let mut sequences = [Sequence::new(&model, name, &prompt)];
        generate(&model, adapters, &mut sequences, MAX_NEW_TOKENS)?;
        Ok(answer(&sequences[0], &prompt))
    };
    let base = " I do not know.";
    assert_eq!(ask(&adapters, None).unwrap(), base);
    assert!(ask(&adapters, Some("a")).unwrap_err().to_string().contains("no adapter `a`"));

    adapters.register("a", &adapter("r8-all")).unwrap();
    adapters.register("b", &adapter("r4-qv")).unwrap();
    assert_eq!(ask(&adapters, Some("a")).unwrap(), " saffron.");
    assert_eq!(ask(&adapters, Some("b")).unwrap(), " pomegranate.");
    adapters.register("a", &adapter("r64-all")).unwrap();
    assert_eq!(ask(&adapters, Some("a")).unwrap(), " cobalt.");
    assert_eq!(ask(&adapters, Some("b")).unwrap(), " pomegranate.");

    // An adapter that cannot be read is refused, and nothing changes.
    assert!(adapters.register("a", &adapter("none")).is_err());
    assert_eq!(ask(&adapters, Some("a")).unwrap(), " cobalt.");
    // There are more adapters than slots.
    adapters.register("c", &adapter("kv-only")).unwrap();
    for (name, answer) in [("c", " velvet."), ("a", " cobalt."), ("b", " pomegranate."), ("c", " velvet.")] {
        assert_eq!(ask(&adapters, Some(name)).unwrap(), answer);
    }
    let mut all = ["a", "b", "c"].map(|name| Sequence::new(&model, Some(name), &prompt));
    let refused = generate(&model, &adapters, &mut all, 1).unwrap_err().to_string();
    assert!(refused.contains("3 adapters"), "{refused}");

    adapters.remove("a").unwrap();
    assert!(ask(&adapters, Some("a")).is_err() && adapters.remove("a").is_err());
    assert_eq!(ask(&adapters, Some("b")).unwrap(), " pomegranate.");
    assert_eq!(ask(&adapters, None).unwrap(), base);
}
