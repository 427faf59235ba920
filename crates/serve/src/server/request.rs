//! Requests for text: what their fields mean. The table of the fields is in [`fields`](super::fields).

use std::{collections::BTreeMap, fmt::Display, sync::Arc};

use aril::pool::AdapterId;
use aril_requests::registry::Served;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    Server,
    access::Access,
    body::{self, Received},
    chat,
    combined::{Combination, Part},
    error::{ApiError, ApiResult},
    fields::{Fields, On},
    messages, native,
    text::{Decoder, End, Place},
};
use aril_engine::{Changes, Sampling};

/// The most choices of a request.
const MAX_CHOICES: usize = 128;
/// The most log-probabilities of a token.
const MAX_LOGPROBS: usize = 20;
/// The most strings, and tokens, that end a text.
const MAX_STOPS: usize = 64;
/// New tokens of a completion whose request does not say.
const COMPLETION_TOKENS: usize = 16;

/// Which of the two formats an answer has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Format {
    Completion,
    Chat,
}

/// A checked request.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) format: Format,
    /// The form of SGLang's `/generate` instead.
    pub(super) native: Option<native::Form>,
    pub(super) prompts: Vec<Prompt>,
    /// Of each prompt.
    pub(super) choices: usize,
    pub(super) echo: bool,
    /// Log-probabilities of the prompt's tokens, as an extra.
    pub(super) prompt_logprobs: Option<usize>,
    pub(super) stream: bool,
    pub(super) usage: StreamedUsage,
    pub(super) return_token_ids: bool,
    pub(super) tokens_as_ids: bool,
    pub(super) access: Arc<Access>,
}

impl Job {
    /// The prompt of a choice.
    pub(super) fn prompt(&self, choice: usize) -> &Prompt {
        &self.prompts[choice / self.choices]
    }

    /// Those of all prompts.
    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }
}

/// What answers a prompt.
#[derive(Clone, Debug)]
pub(super) struct Model {
    pub(super) name: String,
    pub(super) adapter: Option<AdapterId>,
    /// Whether the adapter is to be loaded first.
    pub(super) is_sought: bool,
    /// Its place in the list of `lora_path`, if it has one there.
    pub(super) index: Option<usize>,
    /// The adapters that apply together, if there are several.
    pub(super) parts: Vec<Part>,
    /// Their combination, which stays loaded meanwhile.
    pub(super) held: Option<Arc<Combination>>,
}

impl Model {
    /// The names of the adapter or of its parts, none of the base model.
    pub(super) fn adapter_names(&self) -> impl Iterator<Item = &str> {
        let alone = self.adapter.filter(|_| self.parts.is_empty()).map(|_| self.name.as_str());
        let mut parts: Vec<_> = self.parts.iter().map(|part| part.name.as_str()).collect();
        parts.sort_unstable();
        parts.dedup();
        alone.into_iter().chain(parts)
    }
}

/// A prompt.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<u32>,
    /// What an answer begins with.
    pub(super) echo: Option<Echo>,
    pub(super) asked: Arc<Asked>,
    pub(super) model: Model,
}

/// What is asked of the answers to a prompt.
#[derive(Debug)]
pub(super) struct Asked {
    /// The most new tokens. 0 with `echo`, which shows the prompt alone.
    pub(super) max_tokens: Option<usize>,
    /// Where the request does not say: as many, as far as they fit, or all that fit.
    pub(super) default_tokens: Option<usize>,
    pub(super) end: End,
    /// The tokens that end the text.
    pub(super) stop_tokens: Vec<u32>,
    pub(super) sampling: Sampling,
}

/// A prompt as text.
#[derive(Debug)]
pub(super) struct Echo {
    pub(super) text: String,
    /// Where each token is.
    pub(super) places: Vec<Place>,
}

/// Which chunks of a stream have a usage.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum StreamedUsage {
    #[default]
    None,
    /// One more, at the end.
    Last,
    /// That one, and each chunk has the usage up to it.
    Each,
}

/// One value, or a list of values.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrEach<T, E = T> {
    Each(Vec<E>),
    One(T),
}

/// SGLang's `lora_path`: an adapter of all prompts, or one of each, where null stands for the base model.
type LoraPath = OneOrEach<String, Value>;

/// The adapters that a request names beside its model.
#[derive(Debug)]
pub(super) struct Lora {
    path: Option<LoraPath>,
    /// Those that apply together.
    parts: Vec<Part>,
}

impl Lora {
    pub(super) fn take(fields: &mut Fields) -> ApiResult<Self> {
        Ok(Self { path: fields.take("lora_path")?, parts: fields.take("lora")?.unwrap_or_default() })
    }
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    ManyTokens(Vec<Vec<u32>>),
}

impl Prompts {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(prompts) => prompts.len(),
            Self::ManyTokens(prompts) => prompts.len(),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Tokens(tokens) => tokens.is_empty(),
            _ => self.len() == 0,
        }
    }

    /// Each of them alone.
    pub(super) fn split(self) -> Vec<Self> {
        match self {
            Self::Texts(texts) => texts.into_iter().map(Self::Text).collect(),
            Self::ManyTokens(prompts) => prompts.into_iter().map(|tokens| Self::ManyTokens(vec![tokens])).collect(),
            one => vec![one],
        }
    }
}

fn refused(param: &'static str, message: impl Into<String>) -> ApiError {
    ApiError::bad_request(message).of(param)
}

/// A number within bounds.
fn within<N: PartialOrd + Display + Copy>(name: &'static str, number: N, least: N, most: N) -> ApiResult<N> {
    let is_within = number >= least && number <= most;
    is_within
        .then_some(number)
        .ok_or_else(|| refused(name, format!("{name} must be in [{least}, {most}], got {number}.")))
}

fn fields(on: On, received: Received) -> ApiResult<Fields> {
    let body = body::parse_object(received)?;
    Ok(Fields::new(on, body))
}

impl Server {
    /// A request to `/v1/completions`.
    pub(super) fn completion(&self, received: Received) -> ApiResult<Job> {
        let access = Arc::clone(&received.access);
        let mut fields = fields(On::Completions, received)?;
        let prompts = fields.take("prompt")?.unwrap_or(Prompts::Texts(Vec::new()));
        let is_list = matches!(prompts, Prompts::Texts(_) | Prompts::ManyTokens(_));
        let (model, lora) = (fields.take("model")?, Lora::take(&mut fields)?);
        let models = self.models_of(model, lora, is_list.then_some(prompts.len()))?;
        self.completion_of(fields, prompts, models, COMPLETION_TOKENS, access)
    }

    /// A completion of these prompts, by these models in turn, with so many tokens where the request does not say.
    pub(super) fn completion_of(
        &self,
        mut fields: Fields,
        prompts: Prompts,
        models: Vec<Model>,
        default_tokens: usize,
        access: Arc<Access>,
    ) -> ApiResult<Job> {
        if prompts.is_empty() {
            return Err(refused("prompt", "There is no prompt."));
        }
        let limit = (fields.take("max_tokens")?, Some(default_tokens));
        let (echo, logprobs) = (fields.is_on("echo")?, fields.take("logprobs")?);
        let adds_special = fields.take("add_special_tokens")?.unwrap_or(true);
        let (job, asked) = self.job(Format::Completion, fields, prompts.len(), limit, logprobs, access)?;
        let mut models = models.into_iter().cycle();
        let mut prompt = |tokens: Vec<u32>, text: Option<String>| {
            let echo = echo.then(|| self.echo(&tokens, text, asked.max_tokens == Some(0))).transpose()?;
            let model = models.next().ok_or_else(|| refused("prompt", "There is no prompt."))?;
            Ok(Prompt { tokens, echo, asked: Arc::clone(&asked), model })
        };
        let mut of_text =
            |text: String| prompt(self.encode(&text, adds_special, self.max_positions, "prompt")?, Some(text));
        let prompts = match prompts {
            Prompts::Text(text) => vec![of_text(text)?],
            Prompts::Texts(texts) => texts.into_iter().map(of_text).collect::<ApiResult<_>>()?,
            Prompts::Tokens(tokens) => vec![prompt(tokens, None)?],
            Prompts::ManyTokens(prompts) => {
                prompts.into_iter().map(|tokens| prompt(tokens, None)).collect::<ApiResult<_>>()?
            }
        };
        Ok(Job { prompts, echo, ..job })
    }

    /// A prompt as it was sent, or as its tokens read. Unless it is the whole answer, a character that it begins
    /// belongs to what follows.
    fn echo(&self, tokens: &[u32], sent: Option<String>, is_whole: bool) -> ApiResult<Echo> {
        let read = |shows_special| -> ApiResult<Echo> {
            let mut decoder = Decoder::new(shows_special);
            let mut echo = Echo { text: String::new(), places: Vec::with_capacity(tokens.len()) };
            for &token in tokens {
                let (place, text) = decoder.push(&self.tokenizer, token)?;
                echo.places.push(place);
                echo.text.push_str(&text);
            }
            if is_whole {
                echo.text.push_str(&decoder.end(&self.tokenizer));
            }
            Ok(echo)
        };
        let mut echo = read(true)?;
        if let Some(sent) = sent {
            let len = sent.chars().count();
            if echo.text.chars().count() != len {
                // Special tokens that the tokenizer has added are no part of the text.
                echo = read(false)?;
            }
            echo.places.iter_mut().for_each(|place| place.at = place.at.min(len));
            echo.text = sent;
        }
        Ok(echo)
    }

    /// A request to `/v1/chat/completions`.
    pub(super) fn chat(&self, received: Received) -> ApiResult<Job> {
        let access = Arc::clone(&received.access);
        let mut fields = fields(On::Chat, received)?;
        let messages: Vec<Value> = fields.take("messages")?.unwrap_or_default();
        let logprobs = match (fields.is_on("logprobs")?, fields.take("top_logprobs")?) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(refused("top_logprobs", "`top_logprobs` needs `logprobs`.")),
        };
        let limits: [Option<usize>; 2] = [fields.take("max_completion_tokens")?, fields.take("max_tokens")?];
        let limit = (limits.into_iter().flatten().next(), self.defaults.max_new_tokens);
        let adds_special = fields.is_on("add_special_tokens")?;
        let options = chat_options(&mut fields)?;
        let (model, lora) = (fields.take("model")?, Lora::take(&mut fields)?);
        let model = self.models_of(model, lora, None)?.swap_remove(0);
        let (job, asked) = self.job(Format::Chat, fields, 1, limit, logprobs, access)?;
        let text = self.template.render(messages::read(messages)?, &options)?;
        let tokens = self.encode(&text, adds_special, self.max_positions, "messages")?;
        Ok(Job { prompts: vec![Prompt { tokens, echo: None, asked, model }], ..job })
    }

    /// What answers: each prompt of a list of so many, or all of them.
    pub(super) fn models_of(
        &self,
        model: Option<String>,
        Lora { path, parts }: Lora,
        list: Option<usize>,
    ) -> ApiResult<Vec<Model>> {
        const NAME: &str = "lora_path";
        if !parts.is_empty() {
            if path.is_some() {
                return Err(refused("lora", "`lora` and `lora_path` both name adapters."));
            }
            return Ok(vec![self.combination_of(model, parts)?]);
        }
        let find = |path: Option<String>, index| -> ApiResult<Model> {
            let name = self.name_of(model.clone(), path)?;
            let served = self.resolve_or_find(&name)?;
            let (adapter, is_sought) = (served.and_then(Served::adapter), served.is_none());
            Ok(Model { name, adapter, is_sought, index, parts: Vec::new(), held: None })
        };
        let paths = match (path, list) {
            (None, _) => return Ok(vec![find(None, None)?]),
            (Some(LoraPath::One(path)), _) => return Ok(vec![find(Some(path), None)?]),
            // It is not taken without a flag, whatever its length.
            (Some(LoraPath::Each(_)), _) if !self.takes_lora_path => return Ok(vec![find(Some("-".into()), None)?]),
            (Some(LoraPath::Each(_)), None) => {
                return Err(refused(NAME, format!("`{NAME}` is a list, and the prompt is not.")));
            }
            (Some(LoraPath::Each(paths)), Some(prompts)) if paths.len() != prompts => {
                return Err(refused(NAME, format!("`{NAME}` has {} values for {prompts} prompts.", paths.len())));
            }
            (Some(LoraPath::Each(paths)), Some(_)) => paths,
        };
        let find = |(index, path): (usize, Value)| {
            let path = match path {
                Value::Null => None,
                Value::String(path) => Some(path),
                other => return Err(refused(NAME, format!("`{NAME}[{index}]` must be a text or null, got {other}."))),
            };
            find(path, Some(index)).map_err(|error| error.of_adapter(index))
        };
        paths.into_iter().enumerate().map(find).collect()
    }

    /// The tokens of a text, unless there must be more than `most`.
    pub(super) fn encode(&self, text: &str, adds_special: bool, most: usize, of: &'static str) -> ApiResult<Vec<u32>> {
        let tokens = self.tokenizer.encode(text, adds_special, most);
        tokens.map_err(|error| refused(of, format!("The prompt cannot be tokenized: {error}")))
    }

    /// Checks what both endpoints take, for a number of prompts that are tokenized later.
    fn job(
        &self,
        format: Format,
        mut fields: Fields,
        prompts: usize,
        (max_tokens, default_tokens): (Option<usize>, Option<usize>),
        logprobs: Option<usize>,
        access: Arc<Access>,
    ) -> ApiResult<(Job, Arc<Asked>)> {
        let stop = match fields.take("stop")? {
            Some(OneOrEach::One(stop)) => vec![stop],
            Some(OneOrEach::Each(stop)) => stop,
            None => Vec::new(),
        };
        if stop.iter().any(String::is_empty) || stop.len() > MAX_STOPS {
            return Err(refused("stop", format!("stop has up to {MAX_STOPS} strings, none of which is empty.")));
        }
        let mut stop_tokens: Vec<u32> = fields.take("stop_token_ids")?.unwrap_or_default();
        if stop_tokens.len() > MAX_STOPS {
            return Err(refused("stop_token_ids", format!("stop_token_ids has up to {MAX_STOPS} tokens.")));
        }
        let ends: Vec<u32> = stop_tokens.iter().chain(&self.eos).copied().collect();
        let sampling = self.sampling(&mut fields, &ends, logprobs)?;
        if !fields.is_on("ignore_eos")? {
            stop_tokens = ends;
        }
        let includes_stop = [fields.is_on("include_stop_str_in_output")?, fields.is_on("no_stop_trim")?];
        let end = End {
            stop,
            includes_stop: includes_stop.contains(&true),
            min_tokens: sampling.changes.min_tokens,
            shows_special: !fields.take("skip_special_tokens")?.unwrap_or(true),
        };
        let choices = fields.take("n")?.unwrap_or(1);
        check_choices(prompts, choices)?;
        if choices > 1 && sampling.temperature == 0.0 {
            return Err(refused("n", "n must be 1 when using greedy sampling."));
        }
        let stream = fields.is_on("stream")?;
        let prompt_logprobs: Option<usize> = fields.take("prompt_logprobs")?;
        if prompt_logprobs.is_some() && stream {
            return Err(refused("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`."));
        }
        for (name, count) in [("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)] {
            within(name, count.unwrap_or(0), 0, MAX_LOGPROBS)?;
        }
        let job = Job {
            format,
            native: None,
            prompts: Vec::new(),
            choices,
            echo: false,
            prompt_logprobs,
            stream,
            usage: streamed_usage(&mut fields, stream)?,
            return_token_ids: fields.is_on("return_token_ids")?,
            tokens_as_ids: fields.is_on("return_tokens_as_token_ids")?,
            access,
        };
        fields.end()?;
        let asked = Asked { max_tokens, default_tokens, end, stop_tokens, sampling };
        Ok((job, Arc::new(asked)))
    }

    fn sampling(&self, fields: &mut Fields, ends: &[u32], logprobs: Option<usize>) -> ApiResult<Sampling> {
        let defaults = &self.defaults;
        let temperature: f32 = fields.take("temperature")?.or(defaults.temperature).unwrap_or(1.0);
        if !(temperature.is_finite() && temperature >= 0.0) {
            let message = format!("temperature must be non-negative, got {temperature}.");
            return Err(refused("temperature", message));
        }
        let top_p: f32 = fields.take("top_p")?.or(defaults.top_p).unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(refused("top_p", format!("top_p must be in (0, 1], got {top_p}.")));
        }
        // -1 and 0 stand for all tokens.
        let top_k: i64 = fields.take("top_k")?.or(defaults.top_k).unwrap_or(0);
        let Ok(top_k) = usize::try_from(if top_k == -1 { 0 } else { top_k }) else {
            return Err(refused("top_k", "top_k must be 0 (disable), or at least 1."));
        };
        // As in vLLM, -1 stands for no seed.
        let seed: Option<i64> = fields.take("seed")?.filter(|seed| *seed != -1);
        let min_p: f32 = fields.take("min_p")?.or(defaults.min_p).unwrap_or(0.0);
        let repetition_penalty: f32 = fields.take("repetition_penalty")?.or(defaults.repetition_penalty).unwrap_or(1.0);
        if !(repetition_penalty.is_finite() && repetition_penalty > 0.0) {
            let message = format!("repetition_penalty must be greater than zero, got {repetition_penalty}.");
            return Err(refused("repetition_penalty", message));
        }
        let penalty = |fields: &mut Fields, name| within(name, fields.take(name)?.unwrap_or(0.0), -2.0, 2.0);
        let min_tokens = fields.take("min_tokens")?.unwrap_or(0);
        let changes = Changes {
            allowed: fields.take("allowed_token_ids")?,
            min_tokens,
            ends: if min_tokens > 0 { ends.to_vec() } else { Vec::new() },
            bias: self.bias(fields.take("logit_bias")?.unwrap_or_default())?,
            repetition_penalty,
            frequency_penalty: penalty(fields, "frequency_penalty")?,
            presence_penalty: penalty(fields, "presence_penalty")?,
            min_p: within("min_p", min_p, 0.0, 1.0)?,
        };
        let is_known = |token: &u32| (*token as usize) < self.vocab;
        if changes.allowed.as_ref().is_some_and(|allowed| allowed.is_empty() || !allowed.iter().all(is_known)) {
            return Err(refused("allowed_token_ids", "allowed_token_ids has one or more tokens of the vocabulary."));
        }
        if changes.allowed.as_ref().is_some_and(|allowed| allowed.iter().all(|token| changes.ends.contains(token))) {
            let message =
                "No token is left to choose: all of allowed_token_ids end the text, which min_tokens forbids.";
            return Err(refused("allowed_token_ids", message));
        }
        Ok(Sampling { temperature, top_p, top_k, seed: seed.map(i64::cast_unsigned), logprobs, changes })
    }

    /// `logit_bias` as numbers, by token.
    fn bias(&self, bias: BTreeMap<String, f32>) -> ApiResult<Vec<(u32, f32)>> {
        let known = |token: &String| token.parse().ok().filter(|token: &u32| (*token as usize) < self.vocab);
        let unknown: Vec<_> = bias.keys().filter(|token| known(token).is_none()).take(MAX_STOPS).cloned().collect();
        if !unknown.is_empty() {
            let message = format!(
                "logit_bias names what is out of vocabulary, which has the tokens below {}: {}.",
                self.vocab,
                unknown.join(", ")
            );
            return Err(refused("logit_bias", message));
        }
        let entry = |(token, bias)| Some((known(&token)?, bias));
        let entries = bias.into_iter().filter_map(entry);
        entries.map(|(token, bias)| Ok((token, within("logit_bias", bias, -100.0, 100.0)?))).collect()
    }
}

/// Refuses more choices of a number of prompts than a request may have.
pub(super) fn check_choices(prompts: usize, choices: usize) -> ApiResult<()> {
    let is_within = (1..=MAX_CHOICES).contains(&choices) && prompts.saturating_mul(choices) <= MAX_CHOICES;
    let message = || format!("A request has 1 to {MAX_CHOICES} choices, those of all prompts together.");
    is_within.then_some(()).ok_or_else(|| refused("n", message()))
}

/// What a chat's prompt is rendered from, beside its messages.
pub(super) fn chat_options(fields: &mut Fields) -> ApiResult<chat::Options> {
    let options = chat::Options {
        adds_prompt: fields.take("add_generation_prompt")?.unwrap_or(true),
        continues_last: fields.is_on("continue_final_message")?,
        documents: fields
            .take::<Vec<Map<String, Value>>>("documents")?
            .filter(|all| !all.is_empty())
            .map(Value::from_iter),
        kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
    };
    if options.adds_prompt && options.continues_last {
        let message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True.";
        return Err(refused("continue_final_message", message));
    }
    Ok(options)
}

fn streamed_usage(fields: &mut Fields, stream: bool) -> ApiResult<StreamedUsage> {
    const NAME: &str = "stream_options";
    let options: Option<Map<String, Value>> = fields.take(NAME)?;
    if options.as_ref().is_some_and(|options| !options.is_empty()) && !stream {
        return Err(refused(NAME, "`stream_options` can only be defined when `stream=True`."));
    }
    let (mut has_usage, mut has_each) = (false, false);
    for (option, value) in options.unwrap_or_default() {
        match (option.as_str(), &value) {
            (_, Value::Null) | ("include_obfuscation", Value::Bool(false)) => {}
            ("include_usage", Value::Bool(is_on)) => has_usage = *is_on,
            ("continuous_usage_stats", Value::Bool(is_on)) => has_each = *is_on,
            _ => return Err(refused(NAME, format!("`{NAME}.{option}` = {value} is not implemented."))),
        }
    }
    Ok(match (has_usage, has_each) {
        (false, _) => StreamedUsage::None,
        (true, false) => StreamedUsage::Last,
        (true, true) => StreamedUsage::Each,
    })
}
