//! The model's `tokenizer.json`, used as in transformers: without the padding and truncation that the file may contain.
//!
//! The tokenizers crate panics on some files, and on others allocates sizes that the file names. Invariant: both end in an error.

use std::{
    any::Any,
    cell::Cell,
    panic::{self, AssertUnwindSafe},
    path::Path,
    sync::Once,
};

use serde_json::{Map, Value};

use crate::{
    error::{Context, Error, Result, bail},
    files,
};

/// The largest `tokenizer.json` in MiB. The largest in use have about 35.
const MAX_MIB: u64 = 256;

/// A tokenizer.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    pub(crate) inner: tokenizers::Tokenizer,
    /// The largest number of bytes of a prompt that one token can represent.
    longest_token: usize,
}

impl Tokenizer {
    /// The tokenizer in a model's folder, if it has one.
    pub(crate) fn read(model: &Path) -> Result<Option<Self>> {
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
            let longest_token = inner.get_vocab(true).keys().map(String::len).max().unwrap_or(0);
            Ok(Self { inner, longest_token })
        })
    }

    /// The tokens of a text, with the special tokens that the file adds to a text, or without. A text that must have more than
    /// `max_tokens` is refused before it is tokenized.
    pub(crate) fn encode(&self, text: &str, adds_special: bool, max_tokens: usize) -> Result<Vec<u32>> {
        if text.len() > max_tokens.saturating_mul(self.longest_token) {
            bail!(
                "it has {} bytes, and no token more than {}: it is too long for the model's positions",
                text.len(),
                self.longest_token
            );
        }
        let encode = || self.inner.encode(text, adds_special).map_err(|error| Error::new(error.to_string()));
        guarded(|| encode().map(|encoding| encoding.get_ids().to_vec()))
    }

    /// The text of tokens, without special ones or with them.
    pub(crate) fn decode(&self, tokens: &[u32], skips_special: bool) -> Result<String> {
        let decode = || self.inner.decode(tokens, skips_special).map_err(|error| Error::new(error.to_string()));
        guarded(decode).context("tokenizer.json")
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
pub(crate) fn guarded<V>(run: impl FnOnce() -> Result<V>) -> Result<V> {
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
