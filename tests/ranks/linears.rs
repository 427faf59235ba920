//! Linear layers of every layout: the ranks hold all of their factors, and their deltas are the whole ones.

use aril::{
    adapter::ModuleKind,
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{Linear, LinearId, ModelSpec, Parallel, Part, SpecError, TpRank},
    routing::Batch,
};

use crate::{
    common::{adapters::adapter, cpu::slots},
    layout::{Layout, check_all},
    numbers::{SLOTS, TOKENS, delta, group, integers, module},
};

impl Layout {
    /// Checks all ranks of a group. Returns whether the layer can be divided.
    fn check(&self, size: usize) -> bool {
        let mut spec = ModelSpec::new();
        let id = spec.linear(self.linear()).unwrap();
        if let Some(uneven) = self.uneven(size) {
            for rank in 0..size {
                let error = spec.shard(TpRank::new(rank, size).unwrap()).unwrap_err();
                assert!(matches!(error, SpecError::Uneven { .. } | SpecError::Heads { .. }), "{error}");
                assert!(error.to_string().starts_with(&uneven), "{uneven}: {error}");
            }
            return false;
        }
        let paths = |module: usize| format!("layer.{}", self.modules[module].0);
        let one =
            |module_of: usize| module(ModuleKind::Linear, &paths(module_of), self.inputs, self.outputs(module_of));
        let separate: Vec<_> = (0..self.modules.len()).map(one).collect();
        self.check_deltas(id, &group(&spec, size, &adapter(&separate)), |token_x| {
            separate.iter().map(|lora| delta(lora, token_x)).collect()
        });
        // The same with an adapter of the fused module.
        let outputs = (0..self.modules.len()).map(|module| self.outputs(module)).sum();
        let fused = module(ModuleKind::Linear, "layer.all", self.inputs, outputs);
        self.check_deltas(id, &group(&spec, size, &adapter(std::slice::from_ref(&fused))), |token_x| {
            let mut all = delta(&fused, token_x);
            (0..self.modules.len()).map(|module| all.drain(..self.outputs(module)).collect()).collect()
        });
        true
    }

    /// Checks that the ranks' deltas, side by side or summed, are the whole ones, given by module for each token's
    /// input.
    fn check_deltas(&self, id: LinearId, ranks: &[WeightTable], whole: impl Fn(&[f32]) -> Vec<Vec<f32>>) {
        let x = integers(1, TOKENS * self.inputs);
        let deltas: Vec<_> = x.chunks(self.inputs).map(whole).collect();
        let mut held_by = (0..self.modules.len()).map(|module| vec![0; self.outputs(module)]).collect::<Vec<_>>();
        let mut sums = vec![0.0; 0];
        for (rank, weights) in ranks.iter().enumerate() {
            let site = &weights.model()[id];
            assert_eq!(Some(site.in_range()), self.held_inputs(rank, ranks.len()));
            let own_x: Vec<_> = x.chunks(self.inputs).flat_map(|x| x[site.in_range()].to_vec()).collect();
            let y = run(weights, id, &own_x);
            if self.parallel == Parallel::Row {
                sums.resize(y.len(), 0.0);
                sums.iter_mut().zip(&y).for_each(|(sum, y)| *sum += y);
            }
            let mut first = 0;
            for (module, slice) in site.slices().iter().enumerate() {
                let held = self.held_outputs(module, rank, ranks.len()).unwrap();
                let ranges = slice.ranges().iter().cloned().flatten().map(Some);
                let with_padding = ranges.chain(std::iter::repeat(None)).take(slice.out_features());
                assert!(with_padding.eq(held.iter().copied()), "{} of rank {rank}", slice.module());
                held.iter().flatten().for_each(|&row| held_by[module][row] += 1);
                if self.parallel != Parallel::Row {
                    for (token, y) in y.chunks(site.out_features()).enumerate() {
                        let expected = held.iter().map(|row| row.map_or(0.0, |row| deltas[token][module][row]));
                        let expected = expected.map(|delta| if SLOTS[token] >= 0 { delta } else { 0.0 });
                        assert!(expected.eq(y[first..][..held.len()].iter().copied()), "{}", slice.module());
                    }
                }
                first += held.len();
            }
        }
        // No output is missing.
        assert!(held_by.iter().flatten().all(|&ranks| ranks > 0));
        if self.parallel == Parallel::Row {
            let tokens = deltas.iter().zip(SLOTS);
            let masked =
                tokens.map(|(delta, slot)| delta.concat().into_iter().map(move |d| if slot >= 0 { d } else { 0.0 }));
            assert!(masked.flatten().eq(sums), "the sum of all ranks");
        }
    }
}

/// The delta of a rank.
fn run(weights: &WeightTable, id: LinearId, x: &[f32]) -> Vec<f32> {
    let site = &weights.model()[id];
    let mut y = vec![0.0; TOKENS * site.out_features()];
    let mut workspace = Workspace::default();
    let slots = slots(weights, SLOTS);
    let mut step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
    let x = Matrix::new(x, TOKENS, site.in_features()).unwrap();
    let layer = LoraLinear::new(weights, id).unwrap();
    layer.add_delta(&mut step, x, MatrixMut::new(&mut y, TOKENS, site.out_features()).unwrap()).unwrap();
    y
}

#[test]
fn every_layout() {
    check_all(Layout::check);
}

#[test]
fn descriptions_that_cannot_be_sharded_are_refused() {
    let refused = |layer: Linear, error: SpecError| {
        let mut spec = ModelSpec::new();
        assert_eq!(spec.linear(layer), Err(error));
        assert_eq!(spec.shard(TpRank::SINGLE).unwrap().num_entries(), 0);
    };
    let module = || "l.m".to_owned();
    let layer = |parallel| Linear::new("l", parallel, 4);
    for parallel in [Parallel::Row, Parallel::Replicated] {
        let error = SpecError::NotColumn { module: module() };
        refused(layer(parallel).replicated("m", 4), error.clone());
        refused(layer(parallel).vocab("m", 4, 4), error.clone());
        refused(layer(parallel).merged("m", [Part::even(4), Part::heads(2, 2)]), error);
    }
    let column = || layer(Parallel::Column);
    refused(column().vocab("m", 9, 8), SpecError::Padding { module: module(), vocab: 9, padded: 8 });
    let features = |features| SpecError::Features { path: module(), features };
    refused(column().vocab("m", 4, 1 << 31), features(1 << 31));
    refused(column().replicated("m", 0), features(0));
    refused(column().merged("m", []), features(0));
    refused(column().merged("m", [Part::even(4), Part::kv_heads(0, 2)]), features(0));
    refused(column().merged("m", [Part::even(1 << 30), Part::replicated(1 << 30)]), features(1 << 31));
}
