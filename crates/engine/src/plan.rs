//! A step as the scheduler plans it, and its execution.
//!
//! A plan has everything that its results depend on: which tokens run, where their keys and values are, and the slots
//! of their adapters. A token may be one that the step before chooses, and that the host does not know yet.

use std::{iter, ops::Range};

use aril::Slot;

use crate::graph::{Capture, Decoder, Drawn};
use crate::{
    device::{BlockTable, Draw, Slots},
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
    /// Position of the sequence's first token that has the slot. Those before it are the base model's.
    pub(crate) start: usize,
    /// Whether its adapter, if it has one, has no factors of a router.
    pub(crate) keeps_routers: bool,
    /// Position of the first token.
    pub(crate) position: usize,
    pub(crate) tokens: Vec<u32>,
    /// The sampled chunk of the step before that chooses the last of these tokens, if it is not known yet.
    pub(crate) source: Option<usize>,
    /// The sequence's blocks of the cache, in order, up to the last token's.
    pub(crate) blocks: Vec<u32>,
    /// The place of the sequence's state.
    pub(crate) state: u32,
    /// The tokens of the chunk, none of them the last one if it is sampled, whose logits are wanted on the host.
    pub(crate) scored: Range<usize>,
    /// Whether the token behind the last one is chosen.
    pub(crate) is_sampled: bool,
    /// How the device chooses it; `None` if logits of the chunk are wanted on the host.
    pub(crate) draw: Option<Draw>,
}

impl Chunk {
    /// The rows of its logits that are computed.
    pub(crate) fn rows(&self) -> usize {
        self.scored.len() + usize::from(self.is_sampled)
    }
}

/// What a token is chosen from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scores {
    /// All logits: `[vocab]`.
    Logits(Vec<f32>),
    /// The token that the device chose, `None` if a logit is not a number, and its log-probability.
    Drawn(Option<u32>, f32),
}

/// A step that has been enqueued.
#[derive(Debug)]
pub(crate) struct Enqueued {
    /// All logits, if a token is chosen on the host.
    logits: Option<Vec<f32>>,
}

impl Plan {
    /// Enqueues all chunks in one pass. Tokens of `last` continue the sequences that have a source there; those that
    /// are chosen now will be in `draws`. Only if a chunk wants its logits on the host, and this is the first rank,
    /// this waits for them.
    pub(crate) fn enqueue<D: Capture>(
        &self,
        (model, adapters): (&Model<'_, D>, Slots<'_, D>),
        session: &mut Session<'_, D>,
        decoder: &mut Decoder<D>,
        block_rows: usize,
        last: Option<&D::Draws>,
        draws: &mut D::Draws,
    ) -> Result<Enqueued> {
        let (step, sources) = self.step(block_rows)?;
        let eager;
        let (logits, rows) = match decoder.run((model, adapters), session, &step, &Drawn { last, sources: &sources })? {
            Some(of_graph) => of_graph,
            None => {
                // Copies from the host may wait for the last step, which waits for the other ranks.
                model.device.wait()?;
                let mut inputs = model.inputs(&step)?;
                if let Some(last) = last.filter(|_| sources.iter().any(|&source| source >= 0)) {
                    model.device.take_drawn(&mut inputs.ids, &sources, last)?;
                }
                eager = model.forward_on(adapters, session, &step, &inputs)?;
                (&eager, step.sampled.len())
            }
        };
        let mut how: Vec<Draw> = self.sampled().map(|chunk| chunk.draw.unwrap_or(Draw::GREEDY)).collect();
        how.resize(rows, Draw::GREEDY);
        model.device.draw(logits, &how, draws)?;
        let is_read = !self.is_drawn() && model.device.tp().rank() == 0;
        let logits = if is_read { Some(model.device.read(logits)?) } else { None };
        Ok(Enqueued { logits })
    }

    /// What each computed row is for, in the order of the chunks: the logits of scored tokens, then what a token is
    /// chosen from. Waits for the step, and not for one that was enqueued later.
    pub(crate) fn scores<D: Capture>(
        &self,
        model: &Model<'_, D>,
        enqueued: &Enqueued,
        draws: &mut D::Draws,
    ) -> Result<Vec<Scores>> {
        let vocab = model.config.vocab;
        let drawn = model.device.drawn(draws)?;
        let of_chunk = |(row, (chunk, (token, logprob))): (usize, (&Chunk, _))| match &enqueued.logits {
            Some(logits) if chunk.draw.is_none() => Scores::Logits(logits[row * vocab..][..vocab].to_vec()),
            _ => Scores::Drawn(token, logprob),
        };
        Ok(self.sampled().zip(drawn).enumerate().map(of_chunk).collect())
    }

    /// Whether the device chooses all tokens, so that the next step can be enqueued before the host knows them.
    pub(crate) fn is_drawn(&self) -> bool {
        self.sampled().all(|chunk| chunk.draw.is_some())
    }

    /// Tokens that are computed.
    pub(crate) fn num_tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.tokens.len()).sum()
    }

    /// The chunk of each row whose logits are computed.
    fn sampled(&self) -> impl Iterator<Item = &Chunk> {
        self.chunks.iter().flat_map(|chunk| iter::repeat_n(chunk, chunk.rows()))
    }

    /// Packs the chunks without padding. Also returns each token's source, as for
    /// [`Device::take_drawn`](crate::device::Device).
    fn step(&self, block_rows: usize) -> Result<(Step, Vec<i32>)> {
        let columns = self.chunks.iter().map(|chunk| chunk.blocks.len()).max().unwrap_or(0);
        let states = self.chunks.iter().map(|chunk| chunk.state).collect();
        let table = BlockTable { first_rows: Vec::new(), columns, block_rows: index(block_rows)?, states };
        let keeps_routers = self.chunks.iter().all(|chunk| chunk.keeps_routers);
        let mut step = Step { table, keeps_routers, ..Step::default() };
        let mut sources = Vec::new();
        for (sequence, chunk) in (0..).zip(&self.chunks) {
            for (position, &token) in (chunk.position..).zip(&chunk.tokens) {
                step.ids.push(token);
                step.positions.push(index(position)?);
                step.sequences.push(sequence);
                step.slots.push(if position < chunk.start { Slot::BASE } else { chunk.slot });
                step.scales.push(1.0);
            }
            sources.resize(step.ids.len(), -1);
            if let (Some(source), Some(last)) = (chunk.source, sources.last_mut()) {
                *last = i32::try_from(source)?;
            }
            for &block in &chunk.blocks {
                step.table.first_rows.push(index(block as usize * block_rows)?);
            }
            step.table.first_rows.resize(columns * (sequence as usize + 1), 0);
            let first = step.ids.len() - chunk.tokens.len();
            for row in chunk.scored.clone().chain(chunk.is_sampled.then(|| chunk.tokens.len() - 1)) {
                step.sampled.push(index(first + row)?);
            }
        }
        Ok((step, sources))
    }
}

/// A row or position as the kernels' integer.
pub(crate) fn index(value: usize) -> Result<u32> {
    let index = i32::try_from(value).map(i32::cast_unsigned);
    index.map_err(|_| Error::new(format!("{value} is past the last row of a cache, 2147483647")))
}
