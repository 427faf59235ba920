//! Errors as the OpenAI API has them.

use std::io;

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::error::{Error, shown};

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

    /// That of an adapter in the list of `lora_path`: what is not found there is no address.
    #[must_use]
    pub(crate) fn of_adapter(self, index: usize) -> Self {
        let message = format!("`lora_path[{index}]`: {}", self.message);
        let error = match self.status {
            StatusCode::NOT_FOUND => Self::bad_request(message),
            _ => Self { message: shown(&message), ..self },
        };
        error.of("lora_path")
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn refused(&self) -> Refused {
        Refused { status: self.status.as_u16(), kind: self.kind, param: self.param }
    }

    /// The body of the answer, and of a stream's last event.
    pub(crate) fn json(&self) -> Value {
        let Self { status, kind, message, param } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": status.as_u16() } })
    }
}

/// What the log says of an error: not its message, which may quote what a user has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) status: u16,
    pub(crate) kind: &'static str,
    pub(crate) param: Option<&'static str>,
}

impl From<Error> for ApiError {
    /// What the tokenizer cannot do to the model's own tokens.
    fn from(error: Error) -> Self {
        Self::internal(error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        let fields: &[_] = match self.status {
            StatusCode::UNAUTHORIZED => &[(header::WWW_AUTHENTICATE, "Bearer")],
            StatusCode::SERVICE_UNAVAILABLE => &[(header::RETRY_AFTER, "1")],
            StatusCode::UNSUPPORTED_MEDIA_TYPE => {
                &[(header::ACCEPT, "application/json"), (header::ACCEPT_ENCODING, "identity")]
            }
            _ => &[],
        };
        let fields = fields.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value)));
        response.headers_mut().extend(fields);
        response.extensions_mut().insert(self.refused());
        response
    }
}
