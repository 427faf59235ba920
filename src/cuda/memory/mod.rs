//! Memory on the device and page-locked memory of the host: buffers, and the typed views and matrices in them that
//! operations take.

mod buffer;
mod pinned;
mod view;

pub use self::{
    buffer::{Buffer, PinnedBuffer},
    view::{Matrix, MatrixMut, View, ViewMut},
};
pub(in crate::cuda) use self::{
    buffer::{Kept, Region},
    pinned::{HostArena, HostPart, Pinned},
    view::{Memory, Operand},
};
