//! Jinja as transformers sets it up for chat templates.
//!
//! The syntax, the functions and the filters are those of `render_jinja_template` in transformers'
//! `utils/chat_template_utils.py`, and values are written as Python writes them. `tests/templates.py` has transformers
//! render the templates that the tests here compare with.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
    iter, thread,
};

use jiff::{Zoned, fmt::strtime};
use minijinja::{
    Environment, Error, ErrorKind, State, escape_formatter,
    syntax::SyntaxConfig,
    value::{Kwargs, Rest, Value, ValueKind, from_args},
};

/// What a render may cost: an instruction or 64 bytes are one. A conversation of 16,000 messages costs less than half
/// of it.
const FUEL: u64 = 1 << 22;
/// The bytes that cost as much as an instruction.
const BYTES: usize = 64;
/// The stack of a render: lists in lists, of which the fuel allows hundreds of thousands, end on it.
const STACK: usize = 256 << 20;
/// How deep values are nested in JSON.
const MAX_DEPTH: usize = 500;

/// Runs what renders. A template can end neither its thread nor others'.
pub(super) fn apart<V: Send>(render: impl FnOnce() -> V + Send) -> Result<V, Error> {
    let failed = |error: String| Error::new(ErrorKind::InvalidOperation, error);
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("template".into()).stack_size(STACK);
        let running = builder.spawn_scoped(scope, render).map_err(|error| failed(error.to_string()))?;
        running.join().map_err(|_| failed("it panics".into()))
    })
}

/// An environment whose only template has this name and source.
pub(super) fn environment(name: &'static str, source: &str) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        if let Some(text) = value.as_str() {
            pay_for_method(state, text, method, arguments)?;
        }
        let of_text = value.as_str().and_then(|text| method_of_text(state, text, method, arguments));
        of_text.unwrap_or_else(|| minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments))
    });
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.set_formatter(|out, state, value| match python_float(value) {
        Some(text) => escape_formatter(out, state, &Value::from(text)),
        None => {
            // What it prints is paid for before there is any.
            if value.as_object().is_some() {
                pay_for_printed(state, value)?;
            }
            escape_formatter(out, state, value)
        }
    });
    environment.add_function("raise_exception", |message: String| -> Result<(), Error> { Err(invalid(message)) });
    environment.add_function("strftime_now", |format: String| {
        let now = strtime::format(format.as_bytes(), &Zoned::now());
        now.map_err(|error| invalid(format!("strftime_now({format:?}): {error}")))
    });
    environment
        .add_filter("tojson", |state: &State<'_, '_>, value: &Value, kwargs: Kwargs| to_json(state, value, &kwargs));
    environment.add_template_owned(name, rewritten(source))?;
    Ok(environment)
}

fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Pays for bytes before there are any.
fn pay(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel(bytes.div_ceil(BYTES) as u64)
}

/// Pays for what a value is as text.
struct Printed<'s, 't, 'e>(&'s State<'t, 'e>);

impl fmt::Write for Printed<'_, '_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        pay(self.0, text.len()).map_err(|_| fmt::Error)
    }
}

fn pay_for_printed(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    write!(Printed(state), "{value}").map_err(|_| ErrorKind::OutOfFuel.into())
}

/// Pays for what a method of a text reads and makes, beyond the text itself.
fn pay_for_method(state: &State<'_, '_>, text: &str, method: &str, arguments: &[Value]) -> Result<(), Error> {
    let first = arguments.first().and_then(Value::as_str);
    pay(state, arguments.iter().filter_map(Value::as_str).map(str::len).sum())?;
    match (method, first) {
        ("replace", Some(old)) => {
            let new = arguments.get(1).and_then(Value::as_str).unwrap_or_default();
            pay(state, text.matches(old).count().saturating_mul(new.len()))
        }
        ("strip" | "lstrip" | "rstrip", Some(chars)) => pay(state, text.len().saturating_mul(chars.len())),
        ("split", Some(separator)) => pay(state, text.matches(separator).count().saturating_mul(BYTES)),
        ("split", None) => pay(state, text.split_whitespace().count().saturating_mul(BYTES)),
        ("splitlines", _) => pay(state, text.lines().count().saturating_mul(BYTES)),
        ("join" | "startswith" | "endswith", None) => {
            let Some(items) = arguments.first().and_then(|items| items.try_iter().ok()) else { return Ok(()) };
            for item in items {
                pay(state, text.len())?;
                pay_for_printed(state, &item)?;
            }
            Ok(())
        }
        ("format", _) => {
            // All widths that the text names, and each argument in each place.
            let numbers = text.split(|char: char| !char.is_ascii_digit()).filter(|digits| !digits.is_empty());
            let widths = numbers.fold(0_usize, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(usize::MAX)));
            pay(state, widths)?;
            for _ in text.matches('{') {
                arguments.iter().try_for_each(|argument| pay_for_printed(state, argument))?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The methods of Python's `str` that pycompat lacks, or has in another way.
fn method_of_text(
    state: &State<'_, '_>,
    text: &str,
    method: &str,
    arguments: &[Value],
) -> Option<Result<Value, Error>> {
    let padding = |width: usize, with: Option<char>| -> Result<String, Error> {
        let (with, count) = (with.unwrap_or(' '), width.saturating_sub(text.chars().count()));
        pay(state, count.saturating_mul(with.len_utf8()))?;
        Ok(iter::repeat_n(with, count).collect())
    };
    let padded = |is_left| {
        let (width, with) = from_args(arguments)?;
        let padding = padding(width, with)?;
        Ok(if is_left { text.to_owned() + &padding } else { padding + text })
    };
    let result = match method {
        "title" => from_args(arguments).map(|()| title(text)),
        "swapcase" => from_args(arguments).map(|()| {
            let swapped = |char: char| match char.is_uppercase() {
                true => char.to_lowercase().collect::<String>(),
                false => char.to_uppercase().collect(),
            };
            text.chars().map(swapped).collect()
        }),
        "removeprefix" => {
            from_args(arguments).map(|(prefix,): (&str,)| text.strip_prefix(prefix).unwrap_or(text).to_owned())
        }
        "removesuffix" => {
            from_args(arguments).map(|(suffix,): (&str,)| text.strip_suffix(suffix).unwrap_or(text).to_owned())
        }
        "ljust" => padded(true),
        "rjust" => padded(false),
        "zfill" => from_args(arguments).and_then(|(width,): (usize,)| {
            let sign = if text.starts_with(['+', '-']) { 1 } else { 0 };
            Ok(text[..sign].to_owned() + &padding(width, Some('0'))? + &text[sign..])
        }),
        _ => return None,
    };
    Some(result.map(Value::from))
}

/// Python's `str.title`: a letter behind another is in lower case, any other in upper case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_inside = false;
    for char in text.chars() {
        if is_inside {
            out.extend(char.to_lowercase());
        } else {
            out.extend(char.to_uppercase());
        }
        is_inside = char.is_alphabetic();
    }
    out
}

/// How Python's `json.dumps` is called.
struct Json<'s, 't, 'e> {
    state: &'s State<'t, 'e>,
    is_ascii: bool,
    indent: Option<usize>,
    is_sorted: bool,
    between: String,
    behind_key: String,
}

/// `tojson` with the arguments that transformers gives it.
fn to_json(state: &State<'_, '_>, value: &Value, kwargs: &Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let (between, behind_key) = match separators.as_deref() {
        Some([between, behind_key]) => (between.clone(), behind_key.clone()),
        Some(_) => return Err(invalid("tojson: separators are two strings")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let is_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let is_sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let mut out = String::new();
    Json { state, is_ascii, indent, is_sorted, between, behind_key }.write(&mut out, value, 0)?;
    Ok(out)
}

impl Json<'_, '_, '_> {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid("tojson: the value is nested too deeply"));
        }
        // With the line, the separators and the brackets around it.
        let line = self.indent.unwrap_or(0).saturating_mul(depth + 1);
        let text = value.as_str().unwrap_or_default();
        let around = self.between.len() + self.behind_key.len() + BYTES;
        pay(self.state, line.saturating_add(text.len() + around))?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut items = Vec::new();
                for item in value.try_iter()? {
                    pay(self.state, BYTES)?;
                    items.push(item);
                }
                self.write_all(out, ['[', ']'], depth, &items, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut entries = Vec::new();
                for key in value.try_iter()? {
                    let name = match (key.kind(), key.as_str()) {
                        (_, Some(text)) => text.to_owned(),
                        (ValueKind::None, _) => "null".into(),
                        (ValueKind::Bool, _) => key.is_true().to_string(),
                        (ValueKind::Number, _) => number(&key),
                        (kind, _) => return Err(invalid(format!("tojson: a {kind} is no key of JSON"))),
                    };
                    pay(self.state, BYTES + name.len())?;
                    entries.push((name, value.get_item(&key)?));
                }
                if self.is_sorted {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.write_all(out, ['{', '}'], depth, &entries, |out, (name, item)| {
                    self.write_text(out, name);
                    out.push_str(&self.behind_key);
                    self.write(out, item, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("tojson: a value that is {kind} has no JSON"))),
        }
        Ok(())
    }

    /// Writes items between brackets.
    fn write_all<T>(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: &[T],
        mut write: impl FnMut(&mut String, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let new_line = |out: &mut String, depth: usize| {
            if let Some(indent) = self.indent {
                out.push('\n');
                out.extend(iter::repeat_n(' ', indent * depth));
            }
        };
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.between);
            }
            new_line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn write_text(&self, out: &mut String, text: &str) {
        let quoted = serde_json::Value::from(text).to_string();
        for char in quoted.chars() {
            if self.is_ascii && !(' '..='~').contains(&char) {
                char.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
            } else {
                out.push(char);
            }
        }
    }
}

/// A number as `json.dumps` writes it.
fn number(value: &Value) -> String {
    match python_float(value) {
        Some(text) => text.replace("inf", "Infinity").replace("nan", "NaN"),
        None => value.to_string(),
    }
}

/// What `repr` of Python makes of a float; `None` for other values.
fn python_float(value: &Value) -> Option<String> {
    if value.kind() != ValueKind::Number || value.is_integer() {
        return None;
    }
    let number = f64::try_from(value.clone()).ok()?;
    if number.is_nan() {
        return Some("nan".into());
    }
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return Some(scientific) };
    let exponent: i32 = exponent.parse().ok()?;
    if number == 0.0 || (-4..16).contains(&exponent) {
        let text = number.to_string();
        return Some(if text.contains('.') { text } else { text + ".0" });
    }
    Some(format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()))
}

/// A template without what minijinja does not have, and with what does the same:
/// - `{% generation %}`, which marks the text of an answer in training, becomes a scope;
/// - `'…' % x`, on a string literal, becomes the filter `format`.
fn rewritten(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let (open, close) = match tag.as_bytes().get(1) {
            Some(b'#') => {
                // A comment is dropped with its tag.
                let end = tag.find("#}").map_or(tag.len(), |end| end + 2);
                out.push_str(&tag[..end]);
                rest = &tag[end..];
                continue;
            }
            Some(b'%') => ("{%", "%}"),
            Some(b'{') => ("{{", "}}"),
            _ => {
                out.push('{');
                rest = &tag[1..];
                continue;
            }
        };
        let inner = &tag[open.len()..];
        let end = end_of_tag(inner, close);
        let body = &inner[..end];
        let word = body.trim_matches(['-', '+']).trim();
        out.push_str(open);
        match word {
            "generation" | "endgeneration" if open == "{%" => {
                let scope = if word == "generation" { "with generation = true" } else { "endwith" };
                out.push_str(&body.replacen(word, scope, 1));
            }
            _ => out.push_str(&with_format(body)),
        }
        rest = &inner[end..];
        if word == "raw" {
            // Up to the tag that ends it, nothing is a tag.
            let end = rest.find("endraw").unwrap_or(rest.len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out + rest
}

/// Where the body of a tag ends: at `close` outside of strings and brackets.
fn end_of_tag(body: &str, close: &str) -> usize {
    let (mut at, mut depth) = (0, 0_usize);
    while at < body.len() {
        let byte = body.as_bytes()[at];
        if depth == 0 && body[at..].starts_with(close) {
            return at;
        }
        match byte {
            b'\'' | b'"' => {
                at = end_of_string(body, at);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += body[at..].chars().next().map_or(1, char::len_utf8);
    }
    body.len()
}

/// Behind the string literal that begins here.
fn end_of_string(text: &str, start: usize) -> usize {
    let bytes = text.as_bytes();
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 1,
            byte if byte == bytes[start] => return at + 1,
            _ => {}
        }
        at += 1;
    }
    text.len()
}

/// Behind the bracket that closes the one here.
fn end_of_group(text: &str, start: usize) -> usize {
    let (mut at, mut depth) = (start, 0_usize);
    while at < text.len() {
        match text.as_bytes()[at] {
            b'\'' | b'"' => {
                at = end_of_string(text, at);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    text.len()
}

/// Behind the operand that begins here: a value with its attributes, items, calls and filters.
fn end_of_operand(text: &str, start: usize) -> usize {
    let word = |at: usize| {
        let is_word = |char: char| char.is_alphanumeric() || matches!(char, '_' | '.');
        text[at..].find(|char| !is_word(char)).map_or(text.len(), |len| at + len)
    };
    let space = |at: usize| text[at..].find(|char: char| !char.is_whitespace()).map_or(text.len(), |len| at + len);
    let mut at = space(start);
    at = match text.as_bytes().get(at) {
        Some(b'\'' | b'"') => end_of_string(text, at),
        Some(b'(' | b'[' | b'{') => end_of_group(text, at),
        Some(b'-') => word(at + 1),
        _ => word(at),
    };
    loop {
        match text.as_bytes().get(at) {
            Some(b'(' | b'[') => at = end_of_group(text, at),
            Some(b'.') => at = word(at),
            _ => {
                let bar = space(at);
                if text.as_bytes().get(bar) != Some(&b'|') {
                    return at;
                }
                at = word(space(bar + 1));
            }
        }
    }
}

/// The body of a tag with `format` for `%` behind string literals.
fn with_format(body: &str) -> String {
    let mut out = String::with_capacity(body.len());
    let mut at = 0;
    while at < body.len() {
        if !matches!(body.as_bytes()[at], b'\'' | b'"') {
            let next = body[at..].find(['\'', '"']).map_or(body.len(), |len| at + len);
            out.push_str(&body[at..next]);
            at = next;
            continue;
        }
        let end = end_of_string(body, at);
        out.push_str(&body[at..end]);
        at = end;
        let behind = body[end..].trim_start();
        let Some(operand) = behind.strip_prefix('%') else { continue };
        let from = body.len() - operand.len();
        let to = end_of_operand(body, from);
        let operand = body[from..to].trim();
        // A tuple has the arguments.
        let is_tuple = operand.starts_with('(') && end_of_group(operand, 0) == operand.len();
        let operand = if is_tuple { &operand[1..operand.len() - 1] } else { operand };
        out.push_str(&format!("|format({})", with_format(operand)));
        at = to;
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use minijinja::value::Serde;
    use serde::Deserialize;
    use serde_json::{Map, Value, json};

    use super::{FUEL, environment};

    /// What transformers renders.
    #[derive(Deserialize)]
    struct Table {
        templates: BTreeMap<String, String>,
        conversations: BTreeMap<String, Conversation>,
        rows: Vec<Row>,
    }

    #[derive(Clone, Deserialize)]
    struct Conversation {
        messages: Value,
        given: Map<String, Value>,
    }

    #[derive(Deserialize)]
    struct Row {
        template: String,
        conversation: String,
        prompt: Option<String>,
        refused: Option<String>,
    }

    fn table() -> Table {
        serde_json::from_str(include_str!("../../tests/templates.json")).expect("the table is whole")
    }

    #[test]
    fn prompts_are_those_of_transformers() {
        let Table { templates, conversations, rows } = table();
        let mut wrong = Vec::new();
        for Row { template, conversation, prompt, refused } in rows {
            let (source, Conversation { messages, given }) =
                (&templates[&template], conversations[&conversation].clone());
            let environment = environment("chat", source).expect("a template is right");
            let mut context = json!({
                "messages": messages, "tools": null, "documents": null, "add_generation_prompt": true,
                "bos_token": "<s>", "eos_token": "<|endoftext|>", "pad_token": "<pad>",
            });
            context.as_object_mut().expect("it is an object").extend(given);
            let template_of = environment.get_template("chat").expect("it was added");
            let rendered = template_of.render(minijinja::Value::from(Serde(context)));
            let what = format!("{template}, {conversation}");
            match (rendered, prompt, refused) {
                (Ok(rendered), Some(prompt), _) if rendered == prompt => {}
                (Ok(rendered), Some(prompt), _) => {
                    for (number, (ours, theirs)) in rendered.lines().zip(prompt.lines()).enumerate() {
                        if ours != theirs {
                            wrong.push(format!("{what}, line {number}:\n  {ours}\n  {theirs}"));
                        }
                    }
                    wrong.push(format!("{what}: {} lines, not {}", rendered.lines().count(), prompt.lines().count()));
                }
                (Err(error), None, Some(refused)) if error.to_string().contains(&refused) => {}
                (rendered, prompt, refused) => wrong.push(format!("{what}: {rendered:?}, not {prompt:?} {refused:?}")),
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    /// What a template may do has a bound, and a long conversation is far from it.
    #[test]
    fn a_render_has_a_bound() {
        let rendered = |source: &str, context: Value, fuel| {
            let mut environment = environment("chat", source).expect("a template is right");
            environment.set_fuel(Some(fuel));
            let render = || environment.get_template("chat")?.render(minijinja::Value::from(Serde(context)));
            super::apart(render).and_then(|rendered| rendered)
        };
        let nested = |times, then: &str| {
            format!(
                "{{% set ns = namespace(x=[]) %}}{{% for a in range({times}) %}}{{% for b in range(30) %}}{{% set ns.x \
                 = [ns.x] %}}\
                 {{% endfor %}}{{% endfor %}}{then}"
            )
        };
        let doubled = |then: &str| {
            format!(
                "{{% set ns = namespace(x=['x']) %}}{{% for a in range(40) %}}{{% set ns.x = [ns.x, ns.x] %}}{{% \
                 endfor %}}{then}"
            )
        };
        let long = "{% set x = 'x' * 1000000 %}";
        for source in [
            "{{ 'x'.ljust(10000000000) }}",
            "{{ 'x'.rjust(width) }}",
            "{{ '5'.zfill(10000000000) }}",
            "{{ 'x' * 1000000000 }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%*d' % (1000000000, 1) }}",
            "{{ '%.1000000000f' % 1.5 }}",
            "{{ '{:1000000000}'.format(1) }}",
            "{{ '{:>{}}'.format(1, 1000000000) }}",
            "{{ 'x'|indent(1000000000, true) }}",
            "{{ [1, 2]|tojson(indent=1000000000) }}",
            "{{ ([1] * 1000000000)|tojson }}",
            "{{ [1] * 1000000000 }}",
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
            &doubled("{{ ns.x }}"),
            &doubled("{{ ns.x|tojson }}"),
            &doubled("{{ ','.join(ns.x) }}"),
            &doubled("{{ '{}'.format(ns.x) }}"),
            &nested(20, "{{ ns.x|tojson }}"),
            &format!("{long}{{{{ x.replace('x', x) }}}}"),
            &format!("{long}{{{{ x.replace('', x) }}}}"),
            &format!("{long}{{{{ x.join([1] * 1000000) }}}}"),
            &format!("{long}{{% for i in range(9999) %}}{{{{ 'y'.count(x) }}}}{{% endfor %}}"),
            &format!("{long}{{% for i in range(9999) %}}{{{{ x.strip('y' + x) }}}}{{% endfor %}}"),
            &format!("{long}{{% for i in range(9999) %}}{{{{ x.startswith([x + 'y'] * 9999) }}}}{{% endfor %}}"),
            &format!("{long}{{% for i in range(9999) %}}{{% set y = x.split('') %}}{{% endfor %}}"),
        ] {
            // Less than there is, so that the test does not take long.
            assert!(rendered(source, json!({ "width": 10_000_000_000_u64 }), FUEL / 16).is_err(), "{source}");
        }
        assert!(rendered(&nested(600, ""), json!({}), FUEL).is_ok_and(|text| text.is_empty()));

        let messages: Vec<Value> = (0..1600)
            .map(|index| if index % 2 == 0 { "user" } else { "assistant" })
            .map(|role| json!({ "role": role, "content": "<think>a</think> b" }))
            .collect();
        for (name, source) in &table().templates {
            let context =
                json!({ "messages": messages, "add_generation_prompt": true, "bos_token": "", "eos_token": "" });
            let rendered = rendered(source, context, FUEL / 20);
            let is_out = rendered.as_ref().is_err_and(|error| error.kind() == minijinja::ErrorKind::OutOfFuel);
            assert!(!is_out, "{name}");
        }
    }
}
