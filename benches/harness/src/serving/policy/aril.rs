use std::time::Duration;

use aril_serving::admission::{Admission, Answer, Limits, Request as Waiting};

use super::{Adapter, Memory, Policy, Request, Room, Time, load_ahead};

/// Our admission. The slots that a batch may not use are for adapters that are loaded ahead.
#[derive(Debug)]
pub struct Aril {
    admission: Admission<usize, Adapter>,
    requests: Vec<Request>,
    ahead: usize,
}

impl Aril {
    /// `max_adapters` of a batch, and `ahead` slots beside them, at least one.
    pub fn new(max_adapters: usize, ahead: usize, max_wait: Duration) -> Self {
        Self { admission: Admission::new(Limits::new(max_adapters, max_wait)), requests: Vec::new(), ahead }
    }
}

impl Policy for Aril {
    fn arrive(&mut self, number: usize, request: &Request) {
        let arrival = Duration::from_micros(request.arrival);
        self.admission.enqueue(Waiting::new(number, request.adapter, 1, arrival)).expect("requests are numbered");
        self.requests.push(*request);
    }

    fn admit(&mut self, now: Time, memory: &mut Memory, room: &mut Room) -> Vec<usize> {
        let next: Vec<Adapter> = self.admission.prefetch().take(self.ahead).collect();
        load_ahead(memory, now, &next);
        let mut started = Vec::new();
        self.admission.admit(Duration::from_micros(now), |waiting| {
            let request = &self.requests[waiting.id];
            if !memory.is_ready(request.adapter, now) {
                return Answer::Skip;
            }
            if !room.take(request) {
                return Answer::Stop;
            }
            memory.lease(request.adapter);
            started.push(waiting.id);
            Answer::Take
        });
        started
    }

    fn finish(&mut self, number: usize, _: Adapter) {
        self.admission.finish(&number).expect("the request runs");
    }
}
