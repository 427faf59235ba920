//! What the operations of a step share: the table of the adapters' factors, the workspace, the batch and the stream.

use bytemuck::{Pod, Zeroable};

use super::{
    memory::{DeviceRegion, Stream, int},
    routing::RoutedBatch,
};
use crate::{
    DType,
    adapter::SlotImage,
    contract::StepShape,
    error::{LaunchError, OperandError},
    ffi,
    model::{Model, ModelId},
    plan::{BatchBounds, WorkspaceBytes},
};

/// The factors of one module in one slot: an element of a descriptor table `[num_slots][num_entries]` in device memory.
///
/// Factors are aligned to 128 bytes and stored in the formats of [`layout`](crate::adapter::layout), as [`SlotImage`]
/// writes them. The default means that the slot does not adapt the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Descriptor {
    /// Address of A `[rank, in_features]`, or of an embedding's A, transposed: `[vocab, rank]`. Of a fully sharded
    /// layer, this rank's part of A.
    pub a: u64,
    /// Address of B `[out_features, rank]`.
    pub b: u64,
    /// The rank; 0 if the slot does not adapt the module.
    pub rank: i32,
    /// The scaling, α/r or α/√r.
    pub scaling: f32,
}

impl Descriptor {
    /// The descriptors of a slot, `[num_entries]`, for an adapter whose block is at the address `block`.
    ///
    /// In the descriptors of what experts have in common ([`ProjectionSite`](crate::model::ProjectionSite)), the rank
    /// is the largest of the experts', a factor that is not shared is null, and the scaling is 1. In those of trained
    /// rows ([`RowsSite`](crate::model::RowsSite)), A are the ids, B are the rows, and the rank is their number.
    ///
    /// ```
    /// use aril::{DType, adapter::{Adapter, Tensor, layout::LinearA}, cuda::raw::Descriptor, model::{Experts, ModelSpec, Shard, TpRank}};
    ///
    /// let mut spec = ModelSpec::new();
    /// let id = spec.experts(Experts::new("mlp.experts", 2, 8, 4))?;
    /// let model = spec.shard(Shard::new(TpRank::SINGLE).held(id, [1]))?;
    /// // Both experts share A.
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
        for rows in image.rows() {
            let (a, b, count) = (at(rows.ids_elems), at(rows.rows_elems), i32::try_from(rows.count).unwrap_or(0));
            row[rows.entry] = Self { a, b, rank: count, scaling: 1.0 };
        }
        for shared in image.shared() {
            let [a, b] = [shared.a_elems, shared.b_elems].map(|elems| elems.map_or(0, at));
            row[shared.entry] = Self { a, b, rank: rank(shared.rank), scaling: 1.0 };
        }
        row
    }

    /// The descriptor once the block is at `to` instead of `from`, which is not null.
    pub(in crate::cuda) fn moved(self, from: u64, to: u64) -> Self {
        let moved = |address: u64| if address == 0 { 0 } else { address - from + to };
        Self { a: moved(self.a), b: moved(self.b), ..self }
    }
}

const _: () = assert!(size_of::<Descriptor>() == size_of::<ffi::aril_descriptor>());

/// A descriptor table of the engine: the factors of every slot.
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
    /// The table at the address `ptr`: [`Descriptor`]s `[num_slots][num_entries]`, row-major, with
    /// [`Model::num_entries`] entries per slot and factors in `dtype`. Descriptors with a rank above `max_rank` count
    /// as empty. Operations refuse a `max_rank` of 0.
    pub fn new(model: &Model, dtype: DType, ptr: u64, num_slots: usize, max_rank: usize) -> Self {
        Self { ptr, model: model.id(), dtype, num_slots, num_entries: model.num_entries(), max_rank }
    }

    /// Address of the [`Descriptor`]s, `[num_slots][num_entries]`. It never changes.
    pub const fn address(&self) -> u64 {
        self.ptr
    }

    pub(in crate::cuda) fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// What steps of `num_tokens` tokens are checked against.
    pub(in crate::cuda) fn step_shape(&self, num_tokens: usize) -> StepShape {
        let &Self { model, dtype, num_slots, max_rank, .. } = self;
        StepShape { model, dtype, num_slots, max_rank, num_tokens }
    }

    /// The descriptors from `first_entry` on.
    pub(in crate::cuda) fn at(&self, first_entry: usize) -> Result<ffi::aril_weights, LaunchError> {
        let offset = first_entry * size_of::<Descriptor>();
        Ok(ffi::aril_weights {
            table: (self.ptr + offset as u64) as *const ffi::aril_descriptor,
            num_slots: int(self.num_slots)?,
            num_entries: int(self.num_entries)?,
            max_rank: int(self.max_rank)?,
        })
    }
}

/// Scratch memory of the engine, of the sizes in [`WorkspaceBytes`], aligned to 16 bytes. The layers on one stream may
/// share it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Workspace {
    /// Zero before its first use. After that, only the kernels may write it. Every step that shares it gives the same
    /// extent.
    pub mailbox: DeviceRegion,
    /// May hold anything.
    pub partials: DeviceRegion,
}

/// The widest access of the kernels.
const WORKSPACE_ALIGNMENT_BYTES: usize = 16;

impl Workspace {
    /// Rejects a workspace that is too small or misaligned.
    pub(in crate::cuda) fn check(&self, needed: WorkspaceBytes) -> Result<(), LaunchError> {
        for (needed, part) in [(needed.mailbox, self.mailbox), (needed.partials, self.partials)] {
            LaunchError::room("the workspace", part.bytes, "this layer", needed)?;
            if needed > 0 && !part.ptr.is_multiple_of(WORKSPACE_ALIGNMENT_BYTES as u64) {
                return Err(LaunchError::Misaligned { operand: "the workspace", alignment: WORKSPACE_ALIGNMENT_BYTES });
            }
        }
        Ok(())
    }
}

/// The table, batch, workspace and stream that the operations of a step share.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub(in crate::cuda) table: Table,
    pub(in crate::cuda) batch: RoutedBatch,
    pub(in crate::cuda) workspace: Workspace,
    pub(in crate::cuda) stream: Stream,
}

impl Step {
    /// A step of `batch` with the adapters of `table`, enqueued on `stream`.
    pub const fn new(table: Table, batch: RoutedBatch, workspace: Workspace, stream: Stream) -> Self {
        Self { table, batch, workspace, stream }
    }

    /// The same step with its operations enqueued on another stream of the kernels' context, such as that of a green
    /// context.
    ///
    /// The engine orders the streams: after the [update](crate::cuda::Routing::update) of the routing and before the
    /// next one, and before and after other work that uses the workspace. Operations on two streams at once need two
    /// workspaces.
    #[must_use]
    pub const fn on(self, stream: Stream) -> Self {
        Self { stream, ..self }
    }

    /// Rejects a replay of this captured step for a step with another table, routing or workspace, or with more tokens.
    pub(in crate::cuda) fn check_replay(&self, step: &Self) -> Result<(), LaunchError> {
        for (is_other, what) in [
            (self.table.address() != step.table.address(), "table"),
            (self.batch.tokens() != step.batch.tokens(), "routing"),
            (self.workspace != step.workspace, "workspace"),
        ] {
            if is_other {
                return Err(LaunchError::OtherGraph { what });
            }
        }
        Ok(OperandError::within("the batch's tokens for this graph", step.batch.num_tokens, self.batch.num_tokens)?)
    }

    /// What the operations are checked against.
    pub(in crate::cuda) fn shape(&self) -> StepShape {
        self.table.step_shape(self.batch.num_tokens)
    }

    /// What launches are sized by.
    pub(in crate::cuda) fn bounds(&self) -> BatchBounds {
        self.batch.bounds(self.table.max_rank())
    }

    /// The batch.
    pub const fn batch(&self) -> RoutedBatch {
        self.batch
    }

    /// The stream of the operations.
    pub const fn stream(&self) -> Stream {
        self.stream
    }
}
