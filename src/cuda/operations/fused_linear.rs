//! A linear layer with its base weight.

#![expect(unsafe_code, reason = "calls the raw API")]

use std::ffi::c_void;

use crate::{
    Element, IntoSlices, Slices,
    cuda::{
        LaunchError, Matrix, MatrixMut, Queue, Step, View, WeightTable,
        memory::Memory,
        raw,
        steps::{Checked, Moment, join},
    },
    model::{LinearId, MAX_SLICES},
    plan::ForwardPlan,
};

/// A linear layer with its base weight and its adapters in one launch, for decode: `y = x Wᵀ + bias + scaling · B (A
/// x)`. It supports up to [`MAX_FORWARD_TOKENS`](crate::plan::MAX_FORWARD_TOKENS) tokens in `bf16` and `f16`, from
/// compute capability 9.0 on.
///
/// It borrows W and the bias, and reads W in PyTorch's layout: row-major, with a row stride that is a multiple of 8
/// elements. In a captured step both must be [`Buffer`](crate::cuda::Buffer)s, which the graph keeps alive, and the
/// layer must be older than the capture. Each launch on cudarc slices costs the events that order them. A shared buffer
/// is not borrowed: see [`View`].
///
/// A token's result depends only on its own `x`, adapter and scale and on the layer. For batches of more than
/// [`plan().max_tokens()`](ForwardPlan::max_tokens) tokens, use a GEMM and [`LoraLinear`](super::LoraLinear). They sum
/// in another order and may differ in the last bits.
///
/// ```no_run
/// use aril::{cuda::{Buffer, FusedLinear, LaunchError, Matrix, MatrixMut, Step, WeightTable}, model::LinearId};
/// use half::bf16;
///
/// // q, k and v in one W, slice after slice.
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
    /// Behind the work that has written W and the bias.
    created: Moment,
}

impl<'a, T: Element> FusedLinear<'a, T> {
    /// Plans the layer `id` of the table's model, for the table's element type and capacity, with a base weight W
    /// `[out_features, in_features]` for each of its slices. Waits for work enqueued before, which may write W.
    ///
    /// # Errors
    /// [`LaunchError`] if the device is older than compute capability 9.0, the id belongs to another model, there is
    /// not one W per slice of the right shape, type and queue with rows aligned to 16 bytes, the kernels do not support
    /// the element type, a size or the capacity, or the stream is being captured.
    pub fn new(
        weights: &WeightTable,
        id: LinearId,
        slices: impl IntoIterator<Item = Matrix<'a, T>>,
    ) -> Result<Self, LaunchError> {
        let queue = weights.queue();
        queue.prepare()?;
        let slices: Vec<_> = slices.into_iter().collect();
        slices.iter().try_for_each(|w| w.view().check_queue("W", queue))?;
        let addressed = slices.iter().map(|w| Ok(w.at(w.view().on(queue)?.0)));
        let addressed = addressed.collect::<Result<Vec<_>, LaunchError>>()?;
        let (kernels, model) = (queue.kernels(), weights.model());
        let raw = raw::FusedLinear::new(kernels, model, id, weights.dtype(), weights.capacity(), &addressed)?;
        wait_for(queue)?;
        Ok(Self { raw, queue: queue.clone(), slices, bias: None, created: Moment::now() })
    }

    /// Adds `bias` `[out_features]` to every row. Waits for work enqueued before, which may write the bias.
    ///
    /// # Errors
    /// [`LaunchError`] if it has another length or queue, or the stream is being captured.
    pub fn with_bias(self, bias: impl Into<View<'a, T>>) -> Result<Self, LaunchError> {
        let (bias, queue) = (bias.into(), &self.queue);
        self.raw.check_bias(bias.len())?;
        bias.check_queue("bias", queue)?;
        queue.prepare()?;
        let address = (&bias).on(queue)?.0;
        wait_for(queue)?;
        Ok(Self { raw: self.raw.with_bias(address), bias: Some(bias), created: Moment::now(), ..self })
    }

    /// The launch configuration. It also gives the largest batch and the size of the workspace.
    pub fn plan(&self) -> &ForwardPlan {
        self.raw.plan()
    }

    #[doc = doc_of!(fused_linear_forward)]
    ///
    /// The rows of `x` are aligned to 16 bytes. In a captured step, rows beyond the last update have no adapter.
    /// Enqueues the work, and neither allocates nor waits.
    ///
    /// # Errors
    /// [`LaunchError`] if an operand does not match the layer and the step, or the step has more than
    /// [`plan().max_tokens()`](ForwardPlan::max_tokens) tokens. [`LaunchError::CreatedInCapture`]. Nothing was
    /// enqueued.
    pub fn forward<'y>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'y, T>>,
    ) -> Result<(), LaunchError>
    where
        T: 'y,
    {
        self.enqueue(false, step, x, y.into_slices())
    }

    /// Like [`forward`](Self::forward), but adds to `y`.
    ///
    /// # Errors
    /// As for `forward`.
    pub fn accumulate<'y>(
        &self,
        step: &mut Step<'_>,
        x: Matrix<'_, T>,
        y: impl IntoSlices<MatrixMut<'y, T>>,
    ) -> Result<(), LaunchError>
    where
        T: 'y,
    {
        self.enqueue(true, step, x, y.into_slices())
    }

    fn enqueue(
        &self,
        accumulates: bool,
        step: &mut Step<'_>,
        mut x: Matrix<'_, T>,
        mut y: Slices<MatrixMut<'_, T>>,
    ) -> Result<(), LaunchError> {
        step.check_created("the fused linear", self.created)?;
        let shapes = y.shapes();
        let mut args = self.raw.args(&step.raw(), x.shape(), &shapes)?;
        args.accumulates = accumulates.into();
        let mut slices: [_; MAX_SLICES] = std::array::from_fn(|slice| self.slices.get(slice).map(Matrix::view));
        let mut bias = self.bias.as_ref();
        let slices = slices.iter_mut().map(|w| w.as_mut().map(|w| ("W", w as &mut dyn Memory)));
        let bias = bias.as_mut().map(|bias| ("bias", bias as &mut dyn Memory));
        let operands = [x.operand()].into_iter().chain(y.operands());
        let operands: Checked<'_, '_, { 2 + 2 * MAX_SLICES }> =
            step.check(join(operands, [bias].into_iter().chain(slices)))?;
        // The raw layer has the addresses of W and the bias.
        operands.enqueue(|[x, rest @ ..], stream| {
            raw::FusedLinear::check_x(x)?;
            args.x = x as *const c_void;
            args.y = self.raw.places_at(std::array::from_fn(|slice| rest[slice]), &shapes);
            // SAFETY: the operands fit the plan (checked), and are as `Checked::enqueue` says. The kernel may read W
            // and the bias before the one in front of it ends, which does not write them: what wrote them has run
            // (`wait_for`), and nothing writes them while they are borrowed, except graphs that were captured before. A
            // graph ends before the next kernel starts.
            unsafe { self.raw.launch(&args, stream) }
        })
    }
}

/// Kernels fetch W and the bias before they wait for their predecessors, so no predecessor may write them.
#[expect(clippy::disallowed_methods, reason = "creating a layer waits, as documented")]
fn wait_for(queue: &Queue) -> Result<(), LaunchError> {
    Ok(queue.stream().synchronize()?)
}
