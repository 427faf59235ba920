//! The choice of tokens on the GPU.

use aril::{
    Element,
    cuda::{Buffer, PinnedBuffer, Queue},
};
use cudarc::driver::{CudaEvent, DeviceRepr, ValidAsZeroBits};

use super::{Cuda, Matrix, launch::launch_blocks, matrix::MemoryFor as _, nccl::Nccl};
use crate::{
    device::Draw,
    error::{Result, bail},
    kernels::sampling::{BLOCKS, THREADS},
};

// SAFETY: numbers without padding, laid out as in C.
unsafe impl DeviceRepr for Draw {}
// SAFETY: they are numbers.
unsafe impl ValidAsZeroBits for Draw {}

/// Tokens that are chosen on the device, with their log-probabilities. Copies to and from the host are from page-locked
/// memory, so that the host does not wait for them before it needs the tokens.
#[derive(Debug)]
pub struct Draws {
    draws: Buffer<Draw>,
    from_host: PinnedBuffer<Draw>,
    /// The tokens, -1 for none, then the bits of the log-probabilities: `[2, rows]` of the last draw.
    drawn: Buffer<i32>,
    to_host: PinnedBuffer<i32>,
    rows: usize,
    /// The end of the last step, if other ranks take part in it.
    end: Option<CudaEvent>,
}

impl Draws {
    pub(super) fn new(queue: &Queue, rows: usize) -> Result<Self> {
        let what = "the tokens of a step";
        Ok(Self {
            draws: Buffer::zeros(queue, rows).memory_for(what)?,
            from_host: PinnedBuffer::zeros(queue, rows).memory_for(what)?,
            drawn: Buffer::zeros(queue, 2 * rows).memory_for(what)?,
            to_host: PinnedBuffer::zeros(queue, 2 * rows).memory_for(what)?,
            rows: 0,
            end: None,
        })
    }

    /// Enqueues the draws, and the copy of their tokens to the host.
    pub(super) fn draw<T: Element + DeviceRepr>(
        &mut self,
        device: &Cuda<T>,
        logits: &Matrix<T>,
        draws: &[Draw],
    ) -> Result<()> {
        let (rows, room) = (draws.len(), self.draws.len());
        if rows > room || rows > logits.rows {
            bail!("{rows} draws from {} rows of logits, with room for {room}", logits.rows);
        }
        self.rows = rows;
        if rows > 0 {
            self.enqueue(device, logits, draws)?;
        }
        self.end = device.nccl.as_ref().map(Nccl::mark).transpose()?;
        Ok(())
    }

    fn enqueue<T: Element + DeviceRepr>(&mut self, device: &Cuda<T>, logits: &Matrix<T>, draws: &[Draw]) -> Result<()> {
        let rows = draws.len();
        self.from_host.elements()?[..rows].copy_from_slice(draws);
        self.draws.enqueue_write(&mut self.from_host, rows)?;
        let (draws, tokens) = (self.draws.device_ptr(), self.address());
        let logprobs = tokens + (rows * size_of::<i32>()) as u64;
        let mut kernel = device.kernel(&device.functions.draw);
        kernel.arg(&logits.address).arg(&draws).arg(&tokens).arg(&logprobs).arg(&logits.cols);
        launch_blocks(kernel, (BLOCKS, rows), THREADS, 0)?;
        Ok(self.drawn.enqueue_read(&mut self.to_host, 2 * rows)?)
    }

    /// Waits for the last step, for as long as the other ranks are there.
    pub(super) fn wait(&self, nccl: &Nccl) -> Result<()> {
        self.end.as_ref().map_or(Ok(()), |end| nccl.wait_for(end))
    }

    /// The device address of the tokens.
    pub fn address(&self) -> u64 {
        self.drawn.device_ptr()
    }

    /// The tokens and log-probabilities. Waits for their copy.
    pub(super) fn read(&mut self) -> Result<Vec<(Option<u32>, f32)>> {
        let (tokens, logprobs) = self.to_host.elements()?[..2 * self.rows].split_at(self.rows);
        let logprobs = logprobs.iter().map(|bits| f32::from_bits(bits.cast_unsigned()));
        Ok(tokens.iter().map(|&token| u32::try_from(token).ok()).zip(logprobs).collect())
    }
}
