//! Factors of experts: reads every format listed at [`adapter`](super), splits them by expert and module, and places
//! them in an image.
//!
//! Invariant: each module of each expert has at most one pair of factors, and their shapes match the model.

mod forms;
mod layer;
mod parameters;
mod place;
mod source;

pub use self::source::Orientation;
pub(super) use self::{
    layer::{Layer, OfExperts},
    place::Joined,
    source::Source,
};
