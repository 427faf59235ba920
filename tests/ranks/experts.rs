//! Experts, split over expert-parallel and tensor-parallel ranks.

use aril::{
    adapter::ModuleKind,
    cpu::{LoraExperts, Matrix, MatrixMut, Workspace},
    model::{Experts, ModelSpec, Shard, SpecError, TpRank},
    routing::{Batch, TopK},
};

use crate::{
    common::{
        adapters::{Lora, adapter},
        cpu::slots,
    },
    numbers::{RANK, SLOTS, TOKENS, delta, integers, module, table},
};

const HIDDEN: usize = 6;
const TOP_K: usize = 2;
const ROUTES: usize = TOKENS * TOP_K;

/// The factors of all experts.
struct Adapted {
    gate: Vec<Lora>,
    up: Vec<Lora>,
    down: Vec<Lora>,
}

/// The factors that all experts of an adapter share.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Shared {
    Nothing,
    /// A of gate and up, and B of down.
    Outer,
}

fn adapted(num_experts: usize, inter: usize, shared: Shared) -> Adapted {
    let all = |name: &str, inputs, outputs| {
        let one = |expert| module(ModuleKind::Linear, &format!("experts.{expert}.{name}"), inputs, outputs);
        (0..num_experts).map(one).collect::<Vec<_>>()
    };
    let [mut gate, mut up] = ["gate_proj", "up_proj"].map(|name| all(name, HIDDEN, inter));
    let mut down = all("down_proj", inter, HIDDEN);
    for (expert, (gate, (up, down))) in gate.iter_mut().zip(up.iter_mut().zip(&mut down)).enumerate() {
        for (lora, is_down) in [(gate, false), (up, false), (down, true)] {
            let (inputs, outputs) = if is_down { (inter, HIDDEN) } else { (HIDDEN, inter) };
            let seed = |own: usize, is_shared| if is_shared && shared == Shared::Outer { 0 } else { own };
            lora.a = integers(seed(1 + 2 * expert, !is_down), RANK * inputs);
            lora.b = integers(seed(2 + 2 * expert, is_down), RANK * outputs);
        }
    }
    Adapted { gate, up, down }
}

/// Checks groups of so many experts each, every group sharded over `size` ranks. Returns whether the intermediate
/// features can be divided.
fn check(groups: &[usize], size: usize, inter: usize, shared: Shared) -> bool {
    let (parts, num_experts) = (groups.len(), groups.iter().sum());
    let mut spec = ModelSpec::new();
    let id = spec.experts(Experts::new("experts", num_experts, HIDDEN, inter).top_k(TOP_K)).unwrap();
    let shard = |part: usize, rank: usize| {
        let (tp, own) = (TpRank::new(part * size + rank, parts * size).unwrap(), TpRank::new(rank, size).unwrap());
        let first = groups[..part].iter().sum();
        spec.shard(Shard::new(tp).experts_tp(own).held(id, first..first + groups[part]))
    };
    if !inter.is_multiple_of(size) {
        let error = SpecError::Uneven { path: "experts".into(), features: inter, shards: size, size };
        assert!(error.to_string().starts_with("`experts`"));
        (0..parts).for_each(|part| (0..size).for_each(|rank| assert_eq!(shard(part, rank).unwrap_err(), error)));
        return false;
    }
    let Adapted { gate, up, down } = adapted(num_experts, inter, shared);
    let all = adapter(&[&gate[..], &up, &down].concat());
    let ids: Vec<usize> = (0..ROUTES).map(|route| (5 * route + 1) % num_experts).collect();
    let router: Vec<f32> = (1..=ROUTES).map(|route| route as f32).collect();
    let (x, activated) = (integers(3, TOKENS * HIDDEN), integers(4, ROUTES * inter));
    let mut held_by = vec![vec![0; inter]; num_experts];
    // By route: gate and up, and the sum of down over all ranks.
    let (mut gate_up, mut sums) = (vec![0.0; ROUTES * 2 * inter], vec![0.0; ROUTES * HIDDEN]);
    // By token: the sum of all routes on all ranks.
    let mut combined = vec![0.0; TOKENS * HIDDEN];
    for (part, rank) in (0..parts).flat_map(|part| (0..size).map(move |rank| (part, rank))) {
        let weights = table(&shard(part, rank).unwrap(), std::slice::from_ref(&all));
        let site = &weights.model()[id];
        let (range, width) = (site.inter_range(), site.inter_range().len());
        assert_eq!(width, inter / size);
        site.held().iter().for_each(|&expert| range.clone().for_each(|feature| held_by[expert][feature] += 1));
        let local =
            |expert: &usize| site.held().iter().position(|held| held == expert).map_or(-1, |local| local as i32);
        let local: Vec<i32> = ids.iter().map(local).collect();
        let top_k = TopK::new(&local, TOP_K).unwrap().with_weights(&router).unwrap();
        let mut workspace = Workspace::default();
        let slots = slots(&weights, SLOTS);
        let mut step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
        let experts = LoraExperts::new(&weights, id).unwrap();

        let (x, mut y) = (Matrix::new(&x, TOKENS, HIDDEN).unwrap(), vec![0.0; ROUTES * 2 * width]);
        let y_matrix = MatrixMut::new(&mut y, ROUTES, 2 * width).unwrap();
        experts.add_gate_up_delta(&mut step, &top_k, x, y_matrix).unwrap();
        for (route, y) in y.chunks(2 * width).enumerate() {
            for (half, y) in y.chunks(width).enumerate() {
                let whole = &mut gate_up[(2 * route + half) * inter..][range.clone()];
                whole.iter_mut().zip(y).for_each(|(whole, y)| *whole += y);
            }
        }

        let own: Vec<f32> = activated.chunks(inter).flat_map(|row| row[range.clone()].to_vec()).collect();
        let mut y = vec![0.0; ROUTES * HIDDEN];
        let (own, y_matrix) =
            (Matrix::new(&own, ROUTES, width).unwrap(), MatrixMut::new(&mut y, ROUTES, HIDDEN).unwrap());
        experts.add_down_delta(&mut step, &top_k, own, y_matrix).unwrap();
        sums.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);

        let mut y = vec![0.0; TOKENS * HIDDEN];
        let y_matrix = MatrixMut::new(&mut y, TOKENS, HIDDEN).unwrap();
        experts.add_combined_delta(&mut step, &top_k, own, y_matrix).unwrap();
        combined.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);
    }
    // Every feature of every expert is on one rank.
    assert!(held_by.iter().flatten().all(|&ranks| ranks == 1));
    for (route, &expert) in ids.iter().enumerate() {
        let token = route / TOP_K;
        let expected = |lora: &Lora, x: &[f32]| {
            let delta = delta(lora, x);
            if SLOTS[token] >= 0 { delta } else { vec![0.0; delta.len()] }
        };
        let x = &x[token * HIDDEN..][..HIDDEN];
        let both = [expected(&gate[expert], x), expected(&up[expert], x)].concat();
        assert_eq!(gate_up[route * 2 * inter..][..2 * inter], both);
        let down = expected(&down[expert], &activated[route * inter..][..inter]);
        assert_eq!(sums[route * HIDDEN..][..HIDDEN], down);
        let combined = &mut combined[token * HIDDEN..][..HIDDEN];
        combined.iter_mut().zip(down).for_each(|(sum, down)| *sum -= router[route] * down);
    }
    assert!(combined.iter().all(|&left| left == 0.0), "{groups:?} {size} {shared:?}: {combined:?}");
    true
}

#[test]
fn tensor_parallel() {
    let (mut even, mut uneven) = (0, 0);
    for size in 1..=16 {
        for inter in [12, 70, 5 * size] {
            if check(&[2], size, inter, Shared::Nothing) { even += 1 } else { uneven += 1 }
        }
    }
    assert!(even >= 16 && uneven >= 16, "{even} even, {uneven} uneven");
}

/// Groups of up to 16 ranks, each group of experts on some of them.
#[test]
fn expert_parallel() {
    for (parts, size) in
        (1..=16).flat_map(|ranks| (1..=ranks).filter(move |parts| ranks % parts == 0).map(move |p| (p, ranks / p)))
    {
        let groups = vec![2; parts];
        for shared in [Shared::Nothing, Shared::Outer] {
            assert!(check(&groups, size, 5 * size, shared));
        }
        assert_eq!(check(&groups, size, 5 * size + 1, Shared::Nothing), size == 1);
    }
}

/// Ranks with different numbers of experts, also without any.
#[test]
fn uneven_expert_parallel() {
    for groups in [&[3, 2][..], &[1, 1, 2], &[0, 4], &[5, 0, 1, 0], &[4, 3, 3, 3]] {
        for (size, shared) in [1, 2].into_iter().flat_map(|size| [(size, Shared::Nothing), (size, Shared::Outer)]) {
            assert!(check(groups, size, 5 * size, shared));
        }
    }
}
