//! A registry against a list of facts that is searched from the start each time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
};

use proptest::{collection::vec, prelude::*, sample::select};

use super::{Listed, OnDuplicate, PendingLoad, Registry, RegistryError, Served, Unloaded};
use aril::pool::AdapterId;

/// A call. Each caller has at most one pending load.
#[derive(Clone, Debug)]
pub(super) enum Call {
    Begin { caller: usize, name: &'static str, on_duplicate: OnDuplicate },
    Serve { caller: usize, id: AdapterId },
    Release { caller: usize },
    Unload { name: &'static str },
    Resolve { name: &'static str },
    List,
}

/// What a call returned.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Outcome {
    Done(Result<(), RegistryError>),
    Replaced(Result<Option<AdapterId>, RegistryError>),
    Unloaded(Result<Unloaded, RegistryError>),
    Resolved(Result<Served, RegistryError>),
    Listed(Vec<Listed>),
}

pub(super) const BASE: &str = "base";
/// Names of adapters, the base model's, and one that breaks the rules.
pub(super) const NAMES: [&str; 6] = ["a", "b", "c", "d", BASE, "../x"];

/// The facts that calls establish, in the order in which they were established.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// The most versions of a name.
    kept: usize,
    /// Newest first.
    served: Vec<(&'static str, AdapterId)>,
    loading: Vec<(&'static str, usize)>,
    /// The names under which callers load, whether or not the load was cancelled.
    pending: BTreeMap<usize, &'static str>,
}

impl Default for Model {
    fn default() -> Self {
        Self::keeping(1)
    }
}

impl Model {
    fn keeping(kept: usize) -> Self {
        Self { kept, served: Vec::new(), loading: Vec::new(), pending: BTreeMap::new() }
    }

    pub(super) fn apply(&mut self, call: &Call) -> Outcome {
        match *call {
            Call::Begin { caller, name, on_duplicate } => Outcome::Done(self.begin_load(caller, name, on_duplicate)),
            Call::Serve { caller, id } => Outcome::Replaced(self.serve(caller, id)),
            Call::Release { caller } => {
                if let Some(name) = self.pending.remove(&caller) {
                    self.loading.retain(|&load| load != (name, caller));
                }
                Outcome::Done(Ok(()))
            }
            Call::Unload { name } => Outcome::Unloaded(self.unload(name)),
            Call::Resolve { name } => Outcome::Resolved(match self.id(name) {
                _ if name == BASE => Ok(Served::Base),
                Some(id) => Ok(Served::Adapter(id)),
                None if self.is_loading(name) => Err(super::loading(name)),
                None => Err(super::of(name)),
            }),
            Call::List => {
                let listed = |name: &str| {
                    Some(Listed { name: name.into(), id: self.id(name)?, older: self.of(name).skip(1).collect() })
                };
                Outcome::Listed(["a", "b", "c", "d"].into_iter().filter_map(listed).collect())
            }
        }
    }

    fn begin_load(
        &mut self,
        caller: usize,
        name: &'static str,
        on_duplicate: OnDuplicate,
    ) -> Result<(), RegistryError> {
        allowed(name)?;
        if self.is_loading(name) {
            return Err(super::loading(name));
        }
        if self.id(name).is_some() && on_duplicate == OnDuplicate::Refuse {
            return Err(super::loaded(name));
        }
        stands_for(name, self.id(name), on_duplicate)?;
        self.loading.push((name, caller));
        self.pending.insert(caller, name);
        Ok(())
    }

    fn serve(&mut self, caller: usize, id: AdapterId) -> Result<Option<AdapterId>, RegistryError> {
        let Some(name) = self.pending.remove(&caller) else { return Ok(None) };
        if !self.loading.contains(&(name, caller)) {
            return Err(RegistryError::Unloaded { name: name.into() });
        }
        self.loading.retain(|&(of, _)| of != name);
        if let Some((owner, _)) = self.served.iter().find(|(_, known)| *known == id) {
            return Err(RegistryError::Id { id, name: (*owner).into() });
        }
        let replaced = self.of(name).nth(self.kept - 1);
        self.served.retain(|&(_, known)| Some(known) != replaced);
        self.served.insert(0, (name, id));
        Ok(replaced)
    }

    fn unload(&mut self, name: &'static str) -> Result<Unloaded, RegistryError> {
        if name == BASE {
            return Err(super::base(name));
        }
        if self.id(name).is_none() && !self.is_loading(name) {
            return Err(super::of(name));
        }
        let unloaded = Unloaded { versions: self.of(name).collect() };
        self.served.retain(|&(of, _)| of != name);
        self.loading.retain(|&(of, _)| of != name);
        Ok(unloaded)
    }

    fn id(&self, name: &str) -> Option<AdapterId> {
        self.of(name).next()
    }

    fn of(&self, name: &str) -> impl Iterator<Item = AdapterId> {
        self.served.iter().filter(move |(of, _)| *of == name).map(|&(_, id)| id)
    }

    fn is_loading(&self, name: &str) -> bool {
        self.loading.iter().any(|(of, _)| *of == name)
    }
}

/// A version that is to be replaced must be the one that the name stands for.
fn stands_for(name: &str, served: Option<AdapterId>, on_duplicate: OnDuplicate) -> Result<(), RegistryError> {
    match on_duplicate {
        OnDuplicate::ReplaceVersion(expected) if served != Some(expected) => {
            Err(RegistryError::OtherVersion { name: name.into(), expected, served })
        }
        _ => Ok(()),
    }
}

/// The base model's name and the bad name of [`NAMES`] are refused.
fn allowed(name: &str) -> Result<(), RegistryError> {
    match name {
        BASE => Err(super::base(name)),
        "../x" => Err(RegistryError::Name { name: name.into(), reason: super::NameError::Parent }),
        _ => Ok(()),
    }
}

/// Runs a call on a registry, with the pending load of its caller.
pub(super) fn run(registry: &Registry, held: &mut Option<PendingLoad>, call: &Call) -> Outcome {
    match *call {
        Call::Begin { name, on_duplicate, .. } => {
            Outcome::Done(registry.begin_load(name, on_duplicate).map(|pending| *held = Some(pending)))
        }
        Call::Serve { id, .. } => {
            Outcome::Replaced(held.take().map_or(Ok(None), |pending| Ok(pending.serve(id)?.version)))
        }
        Call::Release { .. } => {
            *held = None;
            Outcome::Done(Ok(()))
        }
        Call::Unload { name } => Outcome::Unloaded(registry.unload(name)),
        Call::Resolve { name } => Outcome::Resolved(registry.resolve(name)),
        Call::List => Outcome::Listed(registry.list()),
    }
}

const CALLERS: usize = 3;

fn call() -> impl Strategy<Value = Call> {
    let name = || select(&NAMES[..]);
    let on_duplicate =
        || select(vec![OnDuplicate::Refuse, OnDuplicate::Replace, OnDuplicate::ReplaceVersion(AdapterId::unique())]);
    let caller = 0..CALLERS;
    prop_oneof![
        4 => (caller.clone(), name(), on_duplicate())
            .prop_map(|(caller, name, on_duplicate)| Call::Begin { caller, name, on_duplicate }),
        4 => caller.clone().prop_map(|caller| Call::Serve { caller, id: AdapterId::unique() }),
        1 => caller.prop_map(|caller| Call::Release { caller }),
        1 => name().prop_map(|name| Call::Unload { name }),
        2 => name().prop_map(|name| Call::Resolve { name }),
        1 => Just(Call::List),
    ]
}

proptest! {
    #[test]
    fn calls_return_what_the_facts_say(calls in vec(call(), 1..60), kept in 1..4_usize) {
        // A failure leaves shuttle's scheduler by a value: a panic inside it would be reported as a failed schedule.
        let failure = std::sync::Arc::new(Mutex::new(None));
        let found = failure.clone();
        super::alone(move || {
            let (registry, mut model) = (Registry::keeping(kept.try_into().unwrap(), [BASE]), Model::keeping(kept));
            let mut held: [Option<PendingLoad>; CALLERS] = Default::default();
            let mut versions = BTreeSet::new();
            for (number, call) in calls.iter().enumerate() {
                let mut call = call.clone();
                let asked = &mut call;
                if let Call::Begin { name, on_duplicate: OnDuplicate::ReplaceVersion(expected), .. } = asked
                    && let Some(served) = model.id(name)
                    && number % 3 > 0
                {
                    *expected = served;
                }
                let call = &call;
                let mut calls = vec![call.clone()];
                if let Call::Begin { caller, .. } = *call {
                    calls.insert(0, Call::Release { caller });
                }
                for call in calls {
                    let caller = match call {
                        Call::Begin { caller, .. } | Call::Serve { caller, .. } | Call::Release { caller } => caller,
                        _ => 0,
                    };
                    let (is, expected) = (run(&registry, &mut held[caller], &call), model.apply(&call));
                    versions.extend(model.served.iter().copied());
                    let resolved = |&(name, id): &(&'static str, AdapterId)| {
                        let is_served = registry.resolve(&format!("{name}@{}", id.get())) == Ok(Served::Adapter(id));
                        is_served == model.served.contains(&(name, id))
                    };
                    if is != expected || !versions.iter().all(resolved) {
                        *found.lock().unwrap() = Some(format!("call {number}, {call:?}: {is:?}, not {expected:?}"));
                        return;
                    }
                }
            }
        });
        let failure = failure.lock().unwrap().take();
        prop_assert!(failure.is_none(), "{}", failure.unwrap_or_default());
    }
}
