//! The messages of errors: a message has the text of its cause, and a report of the chain shows no text twice.

use std::{error::Error, fs, io, path::Path, sync::Arc};

use aril::{
    adapter::{Adapter, AdapterError},
    error::{LoadError, OperandError},
    group::{ChannelError, GroupError},
    plan::PlanError,
    pool::{AdapterId, PoolError},
};

/// The messages of an error and of its causes.
fn chain(error: &dyn Error) -> Vec<String> {
    let (mut texts, mut next) = (Vec::new(), Some(error));
    while let Some(error) = next {
        texts.push(error.to_string());
        next = error.source();
    }
    texts
}

/// Asserts that the message has the cause's text, and that no other error of the chain has it.
fn has_once(error: &dyn Error, cause: &str) {
    let texts = chain(error);
    assert_eq!(texts.iter().map(|text| text.matches(cause).count()).sum::<usize>(), 1, "{texts:?}");
    assert!(texts[0].contains(cause), "{texts:?}");
}

fn missing() -> AdapterError {
    Adapter::open("there/is/no/such/adapter").unwrap_err()
}

#[test]
fn a_cause_is_shown_once() {
    let AdapterError::Read { error, .. } = missing() else { panic!("{}", missing()) };
    let cause = error.to_string();
    has_once(&missing(), &cause);
    has_once(&LoadError::from(missing()), &cause);
    let failed = PoolError::Failed { id: AdapterId::unique(), error: Arc::new(missing().into()) };
    has_once(&failed, &cause);
    has_once(&PoolError::Threads(io::Error::other("no more threads")), "no more threads");
    let channel = ChannelError { ranks: vec![1], reason: "it has left".to_owned() };
    has_once(&GroupError::from(channel.clone()), "it has left");
    has_once(&LoadError::Group(Box::new(channel.into())), "it has left");
    let config = r#"{"peft_type": "LORA", "lora_alpha": 1, "rank_pattern": {"(": 1}}"#;
    let pattern = Adapter::from_tensors(config, []).unwrap_err();
    let AdapterError::Pattern { reason, .. } = &pattern else { panic!("{pattern}") };
    has_once(&pattern, reason);
    let json = Adapter::from_tensors("{", []).unwrap_err();
    let AdapterError::Json { reason, .. } = &json else { panic!("{json}") };
    has_once(&json, reason);
}

/// A variant that returns its cause shows it, too, unless it is the cause itself.
#[test]
fn no_variant_but_a_transparent_one_returns_its_cause() {
    let mut variants = 0;
    each_file(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")), &mut |path, text| {
        let (mut is_transparent, mut is_error) = (false, false);
        for line in text.lines().map(str::trim) {
            if line.contains("thiserror::Error") {
                is_error = true;
            } else if line == "}" && is_error {
                is_transparent = false;
            } else if line.starts_with("#[error(") {
                (is_transparent, variants) = (line == "#[error(transparent)]", variants + 1);
            }
            let is_cause = line.contains("#[from]") || line.contains("#[source]") || line.starts_with("source:");
            assert!(!is_error || !is_cause || is_transparent, "{}: {line}", path.display());
        }
    });
    assert!(variants > 100, "{variants} variants");
}

fn each_file(dir: &Path, check: &mut dyn FnMut(&Path, &str)) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            each_file(&path, check);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            check(&path, &fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn messages_name_the_mend() {
    for (message, mend) in [
        (OperandError::Model.to_string(), "the one `ModelSpec` object that it was added to"),
        (PlanError::Foreign.to_string(), "the one `ModelSpec` object that it was added to"),
        (PlanError::NoTopK.to_string(), "call `Experts::top_k`"),
    ] {
        assert!(message.contains(mend), "{message}");
    }
}
