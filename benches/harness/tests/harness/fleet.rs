//! The simulation of replicas: its routers and its replicas, by figures that can be added up by hand.

use std::collections::HashMap;

use aril::pool::Tier;
use aril_bench::{
    engine,
    fleet::{
        Event, Kind, LeastLoaded, Modulo, Outcome, Random, Record, Replica, Resident, Ring, RoundRobin, Router, Run,
        Scenario, Settings, run, scenarios, shown,
    },
    pool,
    record::repository,
    serving::{Engine, Hardware, Request, Time, Times, Trace},
};

use crate::serving::{HARDWARE, request};

const SETTINGS: Settings =
    Settings { hardware: Hardware { slots: 3, host_adapters: 5, ..HARDWARE }, ahead: 1, ..Settings::ALL };

fn scenario(replicas: u32, event: Option<Event>) -> Scenario {
    let trace = Trace { seed: 7, requests: 900, adapters: 1000, zipf: 1.0, rate: Some(f64::from(replicas) * 20.0) };
    Scenario { replicas, trace, read_us: 10_000, event }
}

/// Runs a trace on one replica: when each request had its first and its last token.
fn alone(requests: &[Request]) -> (Times, Engine<Replica>) {
    let mut engine = Engine::new(SETTINGS.hardware, Replica::new(&SETTINGS).unwrap());
    let mut times = Times::new(requests.len());
    for (number, request) in requests.iter().enumerate() {
        engine.advance(Some(request.arrival), requests, &mut times);
        engine.arrive(number, request);
    }
    engine.advance(None, requests, &mut times);
    (times, engine)
}

#[test]
fn a_replica_takes_the_time_of_its_loads_and_steps() {
    // A read, which also copies; 100 and 50 tokens of the prompt; two more tokens.
    let steps = [210, 160];
    let (times, engine) = alone(&[request(500, 1, 150, 3)]);
    let first = 500 + 1000 + steps.iter().sum::<Time>();
    assert_eq!((times.first_token[0], times.last_token[0]), (first, first + 2 * 111));
    assert_eq!((engine.stalled, engine.tokens, engine.steps, engine.max_adapters), (1000, 3, 4, 1));
    assert_eq!(engine.server.loads(), [1, 1]);
    assert_eq!([1, 2].map(|adapter| engine.server.tier(adapter)), [Tier::Device, Tier::Source]);
}

#[test]
fn an_adapter_is_loaded_again_from_the_tier_that_it_is_in() {
    // Four adapters for three slots, one after another. 1 is evicted to host memory, and copied again.
    let adapters = [1, 2, 3, 4, 1, 4];
    let requests: Vec<_> = (0..).zip(adapters).map(|(at, adapter)| request(10_000 * at, adapter, 10, 1)).collect();
    let (times, engine) = alone(&requests);
    let waits: Vec<_> =
        times.first_token.iter().zip(&requests).map(|(first, request)| first - request.arrival).collect();
    assert_eq!(waits, [1120, 1120, 1120, 1120, 170, 120]);
    assert_eq!(engine.server.loads(), [4, 5]);
    let mut places = engine.server.report();
    places.sort_unstable();
    assert_eq!(places, [(1, Tier::Device), (2, Tier::Host), (3, Tier::Device), (4, Tier::Device)]);
}

#[test]
fn reads_take_turns_and_so_do_copies() {
    // Both reads begin at once, on one disk. The second request starts a step after the first.
    let (times, _) = alone(&[request(0, 1, 10, 1), request(0, 2, 10, 1)]);
    assert_eq!(times.first_token, [1120, 2120]);
    // 1 and 2 are in host memory. Both start in one step, which waits for two copies.
    let arrivals = [0, 10_000, 20_000, 30_000, 40_000, 50_000, 50_000];
    let adapters = [1, 2, 3, 4, 5, 1, 2];
    let requests: Vec<_> =
        arrivals.into_iter().zip(adapters).map(|(at, adapter)| request(at, adapter, 10, 1)).collect();
    let (times, engine) = alone(&requests);
    assert_eq!(times.first_token[5..], [50_240; 2]);
    assert_eq!((engine.server.loads(), engine.stalled), ([5, 7], 5 * 1000 + 2 * 50));
}

/// The replicas that a router chooses for adapters 0 to 999.
fn places(router: &mut dyn Router, loads: &[Option<usize>]) -> Vec<usize> {
    (0..1000).map(|adapter| router.place(adapter, loads)).collect()
}

fn counts(places: &[usize]) -> HashMap<usize, usize> {
    places.iter().fold(HashMap::new(), |mut counts, place| {
        *counts.entry(*place).or_default() += 1;
        counts
    })
}

#[test]
fn routers_use_the_replicas_that_are_up() {
    let loads = [Some(3), None, Some(3), Some(3)];
    let routers: [Box<dyn Router>; 6] = [
        Box::new(Random::new(1)),
        Box::new(RoundRobin::default()),
        Box::new(LeastLoaded),
        Box::new(Modulo),
        Box::new(Ring::new(4, None)),
        Box::new(Resident::new(4, 4, 12)),
    ];
    for mut router in routers {
        let counts = counts(&places(&mut *router, &loads));
        assert_eq!(counts.len(), 3, "{counts:?}");
        assert!(counts.iter().all(|(replica, count)| *replica != 1 && *count > 200), "{counts:?}");
    }
    let mut turns = RoundRobin::default();
    assert_eq!([1; 6].map(|adapter| turns.place(adapter, &loads)), [2, 3, 0, 2, 3, 0]);
    assert_eq!(LeastLoaded.place(1, &[Some(2), None, Some(1), Some(3)]), 2);
}

#[test]
fn a_ring_moves_the_adapters_of_the_replica_that_left() {
    let (all, left) = ([Some(0); 8], [[None].as_slice(), &[Some(0); 7]].concat());
    let moved = |router: &mut dyn Router| {
        let (before, after) = (places(router, &all), places(router, &left));
        before.iter().zip(&after).filter(|(before, after)| **before != 0 && before != after).count()
    };
    assert_eq!(moved(&mut Ring::new(8, None)), 0);
    assert!(moved(&mut Modulo) > 700, "nearly all move");
}

#[test]
fn a_bound_passes_over_replicas_with_many_requests() {
    let (mut plain, mut bounded) = (Ring::new(4, None), Ring::new(4, Some(1.25)));
    let mut loads = [Some(10); 4];
    for adapter in 0..100 {
        let home = plain.place(adapter, &loads);
        assert_eq!(bounded.place(adapter, &loads), home, "all have the mean");
        // Of 46 requests, fewer than 15 on a replica leave room for another one.
        loads[home] = Some(15);
        assert_eq!(plain.place(adapter, &loads), home);
        assert_ne!(bounded.place(adapter, &loads), home);
        loads[home] = Some(10);
    }
}

#[test]
fn residency_weighs_requests_against_loads() {
    let mut router = Resident::new(3, 4, 12);
    router.report(0, &[(7, Tier::Host)]);
    router.report(1, &[(7, Tier::Device)]);
    let mut at = |loads: [usize; 3]| {
        let replica = router.place(7, &loads.map(Some));
        router.finish(7, replica);
        // As it was.
        router.report(0, &[(7, Tier::Host)]);
        router.report(1, &[(7, Tier::Device)]);
        router.report(2, &[]);
        replica
    };
    assert_eq!([at([0, 3, 0]), at([0, 5, 0]), at([0, 13, 9]), at([20, 13, 0])], [1, 0, 0, 2]);
    assert_eq!([at([0, 4, 0]), at([1, 5, 9])], [0, 0], "of equal costs, the fewest requests");
}

#[test]
fn a_router_remembers_what_it_placed() {
    for is_told in [true, false] {
        let router = Resident::new(4, 4, 12);
        let mut router = if is_told { router } else { router.untold() };
        let loads = [Some(0); 4];
        let home = router.place(7, &loads);
        // On its way: the replica does not report it yet.
        router.report(home, &[]);
        let mut busy = loads;
        busy[home] = Some(11);
        assert_eq!(router.place(7, &busy), home);
        router.finish(7, home);
        router.finish(7, home);
        // Evicted meanwhile.
        router.report(home, &[]);
        assert_eq!(router.place(7, &busy) == home, !is_told);
    }
}

#[test]
fn a_router_forgets_replicas_that_leave_and_all_when_it_restarts() {
    let loads = [Some(11), Some(0)];
    let mut router = Resident::new(2, 4, 12);
    router.report(0, &[(7, Tier::Device), (8, Tier::Device)]);
    assert_eq!(router.place(7, &loads), 0);
    router.leave(0);
    assert_eq!(router.place(8, &loads), 1);
    router.report(0, &[(9, Tier::Device)]);
    router.restart();
    assert_eq!(router.place(9, &loads), 1);
}

fn simulate(scenario: &Scenario, kind: Kind) -> (Vec<Request>, Outcome) {
    let requests = scenario.draw().unwrap();
    let mut router = kind.router(scenario.replicas as usize, scenario.trace.seed, &Settings::ALL);
    let outcome = run(scenario, &requests, &Settings::ALL, &mut *router, &scenario.marks()).unwrap();
    (requests, outcome)
}

#[test]
fn every_request_ends_whatever_happens() {
    for event in [None, Some(Event::Popularity), Some(Event::Leave), Some(Event::Restart)] {
        for kind in Kind::ALL {
            let scenario = scenario(3, event);
            let (requests, outcome) = simulate(&scenario, kind);
            let hardware = Settings::ALL.hardware;
            for (number, request) in requests.iter().enumerate() {
                let first = outcome.times.first_token[number] - request.arrival;
                assert!(first >= hardware.step(request.prompt.min(hardware.max_tokens), 0, 1), "{kind:?} {request:?}");
                let last = outcome.times.last_token[number] - request.arrival;
                assert!(last >= first + hardware.step(0, 1, 1) * (request.output as Time - 1), "{kind:?} {request:?}");
            }
            let [begin, at, end] = [0, 1, 2].map(|mark| &outcome.marks[mark]);
            assert_eq!([begin.number, at.number, end.number], [300, 600, 900]);
            assert_eq!(end.replicas.iter().map(|replica| replica.is_up).collect::<Vec<_>>()[1..], [true, true]);
            assert_eq!(end.replicas[0].is_up, event != Some(Event::Leave));
            let is_left = |number: &usize| outcome.replicas[*number] == 0;
            assert_eq!((600..900).any(|number| is_left(&number)), event != Some(Event::Leave), "{kind:?}");
            let tokens: u64 = end.replicas.iter().map(|replica| replica.tokens).sum();
            assert!(tokens <= requests.iter().map(|request| request.output as u64).sum::<u64>() + 20_000);
        }
    }
}

/// Its requests that had not ended are placed again, and compute their tokens again.
#[test]
fn the_requests_of_a_replica_that_leaves_are_placed_again() {
    let (scenario, kind) = (scenario(3, Some(Event::Leave)), Kind::Modulo);
    let (requests, outcome) = simulate(&scenario, kind);
    let (_, without) = simulate(&Scenario { event: None, ..scenario }, kind);
    let now = requests[600].arrival;
    let mut again = 0;
    for number in (0..600).filter(|number| without.replicas[*number] == 0) {
        let has_ended = without.times.last_token[number] <= now;
        assert_eq!(outcome.replicas[number] == 0, has_ended, "{number}");
        if !has_ended {
            assert!(outcome.times.last_token[number] > now);
            again += 1;
        }
        if without.times.first_token[number] <= now {
            assert_eq!(outcome.times.first_token[number], without.times.first_token[number]);
        }
    }
    assert!(again > 3, "{again}");
}

#[test]
fn other_adapters_become_popular() {
    let mut scenario = scenario(3, Some(Event::Popularity));
    let requests = scenario.draw().unwrap();
    scenario.event = None;
    let before = scenario.draw().unwrap();
    assert_eq!(requests[..600], before[..600]);
    for (changed, request) in requests[600..].iter().zip(&before[600..]) {
        assert!((1..=1000).contains(&changed.adapter));
        assert_eq!(changed.adapter.abs_diff(request.adapter), 500);
        assert_eq!(Request { adapter: 0, ..*changed }, Request { adapter: 0, ..*request });
    }
}

/// The times of the simulation are those that were measured, within a tenth.
#[test]
fn the_hardware_is_that_of_the_record() {
    let hardware = Hardware::MEASURED;
    let folder = repository().join("benches/record/h200");
    let is_near = |is: Time, us: f64| assert!((is as f64 / us - 1.0).abs() < 0.1, "{is}, not {us}");
    let pool: pool::Figures = serde_json::from_slice(&std::fs::read(folder.join("pool.json")).unwrap()).unwrap();
    let load = |from: &str| pool.load.iter().find(|load| load.from == from).unwrap().us;
    is_near(hardware.copy_us, load("host"));
    is_near(hardware.read_us, load("disk"));
    // Steps of Qwen3-8B with adapters of rank 16, in the faster of the two ways.
    let engine = engine::Record::load(&folder).unwrap().unwrap();
    let run = engine.runs.iter().find(|run| run.meta.tp == 1).unwrap();
    let is_meant = |step: &&engine::Step| {
        (step.model.as_str(), step.context, step.rank) == ("Qwen3-8B", 512, 16) && step.batch <= hardware.max_requests
    };
    let mut fastest: HashMap<(usize, usize), f64> = HashMap::new();
    for step in run.steps.iter().filter(is_meant) {
        let us = fastest.entry((step.batch, step.adapters)).or_insert(f64::INFINITY);
        *us = us.min(step.p50_us);
    }
    assert!(fastest.len() >= 6, "{fastest:?}");
    fastest.iter().for_each(|(&(batch, adapters), us)| is_near(hardware.step(0, batch, adapters), *us));
    let prefill = run.prefills.iter().find(|prefill| (prefill.tokens, prefill.rank) == (4096, 16)).unwrap();
    is_near(hardware.step(prefill.tokens, 0, prefill.adapters), prefill.p50_us);
}

/// The record is of this code: one of its shortest runs is run again.
#[test]
fn the_record_is_what_the_simulation_gives() {
    let record = Record::load(&repository()).unwrap();
    assert_eq!(record.settings, Settings::ALL);
    let known: Vec<_> = record.runs.iter().map(|run| (run.scenario, run.policy)).collect();
    let all = scenarios().into_iter().flat_map(|scenario| Kind::ALL.map(|policy| (scenario, policy)));
    assert_eq!(known, all.collect::<Vec<_>>());
    let is_meant = |run: &&Run| (run.scenario.replicas, run.scenario.trace.seed, run.policy) == (8, 1, Kind::Resident);
    let known = record.runs.iter().find(is_meant).unwrap();
    assert_eq!(*known, Run::new(known.scenario, known.policy, &record.settings).unwrap());
}

#[test]
fn the_tables_have_a_row_for_each_policy() {
    let record = Record::load(&repository()).unwrap();
    let [(_, steady), (_, events)] = shown(&record);
    let rows = |text: &str, begin: &str| text.lines().filter(|line| line.starts_with(begin)).count();
    assert_eq!(rows(&steady, "| 16 | 24 | 1.0 | disk |"), Kind::ALL.len());
    assert_eq!(rows(&steady, "| 64 | 24 |"), Kind::ALL.len());
    assert_eq!(rows(&steady, "| 16 | 24 | 1.0 | page cache |"), Kind::ALL.len());
    for event in Event::ALL {
        assert_eq!(rows(&events, &format!("| {} |", event.name())), Kind::ALL.len());
    }
    let of = |run: &&Run| run.policy == Kind::Resident && run.scenario.replicas == 64 && run.scenario.event.is_none();
    let runs: Vec<_> = record.runs.iter().filter(of).collect();
    let mean = runs.iter().map(|run| run.figures.device).sum::<f64>() / runs.len() as f64;
    assert_eq!(runs.len(), 3);
    assert!(steady.contains(&format!("| 64 | 24 | 1.0 | disk | residency | {:.1} |", 100.0 * mean)), "{steady}");
}
