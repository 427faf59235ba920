//! Small endpoints of vLLM and of SGLang, which their clients and routers ask.

use axum::{
    Json, Router,
    extract::State,
    routing::{get, post},
};
use serde_json::{Value, json};

use super::{
    Server, Shared, body,
    error::{ApiError, ApiResult},
    fields::{Fields, On},
    messages, request,
};

/// Those that a key guards.
pub(super) fn routes() -> Router<std::sync::Arc<Server>> {
    let model_info = get(async |State(server): Shared| Json(server.model_info()));
    let server_info = get(server_info);
    Router::new()
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/load", get(load))
        .route("/model_info", model_info.clone())
        .route("/get_model_info", model_info)
        .route("/server_info", server_info.clone())
        .route("/get_server_info", server_info)
}

/// `GET /version`
pub(super) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// `POST /tokenize`, of a `prompt` or of `messages` of any length, as vLLM has it.
async fn tokenize(State(server): Shared, received: body::Received) -> ApiResult<Json<Value>> {
    server.prepare(received, Server::tokenize).await.map(Json)
}

/// `POST /detokenize`, as vLLM has it.
async fn detokenize(State(server): Shared, received: body::Received) -> ApiResult<Json<Value>> {
    server.prepare(received, Server::detokenize).await.map(Json)
}

/// `GET /load`: the requests that run or wait, as vLLM counts them.
async fn load(State(server): Shared) -> ApiResult<Json<Value>> {
    let report = server.engine.report().await.ok_or_else(ApiError::ended)?;
    let state = &report.state;
    Ok(Json(json!({ "server_load": state.running + state.waiting })))
}

/// `GET /server_info`: what SGLang's router asks a replica.
async fn server_info(State(server): Shared) -> ApiResult<Json<Value>> {
    let report = server.engine.report().await.ok_or_else(ApiError::ended)?;
    let state = &report.state;
    let mut info = server.model_info();
    info["status"] = "ready".into();
    info["version"] = env!("CARGO_PKG_VERSION").into();
    info["dp_size"] = 1.into();
    info["max_total_num_tokens"] = (state.blocks * server.block_rows).into();
    info["num_running_reqs"] = state.running.into();
    info["num_waiting_reqs"] = state.waiting.into();
    Ok(Json(info))
}

impl Server {
    /// What SGLang's `/get_model_info` says.
    fn model_info(&self) -> Value {
        json!({
            "model_path": self.model,
            "tokenizer_path": self.model,
            "served_model_name": self.names.first(),
            "is_generation": true,
            "model_type": "qwen3",
            "max_model_len": self.max_positions,
            "vocab_size": self.vocab,
            "eos_token_ids": self.eos,
        })
    }

    fn tokenize(&self, received: body::Received) -> ApiResult<Value> {
        let body = body::parse_object(received)?;
        let mut fields = Fields::new(On::Tokens, body);
        self.resolve_or_find(&self.name_of(fields.take("model")?, None)?)?;
        let shows = fields.is_on("return_token_strs")?;
        let (prompt, messages): (Option<String>, Option<Vec<Value>>) =
            (fields.take("prompt")?, fields.take("messages")?);
        let adds_special: Option<bool> = fields.take("add_special_tokens")?;
        let tokens = match (prompt, messages) {
            (Some(prompt), None) => self.encode(&prompt, adds_special.unwrap_or(true), usize::MAX, "prompt")?,
            (None, Some(messages)) => {
                let options = request::chat_options(&mut fields)?;
                let text = self.template.render(messages::read(messages)?, &options)?;
                self.encode(&text, adds_special.unwrap_or(false), usize::MAX, "messages")?
            }
            _ => return Err(ApiError::bad_request("The request has one of `prompt` and `messages`.")),
        };
        fields.end()?;
        // As the vocabulary spells them.
        let spelled = || tokens.iter().map(|token| self.tokenizer.inner.id_to_token(*token)).collect::<Vec<_>>();
        Ok(json!({
            "count": tokens.len(),
            "max_model_len": self.max_positions,
            "tokens": tokens,
            "token_strs": shows.then(spelled),
        }))
    }

    fn detokenize(&self, received: body::Received) -> ApiResult<Value> {
        let body = body::parse_object(received)?;
        let mut fields = Fields::new(On::Tokens, body);
        self.resolve_or_find(&self.name_of(fields.take("model")?, None)?)?;
        let tokens: Vec<u32> = fields.take("tokens")?.unwrap_or_default();
        fields.end()?;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= self.vocab) {
            return Err(ApiError::bad_request(format!("Token id {token} is out of vocabulary.")).of("tokens"));
        }
        Ok(json!({ "prompt": self.tokenizer.decode(&tokens, false)? }))
    }
}
