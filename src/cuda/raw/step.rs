use super::{
    memory::{DeviceRegion, Stream},
    routing::RoutedBatch,
    table::Table,
};
use crate::{error::LaunchError, plan::WorkspaceBytes};

/// A layer's scratch that somebody else owns: as much of each as [`WorkspaceBytes`] says, aligned to
/// 16 bytes. Any number of layers may share one on a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Workspace {
    /// Zero when it is first used, and written by nothing but the kernels from then on. Every step that shares it gives the same extent.
    pub mailbox: DeviceRegion,
    /// Of any content.
    pub partials: DeviceRegion,
}

/// What kernels read of a workspace at a time.
const WORKSPACE_ALIGNMENT_BYTES: usize = 16;

impl Workspace {
    /// Refuses one that is too small or misaligned.
    pub(super) fn check(&self, needed: WorkspaceBytes) -> Result<(), LaunchError> {
        for (needed, part) in [(needed.mailbox, self.mailbox), (needed.partials, self.partials)] {
            LaunchError::within("the workspace's use", needed, part.bytes)?;
            if needed > 0 && !part.ptr.is_multiple_of(WORKSPACE_ALIGNMENT_BYTES as u64) {
                return Err(LaunchError::Misaligned { operand: "workspace", alignment: WORKSPACE_ALIGNMENT_BYTES });
            }
        }
        Ok(())
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
