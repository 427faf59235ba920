//! The GPU refuses the operands of `common::wrong`, and changes nothing.

use aril::{
    Element, IntoSlices as _, Slices,
    cuda::{
        FullyShardedLinear, FusedLinear, Grouping, LaunchError, LoraEmbedding, LoraExperts, LoraLinear, Matrix,
        MatrixMut, Routing, TopK, Workspace,
    },
    error::OperandError,
    routing::Batch,
};
use half::{bf16, f16};

use crate::{
    common::wrong::{ACTIVATION, Call, Choice, LEN, Op, Projection, World, check},
    device::{Buffer, Gpu},
    operations::table,
};

/// The matrix of all slices, or one of each.
fn ys<'a, T: Element>(
    call: Call,
    whole: impl FnOnce() -> Result<MatrixMut<'a, T>, LaunchError>,
    parts: &'a mut [Buffer],
) -> Result<Slices<MatrixMut<'a, T>>, LaunchError> {
    if call.y_slices.is_empty() {
        return Ok(whole()?.into_slices());
    }
    let part = |(part, &[rows, cols, stride]): (&'a mut Buffer, &[usize; 3])| {
        MatrixMut::strided(part.view_mut::<T>(), rows, cols, stride)
    };
    parts.iter_mut().zip(call.y_slices).map(part).collect()
}

fn run<T: Element>(gpu: &Gpu, world: &World, call: Call) -> Result<(), LaunchError> {
    let [own, other] = world
        .models
        .each_ref()
        .map(|model| table(&gpu.queue, model, World::dtype(), World::capacity(), &[World::adapter()]));
    let weights = if call.is_of_other_table { &other } else { &own };
    let slots = vec![weights.get(0).unwrap().slot; call.tokens];
    let mut routing = Routing::new(&gpu.queue, World::capacity(), 1).unwrap();
    let mut workspace = Workspace::new(&own).unwrap();
    let seven = T::from_f32(7.0);
    let (inputs, ids) = (gpu.upload(&[T::from_f32(1.0); LEN]), gpu.upload(&[0_i32; LEN]));
    let (ones, rows) = (gpu.upload(&[1.0_f32; LEN]), gpu.upload(&std::array::from_fn::<_, LEN, _>(|row| row as i32)));
    let [mut y, mut out] = [(); 2].map(|()| gpu.upload(&[seven; LEN]));
    let mut parts: Vec<_> = call.y_slices.iter().map(|_| gpu.upload(&[seven; LEN])).collect();
    let mut v = gpu.upload(&[7.0_f32; LEN]);
    let inputs = inputs.view::<T>();
    let matrix = |[rows, cols, stride]: [usize; 3]| Matrix::strided(inputs.slice(..), rows, cols, stride);
    let result = (|| -> Result<(), LaunchError> {
        let [y, out] = [&mut y, &mut out].map(|buffer| buffer.view_mut::<T>());
        let [y_shape, out_shape] = [call.y, call.out];
        let batch = routing.update(&Batch::new(&slots))?;
        let linear = || LoraLinear::new(&own, world.id(call.of));
        let mut step = weights.step(&batch, &mut workspace)?;
        let y = move || MatrixMut::strided(y, y_shape[0], y_shape[1], y_shape[2]);
        let ws = |w| (0..call.num_w()).map(|_| matrix(w)).collect::<Result<Vec<_>, _>>();
        let out = move || MatrixMut::strided(out, out_shape[0], out_shape[1], out_shape[2]);
        let parts = &mut parts[..];
        match call.op {
            Op::AddDelta => linear()?.add_delta(&mut step, matrix(call.x)?, ys(call, y, parts)?),
            Op::WriteDelta => linear()?.write_delta(&mut step, matrix(call.x)?, ys(call, y, parts)?),
            Op::Expand => linear()?.shrink(&mut step, matrix(call.x)?)?.expand(ys(call, y, parts)?),
            Op::SiluMul => {
                let (layer, out) = (linear()?, out()?);
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
                ys(call, y, parts)?,
            ),
            Op::Accumulate { w } => FusedLinear::new(&own, world.id(call.of), ws(w)?)?.accumulate(
                &mut step,
                matrix(call.x)?,
                ys(call, y, parts)?,
            ),
            Op::Embedding { ids: num_ids } => {
                let layer = LoraEmbedding::new(&own, world.embedding(call.of))?;
                let ids = ids.view::<i32>();
                layer.add_delta(&mut step, ids.slice(..num_ids), y()?)
            }
            Op::Experts { at, choice: Choice { ids: num_ids, top_k, weights, rows: num_rows } } => {
                let layer = LoraExperts::new(&own, world.experts(call.of))?;
                let mut grouping = Grouping::new(&gpu.queue, layer.plan().routes())?;
                let (ids, ones, rows) = (ids.view::<i32>(), ones.view::<f32>(), rows.view::<i32>());
                let top_k = TopK::new(ids.slice(..num_ids), top_k)?.with_weights(ones.slice(..weights))?;
                let routes = &mut grouping.update(&mut step, top_k.with_rows(rows.slice(..num_rows))?)?;
                let (step, x) = (&mut step, matrix(call.x)?);
                match at {
                    Projection::AddGateUp => layer.add_gate_up_delta(step, routes, x, y()?),
                    Projection::WriteGateUp => layer.write_gate_up_delta(step, routes, x, y()?),
                    Projection::Activate => layer.activate(step, routes, x, matrix(call.y)?, out()?, ACTIVATION),
                    Projection::AddDown => layer.add_down_delta(step, routes, x, y()?),
                    Projection::WriteDown => layer.write_down_delta(step, routes, x, y()?),
                    Projection::AddCombined => layer.add_combined_delta(step, routes, x, y()?),
                    Projection::Combine => layer.combine(step, routes, x, matrix(call.y)?, out()?),
                }
            }
            Op::ShardedShrink => {
                let layer = FullyShardedLinear::new(&own, world.id(call.of))?;
                let v = MatrixMut::strided(v.view_mut::<f32>(), y_shape[0], y_shape[1], y_shape[2])?;
                layer.shrink(&step, matrix(call.x)?, v)
            }
            Op::ShardedExpand => {
                let ([rows, cols, stride], v) = (call.x, ones.view::<f32>());
                let layer = FullyShardedLinear::new(&own, world.id(call.of))?;
                layer.expand(&step, Matrix::strided(v, rows, cols, stride)?, y()?)
            }
        }
    })();
    let written: Vec<T> = [y, out].iter().chain(&parts).flat_map(|buffer| buffer.read()).collect();
    let is_unchanged = written.iter().all(|value| *value == seven) && v.read::<f32>() == [7.0; LEN];
    assert!(result.is_ok() || is_unchanged, "{call:?}");
    result
}

#[test]
#[ignore = "needs a GPU"]
fn what_does_not_fit_is_refused_by_the_errors_of_every_backend() {
    let (gpu, world) = (Gpu::new(), World::new());
    let of_both = |error| match error {
        LaunchError::Operand(error) => error,
        LaunchError::Plan(error) => OperandError::from(error),
        error => panic!("the CPU has no such error: {error}"),
    };
    check(|call| {
        let result = if call.is_f16 { run::<f16>(&gpu, &world, call) } else { run::<bf16>(&gpu, &world, call) };
        result.map_err(of_both)
    });
}
