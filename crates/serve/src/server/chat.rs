//! Chat templates: from messages to a prompt.

use std::{collections::HashMap, path::Path, sync::OnceLock};

use minijinja::{
    Environment, ErrorKind,
    value::{Serde, Value as TemplateValue},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    error::{ApiError, ApiResult},
    jinja,
    messages::{Content, Form, Message, ROLES},
};
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
    source: Option<String>,
    special: Special,
    /// By role, as far as the template shows a message of the role. It is rendered for the first chat, so that it can
    /// keep nothing else from being served.
    forms: OnceLock<HashMap<&'static str, Form>>,
}

/// What a prompt is rendered from, beside the messages.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// Whether the prompt ends with the beginning of an answer.
    pub(crate) adds_prompt: bool,
    /// Whether the prompt ends with the text of the last message.
    pub(crate) continues_last: bool,
    pub(crate) documents: Option<Value>,
    pub(crate) kwargs: Map<String, Value>,
}

/// The special tokens that templates name.
#[derive(Debug, Default, Deserialize)]
struct Special {
    bos_token: Option<Token>,
    eos_token: Option<Token>,
    pad_token: Option<Token>,
    #[serde(default)]
    chat_template: Option<Value>,
    add_bos_token: Option<Value>,
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
        let text = source.as_deref().unwrap_or_default();
        let environment = jinja::environment(NAME, text).context("the chat template")?;
        Ok(Self { environment, source, special, forms: OnceLock::new() })
    }

    fn forms(&self) -> &HashMap<&'static str, Form> {
        self.forms.get_or_init(|| {
            // One that takes too much is not rendered again.
            let forms = ROLES.into_iter().map_while(|role| Some((role, self.form(role).ok()?)));
            forms.filter_map(|(role, form)| Some((role, form?))).collect()
        })
    }

    /// Whether the class of the checkpoint's tokenizer is told to put a token before every text.
    pub(crate) fn asks_for_bos(&self) -> bool {
        self.special.add_bos_token == Some(Value::Bool(true))
    }

    pub(crate) fn source(&self) -> Option<&str> {
        self.source.as_deref()
    }

    /// Whether there are variables of these names that the template reads.
    fn reads(&self, name: &str) -> bool {
        self.environment.get_template(NAME).is_ok_and(|template| template.undeclared_variables(false).contains(name))
    }

    /// The form in which the template shows the content of a role; `None` if it shows none. An error if it takes too
    /// much.
    fn form(&self, role: &'static str) -> std::result::Result<Option<Form>, minijinja::Error> {
        const SHOWN: &str = "(shown)";
        let shown = |form| {
            let user = || Message::new("user", Content::Text(".".into()));
            let call = json!([{ "id": "call00000", "type": "function", "function": { "name": "f", "arguments": {} } }]);
            let calling = || Message::new("assistant", Content::Text(String::new())).field("tool_calls", call.clone());
            let message = Message::new(role, Content::Text(SHOWN.into()));
            let message = if role == "tool" { message.field("tool_call_id", "call00000".into()) } else { message };
            let before = match role {
                "assistant" => vec![user()],
                "tool" => vec![user(), calling()],
                _ => Vec::new(),
            };
            let behind = if role == "user" { None } else { Some(user()) };
            let of_others = |message: Message| {
                let role = message.role;
                message.value(role, form)
            };
            let messages = before.into_iter().map(of_others).chain([message.value(role, form)]);
            let messages: Vec<Value> = messages.chain(behind.map(of_others)).collect();
            match self.rendered(&messages, &Options { adds_prompt: true, ..Options::default() }) {
                Err(error) if error.kind() == ErrorKind::OutOfFuel => Err(error),
                rendered => Ok(rendered.ok().filter(|rendered| rendered.contains(SHOWN))),
            }
        };
        Ok(match (shown(Form::Text)?, shown(Form::Parts)?) {
            (Some(text), Some(parts)) if text == parts => Some(Form::Both),
            (Some(_), _) => Some(Form::Text),
            (None, Some(_)) => Some(Form::Parts),
            (None, None) => None,
        })
    }

    /// The prompt of a conversation.
    pub(crate) fn render(&self, messages: Vec<Message>, options: &Options) -> ApiResult<String> {
        if self.source.is_none() {
            return Err(ApiError::bad_request(
                "The model has no chat template. Start the server with --chat-template FILE, or use /v1/completions.",
            ));
        }
        if options.documents.is_some() && !self.reads("documents") {
            return Err(ApiError::bad_request("The chat template reads no `documents`.").of("documents"));
        }
        let last = messages.last().map(|message| message.content.last().to_owned()).unwrap_or_default();
        let rendered = jinja::apart(|| {
            let forms = self.forms();
            let value = |message: Message| {
                let role = match message.role {
                    // A template that has no developer calls it system.
                    "developer" if !forms.contains_key("developer") => "system",
                    role => role,
                };
                message.value(role, forms.get(role).copied().unwrap_or(Form::Text))
            };
            self.rendered(&messages.into_iter().map(value).collect::<Vec<_>>(), options)
        });
        let rendered = rendered.and_then(|rendered| rendered).map_err(|error| {
            let message = match error.kind() {
                ErrorKind::OutOfFuel => {
                    "The chat template takes too long, or too much memory, for the messages.".into()
                }
                _ => format!("The chat template refuses the messages: {error}"),
            };
            ApiError::bad_request(message).of("messages")
        })?;
        if options.continues_last { up_to_last(&rendered, &last) } else { Ok(rendered) }
    }

    fn rendered(&self, messages: &[Value], options: &Options) -> std::result::Result<String, minijinja::Error> {
        let token = |token: &Option<Token>| token.as_ref().map(|token| token.text().to_owned());
        let Special { bos_token, eos_token, pad_token, .. } = &self.special;
        // The variables of transformers' renderer. Tokens that the model does not have are not defined.
        let mut variables = Map::new();
        variables.insert("tools".into(), Value::Null);
        variables.insert("documents".into(), options.documents.clone().unwrap_or_default());
        let tokens =
            [("bos_token", token(bos_token)), ("eos_token", token(eos_token)), ("pad_token", token(pad_token))];
        variables.extend(tokens.into_iter().filter_map(|(name, token)| Some((name.into(), token?.into()))));
        variables.extend(options.kwargs.clone());
        variables.insert("messages".into(), messages.into());
        variables.insert("add_generation_prompt".into(), options.adds_prompt.into());
        self.environment.get_template(NAME)?.render(TemplateValue::from(Serde(variables)))
    }
}

/// A prompt without what comes behind the text of its last message, as transformers' `continue_final_message` cuts it.
fn up_to_last(rendered: &str, last: &str) -> ApiResult<String> {
    let text = last.trim();
    let Some(at) = rendered.rfind(text).filter(|_| !text.is_empty()) else {
        let message = "The chat template does not show the last message, so that it cannot be continued.";
        return Err(ApiError::bad_request(message).of("continue_final_message"));
    };
    let kept = last.trim_start();
    let len = if rendered[at..].starts_with(kept) { kept.len() } else { text.len() };
    Ok(rendered[..at + len].to_owned())
}

/// The template named `default` of a list of named templates.
pub(super) fn default_of(named: &Value) -> Result<String> {
    let named = named.as_array().map(Vec::as_slice).unwrap_or_default();
    let default = named.iter().find(|template| template["name"] == "default");
    let source = default.and_then(|template| template["template"].as_str());
    source.map(str::to_owned).ok_or_else(|| crate::error::Error::new("`chat_template` has no template named `default`"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Map, Value, json};

    use super::{super::messages, Form, Options, Template};

    /// A template beside a tokenizer_config.json.
    fn template(source: &str, config: &Value) -> Template {
        let dir = tempfile::tempdir().expect("there is a place for temporary files");
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).expect("it can be written");
        fs::write(dir.path().join("chat_template.jinja"), source).expect("it can be written");
        Template::read(dir.path(), None).expect("the template is right")
    }

    fn render(template: &Template, messages: Value, options: &Options) -> String {
        let Value::Array(messages) = messages else { unreachable!("messages are a list") };
        template.render(messages::read(messages).expect("they are messages"), options).expect("it renders")
    }

    #[test]
    fn variables_are_those_of_transformers() {
        let source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}|{{ tools is none }}|\
                      {{ documents is none }}|\
                      {% if add_generation_prompt %}G{% endif %}|{{ custom }}|{{ messages | length }}";
        let config = json!({ "bos_token": "<s>", "eos_token": { "content": "</s>", "special": true } });
        let template = template(source, &config);
        let user = json!([{ "role": "user", "content": "x" }]);
        let mut kwargs = Map::new();
        kwargs.insert("custom".into(), "c".into());
        let options = Options { adds_prompt: true, kwargs: kwargs.clone(), ..Options::default() };
        assert_eq!(render(&template, user.clone(), &options), "<s>|</s>|False|True|True|G|c|1");
        // Those of fields of the request are the fields', the others are the request's own.
        for (name, value) in [("messages", json!([])), ("add_generation_prompt", json!(true)), ("tools", json!([1]))] {
            kwargs.insert(name.into(), value);
        }
        let options = Options { kwargs, ..Options::default() };
        assert_eq!(render(&template, user, &options), "<s>|</s>|False|False|True||c|1");
    }

    #[test]
    fn the_form_of_contents_is_the_templates_own() {
        let form = |source: &str, role| template(source, &json!({})).forms().get(role).copied();
        let each = |body: &str| format!("{{% for message in messages %}}{body}{{% endfor %}}");
        let parts =
            "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}";
        let both =
            format!("{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{parts}{{% endif %}}");
        assert_eq!(form(&each("{{ message.content }}"), "user"), Some(Form::Text));
        assert_eq!(
            form(&each("{% if message.content is string %}{{ message.content }}{% endif %}"), "tool"),
            Some(Form::Text)
        );
        assert_eq!(form(&each(parts), "user"), Some(Form::Parts));
        assert_eq!(form(&each(&both), "assistant"), Some(Form::Both));
        let users = "{% if message.role != 'developer' %}{{ message.content }}{% endif %}";
        assert_eq!((form(&each(users), "developer"), form(&each(users), "system")), (None, Some(Form::Text)));

        // So no text is lost, whatever its form.
        let messages = json!([
            { "role": "developer", "content": "D" },
            { "role": "user", "content": [{ "type": "text", "text": "one" }, { "type": "text", "text": "two" }] },
        ]);
        let of = |source: &str| render(&template(&each(source), &json!({})), messages.clone(), &Options::default());
        assert_eq!(of(users), "Done\ntwo");
        assert_eq!([of(parts), of(&both)], ["Donetwo", "Donetwo"]);
    }

    #[test]
    fn a_prompt_may_end_with_the_last_message() {
        let source = "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}";
        let template = template(source, &json!({}));
        let messages = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": " Hello, " }]);
        let options = Options { continues_last: true, ..Options::default() };
        assert_eq!(render(&template, messages.clone(), &options), "<user>Hi<end><assistant> Hello, ");
        assert_eq!(render(&template, messages, &Options::default()), "<user>Hi<end><assistant> Hello, <end>");
        // The last of several texts that are the same.
        let messages =
            json!([{ "role": "user", "content": "Say yes, please" }, { "role": "assistant", "content": "yes" }]);
        assert_eq!(render(&template, messages, &options), "<user>Say yes, please<end><assistant>yes");
    }

    /// A quote behind a backslash is in its string, as in Python.
    #[test]
    fn strings_may_have_quotes() {
        let user = json!([{ "role": "user", "content": "you" }]);
        for (source, text) in [
            (r"{{ 'it\'s %s' % messages[0].content }}", "it's you"),
            (r#"{{ "a \" b %s" % messages[0].content }}"#, "a \" b you"),
            (r"{% set end = '\'%}' %}{{ end + messages[0].content }}", "'%}you"),
            (r"{{ '\\' + '%s' % messages[0].content }}", r"\you"),
        ] {
            assert_eq!(render(&template(source, &json!({})), user.clone(), &Options::default()), text, "{source}");
        }
    }
}
