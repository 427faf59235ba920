//! The host tier: a budget of bytes.

use std::collections::BTreeMap;

use crate::{
    blocks::{Block, Blocks},
    plan::PlanError,
    pool::{AdapterId, backend::Copy},
};

/// The host's arena, and its adapters by their last use.
#[derive(Debug)]
pub(crate) struct Host {
    pub(super) blocks: Blocks,
    by_use: BTreeMap<u64, AdapterId>,
}

/// An adapter's place in the host tier.
#[derive(Debug, Default)]
pub(super) enum HostPlace {
    #[default]
    Absent,
    Reading {
        block: Block,
        /// The copy that the read makes meanwhile. Its slot has no leases yet.
        copy: Option<Copy>,
    },
    Ready {
        block: Block,
    },
}

impl HostPlace {
    pub(super) fn is_ready(&self) -> bool {
        matches!(self, Self::Ready { .. })
    }

    /// Whether it is being read, and has room on the device.
    pub(super) fn is_copied_meanwhile(&self) -> bool {
        matches!(self, Self::Reading { copy: Some(_), .. })
    }
}

impl Host {
    pub(super) fn new(bytes: usize) -> Result<Self, PlanError> {
        Ok(Self { blocks: Blocks::new("the host tier's bytes", bytes)?, by_use: BTreeMap::new() })
    }

    /// Adapters that are ready.
    pub(super) fn len(&self) -> usize {
        self.by_use.len()
    }

    /// Takes note of an adapter that is ready. Every use has another number.
    pub(super) fn insert(&mut self, last_use: u64, id: AdapterId) {
        self.by_use.insert(last_use, id);
    }

    pub(super) fn remove(&mut self, last_use: u64) {
        self.by_use.remove(&last_use);
    }

    pub(super) fn touch(&mut self, from: u64, to: u64) {
        if let Some(id) = self.by_use.remove(&from) {
            self.by_use.insert(to, id);
        }
    }

    /// The least recently used adapter that may be evicted.
    pub(super) fn victim(&self, may_evict: impl Fn(AdapterId) -> bool) -> Option<AdapterId> {
        self.by_use.values().copied().find(|&id| may_evict(id))
    }
}
