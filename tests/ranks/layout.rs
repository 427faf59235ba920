//! Layers by description, and who holds what of them, worked out without the library.

use std::ops::Range;

use aril::model::{Linear, Parallel, Part};

/// Output features of one module, and how ranks divide them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Piece {
    Even(usize),
    Heads(usize, usize),
    KvHeads(usize, usize),
    Whole(usize),
    Vocab(usize, usize),
}

pub(crate) use Piece::{Even, Heads, KvHeads, Vocab, Whole};

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
pub(crate) struct Layout {
    pub(crate) parallel: Parallel,
    pub(crate) inputs: usize,
    pub(crate) modules: Vec<(&'static str, Vec<Piece>)>,
}

impl Layout {
    pub(crate) fn linear(&self) -> Linear {
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

    pub(crate) fn outputs(&self, module: usize) -> usize {
        self.modules[module].1.iter().map(|piece| piece.features()).sum()
    }

    /// The inputs of a rank.
    pub(crate) fn held_inputs(&self, rank: usize, size: usize) -> Option<Range<usize>> {
        let each = self.inputs / size;
        match self.parallel {
            Parallel::Row => self.inputs.is_multiple_of(size).then(|| rank * each..(rank + 1) * each),
            _ => Some(0..self.inputs),
        }
    }

    /// The outputs of a module that a rank holds.
    pub(crate) fn held_outputs(&self, module: usize, rank: usize, size: usize) -> Option<Vec<Option<usize>>> {
        let (mut held, mut first) = (Vec::new(), 0);
        for piece in &self.modules[module].1 {
            let own = if self.parallel == Parallel::Column { *piece } else { Whole(piece.features()) };
            held.extend(own.held(rank, size)?.into_iter().map(|row| Some(first + row?)));
            first += piece.features();
        }
        Some(held)
    }

    /// The module, or layer, that cannot be divided over a group, if there is one.
    pub(crate) fn uneven(&self, size: usize) -> Option<String> {
        let module = |module: usize| self.held_outputs(module, 0, size).is_none();
        if let Some(uneven) = (0..self.modules.len()).find(|&i| module(i)) {
            return Some(format!("`layer.{}`", self.modules[uneven].0));
        }
        self.held_inputs(0, size).is_none().then(|| "`layer`".to_owned())
    }
}

pub(crate) fn column(modules: Vec<(&'static str, Vec<Piece>)>) -> Layout {
    Layout { parallel: Parallel::Column, inputs: 10, modules }
}

/// Layouts of real models with this number of heads. Some groups cannot divide them.
pub(crate) fn layouts(heads: usize) -> Vec<Layout> {
    let attention =
        |q: Piece, dim: usize| vec![("q", vec![q]), ("k", vec![KvHeads(heads, dim)]), ("v", vec![KvHeads(heads, dim)])];
    vec![
        column(vec![("gate", vec![Even(5 * heads)]), ("up", vec![Even(5 * heads)])]),
        // Groups may have more ranks than key-value heads.
        column(attention(Heads(4 * heads, 6), 6)),
        // Each head of q has the features of its query, then those of its gate.
        column(attention(Heads(2 * heads, 2 * 9), 9)),
        // One module has several sharded parts.
        column(vec![
            ("qkv", vec![Heads(heads, 4), Heads(heads, 4), Heads(2 * heads, 7)]),
            ("z", vec![Heads(2 * heads, 7)]),
        ]),
        // Sharded and replicated parts in one module, and beside each other.
        column(vec![
            ("a", vec![Whole(7)]),
            ("in", vec![Heads(heads, 7), KvHeads(2, 30), Whole(5), Even(2 * heads)]),
            ("g", vec![Whole(66)]),
        ]),
        // Some ranks may have padding, or nothing else.
        column(vec![("lm_head", vec![Vocab(67, 67_usize.next_multiple_of(heads))])]),
        column(vec![("lm_head", vec![Vocab(2, 2 * heads)])]),
        column(vec![("lm_head", vec![Vocab(6 * heads, 6 * heads)])]),
        Layout { parallel: Parallel::Row, inputs: 5 * heads, modules: vec![("o", vec![Even(11)])] },
        Layout {
            parallel: Parallel::Row,
            inputs: 7 * heads,
            modules: vec![("o", vec![Even(48)]), ("p", vec![Even(3 * heads)])],
        },
        Layout {
            parallel: Parallel::Replicated,
            inputs: 10,
            modules: vec![("a", vec![Even(7)]), ("b", vec![Even(66)])],
        },
    ]
}

/// Checks each layout in groups of 1 to 16 ranks, with numbers of heads that divide and some that do not. `check`
/// returns whether the group can divide the layout.
pub(crate) fn check_all(check: impl Fn(&Layout, usize) -> bool) {
    let (mut even, mut uneven) = (vec![0; layouts(1).len()], vec![0; layouts(1).len()]);
    for size in 1..=16 {
        for heads in [1, 2, 3, 4, 8, 16, size, 3 * size] {
            for (i, layout) in layouts(heads).iter().enumerate() {
                if check(layout, size) { even[i] += 1 } else { uneven[i] += 1 }
            }
        }
    }
    let replicated = |i: usize| layouts(1)[i].parallel == Parallel::Replicated;
    assert!(even.iter().all(|&count| count >= 8), "{even:?} of the groups divide the layouts");
    assert!(uneven.iter().enumerate().all(|(i, &count)| replicated(i) == (count == 0)), "{uneven:?} do not");
}
