use super::{
    abi::{dtype_code, int},
    grouping::GroupedRoutes,
    matrix::{MatrixMut, MatrixRef, RawMatrix},
    memory::Stream,
    step::Step,
};
use crate::{
    DType,
    contract::{self, ExpertsForm},
    cuda::Kernels,
    error::{LaunchError, OperandError},
    ffi,
    model::{Activation, ExpertsId, ExpertsSite, Model, ProjectionSite},
    plan::{Capacity, ExpandBy, ExpertsPlan, PlanError},
    routing::Weighed,
};

/// The LoRA operations of one layer's experts.
#[derive(Clone, Debug)]
pub struct LoraExperts {
    kernels: Kernels,
    contract: contract::Experts,
}

/// An operation, and its operands besides `x`.
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

    /// The projection whose deltas the operation computes.
    pub(in crate::cuda) fn projection<'a>(&self, site: &'a ExpertsSite) -> &'a ProjectionSite {
        if self.is_before_activation() { site.gate_up() } else { site.down() }
    }

    /// Whether the kernel can wait for the base operation in front after it has read `x`.
    fn may_shrink_beside_base(&self) -> bool {
        matches!(self, Self::Activate { .. } | Self::AddCombined { .. } | Self::Combine { .. })
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

    /// What is checked.
    fn shape(&self) -> Result<ExpertsForm, OperandError> {
        let (y, out) = self.matrices();
        let y = y.shape("y")?;
        let out = out.map_or(Ok(y), |out| out.shape("out"))?;
        Ok(match *self {
            Self::AddGateUp { .. } | Self::WriteGateUp { .. } => ExpertsForm::GateUp { y },
            Self::Activate { activation, .. } => ExpertsForm::Activate { y, out, activation },
            Self::AddDown { .. } | Self::WriteDown { .. } => ExpertsForm::Down { y },
            Self::AddCombined { .. } => ExpertsForm::AddCombined { y },
            Self::Combine { .. } => ExpertsForm::Combine { y, out },
        })
    }

    /// `y`, and the output if it is separate.
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

/// Converts an activation: its code, alpha and limit.
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
    /// Plans the experts `id` of `model` for batches within `capacity`, with up to [`ExpertsSite::top_k`] experts per token.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, or the kernels do not support a size or the capacity.
    pub fn new(
        kernels: &Kernels,
        model: &Model,
        id: ExpertsId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        Ok(Self { kernels: kernels.clone(), contract: contract::Experts::new(model, id, dtype, capacity)? })
    }

    /// The launch configuration.
    pub fn plan(&self) -> &ExpertsPlan {
        &self.contract.plan
    }

    operation! {
        #[doc = include_str!("../../docs/operations/experts_add_gate_up_delta.md")]
        ///
        /// The step's workspace has at least [`plan().workspace_bytes()`](ExpertsPlan::workspace_bytes). Enqueues the work, and
        /// neither allocates nor waits. May be captured in a CUDA graph.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        ///
        /// # Safety
        /// As for [`LoraLinear::add_delta`](super::LoraLinear::add_delta), for the routes as for the batch. The routes have
        /// distinct rows.
        add_gate_up_delta, AddGateUp
    }

    operation! {
        #[doc = include_str!("../../docs/operations/experts_write_gate_up_delta.md")]
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        write_gate_up_delta, WriteGateUp
    }

    #[doc = include_str!("../../docs/operations/experts_activate.md")]
    ///
    /// Rows of other routes, and of tokens beyond the last update, are unchanged.
    ///
    /// # Errors
    /// As for `add_gate_up_delta`, and [`OperandError::Activation`] if the activation requires a gate that the experts lack.
    ///
    /// # Safety
    /// As for `add_gate_up_delta`, with `out` in the place of `y`, and `y` as an input like `x`.
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
        #[doc = include_str!("../../docs/operations/experts_add_down_delta.md")]
        ///
        /// # Errors
        /// As for [`add_gate_up_delta`](Self::add_gate_up_delta).
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        add_down_delta, AddDown
    }

    operation! {
        #[doc = include_str!("../../docs/operations/experts_write_down_delta.md")]
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        write_down_delta, WriteDown
    }

    operation! {
        #[doc = include_str!("../../docs/operations/experts_add_combined_delta.md")]
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        ///
        /// # Safety
        /// As for `add_gate_up_delta`.
        add_combined_delta, AddCombined
    }

    #[doc = include_str!("../../docs/operations/experts_combine.md")]
    ///
    /// Rows of tokens beyond the last update are unchanged.
    ///
    /// # Errors
    /// As for `add_gate_up_delta`.
    ///
    /// # Safety
    /// As for `add_gate_up_delta`, with `out` in the place of `y`, and `y` as an input like `x`.
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

    /// Checks the operands and returns the arguments of the C ABI.
    pub(in crate::cuda) fn args(
        &self,
        step: &Step,
        routes: &GroupedRoutes,
        x: MatrixRef,
        form: Form,
    ) -> Result<ffi::aril_experts_args, LaunchError> {
        let Step { table, workspace, .. } = step;
        let contract::Experts { site: experts, plan: of_layer, .. } = &self.contract;
        let (num_tokens, top_k) = (routes.num_tokens(), routes.top_k.top_k.cast_unsigned() as usize);
        let (MatrixRef(x), (y, out)) = (x, form.matrices());
        self.contract.check(step.shape(), [num_tokens, top_k], x.shape("x")?, form.shape()?)?;
        if routes.top_k.num_experts != int(experts.held().len())? {
            return Err(OperandError::Model.into());
        }
        let (site, from_tokens) = (form.projection(experts), form.is_before_activation());
        let plan = if from_tokens { of_layer.gate_up() } else { of_layer.down() };
        let ((x, x_stride), (y, y_stride)) = (x.place(), y.place());
        let (out, out_stride) = out.map_or((std::ptr::null_mut(), 0), |out| out.place());
        let (activation, alpha, limit) = match form {
            Form::Activate { activation, .. } => activation_code(activation),
            _ => (0, 0.0, 0.0),
        };
        workspace.check(plan.workspace_bytes_for(num_tokens, top_k))?;
        let beside_base = routes.beside_base && form.may_shrink_beside_base();
        let launch = plan.launch(num_tokens, top_k, form.expand_by(), beside_base);
        let wide = launch.wide.unwrap_or_default();
        let (_, step) = site.columns(0);
        let (_, up_slice) = experts.gate_and_up();
        let weighted = match form {
            Form::AddCombined { .. } | Form::Combine { .. } => routes.weighed != Weighed::Input,
            _ if from_tokens => routes.weighed == Weighed::Input,
            _ => routes.weighed == Weighed::Rows,
        };
        Ok(ffi::aril_experts_args {
            dtype: dtype_code(of_layer.dtype()),
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
            inputs_complete: beside_base.into(),
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
            weights: table.at(site.shared_entry())?,
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
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_experts, args, args.num_tokens, stream.as_raw()) }?;
        // Operations in f32 do not group routes.
        routes.grouped |= self.plan().dtype() != DType::F32;
        Ok(())
    }
}
