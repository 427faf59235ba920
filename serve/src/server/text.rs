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
    end: End,
    /// Tokens that have been added.
    tokens: usize,
    /// Decoded, but held back.
    held: String,
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
    /// The string that has ended the text.
    stopped_by: Option<String>,
}

/// How a text ends, and what it shows.
#[derive(Clone, Debug, Default)]
pub(crate) struct End {
    /// The text ends before any of these strings, none of which is empty.
    pub(crate) stop: Vec<String>,
    /// The text ends behind the string instead, and has the token that ends it.
    pub(crate) includes_stop: bool,
    /// The string is not looked for in so many tokens.
    pub(crate) min_tokens: usize,
    /// The text has the special tokens.
    pub(crate) shows_special: bool,
}

/// What a token adds to a text.
#[derive(Debug, Default, Eq, PartialEq)]
pub(crate) struct Added {
    pub(crate) text: String,
    /// Whether a stop string came behind it, which ends the text.
    pub(crate) is_stopped: bool,
}

impl Text {
    pub(crate) fn new(end: End) -> Self {
        Self {
            end,
            tokens: 0,
            held: String::new(),
            ids: Vec::new(),
            prefix: String::new(),
            prefix_index: 0,
            stopped_by: None,
        }
    }

    /// The stop string that has ended the text.
    pub(crate) fn stopped_by(&self) -> Option<&str> {
        self.stopped_by.as_deref()
    }

    /// Adds the token that ends the text, which is shown only beside stop strings. A step that is no text's end has [`push`](Self::push).
    pub(crate) fn push_last(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<Added> {
        if self.end.includes_stop { self.push(tokenizer, token) } else { Ok(Added::default()) }
    }

    /// Adds a token.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<Added> {
        self.tokens += 1;
        let Self { end, ids, prefix, prefix_index, .. } = self;
        let decoded = guarded(|| {
            step_decode_stream(&tokenizer.inner, vec![token], !end.shows_special, ids, prefix, prefix_index)
                .map_err(|error| Error::new(error.to_string()))
        });
        self.held.push_str(&decoded.context("tokenizer.json")?.unwrap_or_default());
        Ok(self.release())
    }

    /// Ends the text: what was held back, and what incomplete characters are shown as.
    pub(crate) fn end(&mut self, tokenizer: &Tokenizer) -> Result<Added> {
        let all = tokenizer.decode(&self.ids, !self.end.shows_special)?;
        self.held.push_str(all.strip_prefix(&self.prefix).unwrap_or_default());
        let mut added = self.release();
        if !added.is_stopped {
            added.text.push_str(&self.held);
        }
        Ok(added)
    }

    /// Releases what no stop string can begin in.
    fn release(&mut self) -> Added {
        if self.tokens <= self.end.min_tokens {
            return Added { text: std::mem::take(&mut self.held), is_stopped: false };
        }
        let stops = self.end.stop.iter().filter_map(|stop| Some((self.held.find(stop)?, stop)));
        if let Some((at, stop)) = stops.min_by_key(|(at, _)| *at) {
            self.held.truncate(if self.end.includes_stop { at + stop.len() } else { at });
            self.stopped_by = Some(stop.clone());
            return Added { text: std::mem::take(&mut self.held), is_stopped: true };
        }
        let may_begin = |at: &usize| self.end.stop.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let keep = (0..self.held.len()).find(|at| self.held.is_char_boundary(*at) && may_begin(at));
        let kept = self.held.split_off(keep.unwrap_or(self.held.len()));
        Added { text: std::mem::replace(&mut self.held, kept), is_stopped: false }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Added, End, Text};
    use crate::tokenizer::Tokenizer;

    fn tokenizer() -> Tokenizer {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/qwen3");
        Tokenizer::read(&model).expect("the fixture is whole").expect("the fixture has one")
    }

    /// The pieces of a text whose tokens arrive one by one, and whether a stop string ended it.
    fn pieces(text: &str, stop: &[&str]) -> (Vec<String>, bool) {
        pieces_up_to(text, stop, End::default())
    }

    fn pieces_up_to(text: &str, stop: &[&str], end: End) -> (Vec<String>, bool) {
        let tokenizer = tokenizer();
        let mut stream = Text::new(End { stop: stop.iter().map(|stop| (*stop).into()).collect(), ..end });
        let mut pieces = Vec::new();
        for token in tokenizer.encode(text, false, 512).expect("the text is short") {
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
        // The first in the text of those that one token completes, not the first of the list.
        assert_eq!(stopped("the password", &["word", "pass"]), ("the ".into(), true));
    }

    #[test]
    fn a_text_may_have_the_string_that_ends_it() {
        let ended = |stop: &[&str], end: End| {
            let (pieces, is_stopped) = pieces_up_to("one two three four", stop, end);
            (pieces.concat(), is_stopped)
        };
        let including = End { includes_stop: true, ..End::default() };
        assert_eq!(ended(&["wo t"], including.clone()), ("one two t".into(), true));
        assert_eq!(ended(&["five"], including), ("one two three four".into(), false));
        // A string within the first tokens is none that ends the text.
        let tokens = tokenizer().encode("one two", false, 512).expect("the text is short").len();
        let late = |min_tokens| End { min_tokens, ..End::default() };
        assert_eq!(ended(&["two"], late(tokens)), ("one two three four".into(), false));
        assert_eq!(ended(&["two", "three"], late(tokens)), ("one two ".into(), true));
        // Nor is the last of them.
        assert_eq!(ended(&["wo"], late(tokens)), ("one two three four".into(), false));
        assert_eq!(ended(&["wo"], late(tokens - 1)), ("one t".into(), true));
        // " t" is the third token, and "wo" the fourth.
        assert_eq!(ended(&["two"], late(2)), ("one ".into(), true));
    }

    #[test]
    fn the_token_that_ends_a_text_is_not_in_it() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("one two", false, 512).expect("the text is short");
        let (&last, first) = tokens.split_last().expect("there are tokens");
        let read = |end: End, last: u32| {
            let mut text = Text::new(end);
            let mut read = String::new();
            for token in first {
                read += &text.push(&tokenizer, *token).expect("it decodes").text;
            }
            read += &text.push_last(&tokenizer, last).expect("it decodes").text;
            read + &text.end(&tokenizer).expect("it decodes").text
        };
        let eos = tokenizer.inner.token_to_id("<|endoftext|>").expect("the fixture has it");
        let including = End { includes_stop: true, ..End::default() };
        let without = read(End::default(), eos);
        assert_eq!(read(End::default(), last), without);
        assert!("one two".starts_with(&without) && without.len() < 7, "{without}");
        assert_eq!((read(including.clone(), last), read(including.clone(), eos)), ("one two".into(), without));
        let showing = End { shows_special: true, ..including };
        assert!(read(showing, eos).ends_with("<|endoftext|>"));
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
        let tokens = tokenizer.encode("é", false, 512).expect("the text is short");
        assert_eq!(tokens.len(), 2);
        let mut text = Text::new(End::default());
        assert_eq!(text.push(&tokenizer, tokens[0]).expect("it decodes").text, "");
        assert_eq!(text.end(&tokenizer).expect("it decodes").text, "\u{fffd}");
    }
}
