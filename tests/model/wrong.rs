//! Calls of operations whose operands do not fit, and the error, which is the same on every backend; and random calls,
//! which are refused or computed.

use std::error::Error;

use aril::{
    DType, IntoSlices as _, Slices,
    adapter::Adapter,
    error::OperandError,
    model::{EmbeddingId, Experts, ExpertsId, Linear, LinearId, Model, ModelSpec, Parallel, RowsId, Shard, TpRank},
    plan::{Capacity, MAX_FORWARD_TOKENS, PlanError, RouteCapacity},
    routing::Batch,
};
use half::{bf16, f16};
use proptest::prelude::*;

use super::misuse::Outcome;
use crate::{
    backend::{
        self, Backend, Elements, FullyShardedLinear, FusedLinear, LoraEmbedding, LoraExperts, LoraLinear, Matrix,
        MatrixMut, TopK, TrainedRows, Value, elements_of, operand_error,
    },
    common::{
        case::loaded_slots,
        experts::{self, Act},
        factors::{Modules, neighbour},
    },
};

const TOKENS: usize = 5;
const FEATURES: usize = 40;
const OUTPUTS: usize = 17;
const HALF: usize = 9;
/// The input features of a layer that the fused linear does not take, of experts, and the rows of an embedding.
const ODD: usize = 33;
/// Outputs on this rank of each slice of a layer of two ranks.
const PART: usize = 4;
const EXPERTS: usize = 3;
const INTER: usize = 17;
const TOP_K: usize = 2;
const ROUTES: usize = TOKENS * TOP_K;
const SLOTS: usize = 3;
const RANK: usize = 5;
/// The columns that the ranks exchange, of two slices: half of their ranks, rounded up.
const EXCHANGED: usize = 6;
const ARENA_BYTES: usize = 1 << 18;
const ACT: Act = Act::SwigluOai;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Op {
    AddDelta,
    WriteDelta,
    Expand,
    SiluMul,
    Forward,
    Accumulate,
    Embedding,
    RowEmbeddings,
    RowLogits,
    Experts(experts::Op),
    /// `y` is v.
    ShardedShrink,
    /// `x` is v.
    ShardedExpand,
}

/// A layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Of {
    One,
    Odd,
    /// Two slices of as many outputs.
    Pair,
    /// Two slices, of which one has fewer outputs.
    Uneven,
    /// Half of two slices, and of the rows of their A.
    Column,
    Gated,
    Ungated,
    /// As one or gated, of another model.
    Foreign,
}

/// The table of a step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Table {
    Own,
    /// Of the same description and rank, made once more.
    Again,
    /// Of another rank of the same description.
    OtherRank,
    /// Of the same description with one more layer.
    Grown,
    /// Of an equal description.
    Equal,
    OtherType,
}

/// A matrix in a buffer, of which it has all from the first element on.
#[derive(Clone, Copy, Debug)]
struct Place {
    first: usize,
    len: usize,
    rows: usize,
    cols: usize,
    stride: usize,
}

/// An operation with its operands.
#[derive(Clone, Debug)]
struct Call {
    op: Op,
    of: Of,
    table: Table,
    /// Of the layer's table, of the operands, and of those of `expand` and `silu_mul`.
    types: [DType; 3],
    /// That the layer, the routing and the step's table are for.
    capacities: [Capacity; 3],
    /// Of the workspace's parts, if not all that the table needs.
    workspace_bytes: Option<[usize; 2]>,
    /// Of the adapters in the first slots.
    ranks: Vec<usize>,
    /// By token. Those of a batch in device memory may be any.
    slots: Vec<i32>,
    is_on_device: bool,
    scales: Option<usize>,
    x: Place,
    y: Place,
    /// If there are any: `y` is these matrices instead.
    y_slices: Vec<Place>,
    out: Place,
    w: Vec<Place>,
    bias: Option<usize>,
    /// The capacity of the grouping.
    routes: [usize; 3],
    top_k: usize,
    /// Of tokens or routes.
    ids: Vec<i32>,
    weights: Option<usize>,
    rows: Option<Vec<i32>>,
}

type Refusal = (Call, Option<OperandError>);

const OPERATIONS: [(Op, Of); 20] = [
    (Op::AddDelta, Of::One),
    (Op::AddDelta, Of::Odd),
    (Op::WriteDelta, Of::One),
    (Op::Expand, Of::One),
    (Op::SiluMul, Of::Pair),
    (Op::Forward, Of::One),
    (Op::Forward, Of::Pair),
    (Op::Accumulate, Of::One),
    (Op::Embedding, Of::One),
    (Op::RowEmbeddings, Of::One),
    (Op::RowLogits, Of::One),
    (Op::Experts(experts::Op::AddGateUp), Of::Gated),
    (Op::Experts(experts::Op::WriteGateUp), Of::Gated),
    (Op::Experts(experts::Op::Activate(ACT)), Of::Gated),
    (Op::Experts(experts::Op::AddDown), Of::Gated),
    (Op::Experts(experts::Op::WriteDown), Of::Gated),
    (Op::Experts(experts::Op::AddCombined), Of::Gated),
    (Op::Experts(experts::Op::Combine), Of::Gated),
    (Op::ShardedShrink, Of::Column),
    (Op::ShardedExpand, Of::Column),
];

/// Layers of one description, and those of an equal one.
struct World {
    /// By table.
    models: [Model; 5],
    sites: [Sites; 2],
}

struct Sites {
    one: LinearId,
    odd: LinearId,
    pair: LinearId,
    uneven: LinearId,
    column: LinearId,
    embedding: EmbeddingId,
    rows: RowsId,
    gated: ExpertsId,
    ungated: ExpertsId,
}

impl World {
    fn new() -> Self {
        let describe = || {
            let mut spec = ModelSpec::new();
            spec.linear(neighbour("before")).unwrap();
            let layer = |path, inputs| Linear::new(path, Parallel::Replicated, inputs);
            let column = Linear::new("column", Parallel::Column, FEATURES);
            let experts = |path| Experts::new(path, EXPERTS, ODD, INTER).top_k(TOP_K);
            let one = spec.linear(layer("one", FEATURES).slice("m", OUTPUTS)).unwrap();
            let rows = spec.embedding("rows", OUTPUTS, FEATURES).unwrap();
            let sites = Sites {
                one,
                rows: spec.trained_rows(rows, one, true).unwrap(),
                odd: spec.linear(layer("odd", ODD).slice("m", OUTPUTS)).unwrap(),
                pair: spec.linear(layer("pair", FEATURES).slice("gate", HALF).slice("up", HALF)).unwrap(),
                uneven: spec.linear(layer("uneven", FEATURES).slice("gate", HALF).slice("up", HALF - 1)).unwrap(),
                column: spec.linear(column.slice("m", 2 * PART).slice("n", 2 * PART)).unwrap(),
                embedding: spec.embedding("embed", ODD, OUTPUTS).unwrap(),
                gated: spec.experts(experts("gated")).unwrap(),
                ungated: spec.experts(experts("ungated").ungated()).unwrap(),
            };
            spec.linear(neighbour("behind")).unwrap();
            (spec, sites)
        };
        let [(mut spec, own), (equal, other)] = [(); 2].map(|()| describe());
        let shard = |spec: &ModelSpec, rank| {
            let shard = Shard::new(TpRank::new(rank, 2).unwrap()).fully_sharded().experts_tp(TpRank::SINGLE);
            spec.shard(shard).unwrap()
        };
        let [own_model, again, other_rank] = [0, 0, 1].map(|rank| shard(&spec, rank));
        spec.linear(neighbour("grown")).unwrap();
        let models = [own_model, again, other_rank, shard(&spec, 0), shard(&equal, 0)];
        Self { models, sites: [own, other] }
    }

    fn model(&self, table: Table) -> &Model {
        &self.models[match table {
            Table::Own | Table::OtherType => 0,
            Table::Again => 1,
            Table::OtherRank => 2,
            Table::Grown => 3,
            Table::Equal => 4,
        }]
    }

    fn sites(&self, of: Of) -> &Sites {
        &self.sites[usize::from(of == Of::Foreign)]
    }

    fn linear(&self, of: Of) -> LinearId {
        let sites = self.sites(of);
        match of {
            Of::Odd => sites.odd,
            Of::Pair => sites.pair,
            Of::Uneven => sites.uneven,
            Of::Column => sites.column,
            _ => sites.one,
        }
    }

    fn experts(&self, of: Of) -> ExpertsId {
        if of == Of::Ungated { self.sites(of).ungated } else { self.sites(of).gated }
    }
}

/// An adapter of all modules but one. Its experts share A of gate and up, and B of down, or nothing.
fn adapter(rank: usize, is_shared: bool) -> Adapter {
    let mut modules = Modules::default();
    let mut put = |path: &str, names, shapes: [&[usize]; 2]| {
        let [a, b] = shapes.map(|shape| vec![1.0; shape.iter().product()]);
        modules.put(path, 1.0, names, (shapes[0], &a), (shapes[1], &b));
    };
    for (path, [inputs, outputs]) in [
        ("one.m", [FEATURES, OUTPUTS]),
        ("odd.m", [ODD, OUTPUTS]),
        ("pair.gate", [FEATURES, HALF]),
        ("pair.up", [FEATURES, HALF]),
        ("column.m", [FEATURES, 2 * PART]),
    ] {
        put(path, Modules::LINEAR, [&[rank, inputs], &[outputs, rank]]);
    }
    put("embed", Modules::EMBEDDING, [&[rank, ODD], &[OUTPUTS, rank]]);
    for (module, [inputs, outputs], shared) in [
        ("gate_proj", [ODD, INTER], [true, false]),
        ("up_proj", [ODD, INTER], [true, false]),
        ("down_proj", [INTER, ODD], [false, true]),
    ] {
        if is_shared {
            let [a, b] = shared.map(|is_shared| if is_shared { 1 } else { EXPERTS });
            put(&format!("gated.{module}"), Modules::LINEAR, [&[a, rank, inputs], &[b, outputs, rank]]);
        } else {
            for expert in 0..EXPERTS {
                put(&format!("gated.{expert}.{module}"), Modules::LINEAR, [&[rank, inputs], &[outputs, rank]]);
            }
        }
    }
    modules.adapter()
}

impl Place {
    fn new(rows: usize, cols: usize) -> Self {
        Self::strided(rows, cols, cols)
    }

    fn strided(rows: usize, cols: usize, stride: usize) -> Self {
        Self { first: 0, len: rows * stride, rows, cols, stride }
    }

    /// Matrices with one row or one column less, and with one more.
    fn misfits(self) -> [Self; 4] {
        let Self { rows, cols, .. } = self;
        [[rows - 1, cols], [rows + 1, cols], [rows, cols - 1], [rows, cols + 1]]
            .map(|[rows, cols]| Self::new(rows, cols))
    }

    fn refused(self, operand: &'static str, want: Self) -> Option<OperandError> {
        let Self { rows, cols, .. } = self;
        Some(OperandError::Shape { operand, rows, cols, want_rows: want.rows, want_cols: want.cols })
    }
}

fn capacity() -> Capacity {
    Capacity::tokens(TOKENS + 1).slots(SLOTS).rank(RANK)
}

/// A call whose operands fit.
fn fitting(op: Op, of: Of) -> Call {
    let of_tokens = |features| Place::new(TOKENS, features);
    let (inputs, outputs) = match of {
        Of::Odd => (ODD, OUTPUTS),
        Of::Pair => (FEATURES, 2 * HALF),
        Of::Uneven => (FEATURES, 2 * HALF - 1),
        Of::Column => (FEATURES, 2 * PART),
        _ => (FEATURES, OUTPUTS),
    };
    let [x, y, out] = match op {
        Op::SiluMul => [inputs, outputs, HALF].map(of_tokens),
        Op::RowEmbeddings => [inputs, inputs, 1].map(of_tokens),
        Op::ShardedShrink => [of_tokens(inputs), of_tokens(EXCHANGED), of_tokens(1)],
        Op::ShardedExpand => [Place::new(2 * TOKENS, EXCHANGED), of_tokens(outputs), of_tokens(1)],
        Op::Experts(op) => {
            let [x, mut y, target] = experts::shapes(op, [ODD, INTER], [TOKENS, ROUTES]);
            if of == Of::Ungated && op.is_before_activation() {
                y[1] = INTER;
            }
            let written = if op.has_out() { y } else { target };
            [x, written, target].map(|[rows, cols]| Place::new(rows, cols))
        }
        _ => [inputs, outputs, 1].map(of_tokens),
    };
    let w = match (op, of) {
        (Op::Forward | Op::Accumulate, Of::Pair) => vec![Place::new(HALF, inputs); 2],
        (Op::Forward | Op::Accumulate, _) => vec![Place::new(outputs, inputs)],
        _ => Vec::new(),
    };
    let is_of_experts = matches!(op, Op::Experts(_));
    Call {
        op,
        of,
        table: Table::Own,
        types: [DType::BF16; 3],
        capacities: [capacity(); 3],
        workspace_bytes: None,
        ranks: vec![RANK],
        slots: vec![0; TOKENS],
        is_on_device: false,
        scales: None,
        x,
        y,
        y_slices: Vec::new(),
        out,
        w,
        bias: (op == Op::Forward).then_some(outputs),
        routes: [TOKENS + 1, TOP_K, EXPERTS],
        top_k: TOP_K,
        ids: vec![0; if is_of_experts { ROUTES } else { TOKENS }],
        weights: Some(ROUTES),
        rows: Some((0..ROUTES as i32).collect()),
    }
}

/// What is common to all operations: the layer and the batch against the step, and the operands against the layer.
fn of_any(op: Op, of: Of) -> Vec<Refusal> {
    let call = fitting(op, of);
    let mut calls = vec![(call.clone(), None), (Call { table: Table::Again, ..call.clone() }, None)];
    for table in [Table::OtherRank, Table::Grown, Table::Equal] {
        calls.push((Call { table, ..call.clone() }, Some(OperandError::Model)));
    }
    let of_type = |operand, got, want| Some(OperandError::DType { operand, got, want });
    let of_half = of_type("weights", DType::F16, DType::BF16);
    calls.push((Call { table: Table::OtherType, ..call.clone() }, of_half));
    calls.push((Call { of: Of::Foreign, ..call.clone() }, Some(PlanError::Foreign.into())));
    let within = |what, got, max| Some(OperandError::Capacity { what, got, max });
    let slots = vec![0; TOKENS + 2];
    calls.push((Call { slots, ..call.clone() }, within("the batch's tokens", TOKENS + 2, TOKENS + 1)));
    for (planned_for, error) in [
        (
            Capacity::tokens(TOKENS - 1).slots(SLOTS).rank(RANK),
            within("the batch's tokens for this layer", TOKENS, TOKENS - 1),
        ),
        (capacity().slots(SLOTS - 1), within("the weights' num_slots", SLOTS, SLOTS - 1)),
        (capacity().rank(RANK - 1), within("the weights' max_rank", RANK, RANK - 1)),
    ] {
        calls.push((Call { capacities: [planned_for, capacity(), capacity()], ..call.clone() }, error));
    }
    let (got, want) = (TOKENS, TOKENS - 1);
    let fewer = match op {
        Op::Experts(_) => Some(OperandError::Tokens { got, want }),
        Op::Embedding | Op::RowEmbeddings => Some(OperandError::Length { operand: "token_ids", got, want }),
        Op::ShardedExpand => call.x.refused("v", Place::new(2 * want, EXCHANGED)),
        _ => call.x.refused("x", Place::new(want, call.x.cols)),
    };
    calls.push((Call { slots: vec![0; want], ..call.clone() }, fewer));

    let first = match op {
        Op::Forward | Op::Accumulate => "W",
        Op::Embedding | Op::RowEmbeddings | Op::ShardedExpand => "y",
        _ => "x",
    };
    let types = [DType::BF16, DType::F16, DType::F16];
    calls.push((Call { types, ..call.clone() }, of_type(first, DType::F16, DType::BF16)));
    let x = if op == Op::ShardedExpand { "v" } else { "x" };
    if !matches!(op, Op::Embedding | Op::RowEmbeddings) {
        calls.extend(call.x.misfits().map(|place| (Call { x: place, ..call.clone() }, place.refused(x, call.x))));
        let stride = call.x.len;
        let Place { rows, cols, .. } = call.x;
        let beyond = OperandError::Extent { operand: "x", rows, cols, row_stride: stride, len: call.x.len };
        calls.push((Call { x: Place { stride, ..call.x }, ..call.clone() }, Some(beyond)));
    }
    let y = if op == Op::ShardedShrink { "v" } else { "y" };
    calls.extend(call.y.misfits().map(|place| (Call { y: place, ..call.clone() }, place.refused(y, call.y))));
    let has_out = op == Op::SiluMul || matches!(op, Op::Experts(op) if op.has_out());
    if has_out {
        calls.extend(call.out.misfits().map(|out| (Call { out, ..call.clone() }, out.refused("out", call.out))));
    } else {
        let (cols, row_stride) = (call.y.cols, call.y.cols - 1);
        let overlapping = OperandError::Overlap { operand: "y", cols, row_stride };
        calls.push((Call { y: Place { stride: row_stride, ..call.y }, ..call.clone() }, Some(overlapping)));
    }
    calls
}

/// What a router chose.
fn of_choices(op: experts::Op) -> Vec<Refusal> {
    let call = fitting(Op::Experts(op), Of::Gated);
    let choice = |ids: usize, top_k, weights, rows: usize, error| {
        let (ids, rows) = (vec![0; ids], Some((0..rows as i32).collect()));
        (Call { ids, top_k, weights: Some(weights), rows, ..call.clone() }, Some(error))
    };
    let of_routes = |operand, got| OperandError::Routes { operand, got, want: ROUTES };
    let too_many = OperandError::Capacity { what: "the routes of a token", got: TOP_K + 1, max: TOP_K };
    vec![
        choice(4, TOP_K, 4, 4, OperandError::Tokens { got: 2, want: TOKENS }),
        choice(5, TOP_K, ROUTES, ROUTES, OperandError::TopK { ids: 5, top_k: TOP_K }),
        choice(ROUTES, 0, ROUTES, ROUTES, OperandError::TopK { ids: ROUTES, top_k: 0 }),
        choice(3 * TOKENS, TOP_K + 1, 3 * TOKENS, 3 * TOKENS, too_many),
        choice(ROUTES, TOP_K, ROUTES - 1, ROUTES, of_routes("weights", ROUTES - 1)),
        choice(ROUTES, TOP_K, 2, ROUTES, of_routes("weights", 2)),
        choice(ROUTES, TOP_K, ROUTES, ROUTES - 1, of_routes("rows", ROUTES - 1)),
        choice(ROUTES, TOP_K, ROUTES, ROUTES + 1, of_routes("rows", ROUTES + 1)),
    ]
}

/// Matrices of slices.
fn of_slices(op: Op) -> Vec<Refusal> {
    let (half, call) = (Place::new(TOKENS, HALF), fitting(op, Of::Pair));
    let [shorter, _, narrower, wider] = half.misfits();
    let spread = Place::strided(TOKENS, HALF, HALF + 2);
    let other_number = |got| Some(OperandError::Slices { operand: "y", got, want: 2 });
    [
        (vec![half, spread], None),
        (vec![call.y], None),
        (vec![half], half.refused("y", call.y)),
        (vec![half; 3], other_number(3)),
        (vec![half; 9], other_number(9)),
        (vec![wider, half], wider.refused("y[0]", half)),
        (vec![half, narrower], narrower.refused("y[1]", half)),
        (vec![spread, shorter], shorter.refused("y[1]", half)),
    ]
    .map(|(y_slices, error)| (Call { y_slices, ..call.clone() }, error))
    .to_vec()
}

/// W, the bias, and what the kernel of the fused linear alone demands.
fn of_fused_linears() -> Vec<Refusal> {
    let (call, pair) = (fitting(Op::Forward, Of::One), fitting(Op::Forward, Of::Pair));
    let (w, half) = (call.w[0], pair.w[0]);
    let rows_of =
        |operand| Some(OperandError::MisalignedRows { operand, alignment: 16, stride_bytes: 2 * (FEATURES + 4) });
    let apart = |place: Place| Place::strided(place.rows, place.cols, FEATURES + 4);
    let mut calls = vec![
        (Call { w: vec![apart(w)], ..call.clone() }, rows_of("W")),
        (Call { x: apart(call.x), ..call.clone() }, rows_of("x")),
    ];
    calls.extend(w.misfits().map(|other| (Call { w: vec![other], ..call.clone() }, other.refused("W", w))));
    let wider = half.misfits()[1];
    calls.push((Call { w: vec![half, wider], ..pair.clone() }, wider.refused("W", half)));
    for got in [1, 3] {
        let error = OperandError::Slices { operand: "W", got, want: 2 };
        calls.push((Call { w: vec![half; got], ..pair.clone() }, Some(error)));
    }
    for got in [0, OUTPUTS - 1, OUTPUTS + 1] {
        calls.push((Call { bias: Some(got), ..call.clone() }, Some(OperandError::Bias { got, want: OUTPUTS })));
    }
    calls.push((Call { bias: None, ..call.clone() }, None));
    let odd = PlanError::Multiple { what: "in_features", value: ODD, of: 8 };
    calls.push((fitting(Op::Forward, Of::Odd), Some(odd.into())));
    let wide = PlanError::DType { operation: "the fused linear", got: DType::F32 };
    calls.push((Call { types: [DType::F32; 3], ..call.clone() }, Some(wide.into())));
    // The stride of a single row means nothing.
    let one = |place: Place| Place { rows: 1, ..place };
    let x = Place { stride: usize::MAX, ..one(call.x) };
    calls.push((Call { slots: vec![0], x, y: one(call.y), ..call.clone() }, None));
    let (got, max) = (MAX_FORWARD_TOKENS + 1, MAX_FORWARD_TOKENS);
    let beyond = OperandError::Capacity { what: "the batch's tokens for this layer", got, max };
    for (tokens, error) in [(max, None), (got, Some(beyond))] {
        let [x, y] = [call.x, call.y].map(|place| Place::new(tokens, place.cols));
        let capacities = [Capacity::tokens(2 * MAX_FORWARD_TOKENS).slots(SLOTS).rank(RANK); 3];
        calls.push((Call { slots: vec![0; tokens], x, y, capacities, ..call.clone() }, error));
    }
    calls
}

/// All calls of the table.
fn refusals() -> Vec<Refusal> {
    let mut calls: Vec<_> = OPERATIONS.into_iter().flat_map(|(op, of)| of_any(op, of)).collect();
    for (op, _) in OPERATIONS {
        match op {
            Op::Experts(op) => calls.extend(of_choices(op)),
            Op::Embedding | Op::RowEmbeddings | Op::RowLogits | Op::ShardedShrink | Op::ShardedExpand => {}
            op => calls.extend(of_slices(op)),
        }
    }
    calls.extend(of_fused_linears());
    let one = fitting(Op::AddDelta, Of::One);
    let two = vec![Place::new(TOKENS, HALF); 2];
    calls.push((Call { y_slices: two, ..one }, Some(OperandError::Slices { operand: "y", got: 2, want: 1 })));
    for op in [Op::Expand, Op::SiluMul] {
        let types = [DType::BF16, DType::BF16, DType::F16];
        let error = OperandError::DType { operand: "y", got: DType::F16, want: DType::BF16 };
        calls.push((Call { types, ..fitting(op, Of::Pair) }, Some(error)));
    }
    for (of, outputs) in [(Of::One, vec![OUTPUTS]), (Of::Uneven, vec![HALF, HALF - 1])] {
        calls.push((fitting(Op::SiluMul, of), Some(OperandError::GateUp { outputs })));
    }
    for (op, ids) in [Op::Embedding, Op::RowEmbeddings].into_iter().flat_map(|op| [(op, TOKENS - 1), (op, TOKENS + 1)])
    {
        let error = OperandError::Length { operand: "token_ids", got: ids, want: TOKENS };
        calls.push((Call { ids: vec![0; ids], ..fitting(op, Of::One) }, Some(error)));
    }
    let activate = |act| fitting(Op::Experts(experts::Op::Activate(act)), Of::Ungated);
    calls.push((activate(ACT), Some(OperandError::Activation { activation: ACT.activation() })));
    calls.push((activate(Act::Relu2), None));
    for op in [Op::AddDelta, Op::Forward] {
        calls.push((fitting(op, Of::Column), Some(PlanError::FullySharded.into())));
    }
    for op in [Op::ShardedShrink, Op::ShardedExpand] {
        calls.push((Call { of: Of::One, ..fitting(op, Of::Column) }, Some(PlanError::NotFullySharded.into())));
    }
    calls
}

/// The operands of one element type. What is written is 7 before.
struct Memory<T> {
    x: Elements<T>,
    y: Elements<T>,
    y_slices: Vec<Elements<T>>,
    out: Elements<T>,
    w: Vec<Elements<T>>,
    bias: Elements<T>,
}

impl<T: Value> Memory<T> {
    fn new(backend: &Backend, call: &Call) -> Self {
        let of = |len, value| backend.elements(0, &vec![T::from_f32(value); len]);
        let all = |place: &Place, value| of(place.first + place.len, value);
        Self {
            x: all(&call.x, 1.0),
            y: all(&call.y, 7.0),
            y_slices: call.y_slices.iter().map(|place| all(place, 7.0)).collect(),
            out: all(&call.out, 7.0),
            w: call.w.iter().map(|place| all(place, 1.0)).collect(),
            bias: of(call.bias.unwrap_or(0), 1.0),
        }
    }

    fn is_unchanged(&self) -> bool {
        let written = [&self.y, &self.out].into_iter().chain(&self.y_slices);
        written.flat_map(elements_of).all(|value| value.to_f32() == 7.0)
    }
}

fn matrix<T: Value>(elements: &Elements<T>, place: Place) -> Result<Matrix<'_, T>, backend::Error> {
    Matrix::strided(backend::part(elements, place.first), place.rows, place.cols, place.stride)
}

fn matrix_mut<T: Value>(elements: &mut Elements<T>, place: Place) -> Result<MatrixMut<'_, T>, backend::Error> {
    MatrixMut::strided(backend::part_mut(elements, place.first), place.rows, place.cols, place.stride)
}

fn matrices<'a, T: Value>(elements: &'a [Elements<T>], places: &[Place]) -> Result<Vec<Matrix<'a, T>>, backend::Error> {
    elements.iter().zip(places).map(|(elements, place)| matrix(elements, *place)).collect()
}

/// The matrix of all slices, or one of each.
fn outputs<'a, T: Value>(
    y: &'a mut Elements<T>,
    y_slices: &'a mut [Elements<T>],
    call: &Call,
) -> Result<Slices<MatrixMut<'a, T>>, backend::Error> {
    if call.y_slices.is_empty() {
        return Ok(matrix_mut(y, call.y)?.into_slices());
    }
    y_slices.iter_mut().zip(&call.y_slices).map(|(elements, place)| matrix_mut(elements, *place)).collect()
}

/// Makes a call with operands of `T`, and of `U` those of `expand` and `silu_mul`.
fn make_with<T: Value, U: Value>(backend: &Backend, world: &World, call: &Call) -> Outcome {
    let [planned_for, routed, of_step] = call.capacities;
    let own = backend.table(world.model(Table::Own), call.types[0], planned_for, ARENA_BYTES)?;
    let dtype = if call.table == Table::OtherType { DType::F16 } else { call.types[0] };
    let weights = backend.table(world.model(call.table), dtype, of_step, ARENA_BYTES)?;
    for (slot, &rank) in call.ranks.iter().enumerate() {
        weights.load(slot, &adapter(rank, slot == 1).plan(weights.model(), dtype)?)?;
    }
    let (mut first, mut second, mut of_f32) =
        (Memory::<T>::new(backend, call), Memory::<U>::new(backend, call), Memory::<f32>::new(backend, call));
    let result = (|| -> Outcome {
        let (Memory { x, y, y_slices, out, w, bias }, v) = (&mut first, &mut of_f32);
        let slots = loaded_slots(&call.slots, |slot| weights.get(slot));
        let scales = call.scales.map(|len| vec![0.5; len]);
        let mut batch = Batch::new(&slots);
        if let Some(scales) = &scales {
            batch = batch.with_scales(scales)?;
        }
        let mut routing = backend.routing(0, routed)?;
        let numbers = call.is_on_device.then_some(&call.slots[..]);
        let batch = backend.update(&mut routing, &batch, numbers)?;
        let mut workspace = match call.workspace_bytes {
            Some(bytes) => backend.workspace_of(bytes)?,
            None => backend.workspace(0, &weights),
        };
        let mut step = weights.step(&batch, &mut workspace)?;
        let linear = || LoraLinear::new(&own, world.linear(call.of));
        let ids = backend.elements(0, &call.ids);
        match call.op {
            Op::AddDelta => linear()?.add_delta(&mut step, matrix(x, call.x)?, outputs(y, y_slices, call)?)?,
            Op::WriteDelta => linear()?.write_delta(&mut step, matrix(x, call.x)?, outputs(y, y_slices, call)?)?,
            Op::Expand => {
                let y = outputs(&mut second.y, &mut second.y_slices, call)?;
                linear()?.shrink(&mut step, matrix(x, call.x)?)?.expand(y)?;
            }
            Op::SiluMul => {
                let (layer, Memory { y, y_slices, out, .. }) = (linear()?, &mut second);
                let shrunk = layer.shrink(&mut step, matrix(x, call.x)?)?;
                let y: Slices<_> = match &call.y_slices[..] {
                    [] => matrix(y, call.y)?.into_slices(),
                    places => matrices(y_slices, places)?.into_iter().collect(),
                };
                shrunk.silu_mul(y, matrix_mut(out, call.out)?)?;
            }
            Op::Forward | Op::Accumulate => {
                let layer = FusedLinear::new(&own, world.linear(call.of), matrices(w, &call.w)?)?;
                let layer = if call.bias.is_some() { layer.with_bias(backend::part(bias, 0))? } else { layer };
                let (x, y) = (matrix(x, call.x)?, outputs(y, y_slices, call)?);
                if call.op == Op::Forward {
                    layer.forward(&mut step, x, y)?
                } else {
                    layer.accumulate(&mut step, x, y)?
                }
            }
            Op::Embedding => {
                let layer = LoraEmbedding::new(&own, world.sites(call.of).embedding)?;
                layer.add_delta(&mut step, &ids, matrix_mut(y, call.y)?)?;
            }
            Op::RowEmbeddings => {
                let rows = TrainedRows::new(&own, world.sites(call.of).rows)?;
                rows.replace_embeddings(&mut step, &ids, matrix_mut(y, call.y)?)?;
            }
            Op::RowLogits => {
                let rows = TrainedRows::new(&own, world.sites(call.of).rows)?;
                rows.replace_logits(&mut step, matrix(x, call.x)?, matrix_mut(y, call.y)?)?;
            }
            Op::Experts(op) => {
                let layer = LoraExperts::new(&own, world.experts(call.of))?;
                let [max_tokens, top_k, num_experts] = call.routes;
                let routes = RouteCapacity::tokens(max_tokens).top_k(top_k).experts(num_experts);
                let mut grouping = backend.grouping(routes)?;
                let router = call.weights.map(|len| backend.elements(0, &vec![0.5; len]));
                let rows = call.rows.as_ref().map(|rows| backend.elements(0, rows));
                let mut top_k = TopK::new(&ids, call.top_k)?;
                if let Some(router) = &router {
                    top_k = top_k.with_weights(router)?;
                }
                if let Some(rows) = &rows {
                    top_k = top_k.with_rows(rows)?;
                }
                let mut routes = grouping.update(&mut step, top_k)?;
                // An operation without an output of its own writes y.
                let none = Place::new(0, 0);
                let (of_y, target) = if op.has_out() {
                    (matrix(y, call.y)?, matrix_mut(out, call.out)?)
                } else {
                    (matrix(out, none)?, matrix_mut(y, call.y)?)
                };
                backend::launch(&layer, op, &mut step, &mut routes, [matrix(x, call.x)?, of_y], target)?;
            }
            Op::ShardedShrink => {
                let layer = FullyShardedLinear::new(&own, world.linear(call.of))?;
                layer.shrink(&step, matrix(x, call.x)?, matrix_mut(&mut v.y, call.y)?)?;
            }
            Op::ShardedExpand => {
                let layer = FullyShardedLinear::new(&own, world.linear(call.of))?;
                layer.expand(&step, matrix(&v.x, call.x)?, matrix_mut(y, call.y)?)?;
            }
        }
        Ok(())
    })();
    let is_unchanged = first.is_unchanged() && second.is_unchanged() && of_f32.is_unchanged();
    assert!(result.is_ok() || is_unchanged, "{result:?} has written: {call:?}");
    result
}

fn make(backend: &Backend, world: &World, call: &Call) -> Outcome {
    match call.types {
        [_, DType::BF16, DType::F16] => make_with::<bf16, f16>(backend, world, call),
        [_, DType::BF16, _] => make_with::<bf16, bf16>(backend, world, call),
        [_, DType::F16, _] => make_with::<f16, f16>(backend, world, call),
        _ => make_with::<f32, f32>(backend, world, call),
    }
}

/// An error of operands, of whatever type it is.
fn named(error: &(dyn Error + 'static)) -> Option<OperandError> {
    let plan = error.downcast_ref::<PlanError>().map(|error| error.clone().into());
    plan.or_else(|| error.downcast_ref::<OperandError>().cloned()).or_else(|| operand_error(error))
}

/// Makes every call of the table. Those that fit succeed, all others fail with the named error and write nothing.
pub fn every_refusal_is_named(backend: &Backend) {
    let world = World::new();
    for (call, expected) in refusals() {
        let error = make(backend, &world, &call).err();
        let got = error.as_ref().map(|error| named(&**error).unwrap_or_else(|| panic!("{error}: {call:?}")));
        assert_eq!(got, expected, "{call:?}");
    }
}

/// What becomes of a number of a call that fits.
#[derive(Clone, Copy, Debug)]
enum Misfit {
    Zero,
    OneMore,
    Any(usize),
    Most,
}

/// Calls whose arguments mostly fit each other.
fn calls() -> impl Strategy<Value = Call> {
    let misfit = prop_oneof![
        Just(Misfit::Zero),
        Just(Misfit::OneMore),
        (0..400_usize).prop_map(Misfit::Any),
        Just(Misfit::Most),
    ];
    let misfits = prop::collection::vec(prop::option::weighted(0.012, misfit), 64);
    let slot = prop_oneof![30 => -1..SLOTS as i32, 1 => any::<i32>()];
    let id = prop_oneof![4 => -1..EXPERTS as i32 + 1, 1 => any::<i32>()];
    let row = prop_oneof![4 => -1..ROUTES as i32 + 1, 1 => any::<i32>()];
    let contents = (
        prop::collection::vec(1..=RANK, 0..=SLOTS),
        prop::collection::vec(slot, TOKENS),
        prop::collection::vec(id, ROUTES),
        prop::collection::vec(row, ROUTES),
    );
    let with = (any::<[bool; 4]>(), prop::bool::weighted(0.5), prop::bool::weighted(0.02));
    (prop::sample::select(OPERATIONS.to_vec()), any::<bool>(), misfits, contents, with).prop_map(
        |((op, of), is_f16, misfits, (ranks, slots, ids, rows), (has, is_on_device, is_of_other))| {
            let mut misfits = misfits.into_iter();
            let mut bend = |number: &mut usize| match misfits.next().flatten() {
                None => {}
                Some(Misfit::Zero) => *number = 0,
                Some(Misfit::OneMore) => *number = number.saturating_add(1),
                Some(Misfit::Any(other)) => *number = other,
                Some(Misfit::Most) => *number = usize::MAX,
            };
            let call = fitting(op, of);
            let optional = |has, len| if has { len } else { None };
            let mut call = Call {
                types: [if is_f16 { DType::F16 } else { DType::BF16 }; 3],
                table: if is_of_other { Table::Equal } else { Table::Own },
                workspace_bytes: Some([1 << 16; 2]),
                ranks,
                slots,
                is_on_device,
                scales: optional(has[0], Some(TOKENS)),
                bias: optional(has[1], call.bias),
                weights: optional(has[2], call.weights),
                rows: has[3].then_some(rows),
                ids: ids[..call.ids.len()].to_vec(),
                ..call
            };
            for capacity in &mut call.capacities {
                let Capacity { max_tokens, num_slots, max_rank, .. } = capacity;
                [max_tokens, num_slots, max_rank].into_iter().for_each(&mut bend);
            }
            for place in [&mut call.x, &mut call.y, &mut call.out].into_iter().chain(&mut call.w) {
                let Place { first, len, rows, cols, stride } = place;
                [&mut *first, &mut *len, rows, cols, stride].into_iter().for_each(&mut bend);
                [first, len].into_iter().for_each(|number| *number = (*number).min(1 << 12));
            }
            call.routes.iter_mut().for_each(&mut bend);
            bend(&mut call.top_k);
            let lens = [&mut call.scales, &mut call.bias, &mut call.weights];
            for number in lens.into_iter().flatten().chain(call.workspace_bytes.iter_mut().flatten()) {
                bend(number);
                *number = (*number).min(1 << 16);
            }
            for indices in [Some(&mut call.slots), Some(&mut call.ids), call.rows.as_mut()].into_iter().flatten() {
                let mut len = indices.len();
                bend(&mut len);
                indices.resize(len.min(64), 0);
            }
            call
        },
    )
}

/// Makes random calls. None faults, and many are computed.
pub fn random_calls_are_refused_or_computed(backend: &Backend, cases: u32) {
    let (world, taken) = (World::new(), std::cell::Cell::new(0_u32));
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let run = proptest::test_runner::TestRunner::new(config).run(&calls(), |call| {
        match make(backend, &world, &call) {
            Ok(()) => taken.set(taken.get() + 1),
            Err(error) => prop_assert!(!backend::is_of_device(&*error), "{error} for {call:?}"),
        }
        backend.synchronize().map_err(|error| TestCaseError::fail(format!("{error} after {call:?}")))
    });
    run.unwrap();
    let taken = taken.get();
    assert!(taken > cases / 4, "only {taken} of {cases} calls were taken: the test tests refusals alone");
}
