//! The text of tokens as they are chosen, up to a stop string.

use std::iter;

use crate::{error::Result, tokenizer::Tokenizer};

/// The most bytes of a character.
const MAX_BYTES: usize = 4;

/// The text of tokens, one after the other, in whole characters.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    shows_special: bool,
    /// The last token that has a text.
    before: Option<u32>,
    /// The beginning of a character.
    bytes: Vec<u8>,
    /// The characters up to here.
    len: usize,
}

/// Where a token is in a text.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Place {
    /// The token before it that has a text.
    pub(crate) before: Option<u32>,
    /// The characters before it.
    pub(crate) at: usize,
}

impl Decoder {
    /// At the beginning of a text, which shows special tokens or does not.
    pub(crate) fn new(shows_special: bool) -> Self {
        Self { shows_special, ..Self::default() }
    }

    /// Behind these tokens, of whose text `len` characters count. A character that they begin is part of the text
    /// behind them.
    fn behind(tokens: &[u32], len: usize, shows_special: bool, tokenizer: &Tokenizer) -> Result<Self> {
        let is_shown = |index: &usize| tokenizer.is_shown(tokens[*index], shows_special);
        let first = (0..tokens.len()).rev().filter(is_shown).take(MAX_BYTES).last().unwrap_or(tokens.len());
        let mut decoder = Self::new(shows_special);
        for &token in &tokens[first..] {
            decoder.push(tokenizer, token)?;
        }
        Ok(Self { len, ..decoder })
    }

    /// Where the next token is, if it does not go on with a character.
    fn place(&self) -> Place {
        Place { before: self.before, at: self.len }
    }

    /// Adds a token. Returns where it is, and the characters that are whole with it.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<(Place, String)> {
        if !tokenizer.is_shown(token, self.shows_special) {
            return Ok((self.place(), String::new()));
        }
        let bytes = tokenizer.bytes(self.before, token)?;
        let goes_on = bytes.first().is_none_or(|first| first & 0xc0 == 0x80);
        let mut text = if goes_on { String::new() } else { self.end(tokenizer) };
        let place = self.place();
        self.before = Some(token);
        self.bytes.extend(bytes);
        text += &self.take(tokenizer, false);
        Ok((place, text))
    }

    /// What an incomplete character is shown as.
    pub(crate) fn end(&mut self, tokenizer: &Tokenizer) -> String {
        self.take(tokenizer, true)
    }

    /// Takes the whole characters, and at the end all that is left.
    fn take(&mut self, tokenizer: &Tokenizer, is_end: bool) -> String {
        let (mut text, mut kept) = (String::new(), 0);
        let mut chunks = self.bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            let may_go_on = || str::from_utf8(invalid).is_err_and(|error| error.error_len().is_none());
            if !is_end && chunks.peek().is_none() && may_go_on() {
                kept = invalid.len();
            } else if !invalid.is_empty() {
                text.extend(iter::repeat_n('\u{fffd}', tokenizer.num_replacements(invalid.len())));
            }
        }
        self.bytes.drain(..self.bytes.len() - kept);
        self.len += text.chars().count();
        text
    }
}

/// The text of an answer.
///
/// Text that may be the beginning of a stop string is held back until it is known. So is a character whose bytes are
/// not complete.
#[derive(Debug)]
pub(crate) struct Text {
    end: End,
    decoder: Decoder,
    /// Tokens that have been added.
    tokens: usize,
    /// Decoded, but held back.
    held: String,
    /// As much of it is of the first tokens, in which no stop string may end.
    exempt: usize,
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
    /// A string that ends within so many tokens is none of them.
    pub(crate) min_tokens: usize,
    /// The text has the special tokens.
    pub(crate) shows_special: bool,
}

/// What a token adds to a text.
#[derive(Debug, Default, Eq, PartialEq)]
pub(crate) struct Added {
    pub(crate) place: Place,
    pub(crate) text: String,
    /// Whether a stop string came behind it, which ends the text.
    pub(crate) is_stopped: bool,
}

impl Text {
    /// The text that goes on behind a prompt, of whose text `len` characters count.
    pub(crate) fn behind(prompt: &[u32], len: usize, end: End, tokenizer: &Tokenizer) -> Result<Self> {
        let decoder = Decoder::behind(prompt, len, end.shows_special, tokenizer)?;
        Ok(Self { end, decoder, tokens: 0, held: String::new(), exempt: 0, stopped_by: None })
    }

    /// The stop string that has ended the text.
    pub(crate) fn stopped_by(&self) -> Option<&str> {
        self.stopped_by.as_deref()
    }

    /// Adds the token that ends the text, which is shown only beside stop strings. A step that is no text's end has
    /// [`push`](Self::push).
    pub(crate) fn push_last(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<Added> {
        let hidden = Added { place: self.decoder.place(), ..Added::default() };
        if self.end.includes_stop { self.push(tokenizer, token) } else { Ok(hidden) }
    }

    /// Adds a token.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<Added> {
        self.tokens += 1;
        let (place, text) = self.decoder.push(tokenizer, token)?;
        self.held.push_str(&text);
        Ok(Added { place, ..self.release() })
    }

    /// Ends the text: what was held back, and what an incomplete character is shown as.
    pub(crate) fn end(&mut self, tokenizer: &Tokenizer) -> Added {
        let rest = self.decoder.end(tokenizer);
        self.held.push_str(&rest);
        let mut added = self.release();
        if !added.is_stopped {
            added.text.push_str(&self.held);
        }
        added
    }

    /// Releases what no stop string can begin in.
    fn release(&mut self) -> Added {
        if self.tokens <= self.end.min_tokens {
            self.exempt = self.held.len();
        }
        let stops = self.end.stop.iter().filter_map(|stop| Some((self.find(stop)?, stop)));
        if let Some((at, stop)) = stops.min_by_key(|(at, _)| *at) {
            self.held.truncate(if self.end.includes_stop { at + stop.len() } else { at });
            self.stopped_by = Some(stop.clone());
            return Added { text: std::mem::take(&mut self.held), is_stopped: true, ..Added::default() };
        }
        let may_begin = |at: &usize| self.end.stop.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let keep = (0..self.held.len()).find(|at| self.held.is_char_boundary(*at) && may_begin(at));
        let kept = self.held.split_off(keep.unwrap_or(self.held.len()));
        self.exempt = self.exempt.saturating_sub(self.held.len());
        Added { text: std::mem::replace(&mut self.held, kept), ..Added::default() }
    }

    /// Where a stop string is that ends behind the first tokens.
    fn find(&self, stop: &str) -> Option<usize> {
        let least = (self.exempt + 1).saturating_sub(stop.len());
        let first = (least..self.held.len()).find(|at| self.held.is_char_boundary(*at))?;
        Some(first + self.held[first..].find(stop)?)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
    use serde_json::{Map, Value, json};

    use super::{Decoder, End, Text};
    use crate::tokenizer::Tokenizer;

    fn tokenizer() -> Tokenizer {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/qwen3");
        Tokenizer::read(&model).expect("the fixture is whole").expect("the fixture has one")
    }

    #[test]
    fn the_token_that_ends_a_text_is_not_in_it() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("one two", false, 512).expect("the text is short");
        let (&last, first) = tokens.split_last().expect("there are tokens");
        let read = |end: End, last: u32| {
            let mut text = Text::behind(&[], 0, end, &tokenizer).expect("there is no prompt");
            let mut read = String::new();
            for token in first {
                read += &text.push(&tokenizer, *token).expect("it decodes").text;
            }
            read += &text.push_last(&tokenizer, last).expect("it decodes").text;
            read + &text.end(&tokenizer).text
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

    /// The fixture's tokenizer, whose tokens have a character for each byte.
    const BYTES: &str = "bytes";
    /// Tokens with `▁` for a space, of which a text loses the first.
    const METASPACE: &str = "metaspace";
    /// The same, with a token for each byte as `<0xE9>`.
    const FALLBACK: &str = "fallback";

    fn tokenizer_of(kind: &str) -> Tokenizer {
        if kind == BYTES {
            return tokenizer();
        }
        let words = ["<s>", "</s>", "▁", "▁the", "▁a", "▁cat", "cat", "s", "▁▁", "x▁y", ".", "\n", "é", "日本", "the"];
        let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>")).filter(|_| kind == FALLBACK);
        let vocab: Map<String, Value> = words
            .map(str::to_owned)
            .into_iter()
            .chain(bytes)
            .enumerate()
            .map(|(id, token)| (token, id.into()))
            .collect();
        let special = words.iter().take(2).enumerate().map(|(id, content)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        });
        let decoder = match kind {
            METASPACE => json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true }),
            _ => json!({ "type": "Sequence", "decoders": [
                { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
                { "type": "ByteFallback" },
                { "type": "Fuse" },
                { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
            ] }),
        };
        let dir = tempfile::tempdir().expect("there is a place for temporary files");
        let file = json!({
            "version": "1.0", "added_tokens": special.collect::<Vec<_>>(), "decoder": decoder,
            "model": { "type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": kind == FALLBACK },
        });
        fs::write(dir.path().join("tokenizer.json"), file.to_string()).expect("it can be written");
        Tokenizer::read(dir.path()).expect("it is whole").expect("it is there")
    }

    /// Random tokens, for each number of first ones the number of those whose characters are whole, and for each
    /// whether it goes on with a character.
    struct Tokens {
        ids: Vec<u32>,
        whole: Vec<usize>,
        goes_on: Vec<bool>,
    }

    impl Tokens {
        fn random(rng: &mut StdRng, kind: &str, tokenizer: &Tokenizer, shows_special: bool) -> Self {
            let id = |token: &str| tokenizer.inner.token_to_id(token).expect("it is a token");
            // GPT-2's table.
            let visible: Vec<u32> = (33..127).chain(161..173).chain(174..256).collect();
            let others: Vec<u32> = (0..256).filter(|byte| !visible.contains(byte)).collect();
            let of_byte = |byte: u8| {
                let place = others.iter().position(|other| *other == u32::from(byte));
                let code = place.map_or(byte.into(), |place| 256 + u32::try_from(place).expect("it is small"));
                id(&char::from_u32(code).expect("it is a character").to_string())
            };
            let mut tokens = Self { ids: vec![], whole: vec![0], goes_on: vec![] };
            for _ in 0..rng.random_range(2..14) {
                let char = ['é', '日', '🦀', 'ß', '\u{301}'][rng.random_range(0..5)].to_string();
                let (start, which) = (tokens.ids.len(), rng.random_range(0..6));
                if which == 0 {
                    // One that is hidden changes nothing.
                    let open = tokens.whole[start];
                    tokens.goes_on.push(open != start && !shows_special);
                    tokens.whole.push(if tokens.goes_on[start] { open } else { start + 1 });
                    tokens.ids.push(if kind == BYTES { 511 } else { rng.random_range(0..2) });
                    continue;
                }
                let mut all: Vec<u32> = match (kind, which) {
                    (BYTES, 1 | 2) => vec![rng.random_range(256..511)],
                    (BYTES, _) => char.bytes().map(of_byte).collect(),
                    (FALLBACK, 1..=3) => char.bytes().map(|byte| id(&format!("<0x{byte:02X}>"))).collect(),
                    _ => vec![rng.random_range(2..15)],
                };
                // A character that ends too early.
                let is_broken = kind == BYTES && all.len() > 1 && rng.random_range(0..4) == 0;
                all.truncate(all.len() - usize::from(is_broken));
                for index in 0..all.len() {
                    tokens.goes_on.push(index > 0);
                    tokens.whole.push(if index + 1 < all.len() || is_broken { start } else { start + index + 1 });
                }
                tokens.ids.extend(all);
            }
            tokens
        }
    }

    /// What the text of an answer is: everything decoded at once for each token, from the beginning of the prompt on.
    struct Slow<'a> {
        tokens: &'a Tokens,
        prompt: usize,
        end: &'a End,
        tokenizer: &'a Tokenizer,
    }

    impl Slow<'_> {
        fn decoded(&self, count: usize) -> String {
            let ids = &self.tokens.ids[..count];
            self.tokenizer.decode(ids, !self.end.shows_special).expect("it decodes")
        }

        /// The text of the first tokens of all, behind the prompt's.
        fn answer(&self, count: usize) -> String {
            let base = self.decoded(self.tokens.whole[self.prompt]);
            self.decoded(count).strip_prefix(&base).expect("a text goes on").to_owned()
        }

        /// The first stop string that ends behind the first tokens' text.
        fn stop(&self, text: &str) -> Option<(usize, &str)> {
            let first = (self.prompt + self.end.min_tokens).min(self.tokens.ids.len());
            let exempt = self.answer(self.tokens.whole[first]).len();
            let starts = (0..text.len()).filter(|at| text.is_char_boundary(*at));
            let all = starts.flat_map(|at| self.end.stop.iter().map(move |stop| (at, stop.as_str())));
            all.filter(|(at, stop)| at + stop.len() > exempt).find(|(at, stop)| text[*at..].starts_with(stop))
        }

        /// The whole text, with the string that ended it.
        fn whole(&self) -> (String, Option<String>) {
            let last = self.tokens.ids.len();
            for count in self.prompt + 1..=last + 1 {
                let is_end = count > last;
                let mut text = self.answer(if is_end { last } else { self.tokens.whole[count] });
                let is_late = count.min(last) - self.prompt > self.end.min_tokens;
                if let Some((at, stop)) = self.stop(&text).filter(|_| is_late) {
                    text.truncate(if self.end.includes_stop { at + stop.len() } else { at });
                    return (text, Some(stop.to_owned()));
                }
                if is_end {
                    return (text, None);
                }
            }
            unreachable!("the last step returns")
        }

        fn place(&self, index: usize) -> usize {
            let Tokens { whole, goes_on, .. } = self.tokens;
            self.answer(if goes_on[index] { whole[index] } else { index }).chars().count()
        }
    }

    /// Texts of random tokens behind random prompts, which are cut anywhere, with random strings that end them.
    #[test]
    fn texts_are_those_of_all_tokens_at_once() {
        for kind in [BYTES, METASPACE, FALLBACK] {
            let tokenizer = tokenizer_of(kind);
            let (mut stopped, mut continued) = (0, 0);
            for seed in 0..2000 {
                let mut rng = StdRng::seed_from_u64(seed);
                let mut end = End {
                    includes_stop: rng.random(),
                    min_tokens: [0, 0, 1, 2, 5][rng.random_range(0..5)],
                    shows_special: rng.random(),
                    stop: vec![],
                };
                let tokens = Tokens::random(&mut rng, kind, &tokenizer, end.shows_special);
                let prompt = rng.random_range(0..tokens.ids.len());
                // Strings of the text, some with another end.
                let text = tokenizer.decode(&tokens.ids, !end.shows_special).expect("it decodes");
                let chars: Vec<char> = text.chars().collect();
                for _ in 0..rng.random_range(0..3) {
                    let (at, len) = (rng.random_range(0..chars.len().max(1)), rng.random_range(1..6));
                    let behind = ["", "", "!"][rng.random_range(0..3)];
                    let stop = chars.iter().skip(at).take(len).collect::<String>() + behind;
                    end.stop.extend(Some(stop).filter(|stop| !stop.is_empty()));
                }
                let slow = Slow { tokens: &tokens, prompt, end: &end, tokenizer: &tokenizer };
                let (before, behind) = tokens.ids.split_at(prompt);
                let what = format!("{kind}, seed {seed}: {before:?} {behind:?} {end:?}");
                let mut text = Text::behind(before, 7, end.clone(), &tokenizer).expect("it decodes");
                let (mut whole, mut is_stopped) = (String::new(), false);
                for (index, &token) in (prompt..).zip(behind) {
                    let added = text.push(&tokenizer, token).expect("it decodes");
                    assert_eq!(added.place.at, 7 + slow.place(index), "{what}, token {index}");
                    whole += &added.text;
                    is_stopped = added.is_stopped;
                    if is_stopped {
                        break;
                    }
                    // All that is known is released, but for what a stop string may begin with.
                    let known = slow.answer(tokens.whole[index + 1]);
                    let may_begin = |at: &usize| end.stop.iter().any(|stop| stop.starts_with(&known[*at..]));
                    let held = (0..known.len()).find(|at| known.is_char_boundary(*at) && may_begin(at));
                    assert_eq!(whole, known[..held.unwrap_or(known.len())], "{what}, token {index}");
                }
                if !is_stopped {
                    whole += &text.end(&tokenizer).text;
                }
                let stop = text.stopped_by().map(str::to_owned);
                stopped += usize::from(stop.is_some());
                continued += usize::from(tokens.goes_on[prompt]);
                assert_eq!((whole, stop), slow.whole(), "{what}");

                // The bytes of all tokens are the text.
                let mut decoder = Decoder::new(end.shows_special);
                let mut bytes = Vec::new();
                for &token in &tokens.ids {
                    let (place, _) = decoder.push(&tokenizer, token).expect("it decodes");
                    if tokenizer.is_shown(token, end.shows_special) {
                        bytes.extend(tokenizer.bytes(place.before, token).expect("it decodes"));
                    }
                }
                assert_eq!(String::from_utf8_lossy(&bytes), slow.decoded(tokens.ids.len()), "{what}");
            }
            assert!(stopped > 300 && (kind == METASPACE || continued > 100), "{kind}: {stopped}, {continued}");
        }
    }

    /// Of a character that does not go on, each byte is shown, as the tokenizer does.
    #[test]
    fn bytes_that_are_no_character_are_replaced() {
        let tokenizer = tokenizer_of(FALLBACK);
        let id = |token: &str| tokenizer.inner.token_to_id(token).expect("it is a token");
        let tokens = [id("▁the"), id("<0xE6>"), id("<0x97>"), id("▁cat")];
        let mut text = Text::behind(&tokens[..2], 0, End::default(), &tokenizer).expect("it decodes");
        let pushed: Vec<String> =
            tokens[2..].iter().map(|token| text.push(&tokenizer, *token).expect("it decodes").text).collect();
        assert_eq!(pushed, ["", "\u{fffd}\u{fffd} cat"]);
        assert_eq!(tokenizer.decode(&tokens, true).expect("it decodes"), "the\u{fffd}\u{fffd} cat");
        text.push(&tokenizer, tokens[1]).expect("it decodes");
        assert_eq!(text.end(&tokenizer).text, "\u{fffd}");
    }
}
