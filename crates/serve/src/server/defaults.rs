//! What requests sample with where they do not say: a model's `generation_config.json`, as vLLM and SGLang read it.

use std::{fs, path::Path};

use serde::Deserialize;

use crate::{
    error::{Context, Result, bail},
    files,
};

/// The largest generation_config.json in MiB.
const MAX_MIB: u64 = 4;

/// The fields that stand for those of requests. Other fields of the file have no effect here, `do_sample` among them.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(crate) struct Defaults {
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    /// -1 and 0 stand for all tokens.
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    /// Of chats, where the request does not say.
    pub(crate) max_new_tokens: Option<usize>,
}

impl Defaults {
    /// Reads the defaults that `--generation-config` names.
    pub(crate) fn read(model: &Path, argument: &str) -> Result<Self> {
        let file = match argument {
            "vllm" => return Ok(Self::default()),
            "auto" => model.join("generation_config.json"),
            folder => Path::new(folder).join("generation_config.json"),
        };
        if argument == "auto" && !fs::exists(&file)? {
            return Ok(Self::default());
        }
        let read = || -> Result<Self> { Ok(serde_json::from_str(&files::read_text(&file, MAX_MIB)?)?) };
        let defaults = read().context(file.display())?;
        defaults.check().context(file.display())?;
        Ok(defaults)
    }

    fn check(&self) -> Result<()> {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens } = *self;
        for (name, is_right) in [
            ("temperature", temperature.is_none_or(|value| value.is_finite() && value >= 0.0)),
            ("top_p", top_p.is_none_or(|value| value > 0.0 && value <= 1.0)),
            ("top_k", top_k.is_none_or(|value| value >= -1)),
            ("min_p", min_p.is_none_or(|value| (0.0..=1.0).contains(&value))),
            ("repetition_penalty", repetition_penalty.is_none_or(|value| value.is_finite() && value > 0.0)),
            ("max_new_tokens", max_new_tokens != Some(0)),
        ] {
            if !is_right {
                bail!("`{name}` is not one that a request may have");
            }
        }
        Ok(())
    }

    /// What is not as OpenAI has it, for the log.
    pub(crate) fn shown(&self) -> String {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens } = *self;
        let text = |name: &str, value: Option<String>| value.map(|value| format!("{name} {value}"));
        let set = [
            text("temperature", temperature.map(|value| value.to_string())),
            text("top_p", top_p.map(|value| value.to_string())),
            text("top_k", top_k.map(|value| value.to_string())),
            text("min_p", min_p.map(|value| value.to_string())),
            text("repetition_penalty", repetition_penalty.map(|value| value.to_string())),
            text("max_new_tokens", max_new_tokens.map(|value| value.to_string())),
        ];
        set.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::Defaults;

    #[test]
    fn defaults_are_those_of_the_file_that_is_named() {
        let dir = tempfile::tempdir().expect("there is a place for temporary files");
        let file = dir.path().join("generation_config.json");
        let read = |argument: &str| Defaults::read(dir.path(), argument).map_err(|error| error.to_string());
        assert_eq!(read("auto"), Ok(Defaults::default()));
        assert!(read("/nowhere").is_err_and(|error| error.contains("/nowhere/generation_config.json")));
        fs::write(
            &file,
            r#"{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": true, "eos_token_id": [1, 2]}"#,
        )
        .expect("the file can be written");
        let of_qwen3 = Defaults { temperature: Some(0.6), top_k: Some(20), top_p: Some(0.95), ..Defaults::default() };
        assert_eq!(of_qwen3.shown(), "temperature 0.6, top_p 0.95, top_k 20");
        assert_eq!(read("auto"), Ok(of_qwen3.clone()));
        assert_eq!(read(&dir.path().display().to_string()), Ok(of_qwen3));
        assert_eq!(read("vllm"), Ok(Defaults::default()));
        fs::write(&file, r#"{"top_p": 1.5}"#).expect("the file can be written");
        assert!(read("auto").is_err_and(|error| error.contains("`top_p`")));
        assert_eq!(read("vllm"), Ok(Defaults::default()));
    }
}
