//! The kernels of `kernels.cu`, compiled.

/// A fat binary with code for every architecture that aril was compiled for. Empty if aril was built without kernels.
pub const IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));
