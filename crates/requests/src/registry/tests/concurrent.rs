//! Histories of concurrent calls, under shuttle's schedules: each must be one that some order of the calls explains
//! (linearizability).

use std::sync::Arc;

use shuttle::{
    rand::{Rng, thread_rng},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::{
    OnDuplicate, Registry, RegistryError, Served, load,
    model::{BASE, Call, Model, Outcome, run},
};
use aril::pool::AdapterId;

use OnDuplicate::{Refuse, Replace};

const SCHEDULES: usize = 3000;
const THREADS: usize = 3;
const CALLS: usize = 5;
/// Few names, so that calls meet.
const NAMES: [&str; 4] = ["a", "b", "c", BASE];

/// A call that has returned, and the times of its begin and its end.
#[derive(Clone, Debug)]
struct Event {
    call: Call,
    outcome: Outcome,
    begin: usize,
    end: usize,
}

/// Whether the calls give these outcomes in some order that keeps every call behind those which ended before it began.
fn is_explained(model: &Model, events: &[Event]) -> bool {
    let Some(first_end) = events.iter().map(|event| event.end).min() else { return true };
    (0..events.len()).filter(|&next| events[next].begin < first_end).any(|next| {
        let (mut model, mut rest) = (model.clone(), events.to_vec());
        let event = rest.remove(next);
        model.apply(&event.call) == event.outcome && is_explained(&model, &rest)
    })
}

fn any_call(caller: usize, is_held: bool) -> Call {
    let mut rng = thread_rng();
    let name = NAMES[rng.gen_range(0..NAMES.len())];
    let on_duplicate = if rng.r#gen() { Refuse } else { Replace };
    match rng.gen_range(0..7) {
        0..3 if is_held => Call::Serve { caller, id: AdapterId::unique() },
        3 if is_held => Call::Release { caller },
        0..4 => Call::Begin { caller, name, on_duplicate },
        4 => Call::Unload { name },
        5 => Call::Resolve { name },
        _ => Call::List,
    }
}

/// Loads two adapters.
fn served(registry: &Registry, model: &mut Model) {
    let load = |name| {
        let begin_load = Call::Begin { caller: 0, name, on_duplicate: Refuse };
        [begin_load, Call::Serve { caller: 0, id: AdapterId::unique() }]
    };
    let mut held = None;
    for call in load("a").into_iter().chain(load("b")) {
        assert_eq!(run(registry, &mut held, &call), model.apply(&call));
    }
}

#[test]
fn calls_of_several_threads_take_effect_in_one_order() {
    shuttle::check_random(
        || {
            let (registry, clock) = (Registry::new([BASE]), Arc::new(AtomicUsize::new(0)));
            let mut model = Model::default();
            if thread_rng().r#gen() {
                served(&registry, &mut model);
            }
            let events = Arc::new(Mutex::new(Vec::new()));
            let threads: Vec<_> = (0..THREADS)
                .map(|caller| {
                    let (registry, clock, events) = (registry.clone(), clock.clone(), events.clone());
                    thread::spawn(move || {
                        let mut held = None;
                        for _ in 0..CALLS {
                            let call = any_call(caller, held.is_some());
                            let begin = clock.fetch_add(1, Ordering::SeqCst);
                            let outcome = run(&registry, &mut held, &call);
                            let end = clock.fetch_add(1, Ordering::SeqCst);
                            events.lock().unwrap().push(Event { call, outcome, begin, end });
                        }
                        let begin = clock.fetch_add(1, Ordering::SeqCst);
                        drop(held);
                        let (call, outcome) = (Call::Release { caller }, Outcome::Done(Ok(())));
                        let end = clock.fetch_add(1, Ordering::SeqCst);
                        events.lock().unwrap().push(Event { call, outcome, begin, end });
                    })
                })
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let events = events.lock().unwrap();
            assert!(is_explained(&model, &events), "no order of the calls explains {events:#?}");
        },
        SCHEDULES,
    );
}

/// The check finds a history that is not linearizable: a name resolves after the call that unloaded it has returned.
#[test]
fn a_history_without_an_order_is_found() {
    let id = AdapterId::unique();
    let event = |call, outcome, begin| Event { call, outcome, begin, end: begin + 1 };
    let unloaded = Ok(super::Unloaded { versions: vec![id] });
    let mut events = vec![
        event(Call::Begin { caller: 0, name: "a", on_duplicate: Refuse }, Outcome::Done(Ok(())), 0),
        event(Call::Serve { caller: 0, id }, Outcome::Replaced(Ok(None)), 2),
        event(Call::Unload { name: "a" }, Outcome::Unloaded(unloaded), 4),
        event(Call::Resolve { name: "a" }, Outcome::Resolved(Ok(Served::Adapter(id))), 6),
    ];
    assert!(!is_explained(&Model::default(), &events));
    events[3].begin = 3;
    assert!(is_explained(&Model::default(), &events), "beside the unload, the resolve may come first");
}

/// While one thread loads, which may take for ever, every call of the others returns.
#[test]
fn nothing_waits_for_a_load() {
    shuttle::check_random(
        || {
            let registry = Registry::new([BASE]);
            let old = load(&registry, "a");
            let pending = [registry.begin_load("a", Replace), registry.begin_load("new", Refuse)].map(Result::unwrap);
            let others: Vec<_> = (0..2)
                .map(|number| {
                    let registry = registry.clone();
                    thread::spawn(move || {
                        assert_eq!(registry.resolve("a"), Ok(Served::Adapter(old)));
                        assert_eq!(registry.resolve("new"), Err(super::loading("new")));
                        assert_eq!(registry.begin_load("a", Replace).err(), Some(super::loading("a")));
                        assert_eq!(registry.list()[0].id, old);
                        load(&registry, if number == 0 { "x" } else { "y" });
                    })
                })
                .collect();
            // The loads end after everything else.
            others.into_iter().for_each(|thread| thread.join().unwrap());
            drop(pending);
        },
        SCHEDULES / 10,
    );
}

/// Of two loads of one name, one is refused at once or comes after the other.
#[test]
fn one_of_two_loads_wins() {
    shuttle::check_random(
        || {
            let registry = Registry::new([BASE]);
            let load = |registry: Registry| {
                let id = AdapterId::unique();
                registry
                    .begin_load("a", Refuse)
                    .and_then(|pending| pending.serve(id))
                    .map(|replaced| (id, replaced.version))
            };
            let other = thread::spawn({
                let registry = registry.clone();
                move || load(registry)
            });
            let results = [load(registry.clone()), other.join().unwrap()];
            let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
            let [Ok((id, None))] = won[..] else { panic!("one load wins: {won:?} {lost:?}") };
            assert!(
                matches!(lost[..], [Err(RegistryError::Loading { .. } | RegistryError::Loaded { .. })]),
                "the other is refused: {lost:?}"
            );
            assert_eq!(registry.resolve("a"), Ok(Served::Adapter(id)));
        },
        SCHEDULES / 10,
    );
}
