//! A stack of factors behind base weights, by addresses.

use std::mem;

use cudarc::driver::result;

use super::{
    memory::{Arrays, DeviceRegion, MatrixMut, Stream, int},
    step::Table,
};
use crate::{
    DType, contract,
    cuda::Kernels,
    error::{LaunchError, OperandError},
    ffi,
    model::{LinearId, LinearSite, MAX_RANK, Model, ModelId},
    plan::{MAX_SLOTS, PlanError, stacked_rows},
};

/// Elements of 16 bytes, which the kernels move at once.
const PIECE: usize = 8;
/// K tiles of this many features are copied by a thread block each.
const K_TILE: usize = ffi::ARIL_K_TILE as usize;
const RANK_TILE: usize = ffi::ARIL_RANK_TILE as usize;

/// A stack: `A` of some slots of a table as further rows of the base weights, for batches in which a base GEMM is
/// limited by the bytes of its weight.
///
/// For a base weight W `[out_features, in_features]` of a layer, the engine allocates W′ with
/// [`stacked_rows`](crate::plan::LinearPlan::stacked_rows) more rows, which belong to the stack. Its GEMM multiplies by
/// W′, so that `y` has `v = A x` of all adapters in the stack as further columns. Then
/// [`add_stacked_delta_raw`](crate::cuda::LoraLinear::add_stacked_delta_raw) adds `scaling · B v`, or
/// [`stacked_silu_mul_raw`](crate::cuda::LoraLinear::stacked_silu_mul_raw) does so within the activation. Neither reads
/// `x`.
///
/// An adapter has one of [`positions`](Self::positions) of the stack, which the engine [sets](Self::set) from its slot.
/// Graphs stay valid when positions change. `v` is rounded to the element type, so that a delta may differ in its last
/// bits from that of [`add_delta_raw`](crate::cuda::LoraLinear::add_delta_raw), and overflows in f16 beyond 65,504. A
/// token reads the columns of its own adapter alone.
#[derive(Clone, Debug)]
pub struct Stack {
    kernels: Kernels,
    model: ModelId,
    dtype: DType,
    positions: usize,
    rank: usize,
    modules: u64,
    layers: u64,
    num_blocks: usize,
    /// The first entries of its layers, sorted.
    entries: Vec<usize>,
}

impl Stack {
    /// Device memory that [`new`](Self::new) needs for a stack of so many layers, in bytes.
    pub fn device_bytes(model: &Model, positions: usize, num_layers: usize) -> usize {
        lay_out(0, model.num_entries(), positions, num_layers).2
    }

    /// An empty stack of the layers `rows`, in `memory`, which must be aligned to 256 bytes. `rows` of a layer is the
    /// part of its W′ behind W: `[stacked_rows, in_features]`, with rows aligned to 16 bytes. It has room for
    /// `positions` adapters whose modules have ranks up to `rank`. The element type of `table`s is `dtype`.
    ///
    /// # Errors
    /// [`LaunchError`] if a size is outside its limits, an id belongs to another model, a layer is fully sharded or is
    /// there twice, a matrix has another shape, type or alignment, `in_features` or a slice's outputs are no multiple
    /// of 8, or `memory` is too small or misaligned.
    ///
    /// # Safety
    /// - **Validity.** `memory` and `rows` are device memory of the kernels' context, and `stream` belongs to it and is
    ///   not being captured.
    /// - **Liveness.** They stay mapped while the stack is in use, and until the work has run.
    /// - **Aliasing.** Nothing else writes them.
    pub unsafe fn new(
        kernels: &Kernels,
        model: &Model,
        dtype: DType,
        (positions, rank): (usize, usize),
        rows: &[(LinearId, MatrixMut)],
        memory: DeviceRegion,
        stream: Stream,
    ) -> Result<Self, LaunchError> {
        kernels.check_thread()?;
        Self::check_limits(positions, rank)?;
        check_limit("layers", rows.len(), usize::MAX)?;
        if dtype == DType::F32 {
            return Err(PlanError::DType { operation: "a stack", got: dtype }.into());
        }
        let rank = rank.next_multiple_of(RANK_TILE);
        let (modules, layers, bytes) = lay_out(memory.ptr, model.num_entries(), positions, rows.len());
        memory.check_room("the stack's memory", bytes)?;
        let (mut table, mut num_blocks, mut entries) =
            (Vec::with_capacity(rows.len()), 0, Vec::with_capacity(rows.len()));
        for &(id, MatrixMut(matrix)) in rows {
            let site = model.linear(id).ok_or(PlanError::Foreign)?;
            check_site(site)?;
            let shape = matrix.shape("the stack's rows")?;
            contract::Linear::check_stack(site, dtype, shape, Self::rows_of(site, positions, rank))?;
            matrix.check_alignment("the stack's rows", contract::Linear::STACKED_ALIGNMENT_BYTES)?;
            let (rows, stride) = matrix.place();
            table.push(ffi::aril_stack_layer {
                rows,
                stride,
                in_features: int(site.in_features())?,
                num_slices: int(site.slices().len())?,
                first_entry: int(site.first_entry())?,
                first_block: int(num_blocks)?,
            });
            num_blocks += site.slices().len() * site.in_features().div_ceil(K_TILE);
            entries.push(site.first_entry());
        }
        entries.sort_unstable();
        if entries.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(OperandError::Twice { operand: "a layer of the stack" }.into());
        }
        int(num_blocks)?;
        // SAFETY: plain data without padding.
        let bytes =
            unsafe { std::slice::from_raw_parts(table.as_ptr().cast::<u8>(), mem::size_of_val(table.as_slice())) };
        let on = stream.as_raw().cast();
        let module_bytes = model.num_entries() * positions * size_of::<ffi::aril_stacked_module>();
        // No slot is at a position.
        // SAFETY: the caller vouches for the memory, which is large enough, and for the stream.
        unsafe { result::memset_d8_async(modules, 0xff, module_bytes, on) }?;
        // SAFETY: as above. From pageable memory, the driver has read the bytes when it returns.
        unsafe { result::memcpy_htod_async(layers, bytes, on) }?;
        let kernels = kernels.clone();
        Ok(Self { kernels, model: model.id(), dtype, positions, rank, modules, layers, num_blocks, entries })
    }

    pub(in crate::cuda) fn check_limits(positions: usize, rank: usize) -> Result<(), PlanError> {
        check_limit("positions", positions, MAX_SLOTS)?;
        check_limit("the stack's rank", rank, MAX_RANK)
    }

    /// The rows of a layer.
    pub(in crate::cuda) fn rows_of(site: &LinearSite, positions: usize, rank: usize) -> usize {
        stacked_rows(site.slices().len(), positions, rank)
    }

    /// Room for so many adapters.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The highest rank of a module in the stack: that of [`new`](Self::new), in steps of 8.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Enqueues the copy of the `A` of the slot with this index to a position, or empties the position if none is
    /// given. The adapter that was there leaves the stack, and so does the slot's at any other position. Neither
    /// allocates nor waits.
    ///
    /// Set a slot again when its adapter has been replaced or unloaded: the stack has the addresses of its factors.
    ///
    /// # Errors
    /// [`LaunchError`] if the position or the slot is outside its limits, or the table is of another model or element
    /// type.
    ///
    /// # Safety
    /// - **Validity.** The table and the factors of the slot are device memory of the kernels' context. No module of
    ///   the slot has a higher rank than the stack.
    /// - **Liveness.** They stay mapped until the position is set again, and the work has run.
    /// - **Aliasing.** Until then, nothing writes the slot's factors.
    /// - **Order.** `stream` orders this call with all work that uses the stack.
    pub unsafe fn set(
        &self,
        position: usize,
        table: &Table,
        slot: Option<usize>,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        let shape = table.step_shape(0);
        if shape.model != self.model {
            return Err(OperandError::Model.into());
        }
        if shape.dtype != self.dtype {
            return Err(OperandError::DType { operand: "weights", got: shape.dtype, want: self.dtype }.into());
        }
        OperandError::within("the position", position, self.positions - 1)?;
        if let Some(slot) = slot {
            OperandError::within("the slot", slot, shape.num_slots.saturating_sub(1))?;
        }
        let args = ffi::aril_stack_args {
            slot: slot.map_or(Ok(-1), int)?,
            position: int(position)?,
            positions: int(self.positions)?,
            rank: int(self.rank)?,
            num_layers: int(self.entries.len())?,
            num_blocks: int(self.num_blocks)?,
            layers: self.layers as *const ffi::aril_stack_layer,
            modules: self.modules as *mut ffi::aril_stacked_module,
            weights: table.at(0)?,
        };
        // SAFETY: the arguments are within the limits, and the caller vouches for the memory.
        unsafe { self.kernels.launch(ffi::aril_stack, &args, 1, stream.as_raw()) }
    }

    /// Columns of v behind the outputs of a layer, if it is in the stack.
    pub(in crate::cuda) fn columns(&self, model: ModelId, site: &LinearSite) -> Result<usize, OperandError> {
        if model != self.model {
            return Err(OperandError::Model);
        }
        if self.entries.binary_search(&site.first_entry()).is_err() {
            return Err(OperandError::NotStacked);
        }
        Ok(Self::rows_of(site, self.positions, self.rank))
    }

    /// The modules of a layer.
    pub(in crate::cuda) fn modules_of(&self, site: &LinearSite) -> *const ffi::aril_stacked_module {
        let offset = site.first_entry() * self.positions * size_of::<ffi::aril_stacked_module>();
        (self.modules + offset as u64) as *const _
    }
}

fn check_limit(what: &'static str, value: usize, max: usize) -> Result<(), PlanError> {
    if (1..=max).contains(&value) { Ok(()) } else { Err(PlanError::Limit { what, value, max }) }
}

/// Addresses of modules and layers from `start` on, and the bytes of both.
fn lay_out(start: u64, num_entries: usize, positions: usize, num_layers: usize) -> (u64, u64, usize) {
    let mut arrays = Arrays::at(start);
    let modules = arrays.push::<ffi::aril_stacked_module>(num_entries.saturating_mul(positions));
    let layers = arrays.push::<ffi::aril_stack_layer>(num_layers);
    (modules, layers, arrays.bytes())
}

/// Rejects layers that kernels could not move in pieces of 16 bytes, or whose ranks exchange v.
fn check_site(site: &LinearSite) -> Result<(), PlanError> {
    if site.exchange().is_some() {
        return Err(PlanError::FullySharded);
    }
    let outs = site.slices().iter().map(|slice| ("outputs of a slice", slice.out_features()));
    for (what, value) in [("in_features", site.in_features())].into_iter().chain(outs) {
        if !value.is_multiple_of(PIECE) {
            return Err(PlanError::Multiple { what, value, of: PIECE });
        }
    }
    Ok(())
}
