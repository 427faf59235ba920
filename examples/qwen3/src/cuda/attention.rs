//! Attention on the GPU: which kernel a step takes.
//!
//! In 16 bits, tokens that are alone in their sequences take `attend_decode`, all others `attend_prefill`, both of
//! `kernels/attention.cuh`. In `f32`, and with heads or groups of other sizes, all take `attend` of `kernels.cu`, which
//! rounds as transformers' `eager` does.

use std::{result, sync::Arc};

use aril::{
    DType, Element,
    cuda::{Buffer, Queue},
};
use cudarc::driver::{CudaFunction, CudaModule, DeviceRepr};

use super::{
    Cuda, Matrix,
    functions::load_with_shared,
    launch::{Launch, launch, launch_blocks},
    matrix::MemoryFor as _,
};
use crate::{
    config::Heads,
    device::{Cache, Places},
    error::{Result, bail},
    kernels::attention::{DIMS, Kernel, MAX_GROUP, THREADS, decode_grid, max_splits, prefill_grid},
};

/// The product of sequences and kv heads of a step, at most.
const MAX_ARRIVALS: usize = 1 << 20;

pub(super) struct Attention {
    simple: CudaFunction,
    fast: Vec<Fast>,
    /// The splits of each sequence and kv head that have been computed: zeros between steps.
    arrivals: Buffer<i32>,
}

/// The kernels for heads of `dim` features, in the order of `Kernel::ALL`.
struct Fast {
    dim: usize,
    functions: Vec<CudaFunction>,
}

impl Fast {
    fn get(&self, kernel: Kernel) -> (&CudaFunction, usize) {
        (&self.functions[kernel as usize], kernel.shared_bytes(self.dim))
    }
}

impl Attention {
    pub(super) fn new(dtype: DType, module: &Arc<CudaModule>, queue: &Queue) -> Result<Self> {
        let dims = if dtype == DType::F32 { &[][..] } else { &DIMS };
        let fast = dims.iter().map(|&dim| {
            let load = |kernel: Kernel| {
                load_with_shared(module, &format!("{}_{dtype}", kernel.name(dim)), kernel.shared_bytes(dim))
            };
            let functions = Kernel::ALL.into_iter().map(load).collect::<result::Result<_, _>>();
            Ok(Fast { dim, functions: functions.memory_for("the example's kernels")? })
        });
        Ok(Self {
            simple: module.load_function(&format!("attend_{dtype}")).memory_for("the example's kernels")?,
            fast: fast.collect::<Result<_>>()?,
            arrivals: Buffer::zeros(queue, MAX_ARRIVALS).memory_for("the counters of attention")?,
        })
    }

    pub(super) fn run<T: Element + DeviceRepr>(
        &self,
        device: &Cuda<T>,
        qkv: &Matrix<T>,
        heads: Heads,
        places: &Places<Cuda<T>>,
        cache: &Cache<Cuda<T>>,
        out: &mut Matrix<T>,
    ) -> Result<()> {
        #[expect(clippy::cast_possible_truncation, reason = "rounded as transformers does")]
        let scale = (1.0 / (heads.dim as f64).sqrt()) as f32;
        let block_rows = places.table.block_rows as usize;
        let call = Call { qkv, heads, places, cache, out, block_rows, scale };
        let group = heads.query / heads.kv;
        let Some(fast) = self.fast.iter().find(|fast| fast.dim == heads.dim && group <= MAX_GROUP) else {
            let mut kernel = device.kernel(&self.simple);
            call.push(&mut kernel);
            kernel.arg(&heads.dim);
            return launch(kernel, qkv.rows, heads.query);
        };
        self.decode(device, fast, &call)?;
        if places.alone.is_none() {
            return Ok(());
        }
        let (function, shared_bytes) = fast.get(Kernel::Prefill);
        let mut kernel = device.kernel(function);
        call.push(&mut kernel);
        kernel.arg(&qkv.rows);
        let grid = prefill_grid(qkv.rows, heads.kv, group);
        launch_blocks(kernel, grid, THREADS, shared_bytes)
    }

    /// The tokens that are alone.
    fn decode<T: Element + DeviceRepr>(&self, device: &Cuda<T>, fast: &Fast, call: &Call<'_, T>) -> Result<()> {
        let Call { qkv, heads, places, .. } = *call;
        let table = &places.table;
        let (tokens, alone) = places.alone.as_ref().map_or((qkv.rows, 0), |alone| (alone.rows, alone.address));
        if tokens == 0 {
            return Ok(());
        }
        let sequences = table.first_rows.rows / table.columns;
        let pairs = sequences * heads.kv;
        if pairs > MAX_ARRIVALS {
            bail!("a step of {sequences} sequences and {} kv heads: attention takes {MAX_ARRIVALS} of both", heads.kv);
        }
        // Of the longest sequence that the table has room for, whose length the host does not know.
        let max_splits = max_splits(table.columns * call.block_rows);
        let rows = if max_splits > 1 { pairs * max_splits * heads.query / heads.kv } else { 0 };
        let partials = device.alloc::<f32>(rows, heads.dim)?;
        let stats = device.alloc::<f32>(rows, 2)?;
        let arrivals = self.arrivals.device_ptr();
        let grid = decode_grid(tokens, heads.kv, max_splits);
        let (function, shared_bytes) = fast.get(Kernel::for_decode(grid));
        let mut kernel = device.consumer(function);
        call.push(&mut kernel);
        kernel.arg(&alone).arg(&partials.address).arg(&stats.address).arg(&arrivals).arg(&max_splits);
        launch_blocks(kernel, grid, THREADS, shared_bytes)
    }
}

/// What all kernels of attention get first.
struct Call<'a, T: Element + DeviceRepr> {
    qkv: &'a Matrix<T>,
    heads: Heads,
    places: &'a Places<Cuda<T>>,
    cache: &'a Cache<Cuda<T>>,
    out: &'a Matrix<T>,
    block_rows: usize,
    scale: f32,
}

impl<T: Element + DeviceRepr> Call<'_, T> {
    fn push<'a>(&'a self, kernel: &mut Launch<'a>) {
        let Self { qkv, heads, places, cache, out, block_rows, scale } = self;
        kernel.arg(&qkv.address).arg(&cache.keys.address).arg(&cache.values.address);
        kernel.arg(&places.positions.address).arg(&places.sequences.address).arg(&places.table.first_rows.address);
        kernel.arg(&places.table.columns).arg(block_rows).arg(&out.address);
        kernel.arg(&qkv.stride).arg(&heads.query).arg(&heads.kv).arg(scale);
    }
}
