//! The base model's GEMMs, by cuBLASLt.
//!
//! A reference cannot use cudarc's `CudaBlasLT::matmul`: it computes `f32` in TF32, and lets cuBLASLt add partial sums
//! that are already rounded to the output type.

use std::ffi::c_void;

use aril::{
    DType, Element,
    cuda::{Buffer, Queue, raw::Stream},
};
use cudarc::{
    cublaslt::{
        result::{self, CublasError},
        sys,
    },
    driver::DeviceRepr,
};

use super::{Matrix, matrix::MemoryFor as _};
use crate::error::{Context, Result, bail};

/// What NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Partial sums of a split `k` stay `f32`, so that the result is rounded once.
const REDUCTION_SCHEMES: u32 = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;

/// A value of `cublasOperation_t`, which cudarc's bindings of cuBLASLt lack.
const CUBLAS_OP_T: i32 = 1;

/// `x Wᵀ`, one product after the other.
pub(super) struct Gemm {
    operation: Owned<sys::cublasLtMatmulDesc_t>,
    preference: Owned<sys::cublasLtMatmulPreference_t>,
    library: Owned<sys::cublasLtHandle_t>,
    element: sys::cudaDataType,
    workspace: Buffer<u8>,
}

impl Gemm {
    pub(super) fn new(dtype: DType, queue: &Queue) -> Result<Self> {
        // SAFETY: loading the library has no preconditions.
        if !unsafe { sys::is_culib_present() } {
            bail!("cuBLASLt was not found: add the folder of the CUDA toolkit's `libcublasLt.so` to LD_LIBRARY_PATH");
        }
        let element = match dtype {
            DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
            DType::F16 => sys::cudaDataType::CUDA_R_16F,
            DType::F32 => sys::cudaDataType::CUDA_R_32F,
            _ => bail!("{dtype} is not implemented"),
        };
        let library = Owned(result::create_handle().context("cuBLASLt")?, result::destroy_handle);

        let (compute, scale) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F);
        let operation = Owned(result::create_matmul_desc(compute, scale)?, result::destroy_matmul_desc);
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let (value, bytes) = (address(&CUBLAS_OP_T), size_of_val(&CUBLAS_OP_T));
        // SAFETY: the attribute is a `cublasOperation_t`.
        unsafe { result::set_matmul_desc_attribute(operation.0, attribute, value, bytes) }?;

        let preference = Owned(result::create_matmul_pref()?, result::destroy_matmul_pref);
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let (value, bytes) = (address(&WORKSPACE_BYTES), size_of_val(&WORKSPACE_BYTES));
        // SAFETY: the attribute is a `size_t`.
        unsafe { result::set_matmul_pref_attribute(preference.0, attribute, value, bytes) }?;
        let attribute = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        let (value, bytes) = (address(&REDUCTION_SCHEMES), size_of_val(&REDUCTION_SCHEMES));
        // SAFETY: the attribute is a `uint32_t`.
        unsafe { result::set_matmul_pref_attribute(preference.0, attribute, value, bytes) }?;

        let workspace = Buffer::zeros(queue, WORKSPACE_BYTES).memory_for("the workspace of cuBLASLt")?;
        Ok(Self { operation, preference, library, element, workspace })
    }

    /// Enqueues `y = x Wᵀ` with `x` `[tokens, in]`, `W` `[out, in]` and `y` `[tokens, out]`, plus `beta` times what `y`
    /// holds. If `y` has room for v, W has the rows of the stack, too.
    pub(super) fn run<T>(
        &self,
        stream: Stream,
        x: &Matrix<T>,
        weight: &Matrix<T>,
        y: &mut Matrix<T>,
        beta: f32,
    ) -> Result<()>
    where
        T: Element + DeviceRepr,
    {
        let (tokens, in_features, out_features) = (x.rows, x.cols, y.stride);
        let stacked = if y.stride > y.cols { weight.stacked } else { 0 };
        assert_eq!((weight.cols, y.rows, y.cols), (in_features, tokens, weight.rows));
        assert_eq!((x.stride, y.stride), (x.cols, weight.rows + stacked));
        if tokens == 0 {
            return Ok(());
        }
        // cuBLASLt's matrices are column-major, so row-major ones are their transposes: yᵀ = W xᵀ.
        let weight_layout = self.layout(out_features, in_features)?;
        let x_layout = self.layout(tokens, in_features)?;
        let y_layout = self.layout(tokens, out_features)?;
        // SAFETY: all handles are alive.
        let chosen = unsafe {
            result::get_matmul_algo_heuristic(
                self.library.0,
                self.operation.0,
                weight_layout.0,
                x_layout.0,
                y_layout.0,
                y_layout.0,
                self.preference.0,
            )
        };
        let chosen = chosen.context(format_args!("cuBLASLt, {tokens} x {in_features} x {out_features}"))?;

        let one = 1.0_f32;
        // SAFETY: the layouts describe the matrices. Each matrix starts an allocation, so it is aligned as the
        // heuristic assumes. The workspace has the size given to the heuristic, and is used on the queue's stream and
        // in graphs that it runs.
        let launched = unsafe {
            result::matmul(
                self.library.0,
                self.operation.0,
                address(&one),
                address(&beta),
                weight.address as *const c_void,
                weight_layout.0,
                x.address as *const c_void,
                x_layout.0,
                y.address as *const c_void,
                y_layout.0,
                y.address as *mut c_void,
                y_layout.0,
                &chosen.algo,
                self.workspace.device_ptr() as *mut c_void,
                WORKSPACE_BYTES,
                stream.as_raw().cast(),
            )
        };
        launched.context(format_args!("cuBLASLt, {tokens} x {in_features} x {out_features}"))
    }

    /// The transpose of a row-major matrix, column-major.
    fn layout(&self, rows: usize, cols: usize) -> Result<Owned<sys::cublasLtMatrixLayout_t>> {
        let layout = result::create_matrix_layout(
            self.element,
            u64::try_from(cols)?,
            u64::try_from(rows)?,
            i64::try_from(cols)?,
        )?;
        Ok(Owned(layout, result::destroy_matrix_layout))
    }
}

/// A handle of cuBLASLt, and its destructor.
struct Owned<H: Copy>(H, unsafe fn(H) -> std::result::Result<(), CublasError>);

impl<H: Copy> Drop for Owned<H> {
    fn drop(&mut self) {
        // SAFETY: the handle is alive, and nothing else destroys it. The call fails only if the handle is already gone.
        let _ = unsafe { self.1(self.0) };
    }
}

fn address<V>(value: &V) -> *const c_void {
    std::ptr::from_ref(value).cast()
}
