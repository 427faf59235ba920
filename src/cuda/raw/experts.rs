use super::{
    abi::{dtype_code, int},
    grouping::GroupedRoutes,
    matrix::{MatrixMut, MatrixRef, RawMatrix},
    memory::Stream,
    step::Step,
};
use crate::{
    DType,
    cuda::{Kernels, kernels::check},
    error::{LaunchError, OperandError},
    ffi,
    model::{Activation, ExpertsId, ExpertsSite, Model, ModelId, ProjectionSite},
    plan::{Capacity, ExpandBy, ExpertsPlan, PlanError},
    routing::Weighed,
};

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
        /// combine, and without its weights unless these are [on the rows](super::TopK::on_rows).
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
                if !self.site.allows(activation) {
                    return Err(OperandError::Activation { activation }.into());
                }
                activation_code(activation)
            }
            _ => (0, 0.0, 0.0),
        };
        LaunchError::within("the batch's tokens", num_tokens, self.plan.capacity().max_tokens)?;
        LaunchError::within("the routes of a token", top_k, self.plan.top_k())?;
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
            mailbox_bytes: workspace.mailbox.bytes as u64,
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
