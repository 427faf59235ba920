//! Which workloads are asked for.

use std::{fs, path::PathBuf};

use clap::Args;

use crate::{
    Result,
    experts::{self, ExpertsWorkload},
    own::{launched, own, own_experts, with_base},
    workload::{self, Bytes, Suite, Workload},
};

#[derive(Debug, Args)]
pub struct Selection {
    /// Only these suites
    #[arg(long, value_enum, value_delimiter = ',')]
    pub suite: Vec<Suite>,
    /// Only workloads whose id contains this
    #[arg(long, default_value = "")]
    pub only: String,
    /// A few workloads of each suite
    #[arg(long)]
    pub quick: bool,
    /// A list of workloads in place of `benches/workloads.json`, which is built in
    #[arg(long)]
    pub workloads: Option<PathBuf>,
}

/// The workloads that were asked for.
pub struct Chosen {
    pub layers: Vec<Workload>,
    pub experts: Vec<ExpertsWorkload>,
}

/// One of them.
#[derive(Clone, Copy)]
pub enum Subject<'a> {
    Layer(&'a Workload),
    Experts(&'a ExpertsWorkload),
}

impl Chosen {
    /// Every workload of the built-in list and of our own.
    pub fn all() -> Result<Self> {
        Self::of_list(workload::BUILT_IN)
    }

    /// Those of `default` suites, if the selection names none.
    pub fn new(selection: &Selection, default: &[Suite]) -> Result<Self> {
        let Selection { suite, only, quick, workloads } = selection;
        let suites = if suite.is_empty() { default } else { suite };
        let given = workloads.as_ref().map(fs::read_to_string).transpose()?;
        let mut chosen = Self::of_list(given.as_deref().unwrap_or(workload::BUILT_IN))?;
        let is_chosen = |of: Suite, id: &str| suites.contains(&of) && id.contains(only);
        chosen.layers.retain(|workload| is_chosen(workload.suite, &workload.id));
        chosen.experts.retain(|workload| is_chosen(workload.suite, &workload.id));
        if *quick {
            chosen = Self { layers: workload::quick(chosen.layers), experts: experts::quick(chosen.experts) };
        }
        if chosen.subjects().next().is_none() {
            return Err("no workload is asked for".into());
        }
        Ok(chosen)
    }

    fn of_list(list: &str) -> Result<Self> {
        let layers = [workload::parse(list)?, own()?, with_base()?, launched()?].concat();
        Ok(Self { layers, experts: [experts::parse(list)?, own_experts()].concat() })
    }

    pub fn subjects(&self) -> impl Iterator<Item = Subject<'_>> {
        self.layers.iter().map(Subject::Layer).chain(self.experts.iter().map(Subject::Experts))
    }
}

impl<'a> Subject<'a> {
    pub fn id(self) -> &'a str {
        match self {
            Self::Layer(workload) => &workload.id,
            Self::Experts(workload) => &workload.id,
        }
    }

    pub fn suite(self) -> Suite {
        match self {
            Self::Layer(workload) => workload.suite,
            Self::Experts(workload) => workload.suite,
        }
    }

    pub fn num_tokens(self) -> usize {
        match self {
            Self::Layer(workload) => workload.num_tokens(),
            Self::Experts(workload) => workload.num_tokens(),
        }
    }

    pub fn num_slots(self) -> usize {
        match self {
            Self::Layer(workload) => workload.num_slots(),
            Self::Experts(workload) => workload.adapters.len(),
        }
    }

    pub fn max_rank(self) -> usize {
        match self {
            Self::Layer(workload) => workload.max_rank(),
            Self::Experts(workload) => workload.max_rank(),
        }
    }

    pub fn bytes(self) -> Bytes {
        match self {
            Self::Layer(workload) => workload.bytes(),
            Self::Experts(workload) => workload.bytes(workload.turns().choices),
        }
    }

    /// What its figures are averaged with.
    pub fn class(self) -> String {
        match self {
            Self::Layer(workload) => workload.class(),
            Self::Experts(workload) => workload.class(),
        }
    }
}
