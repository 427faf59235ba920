//! Laws of the reference, which judges all other code.
//!
//! All numbers are small integers, so that every sum is exact and laws are equations.

use aril::{
    model::{Activation, Halves},
    reference::{
        Delta, Factors, embedding,
        experts::{activation, columns, combine},
        linear,
    },
};
use proptest::prelude::*;

/// A token, a layer and an adapter.
#[derive(Clone, Debug)]
struct Problem {
    x: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
    /// The base model's weights, `[out, in]`.
    w: Vec<f64>,
    rank: usize,
}

impl Problem {
    fn factors(&self, scaling: f64) -> Factors<'_> {
        Factors { a: &self.a, b: &self.b, rank: self.rank, scaling }
    }

    fn out_features(&self) -> usize {
        self.b.len() / self.rank
    }
}

fn integers(len: usize) -> impl Strategy<Value = Vec<f64>> {
    prop::collection::vec((-3..=3_i8).prop_map(f64::from), len)
}

fn problems() -> impl Strategy<Value = Problem> {
    (1..12_usize, 1..12_usize, 1..5_usize).prop_flat_map(|(in_features, out_features, rank)| {
        let (a, b) = (integers(rank * in_features), integers(out_features * rank));
        let (x, w) = (integers(in_features), integers(out_features * in_features));
        (x, a, b, w).prop_map(move |(x, a, b, w)| Problem { x, a, b, w, rank })
    })
}

/// `W x`, W `[out, in]`.
fn times(w: &[f64], x: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn values(deltas: &[Delta]) -> Vec<f64> {
    deltas.iter().map(|delta| delta.value).collect()
}

#[test]
fn a_product_worked_by_hand() {
    // A x = [1·1 + 2·10, 3·1 + 4·10] = [21, 43]; B (A x) = [5·21 − 6·43, 7·21 + 8·43] = [−153, 491].
    let factors = Factors { a: &[1.0, 2.0, 3.0, 4.0], b: &[5.0, -6.0, 7.0, 8.0], rank: 2, scaling: 0.5 };
    let deltas = linear(&[1.0, 10.0], factors);
    assert_eq!(deltas, [Delta { value: -76.5, magnitude: 181.5 }, Delta { value: 245.5, magnitude: 245.5 }]);
}

#[test]
fn a_product_that_cancels_keeps_its_magnitude() {
    let factors = Factors { a: &[1.0, 1.0], b: &[2.0], rank: 1, scaling: -3.0 };
    assert_eq!(linear(&[5.0, -5.0], factors), [Delta { value: 0.0, magnitude: 60.0 }]);
}

#[test]
fn an_embedding_worked_by_hand() {
    // A is `[2, 3]`, and id 2 is its column [3, 6]. B is `[2, 2]`.
    let factors = Factors { a: &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], b: &[1.0, 1.0, 1.0, -1.0], rank: 2, scaling: 2.0 };
    let deltas = embedding(2, 3, factors);
    assert_eq!(deltas, [Delta { value: 18.0, magnitude: 18.0 }, Delta { value: -6.0, magnitude: 18.0 }]);
}

#[test]
fn a_combine_worked_by_hand() {
    let delta = |value, magnitude| Delta { value, magnitude };
    let outputs = [vec![delta(1.0, 3.0), delta(-4.0, 4.0)], vec![delta(2.0, 2.0), delta(8.0, 10.0)]];
    assert_eq!(combine(&[2.0, -0.5], &outputs), [delta(1.0, 7.0), delta(-12.0, 13.0)]);
}

/// Values from tables of the error function and of `exp`, to ten digits.
#[test]
fn activations_have_the_values_of_tables() {
    let near = |got: f64, want: f64| assert!((got - want).abs() <= 1e-10 * want.abs().max(1.0), "{got}, not {want}");
    for (x, gelu) in [(1.0, 0.841_344_746_1), (-1.0, -0.158_655_253_9), (2.0, 1.954_499_736_1), (0.0, 0.0), (9.0, 9.0)]
    {
        near(activation(Activation::Gelu, Some(x), 3.0), 3.0 * gelu);
        near(activation(Activation::Gelu, None, x), gelu);
    }
    // The sigmoid of twice tanh's argument: 1.595769122 (1 + 0.044715) = 1.667123936.
    near(activation(Activation::GeluTanh, Some(1.0), 1.0), 1.0 / (1.0 + (-1.667_123_938_4_f64).exp()));
    near(activation(Activation::Silu, Some(1.0), 1.0), 0.731_058_578_6);
    near(activation(Activation::Silu, Some(-2.0), 10.0), -2.384_058_440_4);
    assert_eq!(activation(Activation::Relu2, Some(-3.0), 2.0), 0.0);
    assert_eq!(activation(Activation::Relu2, Some(3.0), 2.0), 18.0);
    let oai = Activation::SwigluOai { alpha: 1.0, limit: 2.0 };
    near(activation(oai, Some(1.0), 1.0), 2.0 * 0.731_058_578_6);
    // The gate is clamped at 2, where the sigmoid is 0.8807970780, but not at −2. Up is clamped at both.
    near(activation(oai, Some(50.0), 50.0), 2.0 * 0.880_797_078_0 * 3.0);
    near(activation(oai, Some(-3.0), -50.0), 3.0 * 0.047_425_873_2);
}

proptest! {
    #[test]
    fn a_zero_b_adds_nothing(problem in problems()) {
        let b = vec![0.0; problem.b.len()];
        let deltas = linear(&problem.x, Factors { b: &b, ..problem.factors(7.0) });
        let nothing = Delta { value: 0.0, magnitude: 0.0 };
        prop_assert_eq!(deltas, vec![nothing; problem.out_features()]);
    }

    #[test]
    fn the_delta_is_linear_in_the_scaling(problem in problems(), scaling in -4..=4_i8) {
        let scaled = linear(&problem.x, problem.factors(f64::from(scaling)));
        let once = linear(&problem.x, problem.factors(1.0));
        for (scaled, once) in scaled.iter().zip(once) {
            prop_assert_eq!(scaled.value, f64::from(scaling) * once.value);
            prop_assert_eq!(scaled.magnitude, f64::from(scaling.abs()) * once.magnitude);
        }
    }

    #[test]
    fn the_magnitude_bounds_the_value(problem in problems()) {
        let deltas = linear(&problem.x, problem.factors(-2.0));
        prop_assert!(deltas.iter().all(|delta| delta.value.abs() <= delta.magnitude));
    }

    /// `(W + s B A) x = W x + delta`.
    #[test]
    fn merged_weights_agree(problem in problems(), scaling in -4..=4_i8) {
        let (in_features, scaling) = (problem.x.len(), f64::from(scaling));
        let mut merged = problem.w.clone();
        for (out, row) in merged.chunks_mut(in_features).enumerate() {
            for (k, w) in row.iter_mut().enumerate() {
                let product = |r: usize| problem.b[out * problem.rank + r] * problem.a[r * in_features + k];
                *w += scaling * (0..problem.rank).map(product).sum::<f64>();
            }
        }
        let deltas = values(&linear(&problem.x, problem.factors(scaling)));
        let apart: Vec<f64> = times(&problem.w, &problem.x).iter().zip(deltas).map(|(y, delta)| y + delta).collect();
        prop_assert_eq!(times(&merged, &problem.x), apart);
    }

    /// A lookup is a product with a one-hot vector.
    #[test]
    fn an_embedding_is_a_linear_layer_of_one_hot_inputs(problem in problems(), id: prop::sample::Index) {
        let vocab = problem.x.len();
        let id = id.index(vocab);
        let one_hot: Vec<f64> = (0..vocab).map(|i| f64::from(u8::from(i == id))).collect();
        prop_assert_eq!(embedding(id, vocab, problem.factors(2.0)), linear(&one_hot, problem.factors(2.0)));
    }

    /// A gate's function satisfies f(x) − f(−x) = x.
    #[test]
    fn activations_of_opposites_are_as_far_apart_as_they(x in -20.0..20.0_f64) {
        for function in [Activation::Gelu, Activation::GeluTanh, Activation::Silu] {
            let apart = activation(function, None, x) - activation(function, None, -x);
            // f(x) = x s(x) with s(x) + s(−x) = 1.
            prop_assert!((apart - x).abs() <= 1e-12 * x.abs().max(1.0), "{function:?}: {apart}");
        }
    }

    #[test]
    fn an_activation_is_linear_in_up(gate in -9.0..9.0_f64, up in -9.0..9.0_f64) {
        for function in [Activation::Gelu, Activation::GeluTanh, Activation::Relu2, Activation::Silu] {
            prop_assert_eq!(activation(function, Some(gate), up), activation(function, None, gate) * up);
        }
        // Without limits, and with up less one.
        let oai = Activation::SwigluOai { alpha: 1.0, limit: f32::INFINITY };
        prop_assert_eq!(activation(oai, Some(gate), up), activation(Activation::Silu, Some(gate), up + 1.0));
    }

    /// Every feature of gate and of up has a distinct place.
    #[test]
    fn halves_fill_the_output(inter in 1..20_usize) {
        for halves in [Halves::GateUp, Halves::UpGate, Halves::Interleaved] {
            let mut places: Vec<usize> = (0..inter).flat_map(|feature| columns(halves, inter, feature)).collect();
            places.sort_unstable();
            prop_assert_eq!(places, (0..2 * inter).collect::<Vec<_>>());
        }
    }

    /// A shared B may therefore be applied once, to the sum of the experts' `A x`.
    #[test]
    fn a_shared_b_may_come_behind_the_combine(problem in problems(), weights in integers(3)) {
        let (rank, identity) = (problem.rank, identity(problem.rank));
        let inputs: Vec<Vec<f64>> = (0..3).map(|i| problem.x.iter().map(|x| x + f64::from(i)).collect()).collect();
        let each: Vec<_> = inputs.iter().map(|x| linear(x, problem.factors(2.0))).collect();
        let shrunk: Vec<_> = inputs
            .iter()
            .map(|x| linear(x, Factors { a: &problem.a, b: &identity, rank, scaling: 1.0 }))
            .collect();
        let sum = values(&combine(&weights, &shrunk));
        let behind = linear(&sum, Factors { a: &identity, b: &problem.b, rank, scaling: 2.0 });
        prop_assert_eq!(values(&combine(&weights, &each)), values(&behind));
    }

    #[test]
    fn a_combine_is_linear_in_its_weights(problem in problems(), weights in integers(4)) {
        let outputs: Vec<_> = weights.iter().map(|scaling| linear(&problem.x, problem.factors(*scaling))).collect();
        let once = vec![linear(&problem.x, problem.factors(1.0)); 4];
        prop_assert_eq!(combine(&[1.0; 4], &outputs), combine(&weights, &once));
    }
}

fn identity(size: usize) -> Vec<f64> {
    (0..size * size).map(|i| f64::from(u8::from(i / size == i % size))).collect()
}
