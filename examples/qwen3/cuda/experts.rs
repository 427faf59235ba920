//! The experts of the base model on the GPU: the router's choice, and one launch for the products of all experts. The host does not
//! know the number of rows of an expert.

use aril::{Element, cuda};
use cudarc::driver::{DeviceRepr, LaunchArgs, PushKernelArg as _};

use super::{Cuda, Matrix, launch};
use crate::{
    device::Device as _,
    error::Result,
    experts::{ExpertWeights, ExpertsShape, GroupedGemm},
};

/// Rows and outputs of a tile: `kTileRows` and `kTileOuts` of `experts.cuh`.
const TILE_ROWS: usize = 32;
const TILE_OUTS: usize = 64;

/// The experts that each token chose, and the routes sorted by expert.
pub(crate) struct Routes {
    /// `[tokens, top_k]`, -1 if a score is NaN.
    ids: Matrix<i32>,
    /// `[tokens, top_k]`
    pub(super) weights: Matrix<f32>,
    /// `[tokens, top_k]`
    pub(super) row_of_route: Matrix<i32>,
    /// The token of each row.
    pub(super) tokens: Matrix<i32>,
    /// The first row of each expert, and the end of the last one's.
    bounds: Matrix<i32>,
}

impl Routes {
    /// Buffers for the choices of `tokens` tokens.
    pub(super) fn new<T: Element + DeviceRepr>(
        device: &Cuda<T>,
        tokens: usize,
        experts: usize,
        top_k: usize,
    ) -> Result<Self> {
        Ok(Self {
            ids: device.alloc(tokens, top_k)?,
            weights: device.alloc(tokens, top_k)?,
            row_of_route: device.alloc(tokens, top_k)?,
            tokens: device.alloc(tokens * top_k, 1)?,
            bounds: device.alloc(experts + 1, 1)?,
        })
    }

    pub(super) fn choose<T: Element + DeviceRepr>(
        &mut self,
        device: &Cuda<T>,
        scores: &Matrix<T>,
        normalized: bool,
    ) -> Result<()> {
        let Self { ids, weights, row_of_route, tokens, bounds } = self;
        let (experts, top_k, normalized) = (scores.cols, ids.cols, i32::from(normalized));
        let mut kernel = device.kernel(&device.functions.choose_experts);
        kernel.arg(&scores.address).arg(&ids.address).arg(&weights.address);
        kernel.arg(&experts).arg(&top_k).arg(&normalized);
        launch(kernel, scores.rows, 1)?;

        let mut kernel = device.kernel(&device.functions.sort_routes);
        kernel.arg(&ids.address).arg(&row_of_route.address).arg(&tokens.address).arg(&bounds.address);
        kernel.arg(&tokens.rows).arg(&experts).arg(&top_k);
        launch(kernel, experts + 1, 1)
    }

    /// The routes as the library's operand.
    pub(super) fn top_k(&self) -> Result<cuda::TopK<'_>> {
        let top_k = cuda::TopK::new(self.ids.view(), self.ids.cols)?.with_weights(self.weights.view())?;
        Ok(top_k.with_rows(self.row_of_route.view())?)
    }
}

/// The routes, and the library's grouping of them.
pub(crate) struct Grouped<'a> {
    pub(super) routes: &'a Routes,
    pub(super) grouped: cuda::GroupedRoutes<'a>,
}

pub(super) fn new<T: Element + DeviceRepr>(
    device: &Cuda<T>,
    shape: ExpertsShape,
    weights: ExpertWeights<'_, T>,
) -> Result<Box<dyn GroupedGemm<Cuda<T>>>> {
    let rows = shape.experts * shape.out_features;
    Ok(match weights {
        ExpertWeights::Plain(parts) => {
            Box::new(Plain { shape, weights: device.weight(rows, shape.in_features, &parts)? })
        }
        ExpertWeights::Int4(int4) => Box::new(Int4 {
            shape,
            group: int4.group,
            words: device.upload(rows, int4.words.len() / rows, &int4.words)?,
            scales: device.upload(rows, int4.scales.len() / rows, &int4.scales)?,
        }),
    })
}

pub(super) struct Plain<T: 'static> {
    pub(super) shape: ExpertsShape,
    /// `[experts * out, in]`
    pub(super) weights: Matrix<T>,
}

impl<T: Element + DeviceRepr> Plain<T> {
    pub(super) fn run_into(&self, device: &Cuda<T>, x: &Matrix<T>, routes: &Routes, y: &mut Matrix<T>) -> Result<()> {
        let mut kernel = device.kernel(&device.functions.grouped_gemm);
        kernel.arg(&x.address).arg(&self.weights.address);
        multiply(kernel, self.shape, routes, y)
    }
}

struct Int4 {
    shape: ExpertsShape,
    group: usize,
    words: Matrix<u32>,
    scales: Matrix<f32>,
}

impl<T: Element + DeviceRepr> GroupedGemm<Cuda<T>> for Plain<T> {
    fn run(&self, device: &Cuda<T>, x: &Matrix<T>, routes: &Routes) -> Result<Matrix<T>> {
        let mut y = device.alloc(x.rows, self.shape.out_features)?;
        self.run_into(device, x, routes, &mut y)?;
        Ok(y)
    }
}

impl<T: Element + DeviceRepr> GroupedGemm<Cuda<T>> for Int4 {
    fn run(&self, device: &Cuda<T>, x: &Matrix<T>, routes: &Routes) -> Result<Matrix<T>> {
        let mut y = device.alloc(x.rows, self.shape.out_features)?;
        let mut kernel = device.kernel(&device.functions.grouped_gemm_int4);
        kernel.arg(&x.address).arg(&self.words.address).arg(&self.scales.address).arg(&self.group);
        multiply(kernel, self.shape, routes, &mut y)?;
        Ok(y)
    }
}

/// Enqueues a grouped GEMM whose factors are already arguments.
fn multiply<T: Element + DeviceRepr>(
    kernel: LaunchArgs<'_>,
    ExpertsShape { experts, out_features, in_features }: ExpertsShape,
    routes: &Routes,
    y: &mut Matrix<T>,
) -> Result<()> {
    // Only an expert's last tile may be partly filled.
    let tiles = y.rows / TILE_ROWS + y.rows.min(experts);
    let mut kernel = kernel;
    kernel.arg(&routes.bounds.address).arg(&y.address).arg(&experts).arg(&out_features).arg(&in_features);
    launch(kernel, tiles, out_features.div_ceil(TILE_OUTS))
}
