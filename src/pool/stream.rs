/// A compute stream of a pool: one that steps are enqueued on. Streams of other pools are unrelated.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct StreamId(pub(crate) usize);

impl StreamId {
    /// The stream that the pool was created on.
    pub const FIRST: Self = Self(0);
}
