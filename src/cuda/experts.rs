#![expect(unsafe_code, reason = "calls the raw API")]

use std::ffi::c_void;

use super::{
    GroupedRoutes, LaunchError, Matrix, MatrixMut, Step, WeightTable,
    raw::{self, Form},
};
use crate::{
    Element,
    model::{Activation, ExpertsId},
    plan::{ExpertsPlan, PlanError},
};

/// The LoRA operations of one layer's experts, planned for a table.
///
/// The operations are those of [`cpu::LoraExperts`](crate::cpu::LoraExperts), where a table shows which base operation each one
/// goes with.
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
            routes: &mut GroupedRoutes<'_, '_>,
            x: Matrix<'_, T>,
            y: MatrixMut<'_, T>,
        ) -> Result<(), LaunchError> {
            let form = Form::$form { y: y.shape() };
            self.enqueue(step, routes, &x, form, Written::Y(y))
        }
    };
}

/// The operands of an operation besides `x`.
enum Written<'a, T> {
    /// The operation reads and writes `y`.
    Y(MatrixMut<'a, T>),
    /// The operation reads `y` and writes `out`.
    Out(Matrix<'a, T>, MatrixMut<'a, T>),
}

impl LoraExperts {
    /// Plans the experts `id` of the table's model, for the table's element type and capacity.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, [`Experts::top_k`](crate::model::Experts::top_k) was not called, or the
    /// kernels do not support a size or the capacity.
    pub fn new(weights: &WeightTable, id: ExpertsId) -> Result<Self, PlanError> {
        let kernels = weights.queue().kernels();
        let raw = raw::LoraExperts::new(kernels, weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { raw })
    }

    /// The launch configuration. It also gives the size of the workspace.
    pub fn plan(&self) -> &ExpertsPlan {
        self.raw.plan()
    }

    operation! {
        #[doc = include_str!("../docs/operations/experts_add_gate_up_delta.md")]
        ///
        /// Enqueues the work, and neither allocates nor waits.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        add_gate_up_delta, AddGateUp
    }

    operation! {
        #[doc = include_str!("../docs/operations/experts_write_gate_up_delta.md")]
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        write_gate_up_delta, WriteGateUp
    }

    operation! {
        #[doc = include_str!("../docs/operations/experts_add_down_delta.md")]
        ///
        /// Enqueues the work, and neither allocates nor waits.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        add_down_delta, AddDown
    }

    operation! {
        #[doc = include_str!("../docs/operations/experts_write_down_delta.md")]
        ///
        /// # Errors
        /// As for `add_down_delta`.
        write_down_delta, WriteDown
    }

    operation! {
        #[doc = include_str!("../docs/operations/experts_add_combined_delta.md")]
        ///
        /// Enqueues the work, and neither allocates nor waits.
        ///
        /// # Errors
        /// [`LaunchError`] if an operand does not match the experts, the step and its routes. Nothing was enqueued.
        add_combined_delta, AddCombined
    }

    #[doc = include_str!("../docs/operations/experts_activate.md")]
    ///
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the experts, the step and its routes, or the activation requires a gate that
    /// the experts lack. Nothing was enqueued.
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
        let form = Form::Activate { y: y.shape(), out: out.shape(), activation };
        self.enqueue(step, routes, &x, form, Written::Out(y, out))
    }

    #[doc = include_str!("../docs/operations/experts_combine.md")]
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
        let form = Form::Combine { y: y.shape(), out: out.shape() };
        self.enqueue(step, routes, &x, form, Written::Out(y, out))
    }

    fn enqueue<T: Element>(
        &self,
        step: &mut Step<'_>,
        routes: &mut GroupedRoutes<'_, '_>,
        x: &Matrix<'_, T>,
        form: Form,
        mut written: Written<'_, T>,
    ) -> Result<(), LaunchError> {
        let mut args = self.raw.args(&step.raw(), &routes.raw, x.shape(), form)?;
        routes.check(step)?;
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
        let _entered = step.enter()?;
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
        // SAFETY: every operand is large enough and in the queue's context (checked). The step's table, routing and workspace, the
        // routes' memory, and buffers, belong to the queue; guards order the other operands. Graphs keep their operands alive.
        unsafe { self.raw.launch(&args, &mut routes.raw, queue.raw()) }
    }
}
