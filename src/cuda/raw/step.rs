use super::{
    memory::{DeviceRegion, Stream},
    routing::RoutedBatch,
    table::Table,
};
use crate::{
    contract::StepShape,
    error::{LaunchError, OperandError},
    plan::WorkspaceBytes,
};

/// Scratch memory of the engine, of the sizes in [`WorkspaceBytes`], aligned to 16 bytes. The layers on one stream may share it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Workspace {
    /// Zero before its first use. After that, only the kernels may write it. Every step that shares it gives the same extent.
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
        Ok(OperandError::within("the number of tokens of a replay", step.batch.num_tokens, self.batch.num_tokens)?)
    }

    /// What the operations are checked against.
    pub(in crate::cuda) fn shape(&self) -> StepShape {
        self.table.step_shape(self.batch.num_tokens)
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
