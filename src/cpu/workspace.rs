/// What the operations of a step leave for each other: `A x` between [`LoraLinear::shrink`](super::LoraLinear::shrink) and [`LoraLinear::expand`](super::LoraLinear::expand).
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// `[tokens, slices, max_rank]`
    pub(super) v: Vec<f32>,
}

impl Workspace {
    /// Forgets what an earlier step left.
    pub(super) fn clear(&mut self) {
        self.v.clear();
    }
}
