/// A request that cannot be tracked as asked. Nothing has changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AdmissionError {
    /// A request with this id is waiting or running.
    #[error("a request with this id is waiting or running already")]
    Duplicate,
    /// No request with this id is waiting or running.
    #[error("no request with this id is waiting or running")]
    Unknown,
    /// The request is waiting, so it can neither finish nor be preempted.
    #[error("the request is waiting, not running")]
    NotRunning,
    /// The request has an adapter, and batches have none.
    #[error("the request has an adapter, and a batch has room for none")]
    NoAdapters,
}
