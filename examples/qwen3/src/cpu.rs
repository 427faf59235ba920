//! The forward's operations on the CPU.
//!
//! A token's result is bit-identical in any batch: operations process rows independently, and the GEMM consists of
//! products of one fixed shape. Weights are stored as `f32`, the GEMM's input type, after rounding to the element type.

mod delta;
mod experts;
pub mod sampling;

use std::{borrow::Cow, convert::Infallible, iter, marker::PhantomData, ops::Range};

use aril::{
    Element, Slot,
    adapter::SlotImage,
    cpu,
    model::{Activation, Collective, EmbeddingId, Exchange, ExpertsId, LinearId, Model, RowsId, TpRank},
    plan::{Capacity, RouteCapacity},
    pool::{PoolConfig, StreamId},
    routing::{Batch, TopK},
};
use rayon::prelude::*;

pub use self::{delta::States, experts::Routes};
use crate::{
    config::{DeltaHeads, Heads},
    device::{Cache, DeltaNet, Device, Draw, HeadNorms, Norm, Places, Rope, Slots},
    error::{Error, Result},
    experts::{ExpertWeights, ExpertsShape, GroupedGemm},
    forward::Stacked,
    group::Rank,
};

/// The CPU, computing on `T`.
#[derive(Debug, Default)]
pub struct Cpu<T> {
    /// This rank and its connections to the others.
    pub rank: Rank,
    element: PhantomData<T>,
}

impl<T> Cpu<T> {
    /// The CPU for one rank of a group.
    pub fn new(rank: &Rank) -> Self {
        Self { rank: rank.clone(), element: PhantomData }
    }

    /// The elements of the matrices of all ranks, by rank.
    fn of_ranks<V: Element>(&self, values: &[V]) -> Result<Vec<Vec<V>>> {
        let of_ranks = self.rank.gather(bytemuck::cast_slice(values))?;
        let elements = |bytes: &Vec<u8>| bytes.chunks_exact(size_of::<V>()).map(bytemuck::pod_read_unaligned).collect();
        Ok(of_ranks.iter().map(elements).collect())
    }
}

/// A row-major matrix.
#[derive(Debug)]
pub struct Tensor<T> {
    cols: usize,
    data: Vec<T>,
}

impl<T: Element> Tensor<T> {
    fn rows(&self) -> usize {
        self.data.len() / self.cols
    }

    fn row(&self, row: u32) -> &[T] {
        &self.data[row as usize * self.cols..][..self.cols]
    }

    fn row_mut(&mut self, row: u32) -> &mut [T] {
        &mut self.data[row as usize * self.cols..][..self.cols]
    }

    fn view(&self) -> Result<cpu::Matrix<'_, T>> {
        Ok(cpu::Matrix::new(&self.data, self.rows(), self.cols)?)
    }

    fn view_mut(&mut self) -> Result<cpu::MatrixMut<'_, T>> {
        let (rows, cols) = (self.rows(), self.cols);
        Ok(cpu::MatrixMut::new(&mut self.data, rows, cols)?)
    }

    /// A matrix computed row by row from this one.
    fn map_rows(&self, cols: usize, compute: impl Fn(&[T], &mut [T]) + Sync) -> Self {
        let mut data = vec![T::default(); self.rows() * cols];
        for_rows(&mut data, cols, &|index, out| compute(&self.data[index * self.cols..][..self.cols], out));
        Self { cols, data }
    }
}

/// Calls `compute` with the index of each row and the row, on rayon's threads. It is `dyn`, so that one parallel
/// iterator for each `T` is compiled, and not one for each caller.
fn for_rows<T: Send>(data: &mut [T], cols: usize, compute: &(dyn Fn(usize, &mut [T]) + Sync)) {
    data.par_chunks_mut(cols).enumerate().for_each(|(index, row)| compute(index, row));
}

impl<T: Element> Device for Cpu<T> {
    type Elem = T;
    type Tensor = Tensor<T>;
    type Weight = Weight;
    type Indices = Vec<u32>;
    type Routes = Routes;
    type Draws = Vec<(Option<u32>, f32)>;
    type States = States<T>;

    fn tensor(&self, _rows: usize, cols: usize, values: &[T]) -> Result<Tensor<T>> {
        Ok(Tensor { cols, data: values.to_vec() })
    }

    fn zeros(&self, rows: usize, cols: usize) -> Result<Tensor<T>> {
        let mut data = Vec::new();
        data.try_reserve_exact(rows * cols)?;
        data.resize(rows * cols, T::default());
        Ok(Tensor { cols, data })
    }

    fn weight(&self, rows: usize, cols: usize, parts: &[Cow<'_, [T]>]) -> Result<Weight> {
        Ok(Weight::new(rows, cols, &parts.concat()))
    }

    fn experts(&self, shape: ExpertsShape, weights: ExpertWeights<'_, T>) -> Result<Box<dyn GroupedGemm<Self>>> {
        Ok(experts::new(shape, weights))
    }

    fn indices(&self, values: &[u32]) -> Result<Vec<u32>> {
        Ok(values.to_vec())
    }

    fn states(&self, sequences: usize, heads: DeltaHeads) -> Result<States<T>> {
        States::new(sequences, heads)
    }

    type Adapters = cpu::WeightTable;
    type Tiers = cpu::Tiers;
    type LoraLinear = LoraLinear;
    type FusedLinear<'a> = Infallible;
    type Stack = Infallible;
    type LoraEmbedding = cpu::LoraEmbedding;
    type TrainedRows = cpu::TrainedRows;
    type LoraExperts = cpu::LoraExperts;
    type Buffers = cpu::Workspace;
    type LoraStep<'a> = cpu::Step<'a>;
    type Grouping = ();
    type Grouped<'a, 's> = TopK<'a>;

    fn arena_bytes(images: &[SlotImage<'_>]) -> usize {
        cpu::WeightTable::arena_bytes(images)
    }

    fn adapters(&self, model: &Model, capacity: Capacity, arena_bytes: usize) -> Result<cpu::WeightTable> {
        Ok(cpu::WeightTable::new(model, T::DTYPE, capacity, arena_bytes)?)
    }

    fn load(
        &self,
        adapters: &cpu::WeightTable,
        slot: usize,
        image: &SlotImage<'_>,
        progress: impl FnMut(usize),
    ) -> Result<Slot> {
        Ok(adapters.load_with_progress(slot, image, progress)?)
    }

    fn pool(
        &self,
        model: &Model,
        capacity: Capacity,
        config: PoolConfig,
    ) -> Result<(cpu::AdapterPool, cpu::WeightTable)> {
        let pool = cpu::AdapterPool::new(model, T::DTYPE, capacity, config)?;
        let weights = pool.weights(StreamId::FIRST).cloned();
        Ok((pool, weights.ok_or_else(|| Error::new("the pool has no stream"))?))
    }

    fn lora_linear(&self, adapters: &cpu::WeightTable, id: LinearId) -> Result<LoraLinear> {
        Ok(match adapters.model()[id].exchange() {
            None => LoraLinear::Whole(cpu::LoraLinear::new(adapters, id)?),
            Some(exchange) => LoraLinear::FullySharded {
                layer: cpu::FullyShardedLinear::new(adapters, id)?,
                exchange,
                max_rank: adapters.capacity().max_rank,
            },
        })
    }

    fn fused_linear(&self, _: &cpu::WeightTable, _: LinearId, _: &Weight) -> Result<Option<Infallible>> {
        Ok(None)
    }

    fn is_fastest_fused(&self, _: &LoraLinear, fused: &Infallible, _: usize) -> bool {
        match *fused {}
    }

    fn is_fastest_stacked(&self, _: &LoraLinear, stack: &Infallible, _: usize) -> bool {
        match *stack {}
    }

    fn place(&self, stack: &mut Infallible, _: &mut cpu::Step<'_>) -> Result<bool> {
        match *stack {}
    }

    fn lora_embedding(&self, adapters: &cpu::WeightTable, id: EmbeddingId) -> Result<cpu::LoraEmbedding> {
        Ok(cpu::LoraEmbedding::new(adapters, id)?)
    }

    fn trained_rows(&self, adapters: &cpu::WeightTable, id: RowsId) -> Result<cpu::TrainedRows> {
        Ok(cpu::TrainedRows::new(adapters, id)?)
    }

    fn lora_experts(&self, adapters: &cpu::WeightTable, id: ExpertsId) -> Result<cpu::LoraExperts> {
        Ok(cpu::LoraExperts::new(adapters, id)?)
    }

    fn buffers(&self, _: &cpu::WeightTable) -> Result<cpu::Workspace> {
        Ok(cpu::Workspace::default())
    }

    fn lora_step<'a>(
        &self,
        adapters: Slots<'a, Self>,
        workspace: &'a mut cpu::Workspace,
        slots: &'a [Slot],
        scales: &'a [f32],
    ) -> Result<cpu::Step<'a>> {
        let batch = Batch::new(slots).with_scales(scales)?;
        Ok(match adapters {
            Slots::Table(table) => table.step(&batch, workspace)?,
            Slots::Pool(pool) => pool.step(StreamId::FIRST, &batch, workspace)?,
            Slots::Ranks(pool) => pool.step(StreamId::FIRST, &batch, workspace)?,
        })
    }

    fn gemm_with_deltas(
        &self,
        x: &Tensor<T>,
        (base, layer): (&Weight, &LoraLinear),
        step: &mut cpu::Step<'_>,
        _: Stacked<'_, Self>,
    ) -> Result<Tensor<T>> {
        let mut y = self.gemm(x, base, Stacked::No)?;
        let (layer, exchange, max_rank) = match layer {
            LoraLinear::Whole(layer) => {
                layer.add_delta(step, x.view()?, y.view_mut()?)?;
                return Ok(y);
            }
            LoraLinear::FullySharded { layer, exchange, max_rank } => (layer, exchange, *max_rank),
        };
        let [rows, cols] = exchange.sent(x.rows(), max_rank);
        let mut v = vec![0.0; rows * cols];
        layer.shrink(step, x.view()?, cpu::MatrixMut::new(&mut v, rows, cols)?)?;
        let of_ranks = self.of_ranks(&v)?;
        let v = match exchange.collective() {
            Collective::AllGather => of_ranks.concat(),
            Collective::AllReduce => sum(&of_ranks),
        };
        let [rows, cols] = exchange.received(x.rows(), max_rank);
        layer.expand(step, cpu::Matrix::new(&v, rows, cols)?, y.view_mut()?)?;
        Ok(y)
    }

    fn forward(&self, layer: &Infallible, _: &mut cpu::Step<'_>, _: &Tensor<T>) -> Result<Tensor<T>> {
        match *layer {}
    }

    fn add_embedding_delta(
        &self,
        layer: &cpu::LoraEmbedding,
        step: &mut cpu::Step<'_>,
        ids: &Vec<u32>,
        y: &mut Tensor<T>,
    ) -> Result<()> {
        Ok(layer.add_delta(step, bytemuck::cast_slice(ids), y.view_mut()?)?)
    }

    fn replace_embeddings(
        &self,
        rows: &cpu::TrainedRows,
        step: &mut cpu::Step<'_>,
        ids: &Vec<u32>,
        y: &mut Tensor<T>,
    ) -> Result<()> {
        Ok(rows.replace_embeddings(step, bytemuck::cast_slice(ids), y.view_mut()?)?)
    }

    fn replace_logits(
        &self,
        rows: &cpu::TrainedRows,
        step: &mut cpu::Step<'_>,
        x: &Tensor<T>,
        y: &mut Tensor<T>,
    ) -> Result<()> {
        Ok(rows.replace_logits(step, x.view()?, y.view_mut()?)?)
    }

    fn grouping(&self, _: RouteCapacity) -> Result<()> {
        Ok(())
    }

    fn group<'a, 's: 'a>(&self, (): &'a mut (), _: &mut cpu::Step<'s>, routes: &'a Routes) -> Result<TopK<'a>> {
        routes.top_k()
    }

    fn activate(
        &self,
        layer: &cpu::LoraExperts,
        step: &mut cpu::Step<'_>,
        top_k: &mut TopK<'_>,
        x: &Tensor<T>,
        gate_up: Tensor<T>,
    ) -> Result<Tensor<T>> {
        let mut out = self.zeros(gate_up.rows(), gate_up.cols / 2)?;
        layer.activate(step, top_k, x.view()?, gate_up.view()?, out.view_mut()?, Activation::Silu)?;
        Ok(out)
    }

    fn combine(
        &self,
        layer: &cpu::LoraExperts,
        step: &mut cpu::Step<'_>,
        top_k: &mut TopK<'_>,
        x: &Tensor<T>,
        down: Tensor<T>,
    ) -> Result<Tensor<T>> {
        let mut out = self.zeros(top_k.num_tokens(), down.cols)?;
        layer.combine(step, top_k, x.view()?, down.view()?, out.view_mut()?)?;
        Ok(out)
    }

    fn subtract(&self, indices: &Vec<u32>, first: u32) -> Result<Vec<u32>> {
        Ok(indices.iter().map(|index| index.wrapping_sub(first)).collect())
    }

    fn embed(&self, table: &Weight, ids: &Vec<u32>) -> Result<Tensor<T>> {
        let zeros = vec![0.0; table.cols];
        let row = |&id: &u32| match (id as usize) < table.rows {
            true => table.row(id).collect(),
            false => zeros.clone(),
        };
        let data = ids.iter().flat_map(row).map(T::from_f32).collect();
        Ok(Tensor { cols: table.cols, data })
    }

    fn gemm(&self, x: &Tensor<T>, weight: &Weight, _: Stacked<'_, Self>) -> Result<Tensor<T>> {
        Ok(Tensor { cols: weight.rows, data: product(&x.data, weight) })
    }

    fn rms_norm(&self, x: &Tensor<T>, norm: &Norm<Self>) -> Result<Tensor<T>> {
        Ok(x.map_rows(x.cols, |x, out| {
            out.copy_from_slice(x);
            normalize(out, norm);
        }))
    }

    fn add_rms_norm(&self, x: &mut Tensor<T>, y: &Tensor<T>, norm: &Norm<Self>) -> Result<Tensor<T>> {
        self.add(x, y)?;
        self.rms_norm(x, norm)
    }

    fn without_gates(&self, qkv: &Tensor<T>, heads: Heads) -> Result<Tensor<T>> {
        let cols = heads.query_features() + 2 * heads.kv_features();
        Ok(qkv.map_rows(cols, |qkv, out| {
            let (queries, kv) = qkv.split_at(heads.projected_features());
            let (out, kv_out) = out.split_at_mut(heads.query_features());
            for (query, out) in queries.chunks_exact(2 * heads.dim).zip(out.chunks_exact_mut(heads.dim)) {
                out.copy_from_slice(&query[..heads.dim]);
            }
            kv_out.copy_from_slice(kv);
        }))
    }

    fn gate(&self, x: &mut Tensor<T>, gates: &Tensor<T>, heads: Option<Heads>) -> Result<()> {
        for_rows(&mut x.data, x.cols, &|row, x| {
            let gates = &gates.data[row * gates.cols..][..gates.cols];
            for (feature, x) in x.iter_mut().enumerate() {
                let gate = match heads {
                    Some(Heads { dim, .. }) => gates[feature / dim * 2 * dim + dim + feature % dim],
                    None => gates[0],
                };
                *x = T::from_f32(x.to_f32() * round::<T>(sigmoid(gate.to_f32())));
            }
        });
        Ok(())
    }

    fn delta_net(
        &self,
        x: &Tensor<T>,
        net: &DeltaNet<Self>,
        places: &Places<Self>,
        states: &mut States<T>,
    ) -> Result<Tensor<T>> {
        Ok(states.run(x, net, places))
    }

    fn rotate_and_append(
        &self,
        qkv: &mut Tensor<T>,
        heads: Heads,
        norms: &HeadNorms<Self>,
        rope: &Rope<Self>,
        places: &Places<Self>,
        cache: &mut Cache<Self>,
    ) -> Result<()> {
        let (query_features, kv_features) = (heads.query_features(), heads.kv_features());
        for_rows(&mut qkv.data, qkv.cols, &|token, row| {
            let position = places.positions[token];
            let (queries, row) = row.split_at_mut(query_features);
            for (features, norm) in [(queries, &norms.q), (&mut row[..kv_features], &norms.k)] {
                for head in features.chunks_exact_mut(heads.dim) {
                    normalize(head, norm);
                    rotate(head, rope.cos.row(position), rope.sin.row(position));
                }
            }
        });
        for (qkv, &row) in qkv.data.chunks_exact(qkv.cols).zip(&places.rows) {
            let (keys, values) = qkv[query_features..].split_at(kv_features);
            cache.keys.row_mut(row).copy_from_slice(keys);
            cache.values.row_mut(row).copy_from_slice(values);
        }
        Ok(())
    }

    fn attention(
        &self,
        qkv: &Tensor<T>,
        heads: Heads,
        places: &Places<Self>,
        cache: &Cache<Self>,
    ) -> Result<Tensor<T>> {
        let scale = (heads.dim as f32).sqrt().recip();
        let cols = heads.query_features();
        let mut data = vec![T::default(); qkv.rows() * cols];
        for_rows(&mut data, heads.dim, &|index, out| {
            let (token, head) = (index / heads.query, index % heads.query);
            let query = &qkv.data[token * qkv.cols + head * heads.dim..][..heads.dim];
            let kv_start = head / (heads.query / heads.kv) * heads.dim;
            let kv_features = kv_start..kv_start + heads.dim;
            let sequence = places.sequences[token];
            let rows = (0..=places.positions[token]).map(|position| places.table.row(sequence, position));
            let mut weights: Vec<f32> = rows
                .clone()
                .map(|row| {
                    let key = &cache.keys.row(row)[kv_features.clone()];
                    round::<T>(round::<T>(dot(query, key)) * scale)
                })
                .collect();
            softmax(&mut weights);
            let mut sums = vec![0.0; heads.dim];
            for (weight, row) in iter::zip(weights, rows) {
                let weight = round::<T>(weight);
                let value = &cache.values.row(row)[kv_features.clone()];
                sums.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value.to_f32());
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::from_f32(sum));
        });
        Ok(Tensor { cols, data })
    }

    fn silu_mul(&self, gate_up: &Tensor<T>) -> Result<Tensor<T>> {
        Ok(gate_up.map_rows(gate_up.cols / 2, |row, out| {
            let (gate, up) = row.split_at(out.len());
            for ((gate, up), out) in gate.iter().zip(up).zip(out) {
                *out = T::from_f32(round::<T>(silu(gate.to_f32())) * up.to_f32());
            }
        }))
    }

    fn choose_experts(
        &self,
        x: &Tensor<T>,
        router: (&Weight, &LoraLinear),
        adapted: Option<&mut cpu::Step<'_>>,
        (top_k, normalized): (usize, bool),
        held: Range<usize>,
    ) -> Result<Routes> {
        let scores = match adapted {
            Some(step) => self.gemm_with_deltas(x, router, step, Stacked::No)?,
            None => self.gemm(x, router.0, Stacked::No)?,
        };
        Routes::new(&scores, top_k, normalized, held)
    }

    fn rows_of_routes(&self, x: &Tensor<T>, routes: &Routes) -> Result<Tensor<T>> {
        let mut rows = self.gather(x, routes.tokens())?;
        rows.data.resize(routes.len() * x.cols, T::default());
        Ok(rows)
    }

    fn add(&self, y: &mut Tensor<T>, x: &Tensor<T>) -> Result<()> {
        for_rows(&mut y.data, y.cols, &|index, y| {
            let x = &x.data[index * x.cols..];
            y.iter_mut().zip(x).for_each(|(y, x)| *y = T::from_f32(y.to_f32() + x.to_f32()));
        });
        Ok(())
    }

    fn gather(&self, x: &Tensor<T>, rows: &Vec<u32>) -> Result<Tensor<T>> {
        Ok(Tensor { cols: x.cols, data: rows.iter().flat_map(|&row| x.row(row)).copied().collect() })
    }

    fn tp(&self) -> TpRank {
        self.rank.tp()
    }

    fn all_reduce(&self, y: &mut Tensor<T>) -> Result<()> {
        if self.tp().size() == 1 {
            return Ok(());
        }
        y.data = sum(&self.of_ranks(&y.data)?);
        Ok(())
    }

    fn all_gather(&self, x: Tensor<T>, cols: usize) -> Result<Tensor<T>> {
        if self.tp().size() == 1 {
            return Ok(x);
        }
        let of_ranks = self.of_ranks(&x.data)?;
        let row = |row: usize| of_ranks.iter().flat_map(move |values| &values[row * x.cols..][..x.cols]).take(cols);
        Ok(Tensor { cols, data: (0..x.rows()).flat_map(row).copied().collect() })
    }

    fn draws(&self, _: usize) -> Result<Self::Draws> {
        Ok(Vec::new())
    }

    fn draw(&self, logits: &Tensor<T>, draws: &[Draw], drawn: &mut Self::Draws) -> Result<()> {
        let rows = logits.data.par_chunks_exact(logits.cols).zip(draws);
        let choose = |(row, draw): (&[T], _)| {
            let row: Vec<f32> = row.iter().map(|logit| logit.to_f32()).collect();
            sampling::choose(&row, draw)
        };
        *drawn = rows.map(choose).collect();
        Ok(())
    }

    fn take_drawn(&self, ids: &mut Vec<u32>, sources: &[i32], drawn: &Self::Draws) -> Result<()> {
        for (id, &source) in ids.iter_mut().zip(sources) {
            if let Ok(row) = usize::try_from(source) {
                *id = drawn[row].0.unwrap_or(0);
            }
        }
        Ok(())
    }

    fn drawn(&self, drawn: &mut Self::Draws) -> Result<Vec<(Option<u32>, f32)>> {
        Ok(std::mem::take(drawn))
    }

    fn read(&self, x: &Tensor<T>) -> Result<Vec<f32>> {
        Ok(x.data.iter().map(|value| value.to_f32()).collect())
    }
}

/// A linear layer of adapters.
#[derive(Debug)]
pub enum LoraLinear {
    /// Whose ranks exchange no sums of A x.
    Whole(cpu::LoraLinear),
    /// Whose ranks exchange these sums between shrink and expand.
    FullySharded {
        /// The operations on this rank.
        layer: cpu::FullyShardedLinear,
        /// What the ranks exchange.
        exchange: Exchange,
        /// The table's.
        max_rank: usize,
    },
}

/// The sum of the matrices of all ranks, rounded once.
fn sum<T: Element>(of_ranks: &[Vec<T>]) -> Vec<T> {
    let element = |index: usize| T::from_f32(of_ranks.iter().map(|values| values[index].to_f32()).sum());
    (0..of_ranks[0].len()).map(element).collect()
}

/// Tokens of every product, padded with zeros. The order in which `gemm` sums depends on the shape, so a fixed shape
/// makes a token's result the same in any batch.
const TILE_ROWS: usize = 16;

/// Rows of the weight in every product.
const PANEL_ROWS: usize = 64;

/// A weight in the order in which products read it: panels of `PANEL_ROWS` rows, padded with zeros, each stored by
/// columns.
trait Panels: Sync {
    /// Rows and columns.
    fn shape(&self) -> (usize, usize);
    fn panel(&self, index: usize) -> Cow<'_, [f32]>;
}

/// A weight whose panels are all stored.
#[derive(Debug)]
pub struct Weight {
    rows: usize,
    cols: usize,
    panels: Vec<f32>,
}

impl Weight {
    fn new<T: Element>(rows: usize, cols: usize, values: &[T]) -> Self {
        let mut panels = vec![0.0; rows.next_multiple_of(PANEL_ROWS) * cols];
        let panel_elems = PANEL_ROWS * cols;
        for_rows(&mut panels, panel_elems, &|index, panel| {
            let values = values[index * panel_elems..].iter().take(panel_elems);
            fill(panel, cols, values.map(|value| value.to_f32()));
        });
        Self { rows, cols, panels }
    }

    fn row(&self, row: u32) -> impl Iterator<Item = f32> {
        let (panel, row) = (row as usize / PANEL_ROWS, row as usize % PANEL_ROWS);
        self.panels[panel * PANEL_ROWS * self.cols + row..].iter().step_by(PANEL_ROWS).take(self.cols).copied()
    }
}

impl Panels for Weight {
    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    fn panel(&self, index: usize) -> Cow<'_, [f32]> {
        self.panels[index * PANEL_ROWS * self.cols..][..PANEL_ROWS * self.cols].into()
    }
}

/// Writes rows of a weight to their panel.
fn fill(panel: &mut [f32], cols: usize, values: impl Iterator<Item = f32>) {
    for (index, value) in values.enumerate() {
        panel[index % cols * PANEL_ROWS + index / cols] = value;
    }
}

/// `x Wᵀ`, rounded once.
fn product<T: Element>(x: &[T], weight: &impl Panels) -> Vec<T> {
    let (outputs, cols) = weight.shape();
    let tokens = x.len() / cols;
    let rows = tokens.next_multiple_of(TILE_ROWS);
    let mut wide = vec![0.0; rows * cols];
    for_rows(&mut wide, cols, &|token, wide| {
        wide.iter_mut().zip(x.iter().skip(token * cols)).for_each(|(wide, value)| *wide = value.to_f32());
    });
    // A separate [rows, PANEL_ROWS] for each panel.
    let mut y = vec![0.0; outputs.div_ceil(PANEL_ROWS) * rows * PANEL_ROWS];
    for_rows(&mut y, (rows * PANEL_ROWS).max(1), &|index, y| {
        let panel = weight.panel(index);
        let tiles = wide.chunks_exact(TILE_ROWS * cols);
        for (x_tile, y_tile) in tiles.zip(y.chunks_exact_mut(TILE_ROWS * PANEL_ROWS)) {
            multiply(x_tile, &panel, y_tile, cols);
        }
    });
    let mut data = vec![T::default(); tokens * outputs];
    for_rows(&mut data, outputs, &|row, data| {
        for (panel, data) in data.chunks_mut(PANEL_ROWS).enumerate() {
            let y = &y[(panel * rows + row) * PANEL_ROWS..];
            data.iter_mut().zip(y).for_each(|(data, &y)| *data = T::from_f32(y));
        }
    });
    data
}

/// `x Wᵀ` of a tile of tokens and a panel of a weight.
fn multiply(x: &[f32], panel: &[f32], y: &mut [f32], cols: usize) {
    assert_eq!((x.len(), panel.len(), y.len()), (TILE_ROWS * cols, PANEL_ROWS * cols, TILE_ROWS * PANEL_ROWS));
    let [panel_stride, x_stride] = [PANEL_ROWS, cols].map(usize::cast_signed);
    // SAFETY: by the assertion, x [TILE_ROWS, cols], the panel [cols, PANEL_ROWS] and y [TILE_ROWS, PANEL_ROWS] are
    // dense matrices of just the extents and strides given. y is borrowed mutably, so nothing else refers to it, and it
    // is only written.
    unsafe {
        gemm::gemm(
            PANEL_ROWS,
            TILE_ROWS,
            cols,
            y.as_mut_ptr(),
            panel_stride,
            1,
            false,
            panel.as_ptr(),
            panel_stride,
            1,
            x.as_ptr(),
            x_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// The value rounded to `T`.
fn round<T: Element>(value: f32) -> f32 {
    T::from_f32(value).to_f32()
}

/// A dot product in eight interleaved sums, so that the loop vectorizes.
fn dot<T: Element>(a: &[T], b: &[T]) -> f32 {
    debug_assert_eq!(a.len(), b.len(), "the tails must be of the same features");
    let (a, a_tail) = a.as_chunks::<8>();
    let (b, b_tail) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..8 {
            sums[lane] += a[lane].to_f32() * b[lane].to_f32();
        }
    }
    let tail: f32 = a_tail.iter().zip(b_tail).map(|(a, b)| a.to_f32() * b.to_f32()).sum();
    sums.iter().sum::<f32>() + tail
}

fn normalize<T: Element>(x: &mut [T], Norm { weight, offset, eps }: &Norm<Cpu<T>>) {
    let scale = 1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt();
    for (x, weight) in x.iter_mut().zip(&weight.data) {
        let value = x.to_f32() * scale;
        let value = if *offset == 0.0 { round::<T>(value) } else { value };
        *x = T::from_f32(value * (weight.to_f32() + offset));
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// Rotates the pairs `(i, i + n)` of a head, for each of `n` angles.
fn rotate<T: Element>(head: &mut [T], cos: &[T], sin: &[T]) {
    let (low, high) = head.split_at_mut(cos.len());
    for pair in 0..cos.len() {
        let (l, h) = (low[pair].to_f32(), high[pair].to_f32());
        let (c, s) = (cos[pair].to_f32(), sin[pair].to_f32());
        low[pair] = T::from_f32(round::<T>(l * c) - round::<T>(h * s));
        high[pair] = T::from_f32(round::<T>(h * c) + round::<T>(l * s));
    }
}

fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - max).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}
