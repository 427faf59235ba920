//! The experts of the base model on the CPU: the router's choice, and one product per expert with the rows that chose
//! it.

use std::{borrow::Cow, ops::Range};

use aril::{Element, routing::TopK};
use rayon::prelude::*;

use super::{Cpu, PANEL_ROWS, Panels, Tensor, Weight, fill, product, round, softmax};
use crate::{
    error::Result,
    experts::{ExpertWeights, ExpertsShape, GroupedGemm, Packed},
};

/// The experts that each token chose, and the routes to those of this rank, sorted by expert.
#[derive(Debug)]
pub struct Routes {
    top_k: usize,
    /// `[tokens, top_k]`: the expert's place among those of this rank, -1 if it is on another.
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// -1 for routes to other ranks.
    row_of_route: Vec<i32>,
    /// The token of each row.
    tokens: Vec<u32>,
    /// Each expert that has rows, by its place, and how many.
    groups: Vec<(usize, usize)>,
}

impl Routes {
    pub(super) fn new<T: Element>(
        scores: &Tensor<T>,
        top_k: usize,
        normalized: bool,
        held: Range<usize>,
    ) -> Result<Self> {
        let chosen: Vec<(usize, f32)> =
            scores.data.par_chunks(scores.cols).flat_map_iter(|scores| choose(scores, top_k, normalized)).collect();
        let (experts, weights): (Vec<usize>, Vec<f32>) = chosen.into_iter().unzip();
        // The sort is stable, so an expert's rows are in the order of tokens.
        let mut routes: Vec<usize> = (0..experts.len()).filter(|&route| held.contains(&experts[route])).collect();
        routes.sort_by_key(|&route| experts[route]);
        let (mut ids, mut row_of_route) = (vec![-1; experts.len()], vec![-1; experts.len()]);
        for (row, &route) in routes.iter().enumerate() {
            ids[route] = i32::try_from(experts[route] - held.start)?;
            row_of_route[route] = i32::try_from(row)?;
        }
        let token = |&route: &usize| u32::try_from(route / top_k);
        let tokens = routes.iter().map(token).collect::<std::result::Result<_, _>>()?;
        let groups = routes.chunk_by(|a, b| experts[*a] == experts[*b]);
        let groups = groups.map(|group| (experts[group[0]] - held.start, group.len())).collect();
        Ok(Self { top_k, ids, weights, row_of_route, tokens, groups })
    }

    /// The routes to all ranks, which is the number of rows of matrices of routes.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn tokens(&self) -> &Vec<u32> {
        &self.tokens
    }

    /// The routes as the library's operand.
    pub(super) fn top_k(&self) -> Result<TopK<'_>> {
        Ok(TopK::new(&self.ids, self.top_k)?.with_weights(&self.weights)?.with_rows(&self.row_of_route)?)
    }
}

fn choose<T: Element>(scores: &[T], top_k: usize, normalized: bool) -> impl Iterator<Item = (usize, f32)> {
    let mut weights: Vec<f32> = scores.iter().map(|score| score.to_f32()).collect();
    softmax(&mut weights);
    let mut experts: Vec<(usize, f32)> = weights.into_iter().enumerate().collect();
    experts.sort_by(|a, b| b.1.total_cmp(&a.1));
    experts.truncate(top_k);
    let sum = if normalized { experts.iter().map(|(_, weight)| weight).sum() } else { 1.0 };
    experts.into_iter().map(move |(expert, weight)| (expert, round::<T>(weight / sum)))
}

pub(super) fn new<T: Element>(shape: ExpertsShape, weights: ExpertWeights<'_, T>) -> Box<dyn GroupedGemm<Cpu<T>>> {
    let ExpertsShape { out_features, in_features, .. } = shape;
    match weights {
        ExpertWeights::Plain(parts) => {
            let values = parts.concat();
            let experts = values.chunks_exact(out_features * in_features);
            Box::new(Vec::from_iter(experts.map(|values| Weight::new(out_features, in_features, values))))
        }
        ExpertWeights::Packed(packed) => {
            Box::new(Vec::from_iter(packed.split(out_features, in_features).map(|expert| {
                let panels = expert.split(PANEL_ROWS, in_features).collect();
                PackedWeight { rows: out_features, cols: in_features, panels }
            })))
        }
    }
}

/// A base of any kind of weights: one for each expert.
impl<T: Element, W: Panels> GroupedGemm<Cpu<T>> for Vec<W> {
    fn run(&self, _: &Cpu<T>, x: &Tensor<T>, routes: &Routes) -> Result<Tensor<T>> {
        let mut rest = x.data.as_slice();
        let groups = routes.groups.iter().map(|&(expert, rows)| {
            let rows = rest.split_off(..rows * x.cols).unwrap_or_default();
            (&self[expert], rows)
        });
        let groups: Vec<_> = groups.collect();
        let products: Vec<Vec<T>> = groups.into_par_iter().map(|(weight, x)| product(x, weight)).collect();
        let (cols, mut data) = (self[0].shape().0, products.concat());
        data.resize(routes.len() * cols, T::default());
        Ok(Tensor { cols, data })
    }
}

/// A packed weight, of which a product unpacks one panel at a time.
struct PackedWeight {
    rows: usize,
    cols: usize,
    panels: Vec<Packed>,
}

impl Panels for PackedWeight {
    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    fn panel(&self, index: usize) -> Cow<'_, [f32]> {
        let mut panel = vec![0.0; PANEL_ROWS * self.cols];
        fill(&mut panel, self.cols, self.panels[index].values());
        panel.into()
    }
}
