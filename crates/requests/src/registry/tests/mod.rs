//! The registry's locks are shuttle's in these tests, so each runs under its scheduler.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod concurrent;
mod model;

use std::path::{Component, Path};

use super::{Listed, MAX_NAME_BYTES, NameError, OnDuplicate, RegistryError, Served};
use aril::pool::{AdapterId, CacheNamespace};

type Registry = super::Registry<AdapterId>;
type Replaced = super::Replaced<AdapterId>;
type PendingLoad = super::PendingLoad<AdapterId>;
type Unloaded = super::Unloaded<AdapterId>;

use OnDuplicate::{Refuse, Replace};

/// Runs a test on one thread.
fn alone(test: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(test, 1);
}

fn load(registry: &Registry, name: &str) -> AdapterId {
    let id = AdapterId::unique();
    let pending = registry.begin_load(name, Replace).expect("nobody else loads it");
    let Replaced { version: _old } = pending.serve(id).expect("nothing else has the name");
    id
}

fn of(name: &str) -> RegistryError {
    RegistryError::Unknown { name: name.into() }
}

fn base(name: &str) -> RegistryError {
    RegistryError::Base { name: name.into() }
}

fn loading(name: &str) -> RegistryError {
    RegistryError::Loading { name: name.into() }
}

fn loaded(name: &str) -> RegistryError {
    RegistryError::Loaded { name: name.into() }
}

#[test]
fn one_of_two_who_replace_the_same_version_does() {
    alone(|| {
        let registry = Registry::new(["base"]);
        let first = load(&registry, "a");
        let winner = registry.begin_load("a", OnDuplicate::ReplaceVersion(first)).unwrap();
        assert_eq!(registry.begin_load("a", OnDuplicate::ReplaceVersion(first)).err(), Some(loading("a")));
        let second = AdapterId::unique();
        assert_eq!(winner.serve(second), Ok(Replaced { version: Some(first) }));
        let late = registry.begin_load("a", OnDuplicate::ReplaceVersion(first)).unwrap_err();
        assert_eq!(late, RegistryError::OtherVersion { name: "a".into(), expected: first, served: Some(second) });
        assert_eq!(late.to_string(), format!("\"a\" does not stand for {first}, but for {second}"));
        let none = registry.begin_load("b", OnDuplicate::ReplaceVersion(first)).unwrap_err();
        assert_eq!(none.to_string(), format!("\"b\" does not stand for {first}, but for no version"));
        assert_eq!(registry.resolve("b"), Err(of("b")));
        assert_eq!(registry.resolve("a"), Ok(Served::Adapter(second)));
    });
}

#[test]
fn a_name_stands_for_each_of_its_versions_in_turn() {
    alone(|| {
        let registry = Registry::new(["qwen3-8b", "default"]);
        let first = load(&registry, "org/pirate");
        assert_eq!(registry.resolve("org/pirate"), Ok(Served::Adapter(first)));
        assert_eq!(registry.name_of(first).as_deref(), Some("org/pirate"));

        let (second, pending) = (AdapterId::unique(), registry.begin_load("org/pirate", Replace).unwrap());
        assert_eq!(pending.name(), "org/pirate");
        assert_eq!(registry.resolve("org/pirate"), Ok(Served::Adapter(first)), "the old version until then");
        assert_eq!(
            pending.serve(second),
            Ok(Replaced { version: Some(first) }),
            "the caller unregisters the old version"
        );
        assert_eq!(registry.resolve("org/pirate"), Ok(Served::Adapter(second)));
        assert_eq!((registry.name_of(first), registry.name_of(second).as_deref()), (None, Some("org/pirate")));

        assert_eq!(registry.unload("org/pirate"), Ok(Unloaded { versions: vec![second] }));
        assert_eq!(registry.resolve("org/pirate"), Err(of("org/pirate")), "never the base model");
        assert_eq!(registry.name_of(second), None);
        assert_eq!(registry.unload("org/pirate"), Err(of("org/pirate")));
    });
}

#[test]
fn the_base_model_keeps_its_names() {
    alone(|| {
        let registry = Registry::new(["/models/qwen3", "default", "default"]);
        assert_eq!(registry.base_names().iter().map(AsRef::as_ref).collect::<Vec<_>>(), ["/models/qwen3", "default"]);
        for name in ["/models/qwen3", "default"] {
            let served = registry.resolve(name).unwrap();
            assert_eq!(
                (served, served.adapter(), served.cache_namespace()),
                (Served::Base, None, CacheNamespace::BASE)
            );
        }
        let id = load(&registry, "a");
        let served = registry.resolve("a").unwrap();
        assert_eq!((served.adapter(), served.cache_namespace()), (Some(id), id.cache_namespace()));
        assert_eq!(registry.begin_load("default", Replace).err(), Some(base("default")));
        assert_eq!(registry.unload("default"), Err(base("default")));
    });
}

#[test]
fn a_version_has_one_name() {
    alone(|| {
        let registry = Registry::new(["base"]);
        let id = load(&registry, "a");
        let taken = Err(RegistryError::Id { id, name: "a".into() });
        assert_eq!(registry.begin_load("b", Refuse).unwrap().serve(id), taken);
        assert_eq!(registry.begin_load("a", Replace).unwrap().serve(id), taken);
        assert_eq!((registry.resolve("a"), registry.resolve("b")), (Ok(Served::Adapter(id)), Err(of("b"))));
        assert!(registry.begin_load("a", Replace).is_ok(), "the failed loads gave the names back");
    });
}

#[test]
fn names_are_checked() {
    alone(|| {
        let registry = Registry::new(["base"]);
        let longest = "é".repeat(MAX_NAME_BYTES / 2);
        let paths =
            ["org/a", "/etc/passwd", "a/", "a//b", ".", "./a", "a/./b", "~/a", "/", "s3://bucket/a", "file:///a"];
        for name in ["a", "a b", "llama:latest", "a@", "a@v7", "@home", "名前", "...", "a..b", "~", longest.as_str()]
            .into_iter()
            .chain(paths)
        {
            assert!(registry.begin_load(name, Refuse).is_ok(), "{name}");
            let below = Path::new("/folder").join(name.trim_start_matches('/'));
            let mut parts = below.components();
            assert!(below.starts_with("/folder") && parts.all(|part| part != Component::ParentDir), "{name}");
        }
        let long = "a".repeat(MAX_NAME_BYTES + 1);
        let char = |char| NameError::Char { char };
        for (name, reason) in [
            ("", NameError::Empty),
            (&long, NameError::Long { bytes: MAX_NAME_BYTES + 1 }),
            ("a\nb", char('\n')),
            ("a\0", char('\0')),
            ("\u{1b}[2J", char('\u{1b}')),
            ("a\u{2028}b", char('\u{2028}')),
            ("a\u{a0}b", char('\u{a0}')),
            ("\\\\host\\share", char('\\')),
            ("a@7", NameError::Version),
            ("org/a@b@0", NameError::Version),
            (" a", NameError::Space),
            ("a ", NameError::Space),
            ("..", NameError::Parent),
            ("/..", NameError::Parent),
            ("a/../b", NameError::Parent),
            ("s3://../b", NameError::Parent),
            ("../secret", NameError::Parent),
            ("a/..", NameError::Parent),
        ] {
            let error = RegistryError::Name { name: name.into(), reason };
            assert_eq!(registry.begin_load(name, Replace).err(), Some(error.clone()), "{name:?}");
            assert_eq!(registry.resolve(name), Err(of(name)), "{name:?}");
            let message = error.to_string();
            assert!(!message.chars().any(char::is_control) && message.len() < 300, "{message:?}");
        }
    });
}

#[test]
fn errors_name_what_they_are_about() {
    let id = AdapterId::unique();
    let name = |name: &str| name.into();
    for (error, message) in [
        (
            RegistryError::Name { name: name("a/../b"), reason: NameError::Parent },
            r#""a/../b" cannot be a name: it has `..` between slashes"#.to_owned(),
        ),
        (of("x\ny"), r#"no model or adapter is named "x\ny""#.to_owned()),
        (base("qwen3"), r#""qwen3" is a name of the base model"#.to_owned()),
        (loaded("a"), r#"an adapter named "a" is loaded already; unload it first, or replace it in place"#.to_owned()),
        (loading("a"), r#"an adapter named "a" is being loaded"#.to_owned()),
        (
            RegistryError::Unloaded { name: name("a") },
            r#""a" was unloaded while its adapter was being loaded"#.to_owned(),
        ),
        (RegistryError::Id { id, name: name("a") }, format!(r#"{id} is served as "a" already"#)),
    ] {
        assert_eq!(error.to_string(), message);
    }
}
