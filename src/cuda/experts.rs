#![expect(unsafe_code, reason = "calls the raw door")]

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
        /// the combine, and without its weights unless these are [on the rows](super::TopK::on_rows). What has no adapter keeps `y` bit
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
