//! The experts of the base model on the GPU: the router's choice, and one launch for the products of all experts. The host does not
//! know the number of rows of an expert.

use std::{ops::Range, result, sync::Arc};

use aril::{DType, Element, cuda};
use cudarc::driver::{CudaFunction, CudaModule, DeviceRepr, DriverError};

use qwen3_kernels::grouped_gemm::{SIMPLE, TENSOR, Tile, VECTOR};

use super::{Cuda, Launch, Matrix, launch, launch_blocks, load_with_shared};
use crate::{
    device::Device as _,
    error::Result,
    experts::{ExpertWeights, ExpertsShape, GroupedGemm},
};

/// A grouped GEMM of `experts.cuh`.
pub(super) struct Tiled {
    pub(super) function: CudaFunction,
    pub(super) tile: Tile,
}

/// The grouped GEMMs of an element type for weights of the same type.
pub(super) struct GroupedGemms {
    /// Of any sizes.
    any: Tiled,
    /// For 16 bits and rows of whole vectors, by the rows of a tile.
    tensor: Vec<Tiled>,
}

impl GroupedGemms {
    pub(super) fn load(dtype: DType, module: &Arc<CudaModule>) -> result::Result<Self, DriverError> {
        let tiles = if dtype == DType::F32 { &[][..] } else { &TENSOR };
        let tensor = tiles.iter().map(|&tile| {
            let name = format!("grouped_gemm_{}_{dtype}", tile.rows);
            Ok(Tiled { function: load_with_shared(module, &name, tile.shared_bytes)?, tile })
        });
        let any = module.load_function(&format!("grouped_gemm_{dtype}"))?;
        Ok(Self {
            any: Tiled { function: any, tile: SIMPLE },
            tensor: tensor.collect::<result::Result<_, DriverError>>()?,
        })
    }

    /// The kernel for rows of `cols` elements: the one with the fewest rows of a tile that has room for the routes of an expert, if
    /// those to all ranks are spread evenly over `experts`. Those of `tensor` have the same bits.
    fn get(&self, cols: usize, routes: usize, experts: usize) -> &Tiled {
        let fits = |tiled: &&Tiled| routes <= tiled.tile.rows * experts;
        let tensor = self.tensor.iter().find(fits).or(self.tensor.last());
        tensor.filter(|_| cols.is_multiple_of(VECTOR)).unwrap_or(&self.any)
    }
}

/// The experts that each token chose, and the routes to those of this rank, sorted by expert.
pub(crate) struct Routes {
    /// The experts of all ranks.
    experts: usize,
    /// Those on this rank.
    held: Range<usize>,
    /// `[tokens, top_k]`: the expert's place among those of this rank, -1 if it is on another.
    ids: Matrix<i32>,
    /// `[tokens, top_k]`
    pub(super) weights: Matrix<f32>,
    /// `[tokens, top_k]`, -1 for routes to other ranks.
    pub(super) row_of_route: Matrix<i32>,
    /// The token of each row, -1 for the rows that belong to no route.
    pub(super) tokens: Matrix<i32>,
    /// The first row of each expert, and the end of the last one's.
    bounds: Matrix<i32>,
}

impl Routes {
    /// Buffers for the choices of `tokens` tokens.
    pub(super) fn new<T: Element + DeviceRepr>(
        device: &Cuda<T>,
        tokens: usize,
        (experts, held): (usize, Range<usize>),
        top_k: usize,
    ) -> Result<Self> {
        Ok(Self {
            experts,
            ids: device.alloc(tokens, top_k)?,
            weights: device.alloc(tokens, top_k)?,
            row_of_route: device.alloc(tokens, top_k)?,
            tokens: device.alloc(tokens * top_k, 1)?,
            bounds: device.alloc(held.len() + 1, 1)?,
            held,
        })
    }

    pub(super) fn choose<T: Element + DeviceRepr>(
        &mut self,
        device: &Cuda<T>,
        scores: &Matrix<T>,
        normalized: bool,
    ) -> Result<()> {
        let Self { experts, held, ids, weights, row_of_route, tokens, bounds } = self;
        let (top_k, normalized) = (ids.cols, i32::from(normalized));
        let (first_held, num_held) = (held.start, held.len());
        let mut kernel = device.kernel(&device.functions.choose_experts);
        kernel.arg(&scores.address).arg(&ids.address).arg(&weights.address);
        kernel.arg(&*experts).arg(&first_held).arg(&num_held).arg(&top_k).arg(&normalized);
        launch(kernel, scores.rows, 1)?;

        let mut kernel = device.kernel(&device.functions.sort_routes);
        kernel.arg(&ids.address).arg(&row_of_route.address).arg(&tokens.address).arg(&bounds.address);
        kernel.arg(&tokens.rows).arg(&num_held).arg(&top_k);
        launch(kernel, num_held + 1, 1)
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
        let tiled = device.functions.grouped_gemm.get(x.cols, x.rows, routes.experts);
        let mut kernel = device.kernel(&tiled.function);
        kernel.arg(&x.address).arg(&self.weights.address);
        multiply(tiled, kernel, self.shape, routes, y)
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
        let tiled = &device.functions.grouped_gemm_int4;
        let mut kernel = device.kernel(&tiled.function);
        kernel.arg(&x.address).arg(&self.words.address).arg(&self.scales.address).arg(&self.group);
        multiply(tiled, kernel, self.shape, routes, &mut y)?;
        Ok(y)
    }
}

/// Enqueues a grouped GEMM whose factors are already arguments.
fn multiply<T: Element + DeviceRepr>(
    tiled: &Tiled,
    kernel: Launch<'_>,
    ExpertsShape { experts, out_features, in_features }: ExpertsShape,
    routes: &Routes,
    y: &mut Matrix<T>,
) -> Result<()> {
    let Tile { threads, shared_bytes, .. } = tiled.tile;
    let grid = tiled.tile.grid(y.rows, experts, out_features);
    let mut kernel = kernel;
    kernel.arg(&routes.bounds.address).arg(&y.address).arg(&experts).arg(&out_features).arg(&in_features);
    launch_blocks(kernel, grid, threads, shared_bytes)
}
