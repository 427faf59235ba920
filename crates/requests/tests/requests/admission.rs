//! Admission: its limits, its order and its bound on waiting, against random requests and engines.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::Duration,
};

use aril_requests::admission::{Admission, AdmissionError, Answer, Limits, Request};
use proptest::{collection::vec, prelude::*};

type Adapter = u32;

const FOREVER: Duration = Duration::MAX;

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

fn request(id: u32, adapter: Option<Adapter>, arrival: Duration) -> Request<u32, Adapter> {
    adapter.map_or(Request::base(id, arrival), |adapter| Request::new(id, adapter, arrival))
}

/// Requests that arrive one after another, each a millisecond after the last.
fn waiting(limits: Limits, adapters: &[Option<Adapter>]) -> Admission<u32, Adapter> {
    let mut admission = Admission::new(limits);
    for (id, adapter) in (0..).zip(adapters) {
        admission.enqueue(request(id, *adapter, ms(id.into()))).unwrap();
    }
    admission
}

/// The requests that are taken if all that are offered are.
fn admit(admission: &mut Admission<u32, Adapter>, now: u64) -> Vec<u32> {
    let mut taken = Vec::new();
    admission.admit(ms(now), |request| {
        taken.push(request.id);
        Answer::Take
    });
    taken
}

#[test]
fn requests_of_the_batch_come_first_and_adapters_stay_together() {
    let mut admission = waiting(Limits::new(2, FOREVER), &[Some(1), Some(2), Some(3), None, Some(1), Some(2)]);
    assert_eq!(admit(&mut admission, 10), [3, 0, 4, 1, 5]);
    assert_eq!(admission.batch(), [1, 2]);
    assert_eq!((admission.num_running(), admission.num_waiting()), (5, 1));
    // An adapter leaves with its last request.
    admission.finish(&0).unwrap();
    assert_eq!(admit(&mut admission, 11), [0; 0]);
    admission.finish(&4).unwrap();
    assert_eq!(admit(&mut admission, 12), [2]);
    assert_eq!(admission.batch(), [2, 3]);
}

/// Whether it is overdue or not, the next request of its adapter is offered, and its room is not kept.
#[test]
fn a_request_that_fails_is_forgotten() {
    for max_wait in [FOREVER, Duration::ZERO] {
        let mut admission = waiting(Limits::new(1, max_wait), &[Some(1), Some(1), Some(2), None]);
        let mut offered = Vec::new();
        admission.admit(ms(10), |request| {
            offered.push(request.id);
            if request.adapter == Some(1) { Answer::Fail } else { Answer::Take }
        });
        offered.sort_unstable();
        assert_eq!((offered, admission.batch()), (vec![0, 1, 2, 3], &[2][..]));
        assert_eq!((admission.num_running(), admission.num_waiting()), (2, 0));
        assert_eq!(admission.cancel(&0), Err(AdmissionError::Unknown));
    }
}

#[test]
fn what_was_taken_counts_at_once_and_what_was_not_does_not() {
    let mut admission = waiting(Limits::new(1, FOREVER), &[Some(1), Some(2)]);
    let mut offered = Vec::new();
    admission.admit(ms(10), |request| {
        offered.push(request.id);
        Answer::Stop
    });
    assert_eq!((offered, admission.batch()), (vec![0], &[][..]));
    // The first is still loading, so that the second has its room.
    admission.admit(ms(10), |request| if request.id == 0 { Answer::Skip } else { Answer::Take });
    assert_eq!(admission.batch(), [2]);
}

#[test]
fn an_adapter_is_skipped_with_all_of_its_requests() {
    let mut admission = waiting(Limits::new(2, FOREVER), &[Some(1), Some(2), Some(1), None, None]);
    let mut offered = Vec::new();
    admission.admit(ms(10), |request| {
        offered.push(request.id);
        if request.adapter == Some(2) { Answer::Take } else { Answer::Skip }
    });
    assert_eq!(offered, [3, 0, 1]);
}

#[test]
fn a_call_ends_after_one_refused_adapter_more_than_a_batch_has() {
    let mut admission = waiting(Limits::new(2, FOREVER), &[1, 2, 3, 4, 5, 6].map(Some));
    let mut offered = Vec::new();
    admission.admit(ms(10), |request| {
        offered.push(request.id);
        Answer::Skip
    });
    assert_eq!(offered, [0, 1, 2]);
}

#[test]
fn an_overdue_request_drains_the_batch() {
    let mut admission = waiting(Limits::new(1, ms(100)), &[Some(1), Some(2), Some(1)]);
    assert_eq!(admit(&mut admission, 50), [0, 2]);
    // Requests for the adapter in the batch keep coming, and join until the other one is overdue.
    admission.enqueue(request(3, Some(1), ms(60))).unwrap();
    assert_eq!(admit(&mut admission, 100), [3]);
    admission.enqueue(request(4, Some(1), ms(100))).unwrap();
    admission.enqueue(request(5, None, ms(101))).unwrap();
    assert_eq!(admit(&mut admission, 101), [5], "the base model needs no room");
    for id in [0, 2, 3] {
        assert_eq!(admit(&mut admission, 102), [0; 0]);
        admission.finish(&id).unwrap();
    }
    assert_eq!(admit(&mut admission, 110), [1]);
}

#[test]
fn a_drain_takes_the_adapter_that_started_first_and_no_more() {
    let mut admission = waiting(Limits::new(2, ms(100)), &[Some(1), Some(2)]);
    assert_eq!(admit(&mut admission, 1), [0, 1]);
    admission.enqueue(request(2, Some(3), ms(2))).unwrap();
    admission.enqueue(request(3, Some(1), ms(3))).unwrap();
    assert_eq!(admit(&mut admission, 3), [3]);
    admission.enqueue(request(4, Some(1), ms(100))).unwrap();
    admission.enqueue(request(5, Some(2), ms(100))).unwrap();
    assert_eq!(admit(&mut admission, 102), [4], "the place of adapter 2 is enough");
    admission.finish(&1).unwrap();
    assert_eq!(admit(&mut admission, 103), [2]);
}

#[test]
fn a_drain_ends_when_its_request_is_cancelled() {
    let mut admission = waiting(Limits::new(1, ms(100)), &[Some(1), Some(2)]);
    assert_eq!(admit(&mut admission, 1), [0]);
    admission.enqueue(request(2, Some(1), ms(2))).unwrap();
    assert_eq!(admit(&mut admission, 101), [0; 0]);
    admission.cancel(&1).unwrap();
    assert_eq!(admit(&mut admission, 101), [2]);
}

#[test]
fn the_room_of_an_overdue_adapter_that_is_loading_is_kept() {
    for max_wait in [100, 0] {
        let mut admission = waiting(Limits::new(1, ms(max_wait)), &[Some(3), Some(7), Some(0), Some(11)]);
        // All of them overdue, and the first alone.
        for now in [200, 100] {
            let mut offered = Vec::new();
            admission.admit(ms(now), |request| {
                offered.push(request.id);
                Answer::Skip
            });
            assert_eq!((offered, admission.batch()), (vec![0], &[][..]), "{max_wait} at {now} ms");
        }
        assert_eq!(admit(&mut admission, 101), [0], "{max_wait}");
        admission.finish(&0).unwrap();
        assert_eq!(admit(&mut admission, 300), [1], "{max_wait}");
    }
}

#[test]
fn a_preempted_request_keeps_its_age() {
    let mut admission = waiting(Limits::new(1, FOREVER), &[Some(1), Some(2)]);
    assert_eq!(admit(&mut admission, 1), [0]);
    admission.preempt(&0).unwrap();
    assert_eq!((admission.batch(), admission.num_waiting()), (&[][..], 2));
    assert_eq!(admission.prefetch().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(admit(&mut admission, 2), [0]);
}

#[test]
fn adapters_are_prefetched_in_the_order_in_which_they_enter() {
    let mut admission = waiting(Limits::new(1, FOREVER), &[Some(1), None, Some(3), Some(2), Some(3), Some(1)]);
    assert_eq!(admission.prefetch().collect::<Vec<_>>(), [1, 3, 2]);
    admit(&mut admission, 10);
    assert_eq!(admission.prefetch().collect::<Vec<_>>(), [3, 2]);
}

#[test]
fn errors_say_what_is_wrong_and_change_nothing() {
    let mut admission = waiting(Limits::new(2, FOREVER), &[Some(1), Some(2)]);
    assert_eq!(admission.enqueue(request(0, Some(3), ms(9))), Err(AdmissionError::Duplicate));
    let mut none = Admission::new(Limits::new(0, FOREVER));
    assert_eq!(none.enqueue(request(9, Some(9), ms(9))), Err(AdmissionError::NoAdapters));
    assert_eq!(none.enqueue(request(9, None, ms(9))), Ok(()));
    assert_eq!(
        (admission.finish(&0), admission.preempt(&1)),
        (Err(AdmissionError::NotRunning), Err(AdmissionError::NotRunning))
    );
    for result in [admission.finish(&9), admission.preempt(&9), admission.cancel(&9)] {
        assert_eq!(result, Err(AdmissionError::Unknown));
    }
    assert_eq!((admission.num_running(), admission.num_waiting()), (0, 2));
    assert_eq!(admit(&mut admission, 10), [0, 1]);
}

/// What happens to an admission.
#[derive(Clone, Debug)]
enum Event {
    Arrive { adapter: Option<Adapter>, age: u64 },
    Admit { answers: Vec<Answer> },
    Finish(prop::sample::Index),
    Preempt(prop::sample::Index),
    Cancel(prop::sample::Index),
}

fn event() -> impl Strategy<Value = Event> {
    let answer =
        prop_oneof![6 => Just(Answer::Take), 2 => Just(Answer::Skip), 1 => Just(Answer::Fail), 1 => Just(Answer::Stop)];
    prop_oneof![
        6 => (prop::option::weighted(0.9, 0..12_u32), 0..30_u64)
            .prop_map(|(adapter, age)| Event::Arrive { adapter, age }),
        3 => vec(answer, 1..20).prop_map(|answers| Event::Admit { answers }),
        3 => any::<prop::sample::Index>().prop_map(Event::Finish),
        1 => any::<prop::sample::Index>().prop_map(Event::Preempt),
        1 => any::<prop::sample::Index>().prop_map(Event::Cancel),
    ]
}

/// What an engine knows of its requests.
#[derive(Default)]
struct Known {
    waiting: BTreeMap<u32, Option<Adapter>>,
    running: BTreeMap<u32, Option<Adapter>>,
}

impl Known {
    fn batch(&self) -> BTreeSet<Adapter> {
        self.running.values().copied().flatten().collect()
    }

    fn any(of: &BTreeMap<u32, Option<Adapter>>, index: &prop::sample::Index) -> Option<u32> {
        (!of.is_empty()).then(|| *of.keys().nth(index.index(of.len())).unwrap())
    }
}

proptest! {
    /// At each offer, the batch with the offered request is within its limits, and the request is one that waits.
    #[test]
    fn no_batch_exceeds_its_limits(
        (max_adapters, max_wait) in (1..6_usize, 0..40_u64),
        events in vec(event(), 1..150),
    ) {
        let mut admission = Admission::new(Limits::new(max_adapters, ms(max_wait)));
        let mut known = Known::default();
        for ((time, id), event) in (100_u64..).zip(0_u32..).zip(&events) {
            match event {
                Event::Arrive { adapter, age } => {
                    admission.enqueue(request(id, *adapter, ms(time - age))).unwrap();
                    known.waiting.insert(id, *adapter);
                }
                Event::Admit { answers } => {
                    let (mut answers, mut wrong) = (answers.iter().cycle(), None);
                    let (mut skipped, mut is_stopped, mut rejected) = (HashSet::new(), false, 0);
                    admission.admit(ms(time), |request| {
                        let answer = *answers.next().unwrap();
                        let mut batch = known.batch();
                        batch.extend(request.adapter);
                        let is_fit = batch.len() <= max_adapters;
                        let is_waiting = known.waiting.get(&request.id) == Some(&request.adapter);
                        if !is_fit || !is_waiting || is_stopped || skipped.contains(&request.adapter) {
                            wrong = Some(format!("{request:?} beside {:?}, {answer:?}", known.running));
                        }
                        rejected += usize::from(matches!(answer, Answer::Skip | Answer::Stop));
                        match answer {
                            Answer::Take => {
                                known.waiting.remove(&request.id);
                                known.running.insert(request.id, request.adapter);
                            }
                            Answer::Skip => {
                                skipped.insert(request.adapter);
                            }
                            Answer::Fail => {
                                known.waiting.remove(&request.id);
                            }
                            Answer::Stop => is_stopped = true,
                        }
                        answer
                    });
                    prop_assert!(wrong.is_none(), "{}", wrong.unwrap_or_default());
                    prop_assert!(rejected <= 2 * max_adapters + 3, "{rejected} offers were in vain");
                }
                Event::Finish(index) => if let Some(id) = Known::any(&known.running, index) {
                    known.running.remove(&id);
                    admission.finish(&id).unwrap();
                },
                Event::Preempt(index) => if let Some(id) = Known::any(&known.running, index) {
                    let adapter = known.running.remove(&id).unwrap();
                    known.waiting.insert(id, adapter);
                    admission.preempt(&id).unwrap();
                },
                Event::Cancel(index) => for of in [&mut known.waiting, &mut known.running] {
                    if let Some(id) = Known::any(of, index) {
                        of.remove(&id);
                        admission.cancel(&id).unwrap();
                    }
                },
            }
            prop_assert_eq!(admission.num_running(), known.running.len());
            prop_assert_eq!(admission.num_waiting(), known.waiting.len());
            let batch = known.batch();
            prop_assert_eq!(admission.batch().iter().copied().collect::<BTreeSet<_>>(), batch.clone());
            prop_assert_eq!(admission.batch().len(), batch.len());
            let next: Vec<_> = admission.prefetch().collect();
            let wanted = known.waiting.values().copied().flatten().filter(|adapter| !batch.contains(adapter));
            let wanted: BTreeSet<_> = wanted.collect();
            prop_assert_eq!(next.len(), wanted.len());
            prop_assert_eq!(next.into_iter().collect::<BTreeSet<_>>(), wanted);
        }
    }

    /// Without overdue requests, admission leaves no room unused.
    #[test]
    fn room_is_used(max_adapters in 1..6_usize, adapters in vec(prop::option::weighted(0.9, 0..12_u32), 1..40)) {
        let mut admission = waiting(Limits::new(max_adapters, FOREVER), &adapters);
        let taken: HashSet<u32> = admit(&mut admission, 100).into_iter().collect();
        let left = (0..).zip(&adapters).filter(|(id, _)| !taken.contains(id));
        let left: Vec<_> = left.map(|(_, adapter)| adapter.expect("the base model needs no room")).collect();
        prop_assert!(left.is_empty() || admission.batch().len() == max_adapters);
        prop_assert!(left.iter().all(|adapter| !admission.batch().contains(adapter)), "adapters stay together");
    }

    /// If every request is overdue at once, adapters enter in the order of their oldest requests.
    #[test]
    fn without_a_wait_the_order_is_that_of_arrival(
        max_adapters in 1..4_usize,
        adapters in vec(prop::option::weighted(0.9, 0..12_u32), 1..60),
    ) {
        let mut admission = waiting(Limits::new(max_adapters, Duration::ZERO), &adapters);
        let mut last_entered = None;
        for step in 0.. {
            let mut before: HashSet<_> = admission.batch().iter().copied().collect();
            for id in admit(&mut admission, 100 + step) {
                if adapters[id as usize].is_some_and(|adapter| before.insert(adapter)) {
                    prop_assert!(last_entered < Some(id), "{id} entered after {last_entered:?}");
                    last_entered = Some(id);
                }
            }
            let mut ids = (0..).zip(&adapters).map(|(id, _)| id);
            let Some(id) = ids.find(|id| admission.clone().finish(id).is_ok()) else { break };
            admission.finish(&id).unwrap();
        }
        prop_assert_eq!(admission.num_waiting(), 0);
    }

    /// The bound of the module's documentation, with adversarial arrivals: some adapters are asked for in every step.
    #[test]
    fn no_request_starves(
        (max_adapters, max_wait) in (1..5_usize, 0..30_u64),
        hot in 0..4_u32,
        arrivals in vec((0..200_u64, 4..12_u32, 0..20_u64), 1..60),
        longest in 1..20_u64,
    ) {
        let mut admission = Admission::new(Limits::new(max_adapters, ms(max_wait)));
        let mut by_time: BTreeMap<u64, Vec<(Adapter, u64)>> = BTreeMap::new();
        for (time, adapter, length) in arrivals {
            by_time.entry(time).or_default().push((adapter, length % longest + 1));
        }
        // The length of each request; the arrivals of those that wait, the ends of those that run, and the latest
        // admissions of overdue ones.
        let (mut lengths, mut waiting, mut ends, mut latest) =
            (Vec::new(), BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for now in 0..600_u64 {
            let finished: Vec<u32> = ends.iter().filter(|(_, end)| **end <= now).map(|(id, _)| *id).collect();
            for id in finished {
                ends.remove(&id);
                admission.finish(&id).unwrap();
            }
            let hot = (0..hot).map(|adapter| (adapter, longest));
            for (adapter, length) in hot.chain(by_time.remove(&now).unwrap_or_default()) {
                let id = u32::try_from(lengths.len()).unwrap();
                admission.enqueue(request(id, Some(adapter), ms(now))).unwrap();
                lengths.push(length);
                waiting.insert(id, now);
            }
            let overdue = (1..).zip(&waiting).take_while(|(_, (_, arrival))| now - **arrival >= max_wait);
            for (place, (id, _)) in overdue {
                latest.entry(*id).or_insert(now + place * (longest + 1));
            }
            for id in admit(&mut admission, now) {
                waiting.remove(&id);
                ends.insert(id, now + lengths[id as usize]);
                latest.remove(&id);
            }
            for (id, latest) in &latest {
                prop_assert!(now < *latest, "{id} arrived at {} and still waits at {now}", waiting[id]);
            }
        }
    }
}
