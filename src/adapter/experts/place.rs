//! Places factors of experts in an image, storing shared factors once.

use std::collections::{BTreeMap, btree_map::Entry};

use super::{
    forms::Part,
    layer::{Layer, OfExperts},
    source::Orientation,
};
use crate::{
    adapter::{
        error::AdapterError,
        image::{ImageEntry, SlotImage},
        joined::{Factors, Pair},
        names::{InExperts, Item},
        rectangle::Rectangle,
        tensor::all,
    },
    model::{ExpertModule, ExpertSlice, ExpertsSite, ProjectionSite},
};

impl<'a> Layer<'a, '_> {
    /// The factors of each module of each expert.
    pub(in crate::adapter) fn finish(
        mut self,
        orientation: Option<Orientation>,
    ) -> Result<OfExperts<'a>, AdapterError> {
        self.add_parameters(orientation)?;
        if let Some((source, _)) = self.empty.iter().find(|(_, at)| !self.is_placeholder(at)) {
            let what = "an empty factor of a module that the model has";
            return Err(AdapterError::UnsupportedTensor { tensor: source.a.name.clone(), what });
        }
        Ok(self.factors)
    }

    /// Whether empty factors stand for a module that ungated experts lack. The up projection may then go by the gate's
    /// name.
    fn is_placeholder(&self, at: &InExperts) -> bool {
        let (Item::Module(name) | Item::Fms(name)) = at.item else { return false };
        match Part::named(name, self.site) {
            None => true,
            Some(Part::One(ExpertModule::Up)) if self.site.halves().is_none() => {
                let mut up = self.factors.keys().filter(|(module, _)| *module == ExpertModule::Up);
                up.any(|&(_, expert)| at.expert.is_none_or(|of| of == expert))
            }
            Some(_) => false,
        }
    }
}

/// The factors of all experts of a layer, of one adapter or of several.
#[derive(Debug)]
pub(in crate::adapter) struct Joined<'a, 'm> {
    site: &'m ExpertsSite,
    pairs: BTreeMap<(ExpertModule, usize), Pair<'a>>,
}

impl<'a, 'm> Joined<'a, 'm> {
    pub(in crate::adapter) fn new(site: &'m ExpertsSite) -> Self {
        Self { site, pairs: BTreeMap::new() }
    }

    /// Joins the factors of the next adapter.
    pub(in crate::adapter) fn join(
        &mut self,
        at: (ExpertModule, usize),
        next: Factors<'a>,
    ) -> Result<(), AdapterError> {
        match self.pairs.entry(at) {
            Entry::Vacant(none) => drop(none.insert(Pair::new(next))),
            Entry::Occupied(mut pair) => pair.get_mut().join(next)?,
        }
        Ok(())
    }

    /// Places this rank's part of the factors in the image: the projection before the activation, then the one after
    /// it. Each has the shared factors first, then those of each expert; A before B, slice by slice. If gate and up
    /// have the same A for every expert, it is stored once.
    pub(in crate::adapter) fn place(self, image: &mut SlotImage<'a>) -> Result<(), AdapterError> {
        [self.site.gate_up(), self.site.down()]
            .into_iter()
            .try_for_each(|projection| self.place_projection(projection, image))
    }

    fn place_projection(&self, projection: &ProjectionSite, image: &mut SlotImage<'a>) -> Result<(), AdapterError> {
        let (slices, input, one_a) = (projection.slices(), projection.input().range(), self.gate_and_up_have_one_a()?);
        // `first` is the A placed for an earlier slice.
        let place_a = |image: &mut SlotImage<'a>, first: &mut Option<usize>, pair: &Pair<'a>| {
            let placed = first.filter(|_| one_a);
            let place = || image.place(Rectangle::linear_a(pair, 0..pair.rank(), input.clone()));
            let elems = placed.unwrap_or_else(place);
            *first = Some(elems);
            elems
        };
        let place_b = |image: &mut SlotImage<'a>, slice: &ExpertSlice, pair: &Pair<'a>| {
            image.place(Rectangle::b(pair, &[slice.output.range()], slice.output.len))
        };
        let is_here = |module| self.site.held().iter().any(|&expert| self.pairs.contains_key(&(module, expert)));
        let shared = slices.iter().map(|slice| self.shared(slice.module, is_here(slice.module)));
        let shared = shared.collect::<Result<Vec<_>, _>>()?;

        let mut first = None;
        let shared_a: Vec<_> = shared.iter().map(|pair| Some(place_a(image, &mut first, pair.a?))).collect();
        let shared_b: Vec<_> =
            slices.iter().zip(&shared).map(|(slice, pair)| Some(place_b(image, slice, pair.b?))).collect();
        for (i, slice) in slices.iter().enumerate() {
            let ranks =
                self.site.held().iter().filter_map(|&expert| Some(self.pairs.get(&(slice.module, expert))?.rank()));
            if let Some(rank) = ranks.max() {
                image.share(projection.shared_entry() + i, rank, shared_a[i], shared_b[i]);
            }
        }
        for (local, &expert) in self.site.held().iter().enumerate() {
            let pairs: Vec<_> = slices.iter().map(|slice| self.pairs.get(&(slice.module, expert))).collect();
            let mut first = None;
            let a = pairs.iter().zip(&shared_a).map(|(pair, shared)| match (pair, shared) {
                (Some(pair), None) => Some(place_a(image, &mut first, pair)),
                (_, shared) => *shared,
            });
            let a: Vec<_> = a.collect();
            for (i, pair) in pairs.into_iter().enumerate() {
                let (Some(pair), Some(a)) = (pair, a[i]) else { continue };
                let b_elems = shared_b[i].unwrap_or_else(|| place_b(image, &slices[i], pair));
                let (entry, rank) = (projection.expert_entry(local) + i, pair.rank());
                image.push(ImageEntry { entry, a_elems: a, a_rank: rank, b_elems, rank, scaling: pair.scaling() });
            }
        }
        Ok(())
    }

    /// The factors that all experts with this module share, if there are several such experts. Equal on every rank that
    /// holds one of them.
    fn shared(&self, module: ExpertModule, is_here: bool) -> Result<Shared<'_, 'a>, AdapterError> {
        let mut pairs = self.of(module).map(|(_, pair)| pair).peekable();
        let Some(first) = pairs.next().filter(|_| is_here && pairs.peek().is_some()) else {
            return Ok(Shared { a: None, b: None });
        };
        let others: Vec<_> = pairs.collect();
        let a = all(others.iter().map(|pair| first.has_a_of(pair)))?.then_some(first);
        let b = all(others.iter().map(|pair| first.has_b_of(pair)))?.then_some(first);
        Ok(Shared { a, b })
    }

    fn gate_and_up_have_one_a(&self) -> Result<bool, AdapterError> {
        let both = |(expert, gate)| Some((gate, self.pairs.get(&(ExpertModule::Up, expert))?));
        let mut both = self.of(ExpertModule::Gate).filter_map(both).peekable();
        Ok(both.peek().is_some() && all(both.map(|(gate, up): (&Pair<'_>, &Pair<'_>)| gate.has_a_of(up)))?)
    }

    fn of(&self, module: ExpertModule) -> impl Iterator<Item = (usize, &Pair<'a>)> {
        self.pairs.range((module, 0)..=(module, usize::MAX)).map(|((_, expert), pair)| (*expert, pair))
    }
}

/// The factors of one module, as of any expert, that all experts share.
#[derive(Clone, Copy, Debug)]
struct Shared<'p, 'a> {
    a: Option<&'p Pair<'a>>,
    b: Option<&'p Pair<'a>>,
}
