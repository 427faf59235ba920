//! Speculative decoding with adapters: the rows of drafts and the rows that verify them in one step, of different lengths
//! for each sequence. On the CPU and, with `--features cuda` and a driver, in replays of one graph on the GPU.
//!
//! The model is one layer whose base computes `y = x`. A draft is the base model, or a draft adapter on top of the
//! tenant's own, which are one combination. Every token is one that the tenant's adapter chooses, so that the texts are
//! those of decoding without a draft, bit for bit.

#![forbid(unsafe_code)]

use std::error::Error;

use aril::{
    DType, Slot,
    adapter::{Adapter, SlotImage, Tensor},
    cpu,
    error::LoadError,
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::Capacity,
    routing::Batch,
};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const FEATURES: usize = 16;
const VOCAB: usize = 64;
const TOKENS: usize = 40;
const MAX_ROWS: usize = 32;
const CAPACITY: Capacity = Capacity::tokens(MAX_ROWS).slots(4).rank(16);
const ARENA_BYTES: usize = 1 << 20;

/// What a device does.
trait Device {
    fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot, LoadError>;

    /// Adds the delta of each row. `x` and `y` are `[rows, features]`.
    fn add_delta(&mut self, batch: &Batch<'_>, x: &[f32], y: &mut [f32]) -> Result<()>;
}

struct Cpu {
    weights: cpu::WeightTable,
    layer: cpu::LoraLinear,
    workspace: cpu::Workspace,
}

impl Cpu {
    fn new(model: &Model, id: LinearId) -> Result<Self> {
        let weights = cpu::WeightTable::new(model, DType::F32, CAPACITY, ARENA_BYTES)?;
        Ok(Self { layer: cpu::LoraLinear::new(&weights, id)?, workspace: cpu::Workspace::default(), weights })
    }
}

impl Device for Cpu {
    fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot, LoadError> {
        self.weights.load(slot, image)
    }

    fn add_delta(&mut self, batch: &Batch<'_>, x: &[f32], y: &mut [f32]) -> Result<()> {
        let rows = batch.num_tokens();
        let (x, y) = (cpu::Matrix::new(x, rows, FEATURES)?, cpu::MatrixMut::new(y, rows, FEATURES)?);
        Ok(self.layer.add_delta(&mut self.weights.step(batch, &mut self.workspace)?, x, y)?)
    }
}

/// The GPU, if there is one.
#[cfg(not(feature = "cuda"))]
fn gpu(_: &Model, _: LinearId) -> Result<Option<Box<dyn Device>>> {
    Ok(None)
}

#[cfg(feature = "cuda")]
use gpu::gpu;

#[cfg(feature = "cuda")]
mod gpu {
    use aril::cuda::{
        Buffer, Graph, Kernels, LaunchError, LoraLinear, Matrix, MatrixMut, Queue, Routing, WeightTable, Workspace,
        driver_is_present,
    };
    use cudarc::driver::CudaContext;

    use super::*;

    struct Gpu {
        weights: WeightTable,
        routing: Routing,
        workspace: Workspace,
        x: Buffer<f32>,
        y: Buffer<f32>,
        /// For any rows, up to as many as it was captured for.
        graph: Graph,
    }

    /// The GPU, if there is one.
    pub(super) fn gpu(model: &Model, id: LinearId) -> Result<Option<Box<dyn Device>>> {
        if !driver_is_present() {
            return Ok(None);
        }
        let context = CudaContext::new(0)?;
        let queue = Queue::new(&Kernels::load_into(&context)?, &context.default_stream())?;
        let weights = WeightTable::new(&queue, model, DType::F32, CAPACITY, ARENA_BYTES)?;
        let (routing, mut workspace) = (Routing::new(&queue, CAPACITY, 1)?, Workspace::new(&weights)?);
        let (x, mut y) = (Buffer::zeros(&queue, MAX_ROWS * FEATURES)?, Buffer::zeros(&queue, MAX_ROWS * FEATURES)?);
        let layer = LoraLinear::new(&weights, id)?;
        let graph = weights.capture(&routing, MAX_ROWS, &mut workspace, |step| {
            let y = MatrixMut::new(&mut y, MAX_ROWS, FEATURES)?;
            layer.add_delta(step, Matrix::new(&x, MAX_ROWS, FEATURES)?, y)?;
            Ok::<_, LaunchError>(())
        })?;
        Ok(Some(Box::new(Gpu { weights, routing, workspace, x, y, graph })))
    }

    impl Device for Gpu {
        fn load(&self, slot: usize, image: &SlotImage<'_>) -> Result<Slot, LoadError> {
            self.weights.load(slot, image)
        }

        fn add_delta(&mut self, batch: &Batch<'_>, x: &[f32], y: &mut [f32]) -> Result<()> {
            self.x.write(x)?;
            self.y.write(y)?;
            let batch = self.routing.update(batch)?;
            self.graph.replay(&mut self.weights.step(&batch, &mut self.workspace)?)?;
            Ok(self.y.read(y)?)
        }
    }
}

/// The model but for its deltas.
struct Engine {
    /// `[vocab, features]`
    embeddings: Vec<[f32; FEATURES]>,
    head: Vec<[f32; FEATURES]>,
}

struct Sequence {
    tokens: Vec<usize>,
    tenant: Slot,
    draft: Slot,
    /// Tokens that the draft proposes before they are verified; none without a draft.
    ahead: usize,
    proposed: Vec<usize>,
}

impl Sequence {
    fn verifies(&self) -> bool {
        self.proposed.len() == self.ahead
    }

    /// The rows of the next step: one that proposes a token, or one behind the last token and behind each proposal.
    fn rows(&self) -> Vec<(Slot, [usize; 2])> {
        let all = [&self.tokens[..], &self.proposed].concat();
        let behind = |end: usize| [all[end - 2], all[end - 1]];
        match self.verifies() {
            true => (self.tokens.len()..=all.len()).map(|end| (self.tenant, behind(end))).collect(),
            false => vec![(self.draft, behind(all.len()))],
        }
    }

    /// Takes what was chosen behind each row. Proposals count up to the first that the tenant's adapter does not
    /// choose, in whose place is what it chooses.
    fn take(&mut self, chosen: &[usize]) {
        if !self.verifies() {
            self.proposed.extend(chosen);
            return;
        }
        let agreed = self.proposed.iter().zip(chosen).take_while(|(proposed, chosen)| proposed == chosen).count();
        self.tokens.extend(&chosen[..=agreed]);
        self.tokens.truncate(TOKENS);
        self.proposed.clear();
    }
}

impl Engine {
    fn new() -> Self {
        let mut value = values(1);
        let mut matrix = || (0..VOCAB).map(|_| std::array::from_fn(|_| value())).collect();
        Self { embeddings: matrix(), head: matrix() }
    }

    /// The most probable token behind each row's last two.
    fn step(&self, device: &mut dyn Device, rows: &[(Slot, [usize; 2])]) -> Result<Vec<usize>> {
        let slots: Vec<Slot> = rows.iter().map(|(slot, _)| *slot).collect();
        let input = |[before, last]: [usize; 2]| -> [f32; FEATURES] {
            std::array::from_fn(|i| self.embeddings[last][i] + self.embeddings[before][i] / 2.0)
        };
        let x: Vec<_> = rows.iter().map(|(_, tokens)| input(*tokens)).collect();
        let mut y = x.clone();
        device.add_delta(&Batch::new(&slots), x.as_flattened(), y.as_flattened_mut())?;
        let logit =
            |y: &[f32; FEATURES], token: usize| -> f32 { y.iter().zip(&self.head[token]).map(|(y, h)| y * h).sum() };
        let best = |y: &[f32; FEATURES]| (0..VOCAB).max_by(|&a, &b| logit(y, a).total_cmp(&logit(y, b)));
        Ok(y.iter().filter_map(best).collect())
    }

    /// Decodes all sequences to the end. Returns how often the tenants' rows of a sequence were in a step.
    fn decode(&self, device: &mut dyn Device, sequences: &mut [Sequence]) -> Result<usize> {
        let mut verifications = 0;
        loop {
            let unfinished = || sequences.iter().enumerate().filter(|(_, sequence)| sequence.tokens.len() < TOKENS);
            let of_sequences: Vec<_> = unfinished().map(|(number, sequence)| (number, sequence.rows())).collect();
            if of_sequences.is_empty() {
                return Ok(verifications);
            }
            let rows: Vec<_> = of_sequences.iter().flat_map(|(_, rows)| rows.iter().copied()).collect();
            let chosen = self.step(device, &rows)?;
            let mut first = 0;
            for (number, rows) in &of_sequences {
                verifications += usize::from(sequences[*number].verifies());
                sequences[*number].take(&chosen[first..first + rows.len()]);
                first += rows.len();
            }
        }
    }
}

/// Numbers between -1 and 1, the same in each run.
fn values(mut seed: u32) -> impl FnMut() -> f32 {
    move || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from((seed >> 17) as u16) / 16384.0 - 1.0
    }
}

/// An adapter with random factors of this rank, whose delta is of this size.
fn adapter(rank: usize, size: f32, seed: u32) -> Result<Adapter> {
    let mut value = values(seed);
    let mut tensor = |shape: [usize; 2], size: f32| {
        let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| size * value()).collect();
        Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec())
    };
    let (a, b) = (tensor([rank, FEATURES], 1.0)?, tensor([FEATURES, rank], size)?);
    let tensors = [("proj.lora_A.weight".to_owned(), a), ("proj.lora_B.weight".to_owned(), b)];
    let config = format!(r#"{{"peft_type": "LORA", "r": {rank}, "lora_alpha": {rank}}}"#);
    Ok(Adapter::from_tensors(&config, tensors)?)
}

pub(crate) fn main() -> Result<()> {
    let mut spec = ModelSpec::new();
    let proj = spec.linear(Linear::new("", Parallel::Replicated, FEATURES).slice("proj", FEATURES))?;
    let model = spec.shard(TpRank::SINGLE)?;
    println!("CPU: {}", run(&model, &mut Cpu::new(&model, proj)?)?);
    match gpu(&model, proj)? {
        Some(mut gpu) => println!("GPU: {}", run(&model, &mut *gpu)?),
        None => println!("There is no GPU, or the feature `cuda` is off."),
    }
    Ok(())
}

/// Decodes with drafts and without, and compares.
fn run(model: &Model, device: &mut dyn Device) -> Result<String> {
    let engine = Engine::new();
    let (tenants, draft) = ([adapter(4, 0.3, 2)?, adapter(8, 0.2, 3)?], adapter(2, 0.1, 4)?);
    let load = |slot, parts: &[(&Adapter, f32)]| -> Result<Slot> {
        Ok(device.load(slot, &SlotImage::combined(parts, model, DType::F32)?)?)
    };
    let [one, other] = [load(0, &[(&tenants[0], 1.0)])?, load(1, &[(&tenants[1], 1.0)])?];
    // A draft adapter applies on top of the tenant's, as one adapter of the sum of their ranks.
    let [one_draft, other_draft] =
        [load(2, &[(&tenants[0], 1.0), (&draft, 1.0)])?, load(3, &[(&tenants[1], 1.0), (&draft, 1.0)])?];

    let sequences = |is_speculative: bool| -> Vec<Sequence> {
        let all = [(one, one_draft, 4), (other, other_draft, 2), (one, Slot::BASE, 3), (other, Slot::BASE, 1)];
        let sequence = |(number, (tenant, draft, ahead)): (usize, (Slot, Slot, usize))| Sequence {
            tokens: vec![number, 7],
            tenant,
            draft,
            ahead: if is_speculative { ahead } else { 0 },
            proposed: Vec::new(),
        };
        all.into_iter().enumerate().map(sequence).collect()
    };
    let (mut plain, mut speculative) = (sequences(false), sequences(true));
    let (tokens, verifications) = (engine.decode(device, &mut plain)?, engine.decode(device, &mut speculative)?);
    for (plain, speculative) in plain.iter().zip(&speculative) {
        assert_eq!(plain.tokens, speculative.tokens);
    }
    assert!(verifications < tokens, "no proposal was taken");
    let sequences = plain.len();
    Ok(format!("{tokens} tokens of {sequences} sequences, the same without a draft, in {verifications} verifications"))
}

// With the feature, tests/gpu has it.
#[cfg(not(feature = "cuda"))]
#[test]
fn runs() -> Result<()> {
    main()
}
