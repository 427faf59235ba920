use crate::DType;

/// A problem that no kernel takes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The layer's id is of another model.
    #[error("the layer is of another model than the weights")]
    Foreign,
    /// The element type is none that the fused linear computes on.
    #[error("the fused linear computes on bf16 and f16, not on {got}")]
    FusedDType {
        /// The element type given.
        got: DType,
    },
    /// A size is zero or past what the kernels take.
    #[error("{what} is {value}; it must be 1 to {max}")]
    Limit {
        /// Which size.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The kernels' limit.
        max: usize,
    },
    /// A size is not a multiple of what the kernels take.
    #[error("{what} is {value}; it must be a multiple of {of}")]
    Multiple {
        /// Which size.
        what: &'static str,
        /// Its value.
        value: usize,
        /// What it must be a multiple of.
        of: usize,
    },
}
