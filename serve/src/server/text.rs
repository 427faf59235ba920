//! The text of tokens as they are chosen, up to a stop string.

use tokenizers::step_decode_stream;

use crate::{
    error::{Context, Error, Result},
    tokenizer::{Tokenizer, guarded},
};

/// The text of one request.
///
/// Text that may be the beginning of a stop string is held back until it is known. So is a character whose bytes are not complete.
#[derive(Debug)]
pub(crate) struct Text {
    stop: Vec<String>,
    /// Decoded, but held back.
    held: String,
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
}

/// What a token adds to a text.
#[derive(Debug, Eq, PartialEq)]
pub(crate) struct Added {
    pub(crate) text: String,
    /// Whether a stop string came behind it, which ends the text.
    pub(crate) is_stopped: bool,
}

impl Text {
    /// An empty text that ends before any of these strings, none of which is empty.
    pub(crate) fn new(stop: Vec<String>) -> Self {
        Self { stop, held: String::new(), ids: Vec::new(), prefix: String::new(), prefix_index: 0 }
    }

    /// Adds a token.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<Added> {
        let Self { ids, prefix, prefix_index, .. } = self;
        let decoded = guarded(|| {
            step_decode_stream(&tokenizer.inner, vec![token], true, ids, prefix, prefix_index)
                .map_err(|error| Error::new(error.to_string()))
        });
        self.held.push_str(&decoded.context("tokenizer.json")?.unwrap_or_default());
        Ok(self.release())
    }

    /// Ends the text: what was held back, and what incomplete characters are shown as.
    pub(crate) fn end(&mut self, tokenizer: &Tokenizer) -> Result<Added> {
        let all = tokenizer.decode(&self.ids)?;
        self.held.push_str(all.strip_prefix(&self.prefix).unwrap_or_default());
        let mut added = self.release();
        if !added.is_stopped {
            added.text.push_str(&self.held);
        }
        Ok(added)
    }

    /// Releases what no stop string can begin in.
    fn release(&mut self) -> Added {
        let stops = self.stop.iter().filter_map(|stop| self.held.find(stop));
        if let Some(at) = stops.min() {
            self.held.truncate(at);
            return Added { text: std::mem::take(&mut self.held), is_stopped: true };
        }
        let may_begin = |at: &usize| self.stop.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let keep = (0..self.held.len()).find(|at| self.held.is_char_boundary(*at) && may_begin(at));
        let kept = self.held.split_off(keep.unwrap_or(self.held.len()));
        Added { text: std::mem::replace(&mut self.held, kept), is_stopped: false }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Added, Text};
    use crate::tokenizer::Tokenizer;

    fn tokenizer() -> Tokenizer {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
        Tokenizer::read(&model).expect("the fixture is whole").expect("the fixture has one")
    }

    /// The pieces of a text whose tokens arrive one by one, and whether a stop string ended it.
    fn pieces(text: &str, stop: &[&str]) -> (Vec<String>, bool) {
        let tokenizer = tokenizer();
        let mut stream = Text::new(stop.iter().map(|stop| (*stop).into()).collect());
        let mut pieces = Vec::new();
        for token in tokenizer.encode(text, 512).expect("the text is short") {
            let Added { text, is_stopped } = stream.push(&tokenizer, token).expect("it decodes");
            pieces.push(text);
            if is_stopped {
                return (pieces, true);
            }
        }
        let Added { text, is_stopped } = stream.end(&tokenizer).expect("it decodes");
        pieces.push(text);
        (pieces, is_stopped)
    }

    #[test]
    fn pieces_add_up_to_the_text() {
        for text in ["What is the password?", "naïve café — 日本語 🦀!", "", " leading and trailing "] {
            let (pieces, is_stopped) = pieces(text, &[]);
            assert_eq!((pieces.concat().as_str(), is_stopped), (text, false));
            assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        }
    }

    #[test]
    fn a_text_ends_before_its_first_stop_string() {
        let stopped = |text, stop: &[&str]| {
            let (pieces, is_stopped) = pieces(text, stop);
            (pieces.concat(), is_stopped)
        };
        assert_eq!(stopped("one two three four", &["three"]), ("one two ".into(), true));
        assert_eq!(stopped("one two three four", &["four", "wo t"]), ("one t".into(), true));
        assert_eq!(stopped("one two three", &["three four"]), ("one two three".into(), false));
        assert_eq!(stopped("aaab", &["aab"]), ("a".into(), true));
        assert_eq!(stopped("日本語", &["本"]), ("日".into(), true));
        assert_eq!(stopped("one", &["one"]), (String::new(), true));
    }

    #[test]
    fn nothing_is_released_that_a_stop_string_may_begin_with() {
        let (pieces, _) = pieces("one two three four", &["two three five"]);
        assert!(pieces.iter().all(|piece| !piece.starts_with(" two") || piece.contains("four")), "{pieces:?}");
        assert_eq!(pieces.concat(), "one two three four");
    }

    /// A token that is half of a character.
    #[test]
    fn a_character_is_shown_once_it_is_whole() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("é", 512).expect("the text is short");
        assert_eq!(tokens.len(), 2);
        let mut text = Text::new(Vec::new());
        assert_eq!(text.push(&tokenizer, tokens[0]).expect("it decodes").text, "");
        assert_eq!(text.end(&tokenizer).expect("it decodes").text, "\u{fffd}");
    }
}
