use std::sync::Arc;

use super::{
    LaunchError, Queue, WeightTable, raw,
    region::{Kept, Region},
};
use crate::plan::WorkspaceBytes;

/// Scratch for the operations of a step. Any number of layers and graphs of one queue share one.
#[derive(Debug)]
pub struct Workspace {
    mailbox: Arc<Region>,
    partials: Arc<Region>,
}

impl Workspace {
    /// One that is enough for every layer of the table's model.
    ///
    /// # Errors
    /// If no kernel takes the shape of a layer, or there is no memory left.
    pub fn new(weights: &WeightTable) -> Result<Self, LaunchError> {
        Self::with_bytes(weights.queue(), weights.workspace_bytes()?)
    }

    /// One of that size: the [maximum](WorkspaceBytes::max) of what the layers' [`LinearPlan::workspace_bytes`](crate::plan::LinearPlan::workspace_bytes) ask for.
    ///
    /// # Errors
    /// If there is no memory left.
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

    /// What the raw door calls it.
    pub fn raw(&self) -> raw::Workspace {
        raw::Workspace { mailbox: self.mailbox.region(), partials: self.partials.region() }
    }
}
