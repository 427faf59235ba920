//! Guarantees of the public types: `Send`, `Sync`, `Error`, and the representation of slots.

use std::error::Error;

use aril::{
    DType, Slot,
    adapter::{
        Adapter, AdapterError, ImageEntry, Invocation, Module, Orientation, Piece, SharedEntry, SlotImage, Stack,
        Tensor, TensorName,
    },
    cpu,
    error::{LoadError, OperandError, SlotError},
    group::{ChannelError, GroupError, InProcess, Message, Phase, RankFailure},
    model::{
        Activation, Collective, EmbeddingId, EmbeddingSite, Exchange, Experts, ExpertsId, ExpertsSite, Halves, Linear,
        LinearId, LinearSite, Model, ModelSpec, Parallel, Part, ProjectionSite, Shard, SpecError, TpRank,
    },
    plan::{Capacity, ExpertsPlan, ForwardPlan, LinearPlan, PlanError, ProjectionPlan, RouteCapacity},
    pool::{
        AdapterId, CacheNamespace, Counters, Lease, PoolConfig, PoolError, Residency, Snapshot, Source, StreamId, Tier,
    },
    reference,
    routing::{Batch, Segments, TopK},
    slots::{SlotInfo, Usage},
};

fn shared<T: Send + Sync>() {}
fn error<T: Error + Send + Sync + 'static>() {}

#[test]
fn types_may_be_shared_between_threads() {
    shared::<(Adapter, Invocation, Module, Stack, Tensor, TensorName, ImageEntry, SharedEntry, Orientation)>();
    shared::<(
        Activation,
        Collective,
        cpu::FullyShardedLinear,
        Exchange,
        Experts,
        ExpertsId,
        ExpertsSite,
        Halves,
        ProjectionSite,
    )>();
    shared::<(SlotImage<'_>, Piece<'_>)>();
    shared::<(Model, ModelSpec, Linear, LinearId, LinearSite, EmbeddingId, EmbeddingSite)>();
    shared::<(Parallel, Part, Shard, TpRank)>();
    shared::<(DType, Slot, Segments, Capacity, LinearPlan)>();
    shared::<(ExpertsPlan, ForwardPlan, ProjectionPlan, RouteCapacity)>();
    shared::<(Batch<'_>, TopK<'_>)>();
    shared::<(cpu::LoraLinear, cpu::LoraEmbedding, cpu::LoraExperts, cpu::FusedLinear<'_, f32>, cpu::Workspace)>();
    shared::<(cpu::WeightTable, cpu::Reservation, cpu::Filled, cpu::Step<'_>)>();
    shared::<(SlotInfo, Usage)>();
    shared::<(AdapterId, CacheNamespace, Counters, Lease, PoolConfig, Residency, Snapshot, Source, StreamId, Tier)>();
    shared::<(cpu::Matrix<'_, f32>, cpu::MatrixMut<'_, f32>)>();
    shared::<(reference::Factors<'_>, reference::Delta)>();
    shared::<(InProcess, Message, Phase, RankFailure)>();
}

/// One thread at a time owns a pool.
#[test]
fn pools_may_be_sent_to_another_thread() {
    fn sent<T: Send>() {}
    sent::<cpu::AdapterPool>();
}

#[test]
fn errors_go_anywhere() {
    error::<AdapterError>();
    error::<ChannelError>();
    error::<GroupError>();
    error::<LoadError>();
    error::<OperandError>();
    error::<PlanError>();
    error::<PoolError>();
    error::<SlotError>();
    error::<SpecError>();
}

/// It costs little to keep one for each token.
#[test]
fn a_slot_is_small() {
    assert_eq!(size_of::<Slot>(), 16);
    assert_eq!((Slot::BASE.number(), Slot::BASE.index()), (-1, None));
}

#[cfg(feature = "cuda")]
mod cuda {
    use aril::cuda::{
        AdapterPool, Buffer, Filled, FullyShardedLinear, FusedLinear, Graph, GroupedRoutes, Grouping, Kernels,
        LaunchError, LoraEmbedding, LoraExperts, LoraLinear, Matrix, MatrixMut, PinnedBuffer, Queue, Reservation,
        RoutedBatch, Routing, Shrunk, Staging, Step, TopK, View, ViewMut, WeightTable, Workspace, driver_is_present,
        raw,
    };

    fn sent<T: Send>() {}
    fn cloned<T: Clone>() {}

    #[test]
    fn types_may_be_shared_between_threads() {
        super::shared::<(Kernels, Queue, LoraLinear, LoraEmbedding, LoraExperts, FusedLinear<'_, f32>)>();
        super::shared::<(FullyShardedLinear, raw::FusedLinear, raw::TopK)>();
        super::shared::<(WeightTable, Reservation, Filled, Staging)>();
        super::shared::<(Shrunk<'_, '_>, Routing, RoutedBatch<'_>, Workspace, Step<'_>)>();
        super::shared::<(Grouping, GroupedRoutes<'_, '_>, TopK<'_>)>();
        super::shared::<(
            Buffer<f32>,
            PinnedBuffer<f32>,
            View<'_, f32>,
            ViewMut<'_, f32>,
            Matrix<'_, f32>,
            MatrixMut<'_, f32>,
        )>();
        super::shared::<(raw::Stream, raw::DeviceRegion, raw::Descriptor)>();
        super::shared::<(raw::Routing, raw::Grouping, raw::GroupedRoutes)>();
        super::shared::<(raw::MatrixRef, raw::MatrixMut, raw::Table, raw::Step, raw::RoutedBatch)>();
        super::error::<LaunchError>();
    }

    #[test]
    fn graphs_and_pools_may_be_sent_to_another_thread() {
        sent::<Graph>();
        sent::<AdapterPool>();
    }

    #[test]
    fn clones_are_the_same_table_and_queue() {
        cloned::<(WeightTable, Queue, Kernels)>();
    }

    /// Without a driver, loading returns that error. It neither panics nor aborts.
    #[test]
    fn loading_says_that_there_is_no_driver() {
        if !driver_is_present() {
            assert!(matches!(Kernels::load(), Err(LaunchError::NoDriver)));
        }
    }
}
