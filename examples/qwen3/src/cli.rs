//! The command line of the program, which README.md describes.
//!
//! Without arguments it runs the small models and adapters of `tests/fixtures`, or of the copy that `ARIL_FIXTURES`
//! names. `generate` makes one batch of all requests.

use std::{
    env, fs,
    io::{self, Write as _},
    iter,
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use aril::{
    DType,
    adapter::{Adapter, BaseWeight},
    model::TpRank,
    pool::PoolConfig,
};
use clap::{Parser, ValueEnum};
use half::{bf16, f16};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    checkpoint::Checkpoint,
    config::Config,
    device_arg::DeviceArg,
    error::{Context, Error, Result, bail},
    files,
    job::Job,
    model::describe,
    report::{self, Row},
    requests::{self, Checker, Written},
    stderr::say,
    tokenizer::Tokenizer,
};

/// Runs a Qwen3, dense or with experts, or a Qwen3.5 with experts, and its LoRA adapters, all requests in one batch.
///
/// Without --model, it runs the small dense model in tests/fixtures, and without --adapter all of its adapters too.
/// Without --requests and --logits as well, it then runs the small model with experts there, and that with weights in 4
/// bits; with --ep, these alone.
#[derive(Debug, Parser)]
struct Cli {
    /// A Hugging Face directory of a qwen3, a qwen3_moe or a qwen3_5_moe. Its weights stay mapped: they must not be truncated
    /// meanwhile
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// An adapter as PEFT saves it; may be repeated
    #[arg(long = "adapter", value_name = "NAME=DIR")]
    adapters: Vec<AdapterArg>,
    /// A JSON array of {"adapter": "NAME" | null, "prompt": "text"} or {"adapter": .., "token_ids": [..]}, each with an
    /// optional "scale" that multiplies the adapter's own scaling. The output is then a line of JSON for each:
    /// "adapter", "prompt_tokens" and "generated_tokens" (token ids), "text"
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,
    /// Where a text ends if no end-of-text token comes before
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    max_new_tokens: u32,
    /// cpu, cuda or cuda:N [default: cuda if built in and a driver is present, else cpu]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceArg>,
    /// The ranks of a tensor-parallel group, each on a device of its own, from that of --device on. They are threads of
    /// this process or, if WORLD_SIZE is set, one of them is this process, as NCCL's programs are started: with RANK,
    /// MASTER_ADDR and MASTER_PORT, and LOCAL_RANK on several hosts
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    tp: u16,
    /// Each rank has some of the experts of a layer, with their adapters, instead of a part of each expert (expert
    /// parallelism). The rest of the model is split as without it
    #[arg(long, requires = "tp")]
    ep: bool,
    /// Each rank has a part of both factors of an adapter's linear layers, instead of a part of one and all of the
    /// other. The ranks exchange what is between the factors
    #[arg(long, requires = "tp")]
    fully_sharded_loras: bool,
    /// How long a rank waits for another, which may be loading
    #[arg(long, value_name = "S", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    tp_seconds: u64,
    /// What to compute in [default: what the checkpoint says it was saved in]
    #[arg(long)]
    dtype: Option<DTypeArg>,
    /// Holds the adapters in a pool with an arena of this size on the device of each rank. Requests whose adapters do
    /// not fit in it together run in several batches [default: all adapters on the device]
    #[arg(long, value_name = "N")]
    arena_mib: Option<usize>,
    /// Host memory of each rank for adapters [default: that of the arena]
    #[arg(long, value_name = "N", requires = "arena_mib")]
    host_mib: Option<usize>,
    /// Writes the logits that chose each token as safetensors: "request.I" of [steps, vocab], f32. Replaces no file
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,
    /// Runs every request again alone, in f32, with its adapter merged into the weights. Exits with 1 if logits differ
    /// by more than rounding explains
    #[arg(long)]
    verify: bool,
}

impl Cli {
    fn pool(&self) -> Option<PoolConfig> {
        let bytes = |mib: usize| mib.saturating_mul(1 << 20);
        let arena = self.arena_mib.map(bytes)?;
        Some(PoolConfig::arena_bytes(arena).host_bytes(self.host_mib.map_or(arena, bytes)))
    }
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

/// Runs what the arguments of the process say.
pub fn main() -> ExitCode {
    let done = match Cli::try_parse() {
        Ok(cli) => run(&cli),
        Err(usage) if usage.use_stderr() => Err(misused(&usage)),
        Err(help) => help.print().map(|()| true).context("standard output"),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            say(&format!("error: {error}\n"));
            ExitCode::from(2)
        }
    }
}

/// The error in the arguments, without clap's usage text.
fn misused(usage: &clap::Error) -> Error {
    let text = usage.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let first = text.split("\n\n").next().unwrap_or(text);
    Error::new(first.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// The small models in `tests/fixtures`, each with its folder of adapters, default requests and description. Only the
/// first is without experts.
const SMALL_MODELS: [[&str; 4]; 4] = [
    ["qwen3", "adapters", "prompts.json", "dense"],
    ["qwen3-moe", "adapters-moe", "prompts-moe.json", "8 experts, 2 of them for each token, in every other layer"],
    ["qwen3-moe-int4", "adapters-moe", "prompts-moe.json", "the same in 4 bits"],
    ["qwen3-hybrid", "adapters-hybrid", "prompts-hybrid.json", "gated delta nets in two of three layers, and experts"],
];

/// Runs everything. Returns `false` if a check failed.
fn run(cli: &Cli) -> Result<bool> {
    let copy = env::var_os("ARIL_FIXTURES").map(PathBuf::from);
    let fixtures = copy.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures"));
    let small = |heading: String, [model, adapters, requests, _]: [&str; 4]| -> Result<Given> {
        Ok(Given {
            heading,
            model: fixtures.join(model),
            adapters: adapters_in(&fixtures.join(adapters))?,
            requests: cli.requests.clone().or_else(|| Some(fixtures.join(requests))),
        })
    };
    if cli.model.is_some() || !cli.adapters.is_empty() {
        let model = cli.model.clone().unwrap_or_else(|| fixtures.join(SMALL_MODELS[0][0]));
        let (adapters, requests) = (cli.adapters.clone(), cli.requests.clone());
        return run_one(cli, &Given { heading: String::new(), model, adapters, requests });
    }
    if cli.requests.is_some() || cli.logits.is_some() {
        return run_one(cli, &small(String::new(), SMALL_MODELS[0])?);
    }
    let mut is_as_it_should_be = true;
    let models = if cli.ep { &SMALL_MODELS[1..] } else { &SMALL_MODELS };
    for (index, &model) in models.iter().enumerate() {
        let [name, .., what] = model;
        let heading = format!("{}{name}: {what}\n\n", if index == 0 { "" } else { "\n" });
        is_as_it_should_be &= run_one(cli, &small(heading, model)?)?;
    }
    Ok(is_as_it_should_be)
}

/// The run of one model.
struct Given {
    /// The title of a table.
    heading: String,
    model: PathBuf,
    adapters: Vec<AdapterArg>,
    /// Without a file, the same question to all.
    requests: Option<PathBuf>,
}

/// Runs one model. Returns `false` if a check failed.
fn run_one(cli: &Cli, given: &Given) -> Result<bool> {
    let Given { heading, model, adapters, requests } = given;
    let config = Config::read(model)?;
    if cli.ep && config.moe.is_none() {
        bail!("--ep: {} has no experts", model.display());
    }
    let checkpoint = Checkpoint::open(model)?;
    checkpoint.check(&config)?;
    let dtype = cli.dtype.map(DType::from).or(config.dtype).unwrap_or(DType::F32);
    cli.logits.as_ref().map(|path| files::check_output(path).context("--logits")).transpose()?;
    let whole = describe(&config, TpRank::SINGLE)?.model;
    let adapters = read(adapters, |weight| match dtype {
        DType::BF16 => checkpoint.has::<bf16>(weight, &whole, config.tied),
        DType::F16 => checkpoint.has::<f16>(weight, &whole, config.tied),
        _ => checkpoint.has::<f32>(weight, &whole, config.tied),
    })?;

    let names: Vec<&str> = adapters.iter().map(|(name, _)| name.as_str()).collect();
    let written = requests.as_deref().map_or_else(|| Ok(ask_everyone(&names)), requests::read)?;
    let tokenizer = Tokenizer::read(model)?;
    let max_new_tokens = usize::try_from(cli.max_new_tokens)?;
    let checker = Checker { config: &config, model, tokenizer: tokenizer.as_ref(), adapters: names, max_new_tokens };
    let subject = requests.as_deref().unwrap_or(Path::new("the default requests"));
    let requests = checker.check(&written).context(subject.display())?;

    let job = Job {
        device: cli.device.unwrap_or_else(default_device),
        tp: cli.tp.into(),
        expert_parallel: cli.ep,
        fully_sharded: cli.fully_sharded_loras,
        tp_limit: Duration::from_secs(cli.tp_seconds),
        checkpoint,
        config,
        adapters,
        pool: cli.pool(),
        requests,
        max_new_tokens,
        compare_with_base: cli.requests.is_none(),
        keep_logits: cli.logits.is_some(),
        verify: cli.verify,
    };
    let job = Arc::new(job);
    let Some(outcome) = job.run(dtype)? else { return Ok(true) };

    let rows = job.rows(&outcome);
    if let Some(path) = &cli.logits {
        report::write_logits(path, &rows).context("--logits")?;
    }
    let output = match cli.requests {
        Some(_) => {
            say(&report::verdicts(&rows)?);
            report::json_lines(&rows, tokenizer.as_ref())?
        }
        None => format!(
            "{heading}{}\n{}{}",
            report::table(&rows, tokenizer.as_ref())?,
            job.summary(&rows, &outcome, dtype),
            report::verdicts(&rows)?
        ),
    };
    print(&output)?;
    Ok(rows.iter().all(Row::is_as_it_should_be))
}

/// The adapters, by the names of their directories.
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

/// Reads adapters into memory, because their files may change later. `is_same` says whether an adapter's copy of a base
/// weight equals the base model's.
fn read(args: &[AdapterArg], is_same: impl Fn(&BaseWeight) -> Result<bool>) -> Result<Vec<(String, Arc<Adapter>)>> {
    let mut adapters: Vec<(String, Arc<Adapter>)> = Vec::with_capacity(args.len());
    for AdapterArg { name, dir } in args {
        if adapters.iter().any(|(other, _)| other == name) {
            bail!("two adapters are named `{name}`");
        }
        let checked = || -> Result<Adapter> {
            let mut adapter = Adapter::open(dir)?;
            adapter.compare_base_weights(&is_same)?;
            Ok(adapter)
        };
        adapters
            .push((name.clone(), Arc::new(checked().context(format_args!("adapter `{name}` in {}", dir.display()))?)));
    }
    Ok(adapters)
}

/// Writes all of a text to standard output.
fn print(text: &str) -> Result<()> {
    let mut output = io::stdout();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).context("standard output")
}

/// The same question to the base model and to every adapter.
fn ask_everyone(adapters: &[&str]) -> Vec<Written> {
    let ask = |adapter: Option<&str>| Written {
        adapter: adapter.map(Into::into),
        prompt: Some("The capital of France is".into()),
        ..Written::default()
    };
    iter::once(None).chain(adapters.iter().copied().map(Some)).map(ask).collect()
}

fn default_device() -> DeviceArg {
    #[cfg(feature = "cuda")]
    if cuda::device_count() > 0 {
        return DeviceArg::Cuda(0);
    }
    DeviceArg::Cpu
}
