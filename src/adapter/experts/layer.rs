//! Collects an adapter's factors for the experts of one layer, whatever their format.

use std::{collections::BTreeMap, ops::Range};

use super::{
    forms::{Part, Steps},
    source::Source,
};
use crate::{
    adapter::{
        config::Config,
        error::AdapterError,
        joined::Factors,
        names::{InExperts, Item},
        pattern::Work,
    },
    model::{ExpertModule, ExpertsSite, MAX_RANK},
};

/// The factors of each module of each expert.
pub(in crate::adapter) type OfExperts<'a> = BTreeMap<(ExpertModule, usize), Factors<'a>>;

/// An adapter's factors for the experts of one layer.
#[derive(Debug)]
pub(in crate::adapter) struct Layer<'a, 'm> {
    pub(super) site: &'m ExpertsSite,
    pub(super) config: &'a Config,
    /// What is left for matching α's patterns.
    work: &'m Work,
    pub(super) factors: OfExperts<'a>,
    pub(super) parameters: Vec<Source<'a>>,
    pub(super) empty: Vec<(Source<'a>, InExperts)>,
}

impl<'a, 'm> Layer<'a, 'm> {
    pub(in crate::adapter) fn new(site: &'m ExpertsSite, config: &'a Config, work: &'m Work) -> Self {
        Self { site, config, work, factors: BTreeMap::new(), parameters: Vec::new(), empty: Vec::new() }
    }

    /// Adds factors whose path is `at` in the experts.
    pub(in crate::adapter) fn add(&mut self, source: Source<'a>, at: &InExperts) -> Result<(), AdapterError> {
        if source.is_empty() {
            self.empty.push((source, at.clone()));
            return Ok(());
        }
        let (name, fms) = match at.item {
            Item::Module(name) => (name, false),
            Item::Fms(name) => (name, true),
            Item::Parameter => {
                self.parameters.push(source);
                return Ok(());
            }
        };
        let module = || source.path.to_owned();
        let part = Part::named(name, self.site).ok_or_else(|| AdapterError::NoPlace { module: module() })?;
        let num_experts = self.site.num_experts();
        let (experts, steps) = match at.expert {
            Some(expert) if expert >= num_experts => {
                return Err(AdapterError::NoExpert { module: module(), expert, num_experts });
            }
            Some(expert) => (expert..expert + 1, source.one(self.site, part)?),
            None if fms => (0..num_experts, source.fms(self.site, part)?),
            None if source.a.tensor.shape().len() == 2 => (0..num_experts, source.side_by_side(self.site, part)?),
            None => (0..num_experts, source.stacked(self.site, part)?),
        };
        self.insert(experts, part, (source.path, source.path), steps)
    }

    /// Adds the factors of a range of experts. `alpha_path` is the path to look up α by.
    pub(super) fn insert(
        &mut self,
        experts: Range<usize>,
        part: Part,
        (path, alpha_path): (&'a str, &str),
        steps: Steps<'a>,
    ) -> Result<(), AdapterError> {
        let rank = steps.b.cols;
        if !(1..=MAX_RANK).contains(&rank) {
            return Err(AdapterError::Rank { tensor: steps.a.name.clone(), rank });
        }
        let scaling = self.config.scaling(alpha_path, rank, steps.a.name, self.work)?;
        for (step, expert) in experts.enumerate() {
            for (module, a, b) in part.apart(self.site.stored().halves, steps.at(step)) {
                if let Some(other) = self.factors.insert((module, expert), Factors { path, a, b, scaling }) {
                    return Err(AdapterError::Overlap { module: path.to_owned(), other: other.path.to_owned() });
                }
            }
        }
        Ok(())
    }
}
