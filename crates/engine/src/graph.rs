//! Decode steps as graphs: captured once for each size of a batch, and replayed with other tokens, places and adapters.
//!
//! A graph's operands stay where they are. A step copies its inputs over those of the smallest graph that has room for
//! it, all at once. The rows that it does not use are of the base model, and write to a block of the cache and to a state
//! that no sequence has.

use std::{cell::RefCell, convert::Infallible, iter, time::Instant};

use aril::{Element, Slot};

#[cfg(feature = "cuda")]
pub use crate::cuda_graph::Staging;
use crate::{
    cpu::Cpu,
    device::{BlockTable, Device, Places, Slots},
    error::Result,
    forward::{FUSED_TOKENS, Fusion, Inputs, Lora, Session, Stacked, Step},
    model::Model,
};

/// A device that may capture steps.
pub trait Capture: Device {
    /// A captured step.
    type Graph;

    /// Captures a step of so many tokens, which may have adapters or have none, as a graph of what `record` enqueues,
    /// and returns both; `None` on a device without graphs. `record` is also run once before.
    ///
    /// # Errors
    ///
    /// The device's, or that of `record`.
    fn capture<R>(
        &self,
        table: &Self::Adapters,
        adapters: Slots<'_, Self>,
        buffers: &mut Self::Buffers,
        batch: (usize, bool),
        record: impl FnMut(&mut Self::LoraStep<'_>) -> Result<R>,
    ) -> Result<Option<(Self::Graph, R)>>;

    /// Enqueues the captured step whose tokens have these slots: that with the stack if there is one and their adapters
    /// fit there. Returns whether it was.
    ///
    /// # Errors
    ///
    /// The device's.
    fn replay(
        &self,
        stacked: Option<(&mut Self::Graph, &mut Self::Stack)>,
        graph: &mut Self::Graph,
        adapters: Slots<'_, Self>,
        buffers: &mut Self::Buffers,
        slots: &[Slot],
    ) -> Result<bool>;

    /// Waits until all ranks have come this far.
    ///
    /// # Errors
    ///
    /// One of them has ended.
    fn meet(&self) -> Result<()>;

    /// Waits for all enqueued work that other ranks take part in. Without other ranks, it does nothing.
    ///
    /// # Errors
    ///
    /// One of them has ended.
    fn wait(&self) -> Result<()>;

    /// Where the host leaves the inputs of a step.
    type Staging;

    /// Room for inputs of up to `len` values.
    ///
    /// # Errors
    ///
    /// The device has no room.
    fn staging(&self, len: usize) -> Result<Self::Staging>;

    /// Overwrites inputs, after all work that is enqueued. The ids of tokens with a source are those that `last` has
    /// there.
    ///
    /// # Errors
    ///
    /// The device's.
    fn set_inputs(
        &self,
        inputs: &mut Inputs<Self>,
        values: &InputValues,
        staging: &mut Self::Staging,
        last: Option<&Self::Draws>,
    ) -> Result<()>;
}

/// The new inputs of a graph.
#[derive(Debug)]
pub struct InputValues {
    /// Tokens of the graph.
    pub tokens: usize,
    /// The id, the source (as for [`Device::take_drawn`]), the position, the cache row and the state of each token:
    /// `[5, tokens]`. Then the places of the block table that have changed, and their values: `[2, changes]`.
    pub values: Vec<i32>,
}

impl InputValues {
    /// Places of the block table that have changed.
    pub fn changes(&self) -> usize {
        (self.values.len() - 5 * self.tokens) / 2
    }
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
    /// With deltas of the stack, if that is fastest.
    stacked: Option<Captured<D>>,
    /// With adapters that may change routers, if the model has any. It has no deltas of the stack.
    with_routers: Option<Captured<D>>,
    with_adapters: Captured<D>,
    without: Captured<D>,
}

/// The operands of the graphs for up to `tokens` sequences.
pub struct Batch<D: Capture> {
    tokens: usize,
    /// The cache row of the block that no sequence has, and the state that none has.
    spare_row: u32,
    spare_state: u32,
    inputs: Inputs<D>,
    /// The block table as the device has it.
    first_rows: Vec<u32>,
    values: InputValues,
    /// In turn, so that a step is staged while the last one's values are copied.
    staging: [D::Staging; 2],
}

/// The block tables of graphs.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// Blocks of the longest sequence.
    pub columns: usize,
    /// Tokens of a block.
    pub block_rows: u32,
    /// The first cache row of a block that no sequence has.
    pub spare_row: u32,
    /// A state that no sequence has.
    pub spare_state: u32,
}

/// What a captured step runs.
#[derive(Clone, Copy, Debug)]
pub struct Variant {
    /// Whether a token may have an adapter.
    pub has_adapters: bool,
    /// Whether one of them may have factors of a router.
    pub changes_routers: bool,
    /// Whether layers run base weights and adapters in one launch where the device can and that is fastest.
    pub is_fused: bool,
    /// What of the stack it has.
    pub stacked: OfStack,
}

/// What of the model's stack a captured step has.
#[derive(Clone, Copy, Debug)]
pub enum OfStack {
    /// Nothing.
    Nothing,
    /// [`Stacked::Rows`].
    Rows,
    /// [`Stacked::Deltas`].
    Deltas,
}

/// A graph, and the logits that it computes: `[tokens, vocab]`.
pub struct Captured<D: Capture> {
    /// What a replay runs.
    pub graph: D::Graph,
    logits: D::Tensor,
}

impl<D: Capture> Decoder<D> {
    /// Captures steps of up to `max_tokens` sequences. Without graphs on the device, the decoder takes no step.
    ///
    /// The driver may let an allocation wait for all devices. So all ranks have allocated before one of them runs a
    /// step, which waits for the others.
    pub(crate) fn new(
        model: &Model<'_, D>,
        adapters: Slots<'_, D>,
        session: &mut Session<'_, D>,
        max_tokens: usize,
        tables: Tables,
    ) -> Result<Self> {
        let operands = sizes(max_tokens).into_iter().map(|tokens| Batch::new(model.device, tokens, tables));
        let operands = operands.collect::<Result<Vec<_>>>()?;
        model.device.meet()?;
        let mut batches = Vec::new();
        for batch in operands {
            let tokens = batch.tokens;
            let has_rows = model.has_stacked_rows(tokens);
            let mut capture = |has_adapters, changes_routers, stacked| {
                let is_fused = tokens <= FUSED_TOKENS;
                let variant = Variant { has_adapters, changes_routers, is_fused, stacked };
                Captured::new((model, adapters), session, &batch, variant)
            };
            let (of_adapters, of_base) = match has_rows {
                true => (OfStack::Rows, OfStack::Deltas),
                false => (OfStack::Nothing, OfStack::Nothing),
            };
            let (with_adapters, without) = (capture(true, false, of_adapters)?, capture(false, false, of_base)?);
            let (Some(with_adapters), Some(without)) = (with_adapters, without) else { break };
            let stacked = if has_rows { capture(true, false, OfStack::Deltas)? } else { None };
            let has_routers = model.routers().next().is_some();
            let with_routers = if has_routers { capture(true, true, of_adapters)? } else { None };
            batches.push(Graphs { batch, stacked, with_routers, with_adapters, without });
        }
        Ok(Self { batches, enqueued: None })
    }

    /// Enqueues a step, and returns its logits and the number of their rows, which may be more than the tokens. The
    /// next step overwrites them. Its last tokens may be those of the step before, `drawn`. Returns `None` if the step
    /// is not one of one sampled token of each sequence, or has too many.
    pub(crate) fn run(
        &mut self,
        (model, adapters): (&Model<'_, D>, Slots<'_, D>),
        session: &mut Session<'_, D>,
        step: &Step,
        drawn: &Drawn<'_, D>,
    ) -> Result<Option<(&D::Tensor, usize)>> {
        let tokens = step.ids.len();
        let is_decode = step.sampled.len() == tokens && step.table.first_rows.len() == tokens * step.table.columns;
        let Some(graphs) = self.batches.iter_mut().find(|graphs| is_decode && graphs.batch.tokens >= tokens) else {
            return Ok(None);
        };
        graphs.batch.set(model.device, step, drawn)?;
        let has_adapters = step.slots.iter().any(|&slot| slot != Slot::BASE);
        // A row beyond the batch keeps its delta of an earlier step, and the GEMM would add to it again.
        let mut slots = step.slots.clone();
        slots.resize(graphs.batch.tokens, Slot::BASE);
        let Graphs { batch, stacked, with_routers, with_adapters, without } = graphs;
        let with_routers = with_routers.as_mut().filter(|_| has_adapters && !step.keeps_routers);
        let may_stack = has_adapters && with_routers.is_none();
        let other = with_routers.unwrap_or(if has_adapters { with_adapters } else { without });
        let mut stack = model.stack.as_ref().map(RefCell::borrow_mut);
        let with_stack = stacked.as_mut().filter(|_| may_stack).zip(stack.as_deref_mut());
        let with_stack = with_stack.map(|(captured, stack)| (&mut captured.graph, stack));
        let buffers = &mut session.buffers;
        let is_stacked = model.device.replay(with_stack, &mut other.graph, adapters, buffers, &slots)?;
        self.enqueued = Some(Instant::now());
        let captured = stacked.as_ref().filter(|_| is_stacked).unwrap_or(other);
        Ok(Some((&captured.logits, batch.tokens)))
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
    /// Operands of rows that are of the base model and of no sequence.
    ///
    /// # Errors
    ///
    /// The device has no room.
    pub fn new(device: &D, tokens: usize, tables: Tables) -> Result<Self> {
        let Tables { columns, block_rows, spare_row, spare_state } = tables;
        let first_rows = vec![spare_row; tokens * columns];
        let sequences: Vec<u32> = (0..).take(tokens).collect();
        let places = Places {
            positions: device.indices(&vec![0; tokens])?,
            sequences: device.indices(&sequences)?,
            rows: device.indices(&vec![spare_row; tokens])?,
            table: BlockTable {
                first_rows: device.indices(&first_rows)?,
                columns,
                block_rows,
                states: device.indices(&vec![spare_state; tokens])?,
            },
            alone: None,
        };
        let inputs = Inputs { ids: device.indices(&vec![0; tokens])?, places };
        let most = 5 * tokens + 2 * first_rows.len();
        let values = InputValues { tokens, values: Vec::with_capacity(most) };
        let staging = [device.staging(most)?, device.staging(most)?];
        Ok(Self { tokens, spare_row, spare_state, inputs, first_rows, values, staging })
    }

    /// Copies the inputs of a step over those of the graphs.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn set(&mut self, device: &D, step: &Step, drawn: &Drawn<'_, D>) -> Result<()> {
        let Self { tokens, spare_row, spare_state, .. } = *self;
        let Self { inputs, first_rows, values, staging, .. } = self;
        let signed = |values: &[u32]| values.iter().map(|value| value.cast_signed()).collect::<Vec<i32>>();
        let rows = (0..).zip(&step.positions).map(|(sequence, &position)| step.table.row(sequence, position));
        let rows: Vec<u32> = rows.collect();
        let InputValues { values: staged, .. } = values;
        staged.clear();
        for (values, unused) in [
            (signed(&step.ids), 0),
            (drawn.sources.to_vec(), -1),
            (signed(&step.positions), 0),
            (signed(&rows), spare_row.cast_signed()),
            (signed(&step.table.states), spare_state.cast_signed()),
        ] {
            staged.extend(values.into_iter().chain(iter::repeat(unused)).take(tokens));
        }
        // Most steps begin no block.
        let columns = inputs.places.table.columns;
        let (mut places, mut changed) = (Vec::new(), Vec::new());
        let wanted = step.table.first_rows.chunks_exact(step.table.columns);
        let spare = [spare_row];
        let wanted = wanted.chain(iter::repeat(&spare[..]));
        for (row, (known, wanted)) in first_rows.chunks_exact_mut(columns).zip(wanted).enumerate() {
            for (column, (known, &wanted)) in known.iter_mut().zip(wanted).enumerate() {
                if *known != wanted {
                    *known = wanted;
                    places.push(i32::try_from(row * columns + column)?);
                    changed.push(wanted.cast_signed());
                }
            }
        }
        staged.append(&mut places);
        staged.append(&mut changed);
        staging.swap(0, 1);
        device.set_inputs(inputs, values, &mut staging[0], drawn.last)
    }
}

/// Which tokens of a step are those that the last one chose.
pub struct Drawn<'a, D: Device> {
    /// Those tokens.
    pub last: Option<&'a D::Draws>,
    /// For each token, as for [`Device::take_drawn`].
    pub sources: &'a [i32],
}

impl<D: Capture> Captured<D> {
    /// Captures a step on these operands; `None` on a device without graphs.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn new(
        (model, adapters): (&Model<'_, D>, Slots<'_, D>),
        Session { state, buffers }: &mut Session<'_, D>,
        batch: &Batch<D>,
        Variant { has_adapters, changes_routers, is_fused, stacked }: Variant,
    ) -> Result<Option<Self>> {
        let captured =
            model.device.capture(&model.adapters, adapters, buffers, (batch.tokens, has_adapters), |step| {
                let fusion = if is_fused { Fusion::Fastest(batch.tokens) } else { Fusion::None };
                let mut stack = model.stack.as_ref().map(RefCell::borrow_mut);
                let stacked = match (stacked, &mut stack) {
                    (OfStack::Deltas, Some(stack)) => {
                        // Of no adapters, or any.
                        model.device.place(stack, step)?;
                        Stacked::Deltas(&**stack)
                    }
                    (OfStack::Rows, Some(_)) => Stacked::Rows,
                    _ => Stacked::No,
                };
                let mut lora = Lora { step, has_adapters, changes_routers, fusion, stacked };
                let h = model.hidden(state, &batch.inputs, &mut lora)?;
                model.logits(state, &h, &mut Lora { stacked: Stacked::No, ..lora })
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
        _: Slots<'_, Self>,
        _: &mut Self::Buffers,
        _: (usize, bool),
        _: impl FnMut(&mut Self::LoraStep<'_>) -> Result<R>,
    ) -> Result<Option<(Infallible, R)>> {
        Ok(None)
    }

    fn replay(
        &self,
        _: Option<(&mut Infallible, &mut Infallible)>,
        graph: &mut Infallible,
        _: Slots<'_, Self>,
        _: &mut Self::Buffers,
        _: &[Slot],
    ) -> Result<bool> {
        match *graph {}
    }

    fn meet(&self) -> Result<()> {
        self.rank.gather(&[])?;
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }

    type Staging = ();

    fn staging(&self, _: usize) -> Result<()> {
        Ok(())
    }

    fn set_inputs(
        &self,
        Inputs { ids, places }: &mut Inputs<Self>,
        values: &InputValues,
        (): &mut (),
        last: Option<&Self::Draws>,
    ) -> Result<()> {
        let (of_tokens, of_table) = values.values.split_at(5 * values.tokens);
        let mut of_tokens = of_tokens.chunks_exact(values.tokens);
        let mut next = || of_tokens.next().expect("there are five parts");
        let unsigned = |values: &[i32]| values.iter().map(|value| value.cast_unsigned()).collect();
        (*ids, places.positions, places.rows, places.table.states) = {
            let (new_ids, sources) = (next(), next());
            let mut new_ids = unsigned(new_ids);
            if let Some(last) = last {
                self.take_drawn(&mut new_ids, sources, last)?;
            }
            (new_ids, unsigned(next()), unsigned(next()), unsigned(next()))
        };
        let (changed, first_rows) = of_table.split_at(values.changes());
        for (&place, first_row) in changed.iter().zip(first_rows) {
            places.table.first_rows[usize::try_from(place)?] = first_row.cast_unsigned();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs are replaced, unused rows become spare ones, and only what changes in the table is copied.
    #[test]
    fn inputs_are_those_of_the_step() {
        let device = Cpu::<f32>::default();
        let tables = Tables { columns: 3, block_rows: 4, spare_row: 40, spare_state: 7 };
        let mut batch = Batch::new(&device, 3, tables).expect("there is memory");
        let step = |first_rows: &[u32], positions: &[u32]| Step {
            ids: vec![7; positions.len()],
            positions: positions.to_vec(),
            table: BlockTable {
                first_rows: first_rows.to_vec(),
                columns: 2,
                block_rows: 4,
                states: (1..).take(positions.len()).collect(),
            },
            ..Step::default()
        };
        let drawn = vec![(Some(5), 0.0), (None, 0.0)];
        let mut set = |step: &Step, sources: &[i32]| {
            let drawn = Drawn { last: Some(&drawn), sources };
            batch.set(&device, step, &drawn).expect("it fits");
            let Inputs { ids, places } = &batch.inputs;
            let BlockTable { first_rows, states, .. } = &places.table;
            let of_tokens = [ids, &places.positions, &places.rows, states].map(Clone::clone);
            (of_tokens, first_rows.clone(), batch.values.changes())
        };
        let first = set(&step(&[0, 4, 8, 12], &[5, 2]), &[-1, 0]);
        let of_tokens = [vec![7, 5, 0], vec![5, 2, 0], vec![5, 10, 40], vec![1, 2, 7]];
        assert_eq!(first, (of_tokens, vec![0, 4, 40, 8, 12, 40, 40, 40, 40], 4));
        // A row without a token has 0; one sequence has begun a block, and the other has ended.
        let second = set(&step(&[0, 16], &[6]), &[1]);
        let of_tokens = [vec![0; 3], vec![6, 0, 0], vec![18, 40, 40], vec![1, 7, 7]];
        assert_eq!(second, (of_tokens, vec![0, 16, 40, 40, 12, 40, 40, 40, 40], 2));
    }

    #[test]
    fn sizes_end_with_the_largest() {
        assert_eq!(sizes(1), [1]);
        assert_eq!(sizes(13), [1, 2, 3, 4, 6, 8, 12, 13]);
        assert_eq!(sizes(16), [1, 2, 3, 4, 6, 8, 12, 16]);
    }
}
