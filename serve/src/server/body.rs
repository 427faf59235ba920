//! Bodies of requests: JSON of a limited size.

use std::convert::Infallible;

use axum::{
    body::Bytes,
    extract::{FromRequest, Request},
    http::{HeaderMap, StatusCode, header::CONTENT_TYPE},
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};

use super::{
    connections::Deadline,
    error::{ApiError, ApiResult},
};

/// Bytes of a body that are read, and whose texts are tokenized, in no more than a few milliseconds.
const LONG: usize = 16 << 10;

/// A body, or why it could not be received.
pub(crate) struct Received {
    bytes: ApiResult<Bytes>,
    /// When the request has to be answered.
    pub(crate) deadline: Instant,
}

impl Received {
    /// Whether to read the body takes long.
    pub(crate) fn is_long(&self) -> bool {
        self.bytes.as_ref().is_ok_and(|bytes| bytes.len() > LONG)
    }
}

impl<S: Send + Sync> FromRequest<S> for Received {
    type Rejection = Infallible;

    async fn from_request(request: Request, state: &S) -> Result<Self, Infallible> {
        let deadline = request.extensions().get().map_or_else(Instant::now, |&Deadline(deadline)| deadline);
        let bytes = if is_json(request.headers()) {
            match timeout_at(deadline, Bytes::from_request(request, state)).await {
                Ok(bytes) => bytes.map_err(|error| ApiError::with_status(error.status(), error.body_text())),
                Err(_) => Err(ApiError::with_status(StatusCode::REQUEST_TIMEOUT, "The body took too long.")),
            }
        } else {
            Err(ApiError::with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json."))
        };
        Ok(Self { bytes, deadline })
    }
}

/// Whether a body is JSON by its type. Browsers ask the server before they send one of this type from a page of another origin, and
/// are refused.
fn is_json(headers: &HeaderMap) -> bool {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("application/json")
}

/// Reads a body as JSON.
pub(crate) fn parse<V: DeserializeOwned>(received: Received) -> ApiResult<V> {
    let bytes = received.bytes?;
    serde_json::from_slice(&bytes).map_err(|error| ApiError::bad_request(format!("The body cannot be read: {error}")))
}
