//! The operations of fully sharded linear layers on the CPU.

use super::{Matrix, MatrixMut, Step, WeightTable};
use crate::{Element, IntoSlices, contract, error::OperandError, model::LinearId, plan::PlanError};

/// The LoRA operations of a [fully sharded](crate::model::Shard::fully_sharded) linear layer. Between them, the engine
/// exchanges `v` with the other ranks, as [`Exchange`](crate::model::Exchange) says.
///
/// ```
/// use aril::{
///     DType,
///     adapter::{Adapter, Tensor},
///     cpu::{FullyShardedLinear, Matrix, MatrixMut, WeightTable, Workspace},
///     model::{Collective, Linear, ModelSpec, Parallel, Shard, TpRank},
///     plan::Capacity,
///     routing::Batch,
/// };
///
/// // A layer with two inputs and four outputs, on two ranks, and an adapter of rank 2.
/// let mut spec = ModelSpec::new();
/// let up = spec.linear(Linear::new("mlp", Parallel::Column, 2).slice("up_proj", 4))?;
/// let tensor = |shape, values: &[f32]| Tensor::new(DType::F32, shape, bytemuck::cast_slice(values).to_vec());
/// let adapter = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 2}"#, [
///     ("mlp.up_proj.lora_A.weight".to_owned(), tensor([2, 2], &[1.0, 0.0, 0.0, 1.0])?),
///     ("mlp.up_proj.lora_B.weight".to_owned(), tensor([4, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, -1.0])?),
/// ])?;
/// let tables = [0, 1].map(|rank| {
///     let model = spec.shard(Shard::new(TpRank::new(rank, 2).unwrap()).fully_sharded()).unwrap();
///     let table = WeightTable::new(&model, DType::F32, Capacity::tokens(1).slots(1).rank(2), 1 << 16).unwrap();
///     let slot = table.load(0, &adapter.plan(&model, DType::F32).unwrap()).unwrap();
///     (table, [slot])
/// });
///
/// let x = [3.0_f32, 5.0];
/// let x = Matrix::new(&x, 1, 2)?;
/// let exchange = tables[0].0.model()[up].exchange().unwrap();
/// assert_eq!(exchange.collective(), Collective::AllGather);
/// assert_eq!((exchange.sent(1, 2), exchange.received(1, 2)), ([1, 1], [2, 1]));
/// // Each rank computes one of the two elements of v.
/// let mut gathered = Vec::new();
/// for (table, slots) in &tables {
///     let mut workspace = Workspace::default();
///     let step = table.step(&Batch::new(slots), &mut workspace)?;
///     let mut v = [0.0];
///     FullyShardedLinear::new(table, up)?.shrink(&step, x, MatrixMut::new(&mut v, 1, 1)?)?;
///     gathered.extend(v);
/// }
/// assert_eq!(gathered, [3.0, 5.0]);
/// // Each rank adds two of the four outputs.
/// for ((table, slots), delta) in tables.iter().zip([[3.0, 5.0], [8.0, -2.0]]) {
///     let mut workspace = Workspace::default();
///     let step = table.step(&Batch::new(slots), &mut workspace)?;
///     let mut y = [0.0_f32; 2];
///     let v = Matrix::new(&gathered, 2, 1)?;
///     FullyShardedLinear::new(table, up)?.expand(&step, v, MatrixMut::new(&mut y, 1, 2)?)?;
///     assert_eq!(y, delta);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[doc(alias = "S-LoRA")]
pub struct FullyShardedLinear {
    contract: contract::FullyShardedLinear,
}

impl FullyShardedLinear {
    /// The layer `id` of the table's model.
    ///
    /// # Errors
    /// [`PlanError::Foreign`] if the id belongs to another model, [`PlanError::NotFullySharded`] if the layer has no
    /// [exchange](crate::model::LinearSite::exchange).
    pub fn new(weights: &WeightTable, id: LinearId) -> Result<Self, PlanError> {
        let contract = contract::FullyShardedLinear::new(weights.model(), id, weights.dtype(), weights.capacity())?;
        Ok(Self { contract })
    }

    /// Writes this rank's part of `v = A x[t]` for every token `t`: its rows of `v`, or its partial sum. Elements
    /// beyond the rank of the token's adapter are zero.
    ///
    /// `x` is `[tokens, in_features]`, `v` is [`Exchange::sent`](crate::model::Exchange::sent) with the table's
    /// `max_rank`.
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step. `v` is then unchanged.
    pub fn shrink<T: Element>(
        &self,
        step: &Step<'_>,
        x: Matrix<'_, T>,
        mut v: MatrixMut<'_, f32>,
    ) -> Result<(), OperandError> {
        self.contract.check_shrink(step.shape(), x.shape(), v.shape())?;
        let contract::FullyShardedLinear { site, exchange, .. } = &self.contract;
        v.for_rows(&|token, v| {
            v.fill(0.0);
            for (slice, v) in v.chunks_mut(exchange.width(step.max_rank)).enumerate() {
                if let Some(factors) = step.factors(step.batch.slots()[token], site.first_entry() + slice) {
                    factors.shrink(x.row(token), v);
                }
            }
        });
        Ok(())
    }

    /// `y[t] += scaling · B v`, for every token `t` whose slot has an adapter of this layer, in the columns of this
    /// rank's rows of B. All other elements of `y` keep every bit.
    ///
    /// `v` is [`Exchange::received`](crate::model::Exchange::received) with the table's `max_rank`, the result of the
    /// exchange. `y` is `[tokens, out_features]`, or a matrix of each slice ([`Slices`](crate::Slices)).
    ///
    /// # Errors
    /// [`OperandError`] if an operand does not match the layer and the step. `y` is then unchanged.
    pub fn expand<'a, T: Element>(
        &self,
        step: &Step<'_>,
        v: Matrix<'_, f32>,
        y: impl IntoSlices<MatrixMut<'a, T>>,
    ) -> Result<(), OperandError> {
        let mut y = y.into_slices();
        self.contract.check_expand(step.shape(), v.shape(), &y.map(MatrixMut::shape))?;
        let site = &self.contract.site;
        y.for_rows(site.slices(), &|token, slice, y| {
            if let Some(factors) = step.factors(step.batch.slots()[token], site.first_entry() + slice) {
                let whole = self.whole(step, v, token, slice, factors.rank());
                factors.expand(&whole, step.batch.scale(token), &mut y[site.slices()[slice].delta_range()]);
            }
        });
        Ok(())
    }

    /// `v` of one slice of a token, for an adapter of rank `rank`.
    fn whole(&self, step: &Step<'_>, v: Matrix<'_, f32>, token: usize, slice: usize, rank: usize) -> Vec<f32> {
        let exchange = &self.contract.exchange;
        let (first, width) = (slice * exchange.width(step.max_rank), exchange.width(rank));
        // Element `k` is in the part of rank `k / width`; sums have one part.
        (0..rank).map(|k| v.row(k / width * step.num_tokens() + token)[first + k % width]).collect()
    }
}
