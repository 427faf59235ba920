//! Operations on the GPU: the time of one in a captured graph. One binary, to carry to a machine that has a GPU and no Rust.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    unreachable_pub,
    reason = "of numbers of its own, and with no outside"
)]

mod align;
mod layers;
mod routing;

criterion::criterion_main!(align::benches, layers::benches, routing::benches);
