//! SGLang's `/generate`: its body as that of a completion, and its answers.

use axum::{Json, extract::State, response::Response};
use serde_json::{Map, Value, json};

use super::{
    Server, Shared, body,
    error::{ApiError, ApiResult},
    fields::{Fields, On},
    generate::Addition,
    request::{Job, Prompt, Prompts},
};

/// The fields of `sampling_params`: SGLang's name, that of a completion, and the value of a request that does not say, in JSON. As in
/// SGLang, generation_config.json does not change these values.
const SAMPLING: &[(&str, &str, &str)] = &[
    ("max_new_tokens", "max_tokens", "128"),
    ("min_new_tokens", "min_tokens", "0"),
    ("sampling_seed", "seed", "null"),
    ("temperature", "temperature", "1"),
    ("top_p", "top_p", "1"),
    ("top_k", "top_k", "-1"),
    ("min_p", "min_p", "0"),
    ("repetition_penalty", "repetition_penalty", "1"),
    ("frequency_penalty", "frequency_penalty", "0"),
    ("presence_penalty", "presence_penalty", "0"),
    ("logit_bias", "logit_bias", "null"),
    ("n", "n", "1"),
    ("stop", "stop", "null"),
    ("stop_token_ids", "stop_token_ids", "null"),
    ("ignore_eos", "ignore_eos", "false"),
    ("no_stop_trim", "no_stop_trim", "false"),
    ("skip_special_tokens", "skip_special_tokens", "true"),
    ("spaces_between_special_tokens", "spaces_between_special_tokens", "true"),
];

/// The form of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Whether it is a list, of several prompts or choices.
    is_list: bool,
    has_logprobs: bool,
    /// Whether log-probabilities have the text of their tokens.
    shows_text: bool,
}

/// `POST /generate`
pub(super) async fn generate(State(server): Shared, received: body::Received) -> ApiResult<Response> {
    let job = server.prepare(received, Server::native).await?;
    server.answer(job).await
}

impl Server {
    /// A request to `/generate`, as one of a completion.
    fn native(&self, received: body::Received) -> ApiResult<Job> {
        let deadline = received.deadline;
        let mut fields = Fields::new(On::Generate, body::parse_object(received)?);
        let (text, ids): (Option<Prompts>, Option<Prompts>) = (fields.take("text")?, fields.take("input_ids")?);
        let prompts = match (text, ids) {
            (Some(text @ (Prompts::Text(_) | Prompts::Texts(_))), None) => text,
            (None, Some(ids @ (Prompts::Tokens(_) | Prompts::ManyTokens(_)))) => ids,
            _ => {
                let message =
                    "The request has one of `text`, a text or a list of texts, and `input_ids`, of token ids.";
                return Err(ApiError::bad_request(message).of("text"));
            }
        };
        let mut sampling: Map<String, Value> = fields.take("sampling_params")?.unwrap_or_default();
        let mut completion = Map::new();
        for (name, of_completion, default) in SAMPLING {
            let given = sampling.shift_remove(*name).filter(|value| !value.is_null());
            let default = || serde_json::from_str(default).unwrap_or_default();
            completion.insert((*of_completion).into(), given.unwrap_or_else(default));
        }
        if let Some((name, value)) = sampling.iter().find(|(_, value)| !value.is_null()) {
            let message = format!("`sampling_params.{name}` = {value} is not implemented.");
            return Err(ApiError::bad_request(message).of("sampling_params"));
        }
        let has_logprobs = fields.is_on("return_logprob")?;
        if has_logprobs {
            completion.insert("logprobs".into(), 0.into());
        }
        let shows_text = fields.is_on("return_text_in_logprobs")?;
        completion.insert("stream".into(), fields.is_on("stream")?.into());
        completion.insert("lora_path".into(), fields.take::<String>("lora_path")?.into());
        fields.end()?;
        let is_one = matches!(prompts, Prompts::Text(_) | Prompts::Tokens(_));
        let job = self.completion_of(Fields::new(On::Completions, completion), Some(prompts), deadline)?;
        let native = Some(Form { is_list: !is_one || job.choices > 1, has_logprobs, shows_text });
        Ok(Job { native, ..job })
    }
}

impl Form {
    /// What a choice has up to now.
    pub(super) fn answer(self, id: &str, prompt: &Prompt, all: &Addition) -> Value {
        let Addition { text, tokens, logprobs, finish, matched } = all;
        let finish = finish.map(|kind| match kind {
            "length" => json!({ "type": kind, "length": tokens.len() }),
            _ => json!({ "type": kind, "matched": matched }),
        });
        let mut info = json!({
            "id": id,
            "finish_reason": finish,
            "prompt_tokens": prompt.tokens.len(),
            "completion_tokens": tokens.len(),
        });
        let logprobs = tokens.iter().zip(logprobs.tokens());
        let logprobs: Vec<Value> =
            logprobs.map(|(id, (logprob, text))| json!([logprob, id, self.shows_text.then_some(text)])).collect();
        if self.has_logprobs {
            info["input_token_logprobs"] = json!([]);
            info["output_token_logprobs_length"] = logprobs.len().into();
            info["output_token_logprobs"] = logprobs.into();
        }
        json!({ "text": text, "output_ids": tokens, "meta_info": info })
    }

    /// A chunk of a stream, with what a choice has up to it.
    pub(super) fn chunk(self, index: usize, mut answer: Value) -> Value {
        if self.is_list {
            answer["index"] = index.into();
        }
        answer
    }

    /// The body of a whole answer.
    pub(super) fn whole(self, mut answers: Vec<Value>) -> Json<Value> {
        Json(if self.is_list { answers.into() } else { answers.swap_remove(0) })
    }
}
