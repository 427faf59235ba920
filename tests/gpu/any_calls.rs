//! Any calls on a GPU, against the model.

use proptest::{
    strategy::{Strategy as _, ValueTree as _},
    test_runner::TestRunner,
};

use crate::{
    backend::Backend,
    common::small::{choose, random_cases},
    model::{Broken, Call, Expected, PROMISES, Promise, calls, combined, machine::Machine},
};

/// Random calls, the same ones in each run.
fn cases(number: u32) -> impl Iterator<Item = Vec<Call>> {
    let mut runner = TestRunner::deterministic();
    (0..number).map(move |_| calls(choose(60, 30), true).new_tree(&mut runner).unwrap().current())
}

#[test]
#[ignore = "needs a GPU"]
fn any_calls_end_as_the_model_knows() {
    let backend = Backend::new();
    for (number, calls) in cases(random_cases(300)).enumerate() {
        let result = Expected::new(Machine::new(backend.clone())).run(&calls);
        assert!(result.is_ok(), "case {number}: {}: {calls:#?}", result.unwrap_err());
    }
}

/// The model sees each promise that is broken.
#[test]
#[ignore = "needs a GPU"]
fn every_promise_is_checked() {
    let backend = Backend::new();
    let breaks = |promise: Promise, calls: &[_]| {
        Expected::new(Broken { device: Machine::new(backend.clone()), promise }).run(calls).is_err()
    };
    for promise in PROMISES.into_iter().take(choose(PROMISES.len(), 2)) {
        assert!(cases(400).any(|calls| breaks(promise, &calls)), "nobody notices that {promise:?} is broken");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn combinations_are_sums() {
    combined::combinations_are_sums(&Backend::new());
}
