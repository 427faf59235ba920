//! Text of others as errors show it: without control characters, and cut.

use std::fmt;

/// Characters that are shown of the beginning of a long text, and of its end.
const HEAD: usize = 120;
const TAIL: usize = 60;

/// Shows a value on one line: characters that are not printable escaped, and what is long cut in its middle.
pub(super) struct Shown<T>(pub(super) T);

impl<T: fmt::Display> fmt::Display for Shown<T> {
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

/// An error of another library, shown.
pub(super) type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Shows an error of another library, which may quote a whole file.
pub(super) fn cause(source: impl fmt::Display) -> Cause {
    Shown(source).to_string().into()
}
