//! Bodies of requests: JSON of a limited size.

use std::{convert::Infallible, fmt};

use axum::{
    body::Bytes,
    extract::{FromRequest, Request},
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_TYPE, ORIGIN},
    },
};
use serde::{
    Deserialize,
    de::{DeserializeOwned, Error as _, MapAccess, Visitor},
};
use serde_json::{Map, Value};
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
    kind: Kind,
    /// When the request has to be answered.
    pub(crate) deadline: Instant,
}

/// What a body is by its type.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Kind {
    /// Browsers ask the server before they send one from a page of another origin, and are refused.
    Json,
    /// Of no type, or of the one that curl and Python's urllib send unless told another, and from no page: pages name their origin.
    Untold,
    Other,
}

impl Kind {
    fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap_or("not text"));
        let essence = given.map(|given| given.split(';').next().unwrap_or_default().trim().to_ascii_lowercase());
        match essence.as_deref() {
            Some("application/json") => Self::Json,
            None | Some("application/x-www-form-urlencoded") if !headers.contains_key(ORIGIN) => Self::Untold,
            _ => Self::Other,
        }
    }
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
        let kind = Kind::of(request.headers());
        let bytes = if kind == Kind::Other {
            Err(other_type())
        } else {
            match timeout_at(deadline, Bytes::from_request(request, state)).await {
                Ok(bytes) => bytes.map_err(|error| ApiError::with_status(error.status(), error.body_text())),
                Err(_) => Err(ApiError::with_status(StatusCode::REQUEST_TIMEOUT, "The body took too long.")),
            }
        };
        Ok(Self { bytes, kind, deadline })
    }
}

fn other_type() -> ApiError {
    ApiError::with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json.")
}

/// Reads a body as JSON.
fn parse<V: DeserializeOwned>(received: Received) -> ApiResult<V> {
    let bytes = received.bytes?;
    serde_json::from_slice(&bytes).map_err(|error| ApiError::bad_request(format!("The body cannot be read: {error}")))
}

/// An object that has no name twice: of two values of `model`, a gateway may read the other one.
struct Object(Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Map<String, Value>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
                let mut object = Map::new();
                while let Some((name, value)) = members.next_entry()? {
                    if let Some((twice, _)) = object.get_key_value::<String>(&name) {
                        return Err(A::Error::custom(format_args!("`{twice}` is there twice")));
                    }
                    object.insert(name, value);
                }
                Ok(object)
            }
        }

        deserializer.deserialize_map(Members).map(Self)
    }
}

/// Reads a body as an object.
pub(crate) fn parse_object(received: Received) -> ApiResult<Map<String, Value>> {
    parse(received).map(|Object(object)| object)
}

/// Reads a body as JSON, which its type must say.
pub(crate) fn parse_told<V: DeserializeOwned>(received: Received) -> ApiResult<V> {
    if received.kind == Kind::Json { parse(received) } else { Err(other_type()) }
}
