//! The simulation of serving: its traces, its model of memory, its engine and its policies, by figures that can be added up by hand.

use std::{collections::HashSet, time::Duration};

use aril_bench::{
    record::repository,
    report::percentile,
    serving::{
        Adapter, Aril, Fifo, Hardware, Kind, Memory, Outcome, Policy, Record, Request, SLora, Time, Trace, Vllm, run,
        shown,
    },
};

/// A step takes 100 µs, 1 µs for each token and 10 µs for each adapter; a copy takes 50 µs and a read 1000 µs.
pub(crate) const HARDWARE: Hardware = Hardware {
    slots: 2,
    host_adapters: 3,
    copy_us: 50,
    read_us: 1000,
    step_us: 100,
    adapter_us: 10,
    thousand_tokens_us: 1000,
    thousand_decodes_us: 1000,
    max_requests: 8,
    max_tokens: 100,
};
const TRACE: Trace = Trace { seed: 7, requests: 3000, adapters: 1000, zipf: 1.0, rate: Some(10.0) };
const FOREVER: Duration = Duration::MAX;

pub(crate) fn request(arrival: Time, adapter: Adapter, prompt: usize, output: usize) -> Request {
    Request { arrival, adapter, prompt, output }
}

#[test]
fn a_trace_has_the_distributions_that_it_names() {
    let trace = Trace { requests: 20_000, ..TRACE };
    let requests = trace.draw().unwrap();
    let mean = |of: &dyn Fn(&Request) -> f64| requests.iter().map(of).sum::<f64>() / requests.len() as f64;
    let is_near = |is: f64, expected: f64| assert!((is / expected - 1.0).abs() < 0.05, "{is}, not {expected}");
    is_near(requests[requests.len() - 1].arrival as f64 / 1e6, 2000.0);
    is_near(mean(&|request| request.prompt as f64), 256.0);
    is_near(mean(&|request| request.output as f64), 128.0);
    let harmonic: f64 = (1..=1000).map(|rank| 1.0 / f64::from(rank)).sum();
    for rank in [1, 2, 10] {
        is_near(mean(&|request| f64::from(u8::from(request.adapter == rank))), 1.0 / (f64::from(rank) * harmonic));
    }
    assert!(requests.iter().all(|request| (1..=1000).contains(&request.adapter) && request.output > 0));
    assert!(requests.is_sorted_by_key(|request| request.arrival));
}

#[test]
fn the_rate_moves_requests_and_changes_nothing_else() {
    let requests = TRACE.draw().unwrap();
    assert_eq!(requests, TRACE.draw().unwrap());
    assert_ne!(requests, Trace { seed: 8, ..TRACE }.draw().unwrap());
    let [faster, at_once] = [Some(20.0), None].map(|rate| Trace { rate, ..TRACE }.draw().unwrap());
    for (request, (faster, at_once)) in requests.iter().zip(faster.iter().zip(&at_once)) {
        assert!(request.arrival.abs_diff(2 * faster.arrival) <= 2 && at_once.arrival == 0);
        assert_eq!(Request { arrival: 0, ..*request }, *at_once);
        assert_eq!(Request { arrival: 0, ..*faster }, *at_once);
    }
}

#[test]
fn reads_and_copies_take_turns() {
    let mut memory = Memory::new(HARDWARE);
    assert!(memory.load(1, 0, &[]) && memory.load(2, 0, &[]));
    // Two reads one after another, and each copy behind its read.
    let ready = |memory: &mut Memory, adapter, times: [Time; 2]| {
        times.map(|time| {
            memory.advance(time);
            memory.is_ready(adapter, time)
        })
    };
    assert_eq!(memory.next_ready(0), Some(1050));
    assert_eq!(ready(&mut memory, 1, [1049, 1050]), [false, true]);
    assert_eq!(memory.next_ready(1050), Some(2050));
    assert_eq!(ready(&mut memory, 2, [2049, 2050]), [false, true]);
    assert_eq!((memory.next_ready(2050), memory.num_loads(), memory.free_slots()), (None, 2, 0));

    // Loaded again from host memory, two take two copies.
    memory.drop_idle(2050, &[]);
    assert!(memory.load(1, 3000, &[]) && memory.load(2, 3000, &[]));
    assert_eq!(ready(&mut memory, 1, [3049, 3050]), [false, true]);
    assert_eq!(ready(&mut memory, 2, [3099, 3100]), [false, true]);
    assert_eq!(memory.num_loads(), 4);
}

#[test]
fn the_least_recently_used_makes_way() {
    let mut memory = Memory::new(HARDWARE);
    assert!(memory.load(1, 0, &[]) && memory.load(2, 0, &[]));
    assert!(!memory.load(3, 100, &[]), "neither has been loaded, so that neither makes way");
    let now = 10_000;
    memory.advance(now);
    assert!(memory.load(1, now, &[]), "it is there");
    assert_eq!(memory.num_loads(), 2);
    assert!(memory.load(3, now, &[]));
    assert!(memory.is_ready(1, now) && !memory.is_ready(2, now), "2 was used before 1");

    let now = 20_000;
    memory.advance(now);
    memory.lease(1);
    assert!(!memory.load(2, now, &[3]), "1 is leased and 3 is kept");
    assert!(memory.load(2, now, &[]));
    assert!(memory.is_ready(1, now) && !memory.is_ready(3, now));
    memory.release(1);
    memory.drop_idle(now, &[1]);
    assert!(memory.is_ready(1, now));
    memory.drop_idle(now, &[]);
    assert!(!memory.is_ready(1, now));
    assert_eq!(memory.free_slots(), 1, "what is being loaded is not dropped");

    // Host memory holds three. The fourth read takes the place of the first.
    let now = 30_000;
    assert!(memory.load(4, now, &[]));
    memory.advance(now + 1050);
    assert!(memory.is_ready(4, now + 1050));
    assert!(memory.load(1, now + 2000, &[]));
    assert_eq!(memory.next_ready(now + 2000), Some(now + 3050), "1 is read again");
}

#[test]
fn one_request_takes_the_time_of_its_loads_and_steps() {
    let requests = [request(500, 1, 250, 3)];
    // A read and a copy; 100, 100 and 50 tokens of the prompt; two more tokens.
    let (load, steps, decode) = (1050, [210, 210, 160], 111);
    let first = load + steps.iter().sum::<Time>();
    let policies: [Box<dyn Policy>; 5] = [
        Box::new(Aril::new(1, 1, FOREVER)),
        Box::new(Fifo::new(1, 1)),
        Box::new(Vllm::new(2)),
        Box::new(SLora::new(2, 100, false)),
        Box::new(SLora::new(2, 100, true)),
    ];
    for mut policy in policies {
        let outcome = run(&requests, HARDWARE, &mut *policy);
        assert_eq!((&outcome.first_token[..], &outcome.last_token[..]), (&[first][..], &[first + 2 * decode][..]));
        assert_eq!(
            (outcome.end, outcome.stalled),
            (500 + first + 2 * decode, load),
            "the wait for a request is no stall"
        );
        assert_eq!((outcome.loads, outcome.max_adapters), (1, 1));
    }
}

/// The order of the first tokens.
fn order(outcome: &Outcome, requests: &[Request]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&number| requests[number].arrival + outcome.first_token[number]);
    order
}

/// With two slots, adapter 3 waits until 1 or 2 leaves. Which of the later requests wait with it is the policy's.
#[test]
fn policies_differ_in_who_waits_for_a_slot() {
    let adapters = [1, 2, 3, 1, 2];
    let requests: Vec<Request> = (0..).zip(adapters).map(|(at, adapter)| request(at, adapter, 10, 20)).collect();
    let order = |policy: &mut dyn Policy| order(&run(&requests, HARDWARE, policy), &requests);
    assert_eq!(order(&mut Fifo::new(2, 1)), [0, 1, 2, 3, 4], "the queue waits behind its head");
    assert_eq!(order(&mut Vllm::new(2)), [0, 1, 3, 4, 2]);
    assert_eq!(order(&mut Aril::new(2, 1, FOREVER)), [0, 3, 1, 4, 2], "adapter 1 is there before adapter 2");
    assert_eq!(order(&mut SLora::new(2, 100, false)), [0, 1, 2, 3, 4]);
    assert_eq!(order(&mut SLora::new(2, 100, true)), [0, 1, 3, 4, 2]);
}

/// Requests for adapter 1 never end. Ours alone bounds how long adapter 2 waits.
#[test]
fn ours_alone_bounds_the_wait_for_a_slot() {
    let hardware = Hardware { slots: 1, max_requests: 4, ..HARDWARE };
    let mut requests: Vec<Request> = (0..200).map(|number| request(500 * number, 1, 10, 20)).collect();
    requests.insert(3, request(1500, 2, 10, 20));
    let wait = |policy: &mut dyn Policy| run(&requests, hardware, policy).first_token[3];
    let longest = 20 * hardware.step(0, 4, 1) + hardware.step(40, 0, 1);
    let max_wait = 5000;
    // Beside the bound of admission: the load, and the steps that begin before the adapter is there and compute the first token.
    let bound = max_wait + 4 * (longest + 200) + 1050 + 400;
    let ours = wait(&mut Aril::new(1, 1, Duration::from_micros(max_wait)));
    assert!(ours > max_wait && ours < bound, "{ours} of {bound}");
    for other in [&mut Vllm::new(1) as &mut dyn Policy, &mut SLora::new(1, 100, true)] {
        let other = wait(other);
        assert!(other > 90_000, "{other}: until the requests for adapter 1 end");
    }
}

#[test]
fn loading_ahead_hides_loads_behind_steps() {
    let requests = [request(0, 1, 10, 50), request(200, 2, 10, 5)];
    let hardware = Hardware { slots: 2, ..HARDWARE };
    let ahead = run(&requests, hardware, &mut Aril::new(2, 1, FOREVER));
    let before = run(&requests, hardware, &mut Vllm::new(2));
    assert_eq!((ahead.stalled, before.stalled), (1050, 2 * 1050), "beside the first step, or before the second");
    assert!(ahead.end < before.end);
}

#[test]
fn every_policy_serves_every_request_within_its_slots() {
    let hardware = Hardware { slots: 8, max_requests: 32, ..Hardware::H200 };
    for rate in [Some(5.0), Some(30.0), None] {
        let requests = Trace { requests: 500, rate, ..TRACE }.draw().unwrap();
        let tokens: usize = requests.iter().map(|request| request.output).sum();
        let policies: [(Box<dyn Policy>, usize); 5] = [
            (Box::new(Aril::new(6, 2, Duration::from_secs(1))), 6),
            (Box::new(Fifo::new(6, 2)), 6),
            (Box::new(Vllm::new(8)), 8),
            (Box::new(SLora::new(8, hardware.max_tokens, false)), 8),
            (Box::new(SLora::new(8, hardware.max_tokens, true)), 8),
        ];
        for (mut policy, max_adapters) in policies {
            let outcome = run(&requests, hardware, &mut *policy);
            assert!(outcome.max_adapters <= max_adapters);
            for (number, request) in requests.iter().enumerate() {
                let (first, last) = (outcome.first_token[number], outcome.last_token[number]);
                let fastest = hardware.step(request.prompt.min(hardware.max_tokens), 0, 1);
                assert!(first >= fastest, "{request:?}: {first} µs is too soon");
                assert!(last >= first + hardware.step(0, 1, 1) * (request.output as Time - 1), "{request:?}");
            }
            let distinct: HashSet<Adapter> = requests.iter().map(|request| request.adapter).collect();
            assert!(outcome.loads >= distinct.len() as u64 && outcome.stalled < outcome.end);
            let steps = (outcome.end - outcome.stalled) / hardware.step_us;
            assert!(tokens as u64 <= steps * hardware.max_requests as u64, "a step gives a request one token");
        }
    }
}

#[test]
fn percentiles_are_values() {
    let values: Vec<Time> = (1..=200).collect();
    assert_eq!([0, 1, 50, 99, 100].map(|percent| percentile(&values, percent)), [1, 2, 100, 198, 200]);
    assert_eq!(percentile(&[7.5], 99), 7.5);
}

/// The record is of this code: its shortest runs are run again.
#[test]
fn the_record_is_what_the_simulation_gives() {
    let record = Record::load(&repository()).unwrap();
    assert_eq!(record.settings.hardware, Hardware::H200);
    let policies: HashSet<&str> = record.runs.iter().map(|run| run.policy.name()).collect();
    assert_eq!(policies, Kind::ALL.iter().map(|policy| policy.name()).collect());
    assert!(record.runs.iter().all(|run| run.trace.requests == 10_000));
    let again = record.runs.iter().filter(|run| run.trace.rate == Some(16.0) && run.trace.adapters == 1000);
    let mut count = 0;
    for known in again.filter(|run| matches!(run.policy, Kind::Aril | Kind::Vllm)) {
        assert_eq!(*known, aril_bench::serving::Run::new(known.trace, known.policy, &record.settings).unwrap());
        count += 1;
    }
    assert_eq!(count, 2);
}

#[test]
fn the_table_has_a_row_for_each_shown_run() {
    let record = Record::load(&repository()).unwrap();
    let text = shown(&record);
    let run = record.runs.iter().find(|run| run.policy == Kind::Aril && run.trace.rate == Some(24.0)).unwrap();
    let row = format!("| {} | 24 | aril | {:.1} |", run.trace.adapters, 100.0 * run.figures.hit_rate);
    assert!(text.contains(&row), "{text} lacks {row}");
    assert_eq!(text.lines().filter(|line| line.starts_with("| 1000 ")).count(), 4 * Kind::ALL.len());
}
