//! A candle tensor as an operand: aril takes the address of its storage, and candle's stream.

use aril::cuda::{Kernels, raw};
use candle_core::{DType, Device, Storage, Tensor, cuda::cudarc::driver::DevicePtr};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::new_cuda_with_stream(0)?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let kernels = Kernels::load_into(stream.context())?;
    let x = Tensor::zeros((2, 64), DType::F32, &device)?;
    let (storage, _) = x.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return Err("the tensor is not on the GPU".into()) };
    let (address, _ordered) = storage.as_cuda_slice::<f32>()?.device_ptr(&stream);
    println!("{kernels:?}, {:?}, {:?}", raw::MatrixRef::new::<f32>(address, 2, 64), raw::Stream::from(&*stream));
    Ok(())
}
