//! aril and nothing else: the adapted layers of a model, and whether there is a GPU to run them on.

use aril::model::{Linear, ModelSpec, Parallel, TpRank};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut spec = ModelSpec::new();
    let down = spec.linear(Linear::new("mlp", Parallel::Row, 64).slice("down_proj", 16))?;
    println!("{:?}", spec.shard(TpRank::SINGLE)?[down]);
    #[cfg(feature = "cuda")]
    match aril::cuda::Kernels::load() {
        Ok(kernels) => println!("{kernels:?}"),
        Err(error) => println!("on the CPU: {error}"),
    }
    Ok(())
}
