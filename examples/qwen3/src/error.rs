//! Errors: one sentence for the user that names the file, field, tensor or request.
//!
//! Invariant: the sentence is one short line without control characters, whatever it quotes of a file or an argument.

use std::{error, fmt, result};

/// The characters shown of a sentence's beginning, and of its end.
const HEAD: usize = 600;
const TAIL: usize = 300;

/// A sentence that names the cause. Not a [`std::error::Error`], so that any error converts to it.
#[derive(Debug)]
pub struct Error(String);

/// A result whose error is a sentence.
pub type Result<T> = result::Result<T, Error>;

impl Error {
    /// An error of this sentence, which is escaped and shortened.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self(shown(&sentence.into()))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: error::Error> From<E> for Error {
    fn from(error: E) -> Self {
        let mut sentence = shown(&error.to_string());
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = shown(&cause.to_string());
            if !sentence.contains(&cause_text) {
                sentence = format!("{sentence}: {cause_text}");
            }
            source = cause.source();
        }
        Self::new(sentence)
    }
}

/// Adds the subject of an error.
pub trait Context<T> {
    /// Puts the subject in front of the error's sentence.
    ///
    /// # Errors
    ///
    /// The same error behind its subject.
    fn context(self, subject: impl fmt::Display) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for result::Result<T, E> {
    fn context(self, subject: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Error::new(format!("{subject}: {}", error.into())))
    }
}

/// A text on one line, with unprintable characters escaped and the middle of a long text left out.
pub fn shown(text: &str) -> String {
    let escape = |char: char| match char {
        '\'' | '"' | '\\' => char.to_string(),
        _ => char.escape_debug().to_string(),
    };
    let chars = text.chars().count();
    if chars <= HEAD + TAIL {
        return text.chars().map(escape).collect();
    }
    let (head, tail) = (text.chars().take(HEAD), text.chars().skip(chars - TAIL));
    head.map(escape).chain([" … ".to_owned()]).chain(tail.map(escape)).collect()
}

/// Returns early with a sentence.
#[macro_export]
macro_rules! bail {
    ($($sentence:tt)*) => {
        return Err($crate::error::Error::new(format!($($sentence)*)))
    };
}

pub use crate::bail;
