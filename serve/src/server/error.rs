//! Errors as the OpenAI API has them.

use std::io;

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::{
    engine::Failure,
    error::{Error, shown},
};

/// An answer that is not a result. Its message is of bounded length, whatever it quotes.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<&'static str>,
}

pub(crate) type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: shown(&message.into()), param: None }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequestError", message)
    }

    /// What vLLM calls the errors of its endpoints for adapters.
    pub(crate) fn invalid_input(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "InvalidUserInput", message)
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFoundError", message)
    }

    pub(crate) fn no_model(name: &str) -> Self {
        Self::not_found(format!("The model `{name}` does not exist.")).of("model")
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized")
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError", message)
    }

    /// A request has had its time.
    pub(crate) fn late() -> Self {
        Self::new(StatusCode::GATEWAY_TIMEOUT, "TimeoutError", "The request took too long.")
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message)
    }

    /// The system's error for a file that a client named.
    pub(crate) fn of_file(error: &io::Error, message: impl Into<String>) -> Self {
        /// No file descriptors are left, to the process or to the system.
        const EXHAUSTED: [Option<i32>; 2] = [Some(24), Some(23)];
        /// Links lead round in a circle.
        const LOOP: Option<i32> = Some(40);

        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::not_found(message),
            io::ErrorKind::PermissionDenied => Self::new(StatusCode::FORBIDDEN, "PermissionDeniedError", message),
            io::ErrorKind::OutOfMemory => Self::unavailable(message),
            _ if EXHAUSTED.contains(&error.raw_os_error()) => Self::unavailable(message),
            _ if error.raw_os_error() == LOOP => Self::bad_request(message),
            // What is in the file, or its name.
            io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::InvalidFilename
            | io::ErrorKind::Other => Self::bad_request(message),
            _ => Self::internal(message),
        }
    }

    /// Any other status, such as those of a request that cannot be read.
    pub(crate) fn with_status(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, if status.is_client_error() { "BadRequestError" } else { "InternalServerError" }, message)
    }

    /// The engine's thread has ended.
    pub(crate) fn ended() -> Self {
        Self::unavailable("The engine has ended.")
    }

    /// Names the parameter at fault.
    #[must_use]
    pub(crate) fn of(self, param: &'static str) -> Self {
        Self { param: Some(param), ..self }
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The body of the answer, and of a stream's last event.
    pub(crate) fn json(&self) -> Value {
        let Self { status, kind, message, param } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": status.as_u16() } })
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::QueueFull { .. } => Self::unavailable(format!("The server is busy: {message}.")),
            Failure::Cache { .. } => Self::bad_request(message),
            Failure::Unloaded => Self::not_found("The adapter was unloaded.").of("model"),
            Failure::Adapter(_) | Failure::Admission(_) | Failure::NotNumbers | Failure::Step(_) => {
                Self::internal(message)
            }
        }
    }
}

impl From<Error> for ApiError {
    /// What the tokenizer cannot do to the model's own tokens.
    fn from(error: Error) -> Self {
        Self::internal(error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        tracing::info!(status = self.status.as_u16(), message = self.message, "refused");
        (self.status, Json(self.json())).into_response()
    }
}
