//! What LoRA adds to a layer: the time of the base layer's GEMM with LoRA minus its time alone, each in a CUDA graph
//! with base weights and adapters that no cache holds.

use aril::{cuda::raw::FusedLinear, plan::MAX_FORWARD_TOKENS};
use half::bf16;

use aril_bench::{
    Result,
    data::checked_tokens,
    device::Graph,
    gemm::Gemm,
    layer::{self, Layer, MAX_ERROR, Room, Stacked, Stage, elem_bytes, repetitions, stacked_rows},
    report::median,
    results::{Added, Results},
    workload::{COLD_BYTES, Workload},
};

use crate::REPLAYS;

/// An arrangement of GEMM and LoRA: enqueues both for the `i`th time.
pub(crate) type Mode = fn(&Adapted<'_>, usize) -> Result<()>;

const MODES: [(&str, Mode); 2] = [("after", after), ("first", first)];

/// The mode of batches that the fused linear supports.
const FUSED: (&str, Mode) = ("fused", fused);

/// The mode of a GEMM whose weight has A of all adapters as further rows.
const STACKED: (&str, Mode) = ("stacked", stacked);

/// The mode of layers whose expand is part of an operation behind them. It is compared with `plain`.
const WITHIN: (&str, Mode) = ("within", within);

/// LoRA after the GEMM.
pub(crate) fn after(adapted: &Adapted<'_>, i: usize) -> Result<()> {
    alone(adapted, i)?;
    adapted.layer.add_delta(i)
}

/// Shrink before the GEMM, and expand within the operation behind the layer.
fn within(adapted: &Adapted<'_>, i: usize) -> Result<()> {
    adapted.layer.shrink(i)?;
    alone(adapted, i)?;
    adapted.layer.consume(i, false)
}

/// The GEMM and the operation behind the layer, without LoRA.
fn plain(adapted: &Adapted<'_>, i: usize) -> Result<()> {
    alone(adapted, i)?;
    adapted.layer.consume(i, true)
}

/// LoRA before the GEMM, which accumulates.
fn first(adapted: &Adapted<'_>, i: usize) -> Result<()> {
    adapted.layer.write_delta(i)?;
    multiply(adapted, i, 1.0)
}

/// The fused linear in place of GEMM and LoRA.
pub(crate) fn fused(adapted: &Adapted<'_>, i: usize) -> Result<()> {
    let Adapted { workload, layer, fused, .. } = adapted;
    layer.forward(&fused[i % num_base_sets(workload)], i)
}

/// The GEMM by the base weight and its stack, and the expand of what it computes of A.
fn stacked(adapted: &Adapted<'_>, i: usize) -> Result<()> {
    let Adapted { gemm, stage, workload, layer, stacks, .. } = adapted;
    let set = i % num_base_sets(workload);
    let weight = base_address(stage, workload, set);
    let shape = [workload.num_tokens(), workload.in_features, workload.out_features() + stacked_rows(workload)];
    gemm.run(stage.inputs.address, weight, stage.y.address, shape, 0.0)?;
    layer.add_stacked(&stacks[set], set)
}

/// The GEMM without LoRA.
pub(crate) fn alone(adapted: &Adapted<'_>, i: usize) -> Result<()> {
    multiply(adapted, i, 0.0)
}

fn multiply(adapted: &Adapted<'_>, i: usize, beta: f32) -> Result<()> {
    let Adapted { gemm, stage, workload, .. } = adapted;
    let weight = base_address(stage, workload, i);
    let shape = [workload.num_tokens(), workload.in_features, workload.out_features()];
    gemm.run(stage.inputs.address, weight, stage.y.address, shape, beta)
}

/// The number of checked outputs of the GEMM.
const CHECKED_OUTPUTS: usize = 64;
/// The largest relative difference between arrangements: two roundings to bf16.
const MAX_DIFFERENCE: f64 = 1e-2;

/// Checks the arrangements of a layer and times the correct ones.
pub(crate) fn measure(gemm: &Gemm, stage: &Stage, workload: &Workload, results: &mut Results) -> Result<()> {
    let mut adapted = Adapted::new(gemm, stage, workload)?;
    let measured = adapted.stack().and_then(|()| compare(&mut adapted, results));
    adapted.restore()?;
    measured
}

fn compare(adapted: &mut Adapted<'_>, results: &mut Results) -> Result<()> {
    let Adapted { stage, workload, .. } = *adapted;
    if workload.num_tokens() <= MAX_FORWARD_TOKENS
        && let Err(error) = adapted.fuse()
    {
        results.fail(&workload.id, "error", format!("fused: {error}"));
    }
    let (err, gemm_err) = (adapted.layer.check()?, adapted.check_gemm()?);
    if !(err < MAX_ERROR && gemm_err < MAX_DIFFERENCE) {
        results.fail(&workload.id, "wrong", format!("relative errors {err:.3e}, of the GEMM {gemm_err:.3e}"));
        return Ok(());
    }
    let count = adapted.repetitions();
    // Each mode with its graph and that of what it is compared with.
    let mut graphs = vec![adapted.capture(count, alone)?];
    let mut modes = Vec::new();
    let within = adapted.layer.is_consumed().then_some(&WITHIN);
    if within.is_some() {
        graphs.push(adapted.capture(count, plain)?);
    }
    let fused = (!adapted.fused.is_empty()).then_some(&FUSED);
    let after_gemm = MODES.iter().chain([&STACKED]).chain(fused).map(|mode| (mode, 0));
    for (&(name, mode), base) in after_gemm.chain(within.map(|mode| (mode, 1))) {
        let stacked = if name == STACKED.0 { stacked_rows(workload) } else { 0 };
        let stride = workload.out_features() + stacked;
        let checked = if base == 0 { adapted.check(mode, stride) } else { adapted.check_within(mode) };
        match checked.and_then(|()| adapted.capture(count, mode)) {
            Ok(graph) => {
                modes.push((name.to_owned(), graphs.len(), base));
                graphs.push(graph);
            }
            Err(error) => results.fail(&workload.id, "error", format!("{name}: {error}")),
        }
    }
    let times = stage.gpu.time_in_turn(&graphs, REPLAYS)?;
    let us: Vec<f64> = times.into_iter().map(|mut us| median(&mut us) / count as f64).collect();
    let gemm_us = us[0];
    let added_us = modes.into_iter().map(|(name, graph, base)| (name, us[graph] - us[base])).collect();
    results.layer.push(Added { id: workload.id.clone(), gemm_us, added_us });
    Ok(())
}

/// Adapters and base weights of one layer, in sets that take turns.
pub(crate) struct Adapted<'a> {
    gemm: &'a Gemm,
    stage: &'a Stage,
    workload: &'a Workload,
    layer: Layer<'a>,
    /// The fused linear of each set of base weights, if it supports the batch.
    fused: Vec<FusedLinear>,
    /// The stack of each set of base weights.
    stacks: Vec<Stacked>,
}

impl<'a> Adapted<'a> {
    fn new(gemm: &'a Gemm, stage: &'a Stage, workload: &'a Workload) -> Result<Self> {
        let layer = Layer::new(stage, workload)?;
        Ok(Self { gemm, stage, workload, layer, fused: Vec::new(), stacks: Vec::new() })
    }

    /// With the fused linear.
    pub(crate) fn fused(gemm: &'a Gemm, stage: &'a Stage, workload: &'a Workload) -> Result<Self> {
        let mut adapted = Self::new(gemm, stage, workload)?;
        adapted.fuse()?;
        Ok(adapted)
    }

    fn stack(&mut self) -> Result<()> {
        let Self { stage, workload, layer, .. } = self;
        let rows = |set| base_address(stage, workload, set) + elem_bytes(base_elems(workload)) as u64;
        self.stacks = (0..num_base_sets(workload)).map(|set| layer.stacked(rows(set), set)).collect::<Result<_>>()?;
        Ok(())
    }

    /// Gives the rows of stacks back what the weights of other workloads are there.
    fn restore(&self) -> Result<()> {
        let Self { stage, workload, .. } = self;
        let elems = stacked_rows(workload) * workload.in_features;
        for set in 0..num_base_sets(workload) {
            let first = first_base(workload, set) + base_elems(workload);
            let values: Vec<bf16> = stage.data.weights.range(first, elems).collect();
            stage.gpu.write(stage.weights.address + elem_bytes(first) as u64, &values)?;
        }
        Ok(())
    }

    fn fuse(&mut self) -> Result<()> {
        let Self { stage, workload, layer, .. } = self;
        let sets = 0..num_base_sets(workload);
        self.fused = sets.map(|i| layer.fused(base_address(stage, workload, i))).collect::<Result<_>>()?;
        Ok(())
    }

    fn capture(&self, count: usize, mode: Mode) -> Result<Graph> {
        self.stage.gpu.capture(|| (0..count).try_for_each(|i| mode(self, i)))
    }

    /// Compares a captured arrangement, whose rows of y are that many elements apart, with `after`.
    fn check(&self, mode: Mode, stride: usize) -> Result<()> {
        let tokens = checked_tokens(&self.workload.slots);
        let rows =
            |stride| tokens.iter().map(|&token| self.layer.strided_row(token, stride)).collect::<Result<Vec<_>>>();
        after(self, 0)?;
        let expected = rows(self.workload.out_features())?.concat();
        self.capture(1, mode)?.replay()?;
        let difference = difference(&rows(stride)?.concat(), expected.into_iter().map(f64::from));
        agree(difference)
    }

    /// Compares a captured operation behind the layer with what it makes of the outputs of `after`, and `plain`
    /// likewise.
    fn check_within(&self, mode: Mode) -> Result<()> {
        let tokens = checked_tokens(&self.workload.slots);
        for (want, got) in [(after as Mode, mode), (alone, plain)] {
            want(self, 0)?;
            let expected = tokens.iter().map(|&token| self.layer.expected_row(token)).collect::<Result<Vec<_>>>()?;
            self.capture(1, got)?.replay()?;
            let rows = tokens.iter().map(|&token| self.layer.consumed_row(token)).collect::<Result<Vec<_>>>()?;
            let difference = difference(&rows.concat(), expected.into_iter().flatten());
            agree(difference)?;
        }
        Ok(())
    }

    /// The relative error of a few products.
    fn check_gemm(&self) -> Result<f64> {
        let Self { stage: Stage { data, .. }, workload, layer, .. } = self;
        alone(self, 0)?;
        let (token, cols) = (workload.num_tokens() - 1, workload.in_features);
        let x: Vec<f64> = data.inputs.range(token * cols, cols).map(f64::from).collect();
        let product = |row: usize| {
            let weights = data.weights.range(first_base(workload, 0) + row * cols, cols);
            weights.map(f64::from).zip(&x).map(|(weight, x)| weight * x).sum::<f64>()
        };
        Ok(difference(&layer.row(token)?[..CHECKED_OUTPUTS], (0..CHECKED_OUTPUTS).map(product)))
    }

    /// Enough operations to time, and to read all base weights before the first are read again.
    fn repetitions(&self) -> usize {
        let base_elems = base_elems(self.workload) as f64;
        let us = base_elems * 2.0 / 2.5e6 + base_elems * 2.0 * self.workload.num_tokens() as f64 / 6e8;
        repetitions(num_base_sets(self.workload), us)
    }
}

/// The part of the stage that a workload needs, with its sets of base weights.
pub(crate) fn room(workload: &Workload) -> Room {
    let weights = first_base(workload, 0) + num_base_sets(workload) * stacked_elems(workload);
    let y = workload.num_tokens() * (workload.out_features() + stacked_rows(workload));
    Room { weights, y, ..Room::new(workload) }
}

/// Where the base weights of turn `i` start: behind all adapters.
fn first_base(workload: &Workload, i: usize) -> usize {
    layer::weight_elems(workload) + i % num_base_sets(workload) * stacked_elems(workload)
}

fn base_address(stage: &Stage, workload: &Workload, i: usize) -> u64 {
    stage.weights.address + elem_bytes(first_base(workload, i)) as u64
}

fn base_elems(workload: &Workload) -> usize {
    workload.in_features * workload.out_features()
}

/// A base weight and its stack.
fn stacked_elems(workload: &Workload) -> usize {
    base_elems(workload) + stacked_rows(workload) * workload.in_features
}

/// Enough that base weights and adapters are cold at each turn.
fn num_base_sets(workload: &Workload) -> usize {
    COLD_BYTES.div_ceil(elem_bytes(base_elems(workload))).max(2)
}

/// Refuses outputs that differ by more than roundings.
fn agree(difference: f64) -> Result<()> {
    if difference < MAX_DIFFERENCE { Ok(()) } else { Err(format!("off by {difference:.3e}").into()) }
}

/// The relative difference of two vectors.
fn difference(got: &[bf16], want: impl Iterator<Item = f64>) -> f64 {
    let squares = got.iter().zip(want).map(|(got, want)| ((got.to_f64() - want).powi(2), want.powi(2)));
    let (error, norm) = squares.fold((0.0, 0.0), |sum, square| (sum.0 + square.0, sum.1 + square.1));
    (error / norm).sqrt()
}
