//! What the engine is asked, and what it answers.

use std::sync::Arc;

use aril::pool::AdapterId;
use aril_requests::admission::AdmissionError;
use tokio::sync::mpsc::UnboundedSender;

use crate::sampling::{Chosen, Logprobs, Sampling};

/// A prompt to continue.
#[derive(Clone, Debug)]
pub struct Request {
    /// The version of the adapter that its tokens are computed with: all of them, or those from the adapter's
    /// invocation in the prompt on; `None` for the base model.
    pub adapter: Option<AdapterId>,
    /// At least one token of the vocabulary.
    pub prompt: Vec<u32>,
    /// At least 1. With the prompt, not more than the engine's longest sequence.
    pub max_tokens: usize,
    /// Tokens that end the text.
    pub stop_tokens: Vec<u32>,
    /// Log-probabilities to report of each token of the prompt but the first, and of this many of the most probable
    /// ones in its place.
    pub prompt_logprobs: Option<usize>,
    /// How its tokens are chosen.
    pub sampling: Sampling,
}

/// The order of submission.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct RequestId(pub(crate) u64);

/// Where a request's events go. A receiver that is gone does not end the request: its client cancels it.
pub type Events = UnboundedSender<Event>;

/// What has happened to a request.
#[derive(Debug)]
pub enum Event {
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
pub enum Finish {
    /// The last token ends the text.
    Stop,
    /// It has as many tokens as it asked for.
    Length,
}

/// Why a request has no result.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// There is no room in the queue.
    #[error("{waiting} requests are waiting, which are the most")]
    QueueFull {
        /// Those that wait.
        waiting: usize,
    },
    /// The cache is too small for it.
    #[error("{tokens} tokens do not fit into the cache, which has room for {room}")]
    Cache {
        /// Of its prompt and its answer.
        tokens: usize,
        /// Tokens of the whole cache.
        room: usize,
    },
    /// Its adapter is not there any more.
    #[error("the adapter was unloaded")]
    Unloaded,
    /// Its adapter cannot be loaded, for this reason.
    #[error("the adapter could not be loaded: {0}; its files must be as they were, or it has to be loaded anew")]
    Adapter(Arc<str>),
    /// It cannot be admitted.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// A logit is not a number.
    #[error("the logits are not numbers")]
    NotNumbers,
    /// Its step failed, for this reason.
    #[error("the step failed: {0}")]
    Step(Arc<str>),
}
