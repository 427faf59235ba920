//! Places an adapter in a model: matches its factors to modules, and selects what one rank needs.

use std::{collections::BTreeMap, ops::Range};

use super::{
    error::AdapterError,
    experts::{Layer, Source},
    image::{ImageEntry, SlotImage},
    module::{BaseWeight, Module, ModuleKind, Stack},
    names::{self, InExperts},
    open::Adapter,
    pattern::Work,
    rectangle::Rectangle,
    tensor::Stored,
};
use crate::{
    DType,
    model::{EmbeddingSite, ExpertsId, LinearSite, Model, SliceSite, Target},
};

impl Adapter {
    /// Plans the adapter's image in a slot of `model`, with weights of type `dtype`.
    ///
    /// The adapter may adapt any subset of the model's modules, each with its own rank. For experts, planning reads the
    /// factors far enough to find out which of them are equal.
    ///
    /// # Errors
    /// [`AdapterError`] if a module has no place in the model or the same place as another, a factor has the wrong
    /// shape, stacked experts are ambiguous, or [base weights](Self::base_weights) have not been compared.
    pub fn plan(&self, model: &Model, dtype: DType) -> Result<SlotImage<'_>, AdapterError> {
        if let Some(weight) = self.base_weights.first() {
            return Err(AdapterError::BaseWeight { tensor: weight.name.clone() });
        }
        let work = Work::new(self.modules.len() + self.stacks.len());
        let mut image = SlotImage::new(self.id, dtype, model);
        let mut taken: BTreeMap<usize, &Module> = BTreeMap::new();
        let mut layers: BTreeMap<ExpertsId, Layer<'_, '_>> = BTreeMap::new();
        let mut layer = |id, source, at: &InExperts| {
            layers.entry(id).or_insert_with(|| Layer::new(&model[id], &self.config, &work)).add(source, at)
        };
        for module in &self.modules {
            let first_new = image.entries().len();
            match locate(model, &module.path)? {
                (Place::Experts(id, at), _) => {
                    module.expect_kind(ModuleKind::Linear)?;
                    layer(id, module.source(), &at)?;
                }
                (Place::Module(target), _) => module.place(target, model, &mut image)?,
            }
            for entry in &image.entries()[first_new..] {
                if let Some(other) = taken.insert(entry.entry, module) {
                    return Err(AdapterError::Overlap { module: module.path.clone(), other: other.path.clone() });
                }
            }
        }
        for stack in self.stacks.iter().chain(&self.empty) {
            match locate(model, &stack.path)? {
                (Place::Experts(id, at), _) => layer(id, stack.source(), &at)?,
                (Place::Module(_), _) => return Err(stack.not_matrix()),
            }
        }
        layers.into_values().try_for_each(|layer| layer.place(self.orientation, &mut image))?;
        Ok(image)
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

    /// Places this rank's part of the factors in the image. Their required shapes depend on the target alone.
    fn place<'a>(&'a self, target: Target, model: &Model, image: &mut SlotImage<'a>) -> Result<(), AdapterError> {
        match target {
            Target::Slice(layer, slice) if self.is_head(&model[layer], slice) => {}
            Target::Slice(..) | Target::Fused(_) => self.expect_kind(ModuleKind::Linear)?,
            Target::Embedding(_) => self.expect_kind(ModuleKind::Embedding)?,
        }
        match target {
            Target::Slice(layer, slice) => self.place_slices(&model[layer], slice..slice + 1, image),
            Target::Fused(layer) => self.place_slices(&model[layer], 0..model[layer].slices().len(), image),
            Target::Embedding(embedding) => self.place_embedding(&model[embedding], image),
        }
    }

    /// Whether factors named like an embedding's are those of a head: their shapes are, and those of an embedding of
    /// its sizes are others.
    fn is_head(&self, site: &LinearSite, slice: usize) -> bool {
        let sizes = [site.whole_in_features(), site.slices()[slice].whole_out_features()];
        names::is_head(&self.path) && sizes[0] != sizes[1] && sizes == [self.in_features(), self.out_features()]
    }

    /// Places one A, and a part of B for each of these slices.
    fn place_slices<'a>(
        &'a self,
        site: &LinearSite,
        slices: Range<usize>,
        image: &mut SlotImage<'a>,
    ) -> Result<(), AdapterError> {
        let rank = self.rank();
        let whole = || site.slices()[slices.clone()].iter().map(SliceSite::whole_out_features);
        self.a.expect_shape(rank, site.whole_in_features())?;
        self.b.expect_shape(whole().sum(), rank)?;
        let a_rows = site.a_rows(rank);
        let a_rank = a_rows.len();
        let a_elems = image.place(Rectangle::linear_a(self.a.view().rows(a_rows).columns(site.in_range())));
        let mut first = 0;
        for (slice, whole) in slices.clone().zip(whole()) {
            let b_elems = image.place(Rectangle::rows_of_b(self.b.view(), first, &site.slices()[slice].b_rows()));
            let entry = site.first_entry() + slice;
            image.push(ImageEntry { entry, a_elems, a_rank, b_elems, rank, scaling: self.scaling });
            first += whole;
        }
        Ok(())
    }

    fn place_embedding<'a>(&'a self, site: &EmbeddingSite, image: &mut SlotImage<'a>) -> Result<(), AdapterError> {
        let rank = self.rank();
        self.a.expect_shape(rank, site.whole_vocab())?;
        self.b.expect_shape(site.hidden(), rank)?;
        let a_elems = image.place(Rectangle::embedding_a(self.a.view().columns(site.range())));
        let b_elems = image.place(Rectangle::b(self.b.view()));
        let entry = site.entry();
        image.push(ImageEntry { entry, a_elems, a_rank: rank, b_elems, rank, scaling: self.scaling });
        Ok(())
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
