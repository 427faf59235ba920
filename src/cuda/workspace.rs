use std::sync::Arc;

use super::{
    LaunchError, Queue, WeightTable, raw,
    region::{Kept, Region},
};
use crate::plan::WorkspaceBytes;

/// Scratch for the operations of a step. Any number of layers and graphs of one queue share one.
#[derive(Debug)]
pub struct Workspace {
    exchange: Arc<Region>,
    planes: Arc<Region>,
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
        Ok(Self { exchange: region(bytes.exchange)?, planes: region(bytes.planes)? })
    }

    pub(super) fn queue(&self) -> &Queue {
        self.exchange.queue()
    }

    pub(super) fn kept(&self) -> [Kept; 2] {
        [self.exchange.clone(), self.planes.clone()]
    }

    /// What the raw door calls it.
    pub fn raw(&self) -> raw::Workspace {
        raw::Workspace { exchange: self.exchange.region(), planes: self.planes.region() }
    }
}
