//! Decode steps as graphs: captured once for each size of a batch, and replayed with other tokens, places and adapters.
//!
//! A graph's operands stay where they are. A step copies its indices over those of the smallest graph that has room for it. The rows
//! that it does not use are of the base model, and write to a block of the cache that no sequence has.

use std::{convert::Infallible, iter, time::Instant};

use aril::{Element, Slot};

use crate::{
    cpu::Cpu,
    device::{BlockTable, Device, Places},
    error::Result,
    forward::{FUSED_TOKENS, Inputs, Lora, Session, Step},
    model::Model,
};

/// A device that may capture steps.
pub(crate) trait Capture: Device {
    /// A captured step.
    type Graph;

    /// Captures a step of `tokens` tokens as a graph of what `record` enqueues, and returns both; `None` on a device without graphs.
    /// `record` is also run once before.
    fn capture<R>(
        &self,
        adapters: &Self::Adapters,
        buffers: &mut Self::Buffers,
        tokens: usize,
        record: impl FnMut(&mut Self::LoraStep<'_>) -> Result<R>,
    ) -> Result<Option<(Self::Graph, R)>>;

    /// Enqueues a captured step whose first tokens have these slots. The others have no adapter.
    fn replay(&self, graph: &mut Self::Graph, buffers: &mut Self::Buffers, slots: &[Slot]) -> Result<()>;

    /// Overwrites the indices from `first` on, after all work that is enqueued.
    fn overwrite(&self, indices: &mut Self::Indices, first: usize, values: &[u32]) -> Result<()>;
}

/// The graphs of a session.
pub(crate) struct Decoder<D: Capture> {
    /// By size, the smallest first.
    batches: Vec<Graphs<D>>,
    /// When the last step was enqueued.
    enqueued: Option<Instant>,
}

/// The graphs of one size.
struct Graphs<D: Capture> {
    batch: Batch<D>,
    with_adapters: Captured<D>,
    without: Captured<D>,
}

/// The operands of the graphs for up to `tokens` sequences.
pub(crate) struct Batch<D: Capture> {
    tokens: usize,
    /// The cache row of the block that no sequence has.
    spare_row: u32,
    inputs: Inputs<D>,
    /// The block table as the device has it.
    first_rows: Vec<u32>,
}

/// The block tables of graphs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    /// Blocks of the longest sequence.
    pub(crate) columns: usize,
    pub(crate) block_rows: u32,
    /// The first cache row of a block that no sequence has.
    pub(crate) spare_row: u32,
}

/// What a captured step runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    /// Whether a token may have an adapter.
    pub(crate) has_adapters: bool,
    /// Whether layers run base weights and adapters in one launch where the device can.
    pub(crate) is_fused: bool,
}

/// A graph, and the logits that it computes: `[tokens, vocab]`.
pub(crate) struct Captured<D: Capture> {
    pub(crate) graph: D::Graph,
    logits: D::Tensor,
}

impl<D: Capture> Decoder<D> {
    /// Captures steps of up to `max_tokens` sequences. Without graphs on the device, the decoder takes no step.
    pub(crate) fn new(
        model: &Model<'_, D>,
        session: &mut Session<'_, D>,
        max_tokens: usize,
        tables: Tables,
    ) -> Result<Self> {
        let mut batches = Vec::new();
        for tokens in sizes(max_tokens) {
            let batch = Batch::new(model.device, tokens, tables)?;
            let mut capture = |has_adapters| {
                let variant = Variant { has_adapters, is_fused: tokens <= FUSED_TOKENS };
                Captured::new(model, session, &batch, variant)
            };
            let (Some(with_adapters), Some(without)) = (capture(true)?, capture(false)?) else { break };
            batches.push(Graphs { batch, with_adapters, without });
        }
        Ok(Self { batches, enqueued: None })
    }

    /// Enqueues a step, and returns its logits and the number of their rows, which may be more than the tokens. The next step overwrites
    /// them. Returns `None` if the step is not one of one sampled token of each sequence, or has too many.
    pub(crate) fn run(
        &mut self,
        model: &Model<'_, D>,
        session: &mut Session<'_, D>,
        step: &Step,
    ) -> Result<Option<(&D::Tensor, usize)>> {
        let tokens = step.ids.len();
        let is_decode = step.sampled.len() == tokens && step.table.first_rows.len() == tokens * step.table.columns;
        let Some(graphs) = self.batches.iter_mut().find(|graphs| is_decode && graphs.batch.tokens >= tokens) else {
            return Ok(None);
        };
        graphs.batch.set(model, step)?;
        let has_adapters = step.slots.iter().any(|&slot| slot != Slot::BASE);
        let captured = if has_adapters { &mut graphs.with_adapters } else { &mut graphs.without };
        model.device.replay(&mut captured.graph, &mut session.buffers, &step.slots)?;
        self.enqueued = Some(Instant::now());
        Ok(Some((&captured.logits, graphs.batch.tokens)))
    }

    /// Drops all graphs, so that every step is enqueued operation by operation.
    #[cfg(all(test, feature = "cuda"))]
    pub(crate) fn clear(&mut self) {
        self.batches.clear();
    }

    /// When the last step was enqueued, if it was since the last call.
    pub(crate) fn take_enqueued(&mut self) -> Option<Instant> {
        self.enqueued.take()
    }
}

impl<D: Capture> Batch<D> {
    pub(crate) fn new(device: &D, tokens: usize, tables: Tables) -> Result<Self> {
        let Tables { columns, block_rows, spare_row } = tables;
        let first_rows = vec![spare_row; tokens * columns];
        let sequences: Vec<u32> = (0..).take(tokens).collect();
        let places = Places {
            positions: device.indices(&vec![0; tokens])?,
            sequences: device.indices(&sequences)?,
            rows: device.indices(&vec![spare_row; tokens])?,
            table: BlockTable { first_rows: device.indices(&first_rows)?, columns, block_rows },
            alone: None,
        };
        let inputs = Inputs { ids: device.indices(&vec![0; tokens])?, places };
        Ok(Self { tokens, spare_row, inputs, first_rows })
    }

    /// Copies the indices of a step over those of the graphs.
    pub(crate) fn set(&mut self, model: &Model<'_, D>, step: &Step) -> Result<()> {
        let device = model.device;
        let &mut Self { tokens, spare_row, inputs: Inputs { ref mut ids, ref mut places }, ref mut first_rows, .. } =
            self;
        let columns = places.table.columns;
        let unused = tokens - step.ids.len();
        let padded = |values: &[u32], value| [values, &vec![value; unused]].concat();
        let rows = (0..).zip(&step.positions).map(|(sequence, &position)| step.table.row(sequence, position));
        device.overwrite(ids, 0, &model.local_ids(&padded(&step.ids, 0)))?;
        device.overwrite(&mut places.positions, 0, &padded(&step.positions, 0))?;
        device.overwrite(&mut places.rows, 0, &padded(&rows.collect::<Vec<_>>(), spare_row))?;
        // Most steps begin no block.
        let known = first_rows.chunks_exact_mut(columns).enumerate();
        let wanted = step.table.first_rows.chunks_exact(step.table.columns);
        for ((row, known), wanted) in known.zip(wanted.chain(iter::repeat_n(&[spare_row][..], unused))) {
            let known = &mut known[..wanted.len()];
            if known != wanted {
                known.copy_from_slice(wanted);
                device.overwrite(&mut places.table.first_rows, row * columns, wanted)?;
            }
        }
        Ok(())
    }
}

impl<D: Capture> Captured<D> {
    /// Captures a step on these operands; `None` on a device without graphs.
    pub(crate) fn new(
        model: &Model<'_, D>,
        Session { state, buffers }: &mut Session<'_, D>,
        batch: &Batch<D>,
        Variant { has_adapters, is_fused }: Variant,
    ) -> Result<Option<Self>> {
        let captured = model.device.capture(&model.adapters, buffers, batch.tokens, |step| {
            let mut lora = Lora { step, has_adapters };
            let h = model.hidden(state, &batch.inputs, is_fused, &mut lora)?;
            model.logits(&h, &mut lora)
        })?;
        Ok(captured.map(|(graph, logits)| Self { graph, logits }))
    }
}

/// The sizes of batches that are captured: powers of two, the numbers between them, and the largest.
fn sizes(max_tokens: usize) -> Vec<usize> {
    let powers = iter::successors(Some(1_usize), |power| power.checked_mul(2));
    let smaller = powers.flat_map(|power| [power, power + power / 2]).take_while(|&size| size < max_tokens);
    let mut sizes: Vec<usize> = smaller.chain([max_tokens]).collect();
    sizes.dedup();
    sizes
}

impl<T: Element> Capture for Cpu<T> {
    type Graph = Infallible;

    fn capture<R>(
        &self,
        _: &Self::Adapters,
        _: &mut Self::Buffers,
        _: usize,
        _: impl FnMut(&mut Self::LoraStep<'_>) -> Result<R>,
    ) -> Result<Option<(Infallible, R)>> {
        Ok(None)
    }

    fn replay(&self, graph: &mut Infallible, _: &mut Self::Buffers, _: &[Slot]) -> Result<()> {
        match *graph {}
    }

    fn overwrite(&self, indices: &mut Vec<u32>, first: usize, values: &[u32]) -> Result<()> {
        indices[first..first + values.len()].copy_from_slice(values);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::sizes;

    #[test]
    fn sizes_end_with_the_largest() {
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(13), [1, 2, 3, 4, 6, 8, 12, 13]);
        assert_eq!(sizes(16), [1, 2, 3, 4, 6, 8, 12, 16]);
    }
}
