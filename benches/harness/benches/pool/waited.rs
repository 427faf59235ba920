//! Steps of a host that waits for each of them, beside each part of a load. The GPU is idle when a step begins, so that
//! all that the host enqueues for it takes time of the step. Three events time all steps.
//!
//! | column | is |
//! |---|---|
//! | routed | *once* for all steps, *updated* with `Routing::update` in each, or *copied* and `update_on_device` |
//! | step | the time on the host from the update until the replay has ended |
//! | update, call, wait | its parts on the host: the update, the call that replays, the wait for the stream |
//! | before, graph | its parts on the device: up to the graph, and the graph |
//! | late | steps that ended on the host more than 0.1 ms later than on the device, and the most µs |
//! | queued | the most µs that the system let the host's thread wait for a core in a step, if it says so |
//! | longest | the longest parts of the runs beside the steps |
//! | slowest | the two slowest steps, the time since the work began, and the part of a run that each was beside |

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    time::{Duration, Instant},
};

use aril::{
    cuda::{Buffer, Graph, PinnedBuffer, RoutedBatch, WeightTable, Workspace},
    routing::Batch,
};
use aril_bench::{
    Result,
    device::{Event, Gpu},
};

use crate::{
    beside::{Make, Runs, Setup, Span, run_beside},
    neighbours::Captured,
    stalls::percentiles,
};

const WARM_UP: usize = 200;
/// The steps beside one work end after this time.
const MOST: Duration = Duration::from_secs(4);
/// Parts and steps that a row names.
const NAMED: usize = 2;
/// Of a step that ends late on the host, in µs.
const LATE: f64 = 100.0;

#[derive(Clone, Copy, Debug)]
enum Routed {
    Once,
    Updated,
    Copied,
}

pub(crate) fn measure(
    gpu: &Gpu,
    setup: &Setup<'_>,
    captured: &mut Captured,
    works: impl Iterator<Item = (&'static str, Make)>,
    steps: usize,
) -> Result<()> {
    let mut host = Host::new(gpu, setup.weights, captured)?;
    host.steps(Routed::Updated, WARM_UP)?;
    println!(
        "| beside | routed | runs | ms a run | step p50 | p99 | max | update p50 | p99 | max | call p50 | p99 | max | \
         before p50 | p99 | max | graph p50 | p99 | max | late | most | queued | longest | slowest |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, make) in works {
        for routed in [Routed::Updated, Routed::Copied, Routed::Once] {
            // One that fails leaves the others.
            match make(setup).and_then(|work| run_beside(work, || host.steps(routed, steps))) {
                Ok((timed, beside)) => println!("{}", row(name, routed, &timed, &beside)),
                Err(error) => println!("| {name} | {routed:?} | {error} |"),
            }
        }
    }
    println!();
    Ok(())
}

/// A host that replays a captured step.
struct Host<'a> {
    gpu: &'a Gpu,
    weights: &'a WeightTable,
    captured: &'a mut Captured,
    /// Before the update, behind it, and behind the replay.
    events: [Event; 3],
    /// The slots on the host and on the device.
    slots: (PinnedBuffer<i32>, Buffer<i32>),
}

/// When a step began, and its times in µs.
struct Timed {
    start: Instant,
    step: f64,
    update: f64,
    call: f64,
    wait: f64,
    before: f64,
    graph: f64,
    queued: f64,
}

impl<'a> Host<'a> {
    fn new(gpu: &'a Gpu, weights: &'a WeightTable, captured: &'a mut Captured) -> Result<Self> {
        let (queue, count) = (weights.queue(), captured.slots.len());
        let mut slots = (PinnedBuffer::zeros(queue, count)?, Buffer::zeros(queue, count)?);
        slots.0.elements()?.iter_mut().zip(&captured.slots).for_each(|(number, slot)| *number = slot.number());
        Ok(Self { gpu, weights, captured, events: [Event::new()?, Event::new()?, Event::new()?], slots })
    }

    fn steps(&mut self, routed: Routed, steps: usize) -> Result<Vec<Timed>> {
        let Captured { graph, routing, workspace, slots } = &mut *self.captured;
        let mut timer = Timer {
            gpu: self.gpu,
            weights: self.weights,
            graph,
            workspace,
            events: &self.events,
            queued: Queued::new(),
            timed: Vec::new(),
        };
        timer.timed.reserve(steps);
        let ((from, to), batch, begin) = (&mut self.slots, Batch::new(slots), Instant::now());
        let once = match routed {
            Routed::Once => Some(routing.update(&batch)?),
            Routed::Updated | Routed::Copied => None,
        };
        if let Some(batch) = once {
            while timer.timed.len() < steps && begin.elapsed() < MOST {
                let start = timer.start()?;
                timer.replay(start, &batch)?;
            }
            return Ok(timer.timed);
        }
        while timer.timed.len() < steps && begin.elapsed() < MOST {
            let start = timer.start()?;
            let batch = if matches!(routed, Routed::Updated) {
                routing.update(&batch)?
            } else {
                to.enqueue_write(from, slots.len())?;
                routing.update_on_device(&*to, None)?
            };
            timer.replay(start, &batch)?;
        }
        Ok(timer.timed)
    }
}

/// Times steps.
struct Timer<'a> {
    gpu: &'a Gpu,
    weights: &'a WeightTable,
    graph: &'a mut Graph,
    workspace: &'a mut Workspace,
    events: &'a [Event; 3],
    queued: Queued,
    timed: Vec<Timed>,
}

/// What Linux says of the time that this thread has waited for a core.
struct Queued {
    file: Option<File>,
    ns: u64,
}

impl Queued {
    fn new() -> Self {
        let mut queued = Self { file: File::open("/proc/thread-self/schedstat").ok(), ns: 0 };
        queued.us();
        queued
    }

    /// The time since the last call, in µs.
    #[expect(clippy::cast_precision_loss, reason = "a time")]
    fn us(&mut self) -> f64 {
        let mut text = [0; 64];
        let read = self.file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let ns = str::from_utf8(&text[..read]).ok().and_then(|text| text.split(' ').nth(1)?.parse().ok());
        let before = std::mem::replace(&mut self.ns, ns.unwrap_or(0));
        self.ns.saturating_sub(before) as f64 / 1e3
    }
}

impl Timer<'_> {
    /// Starts a step.
    fn start(&self) -> Result<Instant> {
        let start = Instant::now();
        self.events[0].record(&self.gpu.stream)?;
        Ok(start)
    }

    /// Replays the graph for the batch of a step, and waits.
    fn replay(&mut self, start: Instant, batch: &RoutedBatch<'_>) -> Result<()> {
        let [before, updated, replayed] = self.events;
        let us = |start: Instant| start.elapsed().as_secs_f64() * 1e6;
        updated.record(&self.gpu.stream)?;
        let (update, start_call) = (us(start), Instant::now());
        self.graph.replay(&mut self.weights.step(batch, self.workspace)?)?;
        replayed.record(&self.gpu.stream)?;
        let (call, start_wait) = (us(start_call), Instant::now());
        self.gpu.synchronize()?;
        let (step, wait) = (us(start), us(start_wait));
        let (before, graph) = (before.us_until(updated)?, updated.us_until(replayed)?);
        let queued = self.queued.us();
        self.timed.push(Timed { start, step, update, call, wait, before, graph, queued });
        Ok(())
    }
}

impl Timed {
    fn span(&self) -> Span {
        [self.start, self.start + Duration::from_secs_f64(self.step / 1e6)]
    }
}

fn row(name: &str, routed: Routed, timed: &[Timed], beside: &Runs) -> String {
    let of = |us: fn(&Timed) -> f64| percentiles(&timed.iter().map(us).collect::<Vec<_>>());
    let times: [fn(&Timed) -> f64; 5] =
        [|timed| timed.step, |timed| timed.update, |timed| timed.call, |timed| timed.before, |timed| timed.graph];
    let times = times.map(|us| of(us).map(|us| format!("{us:.1}")).join(" | ")).join(" | ");
    let late = |timed: &Timed| timed.step - timed.before - timed.graph;
    let ([.., most_late], [.., queued]) = (of(late), of(|timed| timed.queued));
    let num_late = timed.iter().filter(|timed| late(timed) > LATE).count();
    let mut slowest: Vec<&Timed> = timed.iter().collect();
    slowest.sort_by(|a, b| b.step.total_cmp(&a.step));
    let slowest: Vec<_> = slowest.iter().take(NAMED).map(|timed| place(timed, beside)).collect();
    let mut longest: Vec<_> = beside.parts.0.iter().map(|(name, span)| (ms(*span), name)).collect();
    longest.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let longest: Vec<_> = longest.iter().take(NAMED).map(|(ms, name)| format!("{name} {ms:.2} ms")).collect();
    format!(
        "| {name} | {routed:?} | {} | {:.2} | {times} | {num_late} | {most_late:.0} | {queued:.0} | {} | {} |",
        beside.runs.len(),
        beside.mean_ms(),
        longest.join(", "),
        slowest.join("; "),
    )
}

/// A step's times, and what was beside it.
fn place(timed: &Timed, beside: &Runs) -> String {
    let Timed { step, update, call, wait, before, graph, queued, .. } = timed;
    let since = beside.runs.first().map_or(0.0, |[first, _]| ms([*first, timed.start]));
    let shared = |span: &Span| {
        let [start, end] = timed.span();
        end.min(span[1]).saturating_duration_since(start.max(span[0]))
    };
    let part = beside.parts.0.iter().max_by_key(|(_, span)| shared(span)).filter(|(_, span)| !shared(span).is_zero());
    let part = part.map_or_else(|| "no part".to_owned(), |(name, span)| format!("{name} of {:.2} ms", ms(*span)));
    format!(
        "{step:.0} = {update:.0} + {call:.0} + {wait:.0}, device {before:.0} + {graph:.0}, queued {queued:.0}, at \
         {since:.1} ms, {part}"
    )
}

fn ms([start, end]: Span) -> f64 {
    end.saturating_duration_since(start).as_secs_f64() * 1e3
}
