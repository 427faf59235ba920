//! An adapter's place in a model: which module each of its factors is of, and what of it a rank needs.

use std::collections::BTreeMap;

use super::{
    error::AdapterError,
    experts::{Layer, Source},
    image::SlotImage,
    module::{Module, ModuleKind, Stack},
    names::{self, InExperts},
    open::Adapter,
    rectangle::Rectangle,
    tensor::Stored,
};
use crate::{
    DType,
    model::{ExpertsId, Model, Target},
};

impl Adapter {
    /// What the adapter takes in a slot of `model` on this tensor-parallel rank, its weights in `dtype`.
    ///
    /// Any subset of the model's modules will do, each with a rank of its own. Of experts, it reads as much as it takes to see
    /// whether they have the same factors.
    ///
    /// # Errors
    /// If a module has no place in the model or shares it with another, a factor's shape is not the model's, stacked experts can
    /// be read in more than one way, or there are [base weights](Self::base_weights) that were not compared.
    pub fn plan(&self, model: &Model, dtype: DType) -> Result<SlotImage<'_>, AdapterError> {
        if let Some(weight) = self.base_weights.first() {
            return Err(AdapterError::BaseWeight { tensor: weight.name.clone() });
        }
        let mut image = SlotImage::new(dtype, model);
        let mut taken: BTreeMap<usize, &Module> = BTreeMap::new();
        let mut layers: BTreeMap<ExpertsId, Layer<'_, '_>> = BTreeMap::new();
        let mut layer = |id, source, at: &InExperts| {
            layers.entry(id).or_insert_with(|| Layer::new(&model[id], &self.config)).add(source, at)
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

impl Module {
    /// The module's path as the model spells it, or that of the fused module of a layer: of the model's module that
    /// [`plan`](Adapter::plan) gives the factors to.
    ///
    /// # Errors
    /// If the module has no place in the model, or several.
    pub fn path_in(&self, model: &Model) -> Result<String, AdapterError> {
        locate(model, &self.path).map(|(_, path)| path)
    }

    fn source(&self) -> Source<'_> {
        Source::new(&self.path, [self.a.stored(), self.b.stored()])
    }

    /// Puts what this rank needs of the factors into the image. The target alone decides what they must be.
    fn place<'a>(&'a self, target: Target, model: &Model, image: &mut SlotImage<'a>) -> Result<(), AdapterError> {
        self.expect_kind(match target {
            Target::Linear { .. } | Target::Fused(_) => ModuleKind::Linear,
            Target::Embedding { .. } => ModuleKind::Embedding,
        })?;
        let rank = self.rank();
        match target {
            Target::Linear { entry, input, output } => {
                self.a.expect_shape(rank, input.whole)?;
                self.b.expect_shape(output.whole, rank)?;
                let a = image.place(Rectangle::linear_a(self.a.view().columns(input.range())));
                let b = image.place(Rectangle::b(self.b.view().rows(output.range())));
                image.push(entry, rank, self.scaling, a, b);
            }
            Target::Embedding { entry, vocab, hidden } => {
                self.a.expect_shape(rank, vocab)?;
                self.b.expect_shape(hidden, rank)?;
                let a = image.place(Rectangle::embedding_a(self.a.view()));
                let b = image.place(Rectangle::b(self.b.view()));
                image.push(entry, rank, self.scaling, a, b);
            }
            Target::Fused(layer) => {
                let slices: Vec<_> = model.fused(layer).collect();
                let [(_, input, _), ..] = slices[..] else { return Ok(()) };
                self.a.expect_shape(rank, input.whole)?;
                self.b.expect_shape(slices.iter().map(|(_, _, output)| output.whole).sum(), rank)?;
                let a = image.place(Rectangle::linear_a(self.a.view().columns(input.range())));
                let mut first_row = 0;
                for (entry, _, output) in slices {
                    let rows = first_row + output.start..first_row + output.start + output.len;
                    let b = image.place(Rectangle::b(self.b.view().rows(rows)));
                    image.push(entry, rank, self.scaling, a, b);
                    first_row += output.whole;
                }
            }
        }
        Ok(())
    }
}

impl Stack {
    fn source(&self) -> Source<'_> {
        Source::new(&self.path, [&self.a, &self.b].map(|(name, tensor)| Stored { name, tensor }))
    }

    /// For one that is where the model has something else than experts.
    fn not_matrix(&self) -> AdapterError {
        let (tensor, a) = &self.a;
        AdapterError::NotMatrix { tensor: tensor.clone(), shape: a.shape().to_vec() }
    }
}

/// What a path stands for.
enum Place {
    Module(Target),
    Experts(ExpertsId, InExperts),
}

/// Finds what a path stands for, and how the model spells it: the model's module of that path, else its only module of another
/// spelling of it.
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
