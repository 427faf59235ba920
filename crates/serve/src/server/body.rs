//! Bodies of requests: JSON of a limited size.

use std::{fmt, sync::Arc};

use axum::{
    body::Body,
    extract::{FromRequest, Request},
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_ENCODING, CONTENT_TYPE, ORIGIN},
    },
};
use serde::{
    Deserialize,
    de::{DeserializeOwned, Error as _, MapAccess, Visitor},
};
use serde_json::{Map, Value, error::Category};
use tokio::time::timeout_at;
use tokio_stream::StreamExt as _;

use super::{
    Server,
    access::Access,
    error::{ApiError, ApiResult},
    head, key_of,
    turns::Client,
};

/// Bytes of a body that are read, and whose texts are tokenized, in no more than a few milliseconds.
const LONG: usize = 16 << 10;

/// Bytes of a body that is too long which are read beside those of the limit, so that its client gets to read the
/// answer.
const DISCARDED: usize = 16 << 20;

/// A body.
pub(crate) struct Received {
    bytes: Vec<u8>,
    kind: Kind,
    pub(super) access: Arc<Access>,
    pub(super) client: Client,
}

/// What a body is by its type.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Kind {
    /// Browsers ask the server before they send one from a page of another origin, and are refused.
    Json,
    /// Of no type, or of the one that curl and Python's urllib send unless told another, and from no page: pages name
    /// their origin.
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
    /// How many bytes there are to read, if to read them takes long.
    pub(crate) fn long(&self) -> Option<usize> {
        Some(self.bytes.len()).filter(|bytes| *bytes > LONG)
    }
}

impl FromRequest<Arc<Server>> for Received {
    type Rejection = ApiError;

    async fn from_request(mut request: Request, server: &Arc<Server>) -> ApiResult<Self> {
        let headers = request.headers();
        let kind = Kind::of(headers);
        if kind == Kind::Other {
            return Err(other_type());
        }
        if head::codings(headers, CONTENT_ENCODING).iter().any(|coding| coding != "identity") {
            let message = "The body must have no Content-Encoding.";
            return Err(ApiError::with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let limit = server.limits.body_bytes;
        let key = key_of(headers).to_owned();
        let access: Option<Arc<Access>> = request.extensions_mut().remove();
        let access = access.ok_or_else(|| ApiError::internal("The request came from nowhere."))?;
        let arrival = &access.arrival;
        let client = if server.api_keys.is_empty() { Client::Address(arrival.peer) } else { Client::Key(key) };
        let received = tokio::select! {
            received = timeout_at(arrival.deadline, read(request.into_body(), limit)) => received,
            () = arrival.is_left() => return Err(ApiError::unavailable("The server ends.")),
        };
        let bytes = match received {
            Ok(Ok(Some(bytes))) => bytes,
            Ok(Ok(None)) => return Err(head::too_long(limit)),
            Ok(Err(_)) => return Err(ApiError::bad_request("The body has not arrived.")),
            Err(_) => return Err(ApiError::with_status(StatusCode::REQUEST_TIMEOUT, "The body took too long.")),
        };
        Ok(Self { bytes, kind, access, client })
    }
}

/// Reads a body; `None` if it is longer than the limit.
async fn read(body: Body, limit: usize) -> Result<Option<Vec<u8>>, axum::Error> {
    let (mut parts, mut bytes, mut length) = (body.into_data_stream(), Vec::new(), 0);
    while let Some(part) = parts.next().await {
        let part = part?;
        length += part.len();
        if length <= limit {
            bytes.extend_from_slice(&part);
        } else if length > limit + DISCARDED {
            break;
        } else {
            bytes = Vec::new();
        }
    }
    Ok((length <= limit).then_some(bytes))
}

fn other_type() -> ApiError {
    ApiError::with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json.")
}

/// Reads a body as JSON.
fn parse<V: DeserializeOwned>(received: Received) -> ApiResult<V> {
    serde_json::from_slice(&received.bytes).map_err(|error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        ApiError::bad_request(match error.classify() {
            Category::Data => format!("The body cannot be read: {error}."),
            Category::Eof => format!("The body is not JSON: it ends early, at {place}."),
            Category::Io | Category::Syntax => format!("The body is not JSON: {place} is unexpected."),
        })
    })
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
