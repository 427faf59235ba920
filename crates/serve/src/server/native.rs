//! SGLang's `/generate`: its body as that of a completion, and its answers.

use std::sync::Arc;

use axum::{Json, extract::State, response::Response};
use serde_json::{Map, Value, json};

use super::{
    Server, Shared, body,
    error::{ApiError, ApiResult},
    fields::{Fields, On},
    generate::Addition,
    request::{Job, Lora, OneOrEach, Prompt, Prompts, check_choices},
};

/// The fields of `sampling_params`: SGLang's name, that of a completion, and the value of a request that does not say,
/// in JSON. As in SGLang, generation_config.json does not change these values.
const SAMPLING: &[(&str, &str, &str)] = &[
    ("max_new_tokens", "max_tokens", "null"),
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

/// New tokens of a request that does not say.
const MAX_NEW_TOKENS: usize = 128;

impl<T: Clone> OneOrEach<T> {
    /// The value of each of `count` texts, which are a list or one text.
    fn each(self, name: &'static str, count: usize, is_list: bool) -> ApiResult<Vec<T>> {
        match self {
            Self::One(one) => Ok(vec![one; count]),
            Self::Each(each) if is_list && each.len() == count => Ok(each),
            Self::Each(each) => {
                let message = match is_list {
                    true => format!("`{name}` has {} values for {count} texts.", each.len()),
                    false => format!("`{name}` is a list, and the text is not."),
                };
                Err(ApiError::bad_request(message).of(name))
            }
        }
    }
}

/// The form of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Whether it is a list, of several prompts or choices.
    is_list: bool,
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
        let access = Arc::clone(&received.access);
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
        let is_list = matches!(prompts, Prompts::Texts(_) | Prompts::ManyTokens(_));
        check_choices(prompts.len(), 1)?;
        let sampling: OneOrEach<Map<String, Value>> =
            fields.take("sampling_params")?.unwrap_or_else(|| OneOrEach::One(Map::new()));
        let logprobs: OneOrEach<bool> = fields.take("return_logprob")?.unwrap_or(OneOrEach::One(false));
        let sampling = sampling.each("sampling_params", prompts.len(), is_list)?;
        let logprobs = logprobs.each("return_logprob", prompts.len(), is_list)?;
        let shows_text = fields.is_on("return_text_in_logprobs")?;
        let stream = fields.is_on("stream")?;
        let models = self.models_of(None, Lora::take(&mut fields)?, is_list.then_some(prompts.len()))?;
        fields.end()?;
        let mut whole: Option<Job> = None;
        let each = prompts.split().into_iter().zip(sampling).zip(logprobs).zip(models.into_iter().cycle());
        for (((prompt, sampling), has_logprobs), model) in each {
            let mut completion = completion(sampling)?;
            completion.insert("logprobs".into(), has_logprobs.then_some(0).into());
            completion.insert("stream".into(), stream.into());
            let job = self.completion_of(
                Fields::new(On::Completions, completion),
                prompt,
                vec![model],
                MAX_NEW_TOKENS,
                Arc::clone(&access),
            )?;
            match &mut whole {
                None => whole = Some(job),
                Some(whole) if whole.choices == job.choices => whole.prompts.extend(job.prompts),
                Some(_) => {
                    return Err(ApiError::bad_request("`n` is the same for all texts.").of("sampling_params"));
                }
            }
        }
        let Some(job) = whole else { return Err(ApiError::bad_request("There is no prompt.").of("text")) };
        check_choices(job.prompts.len(), job.choices)?;
        let native = Some(Form { is_list: is_list || job.choices > 1, shows_text });
        Ok(Job { native, ..job })
    }
}

/// The fields of a completion that `sampling_params` stand for.
fn completion(mut sampling: Map<String, Value>) -> ApiResult<Map<String, Value>> {
    let mut completion = Map::new();
    for (name, of_completion, default) in SAMPLING {
        let given = sampling.shift_remove(*name).filter(|value| !value.is_null());
        let default = || serde_json::from_str(default).unwrap_or_default();
        completion.insert((*of_completion).into(), given.unwrap_or_else(default));
    }
    match sampling.iter().find(|(_, value)| !value.is_null()) {
        Some((name, value)) => {
            let message = format!("`sampling_params.{name}` = {value} is not implemented.");
            Err(ApiError::bad_request(message).of("sampling_params"))
        }
        None => Ok(completion),
    }
}

impl Form {
    /// What a choice has up to now.
    pub(super) fn answer(self, id: &str, prompt: &Prompt, all: &Addition) -> Value {
        let Addition { text, tokens, logprobs, finish, matched, cached } = all;
        let finish = finish.map(|kind| match kind {
            "length" => json!({ "type": kind, "length": tokens.len() }),
            _ => json!({ "type": kind, "matched": matched }),
        });
        let mut info = json!({
            "id": id,
            "finish_reason": finish,
            "prompt_tokens": prompt.tokens.len(),
            "completion_tokens": tokens.len(),
            "cached_tokens": cached,
        });
        let logprobs = tokens.iter().zip(logprobs.tokens());
        let logprobs: Vec<Value> =
            logprobs.map(|(id, (logprob, text))| json!([logprob, id, self.shows_text.then_some(text)])).collect();
        if prompt.asked.sampling.logprobs.is_some() {
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
