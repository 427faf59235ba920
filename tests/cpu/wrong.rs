//! The CPU refuses the operands of `common::wrong`, and changes nothing.

use aril::{
    Element, IntoSlices as _, Slices,
    cpu::{FullyShardedLinear, FusedLinear, LoraEmbedding, LoraExperts, LoraLinear, Matrix, MatrixMut, Workspace},
    error::OperandError,
    routing::{Batch, TopK},
};
use half::{bf16, f16};

use crate::common::{
    cpu::table,
    wrong::{ACTIVATION, Call, Choice, LEN, Op, Projection, World, check},
};

fn to<T: Element>(data: &mut [T], [rows, cols, stride]: [usize; 3]) -> Result<MatrixMut<'_, T>, OperandError> {
    MatrixMut::strided(data, rows, cols, stride)
}

/// The matrix of all slices, or one of each.
fn ys<'a, T: Element>(
    whole: &'a mut [T],
    parts: &'a mut [[T; LEN]],
    call: Call,
) -> Result<Slices<MatrixMut<'a, T>>, OperandError> {
    if call.y_slices.is_empty() {
        return Ok(to(whole, call.y)?.into_slices());
    }
    parts.iter_mut().zip(call.y_slices).map(|(part, shape)| to(part, *shape)).collect()
}

fn run<T: Element>(world: &World, call: Call) -> Result<(), OperandError> {
    let [own, other] =
        world.models.each_ref().map(|model| table(model, World::dtype(), World::capacity(), &[World::adapter()]));
    let weights = if call.is_of_other_table { &other } else { &own };
    let (slots, mut workspace) = (vec![weights.get(0).unwrap().slot; call.tokens], Workspace::default());
    let (inputs, seven, ids) = ([T::from_f32(1.0); LEN], T::from_f32(7.0), [0; LEN]);
    let (ones, rows): ([f32; LEN], Vec<i32>) = ([1.0; LEN], (0..LEN as i32).collect());
    let (mut y, mut out, mut v) = ([seven; LEN], [seven; LEN], [7.0_f32; LEN]);
    let mut parts = vec![[seven; LEN]; call.y_slices.len()];
    let matrix = |[rows, cols, stride]: [usize; 3]| Matrix::strided(&inputs, rows, cols, stride);
    let result = (|| -> Result<(), OperandError> {
        let batch = Batch::new(&slots);
        let linear = || LoraLinear::new(&own, world.id(call.of));
        let mut step = weights.step(&batch, &mut workspace)?;
        let ws = |w| (0..call.num_w()).map(|_| matrix(w)).collect::<Result<Vec<_>, _>>();
        let (whole, parts) = (&mut y, &mut parts);
        match call.op {
            Op::AddDelta => linear()?.add_delta(&mut step, matrix(call.x)?, ys(whole, parts, call)?),
            Op::WriteDelta => linear()?.write_delta(&mut step, matrix(call.x)?, ys(whole, parts, call)?),
            Op::Expand => linear()?.shrink(&mut step, matrix(call.x)?)?.expand(ys(whole, parts, call)?),
            Op::SiluMul => {
                let (layer, out) = (linear()?, to(&mut out, call.out)?);
                let shrunk = layer.shrink(&mut step, matrix(call.x)?)?;
                if call.y_slices.is_empty() {
                    return shrunk.silu_mul(matrix(call.y)?, out);
                }
                shrunk
                    .silu_mul(call.y_slices.iter().map(|shape| matrix(*shape)).collect::<Result<Slices<_>, _>>()?, out)
            }
            Op::Forward { w } => FusedLinear::new(&own, world.id(call.of), ws(w)?)?.forward(
                &mut step,
                matrix(call.x)?,
                ys(whole, parts, call)?,
            ),
            Op::Accumulate { w } => FusedLinear::new(&own, world.id(call.of), ws(w)?)?.accumulate(
                &mut step,
                matrix(call.x)?,
                ys(whole, parts, call)?,
            ),
            Op::Embedding { ids: num_ids } => {
                let layer = LoraEmbedding::new(&own, world.embedding(call.of))?;
                layer.add_delta(&mut step, &ids[..num_ids], to(&mut y, call.y)?)
            }
            Op::Experts { at, choice: Choice { ids: num_ids, top_k, weights, rows: num_rows } } => {
                let layer = LoraExperts::new(&own, world.experts(call.of))?;
                let top_k = TopK::new(&ids[..num_ids], top_k)?.with_weights(&ones[..weights])?;
                let (step, top_k, x) = (&mut step, &top_k.with_rows(&rows[..num_rows])?, matrix(call.x)?);
                match at {
                    Projection::AddGateUp => layer.add_gate_up_delta(step, top_k, x, to(&mut y, call.y)?),
                    Projection::WriteGateUp => layer.write_gate_up_delta(step, top_k, x, to(&mut y, call.y)?),
                    Projection::Activate => {
                        layer.activate(step, top_k, x, matrix(call.y)?, to(&mut out, call.out)?, ACTIVATION)
                    }
                    Projection::AddDown => layer.add_down_delta(step, top_k, x, to(&mut y, call.y)?),
                    Projection::WriteDown => layer.write_down_delta(step, top_k, x, to(&mut y, call.y)?),
                    Projection::AddCombined => layer.add_combined_delta(step, top_k, x, to(&mut y, call.y)?),
                    Projection::Combine => layer.combine(step, top_k, x, matrix(call.y)?, to(&mut out, call.out)?),
                }
            }
            Op::ShardedShrink => {
                let layer = FullyShardedLinear::new(&own, world.id(call.of))?;
                layer.shrink(&step, matrix(call.x)?, to(&mut v, call.y)?)
            }
            Op::ShardedExpand => {
                let [rows, cols, stride] = call.x;
                let layer = FullyShardedLinear::new(&own, world.id(call.of))?;
                layer.expand(&step, Matrix::strided(&ones, rows, cols, stride)?, to(&mut y, call.y)?)
            }
        }
    })();
    let is_unchanged = [&[y, out][..], &parts].concat().concat().iter().all(|value| *value == seven) && v == [7.0; LEN];
    assert!(result.is_ok() || is_unchanged, "{call:?}");
    result
}

#[test]
fn what_does_not_fit_is_refused_by_the_errors_of_every_backend() {
    let world = World::new();
    check(|call| if call.is_f16 { run::<f16>(&world, call) } else { run::<bf16>(&world, call) });
}
