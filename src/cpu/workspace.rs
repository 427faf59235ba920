/// Scratch memory of a step: `A x` of what is [`Shrunk`](super::Shrunk).
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    /// `[tokens, slices, max_rank]`
    pub(super) v: Vec<f32>,
}
