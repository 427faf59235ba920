use std::collections::VecDeque;

use cudarc::driver::CudaEvent;

use super::{LaunchError, Queue, capturing::Relaxed};

/// The commits of a stream that may not have run yet.
#[derive(Debug, Default)]
pub(super) struct Commits {
    /// Their numbers and events, in order.
    pending: VecDeque<(u64, CudaEvent)>,
    /// Events to use again.
    spare: Vec<CudaEvent>,
}

impl Commits {
    /// Records a commit on the queue's stream.
    pub(super) fn record(&mut self, number: u64, queue: &Queue) -> Result<(), LaunchError> {
        queue.enter()?;
        self.forget_done();
        let event = self.spare.pop().map_or_else(|| queue.new_event(), Ok)?;
        event.record(queue.stream())?;
        self.pending.push_back((number, event));
        Ok(())
    }

    /// The event of a commit, or of a later one; `None` if it has run.
    pub(super) fn event(&self, number: u64) -> Option<&CudaEvent> {
        let from = self.pending.partition_point(|(pending, _)| *pending < number);
        self.pending.get(from).map(|(_, event)| event)
    }

    fn forget_done(&mut self) {
        let _relaxed = Relaxed::new();
        let done = self.pending.iter().take_while(|(_, event)| event.is_complete()).count();
        self.spare.extend(self.pending.drain(..done).map(|(_, event)| event));
    }
}
