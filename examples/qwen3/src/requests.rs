//! The requests: prompts, and the adapter of each.

use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::{
    config::Config,
    error::{Context, Error, Result, bail},
    files,
    tokenizer::Tokenizer,
};

/// The largest file of requests in MiB.
const MAX_MIB: u64 = 64;

/// A request, checked against the model and the adapters.
#[derive(Debug)]
pub(crate) struct Request {
    /// An index into the adapters, or `None` for the base model.
    pub(crate) adapter: Option<usize>,
    /// A factor on the adapter's own scaling.
    pub(crate) scale: f32,
    pub(crate) prompt: Vec<u32>,
}

/// A request as written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Written {
    pub(crate) adapter: Option<String>,
    pub(crate) prompt: Option<String>,
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) scale: Option<f32>,
}

/// The limits that requests are checked against.
pub(crate) struct Checker<'a> {
    pub(crate) config: &'a Config,
    pub(crate) model: &'a Path,
    pub(crate) tokenizer: Option<&'a Tokenizer>,
    pub(crate) adapters: Vec<&'a str>,
    pub(crate) max_new_tokens: usize,
}

/// Reads a JSON array of requests.
pub(crate) fn read(path: &Path) -> Result<Vec<Written>> {
    let text = files::read_text(path, MAX_MIB)?;
    let requests: Vec<&RawValue> = serde_json::from_str(&text).context(path.display())?;
    if requests.is_empty() {
        bail!("{}: there are no requests", path.display());
    }
    let parse = |(index, request): (usize, &&RawValue)| {
        Written::parse(request.get()).context(format_args!("{}: request {index}", path.display()))
    };
    requests.iter().enumerate().map(parse).collect()
}

impl Written {
    /// Reads a JSON object. (A list of its values would do for `serde`.)
    fn parse(text: &str) -> Result<Self> {
        if !text.starts_with('{') {
            bail!("{text} is not an object");
        }
        Ok(serde_json::from_str(text)?)
    }
}

impl Checker<'_> {
    /// Checks all requests, and names the one at fault.
    pub(crate) fn check(&self, written: &[Written]) -> Result<Vec<Request>> {
        let check = |(index, written)| self.check_one(written).context(format_args!("request {index}"));
        written.iter().enumerate().map(check).collect()
    }

    fn check_one(&self, written: &Written) -> Result<Request> {
        let adapter = written.adapter.as_deref().map(|name| self.adapter(name)).transpose()?;
        let scale = written.scale.unwrap_or(1.0);
        if !scale.is_finite() {
            bail!("`scale` is {scale}");
        }
        if adapter.is_none() && scale != 1.0 {
            bail!("`scale` is {scale}, but there is no adapter whose scaling it could multiply");
        }
        let prompt = match (&written.prompt, &written.token_ids) {
            (Some(prompt), None) => self.encode(prompt)?,
            (None, Some(ids)) => ids.clone(),
            (Some(_), Some(_)) => bail!("both `prompt` and `token_ids` are given"),
            (None, None) => bail!("neither `prompt` nor `token_ids` is given"),
        };
        let Config { vocab, max_positions, .. } = *self.config;
        if prompt.is_empty() {
            bail!("the prompt is empty");
        }
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= vocab) {
            bail!("token id {id} is outside the vocabulary of {vocab}");
        }
        let positions = prompt.len().saturating_add(self.max_new_tokens);
        if positions > max_positions {
            bail!(
                "a prompt of {} tokens and {} new ones are more than the model's {max_positions} positions",
                prompt.len(),
                self.max_new_tokens
            );
        }
        Ok(Request { adapter, scale, prompt })
    }

    fn adapter(&self, name: &str) -> Result<usize> {
        let known = &self.adapters;
        known.iter().position(|known| *known == name).ok_or_else(|| {
            let known =
                if known.is_empty() { "there are none".into() } else { format!("there are {}", known.join(", ")) };
            Error::new(format!("there is no adapter `{name}`; {known}"))
        })
    }

    fn encode(&self, prompt: &str) -> Result<Vec<u32>> {
        let Some(tokenizer) = self.tokenizer else {
            bail!("a `prompt` needs {}, which is missing", self.model.join("tokenizer.json").display());
        };
        tokenizer.encode(prompt, true, self.config.max_positions).context("`prompt`")
    }
}
