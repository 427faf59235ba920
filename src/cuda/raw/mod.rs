//! The raw door: the operations on memory that somebody else owns.
//!
//! Descriptors of memory are `Copy`, carry no lifetime and are safe to make: an address is data. What must hold is said once, at
//! each launch, which is `unsafe`. For engines that are not built on cudarc's slices, and for graphs of several streams.
//!
//! In the `# Safety` sections, *until the work has run* means until everything enqueued by the call is complete on the stream, not
//! until the call returns. For a call that is captured, it means for as long as the graph may be replayed.
//!
#![doc = include_str!("../../docs/graphs.md")]
#![expect(unsafe_code, reason = "launches on memory that somebody else owns")]

mod align;
mod embedding;
mod experts;
mod linear;
mod routing;

use std::ffi::c_void;

use bytemuck::{Pod, Zeroable};

pub use self::{
    align::{AlignedRoutes, Alignment},
    embedding::LoraEmbedding,
    experts::{GroupedRoutes, Grouping, LoraExperts, TopK},
    linear::LoraLinear,
    routing::{RoutedBatch, Routing},
};
pub(in crate::cuda) use self::{experts::Form, linear::Kernel};
use super::LaunchError;
use crate::{
    DType, Element,
    adapter::SlotImage,
    error::OperandError,
    extent::Extent,
    ffi,
    model::{Model, ModelId},
    plan::{Capacity, WorkspaceBytes},
};

/// A CUDA stream that somebody else owns.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(transparent)]
pub struct Stream(*mut c_void);

// SAFETY: a handle; the driver's calls that take it are thread-safe.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Names a stream by its raw `CUstream` or `cudaStream_t`.
    pub const fn from_raw(stream: *mut c_void) -> Self {
        Self(stream)
    }

    /// The raw `CUstream` or `cudaStream_t`.
    pub const fn as_raw(self) -> *mut c_void {
        self.0
    }
}

impl From<&cudarc::driver::CudaStream> for Stream {
    fn from(stream: &cudarc::driver::CudaStream) -> Self {
        Self(stream.cu_stream().cast())
    }
}

/// Bytes in device memory that somebody else owns.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeviceRegion {
    /// The address of the first.
    pub ptr: u64,
    /// How many.
    pub bytes: usize,
}

/// A layer's scratch that somebody else owns: as much of each as [`WorkspaceBytes`] says, aligned to
/// 16 bytes. Any number of layers may share one on a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Workspace {
    /// Zero when it is first used, and written by nothing but the kernels from then on.
    pub mailbox: DeviceRegion,
    /// Of any content.
    pub partials: DeviceRegion,
}

/// What kernels read of a workspace at a time.
const WORKSPACE_ALIGNMENT_BYTES: usize = 16;

impl Workspace {
    /// Refuses one that is too small or misaligned.
    fn check(&self, needed: WorkspaceBytes) -> Result<(), LaunchError> {
        for (needed, part) in [(needed.mailbox, self.mailbox), (needed.partials, self.partials)] {
            within("the workspace's use", needed, part.bytes)?;
            if needed > 0 && !part.ptr.is_multiple_of(WORKSPACE_ALIGNMENT_BYTES as u64) {
                return Err(LaunchError::Misaligned { operand: "workspace", alignment: WORKSPACE_ALIGNMENT_BYTES });
            }
        }
        Ok(())
    }
}

/// A row-major matrix in device memory, to be read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixRef(RawMatrix);

/// A row-major matrix in device memory, to be read and written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixMut(RawMatrix);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct RawMatrix {
    ptr: u64,
    dtype: DType,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

macro_rules! raw_matrix {
    ($matrix:ident) => {
        impl $matrix {
            /// `rows` rows of `cols` elements, one behind the other.
            pub const fn new<T: Element>(ptr: u64, rows: usize, cols: usize) -> Self {
                Self::with_dtype(ptr, T::DTYPE, rows, cols)
            }

            /// As `new`, where the element type is known only at run time.
            pub const fn with_dtype(ptr: u64, dtype: DType, rows: usize, cols: usize) -> Self {
                Self(RawMatrix { ptr, dtype, rows, cols, row_stride: cols })
            }

            /// Sets the distance between the beginnings of rows, in elements.
            #[must_use]
            pub const fn row_stride(self, row_stride: usize) -> Self {
                Self(RawMatrix { row_stride, ..self.0 })
            }
        }
    };
}

raw_matrix!(MatrixRef);
raw_matrix!(MatrixMut);

impl RawMatrix {
    /// The address and the stride, of a matrix of that type and shape.
    fn expect(
        &self,
        operand: &'static str,
        dtype: DType,
        rows: usize,
        cols: usize,
    ) -> Result<(*mut c_void, i64), OperandError> {
        if self.dtype != dtype {
            return Err(OperandError::DType { operand, got: self.dtype, want: dtype });
        }
        let addressable = isize::MAX as usize / dtype.bytes();
        Extent::new(operand, addressable, self.rows, self.cols, self.row_stride)?.expect(operand, rows, cols)?;
        // A stride that no row takes may be of any size.
        let row_stride = i64::try_from(self.row_stride).unwrap_or(i64::MAX);
        Ok((self.ptr as *mut c_void, row_stride))
    }
}

/// One module of one slot, as kernels read it: an element of a descriptor table `[num_slots][num_entries]` in device memory.
///
/// Factors begin on 128-byte boundaries, laid out as [`layout`](crate::adapter::layout) says, with zeros for padding
/// ([`SlotImage`] writes them so). The default is a slot without this module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Descriptor {
    /// The address of A `[rank, in_features]`; of an embedding, of A transposed `[vocab, rank]`.
    pub a: u64,
    /// The address of B `[out_features, rank]`.
    pub b: u64,
    /// The rank; 0 where the slot has no such module.
    pub rank: i32,
    /// α/r or α/√r.
    pub scaling: f32,
}

impl Descriptor {
    /// A slot's row of the table, for an adapter whose block is at that address: a descriptor for each of the model's entries.
    ///
    /// Those of what experts share ([`ProjectionSite`](crate::model::ProjectionSite)) have a null pointer for a factor that is not
    /// shared, and the scaling 1.
    ///
    /// ```
    /// use aril::{DType, adapter::{Adapter, Tensor, layout::LinearA}, cuda::raw::Descriptor, model::{Experts, ModelSpec, TpRank}};
    ///
    /// let mut spec = ModelSpec::new();
    /// let id = spec.experts(Experts::new("mlp.experts", 2, 8, 4).held([1]))?;
    /// let model = spec.shard(TpRank::SINGLE)?;
    /// // Both experts have the one A.
    /// let tensor = |shape: [usize; 3], values: &[f32]| Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec());
    /// let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 6}"#, [
    ///     ("mlp.experts.up_proj.lora_A.weight".to_owned(), tensor([1, 3, 8], &[0.5; 24])?),
    ///     ("mlp.experts.up_proj.lora_B.weight".to_owned(), tensor([2, 4, 3], &std::array::from_fn::<_, 24, _>(|i| i as f32))?),
    /// ])?;
    /// let row = Descriptor::row(&adapter.plan(&model, DType::F32)?, 0x1000);
    ///
    /// let (gate, up) = (0, 1);
    /// let entry = model[id].gate_up().expert_entry(0);
    /// let (a, b) = (0x1000, 0x1000 + 4 * LinearA { rank: 3, in_features: 8 }.elems() as u64);
    /// assert_eq!(row[entry + up], Descriptor { a, b, rank: 3, scaling: 2.0 });
    /// assert_eq!(row[model[id].gate_up().shared_entry() + up], Descriptor { a, b: 0, rank: 3, scaling: 1.0 });
    /// assert_eq!(row[entry + gate], Descriptor::default());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn row(image: &SlotImage<'_>, block: u64) -> Vec<Self> {
        let at = |elems: usize| block + (elems * image.dtype().bytes()) as u64;
        // At most MAX_RANK.
        let rank = |rank: usize| i32::try_from(rank).unwrap_or(0);
        let mut row = vec![Self::default(); image.num_entries()];
        for entry in image.entries() {
            let (a, b) = (at(entry.a_elems), at(entry.b_elems));
            row[entry.entry] = Self { a, b, rank: rank(entry.rank), scaling: entry.scaling };
        }
        for shared in image.shared() {
            let [a, b] = [shared.a_elems, shared.b_elems].map(|elems| elems.map_or(0, at));
            row[shared.entry] = Self { a, b, rank: rank(shared.rank), scaling: 1.0 };
        }
        row
    }
}

const _: () = assert!(size_of::<Descriptor>() == size_of::<ffi::aril_descriptor>());

/// A descriptor table that somebody owns: the factors of every slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Table {
    ptr: u64,
    model: ModelId,
    dtype: DType,
    num_slots: usize,
    num_entries: usize,
    max_rank: usize,
}

impl Table {
    /// The table at `ptr`: `num_slots` rows of [`Model::num_entries`] [`Descriptor`]s, row-major, of factors of `dtype`. Descriptors of
    /// a rank above `max_rank` count as no adapter.
    pub fn new(model: &Model, dtype: DType, ptr: u64, num_slots: usize, max_rank: usize) -> Self {
        Self { ptr, model: model.id(), dtype, num_slots, num_entries: model.num_entries(), max_rank }
    }

    /// The descriptors from `first_entry` on, for a layer of that model, type and capacity.
    fn expect(
        &self,
        model: ModelId,
        dtype: DType,
        capacity: &Capacity,
        first_entry: usize,
    ) -> Result<ffi::aril_weights, LaunchError> {
        if self.model != model {
            return Err(OperandError::Model.into());
        }
        if self.dtype != dtype {
            return Err(OperandError::DType { operand: "weights", got: self.dtype, want: dtype }.into());
        }
        within("the weights' num_slots", self.num_slots, capacity.num_slots)?;
        within("the weights' max_rank", self.max_rank, capacity.max_rank)?;
        let offset = first_entry * size_of::<Descriptor>();
        Ok(ffi::aril_weights {
            table: (self.ptr + offset as u64) as *const ffi::aril_descriptor,
            num_slots: int(self.num_slots)?,
            num_entries: int(self.num_entries)?,
            max_rank: int(self.max_rank)?,
        })
    }
}

/// What all operations of a step have in common.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub(in crate::cuda) table: Table,
    pub(in crate::cuda) batch: RoutedBatch,
    pub(in crate::cuda) workspace: Workspace,
    pub(in crate::cuda) stream: Stream,
}

impl Step {
    /// A step of `batch` on the adapters of `table`, enqueued on `stream`.
    pub const fn new(table: Table, batch: RoutedBatch, workspace: Workspace, stream: Stream) -> Self {
        Self { table, batch, workspace, stream }
    }

    /// The same step with another scratch on another stream: for operations beside those of this one.
    #[must_use]
    pub const fn beside(self, workspace: Workspace, stream: Stream) -> Self {
        Self { workspace, stream, ..self }
    }

    /// The batch.
    pub const fn batch(&self) -> RoutedBatch {
        self.batch
    }

    /// The stream that operations are enqueued on.
    pub const fn stream(&self) -> Stream {
        self.stream
    }
}

/// Refuses what there is no room for.
fn within(what: &'static str, got: usize, max: usize) -> Result<(), LaunchError> {
    if got > max { Err(LaunchError::Capacity { what, got, max }) } else { Ok(()) }
}

/// Parts of a device memory, one behind the other, each aligned for kernels.
struct Parts(usize);

impl Parts {
    /// What each part, and the memory, is aligned to.
    const ALIGNMENT_BYTES: usize = 256;

    /// Appends a part of so many bytes, and says where it begins.
    fn push(&mut self, bytes: usize) -> usize {
        let start = self.0;
        self.0 += bytes.next_multiple_of(Self::ALIGNMENT_BYTES);
        start
    }
}

impl DeviceRegion {
    /// Refuses a memory that is too small for its parts, or misaligned.
    fn check_parts(&self, operand: &'static str, bytes: usize) -> Result<(), LaunchError> {
        within(operand, bytes, self.bytes)?;
        if self.ptr.is_multiple_of(Parts::ALIGNMENT_BYTES as u64) {
            Ok(())
        } else {
            Err(LaunchError::Misaligned { operand, alignment: Parts::ALIGNMENT_BYTES })
        }
    }
}

/// A count on its way to the ABI.
fn int(value: usize) -> Result<i32, LaunchError> {
    i32::try_from(value).map_err(|_| LaunchError::Capacity { what: "a count", got: value, max: i32::MAX as usize })
}

/// An element type on its way to the ABI.
fn dtype_code(dtype: DType) -> i32 {
    let ffi::aril_dtype(code) = match dtype {
        DType::BF16 => ffi::aril_dtype::ARIL_BF16,
        DType::F16 => ffi::aril_dtype::ARIL_F16,
        DType::F32 => ffi::aril_dtype::ARIL_F32,
    };
    code.cast_signed()
}
