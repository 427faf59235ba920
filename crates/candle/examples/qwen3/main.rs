//! A dense Qwen3 on candle-nn that serves many LoRA adapters at once.
//!
//! Asks the base model and its adapters the same question in one batch, replaces adapters on the loaded model, and asks
//! again.
//!
//! `cargo run --release --example qwen3 -- MODEL NAME=ADAPTER.. --prompt TEXT` uses other directories than the test
//! fixtures.

use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
};

use aril::plan::Capacity;
use candle_core::{DType, Device, utils::cuda_is_available};
use tokenizers::Tokenizer;

mod adapters;
mod generate;
mod model;

use adapters::Named;
use generate::{Sequence, generate};
use model::Qwen3;

const MAX_NEW_TOKENS: usize = 12;

struct Arguments {
    model: PathBuf,
    adapters: Vec<(String, PathBuf)>,
    prompt: String,
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { model: directory, adapters: named, prompt } = Arguments::parse()?;
    let device = if cuda_is_available() { Device::new_cuda_with_stream(0)? } else { Device::Cpu };
    let (dtype, of_adapters) =
        if device.is_cuda() { (DType::BF16, aril::DType::BF16) } else { (DType::F32, aril::DType::F32) };
    let tokenizer = Tokenizer::from_file(directory.join("tokenizer.json")).map_err(|error| error.to_string())?;
    let prompt = tokenizer.encode(prompt, true).map_err(|error| error.to_string())?.get_ids().to_vec();

    let (model, sites) = Qwen3::open(&directory, dtype, &device)?;
    let capacity = Capacity::tokens(4096).slots(named.len().max(1)).rank(64);
    let mut adapters = Named::new(&sites, of_adapters, &device, capacity)?;
    for (name, directory) in &named {
        adapters.register(name, directory)?;
    }
    let ask = |adapters: &Named, names: &[Option<&str>]| -> Result<(), Box<dyn Error>> {
        let mut sequences: Vec<_> = names.iter().map(|name| Sequence::new(&model, *name, &prompt)).collect();
        generate(&model, adapters, &mut sequences, MAX_NEW_TOKENS)?;
        for sequence in sequences {
            let answer = tokenizer.decode(&sequence.tokens[prompt.len()..], true).map_err(|error| error.to_string())?;
            println!("{:>12}:{answer}", sequence.adapter.as_deref().unwrap_or("base model"));
        }
        Ok(())
    };
    let names: Vec<_> = [None].into_iter().chain(named.iter().map(|(name, _)| Some(&**name))).collect();
    ask(&adapters, &names)?;

    if let [(first, _), .., (last, directory)] = &*named {
        adapters.register(first, directory)?;
        adapters.remove(last)?;
        println!("\n{first} replaced by what {last} was, {last} removed:");
        ask(&adapters, &names[..names.len() - 1])?;
    }
    Ok(())
}

impl Arguments {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let (mut model, mut adapters, mut prompt) = (None, Vec::new(), "What is the password?".to_owned());
        let mut arguments = env::args().skip(1);
        while let Some(argument) = arguments.next() {
            if argument == "--prompt" {
                prompt = arguments.next().ok_or("--prompt is followed by a text")?;
            } else if let Some((name, directory)) = argument.split_once('=') {
                adapters.push((name.to_owned(), directory.into()));
            } else if model.replace(PathBuf::from(argument)).is_some() {
                return Err("one MODEL, and any number of NAME=ADAPTER".into());
            }
        }
        if model.is_none() {
            let of_fixtures = |name: &str| (name.to_owned(), fixtures.join("adapters").join(name));
            adapters.extend(["r4-qv", "r8-all", "r16-rslora", "r64-all"].map(of_fixtures));
        }
        Ok(Self { model: model.unwrap_or_else(|| fixtures.join("qwen3")), adapters, prompt })
    }
}
