//! Chat templates: from messages to a prompt.

use std::path::Path;

use minijinja::{
    Environment, Error as TemplateError, ErrorKind, Value as TemplateValue, context,
    syntax::SyntaxConfig,
    value::{Serde, merge_maps},
};
use serde::Deserialize;
use serde_json::Value;

use super::error::{ApiError, ApiResult};
use crate::{
    error::{Context, Result},
    files,
};

/// The largest template, or tokenizer_config.json, in MiB.
const MAX_MIB: u64 = 4;
const NAME: &str = "chat_template";

/// The template of a checkpoint, if it has one.
#[derive(Debug)]
pub(crate) struct Template {
    environment: Environment<'static>,
    has_template: bool,
    special: Special,
}

/// The special tokens that templates name.
#[derive(Debug, Default, Deserialize)]
struct Special {
    bos_token: Option<Token>,
    eos_token: Option<Token>,
    pad_token: Option<Token>,
    #[serde(default)]
    chat_template: Option<Value>,
}

/// A token as tokenizer_config.json writes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Added { content: String },
}

impl Token {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) | Self::Added { content: text } => text,
        }
    }
}

impl Template {
    /// Reads the template from `file`, or else from the checkpoint: `chat_template.jinja`, or `chat_template` in
    /// `tokenizer_config.json`.
    pub(crate) fn read(model: &Path, file: Option<&Path>) -> Result<Self> {
        let config = model.join("tokenizer_config.json");
        let special: Special = match config.exists() {
            true => serde_json::from_str(&files::read_text(&config, MAX_MIB)?).context(config.display())?,
            false => Special::default(),
        };
        let beside = model.join("chat_template.jinja");
        let source = match (file, &special.chat_template) {
            (Some(file), _) => Some(files::read_text(file, MAX_MIB)?),
            (None, _) if beside.exists() => Some(files::read_text(&beside, MAX_MIB)?),
            (None, Some(Value::String(source))) => Some(source.clone()),
            (None, Some(named)) => Some(default_of(named).context(config.display())?),
            (None, None) => None,
        };
        let mut environment = Environment::new();
        // As transformers sets them.
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> std::result::Result<(), TemplateError> {
            Err(TemplateError::new(ErrorKind::InvalidOperation, message))
        });
        let has_template = source.is_some();
        if let Some(source) = source {
            environment.add_template_owned(NAME, source).context("the chat template")?;
        }
        Ok(Self { environment, has_template, special })
    }

    /// The prompt of a conversation, up to the beginning of the answer.
    pub(crate) fn render(&self, messages: &[Value], kwargs: &Value) -> ApiResult<String> {
        if !self.has_template {
            return Err(ApiError::bad_request(
                "The model has no chat template. Start the server with --chat-template FILE, or use /v1/completions.",
            ));
        }
        let token = |token: &Option<Token>| token.as_ref().map(|token| token.text().to_owned());
        let Special { bos_token, eos_token, pad_token, .. } = &self.special;
        let given = context! {
            messages => TemplateValue::from(Serde(messages)),
            add_generation_prompt => true,
            bos_token => token(bos_token),
            eos_token => token(eos_token),
            pad_token => token(pad_token),
        };
        let kwargs = TemplateValue::from(Serde(kwargs));
        let template = self.environment.get_template(NAME);
        let rendered = template.and_then(|template| template.render(merge_maps([kwargs, given])));
        rendered.map_err(|error| ApiError::bad_request(format!("The chat template refuses the messages: {error}")))
    }
}

/// The template named `default` of a list of named templates.
fn default_of(named: &Value) -> Result<String> {
    let named = named.as_array().map(Vec::as_slice).unwrap_or_default();
    let default = named.iter().find(|template| template["name"] == "default");
    let source = default.and_then(|template| template["template"].as_str());
    source.map(str::to_owned).ok_or_else(|| crate::error::Error::new("`chat_template` has no template named `default`"))
}
