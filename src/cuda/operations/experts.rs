//! The operations of a layer's experts.

#![expect(unsafe_code, reason = "launches kernels")]

use std::ffi::c_void;

use crate::{
    DType, Element,
    contract::{self, ExpertsForm},
    cuda::{
        GroupedRoutes, Kernels, LaunchError, Matrix, MatrixMut, Step, WeightTable,
        memory::{Memory, Operand},
        raw::{self, RawMatrix, dtype_code, int},
    },
    error::OperandError,
    ffi,
    model::{Activation, ExpertsId, Model},
    plan::{Capacity, ExpertsPlan, PlanError},
    routing::WeightsOn,
};

/// The LoRA operations of one layer's experts.
///
/// The operations are those of [`cpu::LoraExperts`](crate::cpu::LoraExperts), where a table shows which base operation
/// each one goes with. Those whose names end in `_raw` are for memory and streams that the engine owns.
#[derive(Clone, Debug)]
#[doc(alias = "FusedMoEWithLoRA")]
pub struct LoraExperts {
    kernels: Kernels,
    contract: contract::Experts,
}

/// The matrices of an operation.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    x: RawMatrix,
    y: RawMatrix,
    /// The output, if it is not `y`.
    out: Option<RawMatrix>,
}

/// Converts a form.
fn form_code(form: ExpertsForm) -> ffi::aril_experts_form {
    match form {
        ExpertsForm::AddGateUp | ExpertsForm::AddDown => ffi::aril_experts_form::ARIL_ADD,
        ExpertsForm::WriteGateUp | ExpertsForm::WriteDown => ffi::aril_experts_form::ARIL_WRITE,
        ExpertsForm::Activate(_) => ffi::aril_experts_form::ARIL_ACTIVATE,
        ExpertsForm::AddCombined => ffi::aril_experts_form::ARIL_ADD_COMBINED,
        ExpertsForm::Combine => ffi::aril_experts_form::ARIL_COMBINE,
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

/// An operation that reads `x`, and writes `y`: on typed operands, and on memory that the engine owns.
macro_rules! operation {
    ($form:ident, $raw:ident, $(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub fn $name<T: Element>(
            &self,
            step: &mut Step<'_>,
            routes: &mut GroupedRoutes<'_, '_>,
            mut x: Matrix<'_, T>,
            mut y: MatrixMut<'_, T>,
        ) -> Result<(), LaunchError> {
            let (raw::MatrixRef(of_x), raw::MatrixMut(of_y)) = (x.shape(), y.shape());
            let matrices = Matrices { x: of_x, y: of_y, out: None };
            self.enqueue(step, routes, ExpertsForm::$form, matrices, [x.operand(), y.operand(), None])
        }

        #[doc = concat!("[`", stringify!($name), "`](Self::", stringify!($name), ") on memory that the engine owns.")]
        ///
        /// The step's workspace has at least [`plan().workspace_bytes()`](ExpertsPlan::workspace_bytes). Enqueues the
        /// work, and neither allocates nor waits. May be captured in a CUDA graph.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        ///
        /// # Safety
        /// As for [`LoraLinear::add_delta_raw`](super::LoraLinear::add_delta_raw), for the routes as for the batch. The
        /// routes have distinct rows.
        pub unsafe fn $raw(
            &self,
            step: &raw::Step,
            routes: &mut raw::GroupedRoutes,
            raw::MatrixRef(x): raw::MatrixRef,
            raw::MatrixMut(y): raw::MatrixMut,
        ) -> Result<(), LaunchError> {
            let args = self.args(step, routes, ExpertsForm::$form, Matrices { x, y, out: None })?;
            // SAFETY: the caller's obligations.
            unsafe { self.run(&args, routes, step.stream) }
        }
    };
}

impl LoraExperts {
    /// Plans the experts `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// As for [`for_model`](Self::for_model).
    pub fn new(weights: &WeightTable, id: ExpertsId) -> Result<Self, PlanError> {
        Self::for_model(weights.queue().kernels(), weights.model(), id, weights.dtype(), weights.capacity())
    }

    /// Plans the experts `id` of `model`, for tables of this element type and batches within `capacity`, with up to
    /// [`ExpertsSite::top_k`](crate::model::ExpertsSite::top_k) experts per token.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, [`Experts::top_k`](crate::model::Experts::top_k) was not
    /// called, or the kernels do not support a size or the capacity.
    pub fn for_model(
        kernels: &Kernels,
        model: &Model,
        id: ExpertsId,
        dtype: DType,
        capacity: Capacity,
    ) -> Result<Self, PlanError> {
        let contract = contract::Experts::new(model, id, dtype, capacity, kernels.device())?;
        Ok(Self { kernels: kernels.clone(), contract })
    }

    /// The launch configuration. It also gives the size of the workspace.
    pub fn plan(&self) -> &ExpertsPlan {
        &self.contract.plan
    }

    operation! {
        AddGateUp, add_gate_up_delta_raw,
        #[doc = doc_of!(experts_add_gate_up_delta)]
        ///
        /// Enqueues the work, and neither allocates nor waits.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        add_gate_up_delta
    }

    operation! {
        WriteGateUp, write_gate_up_delta_raw,
        #[doc = doc_of!(experts_write_gate_up_delta)]
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        write_gate_up_delta
    }

    operation! {
        AddDown, add_down_delta_raw,
        #[doc = doc_of!(experts_add_down_delta)]
        ///
        /// Enqueues the work, and neither allocates nor waits.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        add_down_delta
    }

    operation! {
        WriteDown, write_down_delta_raw,
        #[doc = doc_of!(experts_write_down_delta)]
        ///
        /// # Errors
        /// As for `add_down_delta`.
        write_down_delta
    }

    operation! {
        AddCombined, add_combined_delta_raw,
        #[doc = doc_of!(experts_add_combined_delta)]
        ///
        /// Enqueues the work, and neither allocates nor waits.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        add_combined_delta
    }

    #[doc = doc_of!(experts_activate)]
    ///
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the experts, the step and its routes, or the activation requires a
    /// gate that the experts lack. Nothing was enqueued.
    #[doc(alias = "silu_and_mul")]
    pub fn activate<T: Element>(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_, '_>,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        out: MatrixMut<'_, T>,
        activation: Activation,
    ) -> Result<(), LaunchError> {
        self.enqueue_to(step, routes, ExpertsForm::Activate(activation), x, y, out)
    }

    /// [`activate`](Self::activate) on memory that the engine owns. Rows of other routes, and of tokens beyond the last
    /// update, are unchanged.
    ///
    /// # Errors
    /// As for [`add_gate_up_delta_raw`](Self::add_gate_up_delta_raw), and [`OperandError::Activation`] if the
    /// activation requires a gate that the experts lack.
    ///
    /// # Safety
    /// As for `add_gate_up_delta_raw`, with `out` in the place of `y`, and `y` as an input like `x`.
    pub unsafe fn activate_raw(
        &self,
        step: &raw::Step,
        routes: &mut raw::GroupedRoutes,
        raw::MatrixRef(x): raw::MatrixRef,
        raw::MatrixRef(y): raw::MatrixRef,
        raw::MatrixMut(out): raw::MatrixMut,
        activation: Activation,
    ) -> Result<(), LaunchError> {
        let args = self.args(step, routes, ExpertsForm::Activate(activation), Matrices { x, y, out: Some(out) })?;
        // SAFETY: the caller's obligations.
        unsafe { self.run(&args, routes, step.stream) }
    }

    #[doc = doc_of!(experts_combine)]
    ///
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
    #[doc(alias = "moe_sum")]
    #[doc(alias = "finalize")]
    pub fn combine<T: Element>(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_, '_>,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        out: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        self.enqueue_to(step, routes, ExpertsForm::Combine, x, y, out)
    }

    /// [`combine`](Self::combine) on memory that the engine owns. Rows of tokens beyond the last update are unchanged.
    ///
    /// # Errors
    /// As for [`add_gate_up_delta_raw`](Self::add_gate_up_delta_raw).
    ///
    /// # Safety
    /// As for `add_gate_up_delta_raw`, with `out` in the place of `y`, and `y` as an input like `x`.
    pub unsafe fn combine_raw(
        &self,
        step: &raw::Step,
        routes: &mut raw::GroupedRoutes,
        raw::MatrixRef(x): raw::MatrixRef,
        raw::MatrixRef(y): raw::MatrixRef,
        raw::MatrixMut(out): raw::MatrixMut,
    ) -> Result<(), LaunchError> {
        let args = self.args(step, routes, ExpertsForm::Combine, Matrices { x, y, out: Some(out) })?;
        // SAFETY: the caller's obligations.
        unsafe { self.run(&args, routes, step.stream) }
    }

    /// Enqueues an operation that reads `y`, and writes `out`.
    fn enqueue_to<T: Element>(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_, '_>,
        form: ExpertsForm,
        mut x: Matrix<'_, T>,
        mut y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let (raw::MatrixRef(of_x), raw::MatrixRef(of_y), raw::MatrixMut(of_out)) = (x.shape(), y.shape(), out.shape());
        let matrices = Matrices { x: of_x, y: of_y, out: Some(of_out) };
        self.enqueue(step, routes, form, matrices, [x.operand(), y.operand_as("y"), out.operand_as("out")])
    }

    fn enqueue(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_, '_>,
        form: ExpertsForm,
        matrices: Matrices,
        operands: [Option<Operand<'_>>; 3],
    ) -> Result<(), LaunchError> {
        let mut args = self.args(&step.raw(), &mut routes.raw, form, matrices)?;
        routes.check(step)?;
        let GroupedRoutes { raw: routes, top_k, .. } = routes;
        let [x, y, out] = operands.map(|operand| operand.map(|(name, memory)| (name, memory as &mut dyn Memory)));
        let [ids, weights, rows] = top_k.operands();
        // The routes have the addresses of the router's choice.
        step.check([x, y, out, ids, weights, rows])?.enqueue(|[x, y, out, ..], stream| {
            (args.x, args.y, args.out) = (x as *const c_void, y as *mut c_void, out as *mut c_void);
            // SAFETY: the operands fit the plan (checked), and are as `Checked::enqueue` says. The routes belong to the
            // queue, too.
            unsafe { self.run(&args, routes, stream) }
        })
    }

    /// Checks the operands and returns the arguments of the C ABI.
    fn args(
        &self,
        step: &raw::Step,
        routes: &mut raw::GroupedRoutes,
        form: ExpertsForm,
        matrices: Matrices,
    ) -> Result<ffi::aril_experts_args, LaunchError> {
        let raw::Step { table, workspace, .. } = step;
        let contract::Experts { site: experts, plan: of_layer, .. } = &self.contract;
        let code = form_code(form);
        let batch = routes.batch(code, table.max_rank(), workspace.mailbox.ptr);
        let (num_tokens, top_k) = (batch.bounds.num_tokens, batch.top_k);
        let Matrices { x, y, out } = matrices;
        let out_shape = out.map(|out| out.shape("out")).transpose()?;
        self.contract.check(step.shape(), [num_tokens, top_k], form, [x.shape("x")?, y.shape("y")?], out_shape)?;
        if routes.top_k.num_experts != int(experts.held().len())? {
            return Err(OperandError::Model.into());
        }
        let from_tokens = form.is_before_activation();
        let (site, plan) =
            if from_tokens { (experts.gate_up(), of_layer.gate_up()) } else { (experts.down(), of_layer.down()) };
        let ((x, x_stride), (y, y_stride)) = (x.place(), y.place());
        let (out, out_stride) = out.map_or((std::ptr::null_mut(), 0), |out| out.place());
        let (activation, alpha, limit) = match form {
            ExpertsForm::Activate(activation) => activation_code(activation),
            _ => (0, 0.0, 0.0),
        };
        workspace.check(plan.workspace_bytes_for(num_tokens, top_k))?;
        let (_, step) = site.columns(0);
        let (_, up_slice) = experts.gate_and_up();
        let weighted = match form {
            ExpertsForm::AddCombined | ExpertsForm::Combine => routes.weights_on != WeightsOn::Input,
            _ if from_tokens => routes.weights_on == WeightsOn::Input,
            _ => routes.weights_on == WeightsOn::Rows,
        };
        Ok(ffi::aril_experts_args {
            dtype: dtype_code(of_layer.dtype()),
            num_tokens: int(num_tokens)?,
            plan: plan.launch(code, batch),
            form: code.0.cast_signed(),
            weighted: weighted.into(),
            rows_weighted: (routes.weights_on == WeightsOn::Rows).into(),
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
            mailbox: workspace.mailbox.ptr as *mut c_void,
            mailbox_bytes: workspace.mailbox.bytes as u64,
            partials: workspace.partials.ptr as *mut f32,
            weights: table.at(site.shared_entry())?,
            routing: routes.batch.routing,
            top_k: routes.top_k,
            groups: routes.groups,
        })
    }

    unsafe fn run(
        &self,
        args: &ffi::aril_experts_args,
        routes: &mut raw::GroupedRoutes,
        stream: raw::Stream,
    ) -> Result<(), LaunchError> {
        // SAFETY: the operands fit the plan, and the caller vouches for their memory.
        unsafe { self.kernels.launch(ffi::aril_experts, args, args.num_tokens, stream.as_raw()) }?;
        routes.enqueued(args);
        Ok(())
    }
}
