//! What went wrong, as a sentence for the user: whoever can name the file, field, tensor or request does so.

use std::{error, fmt, result};

/// A sentence that names what is at fault. Not a [`std::error::Error`], so that it can be made of any.
#[derive(Debug)]
pub(crate) struct Error(String);

pub(crate) type Result<T> = result::Result<T, Error>;

impl Error {
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self(sentence.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: error::Error> From<E> for Error {
    fn from(error: E) -> Self {
        let mut sentence = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            if !sentence.contains(&cause_text) {
                sentence = format!("{sentence}: {cause_text}");
            }
            source = cause.source();
        }
        Self(sentence)
    }
}

/// Says what an error is about.
pub(crate) trait Context<T> {
    fn context(self, subject: impl fmt::Display) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for result::Result<T, E> {
    fn context(self, subject: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Error(format!("{subject}: {}", error.into())))
    }
}

/// Returns early with a sentence.
macro_rules! bail {
    ($($sentence:tt)*) => {
        return Err($crate::error::Error::new(format!($($sentence)*)))
    };
}

pub(crate) use bail;
