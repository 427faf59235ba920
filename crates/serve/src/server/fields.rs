//! The fields of requests: one table, from which requests are checked, and which README.md shows.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::{ApiError, ApiResult};

/// Which requests have a field.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum On {
    Both,
    Completions,
    Chat,
    /// Those of `/tokenize` and `/detokenize`, which have what both of the others have, too.
    Tokens,
    /// Those of `/generate`.
    Generate,
}

/// What becomes of a field.
#[derive(Clone, Copy, Debug)]
enum Effect {
    /// It is obeyed. It must be this.
    Works(&'static str),
    /// It is taken with any value, and changes no answer.
    Ignored,
    /// It is not implemented. These values, in JSON, change nothing and are taken; so is null.
    Only(&'static [&'static str]),
}

use Effect::{Ignored, Only, Works};
use On::{Both, Chat, Completions, Generate, Tokens};

/// The name of a field, whose it is, which requests have it, and what becomes of it.
type Field = (&'static str, &'static str, On, Effect);

/// All fields that a request may have, by whose they are.
const FIELDS: &[Field] = &[
    ("model", "OpenAI", Both, Works("a text")),
    ("prompt", "OpenAI", Completions, Works("a text, a list of texts, a list of token ids, or a list of such lists")),
    ("messages", "OpenAI", Chat, Works("a list of messages")),
    ("max_tokens", "OpenAI", Both, Works("a whole number")),
    ("max_completion_tokens", "OpenAI", Chat, Works("a whole number")),
    ("temperature", "OpenAI", Both, Works("a number")),
    ("top_p", "OpenAI", Both, Works("a number")),
    ("n", "OpenAI", Both, Works("a whole number")),
    ("seed", "OpenAI", Both, Works("a whole number")),
    ("stop", "OpenAI", Both, Works("a text or a list of texts")),
    ("stream", "OpenAI", Both, Works("true or false")),
    ("stream_options", "OpenAI", Both, Works("an object")),
    ("echo", "OpenAI", Completions, Works("true or false")),
    ("logprobs", "OpenAI", Both, Works("a whole number in completions, and true or false in a chat")),
    ("top_logprobs", "OpenAI", Chat, Works("a whole number")),
    ("frequency_penalty", "OpenAI", Both, Works("a number")),
    ("presence_penalty", "OpenAI", Both, Works("a number")),
    ("logit_bias", "OpenAI", Both, Works("an object of token ids and numbers")),
    ("user", "OpenAI", Both, Ignored),
    ("metadata", "OpenAI", Both, Ignored),
    ("service_tier", "OpenAI", Both, Ignored),
    ("safety_identifier", "OpenAI", Both, Ignored),
    ("prompt_cache_key", "OpenAI", Both, Ignored),
    ("prompt_cache_retention", "OpenAI", Both, Ignored),
    ("parallel_tool_calls", "OpenAI", Both, Ignored),
    ("best_of", "OpenAI", Both, Only(&["1"])),
    ("suffix", "OpenAI", Completions, Only(&["\"\""])),
    ("store", "OpenAI", Both, Only(&["false"])),
    ("response_format", "OpenAI", Both, Only(&["{\"type\":\"text\"}"])),
    ("tools", "OpenAI", Both, Only(&["[]"])),
    ("tool_choice", "OpenAI", Both, Only(&["\"none\"", "\"auto\""])),
    ("functions", "OpenAI", Chat, Only(&["[]"])),
    ("function_call", "OpenAI", Chat, Only(&["\"none\"", "\"auto\""])),
    ("modalities", "OpenAI", Chat, Only(&["[\"text\"]"])),
    ("reasoning_effort", "OpenAI", Chat, Only(&["\"none\""])),
    ("verbosity", "OpenAI", Chat, Only(&["\"medium\""])),
    ("top_k", "vLLM", Both, Works("a whole number")),
    ("min_p", "vLLM", Both, Works("a number")),
    ("min_tokens", "vLLM", Both, Works("a whole number")),
    ("repetition_penalty", "vLLM", Both, Works("a number")),
    ("stop_token_ids", "vLLM", Both, Works("a list of token ids")),
    ("include_stop_str_in_output", "vLLM", Both, Works("true or false")),
    ("ignore_eos", "vLLM", Both, Works("true or false")),
    ("allowed_token_ids", "vLLM", Both, Works("a list of token ids")),
    ("prompt_logprobs", "vLLM", Both, Works("a whole number")),
    ("return_token_ids", "vLLM", Both, Works("true or false")),
    ("return_tokens_as_token_ids", "vLLM", Both, Works("true or false")),
    ("skip_special_tokens", "vLLM", Both, Works("true or false")),
    ("add_special_tokens", "vLLM", Both, Works("true or false")),
    ("add_generation_prompt", "vLLM", Chat, Works("true or false")),
    ("continue_final_message", "vLLM", Chat, Works("true or false")),
    ("chat_template_kwargs", "vLLM", Chat, Works("an object")),
    ("documents", "vLLM", Chat, Works("a list of objects")),
    ("echo", "vLLM", Chat, Only(&["false"])),
    ("request_id", "vLLM", Both, Ignored),
    ("priority", "vLLM", Both, Only(&["0"])),
    ("bad_words", "vLLM", Both, Only(&["[]"])),
    ("length_penalty", "vLLM", Both, Only(&["1"])),
    ("early_stopping", "vLLM", Both, Only(&["false"])),
    ("use_beam_search", "vLLM", Both, Only(&["false"])),
    ("detokenize", "vLLM", Both, Only(&["true"])),
    ("spaces_between_special_tokens", "vLLM", Both, Only(&["true"])),
    ("truncate_prompt_tokens", "vLLM", Both, Only(&["-1"])),
    ("logits_processors", "vLLM", Both, Only(&["[]"])),
    ("logprob_token_ids", "vLLM", Both, Only(&["[]"])),
    ("vllm_xargs", "vLLM", Both, Only(&["{}"])),
    ("mm_processor_kwargs", "vLLM", Both, Only(&["{}"])),
    ("media_io_kwargs", "vLLM", Both, Only(&["{}"])),
    ("include_reasoning", "vLLM", Chat, Only(&["true"])),
    ("tokens", "vLLM", Tokens, Works("a list of token ids")),
    ("return_token_strs", "vLLM", Tokens, Works("true or false")),
    ("lora_path", "SGLang", Both, Works("a text, or a list of a text or null for each prompt")),
    ("lora", "llama.cpp", Both, Works("a list of objects of `name` or `id`, a text, and `scale`, a number")),
    ("no_stop_trim", "SGLang", Both, Works("true or false")),
    ("rid", "SGLang", Both, Ignored),
    ("separate_reasoning", "SGLang", Both, Ignored),
    ("stream_reasoning", "SGLang", Both, Ignored),
    ("return_hidden_states", "SGLang", Both, Only(&["false"])),
    ("return_routed_experts", "SGLang", Both, Only(&["false"])),
    ("return_cached_tokens_details", "SGLang", Both, Only(&["false"])),
    ("return_meta_info", "SGLang", Both, Only(&["false"])),
    ("text", "SGLang", Generate, Works("a text or a list of texts")),
    ("input_ids", "SGLang", Generate, Works("a list of token ids, or a list of such lists")),
    ("sampling_params", "SGLang", Generate, Works("an object, or one for each text")),
    ("return_logprob", "SGLang", Generate, Works("true or false, or one for each text")),
    ("return_text_in_logprobs", "SGLang", Generate, Works("true or false")),
    ("logprob_start_len", "SGLang", Generate, Only(&["-1"])),
    ("top_logprobs_num", "SGLang", Generate, Only(&["0"])),
    ("token_ids_logprob", "SGLang", Generate, Only(&["[]"])),
    ("return_entropy", "SGLang", Generate, Only(&["false"])),
    ("image_data", "SGLang", Generate, Only(&["[]"])),
    ("routing_key", "SGLang", Generate, Ignored),
    ("conversation_id", "SGLang", Generate, Ignored),
    ("log_metrics", "SGLang", Generate, Only(&["true"])),
];

/// The fields of a request that have not been taken.
#[derive(Debug)]
pub(super) struct Fields {
    on: On,
    left: Map<String, Value>,
}

fn find(on: On, name: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|(known, _, of, _)| *known == name && (*of == Both || *of == on || on == Tokens))
}

impl Fields {
    pub(super) fn new(on: On, left: Map<String, Value>) -> Self {
        Self { on, left }
    }

    /// The value of a field that works, if the request has one that is not null.
    pub(super) fn take<V: DeserializeOwned>(&mut self, name: &'static str) -> ApiResult<Option<V>> {
        let value = self.left.shift_remove(name).unwrap_or(Value::Null);
        let Some((.., Works(what))) = find(self.on, name) else {
            return Err(ApiError::internal(format!("`{name}` is no field of such requests.")));
        };
        if value.is_null() {
            return Ok(None);
        }
        let refused = |_| ApiError::bad_request(format!("`{name}` must be {what}, got {value}.")).of(name);
        // Some clients write whole numbers as floats.
        V::deserialize(whole(&value).as_ref().unwrap_or(&value)).map(Some).map_err(refused)
    }

    /// The value of a switch, which is off where the request does not say.
    pub(super) fn is_on(&mut self, name: &'static str) -> ApiResult<bool> {
        Ok(self.take(name)?.unwrap_or(false))
    }

    /// Refuses what is left, unless it changes nothing.
    pub(super) fn end(self) -> ApiResult<()> {
        for (name, value) in self.left.iter().filter(|(_, value)| !value.is_null()) {
            let is_neutral = match find(self.on, name) {
                Some((.., Ignored)) => true,
                Some((.., on, Only(neutral))) => {
                    let is_neutral = |value: &Value| neutral.iter().any(|text| is_same(text, value));
                    // Where there may be a value for each text.
                    let each = value.as_array().filter(|each| *on == Generate && !each.is_empty());
                    is_neutral(value)
                        || each.is_some_and(|each| each.iter().all(|one| one.is_null() || is_neutral(one)))
                }
                // What works elsewhere would be ignored here.
                Some((.., Works(_))) | None => false,
            };
            if !is_neutral {
                return Err(ApiError::bad_request(format!("`{name}` = {value} is not implemented.")));
            }
        }
        Ok(())
    }
}

/// A float that is a whole number, as such.
fn whole(value: &Value) -> Option<Value> {
    /// Each whole number up to it is a float.
    const MOST: f64 = (1_u64 << 53) as f64;
    let number = value.as_f64().filter(|number| value.is_f64() && number.fract() == 0.0 && number.abs() <= MOST)?;
    #[expect(clippy::cast_possible_truncation, reason = "it is whole, and within the bounds of i64")]
    Some((number as i64).into())
}

/// Whether a value is the one of this JSON.
fn is_same(json: &str, value: &Value) -> bool {
    let known: Option<Value> = serde_json::from_str(json).ok();
    known.is_some_and(|known| known == *value || (known.is_number() && known.as_f64() == value.as_f64()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::{Map, Value, json};

    use super::{Both, Chat, Completions, FIELDS, Fields, Generate, Ignored, Only, Tokens, Works, find};

    fn end(on: super::On, name: &str, value: Value) -> Result<(), String> {
        let fields = Fields::new(on, Map::from_iter([(name.to_owned(), value)]));
        fields.end().map_err(|error| error.message().to_owned())
    }

    #[test]
    fn every_field_is_taken_with_what_changes_nothing_and_no_other_value() {
        for (name, ..) in FIELDS {
            for on in [Completions, Chat, Generate] {
                assert!(end(on, name, Value::Null).is_ok());
                let neutral: &[&str] = match find(on, name) {
                    Some((.., Only(neutral))) => neutral,
                    Some((.., Ignored)) => {
                        assert!(end(on, name, json!("something")).is_ok());
                        continue;
                    }
                    // It has not been taken, or is no field of these requests.
                    Some((.., Works(_))) | None => &[],
                };
                for text in neutral {
                    let value = serde_json::from_str(text).expect("it is JSON");
                    assert!(end(on, name, value).is_ok(), "{name} {text}");
                }
                for other in [json!("something"), json!(0.5), json!(["something"]), json!({ "some": "thing" })] {
                    let refused = end(on, name, other).expect_err("it would be ignored");
                    assert!(refused.starts_with(&format!("`{name}` = ")), "{refused}");
                }
            }
        }
        assert!(end(Chat, "unheard_of", json!(false)).is_err() && end(Chat, "unheard_of", Value::Null).is_ok());
    }

    #[test]
    fn a_value_of_another_kind_is_refused_by_the_fields_name() {
        let mut fields = Fields::new(Chat, Map::from_iter([("temperature".to_owned(), json!("hot"))]));
        let refused = fields.take::<f32>("temperature").expect_err("it is no number");
        assert!(refused.message().starts_with("`temperature` must be a number, got \"hot\""), "{}", refused.message());
        assert_eq!(refused.json()["error"]["param"], "temperature");
        // Whole numbers may be written as floats.
        let take = |value: Value| {
            let mut fields = Fields::new(Chat, Map::from_iter([("seed".to_owned(), value)]));
            fields.take::<i64>("seed").map_err(|error| error.message().to_owned())
        };
        assert_eq!(
            (take(json!(12.0)), take(json!(-1.0)), take(json!(1e15))),
            (Ok(Some(12)), Ok(Some(-1)), Ok(Some(1_000_000_000_000_000)))
        );
        for other in [json!(1.5), json!(1e17), json!("1"), json!(true)] {
            assert!(take(other.clone()).is_err_and(|message| message.ends_with(&format!("got {other}."))));
        }
    }

    #[test]
    fn the_readme_has_the_table() {
        let names: HashSet<_> = FIELDS.iter().map(|(name, _, on, _)| (name, *on)).collect();
        assert_eq!(names.len(), FIELDS.len(), "a field is listed twice");
        let mut table = String::from("| field | of | in | |\n|---|---|---|---|\n");
        for (name, whose, on, effect) in FIELDS {
            let on = match on {
                Both => "both",
                Completions => "completions",
                Chat => "chat",
                Tokens => "tokenize",
                Generate => "generate",
            };
            let effect = match effect {
                Works(what) => format!("works: {what}"),
                Ignored => "has no effect, whatever its value".to_owned(),
                Only(neutral) => format!("refused, but for `{}`", neutral.join("` and `")),
            };
            table += &format!("| `{name}` | {whose} | {on} | {effect} |\n");
        }
        let readme = include_str!("../../README.md");
        assert!(readme.contains(&table), "crates/serve/README.md needs this table:\n{table}");
    }
}
