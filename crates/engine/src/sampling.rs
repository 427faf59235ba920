//! The choice of a request's next token.
//!
//! A choice depends on the logits, the parameters and the request's own random numbers, and on nothing else in the
//! batch.

use std::collections::{HashMap, HashSet};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use crate::plan::Scores;
use crate::{cpu::sampling::choose, device::Draw};

/// How tokens are chosen, with the meaning of the OpenAI API and of vLLM.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits. With 0, the token with the largest logit is chosen, the first of equals.
    pub temperature: f32,
    /// Only the most probable tokens that together have at least this probability.
    pub top_p: f32,
    /// Only this many of the most probable tokens; 0 for all.
    pub top_k: usize,
    /// Of its random numbers; `None` for any.
    pub seed: Option<u64>,
    /// Log-probabilities to report: those of the chosen token and of this many of the most probable ones.
    pub logprobs: Option<usize>,
    /// What is done to the logits before.
    pub changes: Changes,
}

/// What is done to the logits, in the order of the fields, before temperature, `top_k` and `top_p`. The meaning and the
/// order are those of vLLM's sampler.
#[derive(Clone, Debug, PartialEq)]
pub struct Changes {
    /// The only tokens that may be chosen.
    pub allowed: Option<Vec<u32>>,
    /// As long as there are fewer tokens than this, none of `ends` is chosen.
    pub min_tokens: usize,
    /// The tokens that end texts, whether this one goes on behind them or not.
    pub ends: Vec<u32>,
    /// Added to the logits of these tokens.
    pub bias: Vec<(u32, f32)>,
    /// Divides a positive logit of a token of the prompt or the answer, and multiplies a negative one.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of a token once for each time that the answer has it.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a token that the answer has.
    pub presence_penalty: f32,
    /// Only tokens whose probability is at least this part of the largest one's.
    pub min_p: f32,
}

/// The tokens that a choice comes after.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before<'a> {
    pub(crate) prompt: &'a [u32],
    pub(crate) chosen: &'a [u32],
}

impl Changes {
    /// Leaves the logits as they are.
    pub const NONE: Self = Self {
        allowed: None,
        min_tokens: 0,
        ends: Vec::new(),
        bias: Vec::new(),
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
        min_p: 0.0,
    };

    /// Changes the logits of a vocabulary, all of whose ids the fields and `before` have.
    fn apply(&self, logits: &mut [f32], before: &Before<'_>, temperature: f32) {
        if let Some(allowed) = &self.allowed {
            let mut only = vec![f32::NEG_INFINITY; logits.len()];
            allowed.iter().for_each(|&token| only[token as usize] = logits[token as usize]);
            logits.copy_from_slice(&only);
        }
        if before.chosen.len() < self.min_tokens {
            for &token in &self.ends {
                // A checkpoint may name a token that it does not have.
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        for &(token, bias) in &self.bias {
            logits[token as usize] += bias;
        }
        if self.repetition_penalty != 1.0 {
            for &token in before.prompt.iter().chain(before.chosen).collect::<HashSet<_>>() {
                let logit = &mut logits[token as usize];
                // One that is too large for a number is none that forbids the token.
                let penalty = self.repetition_penalty;
                let changed = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                *logit = if logit.is_finite() { changed.clamp(f32::MIN, f32::MAX) } else { changed };
            }
        }
        if self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 {
            let mut counts = HashMap::new();
            before.chosen.iter().for_each(|&token| *counts.entry(token).or_insert(0_u32) += 1);
            for (token, count) in counts {
                logits[token as usize] -= self.frequency_penalty * count as f32 + self.presence_penalty;
            }
        }
        if self.min_p > 0.0 && temperature > 0.0 {
            let least = largest(logits) + temperature * self.min_p.ln();
            logits.iter_mut().filter(|logit| **logit < least).for_each(|logit| *logit = f32::NEG_INFINITY);
        }
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: u32,
    /// Its log-probabilities, if they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// Log-probabilities of the model, before temperature, `top_p` and `top_k`.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// That of the chosen token.
    pub chosen: f32,
    /// The most probable tokens, the first of equals first.
    pub top: Vec<(u32, f32)>,
}

/// The parameters and random numbers of one request.
#[derive(Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    rng: StdRng,
}

impl Sampler {
    pub(crate) fn new(sampling: Sampling) -> Self {
        let rng = sampling.seed.map_or_else(|| StdRng::from_rng(&mut rand::rng()), StdRng::seed_from_u64);
        Self { sampling, rng }
    }

    /// How the device chooses the next token; `None` if more than its log-probability is to be reported, or if logits
    /// are changed before. Takes the request's next random number.
    pub(crate) fn draw(&mut self) -> Option<Draw> {
        let Sampling { logprobs, changes, .. } = &self.sampling;
        let is_for_device = logprobs.is_none_or(|top| top == 0) && *changes == Changes::NONE;
        is_for_device.then(|| self.next_draw())
    }

    fn next_draw(&mut self) -> Draw {
        let Sampling { temperature, top_p, top_k, .. } = self.sampling;
        let place = if temperature == 0.0 { 0.0 } else { self.rng.random() };
        Draw { temperature, top_p, top_k: top_k as u64, place }
    }

    /// Chooses a token; `None` if a logit is not a number.
    pub(crate) fn choose_from(&mut self, scores: &Scores, before: &Before<'_>) -> Option<Chosen> {
        match *scores {
            Scores::Logits(ref logits) => self.choose(logits, before),
            Scores::Drawn(token, chosen) => {
                let logprobs = self.sampling.logprobs.map(|_| Logprobs { chosen, top: Vec::new() });
                token.map(|token| Chosen { token, logprobs })
            }
        }
    }

    /// Chooses a token by its logits `[vocab]`; `None` if one is not a number.
    fn choose(&mut self, logits: &[f32], before: &Before<'_>) -> Option<Chosen> {
        let draw = self.next_draw();
        let changes = &self.sampling.changes;
        let token = if *changes == Changes::NONE {
            choose(logits, &draw).0?
        } else {
            let mut logits = logits.to_vec();
            changes.apply(&mut logits, before, draw.temperature);
            // If no token is left, none is chosen.
            choose(&logits, &draw).0.filter(|_| largest(&logits) > f32::NEG_INFINITY)?
        };
        let logprobs = self.sampling.logprobs.map(|top| Logprobs::of(logits, token as usize, top));
        Some(Chosen { token, logprobs })
    }
}

impl Logprobs {
    pub(super) fn of(logits: &[f32], chosen: usize, top: usize) -> Self {
        let largest = logits[first_largest(logits)];
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
        #[expect(clippy::cast_possible_truncation, reason = "reported as f32")]
        let logprob = |index: usize| (f64::from(logits[index] - largest) - sum.ln()) as f32;
        let mut order: Vec<usize> = (0..logits.len()).collect();
        keep_largest(&mut order, top, |index| f64::from(logits[index]));
        let top = (order.iter()).filter_map(|&index| Some((u32::try_from(index).ok()?, logprob(index)))).collect();
        Self { chosen: logprob(chosen), top }
    }
}

/// How many tokens are at least as probable as this one, itself among them.
pub(super) fn rank(logits: &[f32], token: usize) -> usize {
    logits.iter().filter(|logit| **logit >= logits[token]).count()
}

fn largest(logits: &[f32]) -> f32 {
    logits.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

fn first_largest(logits: &[f32]) -> usize {
    let largest = largest(logits);
    logits.iter().position(|&logit| logit == largest).unwrap_or(0)
}

/// Keeps the `count` indices with the largest values, sorted, the first of equals first.
fn keep_largest(indices: &mut Vec<usize>, count: usize, value: impl Fn(usize) -> f64) {
    let order = |a: &usize, b: &usize| value(*b).total_cmp(&value(*a)).then(a.cmp(b));
    if count < indices.len() {
        if count > 0 {
            indices.select_nth_unstable_by(count - 1, order);
        }
        indices.truncate(count);
    }
    indices.sort_unstable_by(order);
}

#[cfg(test)]
mod tests {
    use super::{Before, Changes, Chosen, Logprobs, Sampler, Sampling, rank};
    use crate::{cpu::sampling::candidates, device::Draw};

    const NOTHING: Before<'_> = Before { prompt: &[], chosen: &[] };

    const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: Some(7), logprobs: None, changes: Changes::NONE };

    fn choose(sampling: Sampling, logits: &[f32]) -> Option<Chosen> {
        Sampler::new(sampling).choose(logits, &NOTHING)
    }

    /// The logits after changes, by the definitions in vLLM's documentation of its sampling parameters.
    #[test]
    fn changes_have_their_effect_on_logits() {
        let before = Before { prompt: &[0, 1, 1], chosen: &[2, 2, 3] };
        let changed = |changes: &Changes, temperature: f32| {
            let mut logits = [2.0_f32, -2.0, 4.0, -1.0, 6.0];
            changes.apply(&mut logits, &before, temperature);
            logits
        };
        const NEVER: f32 = f32::NEG_INFINITY;
        assert_eq!(changed(&Changes::NONE, 1.0), [2.0, -2.0, 4.0, -1.0, 6.0]);
        let allowed = Some(vec![4, 1]);
        assert_eq!(changed(&Changes { allowed, ..Changes::NONE }, 1.0), [NEVER, -2.0, NEVER, NEVER, 6.0]);
        let least = |min_tokens| Changes { min_tokens, ends: vec![4, 99], ..Changes::NONE };
        assert_eq!(changed(&least(4), 1.0), [2.0, -2.0, 4.0, -1.0, NEVER]);
        assert_eq!(changed(&least(3), 1.0), [2.0, -2.0, 4.0, -1.0, 6.0]);
        let bias = vec![(0, 5.0), (4, -100.0)];
        assert_eq!(changed(&Changes { bias, ..Changes::NONE }, 1.0), [7.0, -2.0, 4.0, -1.0, -94.0]);
        assert_eq!(changed(&Changes { repetition_penalty: 2.0, ..Changes::NONE }, 1.0), [1.0, -4.0, 2.0, -2.0, 6.0]);
        // No penalty is large enough to leave no token, or one too many.
        let huge = |repetition_penalty| changed(&Changes { repetition_penalty, ..Changes::NONE }, 1.0);
        assert_eq!(huge(f32::MAX), [2.0 / f32::MAX, f32::MIN, 4.0 / f32::MAX, f32::MIN, 6.0]);
        assert_eq!(huge(1e-40)[..3], [f32::MAX, -2.0 * 1e-40, f32::MAX]);
        let changes = Changes { allowed: Some(vec![1]), repetition_penalty: f32::MAX, ..Changes::NONE };
        assert_eq!(changed(&changes, 1.0), [NEVER, f32::MIN, NEVER, NEVER, NEVER]);
        assert_eq!(changed(&Changes { frequency_penalty: 1.5, ..Changes::NONE }, 1.0), [2.0, -2.0, 1.0, -2.5, 6.0]);
        assert_eq!(changed(&Changes { presence_penalty: 1.5, ..Changes::NONE }, 1.0), [2.0, -2.0, 2.5, -2.5, 6.0]);
        // exp(-2) is 0.135, and exp(-4 / 2) as well.
        assert_eq!(changed(&Changes { min_p: 0.13, ..Changes::NONE }, 1.0), [NEVER, NEVER, 4.0, NEVER, 6.0]);
        assert_eq!(changed(&Changes { min_p: 0.13, ..Changes::NONE }, 2.0), [2.0, NEVER, 4.0, NEVER, 6.0]);
        assert_eq!(changed(&Changes { min_p: 1.0, ..Changes::NONE }, 1.0), [NEVER, NEVER, NEVER, NEVER, 6.0]);
        // Tokens are chosen from the changed logits, and the model's log-probability is reported.
        let bias = vec![(0, 9.0)];
        let sampling = Sampling { logprobs: Some(0), changes: Changes { bias, ..Changes::NONE }, ..GREEDY };
        assert!(Sampler::new(sampling.clone()).draw().is_none());
        let biased = choose(sampling, &[0.5_f32.ln(), 0.5_f32.ln()]).expect("a token is left");
        let logprob = biased.logprobs.expect("it was asked for").chosen;
        assert!(biased.token == 0 && (logprob - 0.5_f32.ln()).abs() < 1e-6);
        // No token is left.
        let changes = Changes { allowed: Some(vec![1]), bias: vec![(1, f32::NEG_INFINITY)], ..Changes::NONE };
        assert_eq!(choose(Sampling { changes, ..GREEDY }, &[1.0, 1.0]), None);
    }

    #[test]
    fn a_rank_counts_tokens_that_are_as_probable() {
        assert_eq!([0, 1, 2, 3].map(|token| rank(&[1.0, 3.0, 2.0, 3.0], token)), [4, 2, 3, 2]);
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let chosen = choose(GREEDY, &[1.0, 3.0, f32::NEG_INFINITY, 3.0]);
        assert_eq!(chosen, Some(Chosen { token: 1, logprobs: None }));
    }

    #[test]
    fn a_logit_that_is_not_a_number_is_refused() {
        assert_eq!(choose(GREEDY, &[1.0, f32::NAN]), None);
        assert_eq!(choose(Sampling { temperature: 1.0, ..GREEDY }, &[f32::NAN, 1.0]), None);
    }

    #[test]
    fn bounds_keep_the_most_probable_tokens() {
        // Probabilities 0.1, 0.4, 0.2, 0.3.
        let logits = [0.1_f32, 0.4, 0.2, 0.3].map(f32::ln);
        let kept = |top_k, top_p| -> Vec<usize> {
            let draw = Draw { temperature: 1.0, top_p, top_k, place: 0.0 };
            candidates(&logits, &draw).into_iter().map(|(index, _)| index).collect()
        };
        assert_eq!(kept(0, 1.0), [0, 1, 2, 3]);
        assert_eq!(kept(2, 1.0), [1, 3]);
        assert_eq!(kept(9, 1.0), [1, 3, 2, 0]);
        assert_eq!(kept(0, 0.65), [1, 3]);
        assert_eq!(kept(0, 0.75), [1, 3, 2]);
        assert_eq!(kept(0, 0.0), [1]);
        // Of the two that top_k leaves, the first has 4/7.
        assert_eq!(kept(2, 0.5), [1]);
        assert_eq!(kept(2, 0.6), [1, 3]);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.1_f32, 0.4, 0.2, 0.3].map(f32::ln);
        let mut sampler = Sampler::new(Sampling { temperature: 1.0, ..GREEDY });
        let mut counts = [0_u32; 4];
        const DRAWS: u32 = 20_000;
        for _ in 0..DRAWS {
            let chosen = sampler.choose(&logits, &NOTHING).expect("all logits are numbers");
            counts[chosen.token as usize] += 1;
        }
        for (count, probability) in counts.into_iter().zip([0.1, 0.4, 0.2, 0.3]) {
            // Five standard deviations.
            let bound = 5.0 * (f64::from(DRAWS) * probability * (1.0 - probability)).sqrt();
            assert!((f64::from(count) - f64::from(DRAWS) * probability).abs() < bound, "{counts:?}");
        }
        // A high temperature flattens them, a low one sharpens them.
        let share = |temperature| {
            let weights = candidates(&logits, &Draw { temperature, top_p: 1.0, top_k: 0, place: 0.0 });
            weights[1].1 / weights.iter().map(|(_, weight)| weight).sum::<f64>()
        };
        assert!((share(100.0) - 0.25).abs() < 0.01 && share(0.1) > 0.94);
    }

    #[test]
    fn a_seed_repeats_the_tokens() {
        let sampling = Sampling { temperature: 1.0, ..GREEDY };
        let logits: Vec<f32> = (0..50).map(|index| (index as f32).sin()).collect();
        let tokens = |sampling: &Sampling| -> Vec<u32> {
            let mut sampler = Sampler::new(sampling.clone());
            (0..20).filter_map(|_| Some(sampler.choose(&logits, &NOTHING)?.token)).collect()
        };
        let first = tokens(&sampling);
        assert_eq!((first.len(), &first), (20, &tokens(&sampling)));
        assert_ne!(first, tokens(&Sampling { seed: Some(8), ..sampling }));
    }

    #[test]
    fn logprobs_are_those_of_the_model() {
        let logits = [0.1_f32, 0.4, 0.2, 0.3].map(f32::ln);
        let sampling = Sampling { temperature: 0.5, top_k: 1, logprobs: Some(2), ..GREEDY };
        let chosen = choose(sampling, &logits).and_then(|chosen| Some((chosen.token, chosen.logprobs?)));
        let (token, logprobs) = chosen.expect("log-probabilities were asked for");
        assert_eq!((token, logprobs.top.len()), (1, 2));
        let near = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert!(near(logprobs.chosen, logits[1]));
        assert!((logprobs.top[0].0, logprobs.top[1].0) == (1, 3) && near(logprobs.top[1].1, logits[3]));
        // More than are kept, and in falling order whatever the order of the logits.
        let chosen = choose(Sampling { logprobs: Some(5), ..GREEDY }, &[3.0, 5.0, 1.0, 4.0, 2.0, 6.0]);
        let top = chosen.and_then(|chosen| chosen.logprobs).expect("log-probabilities were asked for").top;
        assert_eq!(top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [5, 1, 3, 0, 4]);
        // The first of equals, of many.
        let mut logits = [1.0; 500];
        let top =
            |logits: &[f32]| Logprobs::of(logits, 0, 3).top.into_iter().map(|(token, _)| token).collect::<Vec<_>>();
        assert_eq!(top(&logits), [0, 1, 2]);
        logits[400] = 2.0;
        assert_eq!(top(&logits), [400, 0, 1]);
    }
}
