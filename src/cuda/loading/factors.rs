//! Factors that an engine has in device memory, packed into a slot by a kernel.

#![expect(unsafe_code, reason = "launches on memory that the caller vouches for")]

use std::collections::BTreeSet;

use cudarc::driver::result;

use super::{
    Filled, LaunchError, Reservation, Staging, WeightTable,
    raw::{self, Descriptor, MatrixRef, RawMatrix, Stream, dtype_code, int},
};
use crate::{
    DType, Element, Slot,
    adapter::layout::{B, CORE, LinearA},
    cuda::{Matrix, View, kernels::check, memory::Memory as _},
    error::{LoadError, OperandError},
    ffi,
    model::LinearId,
    plan::{PlanError, limit},
};

const FACTORS_PER_LAUNCH: usize = ffi::ARIL_PACK_FACTORS as usize;

/// The factors of one module in device memory: those of an engine that owns its adapters, or trains them.
#[derive(Debug)]
pub struct Factors<'a, T> {
    /// The layer.
    pub layer: LinearId,
    /// The slice of the layer, from 0.
    pub slice: usize,
    /// α/r or α/√r. It must be finite.
    pub scaling: f32,
    /// A `[rank, in_features]`, row-major.
    pub a: Matrix<'a, T>,
    /// B `[out_features, rank]`, row-major.
    pub b: Matrix<'a, T>,
}

impl WeightTable {
    /// Packs factors in device memory into a slot and replaces the previous adapter, as [`load`](Self::load) does with
    /// an adapter in host memory. The factors are row-major, `bf16`, `f16` or `f32`, and converted to the table's
    /// element type by rounding to nearest, ties to even. The bytes in the slot are those that `load` writes for the
    /// same factors. Modules that are not given are not adapted.
    ///
    /// Shapes are those of this rank: of its input features in row-parallel layers, of its outputs, with padding, in
    /// column-parallel ones.
    ///
    /// The packing waits on the device for the work that the queue's stream has now. Blocks this thread until it has
    /// run, after which the factors may change. Other threads may step meanwhile.
    ///
    /// # Errors
    /// [`LoadError::Factors`] if a module's layer belongs to another model, is fully sharded or is no linear layer of
    /// the table, the slice does not exist or is given twice, or a factor or the scaling is not as described, belongs
    /// to another context, or has an element without a finite value in the table's element type. Otherwise as for
    /// [`load`](Self::load). The slot is then unchanged.
    pub fn load_factors<'a, T: Element>(
        &self,
        slot: usize,
        factors: impl IntoIterator<Item = Factors<'a, T>>,
    ) -> Result<Slot, LoadError> {
        let queue = self.queue();
        let factors: Vec<_> = factors.into_iter().collect();
        let mut views: Vec<[&View<'_, T>; 2]> =
            factors.iter().map(|module| [module.a.view(), module.b.view()]).collect();
        for (module, [a, b]) in factors.iter().zip(&views) {
            let checked = a.check_queue("A", queue).and_then(|()| b.check_queue("B", queue));
            checked.map_err(|error| self.of_module(module.layer, module.slice, error))?;
        }
        // The stream is not being captured.
        queue.prepare()?;
        let used = views.iter_mut().map(|[a, b]| Ok([a.on(queue)?, b.on(queue)?]));
        let used = used.collect::<Result<Vec<_>, LaunchError>>()?;
        let raw: Vec<_> = factors
            .iter()
            .zip(&used)
            .map(|(&Factors { layer, slice, scaling, ref a, ref b }, [(a_at, _), (b_at, _)])| raw::Factors {
                layer,
                slice,
                scaling,
                a: a.at(*a_at),
                b: b.at(*b_at),
            })
            .collect();
        // SAFETY: the matrices are within their memory, which belongs to this context and is borrowed until the packing
        // has run. The queue's stream waits for its earlier uses: for buffers because they belong to it, for cudarc's
        // memory by its events.
        unsafe { self.load_factors_raw(slot, &raw) }
    }

    /// [`load_factors`](Self::load_factors) on memory that the engine owns. All factors of a call have one element
    /// type.
    ///
    /// # Errors
    /// As for `load_factors`, and [`OperandError::DType`] if the element types differ.
    ///
    /// # Safety
    /// From this call until it returns:
    /// - **Validity.** The factors are device memory of the kernels' context, in their whole extent.
    /// - **Liveness.** That memory stays mapped.
    /// - **Aliasing.** Only work that the queue's stream is ordered behind, when this is called, writes it.
    pub unsafe fn load_factors_raw(&self, slot: usize, factors: &[raw::Factors]) -> Result<Slot, LoadError> {
        self.check_owner()?;
        self.check_slot(slot)?;
        let packing = Packing::new(self, factors)?;
        let queue = self.queue();
        let ready = queue.new_event()?;
        queue.prepare()?;
        ready.record(queue.stream()).map_err(LaunchError::from)?;
        let reservation = self.reserve_bytes(packing.bytes(), None)?;
        let filled = self.fill_by(|staging| {
            staging.wait_for(&ready)?;
            // SAFETY: the caller's obligations. The staging's stream waits for what wrote the factors.
            unsafe { reservation.pack(&packing, staging) }
        })?;
        self.commit(slot, filled)
    }

    /// An error about the factors of a module.
    fn of_module(&self, layer: LinearId, slice: usize, error: impl Into<LaunchError>) -> LoadError {
        let site = self.model().linear(layer).and_then(|site| site.slices().get(slice));
        let module = site.map_or_else(|| format!("slice {slice} of {layer:?}"), |site| site.module().to_owned());
        LoadError::Factors { module, error: Box::new(error.into()) }
    }
}

/// A factor and its place in the block.
#[derive(Debug)]
struct Factor {
    source: RawMatrix,
    is_b: bool,
    /// In elements.
    at: usize,
    elems: usize,
}

/// Checked factors of an adapter, and the block that they are packed into.
#[derive(Debug)]
struct Packing<'a> {
    weights: &'a WeightTable,
    factors: &'a [raw::Factors],
    source_dtype: DType,
    /// Two for each module.
    parts: Vec<Factor>,
    /// By module.
    entries: Vec<(usize, usize)>,
    elems: usize,
}

impl<'a> Packing<'a> {
    fn new(weights: &'a WeightTable, factors: &'a [raw::Factors]) -> Result<Self, LoadError> {
        let source_dtype = factors.first().map_or(weights.dtype(), |module| module.a.0.dtype);
        let (parts, entries) = (Vec::with_capacity(2 * factors.len()), Vec::with_capacity(factors.len()));
        let mut packing = Self { weights, factors, source_dtype, parts, entries, elems: 0 };
        let mut taken = BTreeSet::new();
        for module in factors {
            let placed = packing.place(module).and_then(|entry| {
                let is_new = taken.insert(entry);
                if is_new { Ok(()) } else { Err(OperandError::Twice { operand: "the module" }.into()) }
            });
            placed.map_err(|error| weights.of_module(module.layer, module.slice, error))?;
        }
        Ok(packing)
    }

    /// Checks the factors of a module, appends them to the block, and returns its entry.
    fn place(&mut self, module: &raw::Factors) -> Result<usize, LaunchError> {
        let &raw::Factors { layer, slice, scaling, a: MatrixRef(a), b: MatrixRef(b) } = module;
        let site = self.weights.model().linear(layer).ok_or(PlanError::Foreign)?;
        if site.exchange().is_some() {
            return Err(PlanError::FullySharded.into());
        }
        let slices = site.slices();
        OperandError::within("the slice", slice, slices.len() - 1)?;
        if !scaling.is_finite() {
            return Err(OperandError::NotFinite { operand: "the scaling", dtype: DType::F32 }.into());
        }
        let (a_shape, b_shape, in_features) = (a.shape("A")?, b.shape("B")?, site.in_features());
        let (rank, out_features) = (a_shape.extent.rows, slices[slice].b_rows().len);
        // Before the shapes, which are those for any rank.
        limit("the rank", rank, self.weights.capacity().max_rank)?;
        a_shape.expect("A", self.source_dtype, rank, in_features)?;
        b_shape.expect("B", self.source_dtype, out_features, rank)?;
        self.append(a, false, LinearA { rank, in_features }.elems());
        self.append(b, true, B { out_features, rank }.elems());
        let entry = site.first_entry() + slice;
        self.entries.push((entry, rank));
        Ok(entry)
    }

    fn append(&mut self, source: RawMatrix, is_b: bool, elems: usize) {
        self.parts.push(Factor { source, is_b, at: self.elems, elems });
        self.elems += elems;
    }

    fn bytes(&self) -> usize {
        self.elems * self.weights.dtype().bytes()
    }

    fn max_rank(&self) -> usize {
        self.entries.iter().map(|&(_, rank)| rank).max().unwrap_or(0)
    }

    /// The descriptors of a block at this address.
    fn row(&self, block: u64) -> Result<Vec<Descriptor>, LaunchError> {
        let mut row = vec![Descriptor::default(); self.weights.model().num_entries()];
        for ((module, &(entry, rank)), parts) in self.factors.iter().zip(&self.entries).zip(self.parts.chunks(2)) {
            let [a, b] = [0, 1].map(|part| self.address(block, &parts[part]));
            row[entry] = Descriptor { a, b, rank: int(rank)?, scaling: module.scaling };
        }
        Ok(row)
    }

    fn address(&self, block: u64, part: &Factor) -> u64 {
        block + (part.at * self.weights.dtype().bytes()) as u64
    }

    /// The part as the C ABI has it.
    fn raw(&self, number: usize, block: u64) -> Result<ffi::aril_pack_factor, LaunchError> {
        let part = &self.parts[number];
        let ((source, row_stride), extent) = (part.source.place(), part.source.shape("A")?.extent);
        Ok(ffi::aril_pack_factor {
            source,
            target: self.address(block, part) as *mut _,
            row_stride,
            rows: int(extent.rows)?,
            cols: int(extent.cols)?,
            core_rows: int(part.elems / CORE)?,
            is_b: part.is_b.into(),
            number: int(number)?,
            first_block: 0,
        })
    }

    /// Packs into a block, and waits. `not_finite` is the address of four bytes.
    ///
    /// # Safety
    /// As for [`load_factors_raw`](WeightTable::load_factors_raw), on the staging's stream. The block has
    /// [`bytes`](Self::bytes) bytes, and nothing else uses it or `not_finite`.
    unsafe fn pack(&self, staging: &Staging, block: u64, not_finite: u64) -> Result<(), LoadError> {
        let mut lowest = [u32::MAX];
        // SAFETY: the caller's obligations. `lowest` lives until the stream has run.
        let launched = unsafe { self.launch(staging.raw(), block, not_finite, &mut lowest) };
        // Also after an error: then the kernels no longer read the factors.
        staging.synchronize()?;
        launched?;
        let Some(part) = usize::try_from(lowest[0]).ok().filter(|&part| part < self.parts.len()) else { return Ok(()) };
        let (operand, module) = (if self.parts[part].is_b { "B" } else { "A" }, &self.factors[part / 2]);
        let error = OperandError::NotFinite { operand, dtype: self.weights.dtype() };
        Err(self.weights.of_module(module.layer, module.slice, error))
    }

    /// Enqueues the packing, and the copy of what it found to `lowest`.
    ///
    /// # Safety
    /// As for [`pack`](Self::pack). `lowest` lives until the stream has run.
    unsafe fn launch(
        &self,
        stream: Stream,
        block: u64,
        not_finite: u64,
        lowest: &mut [u32],
    ) -> Result<(), LaunchError> {
        // SAFETY: the caller's obligations.
        unsafe { result::memset_d8_async(not_finite, 0xff, size_of::<u32>(), stream.as_raw().cast()) }?;
        let numbers: Vec<_> = (0..self.parts.len()).collect();
        for numbers in numbers.chunks(FACTORS_PER_LAUNCH) {
            let mut factors = [self.raw(numbers[0], block)?; FACTORS_PER_LAUNCH];
            for (factor, &number) in factors.iter_mut().zip(numbers) {
                *factor = self.raw(number, block)?;
            }
            let args = ffi::aril_pack_args {
                dtype: dtype_code(self.weights.dtype()),
                source_dtype: dtype_code(self.source_dtype),
                num_factors: int(numbers.len())?,
                not_finite: not_finite as *mut u32,
                factors,
            };
            // SAFETY: the factors have been checked against the model, and their places are in the block; the caller
            // vouches for the rest.
            check(unsafe { ffi::aril_pack(&raw const args, stream.as_raw()) })?;
        }
        // SAFETY: the address is of four bytes; the caller vouches for `lowest`.
        Ok(unsafe { result::memcpy_dtoh_async(lowest, not_finite, stream.as_raw().cast()) }?)
    }
}

impl Reservation {
    /// Packs factors into the room, and waits until they may change.
    ///
    /// # Safety
    /// As for [`WeightTable::load_factors_raw`], on the staging's stream.
    unsafe fn pack(self, packing: &Packing<'_>, staging: &mut Staging) -> Result<Filled, LoadError> {
        self.fill_by(
            packing.max_rank(),
            staging,
            // SAFETY: the caller's obligations, and those of `fill_by`. The row is written after the packing has run.
            |staging, block, row| unsafe { packing.pack(staging, block, row) },
            |block| packing.row(block),
        )
    }
}
