//! An operation with several outputs. candle's in-place operations have one, so that each output borrows its storage in an operation of
//! its own, within that of the output before it; the last one adds to all.

use std::{cell::Cell, collections::BTreeSet};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, Layout, Result, Tensor, bail};

use super::{Delta, Outputs};

/// Adds the deltas to `y`.
pub(super) fn add(delta: &Delta<'_>, y: &[&Tensor], x: &Tensor) -> Result<()> {
    let Some((first, rest)) = y.split_first() else { bail!("there is no output") };
    // candle would wait forever for a storage that is borrowed already.
    let storages: BTreeSet<_> = y.iter().copied().chain([x]).map(storage).collect();
    if storages.len() != y.len() + 1 {
        bail!("two of `x` and the outputs share a storage")
    }
    first.inplace_op2(x, &First { delta, rest })
}

/// The address of a tensor's storage.
fn storage(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

/// Borrows the storages of `x` and the first output.
struct First<'a> {
    delta: &'a Delta<'a>,
    rest: &'a [&'a Tensor],
}

/// Borrows the storage of one more output.
struct Next<'a, S> {
    delta: &'a Delta<'a>,
    rest: &'a [&'a Tensor],
    x: (&'a S, &'a Layout),
    borrowed: Cell<Outputs<'a, S>>,
}

impl InplaceOp2 for First<'_> {
    fn name(&self) -> &'static str {
        "lora-deltas"
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, y_layout: &Layout, x: &CpuStorage, x_layout: &Layout) -> Result<()> {
        add_on_cpu(self.delta, self.rest, vec![(y, y_layout)], (x, x_layout))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, y: &mut CudaStorage, y_layout: &Layout, x: &CudaStorage, x_layout: &Layout) -> Result<()> {
        add_on_cuda(self.delta, self.rest, vec![(y, y_layout)], (x, x_layout))
    }
}

fn add_on_cpu<'a>(
    delta: &'a Delta<'a>,
    rest: &'a [&'a Tensor],
    borrowed: Outputs<'a, CpuStorage>,
    x: (&'a CpuStorage, &'a Layout),
) -> Result<()> {
    match rest {
        [] => delta.add_on_cpu(borrowed, x),
        [y, rest @ ..] => y.inplace_op1(&Next { delta, rest, x, borrowed: Cell::new(borrowed) }),
    }
}

impl InplaceOp1 for Next<'_, CpuStorage> {
    fn name(&self) -> &'static str {
        "lora-deltas"
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let mut borrowed: Outputs<'_, _> = self.borrowed.take();
        borrowed.push((y, layout));
        add_on_cpu(self.delta, self.rest, borrowed, self.x)
    }
}

#[cfg(feature = "cuda")]
fn add_on_cuda<'a>(
    delta: &'a Delta<'a>,
    rest: &'a [&'a Tensor],
    borrowed: Outputs<'a, CudaStorage>,
    x: (&'a CudaStorage, &'a Layout),
) -> Result<()> {
    match rest {
        [] => delta.add_on_cuda(borrowed, x),
        [y, rest @ ..] => y.inplace_op1(&Next { delta, rest, x, borrowed: Cell::new(borrowed) }),
    }
}

#[cfg(feature = "cuda")]
impl InplaceOp1 for Next<'_, CudaStorage> {
    fn name(&self) -> &'static str {
        "lora-deltas"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("an output is on another device than `x`")
    }

    fn cuda_fwd(&self, y: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let mut borrowed: Outputs<'_, _> = self.borrowed.take();
        borrowed.push((y, layout));
        add_on_cuda(self.delta, self.rest, borrowed, self.x)
    }
}
