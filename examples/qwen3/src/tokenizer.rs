//! The model's `tokenizer.json`, used as in transformers: without the padding and truncation that the file may contain.
//!
//! The tokenizers crate panics on some files, and on others allocates sizes that the file names. Invariant: both end in
//! an error.

use std::{
    any::Any,
    array::from_fn,
    cell::Cell,
    collections::HashMap,
    panic::{self, AssertUnwindSafe},
    path::Path,
    sync::Once,
};

use serde_json::{Map, Value};
use tokenizers::decoders::DecoderWrapper;

use crate::{
    error::{Context, Error, Result, bail},
    files,
};

/// The largest `tokenizer.json` in MiB. The largest in use have about 35.
const MAX_MIB: u64 = 256;

/// A tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    /// The tokenizer of the crate `tokenizers`.
    pub inner: tokenizers::Tokenizer,
    least: Least,
    spelling: Spelling,
}

/// How a decoder makes text of tokens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Spelling {
    /// A token has a character for each byte.
    Bytes,
    /// A token is text, or one byte as `<0xE9>`.
    Fallback,
    /// A token is text, which may depend on the token before.
    Text,
}

impl Tokenizer {
    /// The tokenizer in a model's folder, if it has one.
    ///
    /// # Errors
    ///
    /// If `tokenizer.json` cannot be read, or has a part that is not implemented.
    pub fn read(model: &Path) -> Result<Option<Self>> {
        let path = model.join("tokenizer.json");
        if !path.exists() {
            return Ok(None);
        }
        let text = files::read_text(&path, MAX_MIB)?;
        Self::parse(&text).map(Some).context(path.display())
    }

    fn parse(text: &str) -> Result<Self> {
        let mut fields: Map<String, Value> = serde_json::from_str(text)?;
        // transformers sets both for each call.
        for reset in ["padding", "truncation"] {
            fields.insert(reset.into(), Value::Null);
        }
        if fields.get("normalizer").is_some_and(has_charsmap) {
            bail!("a normalizer with a precompiled map of characters is not implemented");
        }
        if let Some(dropout) = fields.get("model").and_then(|model| model.get("dropout"))
            && !dropout.is_null()
            && dropout.as_f64() != Some(0.0)
        {
            bail!("`model.dropout` is {dropout}, so that no text has tokens for sure");
        }
        let bytes = serde_json::to_vec(&fields)?;
        guarded(|| {
            let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| Error::new(error.to_string()))?;
            let least = match Least::holds(&fields) {
                true => Least::new(&inner.get_vocab(true), |byte| spelled(&fields, byte)),
                false => Least::default(),
            };
            let spelling = Spelling::of(inner.get_decoder());
            Ok(Self { inner, least, spelling })
        })
    }

    /// The tokens of a text, with the special tokens that the file adds to a text, or without. A text that must have
    /// more than `max_tokens` is refused before it is tokenized.
    ///
    /// # Errors
    ///
    /// If the text has more tokens, or the tokenizer fails.
    pub fn encode(&self, text: &str, adds_special: bool, max_tokens: usize) -> Result<Vec<u32>> {
        let least = self.least.of(text);
        if least > max_tokens {
            bail!("it has at least {least} tokens, and the model has {max_tokens} positions");
        }
        let encode = || self.inner.encode(text, adds_special).map_err(|error| Error::new(error.to_string()));
        guarded(|| encode().map(|encoding| encoding.get_ids().to_vec()))
    }

    /// The text of tokens, without special ones or with them.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn decode(&self, tokens: &[u32], skips_special: bool) -> Result<String> {
        let decode = || self.inner.decode(tokens, skips_special).map_err(|error| Error::new(error.to_string()));
        guarded(decode).context("tokenizer.json")
    }

    /// Whether a token has a text, if special ones are shown or not.
    pub fn is_shown(&self, token: u32, shows_special: bool) -> bool {
        let is_special = |spelled: &String| self.inner.get_added_vocabulary().is_special_token(spelled);
        self.inner.id_to_token(token).is_some_and(|spelled| shows_special || !is_special(&spelled))
    }

    /// The bytes that a token adds to a text, behind the token `before` it or at its beginning. Those of a character
    /// may be of several tokens.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn bytes(&self, before: Option<u32>, token: u32) -> Result<Vec<u8>> {
        let Some(spelled) = self.inner.id_to_token(token) else { return Ok(Vec::new()) };
        if self.spelling == Spelling::Bytes {
            let bytes: Option<Vec<u8>> = spelled.chars().map(byte_of).collect();
            return Ok(bytes.unwrap_or_else(|| spelled.into_bytes()));
        }
        // What a text begins with may be dropped.
        let byte = fallback_byte(&spelled).filter(|byte| before.is_some() || !byte.is_ascii());
        if let (Spelling::Fallback, Some(byte)) = (self.spelling, byte) {
            return Ok(vec![byte]);
        }
        let Some(before) = before else { return self.decode(&[token], false).map(String::into_bytes) };
        let (first, both) = (self.decode(&[before], false)?, self.decode(&[before, token], false)?);
        match both.strip_prefix(&first) {
            Some(added) => Ok(added.as_bytes().to_vec()),
            None => self.decode(&[token], false).map(String::into_bytes),
        }
    }

    /// The replacement characters that stand for so many bytes, the beginning of a character that does not go on.
    pub fn num_replacements(&self, bytes: usize) -> usize {
        if self.spelling == Spelling::Fallback { bytes } else { 1 }
    }
}

impl Spelling {
    fn of(decoder: Option<&DecoderWrapper>) -> Self {
        let parts = match decoder {
            Some(DecoderWrapper::Sequence(sequence)) => sequence.get_decoders(),
            one => one.map(std::slice::from_ref).unwrap_or_default(),
        };
        let is_plain = |part: &DecoderWrapper| matches!(part, DecoderWrapper::ByteLevel(_) | DecoderWrapper::Fuse(_));
        if parts.iter().any(|part| matches!(part, DecoderWrapper::ByteFallback(_))) {
            Self::Fallback
        } else if parts.iter().any(|part| matches!(part, DecoderWrapper::ByteLevel(_))) && parts.iter().all(is_plain) {
            Self::Bytes
        } else {
            Self::Text
        }
    }
}

/// The byte that a character stands for in a vocabulary of bytes: GPT-2's, which shows those that are no visible
/// characters of Latin-1 as those from U+0100 on.
fn byte_of(char: char) -> Option<u8> {
    let code = u32::from(char);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// The byte that a token such as `<0xE9>` stands for.
fn fallback_byte(spelled: &str) -> Option<u8> {
    let digits = spelled.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// How many tokens a text has at least, which is found faster than its tokens.
///
/// ASCII characters count, where each is itself a token of a BPE model, so that none is unknown. A token of `n`
/// characters stands for at most `n` of them, so a character counts as one part of the characters of the longest token
/// that it is in. A character before one beyond ASCII does not count, as it may be composed with it; nor does white
/// space where an added token may take any number of it.
#[derive(Clone, Copy, Debug)]
struct Least([u64; 128]);

impl Least {
    /// What a character counts that is a token.
    const TOKEN: u64 = 1 << 32;

    /// With the character that each byte is in the vocabulary, if it is one.
    fn new(vocab: &HashMap<String, u32>, spelled: impl Fn(u8) -> Option<char>) -> Self {
        let mut longest: HashMap<char, u64> = HashMap::new();
        for token in vocab.keys() {
            let len = token.chars().count() as u64;
            for char in token.chars() {
                let longest = longest.entry(char).or_default();
                *longest = len.max(*longest);
            }
        }
        Self(from_fn(|byte| {
            let count = || {
                let byte = u8::try_from(byte).ok()?;
                let spelled = spelled(byte).filter(|char| vocab.contains_key(char.encode_utf8(&mut [0; 4]) as &str))?;
                // Added tokens have characters as they are.
                let of = [spelled, char::from(byte)].into_iter().filter_map(|char| longest.get(&char)).max()?;
                Self::TOKEN.checked_div(*of)
            };
            count().unwrap_or(0)
        }))
    }

    /// Whether a `tokenizer.json` keeps ASCII characters, up to its model.
    fn holds(fields: &Map<String, Value>) -> bool {
        let is = |value: &Value, types: &[&str]| value["type"].as_str().is_some_and(|of| types.contains(&of));
        let keeps = |value: &Value| {
            is(value, &["NFC", "NFD", "NFKC", "NFKD", "Prepend", "ByteLevel", "Metaspace", "Digits"])
                || (is(value, &["Replace"]) && value["pattern"]["String"] == " " && value["content"] == "\u{2581}")
                || (is(value, &["Split"]) && value["behavior"] != "Removed")
        };
        let parts_keep = |name: &str, parts: &str| match fields.get(name) {
            None | Some(Value::Null) => true,
            Some(all) if is(all, &["Sequence"]) => all[parts].as_array().is_some_and(|all| all.iter().all(keeps)),
            Some(one) => keeps(one),
        };
        let model = fields.get("model").unwrap_or(&Value::Null);
        let added = fields.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
        let is_composed =
            |token: &Value| token["normalized"] != false && !token["content"].as_str().is_some_and(str::is_ascii);
        is(model, &["BPE"])
            && ["continuing_subword_prefix", "end_of_word_suffix"]
                .iter()
                .all(|affix| matches!(model[affix].as_str(), None | Some("")))
            && parts_keep("normalizer", "normalizers")
            && parts_keep("pre_tokenizer", "pretokenizers")
            && !added.into_iter().any(is_composed)
    }

    fn of(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let behind = bytes.iter().skip(1).chain([&0]);
        let counted = bytes.iter().zip(behind).filter(|(byte, behind)| byte.is_ascii() && behind.is_ascii());
        // No text has 2^32 characters.
        let sum: u64 = counted.map(|(byte, _)| self.0[usize::from(*byte)]).sum();
        usize::try_from(sum.div_ceil(Self::TOKEN)).unwrap_or(usize::MAX)
    }
}

/// The character that an ASCII byte is in the vocabulary of a `tokenizer.json` whose parts keep it; `None` if it may be
/// none.
fn spelled(fields: &Map<String, Value>, byte: u8) -> Option<char> {
    let char = char::from(byte);
    if char.is_ascii_graphic() {
        return Some(char);
    }
    let parts: Vec<&Value> = [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")]
        .into_iter()
        .filter_map(|(name, parts)| Some((fields.get(name)?, parts)))
        .flat_map(|(all, parts)| all[parts].as_array().map_or(std::slice::from_ref(all), Vec::as_slice))
        .collect();
    let has = |name: &str| parts.iter().any(|part| part["type"] == name);
    let added = fields.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let is_stripping = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    if !char.is_ascii_whitespace() || added.into_iter().any(is_stripping) {
        return None;
    }
    match (has("ByteLevel"), has("Metaspace") || has("Replace")) {
        (true, true) => None,
        (true, false) => ('\u{100}'..='\u{143}').find(|char| byte_of(*char) == Some(byte)),
        (false, true) if char == ' ' => Some('\u{2581}'),
        (false, _) => Some(char),
    }
}

impl Default for Least {
    /// Of nothing is anything known.
    fn default() -> Self {
        Self([0; 128])
    }
}

/// Whether a normalizer, or one inside it, has a binary table, whose sizes the crate trusts.
fn has_charsmap(normalizer: &Value) -> bool {
    match normalizer {
        Value::Object(fields) => fields.contains_key("precompiled_charsmap") || fields.values().any(has_charsmap),
        Value::Array(values) => values.iter().any(has_charsmap),
        _ => false,
    }
}

/// Turns a panic into an error, and suppresses the panic's message.
///
/// # Errors
///
/// That of `run`, or that it panicked.
pub fn guarded<V>(run: impl FnOnce() -> Result<V>) -> Result<V> {
    thread_local! {
        static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
    }
    static HOOK: Once = Once::new();
    // One hook for all threads, which may be here at the same time.
    HOOK.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_GUARDED.get() {
                hook(info);
            }
        }));
    });
    IS_GUARDED.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(run));
    IS_GUARDED.set(false);
    result.unwrap_or_else(|payload| Err(Error::new(format!("tokenizer.json does not work: {}", message(&*payload)))))
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    owned.or(payload.downcast_ref::<&str>().copied()).unwrap_or("it says no reason")
}
