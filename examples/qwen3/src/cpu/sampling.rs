//! The choice of a token from its logits.

use crate::device::Draw;

/// The token that a draw chooses, and its log-probability; no token if a logit is NaN.
pub fn choose(logits: &[f32], draw: &Draw) -> (Option<u32>, f32) {
    if logits.iter().any(|logit| logit.is_nan()) {
        return (None, f32::NAN);
    }
    let distance = distances(logits);
    let index = if draw.temperature == 0.0 {
        (0..logits.len()).find(|&index| distance(index) == 0.0).unwrap_or(0)
    } else {
        place(&candidates(logits, draw), draw.place)
    };
    let sum: f64 = (0..logits.len()).map(|index| distance(index).exp()).sum();
    #[expect(clippy::cast_possible_truncation, reason = "reported as f32")]
    let logprob = (distance(index) - sum.ln()) as f32;
    (u32::try_from(index).ok(), logprob)
}

/// How far each logit is below the largest. If that is infinite, it has all the weight.
fn distances(logits: &[f32]) -> impl Fn(usize) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    move |index| if logits[index] == largest { 0.0 } else { f64::from(logits[index] - largest) }
}

/// The tokens that may be chosen, the most probable first if there is a bound, and how much each weighs.
pub fn candidates(logits: &[f32], draw: &Draw) -> Vec<(usize, f64)> {
    let distance = distances(logits);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    if draw.top_k > 0 || draw.top_p < 1.0 {
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(std::cmp::Ordering::Equal));
        if draw.top_k > 0 {
            order.truncate(usize::try_from(draw.top_k).unwrap_or(usize::MAX));
        }
    }
    let weight = |index| (distance(index) / f64::from(draw.temperature)).exp();
    let mut candidates: Vec<(usize, f64)> = order.into_iter().map(|index| (index, weight(index))).collect();
    if draw.top_p < 1.0 {
        let wanted = f64::from(draw.top_p) * total(&candidates);
        let mut sum = 0.0;
        let enough = candidates.iter().position(|(_, weight)| {
            sum += weight;
            sum >= wanted
        });
        candidates.truncate(enough.map_or(candidates.len(), |last| last + 1));
    }
    candidates
}

/// The candidate at a place of the unit interval.
fn place(candidates: &[(usize, f64)], place: f64) -> usize {
    let place = place * total(candidates);
    let mut sum = 0.0;
    let drawn = candidates.iter().find(|(_, weight)| {
        sum += weight;
        sum > place
    });
    // By rounding, the sum may end before the place.
    drawn.or(candidates.last()).map_or(0, |(index, _)| *index)
}

fn total(candidates: &[(usize, f64)]) -> f64 {
    candidates.iter().map(|(_, weight)| weight).sum()
}

#[cfg(test)]
mod tests {
    use super::choose;
    use crate::device::Draw;

    /// Each token has its part of the unit interval, with its begin and without its end, so that one without weight is
    /// never drawn.
    #[test]
    fn a_place_belongs_to_one_token() {
        let draw = |logits: &[f32], place| choose(logits, &Draw { temperature: 1.0, place, ..Draw::GREEDY }).0;
        let never = f32::NEG_INFINITY;
        let most = 1.0_f64.next_down();
        for place in [0.0, 0.5, most] {
            assert_eq!(draw(&[never, 0.0, never], place), Some(1));
        }
        let halves = [never, 0.0, never, 0.0, never];
        assert_eq!([0.0, 0.5_f64.next_down(), 0.5, most].map(|place| draw(&halves, place)), [1, 1, 3, 3].map(Some));
    }
}
