//! Adapters that are loaded for the first request which names them, from the folder of that name below `--lora-root`.
//!
//! To look for a folder takes a few calls of the system. Few adapters are read at the same time, and one that could not
//! be served is not read again for a while, however often it is asked for.

use std::{
    collections::HashMap,
    path::{Component, Path},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aril_requests::registry::{OnDuplicate, RegistryError, Served};
use tokio::{
    sync::Semaphore,
    time::{Instant, sleep, timeout_at},
};

use super::{
    Server,
    error::{ApiError, ApiResult},
};

/// Adapters that are read at the same time.
const READ: usize = 4;
/// How long a failure is the answer to further requests.
const REMEMBERED: Duration = Duration::from_secs(10);
/// The most failures that are remembered.
const FAILURES: usize = 1000;
/// How often a request looks whether another one's load has ended.
const LOOKED: Duration = Duration::from_millis(5);

/// What is being looked for, and what was not to be served.
#[derive(Debug)]
pub(super) struct Finds {
    reading: Semaphore,
    failures: Mutex<HashMap<String, (Instant, ApiError)>>,
}

impl Default for Finds {
    fn default() -> Self {
        Self { reading: Semaphore::new(READ), failures: Mutex::default() }
    }
}

impl Finds {
    /// The failure of a name not long ago.
    fn failure(&self, name: &str) -> Option<ApiError> {
        // A map is whole between its calls.
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.get(name).filter(|(at, _)| at.elapsed() < REMEMBERED).map(|(_, error)| error.clone())
    }

    fn remember(&self, name: &str, error: ApiError) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() >= FAILURES {
            failures.retain(|_, (at, _)| at.elapsed() < REMEMBERED);
        }
        if failures.len() < FAILURES {
            failures.insert(name.to_owned(), (Instant::now(), error));
        }
    }
}

impl Server {
    /// Whether a name is that of a folder in the root which may be an adapter.
    pub(super) fn is_findable(&self, name: &str) -> bool {
        let (Some(_), Some(root)) = (&self.finds, &self.lora_root) else { return false };
        let mut parts = Path::new(name).components();
        let is_one = matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name);
        is_one && !name.starts_with('.') && self.check_name(name).is_ok() && root.folder(Path::new(name)).is_ok()
    }

    /// Loads an adapter from the folder of its name, or waits for whoever does.
    pub(super) async fn find(self: &Arc<Self>, name: &str, deadline: Instant) -> ApiResult<Served> {
        let (Some(finds), Some(root)) = (&self.finds, &self.lora_root) else { return self.resolve(name) };
        while Instant::now() < deadline {
            match self.registry.resolve(name) {
                Ok(served) => return Ok(served),
                Err(RegistryError::Loading { .. }) => {
                    sleep(LOOKED).await;
                    continue;
                }
                Err(_) => {}
            }
            if let Some(error) = finds.failure(name) {
                return Err(error);
            }
            let turn = timeout_at(deadline, finds.reading.acquire()).await.map_err(|_| ApiError::late())?;
            // Another one may have been here meanwhile.
            if self.registry.resolve(name).is_ok() || finds.failure(name).is_some() {
                continue;
            }
            let folder = root.folder(Path::new(name))?;
            let loaded = self.load(name, folder, root.opener(), OnDuplicate::Refuse, false).await;
            drop(turn);
            if let (Err(error), Err(RegistryError::Unknown { .. })) = (loaded, self.registry.resolve(name)) {
                finds.remember(name, error);
            }
        }
        Err(ApiError::late())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_failures_are_remembered() {
        let finds = Finds::default();
        for name in 0..2 * FAILURES {
            finds.remember(&name.to_string(), ApiError::bad_request("broken"));
        }
        assert_eq!(finds.failures.lock().expect("no test fails here").len(), FAILURES);
        assert!(finds.failure("0").is_some() && finds.failure("-1").is_none());
    }
}
