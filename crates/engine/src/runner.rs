//! What runs steps: the model, its cache, and the tokens that are chosen. Each rank of a group has one.

use std::time::Instant;

use crate::{
    Sizes,
    graph::{Capture, Decoder, Tables},
    plan::{Enqueued, Plan, Scores, index},
};
use crate::{device::Slots, error::Result, forward::Session, model::Model};

/// Runs the steps of an engine on a rank.
pub(crate) struct Runner<'m, D: Capture> {
    pub(super) model: &'m Model<'m, D>,
    pub(super) session: Session<'m, D>,
    pub(super) decoder: Decoder<D>,
    block_rows: usize,
    /// Of the last step, then those of the next one.
    pub(super) draws: [D::Draws; 2],
}

impl<'m, D: Capture> Runner<'m, D> {
    /// Runs the model on the adapters of a pool.
    pub(crate) fn new(model: &'m Model<'m, D>, adapters: Slots<'_, D>, sizes: &Sizes) -> Result<Self> {
        let Sizes { limits, blocks, block_rows, max_positions, .. } = *sizes;
        // Graphs have a block and a state of their own.
        let rows = blocks as usize * block_rows;
        let mut session = model.session(rows + block_rows, max_positions, limits.running + 1)?;
        let tables = Tables {
            columns: max_positions.div_ceil(block_rows),
            block_rows: index(block_rows)?,
            spare_row: index(rows)?,
            spare_state: index(limits.running)?,
        };
        // What is allocated comes before the first step, as `Decoder` says.
        let draws = [model.device.draws(limits.running)?, model.device.draws(limits.running)?];
        let decoder = Decoder::new(model, adapters, &mut session, limits.running, tables)?;
        Ok(Self { model, decoder, session, block_rows, draws })
    }

    /// Enqueues a step. If it is behind the last one, its tokens may be those that the last one chooses.
    pub(crate) fn enqueue(&mut self, adapters: Slots<'_, D>, plan: &Plan, is_behind: bool) -> Result<Enqueued> {
        let Self { model, session, decoder, draws: [last, next], .. } = self;
        let last = if is_behind { Some(&*last) } else { None };
        let enqueued = plan.enqueue((model, adapters), session, decoder, self.block_rows, last, next)?;
        self.draws.swap(0, 1);
        Ok(enqueued)
    }

    /// The results of the last step, or of the one before it.
    pub(super) fn scores(&mut self, plan: &Plan, enqueued: &Enqueued, is_last: bool) -> Result<Vec<Scores>> {
        plan.scores(self.model, enqueued, &mut self.draws[usize::from(!is_last)])
    }

    /// When the last graph was enqueued, if it was since the last call.
    pub(super) fn take_enqueued(&mut self) -> Option<Instant> {
        self.decoder.take_enqueued()
    }
}
