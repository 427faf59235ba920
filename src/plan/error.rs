/// A layer or a capacity that the kernels do not support.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The layer id belongs to another model than the weights.
    #[error("the layer and the weights belong to different models")]
    Foreign,
    /// A size is outside its limits.
    #[error("{what} is {value}, but must be 1 to {max}")]
    Limit {
        /// Name of the size.
        what: &'static str,
        /// The value given.
        value: usize,
        /// The largest allowed value.
        max: usize,
    },
}
