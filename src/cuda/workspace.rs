use std::sync::Arc;

use super::{
    LaunchError, Queue, WeightTable, raw,
    region::{Kept, Region},
};
use crate::plan::WorkspaceBytes;

/// Scratch memory for the operations of a step. All layers and graphs of a queue may share one workspace.
#[derive(Debug)]
pub struct Workspace {
    mailbox: Arc<Region>,
    partials: Arc<Region>,
}

impl Workspace {
    /// A workspace for any layer of the table's model.
    ///
    /// # Errors
    /// [`LaunchError`] if the kernels do not support a layer, or device memory is exhausted.
    pub fn new(weights: &WeightTable) -> Result<Self, LaunchError> {
        Self::with_bytes(weights.queue(), weights.workspace_bytes()?)
    }

    /// A workspace of this size: the [maximum](WorkspaceBytes::max) over the layers' plans, such as
    /// [`LinearPlan::workspace_bytes`](crate::plan::LinearPlan::workspace_bytes).
    ///
    /// # Errors
    /// [`LaunchError`] if device memory is exhausted.
    pub fn with_bytes(queue: &Queue, bytes: WorkspaceBytes) -> Result<Self, LaunchError> {
        let region = |bytes| Ok::<_, LaunchError>(Arc::new(Region::new(queue, bytes)?));
        Ok(Self { mailbox: region(bytes.mailbox)?, partials: region(bytes.partials)? })
    }

    pub(super) fn queue(&self) -> &Queue {
        self.mailbox.queue()
    }

    pub(super) fn kept(&self) -> [Kept; 2] {
        [self.mailbox.clone(), self.partials.clone()]
    }

    /// The workspace in the raw API.
    pub fn raw(&self) -> raw::Workspace {
        raw::Workspace { mailbox: self.mailbox.region(), partials: self.partials.region() }
    }
}
