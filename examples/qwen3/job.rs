//! One run of the example on any device and in any element type: the batch, and the checks of its results.

use std::time::{Duration, Instant};

use aril::{DType, Element, Slot, adapter::Adapter};
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
    model::{Described, Model, describe},
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
    pub(crate) adapters: Vec<(String, Adapter)>,
    pub(crate) requests: Vec<Request>,
    pub(crate) max_new_tokens: usize,
    /// Whether to run the batch a second time without adapters.
    pub(crate) compare_with_base: bool,
    pub(crate) keep_logits: bool,
    pub(crate) verify: bool,
}

/// The results of a run.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) generations: Vec<Generation>,
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
        let adapters: Vec<(&str, &Adapter)> =
            self.adapters.iter().map(|(name, adapter)| (name.as_str(), adapter)).collect();
        let sequences = self.requests.iter().map(|request| {
            let slot = request.adapter.map_or(Ok(Slot::BASE), |index| u16::try_from(index).map(Slot::new))?;
            Ok(Sequence { prompt: &request.prompt, slot, scale: request.scale })
        });
        let sequences: Vec<_> = sequences.collect::<Result<_>>()?;
        let tokens = self.requests.iter().map(|request| request.prompt.len()).sum();
        let limits = Limits {
            max_new_tokens: self.max_new_tokens,
            eos: &self.config.eos,
            keep_logits: self.keep_logits || self.verify || self.compare_with_base,
        };

        let described = describe(&self.config)?;
        let weights = Weights::new(&self.checkpoint, self.config.int4_group);
        let model = Model::new(device, &self.config, &described, weights, adapters.iter().copied(), tokens)?;
        let start = Instant::now();
        let generations = generate(&model, &sequences, limits)?;
        let elapsed = start.elapsed();
        drop(model);

        let compare = || self.compare(device, &described, &sequences, &generations);
        let moved = self.compare_with_base.then(compare).transpose()?;
        let verdicts = self.verify.then(|| {
            let Self { config, checkpoint, requests, .. } = self;
            let merge = Merge { config, described: &described, checkpoint, adapters: &adapters };
            verify(reference, merge, requests, &generations, D::Elem::DTYPE)
        });
        Ok(Outcome { generations, elapsed, moved, verdicts: verdicts.transpose()? })
    }

    /// Runs the same batch, token by token, on a model that never had an adapter.
    fn compare<D: Device>(
        &self,
        device: &D,
        described: &Described,
        sequences: &[Sequence<'_>],
        generations: &[Generation],
    ) -> Result<Vec<Moved>> {
        let tokens = sequences.iter().map(|sequence| sequence.prompt.len()).sum();
        let weights = Weights::new(&self.checkpoint, self.config.int4_group);
        let model = Model::new(device, &self.config, described, weights, [], tokens)?;
        let sequences: Vec<_> = sequences.iter().map(|&sequence| Sequence { slot: Slot::BASE, ..sequence }).collect();
        let tokens: Vec<&[u32]> = generations.iter().map(|generation| generation.tokens.as_slice()).collect();
        let base = replay(&model, &sequences, &tokens)?;
        let compare = |(with, without): (&Generation, &Generation)| Moved::between(&with.logits, &without.logits);
        Ok(generations.iter().zip(&base).map(compare).collect())
    }

    pub(crate) fn rows<'a>(&'a self, outcome: &'a Outcome) -> Vec<Row<'a>> {
        let row = |(index, generation)| {
            let Request { adapter, scale, prompt } = &self.requests[index];
            Row {
                adapter: adapter.map(|adapter| self.adapters[adapter].0.as_str()),
                scale: *scale,
                prompt,
                generation,
                moved: outcome.moved.as_ref().map(|moved| moved[index]),
                verdict: outcome.verdicts.as_ref().map(|verdicts| verdicts[index]),
            }
        };
        outcome.generations.iter().enumerate().map(row).collect()
    }

    pub(crate) fn summary(&self, rows: &[Row<'_>], outcome: &Outcome, dtype: DType) -> String {
        let prompts: usize = rows.iter().map(|row| row.prompt.len()).sum();
        let longest = rows.iter().map(|row| row.generation.tokens.len()).max().unwrap_or(0);
        let base = rows.iter().filter(|row| row.adapter.is_none());
        let untouched = base.clone().filter(|row| row.moved.is_some_and(|moved| moved.identical));
        format!(
            "One batch of {} requests, {} adapters and the base model, {dtype} on {}: a prefill of {prompts} tokens, then {} \
             decode steps, in {:.3} s.\n\
             Base model: {} of {} requests have the very bits of a run in which no adapter was ever loaded.\n",
            rows.len(),
            self.adapters.len(),
            self.device,
            longest.saturating_sub(1),
            outcome.elapsed.as_secs_f64(),
            untouched.count(),
            base.count(),
        )
    }
}
