//! Bodies of requests: JSON of a limited size, and nothing in it that would be ignored.

use axum::{
    body::Bytes,
    extract::{FromRequest, Request, rejection::BytesRejection},
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::{ApiError, ApiResult};

/// A body, or why it could not be received.
pub(crate) struct Received(Result<Bytes, BytesRejection>);

impl<S: Send + Sync> FromRequest<S> for Received {
    type Rejection = std::convert::Infallible;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        Ok(Self(Bytes::from_request(request, state).await))
    }
}

/// Reads a body as JSON.
pub(crate) fn parse<V: DeserializeOwned>(Received(bytes): Received) -> ApiResult<V> {
    let bytes = bytes.map_err(|error| ApiError::with_status(error.status(), error.body_text()))?;
    serde_json::from_slice(&bytes).map_err(|error| ApiError::bad_request(format!("The body cannot be read: {error}")))
}

/// Refuses fields that are not implemented, unless they have the value that changes nothing.
pub(crate) fn refuse_rest(rest: &Map<String, Value>) -> ApiResult<()> {
    for (field, value) in rest {
        let is_neutral = match field.as_str() {
            "user" | "metadata" | "request_id" | "service_tier" | "parallel_tool_calls" | "safety_identifier" => true,
            "frequency_penalty" | "presence_penalty" | "min_p" | "min_tokens" => value.as_f64() == Some(0.0),
            "repetition_penalty" | "best_of" => value.as_f64() == Some(1.0),
            "logit_bias" => value.as_object().is_some_and(Map::is_empty),
            "tools" => value.as_array().is_some_and(Vec::is_empty),
            "tool_choice" => value == "none",
            "response_format" => value["type"] == "text",
            "store" | "use_beam_search" | "include_stop_str_in_output" => value == false,
            "skip_special_tokens" | "add_generation_prompt" => value == true,
            _ => false,
        };
        if !value.is_null() && !is_neutral {
            return Err(ApiError::bad_request(format!("`{field}` = {value} is not implemented.")));
        }
    }
    Ok(())
}
