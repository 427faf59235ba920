//! Greedy generation: one prefill of all requests, then decode steps for the requests that still run.

use aril::{Element, Slot};

use crate::{
    device::{BlockTable, Device, Draw, Slots},
    error::{Error, Result, bail},
    forward::Step,
    model::Model,
};

/// A request in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequence<'a> {
    /// Index of the request, for errors.
    pub(crate) request: usize,
    /// At least one token.
    pub(crate) prompt: &'a [u32],
    pub(crate) slot: Slot,
    /// A factor on the adapter's own scaling.
    pub(crate) scale: f32,
}

/// The result of a request.
#[derive(Debug, Default)]
pub(crate) struct Generation {
    /// Ends with the token that ended the text, if one did.
    pub(crate) tokens: Vec<u32>,
    /// The logits that chose each token, `[tokens, vocab]`, if requested.
    pub(crate) logits: Vec<f32>,
}

/// When a request ends, and whether its logits are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits<'a> {
    pub(crate) max_new_tokens: usize,
    pub(crate) eos: &'a [u32],
    pub(crate) keep_logits: bool,
}

/// Runs all sequences together with greedy sampling.
pub(crate) fn generate<D: Device>(
    model: &Model<'_, D>,
    adapters: Slots<'_, D>,
    sequences: &[Sequence<'_>],
    limits: Limits<'_>,
) -> Result<Vec<Generation>> {
    run(model, adapters, sequences, limits.max_new_tokens, limits.keep_logits, |index, _, largest| {
        let Some(token) = largest else {
            let request = sequences[index].request;
            bail!("request {request}: the logits are not numbers; activations overflow {}", D::Elem::DTYPE)
        };
        Ok((token, limits.eos.contains(&token)))
    })
}

/// Repeats the steps of an earlier run with its tokens and no adapter in a pool, and keeps the logits of each step.
pub(crate) fn replay<D: Device>(
    model: &Model<'_, D>,
    sequences: &[Sequence<'_>],
    tokens: &[&[u32]],
) -> Result<Vec<Generation>> {
    let longest = tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0);
    run(model, Slots::Table(&model.adapters), sequences, longest, true, |request, step, _| {
        let tokens = tokens[request];
        Ok((tokens[step], step + 1 == tokens.len()))
    })
}

/// Runs all sequences. `next` returns the next token of a request at a step, and whether it is the last.
fn run<D: Device>(
    model: &Model<'_, D>,
    adapters: Slots<'_, D>,
    sequences: &[Sequence<'_>],
    max_new_tokens: usize,
    keep_logits: bool,
    next: impl Fn(usize, usize, Option<u32>) -> Result<(u32, bool)>,
) -> Result<Vec<Generation>> {
    // Each sequence has one block, as long as the longest sequence.
    let states = (0..).take(sequences.len()).collect();
    let mut table = BlockTable { first_rows: Vec::with_capacity(sequences.len()), columns: 1, block_rows: 0, states };
    let (mut rows, mut longest) = (0, 0);
    for sequence in sequences {
        table.first_rows.push(index(rows)?);
        let len = sequence.prompt.len() + max_new_tokens;
        rows += len;
        longest = longest.max(len);
    }
    index(rows)?;
    table.block_rows = index(longest)?;
    let mut session = model.session(rows, longest, sequences.len())?;
    let mut drawn = model.device.draws(sequences.len())?;

    let mut step = Step { table, ..Step::default() };
    for (request, sequence) in sequences.iter().enumerate() {
        step.push(index(request)?, sequence, 0, sequence.prompt)?;
    }
    let mut generations: Vec<Generation> = sequences.iter().map(|_| Generation::default()).collect();
    let mut running: Vec<usize> = (0..sequences.len()).collect();
    while !running.is_empty() {
        let logits = model.forward(adapters, &mut session, &step)?;
        model.device.draw(&logits, &vec![Draw::GREEDY; running.len()], &mut drawn)?;
        if keep_logits {
            let logits = model.device.read(&logits)?;
            for (logits, &request) in logits.chunks_exact(logits.len() / running.len()).zip(&running) {
                generations[request].logits.extend_from_slice(logits);
            }
        }
        step = Step { table: step.table, ..Step::default() };
        let mut still_running = Vec::with_capacity(running.len());
        for (request, (largest, _)) in running.into_iter().zip(model.device.drawn(&mut drawn)?) {
            let (sequence, tokens) = (&sequences[request], &mut generations[request].tokens);
            let (token, last) = next(request, tokens.len(), largest)?;
            tokens.push(token);
            if !last && tokens.len() < max_new_tokens {
                step.push(index(request)?, sequence, sequence.prompt.len() + tokens.len() - 1, &[token])?;
                still_running.push(request);
            }
        }
        running = still_running;
    }
    Ok(generations)
}

impl Step {
    /// Appends tokens of a sequence, whose row of the block table is `row`. The last one is sampled.
    fn push(&mut self, row: u32, sequence: &Sequence<'_>, position: usize, tokens: &[u32]) -> Result<()> {
        for (position, &token) in (position..).zip(tokens) {
            self.ids.push(token);
            self.positions.push(index(position)?);
            self.sequences.push(row);
            self.slots.push(sequence.slot);
            self.scales.push(sequence.scale);
        }
        self.sampled.push(index(self.ids.len() - 1)?);
        Ok(())
    }
}

/// A row or position as the kernels' integer.
fn index(value: usize) -> Result<u32> {
    i32::try_from(value)
        .map(i32::cast_unsigned)
        .map_err(|_| Error::new(format!("the requests take {value} rows of the cache; there are 2147483647")))
}
