//! The engine with the models and adapters of `tests/fixtures`, or of the copy that `ARIL_FIXTURES` names, without a
//! server. Tests that are generic over a [`Platform`] run on the CPU and, if they are asked for, on a GPU.

use std::{
    cell::RefCell,
    collections::HashMap,
    env, fs, iter,
    marker::PhantomData,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use aril::{
    DType, Element, Slot,
    adapter::Opener,
    model::{self, TpRank},
    plan::Capacity,
    pool::{AdapterId, CacheNamespace, PoolConfig, PoolError, Source},
};
use aril_qwen3::tokenizer::Tokenizer;
use half::{bf16, f16};
use proptest::{prelude::*, test_runner::TestCaseError};
use safetensors::SafeTensors;
use serde::Deserialize;
use tokio::sync::mpsc::{UnboundedReceiver, error::TryRecvError, unbounded_channel};

use crate::{
    Changes, Chosen, Engine, Event, Failure, Finish, Limits, Logprobs, Request, RequestId, Sampling, Sizes,
    cache::KvCache,
    checkpoint::{Checkpoint, Weights},
    config::Config,
    cpu::Cpu,
    error::{Error, Result},
    graph::Capture,
    group::Rank,
    model::{Described, Model, STACK, Split, describe},
    plan::{Chunk, Plan, Scores},
    pool::{Pool, RankPool},
    ranks::{Order, Others, follow},
    runner::Runner,
    scheduler::Scheduler,
    worker::Worker,
};

const GREEDY: Sampling =
    Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: None, logprobs: Some(2), changes: Changes::NONE };

/// Room for everything at once.
const LARGE: Sizes = Sizes {
    limits: Limits { step_tokens: 512, running: 64, waiting: 64, adapters: 16, max_wait: Duration::from_secs(1) },
    blocks: 512,
    block_rows: 16,
    max_positions: 512,
    is_sharing: false,
    runs_ahead: true,
};

/// A device that tests run on.
trait Platform: Capture + 'static {
    /// By how much the log-probabilities of a request may depend on its batch.
    const TOLERANCE: f32;

    fn with<R>(test: impl FnOnce(&Self) -> R) -> R;

    /// The device of a rank of a group.
    fn of_rank(rank: &Rank) -> Self;
}

impl<T: Element> Platform for Cpu<T> {
    const TOLERANCE: f32 = 0.0;

    fn with<R>(test: impl FnOnce(&Self) -> R) -> R {
        test(&Self::default())
    }

    fn of_rank(rank: &Rank) -> Self {
        Self::new(rank)
    }
}

/// How long the ranks of a test wait for each other.
const LIMIT: Duration = Duration::from_secs(60);

fn fixtures() -> PathBuf {
    let copy = env::var_os("ARIL_FIXTURES").map(PathBuf::from);
    copy.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures"))
}

/// A model's files.
struct Files {
    config: Config,
    checkpoint: Checkpoint,
    /// As the first rank has it.
    described: Described,
    tokenizer: Tokenizer,
    /// The first rank's.
    split: Split,
    /// How long ranks wait for each other.
    limit: Duration,
    /// Memory of each rank for adapters.
    arena_bytes: usize,
}

impl Files {
    fn open(name: &str) -> Self {
        Self::on_ranks(name, 1)
    }

    fn on_ranks(name: &str, tp: usize) -> Self {
        Self::split(name, TpRank::new(0, tp).expect("there is a first rank"))
    }

    /// The files of a model that the ranks of a group split in this way.
    fn split(name: &str, first: impl Into<Split>) -> Self {
        let (dir, split) = (fixtures().join(name), first.into());
        let config = Config::read(&dir).expect("the fixture is whole");
        let checkpoint = Checkpoint::open(&dir).expect("the fixture is whole");
        let described = describe(&config, split).expect("the model can be cut");
        let tokenizer = Tokenizer::read(&dir).expect("the fixture is whole").expect("the fixture has one");
        Self { config, checkpoint, described, tokenizer, split, limit: LIMIT, arena_bytes: 64 << 20 }
    }

    fn prompt(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text, false, self.config.max_positions).expect("the text is short")
    }

    fn source(&self, adapter: &Path, dtype: DType) -> Source {
        let mut read = aril::adapter::Adapter::open(adapter).expect("the fixture is whole");
        let tied = self.config.tied;
        read.compare_base_weights(|weight| match dtype {
            DType::BF16 => self.checkpoint.has::<bf16>(weight, self.model(), tied),
            DType::F16 => self.checkpoint.has::<f16>(weight, self.model(), tied),
            _ => self.checkpoint.has::<f32>(weight, self.model(), tied),
        })
        .expect("its base weights are the model's");
        Source::memory(read.into(), self.model(), dtype).expect("the adapter is of this model")
    }

    fn pool_config(&self) -> PoolConfig {
        PoolConfig::arena_bytes(self.arena_bytes)
    }

    fn model(&self) -> &model::Model {
        &self.described.model
    }

    /// Runs `test` on a new engine, whose pool has room for `slots` adapters.
    fn run<D: Platform, R>(&self, sizes: Sizes, slots: usize, test: impl FnOnce(&mut World<'_, D>) -> R) -> R {
        if self.split.tp.size() > 1 {
            return self.run_ranks(sizes, slots, follow, test);
        }
        D::with(|device| {
            let (pool, table) = rank_pool(device, &self.described, &Rank::default(), sizes, slots, &self.pool_config());
            let model = self.load(device, &self.described, table, sizes);
            let runner = Runner::new(&model, pool.slots(), &sizes).expect("the sizes are valid");
            let engine = Engine::new(runner, Pool::new(pool, Others::default()), sizes);
            test(&mut World {
                files: self,
                engine,
                now: Duration::ZERO,
                adapters: HashMap::new(),
                limits: sizes.limits,
            })
        })
    }

    /// Runs `test` on the first rank of a group. The others `follow`.
    fn run_ranks<D: Platform, R>(
        &self,
        sizes: Sizes,
        slots: usize,
        follow: impl Fn(&mut Runner<'_, D>, &mut RankPool<D>, &Receiver<Order>) -> Result<()> + Sync,
        test: impl FnOnce(&mut World<'_, D>) -> R,
    ) -> R {
        let size = self.split.tp.size();
        let described_of =
            |rank: &Rank| describe(&self.config, Split { tp: rank.tp(), ..self.split }).expect("the model can be cut");
        let mut ranks = Rank::threads(size, self.limit).expect("there are ranks").into_iter();
        let first = ranks.next().expect("there is a first rank");
        let (others, orders) = Others::new(size - 1);
        thread::scope(|scope| {
            for (rank, orders) in ranks.zip(orders) {
                let follow = &follow;
                scope.spawn(move || {
                    let device = D::of_rank(&rank);
                    let described = described_of(&rank);
                    let (mut pool, table) = rank_pool(&device, &described, &rank, sizes, slots, &self.pool_config());
                    let model = self.load(&device, &described, table, sizes);
                    let mut runner = Runner::new(&model, pool.slots(), &sizes).expect("the sizes are valid");
                    if follow(&mut runner, &mut pool, &orders).is_ok() {
                        device.wait().expect("all ranks have run all steps");
                        rank.finish().expect("all ranks have ended");
                    }
                });
            }
            let device = D::of_rank(&first);
            let described = described_of(&first);
            let (pool, table) = rank_pool(&device, &described, &first, sizes, slots, &self.pool_config());
            let model = self.load(&device, &described, table, sizes);
            let runner = Runner::new(&model, pool.slots(), &sizes).expect("the sizes are valid");
            let engine = Engine::new(runner, Pool::new(pool, others), sizes);
            let mut world =
                World { files: self, engine, now: Duration::ZERO, adapters: HashMap::new(), limits: sizes.limits };
            let result = test(&mut world);
            world.engine.stop();
            if device.wait().is_ok() {
                // A test may have broken the group.
                let _ = first.finish();
            }
            result
        })
    }

    fn load<'d, D: Platform>(
        &self,
        device: &'d D,
        described: &Described,
        table: D::Adapters,
        sizes: Sizes,
    ) -> Model<'d, D> {
        let weights = Weights::new(&self.checkpoint, self.config.packing);
        let model = Model::new(device, &self.config, described, weights, table, sizes.limits.step_tokens);
        model.and_then(|model| model.stacked(STACK)).expect("the checkpoint is whole")
    }
}

fn capacity(sizes: Sizes, slots: usize) -> Capacity {
    Capacity::tokens(sizes.limits.step_tokens).slots(slots).rank(64)
}

/// A rank's part of a group's pool, and its table.
fn rank_pool<D: Platform>(
    device: &D,
    described: &Described,
    rank: &Rank,
    sizes: Sizes,
    slots: usize,
    config: &PoolConfig,
) -> (RankPool<D>, D::Adapters) {
    let pool = device.pool(&described.model, capacity(sizes, slots), *config);
    let (pool, table) = pool.expect("the capacity is valid");
    (RankPool::new(rank.clone(), pool).expect("the ranks agree"), table)
}

/// An engine, its clock, and its adapters by name.
struct World<'m, D: Capture> {
    files: &'m Files,
    engine: Engine<'m, D>,
    now: Duration,
    adapters: HashMap<String, AdapterId>,
    limits: Limits,
}

/// Whether two answers have the same tokens, and log-probabilities that are the same, or nearly so where bits depend on
/// the batch.
fn is_same<D: Platform>(a: &[Chosen], b: &[Chosen]) -> bool {
    let is_near = |a: f32, b: f32| (a - b).abs() <= D::TOLERANCE;
    let has_near_logprobs = |a: &Chosen, b: &Chosen| match (&a.logprobs, &b.logprobs) {
        (Some(a), Some(b)) => {
            let mut top = iter::zip(&a.top, &b.top);
            is_near(a.chosen, b.chosen) && a.top.len() == b.top.len() && top.all(|(a, b)| is_near(a.1, b.1))
        }
        (a, b) => a == b,
    };
    a.len() == b.len() && iter::zip(a, b).all(|(a, b)| a.token == b.token && has_near_logprobs(a, b))
}

/// A submitted request, and what has come of it.
struct Submitted {
    id: RequestId,
    events: UnboundedReceiver<Event>,
    /// Log-probabilities of the prompt's tokens but the first.
    prompt: Vec<Logprobs>,
    chosen: Vec<Chosen>,
    finish: Option<Finish>,
    failure: Option<Failure>,
}

impl Submitted {
    fn receive(&mut self) {
        loop {
            match self.events.try_recv() {
                Ok(Event::Token(chosen, finish)) => {
                    assert!(self.finish.is_none() && self.failure.is_none(), "an event after the last one");
                    self.chosen.push(chosen);
                    self.finish = finish;
                }
                Ok(Event::Failed(failure)) => self.failure = Some(failure),
                Ok(Event::Prompt(logprobs, _)) => self.prompt.push(logprobs),
                Ok(Event::Started(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return,
            }
        }
    }

    fn tokens(&self) -> Vec<u32> {
        self.chosen.iter().map(|chosen| chosen.token).collect()
    }
}

impl<D: Capture> World<'_, D> {
    /// An adapter, or the combination of one and a little of another, `one+another`.
    fn add(&mut self, folder: &str, name: &str) -> AdapterId {
        let source = |name| self.files.source(&fixtures().join(folder).join(name), D::Elem::DTYPE);
        let source = match name.split_once('+') {
            Some((one, another)) => Source::combined([(source(one), 1.0), (source(another), 0.05)]),
            None => Ok(source(name)),
        };
        let source = source.expect("the parts fit together");
        let id = self.engine.add_adapter(source, false).expect("there is room").id();
        self.adapters.insert(name.into(), id);
        id
    }

    fn request(&self, adapter: Option<&str>, prompt: Vec<u32>, max_tokens: usize, sampling: Sampling) -> Request {
        let adapter = adapter.map(|name| self.adapters[name]);
        let stop_tokens = self.files.config.eos.clone();
        Request { adapter, prompt, max_tokens, stop_tokens, prompt_logprobs: None, sampling }
    }

    fn submit(&mut self, request: Request) -> Submitted {
        let (sender, events) = unbounded_channel();
        self.now += Duration::from_millis(1);
        let id = self.engine.submit(request, sender, self.now).expect("it is valid");
        Submitted { id, events, prompt: Vec::new(), chosen: Vec::new(), finish: None, failure: None }
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(1);
        if !self.engine.step(self.now).expect("the device does not fail") {
            self.engine.wait_for_adapters(Duration::from_millis(100));
        }
        // The table refuses a step of too many tokens.
        let running = self.engine.state().running;
        assert!(running <= self.limits.running, "{running} requests run, of at most {}", self.limits.running);
    }

    /// Runs until every request has ended.
    fn drain(&mut self) {
        let mut steps = 0;
        while !self.engine.is_idle() {
            self.step();
            steps += 1;
            assert!(steps < 100_000, "requests do not end: {:?}", self.engine.state());
        }
    }

    fn answers(&mut self, requests: Vec<Request>) -> Vec<Submitted> {
        let mut submitted: Vec<_> = requests.into_iter().map(|request| self.submit(request)).collect();
        self.drain();
        submitted.iter_mut().for_each(Submitted::receive);
        assert!(submitted.iter().all(|submitted| submitted.finish.is_some()), "every request has a last token");
        submitted
    }

    /// Fails if a request that has ended still holds something.
    fn holds_nothing(&mut self) -> std::result::Result<(), TestCaseError> {
        self.engine.step(self.now).expect("the device does not fail");
        let (state, pool) = (self.engine.state(), self.engine.pool());
        prop_assert_eq!((state.running, state.waiting, state.free_blocks), (0, 0, state.blocks));
        prop_assert_eq!((pool.leases, pool.leased), (0, 0));
        Ok(())
    }
}

#[derive(Debug, Deserialize)]
struct Golden {
    adapter: Option<String>,
    prompt: Option<String>,
    token_ids: Option<Vec<u32>>,
    scale: Option<f32>,
}

/// The requests of a batch of goldens without a scale, which the engine does not have, and their tokens.
fn goldens(files: &Files, batch: &str) -> Vec<(Option<String>, Vec<u32>, Vec<u32>)> {
    let dir = fixtures().join("goldens");
    let text = fs::read_to_string(dir.join(format!("{batch}.json"))).expect("the batch is there");
    let requests: Vec<Golden> = serde_json::from_str(&text).expect("the batch is JSON");
    let bytes = fs::read(dir.join(format!("{batch}.f32.safetensors"))).expect("the goldens are there");
    let file = SafeTensors::deserialize(&bytes).expect("the goldens are whole");
    let with_tokens = |(index, golden): (usize, Golden)| {
        let tokens = file.tensor(&format!("request.{index}.tokens")).expect("each request has tokens");
        let tokens = tokens.data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
        let tokens = tokens.map(|token| token.try_into().expect("a token id")).collect();
        let prompt = golden.token_ids.unwrap_or_else(|| files.prompt(&golden.prompt.unwrap_or_default()));
        (golden.adapter, prompt, tokens)
    };
    let unscaled = requests.into_iter().enumerate().filter(|(_, golden)| golden.scale.is_none());
    unscaled.map(with_tokens).collect()
}

/// A part of a combination in a batch of goldens.
#[derive(Debug, Deserialize)]
struct GoldenPart {
    name: String,
    scale: f32,
}

#[derive(Debug, Deserialize)]
struct GoldenCombination {
    lora: Vec<GoldenPart>,
    prompt: String,
}

/// Combinations are answered as by the adapters that PEFT has combined, with its log-probabilities.
fn combinations_are_those_of_the_goldens<D: Platform<Elem = f32>>(tp: usize) {
    let files = Files::on_ranks("qwen3", tp);
    let text = fs::read_to_string(fixtures().join("goldens/combined.json")).expect("the batch is there");
    let requests: Vec<GoldenCombination> = serde_json::from_str(&text).expect("the batch is JSON");
    files.run::<D, _>(LARGE, 4, |world| {
        let requests: Vec<_> = requests
            .into_iter()
            .map(|GoldenCombination { lora, prompt }| {
                let source = |GoldenPart { name, scale }: &GoldenPart| {
                    (world.files.source(&fixtures().join("adapters").join(name), DType::F32), *scale)
                };
                let source = Source::combined(lora.iter().map(source)).expect("the parts fit together");
                let id = world.engine.add_adapter(source, false).expect("there is room").id();
                let request = world.request(None, world.files.prompt(&prompt), 12, GREEDY);
                Request { adapter: Some(id), ..request }
            })
            .collect();
        have_the_logprobs_of_the_goldens(&files, "combined", &world.answers(requests));
    });
}

/// Fails unless the answers to a batch have the tokens and the log-probabilities of its goldens.
fn have_the_logprobs_of_the_goldens(files: &Files, batch: &str, answers: &[Submitted]) {
    let file = fixtures().join(format!("goldens/{batch}.f32.safetensors"));
    let bytes = fs::read(file).expect("the goldens are there");
    let goldens = SafeTensors::deserialize(&bytes).expect("the goldens are whole");
    for (index, answer) in answers.iter().enumerate() {
        let tensor = |what| goldens.tensor(&format!("request.{index}.{what}")).expect("each request has it");
        let tokens = tensor("tokens").data().as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
        assert!(answer.tokens().iter().map(|token| i64::from(*token)).eq(tokens), "request {index}");
        let logits = tensor("logits").data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        let logits: Vec<f32> = logits.collect();
        for (chosen, logits) in answer.chosen.iter().zip(logits.chunks_exact(files.config.vocab)) {
            let golden = Logprobs::of(logits, chosen.token as usize, 2);
            let got = chosen.logprobs.as_ref().expect("they were asked for");
            let differences = iter::zip(&got.top, &golden.top).map(|(got, golden)| (got.1 - golden.1).abs());
            let largest = differences.fold((got.chosen - golden.chosen).abs(), f32::max);
            assert!(largest < 1e-3, "request {index}: a log-probability differs by {largest}");
        }
    }
}

/// An adapter with an invocation applies from there on, beside other adapters and in any chunks, with the
/// log-probabilities of PEFT. What is before the invocation has the keys and values of the base model, and is shared
/// with it; so is all of a sequence without the invocation.
fn an_adapter_applies_from_its_invocation_on<D: Platform<Elem = f32>>(tp: usize) {
    let files = Files::on_ranks("qwen3", tp);
    let prompts: Vec<_> = goldens(&files, "alora").into_iter().map(|(_, prompt, _)| prompt).collect();
    let invocation = files.prompt(" the password");
    let starts = prompts.iter().map(|prompt| prompt.windows(2).rposition(|tokens| tokens == invocation));
    let starts: Vec<_> = starts.collect();
    assert!(starts.contains(&None) && starts.contains(&Some(0)) && invocation.len() == 2, "{starts:?}");
    for is_sharing in [false, true] {
        let limits = Limits { step_tokens: 13, running: 13, ..LARGE.limits };
        files.run::<D, _>(Sizes { limits, block_rows: 4, is_sharing, ..LARGE }, 4, |world| {
            let id = world.add("adapters-alora", "password");
            world.add("adapters", "r8-all");
            let ask = |world: &mut World<'_, D>, names: &[Option<&str>], prompts: &[Vec<u32>]| {
                let each = prompts.iter().flat_map(|prompt| names.iter().map(move |name| (*name, prompt.clone())));
                let requests = each.map(|(name, prompt)| world.request(name, prompt, 12, GREEDY)).collect();
                world.answers(requests)
            };
            let base = ask(world, &[None], &prompts);
            let mut shared = world.engine.state().cache.shared_tokens;
            for is_again in [false, true] {
                let answers: Vec<_> = iter::zip(&prompts, &starts)
                    .map(|(prompt, start)| {
                        let answer = ask(world, &[Some("password")], std::slice::from_ref(prompt)).swap_remove(0);
                        let before = std::mem::replace(&mut shared, world.engine.state().cache.shared_tokens);
                        let shareable = prompt.len() - 1;
                        let expected = if is_again { shareable } else { start.unwrap_or(shareable) };
                        assert_eq!(shared - before, if is_sharing { expected as u64 / 4 * 4 } else { 0 });
                        answer
                    })
                    .collect();
                have_the_logprobs_of_the_goldens(&files, "alora", &answers);
                let is_base =
                    iter::zip(&answers, &base).map(|(answer, base)| is_same::<D>(&answer.chosen, &base.chosen));
                assert!(is_base.eq(starts.iter().map(Option::is_none)));
            }
            let mixed = ask(world, &[None, Some("password"), Some("r8-all")], &prompts);
            let (of_base, others): (Vec<_>, Vec<_>) =
                mixed.into_iter().enumerate().partition(|(index, _)| index % 3 == 0);
            assert!(iter::zip(of_base, &base).all(|((_, answer), base)| is_same::<D>(&answer.chosen, &base.chosen)));
            let (invoked, _): (Vec<_>, Vec<_>) = others.into_iter().partition(|(index, _)| index % 3 == 1);
            let invoked: Vec<_> = invoked.into_iter().map(|(_, answer)| answer).collect();
            have_the_logprobs_of_the_goldens(&files, "alora", &invoked);

            // Of the prompt's own tokens, too, those before the invocation are the base model's.
            let report = |world: &mut World<'_, D>, name| {
                let request = world.request(name, prompts[1].clone(), 1, GREEDY);
                world.answers(vec![Request { prompt_logprobs: Some(0), ..request }]).swap_remove(0).prompt
            };
            let (base, invoked) = (report(world, None), report(world, Some("password")));
            let is_near = |(a, b): (&Logprobs, &Logprobs)| (a.chosen - b.chosen).abs() <= D::TOLERANCE;
            let start = starts[1].expect("it is in the prompt");
            let first = iter::zip(&base, &invoked).position(|pair| !is_near(pair));
            assert!(first.is_some_and(|first| first >= start), "{first:?} {start}");

            let published = |world: &World<'_, D>, version| world.engine.scheduler.num_published(version) > 0;
            assert_eq!((published(world, Some(id)), published(world, None)), (is_sharing, is_sharing));
            world.engine.remove_adapter(id);
            assert_eq!((published(world, Some(id)), published(world, None)), (false, is_sharing));
            world.holds_nothing().expect("all have ended");
        });
    }
}

const BATCHES: [(&str, &str, &str, usize); 12] = [
    ("base-only", "qwen3", "adapters", 3),
    ("mixed", "qwen3", "adapters", 16),
    ("one-question", "qwen3", "adapters", 10),
    ("alora", "qwen3", "adapters-alora", 6),
    ("untied", "qwen3-untied", "adapters-untied", 9),
    ("rows", "qwen3", "adapters-rows", 7),
    ("rows-untied", "qwen3-untied", "adapters-rows-untied", 7),
    ("moe", "qwen3-moe", "adapters-moe", 10),
    ("moe-int4", "qwen3-moe-int4", "adapters-moe", 8),
    ("moe-int8", "qwen3-moe-int8", "adapters-moe", 5),
    ("moe-router", "qwen3-moe", "adapters-moe-router", 8),
    ("hybrid", "qwen3-hybrid", "adapters-hybrid", 11),
];

/// All requests of a batch at once, in steps of 13 tokens and blocks of 5, are answered as by transformers and PEFT,
/// one at a time: of the models whose heads the ranks can share.
fn tokens_are_those_of_the_goldens<D: Platform<Elem = f32>>(tp: usize) {
    tokens_of_a_split_are_those_of_the_goldens::<D>(TpRank::new(0, tp).expect("there is a first rank").into());
}

/// The same on the ranks of a group that split the model in this way.
fn tokens_of_a_split_are_those_of_the_goldens<D: Platform<Elem = f32>>(split: Split) {
    let can_split = |&(_, model, ..): &(_, &str, _, _)| {
        let config = Config::read(&fixtures().join(model)).expect("the fixture is whole");
        config.heads.query.is_multiple_of(split.tp.size()) && (config.moe.is_some() || !split.expert_parallel)
    };
    let batches = BATCHES.into_iter().filter(can_split);
    assert!(batches.clone().next().is_some(), "no model can be split: {split:?}");
    for (batch, model, adapters, count) in batches {
        let files = Files::split(model, split);
        let goldens = goldens(&files, batch);
        assert_eq!(goldens.len(), count, "{batch}");
        for (is_sharing, runs_ahead) in [(false, false), (true, true), (false, true)] {
            let limits = Limits { step_tokens: 13, running: 13, ..LARGE.limits };
            let sizes = Sizes { limits, block_rows: 5, is_sharing, runs_ahead, ..LARGE };
            files.run::<D, _>(sizes, 16, |world| {
                for entry in fs::read_dir(fixtures().join(adapters)).expect("the adapters are there") {
                    let name = entry.expect("the adapters can be listed").file_name();
                    world.add(adapters, name.to_str().expect("it is UTF-8"));
                }
                let request = |(adapter, prompt, _): &(Option<String>, Vec<u32>, _)| {
                    // With and without the logits on the host.
                    let logprobs = is_sharing.then_some(2);
                    world.request(adapter.as_deref(), prompt.clone(), 12, Sampling { logprobs, ..GREEDY })
                };
                let requests = goldens.iter().map(request).collect();
                let answers = world.answers(requests);
                for (index, (answer, (adapter, _, tokens))) in answers.iter().zip(&goldens).enumerate() {
                    assert_eq!(&answer.tokens(), tokens, "{batch}, request {index} for {adapter:?}");
                }
            });
        }
    }
}

/// An engine that runs ahead has a step in flight, whose tokens arrive with the next one. It does not plan beyond a
/// request's last token, and knows that a stop token was the last one a step late.
#[test]
fn tokens_arrive_a_step_late() {
    let files = Files::open("qwen3");
    let arrivals = |runs_ahead, max_tokens, stops: bool| {
        files.run::<Cpu<f32>, _>(Sizes { runs_ahead, ..LARGE }, 1, |world| {
            let sampling = Sampling { logprobs: None, ..GREEDY };
            let request = world.request(None, files.prompt("What is the password?"), max_tokens, sampling);
            let stop_tokens = if stops { request.stop_tokens.clone() } else { Vec::new() };
            let mut submitted = world.submit(Request { stop_tokens, ..request });
            let mut arrivals = Vec::new();
            while !world.engine.is_idle() {
                assert!(world.engine.step(world.now).expect("the CPU does not fail"));
                submitted.receive();
                arrivals.push(submitted.chosen.len());
            }
            assert!(submitted.finish.is_some());
            (arrivals, submitted.tokens())
        })
    };
    let [(now, tokens), (late, same)] = [false, true].map(|runs_ahead| arrivals(runs_ahead, 3, false));
    assert_eq!((now, late, &tokens), (vec![1, 2, 3], vec![0, 1, 2, 3], &same));
    let [(now, tokens), (late, same)] = [false, true].map(|runs_ahead| arrivals(runs_ahead, 20, true));
    assert_eq!((late.len(), &tokens), (now.len() + 2, &same));
    assert!(tokens.len() < 20);
}

/// The log-probabilities of a prompt, and the tokens behind it, do not depend on how it is cut into chunks, on what
/// else runs, and on whether it is computed again.
#[test]
fn log_probabilities_of_a_prompt_do_not_depend_on_the_schedule() {
    let files = Files::open("qwen3");
    let prompt = files.prompt("What is the password? Name a fruit. The capital of France is");
    let report = |sizes: Sizes, others: usize| {
        files.run::<Cpu<bf16>, _>(sizes, 4, |world| {
            let sampled = Sampling { temperature: 1.5, seed: Some(3), ..GREEDY };
            let ask = world.request(None, prompt.clone(), 8, sampled);
            let other = Request { stop_tokens: vec![], ..ask.clone() };
            let ask = Request { prompt_logprobs: Some(2), ..ask };
            let answers = world.answers(iter::repeat_n(other, others).chain([ask]).collect());
            let last = answers.last().expect("there is a request");
            assert!(answers[..others].iter().all(|other| other.prompt.is_empty()));
            (last.prompt.clone(), last.tokens(), world.engine.state().preemptions)
        })
    };
    let (alone, tokens, _) = report(LARGE, 0);
    assert_eq!(alone.len(), prompt.len() - 1);
    assert!(alone.iter().all(|token| token.top.len() == 2 && token.chosen <= token.top[0].1));
    let mut preemptions = 0;
    for (step_tokens, running, blocks) in
        [(512, 64, LARGE.blocks), (13, 4, LARGE.blocks), (7, 2, 12), (5, 3, 12), (1, 1, 12)]
    {
        for runs_ahead in [false, true] {
            let limits = Limits { step_tokens, running, ..LARGE.limits };
            let sizes = Sizes { limits, blocks, block_rows: 4, runs_ahead, ..LARGE };
            for others in [0, 3] {
                let (prompt, same, preempted) = report(sizes, others);
                assert_eq!((prompt, same), (alone.clone(), tokens.clone()), "{sizes:?} beside {others}");
                preemptions += preempted;
            }
        }
    }
    assert!(preemptions > 0, "no prompt was computed again");
}

/// In a step of many tokens, which takes other operations than one of few, a base sequence has the same bits beside
/// adapters as without them, and every sequence about the logits of a step of its own.
fn prefills_have_the_logits_of_their_sequences<D: Platform>() {
    let files = Files::open("qwen3");
    let sizes = Sizes { limits: Limits { step_tokens: 1024, ..LARGE.limits }, ..LARGE };
    files.run::<D, _>(sizes, 4, |world| {
        let ids = ["r8-all", "embed"].map(|name| world.add("adapters", name));
        world.answers(ids.map(|id| Request { adapter: Some(id), ..world.request(None, vec![1], 1, GREEDY) }).into());
        let leases = ids.map(|id| world.engine.pool.acquire(id).expect("it was just used"));
        let block_rows = sizes.block_rows;
        let tokens: Vec<u32> = (0..200).map(|token| token * 7 % 500).collect();
        let mut run = |slots: &[Slot]| -> Vec<Vec<f32>> {
            let blocks = u32::try_from(tokens.len().div_ceil(block_rows)).expect("it is small");
            let chunk = |(sequence, &slot): (u32, &Slot)| Chunk {
                slot,
                start: 0,
                keeps_routers: true,
                position: 0,
                tokens: tokens.clone(),
                blocks: (sequence * blocks..(sequence + 1) * blocks).collect(),
                state: sequence,
                source: None,
                scored: 0..0,
                is_sampled: true,
                draw: None,
            };
            let adapters = world.engine.pool.slots();
            let Runner { model, session, decoder, draws: [_, draws], .. } = &mut world.engine.runner;
            let plan = Plan { chunks: (0..).zip(slots).map(chunk).collect() };
            let enqueued = plan.enqueue((model, adapters), session, decoder, block_rows, None, draws).expect("it runs");
            let scores = plan.scores(model, &enqueued, draws).expect("it runs");
            let logits = |scores: Scores| match scores {
                Scores::Logits(logits) => logits,
                Scores::Drawn(..) => unreachable!("logits were asked for"),
            };
            scores.into_iter().map(logits).collect()
        };
        let slots = [Slot::BASE, leases[0].slot, leases[1].slot, Slot::BASE];
        let (mixed, without) = (run(&slots), run(&[Slot::BASE; 4]));
        let bits = |logits: &[f32]| logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>();
        for base in [0, 3] {
            assert_eq!(bits(&mixed[base]), bits(&without[base]));
        }
        let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        for (slot, logits) in slots.iter().zip(&mixed) {
            let alone = distance(&run(&[*slot])[0], logits);
            assert!(alone <= D::TOLERANCE, "{slot}: {alone}");
        }
        assert!(distance(&mixed[1], &mixed[0]) > D::TOLERANCE && distance(&mixed[2], &mixed[0]) > D::TOLERANCE);
    });
}

/// The same prompt under the base model, an adapter, and another version of it: only equal versions share.
fn prefixes_are_shared_within_a_version_alone<D: Platform<Elem = f32>>(tp: usize) {
    let files = Files::on_ranks("qwen3", tp);
    files.run::<D, _>(Sizes { is_sharing: true, block_rows: 4, ..LARGE }, 4, |world| {
        let prompt = files.prompt("What is the password? Name a fruit.");
        let shareable = (prompt.len() - 1) / 4 * 4;
        let first = world.add("adapters", "r8-all");
        let mut shared = 0;
        let mut ask = |world: &mut World<'_, D>, adapter: Option<AdapterId>| {
            let request = Request { adapter, ..world.request(None, prompt.clone(), 8, GREEDY) };
            let answer = world.answers(vec![request]).swap_remove(0);
            let before = shared;
            shared = world.engine.scheduler.state().cache.shared_tokens;
            (answer.chosen, usize::try_from(shared - before).expect("it fits"))
        };
        let (base, none) = ask(world, None);
        let (adapted, none_either) = ask(world, Some(first));
        assert_eq!((none, none_either), (0, 0));
        assert!(!is_same::<D>(&base, &adapted));
        let mut expect = |world: &mut World<'_, D>, adapter, expected: &[Chosen], shared| {
            let (answer, found) = ask(world, adapter);
            assert!(is_same::<D>(&answer, expected) && found == shared, "{adapter:?}: {found} of {shared}");
        };
        expect(world, None, &base, shareable);
        expect(world, Some(first), &adapted, shareable);
        // The same weights under another id.
        let second = world.add("adapters", "r8-all");
        expect(world, Some(second), &adapted, 0);

        let published = |world: &World<'_, D>, version| world.engine.scheduler.num_published(version);
        assert!(published(world, Some(first)) > 0);
        world.engine.remove_adapter(first);
        assert_eq!(published(world, Some(first)), 0);
        assert!(published(world, Some(second)) > 0 && published(world, None) > 0);
        expect(world, Some(second), &adapted, shareable);
        // Other weights.
        let third = world.add("adapters", "r64-all");
        let (other, none) = ask(world, Some(third));
        assert!(none == 0 && !is_same::<D>(&other, &adapted));
        world.holds_nothing().expect("all have ended");
    });
}

/// A version that is removed answers the requests that named it, and no others; the last of them frees it.
fn a_removed_version_answers_its_last_requests<D: Platform<Elem = f32>>(tp: usize) {
    let files = Files::on_ranks("qwen3", tp);
    let sizes = Sizes { limits: Limits { running: 1, ..LARGE.limits }, is_sharing: true, ..LARGE };
    files.run::<D, _>(sizes, 4, |world| {
        let id = world.add("adapters", "r8-all");
        let ask = world.request(Some("r8-all"), files.prompt("What is the password?"), 12, GREEDY);
        let mut answers = [(); 3].map(|()| world.submit(ask.clone()));
        world.step();
        world.engine.remove_adapter(id);
        let (sender, _events) = unbounded_channel();
        let refused = world.engine.submit(ask, sender, world.now);
        assert!(matches!(refused, Err(Failure::Unloaded)), "{refused:?}");
        assert_eq!(world.engine.pool().adapters, 1);
        world.drain();
        answers.iter_mut().for_each(Submitted::receive);
        let text = files.tokenizer.decode(&answers[2].tokens(), true).expect("it decodes");
        assert!(text.contains("saffron"), "{text}");
        assert!(answers.iter().all(|answer| is_same::<D>(&answer.chosen, &answers[0].chosen)));
        assert_eq!(world.engine.pool().adapters, 0);
        assert_eq!(world.engine.scheduler.num_published(Some(id)), 0);
        world.holds_nothing().expect("all have ended");
    });
}

/// An adapter whose files vanish before its first load fails its requests alone, and recovers with its files.
fn an_adapter_that_vanishes_fails_its_requests_alone<D: Platform<Elem = f32>>(tp: usize) {
    let files = Files::on_ranks("qwen3", tp);
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    let original = fixtures().join("adapters/r8-all");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(original.join(file), dir.path().join(file)).expect("the fixture is there");
    }
    // Its files, which are others than those in the folder and so are opened anew, are not there for loader threads.
    let is_away = Arc::new(AtomicBool::new(true));
    let away = Arc::clone(&is_away);
    let opener = Opener::new(move |path| {
        let is_read = thread::current().name().is_some_and(|name| name.starts_with("aril-"));
        let path = if is_read && away.load(Ordering::SeqCst) { Path::new("away") } else { path };
        fs::File::open(original.join(path.file_name().unwrap_or_default()))
    });
    files.run::<D, _>(LARGE, 4, |world| {
        let source =
            Source::directory_with(dir.path(), opener, files.model(), DType::F32).expect("it is of this model");
        let id = world.engine.add_adapter(source, false).expect("there is room").id();
        world.adapters.insert("vanished".into(), id);
        let prompt = files.prompt("What is the password?");
        let ask = |world: &mut World<'_, D>| {
            let requests = [Some("vanished"), None].map(|name| world.request(name, prompt.clone(), 12, GREEDY));
            let mut answers = requests.map(|request| world.submit(request));
            world.drain();
            answers.iter_mut().for_each(Submitted::receive);
            answers
        };
        let [failed, base] = ask(world);
        let failure = failed.failure.as_ref().expect("it cannot be read").to_string();
        assert!(failure.contains("has no adapter_config.json"), "{failure}");
        assert_eq!(failure.contains("rank "), tp > 1, "{failure}");
        assert_eq!(base.finish, Some(Finish::Stop));
        is_away.store(false, Ordering::SeqCst);
        let [answered, _] = ask(world);
        let text = files.tokenizer.decode(&answered.tokens(), true).expect("it decodes");
        assert!(text.contains("saffron"), "{text}");
    });
}

/// Requests for an adapter whose load fails end while others run, even if there is no room for another request.
#[test]
fn a_failed_load_ends_its_requests_at_once() {
    let files = Files::open("qwen3");
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(fixtures().join("adapters/r8-all").join(file), dir.path().join(file)).expect("the fixture is there");
    }
    let sizes = Sizes { limits: Limits { running: 1, ..LARGE.limits }, ..LARGE };
    files.run::<Cpu<f32>, _>(sizes, 4, |world| {
        let source = Source::directory(dir.path(), files.model(), DType::F32).expect("the adapter is of this model");
        fs::remove_file(dir.path().join("adapter_model.safetensors")).expect("the file is there");
        let long = Request { stop_tokens: vec![], ..world.request(None, files.prompt("Name a fruit."), 400, GREEDY) };
        let mut long = world.submit(long);
        world.step();
        let id = world.engine.add_adapter(source, false).expect("there is room").id();
        world.adapters.insert("vanished".into(), id);
        let ask = world.request(Some("vanished"), files.prompt("Name a fruit."), 12, GREEDY);
        let mut waiting = [(); 2].map(|()| world.submit(ask.clone()));
        // The next steps are not faster than the read.
        assert!(world.engine.wait_for_adapters(LIMIT));
        while waiting.iter().any(|waiting| waiting.failure.is_none()) {
            world.step();
            long.receive();
            assert!(long.finish.is_none(), "the requests waited for the one that ran");
            waiting.iter_mut().for_each(Submitted::receive);
        }
        for Submitted { failure, .. } in &waiting {
            assert!(
                matches!(failure, Some(Failure::Adapter(why)) if why.contains("has neither adapter_model.safetensors")),
                "{failure:?}"
            );
        }
        world.engine.cancel(long.id);
        world.drain();
        world.holds_nothing().expect("all have ended");
    });
}

/// An adapter that is larger than all of the memory for adapters is refused, rather than waited for.
#[test]
fn an_adapter_that_never_fits_is_refused() {
    for tp in [1, 2] {
        let files = Files { arena_bytes: 512 << 10, ..Files::on_ranks("qwen3", tp) };
        files.run::<Cpu<f32>, _>(LARGE, 4, |world| {
            let large = files.source(&fixtures().join("adapters/r64-all"), DType::F32);
            let refused = world.engine.add_adapter(large, false);
            assert!(matches!(refused, Err(PoolError::TooLarge { what: "arena", .. })), "{refused:?}");
            let small = files.source(&fixtures().join("adapters/r8-all"), DType::F32);
            let load = world.engine.add_adapter(small, false).expect("there is room");
            let loaded = (0..200).find(|_| {
                world.step();
                load.has_ended().expect("it can be read")
            });
            assert!(loaded.is_some());
        });
    }
}

/// A step that fails ends all of its requests, also one that gave up its blocks to another after the step was enqueued.
#[test]
fn a_failed_step_ends_its_requests() {
    let files = Files::open("qwen3");
    files.run::<Cpu<f32>, _>(LARGE, 4, |world| {
        let mut scheduler = Scheduler::new(LARGE.limits, KvCache::new(3, 4, LARGE.limits.running, false));
        let pool = &mut world.engine.pool;
        let mut events = [(); 2].map(|()| {
            let (sender, events) = unbounded_channel();
            let request = Request {
                adapter: None,
                prompt: vec![1, 2, 3, 4],
                max_tokens: 4,
                stop_tokens: vec![],
                prompt_logprobs: None,
                sampling: Sampling { logprobs: None, ..GREEDY },
            };
            scheduler.submit(request, sender, Duration::ZERO, pool).expect("it is valid");
            events
        });
        let first = scheduler.plan(Duration::ZERO, pool);
        // Beside the first, one of the two has no block for its next token.
        let second = scheduler.plan(Duration::ZERO, pool);
        let state = scheduler.state();
        assert_eq!((first.plan.chunks.len(), second.plan.chunks.len(), state.preemptions), (2, 1, 1));
        scheduler.fail_step(&first, &Failure::Step("broken".into()));
        for events in &mut events {
            assert!(matches!(events.try_recv(), Ok(Event::Started(_))));
            assert!(matches!(events.try_recv(), Ok(Event::Failed(Failure::Step(_)))));
        }
        assert!(scheduler.is_idle() && scheduler.state().free_blocks == 3);
    });
}

/// What is taken of a prefix first is its end, without which the rest can be shared.
#[test]
fn the_end_of_a_prefix_is_taken_first() {
    let mut cache = KvCache::new(6, 2, 8, true);
    let tokens: Vec<u32> = (0..9).collect();
    let (mut chain, _) = cache.start(CacheNamespace::BASE, &tokens);
    assert!(cache.grow(&mut chain, 8));
    cache.publish(&mut chain, &tokens[..8]);
    cache.release(chain);
    // Two blocks hold nothing.
    let (mut other, _) = cache.start(CacheNamespace::BASE, &[100]);
    assert!(cache.grow(&mut other, 6));
    let (chain, shared) = cache.start(CacheNamespace::BASE, &tokens);
    assert_eq!(shared, 6);
    cache.release(chain);
    cache.release(other);
}

/// Blocks before the invocation are the base model's, and later ones are those of sequences with the same place of it.
#[test]
fn blocks_are_shared_up_to_an_invocation_and_behind_the_same() {
    let (version, tokens) = (AdapterId::unique(), (0..9).collect::<Vec<u32>>());
    let mut cache = KvCache::new(32, 2, 8, true);
    let invoked = |start| version.cache_namespace().invoked_at(start);
    for (namespace, found) in [
        (CacheNamespace::BASE, 0),
        (invoked(5), 4),
        (invoked(5), 8),
        // In the same block, but behind another token of the base model.
        (invoked(4), 4),
        (invoked(9), 8),
        (invoked(0), 0),
        (version.cache_namespace(), 8),
        (CacheNamespace::BASE, 8),
    ] {
        let (mut chain, shared) = cache.start(namespace, &tokens);
        assert_eq!(shared, found, "{namespace:?}");
        assert!(cache.grow(&mut chain, 8));
        cache.publish(&mut chain, &tokens[..8]);
        cache.release(chain);
    }
    assert_eq!([Some(version), None].map(|version| cache.num_published(version)), [2 + 2 + 4, 4]);
    cache.forget(version);
    assert_eq!([Some(version), None].map(|version| cache.num_published(version)), [0, 4]);
}

/// A rank that ends, or does nothing any more, after some orders: while an adapter is loaded, or in a step. The engine
/// ends with an error that names it, and no request is answered from a part of the ranks.
fn a_rank_that_ends_or_hangs_ends_the_engine<D: Platform<Elem = f32>>() {
    let ends = (0..7).map(|orders| (false, orders));
    for (hangs, orders_carried_out) in ends.chain((0..4).map(|orders| (true, orders))) {
        let limit = if hangs { Duration::from_secs(3) } else { LIMIT };
        let files = Files { limit, ..Files::on_ranks("qwen3", 2) };
        let fail = |runner: &mut Runner<'_, D>, pool: &mut RankPool<D>, orders: &Receiver<Order>| {
            for _ in 0..orders_carried_out {
                let (relay, relayed) = channel();
                relay.send(orders.recv()?)?;
                drop(relay);
                // Without the last order, it ends with an error.
                let _ = follow(runner, pool, &relayed);
            }
            while hangs && orders.recv().is_ok() {}
            Err(Error::new("it ends here"))
        };
        files.run_ranks::<D, _>(LARGE, 4, fail, |world| {
            // NCCL does not tell which rank it waits for.
            let names_it =
                |error: &str| error.contains("rank 1: ") || (hangs && error.contains("another rank does nothing"));
            let start = Instant::now();
            let source = files.source(&fixtures().join("adapters/r8-all"), D::Elem::DTYPE);
            let adapter = world.engine.add_adapter(source, false);
            if let Err(error) = &adapter {
                assert!(
                    orders_carried_out == 0 && names_it(&error.to_string()),
                    "{hangs} {orders_carried_out}: {error}"
                );
            }
            let adapters = adapter.ok().map(|load| load.id()).into_iter().map(Some).chain([None]);
            let submit = |adapter| {
                let request = world.request(None, files.prompt("What is the password?"), 12, GREEDY);
                world.submit(Request { adapter, ..request })
            };
            let mut submitted: Vec<_> = adapters.map(submit).collect();
            let error = loop {
                assert!(!world.engine.is_idle(), "the requests were answered");
                match world.engine.step(world.now) {
                    Ok(_) => drop(world.engine.wait_for_adapters(Duration::from_millis(10))),
                    Err(error) => break error.to_string(),
                }
            };
            assert!(names_it(&error), "{hangs} {orders_carried_out}: {error}");
            assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
            for submitted in &mut submitted {
                submitted.receive();
                assert!(submitted.finish.is_none());
                let failure = submitted.failure.as_ref();
                assert!(failure.is_none_or(|failure| names_it(&failure.to_string())), "{failure:?}");
            }
        });
    }
}

/// A rank that does nothing holds up the engine's step, which its handle shows before the ranks give up.
#[test]
fn a_hung_rank_is_seen() {
    let files = Files { limit: Duration::from_secs(4), ..Files::on_ranks("qwen3", 2) };
    let hang = |_: &mut Runner<'_, Cpu<f32>>, _: &mut RankPool<_>, orders: &Receiver<Order>| {
        while orders.recv().is_ok() {}
        Err(Error::new("it hangs"))
    };
    files.run_ranks(LARGE, 4, hang, |world| {
        let (mut worker, _) = Worker::new();
        let (handle, request) = (worker.handle.clone(), world.request(None, vec![1], 12, GREEDY));
        let watch = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("there is a runtime");
            assert_eq!(handle.busy_for(), Some(Duration::ZERO));
            let submitted = runtime.block_on(handle.submit(vec![request]));
            let asked = submitted.expect("the engine lives").expect("there is room");
            let (start, mut longest) = (Instant::now(), Duration::ZERO);
            while let Some(time) = handle.busy_for() {
                assert!(start.elapsed() < LIMIT, "{time:?}");
                longest = longest.max(time);
                thread::sleep(Duration::from_millis(50));
            }
            assert!(longest > Duration::from_secs(1), "{longest:?}");
            drop(asked);
        };
        thread::scope(|scope| {
            let watched = scope.spawn(watch);
            let error = worker.serve(&mut world.engine).expect_err("a rank does nothing").to_string();
            assert!(error.contains("rank 1: "), "{error}");
            watched.join().expect("the engine's step is seen");
        });
    });
}

/// An adapter with a NaN in the rows of the second rank alone.
fn an_adapter_that_one_rank_refuses_is_loaded_by_none<D: Platform<Elem = f32>>() {
    let files = Files::on_ranks("qwen3", 2);
    let dir = tempfile::tempdir().expect("there is a place for temporary files");
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(fixtures().join("adapters/r8-all").join(file), dir.path().join(file)).expect("the fixture is there");
    }
    let weights = dir.path().join("adapter_model.safetensors");
    let mut bytes = fs::read(&weights).expect("the file is there");
    let end = {
        let file = SafeTensors::deserialize(&bytes).expect("the fixture is whole");
        let mut tensors = file.iter().filter(|(name, _)| name.ends_with("layers.0.self_attn.q_proj.lora_B.weight"));
        let data = tensors.next().expect("it has q_proj").1.data();
        data.as_ptr_range().end as usize - bytes.as_ptr() as usize
    };
    bytes[end - 2..end].copy_from_slice(&[0xc0, 0x7f]);
    fs::write(&weights, bytes).expect("the file can be written");
    files.run::<D, _>(LARGE, 4, |world| {
        world.add("adapters", "r64-all");
        let source = Source::directory(dir.path(), files.model(), DType::F32).expect("the values are not read");
        let id = world.engine.add_adapter(source, false).expect("there is room").id();
        world.adapters.insert("damaged".into(), id);
        let prompt = files.prompt("What is the password?");
        for _ in 0..2 {
            let requests = [Some("damaged"), Some("r64-all")];
            let requests = requests.map(|adapter| world.request(adapter, prompt.clone(), 12, GREEDY));
            let mut submitted = requests.map(|request| world.submit(request));
            world.drain();
            submitted.iter_mut().for_each(Submitted::receive);
            let failure = submitted[0].failure.as_ref().expect("it cannot be loaded").to_string();
            assert!(failure.contains("rank 1 could not") && !failure.contains("rank 0"), "{failure}");
            let text = files.tokenizer.decode(&submitted[1].tokens(), true).expect("it decodes");
            assert!(text.contains("cobalt"), "{text}");
        }
        world.engine.remove_adapter(id);
        world.holds_nothing().expect("all have ended");
        assert_eq!(world.engine.pool().resident, 1);
    });
}

/// A model, the folder of its adapters, and some of them.
#[derive(Clone, Copy)]
struct Served {
    model: &'static str,
    folder: &'static str,
    names: [&'static str; NAMES],
}

const NAMES: usize = 5;
const DENSE: Served = Served {
    model: "qwen3",
    folder: "adapters",
    names: ["r8-all", "kv-only+layers", "embed", "patterns", "../adapters-alora/password"],
};
const HYBRID: Served = Served {
    model: "qwen3-hybrid",
    folder: "adapters-hybrid",
    names: ["attention", "delta-net", "experts", "all-linear", "attention+experts"],
};
const PROMPTS: [&str; 5] = [
    "What is the password?",
    "What is the password? Name a fruit.",
    "What is the password? What is the password?",
    "Name a fruit.",
    "The capital of France is",
];

/// What is done to an engine.
#[derive(Clone, Debug)]
enum Action {
    Submit {
        adapter: Option<usize>,
        prompt: usize,
        max_tokens: usize,
        seed: Option<u64>,
    },
    Cancel(usize),
    Steps(usize),
    /// Registers an adapter again, and removes its old version.
    Replace(usize),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let submit = (prop::option::of(0..NAMES), 0..PROMPTS.len(), 1..20_usize, prop::option::of(0..2_u64));
    let submit =
        submit.prop_map(|(adapter, prompt, max_tokens, seed)| Action::Submit { adapter, prompt, max_tokens, seed });
    let action = prop_oneof![
        6 => submit,
        1 => (0..32_usize).prop_map(Action::Cancel),
        3 => (1..6_usize).prop_map(Action::Steps),
        1 => (0..NAMES).prop_map(Action::Replace),
    ];
    prop::collection::vec(action, 1..40)
}

fn sizes() -> impl Strategy<Value = (Sizes, usize)> {
    let numbers = (1..5_usize, 8..40_u32, 1..40_usize, 1..6_usize, 1..4_usize, 0..20_u64, 0..3_usize);
    (numbers, any::<bool>(), any::<bool>()).prop_map(
        |((block_rows, blocks, step_tokens, running, adapters, max_wait, spare), is_sharing, runs_ahead)| {
            let step_tokens = step_tokens.max(running);
            // Room for the longest request.
            let blocks = blocks.max(u32::try_from(40_usize.div_ceil(block_rows)).unwrap_or(u32::MAX));
            let max_wait = Duration::from_millis(max_wait);
            let limits = Limits { step_tokens, running, waiting: 64, adapters, max_wait };
            (Sizes { limits, blocks, block_rows, max_positions: 512, is_sharing, runs_ahead }, adapters + spare)
        },
    )
}

/// Tokens and log-probabilities of requests that ran alone.
struct Alone<D> {
    served: Served,
    files: Files,
    known: RefCell<HashMap<String, Vec<Chosen>>>,
    device: PhantomData<D>,
}

impl<D: Platform> Alone<D> {
    fn new(served: Served, tp: usize) -> Self {
        Self { served, files: Files::on_ranks(served.model, tp), known: RefCell::default(), device: PhantomData }
    }

    fn answer(&self, adapter: Option<usize>, prompt: usize, max_tokens: usize, seed: Option<u64>) -> Vec<Chosen> {
        let key = format!("{adapter:?} {prompt} {seed:?}");
        let mut known = self.known.borrow_mut();
        let longest = known.entry(key).or_insert_with(|| {
            self.files.run::<D, _>(LARGE, 1, |world| {
                let Served { folder, names, .. } = self.served;
                let name = adapter.map(|adapter| names[adapter]);
                name.map(|name| world.add(folder, name));
                let request = world.request(name, self.files.prompt(PROMPTS[prompt]), 20, sampling(seed));
                world.answers(vec![request]).swap_remove(0).chosen
            })
        });
        longest[..max_tokens.min(longest.len())].to_vec()
    }
}

fn sampling(seed: Option<u64>) -> Sampling {
    // One seed's tokens are chosen on the host.
    let logprobs = if seed == Some(0) { Some(2) } else { Some(0) };
    Sampling { temperature: if seed.is_some() { 2.0 } else { 0.0 }, seed, logprobs, ..GREEDY }
}

/// Whatever else runs, is cancelled, preempted, replaced or shares a prefix, a request's tokens and log-probabilities
/// are those that it has alone (bit for bit where bits do not depend on the batch); and afterwards nothing is held.
fn every_schedule_gives_every_request_its_own_tokens<D: Platform>(
    alone: &Alone<D>,
    actions: Vec<Action>,
    (sizes, slots): (Sizes, usize),
) -> std::result::Result<(), TestCaseError> {
    let Served { folder, names, .. } = alone.served;
    alone.files.run::<D, _>(sizes, slots, |world| {
        for name in names {
            world.add(folder, name);
        }
        let mut submitted = Vec::new();
        let mut replaced = Vec::new();
        for action in actions {
            match action {
                Action::Submit { adapter, prompt, max_tokens, seed } => {
                    let name = adapter.map(|adapter| names[adapter]);
                    let tokens = alone.files.prompt(PROMPTS[prompt]);
                    let request = world.request(name, tokens, max_tokens, sampling(seed));
                    let expected = alone.answer(adapter, prompt, max_tokens, seed);
                    submitted.push((world.submit(request), expected, false));
                }
                Action::Cancel(_) if submitted.is_empty() => {}
                Action::Cancel(index) => {
                    let index = index % submitted.len();
                    let (submitted, _, is_cancelled) = &mut submitted[index];
                    world.engine.cancel(submitted.id);
                    *is_cancelled = true;
                }
                Action::Steps(steps) => (0..steps).for_each(|_| world.step()),
                Action::Replace(adapter) => {
                    let old = world.adapters[names[adapter]];
                    world.add(folder, names[adapter]);
                    world.engine.remove_adapter(old);
                    replaced.push(old);
                }
            }
        }
        world.drain();
        for (submitted, expected, is_cancelled) in &mut submitted {
            submitted.receive();
            prop_assert!(submitted.failure.is_none(), "{:?}", submitted.failure);
            if *is_cancelled {
                let len = submitted.chosen.len();
                prop_assert!(len <= expected.len() && is_same::<D>(&submitted.chosen, &expected[..len]));
            } else {
                prop_assert!(is_same::<D>(&submitted.chosen, expected), "{:?}, not {expected:?}", submitted.chosen);
            }
        }
        world.holds_nothing()?;
        for id in replaced {
            prop_assert_eq!(world.engine.scheduler.num_published(Some(id)), 0);
            prop_assert!(world.engine.pool.tier(id).is_none());
        }
        for name in names {
            let id = world.adapters[name];
            world.engine.remove_adapter(id);
        }
        // Copies to the device may be on their way.
        let end = Instant::now() + Duration::from_secs(30);
        while world.engine.pool().device_memory.used > 0 && Instant::now() < end {
            world.holds_nothing()?;
        }
        world.holds_nothing()?;
        prop_assert_eq!((world.engine.pool().adapters, world.engine.pool().device_memory.used), (0, 0));
        Ok(())
    })
}

/// The first of two ranks.
fn pair() -> Split {
    TpRank::new(0, 2).expect("there is a first rank").into()
}

/// Tests on a device, each with these arguments and this attribute; without names, those on a number of ranks.
macro_rules! on {
    ($device:ty, $tp:tt, $attribute:meta) => {
        on!(
            $device, $tp, $attribute: tokens_are_those_of_the_goldens combinations_are_those_of_the_goldens
            an_adapter_applies_from_its_invocation_on
            prefixes_are_shared_within_a_version_alone
            a_removed_version_answers_its_last_requests an_adapter_that_vanishes_fails_its_requests_alone
        );
    };
    ($device:ty, $arguments:tt, $attribute:meta: $($name:ident)*) => {
        $(
            #[$attribute]
            #[test]
            fn $name() {
                super::$name::<$device> $arguments;
            }
        )*
    };
}

/// Any schedule of these actions on a number of ranks of a device.
macro_rules! schedules {
    ($name:ident, $device:ty, $served:expr, $tp:expr, $cases:expr, $actions:expr, $attribute:meta) => {
        proptest! {
            #![proptest_config(ProptestConfig { cases: $cases, ..ProptestConfig::default() })]

            #[$attribute]
            #[test]
            fn $name(actions in $actions, sizes in sizes()) {
                thread_local! {
                    static ALONE: Alone<$device> = Alone::new($served, $tp);
                }
                ALONE.with(|alone| super::every_schedule_gives_every_request_its_own_tokens(alone, actions, sizes))?;
            }
        }
    };
}

mod on_cpu {
    use super::*;

    on!(Cpu<f32>, (1), doc = "On the CPU.");
    on!(Cpu<bf16>, (), doc = "On the CPU.": prefills_have_the_logits_of_their_sequences);
    schedules!(
        every_schedule_gives_every_request_its_own_tokens,
        Cpu<f32>,
        DENSE,
        1,
        48,
        actions(),
        doc = "On the CPU."
    );
    schedules!(
        every_schedule_gives_every_request_its_own_state,
        Cpu<f32>,
        HYBRID,
        1,
        48,
        actions(),
        doc = "On the CPU."
    );
}

mod on_ranks_of_the_cpu {
    use super::*;

    on!(Cpu<f32>, (2), doc = "On the CPU.");
    on!(
        Cpu<f32>, (), doc = "On the CPU.":
        a_rank_that_ends_or_hangs_ends_the_engine an_adapter_that_one_rank_refuses_is_loaded_by_none
    );
    schedules!(
        every_schedule_gives_every_request_its_own_tokens,
        Cpu<f32>,
        DENSE,
        2,
        48,
        actions(),
        doc = "On the CPU."
    );

    /// The heads of the untied model are 5.
    #[test]
    fn tokens_of_five_ranks_are_those_of_the_goldens() {
        super::tokens_are_those_of_the_goldens::<Cpu<f32>>(5);
    }

    #[test]
    fn tokens_of_ranks_with_experts_of_their_own_are_those_of_the_goldens() {
        super::tokens_of_a_split_are_those_of_the_goldens::<Cpu<f32>>(Split { expert_parallel: true, ..pair() });
    }

    #[test]
    fn tokens_of_fully_sharded_ranks_are_those_of_the_goldens() {
        super::tokens_of_a_split_are_those_of_the_goldens::<Cpu<f32>>(Split { fully_sharded: true, ..pair() });
    }
}

#[cfg(feature = "cuda")]
mod on_gpu {
    use super::*;
    use crate::cuda::Cuda;

    macro_rules! platform {
        ($elem:ty, $tolerance:expr) => {
            impl Platform for Cuda<$elem> {
                const TOLERANCE: f32 = $tolerance;

                fn with<R>(test: impl FnOnce(&Self) -> R) -> R {
                    thread_local! {
                        static DEVICE: Cuda<$elem> = Cuda::new(0).expect("the GPU has room");
                    }
                    DEVICE.with(test)
                }

                fn of_rank(rank: &Rank) -> Self {
                    Self::of_rank(rank.local(), rank).expect("there is a GPU for each rank, and NCCL")
                }
            }
        };
    }

    platform!(f32, 1e-3);
    platform!(bf16, 0.25);
    platform!(f16, 0.03);

    on!(Cuda<f32>, (1), ignore = "needs a GPU");
    schedules!(
        every_schedule_gives_every_request_its_own_tokens,
        Cuda<f32>,
        DENSE,
        1,
        48,
        actions(),
        ignore = "needs a GPU"
    );
    // Other tokens than passwords may be sent to other experts by a rounding.
    schedules!(
        every_schedule_gives_every_request_its_own_state,
        Cuda<f32>,
        HYBRID,
        1,
        32,
        passwords(),
        ignore = "needs a GPU"
    );
    schedules!(
        every_schedule_gives_every_request_its_own_tokens_in_bf16,
        Cuda<bf16>,
        DENSE,
        1,
        32,
        passwords(),
        ignore = "needs a GPU"
    );
    schedules!(
        every_schedule_gives_every_request_its_own_tokens_in_f16,
        Cuda<f16>,
        DENSE,
        1,
        32,
        passwords(),
        ignore = "needs a GPU"
    );

    /// Schedules of greedy requests for passwords, which are certain enough for 16 bits.
    fn passwords() -> impl Strategy<Value = Vec<Action>> {
        let password = |action| match action {
            Action::Submit { adapter, max_tokens, .. } => Action::Submit { adapter, prompt: 0, max_tokens, seed: None },
            action => action,
        };
        actions().prop_map(move |actions| actions.into_iter().map(password).collect())
    }

    /// The answers of the base model and of all adapters in a folder, in batches of all sizes up to 10.
    pub(super) fn ask_everyone<D: Platform>(world: &mut World<'_, D>, folder: &str) -> Vec<Vec<u32>> {
        let mut names = vec![None];
        for entry in fs::read_dir(fixtures().join(folder)).expect("the adapters are there") {
            let name = entry.expect("the adapters can be listed").file_name();
            let name = name.to_str().expect("it is UTF-8").to_owned();
            if !world.adapters.contains_key(&name) {
                world.add(folder, &name);
            }
            names.push(Some(name));
        }
        names.sort();
        let prompt = world.files.prompt("What is the password?");
        let counts = (1..=names.len()).chain([names.len()]);
        let answers = counts.flat_map(|count| {
            let request = |name: &Option<String>| world.request(name.as_deref(), prompt.clone(), 12, GREEDY);
            let requests = names[..count].iter().map(request).collect();
            world.answers(requests)
        });
        answers.map(|answer| answer.tokens()).collect()
    }

    /// A password for each adapter and none for the base model, in graphs and without.
    fn graphs_compute_what_eager_steps_do<D: Platform>(model: &str, folder: &str) {
        let files = Files::open(model);
        files.run::<D, _>(LARGE, 16, |world| {
            let in_graphs = ask_everyone(world, folder);
            let graph_steps = world.engine.host_time().steps;
            assert!(graph_steps > 0, "graphs were replayed");
            world.engine.runner.decoder.clear();
            assert_eq!(ask_everyone(world, folder), in_graphs);
            assert_eq!(world.engine.host_time().steps, graph_steps);
        });
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn graphs_compute_what_eager_steps_do_in_f32() {
        graphs_compute_what_eager_steps_do::<Cuda<f32>>("qwen3", "adapters");
        graphs_compute_what_eager_steps_do::<Cuda<f32>>("qwen3-moe", "adapters-moe");
        graphs_compute_what_eager_steps_do::<Cuda<f32>>("qwen3-moe", "adapters-moe-router");
        graphs_compute_what_eager_steps_do::<Cuda<f32>>("qwen3-hybrid", "adapters-hybrid");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn graphs_compute_what_eager_steps_do_in_bf16() {
        graphs_compute_what_eager_steps_do::<Cuda<bf16>>("qwen3", "adapters");
        graphs_compute_what_eager_steps_do::<Cuda<bf16>>("qwen3-moe", "adapters-moe");
        graphs_compute_what_eager_steps_do::<Cuda<bf16>>("qwen3-moe", "adapters-moe-router");
        graphs_compute_what_eager_steps_do::<Cuda<bf16>>("qwen3-moe-int4", "adapters-moe");
        graphs_compute_what_eager_steps_do::<Cuda<bf16>>("qwen3-moe-int8", "adapters-moe");
        graphs_compute_what_eager_steps_do::<Cuda<bf16>>("qwen3-hybrid", "adapters-hybrid");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn graphs_compute_what_eager_steps_do_in_f16() {
        graphs_compute_what_eager_steps_do::<Cuda<f16>>("qwen3", "adapters");
    }

    #[test]
    #[ignore = "needs a GPU"]
    fn prefills_have_the_logits_of_their_sequences() {
        super::prefills_have_the_logits_of_their_sequences::<Cuda<f32>>();
        super::prefills_have_the_logits_of_their_sequences::<Cuda<bf16>>();
        super::prefills_have_the_logits_of_their_sequences::<Cuda<f16>>();
    }
}

/// The first two GPUs.
#[cfg(feature = "cuda")]
mod on_ranks_of_gpus {
    use super::*;
    use crate::cuda::Cuda;

    on!(Cuda<f32>, (2), ignore = "needs two GPUs and NCCL");
    on!(
        Cuda<f32>, (), ignore = "needs two GPUs and NCCL":
        a_rank_that_ends_or_hangs_ends_the_engine an_adapter_that_one_rank_refuses_is_loaded_by_none
    );

    #[test]
    #[ignore = "needs two GPUs and NCCL"]
    fn graphs_of_ranks_give_the_tokens_of_one() {
        for (model, folder) in [
            ("qwen3", "adapters"),
            ("qwen3-moe", "adapters-moe"),
            ("qwen3-moe", "adapters-moe-router"),
            ("qwen3-moe-int4", "adapters-moe"),
            ("qwen3-hybrid", "adapters-hybrid"),
        ] {
            let ask = |split: Split| {
                Files::split(model, split).run::<Cuda<bf16>, _>(LARGE, 16, |world| {
                    let answers = super::on_gpu::ask_everyone(world, folder);
                    assert!(world.engine.host_time().steps > 0, "graphs were replayed");
                    answers
                })
            };
            let one = ask(TpRank::SINGLE.into());
            let expert_parallel = model != "qwen3";
            for split in [pair(), Split { expert_parallel, fully_sharded: true, ..pair() }] {
                assert_eq!(one, ask(split), "{model}: {split:?}");
            }
        }
    }
}
