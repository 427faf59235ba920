//! What an adapter's folder has that changes nothing here, although whoever saved it may think so.

use std::{collections::BTreeSet, fs, io::Read as _, path::PathBuf};

use aril::adapter::Opener;
use serde_json::{Map, Value};

use super::{Server, chat::default_of};

/// The largest file that is looked at, in MiB.
const MAX_MIB: u64 = 256;
/// The most tokens that a sentence names.
const SHOWN: usize = 3;

impl Server {
    /// A sentence for each part of the folder that has no effect.
    pub(super) fn warnings(&self, folder: &Folder) -> Vec<String> {
        let mut warnings = self.of_scaling(folder);
        warnings.extend(self.of_tokens(folder));
        warnings.extend(self.of_template(folder));
        warnings.extend(self.of_ends(folder));
        warnings
    }

    fn of_scaling(&self, folder: &Folder) -> Vec<String> {
        let config = read(folder, "adapter_config.json").unwrap_or_default();
        let patterns = config.get("alpha_pattern").and_then(Value::as_object).cloned().unwrap_or_default();
        let is_zero = |value: &Value| value.as_f64() == Some(0.0);
        let of_patterns = patterns.iter().filter(|(_, alpha)| is_zero(alpha));
        let of_patterns = of_patterns
            .map(|(module, _)| format!("`alpha_pattern` has 0 for `{module}`, where the adapter changes nothing"));
        let of_all = config.get("lora_alpha").is_some_and(is_zero).then(|| match patterns.is_empty() {
            true => "`lora_alpha` is 0, so that the adapter changes nothing".to_owned(),
            false => "`lora_alpha` is 0, so that the adapter changes nothing but what `alpha_pattern` names".to_owned(),
        });
        of_all.into_iter().chain(of_patterns).collect()
    }

    /// Tokens that the model's tokenizer does not have, or has under another id.
    pub(super) fn of_tokens(&self, folder: &Folder) -> Option<String> {
        const NAME: &str = "tokenizer.json";
        // Trainers save the model's own beside the adapter.
        let is_same = |own: &String| fs::read(self.model.join(NAME)).is_ok_and(|models| own.as_bytes() == models);
        let (name, tokens) = match folder.text(NAME) {
            Some(own) if is_same(&own) => return None,
            Some(own) => (NAME, tokens_of(&serde_json::from_str(&own).ok()?)),
            None => ("added_tokens.json", ids(&read(folder, "added_tokens.json")?)),
        };
        let is_known = |token: &str, id: u32| self.tokenizer.inner.token_to_id(token) == Some(id);
        let other: BTreeSet<&str> =
            tokens.iter().filter(|(token, id)| !is_known(token, *id)).map(|(token, _)| token.as_str()).collect();
        let shown: Vec<String> = other.iter().take(SHOWN).map(|token| format!("`{token}`")).collect();
        let more = if other.len() > SHOWN { format!(" and {} more", other.len() - SHOWN) } else { String::new() };
        let shown = shown.join(", ");
        (!other.is_empty()).then(|| {
            format!("{name} has tokens that the model's tokenizer, which is used, does not have: {shown}{more}")
        })
    }

    fn of_template(&self, folder: &Folder) -> Option<String> {
        const NAME: &str = "chat_template.jinja";
        let beside = folder.text(NAME);
        let in_config = || match read(folder, "tokenizer_config.json")?.get("chat_template")? {
            Value::Null => None,
            Value::String(source) => Some(source.clone()),
            named => default_of(named).ok(),
        };
        let own = beside.or_else(in_config)?;
        let is_same = self.template.source().is_some_and(|source| source.trim() == own.trim());
        (!is_same).then(|| "its chat template is not the server's, which is used".to_owned())
    }

    /// Tokens that end a text of the adapter, and none of the model.
    fn of_ends(&self, folder: &Folder) -> Option<String> {
        let (name, ends) = match read(folder, "generation_config.json") {
            Some(config) => {
                let ends = match config.get("eos_token_id")? {
                    Value::Array(ids) => ids.clone(),
                    Value::Null => return None,
                    id => vec![id.clone()],
                };
                ("generation_config.json", ends.iter().filter_map(id).collect::<Vec<_>>())
            }
            None => {
                let config = read(folder, "tokenizer_config.json")?;
                let token = config.get("eos_token")?;
                let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
                ("tokenizer_config.json", vec![self.tokenizer.inner.token_to_id(text)?])
            }
        };
        let other: Vec<u32> = ends.into_iter().filter(|end| !self.eos.contains(end)).collect();
        (!other.is_empty()).then(|| {
            format!("{name} ends texts with {other:?}, and the model, whose ends are used, with {:?}", self.eos)
        })
    }
}

/// A folder whose files are opened as those of its adapter.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: PathBuf,
    pub(super) opener: Opener,
}

impl Folder {
    /// The text of a file, if there is one and it is no link, which may lead to anything.
    fn text(&self, name: &str) -> Option<String> {
        let path = self.path.join(name);
        if !fs::symlink_metadata(&path).is_ok_and(|file| file.is_file()) {
            return None;
        }
        let file = self.opener.open(&path).ok()?;
        let is_short = file.metadata().is_ok_and(|file| file.is_file() && file.len() <= MAX_MIB << 20);
        let mut text = String::new();
        let read = is_short.then(|| file.take(MAX_MIB << 20).read_to_string(&mut text));
        read?.ok().map(|_| text)
    }
}

/// A file's object, if there is one.
fn read(folder: &Folder, name: &str) -> Option<Map<String, Value>> {
    serde_json::from_str(&folder.text(name)?).ok()
}

fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn ids(of_tokens: &Map<String, Value>) -> Vec<(String, u32)> {
    of_tokens.iter().filter_map(|(token, value)| Some((token.clone(), id(value)?))).collect()
}

/// The tokens of a tokenizer.json.
fn tokens_of(tokenizer: &Map<String, Value>) -> Vec<(String, u32)> {
    let vocab = tokenizer.get("model").and_then(|model| model.get("vocab")).and_then(Value::as_object);
    let added = tokenizer.get("added_tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let added = added.iter().filter_map(|token| Some((token["content"].as_str()?.to_owned(), id(&token["id"])?)));
    vocab.map(ids).unwrap_or_default().into_iter().chain(added).collect()
}
