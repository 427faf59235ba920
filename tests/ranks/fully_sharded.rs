//! Fully sharded layers: each rank has a part of A and of B, and the ranks exchange `v` between shrink and expand.

use aril::{
    DType,
    adapter::{Adapter, ModuleKind},
    cpu::{FullyShardedLinear, LoraLinear, Matrix, MatrixMut, Step, WeightTable, Workspace},
    model::{Collective, Experts, Linear, LinearId, Model, ModelSpec, Parallel, Shard, SliceSite, SpecError, TpRank},
    plan::{Capacity, ForwardPlan, LinearPlan, PlanError},
    routing::Batch,
};

use crate::{
    common::{
        adapters::{Lora, adapter},
        compare::Place,
        cpu::{matrix_mut, slots},
        slices::SliceBuffers,
    },
    layout::{Layout, check_all},
    numbers::{TOKENS, delta, integers, module, module_of_rank, table},
};

/// The first two tokens have adapters of different ranks.
const SLOTS: [i32; TOKENS] = [0, 1, -1];

fn fully_sharded(spec: &ModelSpec, rank: usize, size: usize) -> Result<Model, SpecError> {
    spec.shard(Shard::new(TpRank::new(rank, size).unwrap()).fully_sharded())
}

impl Layout {
    /// The module, or layer, that cannot be divided if the outputs of a row-parallel layer are divided, too.
    fn fully_uneven(&self, size: usize) -> Option<String> {
        let is_uneven = |&module: &usize| self.parallel == Parallel::Row && !self.outputs(module).is_multiple_of(size);
        let outputs =
            || (0..self.modules.len()).find(is_uneven).map(|module| format!("`layer.{}`", self.modules[module].0));
        self.uneven(size).or_else(outputs)
    }

    /// The modules of the two adapters: one for each module of the layer, of several ranks, and the fused one.
    fn loras(&self) -> [Vec<Lora>; 2] {
        let all = (0..self.modules.len()).map(|module| self.outputs(module)).sum();
        let one = |i: usize| {
            let path = format!("layer.{}", self.modules[i].0);
            module_of_rank([17, 1, 6][i], ModuleKind::Linear, &path, self.inputs, self.outputs(i))
        };
        let fused = module_of_rank(10, ModuleKind::Linear, "layer.all", self.inputs, all);
        [(0..self.modules.len()).map(one).collect(), vec![fused]]
    }

    /// Checks all ranks of a group. Returns whether the layer can be divided.
    fn check_fully_sharded(&self, size: usize) -> bool {
        let mut spec = ModelSpec::new();
        let id = spec.linear(self.linear()).unwrap();
        if let Some(uneven) = self.fully_uneven(size) {
            for rank in 0..size {
                let error = fully_sharded(&spec, rank, size).unwrap_err();
                assert!(matches!(error, SpecError::Uneven { .. } | SpecError::Heads { .. }), "{error}");
                assert!(error.to_string().starts_with(&uneven), "{uneven}: {error}");
            }
            return false;
        }
        let loras = self.loras();
        let adapters = loras.each_ref().map(|loras| adapter(loras));
        let models: Vec<_> = (0..size).map(|rank| fully_sharded(&spec, rank, size).unwrap()).collect();
        let ranks: Vec<_> = models.iter().map(|model| table(model, &adapters)).collect();
        if size == 1 || self.parallel == Parallel::Replicated {
            for weights in &ranks {
                assert_eq!(weights.model()[id].exchange(), None);
                assert_eq!(FullyShardedLinear::new(weights, id).unwrap_err(), PlanError::NotFullySharded);
                LoraLinear::new(weights, id).unwrap();
            }
            return true;
        }
        self.check_parts(id, &models, &adapters);
        let x = integers(1, TOKENS * self.inputs);
        let v = exchanged(id, &ranks, &x, self.inputs);
        // By token: the deltas of all modules, one after the other.
        let whole = SLOTS.iter().zip(x.chunks(self.inputs)).map(|(slot, x)| match usize::try_from(*slot) {
            Ok(slot) => loras[slot].iter().flat_map(|lora| delta(lora, x)).collect(),
            Err(_) => vec![0.0; loras[1][0].out_features],
        });
        let whole: Vec<Vec<f32>> = whole.collect();
        let mut sum = vec![0.0; TOKENS * whole[0].len()];
        for (rank, weights) in ranks.iter().enumerate() {
            let added = expanded(id, weights, &v);
            if self.parallel == Parallel::Row {
                sum.iter_mut().zip(added).for_each(|(sum, added)| *sum += added);
                continue;
            }
            let mut own = added.into_iter();
            for whole in &whole {
                let mut first = 0;
                for module in 0..self.modules.len() {
                    for row in self.held_outputs(module, rank, size).unwrap() {
                        assert_eq!(own.next().unwrap(), row.map_or(0.0, |row| whole[first + row]));
                    }
                    first += self.outputs(module);
                }
            }
        }
        assert!(self.parallel != Parallel::Row || sum == whole.concat());
        true
    }

    /// Checks that the ranks have each row of A, or each row of B, once.
    fn check_parts(&self, id: LinearId, ranks: &[Model], adapters: &[Adapter; 2]) {
        for adapter in adapters {
            let images: Vec<_> = ranks.iter().map(|model| adapter.plan(model, DType::F32).unwrap()).collect();
            for (i, entry) in images[0].entries().iter().enumerate() {
                let a_ranks: Vec<_> = images.iter().map(|image| image.entries()[i].a_rank).collect();
                if self.parallel == Parallel::Row {
                    assert!(a_ranks.iter().all(|&rows| rows == entry.rank));
                } else {
                    assert_eq!(a_ranks.iter().sum::<usize>(), entry.rank);
                    assert!(a_ranks.iter().all(|&rows| rows <= entry.rank.div_ceil(ranks.len())));
                }
            }
        }
        for (module, slice) in ranks[0][id].slices().iter().enumerate() {
            if self.parallel == Parallel::Row {
                let ranges = ranks.iter().flat_map(|model| model[id].slices()[module].delta_range());
                assert!(ranges.eq(0..self.outputs(module)));
            } else {
                assert_eq!(slice.delta_range(), 0..slice.out_features());
            }
        }
    }
}

/// The matrix that expand reads, and its shape, after shrink on all ranks and the exchange.
fn exchanged(id: LinearId, ranks: &[WeightTable], x: &[f32], inputs: usize) -> (Vec<f32>, [usize; 2]) {
    let shrink = |weights: &WeightTable| {
        let site = &weights.model()[id];
        let x: Vec<_> = x.chunks(inputs).flat_map(|x| x[site.in_range()].to_vec()).collect();
        let [rows, cols] = site.exchange().unwrap().sent(TOKENS, weights.capacity().max_rank);
        let mut v = vec![f32::NAN; rows * cols];
        let x = Matrix::new(&x, TOKENS, site.in_features()).unwrap();
        with_step(weights, |step| {
            let layer = FullyShardedLinear::new(weights, id).unwrap();
            layer.shrink(step, x, MatrixMut::new(&mut v, rows, cols).unwrap()).unwrap();
        });
        // What no adapter computes is zero, because the engine sends it, too.
        assert!(v.iter().all(|v| v.is_finite()) && v[(TOKENS - 1) * cols..].iter().all(|&v| v == 0.0));
        v
    };
    let parts: Vec<_> = ranks.iter().map(shrink).collect();
    let exchange = ranks[0].model()[id].exchange().unwrap();
    let v = match exchange.collective() {
        Collective::AllGather => parts.concat(),
        Collective::AllReduce => (0..parts[0].len()).map(|i| parts.iter().map(|part| part[i]).sum()).collect(),
    };
    (v, exchange.received(TOKENS, ranks[0].capacity().max_rank))
}

/// What a rank adds to its outputs.
fn expanded(id: LinearId, weights: &WeightTable, (v, [rows, cols]): &(Vec<f32>, [usize; 2])) -> Vec<f32> {
    let site = &weights.model()[id];
    let before = integers(5, TOKENS * site.out_features());
    let place = Place { offset: 0, rows: TOKENS, cols: site.out_features(), stride: site.out_features() };
    let slices: Vec<usize> = site.slices().iter().map(SliceSite::out_features).collect();
    let v = Matrix::new(v, *rows, *cols).unwrap();
    let [fused, separate] = [false, true].map(|separate| {
        let outputs = SliceBuffers::new(&before, place, &slices, separate);
        let mut buffers = outputs.buffers();
        let y = outputs.matrices(&mut buffers, |buffer, place| matrix_mut(buffer, place));
        with_step(weights, |step| FullyShardedLinear::new(weights, id).unwrap().expand(step, v, y).unwrap());
        outputs.merged(buffers)
    });
    assert_eq!(fused, separate);
    fused.iter().zip(before).map(|(after, before)| after - before).collect()
}

fn with_step(weights: &WeightTable, run: impl FnOnce(&Step<'_>)) {
    let mut workspace = Workspace::default();
    run(&weights.step(&Batch::new(&slots(weights, SLOTS)), &mut workspace).unwrap());
}

#[test]
fn every_layout() {
    check_all(Layout::check_fully_sharded);
}

/// Experts and embeddings are the same as without full sharding.
#[test]
fn other_layers_are_as_before() {
    let mut spec = ModelSpec::new();
    let experts = spec.experts(Experts::new("experts", 2, 4, 8).top_k(1)).unwrap();
    spec.embedding("embed", 5, 4).unwrap();
    let model = fully_sharded(&spec, 1, 2).unwrap();
    assert_ne!(model, spec.shard(TpRank::new(1, 2).unwrap()).unwrap());
    assert_eq!(model[experts].inter_range(), 4..8);
    let linear = |path, inputs, outputs| module(ModuleKind::Linear, path, inputs, outputs);
    let modules = [
        linear("experts.0.up_proj", 4, 8),
        linear("experts.1.down_proj", 8, 4),
        module(ModuleKind::Embedding, "embed", 5, 4),
    ];
    let adapter = adapter(&modules);
    let image = adapter.plan(&model, DType::F32).unwrap();
    assert!(image.entries().len() == 3 && image.entries().iter().all(|entry| entry.a_rank == entry.rank));
}

/// Operations that exchange nothing would compute a part of the delta.
#[test]
fn other_plans_refuse_fully_sharded_layers() {
    for parallel in [Parallel::Column, Parallel::Row] {
        let mut spec = ModelSpec::new();
        let id = spec.linear(Linear::new("layer", parallel, 8).slice("m", 8)).unwrap();
        let model = fully_sharded(&spec, 0, 2).unwrap();
        let site = &model[id];
        let capacity = Capacity::tokens(1).slots(1).rank(8);
        assert_eq!(LinearPlan::new(site, DType::BF16, capacity).unwrap_err(), PlanError::FullySharded);
        assert_eq!(ForwardPlan::new(site, DType::BF16, capacity).unwrap_err(), PlanError::FullySharded);
    }
}

/// Two slices of three ranks each are sent, and those of two ranks are received.
#[test]
fn ranks_exchange_half_of_an_adapters_ranks_rounded_up() {
    let mut spec = ModelSpec::new();
    let id = spec.linear(Linear::new("layer", Parallel::Column, 8).slice("m", 8).slice("n", 8)).unwrap();
    let exchange = fully_sharded(&spec, 1, 2).unwrap()[id].exchange().unwrap();
    assert_eq!((exchange.sent(TOKENS, 5), exchange.received(TOKENS, 5)), ([TOKENS, 6], [2 * TOKENS, 6]));
}
