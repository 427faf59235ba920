//! The requests of a trace, by figures that can be added up by hand.

use aril_bench::trace::{Request, Trace};

const TRACE: Trace = Trace { seed: 7, requests: 3000, adapters: 1000, zipf: 1.0, rate: Some(10.0) };

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
