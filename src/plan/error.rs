/// A problem that no kernel takes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The layer's id is of another model.
    #[error("the layer is of another model than the weights")]
    Foreign,
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
}
