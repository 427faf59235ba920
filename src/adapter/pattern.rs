//! The regular expressions of `adapter_config.json`: Python's `re` applied to module paths, as in PEFT.
//!
//! Paths are printable ASCII, so character classes mean the same in ASCII mode as in Python's Unicode mode. Invariants: a pattern
//! has only constructs that both engines interpret alike, and its compiled size and matching work are bounded.

use fancy_regex::{BytesMode, Regex, RegexBuilder};

use super::shown::Shown;

/// The largest number of regular expressions in one configuration. Plain paths do not count.
pub(super) const MAX_REGEXES: usize = 64;

/// The most work of all patterns on all modules, in the units of [`Pattern::work`].
pub(super) const MAX_WORK: u64 = 1 << 31;

/// Size limits that compiled patterns are classified by, in bytes. The last is the largest allowed size.
const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];

/// The smallest size of one state of a compiled pattern, in bytes.
const STATE_BYTES: usize = 32;

/// Backtracking limit per path, for patterns with look-around or back references.
const MAX_BACKTRACKS: usize = 4096;

/// A pattern of module paths.
#[derive(Debug)]
pub(super) struct Pattern {
    text: String,
    matcher: Matcher,
}

#[derive(Debug)]
enum Matcher {
    /// A path or the end of one, as bytes; `None` matches any byte. Most keys are plain, and there may be one per module.
    Plain {
        bytes: Vec<Option<u8>>,
        whole: bool,
    },
    Regex {
        regex: Box<Regex>,
        states: usize,
    },
}

/// The part of a path that a pattern must match.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Anchor {
    /// The whole path or an end of it that follows a dot: `re.match(rf"(.*\.)?({text})$", path)`.
    End,
    /// The whole path: `re.fullmatch(text, path)`.
    Whole,
}

impl Pattern {
    /// Compiles a pattern. The error is the reason why it is not supported.
    pub(super) fn new(text: &str, anchor: Anchor) -> Result<Self, String> {
        if let Some(bytes) = plain(text) {
            let whole = anchor == Anchor::Whole || text.starts_with('^');
            return Ok(Self { text: text.to_owned(), matcher: Matcher::Plain { bytes, whole } });
        }
        let (outer_groups, regex) = match anchor {
            Anchor::End => (2, format!(r"\A(?:(.*\.)?({text})$)")),
            Anchor::Whole => (0, format!(r"\A(?:{text})$")),
        };
        let backtracks = check(text, outer_groups).map_err(|error| Shown(error).to_string())?;
        let compile = |&size: &usize| {
            let mut builder = RegexBuilder::new(&regex);
            builder.bytes_mode(BytesMode::Ascii).backtrack_limit(MAX_BACKTRACKS).max_prog_size(SIZES[3] / STATE_BYTES);
            builder.delegate_size_limit(size).delegate_dfa_size_limit(SIZES[3]);
            builder.build().map(|regex| (regex, size))
        };
        let compiled = SIZES.iter().map(compile).reduce(|smaller, larger| smaller.or(larger));
        let (regex, size) = match compiled {
            Some(Ok(compiled)) => compiled,
            Some(Err(error)) => return Err(Shown(error).to_string()),
            None => return Err("it is too large".to_owned()),
        };
        let states = if backtracks { MAX_BACKTRACKS } else { size / STATE_BYTES };
        Ok(Self { text: text.to_owned(), matcher: Matcher::Regex { regex: Box::new(regex), states } })
    }

    /// The source text.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether a path matches. The error is that matching takes too long.
    pub(super) fn matches(&self, path: &str) -> Result<bool, String> {
        match &self.matcher {
            Matcher::Plain { bytes, whole } => {
                let Some(start) = path.len().checked_sub(bytes.len()) else { return Ok(false) };
                let (before, end) = path.as_bytes().split_at(start);
                let begins = before.is_empty() || (!whole && before.last() == Some(&b'.'));
                let mut pairs = end.iter().zip(bytes);
                Ok(begins && pairs.all(|(byte, want)| want.is_none_or(|want| want == *byte)))
            }
            Matcher::Regex { regex, .. } => regex.is_match(path.as_bytes()).map_err(|error| Shown(error).to_string()),
        }
    }

    /// Whether a pattern is a plain path.
    pub(super) fn is_plain(text: &str) -> bool {
        plain(text).is_some()
    }

    pub(super) fn is_regex(&self) -> bool {
        matches!(self.matcher, Matcher::Regex { .. })
    }

    /// An upper bound on the work of matching `paths` paths with `bytes` bytes in total: states visited per byte.
    pub(super) fn work(&self, paths: u64, bytes: u64) -> u64 {
        match self.matcher {
            Matcher::Plain { .. } => paths,
            Matcher::Regex { states, .. } => bytes.saturating_mul(states as u64),
        }
    }
}

/// The bytes of a plain path. Dots are wildcards unless escaped. A leading `^` or trailing `$` is dropped.
fn plain(text: &str) -> Option<Vec<Option<u8>>> {
    let text = text.strip_prefix('^').unwrap_or(text);
    let text = text.strip_suffix('$').unwrap_or(text);
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'.' => None,
            b'\\' if bytes.next()? == b'.' => Some(b'.'),
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => Some(byte),
            _ => return None,
        });
    }
    Some(plain)
}

/// An open group.
struct Group {
    /// Number and name, if it captures.
    captures: Option<(usize, String)>,
    looks: Option<Look>,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Look {
    Ahead,
    Behind,
}

/// Rejects constructs that Python's `re` lacks, or that the two engines or different versions interpret differently. Otherwise
/// returns whether matching requires backtracking. `outer_groups` groups surround the pattern, the last of them still open.
fn check(text: &str, outer_groups: usize) -> Result<bool, &'static str> {
    const PUNCTUATION: &[u8] = br".^$*+?()[]{}|\/-_#&~,:=!@% ";
    if !text.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
        return Err("it has a character that is not printable ASCII");
    }
    let mut rest = text.as_bytes();
    let mut groups: Vec<Group> = Vec::new();
    // Numbers and names that a back reference may use.
    let mut closed: Vec<(usize, String)> = Vec::new();
    let mut last_group = outer_groups;
    let mut names: Vec<String> = Vec::new();
    let mut backtracks = false;
    // Whether the previous item can be repeated.
    let mut repeatable = false;
    while let [byte, after @ ..] = rest {
        rest = after;
        let looks_behind = groups.iter().any(|group| group.looks == Some(Look::Behind));
        match byte {
            b'\\' => {
                let [escaped, after @ ..] = rest else { return Err("it ends in a backslash") };
                rest = after;
                repeatable = !matches!(escaped, b'b' | b'B' | b'A');
                match escaped {
                    b'd' | b'D' | b'w' | b'W' | b's' | b'S' | b'b' | b'B' | b'A' => {}
                    b'1'..=b'9' if !rest.first().is_some_and(u8::is_ascii_digit) => {
                        let number = usize::from(escaped - b'0');
                        if !closed.iter().any(|(other, _)| *other == number) {
                            return Err("a back reference has no closed group before it");
                        }
                        backtracks = true;
                    }
                    escaped if PUNCTUATION.contains(escaped) => {}
                    _ => return Err("it has an escape that Python lacks or interprets differently"),
                }
            }
            b'[' => {
                rest = class(rest)?;
                repeatable = true;
            }
            b'(' => {
                let (group, after) = open(rest, &mut last_group)?;
                rest = after;
                repeatable = false;
                let Some(group) = group else {
                    let end = rest.iter().position(|byte| *byte == b')').ok_or("a group is not closed")?;
                    if !closed.iter().any(|(_, name)| name.as_bytes() == &rest[..end]) {
                        return Err("a back reference has no closed group before it");
                    }
                    (rest, backtracks, repeatable) = (&rest[end + 1..], true, true);
                    continue;
                };
                if looks_behind || (group.captures.is_some() && groups.iter().any(|group| group.looks.is_some())) {
                    return Err("a group is inside look-around");
                }
                if let Some((_, name)) = group.captures.as_ref().filter(|(_, name)| !name.is_empty()) {
                    if names.contains(name) {
                        return Err("two groups have the same name");
                    }
                    names.push(name.clone());
                }
                backtracks |= group.looks.is_some();
                groups.push(group);
            }
            b')' => {
                let group = groups.pop().ok_or("it has an unmatched closing parenthesis")?;
                repeatable = group.looks.is_none();
                closed.extend(group.captures);
            }
            b'*' | b'+' | b'?' | b'{' => {
                if !repeatable || looks_behind {
                    return Err("a repetition follows nothing that can be repeated");
                }
                if *byte == b'{' {
                    rest = counts(rest)?;
                }
                // A lazy repetition matches the same strings.
                rest = rest.strip_prefix(b"?").unwrap_or(rest);
                repeatable = false;
            }
            b'|' if looks_behind => return Err("look-behind has alternatives"),
            b'^' | b'$' | b'|' => repeatable = false,
            b']' | b'}' => return Err("it has an unmatched closing bracket"),
            _ => repeatable = true,
        }
    }
    if groups.is_empty() { Ok(backtracks) } else { Err("a group is not closed") }
}

/// Parses what follows an opening parenthesis; `None` for a named back reference.
fn open<'a>(rest: &'a [u8], last_group: &mut usize) -> Result<(Option<Group>, &'a [u8]), &'static str> {
    let group = |captures, looks| Some(Group { captures, looks });
    let Some(rest) = rest.strip_prefix(b"?") else {
        *last_group += 1;
        return Ok((group(Some((*last_group, String::new())), None), rest));
    };
    match rest {
        [b':', rest @ ..] => Ok((group(None, None), rest)),
        [b'=' | b'!', rest @ ..] => Ok((group(None, Some(Look::Ahead)), rest)),
        [b'<', b'=' | b'!', rest @ ..] => Ok((group(None, Some(Look::Behind)), rest)),
        [b'P', b'=', rest @ ..] => Ok((None, rest)),
        [b'P', b'<', rest @ ..] => {
            let end = rest.iter().position(|byte| *byte == b'>').ok_or("the name of a group does not end")?;
            let name = &rest[..end];
            let is_name = name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
            if !is_name || name.first().is_none_or(u8::is_ascii_digit) {
                return Err("the name of a group is not an identifier");
            }
            *last_group += 1;
            Ok((group(Some((*last_group, String::from_utf8_lossy(name).into_owned())), None), &rest[end + 1..]))
        }
        _ => Err("it has a kind of group that Python lacks or interprets differently"),
    }
}

/// Parses the rest of a character class.
fn class(mut rest: &[u8]) -> Result<&[u8], &'static str> {
    rest = rest.strip_prefix(b"^").unwrap_or(rest);
    if rest.first() == Some(&b']') {
        return Err("a character class begins with a bracket");
    }
    // Whether the previous character may begin a range.
    let mut begins = false;
    let mut first = true;
    loop {
        let [byte, after @ ..] = rest else { return Err("a character class is not closed") };
        rest = after;
        match (byte, after) {
            (b']', _) => return Ok(rest),
            (b'[', _) => return Err("a character class has a bracket inside"),
            (b'&', [b'&', ..]) | (b'~', [b'~', ..]) | (b'|', [b'|', ..]) | (b'-', [b'-', ..]) => {
                return Err("a character class has a set operator inside");
            }
            (b'\\', [b'd' | b'D' | b'w' | b'W' | b's' | b'S', after @ ..]) => (rest, begins) = (after, false),
            (b'\\', [escaped, after @ ..]) if escaped.is_ascii_punctuation() && !matches!(escaped, b'<' | b'>') => {
                (rest, begins) = (after, false);
            }
            (b'\\', _) => return Err("it has an escape that Python lacks or interprets differently"),
            (b'-', [b']', ..]) => begins = false,
            (b'-', _) if first => begins = false,
            (b'-', [end, after @ ..]) if begins && end.is_ascii_alphanumeric() => (rest, begins) = (after, false),
            (b'-', _) => return Err("a character range is not one of letters or digits"),
            (byte, _) => begins = byte.is_ascii_alphanumeric(),
        }
        first = false;
    }
}

/// Parses the rest of `{m}`, `{m,}` or `{m,n}`.
fn counts(rest: &[u8]) -> Result<&[u8], &'static str> {
    let end = rest.iter().position(|byte| *byte == b'}').ok_or("a brace is not closed")?;
    let (counts, rest) = (&rest[..end], &rest[end + 1..]);
    let digits = |count: &&[u8]| count.iter().all(u8::is_ascii_digit);
    let count = |count: &[u8]| str::from_utf8(Some(count).filter(digits)?).ok()?.parse::<u32>().ok();
    let mut parts = counts.split(|byte| *byte == b',');
    let valid = match (parts.next().map(count), parts.next(), parts.next()) {
        (Some(Some(_)), None | Some(b""), None) => true,
        (Some(Some(least)), Some(most), None) => count(most).is_some_and(|most| least <= most),
        _ => false,
    };
    if valid { Ok(rest) } else { Err("a brace is not a repetition `{m}`, `{m,}` or `{m,n}`") }
}
