//! `/v1/completions` and `/v1/chat/completions`.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use aril::pool::AdapterId;
use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response, Sse, sse},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{Instant, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;

use super::{
    Server, Shared, body,
    error::{ApiError, ApiResult},
    text::Text,
};
use crate::{
    engine::{Chosen, Event, Finish, Logprobs, Request, Sampling},
    worker::Submission,
};

/// The most choices of a request.
const MAX_CHOICES: usize = 128;
/// The most log-probabilities of a token.
const MAX_LOGPROBS: usize = 20;
/// The most strings, and tokens, that end a text.
const MAX_STOPS: usize = 64;
/// Chunks of a stream that wait for its client.
const STREAM_CHUNKS: usize = 64;

/// What both endpoints take.
#[derive(Debug, Deserialize)]
struct Common {
    model: Option<String>,
    lora_path: Option<String>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// -1 and 0 stand for all tokens.
    top_k: Option<i64>,
    seed: Option<i64>,
    n: Option<usize>,
    stop: Option<OneOrMany>,
    #[serde(default)]
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    /// Adds the chosen tokens to each choice.
    return_token_ids: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// The body of `/v1/completions`.
#[derive(Debug, Deserialize)]
struct Completion {
    prompt: Prompts,
    max_tokens: Option<usize>,
    logprobs: Option<usize>,
    echo: Option<bool>,
    #[serde(flatten)]
    common: Common,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    ManyTokens(Vec<Vec<u32>>),
}

/// The body of `/v1/chat/completions`.
#[derive(Debug, Deserialize)]
struct Chat {
    messages: Vec<Value>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    logprobs: Option<bool>,
    top_logprobs: Option<usize>,
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(flatten)]
    common: Common,
}

/// Which of the two formats an answer has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Format {
    Completion,
    Chat,
}

/// A checked request.
#[derive(Debug)]
struct Job {
    format: Format,
    /// The name that the request used.
    model: String,
    adapter: Option<AdapterId>,
    prompts: Vec<Vec<u32>>,
    choices: usize,
    /// The most new tokens, or as many as fit.
    max_tokens: Option<usize>,
    echo: bool,
    stop: Vec<String>,
    stop_tokens: Vec<u32>,
    sampling: Sampling,
    stream: bool,
    include_usage: bool,
    return_token_ids: bool,
    deadline: Instant,
}

/// `POST /v1/completions`
pub(crate) async fn completions(State(server): Shared, received: body::Received) -> ApiResult<Response> {
    let job = server.prepare(received, Server::completion).await?;
    server.answer(job).await
}

/// `POST /v1/chat/completions`
pub(crate) async fn chat(State(server): Shared, received: body::Received) -> ApiResult<Response> {
    let job = server.prepare(received, Server::chat).await?;
    server.answer(job).await
}

/// One choice of an answer.
struct Choice {
    index: usize,
    submission: Submission,
    text: Text,
    deadline: Instant,
    /// The prompt's text, which the answer begins with.
    echo: String,
}

/// What a choice's next token adds.
#[derive(Debug)]
struct Piece {
    text: String,
    token: u32,
    logprobs: Option<Logprobs>,
    finish: Option<&'static str>,
}

impl Choice {
    /// Waits for the next token.
    async fn next(&mut self, server: &Server) -> ApiResult<Piece> {
        let event = timeout_at(self.deadline, self.submission.next()).await;
        let event = event.map_err(|_| ApiError::late())?;
        let (Chosen { token, logprobs }, finish) = match event.ok_or_else(ApiError::ended)? {
            Event::Token(chosen, finish) => (chosen, finish),
            Event::Failed(failure) => return Err(failure.into()),
        };
        let internal = |error: crate::error::Error| ApiError::internal(error.to_string());
        let mut added = self.text.push(&server.tokenizer, token).map_err(internal)?;
        if finish.is_some() && !added.is_stopped {
            let rest = self.text.end(&server.tokenizer).map_err(internal)?;
            added.text.push_str(&rest.text);
            added.is_stopped = rest.is_stopped;
        }
        let finish = match finish {
            _ if added.is_stopped => Some("stop"),
            Some(Finish::Stop) => Some("stop"),
            Some(Finish::Length) => Some("length"),
            None => None,
        };
        Ok(Piece { text: added.text, token, logprobs, finish })
    }
}

impl Server {
    /// Reads, renders and tokenizes a request, which may take long, on a thread that serves nobody else meanwhile. Few long ones are read
    /// at the same time.
    async fn prepare(
        self: &Arc<Self>,
        received: body::Received,
        read: impl FnOnce(&Self, body::Received) -> ApiResult<Job> + Send + 'static,
    ) -> ApiResult<Job> {
        let server = Arc::clone(self);
        let turn = if received.is_long() {
            let turn = timeout_at(received.deadline, Arc::clone(&self.long_bodies).acquire_owned()).await;
            Some(turn.map_err(|_| ApiError::late())?)
        } else {
            None
        };
        let job = spawn_blocking(move || {
            let job = read(&server, received);
            drop(turn);
            job
        });
        job.await.map_err(|error| ApiError::internal(error.to_string()))?
    }

    fn completion(&self, received: body::Received) -> ApiResult<Job> {
        let deadline = received.deadline;
        let Completion { prompt, max_tokens, logprobs, echo, common } = body::parse(received)?;
        let echo = echo.unwrap_or(false);
        if echo && logprobs.is_some() {
            return Err(ApiError::bad_request("`echo` with `logprobs` is not implemented.").of("echo"));
        }
        let prompts = match &prompt {
            Prompts::Text(_) | Prompts::Tokens(_) => 1,
            Prompts::Texts(prompts) => prompts.len(),
            Prompts::ManyTokens(prompts) => prompts.len(),
        };
        let job = self.job(Format::Completion, common, prompts, logprobs, deadline)?;
        let encode = |text: &String| self.encode(text);
        let prompts = match prompt {
            Prompts::Text(text) => vec![encode(&text)?],
            Prompts::Texts(texts) => texts.iter().map(encode).collect::<ApiResult<_>>()?,
            Prompts::Tokens(tokens) => vec![tokens],
            Prompts::ManyTokens(prompts) => prompts,
        };
        Ok(Job { prompts, max_tokens: Some(max_tokens.unwrap_or(16)), echo, ..job })
    }

    fn chat(&self, received: body::Received) -> ApiResult<Job> {
        let deadline = received.deadline;
        let Chat { messages, max_tokens, max_completion_tokens, logprobs, top_logprobs, chat_template_kwargs, common } =
            body::parse(received)?;
        let logprobs = match (logprobs.unwrap_or(false), top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(ApiError::bad_request("`top_logprobs` needs `logprobs`.").of("top_logprobs"));
            }
        };
        let job = self.job(Format::Chat, common, 1, logprobs, deadline)?;
        let kwargs = Value::Object(chat_template_kwargs.unwrap_or_default());
        let prompt = self.encode(&self.template.render(&messages, &kwargs)?)?;
        Ok(Job { prompts: vec![prompt], max_tokens: max_completion_tokens.or(max_tokens), ..job })
    }

    fn encode(&self, text: &str) -> ApiResult<Vec<u32>> {
        let tokens = self.tokenizer.encode(text, self.max_positions);
        tokens.map_err(|error| ApiError::bad_request(format!("The prompt cannot be tokenized: {error}")))
    }

    /// Checks what both endpoints take, for a number of prompts that are tokenized later.
    fn job(
        &self,
        format: Format,
        common: Common,
        prompts: usize,
        logprobs: Option<usize>,
        deadline: Instant,
    ) -> ApiResult<Job> {
        let refuse = |param: &'static str, message: String| Err(ApiError::bad_request(message).of(param));
        body::refuse_rest(&common.rest)?;
        let Common { model, lora_path, temperature, top_p, top_k, seed, n, stop, stop_token_ids, .. } = common;
        let model = model.or_else(|| self.names.first().cloned()).unwrap_or_default();
        let served = self.resolve(&model, lora_path.as_deref())?;
        let (temperature, top_p) = (temperature.unwrap_or(1.0), top_p.unwrap_or(1.0));
        if !(temperature.is_finite() && temperature >= 0.0) {
            return refuse("temperature", format!("temperature must be non-negative, got {temperature}."));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse("top_p", format!("top_p must be in (0, 1], got {top_p}."));
        }
        let Ok(top_k) = usize::try_from(top_k.map_or(0, |top_k| if top_k == -1 { 0 } else { top_k })) else {
            return refuse("top_k", "top_k must be 0 (disable), or at least 1.".into());
        };
        if logprobs.is_some_and(|logprobs| logprobs > MAX_LOGPROBS) {
            return refuse("logprobs", format!("At most {MAX_LOGPROBS} log-probabilities of a token are given."));
        }
        if prompts == 0 {
            return refuse("prompt", "There is no prompt.".into());
        }
        let choices = n.unwrap_or(1);
        if !(1..=MAX_CHOICES).contains(&choices) || prompts.saturating_mul(choices) > MAX_CHOICES {
            return refuse("n", format!("A request has 1 to {MAX_CHOICES} choices, those of all prompts together."));
        }
        if choices > 1 && temperature == 0.0 {
            return refuse("n", "n must be 1 when using greedy sampling.".into());
        }
        let stop = match stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop],
            Some(OneOrMany::Many(stop)) => stop,
        };
        if stop.iter().any(String::is_empty) || stop.len() > MAX_STOPS {
            return refuse("stop", format!("stop has up to {MAX_STOPS} strings, none of which is empty."));
        }
        let mut stop_tokens = stop_token_ids.unwrap_or_default();
        if stop_tokens.len() > MAX_STOPS {
            return refuse("stop_token_ids", format!("stop_token_ids has up to {MAX_STOPS} tokens."));
        }
        if !common.ignore_eos.unwrap_or(false) {
            stop_tokens.extend(&self.eos);
        }
        Ok(Job {
            format,
            model,
            adapter: served.adapter(),
            prompts: Vec::new(),
            choices,
            max_tokens: None,
            echo: false,
            stop,
            stop_tokens,
            sampling: Sampling { temperature, top_p, top_k, seed: seed.map(i64::cast_unsigned), logprobs },
            stream: common.stream.unwrap_or(false),
            include_usage: common.stream_options.is_some_and(|options| options.include_usage),
            return_token_ids: common.return_token_ids.unwrap_or(false),
            deadline,
        })
    }

    /// Submits all choices of a request.
    async fn submit(&self, job: &Job) -> ApiResult<Vec<Choice>> {
        let deadline = job.deadline;
        let mut choices = Vec::with_capacity(job.prompts.len() * job.choices);
        for prompt in &job.prompts {
            let max_tokens = self.check_length(prompt, job.max_tokens)?;
            let echo = if job.echo { self.tokenizer.decode(prompt) } else { Ok(String::new()) };
            let echo = echo.map_err(|error| ApiError::internal(error.to_string()))?;
            for number in 0..job.choices {
                let seed = job.sampling.seed.map(|seed| seed.wrapping_add(number as u64));
                let request = Request {
                    adapter: job.adapter,
                    prompt: prompt.clone(),
                    max_tokens,
                    stop_tokens: job.stop_tokens.clone(),
                    sampling: Sampling { seed, ..job.sampling.clone() },
                };
                let submission = self.engine.submit(request).await.ok_or_else(ApiError::ended)??;
                let text = Text::new(job.stop.clone());
                choices.push(Choice { index: choices.len(), submission, text, deadline, echo: echo.clone() });
            }
        }
        self.count("vllm:prompt_tokens_total", job.prompts.iter().map(Vec::len).sum());
        Ok(choices)
    }

    /// The most new tokens of a prompt.
    fn check_length(&self, prompt: &[u32], max_tokens: Option<usize>) -> ApiResult<usize> {
        let (max, tokens) = (self.max_positions, prompt.len());
        if tokens == 0 {
            return Err(ApiError::bad_request("The prompt is empty.").of("prompt"));
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= self.vocab) {
            let message = format!("Token id {token} is out of vocabulary.");
            return Err(ApiError::bad_request(message).of("prompt"));
        }
        if max_tokens == Some(0) {
            return Err(ApiError::bad_request("max_tokens must be at least 1, got 0.").of("max_tokens"));
        }
        let wanted = max_tokens.unwrap_or_else(|| max.saturating_sub(tokens).max(1));
        if tokens.saturating_add(wanted) > max {
            return Err(ApiError::bad_request(format!(
                "This model's maximum context length is {max} tokens. However, you requested {} tokens ({tokens} in the \
                 prompt, {wanted} in the completion). Please reduce the length of the prompt or completion.",
                tokens.saturating_add(wanted),
            )));
        }
        Ok(wanted)
    }

    async fn answer(self: &Arc<Self>, job: Job) -> ApiResult<Response> {
        let start = Instant::now();
        let choices = self.submit(&job).await?;
        let answer = Answer::new(Arc::clone(self), job, start);
        if answer.job.stream {
            let (chunks, stream) = mpsc::channel(STREAM_CHUNKS);
            tokio::spawn(answer.stream(choices, chunks));
            return Ok(Sse::new(ReceiverStream::new(stream)).into_response());
        }
        answer.whole(choices).await
    }
}

/// An answer on its way.
struct Answer {
    server: Arc<Server>,
    job: Job,
    start: Instant,
    id: String,
    created: u64,
    completion_tokens: usize,
}

impl Answer {
    fn new(server: Arc<Server>, job: Job, start: Instant) -> Self {
        let prefix = if job.format == Format::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:032x}", rand::random::<u128>());
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
        Self { server, job, start, id, created, completion_tokens: 0 }
    }

    /// Waits for all choices, which run at the same time.
    async fn whole(mut self, choices: Vec<Choice>) -> ApiResult<Response> {
        let mut done = Vec::with_capacity(choices.len());
        for mut choice in choices {
            let (mut text, mut tokens) = (std::mem::take(&mut choice.echo), Vec::new());
            let mut logprobs = TokenLogprobs::default();
            let finish = loop {
                let piece = choice.next(&self.server).await?;
                self.note(&piece);
                logprobs.push(&self.server, &piece, text.chars().count())?;
                text.push_str(&piece.text);
                tokens.push(piece.token);
                if let Some(finish) = piece.finish {
                    break finish;
                }
            };
            let logprobs = self.job.sampling.logprobs.map(|_| logprobs.json(self.job.format));
            let mut whole = match self.job.format {
                Format::Completion => {
                    json!({ "index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish })
                }
                Format::Chat => json!({
                    "index": choice.index,
                    "message": { "role": "assistant", "content": text },
                    "logprobs": logprobs,
                    "finish_reason": finish,
                }),
            };
            if self.job.return_token_ids {
                whole["token_ids"] = json!(tokens);
            }
            done.push(whole);
        }
        let object = match self.job.format {
            Format::Completion => "text_completion",
            Format::Chat => "chat.completion",
        };
        let mut body = self.envelope(object, done);
        body["usage"] = self.usage();
        Ok(Json(body).into_response())
    }

    /// Sends each token as it comes. Ends, and cancels the choices, when the client goes away.
    async fn stream(mut self, choices: Vec<Choice>, chunks: mpsc::Sender<Result<sse::Event, Infallible>>) {
        let mut left = choices.len();
        let mut offsets: Vec<usize> = choices.iter().map(|choice| choice.echo.chars().count()).collect();
        for choice in &choices {
            let text = (self.job.format == Format::Chat || !choice.echo.is_empty()).then(|| choice.echo.clone());
            let Some(text) = text else { continue };
            let chunk = self.chunk(choice.index, &text, None, None, true);
            if chunks.send(event(&chunk)).await.is_err() {
                return;
            }
        }
        let (pieces, mut received) = mpsc::channel(STREAM_CHUNKS);
        for mut choice in choices {
            let (server, pieces) = (Arc::clone(&self.server), pieces.clone());
            tokio::spawn(async move {
                loop {
                    let piece = tokio::select! {
                        piece = choice.next(&server) => piece,
                        () = pieces.closed() => return,
                    };
                    let is_last = piece.as_ref().map_or(true, |piece| piece.finish.is_some());
                    if pieces.send((choice.index, piece)).await.is_err() || is_last {
                        return;
                    }
                }
            });
        }
        drop(pieces);
        while left > 0 {
            let received = tokio::select! {
                received = received.recv() => received,
                () = chunks.closed() => return,
            };
            let (index, piece) = match received {
                Some((index, Ok(piece))) => (index, piece),
                Some((_, Err(error))) => return fail(&chunks, &error).await,
                None => return fail(&chunks, &ApiError::internal("A choice has ended early.")).await,
            };
            self.note(&piece);
            let mut logprobs = TokenLogprobs::default();
            if let Err(error) = logprobs.push(&self.server, &piece, offsets[index]) {
                return fail(&chunks, &error).await;
            }
            offsets[index] += piece.text.chars().count();
            left -= usize::from(piece.finish.is_some());
            let logprobs = self.job.sampling.logprobs.map(|_| logprobs.json(self.job.format));
            let mut chunk = self.chunk(index, &piece.text, logprobs, piece.finish, false);
            if self.job.return_token_ids {
                chunk["choices"][0]["token_ids"] = json!([piece.token]);
            }
            if chunks.send(event(&chunk)).await.is_err() {
                return;
            }
        }
        if self.job.include_usage {
            let mut chunk = self.envelope(self.chunk_object(), Vec::new());
            chunk["usage"] = self.usage();
            // The client may be gone, which ends the stream as well.
            let _ = chunks.send(event(&chunk)).await;
        }
        let _ = chunks.send(Ok(sse::Event::default().data("[DONE]"))).await;
    }

    fn chunk_object(&self) -> &'static str {
        match self.job.format {
            Format::Completion => "text_completion",
            Format::Chat => "chat.completion.chunk",
        }
    }

    fn chunk(&self, index: usize, text: &str, logprobs: Option<Value>, finish: Option<&str>, is_first: bool) -> Value {
        let choice = match self.job.format {
            Format::Completion => {
                json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish })
            }
            Format::Chat => {
                let delta =
                    if is_first { json!({ "role": "assistant", "content": text }) } else { json!({ "content": text }) };
                json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish })
            }
        };
        self.envelope(self.chunk_object(), vec![choice])
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        let Self { id, created, job, .. } = self;
        json!({ "id": id, "object": object, "created": created, "model": job.model, "choices": choices })
    }

    fn usage(&self) -> Value {
        let prompt: usize = self.job.prompts.iter().map(Vec::len).sum();
        let completion = self.completion_tokens;
        json!({ "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion })
    }

    /// Counts a token.
    fn note(&mut self, piece: &Piece) {
        let server = &self.server;
        if self.completion_tokens == 0 {
            server.observe("vllm:time_to_first_token_seconds", self.start.elapsed());
        }
        self.completion_tokens += 1;
        server.count("vllm:generation_tokens_total", 1);
        if let Some(finish) = piece.finish {
            server.observe("vllm:e2e_request_latency_seconds", self.start.elapsed());
            server.count_finished(finish);
        }
    }
}

/// The log-probabilities of a text's tokens.
#[derive(Debug, Default)]
struct TokenLogprobs {
    /// The text of each token, its place in the text, and its log-probability.
    tokens: Vec<(String, usize, f32)>,
    top: Vec<Vec<(String, f32)>>,
}

impl TokenLogprobs {
    fn push(&mut self, server: &Server, piece: &Piece, offset: usize) -> ApiResult<()> {
        let Some(Logprobs { chosen, top }) = &piece.logprobs else { return Ok(()) };
        let text = |token| server.token_text(token);
        self.tokens.push((text(piece.token)?, offset, *chosen));
        let top = top.iter().map(|&(token, logprob)| Ok((text(token)?, logprob)));
        self.top.push(top.collect::<ApiResult<_>>()?);
        Ok(())
    }

    fn json(&self, format: Format) -> Value {
        let Self { tokens, top } = self;
        match format {
            Format::Completion => json!({
                "tokens": tokens.iter().map(|(text, ..)| text).collect::<Vec<_>>(),
                "token_logprobs": tokens.iter().map(|(.., logprob)| logprob).collect::<Vec<_>>(),
                "text_offset": tokens.iter().map(|(_, offset, _)| offset).collect::<Vec<_>>(),
                "top_logprobs": top.iter().map(|top| {
                    let object = top.iter().map(|(text, logprob)| (text.clone(), json!(logprob)));
                    Value::Object(object.collect())
                }).collect::<Vec<_>>(),
            }),
            Format::Chat => {
                let entry =
                    |text: &str, logprob: f32| json!({ "token": text, "logprob": logprob, "bytes": text.as_bytes() });
                let content = tokens.iter().zip(top).map(|((text, _, logprob), top)| {
                    let mut content = entry(text, *logprob);
                    content["top_logprobs"] = top.iter().map(|(text, logprob)| entry(text, *logprob)).collect();
                    content
                });
                json!({ "content": content.collect::<Vec<_>>() })
            }
        }
    }
}

fn event(chunk: &Value) -> Result<sse::Event, Infallible> {
    Ok(sse::Event::default().data(chunk.to_string()))
}

/// Ends a stream with an error.
async fn fail(chunks: &mpsc::Sender<Result<sse::Event, Infallible>>, error: &ApiError) {
    // The client may be gone, which ends the stream as well.
    let _ = chunks.send(event(&error.json())).await;
    let _ = chunks.send(Ok(sse::Event::default().data("[DONE]"))).await;
}
