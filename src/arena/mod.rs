//! Who has which part of a memory, and until when, without the memory itself.

pub(crate) mod blocks;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod copies;
