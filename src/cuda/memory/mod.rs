//! Memory on the device and page-locked memory of the host: buffers, and the typed views and matrices in them that operations take.

mod buffer;
pub(in crate::cuda) mod host_arena;
pub(in crate::cuda) mod pinned;
pub(in crate::cuda) mod region;
mod view;

pub use self::{
    buffer::{Buffer, PinnedBuffer},
    view::{Matrix, MatrixMut, View, ViewMut},
};
pub(in crate::cuda) use self::{
    pinned::Pinned,
    region::{Kept, Region},
    view::Memory,
};
