//! The operations of experts on the CPU.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::{Matrix, MatrixMut, Step, WeightTable, factors::Factors};
use crate::{
    Element,
    contract::{self, ExpertsForm, Shape},
    error::OperandError,
    model::{Activation, ExpertsId, ProjectionSite},
    plan::{Device, ExpertsPlan, PlanError},
    routing::TopK,
};

/// The LoRA operations of one layer's experts.
///
/// An engine runs gate-up, an activation, down and a combine for the experts that its router chose. Adapters can be
/// applied at any of these points:
///
/// | base operation | add after it | write before it | replace it |
/// |---|---|---|---|
/// | gate-up | [`add_gate_up_delta`](Self::add_gate_up_delta) | [`write_gate_up_delta`](Self::write_gate_up_delta) | |
/// | activation | | | [`activate`](Self::activate) |
/// | down | [`add_down_delta`](Self::add_down_delta) | [`write_down_delta`](Self::write_down_delta) | |
/// | combine | [`add_combined_delta`](Self::add_combined_delta) | | [`combine`](Self::combine) |
///
/// The rows of `[routes, ..]` matrices are those of [`TopK`]. The delta of a route is `scale · scaling · B (A x)`, with
/// the factors and scaling that the token's adapter has for the expert, and the batch's scale of the token. For routes
/// that are not local nothing is read, and only `write_gate_up_delta` and `write_down_delta` write.
///
/// With `inter` sharded by tensor parallelism, each rank computes its own gate-up features, and everything after the
/// activation is a partial sum for the engine's all-reduce. Combines of expert-parallel ranks add up likewise.
///
/// ```
/// use aril::{
///     DType, Slot,
///     adapter::{Adapter, Tensor},
///     cpu::{LoraExperts, Matrix, MatrixMut, WeightTable, Workspace},
///     model::{Activation, Experts, ModelSpec, TpRank},
///     plan::Capacity,
///     routing::{Batch, TopK},
/// };
///
/// // Two experts with intermediate size 2 and hidden size 1, and an adapter of rank 1 for the second expert's down.
/// let mut spec = ModelSpec::new();
/// let id = spec.experts(Experts::new("mlp.experts", 2, 1, 2).top_k(2))?;
/// let model = spec.shard(TpRank::SINGLE)?;
/// let tensor = |shape, values: &[f32]| Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec());
/// let config = r#"{"peft_type": "LORA", "r": 1, "lora_alpha": 3}"#;
/// let adapter = Adapter::from_tensors(config, [
///     ("mlp.experts.1.down_proj.lora_A.weight".to_owned(), tensor([1, 2], &[1.0, 10.0])?),
///     ("mlp.experts.1.down_proj.lora_B.weight".to_owned(), tensor([1, 1], &[2.0])?),
/// ])?;
/// let weights = WeightTable::new(&model, DType::F32, Capacity::tokens(2).slots(1).rank(8), 1 << 20)?;
/// let adapter = weights.load(0, &adapter.plan(&model, DType::F32)?)?;
///
/// // A token with the adapter and one without. Both chose both experts.
/// let slots = [adapter, Slot::BASE];
/// let (batch, ids, router) = (Batch::new(&slots), [0, 1, 1, 0], [0.5; 4]);
/// let top_k = TopK::new(&ids, 2)?.with_weights(&router)?;
/// let experts = LoraExperts::new(&weights, id)?;
/// let mut workspace = Workspace::default();
/// let mut step = weights.step(&batch, &mut workspace)?;
///
/// // Instead of the activation: silu(gate) · up of each route.
/// let (x, gate_up) = ([1.0_f32; 2], [100.0, 0.0, 0.01, 7.0].repeat(4));
/// let (x, gate_up) = (Matrix::new(&x, 2, 1)?, Matrix::new(&gate_up, 4, 4)?);
/// let mut inter = [0.0; 4 * 2];
/// experts.activate(&mut step, &top_k, x, gate_up, MatrixMut::new(&mut inter, 4, 2)?, Activation::Silu)?;
/// assert_eq!(inter, [1.0, 0.0].repeat(4)[..]);
///
/// // Instead of the combine: half of each route's row of the base model's down, and half of the second route's delta.
/// let down = [4.0, 8.0, 8.0, 4.0];
/// let (inter, down) = (Matrix::new(&inter, 4, 2)?, Matrix::new(&down, 4, 1)?);
/// let mut out = [0.0; 2];
/// experts.combine(&mut step, &top_k, inter, down, MatrixMut::new(&mut out, 2, 1)?)?;
/// assert_eq!(out, [6.0 + 0.5 * 3.0 * 2.0, 6.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[doc(alias = "FusedMoEWithLoRA")]
pub struct LoraExperts {
    contract: contract::Experts,
}

/// The deltas of one projection, after shrink.
struct Deltas<'a, T> {
    projection: &'a ProjectionSite,
    top_k: &'a TopK<'a>,
    /// Factors of the token's adapter for the route's expert: `[routes][slices]`.
    parts: Vec<Option<Part<'a, T>>>,
    /// `A x`. Experts or slices of one token with the same A share an element.
    products: Vec<Vec<f32>>,
}

struct Part<'a, T> {
    factors: Factors<'a, T>,
    product: usize,
    /// Factor on the adapter's scaling.
    scale: f32,
}

/// A route that has a row.
#[derive(Clone, Copy)]
struct Route {
    number: usize,
    token: usize,
    row: usize,
    /// `None` if the route is not local.
    expert: Option<usize>,
}

/// An operation that adds the deltas of a projection to `y`, or overwrites `y` with them.
macro_rules! operation {
    ($form:ident, $deltas:ident, $overwrites:literal, $(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub fn $name<T: Element>(
            &self,
            step: &mut Step<'_>,
            top_k: &TopK<'_>,
            x: Matrix<'_, T>,
            y: MatrixMut<'_, T>,
        ) -> Result<(), OperandError> {
            self.check(step, top_k, ExpertsForm::$form, [x.shape(), y.shape()], None)?;
            self.add(&self.$deltas(step, top_k, x), y, $overwrites);
            Ok(())
        }
    };
}

impl LoraExperts {
    /// The experts `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError`] if the id belongs to another model, [`Experts::top_k`](crate::model::Experts::top_k) was not
    /// called, or the kernels of a GPU do not support a size.
    pub fn new(weights: &WeightTable, id: ExpertsId) -> Result<Self, PlanError> {
        let contract = contract::Experts::new(weights.model(), id, weights.dtype(), weights.capacity(), Device::H100)?;
        Ok(Self { contract })
    }

    /// The launch configuration on a GPU.
    pub fn plan(&self) -> &ExpertsPlan {
        &self.contract.plan
    }

    operation! {
        AddGateUp, gate_up, false,
        #[doc = doc_of!(experts_add_gate_up_delta)]
        ///
        /// # Errors
        /// [`OperandError`] if an operand does not match the experts, the step and its routes. `y` is then unchanged.
        add_gate_up_delta
    }

    operation! {
        WriteGateUp, gate_up, true,
        #[doc = doc_of!(experts_write_gate_up_delta)]
        ///
        /// # Errors
        /// As for `add_gate_up_delta`.
        write_gate_up_delta
    }

    operation! {
        AddDown, down, false,
        #[doc = doc_of!(experts_add_down_delta)]
        ///
        /// # Errors
        /// [`OperandError`] if an operand does not match the experts, the step and its routes. `y` is then unchanged.
        add_down_delta
    }

    operation! {
        WriteDown, down, true,
        #[doc = doc_of!(experts_write_down_delta)]
        ///
        /// # Errors
        /// As for `add_down_delta`.
        write_down_delta
    }

    #[doc = doc_of!(experts_activate)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the experts, the step and its routes, or the activation requires a
    /// gate that the experts lack. `out` is then unchanged.
    #[doc(alias = "silu_and_mul")]
    pub fn activate<T: Element>(
        &self,
        step: &mut Step<'_>,
        top_k: &TopK<'_>,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
        activation: Activation,
    ) -> Result<(), OperandError> {
        self.check(step, top_k, ExpertsForm::Activate(activation), [x.shape(), y.shape()], Some(out.shape()))?;
        let (deltas, site) = (self.gate_up(step, top_k, x), &self.contract.site);
        let (gate, up) = site.gate_and_up();
        let place = |slice| site.gate_up().columns(slice);
        let (gate, up) = (gate.map(place), place(up));
        let routes = self.by_row(top_k);
        out.for_rows(&|row, out| {
            let Some(route) = routes[row].filter(|route| route.expert.is_some()) else { return };
            let mut sums: Vec<f32> = y.row(route.row).iter().map(|y| y.to_f32()).collect();
            deltas.each(route, |column, delta| sums[column] += delta);
            for (feature, out) in out.iter_mut().enumerate() {
                let value = |(first, step)| sums[first + feature * step];
                *out = T::from_f32(activated(activation, gate.map(value), value(up)));
            }
        });
        Ok(())
    }

    #[doc = doc_of!(experts_add_combined_delta)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the experts, the step and its routes. `y` is then unchanged.
    pub fn add_combined_delta<T: Element>(
        &self,
        step: &mut Step<'_>,
        top_k: &TopK<'_>,
        x: Matrix<'_, T>,
        mut y: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        self.check(step, top_k, ExpertsForm::AddCombined, [x.shape(), y.shape()], None)?;
        let deltas = self.down(step, top_k, x);
        y.for_rows(&|token, y| {
            let mut sums = vec![0.0; y.len()];
            let mut has_any = false;
            deltas.each_combined(self.of_token(top_k, token), |column, delta| {
                sums[column] += delta;
                has_any = true;
            });
            if has_any {
                y.iter_mut().zip(sums).for_each(|(y, sum)| *y = T::from_f32(y.to_f32() + sum));
            }
        });
        Ok(())
    }

    #[doc = doc_of!(experts_combine)]
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the experts, the step and its routes. `out` is then unchanged.
    #[doc(alias = "moe_sum")]
    #[doc(alias = "finalize")]
    pub fn combine<T: Element>(
        &self,
        step: &mut Step<'_>,
        top_k: &TopK<'_>,
        x: Matrix<'_, T>,
        y: Matrix<'_, T>,
        mut out: MatrixMut<'_, T>,
    ) -> Result<(), OperandError> {
        self.check(step, top_k, ExpertsForm::Combine, [x.shape(), y.shape()], Some(out.shape()))?;
        let deltas = self.down(step, top_k, x);
        out.for_rows(&|token, out| {
            let mut sums = vec![0.0; out.len()];
            for route in self.of_token(top_k, token).filter(|route| route.expert.is_some()) {
                let weight = top_k.output_weight(route.number);
                sums.iter_mut().zip(y.row(route.row)).for_each(|(sum, y)| *sum += weight * y.to_f32());
            }
            deltas.each_combined(self.of_token(top_k, token), |column, delta| sums[column] += delta);
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::from_f32(sum));
        });
        Ok(())
    }

    fn check(
        &self,
        step: &Step<'_>,
        top_k: &TopK<'_>,
        form: ExpertsForm,
        x_and_y: [Shape; 2],
        out: Option<Shape>,
    ) -> Result<(), OperandError> {
        self.contract.check(step.shape(), [top_k.num_tokens(), top_k.top_k()], form, x_and_y, out)
    }

    fn gate_up<'a, T: Element>(&'a self, step: &'a Step<'_>, top_k: &'a TopK<'a>, x: Matrix<'a, T>) -> Deltas<'a, T> {
        let input = |route: Route| (route.token, top_k.input_weight(route.number));
        self.deltas(self.contract.site.gate_up(), step, top_k, x, input)
    }

    fn down<'a, T: Element>(&'a self, step: &'a Step<'_>, top_k: &'a TopK<'a>, x: Matrix<'a, T>) -> Deltas<'a, T> {
        let input = |route: Route| (route.row, top_k.row_weight(route.number));
        self.deltas(self.contract.site.down(), step, top_k, x, input)
    }

    /// Shrinks. `input` returns a route's row of `x` and the factor on its delta.
    fn deltas<'a, T: Element>(
        &'a self,
        projection: &'a ProjectionSite,
        step: &'a Step<'_>,
        top_k: &'a TopK<'a>,
        x: Matrix<'a, T>,
        input: impl Fn(Route) -> (usize, f32),
    ) -> Deltas<'a, T> {
        let (slices, mut parts, mut shrinks) = (projection.num_slices(), Vec::new(), Vec::new());
        parts.resize_with(top_k.num_routes() * slices, || None);
        for (token, &slot) in step.batch.slots().iter().enumerate() {
            let first = shrinks.len();
            for route in self.of_token(top_k, token) {
                let Some(expert) = route.expert else { continue };
                let (row, weight) = input(route);
                for slice in 0..slices {
                    let entry = projection.expert_entry(expert) + slice;
                    let Some(factors) = step.factors(slot, entry) else { continue };
                    let same =
                        |(other_row, other): &(usize, Factors<'_, T>)| *other_row == row && other.share_a(&factors);
                    let product = shrinks[first..].iter().position(same).map_or(shrinks.len(), |at| first + at);
                    if product == shrinks.len() {
                        shrinks.push((row, factors));
                    }
                    let scale = step.batch.scale(token) * weight;
                    parts[route.number * slices + slice] = Some(Part { factors, product, scale });
                }
            }
        }
        let shrink = |(row, factors): (usize, Factors<'_, T>)| {
            let mut v = vec![0.0; factors.rank()];
            factors.shrink(x.row(row), &mut v);
            v
        };
        Deltas { projection, top_k, parts, products: shrinks.into_par_iter().map(shrink).collect() }
    }

    /// Adds deltas to the rows of their routes, or overwrites the rows.
    fn add<T: Element>(&self, deltas: &Deltas<'_, T>, mut y: MatrixMut<'_, T>, overwrites: bool) {
        let routes = self.by_row(deltas.top_k);
        y.for_rows(&|row, y| {
            let Some(route) = routes[row] else { return };
            if overwrites {
                y.fill(T::default());
            }
            deltas.each(route, |column, delta| y[column] = T::from_f32(y[column].to_f32() + delta));
        });
    }

    /// The route of each row in `[routes, ..]` matrices.
    fn by_row(&self, top_k: &TopK<'_>) -> Vec<Option<Route>> {
        let mut routes = vec![None; top_k.num_routes()];
        for route in (0..top_k.num_routes()).filter_map(|number| self.route(top_k, number)) {
            routes[route.row] = Some(route);
        }
        routes
    }

    fn of_token<'a>(&'a self, top_k: &'a TopK<'_>, token: usize) -> impl Iterator<Item = Route> + 'a {
        let numbers = token * top_k.top_k()..(token + 1) * top_k.top_k();
        numbers.filter_map(|number| self.route(top_k, number))
    }

    fn route(&self, top_k: &TopK<'_>, number: usize) -> Option<Route> {
        let expert = top_k.expert(number, self.contract.site.held().len());
        Some(Route { number, token: number / top_k.top_k(), row: top_k.row(number)?, expert })
    }
}

impl<T: Element> Deltas<'_, T> {
    /// Calls `put` with each column of a route's delta and its value.
    fn each(&self, route: Route, mut put: impl FnMut(usize, f32)) {
        for (slice, part) in self.of(route).iter().enumerate() {
            let Some(Part { factors, product, scale }) = part else { continue };
            let (first, step) = self.projection.columns(slice);
            let put = |feature, delta| put(first + feature * step, delta);
            factors.delta(&self.products[*product], *scale, self.features(), put);
        }
    }

    /// Calls `put` with each column and value of the weighted sum of several routes' deltas, once per distinct B.
    /// Routes to experts with the same B are summed before the product.
    fn each_combined(&self, routes: impl Iterator<Item = Route>, mut put: impl FnMut(usize, f32)) {
        let mut sums: Vec<(Factors<'_, T>, Vec<f32>)> = Vec::new();
        for route in routes {
            for Part { factors, product, scale } in self.of(route).iter().flatten() {
                let weight = self.top_k.output_weight(route.number) * scale * factors.scaling();
                let v = self.products[*product].iter().map(|v| weight * v);
                match sums.iter_mut().find(|(other, _)| other.share_b(factors)) {
                    Some((_, sum)) => sum.iter_mut().zip(v).for_each(|(sum, v)| *sum += v),
                    None => sums.push((*factors, v.collect())),
                }
            }
        }
        for (factors, v) in sums {
            factors.product(&v, self.features(), &mut put);
        }
    }

    fn of(&self, route: Route) -> &[Option<Part<'_, T>>] {
        let slices = self.projection.num_slices();
        &self.parts[route.number * slices..][..slices]
    }

    /// Output features of one slice.
    fn features(&self) -> usize {
        self.projection.out_features() / self.projection.num_slices()
    }
}

/// Applies an activation to one feature of gate (if there is one) and up. NaN propagates.
pub(super) fn activated(activation: Activation, gate: Option<f32>, up: f32) -> f32 {
    // Ungated experts activate `up`.
    let (x, up) = gate.map_or((up, 1.0), |gate| (gate, up));
    match activation {
        Activation::Gelu => 0.5 * x * (1.0 + libm::erff(x * FRAC_1_SQRT_2)) * up,
        Activation::GeluTanh => {
            let inner = FRAC_2_PI.sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh()) * up
        }
        Activation::Relu2 => {
            let x = at_least(x, 0.0);
            x * x * up
        }
        Activation::Silu => x * sigmoid(x) * up,
        Activation::SwigluOai { alpha, limit } => {
            let (x, up) = (at_most(x, limit), at_least(at_most(up, limit), -limit));
            x * sigmoid(alpha * x) * (up + 1.0)
        }
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}
