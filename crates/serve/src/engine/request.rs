//! What the engine is asked, and what it answers.

use std::sync::Arc;

use aril::pool::AdapterId;
use aril_requests::admission::AdmissionError;
use tokio::sync::mpsc::UnboundedSender;

use super::sampling::{Chosen, Logprobs, Sampling};

/// A prompt to continue.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// The version of the adapter that all of its tokens are computed with; `None` for the base model.
    pub(crate) adapter: Option<AdapterId>,
    /// At least one token of the vocabulary.
    pub(crate) prompt: Vec<u32>,
    /// At least 1. With the prompt, not more than the engine's longest sequence.
    pub(crate) max_tokens: usize,
    /// Tokens that end the text.
    pub(crate) stop_tokens: Vec<u32>,
    /// Log-probabilities to report of each token of the prompt but the first, and of this many of the most probable ones in its place.
    pub(crate) prompt_logprobs: Option<usize>,
    pub(crate) sampling: Sampling,
}

/// The order of submission.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct RequestId(pub(crate) u64);

/// Where a request's events go. A receiver that is gone does not end the request: its client cancels it.
pub(crate) type Events = UnboundedSender<Event>;

/// What has happened to a request.
#[derive(Debug)]
pub(crate) enum Event {
    /// It begins to run, for the first time or again; the cache has the keys and values of so many of its tokens.
    Started(usize),
    /// The log-probabilities of the next token of its prompt, and how many tokens are at least as probable.
    Prompt(Logprobs, usize),
    /// Its next token, and why it is the last one.
    Token(Chosen, Option<Finish>),
    /// It ended without a result.
    Failed(Failure),
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Finish {
    /// The last token ends the text.
    Stop,
    /// It has as many tokens as it asked for.
    Length,
}

/// Why a request has no result.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{waiting} requests are waiting, which are the most")]
    QueueFull { waiting: usize },
    #[error("{tokens} tokens do not fit into the cache, which has room for {room}")]
    Cache { tokens: usize, room: usize },
    #[error("the adapter was unloaded")]
    Unloaded,
    #[error("the adapter could not be loaded: {0}; its files must be as they were, or it has to be loaded anew")]
    Adapter(Arc<str>),
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    #[error("the logits are not numbers")]
    NotNumbers,
    #[error("the step failed: {0}")]
    Step(Arc<str>),
}
