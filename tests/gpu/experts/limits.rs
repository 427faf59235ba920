//! The largest numbers of slots, experts, routes, adapters and ranks, and more of them than a block handles at a time,
//! with data.

use aril::{Element, plan::MAX_SLOTS};

use super::steps::{Layer, goes_wide};
use crate::{
    common::{
        experts::{Case, Lora, OPERATIONS},
        values::{Dtype, Values},
    },
    device::Gpu,
    for_dtype,
};

const DTYPES: [Dtype; 3] = [Dtype::BF16, Dtype::F16, Dtype::F32];

/// Runs steps, each of all the tokens of `case`, with its adapters.
fn check<T: Element>(gpu: &Gpu, case: &Case, steps: &[Case]) {
    let mut layer = Layer::<T>::new(gpu, case, &OPERATIONS);
    let pairs = layer.load_all(case);
    for (number, step) in steps.iter().enumerate() {
        let what = format!("{} experts, {} routes, step {number}", case.shape.num_experts, step.num_routes());
        layer.check(step, step.num_tokens(), &pairs, &what, Layer::launch);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn adapters_in_any_slot_of_the_largest_table() {
    let gpu = Gpu::new();
    let mut adapters = vec![Lora::nothing(3); MAX_SLOTS];
    for (slot, rank) in [(0, 5), (511, 12), (512, 8), (4095, 1), (4096, 7)] {
        adapters[slot] = Lora::of_own_ranks(3, rank);
    }
    adapters[MAX_SLOTS - 1] = Lora::shared_outer(3, 9);
    // An empty slot of the table, a slot past its end, and none.
    let slots = [0, 511, 512, 8191, 4095, 4096, 8190, 8192, -1, 8191, i32::MAX];
    for tokens in [16, 200, 320] {
        let case = Case { empty_slots: 0, ..Case::new([3, 40, 24], adapters.clone(), [tokens, 4]) };
        for dtype in DTYPES {
            let [mut spread, mut of_the_last] = [(); 2].map(|()| Case { dtype, ..case.clone() });
            spread.choose(tokens, |token| slots[token as usize % slots.len()], |token, k| (token + k) % 5 - 1);
            of_the_last.choose(tokens, |_| 8191, |token, k| (token % 4 + k) % 3);
            let steps = [spread, of_the_last];
            for_dtype!(steps[0], check(&gpu, &steps[0], &steps));
        }
    }
}

/// With many routes, more groups than blocks that are resident at once.
#[test]
#[ignore = "needs a GPU"]
fn as_many_experts_as_a_rank_can_hold() {
    let gpu = Gpu::new();
    for experts in [300, 513, 1024] {
        let mut of_few = Lora::of_own_ranks(experts, 7);
        for module in &mut of_few.modules {
            let holds = |expert| [0, 1, experts / 2, experts - 1].contains(&expert);
            module.ranks.iter_mut().enumerate().filter(|(expert, _)| !holds(*expert)).for_each(|(_, rank)| *rank = 0);
        }
        let adapters = vec![Lora::of_one_rank(experts, 2, [[false; 2]; 3]), Lora::shared_outer(experts, 8), of_few];
        for (tokens, dtype) in [8, 100, 400].into_iter().zip(DTYPES) {
            let (values, end) = (Values::Exact, experts as i32);
            let case = Case { dtype, values, ..Case::new([experts, 24, 16], adapters.clone(), [tokens, 8]) };
            let [mut spread, mut at_the_ends] = [(); 2].map(|()| case.clone());
            spread.choose(tokens, |token| token % 5 - 1, |token, k| (token * 797 + k * 131) % (end + 2) - 1);
            at_the_ends.choose(tokens, |token| token % 3, |_, k| [0, 1, end / 2, end - 1][k as usize % 4]);
            for_dtype!(case, check(&gpu, &case, &[spread.clone(), at_the_ends.clone()]));
            // Many routes in the other types, and tiles of both sizes.
            if tokens == 400 {
                assert_eq!([&spread, &at_the_ends].map(goes_wide), [false, true]);
                for dtype in [Dtype::BF16, Dtype::F16] {
                    let [spread, at_the_ends] = [&spread, &at_the_ends].map(|step| Case { dtype, ..step.clone() });
                    for_dtype!(spread, check(&gpu, &spread, &[spread.clone(), at_the_ends]));
                }
            }
        }
    }
}

/// More routes than a block of the grouping reads at once.
#[test]
#[ignore = "needs a GPU"]
fn tens_of_thousands_of_routes() {
    let gpu = Gpu::new();
    for (tokens, rank, dtype) in
        [(5000, 8, Dtype::BF16), (4096, 8, Dtype::F16), (5000, 2, Dtype::F16), (8200, 8, Dtype::BF16)]
    {
        let adapters = vec![Lora::of_own_ranks(10, rank), Lora::shared_outer(10, rank), Lora::of_own_ranks(10, 1)];
        let case = Case { dtype, ..Case::new([10, 16, 8], adapters, [tokens, 8]) };
        let mut step = case.clone();
        step.choose(tokens, |token| token % 5 - 1, |token, k| (token * 3 + token / 64 + k * 7) % 12 - 1);
        assert_eq!(goes_wide(&step), rank == 8);
        for_dtype!(case, check(&gpu, &case, &[step]));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_token_has_an_adapter_of_its_own() {
    let gpu = Gpu::new();
    for (tokens, top_k) in [(8, 8), (128, 1), (128, 8), (129, 8)] {
        let lora = |token: usize| match token % 3 {
            0 => Lora::shared_outer(4, 1 + token % 9),
            _ => Lora::of_own_ranks(4, 1 + token % 9),
        };
        let case = Case::new([4, 72, 40], (0..tokens).map(lora).collect(), [tokens, top_k]);
        for dtype in DTYPES {
            let case = Case { dtype, ..case.clone() };
            let mut step = case.clone();
            step.choose(tokens, |token| tokens as i32 - 1 - token, |token, k| (token + k) % 4);
            for_dtype!(case, check(&gpu, &case, &[step]));
        }
    }
}

/// Many routes at ranks that wide tiles do not support.
#[test]
#[ignore = "needs a GPU"]
fn ranks_of_many_routes_past_those_of_wide_tiles() {
    let gpu = Gpu::new();
    for (rank, dtype) in [(129, Dtype::BF16), (129, Dtype::F16), (512, Dtype::BF16), (512, Dtype::F16)] {
        let adapters = vec![Lora::of_own_ranks(3, rank), Lora::shared_outer(3, rank), Lora::of_own_ranks(3, 17)];
        let case = Case { dtype, ..Case::new([3, 40, 72], adapters, [150, 7]) };
        let mut step = case.clone();
        step.choose(150, |token| token % 5 - 1, |token, k| (token + k) % 4);
        for_dtype!(case, check(&gpu, &case, &[step]));
    }
}
