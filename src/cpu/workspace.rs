use super::WeightTable;
use crate::plan::PlanError;

/// Scratch memory of a step: `A x` of what is [`Shrunk`](super::Shrunk).
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// `[tokens, slices, max_rank]`
    pub(super) v: Vec<f32>,
}

impl Workspace {
    /// A workspace for any layer of the table's model, or of any other table: it grows.
    ///
    /// # Errors
    /// None; the GPU's has some.
    pub fn new(_weights: &WeightTable) -> Result<Self, PlanError> {
        Ok(Self::default())
    }
}
