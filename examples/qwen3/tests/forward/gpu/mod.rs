//! What needs a GPU: the kernels of the base model, and the forward as a process on the device. Ignored unless asked
//! for.

#![expect(clippy::disallowed_methods, reason = "tests allocate and wait")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and its numbers are small"
)]

mod delta_net;
mod device;
mod goldens;
mod kernels;
mod ranks;
mod travel;

use std::env;

/// `all` of a test's sizes, or these `few` if `ARIL_SMALL_CASES` is 1, for tools under which kernels are a hundred
/// times slower.
fn choose<T>(all: T, few: T) -> T {
    match env::var("ARIL_SMALL_CASES").as_deref() {
        Err(_) | Ok("0") => all,
        Ok("1") => few,
        Ok(value) => unreachable!("ARIL_SMALL_CASES is 0 or 1, not {value}"),
    }
}
