//! The command line.

use std::{env, num::NonZeroUsize, path::PathBuf, str::FromStr};

use aril::{DType, model::MAX_RANK, plan::MAX_SLOTS};
use clap::{Parser, ValueEnum, builder::RangedU64ValueParser};
use serde::Deserialize;

use crate::{
    DeviceArg,
    error::{Context, Error, Result, bail},
    files,
    model::STACK,
};

/// Serves a Qwen3 and its LoRA adapters with the OpenAI API.
#[derive(Clone, Debug, Parser)]
#[command(name = "aril-serve", version)]
#[non_exhaustive]
pub struct Options {
    /// A Hugging Face directory of a qwen3, a qwen3_moe or a qwen3_5_moe. Its weights stay mapped: they must not be truncated
    /// meanwhile
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// The names of the base model; may be repeated [default: the directory]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub served_model_name: Vec<String>,
    /// The address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// The port to listen on; 0 for any
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceArg::Cpu)]
    pub device: DeviceArg,
    /// The ranks of a tensor-parallel group, each on a device of its own, from that of --device on
    #[arg(long, alias = "tensor-parallel-size", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub tp: usize,
    /// Each rank has some of the experts of a layer, with their adapters, instead of a part of each expert
    #[arg(long, alias = "enable-expert-parallel", requires = "tp")]
    pub ep: bool,
    /// Each rank has a part of both factors of an adapter's linear layers, instead of a part of one and all of the
    /// other
    #[arg(long, requires = "tp")]
    pub fully_sharded_loras: bool,
    /// How long a rank waits for another, which may be loading
    #[arg(long, value_name = "S", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    pub tp_seconds: u64,
    /// Where the weights come from
    #[arg(long, value_enum, default_value_t = LoadFormat::Safetensors)]
    pub load_format: LoadFormat,
    /// What to compute in [default: what the checkpoint says it was saved in]
    #[arg(long)]
    pub dtype: Option<Dtype>,
    /// Serves adapters
    #[arg(long)]
    pub enable_lora: bool,
    /// Adapters to load at the start, as PEFT saves them
    #[arg(long, value_name = "NAME=DIR", num_args = 1..)]
    pub lora_modules: Vec<LoraModule>,
    /// Lets clients load adapters from below this directory, and unload adapters
    #[arg(long, value_name = "DIR")]
    pub lora_root: Option<PathBuf>,
    /// Loads an adapter for the first request that names it, from the folder of that name in --lora-root
    #[arg(long, requires = "lora_root")]
    pub lora_on_request: bool,
    /// Requests may name their adapter in `lora_path`, or as `base:adapter` in `model`, as SGLang has it, and adapters
    /// that apply together in `lora`. A gateway that grants models by `model` alone sees neither field
    #[arg(long, requires = "enable_lora")]
    pub enable_lora_path: bool,
    /// The most adapters of a step
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_one)]
    pub max_loras: usize,
    /// Versions of an adapter that are served: a name stands for the last one that was loaded, and `name@version` for
    /// each
    #[arg(long, value_name = "N", default_value = "1", requires = "enable_lora")]
    pub lora_versions: NonZeroUsize,
    /// The largest rank of an adapter
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub max_lora_rank: usize,
    /// The most adapters of a step whose A the GPU multiplies by with the base weights, in steps of more than 32 tokens
    /// of 16 bits; 0 for none. Steps of more adapters, or of one of a higher rank than --stacked-lora-rank, take longer
    #[arg(long, value_name = "N", default_value_t = STACK.0, value_parser = within(0, MAX_SLOTS))]
    pub stacked_loras: usize,
    /// The largest rank of such an adapter. Each of --stacked-loras has as many rows in every base weight
    #[arg(long, value_name = "N", default_value_t = STACK.1, value_parser = within(1, MAX_RANK))]
    pub stacked_lora_rank: usize,
    /// Memory on the device of each rank for adapters
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = at_least_one)]
    pub arena_mib: usize,
    /// Host memory of each rank for further adapters, beside their files
    #[arg(long, value_name = "MIB", default_value_t = 4096, value_parser = at_least_one)]
    pub host_mib: usize,
    /// The same as a number of adapters of the largest rank, at least --max-loras
    #[arg(long, value_name = "N", conflicts_with = "host_mib", value_parser = at_least_one)]
    pub max_cpu_loras: Option<usize>,
    /// The most requests that run at the same time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub max_num_seqs: usize,
    /// The most tokens of a step, prompts and answers of all requests together
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub max_num_batched_tokens: usize,
    /// The longest prompt with its answer, in tokens [default: the model's positions, or as many as --kv-cache-mib has
    /// room for]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub max_model_len: Option<usize>,
    /// Tokens of a block of the cache
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub block_size: usize,
    /// Memory on the device of each rank for keys and values
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = at_least_one)]
    pub kv_cache_mib: usize,
    /// Computes every prompt from its first token on
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// When a waiting request goes before all younger ones, whatever their adapters
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    pub max_wait_ms: u64,
    /// The most requests that wait
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one)]
    pub max_queue: usize,
    /// The longest time of a request
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub request_seconds: u64,
    /// How long requests may run on when the server is told to end. The default leaves Kubernetes, which waits 30, its
    /// time
    #[arg(long, value_name = "S", default_value_t = 25)]
    pub drain_seconds: u64,
    /// How long a step may take before /health says that the engine hangs
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub step_seconds: u64,
    /// The largest body of a request
    #[arg(long, value_name = "KIB", default_value_t = 1024, value_parser = at_least_one)]
    pub max_body_kib: usize,
    /// A key that requests to /v1 have to give; may be repeated, and the variable ARIL_API_KEY has one more. Other
    /// users of the machine see arguments, but not a file or the environment
    #[arg(long, value_name = "KEY", value_parser = api_key)]
    pub api_key: Vec<String>,
    /// A file of such keys, one a line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The chat template [default: the checkpoint's]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// What requests sample with where they do not say: as the checkpoint's generation_config.json has it (auto), as
    /// that of a folder, or as OpenAI's API has it (vllm)
    #[arg(long, value_name = "auto|vllm|DIR", default_value = "auto")]
    pub generation_config: String,
}

impl Options {
    /// All keys. There are none only if none were asked for.
    pub(crate) fn api_keys(&self) -> Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        if let Some(key) = env::var_os("ARIL_API_KEY") {
            keys.push(api_key(&key.to_string_lossy()).map_err(Error::new).context("ARIL_API_KEY")?);
        }
        if let Some(file) = &self.api_key_file {
            let subject = format!("--api-key-file {}", file.display());
            let text = files::read_text(file, 1).context(&subject)?;
            let lines: std::result::Result<Vec<_>, _> =
                text.trim_end().lines().map(|line| api_key(line.trim())).collect();
            let lines = lines.map_err(Error::new).context(&subject)?;
            if lines.is_empty() {
                bail!("{subject}: it has no key");
            }
            keys.extend(lines);
        }
        Ok(keys)
    }
}

/// An adapter to load at the start.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoraModule {
    /// Its name, which requests give as their model.
    pub name: String,
    /// Its directory.
    pub path: PathBuf,
}

/// vLLM's `LoRAModulePath`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonModule {
    name: String,
    path: PathBuf,
    /// There is one base model.
    #[serde(rename = "base_model_name")]
    _base_model_name: Option<String>,
}

impl FromStr for LoraModule {
    type Err = String;

    fn from_str(arg: &str) -> std::result::Result<Self, String> {
        // vLLM's other form.
        if arg.starts_with('{') {
            let module: JsonModule = serde_json::from_str(arg).map_err(|error| error.to_string())?;
            return Ok(Self { name: module.name, path: module.path });
        }
        match arg.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.into(), path: path.into() })
            }
            _ => Err("an adapter is given as NAME=DIR or {\"name\": …, \"path\": …}".into()),
        }
    }
}

/// Where the base model's weights come from.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
#[non_exhaustive]
pub enum LoadFormat {
    /// The checkpoint's files.
    Safetensors,
    /// Random numbers, to measure a model without its files.
    Dummy,
}

/// An element type.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[non_exhaustive]
pub enum Dtype {
    /// 32 bits.
    #[value(name = "float32", alias = "f32")]
    F32,
    /// 16 bits, 8 of them exponent.
    #[value(name = "bfloat16", alias = "bf16")]
    Bf16,
    /// 16 bits, 5 of them exponent.
    #[value(name = "float16", alias = "f16")]
    F16,
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::BF16,
            Dtype::F16 => Self::F16,
        }
    }
}

fn api_key(arg: &str) -> std::result::Result<String, String> {
    match arg {
        "" => Err("a key is empty, which would let everybody in".into()),
        key if key.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(key.into()),
        _ => Err("a key has printable ASCII characters without spaces, as a header can have them".into()),
    }
}

/// The library's bounds of a stack.
fn within(least: u64, most: usize) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=most as u64)
}

fn at_least_one(arg: &str) -> std::result::Result<usize, String> {
    match arg.parse() {
        Ok(0) => Err("it is 0".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}
