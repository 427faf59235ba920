//! The formats that store the factors of several experts in one pair of tensors, and how they are split.

use super::source::Source;
use crate::{
    adapter::{error::AdapterError, tensor::View},
    model::{ExpertModule, ExpertsSite, Halves},
};

/// The factors of one module for several experts: those of the first, and the offsets from one expert to the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps<'a> {
    pub(super) a: View<'a>,
    pub(super) a_step: usize,
    pub(super) b: View<'a>,
    pub(super) b_step: usize,
}

impl<'a> Steps<'a> {
    pub(super) fn at(&self, expert: usize) -> [View<'a>; 2] {
        [self.a.moved(expert * self.a_step), self.b.moved(expert * self.b_step)]
    }
}

/// What a pair of tensors belongs to: one module, or gate and up together.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Part {
    One(ExpertModule),
    GateUp,
}

impl Part {
    pub(super) fn named(name: &str, site: &ExpertsSite) -> Option<Self> {
        Some(match (name, site.halves().is_some()) {
            ("gate_proj" | "w1", true) => Self::One(ExpertModule::Gate),
            ("up_proj" | "w3", true) | ("up_proj" | "w1", false) => Self::One(ExpertModule::Up),
            ("gate_up_proj", true) => Self::GateUp,
            ("down_proj" | "w2", _) => Self::One(ExpertModule::Down),
            _ => return None,
        })
    }

    /// The expert parameters of such a model, and their names.
    pub(super) fn parameters(site: &ExpertsSite) -> [(Self, &'static str); 2] {
        let first = match site.halves() {
            Some(_) => (Self::GateUp, "gate_up_proj"),
            None => (Self::One(ExpertModule::Up), "up_proj"),
        };
        [first, (Self::One(ExpertModule::Down), "down_proj")]
    }

    /// Unsharded input and output features.
    pub(super) fn features(self, site: &ExpertsSite) -> [usize; 2] {
        let [hidden, inter] = [site.gate_up().input().whole, site.down().input().whole];
        match self {
            Self::One(ExpertModule::Gate | ExpertModule::Up) => [hidden, inter],
            Self::One(ExpertModule::Down) => [inter, hidden],
            Self::GateUp => [hidden, 2 * inter],
        }
    }

    /// Splits factors into those of single modules.
    pub(super) fn apart<'a>(
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

impl<'a> Source<'a> {
    pub(super) fn one(self, site: &ExpertsSite, part: Part) -> Result<Steps<'a>, AdapterError> {
        let [input, output] = part.features(site);
        let ([rank, _], _) = (self.a.matrix()?, self.b.matrix()?);
        self.a.expect_shape(rank, input)?;
        self.b.expect_shape(output, rank)?;
        Ok(Steps { a: self.a.view([rank, input]), a_step: 0, b: self.b.view([output, rank]), b_step: 0 })
    }

    pub(super) fn stacked(self, site: &ExpertsSite, part: Part) -> Result<Steps<'a>, AdapterError> {
        let ([input, output], num_experts) = (part.features(site), site.num_experts());
        let want = || format!("[{num_experts} or 1, rank, {input}] and [{num_experts} or 1, {output}, rank]");
        let is_stack = |len: usize| len == 1 || len == num_experts;
        let shapes = (self.a.tensor.shape(), self.b.tensor.shape());
        let (&[a_stack, a_rank, a_in], &[b_stack, b_out, b_rank]) = shapes else {
            return Err(self.misshapen(want()));
        };
        if !is_stack(a_stack) || !is_stack(b_stack) || [a_in, b_out] != [input, output] {
            return Err(self.misshapen(want()));
        }
        // One A for gate and one for up, in the order of B's halves.
        let two = part == Part::GateUp && a_rank == 2 * b_rank && site.stored().halves != Halves::Interleaved;
        if a_rank != b_rank && !two {
            let (tensor, a_cols, b_rows) = (self.a.name.clone(), a_in, b_out);
            return Err(AdapterError::RankMismatch { tensor, a_rank, a_cols, b_rows, b_rank });
        }
        let step = |stack: usize, elems: usize| if stack == 1 { 0 } else { elems };
        Ok(Steps {
            a: self.a.view([a_rank, a_in]),
            a_step: step(a_stack, a_rank * a_in),
            b: self.b.view([b_out, b_rank]),
            b_step: step(b_stack, b_out * b_rank),
        })
    }

    pub(super) fn fms(self, site: &ExpertsSite, part: Part) -> Result<Steps<'a>, AdapterError> {
        let ([input, output], num_experts) = (part.features(site), site.num_experts());
        let (a, b) = (self.a.tensor.shape(), self.b.tensor.shape());
        let stacked = |rank| (a, b) == (&[num_experts, rank, input][..], &[num_experts, output, rank][..]);
        let transposed = |rank| (a, b) == (&[num_experts, input, rank][..], &[num_experts, rank, output][..]);
        match (a.get(1).is_some_and(|rank| stacked(*rank)), a.get(2).is_some_and(|rank| transposed(*rank))) {
            (true, true) => Err(self.ambiguous(
                "if they are [experts, rank, in] and [experts, out, rank], rename them to `experts.w1` and so on",
            )),
            (true, false) => self.stacked(site, part),
            (false, true) => {
                let rank = a[2];
                let a = self.a.view([input, rank]).transposed();
                let b = self.b.view([rank, output]).transposed();
                Ok(Steps { a, a_step: input * rank, b, b_step: rank * output })
            }
            (false, false) => Err(self.misshapen(format!(
                "[{num_experts}, {input}, rank] and [{num_experts}, rank, {output}], or \
                 [{num_experts}, rank, {input}] and [{num_experts}, {output}, rank]"
            ))),
        }
    }

    pub(super) fn side_by_side(self, site: &ExpertsSite, part: Part) -> Result<Steps<'a>, AdapterError> {
        let ([input, output], num_experts) = (part.features(site), site.num_experts());
        let ([a_experts, b_experts], want) = match part {
            Part::One(ExpertModule::Gate | ExpertModule::Up) => {
                ([1, num_experts], "[rank, in] and [experts * out, rank]")
            }
            Part::One(ExpertModule::Down) => ([num_experts, 1], "[rank, experts * in] and [out, rank]"),
            Part::GateUp => return Err(self.misshapen("separate gate and up, or three dimensions".to_owned())),
        };
        let ([a_rank, _], [_, b_rank]) = (self.a.matrix()?, self.b.matrix()?);
        let shapes = [[a_rank, a_experts * input], [b_experts * output, b_rank]];
        if [self.a.tensor.shape(), self.b.tensor.shape()] != [&shapes[0][..], &shapes[1][..]] || a_rank != b_rank {
            return Err(self.misshapen(format!("{want}, of {num_experts} experts from {input} to {output} features")));
        }
        let (a, b) = (self.a.view(shapes[0]).columns(0..input), self.b.view(shapes[1]).rows(0..output));
        let step = |experts: usize, features: usize| if experts == 1 { 0 } else { features };
        Ok(Steps { a, a_step: step(a_experts, input), b, b_step: step(b_experts, output * b_rank) })
    }
}
