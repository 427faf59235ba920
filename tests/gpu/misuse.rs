//! Mistakes with graphs, streams and routings, each by its name, and those of every backend (tests/model/misuse.rs).

use aril::{
    DType, Slot,
    cuda::{Buffer, LaunchError, Queue, Step, WeightTable},
    plan::Capacity,
    routing::Batch,
};

use crate::{
    backend::{Backend, Graph, LoraLinear, Matrix, MatrixMut, Routing, Workspace},
    model::misuse::{Mistake, Outcome, World, capacity, check, every_mistake_is_named},
};

const FEATURES: usize = 64;

/// A graph of this many tokens on the world's objects.
fn capture(world: &mut World<'_>, tokens: usize) -> Result<Graph, LaunchError> {
    let layer = LoraLinear::new(&world.weights, world.id)?;
    let (x, y) = (&world.x, &mut world.y);
    world.weights.capture(&world.routing, tokens, &mut world.workspace, |step| {
        layer.add_delta(step, Matrix::<f32>::new(x, tokens, FEATURES)?, MatrixMut::<f32>::new(y, tokens, FEATURES)?)
    })
}

/// Captures what `record` does beside an operation.
fn capturing(world: &mut World<'_>, record: impl FnOnce(&WeightTable, &mut Step<'_>) -> Outcome) -> Outcome {
    let mut result = Ok(());
    let captured = world.weights.capture::<LaunchError>(&world.routing, 1, &mut world.workspace, |step| {
        result = record(&world.weights, step);
        Ok(())
    });
    result?;
    Ok(captured.map(drop)?)
}

/// A step on a table, a routing and a workspace.
fn step(weights: &WeightTable, routing: &mut Routing, workspace: &mut Workspace) -> Outcome {
    let batch = routing.update(&Batch::new(&[Slot::BASE]))?;
    Ok(weights.step(&batch, workspace).map(drop)?)
}

const NOTHING: &str = "the captured step enqueued no work";

const MISTAKES: &[Mistake] = &[
    Mistake(
        "a routing is for another number of slots than the table",
        "the routing has 1 slots, but the table has 2",
        |world| {
            let mut routing = world.backend.routing(0, capacity().slots(1))?;
            step(&world.weights, &mut routing, &mut world.workspace)
        },
    ),
    Mistake(
        "a capture's routing is for another number of slots than the table",
        "the routing has 3 slots, but the table has 2",
        |world| {
            world.routing = world.backend.routing(0, capacity().slots(3))?;
            Ok(capture(world, 1).map(drop)?)
        },
    ),
    Mistake("a workspace is one of another stream", "the workspace was created on a different stream", |world| {
        let mut workspace = world.backend.workspace(1, &world.weights);
        step(&world.weights, &mut world.routing, &mut workspace)
    }),
    Mistake("a workspace is too small", "the workspace has", |world| {
        world.workspace = Workspace::with_bytes(world.backend.queue(0), aril::plan::WorkspaceBytes::default())?;
        capture(world, 1).map(drop)?;
        Ok(())
    }),
    Mistake("a routing is one of another stream", "the batch was created on a different stream", |world| {
        let mut routing = world.backend.routing(1, capacity())?;
        step(&world.weights, &mut routing, &mut world.workspace)
    }),
    Mistake("an operand is a buffer of another stream", "was created on a different stream", |world| {
        world.x = world.backend.elements(1, &[1.0; FEATURES]);
        Ok(capture(world, 1).map(drop)?)
    }),
    Mistake(
        "a host runs further ahead than its routing has staging buffers",
        "all 1 staging buffers of the routing are in use",
        |world| {
            let mut routing = Routing::new(world.backend.queue(0), capacity(), 1)?;
            // The stream waits for what the host enqueues faster than the device copies.
            for _ in 0..100_000 {
                routing.update(&Batch::new(&[Slot::BASE]))?;
            }
            Ok(())
        },
    ),
    Mistake(
        "a graph is smaller than the batch",
        "the batch's tokens for this graph must be at most 1, not 2",
        |world| {
            let (mut graph, slot) = (capture(world, 1)?, world.slot());
            let batch = world.routing.update(&Batch::new(&[slot; 2]))?;
            Ok(graph.replay(&mut world.weights.step(&batch, &mut world.workspace)?)?)
        },
    ),
    Mistake(
        "another routing than the captured one was updated",
        "the graph was captured with another routing than the step's",
        |world| {
            let (mut graph, slot) = (capture(world, 1)?, world.slot());
            let mut other = world.backend.routing(0, capacity())?;
            let batch = other.update(&Batch::new(&[slot]))?;
            Ok(graph.replay(&mut world.weights.step(&batch, &mut world.workspace)?)?)
        },
    ),
    Mistake("a graph is replayed in a step of another table", "the graph was captured with another", |world| {
        let mut graph = capture(world, 1)?;
        let other = world.backend.table(&world.model, DType::F32, capacity(), 1 << 16)?;
        let slot = world.load(&other, 0, 5.0)?;
        let batch = world.routing.update(&Batch::new(&[slot]))?;
        Ok(graph.replay(&mut other.step(&batch, &mut world.workspace)?)?)
    }),
    Mistake(
        "a graph without adapters is replayed for a batch with one",
        "the graph was captured without adapters, and the batch has one",
        |world| {
            let slot = world.slot();
            let (x, y) = (&world.x, &mut world.y);
            let mut graph = world.weights.capture_without_adapters::<LaunchError>(
                &world.routing,
                1,
                &mut world.workspace,
                |step| step.copy(x.slice(0..1), y.slice_mut(0..1)),
            )?;
            let batch = world.routing.update(&Batch::new(&[slot]))?;
            Ok(graph.replay(&mut world.weights.step(&batch, &mut world.workspace)?)?)
        },
    ),
    Mistake("two queues use one slice", "`from` was created on a different stream", |world| {
        let [queue, other] = [0, 1].map(|stream| world.backend.queue(stream));
        let slice = queue.stream().alloc_zeros::<f32>(4)?;
        queue.copy(&slice, &mut Buffer::zeros(queue, 4)?)?;
        Ok(other.copy(&slice, &mut Buffer::zeros(other, 4)?)?)
    }),
    Mistake("an operation is called during a capture, and not on its step", NOTHING, |world| {
        let slot = world.slot();
        let (layer, mut routing) = (LoraLinear::new(&world.weights, world.id)?, world.backend.routing(0, capacity())?);
        let mut workspace = world.backend.workspace(0, &world.weights);
        let (x, mut y) = (world.backend.elements(0, &[1.0; FEATURES]), world.backend.elements(0, &[0.0; FEATURES]));
        capturing(world, |weights, _| {
            let batch = routing.update(&Batch::new(&[slot]))?;
            let mut step = weights.step(&batch, &mut workspace)?;
            let (x, y) = (Matrix::<f32>::new(&x, 1, FEATURES)?, MatrixMut::<f32>::new(&mut y, 1, FEATURES)?);
            Ok(layer.add_delta(&mut step, x, y)?)
        })
    }),
    Mistake("nothing is captured", NOTHING, |world| capturing(world, |_, _| Ok(()))),
    Mistake("a queue copies during a capture, in the place of its step", NOTHING, |world| {
        let (queue, x) = (world.backend.queue(0).clone(), world.backend.elements(0, &[1.0; 4]));
        let mut to = Buffer::zeros(&queue, 4)?;
        capturing(world, |_, _| Ok(Queue::copy(&queue, &x, &mut to)?))
    }),
    Mistake(
        "an operand of a captured step is borrowed",
        "is borrowed, but the operands of a captured step must be buffers",
        |world| {
            let stream = world.backend.queue(0).stream();
            let slice = stream.alloc_zeros::<f32>(FEATURES)?;
            let layer = LoraLinear::new(&world.weights, world.id)?;
            let (routing, y) = (&world.routing, &mut world.y);
            let captured = world.weights.capture::<LaunchError>(routing, 1, &mut world.workspace, |step| {
                layer.add_delta(step, Matrix::new(&slice, 1, FEATURES)?, MatrixMut::<f32>::new(y, 1, FEATURES)?)
            });
            Ok(captured.map(drop)?)
        },
    ),
    Mistake("a graph is longer than its routing", "the batch's tokens must be at most 2, not 4", |world| {
        world.x = world.backend.elements(0, &[1.0; 4 * FEATURES]);
        world.routing = world.backend.routing(0, Capacity::tokens(2).slots(2).rank(8))?;
        Ok(capture(world, 4).map(drop)?)
    }),
];

#[test]
#[ignore = "needs a GPU"]
fn every_mistake_is_named_on_the_gpu() {
    let backend = Backend::new();
    every_mistake_is_named(&backend);
    check(&backend, MISTAKES);
}
