use super::{Adapter, Batch, Memory, Policy, Request, Room, Time};

/// S-LoRA's queue of requests, its prefetching and its offloading.
#[derive(Debug)]
pub struct SLora {
    /// Adapters that fit into the memory of the device.
    slots: usize,
    /// Whether a batch that has as many adapters as slots takes requests of its own adapters first (`ClusterReqQueue`).
    is_clustered: bool,
    /// Tokens of prompts that the next batch may have.
    max_tokens: usize,
    waiting: Vec<(usize, Request)>,
    batch: Batch,
    prefetched: Vec<Adapter>,
}

impl SLora {
    pub fn new(slots: usize, max_tokens: usize, is_clustered: bool) -> Self {
        Self { slots, is_clustered, max_tokens, waiting: Vec::new(), batch: Batch::default(), prefetched: Vec::new() }
    }

    /// Starts waiting requests that `is_meant` accepts, by arrival, up to the first that does not fit.
    fn start(
        &mut self,
        now: Time,
        memory: &mut Memory,
        room: &mut Room,
        is_meant: impl Fn(&Batch, Adapter) -> bool,
    ) -> Vec<usize> {
        let (mut started, mut has_room) = (Vec::new(), true);
        self.waiting.retain(|(number, request)| {
            if !has_room || !is_meant(&self.batch, request.adapter) {
                return true;
            }
            has_room = self.batch.fits(request.adapter, self.slots)
                && room.is_left()
                && memory.load(request.adapter, now, &[])
                && room.take(request);
            if has_room {
                memory.lease(request.adapter);
                self.batch.start(request.adapter);
                started.push(*number);
            }
            !has_room
        });
        started
    }

    /// Loads the adapters of the next batch, as the queue stands now, into free slots.
    fn prefetch(&mut self, now: Time, memory: &mut Memory) {
        self.prefetched.clear();
        let mut tokens = 0;
        for (_, request) in &self.waiting {
            tokens += request.prompt;
            if tokens > self.max_tokens {
                break;
            }
            if !self.prefetched.contains(&request.adapter) {
                self.prefetched.push(request.adapter);
            }
        }
        memory.drop_idle(now, &self.prefetched);
        for adapter in &self.prefetched {
            if !self.batch.has(*adapter) && memory.free_slots() > 0 {
                memory.load(*adapter, now, &[]);
            }
        }
    }
}

impl Policy for SLora {
    fn arrive(&mut self, number: usize, request: &Request) {
        self.waiting.push((number, *request));
    }

    fn admit(&mut self, now: Time, memory: &mut Memory, room: &mut Room) -> Vec<usize> {
        let mut started = Vec::new();
        if self.is_clustered && self.batch.len() >= self.slots {
            started = self.start(now, memory, room, |batch, adapter| batch.has(adapter));
        }
        started.extend(self.start(now, memory, room, |_, _| true));
        self.prefetch(now, memory);
        started
    }

    fn finish(&mut self, _: usize, adapter: Adapter) {
        self.batch.finish(adapter);
    }
}
