//! The collectives of a tensor-parallel group, by NCCL. They are enqueued on the stream of the device's launches and
//! can be captured.
//!
//! A rank that ends leaves the others in a kernel that waits for it, or in a call that connects to it. So the
//! communicator does not block, and the host waits for calls and results only where it looks after the other ranks;
//! then it aborts the communicator.
//!
//! NCCL ends the kernels and the calls at once, but its abort returns after the last graph with its collectives is
//! dropped, of all ranks of the process. So the abort is on a thread of its own: what holds the graphs hears of the end
//! by the error of its wait.

use std::{
    cell::RefCell,
    ffi::{CStr, c_char, c_void},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use aril::{
    DType, Element,
    cuda::{LaunchError, Queue, raw::Stream},
};
use cudarc::{
    driver::{
        CudaEvent,
        sys::{CUDA_MEMCPY2D_st, CUmemorytype, cuMemcpy2DAsync_v2},
    },
    nccl::{
        result::{self, NcclError, NcclStatus},
        sys,
    },
};

use super::Matrix;
use crate::{
    error::{Error, Result, bail},
    group::Rank,
};

/// Between two looks at the other ranks.
const LOOK: Duration = Duration::from_millis(5);

/// A wait that looks after the other ranks.
struct Look {
    start: Instant,
    next: Duration,
}

impl Look {
    fn new() -> Self {
        Self { start: Instant::now(), next: LOOK }
    }
}

/// The configuration of a communicator whose calls do not block. All else is NCCL's choice.
fn config() -> sys::ncclConfig_t {
    const UNDEFINED: i32 = i32::MIN;
    // SAFETY: all of its fields are integers and pointers, for which zero is valid.
    let zero: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    sys::ncclConfig_t {
        // The fields of NCCL 2.17, which every later version takes.
        size: std::mem::offset_of!(sys::ncclConfig_t, trafficClass),
        magic: 0xcafe_beef,
        version: 21_700,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        splitShare: UNDEFINED,
        ..zero
    }
}

/// How long the end of a rank waits for an abort, which may wait for the graphs of other ranks.
const ABORT_LIMIT: Duration = Duration::from_secs(2);

/// A communicator of a group of several ranks.
pub(super) struct Nccl {
    communicator: sys::ncclComm_t,
    /// The thread that aborts the communicator, which is not used again.
    abort: RefCell<Option<JoinHandle<()>>>,
    rank: Rank,
    queue: Queue,
}

impl Nccl {
    /// Waits for the other ranks, which must start theirs.
    pub(super) fn new(queue: &Queue, rank: &Rank) -> Result<Self> {
        // SAFETY: loading the library has no preconditions.
        if !unsafe { sys::is_culib_present() } {
            bail!(
                "NCCL was not found: add a folder with `libnccl.so` to LD_LIBRARY_PATH (a link to `libnccl.so.2` will \
                 do)"
            );
        }
        let (tp, mut id) = (rank.tp(), sys::ncclUniqueId { internal: [0; 128] });
        if tp.rank() == 0 {
            id = result::get_uniqueid().map_err(failed)?;
        }
        // That of rank 0. All ranks are alive now, so that the communicator does not wait for one.
        let of_ranks = rank.gather(bytemuck::cast_slice::<c_char, u8>(&id.internal))?;
        id.internal.copy_from_slice(bytemuck::cast_slice(&of_ranks[0]));
        queue.stream().context().bind_to_thread().map_err(LaunchError::from)?;
        let mut communicator = std::ptr::null_mut();
        let (size, index) = (i32::try_from(tp.size())?, i32::try_from(tp.rank())?);
        let mut config = config();
        // SAFETY: the pointers are valid for the call, which writes the communicator. The context is current.
        unsafe { result::comm_init_rank_config(&raw mut communicator, size, id, index, &raw mut config) }
            .map_err(failed)?;
        let nccl = Self { communicator, abort: RefCell::new(None), rank: rank.clone(), queue: queue.clone() };
        nccl.settle()?;
        Ok(nccl)
    }

    /// Waits until the last call has been carried out, which may be to connect to other ranks, for as long as they are
    /// there.
    fn settle(&self) -> Result<()> {
        let mut look = Look::new();
        loop {
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: the communicator is alive, and the pointer is valid for the call.
            unsafe { sys::ncclCommGetAsyncError(self.communicator, &raw mut state) }.result().map_err(failed)?;
            match state.result() {
                Ok(NcclStatus::InProgress) => self.look_after(&mut look, "NCCL has not connected the ranks")?,
                Ok(_) => return Ok(()),
                Err(error) => {
                    // A rank that has ended may be why.
                    self.rank.check()?;
                    return Err(failed(error));
                }
            }
            // To NCCL's own thread.
            thread::yield_now();
        }
    }

    /// Waits until all ranks have come this far.
    pub(super) fn meet(&self) -> Result<()> {
        self.rank.gather(&[])?;
        Ok(())
    }

    /// Enqueues `y += ` those of the other ranks.
    pub(super) fn all_reduce<T: Element>(&self, stream: Stream, y: &mut Matrix<T>) -> Result<()> {
        let (stream, at, element) = (self.enter(stream)?, y.address as *mut c_void, element::<T>()?);
        // SAFETY: the matrix has as many elements of this type, and the stream orders its uses. The communicator is
        // alive.
        let enqueued = unsafe {
            let sum = sys::ncclRedOp_t::ncclSum;
            result::all_reduce(at, at, y.extent(), element, sum, self.communicator, stream)
        };
        enqueued.map_err(failed)?;
        self.settle()
    }

    /// Enqueues the copy of the matrices of all ranks to `parts`, one below the other.
    pub(super) fn gather<T: Element>(&self, stream: Stream, x: &Matrix<T>, parts: &mut Matrix<T>) -> Result<()> {
        assert_eq!(parts.len(), self.rank.tp().size() * x.len());
        let (stream, element) = (self.enter(stream)?, element::<T>()?);
        let (from, to) = (x.address as *const c_void, parts.address as *mut c_void);
        // SAFETY: the matrices have as many elements of this type (asserted), and the stream orders their uses. The
        // communicator is alive.
        unsafe { result::all_gather(from, to, x.len(), element, self.communicator, stream) }.map_err(failed)?;
        self.settle()
    }

    /// [`gather`](Self::gather), and then the copy of the first columns of all ranks to `out`, side by side.
    pub(super) fn all_gather<T: Element>(
        &self,
        stream: Stream,
        x: &Matrix<T>,
        parts: &mut Matrix<T>,
        out: &mut Matrix<T>,
    ) -> Result<()> {
        assert_eq!(out.rows, x.rows);
        self.gather(stream, x, parts)?;
        let bytes = |elements: usize| elements * size_of::<T>();
        for first in (0..out.cols).step_by(x.cols) {
            let cols = x.cols.min(out.cols - first);
            let copy = CUDA_MEMCPY2D_st {
                srcXInBytes: 0,
                srcY: 0,
                srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcHost: std::ptr::null(),
                // The columns of a rank begin where as many rows of the others end.
                srcDevice: parts.address + bytes(first * x.rows) as u64,
                srcArray: std::ptr::null_mut(),
                srcPitch: bytes(x.cols),
                dstXInBytes: bytes(first),
                dstY: 0,
                dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstHost: std::ptr::null_mut(),
                dstDevice: out.address,
                dstArray: std::ptr::null_mut(),
                dstPitch: bytes(out.cols),
                WidthInBytes: bytes(cols),
                Height: x.rows,
            };
            // SAFETY: both rectangles are inside of their matrices, whose uses the stream orders.
            unsafe { cuMemcpy2DAsync_v2(&raw const copy, stream.as_raw().cast()) }
                .result()
                .map_err(LaunchError::from)?;
        }
        Ok(())
    }

    /// Waits for all enqueued work, for as long as the other ranks are there. The communicator is of no use after an
    /// error.
    pub(super) fn wait(&self) -> Result<()> {
        self.wait_for(&self.mark()?)
    }

    /// The end of the work that is enqueued now.
    pub(super) fn mark(&self) -> Result<CudaEvent> {
        Ok(self.queue.stream().record_event(None).map_err(LaunchError::from)?)
    }

    /// As [`wait`](Self::wait), for the work before a mark.
    pub(super) fn wait_for(&self, end: &CudaEvent) -> Result<()> {
        let mut look = Look::new();
        while !end.try_is_complete().map_err(LaunchError::from)? {
            self.look_after(&mut look, "a step has not ended")?;
        }
        Ok(())
    }

    /// Aborts the communicator if another rank has ended, or if this one has waited for too long: `what` says for what.
    fn look_after(&self, look: &mut Look, what: &str) -> Result<()> {
        if look.start.elapsed() < look.next {
            std::hint::spin_loop();
            return Ok(());
        }
        look.next += LOOK;
        if let Err(error) = self.rank.check() {
            self.abort();
            return Err(error.into());
        }
        if look.start.elapsed() > self.rank.limit() {
            self.abort();
            bail!("{what} within {:?}: another rank does nothing", self.rank.limit());
        }
        Ok(())
    }

    /// Makes the context current, and returns the stream as NCCL has it.
    fn enter(&self, stream: Stream) -> Result<sys::cudaStream_t> {
        if self.abort.borrow().is_some() {
            bail!("the group has ended");
        }
        self.queue.stream().context().bind_to_thread().map_err(LaunchError::from)?;
        Ok(stream.as_raw().cast())
    }

    /// Ends all collectives that are enqueued, and the call that has not returned.
    fn abort(&self) {
        self.abort.borrow_mut().get_or_insert_with(|| {
            let communicator = self.communicator.expose_provenance();
            thread::spawn(move || {
                // SAFETY: the communicator is alive, and not used again.
                let _ = unsafe { result::comm_abort(std::ptr::with_exposed_provenance_mut(communicator)) };
            })
        });
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        if !self.rank.is_finished() {
            // Enqueued collectives may wait for a rank that has ended, or that waits for this one.
            self.abort();
        }
        let Some(abort) = self.abort.take() else {
            // SAFETY: the communicator is alive, and not used again. Graphs with its collectives are dropped before the
            // device.
            let _ = unsafe { result::comm_destroy(self.communicator) };
            return;
        };
        let start = Instant::now();
        while !abort.is_finished() && start.elapsed() < ABORT_LIMIT {
            thread::sleep(LOOK);
        }
    }
}

/// NCCL's name of an element type.
fn element<T: Element>() -> Result<sys::ncclDataType_t> {
    Ok(match T::DTYPE {
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        other => bail!("{other} is not implemented"),
    })
}

/// NCCL's error, and its last message.
fn failed(error: NcclError) -> Error {
    // SAFETY: without a communicator, the call returns the last message of this thread.
    let message = unsafe { sys::ncclGetLastError(std::ptr::null_mut()) };
    if message.is_null() {
        return Error::new(format!("NCCL: {:?}", error.0));
    }
    // SAFETY: it is a string that ends with a zero.
    let message = unsafe { CStr::from_ptr(message) };
    Error::new(format!("NCCL: {:?}: {}", error.0, message.to_string_lossy()))
}
