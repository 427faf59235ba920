//! Chat messages as OpenAI defines them.

use serde_json::{Map, Value, json};

use super::error::{ApiError, ApiResult};

/// The roles of messages. What `developer` is to a template, [`Forms`](super::chat) says.
pub(super) const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// A message whose content is text.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) role: &'static str,
    pub(super) content: Content,
    /// All fields, as templates see them.
    fields: Map<String, Value>,
}

/// The text of a message.
#[derive(Clone, Debug)]
pub(super) enum Content {
    Text(String),
    /// Texts in parts, as they were sent.
    Parts(Vec<String>),
}

/// How a template takes the content of messages of a role.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Form {
    /// As a text.
    Text,
    /// As a text, or as parts.
    Both,
    /// As parts alone.
    Parts,
}

/// Reads the messages of a request.
pub(super) fn read(messages: Vec<Value>) -> ApiResult<Vec<Message>> {
    if messages.is_empty() {
        return Err(refused("`messages` is empty."));
    }
    messages.into_iter().enumerate().map(|(index, message)| Message::read(index, message)).collect()
}

fn refused(message: impl Into<String>) -> ApiError {
    ApiError::bad_request(message).of("messages")
}

impl Message {
    fn read(index: usize, message: Value) -> ApiResult<Self> {
        let at = format!("messages[{index}]");
        let Value::Object(mut fields) = message else {
            return Err(refused(format!("`{at}` must be an object.")));
        };
        let role = match fields.get("role") {
            Some(Value::String(role)) => ROLES.into_iter().find(|known| known == role),
            None | Some(Value::Null) => return Err(refused(format!("`{at}.role` is missing."))),
            Some(_) => None,
        };
        let Some(role) = role else {
            let (given, known) = (&fields["role"], ROLES.join(", "));
            return Err(refused(format!("`{at}.role` is {given}; the roles are {known}.")));
        };
        if fields.get("function_call").is_some_and(|call| !call.is_null()) {
            return Err(refused(format!("`{at}.function_call` is not implemented; `tool_calls` is.")));
        }
        let has_calls = read_calls(&at, role, &mut fields)?;
        let content = match fields.shift_remove("content").unwrap_or(Value::Null) {
            Value::String(text) => Content::Text(text),
            Value::Array(parts) => {
                let parts = parts.iter().enumerate();
                let texts = parts.map(|(part, value)| text_of(value, &format!("{at}.content[{part}]")));
                Content::Parts(texts.collect::<ApiResult<_>>()?)
            }
            Value::Null => match fields.get("refusal") {
                Some(Value::String(refusal)) if role == "assistant" => Content::Text(refusal.clone()),
                _ if has_calls => Content::Text(String::new()),
                _ => return Err(refused(format!("`{at}.content` is missing."))),
            },
            _ => return Err(refused(format!("`{at}.content` must be a text, or a list of parts."))),
        };
        Ok(Self { role, content, fields })
    }

    /// A message without other fields.
    pub(super) fn new(role: &'static str, content: Content) -> Self {
        Self { role, content, fields: Map::new() }
    }

    pub(super) fn field(mut self, name: &str, value: Value) -> Self {
        self.fields.insert(name.into(), value);
        self
    }

    /// The message as a template sees it.
    pub(super) fn value(self, role: &str, form: Form) -> Value {
        let part = |text: &String| json!({ "type": "text", "text": text });
        let content = match (self.content, form) {
            (Content::Text(text), Form::Text | Form::Both) => text.into(),
            (Content::Text(text), Form::Parts) => json!([part(&text)]),
            // As vLLM joins them.
            (Content::Parts(parts), Form::Text) => parts.join("\n").into(),
            (Content::Parts(parts), Form::Both | Form::Parts) => parts.iter().map(part).collect(),
        };
        let mut fields = Map::new();
        fields.insert("role".into(), role.into());
        fields.insert("content".into(), content);
        fields.extend(self.fields.into_iter().filter(|(name, _)| name != "role"));
        Value::Object(fields)
    }
}

impl Content {
    /// The text at its end.
    pub(super) fn last(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => parts.last().map_or("", String::as_str),
        }
    }
}

/// The text of a part; other parts are refused by their type.
fn text_of(part: &Value, at: &str) -> ApiResult<String> {
    if let Value::String(text) = part {
        return Ok(text.clone());
    }
    if !part.is_object() {
        return Err(refused(format!("`{at}` must be an object with a `type`.")));
    }
    let field = match part["type"].as_str() {
        // The two others are the Responses API's, which vLLM takes, too.
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some(other) => {
            return Err(refused(format!("`{at}` is of the type `{other}`; the model reads parts of the type `text`.")));
        }
        None => return Err(refused(format!("`{at}.type` is missing."))),
    };
    let text = part[field].as_str().map(str::to_owned);
    text.ok_or_else(|| refused(format!("`{at}.{field}` must be a text.")))
}

/// Checks the tool calls of a message, and gives templates their arguments as objects, as transformers' documentation
/// asks for. Returns whether there are any.
fn read_calls(at: &str, role: &str, fields: &mut Map<String, Value>) -> ApiResult<bool> {
    let calls = match fields.get_mut("tool_calls") {
        None => return Ok(false),
        Some(Value::Null) => &mut Vec::new(),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(refused(format!("`{at}.tool_calls` must be a list."))),
    };
    if calls.is_empty() {
        fields.shift_remove("tool_calls");
        return Ok(false);
    }
    if role != "assistant" {
        return Err(refused(format!("`{at}.tool_calls` is of the role `{role}`; the role `assistant` has them.")));
    }
    for (index, call) in calls.iter_mut().enumerate() {
        let at = format!("{at}.tool_calls[{index}]");
        if call.get("type").is_some_and(|kind| kind != "function") {
            return Err(refused(format!("`{at}.type` is {}; `function` is implemented.", call["type"])));
        }
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
            return Err(refused(format!("`{at}.function` must be an object.")));
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(refused(format!("`{at}.function.name` must be a text.")));
        }
        let arguments = match function.get("arguments") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text)
                .map_err(|error| refused(format!("`{at}.function.arguments` is not JSON: {error}.")))?,
            Some(value) => value.clone(),
        };
        if !arguments.is_object() {
            return Err(refused(format!("`{at}.function.arguments` must be an object.")));
        }
        function.insert("arguments".into(), arguments);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Form, read};

    fn refusal(message: Value) -> String {
        read(vec![message]).expect_err("it is refused").message().to_owned()
    }

    fn seen(message: Value, form: Form) -> Value {
        let message = read(vec![message]).expect("it is a message").swap_remove(0);
        let role = message.role;
        message.value(role, form)
    }

    #[test]
    fn what_is_no_message_is_refused_by_name() {
        for (message, part) in [
            (json!("hello"), "`messages[0]` must be an object"),
            (json!({ "content": "x" }), "`messages[0].role` is missing"),
            (json!({ "role": "usr", "content": "x" }), "`messages[0].role` is \"usr\"; the roles are system,"),
            (json!({ "role": 1, "content": "x" }), "`messages[0].role` is 1"),
            (json!({ "role": "user" }), "`messages[0].content` is missing"),
            (json!({ "role": "user", "content": null }), "`messages[0].content` is missing"),
            (json!({ "role": "assistant", "content": null, "tool_calls": [] }), "`messages[0].content` is missing"),
            (json!({ "role": "user", "content": 7 }), "`messages[0].content` must be a text"),
            (json!({ "role": "user", "content": [7] }), "`messages[0].content[0]` must be an object"),
            (json!({ "role": "user", "content": [{ "text": "x" }] }), "`messages[0].content[0].type` is missing"),
            (
                json!({ "role": "user", "content": [{ "type": "text" }] }),
                "`messages[0].content[0].text` must be a text",
            ),
            (
                json!({ "role": "user", "content": [{ "type": "text", "text": "x" }, { "type": "image_url" }] }),
                "`messages[0].content[1]` is of the type `image_url`",
            ),
            (json!({ "role": "user", "content": "x", "tool_calls": [{}] }), "has them"),
            (json!({ "role": "assistant", "content": "", "tool_calls": [{}] }), "tool_calls[0].function` must be"),
            (
                json!({ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": "{" } }] }),
                "tool_calls[0].function.arguments` is not JSON",
            ),
            (json!({ "role": "assistant", "content": "", "function_call": {} }), "`messages[0].function_call`"),
        ] {
            let refusal = refusal(message);
            assert!(refusal.contains(part), "{refusal}");
        }
        assert!(read(Vec::new()).is_err());
    }

    #[test]
    fn contents_have_the_form_of_the_template() {
        let parts = json!([{ "type": "text", "text": "one" }, "two"]);
        let typed = json!([{ "type": "text", "text": "one" }, { "type": "text", "text": "two" }]);
        let given = json!({ "role": "user", "content": parts, "name": "me" });
        assert_eq!(seen(given.clone(), Form::Text), json!({ "role": "user", "content": "one\ntwo", "name": "me" }));
        assert_eq!(seen(given.clone(), Form::Both)["content"], typed);
        assert_eq!(seen(given, Form::Parts)["content"], typed);
        for kind in ["text", "input_text", "output_text"] {
            let given = json!({ "role": "user", "content": [{ "type": kind, "text": "one" }] });
            assert_eq!(seen(given, Form::Text)["content"], "one");
        }
        let text = json!({ "role": "user", "content": "one" });
        assert_eq!(seen(text.clone(), Form::Both)["content"], "one");
        assert_eq!(seen(text, Form::Parts)["content"], json!([{ "type": "text", "text": "one" }]));
    }

    #[test]
    fn arguments_of_calls_are_objects() {
        let call =
            json!({ "id": "1", "type": "function", "function": { "name": "f", "arguments": "{\"b\": 1, \"a\": 2}" } });
        let seen = seen(json!({ "role": "assistant", "tool_calls": [call] }), Form::Text);
        assert_eq!(seen["content"], "");
        let arguments = &seen["tool_calls"][0]["function"]["arguments"];
        assert_eq!(arguments.to_string(), "{\"b\":1,\"a\":2}", "the order is that of the client");
    }
}
