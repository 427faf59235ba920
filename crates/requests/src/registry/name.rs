use super::RegistryError;

/// Largest size of a name, in bytes of UTF-8.
pub const MAX_NAME_BYTES: usize = 256;

/// The rule that a name breaks.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// It is empty.
    #[error("it is empty")]
    Empty,
    /// It has more than [`MAX_NAME_BYTES`] bytes.
    #[error("it has {bytes} bytes, and at most {MAX_NAME_BYTES} are allowed")]
    Long {
        /// Size of the name, in bytes.
        bytes: usize,
    },
    /// It has a control character, a backslash, or white space other than U+0020.
    #[error("it contains {char:?}")]
    Char {
        /// The first such character.
        char: char,
    },
    /// It begins or ends with a space.
    #[error("it begins or ends with a space")]
    Space,
    /// It ends with `@` and a number, as the name of a version does.
    #[error("it ends as the name of a version does")]
    Version,
    /// A part between slashes is `..`.
    #[error("it has `..` between slashes")]
    Parent,
}

/// The name and the number of `name@number`.
pub(super) fn versioned(name: &str) -> Option<(&str, u64)> {
    let (name, number) = name.rsplit_once('@')?;
    Some((name, number.parse().ok()?))
}

/// Checks a name of an adapter.
pub(super) fn check(name: &str) -> Result<(), RegistryError> {
    broken_rule(name).map_or(Ok(()), |reason| Err(RegistryError::Name { name: name.into(), reason }))
}

fn broken_rule(name: &str) -> Option<NameError> {
    if name.is_empty() {
        return Some(NameError::Empty);
    }
    if name.len() > MAX_NAME_BYTES {
        return Some(NameError::Long { bytes: name.len() });
    }
    let is_refused = |char: &char| char.is_control() || *char == '\\' || (char.is_whitespace() && *char != ' ');
    if let Some(char) = name.chars().find(is_refused) {
        return Some(NameError::Char { char });
    }
    if name.starts_with(' ') || name.ends_with(' ') {
        return Some(NameError::Space);
    }
    if versioned(name).is_some() {
        return Some(NameError::Version);
    }
    name.split('/').any(|part| part == "..").then_some(NameError::Parent)
}
