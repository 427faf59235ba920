use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    ops::Bound,
    time::Duration,
};

use super::{AdmissionError, Request};

/// The place of a request in the order of arrival. It keeps it when it is preempted.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Key {
    arrival: Duration,
    /// Orders requests that arrived at the same moment.
    number: u64,
}

impl Key {
    pub(super) const fn arrival(self) -> Duration {
        self.arrival
    }
}

/// All requests by adapter, and the adapters of the running ones.
#[derive(Clone, Debug)]
pub(super) struct Queue<R, A> {
    requests: HashMap<R, Place<A>>,
    groups: HashMap<Option<A>, Group<R, A>>,
    /// The oldest waiting request of each adapter.
    heads: BTreeMap<Key, Option<A>>,
    /// The adapters of running requests, by entry.
    batch: Vec<A>,
    num_running: usize,
    last_number: u64,
    last_start: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place<A> {
    key: Key,
    adapter: Option<A>,
    is_running: bool,
}

/// The requests of an adapter, or of the base model.
#[derive(Clone, Debug)]
struct Group<R, A> {
    waiting: BTreeMap<Key, Request<R, A>>,
    running: HashMap<R, Request<R, A>>,
    /// The number of the last start among all starts.
    last_start: u64,
}

impl<R, A> Default for Queue<R, A> {
    fn default() -> Self {
        Self {
            requests: HashMap::new(),
            groups: HashMap::new(),
            heads: BTreeMap::new(),
            batch: Vec::new(),
            num_running: 0,
            last_number: 0,
            last_start: 0,
        }
    }
}

impl<R: Clone + Eq + Hash, A: Copy + Eq + Hash> Queue<R, A> {
    pub(super) fn add(&mut self, request: Request<R, A>) -> Result<(), AdmissionError> {
        if self.requests.contains_key(&request.id) {
            return Err(AdmissionError::Duplicate);
        }
        let adapter = request.adapter;
        self.last_number += 1;
        let key = Key { arrival: request.arrival, number: self.last_number };
        self.requests.insert(request.id.clone(), Place { key, adapter, is_running: false });
        let new = || Group { waiting: BTreeMap::new(), running: HashMap::new(), last_start: 0 };
        self.groups.entry(adapter).or_insert_with(new);
        self.with_group(adapter, |group| group.waiting.insert(key, request));
        Ok(())
    }

    /// Starts a waiting request.
    pub(super) fn start(&mut self, key: Key, adapter: Option<A>) {
        self.last_start += 1;
        let last_start = self.last_start;
        let id = self.with_group(adapter, |group| {
            let request = group.waiting.remove(&key).expect("the request is waiting");
            let id = request.id.clone();
            group.running.insert(id.clone(), request);
            group.last_start = last_start;
            id
        });
        self.requests.get_mut(&id).expect("the request is known").is_running = true;
        self.num_running += 1;
        if let Some(entering) = adapter.filter(|adapter| self.group(Some(*adapter)).running.len() == 1) {
            self.batch.push(entering);
        }
    }

    /// Lets a running request wait.
    pub(super) fn stop(&mut self, id: &R) -> Result<(), AdmissionError> {
        let place = self.requests.get_mut(id).ok_or(AdmissionError::Unknown)?;
        if !place.is_running {
            return Err(AdmissionError::NotRunning);
        }
        place.is_running = false;
        let Place { key, adapter, .. } = *place;
        self.with_group(adapter, |group| {
            let request = group.running.remove(id).expect("the request is running");
            group.waiting.insert(key, request);
        });
        self.num_running -= 1;
        if let Some(leaving) = adapter.filter(|adapter| !self.is_in_batch(adapter)) {
            self.batch.retain(|adapter| *adapter != leaving);
        }
        Ok(())
    }

    /// Forgets a waiting request.
    pub(super) fn remove(&mut self, id: &R) -> Result<(), AdmissionError> {
        let Place { key, adapter, .. } = self.requests.remove(id).ok_or(AdmissionError::Unknown)?;
        self.with_group(adapter, |group| group.waiting.remove(&key));
        if self.group(adapter).waiting.is_empty() && self.group(adapter).running.is_empty() {
            self.groups.remove(&adapter);
        }
        Ok(())
    }

    /// A waiting request.
    pub(super) fn request(&self, key: Key, adapter: Option<A>) -> &Request<R, A> {
        &self.group(adapter).waiting[&key]
    }

    /// The oldest waiting request of each adapter, oldest first.
    pub(super) fn heads(&self) -> impl Iterator<Item = (Key, Option<A>)> {
        self.heads.iter().map(|(key, adapter)| (*key, *adapter))
    }

    /// The first of them from a place on.
    pub(super) fn next_head(&self, from: Bound<Key>) -> Option<(Key, Option<A>)> {
        self.heads.range((from, Bound::Unbounded)).next().map(|(key, adapter)| (*key, *adapter))
    }

    /// The oldest waiting request of an adapter, or of the base model.
    pub(super) fn head_of(&self, adapter: Option<A>) -> Option<Key> {
        Some(*self.groups.get(&adapter)?.waiting.first_key_value()?.0)
    }

    pub(super) fn is_in_batch(&self, adapter: &A) -> bool {
        self.groups.get(&Some(*adapter)).is_some_and(|group| !group.running.is_empty())
    }

    /// Orders adapters of the batch by the start of their youngest request.
    pub(super) fn last_start(&self, adapter: &A) -> u64 {
        self.group(Some(*adapter)).last_start
    }

    pub(super) fn batch(&self) -> &[A] {
        &self.batch
    }

    pub(super) fn num_running(&self) -> usize {
        self.num_running
    }

    pub(super) fn num_waiting(&self) -> usize {
        self.requests.len() - self.num_running
    }

    /// A group that has requests.
    fn group(&self, adapter: Option<A>) -> &Group<R, A> {
        &self.groups[&adapter]
    }

    /// Changes a group, and then its head.
    fn with_group<T>(&mut self, adapter: Option<A>, change: impl FnOnce(&mut Group<R, A>) -> T) -> T {
        let group = self.groups.get_mut(&adapter).expect("the adapter has requests");
        if let Some((key, _)) = group.waiting.first_key_value() {
            self.heads.remove(key);
        }
        let result = change(group);
        if let Some((key, _)) = group.waiting.first_key_value() {
            self.heads.insert(*key, adapter);
        }
        result
    }
}
