//! A request from its head to its end: when it came from whom, its id, and what the log and the metrics say of it.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{
    extract::{MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use super::{
    Server, Shared,
    connections::IDLE,
    error::Refused,
    head,
    request::{Model, Prompt},
};

/// The field of a head that names a request, as gateways set it.
const ID: HeaderName = HeaderName::from_static("x-request-id");
/// The longest id that is taken from a client.
const ID_BYTES: usize = 128;
/// What the log says of a request whose client has gone before the end of its answer.
const GONE: u16 = 499;

/// What a connection knows of a request.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    /// When it has to be answered.
    pub(super) deadline: Instant,
    pub(super) peer: IpAddr,
    /// Whether the server is told to end.
    pub(super) ending: watch::Receiver<bool>,
}

impl Arrival {
    /// Waits until the server, which ends, waits no longer for a body that has not come.
    pub(super) async fn is_left(&self) {
        // Without a sender, the server has been dropped.
        let _ = self.ending.clone().wait_for(|is_ending| *is_ending).await;
        sleep(IDLE).await;
    }
}

/// A request. Dropping the last of its owners, the answer's stream among them, logs and counts it.
#[derive(Debug)]
pub(super) struct Access {
    server: Arc<Server>,
    pub(super) arrival: Arrival,
    pub(super) id: String,
    came: Instant,
    method: Method,
    route: Option<MatchedPath>,
    noted: Mutex<Noted>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tokens {
    prompt: usize,
    completion: usize,
}

/// What becomes known of a request. No text of a user is.
#[derive(Debug, Default)]
pub(super) struct Noted {
    /// That of the answer, or that of an error which ended it.
    pub(super) status: Option<u16>,
    refused: Option<Refused>,
    /// Whether it has been submitted.
    is_served: bool,
    /// The tokens of its prompts and answers.
    tokens: Tokens,
    /// Those by adapter.
    adapters: BTreeMap<String, Tokens>,
    pub(super) cached_tokens: usize,
    first: Option<Instant>,
}

impl Access {
    pub(super) fn new(server: Arc<Server>, arrival: Arrival, request: &Request) -> Self {
        Self {
            server,
            arrival,
            id: id_of(request.headers()),
            came: Instant::now(),
            method: request.method().clone(),
            route: request.extensions().get().cloned(),
            noted: Mutex::default(),
        }
    }

    pub(super) fn note(&self) -> MutexGuard<'_, Noted> {
        // It is whole between two changes.
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes note of what is submitted.
    pub(super) fn note_prompts(&self, prompts: &[Prompt]) {
        let mut noted = self.note();
        noted.is_served = true;
        for Prompt { tokens, model, .. } in prompts {
            noted.tokens.prompt += tokens.len();
            for adapter in model.adapter_names() {
                noted.adapters.entry(adapter.to_owned()).or_default().prompt += tokens.len();
            }
        }
    }

    /// Takes note of a token of the answer.
    pub(super) fn note_token(&self, model: &Model) {
        let mut noted = self.note();
        noted.tokens.completion += 1;
        for adapter in model.adapter_names() {
            if let Some(tokens) = noted.adapters.get_mut(adapter) {
                tokens.completion += 1;
            }
        }
        noted.first.get_or_insert_with(Instant::now);
    }

    /// Takes note of an error that ends an answer.
    pub(super) fn fail(&self, refused: Refused) {
        let mut noted = self.note();
        (noted.status, noted.refused) = (Some(refused.status), Some(refused));
    }

    /// Takes note of a client that has gone.
    pub(super) fn leave(&self) {
        self.note().status = Some(GONE);
    }
}

/// The id that a client has given, if it is short and printable, or a new one.
fn id_of(headers: &HeaderMap) -> String {
    let is_id = |id: &&str| (1..=ID_BYTES).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic());
    let given = headers.get(ID).and_then(|given| given.to_str().ok()).filter(is_id);
    given.map_or_else(|| format!("{:032x}", rand::random::<u128>()), str::to_owned)
}

/// Serves a request whose head is in order.
pub(super) async fn enter(State(server): Shared, mut request: Request, next: Next) -> Response {
    let Some(arrival) = request.extensions_mut().remove() else {
        return super::error::ApiError::internal("The request came from nowhere.").into_response();
    };
    let access = Arc::new(Access::new(Arc::clone(&server), arrival, &request));
    request.extensions_mut().insert(Arc::clone(&access));
    let mut response = match head::check(&server.hosts, server.limits.body_bytes, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    match response.extensions_mut().remove::<Refused>() {
        Some(refused) => access.fail(refused),
        None => {
            // A stream may have failed by now.
            access.note().status.get_or_insert(response.status().as_u16());
        }
    }
    response.headers_mut().extend(HeaderValue::from_str(&access.id).ok().map(|id| (ID, id)));
    response
}

impl Drop for Access {
    fn drop(&mut self) {
        let Noted { status, refused, is_served, tokens, adapters, cached_tokens, first } =
            std::mem::take(&mut *self.note());
        let milliseconds = |until: Instant| until.duration_since(self.came).as_secs_f32() * 1000.0;
        for (adapter, tokens) in &adapters {
            self.server.metrics.count_adapter(adapter, tokens.prompt, tokens.completion);
        }
        let names: Vec<&str> = adapters.keys().map(String::as_str).collect();
        let status = status.unwrap_or(GONE);
        macro_rules! log {
            ($level:ident) => {
                tracing::$level!(
                    id = self.id,
                    method = %self.method,
                    route = self.route.as_ref().map(MatchedPath::as_str),
                    status,
                    error = refused.map(|refused| refused.kind),
                    param = refused.and_then(|refused| refused.param),
                    model = is_served.then(|| self.server.names.first().map(String::as_str)).flatten(),
                    adapter = (!names.is_empty()).then(|| names.join(",")),
                    prompt_tokens = is_served.then_some(tokens.prompt),
                    cached_tokens = is_served.then_some(cached_tokens),
                    completion_tokens = is_served.then_some(tokens.completion),
                    first_ms = first.map(milliseconds),
                    ms = milliseconds(Instant::now()),
                    "answered"
                )
            };
        }
        match status {
            500.. => log!(warn),
            // Probes, scrapes and the page ask all the time.
            ..400 if self.method == Method::GET => log!(debug),
            _ => log!(info),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_short_and_printable() {
        let of = |given: &[u8]| {
            let given = HeaderValue::from_bytes(given).expect("a head may have it");
            id_of(&HeaderMap::from_iter([(ID, given)]))
        };
        assert_eq!(of(b"trace-123"), "trace-123");
        assert_eq!(of(&[b'x'; ID_BYTES]).len(), ID_BYTES);
        for other in [&b""[..], b"two words", b"tab\tbed", "\u{e9}".as_bytes(), &[b'x'; ID_BYTES + 1]] {
            let id = of(other);
            assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        }
        assert_ne!(id_of(&HeaderMap::new()), id_of(&HeaderMap::new()));
    }
}
