//! What `benches/pool` measures an adapter pool with, and the figures that it writes.

mod adapters;
mod figures;
mod memory;

pub use self::{
    adapters::{EXPERT_LAYERS, LAYERS, Layers},
    figures::{Figures, Load, Meta, Neighbours, Reading, Replays, StepCost, Times},
    memory::Memory,
};
