//! Trained rows: which rows a rank's image has, and what is refused by name.

use aril::{
    DType, Element,
    adapter::{
        Adapter, AdapterError, MIN_STAGING_BYTES, SlotImage, Tensor,
        layout::{RowIds, Rows},
    },
    model::{EmbeddingId, Linear, LinearId, Model, ModelSpec, Parallel, Part, SpecError, TpRank},
    pool::Source,
};
use half::{bf16, f16};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::refused;

const TOKENS: u32 = 20;
const VOCAB: usize = TOKENS as usize;
const HIDDEN: usize = 6;

/// An embedding, a head, and a layer between them.
fn described(padded: usize) -> (ModelSpec, EmbeddingId, LinearId) {
    let mut spec = ModelSpec::new();
    let embedding = spec.vocab_parallel_embedding("model.embed_tokens", VOCAB, padded, HIDDEN).unwrap();
    spec.linear(Linear::new("model.layers.0", Parallel::Replicated, HIDDEN).slice("q_proj", 4)).unwrap();
    let head = spec.linear(Linear::new("", Parallel::Column, HIDDEN).vocab("lm_head", VOCAB, padded)).unwrap();
    (spec, embedding, head)
}

fn model(is_tied: bool) -> Model {
    let (mut spec, embedding, head) = described(VOCAB);
    spec.trained_rows(embedding, head, is_tied).unwrap();
    spec.shard(TpRank::SINGLE).unwrap()
}

/// The value of a feature of a token's row.
fn value(id: u32, feature: usize) -> f32 {
    id as f32 + feature as f32 / 8.0
}

/// The rows of tokens, under PEFT's name.
fn rows(path: &str, ids: &[u32], hidden: usize) -> (String, Tensor) {
    let values: Vec<f32> = ids.iter().flat_map(|&id| (0..hidden).map(move |feature| value(id, feature))).collect();
    let tensor = Tensor::new(DType::F32, [ids.len(), hidden], bytemuck::cast_slice(&values).to_vec()).unwrap();
    (format!("base_model.model.{path}.token_adapter.trainable_tokens_delta"), tensor)
}

const EMBED: &str = "model.embed_tokens";

fn with(ids: &Value, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Result<Adapter, AdapterError> {
    let config = json!({ "peft_type": "LORA", "lora_alpha": 4, "trainable_token_indices": ids });
    Adapter::from_tensors(&config.to_string(), tensors)
}

/// The ids and the rows at an entry of an image.
fn placed<T: Element>(image: &SlotImage<'_>, entry: usize) -> Vec<(u32, Vec<f32>)> {
    let mut block = vec![0xee; image.bytes()];
    image.write_to(&mut block).unwrap();
    let mut pieces = vec![0xee; image.bytes()];
    for piece in image.pieces(MIN_STAGING_BYTES) {
        piece.write_to(&mut pieces[piece.range()]).unwrap();
    }
    assert!(block == pieces);
    let Some(placed) = image.rows().iter().find(|rows| rows.entry == entry) else { return Vec::new() };
    let element = |at: usize| bytemuck::pod_read_unaligned::<T>(&block[at * size_of::<T>()..][..size_of::<T>()]);
    let (ids, rows) = (RowIds { count: placed.count }, Rows { count: placed.count, hidden: HIDDEN });
    let row = |row: usize| {
        let id = &block[(placed.ids_elems + ids.at(row)) * size_of::<T>()..][..size_of::<u32>()];
        let features = (0..HIDDEN).map(|feature| element(placed.rows_elems + rows.at(row, feature)).to_f32());
        (bytemuck::pod_read_unaligned::<u32>(id), features.collect())
    };
    (0..placed.count).map(row).collect()
}

fn check<T: Element>(ids: &[u32], ranks: usize, is_tied: bool) {
    let padded = VOCAB.next_multiple_of(ranks);
    let (mut spec, embedding, head) = described(padded);
    let id = spec.trained_rows(embedding, head, is_tied).unwrap();
    let adapter = with(&json!(ids), [rows(EMBED, ids, HIDDEN)]).unwrap();
    for rank in 0..ranks {
        let model = spec.shard(TpRank::new(rank, ranks).unwrap()).unwrap();
        let range = model[embedding].range();
        let first = u32::try_from(range.start).unwrap();
        let mut want: Vec<u32> = ids.iter().copied().filter(|&id| range.contains(&(id as usize))).collect();
        want.sort_unstable();
        let image = adapter.plan(&model, T::DTYPE).unwrap();
        let of_token = |id: &u32| {
            let row = (0..HIDDEN).map(|feature| T::from_f32(value(*id, feature)).to_f32()).collect();
            (id - first, row)
        };
        let want: Vec<_> = want.iter().map(of_token).collect();
        let entry = model[id].first_entry();
        assert_eq!(placed::<T>(&image, entry), want);
        assert_eq!(placed::<T>(&image, entry + 1), if is_tied { want } else { Vec::new() });
        assert!(image.bytes() <= SlotImage::max_bytes(&model, T::DTYPE, ids.len()));
        // Both modules have the same memory.
        assert!(image.rows().windows(2).all(|both| both[0].rows_elems == both[1].rows_elems));
        assert_eq!((image.entries(), image.max_rank()), (&[][..], 0));
    }
}

proptest! {
    #[test]
    fn a_rank_has_its_rows_in_order(
        ids in prop::collection::hash_set(0..TOKENS, 1..VOCAB),
        ranks in 1..5_usize,
        is_tied: bool,
    ) {
        let ids: Vec<u32> = ids.into_iter().collect();
        check::<bf16>(&ids, ranks, is_tied);
        check::<f16>(&ids, ranks, is_tied);
        check::<f32>(&ids, ranks, is_tied);
    }
}

/// More rows than a piece has room for.
#[test]
fn rows_of_a_whole_vocabulary_are_split() {
    let (tokens, vocab, hidden) = (1500_u32, 1500, 1000);
    let mut spec = ModelSpec::new();
    let embedding = spec.embedding(EMBED, vocab, hidden).unwrap();
    let head = spec.linear(Linear::new("", Parallel::Column, hidden).slice("lm_head", vocab)).unwrap();
    spec.trained_rows(embedding, head, true).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let ids: Vec<u32> = (0..tokens).rev().collect();
    let adapter = with(&json!(ids), [rows(EMBED, &ids, hidden)]).unwrap();
    for dtype in [DType::BF16, DType::F32] {
        let image = adapter.plan(&model, dtype).unwrap();
        let mut block = vec![0xee; image.bytes()];
        image.write_to(&mut block).unwrap();
        let (mut pieces, mut count) = (vec![0xee; image.bytes()], 0);
        for piece in image.pieces(MIN_STAGING_BYTES) {
            assert!(piece.range().len() <= MIN_STAGING_BYTES);
            piece.write_to(&mut pieces[piece.range()]).unwrap();
            count += 1;
        }
        assert!(block == pieces && count > 4);
    }
}

#[test]
fn ids_belong_to_the_rows_of_their_module() {
    let of = |ids: &Value, paths: &[&str]| with(ids, paths.iter().map(|path| rows(path, &[3, 1], HIDDEN)));
    for (ids, paths) in [
        (json!([3, 1]), &[EMBED][..]),
        (json!([3, 1]), &["transformer.wte"]),
        (json!({ "embed_tokens": [3, 1] }), &[EMBED]),
        (json!({ "model.embed_tokens": [3, 1] }), &[EMBED]),
        (json!({ "embed_tokens": [3, 1], "lm_head": [2, 1] }), &[EMBED, "lm_head"]),
        // The head of a model that ties it, of which PEFT saves the rows once.
        (json!({ "embed_tokens": [3, 1], "lm_head": [3, 1] }), &[EMBED]),
        (json!({ "embed_tokens": [3, 1], "lm_head": [] }), &[EMBED]),
    ] {
        assert!(of(&ids, paths).is_ok(), "{ids} {paths:?}");
    }
    for (ids, paths, reason) in [
        (json!(null), &[EMBED][..], "does not have their module"),
        (json!({}), &[EMBED], "does not have their module"),
        (json!([3, 1]), &["lm_head"], "does not have their module"),
        (json!({ "tokens": [3, 1] }), &[EMBED], "does not have their module"),
        (json!({ "embed_tokens": [3, 1], "model.embed_tokens": [3, 1] }), &[EMBED], "has it twice"),
        (json!([3, 1, 2]), &[EMBED], "another number of ids"),
        (json!([]), &[EMBED], "another number of ids"),
    ] {
        refused!(of(&ids, paths), Rows, "trainable_tokens_delta", reason);
    }
    let of_module = with(&json!({ "lm_head": [2] }), [rows(EMBED, &[2], HIDDEN)]);
    refused!(of_module, Rows, "does not have their module");
    refused!(of(&json!({ "embed_tokens": [3, 1], "lm_head": [1, 3] }), &[EMBED]), NoRows, "2 ids of `lm_head`");
    refused!(of(&json!({ "embed_tokens": [3, 1], "q_proj": [3, 1] }), &[EMBED]), NoRows, "2 ids of `q_proj`");
    let factors = lora("q_proj", "lora", [[2, HIDDEN], [4, 2]]);
    refused!(with(&json!([3, 1]), factors), NoRows, "2 ids of `embed_tokens`");
    for odd in [json!(3), json!("3"), json!([-1]), json!([1.5]), json!([1, 1]), json!({ "embed_tokens": 3 })] {
        refused!(of(&odd, &[EMBED]), InvalidField, "`trainable_token_indices", "token ids");
    }
    let twice = ["", ".default"].map(|name| {
        let (key, tensor) = rows(EMBED, &[3, 1], HIDDEN);
        (key + name, tensor)
    });
    refused!(with(&json!([3, 1]), twice.clone()), Adapters, "trainable_tokens_delta.default");
    assert!(with(&json!([3, 1]), twice.into_iter().skip(1)).is_ok());
    let original = ("model.embed_tokens.token_adapter.trainable_tokens_original".to_owned(), rows("", &[3, 1], 1).1);
    refused!(with(&json!([3, 1]), [original]), UnsupportedTensor, "does not save");
}

fn lora(path: &str, kind: &str, shapes: [[usize; 2]; 2]) -> [(String, Tensor); 2] {
    let suffix = if kind == "lora" { ".weight" } else { "" };
    let tensor = |shape: [usize; 2]| Tensor::new(DType::F32, shape, vec![0; 4 * shape[0] * shape[1]]).unwrap();
    [("A", shapes[0]), ("B", shapes[1])].map(|(side, shape)| (format!("{path}.{kind}_{side}{suffix}"), tensor(shape)))
}

#[test]
fn rows_that_a_model_does_not_take_are_refused() {
    let plan = |adapter: &Adapter, model: &Model| adapter.plan(model, DType::F32).map(|image| image.rows().len());
    let of = |ids: &[u32]| with(&json!(ids), [rows(EMBED, ids, HIDDEN)]).unwrap();
    let [untied, tied] = [false, true].map(model);
    let (spec, ..) = described(VOCAB);
    let undeclared = spec.shard(TpRank::SINGLE).unwrap();
    refused!(plan(&of(&[3]), &undeclared), Rows, "the engine does not apply trained rows");
    assert_eq!([&untied, &tied].map(|model| plan(&of(&[3, 19]), model).unwrap()), [1, 2]);
    refused!(plan(&of(&[3, 20]), &untied), NoToken, "token 20", "20 tokens");
    refused!(plan(&with(&json!([3]), [rows(EMBED, &[3], 5)]).unwrap(), &untied), Shape, "[1, 5]", "[1, 6]");
    let elsewhere = with(&json!({ "q_proj": [3] }), [rows("model.layers.0.q_proj", &[3], HIDDEN)]).unwrap();
    refused!(plan(&elsewhere, &untied), Rows, "the engine does not apply trained rows");

    // Both have rows: of the same tokens, PEFT loads those of the embedding alone where the head is tied.
    let both = |[embed, head]: [&[u32]; 2]| {
        let ids = json!({ "embed_tokens": embed, "lm_head": head });
        with(&ids, [rows(EMBED, embed, HIDDEN), rows("lm_head", head, HIDDEN)]).unwrap()
    };
    assert_eq!([&untied, &tied].map(|model| plan(&both([&[3], &[4]]), model).unwrap()), [2, 2]);
    assert_eq!(plan(&both([&[3], &[3]]), &untied).unwrap(), 2);
    refused!(plan(&both([&[3], &[3]]), &tied), Rows, "the model ties its head");
    let once = with(&json!({ "embed_tokens": [3], "lm_head": [3] }), [rows(EMBED, &[3], HIDDEN)]).unwrap();
    assert_eq!(plan(&once, &tied).unwrap(), 2);
    refused!(plan(&once, &untied), Rows, "the model's is not tied");
    let spelled = json!({ "model.embed_tokens": [3], "wte": [3] });
    let spelled = with(&spelled, [rows(EMBED, &[3], HIDDEN), rows("wte", &[3], HIDDEN)]).unwrap();
    refused!(plan(&spelled, &untied), Overlap, "`wte`");

    // Factors of the same module.
    let [of_embed, of_head] =
        [lora(EMBED, "lora_embedding", [[2, VOCAB], [HIDDEN, 2]]), lora("lm_head", "lora", [[2, HIDDEN], [VOCAB, 2]])]
            .map(|factors| with(&json!([3]), factors.into_iter().chain([rows(EMBED, &[3], HIDDEN)])).unwrap());
    refused!(plan(&of_embed, &untied), Rows, "has factors, too");
    refused!(plan(&of_head, &tied), Rows, "has factors, too");
    assert_eq!(plan(&of_head, &untied).unwrap(), 1);
}

/// A sum of rows is not what each part has, and PEFT drops them.
#[test]
fn rows_are_not_combined() {
    let (model, plain) = (model(true), lora("q_proj", "lora", [[2, HIDDEN], [4, 2]]));
    let plain = Adapter::from_tensors(
        r#"{"peft_type": "LORA", "lora_alpha": 1}"#,
        plain.map(|(key, tensor)| (format!("model.layers.0.{key}"), tensor)),
    )
    .unwrap();
    let of_rows = with(&json!([3]), [rows(EMBED, &[3], HIDDEN)]).unwrap();
    let combined = |parts: &[(&Adapter, f32)]| SlotImage::combined(parts, &model, DType::F32).map(drop);
    assert!(combined(&[(&of_rows, 1.0)]).is_ok());
    for parts in [&[(&of_rows, 0.5)][..], &[(&of_rows, 1.0), (&plain, 1.0)], &[(&plain, 1.0), (&of_rows, 1.0)]] {
        refused!(combined(parts), Rows, "a combination of adapters cannot have any");
    }
    let source = |adapter: Adapter| Source::memory(adapter.into(), &model, DType::F32).unwrap();
    refused!(Source::combined([(source(of_rows), 1.0), (source(plain), 1.0)]), Rows, "a combination");
}

#[test]
fn an_invocation_has_no_rows() {
    let config = json!({
        "peft_type": "LORA", "lora_alpha": 4, "trainable_token_indices": [3], "alora_invocation_tokens": [7]
    });
    let adapter = Adapter::from_tensors(&config.to_string(), [rows(EMBED, &[3], HIDDEN)]);
    refused!(adapter, NotInvocable, "trainable_tokens_delta");
}

#[test]
fn what_is_no_head_of_an_embedding_is_refused() {
    let refused = |hidden: usize, head: Linear, is_tied: bool, reason: &str| {
        let mut spec = ModelSpec::new();
        let embedding = spec.embedding("embed", VOCAB, hidden).unwrap();
        let head = spec.linear(head).unwrap();
        spec.trained_rows(embedding, head, is_tied).unwrap();
        let error = spec.shard(TpRank::SINGLE).unwrap_err();
        assert!(matches!(&error, SpecError::NotHead { embedding, .. } if embedding == "embed"), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    };
    let head = |hidden| Linear::new("", Parallel::Column, hidden);
    refused(HIDDEN, head(HIDDEN).slice("a", 3).slice("b", 3), false, "several slices");
    refused(HIDDEN, head(HIDDEN + 1).slice("a", VOCAB), false, "other input features");
    refused(HIDDEN, head(HIDDEN).slice("a", VOCAB + 1), true, "another vocabulary");
    refused(1 << 18, head(1 << 18).slice("a", VOCAB), false, "131072");
    let (mut spec, embedding, _) = described(VOCAB);
    let (_, _, foreign) = described(VOCAB);
    assert_eq!(spec.trained_rows(embedding, foreign, false), Err(SpecError::Foreign));
    // A rank has two ranges of a head of two parts.
    let parts = [Part::even(VOCAB / 2), Part::even(VOCAB / 2)];
    let head = spec.linear(Linear::new("two", Parallel::Column, HIDDEN).merged("a", parts)).unwrap();
    spec.trained_rows(embedding, head, false).unwrap();
    let error = spec.shard(TpRank::new(0, 2).unwrap()).unwrap_err();
    assert!(error.to_string().contains("several parts"), "{error}");
}

/// The whole weight of a module, under PEFT's name.
fn whole(path: &str, count: u32, hidden: usize) -> (String, Tensor) {
    let ids: Vec<u32> = (0..count).collect();
    (format!("base_model.model.{path}.weight"), rows("", &ids, hidden).1)
}

fn saving(fields: &Value, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Result<Adapter, AdapterError> {
    let mut config = json!({ "peft_type": "LORA", "lora_alpha": 4 });
    config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    Adapter::from_tensors(&config.to_string(), tensors)
}

#[test]
fn whole_modules_replace_all_rows() {
    let [untied, tied] = [false, true].map(model);
    let counts = |adapter: &Adapter, model: &Model| -> Vec<usize> {
        adapter.plan(model, DType::F32).unwrap().rows().iter().map(|rows| rows.count).collect()
    };
    let saved = json!({ "modules_to_save": ["embed_tokens"] });
    let of_embed = saving(&saved, [whole(EMBED, TOKENS, HIDDEN)]).unwrap();
    // PEFT has a copy of the embedding, to which the head is not tied unless it is told to.
    assert_eq!([&untied, &tied].map(|model| counts(&of_embed, model)), [[VOCAB], [VOCAB]]);
    let image = of_embed.plan(&tied, DType::F32).unwrap();
    let placed = placed::<f32>(&image, image.rows()[0].entry);
    let row = |id: u32| (id, (0..HIDDEN).map(|feature| value(id, feature)).collect());
    assert_eq!(placed, (0..TOKENS).map(row).collect::<Vec<_>>());
    let ties = json!({ "modules_to_save": ["model.embed_tokens"], "ensure_weight_tying": true });
    let of_both = saving(&ties, [whole(EMBED, TOKENS, HIDDEN)]).unwrap();
    assert_eq!([&untied, &tied].map(|model| counts(&of_both, model)), [vec![VOCAB], vec![VOCAB; 2]]);
    let each = json!({ "modules_to_save": ["embed_tokens", "lm_head"] });
    let each = saving(&each, [whole(EMBED, TOKENS, HIDDEN), whole("lm_head", TOKENS, HIDDEN)]).unwrap();
    assert_eq!([&untied, &tied].map(|model| counts(&each, model)), [[VOCAB; 2]; 2]);

    let plan = |adapter: &Adapter, model: &Model| adapter.plan(model, DType::F32).map(drop);
    for count in [TOKENS - 1, TOKENS + 1] {
        let of_other = saving(&saved, [whole(EMBED, count, HIDDEN)]).unwrap();
        refused!(plan(&of_other, &untied), Shape, format!("[{count}, 6]"), "[20, 6]");
    }
    let (spec, ..) = described(VOCAB);
    refused!(plan(&of_embed, &spec.shard(TpRank::SINGLE).unwrap()), Rows, "does not apply trained rows");
    let factors = lora(EMBED, "lora_embedding", [[2, VOCAB], [HIDDEN, 2]]);
    let both = saving(&saved, factors.into_iter().chain([whole(EMBED, TOKENS, HIDDEN)])).unwrap();
    refused!(plan(&both, &untied), Rows, "has factors, too");
    let twice = json!({ "modules_to_save": ["embed_tokens"], "trainable_token_indices": [3] });
    let twice = saving(&twice, [whole(EMBED, TOKENS, HIDDEN), rows(EMBED, &[3], HIDDEN)]).unwrap();
    refused!(plan(&twice, &untied), Overlap, EMBED);
    // What the configuration does not name is a copy of the base's.
    let copy = saving(
        &json!({}),
        lora("q_proj", "lora", [[2, HIDDEN], [4, 2]]).into_iter().chain([whole(EMBED, TOKENS, HIDDEN)]),
    );
    refused!(plan(&copy.unwrap(), &untied), BaseWeight, EMBED);
    let each = json!({ "modules_to_save": ["embed_tokens", "lm_head"] });
    refused!(saving(&each, [whole(EMBED, TOKENS, HIDDEN)]), NoWeight, "`lm_head`");
    let odd = json!({ "modules_to_save": "lm_head" });
    refused!(saving(&odd, [whole("lm_head", TOKENS, HIDDEN)]), InvalidField, "`modules_to_save`", "a list of names");
    refused!(saving(&json!({ "modules_to_save": ["score"] }), []), UnsupportedField, "`modules_to_save`", "score");
}
