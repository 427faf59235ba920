//! Untrusted text in error messages: escaped and shortened.

use std::fmt;

/// Characters kept at the beginning and at the end of a long text.
const HEAD: usize = 120;
const TAIL: usize = 60;

/// Displays a value that came from a file or a request, such as a name in a log, on one line. Unprintable characters
/// are escaped, and the middle of a long text is omitted.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<T>(
    /// The value.
    pub T,
);

impl<T: fmt::Display> fmt::Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.0.to_string();
        let chars = text.chars().count();
        if chars <= HEAD + TAIL {
            return write_escaped(f, text.chars());
        }
        write_escaped(f, text.chars().take(HEAD))?;
        f.write_str(" … ")?;
        write_escaped(f, text.chars().skip(chars - TAIL))
    }
}

fn write_escaped(f: &mut fmt::Formatter<'_>, mut chars: impl Iterator<Item = char>) -> fmt::Result {
    chars.try_for_each(|char| match char {
        '\'' | '"' | '\\' => write!(f, "{char}"),
        _ => write!(f, "{}", char.escape_debug()),
    })
}
