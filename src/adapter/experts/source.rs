//! A pair of factors of experts that is not split yet.

use crate::adapter::{
    error::{AdapterError, TensorName},
    tensor::Stored,
};

/// Orientation of PEFT's factors of a parameter that holds all experts.
///
/// PEFT treats a parameter `[experts, m, n]` as mapping m to n features or, since 0.19 and unless the module says that
/// it is transposed, n to m. The model may use it the other way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Orientation {
    /// A takes the expert's input features, and the delta is `B A`, as for other modules.
    Forward,
    /// A takes the expert's output features, and the delta is `(B A)ᵀ`.
    Reversed,
}

/// The factors of a module or a stack.
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

    /// Whether the factors have no elements.
    pub(super) fn is_empty(&self) -> bool {
        [self.a, self.b].iter().all(|factor| factor.tensor.is_empty())
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
