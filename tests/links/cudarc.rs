//! An engine's own cudarc, whose context the kernels are loaded in and whose slices are operands.

use aril::cuda::{Kernels, Matrix, raw::Stream};
use cudarc::driver::CudaContext;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if !aril::cuda::driver_is_present() {
        return Err("there is no CUDA driver".into());
    }
    let context = CudaContext::new(0)?;
    let kernels = Kernels::load_into(&context)?;
    let stream = context.default_stream();
    let x = stream.alloc_zeros::<f32>(2 * 64)?;
    println!("{kernels:?}, {:?}, {:?}", Matrix::new(&x, 2, 64)?, Stream::from(&*stream));
    Ok(())
}
