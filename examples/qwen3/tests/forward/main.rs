//! The forward as a process: its results, its command line, and damaged input. In `gpu`, also its kernels.

/// Tests with this attribute, each of one call.
macro_rules! tests {
    ($attribute:meta: $($name:ident => $call:expr;)*) => {$(
        #[$attribute]
        #[test]
        fn $name() {
            $call;
        }
    )*};
}

mod cli;
mod cpu;
mod files;
mod forms;
mod goldens;
#[cfg(feature = "cuda")]
mod gpu;
mod hybrid;
mod moe;
mod mutations;
mod process;
mod ranks;
mod refusals;
