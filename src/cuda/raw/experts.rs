use super::{DeviceRegion, MatrixMut, MatrixRef, Parts, RawMatrix, RoutedBatch, Step, Stream, dtype_code, int, within};
use crate::{
    DType,
    cuda::{Kernels, LaunchError, kernels::check},
    error::OperandError,
    ffi,
    model::{Activation, ExpertsId, ExpertsSite, Model, ModelId, ProjectionSite},
    plan::{Capacity, ExpandBy, ExpertsPlan, PlanError, RouteCapacity},
    routing::Weighed,
};

/// What each group of routes says in the mailbox of `aril_groups`.
const GROUP_MAILBOX_BYTES: usize = 32;

/// What a layer's router chose for a step, in device memory: [`routing::TopK`](crate::routing::TopK) has it on the host, and says
/// what a route is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopK {
    pub(in crate::cuda) ids: u64,
    pub(in crate::cuda) weights: u64,
    pub(in crate::cuda) rows: u64,
    pub(in crate::cuda) top_k: usize,
    pub(in crate::cuda) weighed: Weighed,
    pub(in crate::cuda) factor: f32,
}

impl TopK {
    /// The address of local expert ids, `i32 [tokens, top_k]`. -1 and whatever else is no local id is not here.
    pub const fn new(ids: u64, top_k: usize) -> Self {
        Self { ids, weights: 0, rows: 0, top_k, weighed: Weighed::Combine, factor: 1.0 }
    }

    /// The address of the router's weights, `f32 [tokens, top_k]`: 1 without them.
    #[must_use]
    pub const fn weights(self, weights: u64) -> Self {
        Self { weights, ..self }
    }

    /// The address of each route's row in the `[routes, ..]` matrices, `i32 [tokens, top_k]`. Without it, a route has the row of its
    /// number. Below 0 or from the number of routes on, the route has no row, and is not here.
    #[must_use]
    #[doc(alias = "row_of_route")]
    pub const fn rows(self, rows: u64) -> Self {
        Self { rows, ..self }
    }

    /// The router's weights are applied to the experts' input: the deltas of gate and up are multiplied by them, and the combine
    /// does without.
    #[must_use]
    pub const fn on_input(self) -> Self {
        Self { weighed: Weighed::Input, ..self }
    }

    /// The router's weights are applied to the rows of down: the deltas of down are multiplied by them.
    #[must_use]
    pub const fn on_rows(self) -> Self {
        Self { weighed: Weighed::Rows, ..self }
    }

    /// What kernels take of it, within the bounds.
    pub(super) fn expect(&self, batch: RoutedBatch, capacity: RouteCapacity) -> Result<ffi::aril_top_k, LaunchError> {
        let RouteCapacity { max_tokens, top_k: max_top_k, num_experts } = capacity;
        within("the batch's tokens", batch.num_tokens, max_tokens)?;
        within("the routes of a token", self.top_k, max_top_k)?;
        if self.top_k == 0 {
            return Err(OperandError::TopK { ids: 0, top_k: 0 }.into());
        }
        Ok(ffi::aril_top_k {
            ids: self.ids as *const i32,
            weights: self.weights as *const f32,
            rows: self.rows as *const i32,
            top_k: int(self.top_k)?,
            num_experts: int(num_experts)?,
        })
    }

    /// Multiplies what every route weighs in the combine, where a model has a factor for its routed experts.
    #[must_use]
    pub const fn scaled(self, factor: f32) -> Self {
        Self { factor, ..self }
    }
}

/// A layer's routes grouped by expert and slot, in the engine's device memory. Any number of layers may share one, one after the
/// other.
#[derive(Debug)]
pub struct Grouping {
    kernels: Kernels,
    capacity: RouteCapacity,
    groups: ffi::aril_groups,
}

// SAFETY: device addresses, which are data.
unsafe impl Send for Grouping {}
// SAFETY: as above.
unsafe impl Sync for Grouping {}

/// Where things are in a grouping's memory, in bytes.
struct Layout {
    routes: usize,
    tiles: usize,
    num_tiles: usize,
    wide_tiles: usize,
    num_wide_tiles: usize,
    mailbox: usize,
    end: usize,
}

impl Layout {
    fn new(capacity: RouteCapacity) -> Self {
        let mut parts = Parts(0);
        let mut part = |count: usize, bytes: usize| parts.push(count * bytes);
        let (max_routes, groups) = (capacity.max_routes(), capacity.num_experts + 2);
        Self {
            routes: part(max_routes, size_of::<ffi::aril_route_entry>()),
            tiles: part(max_routes, size_of::<ffi::aril_route_tile>()),
            num_tiles: part(2, size_of::<i32>()),
            wide_tiles: part(max_routes, size_of::<ffi::aril_route_tile>()),
            num_wide_tiles: part(2, size_of::<i32>()),
            mailbox: part(1, ffi::ARIL_MAILBOX_HEADER as usize + groups * GROUP_MAILBOX_BYTES),
            end: parts.0,
        }
    }
}

impl Grouping {
    /// The device memory that [`new`](Self::new) needs.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits.
    pub fn device_bytes(capacity: RouteCapacity) -> Result<usize, LaunchError> {
        Ok(Layout::new(capacity.checked()?).end)
    }

    /// Takes `memory`, aligned to 256 bytes.
    ///
    /// # Errors
    /// If the capacity is past the kernels' limits, or `memory` is too small or misaligned.
    ///
    /// # Safety
    /// - **Validity.** `memory` addresses device memory of the kernels' context for its whole extent, all of it zero.
    /// - **Liveness.** That memory stays mapped for as long as this or any routes of it are used, and until the work has run.
    /// - **Aliasing.** Nobody else writes it.
    pub unsafe fn new(kernels: &Kernels, capacity: RouteCapacity, memory: DeviceRegion) -> Result<Self, LaunchError> {
        let layout = Layout::new(capacity.checked()?);
        memory.check_parts("the grouping's memory", layout.end)?;
        let at = |offset: usize| memory.ptr + offset as u64;
        let groups = ffi::aril_groups {
            routes: at(layout.routes) as *mut ffi::aril_route_entry,
            tiles: at(layout.tiles) as *mut ffi::aril_route_tile,
            num_tiles: at(layout.num_tiles) as *mut i32,
            wide_tiles: at(layout.wide_tiles) as *mut ffi::aril_route_tile,
            num_wide_tiles: at(layout.num_wide_tiles) as *mut i32,
            mailbox: at(layout.mailbox) as *mut std::ffi::c_void,
        };
        Ok(Self { kernels: kernels.clone(), capacity, groups })
    }

    /// Takes what a layer's router chose for the tokens of `batch`, and enqueues the grouping kernel if there are too many routes for
    /// the operations to sort them by themselves.
    ///
    /// # Errors
    /// `Capacity` if there are more tokens or experts for each than it was made for; then nothing was enqueued.
    ///
    /// # Safety
    /// - **Validity.** `top_k` addresses a value for each route of the batch's tokens, and `stream` is a stream of the kernels'
    ///   context.
    /// - **Liveness.** They stay mapped until all operations on the routes have run.
    /// - **Aliasing.** Nobody writes them meanwhile, except work ordered by `stream`, which also orders all that uses the routes.
    pub unsafe fn group(
        &mut self,
        batch: RoutedBatch,
        top_k: TopK,
        stream: Stream,
    ) -> Result<GroupedRoutes, LaunchError> {
        self.kernels.check_thread()?;
        let raw = top_k.expect(batch, self.capacity)?;
        let args = ffi::aril_group_args {
            num_tokens: int(batch.num_tokens)?,
            top_k: raw,
            routing: batch.routing,
            groups: self.groups,
        };
        if batch.num_tokens > 0 {
            // SAFETY: the memory is laid out for the capacity; the caller vouches for the rest.
            check(unsafe { ffi::aril_group(&args, stream.as_raw()) })?;
        }
        // The fewest are sorted by every operation, the most have just been grouped.
        let by_the_first = ffi::ARIL_EACH_BLOCK_ROUTES as usize + 1..=ffi::ARIL_ONE_BLOCK_ROUTES as usize;
        let grouped = !by_the_first.contains(&(batch.num_tokens * top_k.top_k));
        Ok(GroupedRoutes {
            batch,
            top_k: raw,
            weighed: top_k.weighed,
            factor: top_k.factor,
            groups: self.groups,
            grouped,
        })
    }
}

/// A layer's routes of a step.
///
/// The first operation on them may group them for the others, so each operation borrows them exclusively: host order is the order
/// of the stream. All operations on the same routes are enqueued on one stream.
#[derive(Debug)]
pub struct GroupedRoutes {
    batch: RoutedBatch,
    top_k: ffi::aril_top_k,
    weighed: Weighed,
    factor: f32,
    groups: ffi::aril_groups,
    /// Whether they are grouped already, or are by the next operation on them.
    grouped: bool,
}

// SAFETY: device addresses, which are data.
unsafe impl Send for GroupedRoutes {}
// SAFETY: as above.
unsafe impl Sync for GroupedRoutes {}

impl GroupedRoutes {
    /// Whether they are of that batch's tokens.
    pub(in crate::cuda) fn is_of(&self, batch: RoutedBatch) -> bool {
        (self.batch.tokens(), self.batch.num_tokens) == (batch.tokens(), batch.num_tokens)
    }

    /// Tokens that the router chose for.
    pub const fn num_tokens(&self) -> usize {
        self.batch.num_tokens
    }

    /// Rows of the `[routes, ..]` matrices.
    pub const fn num_routes(&self) -> usize {
        self.batch.num_tokens * self.top_k.top_k.cast_unsigned() as usize
    }
}

/// The adapters of one layer's experts: shapes checked, launches planned, workspace sized.
#[derive(Clone, Debug)]
pub struct LoraExperts {
    kernels: Kernels,
    model: ModelId,
    site: ExpertsSite,
    plan: ExpertsPlan,
}

/// What is made of a layer's deltas, and the operands beside `x`.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) enum Form {
    AddGateUp { y: MatrixMut },
    WriteGateUp { y: MatrixMut },
    Activate { y: MatrixRef, out: MatrixMut, activation: Activation },
    AddDown { y: MatrixMut },
    WriteDown { y: MatrixMut },
    AddCombined { y: MatrixMut },
    Combine { y: MatrixRef, out: MatrixMut },
}

impl Form {
    fn is_before_activation(&self) -> bool {
        matches!(self, Self::AddGateUp { .. } | Self::WriteGateUp { .. } | Self::Activate { .. })
    }

    /// The projection whose deltas they are.
    pub(in crate::cuda) fn projection<'a>(&self, site: &'a ExpertsSite) -> &'a ProjectionSite {
        if self.is_before_activation() { site.gate_up() } else { site.down() }
    }

    fn expand_by(&self) -> ExpandBy {
        match self {
            Self::AddGateUp { .. } | Self::WriteGateUp { .. } | Self::AddDown { .. } | Self::WriteDown { .. } => {
                ExpandBy::Slices
            }
            Self::Activate { .. } => ExpandBy::Routes,
            Self::AddCombined { .. } | Self::Combine { .. } => ExpandBy::Tokens,
        }
    }

    fn code(&self) -> i32 {
        let ffi::aril_experts_form(code) = match self {
            Self::AddGateUp { .. } | Self::AddDown { .. } => ffi::aril_experts_form::ARIL_ADD,
            Self::WriteGateUp { .. } | Self::WriteDown { .. } => ffi::aril_experts_form::ARIL_WRITE,
            Self::Activate { .. } => ffi::aril_experts_form::ARIL_ACTIVATE,
            Self::AddCombined { .. } => ffi::aril_experts_form::ARIL_ADD_COMBINED,
            Self::Combine { .. } => ffi::aril_experts_form::ARIL_COMBINE,
        };
        code.cast_signed()
    }

    /// `y`, and what is written if that is not it.
    fn matrices(&self) -> (RawMatrix, Option<RawMatrix>) {
        match *self {
            Self::AddGateUp { y: MatrixMut(y) }
            | Self::WriteGateUp { y: MatrixMut(y) }
            | Self::AddDown { y: MatrixMut(y) }
            | Self::WriteDown { y: MatrixMut(y) }
            | Self::AddCombined { y: MatrixMut(y) } => (y, None),
            Self::Activate { y: MatrixRef(y), out: MatrixMut(out), .. }
            | Self::Combine { y: MatrixRef(y), out: MatrixMut(out) } => (y, Some(out)),
        }
    }
}

/// An activation on its way to the ABI: its code, alpha and limit.
fn activation_code(activation: Activation) -> (i32, f32, f32) {
    let (ffi::aril_activation(code), alpha, limit) = match activation {
        Activation::Gelu => (ffi::aril_activation::ARIL_GELU, 0.0, 0.0),
        Activation::GeluTanh => (ffi::aril_activation::ARIL_GELU_TANH, 0.0, 0.0),
        Activation::Relu2 => (ffi::aril_activation::ARIL_RELU2, 0.0, 0.0),
        Activation::Silu => (ffi::aril_activation::ARIL_SILU, 0.0, 0.0),
        Activation::SwigluOai { alpha, limit } => (ffi::aril_activation::ARIL_SWIGLU_OAI, alpha, limit),
    };
    (code.cast_signed(), alpha, limit)
}

macro_rules! operation {
    ($(#[$doc:meta])* $name:ident, $form:ident) => {
        $(#[$doc])*
        pub unsafe fn $name(
            &self,
            step: &Step,
            routes: &mut GroupedRoutes,
            x: MatrixRef,
            y: MatrixMut,
        ) -> Result<(), LaunchError> {
            let args = self.args(step, routes, x, Form::$form { y })?;
            // SAFETY: the caller's obligations.
            unsafe { self.launch(&args, routes, step.stream) }
        }
    };
}

impl LoraExperts {
    /// Plans the experts `id` of `model` for batches within `capacity`, whose tokens have up to [`ExpertsSite::top_k`] routes.
    ///
    /// # Errors
    /// If the id is of another model, or no kernel takes these shapes or these bounds.
    pub fn new(
        kernels: &Kernels,
        model: &Model,
        id: ExpertsId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        let site = model.experts(id).ok_or(PlanError::Foreign)?.clone();
        let plan = ExpertsPlan::new(&site, dtype, capacity)?;
        Ok(Self { kernels: kernels.clone(), model: model.id(), site, plan })
    }

    /// What will be launched; for logs.
    pub fn plan(&self) -> &ExpertsPlan {
        &self.plan
    }

    operation! {
        /// Enqueues, for each route that is here: its row of `y` `+=` what its token's adapter adds to gate and up of its expert. What
        /// has no adapter keeps `y` bit for bit.
        ///
        /// `x` is `[tokens, hidden]`; `y` is `[routes, gate_up]`, gate and up in the order of
        /// [`ExpertsSite::halves`](crate::model::ExpertsSite::halves); the step's workspace has
        /// [`plan().workspace_bytes()`](ExpertsPlan::workspace_bytes). Allocates nothing, waits for nothing, and may be captured in a
        /// CUDA graph.
        ///
        /// # Errors
        /// If the operands don't fit the plan; then nothing was enqueued.
        ///
        /// # Safety
        /// As for [`LoraLinear::add_delta`](super::LoraLinear::add_delta), with the routes beside the batch. No two routes have the same
        /// row.
        add_gate_up_delta, AddGateUp
    }

    operation! {
        /// As [`add_gate_up_delta`](Self::add_gate_up_delta), but sets `y` to the delta alone, and to zero for every route and slice that
        /// has no adapter or is not here. Rows that no route has are left as they are.
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        write_gate_up_delta, WriteGateUp
    }

    /// Enqueues the activation, with the deltas of gate and up added before it: `out[row] = activation(y[row] + delta)` for every route
    /// that is here, whether its token has an adapter or not. It takes the place of the base's activation, and spares a pass over `y`.
    /// Computed in `f32`, rounded once.
    ///
    /// `x` is `[tokens, hidden]` and `y`, of the base's gate_up, `[routes, gate_up]`, as for
    /// [`add_gate_up_delta`](Self::add_gate_up_delta); `out` is `[routes, inter]`. Rows of routes that are not here, or not of the last
    /// update, are left as they are.
    ///
    /// # Errors
    /// As for `add_gate_up_delta`, and if the activation needs a gate that the experts do not have.
    ///
    /// # Safety
    /// As for `add_gate_up_delta`, with `out` in the place of `y`, and `y` beside `x`.
    #[doc(alias = "silu_and_mul")]
    pub unsafe fn activate(
        &self,
        step: &Step,
        routes: &mut GroupedRoutes,
        x: MatrixRef,
        y: MatrixRef,
        out: MatrixMut,
        activation: Activation,
    ) -> Result<(), LaunchError> {
        let args = self.args(step, routes, x, Form::Activate { y, out, activation })?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(&args, routes, step.stream) }
    }

    operation! {
        /// Enqueues, for each route that is here: its row of `y` `+=` what its token's adapter adds to down of its expert, before the
        /// combine, and without its weights unless these are [on the rows](TopK::on_rows).
        ///
        /// `x` is `[routes, inter]`, what the activation gave; `y` is `[routes, hidden]`.
        ///
        /// # Errors
        /// As for [`add_gate_up_delta`](Self::add_gate_up_delta).
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        add_down_delta, AddDown
    }

    operation! {
        /// As [`add_down_delta`](Self::add_down_delta), but sets `y` to the delta alone, and to zero for every route that has no adapter
        /// or is not here. Rows that no route has are left as they are.
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        write_down_delta, WriteDown
    }

    operation! {
        /// Enqueues the deltas of down behind the base's combine: to `y[t]` the sum over the routes of token `t` that are here, each
        /// multiplied by what the route [weighs](crate::routing::TopK::output_weight). What has no adapter keeps `y` bit for bit.
        ///
        /// `x` is `[routes, inter]`, what the activation gave; `y` is `[tokens, hidden]`.
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        add_combined_delta, AddCombined
    }

    /// Enqueues the combine, with the deltas of down added before it: `out[t]` is the sum over the routes of token `t` that are here
    /// of `y[row] + delta`, each multiplied by what the route [weighs](crate::routing::TopK::output_weight), and zero if none is. For
    /// every token, whether it has an adapter or not. It takes the place of the base's combine. Computed in `f32`, rounded once.
    ///
    /// `x` is `[routes, inter]`, what the activation gave; `y`, of the base's down, is `[routes, hidden]`, without the router's
    /// weights; `out` is `[tokens, hidden]`. Rows of tokens that the
    /// last update did not have are left as they are.
    ///
    /// # Errors
    /// As for `add_gate_up_delta`.
    ///
    /// # Safety
    /// As for `add_gate_up_delta`, with `out` in the place of `y`, and `y` beside `x`.
    #[doc(alias = "moe_sum")]
    #[doc(alias = "finalize")]
    pub unsafe fn combine(
        &self,
        step: &Step,
        routes: &mut GroupedRoutes,
        x: MatrixRef,
        y: MatrixRef,
        out: MatrixMut,
    ) -> Result<(), LaunchError> {
        let args = self.args(step, routes, x, Form::Combine { y, out })?;
        // SAFETY: the caller's obligations.
        unsafe { self.launch(&args, routes, step.stream) }
    }

    /// The arguments, once the operands are found to fit.
    pub(in crate::cuda) fn args(
        &self,
        step: &Step,
        routes: &GroupedRoutes,
        x: MatrixRef,
        form: Form,
    ) -> Result<ffi::aril_experts_args, LaunchError> {
        let Step { table, workspace, .. } = step;
        let site = form.projection(&self.site);
        let from_tokens = form.is_before_activation();
        let plan = if from_tokens { self.plan.gate_up() } else { self.plan.down() };
        let (dtype, num_tokens, num_routes) = (self.plan.dtype(), routes.num_tokens(), routes.num_routes());
        let top_k = routes.top_k.top_k.cast_unsigned() as usize;
        let (MatrixRef(x), (y, out)) = (x, form.matrices());
        let x_rows = if from_tokens { num_tokens } else { num_routes };
        let (x, x_stride) = x.expect("x", dtype, x_rows, site.in_features())?;
        let y_rows = if matches!(form, Form::AddCombined { .. }) { num_tokens } else { num_routes };
        let (y, y_stride) = y.expect("y", dtype, y_rows, site.out_features())?;
        let (out_rows, out_cols) = match form {
            Form::Activate { .. } => (num_routes, self.site.down().in_features()),
            _ => (num_tokens, site.out_features()),
        };
        let out = out.map(|out| out.expect("out", dtype, out_rows, out_cols)).transpose()?;
        let (out, out_stride) = out.unwrap_or((std::ptr::null_mut(), 0));
        let (activation, alpha, limit) = match form {
            Form::Activate { activation, .. } => {
                self.site.check_activation(activation)?;
                activation_code(activation)
            }
            _ => (0, 0.0, 0.0),
        };
        within("the batch's tokens", num_tokens, self.plan.capacity().max_tokens)?;
        within("the routes of a token", top_k, self.plan.top_k())?;
        if routes.top_k.num_experts != int(self.site.held().len())? {
            return Err(OperandError::Model.into());
        }
        workspace.check(plan.workspace_bytes_for(num_tokens, top_k))?;
        let launch = plan.launch(num_tokens, top_k, form.expand_by());
        let wide = launch.wide.unwrap_or_default();
        let (_, step) = site.columns(0);
        let (_, up_slice) = self.site.gate_and_up();
        let weighted = match form {
            Form::AddCombined { .. } | Form::Combine { .. } => routes.weighed != Weighed::Input,
            _ if from_tokens => routes.weighed == Weighed::Input,
            _ => routes.weighed == Weighed::Rows,
        };
        Ok(ffi::aril_experts_args {
            dtype: dtype_code(dtype),
            num_tokens: int(num_tokens)?,
            max_tiles: int(routes.batch.max_small_tiles)?,
            shrink_blocks: int(launch.small.shrink)?,
            expand_blocks: int(launch.small.expand)?,
            outs_per_block: int(launch.small.outs)?,
            wide_shrink_blocks: int(wide.shrink)?,
            wide_expand_blocks: int(wide.expand)?,
            wide_outs_per_block: int(wide.outs)?,
            form: form.code(),
            weighted: weighted.into(),
            rows_weighted: (routes.weighed == Weighed::Rows).into(),
            groups_routes: (!routes.grouped).into(),
            from_tokens: from_tokens.into(),
            in_features: int(site.in_features())?,
            num_slices: int(site.num_slices())?,
            out_features: int(site.out_features() / site.num_slices())?,
            interleaved: (step > 1).into(),
            up_slice: int(up_slice)?,
            activation,
            alpha,
            limit,
            factor: routes.factor,
            x,
            x_stride,
            y,
            y_stride,
            out,
            out_stride,
            mailbox: workspace.mailbox.ptr as *mut std::ffi::c_void,
            partials: workspace.partials.ptr as *mut f32,
            weights: table.expect(self.model, dtype, &self.plan.capacity(), site.shared_entry())?,
            routing: routes.batch.routing,
            top_k: routes.top_k,
            groups: routes.groups,
        })
    }

    pub(in crate::cuda) unsafe fn launch(
        &self,
        args: &ffi::aril_experts_args,
        routes: &mut GroupedRoutes,
        stream: Stream,
    ) -> Result<(), LaunchError> {
        self.kernels.check_thread()?;
        if args.num_tokens == 0 {
            return Ok(());
        }
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        check(unsafe { ffi::aril_experts(args, stream.as_raw()) })?;
        // Those in f32 go without.
        routes.grouped |= self.plan.dtype() != DType::F32;
        Ok(())
    }
}
