use std::collections::VecDeque;

use super::{Adapter, Batch, Memory, Policy, Request, Room, Time, load_ahead};

/// Requests in the order of their arrival. Adapters are loaded ahead, as [`Aril`](super::Aril) does.
#[derive(Debug)]
pub struct Fifo {
    max_adapters: usize,
    ahead: usize,
    waiting: VecDeque<(usize, Request)>,
    batch: Batch,
}

impl Fifo {
    /// `max_adapters` of a batch, and `ahead` slots beside them, at least one.
    pub fn new(max_adapters: usize, ahead: usize) -> Self {
        Self { max_adapters, ahead, waiting: VecDeque::new(), batch: Batch::default() }
    }

    /// The first adapters of waiting requests that are not in the batch.
    fn next(&self) -> Vec<Adapter> {
        let mut next = Vec::with_capacity(self.ahead);
        for adapter in self.waiting.iter().map(|(_, request)| request.adapter) {
            if next.len() == self.ahead {
                break;
            }
            if !self.batch.has(adapter) && !next.contains(&adapter) {
                next.push(adapter);
            }
        }
        next
    }
}

impl Policy for Fifo {
    fn arrive(&mut self, number: usize, request: &Request) {
        self.waiting.push_back((number, *request));
    }

    fn admit(&mut self, now: Time, memory: &mut Memory, room: &mut Room) -> Vec<usize> {
        load_ahead(memory, now, &self.next());
        let mut started = Vec::new();
        while let Some(&(number, request)) = self.waiting.front() {
            let fits = self.batch.fits(request.adapter, self.max_adapters) && memory.is_ready(request.adapter, now);
            if !fits || !room.take(&request) {
                break;
            }
            self.waiting.pop_front();
            memory.lease(request.adapter);
            self.batch.start(request.adapter);
            started.push(number);
        }
        started
    }

    fn finish(&mut self, _: usize, adapter: Adapter) {
        self.batch.finish(adapter);
    }
}
