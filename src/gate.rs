//! Keeps work that a thread enqueues on a stream out of a capture that another thread begins.

use std::{
    hint,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

/// Whoever enqueues work on a stream enters its gate, and whoever begins a capture closes it for that moment. Between a look at the
/// capture's status and the work that follows, no capture can then begin.
///
/// A thread may enter a gate that it has entered, also while another waits to close it. A lock for readers and writers does not allow
/// that.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// How often it is entered, or [`CLOSED`].
    entered: AtomicUsize,
}

const CLOSED: usize = usize::MAX;
/// Attempts before the thread yields. What others do meanwhile mostly takes less than a microsecond.
const SPINS: usize = 64;

/// The gate cannot be closed.
#[derive(Debug)]
#[must_use = "the gate is left at once"]
pub(crate) struct Entered<'a>(&'a Gate);

/// The gate cannot be entered.
#[derive(Debug)]
#[must_use = "the gate is opened at once"]
pub(crate) struct Closed<'a>(&'a Gate);

impl Gate {
    /// Waits while the gate is closed.
    pub(crate) fn enter(&self) -> Entered<'_> {
        let enter = |entered: usize| (entered != CLOSED).then(|| entered + 1);
        self.attempt(|gate| gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_ok());
        Entered(self)
    }

    /// Waits until nobody is within. The calling thread must not be.
    pub(crate) fn close(&self) -> Closed<'_> {
        self.attempt(|gate| gate.compare_exchange(0, CLOSED, Ordering::Acquire, Ordering::Relaxed).is_ok());
        Closed(self)
    }

    fn attempt(&self, has_succeeded: impl Fn(&AtomicUsize) -> bool) {
        let mut attempts = 0;
        while !has_succeeded(&self.entered) {
            attempts += 1;
            if attempts < SPINS { hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.entered.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.entered.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicBool, time::Duration};

    use super::*;

    /// What a thread of its own does meanwhile. It must wait for `guard`, which is dropped later.
    fn waits_for<G>(guard: G, act: impl FnOnce() + Send) {
        let has_acted = AtomicBool::new(false);
        thread::scope(|threads| {
            let acting = threads.spawn(|| {
                act();
                has_acted.store(true, Ordering::SeqCst);
            });
            thread::sleep(Duration::from_millis(50));
            assert!(!has_acted.load(Ordering::SeqCst) && !acting.is_finished(), "it did not wait");
            drop(guard);
        });
        assert!(has_acted.into_inner());
    }

    #[test]
    fn a_gate_is_not_closed_while_somebody_is_within() {
        let gate = Gate::default();
        let (first, second) = (gate.enter(), gate.enter());
        drop(first);
        waits_for(second, || drop(gate.close()));
        drop(gate.enter());
    }

    #[test]
    fn a_closed_gate_is_not_entered() {
        let gate = Gate::default();
        waits_for(gate.close(), || drop(gate.enter()));
        waits_for(gate.close(), || drop(gate.close()));
        drop(gate.close());
    }

    /// Threads look at a flag within the gate and act on it later; others change the flag while the gate is closed. No flag changes
    /// between a look and what follows, nobody waits for ever, and threads enter within the gate.
    #[test]
    fn what_is_seen_within_the_gate_holds_until_it_is_left() {
        const ROUNDS: usize = 2000;
        let (gate, captured, acted) = (Gate::default(), AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|threads| {
            let act = || {
                for _ in 0..ROUNDS {
                    let _entered = gate.enter();
                    let seen = captured.load(Ordering::Relaxed);
                    thread::yield_now();
                    let _again = gate.enter();
                    assert_eq!(captured.load(Ordering::Relaxed), seen, "a capture began between a look and the work");
                    acted.fetch_add(1, Ordering::Relaxed);
                }
            };
            let acting = [(); 3].map(|()| threads.spawn(act));
            while acting.iter().any(|thread| !thread.is_finished()) {
                let closed = gate.close();
                captured.fetch_xor(true, Ordering::Relaxed);
                drop(closed);
            }
        });
        assert_eq!(acted.into_inner(), 3 * ROUNDS);
        assert_eq!(gate.entered.into_inner(), 0);
    }
}
