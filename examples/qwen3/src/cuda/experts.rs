//! The experts of the base model on the GPU: the router's choice, and one launch for the products of all experts. The
//! host does not know the number of rows of an expert.

use std::{cell::Cell, ops::Range, result, sync::Arc};

use aril::{DType, Element, cuda};
use cudarc::driver::{CudaFunction, CudaModule, DeviceRepr, DriverError};

use crate::kernels::{
    grouped_gemm::{ACTIVATED, SIMPLE, TENSOR, Tile, VECTOR, tensor_for},
    route,
};

use super::{
    Cuda, Matrix,
    functions::load_with_shared,
    launch::{Launch, launch, launch_blocks},
};
use crate::{
    device::Device as _,
    error::Result,
    experts::{ExpertWeights, ExpertsShape, GroupedGemm, Integers, Packing},
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
    /// Those of `TENSOR`: for 16 bits and rows of whole vectors.
    pub(super) tensor: Vec<Tiled>,
    /// The first ones, with the activation.
    pub(super) activated: Vec<Tiled>,
}

impl GroupedGemms {
    pub(super) fn load(dtype: DType, module: &Arc<CudaModule>) -> result::Result<Self, DriverError> {
        let tiles = if dtype == DType::F32 { &[][..] } else { &TENSOR };
        let load = |name: &str, tiles: &[Tile]| {
            let tiled = tiles.iter().map(|&tile| {
                let name = format!("{name}_{}x{}_{dtype}", tile.rows, tile.outs);
                Ok(Tiled { function: load_with_shared(module, &name, tile.shared_bytes)?, tile })
            });
            tiled.collect::<result::Result<_, DriverError>>()
        };
        let any = module.load_function(&format!("grouped_gemm_{dtype}"))?;
        Ok(Self {
            any: Tiled { function: any, tile: SIMPLE },
            tensor: load("grouped_gemm", tiles)?,
            activated: load("grouped_gemm_silu", &tiles[..ACTIVATED.min(tiles.len())])?,
        })
    }
}

/// The experts that each token chose, and the routes to those of this rank, sorted by expert.
#[derive(Debug)]
pub struct Routes {
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
    /// Whether kernels that start early from now on find the bounds written.
    are_bounds_old: Cell<bool>,
    /// Whether the kernel behind the next product may start before the activation in front of it has ended, and whether
    /// the last product let it.
    pub(super) may_start_early: Cell<bool>,
    pub(super) started_early: Cell<bool>,
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
            are_bounds_old: Cell::new(false),
            may_start_early: Cell::new(false),
            started_early: Cell::new(false),
            held,
        })
    }

    /// Chooses by the router's scores, which are added to what `scores` holds if these are deltas.
    pub(super) fn choose<T: Element + DeviceRepr>(
        &mut self,
        device: &Cuda<T>,
        (x, router): (&Matrix<T>, &Matrix<T>),
        (scores, has_deltas): (&mut Matrix<T>, bool),
        normalized: bool,
    ) -> Result<()> {
        let Self { experts, held, ids, weights, row_of_route, tokens, bounds, are_bounds_old, .. } = self;
        are_bounds_old.set(false);
        let (top_k, normalized, adds) = (ids.cols, i32::from(normalized), i32::from(has_deltas));
        let (first_held, num_held) = (held.start, held.len());
        if let Some(function) = &device.functions.route_few
            && route::fits(x.rows, *experts, top_k, x.cols)
        {
            let arrivals = device.route_arrivals.device_ptr();
            let mut kernel = device.early(function);
            kernel.arg(&x.address).arg(&router.address).arg(&scores.address).arg(&ids.address).arg(&weights.address);
            kernel.arg(&row_of_route.address).arg(&tokens.address).arg(&bounds.address).arg(&arrivals);
            kernel
                .arg(&x.cols)
                .arg(&x.rows)
                .arg(&*experts)
                .arg(&first_held)
                .arg(&num_held)
                .arg(&top_k)
                .arg(&normalized)
                .arg(&adds);
            return launch_blocks(kernel, (route::blocks(*experts), 1), route::THREADS, 0);
        }
        let beta = if has_deltas { 1.0 } else { 0.0 };
        device.gemm.run(device.stream.get(), x, router, scores, beta)?;
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
#[derive(Debug)]
pub struct Grouped<'a, 's> {
    pub(super) routes: &'a Routes,
    pub(super) grouped: cuda::GroupedRoutes<'a, 's>,
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
        ExpertWeights::Packed(packed) => Box::new(Packed {
            shape,
            packing: packed.packing,
            words: device.upload(rows, packed.words.len() / rows, &packed.words)?,
            scales: device.upload(rows, packed.scales.len() / rows, &packed.scales)?,
        }),
    })
}

struct Plain<T: 'static> {
    shape: ExpertsShape,
    /// `[experts * out, in]`
    weights: Matrix<T>,
}

/// What the rows of a factor belong to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum RowsOf {
    Tokens,
    Routes,
}

impl<T: Element + DeviceRepr> Plain<T> {
    /// Products of the rows of tokens, of so many columns, by one of these kernels, if there is one for these routes.
    fn run_by(
        &self,
        device: &Cuda<T>,
        kernels: &[Tiled],
        x: &Matrix<T>,
        routes: &Routes,
        cols: usize,
    ) -> Result<Option<Matrix<T>>> {
        let Some(tiled) = self.kernel(kernels, routes) else { return Ok(None) };
        let mut y = device.alloc(routes.tokens.rows, cols)?;
        self.multiply(device, tiled, (x, RowsOf::Tokens), routes, &mut y)?;
        Ok(Some(y))
    }

    /// The kernel for these routes, if it is among these.
    fn kernel<'a>(&self, tiled: &'a [Tiled], routes: &Routes) -> Option<&'a Tiled> {
        let place = tensor_for(routes.tokens.rows, routes.experts);
        tiled.get(place).filter(|_| self.shape.in_features.is_multiple_of(VECTOR))
    }

    /// Enqueues a kernel of `TENSOR`.
    fn multiply(
        &self,
        device: &Cuda<T>,
        Tiled { function, tile }: &Tiled,
        (x, rows_of): (&Matrix<T>, RowsOf),
        routes: &Routes,
        y: &mut Matrix<T>,
    ) -> Result<()> {
        let ExpertsShape { experts, out_features, in_features } = self.shape;
        let tokens = if rows_of == RowsOf::Tokens { routes.tokens.address } else { 0 };
        // The first of these kernels waits for the bounds before it lets the next kernel start.
        let starts_early = routes.may_start_early.replace(false) && routes.are_bounds_old.get();
        routes.started_early.set(starts_early);
        let bounds_are_old = i32::from(routes.are_bounds_old.replace(true)) + i32::from(starts_early);
        let mut kernel = device.early(function);
        kernel.arg(&x.address).arg(&tokens).arg(&self.weights.address).arg(&routes.bounds.address).arg(&y.address);
        kernel.arg(&experts).arg(&out_features).arg(&in_features).arg(&bounds_are_old);
        launch_blocks(kernel, tile.grid(y.rows, experts, out_features), tile.threads, tile.shared_bytes)
    }
}

struct Packed {
    shape: ExpertsShape,
    packing: Packing,
    words: Matrix<u32>,
    scales: Matrix<f32>,
}

impl<T: Element + DeviceRepr> GroupedGemm<Cuda<T>> for Plain<T> {
    fn run(&self, device: &Cuda<T>, x: &Matrix<T>, routes: &Routes) -> Result<Matrix<T>> {
        let mut y = device.alloc(x.rows, self.shape.out_features)?;
        if let Some(tiled) = self.kernel(&device.functions.grouped_gemm.tensor, routes) {
            self.multiply(device, tiled, (x, RowsOf::Routes), routes, &mut y)?;
        } else {
            let tiled = &device.functions.grouped_gemm.any;
            let mut kernel = device.kernel(&tiled.function);
            kernel.arg(&x.address).arg(&self.weights.address);
            multiply(tiled, kernel, self.shape, routes, &mut y)?;
        }
        Ok(y)
    }

    fn run_on_tokens(&self, device: &Cuda<T>, x: &Matrix<T>, routes: &Routes) -> Result<Matrix<T>> {
        let kernels = &device.functions.grouped_gemm.tensor;
        match self.run_by(device, kernels, x, routes, self.shape.out_features)? {
            Some(y) => Ok(y),
            None => self.run(device, &device.rows_of_routes(x, routes)?, routes),
        }
    }

    fn run_activated(&self, device: &Cuda<T>, x: &Matrix<T>, routes: &Routes) -> Result<Option<Matrix<T>>> {
        self.run_by(device, &device.functions.grouped_gemm.activated, x, routes, self.shape.out_features / 2)
    }
}

impl<T: Element + DeviceRepr> GroupedGemm<Cuda<T>> for Packed {
    fn run(&self, device: &Cuda<T>, x: &Matrix<T>, routes: &Routes) -> Result<Matrix<T>> {
        let mut y = device.alloc(x.rows, self.shape.out_features)?;
        let Packing { integers, group } = self.packing;
        let tiled = match integers {
            Integers::Int4 => &device.functions.grouped_gemm_int4,
            Integers::Int8 => &device.functions.grouped_gemm_int8,
        };
        let mut kernel = device.kernel(&tiled.function);
        kernel.arg(&x.address).arg(&self.words.address).arg(&self.scales.address).arg(&group);
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
