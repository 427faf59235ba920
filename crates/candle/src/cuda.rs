//! Adapters in device memory, on candle's slices and on candle's stream.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aril::{
    DType, Element, Slot,
    cuda::{
        AdapterPool, Grouping, Kernels, LaunchError, LoraEmbedding, LoraExperts, LoraLinear, Matrix, MatrixMut, Queue,
        Routing, TopK, View, Workspace,
    },
    model::Model,
    plan::{Capacity, RouteCapacity},
    pool::{PoolConfig, StreamId},
    routing::Batch,
};
use candle_core::{
    CudaDevice, CudaStorage, Error, Layout, Result, Storage, bail,
    cuda::{CudaDType, cudarc::driver::CudaView},
};

use super::{Delta, Layers, Operation, Point, found, span};

/// Groupings of rows on their way, for each routing.
const STEPS_IN_FLIGHT: usize = 2;

/// Routings whose groupings are waited for, instead of making another.
const ROUTINGS: usize = 8;

#[derive(Debug)]
pub(super) struct Cuda {
    queue: Queue,
    capacity: Capacity,
    /// Locked while an operation is enqueued, so that the launches of another one are not between its own. Nothing is
    /// waited for meanwhile.
    state: Mutex<State>,
    layers: Layers<LoraLinear, LoraEmbedding, LoraExperts>,
    /// Those of the steps, the least recently updated first.
    routings: Mutex<VecDeque<Arc<Routing>>>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) pool: AdapterPool,
    workspace: Workspace,
    /// By the number of experts of a layer.
    groupings: BTreeMap<usize, Grouping>,
}

impl Cuda {
    pub(super) fn new(
        model: &Model,
        dtype: DType,
        capacity: Capacity,
        config: PoolConfig,
        device: &CudaDevice,
    ) -> Result<Self> {
        let stream = device.cuda_stream();
        let kernels = Kernels::load_into(stream.context()).map_err(Error::wrap)?;
        let queue = Queue::new(&kernels, &stream).map_err(Error::wrap)?;
        let pool = AdapterPool::new(&queue, model, dtype, capacity, config).map_err(Error::wrap)?;
        let weights = found(pool.weights(StreamId::FIRST), StreamId::FIRST)?;
        let linear = (|id| LoraLinear::new(weights, id), LoraLinear::with_slice);
        let (embedding, experts) = (|id| LoraEmbedding::new(weights, id), |id| LoraExperts::new(weights, id));
        let layers = Layers::new(model, linear, embedding, experts).map_err(Error::wrap)?;
        let mut routes = BTreeMap::new();
        for of_layer in layers.experts.values().map(|layer| layer.plan().routes()) {
            let routes: &mut RouteCapacity = routes.entry(of_layer.num_experts).or_insert(of_layer);
            routes.top_k = routes.top_k.max(of_layer.top_k);
        }
        let grouping = |(num_experts, routes)| Ok((num_experts, Grouping::new(&queue, routes).map_err(Error::wrap)?));
        let groupings = routes.into_iter().map(grouping).collect::<Result<_>>()?;
        let workspace = Workspace::new(weights).map_err(Error::wrap)?;
        let state = Mutex::new(State { pool, workspace, groupings });
        Ok(Self { queue, capacity, state, layers, routings: Mutex::default() })
    }

    /// Groups rows by slot.
    pub(super) fn route(&self, slots: &[Slot]) -> Result<Arc<Routing>> {
        let mut routings = self.routings.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = |routing: &Arc<Routing>| Arc::strong_count(routing) == 1;
        let is_ready = |routing: &Arc<Routing>| is_free(routing) && routing.is_ready().unwrap_or(true);
        let ready = routings.iter().position(is_ready);
        let free = ready.or_else(|| routings.iter().position(is_free).filter(|_| routings.len() >= ROUTINGS));
        let mut routing = match free.and_then(|free| routings.remove(free)) {
            Some(routing) => routing,
            None => Arc::new(Routing::new(&self.queue, self.capacity, STEPS_IN_FLIGHT).map_err(Error::wrap)?),
        };
        let of_step = Arc::get_mut(&mut routing).expect("no step has it");
        of_step.wait().map_err(Error::wrap)?;
        let batch = of_step.update(&Batch::new(slots)).map_err(Error::wrap)?;
        let State { pool, workspace, .. } = &mut *self.lock();
        pool.step(StreamId::FIRST, &batch, workspace).map_err(Error::wrap)?;
        routings.push_back(Arc::clone(&routing));
        Ok(routing)
    }

    /// A panic leaves scratch memory, whose contents do not matter.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add<T: Element + CudaDType>(
        &self,
        delta: &Delta<'_>,
        routing: &Routing,
        (y, y_layout): (&mut CudaStorage, &Layout),
        (x, x_layout): (&CudaStorage, &Layout),
    ) -> Result<()> {
        let at = super::Matrix::of("y", y_layout)?;
        let y = y.as_cuda_slice_mut::<T>()?.slice_mut(at.start..);
        let y = MatrixMut::strided(y, at.rows, at.cols, at.row_stride).map_err(Error::wrap)?;
        let x_rows = || {
            let at = super::Matrix::of("x", x_layout)?;
            let x = x.as_cuda_slice::<T>()?.slice(at.start..);
            Matrix::strided(x, at.rows, at.cols, at.row_stride).map_err(Error::wrap)
        };
        let (batch, State { pool, workspace, groupings }) = (routing.batch(), &mut *self.lock());
        let mut step = pool.step(StreamId::FIRST, &batch, workspace).map_err(Error::wrap)?;
        let added = match delta.operation {
            Operation::Linear(id, slice) => self.layers.linear(id, slice)?.add_delta(&mut step, x_rows()?, y),
            Operation::Embedding(id) => {
                let ids = View::of_ids(x.as_cuda_slice()?.slice(span("x", x_layout)?));
                found(self.layers.embeddings.get(&id), id)?.add_delta(&mut step, ids, y)
            }
            Operation::Experts(id, point, routes) => {
                let (layer, x) = (found(self.layers.experts.get(&id), id)?, x_rows()?);
                let experts = routes.experts.storage_and_layout();
                let weights = routes.weights.as_ref().map(|weights| weights.storage_and_layout());
                let weights = weights.as_ref().map(|(storage, layout)| of::<f32>(storage, layout)).transpose()?;
                let experts = View::of_ids(of(&experts.0, experts.1)?);
                let grouping = found(groupings.get_mut(&layer.plan().routes().num_experts), id)?;
                let add = || {
                    let top_k = TopK::new(experts, routes.top_k)?;
                    let top_k = if let Some(weights) = weights { top_k.with_weights(weights)? } else { top_k };
                    let mut routes = grouping.update(&mut step, top_k)?;
                    match point {
                        Point::GateUp => layer.add_gate_up_delta(&mut step, &mut routes, x, y),
                        Point::Down => layer.add_down_delta(&mut step, &mut routes, x, y),
                        Point::Combined => layer.add_combined_delta(&mut step, &mut routes, x, y),
                    }
                };
                add()
            }
        };
        added.map_err(|error: LaunchError| Error::wrap(error))
    }
}

/// The elements of a contiguous tensor.
fn of<'a, T: CudaDType>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let Storage::Cuda(storage) = storage else { bail!("the routes are not on a GPU") };
    Ok(storage.as_cuda_slice()?.slice(span("routes", layout)?))
}
