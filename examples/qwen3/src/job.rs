//! One run of the example on any device and in any element type: the batch, and the checks of its results.

use std::{
    collections::BTreeMap,
    process,
    sync::{
        Arc,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Slot,
    adapter::Adapter,
    model::TpRank,
    pool::{PoolConfig, Snapshot},
};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::{
    checkpoint::{Checkpoint, Weights},
    config::Config,
    cpu::Cpu,
    device::{Device, Slots},
    device_arg::DeviceArg,
    error::{Context, Result, bail},
    generate::{Generation, Limits, Sequence, generate, replay},
    group::{Rank, errors_of_ranks},
    model::{Described, Model, STACK, Split, describe, load},
    pool::{Batch, Batches, pooled},
    report::Row,
    requests::Request,
    stderr::say,
    verdict::{Moved, Verdict},
    verify::{Merge, verify},
};

/// The checked arguments of a run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) device: DeviceArg,
    /// The ranks of the tensor-parallel group, and how long they wait for each other.
    pub(crate) tp: usize,
    pub(crate) expert_parallel: bool,
    pub(crate) fully_sharded: bool,
    pub(crate) tp_limit: Duration,
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
    /// The state after the last batch of the pool of a single rank.
    pub(crate) pool: Option<Snapshot>,
    pub(crate) elapsed: Duration,
    pub(crate) moved: Option<Vec<Moved>>,
    pub(crate) verdicts: Option<Vec<Verdict>>,
}

/// What a rank has run. All ranks of a group have the same generations.
#[derive(Debug)]
struct Ran {
    generations: Vec<Generation>,
    batches: Vec<Vec<usize>>,
    pool: Option<Snapshot>,
    elapsed: Duration,
    moved: Option<Vec<Moved>>,
}

impl Job {
    /// Runs the job on the ranks of this process. Returns the results of rank 0; `None` in a process of another rank.
    pub(crate) fn run(self: &Arc<Self>, dtype: DType) -> Result<Option<Outcome>> {
        let process = if self.tp > 1 { Rank::process(self.tp, self.tp_limit).context("--tp")? } else { None };
        let ran = match process {
            None if self.tp > 1 => self.run_threads(dtype)?,
            rank => {
                let rank = rank.unwrap_or_default();
                let (tp, ran) = (rank.tp(), self.run_rank(&rank, dtype)?);
                if tp.rank() > 0 {
                    return Ok(None);
                }
                ran
            }
        };
        let Ran { generations, batches, pool, elapsed, moved } = ran;
        let verdicts = self.verify.then(|| self.verify(&generations, dtype)).transpose()?;
        Ok(Some(Outcome { generations, batches, pool, elapsed, moved, verdicts }))
    }

    /// Runs all ranks, each on a thread, and returns what the first has run.
    fn run_threads(self: &Arc<Self>, dtype: DType) -> Result<Ran> {
        let (sender, results) = channel();
        for rank in Rank::threads(self.tp, self.tp_limit).context("--tp")? {
            let (job, sender) = (Arc::clone(self), sender.clone());
            let run = move || {
                let index = rank.tp().rank();
                let ran = job.run_rank(&rank, dtype);
                drop(rank);
                // The receiver is there until all ranks have answered, or one has failed.
                let _ = sender.send((index, ran));
            };
            thread::Builder::new().name("rank".into()).spawn(run)?;
        }
        drop(sender);
        let (mut first, mut errors) = (None, BTreeMap::new());
        for _ in 0..self.tp {
            // The others learn of the first error, but a GPU may not let go of a rank.
            let next = match errors.is_empty() {
                true => results.recv().map_err(Into::into),
                false => results.recv_timeout(self.tp_limit),
            };
            match next {
                Ok((0, Ok(ran))) => first = Some(ran),
                Ok((_, Ok(_))) => {}
                Ok((rank, Err(error))) => drop(errors.insert(rank, error.to_string())),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    say(&format!("error: {}\n", errors_of_ranks(&errors, self.tp)));
                    // An orderly end would wait for the GPUs.
                    process::abort()
                }
            }
        }
        if let (Some(ran), true) = (first, errors.is_empty()) {
            return Ok(ran);
        }
        match errors.is_empty() {
            true => bail!("a rank panicked"),
            false => bail!("{}", errors_of_ranks(&errors, self.tp)),
        }
    }

    fn run_rank(&self, rank: &Rank, dtype: DType) -> Result<Ran> {
        match self.device {
            DeviceArg::Cpu => match dtype {
                DType::BF16 => self.run_on(&Cpu::<bf16>::new(rank), rank),
                DType::F16 => self.run_on(&Cpu::<f16>::new(rank), rank),
                DType::F32 => self.run_on(&Cpu::<f32>::new(rank), rank),
                _ => bail!("{dtype} is not implemented"),
            },
            device @ DeviceArg::Cuda(first) => {
                self.run_on_cuda(first + rank.local(), rank, dtype).context(format_args!("--device {device}"))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn run_on_cuda(&self, ordinal: usize, rank: &Rank, dtype: DType) -> Result<Ran> {
        match dtype {
            DType::BF16 => self.run_on(&Cuda::<bf16>::of_rank(ordinal, rank)?, rank),
            DType::F16 => self.run_on(&Cuda::<f16>::of_rank(ordinal, rank)?, rank),
            DType::F32 => self.run_on(&Cuda::<f32>::of_rank(ordinal, rank)?, rank),
            _ => bail!("{dtype} is not implemented"),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn run_on_cuda(&self, _: usize, _: &Rank, _: DType) -> Result<Ran> {
        bail!("this build has no CUDA; build it with `--features cuda`")
    }

    fn run_on<D: Device>(&self, device: &D, rank: &Rank) -> Result<Ran> {
        let tokens = self.requests.iter().map(|request| request.prompt.len()).sum();
        let limits = Limits {
            max_new_tokens: self.max_new_tokens,
            eos: &self.config.eos,
            keep_logits: self.keep_logits || self.verify || self.compare_with_base,
        };

        let Self { expert_parallel, fully_sharded, .. } = *self;
        rank.agree(&[("--ep", expert_parallel), ("--fully-sharded-loras", fully_sharded)])?;
        let described = describe(&self.config, Split { tp: rank.tp(), expert_parallel, fully_sharded })?;
        let weights = Weights::new(&self.checkpoint, self.config.packing);
        let (mut pool, (table, slots)): (Option<Box<dyn Batches<D>>>, _) = match self.pool {
            None => (None, load(device, &described.model, &self.adapters, tokens, rank)?),
            Some(config) => {
                let (pool, table) = pooled(device, &described.model, &self.adapters, tokens, config, rank)?;
                (Some(pool), (table, Vec::new()))
            }
        };
        let model = Model::new(device, &self.config, &described, weights, table, tokens)?.stacked(STACK)?;
        let start = Instant::now();
        let (generations, batches) = self.serve(&model, pool.as_mut(), &slots, limits)?;
        let elapsed = start.elapsed();
        drop(model);
        let pool = pool.map(|pool| pool.snapshot());

        let compare = || self.compare(device, rank, &described, &batches, &generations);
        let moved = self.compare_with_base.then(compare).transpose()?;
        rank.finish()?;
        Ok(Ran { generations, batches, pool, elapsed, moved })
    }

    /// Checks the results on a single rank.
    fn verify(&self, generations: &[Generation], dtype: DType) -> Result<Vec<Verdict>> {
        match self.device {
            DeviceArg::Cpu => self.verify_on(&Cpu::default(), generations, dtype),
            device @ DeviceArg::Cuda(ordinal) => {
                self.verify_on_cuda(ordinal, generations, dtype).context(format_args!("--device {device}"))
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn verify_on_cuda(&self, ordinal: usize, generations: &[Generation], dtype: DType) -> Result<Vec<Verdict>> {
        self.verify_on(&Cuda::new(ordinal)?, generations, dtype)
    }

    #[cfg(not(feature = "cuda"))]
    fn verify_on_cuda(&self, _: usize, _: &[Generation], _: DType) -> Result<Vec<Verdict>> {
        bail!("this build has no CUDA; build it with `--features cuda`")
    }

    fn verify_on<D: Device<Elem = f32>>(
        &self,
        device: &D,
        generations: &[Generation],
        dtype: DType,
    ) -> Result<Vec<Verdict>> {
        let Self { config, checkpoint, adapters, requests, .. } = self;
        let described = describe(config, TpRank::SINGLE)?;
        let merge = Merge { config, described: &described, checkpoint, adapters };
        verify(device, merge, requests, generations, dtype)
    }

    /// Runs all requests: in one batch, with the adapters in these slots, or in those that fit in a pool. Returns their
    /// results, and the requests of each batch.
    fn serve<D: Device>(
        &self,
        model: &Model<'_, D>,
        mut pool: Option<&mut Box<dyn Batches<D>>>,
        slots: &[Slot],
        limits: Limits<'_>,
    ) -> Result<(Vec<Generation>, Vec<Vec<usize>>)> {
        let mut generations: Vec<Generation> = self.requests.iter().map(|_| Generation::default()).collect();
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut waiting: Vec<usize> = (0..self.requests.len()).collect();
        while !waiting.is_empty() {
            let batch = match &mut pool {
                None => Batch::of_all(&self.requests, &mut waiting, slots),
                Some(pool) => pool.next_batch(&self.requests, &mut waiting)?,
            };
            let sequences: Vec<_> = batch.requests.iter().map(|&(index, slot)| self.sequence(index, slot)).collect();
            let adapters = pool.as_ref().map_or(Slots::Table(&model.adapters), |pool| pool.slots());
            for (sequence, generation) in sequences.iter().zip(generate(model, adapters, &sequences, limits)?) {
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
        rank: &Rank,
        described: &Described,
        batches: &[Vec<usize>],
        generations: &[Generation],
    ) -> Result<Vec<Moved>> {
        let tokens = self.requests.iter().map(|request| request.prompt.len()).sum();
        let weights = Weights::new(&self.checkpoint, self.config.packing);
        let (table, _) = load(device, &described.model, &[], tokens, rank)?;
        let model = Model::new(device, &self.config, described, weights, table, tokens)?.stacked(STACK)?;
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
                batch: self.pool.and(outcome.batches.iter().position(|batch| batch.contains(&index))),
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
            "{batches} of {} requests, {} adapters and the base model, {dtype} on {}{}: a prefill of {prompts} tokens, \
             then {} \
             decode steps, in {:.3} s.\n{}\
             Base model: {} of {} requests have the very bits of a run in which no adapter was ever loaded.\n",
            rows.len(),
            self.adapters.len(),
            self.device,
            match self.tp {
                1 => String::new(),
                ranks if self.expert_parallel => format!(" and {ranks} ranks, each with some of the experts"),
                ranks => format!(" and {ranks} ranks"),
            },
            steps,
            outcome.elapsed.as_secs_f64(),
            pool.unwrap_or_default(),
            untouched.count(),
            base.count(),
        )
    }
}
