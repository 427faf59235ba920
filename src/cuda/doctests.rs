//! What the types of this module refuse. Each program that must not compile stands beside one that does.

/// `x` and `y` are of different types, so they cannot be swapped.
///
/// ```no_run
/// # use aril::cuda::*;
/// # use cudarc::driver::{CudaSlice, CudaStream};
/// # fn step(
/// #     layer: &LoraLinear<f32>, x: &CudaSlice<f32>, y: &mut CudaSlice<f32>, weights: &WeightTable<f32>,
/// #     batch: &RoutedBatch<'_>, workspace: &mut Workspace, stream: &CudaStream,
/// # ) -> Result<(), LaunchError> {
/// let x = Matrix::new(x.as_view(), 1, 8)?;
/// let y = MatrixMut::new(y.as_view_mut(), 1, 8)?;
/// layer.add_delta(x, y, weights, batch, workspace, stream)
/// # }
/// ```
///
/// ```compile_fail,E0308
/// # use aril::cuda::*;
/// # use cudarc::driver::{CudaSlice, CudaStream};
/// # fn step(
/// #     layer: &LoraLinear<f32>, x: &CudaSlice<f32>, y: &mut CudaSlice<f32>, weights: &WeightTable<f32>,
/// #     batch: &RoutedBatch<'_>, workspace: &mut Workspace, stream: &CudaStream,
/// # ) -> Result<(), LaunchError> {
/// let x = Matrix::new(x.as_view(), 1, 8)?;
/// let y = MatrixMut::new(y.as_view_mut(), 1, 8)?;
/// layer.add_delta(y, x, weights, batch, workspace, stream)
/// # }
/// ```
struct Swapped;

/// The element type is the layer's.
///
/// ```compile_fail,E0308
/// # use aril::cuda::*;
/// # use cudarc::driver::{CudaSlice, CudaStream};
/// # fn step(
/// #     layer: &LoraLinear<f32>, x: &CudaSlice<half::bf16>, y: &mut CudaSlice<f32>, weights: &WeightTable<f32>,
/// #     batch: &RoutedBatch<'_>, workspace: &mut Workspace, stream: &CudaStream,
/// # ) -> Result<(), LaunchError> {
/// let x = Matrix::new(x.as_view(), 1, 8)?;
/// let y = MatrixMut::new(y.as_view_mut(), 1, 8)?;
/// layer.add_delta(x, y, weights, batch, workspace, stream)
/// # }
/// ```
struct OtherType;

/// A batch is that of the routing's last update, or there is no batch.
///
/// ```no_run
/// # use aril::{cuda::*, routing::Batch};
/// # use cudarc::driver::CudaStream;
/// # fn step(routing: &mut Routing, first: &Batch<'_>, second: &Batch<'_>, stream: &CudaStream) -> Result<(), LaunchError> {
/// let stale = routing.update(first, stream)?;
/// println!("{}", stale.num_tokens());
/// let live = routing.update(second, stream)?;
/// println!("{}", live.num_tokens());
/// # Ok(())
/// # }
/// ```
///
/// ```compile_fail,E0499
/// # use aril::{cuda::*, routing::Batch};
/// # use cudarc::driver::CudaStream;
/// # fn step(routing: &mut Routing, first: &Batch<'_>, second: &Batch<'_>, stream: &CudaStream) -> Result<(), LaunchError> {
/// let stale = routing.update(first, stream)?;
/// let live = routing.update(second, stream)?;
/// println!("{}", stale.num_tokens());
/// println!("{}", live.num_tokens());
/// # Ok(())
/// # }
/// ```
struct Stale;

/// A launch on addresses is the caller's word that they are good.
///
/// ```no_run
/// # use aril::cuda::{LaunchError, raw::*};
/// # fn step(
/// #     layer: &LoraLinear, x: MatrixRef, y: MatrixMut, weights: LayerWeights, batch: RoutedBatch,
/// #     workspace: Workspace, stream: Stream,
/// # ) -> Result<(), LaunchError> {
/// unsafe { layer.add_delta(x, y, weights, batch, workspace, stream) }
/// # }
/// ```
///
/// ```compile_fail,E0133
/// # use aril::cuda::{LaunchError, raw::*};
/// # fn step(
/// #     layer: &LoraLinear, x: MatrixRef, y: MatrixMut, weights: LayerWeights, batch: RoutedBatch,
/// #     workspace: Workspace, stream: Stream,
/// # ) -> Result<(), LaunchError> {
/// layer.add_delta(x, y, weights, batch, workspace, stream)
/// # }
/// ```
struct RawWithoutUnsafe;

/// A table is changed by one thread at a time.
///
/// ```compile_fail,E0596
/// # use aril::{Slot, cuda::*, adapter::SlotImage};
/// # use cudarc::driver::CudaStream;
/// # fn swap(weights: &WeightTable<f32>, image: &SlotImage<'_>, stream: &CudaStream) -> Result<(), LaunchError> {
/// weights.load(Slot::new(0), image, stream)
/// # }
/// ```
struct SharedTable;
