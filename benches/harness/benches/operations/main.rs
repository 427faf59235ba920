//! Single operations on the GPU, in captured graphs. One binary, to copy to a machine that has a GPU and no Rust.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "its numbers are small"
)]

mod grouping;
mod layers;
mod routing;
mod sharded;

criterion::criterion_main!(grouping::benches, layers::benches, routing::benches, sharded::benches);
