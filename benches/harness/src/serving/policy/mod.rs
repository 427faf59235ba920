//! Policies of admission and loading.

mod aril;
mod fifo;
mod slora;
mod vllm;

use std::collections::HashMap;

pub use self::{aril::Aril, fifo::Fifo, slora::SLora, vllm::Vllm};
use super::{Adapter, Memory, Request, Room, Time};

/// Decides which requests start, and which adapters are loaded.
pub trait Policy {
    /// A request has arrived.
    fn arrive(&mut self, number: usize, request: &Request);

    /// The requests that start in this step, each with a lease on its adapter. The step waits for adapters that are not ready.
    fn admit(&mut self, now: Time, memory: &mut Memory, room: &mut Room) -> Vec<usize>;

    /// A request has ended, and given back its lease.
    fn finish(&mut self, number: usize, adapter: Adapter);
}

/// The adapters of running requests, each with their number.
#[derive(Debug, Default)]
struct Batch(HashMap<Adapter, usize>);

impl Batch {
    fn start(&mut self, adapter: Adapter) {
        *self.0.entry(adapter).or_default() += 1;
    }

    fn finish(&mut self, adapter: Adapter) {
        let requests = self.0.get_mut(&adapter).expect("the adapter has a running request");
        *requests -= 1;
        if *requests == 0 {
            self.0.remove(&adapter);
        }
    }

    /// Whether the adapter is one of the batch, or the batch has fewer than `max_adapters`.
    fn fits(&self, adapter: Adapter, max_adapters: usize) -> bool {
        self.0.len() < max_adapters || self.has(adapter)
    }

    fn has(&self, adapter: Adapter) -> bool {
        self.0.contains_key(&adapter)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Loads the adapters that are next, as far as there is room that none of them has.
fn load_ahead(memory: &mut Memory, now: Time, next: &[Adapter]) {
    for adapter in next {
        if !memory.load(*adapter, now, next) {
            break;
        }
    }
}
