//! The regular expressions of `adapter_config.json`: Python's `re` applied to module paths, as in PEFT.
//!
//! Paths are printable ASCII, so character classes mean the same in ASCII mode as in Python's Unicode mode. Invariants:
//! a pattern has only constructs that both engines interpret alike, and its compiled size and matching work are
//! bounded.

use std::cell::Cell;

use fancy_regex::{BytesMode, Regex, RegexBuilder, RuntimeError};

use super::escaped::Escaped;

/// The largest number of regular expressions in one configuration. Plain paths do not count.
pub(super) const MAX_REGEXES: usize = 64;

/// The longest text of all of them, in bytes. A longer one would be too large when it is compiled.
pub(super) const MAX_REGEX_BYTES: usize = 32 << 10;

/// The most work of all patterns on all modules, in the units of [`Pattern::work`].
pub(super) const MAX_WORK: u64 = 1 << 31;

/// The part of it that may be found out only while paths are matched: about half a second.
const MAX_MATCHING: u64 = MAX_WORK / 2;

/// Size limits that compiled patterns are classified by, in bytes. The last is the largest allowed size.
const SIZES: [usize; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];

/// The smallest size of one state of a compiled pattern, in bytes.
const STATE_BYTES: usize = 32;

/// Backtracking limits per path, for patterns with look-around or back references. Most paths need few, so that a path
/// that needs more is matched again.
const BACKTRACKS: [usize; 3] = [64, 256, 4096];

/// A backtrack takes as long as that many bytes, at least.
const MIN_BYTES: usize = 64;

/// The deepest nesting of groups.
const MAX_DEPTH: usize = 50;
/// The most groups that capture.
const MAX_CAPTURES: usize = 500;

/// What is left of [`MAX_MATCHING`] for an adapter.
#[derive(Debug)]
pub(super) struct Work {
    left: Cell<u64>,
    /// Modules that it is for.
    pub(super) modules: usize,
}

impl Work {
    pub(super) fn new(modules: usize) -> Self {
        Self { left: Cell::new(MAX_MATCHING), modules }
    }

    pub(super) fn take(&self, work: usize) -> Result<(), Failure> {
        self.left.set(self.left.get().checked_sub(work as u64).ok_or(Failure::NoWork)?);
        Ok(())
    }
}

/// Why a path could not be matched.
#[derive(Debug)]
pub(super) enum Failure {
    /// All patterns together take too long.
    NoWork,
    /// This pattern takes too long on this path.
    Slow(String),
}

/// A pattern of module paths.
#[derive(Debug)]
pub(super) struct Pattern {
    text: String,
    matcher: Matcher,
}

#[derive(Debug)]
enum Matcher {
    /// A path or the end of one, as bytes; `None` matches any byte.
    Plain { bytes: Vec<Option<u8>>, whole: bool },
    /// An automaton of at most so many states.
    Automaton { regex: Box<Regex>, states: usize },
    /// The same expression with each of the limits of [`BACKTRACKS`].
    Backtracking(Vec<Regex>),
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
        let pattern = |matcher| Self { text: text.to_owned(), matcher };
        if let Some(bytes) = plain(text) {
            let whole = anchor == Anchor::Whole || text.starts_with('^');
            return Ok(pattern(Matcher::Plain { bytes, whole }));
        }
        let (outer_groups, regex) = match anchor {
            Anchor::End => (2, format!(r"\A(?:(.*\.)?({text})$)")),
            Anchor::Whole => (0, format!(r"\A(?:{text})$")),
        };
        let escaped = |error| Escaped(error).to_string();
        let backtracks = check(text, outer_groups).map_err(|error| Escaped(error).to_string())?;
        let compile = |size: usize, limit: usize| {
            let mut builder = RegexBuilder::new(&regex);
            builder.bytes_mode(BytesMode::Ascii).backtrack_limit(limit).max_prog_size(SIZES[3] / STATE_BYTES);
            builder.delegate_size_limit(size).delegate_dfa_size_limit(SIZES[3]);
            builder.build()
        };
        let [low, high, most] = BACKTRACKS;
        if backtracks {
            let regexes = [low, high, most].into_iter().map(|limit| compile(SIZES[3], limit));
            return Ok(pattern(Matcher::Backtracking(regexes.collect::<Result<_, _>>().map_err(escaped)?)));
        }
        let compiled = SIZES.iter().map(|&size| compile(size, most).map(|regex| (regex, size)));
        match compiled.reduce(|smaller, larger| smaller.or(larger)) {
            Some(Ok((regex, size))) => {
                Ok(pattern(Matcher::Automaton { regex: Box::new(regex), states: size / STATE_BYTES }))
            }
            Some(Err(error)) => Err(escaped(error)),
            None => Err("it is too large".to_owned()),
        }
    }

    /// The source text.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// An upper bound on the work of matching paths with `bytes` bytes in total: states visited per byte. That of
    /// backtracking is only known when it is done.
    pub(super) fn work(&self, bytes: u64) -> u64 {
        match self.matcher {
            Matcher::Automaton { states, .. } => bytes.saturating_mul(states as u64),
            Matcher::Plain { .. } | Matcher::Backtracking(_) => 0,
        }
    }

    /// Whether a path matches.
    pub(super) fn matches(&self, path: &str, work: &Work) -> Result<bool, Failure> {
        let slow = |error| Failure::Slow(Escaped(error).to_string());
        match &self.matcher {
            Matcher::Plain { bytes, whole } => {
                let Some(start) = path.len().checked_sub(bytes.len()) else { return Ok(false) };
                let (before, end) = path.as_bytes().split_at(start);
                let begins = before.is_empty() || (!whole && before.last() == Some(&b'.'));
                let mut pairs = end.iter().zip(bytes);
                Ok(begins && pairs.all(|(byte, want)| want.is_none_or(|want| want == *byte)))
            }
            Matcher::Automaton { regex, .. } => regex.is_match(path.as_bytes()).map_err(slow),
            Matcher::Backtracking(regexes) => {
                let mut last = Ok(false);
                for (regex, limit) in regexes.iter().zip(BACKTRACKS) {
                    work.take(path.len().max(MIN_BYTES).saturating_mul(limit))?;
                    last = regex.is_match(path.as_bytes());
                    if !matches!(&last, Err(fancy_regex::Error::RuntimeError(RuntimeError::BacktrackLimitExceeded))) {
                        break;
                    }
                }
                last.map_err(slow)
            }
        }
    }
}

/// The bytes of a plain path. Dots are wildcards unless escaped. A leading `^` or trailing `$` is dropped.
pub(super) fn plain(text: &str) -> Option<Vec<Option<u8>>> {
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

/// Rejects constructs that Python's `re` lacks, or that the two engines or different versions interpret differently.
/// Otherwise returns whether matching requires backtracking. `outer_groups` groups surround the pattern, the last of
/// them still open.
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
                if groups.len() == MAX_DEPTH || last_group > MAX_CAPTURES {
                    return Err("it has too many groups, or nests them too deep");
                }
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
