//! A dense Qwen3 that serves many LoRA adapters in one batch: the library's reference forward, on the CPU and on the GPU.
//!
//! Without arguments it runs the small model and the adapters in `tests/fixtures`. An engine's author reads `forward.rs`, where
//! the multi-LoRA calls are, and `generate.rs`, where requests of all adapters become one batch.

mod checkpoint;
mod config;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod error;
mod forward;
mod generate;
mod report;
mod requests;
mod verify;

use std::{
    fmt, fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
    time::{Duration, Instant},
};

use aril::{DType, Element, Slot, adapter::Adapter};
use clap::{Parser, ValueEnum};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use self::cuda::Cuda;
use self::{
    checkpoint::{Checkpoint, Weights},
    config::Config,
    cpu::Cpu,
    device::{Capacity, Device},
    error::{Context, Result, bail},
    forward::Model,
    generate::{Generation, Limits, Sequence, generate, replay},
    report::{Moved, Row},
    requests::{Checker, Request, Written},
    verify::{Verdict, largest_difference, verify},
};

/// Runs a dense Qwen3 and its LoRA adapters, all requests in one batch.
///
/// Without --model, it runs the small model in tests/fixtures, and without --adapter all of its adapters too.
#[derive(Debug, Parser)]
struct Cli {
    /// A Hugging Face directory of a dense Qwen3
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// An adapter as PEFT saves it; may be repeated
    #[arg(long = "adapter", value_name = "NAME=DIR")]
    adapters: Vec<AdapterArg>,
    /// A JSON array of {"adapter": "NAME" | null, "prompt": "text"} or {"adapter": .., "token_ids": [..]}, each with an
    /// optional "scale" that multiplies the adapter's own scaling. The output is then a line of JSON for each: "adapter",
    /// "prompt_tokens" and "generated_tokens" (token ids), "text"
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,
    /// Where a text ends if no end-of-text token comes before
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    max_new_tokens: u32,
    /// cpu, cuda or cuda:N [default: cuda if built in and a driver is present, else cpu]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceArg>,
    /// What to compute in [default: what the checkpoint says it was saved in]
    #[arg(long)]
    dtype: Option<DTypeArg>,
    /// Writes the logits that chose each token as safetensors: "request.I" of [steps, vocab], f32
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Runs every request again alone, in f32, with its adapter merged into the weights. Exits with 1 if logits differ by more
    /// than rounding explains
    #[arg(long)]
    verify: bool,
}

#[derive(Clone, Debug)]
struct AdapterArg {
    name: String,
    dir: PathBuf,
}

impl FromStr for AdapterArg {
    type Err = String;

    fn from_str(arg: &str) -> std::result::Result<Self, String> {
        match arg.split_once('=') {
            Some((name, dir)) if !name.is_empty() && !dir.is_empty() => Ok(Self { name: name.into(), dir: dir.into() }),
            _ => Err("an adapter is given as NAME=DIR".into()),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum DeviceArg {
    Cpu,
    Cuda(usize),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(arg: &str) -> std::result::Result<Self, String> {
        let cuda = || arg.strip_prefix("cuda:")?.parse().ok();
        match arg {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => cuda().map(Self::Cuda).ok_or_else(|| "a device is cpu, cuda or cuda:N".into()),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DTypeArg {
    F32,
    Bf16,
    F16,
}

impl From<DTypeArg> for DType {
    fn from(arg: DTypeArg) -> Self {
        match arg {
            DTypeArg::F32 => Self::F32,
            DTypeArg::Bf16 => Self::BF16,
            DTypeArg::F16 => Self::F16,
        }
    }
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Everything; `false` if the outcome is not as it should be.
fn run(cli: &Cli) -> Result<bool> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let model = cli.model.clone().unwrap_or_else(|| fixtures.join("qwen3"));
    let config = Config::read(&model)?;
    let adapters = if cli.model.is_none() && cli.adapters.is_empty() {
        adapters_in(&fixtures.join("adapters"))?
    } else {
        cli.adapters.clone()
    };
    let adapters = open(&adapters)?;

    let names: Vec<&str> = adapters.iter().map(|(name, _)| name.as_str()).collect();
    let written = match &cli.requests {
        Some(path) => requests::read(path)?,
        None if cli.model.is_none() && cli.adapters.is_empty() => requests::read(&fixtures.join("prompts.json"))?,
        None => ask_everyone(&names),
    };
    let tokenizer = requests::tokenizer(&model)?;
    let max_new_tokens = usize::try_from(cli.max_new_tokens)?;
    let checker =
        Checker { config: &config, model: &model, tokenizer: tokenizer.as_ref(), adapters: names, max_new_tokens };
    let subject = cli.requests.as_deref().unwrap_or(Path::new("the default requests"));
    let requests = checker.check(&written).context(subject.display())?;

    let job = Job {
        device: cli.device.unwrap_or_else(default_device),
        checkpoint: Checkpoint::open(&model)?,
        config,
        adapters,
        requests,
        max_new_tokens,
        compare_with_base: cli.requests.is_none(),
        keep_logits: cli.logits.is_some(),
        verify: cli.verify,
    };
    let dtype = cli.dtype.map(DType::from).or(job.config.dtype).unwrap_or(DType::F32);
    let outcome = job.run(dtype)?;

    let rows = job.rows(&outcome);
    if let Some(path) = &cli.logits {
        report::write_logits(path, &rows)?;
    }
    let output = match cli.requests {
        Some(_) => {
            eprint!("{}", report::verdicts(&rows)?);
            report::json_lines(&rows, tokenizer.as_ref())?
        }
        None => format!(
            "{}\n{}{}",
            report::table(&rows, tokenizer.as_ref())?,
            job.summary(&rows, &outcome, dtype),
            report::verdicts(&rows)?
        ),
    };
    io::stdout().write_all(output.as_bytes()).context("standard output")?;
    Ok(rows.iter().all(Row::is_as_it_should_be))
}

/// Adapters by their directory's name.
fn adapters_in(dir: &Path) -> Result<Vec<AdapterArg>> {
    let mut adapters = Vec::new();
    for entry in fs::read_dir(dir).context(dir.display())? {
        let entry = entry.context(dir.display())?;
        let name = entry.file_name().to_string_lossy().into_owned();
        adapters.push(AdapterArg { name, dir: entry.path() });
    }
    adapters.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(adapters)
}

fn open(args: &[AdapterArg]) -> Result<Vec<(String, Adapter)>> {
    let mut adapters: Vec<(String, Adapter)> = Vec::with_capacity(args.len());
    for AdapterArg { name, dir } in args {
        if adapters.iter().any(|(other, _)| other == name) {
            bail!("two adapters are named `{name}`");
        }
        let adapter = Adapter::open(dir).context(format_args!("adapter `{name}` in {}", dir.display()))?;
        adapters.push((name.clone(), adapter));
    }
    Ok(adapters)
}

/// The same question to the base model and to every adapter.
fn ask_everyone(adapters: &[&str]) -> Vec<Written> {
    let ask = |adapter: Option<&str>| Written {
        adapter: adapter.map(Into::into),
        prompt: Some("The capital of France is".into()),
        ..Written::default()
    };
    std::iter::once(None).chain(adapters.iter().copied().map(Some)).map(ask).collect()
}

fn default_device() -> DeviceArg {
    #[cfg(feature = "cuda")]
    if cuda::device_count() > 0 {
        return DeviceArg::Cuda(0);
    }
    DeviceArg::Cpu
}

/// What is to be done, checked.
struct Job {
    device: DeviceArg,
    config: Config,
    checkpoint: Checkpoint,
    adapters: Vec<(String, Adapter)>,
    requests: Vec<Request>,
    max_new_tokens: usize,
    compare_with_base: bool,
    keep_logits: bool,
    verify: bool,
}

/// What came of it.
struct Outcome {
    generations: Vec<Generation>,
    elapsed: Duration,
    moved: Option<Vec<Moved>>,
    verdicts: Option<Vec<Verdict>>,
}

impl Job {
    fn run(&self, dtype: DType) -> Result<Outcome> {
        match self.device {
            DeviceArg::Cpu => match dtype {
                DType::BF16 => self.run_on(&Cpu::<bf16>::default(), &Cpu::default()),
                DType::F16 => self.run_on(&Cpu::<f16>::default(), &Cpu::default()),
                DType::F32 => self.run_on(&Cpu::<f32>::default(), &Cpu::default()),
                _ => bail!("{dtype} is not implemented"),
            },
            DeviceArg::Cuda(ordinal) => {
                self.run_on_cuda(ordinal, dtype).context(format_args!("--device {}", self.device))
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
        let rank = adapters.iter().map(|(_, adapter)| adapter.max_rank()).max().unwrap_or(0).max(1);
        let capacity = Capacity { tokens, slots: adapters.len().max(1), rank };
        let limits = Limits {
            max_new_tokens: self.max_new_tokens,
            eos: &self.config.eos,
            keep_logits: self.keep_logits || self.verify || self.compare_with_base,
        };

        let weights = Weights::new(&self.checkpoint);
        let model = Model::new(device, &self.config, weights, adapters.iter().copied(), capacity)?;
        let start = Instant::now();
        let generations = generate(&model, &sequences, limits)?;
        let elapsed = start.elapsed();
        drop(model);

        let moved = self.compare_with_base.then(|| self.compare(device, &sequences, &generations)).transpose()?;
        let verdicts = self.verify.then(|| {
            let Self { config, checkpoint, requests, .. } = self;
            verify(reference, config, checkpoint, &adapters, requests, &generations, D::Elem::DTYPE)
        });
        Ok(Outcome { generations, elapsed, moved, verdicts: verdicts.transpose()? })
    }

    /// Runs the same batch, token by token, on a model that never saw an adapter.
    fn compare<D: Device>(
        &self,
        device: &D,
        sequences: &[Sequence<'_>],
        generations: &[Generation],
    ) -> Result<Vec<Moved>> {
        let tokens = sequences.iter().map(|sequence| sequence.prompt.len()).sum();
        let capacity = Capacity { tokens, slots: 1, rank: 1 };
        let model = Model::new(device, &self.config, Weights::new(&self.checkpoint), [], capacity)?;
        let sequences: Vec<_> = sequences.iter().map(|&sequence| Sequence { slot: Slot::BASE, ..sequence }).collect();
        let tokens: Vec<&[u32]> = generations.iter().map(|generation| generation.tokens.as_slice()).collect();
        let base = replay(&model, &sequences, &tokens)?;
        let compare = |(with, without): (&Generation, &Generation)| Moved {
            difference: largest_difference(&with.logits, &without.logits),
            identical: with
                .logits
                .iter()
                .map(|logit| logit.to_bits())
                .eq(without.logits.iter().map(|logit| logit.to_bits())),
        };
        Ok(generations.iter().zip(&base).map(compare).collect())
    }

    fn rows<'a>(&'a self, outcome: &'a Outcome) -> Vec<Row<'a>> {
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

    fn summary(&self, rows: &[Row<'_>], outcome: &Outcome, dtype: DType) -> String {
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
