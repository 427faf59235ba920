//! Operands that an operation refuses, and the error, which is the same on every backend.

use aril::{
    DType,
    error::OperandError,
    model::{EmbeddingId, Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
    plan::{Capacity, PlanError},
};

pub const TOKENS: usize = 3;
pub const FEATURES: usize = 8;
/// Elements of each buffer.
pub const LEN: usize = 64;

#[derive(Clone, Copy, Debug)]
pub enum Op {
    AddDelta,
    WriteDelta,
    Expand,
    SiluMul,
    AddRmsNorm { weight: usize },
    Forward { w: [usize; 3] },
    Accumulate { w: [usize; 3] },
    Embedding { ids: usize },
}

/// A layer, by its slices.
#[derive(Clone, Copy, Debug)]
pub enum Of {
    /// 8 outputs.
    One,
    /// 4 and 4 outputs.
    Pair,
    /// 12 inputs and 8 outputs.
    Odd,
    /// 8 outputs, of another model.
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
    pub out: [usize; 3],
}

/// Two models of equal layers, from two descriptions.
pub struct World {
    pub models: [Model; 2],
    pub ids: [[LinearId; 3]; 2],
    pub embeddings: [EmbeddingId; 2],
}

impl World {
    pub fn new() -> Self {
        let [own, other] = [(); 2].map(|()| {
            let mut spec = ModelSpec::new();
            let layer = |name, inputs| Linear::new(name, Parallel::Replicated, inputs);
            let one = spec.linear(layer("one", FEATURES).slice("m", 8)).unwrap();
            let pair = spec.linear(layer("pair", FEATURES).slice("gate", 4).slice("up", 4)).unwrap();
            let odd = spec.linear(layer("odd", 12).slice("m", 8)).unwrap();
            let embedding = spec.embedding("embed", 5, 8).unwrap();
            (spec.shard(TpRank::SINGLE).unwrap(), [one, pair, odd], embedding)
        });
        Self { models: [own.0, other.0], ids: [own.1, other.1], embeddings: [own.2, other.2] }
    }

    pub fn capacity() -> Capacity {
        Capacity::tokens(TOKENS + 1).slots(1).rank(8)
    }

    pub fn dtype() -> DType {
        DType::BF16
    }

    pub fn id(&self, of: Of) -> LinearId {
        match of {
            Of::One => self.ids[0][0],
            Of::Pair => self.ids[0][1],
            Of::Odd => self.ids[0][2],
            Of::Foreign => self.ids[1][0],
        }
    }

    pub fn embedding(&self, of: Of) -> EmbeddingId {
        self.embeddings[usize::from(matches!(of, Of::Foreign))]
    }
}

/// A call whose operands fit.
fn fitting(op: Op, of: Of) -> Call {
    let rows = [TOKENS, FEATURES, FEATURES];
    let out = if matches!(op, Op::SiluMul) { [TOKENS, 4, 4] } else { rows };
    Call { op, of, tokens: TOKENS, is_f16: false, is_of_other_table: false, x: rows, y: rows, out }
}

/// Runs every call. Those that fit succeed, all others fail with the named error.
pub fn check(mut run: impl FnMut(Call) -> Result<(), OperandError>) {
    const W: [usize; 3] = [8, FEATURES, FEATURES];
    let shape = |operand, [rows, cols, _]: [usize; 3], [want_rows, want_cols]: [usize; 2]| OperandError::Shape {
        operand,
        rows,
        cols,
        want_rows,
        want_cols,
    };
    let too_many = OperandError::Capacity { what: "the batch's tokens", got: TOKENS + 2, max: TOKENS + 1 };
    let (narrow, short, apart) = ([TOKENS, 7, 7], [TOKENS - 1, 8, 8], [TOKENS, 8, 12]);
    let mut calls = Vec::new();
    let linear = [Op::AddDelta, Op::WriteDelta, Op::Forward { w: W }, Op::Accumulate { w: W }];
    let after = [Op::Expand, Op::AddRmsNorm { weight: 8 }, Op::Embedding { ids: TOKENS }];
    for op in linear.into_iter().chain(after).chain([Op::SiluMul]) {
        let call = fitting(op, if matches!(op, Op::SiluMul) { Of::Pair } else { Of::One });
        calls.push((call, None));
        calls.push((Call { is_of_other_table: true, ..call }, Some(OperandError::Model)));
        calls.push((Call { tokens: TOKENS + 2, ..call }, Some(too_many.clone())));
        if !matches!(op, Op::SiluMul) {
            calls.push((Call { of: Of::Foreign, ..call }, Some(PlanError::Foreign.into())));
        }
        for y in [narrow, short] {
            calls.push((Call { y, ..call }, Some(shape("y", y, [TOKENS, 8]))));
        }
        let overlapping = OperandError::Overlap { operand: "y", cols: 8, row_stride: 4 };
        if !matches!(op, Op::SiluMul | Op::AddRmsNorm { .. }) {
            calls.push((Call { y: [TOKENS, 8, 4], ..call }, Some(overlapping)));
        }
    }
    for op in linear {
        let call = fitting(op, Of::One);
        for x in [narrow, short] {
            calls.push((Call { x, ..call }, Some(shape("x", x, [TOKENS, 8]))));
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
    let out = [TOKENS, 8, 8];
    calls.push((Call { out, ..fitting(Op::SiluMul, Of::Pair) }, Some(shape("out", out, [TOKENS, 4]))));
    calls.push((fitting(Op::SiluMul, Of::One), Some(OperandError::GateUp { outputs: vec![8] })));
    let norm = Op::AddRmsNorm { weight: 8 };
    calls.push((Call { out: short, ..fitting(norm, Of::One) }, Some(shape("residual", short, [TOKENS, 8]))));
    calls.push((fitting(norm, Of::Pair), Some(OperandError::NormSlices { slices: 2 })));
    let few_weights = OperandError::NormWeight { got: 7, want: 8 };
    calls.push((fitting(Op::AddRmsNorm { weight: 7 }, Of::One), Some(few_weights)));
    let ids = OperandError::Length { operand: "token_ids", got: 2, want: TOKENS };
    calls.push((fitting(Op::Embedding { ids: 2 }, Of::One), Some(ids)));
    let rows_of = |operand| OperandError::MisalignedRows { operand, alignment: 16, stride_bytes: 24 };
    calls.push((Call { x: apart, ..fitting(Op::Forward { w: W }, Of::One) }, Some(rows_of("x"))));
    calls.push((fitting(Op::Forward { w: [4, 8, 12] }, Of::Pair), Some(OperandError::Slices { got: 1, want: 2 })));
    calls.push((fitting(Op::Forward { w: [4, 8, 12] }, Of::One), Some(shape("W", [4, 8, 12], [8, 8]))));
    let odd = PlanError::Multiple { what: "in_features", value: 12, of: 8 };
    calls.push((fitting(Op::Forward { w: [8, 8, 8] }, Of::Odd), Some(odd.into())));
    for (call, error) in calls {
        assert_eq!(run(call).err(), error, "{call:?}");
    }
}
