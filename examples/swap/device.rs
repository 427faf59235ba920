//! The CPU or the GPU: a pool, its layers, and the operands of a step.

use aril::{
    DType, Slot,
    adapter::Adapter,
    cpu,
    model::{LinearId, Model},
    plan::Capacity,
    pool::{AdapterPool, Backend, PoolConfig, Source, StreamId},
    routing::Batch,
};
use half::bf16;

use super::{
    Result,
    adapters::{self, HIDDEN, LAYERS, MAX_RANK, OUTPUTS},
};

/// Outputs of a token in one layer.
const WIDTH: usize = OUTPUTS / LAYERS;
/// Enough for one adapter.
const ALONE_BYTES: usize = 8 << 20;

/// A pool, and steps on it.
pub(crate) trait Device {
    type Backend: Backend<Source = Source>;
    const NAME: &str;

    fn model(&self) -> &Model;
    fn pool(&mut self) -> &mut AdapterPool<Self::Backend>;

    /// The deltas of one token for each slot: `x` is `[tokens, HIDDEN]`, the result `[tokens, OUTPUTS]`.
    fn step(&mut self, slots: &[Slot], x: &[bf16]) -> Result<Vec<bf16>>;

    /// The deltas of a token in a table that has this adapter alone.
    fn alone(&self, adapter: &Adapter, x: &[bf16]) -> Result<Vec<bf16>>;
}

pub(crate) struct Cpu {
    model: Model,
    ids: Vec<LinearId>,
    pool: cpu::AdapterPool,
}

impl Cpu {
    pub(crate) fn new(capacity: Capacity, config: PoolConfig) -> Result<Self> {
        let (model, ids) = adapters::model()?;
        let pool = cpu::AdapterPool::new(&model, DType::BF16, capacity, config)?;
        Ok(Self { model, ids, pool })
    }

    /// The deltas of a step on this table.
    fn run(&self, weights: &cpu::WeightTable, mut step: cpu::Step<'_>, x: &[bf16]) -> Result<Vec<bf16>> {
        let tokens = step.num_tokens();
        let x = cpu::Matrix::new(x, tokens, HIDDEN)?;
        let mut y = vec![bf16::ZERO; LAYERS * tokens * WIDTH];
        for (&id, y) in self.ids.iter().zip(y.chunks_mut(tokens * WIDTH)) {
            let layer = cpu::LoraLinear::new(weights, id)?;
            layer.add_delta(&mut step, x, cpu::MatrixMut::new(y, tokens, WIDTH)?)?;
        }
        Ok(by_token(&y, tokens))
    }
}

impl Device for Cpu {
    type Backend = cpu::Tiers;
    const NAME: &str = "the CPU";

    fn model(&self) -> &Model {
        &self.model
    }

    fn pool(&mut self) -> &mut cpu::AdapterPool {
        &mut self.pool
    }

    fn step(&mut self, slots: &[Slot], x: &[bf16]) -> Result<Vec<bf16>> {
        let (batch, mut workspace) = (Batch::new(slots), cpu::Workspace::default());
        let weights = self.pool.weights(StreamId::FIRST).ok_or("the pool has its first stream")?;
        self.run(weights, self.pool.step(StreamId::FIRST, &batch, &mut workspace)?, x)
    }

    fn alone(&self, adapter: &Adapter, x: &[bf16]) -> Result<Vec<bf16>> {
        let capacity = Capacity::tokens(1).slots(1).rank(MAX_RANK);
        let weights = cpu::WeightTable::new(&self.model, DType::BF16, capacity, ALONE_BYTES)?;
        let slots = [weights.load(0, &adapter.plan(&self.model, DType::BF16)?)?];
        let mut workspace = cpu::Workspace::default();
        self.run(&weights, weights.step(&Batch::new(&slots), &mut workspace)?, x)
    }
}

/// `[LAYERS, tokens, WIDTH]` as `[tokens, LAYERS, WIDTH]`.
fn by_token(y: &[bf16], tokens: usize) -> Vec<bf16> {
    let rows = (0..tokens).flat_map(|token| (0..LAYERS).map(move |layer| layer * tokens + token));
    rows.flat_map(|row| y[row * WIDTH..][..WIDTH].iter().copied()).collect()
}

#[cfg(feature = "cuda")]
pub(crate) mod gpu {
    use aril::cuda::{
        AdapterPool, Buffer, Kernels, LoraLinear, Matrix, MatrixMut, Queue, Routing, WeightTable, Workspace,
    };
    use cudarc::driver::CudaContext;

    use super::*;

    pub(crate) struct Gpu {
        model: Model,
        pool: AdapterPool,
        steps: Steps,
        alone: Steps,
    }

    /// A table, and what its steps need.
    struct Steps {
        weights: WeightTable,
        layers: Vec<LoraLinear>,
        operands: std::cell::RefCell<Operands>,
    }

    struct Operands {
        routing: Routing,
        workspace: Workspace,
        x: Buffer<bf16>,
        y: Buffer<bf16>,
    }

    impl Gpu {
        pub(crate) fn new(capacity: Capacity, config: PoolConfig) -> Result<Self> {
            let context = CudaContext::new(0)?;
            let queue = Queue::new(&Kernels::load_into(&context)?, &context.default_stream())?;
            let (model, ids) = adapters::model()?;
            let pool = AdapterPool::new(&queue, &model, DType::BF16, capacity, config)?;
            let weights = pool.weights(StreamId::FIRST).ok_or("the pool has its first stream")?.clone();
            let one = Capacity::tokens(1).slots(1).rank(MAX_RANK);
            let alone = WeightTable::new(&queue, &model, DType::BF16, one, ALONE_BYTES)?;
            Ok(Self { steps: Steps::new(weights, &ids)?, alone: Steps::new(alone, &ids)?, model, pool })
        }
    }

    impl Steps {
        fn new(weights: WeightTable, ids: &[LinearId]) -> Result<Self> {
            let (queue, capacity) = (weights.queue(), weights.capacity());
            let operands = Operands {
                routing: Routing::new(queue, capacity, 2)?,
                workspace: Workspace::new(&weights)?,
                x: Buffer::zeros(queue, capacity.max_tokens * HIDDEN)?,
                y: Buffer::zeros(queue, capacity.max_tokens * OUTPUTS)?,
            };
            let layers = ids.iter().map(|&id| LoraLinear::new(&weights, id)).collect::<std::result::Result<_, _>>()?;
            Ok(Self { layers, operands: operands.into(), weights })
        }

        /// The deltas of a step of the pool that the table belongs to, if it belongs to one.
        fn run(&self, pool: Option<&AdapterPool>, slots: &[Slot], inputs: &[bf16]) -> Result<Vec<bf16>> {
            let Operands { routing, workspace, x, y } = &mut *self.operands.borrow_mut();
            let tokens = slots.len();
            x.write(inputs)?;
            let mut outputs = vec![bf16::ZERO; tokens * OUTPUTS];
            y.write(&outputs)?;
            let batch = routing.update(&Batch::new(slots))?;
            let mut step = match pool {
                Some(pool) => pool.step(StreamId::FIRST, &batch, workspace)?,
                None => self.weights.step(&batch, workspace)?,
            };
            for (i, layer) in self.layers.iter().enumerate() {
                let x = Matrix::new(x.slice(0..tokens * HIDDEN), tokens, HIDDEN)?;
                let range = i * tokens * WIDTH..(i + 1) * tokens * WIDTH;
                layer.add_delta(&mut step, x, MatrixMut::new(y.slice_mut(range), tokens, WIDTH)?)?;
            }
            drop(step);
            y.read(&mut outputs)?;
            Ok(by_token(&outputs, tokens))
        }
    }

    impl Device for Gpu {
        type Backend = aril::cuda::Tiers;
        const NAME: &str = "the GPU";

        fn model(&self) -> &Model {
            &self.model
        }

        fn pool(&mut self) -> &mut AdapterPool {
            &mut self.pool
        }

        fn step(&mut self, slots: &[Slot], x: &[bf16]) -> Result<Vec<bf16>> {
            self.steps.run(Some(&self.pool), slots, x)
        }

        fn alone(&self, adapter: &Adapter, x: &[bf16]) -> Result<Vec<bf16>> {
            let slot = self.alone.weights.load(0, &adapter.plan(&self.model, DType::BF16)?)?;
            self.alone.run(None, &[slot], x)
        }
    }
}
