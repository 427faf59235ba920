use super::{Adapter, Batch, Memory, Policy, Request, Room, Time};

/// vLLM's loop over waiting requests. The device has `max_loras` slots.
#[derive(Debug)]
pub struct Vllm {
    max_loras: usize,
    waiting: Vec<(usize, Request)>,
    batch: Batch,
}

impl Vllm {
    pub fn new(max_loras: usize) -> Self {
        Self { max_loras, waiting: Vec::new(), batch: Batch::default() }
    }
}

impl Policy for Vllm {
    fn arrive(&mut self, number: usize, request: &Request) {
        self.waiting.push((number, *request));
    }

    fn admit(&mut self, now: Time, memory: &mut Memory, room: &mut Room) -> Vec<usize> {
        let (mut started, mut has_room) = (Vec::new(), true);
        self.waiting.retain(|(number, request)| {
            // A request whose adapter would be one too many keeps its place; the ones behind it are looked at.
            if !has_room || !self.batch.fits(request.adapter, self.max_loras) {
                return true;
            }
            has_room = room.take(request);
            if has_room {
                assert!(memory.load(request.adapter, now, &[]), "a slot is idle while the batch has fewer adapters");
                memory.lease(request.adapter);
                self.batch.start(request.adapter);
                started.push(*number);
            }
            !has_room
        });
        started
    }

    fn finish(&mut self, _: usize, adapter: Adapter) {
        self.batch.finish(adapter);
    }
}
