//! A pair of factors of experts, not taken apart yet.

use crate::adapter::{
    error::{AdapterError, TensorName},
    tensor::Stored,
};

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
pub(in crate::adapter) struct Source<'a> {
    pub(super) path: &'a str,
    pub(super) a: Stored<'a>,
    pub(super) b: Stored<'a>,
}

impl<'a> Source<'a> {
    pub(in crate::adapter) fn new(path: &'a str, [a, b]: [Stored<'a>; 2]) -> Self {
        Self { path, a, b }
    }

    /// Whether it has no elements, and so says nothing of any module.
    pub(super) fn is_empty(&self) -> bool {
        [self.a, self.b].iter().all(|factor| factor.tensor.bytes().is_empty())
    }

    pub(super) fn misshapen(&self, want: String) -> AdapterError {
        let (tensor, a, b) = self.shapes();
        AdapterError::ExpertShapes { tensor, a, b, want }
    }

    pub(super) fn ambiguous(&self, remedy: &'static str) -> AdapterError {
        let (tensor, a, b) = self.shapes();
        AdapterError::AmbiguousExperts { tensor, a, b, remedy }
    }

    fn shapes(&self) -> (TensorName, Vec<usize>, Vec<usize>) {
        (self.a.name.clone(), self.a.tensor.shape().to_vec(), self.b.tensor.shape().to_vec())
    }
}
