//! No configuration and no weight file makes loading panic.
#![no_main]

#[path = "../../common/fuzz.rs"]
mod fuzz;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::run(data));
