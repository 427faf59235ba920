//! Linear layers of every layout.

use std::ops::Range;

use aril::{
    adapter::ModuleKind,
    cpu::{LoraLinear, Matrix, MatrixMut, WeightTable, Workspace},
    model::{Linear, LinearId, ModelSpec, Parallel, Part, SpecError, TpRank},
    routing::Batch,
};

use crate::numbers::{SLOTS, TOKENS, adapter, delta, group, integers, module};

/// Output features of one module, and how ranks divide them.
#[derive(Clone, Copy, Debug)]
enum Piece {
    Even(usize),
    Heads(usize, usize),
    KvHeads(usize, usize),
    Whole(usize),
    Vocab(usize, usize),
}

use Piece::{Even, Heads, KvHeads, Vocab, Whole};

impl Piece {
    fn features(self) -> usize {
        match self {
            Even(features) | Whole(features) | Vocab(features, _) => features,
            Heads(heads, dim) | KvHeads(heads, dim) => heads * dim,
        }
    }

    fn part(self) -> Part {
        match self {
            Even(features) => Part::even(features),
            Heads(heads, dim) => Part::heads(heads, dim),
            KvHeads(heads, dim) => Part::kv_heads(heads, dim),
            Whole(features) => Part::replicated(features),
            Vocab(..) => unreachable!("a vocabulary is a module of its own"),
        }
    }

    /// The features that a rank holds, `None` for padding. `None` if they cannot be divided.
    fn held(self, rank: usize, size: usize) -> Option<Vec<Option<usize>>> {
        let units = |units: usize, features: usize, owner: &dyn Fn(usize) -> Range<usize>| {
            let mine = (0..units).filter(|&unit| owner(unit).contains(&rank));
            mine.flat_map(|unit| unit * features..(unit + 1) * features).map(Some).collect()
        };
        let divided = |count: usize, features: usize| {
            let each = count / size;
            count.is_multiple_of(size).then(|| units(count, features, &|unit| unit / each..unit / each + 1))
        };
        match self {
            Even(features) => divided(features, 1),
            Whole(features) => Some((0..features).map(Some).collect()),
            Heads(heads, dim) => divided(heads, dim),
            KvHeads(heads, dim) => {
                let copies = size / heads;
                let replicated = || units(heads, dim, &|head| head * copies..(head + 1) * copies);
                divided(heads, dim).or_else(|| size.is_multiple_of(heads).then(replicated))
            }
            Vocab(vocab, padded) => {
                let held = divided(padded, 1)?;
                Some(held.into_iter().map(|row| row.filter(|&row| row < vocab)).collect())
            }
        }
    }
}

/// A layer, described by its modules.
struct Layout {
    parallel: Parallel,
    inputs: usize,
    modules: Vec<(&'static str, Vec<Piece>)>,
}

impl Layout {
    fn linear(&self) -> Linear {
        let linear = Linear::new("layer", self.parallel, self.inputs).fused("all");
        self.modules.iter().fold(linear, |linear, (name, pieces)| match pieces[..] {
            [Even(features)] => linear.slice(*name, features),
            [Heads(heads, dim)] => linear.heads(*name, heads, dim),
            [KvHeads(heads, dim)] => linear.kv_heads(*name, heads, dim),
            [Whole(features)] => linear.replicated(*name, features),
            [Vocab(vocab, padded)] => linear.vocab(*name, vocab, padded),
            _ => linear.merged(*name, pieces.iter().map(|piece| piece.part())),
        })
    }

    fn outputs(&self, module: usize) -> usize {
        self.modules[module].1.iter().map(|piece| piece.features()).sum()
    }

    /// The inputs of a rank.
    fn held_inputs(&self, rank: usize, size: usize) -> Option<Range<usize>> {
        let each = self.inputs / size;
        match self.parallel {
            Parallel::Row => self.inputs.is_multiple_of(size).then(|| rank * each..(rank + 1) * each),
            _ => Some(0..self.inputs),
        }
    }

    /// The outputs of a module that a rank holds.
    fn held_outputs(&self, module: usize, rank: usize, size: usize) -> Option<Vec<Option<usize>>> {
        let (mut held, mut first) = (Vec::new(), 0);
        for piece in &self.modules[module].1 {
            let own = if self.parallel == Parallel::Column { *piece } else { Whole(piece.features()) };
            held.extend(own.held(rank, size)?.into_iter().map(|row| Some(first + row?)));
            first += piece.features();
        }
        Some(held)
    }

    /// The module, or layer, that cannot be divided over a group, if there is one.
    fn uneven(&self, size: usize) -> Option<String> {
        let module = |module: usize| self.held_outputs(module, 0, size).is_none();
        if let Some(uneven) = (0..self.modules.len()).find(|&i| module(i)) {
            return Some(format!("`layer.{}`", self.modules[uneven].0));
        }
        self.held_inputs(0, size).is_none().then(|| "`layer`".to_owned())
    }

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

    /// Checks that the ranks' deltas, side by side or summed, are the whole ones, given by module for each token's input.
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
                        let expected = expected.map(|delta| if SLOTS[token].index().is_some() { delta } else { 0.0 });
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
            let masked = tokens.map(|(delta, slot)| {
                delta.concat().into_iter().map(move |d| if slot.index().is_some() { d } else { 0.0 })
            });
            assert!(masked.flatten().eq(sums), "the sum of all ranks");
        }
    }
}

/// The delta of a rank.
fn run(weights: &WeightTable, id: LinearId, x: &[f32]) -> Vec<f32> {
    let site = &weights.model()[id];
    let mut y = vec![0.0; TOKENS * site.out_features()];
    let mut workspace = Workspace::default();
    let mut step = weights.step(&Batch::new(&SLOTS), &mut workspace).unwrap();
    let x = Matrix::new(x, TOKENS, site.in_features()).unwrap();
    let layer = LoraLinear::new(weights, id).unwrap();
    layer.add_delta(&mut step, x, MatrixMut::new(&mut y, TOKENS, site.out_features()).unwrap()).unwrap();
    y
}

/// Checks a layout in groups of 1 to 16 ranks. `layout` takes a number of heads. Some of them divide, and some do not.
fn check(layout: impl Fn(usize) -> Layout) {
    let (mut even, mut uneven) = (0, 0);
    for size in 1..=16 {
        for heads in [1, 2, 3, 4, 8, 16, size, 3 * size] {
            if layout(heads).check(size) { even += 1 } else { uneven += 1 }
        }
    }
    assert!(even >= 32 && uneven >= 32, "{even} even, {uneven} uneven");
}

fn column(modules: Vec<(&'static str, Vec<Piece>)>) -> Layout {
    Layout { parallel: Parallel::Column, inputs: 10, modules }
}

#[test]
fn columns() {
    check(|heads| column(vec![("gate", vec![Even(5 * heads)]), ("up", vec![Even(5 * heads)])]));
}

/// Groups may have more ranks than key-value heads.
#[test]
fn attention() {
    check(|heads| {
        column(vec![("q", vec![Heads(4 * heads, 6)]), ("k", vec![KvHeads(heads, 6)]), ("v", vec![KvHeads(heads, 6)])])
    });
}

/// Each head of q has the features of its query, then those of its gate.
#[test]
fn gated_attention() {
    check(|heads| {
        column(vec![
            ("q", vec![Heads(2 * heads, 2 * 9)]),
            ("k", vec![KvHeads(heads, 9)]),
            ("v", vec![KvHeads(heads, 9)]),
        ])
    });
}

/// One module has several sharded parts.
#[test]
fn merged_columns() {
    check(|heads| {
        column(vec![
            ("qkv", vec![Heads(heads, 4), Heads(heads, 4), Heads(2 * heads, 7)]),
            ("z", vec![Heads(2 * heads, 7)]),
        ])
    });
}

/// Sharded and replicated parts in one module, and beside each other.
#[test]
fn merged_columns_with_replicated_parts() {
    check(|heads| {
        let merged = vec![Heads(heads, 7), KvHeads(2, 30), Whole(5), Even(2 * heads)];
        column(vec![("a", vec![Whole(7)]), ("in", merged), ("g", vec![Whole(66)])])
    });
}

/// With fewer, as many, or more padded outputs than a rank holds.
#[test]
fn vocabularies() {
    check(|heads| column(vec![("lm_head", vec![Vocab(67, 67_usize.next_multiple_of(heads))])]));
    check(|heads| column(vec![("lm_head", vec![Vocab(2, 2 * heads)])]));
    check(|heads| column(vec![("lm_head", vec![Vocab(6 * heads, 6 * heads)])]));
}

#[test]
fn rows() {
    check(|heads| Layout { parallel: Parallel::Row, inputs: 5 * heads, modules: vec![("o", vec![Even(11)])] });
}

#[test]
fn several_modules_in_rows() {
    let modules = || vec![("o", vec![Even(11)]), ("p", vec![Even(3)])];
    check(|heads| Layout { parallel: Parallel::Row, inputs: 7 * heads, modules: modules() });
}

#[test]
fn replicated() {
    let layout = Layout {
        parallel: Parallel::Replicated,
        inputs: 10,
        modules: vec![("a", vec![Even(7)]), ("b", vec![Even(66)])],
    };
    assert!((1..=16).all(|size| layout.check(size)));
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
