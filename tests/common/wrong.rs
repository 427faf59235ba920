//! Operands that an operation refuses, and the error, which is the same on every backend.

use aril::{
    DType,
    adapter::Adapter,
    error::OperandError,
    model::{Activation, EmbeddingId, Experts, ExpertsId, Linear, LinearId, Model, ModelSpec, Parallel, Shard, TpRank},
    plan::{Capacity, PlanError},
};

use super::adapters::{self, Lora};

pub const TOKENS: usize = 3;
pub const FEATURES: usize = 8;
pub const TOP_K: usize = 2;
pub const EXPERTS: usize = 3;
const ROUTES: usize = TOKENS * TOP_K;
/// Features between up and down, on this rank.
const INTER: usize = 2;
/// Elements of each buffer.
pub const LEN: usize = 64;

#[derive(Clone, Copy, Debug)]
pub enum Op {
    AddDelta,
    WriteDelta,
    Expand,
    SiluMul,
    Forward {
        w: [usize; 3],
    },
    Accumulate {
        w: [usize; 3],
    },
    Embedding {
        ids: usize,
    },
    Experts {
        at: Projection,
        choice: Choice,
    },
    /// `y` is v.
    ShardedShrink,
    /// `x` is v.
    ShardedExpand,
}

/// Where an operation on experts is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Projection {
    AddGateUp,
    WriteGateUp,
    Activate,
    AddDown,
    WriteDown,
    AddCombined,
    Combine,
}

/// The lengths of a router's choice.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    pub ids: usize,
    pub top_k: usize,
    pub weights: usize,
    pub rows: usize,
}

const PROJECTIONS: [Projection; 7] = [
    Projection::AddGateUp,
    Projection::WriteGateUp,
    Projection::Activate,
    Projection::AddDown,
    Projection::WriteDown,
    Projection::AddCombined,
    Projection::Combine,
];
/// It needs a gate.
pub const ACTIVATION: Activation = Activation::GPT_OSS;
const CHOICE: Choice = Choice { ids: ROUTES, top_k: TOP_K, weights: ROUTES, rows: ROUTES };

/// A layer, by its slices.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    /// 8 outputs.
    One,
    /// 4 and 4 outputs.
    Pair,
    /// 12 inputs and 8 outputs.
    Odd,
    /// 4 outputs on this rank, of 8. A on this rank has half of its rows.
    Column,
    /// Gated experts.
    Gated,
    /// Experts without a gate.
    Ungated,
    /// 8 outputs, or gated experts, of another model.
    Foreign,
}

/// An operation with operands of these rows, columns and row strides.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub op: Op,
    pub of: Of,
    pub tokens: usize,
    /// The operands are in `f16` instead of the table's `bf16`.
    pub is_f16: bool,
    /// The step is of the table of another model, which describes equal layers.
    pub is_of_other_table: bool,
    pub x: [usize; 3],
    pub y: [usize; 3],
    /// If there are any: `y` is these matrices instead. Forward and accumulate then have two W.
    pub y_slices: &'static [[usize; 3]],
    pub out: [usize; 3],
}

impl Call {
    /// The matrices of W, of the layer's slices unless the layer is to refuse them.
    pub fn num_w(&self) -> usize {
        if self.y_slices.is_empty() { 1 } else { 2 }
    }
}

/// Two models of equal layers, from two descriptions, on the first of two ranks.
pub struct World {
    pub models: [Model; 2],
    layers: [[LinearId; 4]; 2],
    embeddings: [EmbeddingId; 2],
    experts: [[ExpertsId; 2]; 2],
}

impl World {
    pub fn new() -> Self {
        let [own, other] = [(); 2].map(|()| {
            let mut spec = ModelSpec::new();
            let layer = |name, inputs| Linear::new(name, Parallel::Replicated, inputs);
            let one = spec.linear(layer("one", FEATURES).slice("m", 8)).unwrap();
            let pair = spec.linear(layer("pair", FEATURES).slice("gate", 4).slice("up", 4)).unwrap();
            let odd = spec.linear(layer("odd", 12).slice("m", 8)).unwrap();
            let column = spec.linear(Linear::new("column", Parallel::Column, FEATURES).slice("m", 8)).unwrap();
            let embedding = spec.embedding("embed", 5, 8).unwrap();
            let experts = |path| Experts::new(path, EXPERTS, FEATURES, INTER).top_k(TOP_K);
            let [gated, ungated] =
                [experts("gated"), experts("ungated").ungated()].map(|site| spec.experts(site).unwrap());
            let shard = Shard::new(TpRank::new(0, 2).unwrap()).fully_sharded().experts_tp(TpRank::SINGLE);
            (spec.shard(shard).unwrap(), [one, pair, odd, column], embedding, [gated, ungated])
        });
        Self {
            models: [own.0, other.0],
            layers: [own.1, other.1],
            embeddings: [own.2, other.2],
            experts: [own.3, other.3],
        }
    }

    pub fn capacity() -> Capacity {
        Capacity::tokens(TOKENS + 1).slots(1).rank(8)
    }

    pub fn dtype() -> DType {
        DType::BF16
    }

    /// One for either model.
    pub fn adapter() -> Adapter {
        adapters::adapter(&[Lora::linear("one.m", FEATURES, 8, 1)])
    }

    pub fn id(&self, of: Of) -> LinearId {
        match of {
            Of::Pair => self.layers[0][1],
            Of::Odd => self.layers[0][2],
            Of::Column => self.layers[0][3],
            of => self.layers[Self::model(of)][0],
        }
    }

    pub fn embedding(&self, of: Of) -> EmbeddingId {
        self.embeddings[Self::model(of)]
    }

    pub fn experts(&self, of: Of) -> ExpertsId {
        self.experts[Self::model(of)][usize::from(matches!(of, Of::Ungated))]
    }

    fn model(of: Of) -> usize {
        usize::from(matches!(of, Of::Foreign))
    }
}

/// A call whose operands fit.
fn fitting(op: Op, of: Of) -> Call {
    let rows = [TOKENS, FEATURES, FEATURES];
    let (gate_up, inter, down) = ([ROUTES, 2 * INTER, 2 * INTER], [ROUTES, INTER, INTER], [ROUTES, FEATURES, FEATURES]);
    let [x, y, out] = match op {
        Op::SiluMul => [rows, rows, [TOKENS, 4, 4]],
        Op::ShardedShrink => [rows, [TOKENS, 4, 4], rows],
        Op::ShardedExpand => [[2 * TOKENS, 4, 4], [TOKENS, 4, 4], rows],
        Op::Experts { at: Projection::AddGateUp | Projection::WriteGateUp, .. } => [rows, gate_up, rows],
        Op::Experts { at: Projection::Activate, .. } => [rows, gate_up, inter],
        Op::Experts { at: Projection::AddDown | Projection::WriteDown, .. } => [inter, down, rows],
        Op::Experts { at: Projection::AddCombined, .. } => [inter, rows, rows],
        Op::Experts { at: Projection::Combine, .. } => [inter, down, rows],
        _ => [rows; 3],
    };
    Call { op, of, tokens: TOKENS, is_f16: false, is_of_other_table: false, x, y, y_slices: &[], out }
}

/// A matrix without its last column, and one without its last row.
fn too_small([rows, cols, _]: [usize; 3]) -> [[usize; 3]; 2] {
    [[rows, cols - 1, cols - 1], [rows - 1, cols, cols]]
}

fn shape(operand: &'static str, [rows, cols, _]: [usize; 3], [want_rows, want_cols, _]: [usize; 3]) -> OperandError {
    OperandError::Shape { operand, rows, cols, want_rows, want_cols }
}

/// What is common to all operations: the layer and the batch against the step, and the first operand against the layer.
fn of_any(op: Op, of: Of) -> Vec<(Call, Option<OperandError>)> {
    let call = fitting(op, of);
    let too_many = OperandError::Capacity { what: "the batch's tokens", got: TOKENS + 2, max: TOKENS + 1 };
    vec![
        (call, None),
        (Call { is_of_other_table: true, ..call }, Some(OperandError::Model)),
        (Call { tokens: TOKENS + 2, ..call }, Some(too_many)),
        (Call { of: Of::Foreign, ..call }, Some(PlanError::Foreign.into())),
    ]
}

/// Operations on experts, and those of fully sharded layers.
fn of_experts_and_ranks() -> Vec<(Call, Option<OperandError>)> {
    let of_type = |operand| OperandError::DType { operand, got: DType::F16, want: DType::BF16 };
    let mut calls = Vec::new();
    for at in PROJECTIONS {
        let op = Op::Experts { at, choice: CHOICE };
        let call = fitting(op, Of::Gated);
        calls.extend(of_any(op, Of::Gated));
        calls.push((Call { is_f16: true, ..call }, Some(of_type("x"))));
        let [xs, ys, outs] = [call.x, call.y, call.out].map(too_small);
        calls.extend(xs.map(|x| (Call { x, ..call }, Some(shape("x", x, call.x)))));
        calls.extend(ys.map(|y| (Call { y, ..call }, Some(shape("y", y, call.y)))));
        if matches!(at, Projection::Activate | Projection::Combine) {
            calls.extend(outs.map(|out| (Call { out, ..call }, Some(shape("out", out, call.out)))));
        }
        let of_routes = |operand| OperandError::Routes { operand, got: ROUTES - 1, want: ROUTES };
        for (choice, error) in [
            (Choice { ids: 4, weights: 4, rows: 4, ..CHOICE }, OperandError::Tokens { got: 2, want: TOKENS }),
            (Choice { ids: 5, ..CHOICE }, OperandError::TopK { ids: 5, top_k: TOP_K }),
            (Choice { top_k: 0, ..CHOICE }, OperandError::TopK { ids: ROUTES, top_k: 0 }),
            (
                Choice { ids: 9, top_k: 3, weights: 9, rows: 9 },
                OperandError::Capacity { what: "the routes of a token", got: 3, max: TOP_K },
            ),
            (Choice { weights: ROUTES - 1, ..CHOICE }, of_routes("weights")),
            (Choice { rows: ROUTES - 1, ..CHOICE }, of_routes("rows")),
        ] {
            calls.push((Call { op: Op::Experts { at, choice }, ..call }, Some(error)));
        }
    }
    let activate = Op::Experts { at: Projection::Activate, choice: CHOICE };
    let activation = Some(OperandError::Activation { activation: ACTIVATION });
    calls.push((fitting(activate, Of::Ungated), activation));

    for (op, operands) in [(Op::ShardedShrink, ["x", "v"]), (Op::ShardedExpand, ["v", "y"])] {
        let call = fitting(op, Of::Column);
        calls.extend(of_any(op, Of::Column));
        calls.push((Call { of: Of::One, ..call }, Some(PlanError::NotFullySharded.into())));
        let [xs, ys] = [call.x, call.y].map(too_small);
        calls.extend(xs.map(|x| (Call { x, ..call }, Some(shape(operands[0], x, call.x)))));
        calls.extend(ys.map(|y| (Call { y, ..call }, Some(shape(operands[1], y, call.y)))));
        let in_table_type = if matches!(op, Op::ShardedShrink) { "x" } else { "y" };
        calls.push((Call { is_f16: true, ..call }, Some(of_type(in_table_type))));
    }
    calls
}

/// Matrices of slices, for layers of two slices of four outputs.
fn of_slices() -> Vec<(Call, Option<OperandError>)> {
    const HALF: [usize; 3] = [TOKENS, 4, 4];
    const SPREAD: [usize; 3] = [TOKENS, 4, 6];
    const W: [usize; 3] = [4, FEATURES, FEATURES];
    let other_number = |got| Some(OperandError::Slices { operand: "y", got, want: 2 });
    let mut calls = Vec::new();
    let writing = [Op::AddDelta, Op::WriteDelta, Op::Expand, Op::Forward { w: W }, Op::Accumulate { w: W }];
    for op in writing.into_iter().chain([Op::SiluMul]) {
        let call = fitting(op, Of::Pair);
        let of = |y_slices, error| (Call { y_slices, ..call }, error);
        calls.extend([
            of(&[HALF, SPREAD], None),
            of(&[[TOKENS, 8, 8]], None),
            of(&[HALF], Some(shape("y", HALF, [TOKENS, 8, 8]))),
            of(&[HALF; 3], other_number(3)),
            of(&[HALF; 9], other_number(9)),
            of(&[[TOKENS, 5, 5], HALF], Some(shape("y[0]", [TOKENS, 5, 5], HALF))),
            of(&[HALF, [TOKENS, 3, 3]], Some(shape("y[1]", [TOKENS, 3, 3], HALF))),
            of(&[SPREAD, [TOKENS - 1, 4, 4]], Some(shape("y[1]", [TOKENS - 1, 4, 4], HALF))),
        ]);
    }
    let of_one_slice = Call { y_slices: &[HALF; 2], ..fitting(Op::AddDelta, Of::One) };
    calls.push((of_one_slice, Some(OperandError::Slices { operand: "y", got: 2, want: 1 })));
    calls
}

/// Runs every call. Those that fit succeed, all others fail with the named error.
pub fn check(mut run: impl FnMut(Call) -> Result<(), OperandError>) {
    const W: [usize; 3] = [8, FEATURES, FEATURES];
    const ROWS: [usize; 3] = [TOKENS, 8, 8];
    let ([narrow, short], apart) = (too_small(ROWS), [TOKENS, 8, 12]);
    let mut calls = of_experts_and_ranks();
    calls.extend(of_slices());
    let linear = [Op::AddDelta, Op::WriteDelta, Op::Forward { w: W }, Op::Accumulate { w: W }];
    let after = [Op::Expand, Op::Embedding { ids: TOKENS }];
    for op in linear.into_iter().chain(after).chain([Op::SiluMul]) {
        let of = if matches!(op, Op::SiluMul) { Of::Pair } else { Of::One };
        let call = fitting(op, of);
        calls.extend(of_any(op, of));
        for y in [narrow, short] {
            calls.push((Call { y, ..call }, Some(shape("y", y, ROWS))));
        }
        let overlapping = OperandError::Overlap { operand: "y", cols: 8, row_stride: 4 };
        if !matches!(op, Op::SiluMul) {
            calls.push((Call { y: [TOKENS, 8, 4], ..call }, Some(overlapping)));
        }
    }
    for op in linear {
        let call = fitting(op, Of::One);
        for x in [narrow, short] {
            calls.push((Call { x, ..call }, Some(shape("x", x, ROWS))));
        }
        let len = LEN;
        let beyond = OperandError::Extent { operand: "x", rows: TOKENS, cols: 8, row_stride: LEN, len };
        calls.push((Call { x: [TOKENS, 8, LEN], ..call }, Some(beyond)));
    }
    let of_type = |operand| OperandError::DType { operand, got: DType::F16, want: DType::BF16 };
    for (op, of, operand) in [
        (Op::AddDelta, Of::One, "x"),
        (Op::WriteDelta, Of::One, "x"),
        (Op::Embedding { ids: TOKENS }, Of::One, "y"),
        (Op::Forward { w: W }, Of::One, "W"),
    ] {
        calls.push((Call { is_f16: true, ..fitting(op, of) }, Some(of_type(operand))));
    }
    let out = [TOKENS, 4, 4];
    calls.push((Call { out: ROWS, ..fitting(Op::SiluMul, Of::Pair) }, Some(shape("out", ROWS, out))));
    calls.push((fitting(Op::SiluMul, Of::One), Some(OperandError::GateUp { outputs: vec![8] })));
    let ids = OperandError::Length { operand: "token_ids", got: 2, want: TOKENS };
    calls.push((fitting(Op::Embedding { ids: 2 }, Of::One), Some(ids)));
    // The stride of a single row means nothing.
    let [x, one] = [[1, FEATURES, usize::MAX], [1, 8, 8]];
    calls.push((Call { tokens: 1, x, y: one, ..fitting(Op::Forward { w: W }, Of::One) }, None));
    let rows_of = |operand| OperandError::MisalignedRows { operand, alignment: 16, stride_bytes: 24 };
    calls.push((Call { x: apart, ..fitting(Op::Forward { w: W }, Of::One) }, Some(rows_of("x"))));
    calls.push((
        fitting(Op::Forward { w: [4, 8, 12] }, Of::Pair),
        Some(OperandError::Slices { operand: "W", got: 1, want: 2 }),
    ));
    calls.push((fitting(Op::Forward { w: [4, 8, 12] }, Of::One), Some(shape("W", [4, 8, 12], W))));
    let odd = PlanError::Multiple { what: "in_features", value: 12, of: 8 };
    calls.push((fitting(Op::Forward { w: [8, 8, 8] }, Of::Odd), Some(odd.into())));
    for (call, error) in calls {
        assert_eq!(run(call).err(), error, "{call:?}");
    }
}
