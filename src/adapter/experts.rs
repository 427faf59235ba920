//! The factors of experts: every form that adapters have them in (listed in [`adapter`](super)), taken apart into experts and
//! modules, and their place in an image.
//!
//! Invariant: each module of each expert has at most one pair of factors, of the shape that the model needs.

use std::{collections::BTreeMap, ops::Range};

use super::{
    AdapterError, TensorName,
    config::Config,
    image::SlotImage,
    names::{InExperts, Item},
    rectangle::Rectangle,
    tensor::{Stored, View},
};
use crate::model::{ExpertModule, ExpertSlice, ExpertsSite, Halves, MAX_RANK, ProjectionSite};

/// How PEFT's factors of a parameter that holds all experts stand to it.
///
/// PEFT takes a parameter `[experts, m, n]` for one from m to n features, or (from 0.19 on, unless the module says that it is
/// transposed) from n to m, which need not be what the model does with it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Orientation {
    /// A takes the features that an expert takes: the delta is `B A`, as of other modules.
    Forward,
    /// A takes the features that an expert gives: the delta is `(B A)ᵀ`.
    Reversed,
}

/// The factors of a module or a stack, not taken apart yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    path: &'a str,
    a: Stored<'a>,
    b: Stored<'a>,
}

impl<'a> Source<'a> {
    pub(super) fn new(path: &'a str, [a, b]: [Stored<'a>; 2]) -> Self {
        Self { path, a, b }
    }

    /// Whether it has no elements, and so says nothing of any module.
    fn is_empty(&self) -> bool {
        [self.a, self.b].iter().all(|factor| factor.tensor.bytes().is_empty())
    }

    fn misshapen(&self, want: String) -> AdapterError {
        let (tensor, a, b) = self.shapes();
        AdapterError::ExpertShapes { tensor, a, b, want }
    }

    fn ambiguous(&self, remedy: &'static str) -> AdapterError {
        let (tensor, a, b) = self.shapes();
        AdapterError::AmbiguousExperts { tensor, a, b, remedy }
    }

    fn shapes(&self) -> (TensorName, Vec<usize>, Vec<usize>) {
        (self.a.name.clone(), self.a.tensor.shape().to_vec(), self.b.tensor.shape().to_vec())
    }
}

/// What an adapter has for the experts of one layer.
#[derive(Debug)]
pub(super) struct Layer<'a, 'm> {
    site: &'m ExpertsSite,
    config: &'a Config,
    pairs: BTreeMap<(ExpertModule, usize), Pair<'a>>,
    parameters: Vec<Source<'a>>,
    empty: Vec<(Source<'a>, InExperts)>,
}

/// The factors of one module of one expert.
#[derive(Clone, Copy, Debug)]
struct Pair<'a> {
    path: &'a str,
    a: View<'a>,
    b: View<'a>,
    scaling: f32,
}

/// The factors of a module of several experts: those of the first, and how far apart in their tensors the others' are.
#[derive(Clone, Copy, Debug)]
struct Steps<'a> {
    a: View<'a>,
    a_step: usize,
    b: View<'a>,
    b_step: usize,
}

impl<'a> Steps<'a> {
    fn at(&self, expert: usize) -> [View<'a>; 2] {
        [self.a.moved(expert * self.a_step), self.b.moved(expert * self.b_step)]
    }
}

/// What a pair of tensors is of: a module, or gate and up in one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Part {
    One(ExpertModule),
    GateUp,
}

impl Part {
    fn named(name: &str, site: &ExpertsSite) -> Option<Self> {
        Some(match (name, site.halves().is_some()) {
            ("gate_proj" | "w1", true) => Self::One(ExpertModule::Gate),
            ("up_proj" | "w3", true) | ("up_proj" | "w1", false) => Self::One(ExpertModule::Up),
            ("gate_up_proj", true) => Self::GateUp,
            ("down_proj" | "w2", _) => Self::One(ExpertModule::Down),
            _ => return None,
        })
    }

    /// The parameters that a model with such experts has, and their names.
    fn parameters(site: &ExpertsSite) -> [(Self, &'static str); 2] {
        let first = match site.halves() {
            Some(_) => (Self::GateUp, "gate_up_proj"),
            None => (Self::One(ExpertModule::Up), "up_proj"),
        };
        [first, (Self::One(ExpertModule::Down), "down_proj")]
    }

    /// Whole input and output features.
    fn features(self, site: &ExpertsSite) -> [usize; 2] {
        let [hidden, inter] = [site.gate_up().input().whole, site.down().input().whole];
        match self {
            Self::One(ExpertModule::Gate | ExpertModule::Up) => [hidden, inter],
            Self::One(ExpertModule::Down) => [inter, hidden],
            Self::GateUp => [hidden, 2 * inter],
        }
    }

    /// Takes factors apart: the modules that they are of, each with its own.
    fn apart<'a>(
        self,
        halves: Halves,
        [a, b]: [View<'a>; 2],
    ) -> impl Iterator<Item = (ExpertModule, View<'a>, View<'a>)> {
        let modules = match (self, halves) {
            (Self::One(module), _) => return [Some((module, a, b)), None].into_iter().flatten(),
            (Self::GateUp, Halves::GateUp | Halves::Interleaved) => [ExpertModule::Gate, ExpertModule::Up],
            (Self::GateUp, Halves::UpGate) => [ExpertModule::Up, ExpertModule::Gate],
        };
        let (rank, inter) = (b.cols, b.rows / 2);
        let half = |i: usize| {
            let a = if a.rows == rank { a } else { a.rows(i * rank..(i + 1) * rank) };
            let b = match halves {
                Halves::GateUp | Halves::UpGate => b.rows(i * inter..(i + 1) * inter),
                Halves::Interleaved => b.every_row(i, 2),
            };
            Some((modules[i], a, b))
        };
        [half(0), half(1)].into_iter().flatten()
    }
}

impl<'a, 'm> Layer<'a, 'm> {
    pub(super) fn new(site: &'m ExpertsSite, config: &'a Config) -> Self {
        Self { site, config, pairs: BTreeMap::new(), parameters: Vec::new(), empty: Vec::new() }
    }

    /// Adds factors whose path leads `at` these experts.
    pub(super) fn add(&mut self, source: Source<'a>, at: &InExperts) -> Result<(), AdapterError> {
        if source.is_empty() {
            self.empty.push((source, at.clone()));
            return Ok(());
        }
        let (name, fms) = match at.item {
            Item::Module(name) => (name, false),
            Item::Fms(name) => (name, true),
            Item::Parameter => {
                self.parameters.push(source);
                return Ok(());
            }
        };
        let module = || source.path.to_owned();
        let part = Part::named(name, self.site).ok_or_else(|| AdapterError::NoPlace { module: module() })?;
        let num_experts = self.site.num_experts();
        let (experts, steps) = match at.expert {
            Some(expert) if expert >= num_experts => {
                return Err(AdapterError::NoExpert { module: module(), expert, num_experts });
            }
            Some(expert) => (expert..expert + 1, self.one(source, part)?),
            None if fms => (0..num_experts, self.fms(source, part)?),
            None if source.a.tensor.shape().len() == 2 => (0..num_experts, self.side_by_side(source, part)?),
            None => (0..num_experts, self.stacked(source, part)?),
        };
        self.insert(experts, part, (source.path, source.path), steps)
    }

    fn one(&self, source: Source<'a>, part: Part) -> Result<Steps<'a>, AdapterError> {
        let [input, output] = part.features(self.site);
        let ([rank, _], _) = (source.a.matrix()?, source.b.matrix()?);
        source.a.expect_shape(rank, input)?;
        source.b.expect_shape(output, rank)?;
        Ok(Steps { a: source.a.view([rank, input]), a_step: 0, b: source.b.view([output, rank]), b_step: 0 })
    }

    fn stacked(&self, source: Source<'a>, part: Part) -> Result<Steps<'a>, AdapterError> {
        let ([input, output], num_experts) = (part.features(self.site), self.site.num_experts());
        let want = || format!("[{num_experts} or 1, rank, {input}] and [{num_experts} or 1, {output}, rank]");
        let is_stack = |len: usize| len == 1 || len == num_experts;
        let shapes = (source.a.tensor.shape(), source.b.tensor.shape());
        let (&[a_stack, a_rank, a_in], &[b_stack, b_out, b_rank]) = shapes else {
            return Err(source.misshapen(want()));
        };
        if !is_stack(a_stack) || !is_stack(b_stack) || [a_in, b_out] != [input, output] {
            return Err(source.misshapen(want()));
        }
        // An A for gate and another for up, in the order of B's halves.
        let two = part == Part::GateUp && a_rank == 2 * b_rank && self.site.stored().halves != Halves::Interleaved;
        if a_rank != b_rank && !two {
            let (tensor, a_cols, b_rows) = (source.a.name.clone(), a_in, b_out);
            return Err(AdapterError::RankMismatch { tensor, a_rank, a_cols, b_rows, b_rank });
        }
        let step = |stack: usize, elems: usize| if stack == 1 { 0 } else { elems };
        Ok(Steps {
            a: source.a.view([a_rank, a_in]),
            a_step: step(a_stack, a_rank * a_in),
            b: source.b.view([b_out, b_rank]),
            b_step: step(b_stack, b_out * b_rank),
        })
    }

    fn fms(&self, source: Source<'a>, part: Part) -> Result<Steps<'a>, AdapterError> {
        let ([input, output], num_experts) = (part.features(self.site), self.site.num_experts());
        let (a, b) = (source.a.tensor.shape(), source.b.tensor.shape());
        let stacked = |rank| (a, b) == (&[num_experts, rank, input][..], &[num_experts, output, rank][..]);
        let transposed = |rank| (a, b) == (&[num_experts, input, rank][..], &[num_experts, rank, output][..]);
        match (a.get(1).is_some_and(|rank| stacked(*rank)), a.get(2).is_some_and(|rank| transposed(*rank))) {
            (true, true) => {
                Err(source.ambiguous("rename them to `experts.w1` and so on if they are [experts, rank, in] and [experts, out, rank]"))
            }
            (true, false) => self.stacked(source, part),
            (false, true) => {
                let rank = a[2];
                let a = source.a.view([input, rank]).transposed();
                let b = source.b.view([rank, output]).transposed();
                Ok(Steps { a, a_step: input * rank, b, b_step: rank * output })
            }
            (false, false) => Err(source.misshapen(format!(
                "[{num_experts}, {input}, rank] and [{num_experts}, rank, {output}], or [{num_experts}, rank, {input}] and \
                 [{num_experts}, {output}, rank]"
            ))),
        }
    }

    fn side_by_side(&self, source: Source<'a>, part: Part) -> Result<Steps<'a>, AdapterError> {
        let ([input, output], num_experts) = (part.features(self.site), self.site.num_experts());
        let ([a_experts, b_experts], want) = match part {
            Part::One(ExpertModule::Gate | ExpertModule::Up) => {
                ([1, num_experts], "[rank, in] and [experts * out, rank]")
            }
            Part::One(ExpertModule::Down) => ([num_experts, 1], "[rank, experts * in] and [out, rank]"),
            Part::GateUp => return Err(source.misshapen("gate and up apart, or three dimensions".to_owned())),
        };
        let ([a_rank, _], [_, b_rank]) = (source.a.matrix()?, source.b.matrix()?);
        let shapes = [[a_rank, a_experts * input], [b_experts * output, b_rank]];
        if [source.a.tensor.shape(), source.b.tensor.shape()] != [&shapes[0][..], &shapes[1][..]] || a_rank != b_rank {
            return Err(source.misshapen(format!("{want}, of {num_experts} experts from {input} to {output} features")));
        }
        let (a, b) = (source.a.view(shapes[0]).columns(0..input), source.b.view(shapes[1]).rows(0..output));
        let step = |experts: usize, features: usize| if experts == 1 { 0 } else { features };
        Ok(Steps { a, a_step: step(a_experts, input), b, b_step: step(b_experts, output * b_rank) })
    }

    /// Finds out which parameters PEFT has wrapped, and adds them.
    ///
    /// They are all of one orientation. Their shapes say which is which, and if those of up and down are the same, their order.
    fn add_parameters(&mut self, orientation: Option<Orientation>) -> Result<(), AdapterError> {
        let orientations: &[Orientation] =
            match (orientation, self.site.stored().transposed, self.config.swaps_features) {
                (Some(Orientation::Forward), ..) | (None, false, Some(true)) | (None, true, Some(false)) => {
                    &[Orientation::Forward]
                }
                (Some(Orientation::Reversed), ..) | (None, false, Some(false)) => &[Orientation::Reversed],
                // PEFT asks the module whether it is transposed, and not all that are say so.
                (None, ..) => &[Orientation::Forward, Orientation::Reversed],
            };
        let [first, down] = Part::parameters(self.site);
        let sources = std::mem::take(&mut self.parameters);
        // By path, so that of two the last has been wrapped first, which PEFT does in the order in which the model has them.
        let orders: &[&[(Part, &str)]] = match sources[..] {
            [] => return Ok(()),
            [_] => &[&[first], &[down]],
            [_, _] => &[&[down, first], &[first, down]],
            [_, _, third, ..] => return Err(AdapterError::NoPlace { module: third.path.to_owned() }),
        };
        let targeted = |source: Source<'a>, name: &str| self.config.targets_parameter(&parameter_path(source, name));
        if let Some(source) = sources.iter().find(|source| !targeted(**source, first.1) && !targeted(**source, down.1))
        {
            return Err(AdapterError::NotTargeted { module: source.path.to_owned(), field: "target_parameters" });
        }
        let fits = |source: Source<'a>, (part, name): (Part, &str), orientation| {
            targeted(source, name) && self.parameter(source, part, orientation).is_some()
        };
        let mut ways = Vec::new();
        for &orientation in orientations {
            let mut orders = orders.iter().filter(|parts| {
                let mut pairs = sources.iter().zip(parts.iter());
                pairs.all(|(source, part)| fits(*source, *part, orientation))
            });
            match sources[..] {
                [_, _] => ways.extend(orders.next().map(|parts| (orientation, *parts))),
                _ => ways.extend(orders.map(|parts| (orientation, *parts))),
            }
        }
        let &[(orientation, parts)] = &ways[..] else {
            let fits_nothing = |source: &&Source<'a>| {
                let mut ways =
                    orientations.iter().flat_map(|orientation| [(first, *orientation), (down, *orientation)]);
                !ways.any(|(part, orientation)| fits(**source, part, orientation))
            };
            let source = sources.iter().find(fits_nothing).unwrap_or(&sources[0]);
            return Err(match ways[..] {
                [] => source.misshapen(self.parameter_shapes(*source, orientations)),
                _ => source.ambiguous(
                    "write into adapter_config.json the `target_parameters` and the `peft_version` that made it, or say \
                     `Adapter::oriented`",
                ),
            });
        };
        for (source, (part, name)) in sources.into_iter().zip(parts) {
            let Some(steps) = self.parameter(source, *part, orientation) else { continue };
            let path = parameter_path(source, name);
            self.insert(0..self.site.num_experts(), *part, (source.path, &path), steps)?;
        }
        Ok(())
    }

    /// The factors of a parameter, if they have the shape of this one's.
    fn parameter(&self, source: Source<'a>, part: Part, orientation: Orientation) -> Option<Steps<'a>> {
        let ([input, output], num_experts) = (part.features(self.site), self.site.num_experts());
        let (&[rows, a_features], &[b_features, cols]) = (source.a.tensor.shape(), source.b.tensor.shape()) else {
            return None;
        };
        let [takes, gives] = match orientation {
            Orientation::Forward => [input, output],
            Orientation::Reversed => [output, input],
        };
        if rows != cols || !rows.is_multiple_of(num_experts) || [a_features, b_features] != [takes, gives] {
            return None;
        }
        let rank = rows / num_experts;
        let a = source.a.view([rank, takes]);
        // `[gives, rank, experts]`
        let b = source.b.spaced([gives, rank], [rows, num_experts]);
        let (a_step, b_step) = (rank * takes, 1);
        Some(match orientation {
            Orientation::Forward => Steps { a, a_step, b, b_step },
            Orientation::Reversed => Steps { a: b.transposed(), a_step: b_step, b: a.transposed(), b_step: a_step },
        })
    }

    fn parameter_shapes(&self, source: Source<'a>, orientations: &[Orientation]) -> String {
        let num_experts = self.site.num_experts();
        let mut shapes = Vec::new();
        for orientation in orientations {
            let targeted = |name: &str| self.config.targets_parameter(&parameter_path(source, name));
            for (part, name) in Part::parameters(self.site).into_iter().filter(|(_, name)| targeted(name)) {
                let [mut takes, mut gives] = part.features(self.site);
                if *orientation == Orientation::Reversed {
                    (takes, gives) = (gives, takes);
                }
                shapes.push(format!("[{num_experts} * rank, {takes}] and [{gives}, rank * {num_experts}] of {name}"));
            }
        }
        shapes.join(" or ")
    }

    /// Adds the factors of experts, whose α is that of the second path.
    fn insert(
        &mut self,
        experts: Range<usize>,
        part: Part,
        (path, alpha_path): (&'a str, &str),
        steps: Steps<'a>,
    ) -> Result<(), AdapterError> {
        let rank = steps.b.cols;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(AdapterError::Rank { tensor: steps.a.name.clone(), rank });
        }
        let scaling = self.config.scaling(alpha_path, rank, steps.a.name)?;
        for (step, expert) in experts.enumerate() {
            for (module, a, b) in part.apart(self.site.stored().halves, steps.at(step)) {
                if let Some(other) = self.pairs.insert((module, expert), Pair { path, a, b, scaling }) {
                    return Err(AdapterError::Overlap { module: path.to_owned(), other: other.path.to_owned() });
                }
            }
        }
        Ok(())
    }

    /// Puts what this rank needs of the factors into the image: first of the projection before the activation, then of the one
    /// after it; of each, first what all experts share, then what each has of its own, A before B, slice by slice. An A that gate
    /// and up have in common, of every expert, is there once.
    pub(super) fn place(
        mut self,
        orientation: Option<Orientation>,
        image: &mut SlotImage<'a>,
    ) -> Result<(), AdapterError> {
        self.add_parameters(orientation)?;
        if let Some((source, _)) = self.empty.iter().find(|(_, at)| !self.is_placeholder(at)) {
            let what = "a factor without elements, of a module that the model has";
            return Err(AdapterError::UnsupportedTensor { tensor: source.a.name.clone(), what });
        }
        for projection in [self.site.gate_up(), self.site.down()] {
            self.place_projection(projection, image);
        }
        Ok(())
    }

    /// Whether factors without elements stand there for what experts without a gate do not have: another module beside up, whose own
    /// may then go by the gate's name.
    fn is_placeholder(&self, at: &InExperts) -> bool {
        let (Item::Module(name) | Item::Fms(name)) = at.item else { return false };
        match Part::named(name, self.site) {
            None => true,
            Some(Part::One(ExpertModule::Up)) if self.site.halves().is_none() => {
                self.of(ExpertModule::Up).any(|(expert, _)| at.expert.is_none_or(|of| of == expert))
            }
            Some(_) => false,
        }
    }

    fn place_projection(&self, projection: &ProjectionSite, image: &mut SlotImage<'a>) {
        let (slices, input, one_a) = (projection.slices(), projection.input().range(), self.gate_and_up_have_one_a());
        // `first` is the A that was placed for a slice before.
        let place_a = |image: &mut SlotImage<'a>, first: &mut Option<usize>, a: View<'a>| {
            let placed = first.filter(|_| one_a);
            let elems = placed.unwrap_or_else(|| image.place(Rectangle::linear_a(a.columns(input.clone()))));
            *first = Some(elems);
            elems
        };
        let place_b = |image: &mut SlotImage<'a>, slice: &ExpertSlice, b: View<'a>| {
            image.place(Rectangle::b(b.rows(slice.output.range())))
        };
        let is_here = |module| self.site.held().iter().any(|&expert| self.pairs.contains_key(&(module, expert)));
        let shared: Vec<_> = slices.iter().map(|slice| self.shared(slice.module, is_here(slice.module))).collect();

        let mut first = None;
        let shared_a: Vec<_> = shared.iter().map(|pair| Some(place_a(image, &mut first, pair.a?))).collect();
        let shared_b: Vec<_> =
            slices.iter().zip(&shared).map(|(slice, pair)| Some(place_b(image, slice, pair.b?))).collect();
        for (i, pair) in shared.iter().enumerate() {
            if let Some(rank) = pair.rank() {
                image.share(projection.shared_entry() + i, rank, shared_a[i], shared_b[i]);
            }
        }
        for (local, &expert) in self.site.held().iter().enumerate() {
            let pairs: Vec<_> = slices.iter().map(|slice| self.pairs.get(&(slice.module, expert))).collect();
            let mut first = None;
            let a = pairs.iter().zip(&shared_a).map(|(pair, shared)| match (pair, shared) {
                (Some(pair), None) => Some(place_a(image, &mut first, pair.a)),
                (_, shared) => *shared,
            });
            let a: Vec<_> = a.collect();
            for (i, pair) in pairs.into_iter().enumerate() {
                let (Some(pair), Some(a)) = (pair, a[i]) else { continue };
                let b = shared_b[i].unwrap_or_else(|| place_b(image, &slices[i], pair.b));
                image.push(projection.expert_entry(local) + i, pair.b.cols, pair.scaling, a, b);
            }
        }
    }

    /// What all experts that have the module share of it, if they are several: the same on every rank that holds one of them.
    fn shared(&self, module: ExpertModule, is_here: bool) -> Shared<'a> {
        let mut pairs = self.of(module).map(|(_, pair)| pair).peekable();
        let Some(first) = pairs.next().filter(|_| is_here && pairs.peek().is_some()) else {
            return Shared { a: None, b: None };
        };
        let (mut a, mut b) = (Some(first.a), Some(first.b));
        for pair in pairs {
            a = a.filter(|a| a.same(&pair.a));
            b = b.filter(|b| b.same(&pair.b));
        }
        Shared { a, b }
    }

    fn gate_and_up_have_one_a(&self) -> bool {
        let both = |(expert, gate): (usize, &Pair<'a>)| Some((gate.a, self.pairs.get(&(ExpertModule::Up, expert))?.a));
        let mut both = self.of(ExpertModule::Gate).filter_map(both).peekable();
        both.peek().is_some() && both.all(|(gate, up)| gate.same(&up))
    }

    fn of(&self, module: ExpertModule) -> impl Iterator<Item = (usize, &Pair<'a>)> {
        self.pairs.range((module, 0)..=(module, usize::MAX)).map(|((_, expert), pair)| (*expert, pair))
    }
}

/// The path of a parameter of the experts that factors are of.
fn parameter_path(source: Source<'_>, name: &str) -> String {
    format!("{}.{name}", source.path.trim_end_matches(".base_layer"))
}

/// What all experts share of a module.
#[derive(Clone, Copy, Debug)]
struct Shared<'a> {
    a: Option<View<'a>>,
    b: Option<View<'a>>,
}

impl Shared<'_> {
    fn rank(&self) -> Option<usize> {
        self.a.map(|a| a.rows).or(self.b.map(|b| b.cols))
    }
}
