#![expect(unsafe_code, reason = "calls the raw door")]

use std::{marker::PhantomData, sync::Arc};

use cudarc::driver::{CudaStream, CudaView, DevicePtr, DeviceSlice, SyncOnDrop};

use super::{
    Kernels, LaunchError, Matrix, MatrixMut, RoutedBatch, WeightTable, Workspace,
    raw::{self, Form},
    region::Region,
};
use crate::{
    Element,
    error::OperandError,
    model::{Activation, ExpertsId, ModelSpec},
    plan::{Capacity, ExpertsPlan, RouteCapacity},
    routing::Weighed,
};

/// What a layer's router chose for a step, in device memory: [`routing::TopK`](crate::routing::TopK) has it on the host, and says
/// what a route is.
#[derive(Debug)]
#[doc(alias = "topk_ids")]
pub struct TopK<'a> {
    ids: CudaView<'a, i32>,
    weights: Option<CudaView<'a, f32>>,
    rows: Option<CudaView<'a, i32>>,
    top_k: usize,
    weighed: Weighed,
    factor: f32,
}

impl<'a> TopK<'a> {
    /// `ids` is `[tokens, top_k]`: local expert ids. -1 and whatever else is no local id is not here.
    ///
    /// # Errors
    /// If `top_k` is zero or does not divide the ids.
    pub fn new(ids: CudaView<'a, i32>, top_k: usize) -> Result<Self, OperandError> {
        if top_k == 0 || !ids.len().is_multiple_of(top_k) {
            return Err(OperandError::TopK { ids: ids.len(), top_k });
        }
        Ok(Self { ids, weights: None, rows: None, top_k, weighed: Weighed::Combine, factor: 1.0 })
    }

    /// The router's weights, `[tokens, top_k]`: 1 without them.
    ///
    /// # Errors
    /// If there is not one for each route.
    pub fn with_weights(self, weights: CudaView<'a, f32>) -> Result<Self, OperandError> {
        self.check("weights", weights.len())?;
        Ok(Self { weights: Some(weights), ..self })
    }

    /// The row that each route has in the `[routes, ..]` matrices, `[tokens, top_k]`. Without it, a route has the row of its number.
    /// Below 0 or from the number of routes on, the route has no row, and is not here. Where two routes have the same row, it gets
    /// the delta of one or the other.
    ///
    /// # Errors
    /// If there is not one for each route.
    #[doc(alias = "row_of_route")]
    pub fn with_rows(self, rows: CudaView<'a, i32>) -> Result<Self, OperandError> {
        self.check("rows", rows.len())?;
        Ok(Self { rows: Some(rows), ..self })
    }

    /// The router's weights are applied to the experts' input: the deltas of gate and up are multiplied by them, and the combine
    /// does without.
    #[must_use]
    #[doc(alias = "apply_router_weight_on_input")]
    pub fn on_input(self) -> Self {
        Self { weighed: Weighed::Input, ..self }
    }

    /// The router's weights are applied to the rows of down, not in the combine: the deltas of down are multiplied by them.
    #[must_use]
    #[doc(alias = "mul_routed_weight")]
    pub fn on_rows(self) -> Self {
        Self { weighed: Weighed::Rows, ..self }
    }

    /// Multiplies what every route weighs in the combine, where a model has a factor for its routed experts.
    #[must_use]
    #[doc(alias = "routed_scaling_factor")]
    pub fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }

    /// Tokens that the router chose for.
    pub fn num_tokens(&self) -> usize {
        self.ids.len() / self.top_k
    }

    fn check(&self, operand: &'static str, got: usize) -> Result<(), OperandError> {
        let want = self.ids.len();
        if got == want { Ok(()) } else { Err(OperandError::Routes { operand, got, want }) }
    }

    /// Refuses a batch of another stream or of other tokens, and choices in another context.
    pub(super) fn check_with(
        &self,
        batch: &RoutedBatch<'_>,
        kernels: &Kernels,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        batch.check(stream)?;
        kernels.check_context("ids", self.ids.stream().context())?;
        self.weights.as_ref().map_or(Ok(()), |view| kernels.check_context("weights", view.stream().context()))?;
        self.rows.as_ref().map_or(Ok(()), |view| kernels.check_context("rows", view.stream().context()))?;
        let (got, want) = (self.num_tokens(), batch.num_tokens());
        if got == want { Ok(()) } else { Err(OperandError::Tokens { got, want }.into()) }
    }

    /// Has `stream` wait for what writes them. The guards are to be dropped once the launch is enqueued.
    pub(super) fn on<'s>(&'s self, stream: &'s CudaStream) -> (raw::TopK, [Option<SyncOnDrop<'s>>; 3]) {
        let (ids, ids_guard) = self.ids.device_ptr(stream);
        let (weights, weights_guard) = self.weights.as_ref().map(|view| view.device_ptr(stream)).unzip();
        let (rows, rows_guard) = self.rows.as_ref().map(|view| view.device_ptr(stream)).unzip();
        let raw =
            raw::TopK::new(ids, self.top_k).weights(weights.unwrap_or(0)).rows(rows.unwrap_or(0)).scaled(self.factor);
        (raw::TopK { weighed: self.weighed, ..raw }, [Some(ids_guard), weights_guard, rows_guard])
    }
}

/// A layer's routes grouped by expert and slot, on the device. Layers may share one: each updates it for its operations.
#[derive(Debug)]
pub struct Grouping {
    raw: raw::Grouping,
    kernels: Kernels,
    memory: Region,
}

/// The routes that a [`Grouping`] was last updated with. While they live, it cannot be updated again.
#[derive(Debug)]
pub struct GroupedRoutes<'a> {
    raw: raw::GroupedRoutes,
    top_k: TopK<'a>,
    memory: &'a Region,
}

impl Grouping {
    /// Allocates what the routes within `capacity` need, on `stream`.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or there is no memory left.
    pub fn new(kernels: &Kernels, capacity: RouteCapacity, stream: &Arc<CudaStream>) -> Result<Self, LaunchError> {
        let memory = Region::new(kernels, raw::Grouping::device_bytes(capacity)?, stream)?;
        // SAFETY: the memory is zero, this type's own for as long as it lives, and freed in the order of its stream, on which alone
        // it is used.
        let raw = unsafe { raw::Grouping::new(kernels, capacity, memory.region()) }?;
        Ok(Self { raw, kernels: kernels.clone(), memory })
    }

    /// Takes what a layer's router chose for the tokens of `batch`. Many routes are grouped by a kernel that this enqueues, few by the
    /// operations on them.
    ///
    /// # Errors
    /// If the router chose for other tokens than the batch has, or for more than there is room for. Nothing was enqueued.
    pub fn update<'a>(
        &'a mut self,
        top_k: TopK<'a>,
        batch: &'a RoutedBatch<'_>,
        stream: &CudaStream,
    ) -> Result<GroupedRoutes<'a>, LaunchError> {
        self.memory.check("the grouping", stream)?;
        top_k.check_with(batch, &self.kernels, stream)?;
        let raw = {
            let (top_k, _guards) = top_k.on(stream);
            // SAFETY: there is a value for each route, and the guards order them; the stream is the memory's and the batch's own.
            unsafe { self.raw.group(top_k, batch.raw, stream.into()) }?
        };
        Ok(GroupedRoutes { raw, top_k, memory: &self.memory })
    }
}

impl GroupedRoutes<'_> {
    /// Rows of the `[routes, ..]` matrices.
    pub fn num_routes(&self) -> usize {
        self.raw.num_routes()
    }
}

/// The adapters of one layer's experts: shapes checked, launches planned, workspace sized.
///
/// The same operations as [`cpu::LoraExperts`](crate::cpu::LoraExperts), which says what each does, and where it stands beside the
/// base's.
#[derive(Clone, Debug)]
#[doc(alias = "FusedMoEWithLoRA")]
pub struct LoraExperts<T> {
    raw: raw::LoraExperts,
    kernels: Kernels,
    element: PhantomData<T>,
}

macro_rules! operation {
    ($(#[$doc:meta])* $name:ident, $form:ident) => {
        $(#[$doc])*
        pub fn $name(
            &self,
            x: Matrix<'_, T>,
            mut y: MatrixMut<'_, T>,
            routes: &GroupedRoutes<'_>,
            weights: &WeightTable<T>,
            workspace: &mut Workspace,
            stream: &CudaStream,
        ) -> Result<(), LaunchError> {
            y.check_context(&self.kernels)?;
            self.check(&x, Form::$form { y: y.at(0) }, routes, weights, workspace, stream)?;
            let (y, _y_guard) = y.on(stream);
            self.launch(&x, Form::$form { y }, routes, weights, workspace, stream)
        }
    };
}

impl<T: Element> LoraExperts<T> {
    /// Plans the experts `id` of `model` for batches within `capacity`, whose tokens have up to `top_k` routes.
    ///
    /// # Errors
    /// If no kernel takes these shapes or these bounds.
    pub fn new(
        kernels: &Kernels,
        model: &ModelSpec,
        id: ExpertsId,
        capacity: Capacity,
        top_k: usize,
    ) -> Result<Self, LaunchError> {
        let raw = raw::LoraExperts::new(kernels, model, id, T::DTYPE, capacity, top_k)?;
        Ok(Self { raw, kernels: kernels.clone(), element: PhantomData })
    }

    /// What will be launched; for logs, and for the size of the workspace.
    pub fn plan(&self) -> &ExpertsPlan {
        self.raw.plan()
    }

    operation! {
        /// Enqueues, for each route that is here: its row of `y` `+=` what its token's adapter adds to gate and up of its expert.
        /// What has no adapter keeps `y` bit for bit.
        ///
        /// `x` is `[tokens, hidden]`; `y` is `[routes, gate_up]`. Allocates nothing and waits for nothing.
        ///
        /// # Errors
        /// If the operands don't fit the plan; then nothing was enqueued.
        add_gate_up_delta, AddGateUp
    }

    operation! {
        /// As [`add_gate_up_delta`](Self::add_gate_up_delta), but sets `y` to the delta alone, and to zero for every route and slice
        /// that has no adapter or is not here. Rows that no route has are left as they are.
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        write_gate_up_delta, WriteGateUp
    }

    operation! {
        /// Enqueues, for each route that is here: its row of `y` `+=` what its token's adapter adds to down of its expert, before
        /// the combine, and without its weights unless these are [on the rows](TopK::on_rows). What has no adapter keeps `y` bit
        /// for bit.
        ///
        /// `x` is `[routes, inter]`, what the activation gave; `y` is `[routes, hidden]`. Allocates nothing and waits for nothing.
        ///
        /// # Errors
        /// If the operands don't fit the plan; then nothing was enqueued.
        add_down_delta, AddDown
    }

    operation! {
        /// As [`add_down_delta`](Self::add_down_delta), but sets `y` to the delta alone, and to zero for every route that has no
        /// adapter or is not here. Rows that no route has are left as they are.
        ///
        /// # Errors
        /// As for `add_down_delta`.
        write_down_delta, WriteDown
    }

    operation! {
        /// Enqueues the deltas of down behind the base's combine: to `y[t]` the sum over the routes of token `t` that are here, each
        /// multiplied by what the route [weighs](crate::routing::TopK::output_weight). What has no adapter keeps `y` bit for bit.
        ///
        /// `x` is `[routes, inter]`, what the activation gave; `y` is `[tokens, hidden]`.
        ///
        /// # Errors
        /// If the operands don't fit the plan; then nothing was enqueued.
        add_combined_delta, AddCombined
    }

    /// Enqueues the activation, with the deltas of gate and up added before it: `out[row] = activation(y[row] + delta)` for every route
    /// that is here, whether its token has an adapter or not. It takes the place of the base's activation, and spares a pass over `y`.
    /// Computed in `f32`, rounded once.
    ///
    /// `x` is `[tokens, hidden]` and `y`, of the base's gate_up, `[routes, gate_up]`, as for
    /// [`add_gate_up_delta`](Self::add_gate_up_delta); `out` is `[routes, inter]`.
    ///
    /// # Errors
    /// If the operands don't fit the plan, or the activation needs a gate that the experts do not have; then nothing was enqueued.
    #[expect(clippy::too_many_arguments, reason = "three matrices, and what every operation takes")]
    #[doc(alias = "silu_and_mul")]
    pub fn activate(
        &self,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
        activation: Activation,
        routes: &GroupedRoutes<'_>,
        weights: &WeightTable<T>,
        workspace: &mut Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        y.check_context_as("y", &self.kernels)?;
        out.check_context_as("out", &self.kernels)?;
        let form = Form::Activate { y: y.at(0), out: out.at(0), activation };
        self.check(&x, form, routes, weights, workspace, stream)?;
        let ((y, _y_guard), (out, _out_guard)) = (y.on(stream), out.on(stream));
        self.launch(&x, Form::Activate { y, out, activation }, routes, weights, workspace, stream)
    }

    /// Enqueues the combine, with the deltas of down added before it: `out[t]` is the sum over the routes of token `t` that are here of
    /// `y[row] + delta`, each multiplied by what the route [weighs](crate::routing::TopK::output_weight), and zero if none is. For
    /// every token, whether it has an adapter or not. It takes the place of the base's combine. Computed in `f32`, rounded once.
    ///
    /// `x` is `[routes, inter]`, what the activation gave; `y`, of the base's down, is `[routes, hidden]`, without the router's
    /// weights; `out` is `[tokens, hidden]`.
    ///
    /// # Errors
    /// If the operands don't fit the plan; then nothing was enqueued.
    #[expect(clippy::too_many_arguments, reason = "three matrices, and what every operation takes")]
    #[doc(alias = "moe_sum")]
    #[doc(alias = "finalize")]
    pub fn combine(
        &self,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
        routes: &GroupedRoutes<'_>,
        weights: &WeightTable<T>,
        workspace: &mut Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        y.check_context_as("y", &self.kernels)?;
        out.check_context_as("out", &self.kernels)?;
        self.check(&x, Form::Combine { y: y.at(0), out: out.at(0) }, routes, weights, workspace, stream)?;
        let ((y, _y_guard), (out, _out_guard)) = (y.on(stream), out.on(stream));
        self.launch(&x, Form::Combine { y, out }, routes, weights, workspace, stream)
    }

    /// Refuses what does not fit, before anything is enqueued, but for the contexts of what `form` has.
    fn check(
        &self,
        x: &Matrix<'_, T>,
        form: Form,
        routes: &GroupedRoutes<'_>,
        weights: &WeightTable<T>,
        workspace: &Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        self.kernels.check_context("the stream", stream.context())?;
        x.check_context(&self.kernels)?;
        weights.check(stream)?;
        routes.memory.check("the routes", stream)?;
        workspace.check(stream)?;
        if !self.raw.site().is_in(weights.model()) {
            return Err(OperandError::Model.into());
        }
        let layer = weights.layer(form.projection(self.raw.site()).shared_entry());
        self.raw.args(x.at(0), form, layer, &routes.raw, workspace.region())?;
        Ok(())
    }

    /// Launches what was checked, on what `form` has ordered.
    fn launch(
        &self,
        x: &Matrix<'_, T>,
        form: Form,
        routes: &GroupedRoutes<'_>,
        weights: &WeightTable<T>,
        workspace: &mut Workspace,
        stream: &CudaStream,
    ) -> Result<(), LaunchError> {
        let layer = weights.layer(form.projection(self.raw.site()).shared_entry());
        let (_, _top_k_guards) = routes.top_k.on(stream);
        let (x, _x_guard) = x.on(stream);
        // SAFETY: every operand was found large enough, in the kernels' context and, but for the matrices and the router's choices,
        // which guards order, made on this stream.
        unsafe { self.raw.launch(x, form, layer, &routes.raw, workspace.region(), stream.into()) }
    }
}
