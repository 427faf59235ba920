//! Pieces of images that a thread writes within other ones.

use std::cell::Cell;

thread_local! {
    /// How many pieces this thread is writing.
    pub(super) static WRITING: Cell<usize> = const { Cell::new(0) };
}

/// A piece that this thread writes. While it waits for rayon's other threads, it may take up another load, which has
/// memory of its own. That one it writes alone, without waiting: otherwise it could take up one load after the other,
/// each within the one before.
pub(super) struct Writing;

impl Writing {
    pub(super) fn begin() -> Self {
        WRITING.set(WRITING.get() + 1);
        Self
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        WRITING.set(WRITING.get() - 1);
    }
}

/// Whether this thread writes a piece within another one.
pub(super) fn is_nested() -> bool {
    WRITING.get() > 1
}
