//! The fused linear against the reference, in memory where everything that no operand covers is NaN.

use aril::{
    DType, Element, Slot,
    cuda::{LaunchError, raw},
    plan::{Capacity, MAX_FORWARD_TOKENS, PlanError},
};
use proptest::prelude::*;

use crate::{
    common::{
        cases::{Case, Dtype, Site, Sizes, Values, World, compare},
        forward::{Base, forward_cases},
    },
    device::{Buffer, Gpu},
    for_dtype,
    operations::{PoisonedTable, batch, bits, capacity, config},
};

const SIZES: Sizes = Sizes { max_tokens: MAX_FORWARD_TOKENS, ..Sizes::LARGE };

/// How it is launched.
#[derive(Clone, Copy, Default)]
struct Way {
    accumulates: bool,
    /// Every block computes all that it needs.
    withholds: bool,
    captured: bool,
}

fn run<T: Element>(gpu: &Gpu, case: &Case, world: &World<T>, way: Way) -> Vec<T> {
    let (tokens, model, stream) = (case.num_tokens(), &world.model, gpu.raw_stream());
    let Site::Linear(id) = world.site else { panic!("the case is of a linear layer") };
    let (base, capacity) = (Base::<T>::of(case), capacity(world, tokens));
    let memory = gpu.poisoned(raw::Routing::device_bytes(capacity).unwrap());
    // SAFETY: the memory outlives the routing and is used on one stream.
    let mut routing = unsafe { raw::Routing::new(&gpu.kernels, capacity, 1, memory.region()) }.unwrap();
    // SAFETY: the stream is alive and not capturing.
    let batch = unsafe { routing.update(&batch(world), stream) }.unwrap();
    let table = PoisonedTable::new(gpu, world, capacity.num_slots);

    let at = |buffer: &Buffer, elems: usize| buffer.address() + (elems * size_of::<T>()) as u64;
    let w: Vec<Buffer> = base.slices.iter().map(|(_, w)| gpu.upload(w)).collect();
    let slices: Vec<_> = (base.slices.iter().zip(&w))
        .map(|((place, _), w)| raw::MatrixRef::new::<T>(w.address(), place.rows, place.cols).row_stride(place.stride))
        .collect();
    let layer = raw::FusedLinear::new(&gpu.kernels, model, id, T::DTYPE, capacity, &slices).unwrap();
    let bias = base.bias.as_ref().map(|bias| gpu.upload(bias));
    let layer = bias.as_ref().map_or(layer.clone(), |bias| layer.with_bias(bias.address()));
    let layer = if way.withholds { layer.withholding() } else { layer };

    let (x, y) = (gpu.upload(&world.x), gpu.upload(&world.y));
    let x_matrix = raw::MatrixRef::new::<T>(at(&x, case.x_offset), tokens, case.in_features());
    let x_matrix = x_matrix.row_stride(case.x_stride());
    let y_cols = case.slices().iter().sum();
    let y_matrix = raw::MatrixMut::new::<T>(at(&y, case.y_offset), tokens, y_cols).row_stride(case.y_stride());
    // Of the exchange only the header is what it must be.
    let mut exchange = vec![0xff_u8; layer.plan().workspace_bytes().exchange];
    exchange.iter_mut().take(128).for_each(|byte| *byte = 0);
    let exchange = gpu.upload(&exchange);
    let workspace = raw::Workspace { exchange: exchange.region(), planes: raw::DeviceRegion { ptr: 0, bytes: 0 } };
    let weights = raw::LayerWeights::new(
        table.table.address(),
        capacity.num_slots,
        model.num_entries(),
        model[id].first_entry(),
        capacity.max_rank,
    );
    let launch = || {
        if way.accumulates {
            // SAFETY: all operands are the test's own, and alive until the stream is synchronized.
            unsafe { layer.accumulate(x_matrix, y_matrix, weights, batch, workspace, stream) }.unwrap();
        } else {
            // SAFETY: as above.
            unsafe { layer.forward(x_matrix, y_matrix, weights, batch, workspace, stream) }.unwrap();
        }
    };
    if way.captured {
        gpu.capture(launch).replay();
    } else {
        launch();
    }
    y.read()
}

fn property(cases: u32, test: impl Fn(Case) -> Result<(), TestCaseError>) {
    let sixteen_bits = forward_cases(SIZES).prop_map(|case| {
        let dtype = if case.dtype == Dtype::F32 { Dtype::BF16 } else { case.dtype };
        Case { dtype, ..case }
    });
    let result = match Case::from_environment() {
        Some(case) => test(case).map_err(|error| error.to_string()),
        None => proptest::test_runner::TestRunner::new(config(cases))
            .run(&sixteen_bits, test)
            .map_err(|error| error.to_string()),
    };
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn the_fused_linear_agrees_with_the_reference() {
    fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let (world, base) = (case.world::<T>(), Base::<T>::of(case));
        let way = Way {
            accumulates: case.seed.is_multiple_of(3),
            withholds: case.seed.is_multiple_of(5),
            captured: case.seed.is_multiple_of(2),
        };
        let got = run(gpu, case, &world, way);
        compare(case.y_place(), &got, &base.expected(case, &world, way.accumulates), &case.replay())
    }
    let gpu = Gpu::new();
    property(150, |case| for_dtype!(case, check(&gpu, &case)));
}

/// The same bits: twice, captured or not, whoever computes v, and in whatever company.
#[test]
#[ignore = "needs a GPU"]
fn a_tokens_bits_depend_on_nothing_else_in_the_fused_linear() {
    fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
        let world = case.world::<T>();
        let first = run(gpu, case, &world, Way::default());
        let ways = [
            ("twice", Way::default()),
            ("captured", Way { captured: true, ..Way::default() }),
            ("withheld", Way { withholds: true, ..Way::default() }),
        ];
        for (name, way) in ways {
            prop_assert!(bits(&first) == bits(&run(gpu, case, &world, way)), "{name} differs\n{}", case.replay());
        }
        for tokens in [1, 8, 9, 16, 17, 32, 33].into_iter().filter(|&tokens| tokens < case.num_tokens()) {
            let (mut fewer, mut world) = (case.clone(), case.world::<T>());
            fewer.slots.truncate(tokens);
            world.slots.truncate(tokens);
            world.scales.iter_mut().for_each(|scales| scales.truncate(tokens));
            let rows = ..case.y_offset + tokens * case.y_stride();
            let fewer = run(gpu, &fewer, &world, Way::default());
            prop_assert!(bits(&first[rows]) == bits(&fewer[rows]), "{tokens} tokens differ\n{}", case.replay());
        }
        let mut base = case.world::<T>();
        base.slots.fill(Slot::BASE);
        let base = run(gpu, case, &base, Way::default());
        for token in 0..case.num_tokens() {
            if world.slots[token].index().is_some_and(|slot| slot < world.adapters.len()) {
                continue;
            }
            let row = case.y_offset + token * case.y_stride()..case.y_offset + (token + 1) * case.y_stride();
            prop_assert!(bits(&first[row.clone()]) == bits(&base[row]), "base row {token} differs\n{}", case.replay());
        }
        Ok(())
    }
    let gpu = Gpu::new();
    property(40, |case| for_dtype!(case, check(&gpu, &case)));
    for dtype in [Dtype::BF16, Dtype::F16] {
        let slots = (0..64).map(|token| token % 7 - 1).collect();
        let adapters: [&[usize]; 5] = [&[16, 8], &[1, 128], &[64, 0], &[33, 7], &[100, 512]];
        let case = Case { dtype, values: Values::Rounded, ..Case::linear(1304, &[4096, 40], &adapters, slots) };
        for_dtype!(case, check(&gpu, &case)).unwrap();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn what_the_fused_linear_cannot_read_is_refused_by_name() {
    let gpu = Gpu::new();
    let case = Case::linear(16, &[8], &[&[4]], vec![0]);
    let world = case.world::<half::bf16>();
    let Site::Linear(id) = world.site else { panic!("the case is of a linear layer") };
    let new = |capacity: Capacity, dtype, w: raw::MatrixRef| {
        raw::FusedLinear::new(&gpu.kernels, &world.model, id, dtype, capacity, &[w]).map(|_| ())
    };
    let (capacity, w) = (capacity(&world, 1), gpu.poisoned(4096));
    let matrix = |offset: u64| raw::MatrixRef::new::<half::bf16>(w.address() + offset, 8, 16);
    new(capacity, DType::BF16, matrix(16)).unwrap();
    for misaligned in [matrix(2), matrix(0).row_stride(17)] {
        let error = new(capacity, DType::BF16, misaligned).unwrap_err();
        assert!(matches!(error, LaunchError::Misaligned { operand: "W", alignment: 16 }), "{error}");
    }
    let error = new(capacity, DType::F32, matrix(0)).unwrap_err();
    assert!(matches!(error, LaunchError::Plan(PlanError::ForwardDType { got: DType::F32 })), "{error}");
}
