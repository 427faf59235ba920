//! The factors of experts: every form that adapters have them in (listed in [`adapter`](super)), taken apart into experts and
//! modules, and their place in an image.
//!
//! Invariant: each module of each expert has at most one pair of factors, of the shape that the model needs.

mod forms;
mod layer;
mod parameters;
mod place;
mod source;

pub use self::source::Orientation;
pub(super) use self::{layer::Layer, source::Source};
