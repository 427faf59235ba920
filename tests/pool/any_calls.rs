//! Any calls on the CPU, against the model, and mistakes, each by its name.

use proptest::{prelude::*, strategy::ValueTree as _, test_runner::TestRunner};

use crate::{
    backend::Backend,
    model::{Broken, Expected, Promise, calls, combined, machine::Machine, misuse, promises_without_graphs, wrong},
};

fn cpu() -> Machine {
    Machine::new(Backend::new())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_calls_end_as_the_model_knows(calls in calls(60, false)) {
        let result = Expected::new(cpu()).run(&calls);
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}

/// The model sees each promise that is broken.
#[test]
fn every_promise_is_checked() {
    let breaks = |promise: Promise, calls: &[_]| Expected::new(Broken { device: cpu(), promise }).run(calls).is_err();
    for promise in promises_without_graphs() {
        let mut runner = TestRunner::deterministic();
        let mut cases = (0..400).map(|_| calls(60, false).new_tree(&mut runner).unwrap().current());
        assert!(cases.any(|calls| breaks(promise, &calls)), "nobody notices that {promise:?} is broken");
    }
}

#[test]
fn every_mistake_is_named() {
    misuse::every_mistake_is_named(&Backend::new());
}

#[test]
fn every_refusal_is_named() {
    wrong::every_refusal_is_named(&Backend::new());
}

#[test]
fn combinations_are_sums() {
    combined::combinations_are_sums(&Backend::new());
}

#[test]
fn random_calls_are_refused_or_computed() {
    wrong::random_calls_are_refused_or_computed(&Backend::new(), 2000);
}
