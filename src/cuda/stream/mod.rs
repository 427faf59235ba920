//! Streams: the queues that work is enqueued on, the streams of copies, and what differs while one is captured.

pub(in crate::cuda) mod capturing;
pub(in crate::cuda) mod own_stream;
mod queue;

pub(in crate::cuda) use self::capturing::{Relaxed, free, free_postponed};
pub use self::queue::Queue;
