//! Embeddings and experts against sums of all products, with adapters of candle's tensors. Numbers are small, so that
//! every sum is exact in each type.

use std::collections::BTreeMap;

use aril::{
    DType, Slot,
    adapter::Adapter,
    model::{EmbeddingId, Experts, ExpertsId, ModelSpec, TpRank},
    plan::Capacity,
    pool::Lease,
};
use aril_candle::Adapters;
use candle_core::{DType as CandleDType, Result, Tensor};

use crate::{device, lease, of_candle, pool};

const RANK: usize = 3;
const HIDDEN: usize = 6;
const INTER: usize = 4;
const VOCAB: usize = 9;
const EXPERTS: usize = 3;
const TOP_K: usize = 2;
/// Of both adapters: `lora_alpha / r`.
const SCALING: f64 = 2.0;
/// By token: the adapter, if it has one.
const ADAPTERS: [Option<usize>; 5] = [Some(1), None, Some(0), Some(0), Some(1)];
/// One token of the fourth row's, and a choice of the fourth, are none.
const TOKENS: [u32; 5] = [0, 8, 3, VOCAB as u32, 5];
const CHOICE: [[u32; TOP_K]; 5] = [[0, 2], [1, 0], [2, 1], [u32::MAX, 0], [1, 1]];
const WEIGHTS: [[f32; TOP_K]; 5] = [[1.0, 0.5], [0.5, 0.5], [2.0, 1.0], [1.0, 0.5], [0.5, 1.0]];

type Rows = Vec<Vec<f32>>;

/// A row-major matrix of -1, 0 and 1, which depends on `seed`.
fn matrix(seed: usize, rows: usize, cols: usize) -> Rows {
    let value = |at: usize| ((at * at * 7 + at * 5 + seed * 13) % 11 % 3) as f32 - 1.0;
    (0..rows).map(|row| (0..cols).map(|col| value(row * cols + col)).collect()).collect()
}

fn tensor(rows: &Rows, dtype: CandleDType) -> Tensor {
    let (values, cols) = (rows.concat(), rows[0].len());
    Tensor::from_vec(values, (rows.len(), cols), &device()).unwrap().to_dtype(dtype).unwrap()
}

/// Factors of a module.
struct Module {
    a: Rows,
    b: Rows,
}

impl Module {
    /// `scaling · B (A x)`
    fn delta(&self, x: &[f32]) -> Vec<f32> {
        let product = |row: &Vec<f32>, x: &[f64]| row.iter().zip(x).map(|(a, x)| f64::from(*a) * x).sum::<f64>();
        let x: Vec<_> = x.iter().copied().map(f64::from).collect();
        let v: Vec<_> = self.a.iter().map(|a| product(a, &x)).collect();
        self.b.iter().map(|b| (SCALING * product(b, &v)) as f32).collect()
    }
}

/// Two adapters by the paths of their modules: the first has all, the second neither the gates nor the experts above 1.
fn modules() -> [BTreeMap<String, Module>; 2] {
    [0, 1].map(|adapter| {
        let experts = (0..EXPERTS).flat_map(|expert| {
            [("gate_proj", HIDDEN, INTER), ("up_proj", HIDDEN, INTER), ("down_proj", INTER, HIDDEN)]
                .map(|(name, input, output)| (format!("mlp.experts.{expert}.{name}"), input, output))
        });
        let all = experts.chain([("embed".to_owned(), VOCAB, HIDDEN)]);
        let has = |path: &str| adapter == 0 || !(path.contains("gate") || path.contains(".2."));
        let modules = all.enumerate().filter(|(_, (path, ..))| has(path));
        let module = |(number, (path, input, output)): (usize, (String, usize, usize))| {
            let seed = adapter * 5 + number;
            (path, Module { a: matrix(seed, RANK, input), b: matrix(seed + 1, output, RANK) })
        };
        modules.map(module).collect()
    })
}

fn adapter(modules: &BTreeMap<String, Module>) -> Adapter {
    let tensors = modules.iter().flat_map(|(path, Module { a, b })| {
        let of =
            if path == "embed" { ["lora_embedding_A", "lora_embedding_B"] } else { ["lora_A.weight", "lora_B.weight"] };
        [(a, of[0], CandleDType::F16), (b, of[1], CandleDType::BF16)]
            .map(|(factor, name, dtype)| (format!("{path}.{name}"), tensor(factor, dtype)))
    });
    aril_candle::adapter(r#"{"peft_type": "LORA", "r": 3, "lora_alpha": 6}"#, tensors).unwrap()
}

/// The adapters in a pool, their layers, and the slots of `ADAPTERS`, which the leases keep.
fn adapters(dtype: DType) -> (Adapters, EmbeddingId, ExpertsId, [Slot; 5], [Lease; 2]) {
    let mut spec = ModelSpec::new();
    let embedding = spec.embedding("embed", VOCAB, HIDDEN).unwrap();
    let experts = spec.experts(Experts::new("mlp.experts", EXPERTS, HIDDEN, INTER).top_k(TOP_K)).unwrap();
    // A layer with more experts, and fewer of a token.
    spec.experts(Experts::new("other.experts", EXPERTS + 1, HIDDEN, INTER).top_k(1)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let adapters = pool(&model, dtype, Capacity::tokens(5).slots(2).rank(8));
    let leases = modules().each_ref().map(|modules| lease(&adapters, &model, dtype, adapter(modules)));
    let slots = ADAPTERS.map(|adapter| adapter.map_or(Slot::BASE, |adapter| leases[adapter].slot()));
    (adapters, embedding, experts, slots, leases)
}

/// What an operation makes of `y`.
fn result(y: &Rows, x: &Tensor, dtype: CandleDType, operation: &aril_candle::Delta<'_>) -> Result<Rows> {
    let y = tensor(y, dtype);
    y.inplace_op2(x, operation)?;
    y.to_dtype(CandleDType::F32)?.to_vec2()
}

fn add(y: &mut [f32], delta: &[f32], weight: f32) {
    y.iter_mut().zip(delta).for_each(|(y, delta)| *y += weight * delta);
}

#[test]
fn embeddings_are_the_naive_sum() {
    let modules = modules();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (adapters, id, _, slots, _leases) = adapters(dtype);
        let (dtype, step) = (of_candle(dtype), adapters.step(&slots).unwrap());
        let (y, ids) = (matrix(1, 5, HIDDEN), Tensor::new(&TOKENS, &device()).unwrap());
        let mut expected = y.clone();
        for (row, adapter) in ADAPTERS.iter().enumerate() {
            let mut of_token = vec![0.0; VOCAB];
            let Some((adapter, one)) = adapter.zip(of_token.get_mut(TOKENS[row] as usize)) else { continue };
            *one = 1.0;
            add(&mut expected[row], &modules[adapter]["embed"].delta(&of_token), 1.0);
        }
        assert_eq!(result(&y, &ids, dtype, &step.embedding_delta(id)).unwrap(), expected, "{dtype:?}");
        assert_ne!(y, expected);
        // Some rows of the step.
        let (some, part) = (step.rows(2..5).unwrap(), ids.narrow(0, 2, 3).unwrap().reshape((1, 3)).unwrap());
        assert_eq!(
            result(&y[2..].to_vec(), &part, dtype, &some.embedding_delta(id)).unwrap(),
            expected[2..],
            "{dtype:?}"
        );
    }
}

#[test]
fn experts_are_the_naive_sum() {
    let modules = modules();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (adapters, _, id, slots, _leases) = adapters(dtype);
        let (dtype, step) = (of_candle(dtype), adapters.step(&slots).unwrap());
        let (x, inter) = (matrix(2, 5, HIDDEN), matrix(3, 5 * TOP_K, INTER));
        let (y, of_routes) = (matrix(4, 5, HIDDEN), matrix(5, 5 * TOP_K, HIDDEN));
        let gate_up = matrix(6, 5 * TOP_K, 2 * INTER);
        let (mut combined, mut down, mut wanted) = (y.clone(), of_routes.clone(), gate_up.clone());
        for (row, adapter) in ADAPTERS.iter().enumerate() {
            let Some(modules) = adapter.map(|adapter| &modules[adapter]) else { continue };
            for (k, (expert, weight)) in CHOICE[row].iter().zip(WEIGHTS[row]).enumerate() {
                let (route, of) = (row * TOP_K + k, |name| modules.get(&format!("mlp.experts.{expert}.{name}")));
                let (gate, up) = wanted[route].split_at_mut(INTER);
                for (half, name) in [(gate, "gate_proj"), (up, "up_proj")] {
                    of(name).iter().for_each(|module| add(half, &module.delta(&x[row]), 1.0));
                }
                if let Some(module) = of("down_proj") {
                    let delta = module.delta(&inter[route]);
                    add(&mut down[route], &delta, 1.0);
                    add(&mut combined[row], &delta, weight);
                }
            }
        }
        let (choice, weights) = (
            Tensor::new(&CHOICE, &device()).unwrap(),
            Tensor::new(&WEIGHTS, &device()).unwrap().to_dtype(dtype).unwrap(),
        );
        let routes = step.routes(&choice, Some(&weights)).unwrap();
        let (x, of_down) = (tensor(&x, dtype), tensor(&inter, dtype));
        assert_eq!(result(&gate_up, &x, dtype, &routes.gate_up_delta(id)).unwrap(), wanted, "{dtype:?}");
        assert_eq!(result(&of_routes, &of_down, dtype, &routes.down_delta(id)).unwrap(), down, "{dtype:?}");
        assert_eq!(result(&y, &of_down, dtype, &routes.combined_delta(id)).unwrap(), combined, "{dtype:?}");
        assert!(wanted != gate_up && down != of_routes && combined != y);
        // As a model that loops over its experts has them: the rows whose first route is to one.
        for expert in 0..EXPERTS as u32 {
            let rows = || (0..5).filter(|&row: &usize| CHOICE[row][0] == expert);
            let select = |from: &Rows| rows().map(|row| from[row * TOP_K].clone()).collect::<Rows>();
            let choice = Tensor::new(&[[expert]], &device()).unwrap().broadcast_as((rows().count(), 1)).unwrap();
            let some = step.rows(rows()).unwrap();
            let routes = some.routes(&choice, None).unwrap();
            let got = result(&select(&of_routes), &tensor(&select(&inter), dtype), dtype, &routes.down_delta(id));
            assert_eq!(got.unwrap(), select(&down), "{dtype:?}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let (adapters, embedding, experts, slots, _leases) = adapters(DType::F32);
    let (step, f32) = (adapters.step(&slots).unwrap(), CandleDType::F32);
    let tensor = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &device()).unwrap();
    let (x, ids) = (tensor(&[5, HIDDEN], f32), |dims: &[usize]| tensor(dims, CandleDType::U32));
    let (routes, y) = (|ids: &Tensor| step.routes(ids, None), || matrix(0, 5, HIDDEN));
    let mut other = ModelSpec::new();
    let foreign = other.embedding("embed", VOCAB, HIDDEN).unwrap();
    let of_foreign = other.experts(Experts::new("mlp.experts", EXPERTS, HIDDEN, INTER).top_k(TOP_K)).unwrap();
    for (ids, id, error) in [
        (tensor(&[5], f32), embedding, "`y` is in F32 and `x` in F32, but must be in F32 and U32"),
        (ids(&[4]), embedding, "4"),
        (ids(&[5, 2]).narrow(1, 0, 1).unwrap(), embedding, "`x` is not contiguous"),
        (ids(&[5]), foreign, "of another model"),
    ] {
        let refused = result(&y(), &ids, f32, &step.embedding_delta(id)).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused:?} instead of {error:?}");
    }
    let refused = routes(&tensor(&[5, 2], f32)).unwrap_err().to_string();
    assert!(refused.contains("`experts` is in F32, but must be in U32"), "{refused}");
    let inter = tensor(&[5 * TOP_K, INTER], f32);
    for (choice, id, error) in [
        (ids(&[4, TOP_K]), experts, "4 tokens"),
        (ids(&[5, TOP_K + 1]), experts, "the routes of a token must be at most 2, not 3"),
        (ids(&[5, 1]), experts, "`x` is [10, 4], but must be [5, 4]"),
        (ids(&[5, TOP_K]), of_foreign, "of another model"),
    ] {
        let refused = result(&y(), &inter, f32, &routes(&choice).unwrap().combined_delta(id)).unwrap_err().to_string();
        assert!(refused.contains(error), "{refused:?} instead of {error:?}");
    }
    let (choice, weights) = (ids(&[5, TOP_K]), tensor(&[5], f32));
    let short = step.routes(&choice, Some(&weights)).unwrap();
    let refused = result(&y(), &inter, f32, &short.combined_delta(experts)).unwrap_err().to_string();
    assert!(refused.contains("weights"), "{refused}");
    let routes = routes(&choice).unwrap();
    let refused = result(&y(), &x, f32, &routes.gate_up_delta(experts)).unwrap_err().to_string();
    assert!(refused.contains("`y` is [5, 6], but must be [10, 8]"), "{refused}");
    let half = tensor(&[5 * TOP_K, INTER], f32);
    let refused = routes.gate_up_delta(experts).add_to([&half, &half], &x).unwrap_err().to_string();
    assert!(refused.contains("`y` is 2 matrices, but must be one"), "{refused}");
    let wrong = [("embed.lora_embedding_A".to_owned(), tensor(&[RANK, VOCAB], CandleDType::F64))];
    let refused = aril_candle::adapter("{}", wrong).unwrap_err().to_string();
    assert!(refused.contains("`embed.lora_embedding_A` is in F64, but must be in BF16, F16 or F32"), "{refused}");
}
