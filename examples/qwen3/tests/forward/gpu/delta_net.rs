//! The kernels of gated delta nets against references on the CPU in f64.

use aril_qwen3::kernels::{THREADS, delta_net};
use cudarc::driver::PushKernelArg as _;
use half::{bf16, f16};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom as _};

use super::{
    device::Buffer,
    kernels::{EPS, Float, GAP, Kernels, assert_near, bytes, floats, noise, push_all, round, spread},
};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn gates_hold<T: Float>(seed: u64) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    let (gpu, dtype) = (&kernels.gpu, T::DTYPE);
    for (tokens, query_heads, kv_heads, dim) in [(1, 1, 1, 2), (3, 5, 1, 20), (7, 16, 2, 256)] {
        let what = format!("{tokens} tokens, {query_heads} and {kv_heads} heads of {dim} in {dtype}");
        let (queries, kv) = (query_heads * dim, 2 * kv_heads * dim);
        let cols = 2 * queries + kv;
        let qkv = noise::<T>(&mut rng, tokens * cols, 3.0);
        let (from, out) = (gpu.upload(&spread(&qkv, cols)), gpu.poisoned(tokens * (queries + kv) * size_of::<T>()));
        let addresses = [from.address(), out.address()];
        let function = kernels.function(&format!("without_gates_{dtype}"), 0);
        let (parts, stride) = ((queries + kv).div_ceil(THREADS as usize), cols + GAP);
        kernels.launch(&function, (tokens, parts), THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&stride).arg(&query_heads).arg(&kv_heads).arg(&dim);
        });
        let rows = || qkv.chunks_exact(cols);
        let halves = |half: usize| {
            rows().flat_map(move |row| row[..2 * queries].chunks_exact(dim).skip(half).step_by(2)).collect::<Vec<_>>()
        };
        let of_row = |(row, queries): (&[T], &[&[T]])| [&queries.concat()[..], &row[row.len() - kv..]].concat();
        let expected: Vec<T> = rows().zip(halves(0).chunks_exact(query_heads)).flat_map(of_row).collect();
        assert_eq!(bytes(&out.read::<T>()), bytes(&expected), "{what}");

        let x = noise::<T>(&mut rng, tokens * queries, 2.0);
        let x_stride = queries + GAP;
        let function = kernels.function(&format!("gate_{dtype}"), 0);
        for gate_dim in [dim, 0] {
            let to = gpu.upload(&spread(&x, queries));
            let addresses = [to.address(), from.address()];
            kernels.launch(&function, (tokens, queries.div_ceil(THREADS as usize)), THREADS, 0, |kernel| {
                push_all(kernel, &addresses);
                kernel.arg(&queries).arg(&x_stride).arg(&stride).arg(&gate_dim);
            });
            let gates: Vec<T> = match gate_dim {
                0 => rows().flat_map(|row| vec![row[0]; queries]).collect(),
                _ => halves(1).concat(),
            };
            let gated = |(x, gate): (&T, &T)| x.to_f32() * round::<T>(sigmoid(gate.to_f32().into()) as f32);
            let expected: Vec<f32> = x.iter().zip(&gates).map(gated).collect();
            let got: Vec<T> = to.read::<T>().chunks_exact(x_stride).flat_map(|row| row[..queries].to_vec()).collect();
            assert_near(&got, &expected, &what);
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn gates_are_those_of_the_cpu() {
    gates_hold::<f32>(20);
    gates_hold::<bf16>(21);
    gates_hold::<f16>(22);
}

#[derive(Clone, Copy, Debug)]
struct Heads {
    keys: usize,
    values: usize,
    key_dim: usize,
    value_dim: usize,
    taps: usize,
}

impl Heads {
    fn value_features(self) -> usize {
        self.values * self.value_dim
    }

    fn convolved(self) -> usize {
        2 * self.keys * self.key_dim + self.value_features()
    }

    /// Of a row of the projection.
    fn cols(self) -> usize {
        self.convolved() + self.value_features() + 2 * self.values
    }

    fn matrix(self) -> usize {
        self.key_dim * self.value_dim
    }
}

/// A layer's weights, and what it keeps of sequences.
struct Layer<T> {
    heads: Heads,
    weights: Vec<T>,
    a_log: Vec<T>,
    dt_bias: Vec<T>,
    norm: Vec<T>,
    kept: Vec<T>,
    matrices: Vec<f32>,
}

/// A sequence's row, the place of its state, and its tokens in a step: from a position on.
#[derive(Clone, Copy, Debug)]
struct Run {
    row: usize,
    state: usize,
    position: usize,
    tokens: usize,
}

/// What a step gives: the convolution, the result, and what is kept.
type Given<T> = (Vec<T>, Vec<T>, Vec<T>, Vec<f32>);

impl<T: Float> Layer<T> {
    fn new(rng: &mut StdRng, heads: Heads, states: usize) -> Self {
        let Heads { values, value_dim, taps, .. } = heads;
        let convolved = heads.convolved();
        Self {
            heads,
            weights: noise(rng, convolved * taps, 1.0),
            a_log: noise(rng, values, 1.0),
            dt_bias: noise(rng, values, 2.0),
            norm: noise(rng, value_dim, 2.0),
            kept: noise(rng, states * (taps - 1) * convolved, 2.0),
            matrices: noise(rng, states * values * heads.matrix(), 0.5),
        }
    }

    /// Runs the kernels on a step of these sequences, with rows of `x` for their tokens, beside rows without tokens.
    fn run(&self, kernels: &Kernels, x: &[T], runs: &[Run], rows: usize) -> Given<T> {
        let (gpu, dtype, heads) = (&kernels.gpu, T::DTYPE, self.heads);
        let Heads { keys, values, key_dim, value_dim, taps } = heads;
        let (mut positions, mut sequences, mut states) = (Vec::new(), Vec::new(), vec![0_i32; rows]);
        for run in runs {
            states[run.row] = run.state as i32;
            positions.extend((run.position..).take(run.tokens).map(|position| position as i32));
            sequences.extend(vec![run.row as i32; run.tokens]);
        }
        let (tokens, convolved) = (positions.len(), heads.convolved());
        let stride = heads.cols() + GAP;
        let x = gpu.upload(&spread(x, heads.cols()));
        let [weights, a_log, dt_bias, norm, kept] =
            [&self.weights, &self.a_log, &self.dt_bias, &self.norm, &self.kept].map(|values| gpu.upload(values));
        let matrices = gpu.upload(&self.matrices);
        let [positions, sequences, states] = [&positions, &sequences, &states].map(|values| gpu.upload(values));
        let [qkv, out] = [convolved, heads.value_features()].map(|cols| gpu.poisoned(tokens * cols * size_of::<T>()));

        let addresses = [&x, &weights, &kept, &positions, &sequences, &states, &qkv].map(Buffer::address);
        let function = kernels.function(&format!("convolve_{dtype}"), 0);
        kernels.launch(&function, (tokens, convolved.div_ceil(THREADS as usize)), THREADS, 0, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&stride).arg(&convolved).arg(&taps);
        });
        let inputs = [&x, &qkv, &a_log, &dt_bias, &norm, &positions, &sequences, &states, &kept, &matrices, &out];
        let addresses = inputs.map(Buffer::address);
        let shared_bytes = delta_net::shared_bytes(key_dim, value_dim);
        let function = kernels.function(&format!("delta_rule_{dtype}"), shared_bytes);
        kernels.launch(&function, (rows, values), delta_net::threads(value_dim), shared_bytes, |kernel| {
            push_all(kernel, &addresses);
            kernel.arg(&tokens).arg(&stride).arg(&EPS);
            kernel.arg(&keys).arg(&values).arg(&key_dim).arg(&value_dim).arg(&taps);
        });
        (qkv.read(), out.read(), kept.read(), matrices.read())
    }

    /// The inputs of a run's convolution: those that were kept, and its tokens'.
    fn inputs(&self, x: &[T], run: Run) -> Vec<T> {
        let (convolved, cols) = (self.heads.convolved(), self.heads.cols());
        let kept = (self.heads.taps - 1) * convolved;
        let mut inputs = match run.position {
            0 => vec![T::default(); kept],
            _ => self.kept[run.state * kept..][..kept].to_vec(),
        };
        inputs.extend(x.chunks_exact(cols).flat_map(|row| &row[..convolved]));
        inputs
    }

    /// The recurrence of a run behind its convolution, in f64: the results, and the matrices.
    fn recur(&self, x: &[T], qkv: &[T], run: Run) -> (Vec<f64>, Vec<f64>) {
        let Heads { keys, values, key_dim, value_dim, .. } = self.heads;
        let (convolved, features, len) = (self.heads.convolved(), self.heads.value_features(), self.heads.matrix());
        let mut matrices: Vec<f64> = self.matrices[run.state * values * len..][..values * len]
            .iter()
            .map(|&element| if run.position == 0 { 0.0 } else { element.into() })
            .collect();
        let wide = |values: &[T]| values.iter().map(|value| f64::from(value.to_f32())).collect::<Vec<_>>();
        let unit = |values: &[T]| {
            let values = wide(values);
            let squares: f64 = values.iter().map(|value| value * value).sum();
            values.iter().map(|value| value / (squares + 1e-6).sqrt()).collect::<Vec<_>>()
        };
        let mut results = Vec::new();
        for (row, qkv) in x.chunks_exact(self.heads.cols()).zip(qkv.chunks_exact(convolved)) {
            for (head, matrix) in matrices.chunks_exact_mut(len).enumerate() {
                let key_start = head / (values / keys) * key_dim;
                let (query, key) =
                    (unit(&qkv[key_start..][..key_dim]), unit(&qkv[(keys * key_dim + key_start)..][..key_dim]));
                let value = wide(&qkv[2 * keys * key_dim + head * value_dim..][..value_dim]);
                let of_head = |place: usize| f64::from(row[convolved + features + place * values + head].to_f32());
                let beta = f64::from(round::<T>(sigmoid(of_head(0)) as f32));
                let softplus = (of_head(1) + f64::from(self.dt_bias[head].to_f32())).exp().ln_1p();
                let decay = (-f64::from(self.a_log[head].to_f32()).exp() * softplus).exp();
                matrix.iter_mut().for_each(|element| *element *= decay);
                let result: Vec<f64> = (0..value_dim)
                    .map(|column| {
                        let column_of = |i: usize| i * value_dim + column;
                        let known: f64 = (0..key_dim).map(|i| matrix[column_of(i)] * key[i]).sum();
                        let delta = (value[column] - known) * beta;
                        (0..key_dim).for_each(|i| matrix[column_of(i)] += key[i] * delta);
                        let sum: f64 = (0..key_dim).map(|i| matrix[column_of(i)] * query[i]).sum();
                        sum / (key_dim as f64).sqrt()
                    })
                    .collect();
                let squares: f64 = result.iter().map(|value| value * value).sum();
                let scale = 1.0 / (squares / value_dim as f64 + f64::from(EPS)).sqrt();
                results.extend(result.iter().enumerate().map(|(feature, value)| {
                    let z = f64::from(row[convolved + head * value_dim + feature].to_f32());
                    value * scale * f64::from(self.norm[feature].to_f32()) * z * sigmoid(z)
                }));
            }
        }
        (results, matrices)
    }
}

const SIZES: [Heads; 4] = [
    Heads { keys: 1, values: 1, key_dim: 4, value_dim: 8, taps: 2 },
    Heads { keys: 2, values: 4, key_dim: 16, value_dim: 24, taps: 4 },
    Heads { keys: 1, values: 3, key_dim: 20, value_dim: 33, taps: 3 },
    Heads { keys: 2, values: 4, key_dim: 128, value_dim: 128, taps: 4 },
];

fn delta_nets_hold<T: Float>(seed: u64) {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(seed));
    for heads in SIZES {
        // Two rows have no token, and two states no sequence.
        let (rows, mut places) = (7, Vec::from_iter(0..7));
        places.shuffle(&mut rng);
        let run = |row: usize, position, tokens| Run { row, state: places[row], position, tokens };
        let runs = [run(0, 0, 7), run(1, 5, 1), run(3, 3, 2), run(4, 0, 1), run(5, 4, 30)];
        let layer = Layer::<T>::new(&mut rng, heads, 7);
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let x = noise::<T>(&mut rng, tokens * heads.cols(), 2.0);
        let (qkv, out, kept, matrices) = layer.run(&kernels, &x, &runs, rows);
        let (mut expected_kept, mut is_expected) = (layer.kept.clone(), vec![true; 7]);
        let (convolved, cols, features) = (heads.convolved(), heads.cols(), heads.value_features());
        let mut first = 0;
        for run in runs {
            let what = format!("{heads:?}, {run:?} in {}", T::DTYPE);
            let of = first..first + run.tokens;
            first = of.end;
            let x = &x[of.start * cols..of.end * cols];
            let inputs = layer.inputs(x, run);
            let silu = |feature: usize| {
                let weights = &layer.weights[feature % convolved * heads.taps..][..heads.taps];
                let inputs = floats(&inputs[feature..]).into_iter().step_by(convolved);
                let sum: f32 = floats(weights).iter().zip(inputs).map(|(weight, x)| weight * x).sum();
                let sum = round::<T>(sum);
                sum * sigmoid(sum.into()) as f32
            };
            let expected: Vec<f32> = (0..run.tokens * convolved).map(silu).collect();
            let qkv = &qkv[of.start * convolved..of.end * convolved];
            for (got, expected) in qkv.iter().zip(&expected) {
                // A sum of another rounding.
                let bound = (6.0 * T::UNIT + 1e-5) * f64::from(expected.abs()) + 1e-5 + 2.0 * T::UNIT;
                assert!(f64::from((got.to_f32() - expected).abs()) <= bound, "{what}: {got:?}, not {expected}");
            }
            let kept_len = (heads.taps - 1) * convolved;
            expected_kept[run.state * kept_len..][..kept_len].copy_from_slice(&inputs[run.tokens * convolved..]);

            let (results, expected) = layer.recur(x, qkv, run);
            for (got, expected) in out[of.start * features..of.end * features].iter().zip(&results) {
                let bound = 8.0 * T::UNIT * expected.abs() + 20.0 * T::UNIT + 1e-3;
                assert!((f64::from(got.to_f32()) - expected).abs() <= bound, "{what}: {got:?}, not {expected}");
            }
            let matrices = &matrices[run.state * heads.values * heads.matrix()..];
            for (got, expected) in matrices.iter().zip(&expected) {
                let bound = 8.0 * T::UNIT + 1e-4;
                assert!((f64::from(*got) - expected).abs() <= bound, "{what}: a state of {got}, not {expected}");
            }
            is_expected[run.state] = false;
        }
        assert_eq!(bytes(&kept), bytes(&expected_kept), "{heads:?}: what is kept");
        let len = heads.values * heads.matrix();
        for state in (0..7).filter(|&state| is_expected[state]) {
            let of = state * len..(state + 1) * len;
            assert_eq!(bytes(&matrices[of.clone()]), bytes(&layer.matrices[of]), "{heads:?}: state {state}");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn delta_nets_are_those_of_the_cpu() {
    delta_nets_hold::<f32>(23);
    delta_nets_hold::<bf16>(24);
    delta_nets_hold::<f16>(25);
}

/// A prompt in one step, and in parts beside other sequences, leaves the same bits.
#[test]
#[ignore = "needs a GPU"]
fn a_state_does_not_depend_on_the_steps() {
    let (kernels, mut rng) = (Kernels::new(), StdRng::seed_from_u64(26));
    for heads in SIZES {
        let layer = Layer::<bf16>::new(&mut rng, heads, 3);
        let (cols, features) = (heads.cols(), heads.value_features());
        let x = noise::<bf16>(&mut rng, 12 * cols, 2.0);
        let run = |row, state, position, tokens| Run { row, state, position, tokens };
        let (_, whole, kept, matrices) = layer.run(&kernels, &x, &[run(0, 1, 0, 12)], 1);
        let (mut parts, mut layer) = (Vec::new(), layer);
        let mut position = 0;
        for tokens in [1, 1, 5, 2, 3] {
            let other = noise::<bf16>(&mut rng, 2 * cols, 2.0);
            let of_part = &x[position * cols..(position + tokens) * cols];
            let runs = [run(0, 2, rng.random_range(0..3), 2), run(3, 1, position, tokens)];
            let (_, out, kept, matrices) = layer.run(&kernels, &[&other[..], of_part].concat(), &runs, 4);
            parts.extend_from_slice(&out[2 * features..]);
            layer = Layer { kept, matrices, ..layer };
            position += tokens;
        }
        assert_eq!(bytes(&parts), bytes(&whole), "{heads:?}");
        let of_state = |kept: &[bf16], matrices: &[f32]| {
            let [a, b] = [kept.len() / 3, matrices.len() / 3];
            (bytes(&kept[a..2 * a]).to_vec(), bytes(&matrices[b..2 * b]).to_vec())
        };
        assert_eq!(of_state(&layer.kept, &layer.matrices), of_state(&kept, &matrices), "{heads:?}");
    }
}
