//! The GEMM of a base layer: cuBLASLt through cudarc, which engines on cudarc use.

use std::sync::Arc;

use cudarc::{
    cublaslt::{CudaBlasLT, Matmul, MatmulConfig, sys},
    driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop},
};
use half::bf16;

use crate::{Result, device::Gpu};

/// `x Wᵀ` in bf16 on the GPU's stream.
pub struct Gemm {
    library: CudaBlasLT,
    stream: Arc<CudaStream>,
}

impl Gemm {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        // SAFETY: looks for a library and loads it, which has no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err("cuBLASLt was not found: add the folder of `libcublasLt.so` to LD_LIBRARY_PATH".into());
        }
        Ok(Self { library: CudaBlasLT::new(gpu.stream.clone())?, stream: gpu.stream.clone() })
    }

    /// Enqueues `y = x Wᵀ + beta y`, with the addresses of x `[tokens, in]`, W `[out, in]` and y `[tokens, out]`.
    pub fn run(
        &self,
        x: u64,
        weight: u64,
        y: u64,
        [tokens, in_features, out_features]: [usize; 3],
        beta: f32,
    ) -> Result<()> {
        let operand = |address, len| Operand { address, len, stream: &self.stream };
        let (x, weight) = (operand(x, tokens * in_features), operand(weight, out_features * in_features));
        let mut y = operand(y, tokens * out_features);
        // cuBLASLt's matrices are column-major, so ours are their transposes: yᵀ = W xᵀ.
        let config = MatmulConfig {
            transa: true,
            transb: false,
            transc: false,
            m: out_features as u64,
            n: tokens as u64,
            k: in_features as u64,
            alpha: 1.0,
            lda: i64::try_from(in_features)?,
            ldb: i64::try_from(in_features)?,
            beta,
            ldc: i64::try_from(out_features)?,
            stride_a: None,
            stride_b: None,
            stride_c: None,
            stride_bias: None,
            batch_size: None,
        };
        // SAFETY: the matrices are as large as the caller says, and used on this stream only.
        Ok(unsafe { self.library.matmul(config, &weight, &x, &mut y, None, None) }?)
    }
}

/// Memory of the caller. The caller orders its uses.
struct Operand<'a> {
    address: u64,
    len: usize,
    stream: &'a Arc<CudaStream>,
}

impl DeviceSlice<bf16> for Operand<'_> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.stream
    }
}

impl DevicePtr<bf16> for Operand<'_> {
    fn device_ptr<'a>(&'a self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}

impl DevicePtrMut<bf16> for Operand<'_> {
    fn device_ptr_mut<'a>(&'a mut self, _: &'a CudaStream) -> (u64, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}
