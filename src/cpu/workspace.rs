/// Scratch memory of a step: `A x` between [`LoraLinear::shrink`](super::LoraLinear::shrink) and
/// [`LoraLinear::expand`](super::LoraLinear::expand).
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// `[tokens, slices, max_rank]`
    pub(super) v: Vec<f32>,
}

impl Workspace {
    /// Drops the values of an earlier step.
    pub(super) fn clear(&mut self) {
        self.v.clear();
    }
}
