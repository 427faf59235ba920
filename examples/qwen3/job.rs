//! One run of the example on any device and in any element type: the batch, and the checks of its results.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aril::{
    DType, Element, Slot,
    adapter::Adapter,
    pool::{PoolConfig, Snapshot},
};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::{
    DeviceArg,
    checkpoint::{Checkpoint, Weights},
    config::Config,
    cpu::Cpu,
    device::Device,
    error::{Context, Result, bail},
    generate::{Generation, Limits, Sequence, generate, replay},
    model::{Described, Model, describe, load},
    pool::{Batch, Pooled},
    report::Row,
    requests::Request,
    verdict::{Moved, Verdict},
    verify::{Merge, verify},
};

/// The checked arguments of a run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) device: DeviceArg,
    pub(crate) config: Config,
    pub(crate) checkpoint: Checkpoint,
    pub(crate) adapters: Vec<(String, Arc<Adapter>)>,
    /// Holds the adapters in a pool of this size, instead of all of them on the device.
    pub(crate) pool: Option<PoolConfig>,
    pub(crate) requests: Vec<Request>,
    pub(crate) max_new_tokens: usize,
    /// Whether to run the batches a second time without adapters.
    pub(crate) compare_with_base: bool,
    pub(crate) keep_logits: bool,
    pub(crate) verify: bool,
}

/// The results of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) generations: Vec<Generation>,
    /// The requests of each batch.
    pub(crate) batches: Vec<Vec<usize>>,
    /// The pool's state after the last batch.
    pub(crate) pool: Option<Snapshot>,
    pub(crate) elapsed: Duration,
    pub(crate) moved: Option<Vec<Moved>>,
    pub(crate) verdicts: Option<Vec<Verdict>>,
}

impl Job {
    pub(crate) fn run(&self, dtype: DType) -> Result<Outcome> {
        match self.device {
            DeviceArg::Cpu => match dtype {
                DType::BF16 => self.run_on(&Cpu::<bf16>::default(), &Cpu::default()),
                DType::F16 => self.run_on(&Cpu::<f16>::default(), &Cpu::default()),
                DType::F32 => self.run_on(&Cpu::<f32>::default(), &Cpu::default()),
                _ => bail!("{dtype} is not implemented"),
            },
            device @ DeviceArg::Cuda(ordinal) => {
                self.run_on_cuda(ordinal, dtype).context(format_args!("--device {device}"))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn run_on_cuda(&self, ordinal: usize, dtype: DType) -> Result<Outcome> {
        let reference = Cuda::<f32>::new(ordinal)?;
        match dtype {
            DType::BF16 => self.run_on(&Cuda::<bf16>::new(ordinal)?, &reference),
            DType::F16 => self.run_on(&Cuda::<f16>::new(ordinal)?, &reference),
            DType::F32 => self.run_on(&reference, &reference),
            _ => bail!("{dtype} is not implemented"),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn run_on_cuda(&self, _: usize, _: DType) -> Result<Outcome> {
        bail!("this build has no CUDA; build it with `--features cuda`")
    }

    fn run_on<D: Device, R: Device<Elem = f32>>(&self, device: &D, reference: &R) -> Result<Outcome> {
        let tokens = self.requests.iter().map(|request| request.prompt.len()).sum();
        let limits = Limits {
            max_new_tokens: self.max_new_tokens,
            eos: &self.config.eos,
            keep_logits: self.keep_logits || self.verify || self.compare_with_base,
        };

        let described = describe(&self.config)?;
        let weights = Weights::new(&self.checkpoint, self.config.int4_group);
        let (mut pool, table) = match self.pool {
            None => (None, load(device, &described.model, &self.adapters, tokens)?),
            Some(config) => {
                let (pool, table) = Pooled::new(device, &described.model, &self.adapters, tokens, config)?;
                (Some(pool), table)
            }
        };
        let model = Model::new(device, &self.config, &described, weights, table, tokens)?;
        let start = Instant::now();
        let (generations, batches) = self.serve(&model, pool.as_mut(), limits)?;
        let elapsed = start.elapsed();
        drop(model);
        let pool = pool.map(|pool| pool.snapshot());

        let compare = || self.compare(device, &described, &batches, &generations);
        let moved = self.compare_with_base.then(compare).transpose()?;
        let verdicts = self.verify.then(|| {
            let Self { config, checkpoint, adapters, requests, .. } = self;
            let merge = Merge { config, described: &described, checkpoint, adapters };
            verify(reference, merge, requests, &generations, D::Elem::DTYPE)
        });
        let verdicts = verdicts.transpose()?;
        Ok(Outcome { generations, batches, pool, elapsed, moved, verdicts })
    }

    /// Runs all requests: in one batch, or in those that fit in a pool. Returns their results, and the requests of each batch.
    fn serve<D: Device>(
        &self,
        model: &Model<'_, D>,
        mut pool: Option<&mut Pooled<D::Pool>>,
        limits: Limits<'_>,
    ) -> Result<(Vec<Generation>, Vec<Vec<usize>>)> {
        let mut generations: Vec<Generation> = self.requests.iter().map(|_| Generation::default()).collect();
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut waiting: Vec<usize> = (0..self.requests.len()).collect();
        while !waiting.is_empty() {
            let batch = match &mut pool {
                None => Batch::of_all(&self.requests, &mut waiting)?,
                Some(pool) => pool.next_batch(&self.requests, &mut waiting)?,
            };
            let sequences: Vec<_> = batch.requests.iter().map(|&(index, slot)| self.sequence(index, slot)).collect();
            for (sequence, generation) in sequences.iter().zip(generate(model, &sequences, limits)?) {
                generations[sequence.request] = generation;
            }
            batches.push(sequences.iter().map(|sequence| sequence.request).collect());
            if let Some(pool) = &mut pool {
                pool.finish(batch)?;
            }
        }
        Ok((generations, batches))
    }

    fn sequence(&self, request: usize, slot: Slot) -> Sequence<'_> {
        let Request { ref prompt, scale, .. } = self.requests[request];
        Sequence { request, prompt, slot, scale }
    }

    /// Runs the same batches, token by token, on a model that never had an adapter.
    fn compare<D: Device>(
        &self,
        device: &D,
        described: &Described,
        batches: &[Vec<usize>],
        generations: &[Generation],
    ) -> Result<Vec<Moved>> {
        let tokens = self.requests.iter().map(|request| request.prompt.len()).sum();
        let weights = Weights::new(&self.checkpoint, self.config.int4_group);
        let table = load(device, &described.model, &[], tokens)?;
        let model = Model::new(device, &self.config, described, weights, table, tokens)?;
        let mut moved: Vec<Option<Moved>> = vec![None; generations.len()];
        for batch in batches {
            let sequences: Vec<_> = batch.iter().map(|&request| self.sequence(request, Slot::BASE)).collect();
            let tokens: Vec<&[u32]> = batch.iter().map(|&request| generations[request].tokens.as_slice()).collect();
            for (&request, base) in batch.iter().zip(replay(&model, &sequences, &tokens)?) {
                moved[request] = Some(Moved::between(&generations[request].logits, &base.logits));
            }
        }
        Ok(moved.into_iter().flatten().collect())
    }

    pub(crate) fn rows<'a>(&'a self, outcome: &'a Outcome) -> Vec<Row<'a>> {
        let row = |(index, generation)| {
            let Request { adapter, scale, prompt } = &self.requests[index];
            Row {
                adapter: adapter.map(|adapter| self.adapters[adapter].0.as_str()),
                scale: *scale,
                prompt,
                batch: outcome.pool.and(outcome.batches.iter().position(|batch| batch.contains(&index))),
                generation,
                moved: outcome.moved.as_ref().map(|moved| moved[index]),
                verdict: outcome.verdicts.as_ref().map(|verdicts| verdicts[index]),
            }
        };
        outcome.generations.iter().enumerate().map(row).collect()
    }

    pub(crate) fn summary(&self, rows: &[Row<'_>], outcome: &Outcome, dtype: DType) -> String {
        let prompts: usize = rows.iter().map(|row| row.prompt.len()).sum();
        let steps = |batch: &Vec<usize>| batch.iter().map(|&request| rows[request].generation.tokens.len()).max();
        let steps: usize = outcome.batches.iter().filter_map(steps).map(|steps| steps.saturating_sub(1)).sum();
        let batches = match outcome.batches.len() {
            1 => "One batch".into(),
            several => format!("{several} batches"),
        };
        let base = rows.iter().filter(|row| row.adapter.is_none());
        let untouched = base.clone().filter(|row| row.moved.is_some_and(|moved| moved.identical));
        let pool = outcome.pool.map(|Snapshot { device_memory: arena, counters, .. }| {
            format!(
                "Pool: an arena of {} MiB; copies to it: {}; evictions: {}.\n",
                arena.capacity >> 20,
                counters.copies,
                counters.evictions
            )
        });
        format!(
            "{batches} of {} requests, {} adapters and the base model, {dtype} on {}: a prefill of {prompts} tokens, then {} \
             decode steps, in {:.3} s.\n{}\
             Base model: {} of {} requests have the very bits of a run in which no adapter was ever loaded.\n",
            rows.len(),
            self.adapters.len(),
            self.device,
            steps,
            outcome.elapsed.as_secs_f64(),
            pool.unwrap_or_default(),
            untouched.count(),
            base.count(),
        )
    }
}
