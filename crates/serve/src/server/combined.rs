//! Combinations of adapters, which requests name by a list: each is an adapter of the engine from the first request for
//! it on.
//!
//! A combination is known by the versions of its parts and by their scales. So the requests that name the same ones
//! share it and its blocks of the cache, and a part that is replaced makes another one. The last [`MOST`] that were
//! asked for stay, until a part is replaced or unloaded; one that goes is unloaded after the last request on it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aril::{
    adapter::MAX_PARTS,
    pool::{AdapterId, Source},
};
use aril_engine::worker::Version;
use aril_requests::registry::{Served, Version as _};
use serde::Deserialize;
use tokio::{
    sync::{OnceCell, Semaphore},
    time::{Instant, timeout_at},
};

use super::{
    Server,
    error::{ApiError, ApiResult},
    request::Model,
};

/// The most combinations that stay for further requests.
const MOST: usize = 256;
/// Combinations that are read at the same time.
const READ: usize = 4;
/// The field that names the parts of a combination.
const NAME: &str = "lora";

/// A part of a combination, as a request names it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Part {
    #[serde(alias = "id")]
    pub(super) name: String,
    scale: f32,
}

/// The versions of the parts, and the bits of their scales, in the order of the request.
type Key = Vec<(AdapterId, u32)>;

/// A combination that is loaded by the first request for it.
#[derive(Debug, Default)]
pub(super) struct Combination {
    version: OnceCell<Version>,
    /// The names of its parts when it was loaded, for metrics.
    names: String,
}

/// The combinations that stay.
#[derive(Debug)]
pub(super) struct Combinations {
    known: Mutex<Known>,
    reading: Semaphore,
}

#[derive(Debug, Default)]
struct Known {
    /// With the number of the last request for each.
    combinations: HashMap<Key, (Arc<Combination>, u64)>,
    requests: u64,
}

impl Default for Combinations {
    fn default() -> Self {
        Self { known: Mutex::default(), reading: Semaphore::new(READ) }
    }
}

impl Combinations {
    fn known(&self) -> MutexGuard<'_, Known> {
        // It is whole between its changes.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops those that have this version as a part.
    pub(super) fn forget(&self, part: AdapterId) {
        let is_of = |key: &Key| key.iter().any(|(id, _)| *id == part);
        let gone: Vec<_> = self.known().combinations.extract_if(|key, _| is_of(key)).collect();
        // The engine is told when nobody waits for the lock.
        drop(gone);
    }

    /// The names of the parts of a version.
    pub(super) fn names_of(&self, id: AdapterId) -> Option<String> {
        let known = self.known();
        let mut all = known.combinations.values().map(|(combination, _)| combination);
        let found = all.find(|combination| combination.version.get().is_some_and(|version| version.id() == id));
        found.map(|combination| combination.names.clone())
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.known().combinations.len()
    }
}

impl Known {
    /// A combination, which is the last one that was asked for. The one that has not been for the longest time makes
    /// room for it.
    fn ask(&mut self, key: &Key, names: impl FnOnce() -> String) -> (Arc<Combination>, Option<Arc<Combination>>) {
        self.requests += 1;
        let now = self.requests;
        if let Some((combination, last)) = self.combinations.get_mut(key) {
            *last = now;
            return (Arc::clone(combination), None);
        }
        let oldest = self.combinations.iter().min_by_key(|(_, (_, last))| *last).map(|(key, _)| key.clone());
        let gone = oldest.filter(|_| self.combinations.len() >= MOST);
        let gone = gone.and_then(|key| self.combinations.remove(&key)).map(|(combination, _)| combination);
        let combination = Arc::new(Combination { names: names(), ..Combination::default() });
        self.combinations.insert(key.clone(), (Arc::clone(&combination), now));
        (combination, gone)
    }
}

impl Server {
    /// What answers a request that names the parts of a combination beside the base model.
    pub(super) fn combination_of(&self, model: Option<String>, parts: Vec<Part>) -> ApiResult<Model> {
        let refused = |message: String| ApiError::bad_request(message).of(NAME);
        if !self.takes_lora_path {
            let message = "`lora` is not taken: `model` names the adapter, unless the server has --enable-lora-path.";
            return Err(refused(message.into()));
        }
        let name = self.name_of(model, None)?;
        if !self.names.contains(&name) {
            return Err(refused("`model` names an adapter, and `lora` others.".into()));
        }
        if parts.len() > MAX_PARTS {
            return Err(refused(format!(
                "`lora` has {} adapters, and at most {MAX_PARTS} apply together.",
                parts.len()
            )));
        }
        for Part { name, scale } in &parts {
            if !scale.is_finite() {
                return Err(refused(format!("The scale of `{name}` in `lora` is out of range.")));
            }
            if self.resolve_or_find(name).map_err(|error| error.of(NAME))? == Some(Served::Base) {
                return Err(refused(format!("`lora` names adapters, and `{name}` is the base model.")));
            }
        }
        Ok(Model { name, adapter: None, is_sought: true, index: None, parts, held: None })
    }

    /// The version that a combination is now, which is loaded if it is not there; none if all of its scales are zero.
    pub(super) async fn combine(self: &Arc<Self>, model: &mut Model, deadline: Instant) -> ApiResult<()> {
        while Instant::now() < deadline {
            let mut key = Key::new();
            for Part { name, scale } in &model.parts {
                let served = self.find(name, deadline).await.map_err(|error| error.of(NAME))?;
                key.extend(served.adapter().filter(|_| *scale != 0.0).map(|id| (id, scale.to_bits())));
            }
            (model.adapter, model.held) = match key[..] {
                [] => (None, None),
                [(id, scale)] if f32::from_bits(scale) == 1.0 => (Some(id), None),
                _ => {
                    let names = || model.parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>().join("+");
                    // A part may have been replaced or unloaded since.
                    let Some(sources) = self.sources_of(&key) else { continue };
                    let (combination, gone) = self.combinations.known().ask(&key, names);
                    drop(gone);
                    let load = combination.version.get_or_try_init(|| self.load_combination(sources));
                    let id = timeout_at(deadline, load).await.map_err(|_| ApiError::late())??.id();
                    if self.sources_of(&key).is_none() {
                        key.iter().for_each(|(part, _)| self.forget_combinations(*part));
                        continue;
                    }
                    (Some(id), Some(combination))
                }
            };
            return Ok(());
        }
        Err(ApiError::late())
    }

    /// Drops the combinations of a version that is not served any more.
    fn forget_combinations(&self, part: AdapterId) {
        if !self.loaded().contains_key(&part) {
            self.combinations.forget(part);
        }
    }

    /// Where the parts are read from, with their scales; `None` if one is not served any more.
    fn sources_of(&self, key: &Key) -> Option<Vec<(Source, f32)>> {
        let loaded = self.loaded();
        let source = |&(id, scale): &(AdapterId, u32)| Some((loaded.get(&id)?.source.clone(), f32::from_bits(scale)));
        key.iter().map(source).collect()
    }

    async fn load_combination(&self, sources: Vec<(Source, f32)>) -> ApiResult<Version> {
        let _turn = self.combinations.reading.acquire().await.map_err(|_| ApiError::ended())?;
        let source = tokio::task::spawn_blocking(move || Source::combined(sources)).await;
        let source = source.map_err(|_| ApiError::internal("The thread that read the adapters has panicked."))?;
        let refused = |message: String| ApiError::bad_request(self.cut(message, None)).of(NAME);
        let source = source.map_err(|error| refused(error.to_string()))?;
        self.check_rank(&source).map_err(|error| error.of(NAME))?;
        let version = self.engine.load(source, false).await.ok_or_else(ApiError::ended)?;
        version.map_err(|error| refused(aril_engine::sentence(&error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_combinations_stay() {
        let combinations = Combinations::default();
        let key = |scale| vec![(AdapterId::unique(), scale)];
        let keys: Vec<_> = (0..).take(2 * MOST).map(key).collect();
        let ask = |key: &Key| combinations.known().ask(key, String::new);
        let (first, _) = ask(&keys[0]);
        for key in &keys[1..MOST] {
            assert!(ask(key).1.is_none());
        }
        // It is younger than the second one now, which goes.
        assert!(Arc::ptr_eq(&ask(&keys[0]).0, &first));
        for key in &keys[MOST..2 * MOST - 1] {
            assert!(ask(key).1.is_some_and(|gone| !Arc::ptr_eq(&gone, &first)));
        }
        assert_eq!(combinations.len(), MOST);
        assert!(Arc::ptr_eq(&ask(&keys[0]).0, &first));
        combinations.forget(keys[0][0].0);
        assert!(!Arc::ptr_eq(&ask(&keys[0]).0, &first));
    }
}
