//! Programs that the types of this module reject at compile time, each next to one that compiles.

/// `x` and `y` have different types, so they cannot be swapped.
///
/// ```no_run
/// # use aril::cuda::*;
/// # use cudarc::driver::CudaSlice;
/// # fn run(
/// #     layer: &LoraLinear, step: &mut Step<'_>, x: &CudaSlice<f32>, y: &mut CudaSlice<f32>,
/// # ) -> Result<(), LaunchError> {
/// layer.add_delta(step, Matrix::new(x, 1, 8)?, MatrixMut::new(y, 1, 8)?)
/// # }
/// ```
///
/// ```compile_fail,E0308
/// # use aril::cuda::*;
/// # use cudarc::driver::CudaSlice;
/// # fn run(
/// #     layer: &LoraLinear, step: &mut Step<'_>, x: &CudaSlice<f32>, y: &mut CudaSlice<f32>,
/// # ) -> Result<(), LaunchError> {
/// layer.add_delta(step, MatrixMut::new(y, 1, 8)?, Matrix::new(x, 1, 8)?)
/// # }
/// ```
struct Swapped;

/// All operands of an operation have the same element type.
///
/// ```compile_fail,E0277
/// # use aril::cuda::*;
/// # use cudarc::driver::CudaSlice;
/// # fn run(
/// #     layer: &LoraLinear, step: &mut Step<'_>, x: &CudaSlice<half::bf16>, y: &mut CudaSlice<f32>,
/// # ) -> Result<(), LaunchError> {
/// let x: Matrix<'_, half::bf16> = Matrix::new(x, 1, 8)?;
/// let y: MatrixMut<'_, f32> = MatrixMut::new(y, 1, 8)?;
/// layer.add_delta(step, x, y)
/// # }
/// ```
struct OtherType;

/// A batch cannot outlive the next update of its routing.
///
/// ```no_run
/// # use aril::{cuda::*, routing::Batch};
/// # fn step(routing: &mut Routing, first: &Batch<'_>, second: &Batch<'_>) -> Result<(), LaunchError> {
/// let stale = routing.update(first)?;
/// println!("{}", stale.num_tokens());
/// let live = routing.update(second)?;
/// println!("{}", live.num_tokens());
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0499
/// # use aril::{cuda::*, routing::Batch};
/// # fn step(routing: &mut Routing, first: &Batch<'_>, second: &Batch<'_>) -> Result<(), LaunchError> {
/// let stale = routing.update(first)?;
/// let live = routing.update(second)?;
/// println!("{}", stale.num_tokens());
/// println!("{}", live.num_tokens());
/// # Ok(())
/// # }
/// ```
struct Stale;

/// Two steps cannot use a workspace at once.
///
/// ```no_run
/// # use aril::cuda::*;
/// # fn steps(weights: &WeightTable, batch: &RoutedBatch<'_>, workspace: &mut Workspace) -> Result<(), LaunchError> {
/// let first = weights.step(batch, workspace)?;
/// println!("{}", first.num_tokens());
/// let second = weights.step(batch, workspace)?;
/// println!("{}", second.num_tokens());
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0499
/// # use aril::cuda::*;
/// # fn steps(weights: &WeightTable, batch: &RoutedBatch<'_>, workspace: &mut Workspace) -> Result<(), LaunchError> {
/// let first = weights.step(batch, workspace)?;
/// let second = weights.step(batch, workspace)?;
/// println!("{} {}", first.num_tokens(), second.num_tokens());
/// # Ok(())
/// # }
/// ```
struct SharedWorkspace;

/// A routing cannot be updated between the start of a step and a replay in it.
///
/// ```no_run
/// # use aril::{cuda::*, routing::Batch};
/// # fn replay(
/// #     graph: &mut Graph, weights: &WeightTable, routing: &mut Routing, workspace: &mut Workspace, next: &Batch<'_>,
/// # ) -> Result<(), LaunchError> {
/// let batch = routing.update(&Batch::new(&[]))?;
/// let mut step = weights.step(&batch, workspace)?;
/// graph.replay(&mut step)?;
/// routing.update(next)?;
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0499
/// # use aril::{cuda::*, routing::Batch};
/// # fn replay(
/// #     graph: &mut Graph, weights: &WeightTable, routing: &mut Routing, workspace: &mut Workspace, next: &Batch<'_>,
/// # ) -> Result<(), LaunchError> {
/// let batch = routing.update(&Batch::new(&[]))?;
/// let mut step = weights.step(&batch, workspace)?;
/// routing.update(next)?;
/// graph.replay(&mut step)?;
/// # Ok(())
/// # }
/// ```
struct UpdatedUnderReplay;

/// Routes of a step cannot outlive the next update of its routing.
///
/// ```no_run
/// # use aril::{cuda::*, routing::Batch};
/// # fn run(
/// #     weights: &WeightTable, routing: &mut Routing, grouping: &mut Grouping, workspace: &mut Workspace,
/// #     ids: &Buffer<i32>,
/// # ) -> Result<(), LaunchError> {
/// let batch = routing.update(&Batch::new(&[]))?;
/// let mut step = weights.step(&batch, workspace)?;
/// let routes = grouping.update(&mut step, TopK::new(ids, 8)?)?;
/// println!("{}", routes.num_routes());
/// routing.update(&Batch::new(&[]))?;
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0499
/// # use aril::{cuda::*, routing::Batch};
/// # fn run(
/// #     weights: &WeightTable, routing: &mut Routing, grouping: &mut Grouping, workspace: &mut Workspace,
/// #     ids: &Buffer<i32>,
/// # ) -> Result<(), LaunchError> {
/// let batch = routing.update(&Batch::new(&[]))?;
/// let mut step = weights.step(&batch, workspace)?;
/// let routes = grouping.update(&mut step, TopK::new(ids, 8)?)?;
/// drop(step);
/// routing.update(&Batch::new(&[]))?;
/// println!("{}", routes.num_routes());
/// # Ok(())
/// # }
/// ```
struct StaleRoutes;

/// Nothing comes between a shrink and the operation that expands it, and no operation expands another step's.
///
/// ```no_run
/// # use aril::cuda::*;
/// # fn run(
/// #     layers: &[LoraLinear; 2], step: &mut Step<'_>, x: &Buffer<f32>, [first, second]: [&mut Buffer<f32>; 2],
/// # ) -> Result<(), LaunchError> {
/// layers[0].shrink(step, Matrix::<f32>::new(x, 1, 8)?)?.expand(MatrixMut::<f32>::new(first, 1, 8)?)?;
/// layers[1].shrink(step, Matrix::<f32>::new(x, 1, 8)?)?.expand(MatrixMut::<f32>::new(second, 1, 8)?)
/// # }
/// ```
///
/// ```compile_fail,E0499
/// # use aril::cuda::*;
/// # fn run(
/// #     layers: &[LoraLinear; 2], step: &mut Step<'_>, x: &Buffer<f32>, [first, second]: [&mut Buffer<f32>; 2],
/// # ) -> Result<(), LaunchError> {
/// let shrunk = layers[0].shrink(step, Matrix::<f32>::new(x, 1, 8)?)?;
/// layers[1].shrink(step, Matrix::<f32>::new(x, 1, 8)?)?.expand(MatrixMut::<f32>::new(second, 1, 8)?)?;
/// shrunk.expand(MatrixMut::<f32>::new(first, 1, 8)?)
/// # }
/// ```
///
/// ```compile_fail,E0382
/// # use aril::cuda::*;
/// # fn run(
/// #     layers: &[LoraLinear; 2], step: &mut Step<'_>, x: &Buffer<f32>, [first, second]: [&mut Buffer<f32>; 2],
/// # ) -> Result<(), LaunchError> {
/// let shrunk = layers[0].shrink(step, Matrix::<f32>::new(x, 1, 8)?)?;
/// shrunk.expand(MatrixMut::<f32>::new(first, 1, 8)?)?;
/// shrunk.expand(MatrixMut::<f32>::new(second, 1, 8)?)
/// # }
/// ```
struct ExpandedAfterOthers;

/// While a step of a pool lives, the pool can neither end it nor lease.
///
/// ```no_run
/// # use aril::{cuda::*, pool::{PoolError, StreamId}};
/// # fn step<'a>(
/// #     pool: &'a mut AdapterPool, batch: &RoutedBatch<'a>, workspace: &'a mut Workspace,
/// # ) -> Result<(), PoolError> {
/// let step = pool.step(StreamId::FIRST, batch, workspace)?;
/// println!("{}", step.num_tokens());
/// pool.end_step(StreamId::FIRST)
/// # }
/// ```
///
/// ```compile_fail,E0502
/// # use aril::{cuda::*, pool::{PoolError, StreamId}};
/// # fn step<'a>(
/// #     pool: &'a mut AdapterPool, batch: &RoutedBatch<'a>, workspace: &'a mut Workspace,
/// # ) -> Result<(), PoolError> {
/// let step = pool.step(StreamId::FIRST, batch, workspace)?;
/// pool.end_step(StreamId::FIRST)?;
/// println!("{}", step.num_tokens());
/// # Ok(())
/// # }
/// ```
struct EndedUnderStep;

/// A captured step cannot outlive its capture.
///
/// ```no_run
/// # use aril::cuda::*;
/// # fn capture(weights: &WeightTable, routing: &Routing, workspace: &mut Workspace) -> Result<Graph, LaunchError> {
/// let mut tokens = 0;
/// weights.capture(routing, 8, workspace, |step| {
///     tokens = step.num_tokens();
///     Ok(())
/// })
/// # }
/// ```
///
/// ```compile_fail,E0521
/// # use aril::cuda::*;
/// # fn capture(weights: &WeightTable, routing: &Routing, workspace: &mut Workspace) -> Result<Graph, LaunchError> {
/// let mut kept = None;
/// weights.capture(routing, 8, workspace, |step| {
///     kept = Some(step);
///     Ok(())
/// })
/// # }
/// ```
struct KeptStep;

/// The steps of two captures cannot be exchanged.
///
/// ```no_run
/// # use aril::cuda::*;
/// # fn capture(
/// #     weights: &WeightTable, routing: &Routing, workspaces: [&mut Workspace; 2],
/// # ) -> Result<Graph, LaunchError> {
/// let [first, second] = workspaces;
/// weights.capture(routing, 8, first, |step| {
///     weights.capture::<LaunchError>(routing, 8, second, |other| {
///         println!("{} {}", step.num_tokens(), other.num_tokens());
///         Ok(())
///     })?;
///     Ok(())
/// })
/// # }
/// ```
///
/// ```compile_fail
/// # use aril::cuda::*;
/// # fn capture(
/// #     weights: &WeightTable, routing: &Routing, workspaces: [&mut Workspace; 2],
/// # ) -> Result<Graph, LaunchError> {
/// let [first, second] = workspaces;
/// weights.capture(routing, 8, first, |step| {
///     weights.capture::<LaunchError>(routing, 8, second, |other| {
///         std::mem::swap(step, other);
///         Ok(())
///     })?;
///     Ok(())
/// })
/// # }
/// ```
struct ExchangedSteps;

/// Launching on raw addresses is unsafe.
///
/// ```no_run
/// # use aril::cuda::{LaunchError, LoraLinear, raw::*};
/// # fn run(layer: &LoraLinear, step: &Step, x: MatrixRef, y: MatrixMut) -> Result<(), LaunchError> {
/// unsafe { layer.add_delta_raw(step, x, y) }
/// # }
/// ```
///
/// ```compile_fail,E0133
/// # use aril::cuda::{LaunchError, LoraLinear, raw::*};
/// # fn run(layer: &LoraLinear, step: &Step, x: MatrixRef, y: MatrixMut) -> Result<(), LaunchError> {
/// layer.add_delta_raw(step, x, y)
/// # }
/// ```
struct RawWithoutUnsafe;

/// An adapter can be committed only once.
///
/// ```no_run
/// # use aril::{cuda::*, error::LoadError};
/// # fn commit(weights: &WeightTable, filled: Filled) -> Result<(), LoadError> {
/// weights.commit(0, filled)?;
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0382
/// # use aril::{cuda::*, error::LoadError};
/// # fn commit(weights: &WeightTable, filled: Filled) -> Result<(), LoadError> {
/// weights.commit(0, filled)?;
/// weights.commit(1, filled)?;
/// # Ok(())
/// # }
/// ```
struct CommittedTwice;

/// A fused linear borrows W: nobody writes or frees it meanwhile.
///
/// ```no_run
/// # use aril::{cuda::*, model::LinearId};
/// # fn run(weights: &WeightTable, id: LinearId, mut w: Buffer<half::bf16>) -> Result<(), LaunchError> {
/// let layer = FusedLinear::new(weights, id, [Matrix::new(&w, 8, 8)?])?;
/// println!("{}", layer.plan());
/// w.write(&[half::bf16::ONE; 64])?;
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0502
/// # use aril::{cuda::*, model::LinearId};
/// # fn run(weights: &WeightTable, id: LinearId, mut w: Buffer<half::bf16>) -> Result<(), LaunchError> {
/// let layer = FusedLinear::new(weights, id, [Matrix::new(&w, 8, 8)?])?;
/// w.write(&[half::bf16::ONE; 64])?;
/// println!("{}", layer.plan());
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0505
/// # use aril::{cuda::*, model::LinearId};
/// # fn run(weights: &WeightTable, id: LinearId, w: Buffer<half::bf16>) -> Result<(), LaunchError> {
/// let layer = FusedLinear::new(weights, id, [Matrix::new(&w, 8, 8)?])?;
/// drop(w);
/// println!("{}", layer.plan());
/// # Ok(())
/// # }
/// ```
struct BorrowedW;
