//! `/v1/completions` and `/v1/chat/completions`: from a checked request to its answer.

use std::{
    convert::Infallible,
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use aril_engine::{Chosen, Event, Failure, Finish, Logprobs, Request, Sampling, worker::Submission};
use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response, Sse, sse},
};
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
    request::{Asked, Echo, Format, Job, Model, Prompt, StreamedUsage},
    text::{Added, Place, Text},
};

/// Chunks of a stream that wait for its client.
const STREAM_CHUNKS: usize = 64;

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
    /// The folder of its adapter.
    folder: Option<Arc<Path>>,
    /// Tokens of the prompt whose keys and values the cache had.
    cached: usize,
    /// What has been received of the prompt's log-probabilities.
    prompt: Vec<(Logprobs, usize)>,
    times: Times,
}

/// When a choice has come how far.
#[derive(Clone, Copy, Debug)]
struct Times {
    submitted: Instant,
    started: Option<Instant>,
    first: Option<Instant>,
    last: Instant,
    tokens: usize,
}

impl Times {
    fn new() -> Self {
        let now = Instant::now();
        Self { submitted: now, started: None, first: None, last: now, tokens: 0 }
    }

    /// Takes note of a token, and of the end.
    fn note(&mut self, server: &Server, finish: Option<&'static str>) {
        let now = Instant::now();
        let seconds = |name, from: Instant, to: Instant| server.observe(name, to.duration_since(from).as_secs_f64());
        server.count("vllm:generation_tokens_total", 1);
        self.tokens += 1;
        let started = *self.started.get_or_insert(now);
        match self.first {
            Some(_) => seconds("vllm:inter_token_latency_seconds", self.last, now),
            None => seconds("vllm:time_to_first_token_seconds", self.submitted, now),
        }
        let first = *self.first.get_or_insert(now);
        self.last = now;
        let Some(finish) = finish else { return };
        server.count_finished(finish);
        seconds("vllm:e2e_request_latency_seconds", self.submitted, now);
        seconds("vllm:request_queue_time_seconds", self.submitted, started);
        seconds("vllm:request_prefill_time_seconds", started, first);
        seconds("vllm:request_decode_time_seconds", first, now);
        seconds("vllm:request_inference_time_seconds", started, now);
        server.observe("vllm:request_generation_tokens", self.tokens as f64);
        if self.tokens > 1 {
            let mean = now.duration_since(first).as_secs_f64() / (self.tokens - 1) as f64;
            server.observe("vllm:request_time_per_output_token_seconds", mean);
        }
    }
}

/// What a choice's next token adds.
#[derive(Debug)]
struct Piece {
    text: String,
    token: u32,
    place: Place,
    logprobs: Option<Logprobs>,
    finish: Option<&'static str>,
    /// The stop string or the token that ended the text.
    matched: Value,
    /// With the first token: the log-probabilities of the prompt's tokens but the first, and how many tokens are at
    /// least as probable.
    prompt: Vec<(Logprobs, usize)>,
    /// Tokens of the prompt whose keys and values the cache had.
    cached: usize,
}

impl Choice {
    /// Waits for the next token.
    async fn next(&mut self, server: &Server) -> ApiResult<Piece> {
        let (Chosen { token, logprobs }, finish) = loop {
            let event = timeout_at(self.deadline, self.submission.next()).await.map_err(|_| ApiError::late())?;
            match event.ok_or_else(ApiError::ended)? {
                Event::Token(chosen, finish) => break (chosen, finish),
                Event::Prompt(logprobs, rank) => self.prompt.push((logprobs, rank)),
                Event::Started(cached) => {
                    // It may have been preempted since.
                    if self.times.started.is_none() {
                        (self.times.started, self.cached) = (Some(Instant::now()), cached);
                    }
                }
                Event::Failed(failure) => return Err(server.failed(&failure, self.folder.as_deref())),
            }
        };
        let Added { place, mut text, mut is_stopped } = match finish {
            Some(Finish::Stop) => self.text.push_last(&server.tokenizer, token)?,
            _ => self.text.push(&server.tokenizer, token)?,
        };
        if finish.is_some() && !is_stopped {
            let rest = self.text.end(&server.tokenizer);
            text.push_str(&rest.text);
            is_stopped = rest.is_stopped;
        }
        let finish = match finish {
            _ if is_stopped => Some("stop"),
            Some(Finish::Stop) => Some("stop"),
            Some(Finish::Length) => Some("length"),
            None => None,
        };
        let matched = match self.text.stopped_by() {
            Some(stop) => stop.into(),
            None if finish == Some("stop") => token.into(),
            None => Value::Null,
        };
        self.times.note(server, finish);
        let (prompt, cached) = (std::mem::take(&mut self.prompt), self.cached);
        Ok(Piece { text, token, place, logprobs, finish, matched, prompt, cached })
    }
}

impl Server {
    /// Reads, renders and tokenizes a request, which may take long, on a thread that serves nobody else meanwhile. Few
    /// long ones are read at the same time.
    pub(super) async fn prepare<V: Send + 'static>(
        self: &Arc<Self>,
        received: body::Received,
        read: impl FnOnce(&Self, body::Received) -> ApiResult<V> + Send + 'static,
    ) -> ApiResult<V> {
        let server = Arc::clone(self);
        let turn = match received.long() {
            Some(bytes) => {
                let turn = self.turns.take(received.client.clone(), bytes);
                Some(timeout_at(received.access.arrival.deadline, turn).await.map_err(|_| ApiError::late())?)
            }
            None => None,
        };
        let read = spawn_blocking(move || {
            let read = read(&server, received);
            drop(turn);
            read
        });
        // What a panic says may quote what it was about.
        read.await.map_err(|_| ApiError::internal("The thread that read the request has panicked."))?
    }

    /// Submits all choices of a request, together, unless the engine refuses them.
    async fn submit(&self, job: &Job) -> ApiResult<Result<Vec<Choice>, Failure>> {
        let mut requests = Vec::with_capacity(job.prompts.len() * job.choices);
        let mut lengths = Vec::new();
        for Prompt { tokens, asked, model, .. } in &job.prompts {
            let sampling = &asked.sampling;
            let prompt_logprobs = job.prompt_logprobs.max(sampling.logprobs.filter(|_| job.echo));
            let max_tokens = self.check_length(tokens, asked, job.echo)?;
            lengths.push((tokens.len(), max_tokens));
            for number in 0..job.choices {
                let seed = sampling.seed.map(|seed| seed.wrapping_add(number as u64));
                requests.push(Request {
                    adapter: model.adapter,
                    prompt: tokens.clone(),
                    max_tokens,
                    stop_tokens: asked.stop_tokens.clone(),
                    prompt_logprobs,
                    sampling: Sampling { seed, ..sampling.clone() },
                });
            }
        }
        let submissions = match self.engine.submit(requests).await.ok_or_else(ApiError::ended)? {
            Ok(submissions) => submissions,
            Err(failure) => return Ok(Err(failure)),
        };
        self.count("vllm:prompt_tokens_total", lengths.iter().map(|(prompt, _)| prompt).sum());
        self.observe("vllm:request_params_n", job.choices as f64);
        for (prompt, max_tokens) in lengths {
            for _ in 0..job.choices {
                self.observe("vllm:request_prompt_tokens", prompt as f64);
                self.observe("vllm:request_params_max_tokens", max_tokens as f64);
            }
        }
        let choice = |(index, submission)| {
            let Prompt { tokens, echo, asked, model } = job.prompt(index);
            let shown = echo.as_ref().map_or(0, |echo| echo.text.chars().count());
            let text = Text::behind(tokens, shown, asked.end.clone(), &self.tokenizer)?;
            Ok(Choice {
                index,
                submission,
                text,
                deadline: job.access.arrival.deadline,
                folder: model.adapter.and_then(|id| self.folder(id)),
                cached: 0,
                prompt: Vec::new(),
                times: Times::new(),
            })
        };
        submissions.into_iter().enumerate().map(choice).collect::<ApiResult<_>>().map(Ok)
    }

    /// The most new tokens of a prompt.
    fn check_length(&self, prompt: &[u32], asked: &Asked, echo: bool) -> ApiResult<usize> {
        let (max, tokens, min_tokens) = (self.max_positions, prompt.len(), asked.sampling.changes.min_tokens);
        if tokens == 0 {
            return Err(ApiError::bad_request("The prompt is empty.").of("prompt"));
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= self.vocab) {
            let message = format!("Token id {token} is out of vocabulary.");
            return Err(ApiError::bad_request(message).of("prompt"));
        }
        let wanted = match asked.max_tokens {
            // A token is chosen that is not shown.
            Some(0) if echo => 1,
            Some(0) => {
                return Err(ApiError::bad_request("max_tokens must be at least 1, got 0.").of("max_tokens"));
            }
            Some(wanted) => wanted,
            None => {
                let room = max.saturating_sub(tokens).max(1);
                asked.default_tokens.map_or(room, |tokens| tokens.max(min_tokens).min(room))
            }
        };
        if tokens.saturating_add(wanted) > max {
            return Err(ApiError::bad_request(format!(
                "This model's maximum context length is {max} tokens. However, you requested {} tokens ({tokens} in \
                 the \
                 prompt, {wanted} in the completion). Please reduce the length of the prompt or completion.",
                tokens.saturating_add(wanted),
            )));
        }
        if min_tokens > wanted {
            let message = format!("min_tokens must be less than or equal to max_tokens={wanted}, got {min_tokens}.");
            return Err(ApiError::bad_request(message).of("min_tokens"));
        }
        Ok(wanted)
    }

    /// Finds what answers, and loads what is not there.
    async fn find_version(self: &Arc<Self>, model: &mut Model, deadline: Instant) -> ApiResult<()> {
        if !model.parts.is_empty() {
            return self.combine(model, deadline).await;
        }
        model.adapter = self.find(&model.name, deadline).await?.adapter();
        Ok(())
    }

    pub(super) async fn answer(self: &Arc<Self>, mut job: Job) -> ApiResult<Response> {
        let of_list = |model: &Model, error: ApiError| match model.index {
            Some(index) => error.of_adapter(index),
            None => error,
        };
        for Prompt { model, .. } in job.prompts.iter_mut().filter(|prompt| prompt.model.is_sought) {
            let found = self.find_version(model, job.access.arrival.deadline).await;
            found.map_err(|error| of_list(model, error))?;
        }
        job.access.note_prompts(&job.prompts);
        let choices = loop {
            let failure = match self.submit(&job).await? {
                Ok(choices) => break choices,
                Err(failure) => failure,
            };
            // The version may have been replaced since the request was read.
            let mut is_replaced = false;
            for Prompt { model, .. } in job.prompts.iter_mut().filter(|_| matches!(failure, Failure::Unloaded)) {
                let before = model.adapter;
                if model.parts.is_empty() {
                    let now = self.resolve(&model.name).map_err(|error| of_list(model, error))?;
                    model.adapter = now.adapter();
                } else {
                    self.combine(model, job.access.arrival.deadline).await?;
                }
                is_replaced |= model.adapter != before;
            }
            if !is_replaced {
                let folder = job.prompts.iter().find_map(|prompt| self.folder(prompt.model.adapter?));
                return Err(self.failed(&failure, folder.as_deref()));
            }
        };
        let answer = Answer::new(Arc::clone(self), job);
        if answer.job.stream {
            let (chunks, stream) = mpsc::channel(STREAM_CHUNKS);
            let access = Arc::clone(&answer.job.access);
            tokio::spawn(async move {
                answer.stream(choices, chunks.clone()).await;
                if chunks.is_closed() {
                    access.leave();
                }
            });
            return Ok(Sse::new(ReceiverStream::new(stream)).into_response());
        }
        answer.whole(choices).await
    }
}

/// An answer on its way.
struct Answer {
    server: Arc<Server>,
    job: Job,
    id: String,
    /// The name of what answers: the base model's, where prompts have adapters of their own.
    model: String,
    created: u64,
    cached_tokens: usize,
    completion_tokens: usize,
}

/// What a token, or the prompt before the first one, adds to a choice.
#[derive(Debug, Default)]
pub(super) struct Addition {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: TokenLogprobs,
    pub(super) finish: Option<&'static str>,
    /// The stop string or the token that ended the text.
    pub(super) matched: Value,
    /// Tokens of the prompt whose keys and values the cache had.
    pub(super) cached: usize,
}

impl Addition {
    /// Adds what comes next.
    fn extend(&mut self, next: Self) {
        let Self { text, tokens, logprobs, finish, matched, cached } = next;
        self.text.push_str(&text);
        self.tokens.extend(tokens);
        self.logprobs.extend(logprobs);
        (self.finish, self.matched, self.cached) = (finish, matched, cached);
    }
}

impl Answer {
    fn new(server: Arc<Server>, job: Job) -> Self {
        let prefix = if job.format == Format::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{}", job.access.id);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut names = job.prompts.iter().map(|prompt| &prompt.model.name);
        let first = names.next().filter(|first| names.all(|name| name == *first));
        let model = first.or_else(|| server.names.first()).cloned().unwrap_or_default();
        Self { server, job, id, model, created, cached_tokens: 0, completion_tokens: 0 }
    }

    /// Whether the answer is the prompt alone.
    fn is_prompt_alone(&self, choice: usize) -> bool {
        self.job.prompt(choice).asked.max_tokens == Some(0)
    }

    /// How many log-probabilities a token has beside its own, if it has any.
    fn logprobs(&self, choice: usize) -> Option<usize> {
        self.job.prompt(choice).asked.sampling.logprobs
    }

    /// What the next token of a choice adds; `is_first`: with what the prompt adds.
    fn add(&mut self, choice: usize, piece: &Piece, is_first: bool) -> ApiResult<Addition> {
        let mut added = if is_first { self.echo(choice, &piece.prompt)? } else { Addition::default() };
        (added.finish, added.matched, added.cached) = (piece.finish, piece.matched.clone(), piece.cached);
        // Choices of a prompt share it.
        if is_first && choice.is_multiple_of(self.job.choices) {
            self.cached_tokens += piece.cached;
            self.job.access.note().cached_tokens = self.cached_tokens;
        }
        if self.is_prompt_alone(choice) {
            (added.finish, added.matched) = (Some("length"), Value::Null);
            return Ok(added);
        }
        self.completion_tokens += 1;
        self.job.access.note_token(&self.job.prompt(choice).model);
        if let Some(logprobs) = &piece.logprobs {
            self.report(choice, piece.token, piece.place, Some(logprobs), &mut added.logprobs)?;
        }
        added.text.push_str(&piece.text);
        added.tokens.push(piece.token);
        Ok(added)
    }

    /// The prompt, and its log-probabilities, as far as they are asked for.
    fn echo(&self, choice: usize, logprobs: &[(Logprobs, usize)]) -> ApiResult<Addition> {
        let Prompt { tokens, echo, .. } = self.job.prompt(choice);
        let Some(Echo { text, places }) = echo else { return Ok(Addition::default()) };
        let mut added = Addition { text: text.clone(), ..Addition::default() };
        if self.logprobs(choice).is_some() {
            // Nothing comes before the first token.
            let logprobs = std::iter::once(None).chain(logprobs.iter().map(|(logprobs, _)| Some(logprobs)));
            for ((&token, &place), logprobs) in tokens.iter().zip(places).zip(logprobs) {
                self.report(choice, token, place, logprobs, &mut added.logprobs)?;
            }
        }
        Ok(added)
    }

    /// `prompt_logprobs` as vLLM has them: for each token but the first, an object by token id.
    fn prompt_logprobs(&self, choice: usize, logprobs: &[(Logprobs, usize)]) -> ApiResult<Value> {
        let Some(count) = self.job.prompt_logprobs else { return Ok(Value::Null) };
        let mut all = vec![Value::Null];
        for (tokens, (Logprobs { chosen, top }, rank)) in self.job.prompt(choice).tokens.windows(2).zip(logprobs) {
            let [before, token] = [tokens[0], tokens[1]];
            let entry = |token: u32, logprob: f32, rank: usize| -> ApiResult<(String, Value)> {
                let bytes = self.server.tokenizer.bytes(Some(before), token)?;
                let text = String::from_utf8_lossy(&bytes);
                Ok((token.to_string(), json!({ "logprob": logprob, "rank": rank, "decoded_token": text })))
            };
            let mut of_token = Map::from_iter([entry(token, *chosen, *rank)?]);
            for (place, &(other, logprob)) in top.iter().take(count).enumerate() {
                if other != token {
                    let (id, value) = entry(other, logprob, place + 1)?;
                    of_token.insert(id, value);
                }
            }
            all.push(of_token.into());
        }
        Ok(all.into())
    }

    /// Waits for all choices, which run at the same time.
    async fn whole(mut self, choices: Vec<Choice>) -> ApiResult<Response> {
        let mut done = Vec::with_capacity(choices.len());
        let mut prompt_logprobs = Value::Null;
        for mut choice in choices {
            let mut all = Addition::default();
            while all.finish.is_none() {
                let piece = choice.next(&Arc::clone(&self.server)).await?;
                let is_first = all.tokens.is_empty();
                if is_first {
                    prompt_logprobs = self.prompt_logprobs(choice.index, &piece.prompt)?;
                }
                all.extend(self.add(choice.index, &piece, is_first)?);
            }
            if let Some(form) = self.job.native {
                done.push(form.answer(&self.id, self.job.prompt(choice.index), &all));
                continue;
            }
            let logprobs = self.logprobs(choice.index).map(|_| all.logprobs.json(self.job.format));
            let mut whole = match self.job.format {
                Format::Completion => json!({
                    "index": choice.index,
                    "text": all.text,
                    "logprobs": logprobs,
                    "finish_reason": all.finish,
                    "stop_reason": self.stop_reason(&all),
                    "prompt_logprobs": prompt_logprobs.take(),
                    "token_ids": null,
                    "prompt_token_ids": null,
                }),
                Format::Chat => json!({
                    "index": choice.index,
                    "message": { "role": "assistant", "content": all.text },
                    "logprobs": logprobs,
                    "finish_reason": all.finish,
                    "stop_reason": self.stop_reason(&all),
                    "token_ids": null,
                }),
            };
            if self.job.return_token_ids {
                whole["token_ids"] = json!(all.tokens);
                if self.job.format == Format::Completion {
                    whole["prompt_token_ids"] = json!(self.job.prompt(choice.index).tokens);
                }
            }
            done.push(whole);
        }
        if let Some(form) = self.job.native {
            return Ok(form.whole(done).into_response());
        }
        let object = match self.job.format {
            Format::Completion => "text_completion",
            Format::Chat => "chat.completion",
        };
        let mut body = self.envelope(object, done);
        body["usage"] = self.usage();
        if self.job.format == Format::Chat {
            body["prompt_logprobs"] = prompt_logprobs;
            let tokens = self.job.return_token_ids.then(|| &self.job.prompt(0).tokens);
            body["prompt_token_ids"] = json!(tokens);
        }
        Ok(Json(body).into_response())
    }

    /// Sends each token as it comes. Ends, and cancels the choices, when the client goes away.
    async fn stream(mut self, choices: Vec<Choice>, chunks: mpsc::Sender<Result<sse::Event, Infallible>>) {
        let mut left = choices.len();
        // The choices that have had a token.
        let mut begun = vec![false; choices.len()];
        // What they have, if all of it is in each chunk.
        let mut so_far: Vec<Addition> = choices.iter().map(|_| Addition::default()).collect();
        if self.job.format == Format::Chat {
            for choice in &choices {
                let mut chunk = self.chunk(choice.index, Addition::default(), true);
                if self.job.return_token_ids && choice.index == 0 {
                    chunk["prompt_token_ids"] = json!(self.job.prompt(0).tokens);
                }
                if chunks.send(event(&chunk)).await.is_err() {
                    return;
                }
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
                Some((_, Err(error))) => return self.fail(&chunks, &error).await,
                None => return self.fail(&chunks, &ApiError::internal("A choice has ended early.")).await,
            };
            let is_first = !std::mem::replace(&mut begun[index], true);
            let added = match self.add(index, &piece, is_first) {
                Ok(added) => added,
                Err(error) => return self.fail(&chunks, &error).await,
            };
            left -= usize::from(added.finish.is_some());
            if let Some(form) = self.job.native {
                so_far[index].extend(added);
                let chunk = form.chunk(index, form.answer(&self.id, self.job.prompt(index), &so_far[index]));
                if chunks.send(event(&chunk)).await.is_err() {
                    return;
                }
                continue;
            }
            let tokens = self.job.return_token_ids.then(|| json!(added.tokens));
            let mut chunk = self.chunk(index, added, false);
            if let Some(tokens) = tokens {
                chunk["choices"][0]["token_ids"] = tokens;
                if is_first && self.job.format == Format::Completion {
                    chunk["choices"][0]["prompt_token_ids"] = json!(self.job.prompt(index).tokens);
                }
            }
            if chunks.send(event(&chunk)).await.is_err() {
                return;
            }
        }
        if self.job.usage != StreamedUsage::None {
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

    fn chunk(&self, index: usize, added: Addition, has_role: bool) -> Value {
        let stop_reason = self.stop_reason(&added).clone();
        let Addition { text, logprobs, finish, .. } = added;
        let logprobs = self.logprobs(index).filter(|_| !has_role).map(|_| logprobs.json(self.job.format));
        let choice = match self.job.format {
            Format::Completion => {
                json!({
                    "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish,
                    "stop_reason": stop_reason,
                })
            }
            Format::Chat => {
                let delta =
                    if has_role { json!({ "role": "assistant", "content": text }) } else { json!({ "content": text }) };
                json!({
                    "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
                    "stop_reason": stop_reason,
                })
            }
        };
        let mut chunk = self.envelope(self.chunk_object(), vec![choice]);
        match self.job.usage {
            StreamedUsage::None => {}
            StreamedUsage::Last => chunk["usage"] = Value::Null,
            StreamedUsage::Each => chunk["usage"] = self.usage(),
        }
        chunk
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        let Self { id, created, .. } = self;
        json!({ "id": id, "object": object, "created": created, "model": self.model, "choices": choices })
    }

    fn usage(&self) -> Value {
        let (prompt, completion) = (self.job.prompt_tokens(), self.completion_tokens);
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": { "cached_tokens": self.cached_tokens },
        })
    }

    /// Ends a stream with an error.
    async fn fail(&self, chunks: &mpsc::Sender<Result<sse::Event, Infallible>>, error: &ApiError) {
        self.job.access.fail(error.refused());
        // The client may be gone, which ends the stream as well.
        let _ = chunks.send(event(&error.json())).await;
        let _ = chunks.send(Ok(sse::Event::default().data("[DONE]"))).await;
    }

    /// What has ended a text, as vLLM has it: a stop string or a token of `stop_token_ids`, and null for the model's
    /// own.
    fn stop_reason<'a>(&self, added: &'a Addition) -> &'a Value {
        let is_of_model = |token: u64| self.server.eos.iter().any(|eos| u64::from(*eos) == token);
        if added.matched.as_u64().is_some_and(is_of_model) { &Value::Null } else { &added.matched }
    }

    /// Adds a token of a choice to log-probabilities. One that nothing comes before has none.
    fn report(
        &self,
        choice: usize,
        token: u32,
        place: Place,
        logprobs: Option<&Logprobs>,
        to: &mut TokenLogprobs,
    ) -> ApiResult<()> {
        let named = |token, logprob| self.named(place.before, token, logprob);
        let count = self.logprobs(choice).unwrap_or(0);
        let top = logprobs.map(|logprobs| {
            let top = logprobs.top.iter().take(count);
            top.map(|&(token, logprob)| named(token, Some(logprob))).collect::<ApiResult<_>>()
        });
        to.tokens.push(named(token, logprobs.map(|logprobs| logprobs.chosen))?);
        to.places.push(place.at);
        to.top.push(top.transpose()?);
        Ok(())
    }

    /// A token as log-probabilities name it.
    fn named(&self, before: Option<u32>, token: u32, logprob: Option<f32>) -> ApiResult<Named> {
        let bytes = self.server.tokenizer.bytes(before, token)?;
        let text = match self.job.tokens_as_ids {
            true => format!("token_id:{token}"),
            false => String::from_utf8_lossy(&bytes).into_owned(),
        };
        Ok(Named { text, bytes, logprob })
    }
}

/// The log-probabilities of a text's tokens.
#[derive(Debug, Default)]
pub(super) struct TokenLogprobs {
    tokens: Vec<Named>,
    /// The place of each in the text.
    places: Vec<usize>,
    /// The most probable tokens in its place.
    top: Vec<Option<Vec<Named>>>,
}

/// A token with its log-probability.
#[derive(Debug)]
struct Named {
    text: String,
    /// Those of a character may be of several tokens.
    bytes: Vec<u8>,
    logprob: Option<f32>,
}

impl Named {
    fn json(&self) -> Value {
        let Self { text, bytes, logprob } = self;
        json!({ "token": text, "logprob": logprob, "bytes": bytes })
    }
}

impl TokenLogprobs {
    /// The log-probability and the text of each token.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (Option<f32>, &str)> {
        self.tokens.iter().map(|token| (token.logprob, token.text.as_str()))
    }

    fn extend(&mut self, other: Self) {
        self.tokens.extend(other.tokens);
        self.places.extend(other.places);
        self.top.extend(other.top);
    }

    fn json(&self, format: Format) -> Value {
        let Self { tokens, places, top } = self;
        match format {
            Format::Completion => json!({
                "tokens": tokens.iter().map(|token| &token.text).collect::<Vec<_>>(),
                "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
                "text_offset": places,
                "top_logprobs": tokens.iter().zip(top).map(|(token, top)| {
                    // The token itself is among them. Of those that have the same text, it is the one that counts, or
                    // the most probable.
                    let mut all = Map::new();
                    for Named { text, logprob, .. } in std::iter::once(token).chain(top.iter().flatten()) {
                        all.entry(text).or_insert_with(|| json!(logprob));
                    }
                    top.as_ref().map(|_| all)
                }).collect::<Vec<_>>(),
            }),
            Format::Chat => {
                let content = tokens.iter().zip(top).map(|(token, top)| {
                    let mut content = token.json();
                    content["top_logprobs"] = top.iter().flatten().map(Named::json).collect();
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Format, Named, TokenLogprobs};

    /// Of tokens with the same text, the chosen one's value is named, and then the most probable one's.
    #[test]
    fn a_text_has_the_value_of_the_token_that_counts() {
        let named = |text: &str, byte, logprob| Named { text: text.into(), bytes: vec![byte], logprob: Some(logprob) };
        let top = vec![
            named("\u{fffd}", 0xc3, -0.5),
            named("a", b'a', -1.0),
            named("\u{fffd}", 0xe6, -1.5),
            named("b", b'b', -2.0),
            named("b", b'b', -3.0),
        ];
        let logprobs =
            TokenLogprobs { tokens: vec![named("\u{fffd}", 0xe6, -1.5)], places: vec![3], top: vec![Some(top)] };
        assert_eq!(
            logprobs.json(Format::Completion),
            json!({
                "tokens": ["\u{fffd}"], "token_logprobs": [-1.5], "text_offset": [3],
                "top_logprobs": [{ "\u{fffd}": -1.5, "a": -1.0, "b": -2.0 }],
            })
        );
        let of_chat = logprobs.json(Format::Chat)["content"][0].clone();
        assert_eq!((&of_chat["bytes"], &of_chat["top_logprobs"][0]["bytes"]), (&json!([0xe6]), &json!([0xc3])));
    }
}
