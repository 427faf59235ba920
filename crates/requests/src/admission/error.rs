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
    /// The request's adapter would not even fit into an empty batch.
    #[error(
        "an adapter of {bytes} bytes never fits into a batch of up to {max_adapters} adapters and {max_bytes} bytes"
    )]
    NeverFits {
        /// Size of the adapter, in bytes.
        bytes: usize,
        /// Most adapters of a batch.
        max_adapters: usize,
        /// Most bytes of a batch's adapters.
        max_bytes: usize,
    },
    /// Another request of the same adapter gives it another size.
    #[error("the adapter has {bytes} bytes here, but {known} bytes in another request")]
    Bytes {
        /// Size of the adapter in this request, in bytes.
        bytes: usize,
        /// Its size in the other requests.
        known: usize,
    },
}
