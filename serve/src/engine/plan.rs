//! A step as the scheduler plans it, and its execution.
//!
//! A plan has everything that its results depend on: which tokens run, where their keys and values are, and the slots of their
//! adapters.

use aril::Slot;

use super::graph::{Capture, Decoder};
use crate::{
    device::{BlockTable, Draw},
    error::{Error, Result},
    forward::{Session, Step},
    model::Model,
};

/// The tokens of a step, by sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) chunks: Vec<Chunk>,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub(crate) slot: Slot,
    /// Position of the first token.
    pub(crate) position: usize,
    pub(crate) tokens: Vec<u32>,
    /// The sequence's blocks of the cache, in order, up to the last token's.
    pub(crate) blocks: Vec<u32>,
    /// Whether the token behind the last one is chosen.
    pub(crate) is_sampled: bool,
    /// How the device chooses it; `None` if its logits are wanted on the host.
    pub(crate) draw: Option<Draw>,
}

/// What a token is chosen from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scores {
    /// All logits: `[vocab]`.
    Logits(Vec<f32>),
    /// The token that the device chose, `None` if a logit is not a number, and its log-probability.
    Drawn(Option<u32>, f32),
}

impl Plan {
    /// Computes all chunks in one pass, and returns what the token of each sampled one is chosen from, in order. Only if one of them
    /// wants logits are logits copied to the host.
    pub(crate) fn run<D: Capture>(
        &self,
        model: &Model<'_, D>,
        session: &mut Session<'_, D>,
        decoder: &mut Decoder<D>,
        block_rows: usize,
    ) -> Result<Vec<Scores>> {
        let step = self.step(block_rows)?;
        let eager;
        let (logits, rows) = match decoder.run(model, session, &step)? {
            Some(of_graph) => of_graph,
            None => {
                eager = model.forward(session, &step)?;
                (&eager, step.sampled.len())
            }
        };
        let sampled = || self.chunks.iter().filter(|chunk| chunk.is_sampled);
        let mut draws: Vec<Draw> = sampled().map(|chunk| chunk.draw.unwrap_or(Draw::GREEDY)).collect();
        draws.resize(rows, Draw::GREEDY);
        let drawn = model.device.draw(logits, &draws)?;
        let logits = match sampled().all(|chunk| chunk.draw.is_some()) {
            true => Vec::new(),
            false => model.device.read(logits)?,
        };
        let scores = sampled().zip(drawn).enumerate().map(|(row, (chunk, (token, logprob)))| match chunk.draw {
            Some(_) => Scores::Drawn(token, logprob),
            None => Scores::Logits(logits[row * model.config.vocab..][..model.config.vocab].to_vec()),
        });
        Ok(scores.collect())
    }

    /// Packs the chunks without padding.
    fn step(&self, block_rows: usize) -> Result<Step> {
        let columns = self.chunks.iter().map(|chunk| chunk.blocks.len()).max().unwrap_or(0);
        let table = BlockTable { first_rows: Vec::new(), columns, block_rows: index(block_rows)? };
        let mut step = Step { table, ..Step::default() };
        for (sequence, chunk) in (0..).zip(&self.chunks) {
            for (position, &token) in (chunk.position..).zip(&chunk.tokens) {
                step.ids.push(token);
                step.positions.push(index(position)?);
                step.sequences.push(sequence);
                step.slots.push(chunk.slot);
                step.scales.push(1.0);
            }
            for &block in &chunk.blocks {
                step.table.first_rows.push(index(block as usize * block_rows)?);
            }
            step.table.first_rows.resize(columns * (sequence as usize + 1), 0);
            if chunk.is_sampled {
                step.sampled.push(index(step.ids.len() - 1)?);
            }
        }
        Ok(step)
    }
}

/// A row or position as the kernels' integer.
pub(crate) fn index(value: usize) -> Result<u32> {
    let index = i32::try_from(value).map(i32::cast_unsigned);
    index.map_err(|_| Error::new(format!("{value} is past the last row of a cache, 2147483647")))
}
