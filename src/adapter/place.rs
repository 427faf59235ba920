//! Places an adapter in a model: matches its factors to modules, and selects what one rank needs.

use std::collections::{BTreeMap, btree_map::Entry};

use super::{
    error::AdapterError,
    experts::{Joined, Layer, OfExperts, Source},
    image::{ImageEntry, RowsEntry, SlotImage},
    joined::{Factors, Pair},
    module::{BaseWeight, Module, ModuleKind, Stack, TrainedRows},
    names::{self, InExperts},
    open::Adapter,
    pattern::Work,
    rectangle::Rectangle,
    tensor::Stored,
};
use crate::{
    DType, digest,
    model::{EmbeddingSite, ExpertsId, LinearSite, Model, Rows, RowsPart, RowsSite, SliceSite, Target},
};

/// The most adapters of a combination.
pub const MAX_PARTS: usize = 4;

impl Adapter {
    /// Plans the adapter's image in a slot of `model`, with weights of type `dtype`.
    ///
    /// The adapter may adapt any subset of the model's modules, each with its own rank. For experts, planning reads the
    /// factors far enough to find out which of them are equal.
    ///
    /// # Errors
    /// [`AdapterError`] if a module has no place in the model or the same place as another, a factor has the wrong
    /// shape, stacked experts are ambiguous, [base weights](Self::base_weights) have not been compared, the
    /// [invocation](Self::take_invocation) has not been taken, or the engine does not apply the adapter's
    /// [trained rows](crate::model::ModelSpec::trained_rows).
    pub fn plan(&self, model: &Model, dtype: DType) -> Result<SlotImage<'_>, AdapterError> {
        SlotImage::combined(&[(self, 1.0)], model, dtype)
    }
}

impl<'a> SlotImage<'a> {
    /// Plans the image of a *combination*: of up to [`MAX_PARTS`] adapters that apply together, each multiplied by a
    /// scale of its own, as PEFT's `add_weighted_adapter` makes it with `combination_type="cat"`.
    ///
    /// The factors of each module are joined along the rank, in the order of the parts, so that every operation
    /// computes the sum of the parts as it computes one adapter whose rank is the sum of theirs, and at its cost. Parts
    /// may have different modules, ranks, element types and forms of experts. What experts share stays shared if all
    /// parts share it. An adapter may be there twice.
    ///
    /// If the parts of a module have the same scale times scaling, it is the scaling of the image, and the factors are
    /// kept. If not, the rows of A are multiplied by what is left of it beyond a common power of two, and rounded once,
    /// to `dtype`.
    ///
    /// ```
    /// # use aril::{DType, adapter::{Adapter, AdapterError, SlotImage}, model::Model};
    /// # fn plan(model: &Model) -> Result<(), AdapterError> {
    /// let (style, domain) = (Adapter::open("adapters/pirate")?, Adapter::open("adapters/legal")?);
    /// let both = SlotImage::combined(&[(&style, 0.5), (&domain, 1.0)], model, DType::BF16)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// - Those of [`Adapter::plan`], for each part.
    /// - [`AdapterError::Parts`] without a part, or for too many.
    /// - [`AdapterError::PartScale`] if a scale is not finite, and [`AdapterError::CombinedScaling`] if its product
    ///   with a scaling is not a normal `f32`.
    /// - [`AdapterError::Rows`] if a part has trained rows, unless it is the only one, with a scale of 1: no sum of rows
    ///   is what the parts have.
    /// - [`AdapterError::CombinedRank`] if the ranks of a module are together above
    ///   [`MAX_RANK`](crate::model::MAX_RANK).
    #[doc(alias = "add_weighted_adapter")]
    pub fn combined(parts: &[(&'a Adapter, f32)], model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        match parts.iter().find_map(|(adapter, _)| adapter.invocation()) {
            Some(invocation) => Err(AdapterError::Invocation { tokens: invocation.tokens().to_vec() }),
            None => Self::of_parts(parts, model, dtype),
        }
    }

    /// The same, whether or not the parts apply to whole sequences.
    pub(super) fn of_parts(parts: &[(&'a Adapter, f32)], model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        if !(1..=MAX_PARTS).contains(&parts.len()) {
            return Err(AdapterError::Parts { parts: parts.len() });
        }
        if let Some((part, &(_, scale))) = parts.iter().enumerate().find(|(_, (_, scale))| !scale.is_finite()) {
            return Err(AdapterError::PartScale { part, scale });
        }
        let are_one = matches!(parts, [(_, 1.0)]);
        if let Some(rows) = parts.iter().find_map(|(part, _)| part.rows.first()).filter(|_| !are_one) {
            return Err(rows.rejected("a combination of adapters cannot have any"));
        }
        let mut modules: BTreeMap<usize, (Site<'_>, Pair<'a>)> = BTreeMap::new();
        let mut layers: BTreeMap<ExpertsId, Joined<'a, '_>> = BTreeMap::new();
        let mut all_rows = Vec::new();
        for &(adapter, scale) in parts {
            let placed = adapter.placed(model)?;
            for (entry, (site, factors)) in placed.modules {
                let factors = factors.scaled(scale)?;
                match modules.entry(entry) {
                    Entry::Vacant(none) => drop(none.insert((site, Pair::new(factors)))),
                    Entry::Occupied(mut pair) => pair.get_mut().1.join(factors)?,
                }
            }
            all_rows.extend(placed.rows);
            for (id, factors) in placed.layers {
                let layer = layers.entry(id).or_insert_with(|| Joined::new(&model[id]));
                factors.into_iter().try_for_each(|(at, factors)| layer.join(at, factors.scaled(scale)?))?;
            }
        }
        let mut image = Self::new(number(parts), dtype, model);
        // Slices of a fused module have one A.
        let mut last: Option<(Pair<'a>, usize)> = None;
        for (entry, (site, pair)) in modules {
            let (rank, scaling) = (pair.rank(), pair.scaling());
            let (a_rank, a_elems, rows) = match site {
                Site::Slice(layer, slice) => {
                    let rows = layer.a_rows(rank);
                    let stored = last.take().filter(|(other, _)| slice > 0 && pair.has_stored_a_of(other));
                    let place = || Rectangle::linear_a(&pair, rows.clone(), layer.in_range());
                    let a_elems = stored.map_or_else(|| image.place(place()), |(_, a_elems)| a_elems);
                    (rows.len(), a_elems, layer.slices()[slice].b_rows())
                }
                Site::Embedding(site) => {
                    let a_elems = image.place(Rectangle::embedding_a(&pair, site.range()));
                    (rank, a_elems, Rows::whole(site.hidden()))
                }
            };
            let b_elems = image.place(Rectangle::b(&pair, &rows.ranges, rows.len));
            image.push(ImageEntry { entry, a_elems, a_rank, b_elems, rank, scaling });
            last = Some((pair, a_elems));
        }
        layers.into_values().try_for_each(|layer| layer.place(&mut image))?;
        for (rows, parts) in all_rows {
            image.set_trained_rows();
            rows.place(&parts, &mut image);
        }
        Ok(image)
    }
}

/// A number of a combination, which no other one has: that of an adapter which is alone.
fn number(parts: &[(&Adapter, f32)]) -> u64 {
    match parts {
        [(adapter, 1.0)] => adapter.id,
        _ => parts.iter().fold(0, |number, (adapter, scale)| {
            digest::mix(digest::mix(number, adapter.id), u64::from(scale.to_bits()) + 1)
        }),
    }
}

/// The site of an entry that is not of experts.
#[derive(Clone, Copy)]
enum Site<'m> {
    Slice(&'m LinearSite, usize),
    Embedding(&'m EmbeddingSite),
}

/// The factors of an adapter, by their places in a model.
struct Placed<'a, 'm> {
    /// By entry.
    modules: BTreeMap<usize, (Site<'m>, Factors<'a>)>,
    layers: Vec<(ExpertsId, OfExperts<'a>)>,
    /// The modules that have them.
    rows: Vec<(&'a TrainedRows, Vec<&'m RowsPart>)>,
}

impl Adapter {
    fn placed<'m>(&self, model: &'m Model) -> Result<Placed<'_, 'm>, AdapterError> {
        if let Some(weight) = self.base_weights.first() {
            return Err(AdapterError::BaseWeight { tensor: weight.name.clone() });
        }
        let work = Work::new(self.modules.len() + self.stacks.len());
        let mut modules: BTreeMap<usize, (Site<'_>, Factors<'_>)> = BTreeMap::new();
        let mut layers: BTreeMap<ExpertsId, Layer<'_, '_>> = BTreeMap::new();
        let mut layer = |id, source, at: &InExperts| {
            layers.entry(id).or_insert_with(|| Layer::new(&model[id], &self.config, &work)).add(source, at)
        };
        for module in &self.modules {
            match locate(model, &module.path)? {
                (Place::Experts(id, at), _) => {
                    module.expect_kind(ModuleKind::Linear)?;
                    layer(id, module.source(), &at)?;
                }
                (Place::Module(target), _) => {
                    for (entry, site, factors) in module.placed(target, model)? {
                        if let Some((_, other)) = modules.insert(entry, (site, factors)) {
                            let (module, other) = (module.path.clone(), other.path.to_owned());
                            return Err(AdapterError::Overlap { module, other });
                        }
                    }
                }
            }
        }
        for stack in self.stacks.iter().chain(&self.empty) {
            match locate(model, &stack.path)? {
                (Place::Experts(id, at), _) => layer(id, stack.source(), &at)?,
                (Place::Module(_), _) => return Err(stack.not_matrix()),
            }
        }
        let layers = layers.into_iter().map(|(id, layer)| Ok((id, layer.finish(self.orientation)?)));
        let rows = self.placed_rows(model, |entry| modules.contains_key(&entry))?;
        Ok(Placed { modules, layers: layers.collect::<Result<_, AdapterError>>()?, rows })
    }

    /// The places of trained rows. `has_factors` says whether the module of an entry has factors, too.
    fn placed_rows<'m>(
        &self,
        model: &'m Model,
        has_factors: impl Fn(usize) -> bool,
    ) -> Result<Vec<(&TrainedRows, Vec<&'m RowsPart>)>, AdapterError> {
        let mut placed: Vec<(&TrainedRows, Vec<&RowsPart>)> = Vec::new();
        for rows in &self.rows {
            let target = locate(model, &rows.path)?.0;
            let parts_of = |site: &'m RowsSite| match target {
                Place::Module(Target::Embedding(id)) if id == site.embedding() => Some((site, &site.embedding)),
                Place::Module(Target::Slice(id, _)) if id == site.head() => Some((site, &site.head)),
                _ => None,
            };
            let Some((site, part)) = model.trained_rows().iter().find_map(parts_of) else {
                return Err(rows.rejected("the engine does not apply trained rows of their module (`trained_rows`)"));
            };
            rows.rows.expect_shape(if rows.is_whole { part.whole } else { rows.ids.len() }, site.hidden())?;
            if let Some(&id) = rows.ids.last().filter(|&&id| id as usize >= part.whole) {
                let (tensor, vocab) = (rows.rows.name.clone(), part.whole);
                return Err(AdapterError::NoToken { tensor, id, vocab });
            }
            let of_head = self.rows.iter().find(|rows| names::is_head(&rows.path));
            if rows.needs_tied && !site.is_tied() {
                return Err(rows.rejected("the head has the same ids and no rows, but the model's is not tied"));
            }
            let is_of_both = rows.is_tied && site.is_tied() && std::ptr::eq(part, &site.embedding);
            let parts = match of_head.filter(|_| is_of_both) {
                Some(head) if head.ids == rows.ids || self.config.ties => {
                    return Err(head.rejected("the model ties its head, whose rows are those of the embedding"));
                }
                None if is_of_both => vec![part, &site.head],
                _ => vec![part],
            };
            if parts.iter().any(|part| has_factors(part.module_entry)) {
                return Err(rows.rejected("their module has factors, too"));
            }
            let is_of = |other: &&RowsPart| parts.iter().any(|part| part.entry == other.entry);
            if let Some((other, _)) = placed.iter().find(|(_, others)| others.iter().any(is_of)) {
                let (module, other) = (rows.path.clone(), other.path.clone());
                return Err(AdapterError::Overlap { module, other });
            }
            placed.push((rows, parts));
        }
        Ok(placed)
    }
}

impl TrainedRows {
    /// Path of the model's embedding or head that the rows are of, and of a tied head that has them, too.
    ///
    /// # Errors
    /// As for [`Module::path_in`].
    pub fn path_in(&self, model: &Model) -> Result<String, AdapterError> {
        locate(model, &self.path).map(|(_, path)| path)
    }

    fn rejected(&self, reason: &'static str) -> AdapterError {
        AdapterError::Rows { tensor: self.rows.name.clone(), reason }
    }

    /// Adds the rows of this rank to an image, once for modules that have the same ones.
    fn place<'a>(&'a self, parts: &[&RowsPart], image: &mut SlotImage<'a>) {
        let mut placed: Option<(&RowsPart, RowsEntry)> = None;
        for &part in parts {
            // Vocabularies are at most `i32::MAX`.
            let [first, end] = [part.range.start, part.range.end].map(|row| u32::try_from(row).unwrap_or(u32::MAX));
            let of_rank = self.ids.partition_point(|&id| id < first)..self.ids.partition_point(|&id| id < end);
            if of_rank.is_empty() {
                continue;
            }
            let entry = match placed.filter(|(other, _)| other.range == part.range) {
                Some((_, same)) => RowsEntry { entry: part.entry, ..same },
                None => {
                    let view = self.rows.view();
                    // Rows that follow each other in the tensor, too, are one view.
                    let runs = self.places[of_rank.clone()].chunk_by(|row, next| row + 1 == *next);
                    let views = runs.map(|run| view.rows(run[0]..run[0] + run.len())).collect();
                    RowsEntry {
                        entry: part.entry,
                        ids_elems: image.place(Rectangle::ids(&self.ids[of_rank.clone()], first)),
                        rows_elems: image.place(Rectangle::rows(views, self.hidden())),
                        count: of_rank.len(),
                    }
                }
            };
            image.push_rows(entry);
            placed = Some((part, entry));
        }
    }
}

impl BaseWeight {
    /// Path of the model's embedding or head that this is a copy of.
    ///
    /// # Errors
    /// As for [`Module::path_in`].
    pub fn path_in(&self, model: &Model) -> Result<String, AdapterError> {
        locate(model, &self.path).map(|(_, path)| path)
    }
}

impl Module {
    /// Path of the model's module (or fused module) that [`plan`](Adapter::plan) assigns the factors to.
    ///
    /// # Errors
    /// [`AdapterError::NoPlace`] or [`AdapterError::Ambiguous`] if there is no such module, or several.
    pub fn path_in(&self, model: &Model) -> Result<String, AdapterError> {
        locate(model, &self.path).map(|(_, path)| path)
    }

    fn source(&self) -> Source<'_> {
        Source::new(&self.path, [self.a.stored(), self.b.stored()])
    }

    /// The factors of each entry of a target. Their required shapes depend on the target alone.
    fn placed<'m>(
        &self,
        target: Target,
        model: &'m Model,
    ) -> Result<Vec<(usize, Site<'m>, Factors<'_>)>, AdapterError> {
        match target {
            Target::Slice(layer, slice) if self.is_head(&model[layer], slice) => {}
            Target::Slice(..) | Target::Fused(_) => self.expect_kind(ModuleKind::Linear)?,
            Target::Embedding(_) => self.expect_kind(ModuleKind::Embedding)?,
        }
        let (rank, factors) = (self.rank(), self.factors());
        let (layer, slices) = match target {
            Target::Slice(layer, slice) => (&model[layer], slice..slice + 1),
            Target::Fused(layer) => (&model[layer], 0..model[layer].slices().len()),
            Target::Embedding(embedding) => {
                let site = &model[embedding];
                self.a.expect_shape(rank, site.whole_vocab())?;
                self.b.expect_shape(site.hidden(), rank)?;
                return Ok(vec![(site.entry(), Site::Embedding(site), factors)]);
            }
        };
        let whole = || layer.slices()[slices.clone()].iter().map(SliceSite::whole_out_features);
        self.a.expect_shape(rank, layer.whole_in_features())?;
        self.b.expect_shape(whole().sum(), rank)?;
        let mut first = 0;
        let of_slice = slices.clone().zip(whole()).map(|(slice, whole)| {
            let b = factors.b.rows(first..first + whole);
            first += whole;
            (layer.first_entry() + slice, Site::Slice(layer, slice), Factors { b, ..factors })
        });
        Ok(of_slice.collect())
    }

    fn factors(&self) -> Factors<'_> {
        Factors { path: &self.path, a: self.a.view(), b: self.b.view(), scaling: self.scaling }
    }

    /// Whether factors named like an embedding's are those of a head: their shapes are, and those of an embedding of
    /// its sizes are others.
    fn is_head(&self, site: &LinearSite, slice: usize) -> bool {
        let sizes = [site.whole_in_features(), site.slices()[slice].whole_out_features()];
        names::is_head(&self.path) && sizes[0] != sizes[1] && sizes == [self.in_features(), self.out_features()]
    }
}

impl Stack {
    fn source(&self) -> Source<'_> {
        Source::new(&self.path, [&self.a, &self.b].map(|(name, tensor)| Stored { name, tensor }))
    }

    /// The error for a stack whose path is not that of experts.
    fn not_matrix(&self) -> AdapterError {
        let (tensor, a) = &self.a;
        AdapterError::NotMatrix { tensor: tensor.clone(), shape: a.shape().to_vec() }
    }
}

/// The target of a path in a model.
enum Place {
    Module(Target),
    Experts(ExpertsId, InExperts),
}

/// Finds the target of a path and the model's spelling of it. An exact match wins; otherwise exactly one alternative
/// spelling must match.
fn locate(model: &Model, module: &str) -> Result<(Place, String), AdapterError> {
    if let Some(place) = place(model, module) {
        return Ok((place, module.to_owned()));
    }
    let mut places: Vec<_> = names::spellings(module).filter_map(|path| Some((place(model, &path)?, path))).collect();
    match (places.pop(), places.is_empty()) {
        (None, _) => Err(AdapterError::NoPlace { module: module.to_owned() }),
        (Some(place), true) => Ok(place),
        (Some(last), false) => {
            places.push(last);
            let places = places.into_iter().map(|(_, path)| path).collect();
            Err(AdapterError::Ambiguous { module: module.to_owned(), places })
        }
    }
}

fn place(model: &Model, path: &str) -> Option<Place> {
    if let Some(target) = model.target(path) {
        return Some(Place::Module(target));
    }
    let at = names::in_experts(path)?;
    Some(Place::Experts(model.experts_at(&at.experts)?, at))
}
