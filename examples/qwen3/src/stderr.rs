//! What a run says on standard error.

use std::io::{self, Write as _};

use crate::error::shown;

/// Says something, if standard error takes it.
pub fn say(text: &str) {
    // There is nobody left to be told that it does not.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Says how far the loading of an adapter is, if it is large.
pub fn progress(adapter: &str, bytes: usize) -> impl FnMut(usize) {
    const LARGE: usize = 256 << 20;
    let mut tenths = 0;
    move |done| {
        if bytes >= LARGE && done * 10 / bytes > tenths {
            tenths = done * 10 / bytes;
            say(&format!("adapter `{}`: {} of {} MiB\n", shown(adapter), done >> 20, bytes >> 20));
        }
    }
}
