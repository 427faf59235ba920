//! Adapters whose factors are in device memory, packed by kernels.

#![expect(unsafe_code, reason = "launches on memory that the caller vouches for")]

use cudarc::driver::result;
use rayon::prelude::*;

use super::{LaunchError, Queue, Staging, raw, raw::Stream, readback::OnDevice};
use crate::{
    DType,
    adapter::{FactorKind, FactorOnDevice, SlotImage, layout::CORE},
    cuda::kernels::check,
    error::LoadError,
    ffi,
};

const FACTORS_PER_LAUNCH: usize = ffi::ARIL_PACK_FACTORS as usize;
/// Factors that one thread looks up at least.
const MIN_FACTORS: usize = 1024;

/// An image each of whose factors is a matrix in memory of one context.
#[derive(Debug)]
pub(in crate::cuda) struct Packing<'a> {
    image: &'a SlotImage<'a>,
    factors: Vec<Factor<'a>>,
}

/// What is known of a factor without another look at its memory, which is in no cache.
#[derive(Debug)]
struct Factor<'a> {
    of_image: FactorOnDevice<'a>,
    memory: &'a OnDevice,
    source: u64,
    reader: usize,
    number: u64,
}

impl<'a> Packing<'a> {
    /// `None` if a factor is in other memory than that of the queue's context, or is not one matrix: the host packs
    /// such an image.
    pub(in crate::cuda) fn new(image: &'a SlotImage<'a>, queue: &Queue) -> Option<Self> {
        let factors = image.on_device()?.into_par_iter().with_min_len(MIN_FACTORS).map(|of_image| {
            let memory = of_image.memory.downcast_ref::<OnDevice>()?;
            let (source, reader) = (memory.address() + of_image.start as u64, memory.reader());
            let number = memory.number();
            memory.is_of_context(queue).then_some(Factor { of_image, memory, source, reader, number })
        });
        let factors = factors.collect::<Option<Vec<_>>>()?;
        (!factors.is_empty()).then_some(Self { image, factors })
    }

    /// Blocks this thread until the factors are written.
    pub(in crate::cuda) fn wait(&self) -> Result<(), LaunchError> {
        let mut last: Vec<&Factor<'_>> = Vec::new();
        for factor in &self.factors {
            match last.iter_mut().find(|last| last.reader == factor.reader) {
                Some(last) if last.number < factor.number => *last = factor,
                Some(_) => {}
                None => last.push(factor),
            }
        }
        last.into_iter().try_for_each(|factor| factor.memory.wait())
    }

    /// Packs into a block, and blocks this thread until it has run. `not_finite` is the address of four bytes.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch), on the staging's stream.
    pub(super) unsafe fn pack(&self, staging: &Staging, block: u64, not_finite: u64) -> Result<(), LoadError> {
        let mut lowest = [0; size_of::<u32>()];
        // SAFETY: the caller's obligations. `lowest` lives until the stream has run.
        let launched = unsafe { self.launch(staging.raw(), block, not_finite, &mut lowest) };
        // Also after an error: then the kernels no longer read the factors.
        staging.synchronize()?;
        launched?;
        self.check(lowest)
    }

    /// Enqueues the packing, and the copy to `lowest` of what [`check`](Self::check) takes. The factors must be
    /// [written](Self::wait).
    ///
    /// # Safety
    /// - **Validity.** `block` is the address of as many bytes as the image has, and `not_finite` of four, which nothing
    ///   else uses until the stream has run.
    /// - **Liveness.** `self` and `lowest` live until then.
    pub(in crate::cuda) unsafe fn launch(
        &self,
        stream: Stream,
        block: u64,
        not_finite: u64,
        lowest: &mut [u8; size_of::<u32>()],
    ) -> Result<(), LaunchError> {
        // SAFETY: the caller's obligations.
        unsafe { result::memset_d8_async(not_finite, 0xff, size_of::<u32>(), stream.as_raw().cast()) }?;
        let mut target = block;
        let mut by_dtype = [DType::BF16, DType::F16, DType::F32].map(|dtype| (dtype, Vec::new()));
        for (number, factor) in self.factors.iter().enumerate() {
            let FactorOnDevice { dtype, elems, .. } = factor.of_image;
            let (_, of_dtype) = by_dtype.iter_mut().find(|(known, _)| *known == dtype).expect("there are three");
            of_dtype.push(factor.raw(number, target)?);
            target += (elems * self.image.dtype().bytes()) as u64;
        }
        for (source_dtype, factors) in &by_dtype {
            for of_launch in factors.chunks(FACTORS_PER_LAUNCH) {
                let mut factors = [of_launch[0]; FACTORS_PER_LAUNCH];
                factors[..of_launch.len()].copy_from_slice(of_launch);
                let args = ffi::aril_pack_args {
                    dtype: raw::dtype_code(self.image.dtype()),
                    source_dtype: raw::dtype_code(*source_dtype),
                    num_factors: raw::int(of_launch.len())?,
                    not_finite: not_finite as *mut u32,
                    factors,
                };
                // SAFETY: the factors are inside their tensors, and their places in the block; the caller vouches for
                // the rest.
                check(unsafe { ffi::aril_pack(&raw const args, stream.as_raw()) })?;
            }
        }
        // SAFETY: the address is of four bytes; the caller vouches for `lowest`.
        Ok(unsafe { result::memcpy_dtoh_async(lowest, not_finite, stream.as_raw().cast()) }?)
    }

    /// Rejects an image with an element that is not finite, once the packing has run.
    pub(in crate::cuda) fn check(&self, lowest: [u8; size_of::<u32>()]) -> Result<(), LoadError> {
        let factor = usize::try_from(u32::from_ne_bytes(lowest)).ok().filter(|&factor| factor < self.factors.len());
        factor.map_or(Ok(()), |factor| Err(self.image.error_of(factor).into()))
    }
}

impl Factor<'_> {
    /// As the C ABI has it, packed to this address.
    #[expect(clippy::cast_possible_wrap, reason = "strides are inside a tensor")]
    fn raw(&self, number: usize, target: u64) -> Result<ffi::aril_pack_factor, LaunchError> {
        let FactorOnDevice { shape: [rows, cols], strides: [row_stride, col_stride], kind, elems, .. } = self.of_image;
        let kind = match kind {
            FactorKind::LinearA => ffi::ARIL_PACK_A,
            FactorKind::B => ffi::ARIL_PACK_B,
            FactorKind::EmbeddingA => ffi::ARIL_PACK_EMBEDDING_A,
        };
        Ok(ffi::aril_pack_factor {
            source: self.source as *const _,
            target: target as *mut _,
            row_stride: row_stride as i64,
            col_stride: col_stride as i64,
            rows: raw::int(rows)?,
            cols: raw::int(cols)?,
            core_rows: raw::int(elems / CORE)?,
            kind,
            number: raw::int(number)?,
            first_block: 0,
        })
    }
}
