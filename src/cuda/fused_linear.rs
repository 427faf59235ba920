#![expect(unsafe_code, reason = "calls the raw door")]

use std::ffi::c_void;

use super::{LaunchError, Matrix, MatrixMut, Queue, Step, View, WeightTable, raw};
use crate::{
    Element,
    error::OperandError,
    ffi,
    model::{LinearId, MAX_SLICES},
    plan::ForwardPlan,
};

/// A linear layer with its base weights and its adapters, in one launch, for decode: `y = x Wᵀ + bias + scaling · B (A x)` of up to
/// [`MAX_FORWARD_TOKENS`](crate::plan::MAX_FORWARD_TOKENS) tokens in `bf16` and `f16`, from compute capability 9.0 on.
///
/// It borrows W and the bias for as long as it lives, and reads W where it is, as PyTorch stores it: row-major, of any row stride
/// that is a multiple of 8 elements. In a captured step both are to be [`Buffer`](super::Buffer)s, which the graph keeps; slices of
/// cudarc's cost each launch the events that order them.
///
/// A token's bits are a function of its own `x`, adapter and scale and of the layer, whatever else is in the batch. A batch of more than
/// [`plan().max_tokens()`](ForwardPlan::max_tokens) is for a GEMM of the engine's and [`LoraLinear`](super::LoraLinear), which sum up
/// in another order and may differ in the last bits.
///
/// ```no_run
/// use aril::{cuda::{Buffer, FusedLinear, LaunchError, Matrix, MatrixMut, Step, WeightTable}, model::LinearId};
/// use half::bf16;
///
/// // q, k and v in one W, a slice behind the other.
/// fn qkv<'a>(weights: &WeightTable, id: LinearId, w: &'a Buffer<bf16>) -> Result<FusedLinear<'a, bf16>, LaunchError> {
///     const HIDDEN: usize = 4096;
///     let rows = |first: usize, rows: usize| Matrix::new(w.slice(first * HIDDEN..(first + rows) * HIDDEN), rows, HIDDEN);
///     FusedLinear::new(weights, id, [rows(0, 4096)?, rows(4096, 1024)?, rows(5120, 1024)?])
/// }
///
/// fn decode(layer: &FusedLinear<'_, bf16>, step: &mut Step<'_>, x: &Buffer<bf16>, y: &mut Buffer<bf16>) -> Result<(), LaunchError> {
///     let tokens = step.num_tokens();
///     assert!(tokens <= layer.plan().max_tokens(), "for the engine's GEMM and LoraLinear::add_delta");
///     let x = Matrix::new(x, tokens, 4096)?;
///     layer.forward(step, x, MatrixMut::new(y, tokens, 6144)?)
/// }
/// ```
#[derive(Debug)]
pub struct FusedLinear<'a, T> {
    raw: raw::FusedLinear,
    queue: Queue,
    slices: Vec<Matrix<'a, T>>,
    bias: Option<View<'a, T>>,
}

impl<'a, T: Element> FusedLinear<'a, T> {
    /// Plans the layer `id` of the table's model, for the table's element type and capacity, with W `[out_features, in_features]` of
    /// each of its slices. Waits for what was enqueued before, so that W is there.
    ///
    /// # Errors
    /// If the device is older than compute capability 9.0; the id is of another model; W is not one matrix of its shape and type for each
    /// slice, of the queue, whose rows begin at multiples of 16 bytes; no kernel takes the type, the shape or the bounds; or the
    /// queue's stream is being captured.
    pub fn new(
        weights: &WeightTable,
        id: LinearId,
        slices: impl IntoIterator<Item = Matrix<'a, T>>,
    ) -> Result<Self, LaunchError> {
        let queue = weights.queue();
        queue.enter()?;
        let slices: Vec<_> = slices.into_iter().collect();
        slices.iter().try_for_each(|w| w.check_queue("W", queue))?;
        let addressed: Vec<_> = slices.iter().map(|w| w.at(w.on(queue).0)).collect();
        let (kernels, model) = (queue.kernels(), weights.model());
        let raw = raw::FusedLinear::new(kernels, model, id, weights.dtype(), weights.capacity(), &addressed)?;
        wait_for(queue)?;
        Ok(Self { raw, queue: queue.clone(), slices, bias: None })
    }

    /// Adds `bias` `[out_features]` to every row. Waits for what was enqueued before, so that it is there.
    ///
    /// # Errors
    /// If it is of another length or queue, or the queue's stream is being captured.
    pub fn with_bias(self, bias: impl Into<View<'a, T>>) -> Result<Self, LaunchError> {
        let bias = bias.into();
        let (got, want) = (bias.len(), self.raw.num_outputs());
        if got != want {
            return Err(OperandError::Bias { got, want }.into());
        }
        bias.check_queue("bias", &self.queue)?;
        self.queue.enter()?;
        let address = bias.on(&self.queue).0;
        wait_for(&self.queue)?;
        Ok(Self { raw: self.raw.with_bias(address), bias: Some(bias), ..self })
    }

    /// What will be launched; for logs, for the most tokens of a batch, and for the size of the workspace.
    pub fn plan(&self) -> &ForwardPlan {
        self.raw.plan()
    }

    /// Enqueues `y[t] = x[t] Wᵀ + bias + scaling · B (A x[t])`, for every row `t` of the step: of tokens without an adapter, and of rows
    /// of a captured step that the last update did not have, without the last term. Nothing of `y` is read.
    ///
    /// `x` is `[tokens, in_features]`, with rows that begin at multiples of 16 bytes, and `y` is `[tokens, out_features]`. Allocates
    /// nothing and waits for nothing. With row-parallel layers `y` is this rank's partial sum; give the bias to one rank alone.
    ///
    /// # Errors
    /// If the operands don't fit the layer and the step, or there are more than [`plan().max_tokens()`](ForwardPlan::max_tokens)
    /// tokens; then nothing was enqueued.
    pub fn forward(&self, step: &mut Step<'_>, x: Matrix<'_, T>, y: MatrixMut<'_, T>) -> Result<(), LaunchError> {
        self.enqueue(false, step, &x, y)
    }

    /// As [`forward`](Self::forward), but adds to what `y` holds.
    ///
    /// # Errors
    /// As for `forward`.
    pub fn accumulate(&self, step: &mut Step<'_>, x: Matrix<'_, T>, y: MatrixMut<'_, T>) -> Result<(), LaunchError> {
        self.enqueue(true, step, &x, y)
    }

    fn enqueue(
        &self,
        accumulates: bool,
        step: &mut Step<'_>,
        x: &Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), LaunchError> {
        let args = self.raw.args(&step.raw(), x.shape(), y.shape())?;
        x.check(step)?;
        y.check(step)?;
        self.slices.iter().try_for_each(|w| w.check_as("W", step))?;
        self.bias.as_ref().map_or(Ok(()), |bias| bias.check("bias", step))?;
        step.enter()?;
        let kept = [x.kept(), y.kept(), self.bias.as_ref().and_then(View::kept)];
        step.keep(kept.into_iter().chain(self.slices.iter().map(Matrix::kept)));
        let queue = step.queue();
        let (x, _x_guard) = x.on(queue);
        raw::FusedLinear::check_x(x)?;
        let (y, _y_guard) = y.on(queue);
        // The raw layer has the addresses of W and the bias.
        let _w_guards: [_; MAX_SLICES] = std::array::from_fn(|slice| self.slices.get(slice).map(|w| w.on(queue)));
        let _bias_guard = self.bias.as_ref().map(|bias| bias.on(queue));
        let (x, y) = (x as *const c_void, y as *mut c_void);
        let args = ffi::aril_forward_args { x, y, accumulates: accumulates.into(), ..args };
        // SAFETY: every operand was found large enough and in the queue's context; the step's table, routing and workspace, and
        // buffers, are of the queue, and guards order the others. W and the bias are borrowed, so that nobody writes them, and were
        // written before the layer was made. What a graph replays is kept.
        unsafe { self.raw.launch(&args, queue.raw()) }
    }
}

/// W and the bias are fetched before the kernels enqueued earlier are waited for, so that these may not be the ones that write them.
#[expect(clippy::disallowed_methods, reason = "a layer is made once, and says that it waits")]
fn wait_for(queue: &Queue) -> Result<(), LaunchError> {
    Ok(queue.stream().synchronize()?)
}
