//! An engine on the ranks of a tensor-parallel group, each on a thread of its own.
//!
//! The first rank has the scheduler. It tells the others all that it does to its model and its adapters ([`Order`]),
//! and does the same itself. So all ranks enqueue the same steps, in which they exchange activations, and make the same
//! calls of their pool.
//!
//! Invariant: no rank waits for one that has ended. All of a rank's waits for others are exchanges, which fail, or of
//! device work, before which [`Capture::wait`] looks after the other ranks.

use std::sync::mpsc::{Receiver, Sender, channel};

use crate::error::{Result, bail};
use crate::{
    graph::Capture,
    plan::Plan,
    pool::{Change, RankPool},
    runner::Runner,
};

/// What the first rank does, and all others do after it.
pub(crate) enum Order {
    /// Enqueues a step, which may be behind the last one.
    Step(Plan, bool),
    Adapter(Change),
    /// Ends, once all earlier orders have been carried out.
    End,
}

/// The other ranks of the first one's group.
#[derive(Default)]
pub(crate) struct Others(Vec<Sender<Order>>);

impl Others {
    /// The channels to as many ranks, and their ends.
    pub(crate) fn new(count: usize) -> (Self, Vec<Receiver<Order>>) {
        let (orders, received) = (0..count).map(|_| channel()).unzip();
        (Self(orders), received)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn tell(&self, order: impl Fn() -> Order) {
        for rank in &self.0 {
            // The next exchange fails if a rank has ended.
            let _ = rank.send(order());
        }
    }
}

/// Carries out the orders of the first rank until the last of them.
pub(crate) fn follow<D: Capture>(
    runner: &mut Runner<'_, D>,
    adapters: &mut RankPool<D>,
    orders: &Receiver<Order>,
) -> Result<()> {
    loop {
        match orders.recv() {
            Ok(Order::Step(mut plan, is_behind)) => {
                adapters.name_own_slots(&mut plan)?;
                drop(runner.enqueue(adapters.slots(), &plan, is_behind)?);
            }
            Ok(Order::Adapter(change)) => adapters.carry_out(change)?,
            Ok(Order::End) => return Ok(()),
            Err(_) => bail!("rank 0 has ended"),
        }
    }
}
