#![expect(unsafe_code, reason = "calls the raw door")]

use std::{ffi::c_void, sync::Arc};

use cudarc::driver::SyncOnDrop;

use super::{
    LaunchError, Matrix, MatrixMut, Queue, Step, View, WeightTable,
    raw::{self, Form},
    region::{Kept, Region},
};
use crate::{
    Element,
    error::OperandError,
    model::{Activation, ExpertsId},
    plan::{ExpertsPlan, PlanError, RouteCapacity},
    routing::Weighed,
};

/// What a layer's router chose for a step, in device memory: [`routing::TopK`](crate::routing::TopK) has it on the host, and says
/// what a route is.
#[derive(Debug)]
#[doc(alias = "topk_ids")]
pub struct TopK<'a> {
    ids: View<'a, i32>,
    weights: Option<View<'a, f32>>,
    rows: Option<View<'a, i32>>,
    top_k: usize,
    weighed: Weighed,
    factor: f32,
}

impl<'a> TopK<'a> {
    /// `ids` is `[tokens, top_k]`: local expert ids. -1 and whatever else is no local id is not here.
    ///
    /// # Errors
    /// If `top_k` is zero or does not divide the ids.
    pub fn new(ids: impl Into<View<'a, i32>>, top_k: usize) -> Result<Self, OperandError> {
        let ids = ids.into();
        if top_k == 0 || !ids.len().is_multiple_of(top_k) {
            return Err(OperandError::TopK { ids: ids.len(), top_k });
        }
        Ok(Self { ids, weights: None, rows: None, top_k, weighed: Weighed::Combine, factor: 1.0 })
    }

    /// The router's weights, `[tokens, top_k]`: 1 without them.
    ///
    /// # Errors
    /// If there is not one for each route.
    pub fn with_weights(self, weights: impl Into<View<'a, f32>>) -> Result<Self, OperandError> {
        let weights = weights.into();
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
    pub fn with_rows(self, rows: impl Into<View<'a, i32>>) -> Result<Self, OperandError> {
        let rows = rows.into();
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

    /// Refuses a batch of other tokens.
    pub(super) fn check_tokens(&self, want: usize) -> Result<(), OperandError> {
        let got = self.num_tokens();
        if got == want { Ok(()) } else { Err(OperandError::Tokens { got, want }) }
    }

    /// Refuses choices in another context or, of buffers, of another stream.
    pub(super) fn check_queue(&self, queue: &Queue) -> Result<(), LaunchError> {
        self.ids.check_queue("ids", queue)?;
        self.weights.as_ref().map_or(Ok(()), |view| view.check_queue("weights", queue))?;
        self.rows.as_ref().map_or(Ok(()), |view| view.check_queue("rows", queue))
    }

    /// As `check_queue`, for a step: one that is captured keeps them.
    fn check_step(&self, step: &Step<'_>) -> Result<(), LaunchError> {
        self.ids.check("ids", step)?;
        self.weights.as_ref().map_or(Ok(()), |view| view.check("weights", step))?;
        self.rows.as_ref().map_or(Ok(()), |view| view.check("rows", step))
    }

    fn kept(&self) -> [Option<Kept>; 3] {
        let [weights, rows] = [self.weights.as_ref().and_then(View::kept), self.rows.as_ref().and_then(View::kept)];
        [self.ids.kept(), weights, rows]
    }

    /// Has the queue's stream wait for what writes them. The guards are to be dropped once the launch is enqueued.
    pub(super) fn on<'s>(&'s self, queue: &'s Queue) -> (raw::TopK, [Option<SyncOnDrop<'s>>; 3]) {
        let (ids, ids_guard) = self.ids.on(queue);
        let (weights, weights_guard) = self.weights.as_ref().map(|view| view.on(queue)).unzip();
        let (rows, rows_guard) = self.rows.as_ref().map(|view| view.on(queue)).unzip();
        let raw =
            raw::TopK::new(ids, self.top_k).weights(weights.unwrap_or(0)).rows(rows.unwrap_or(0)).scaled(self.factor);
        (raw::TopK { weighed: self.weighed, ..raw }, [ids_guard, weights_guard.flatten(), rows_guard.flatten()])
    }
}

/// A layer's routes grouped by expert and slot, on the device. Layers may share one: each updates it for its operations.
#[derive(Debug)]
pub struct Grouping {
    raw: raw::Grouping,
    memory: Arc<Region>,
}

/// The routes that a [`Grouping`] was last updated with. While they live, it cannot be updated again.
#[derive(Debug)]
pub struct GroupedRoutes<'a> {
    raw: raw::GroupedRoutes,
    top_k: TopK<'a>,
    memory: &'a Region,
}

impl Grouping {
    /// Allocates what the routes within `capacity` need: of a layer, [`ExpertsPlan::routes`].
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or there is no memory left.
    pub fn new(queue: &Queue, capacity: RouteCapacity) -> Result<Self, LaunchError> {
        let memory = Arc::new(Region::new(queue, raw::Grouping::device_bytes(capacity)?)?);
        // SAFETY: the memory is zero, this type's own, freed in the order of its stream, and used on that stream alone; graphs that
        // read it keep it.
        let raw = unsafe { raw::Grouping::new(queue.kernels(), capacity, memory.region()) }?;
        Ok(Self { raw, memory })
    }

    /// Takes what a layer's router chose for the tokens of a step. Many routes are grouped by a kernel that this enqueues, few by the
    /// operations on them.
    ///
    /// # Errors
    /// If the router chose for other tokens than the batch has, or for more than there is room for. Nothing was enqueued.
    pub fn update<'a>(&'a mut self, step: &mut Step<'_>, top_k: TopK<'a>) -> Result<GroupedRoutes<'a>, LaunchError> {
        step.queue().check("the grouping", self.memory.queue())?;
        top_k.check_tokens(step.num_tokens())?;
        top_k.check_step(step)?;
        step.enter()?;
        step.keep(top_k.kept().into_iter().chain([Some(self.memory.clone() as Kept)]));
        let raw = {
            let (top_k, _guards) = top_k.on(step.queue());
            // SAFETY: there is a value for each route, and guards order them; the memory and the batch are of the queue. What a graph
            // replays is kept.
            unsafe { self.raw.group(step.batch(), top_k, step.queue().raw()) }?
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
pub struct LoraExperts {
    raw: raw::LoraExperts,
}

macro_rules! operation {
    ($(#[$doc:meta])* $name:ident, $form:ident) => {
        $(#[$doc])*
        pub fn $name<T: Element>(
            &self,
            step: &mut Step<'_>,
            routes: &mut GroupedRoutes<'_>,
            x: Matrix<'_, T>,
            y: MatrixMut<'_, T>,
        ) -> Result<(), LaunchError> {
            let form = Form::$form { y: y.shape() };
            self.enqueue(step, routes, &x, form, Written::Y(y))
        }
    };
}

/// What an operation works on beside `x`.
enum Written<'a, T> {
    /// `y` is read and written.
    Y(MatrixMut<'a, T>),
    /// `y` is read, and `out` is written.
    Out(Matrix<'a, T>, MatrixMut<'a, T>),
}

impl LoraExperts {
    /// Plans the experts `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// If the id is of another model, no [`top_k`](crate::model::Experts::top_k) was described, or no kernel takes these shapes or
    /// these bounds.
    pub fn new(weights: &WeightTable, id: ExpertsId) -> Result<Self, PlanError> {
        let kernels = weights.queue().kernels();
        let raw = raw::LoraExperts::new(kernels, weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { raw })
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
    #[doc(alias = "silu_and_mul")]
    pub fn activate<T: Element>(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_>,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        out: MatrixMut<'_, T>,
        activation: Activation,
    ) -> Result<(), LaunchError> {
        let form = Form::Activate { y: y.shape(), out: out.shape(), activation };
        self.enqueue(step, routes, &x, form, Written::Out(y, out))
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
    #[doc(alias = "moe_sum")]
    #[doc(alias = "finalize")]
    pub fn combine<T: Element>(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_>,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let form = Form::Combine { y: y.shape(), out: out.shape() };
        self.enqueue(step, routes, &x, form, Written::Out(y, out))
    }

    fn enqueue<T: Element>(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_>,
        x: &Matrix<'_, T>,
        form: Form,
        mut written: Written<'_, T>,
    ) -> Result<(), LaunchError> {
        let mut args = self.raw.args(&step.raw(), &routes.raw, x.shape(), form)?;
        step.queue().check("the routes", routes.memory.queue())?;
        if !routes.raw.is_of(step.batch()) {
            return Err(LaunchError::OtherBatch { operand: "the routes" });
        }
        x.check(step)?;
        let kept = match &written {
            Written::Y(y) => {
                y.check(step)?;
                [y.kept(), None]
            }
            Written::Out(y, out) => {
                y.check_as("y", step)?;
                out.check_as("out", step)?;
                [y.kept(), out.kept()]
            }
        };
        step.enter()?;
        step.keep(kept.into_iter().chain([x.kept()]));
        let queue = step.queue();
        let (_, _top_k_guards) = routes.top_k.on(queue);
        let (x, _x_guard) = x.on(queue);
        let (y, out, _guards) = match &mut written {
            Written::Y(y) => {
                let (y, guard) = y.on(queue);
                (y, 0, [guard, None])
            }
            Written::Out(y, out) => {
                let ((y, y_guard), (out, out_guard)) = (y.on(queue), out.on(queue));
                (y, out, [y_guard, out_guard])
            }
        };
        args.x = x as *const c_void;
        args.y = y as *mut c_void;
        args.out = out as *mut c_void;
        // SAFETY: every operand was found large enough and in the queue's context; the step's table, routing and workspace, the
        // routes' memory, and buffers, are of the queue, and guards order the others. What a graph replays is kept.
        unsafe { self.raw.launch(&args, &mut routes.raw, queue.raw()) }
    }
}
