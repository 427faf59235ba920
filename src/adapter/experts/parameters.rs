//! Factors of PEFT's `target_parameters`, whose module is a parameter that holds all experts.

use super::{
    forms::{Part, Steps},
    layer::Layer,
    source::{Orientation, Source},
};
use crate::adapter::error::AdapterError;

impl<'a> Layer<'a, '_> {
    /// Determines which parameters the factors belong to, and adds them.
    ///
    /// All have the same orientation. Their shapes identify the parameters; if up and down have equal shapes, their
    /// order does.
    pub(super) fn add_parameters(&mut self, orientation: Option<Orientation>) -> Result<(), AdapterError> {
        let orientations: &[Orientation] =
            match (orientation, self.site.stored().transposed, self.config.swaps_features) {
                (Some(Orientation::Forward), ..) | (None, false, Some(true)) | (None, true, Some(false)) => {
                    &[Orientation::Forward]
                }
                (Some(Orientation::Reversed), ..) | (None, false, Some(false)) => &[Orientation::Reversed],
                // PEFT reads the module's `is_transposed`, which not every transposed module sets.
                (None, ..) => &[Orientation::Forward, Orientation::Reversed],
            };
        let [first, down] = Part::parameters(self.site);
        let mut sources = std::mem::take(&mut self.parameters);
        // The last of two was wrapped first, because PEFT wraps parameters in the order of the model.
        sources.sort_by_key(|source| wrapped(source.path).1);
        let orders: &[&[(Part, &str)]] = match sources[..] {
            [] => return Ok(()),
            [_] => &[&[first], &[down]],
            [first, other] if wrapped(first.path).1 == wrapped(other.path).1 => {
                let [module, other] = [first, other].map(|source| source.path.to_owned());
                return Err(AdapterError::Overlap { module, other });
            }
            [_, _] => &[&[down, first], &[first, down]],
            [_, _, third, ..] => return Err(AdapterError::NoPlace { module: third.path.to_owned() }),
        };
        let targeted = |source: Source<'a>, name: &str| self.config.targets_parameter(&parameter_path(source, name));
        if let Some(source) = sources.iter().find(|source| !targeted(**source, first.1) && !targeted(**source, down.1))
        {
            return Err(AdapterError::NotTargeted { module: source.path.to_owned(), field: "target_parameters" });
        }
        let fits = |source: Source<'a>, (part, name): (Part, &str), orientation| {
            targeted(source, name) && self.parameter(source, part, orientation).is_some()
        };
        let mut ways = Vec::new();
        for &orientation in orientations {
            let mut orders = orders.iter().filter(|parts| {
                let mut pairs = sources.iter().zip(parts.iter());
                pairs.all(|(source, part)| fits(*source, *part, orientation))
            });
            match sources[..] {
                [_, _] => ways.extend(orders.next().map(|parts| (orientation, *parts))),
                _ => ways.extend(orders.map(|parts| (orientation, *parts))),
            }
        }
        let &[(orientation, parts)] = &ways[..] else {
            let fits_nothing = |source: &&Source<'a>| {
                let mut ways =
                    orientations.iter().flat_map(|orientation| [(first, *orientation), (down, *orientation)]);
                !ways.any(|(part, orientation)| fits(**source, part, orientation))
            };
            let source = sources.iter().find(fits_nothing).unwrap_or(&sources[0]);
            return Err(match ways[..] {
                [] => source.misshapen(self.parameter_shapes(*source, orientations)),
                _ => source.ambiguous(
                    "set `target_parameters` and the original `peft_version` in adapter_config.json, or call \
                     `Adapter::oriented` or `Source::oriented_directory`",
                ),
            });
        };
        for (source, (part, name)) in sources.into_iter().zip(parts) {
            let Some(steps) = self.parameter(source, *part, orientation) else { continue };
            let path = parameter_path(source, name);
            self.insert(0..self.site.num_experts(), *part, (source.path, &path), steps)?;
        }
        Ok(())
    }

    /// The factors of a parameter, if their shapes match it.
    fn parameter(&self, source: Source<'a>, part: Part, orientation: Orientation) -> Option<Steps<'a>> {
        let ([input, output], num_experts) = (part.features(self.site), self.site.num_experts());
        let (&[rows, a_features], &[b_features, cols]) = (source.a.tensor.shape(), source.b.tensor.shape()) else {
            return None;
        };
        let [takes, gives] = match orientation {
            Orientation::Forward => [input, output],
            Orientation::Reversed => [output, input],
        };
        if rows != cols || !rows.is_multiple_of(num_experts) || [a_features, b_features] != [takes, gives] {
            return None;
        }
        let rank = rows / num_experts;
        let a = source.a.view([rank, takes]);
        // `[gives, rank, experts]`
        let b = source.b.spaced([gives, rank], [rows, num_experts]);
        let (a_step, b_step) = (rank * takes, 1);
        Some(match orientation {
            Orientation::Forward => Steps { a, a_step, b, b_step },
            Orientation::Reversed => Steps { a: b.transposed(), a_step: b_step, b: a.transposed(), b_step: a_step },
        })
    }

    fn parameter_shapes(&self, source: Source<'a>, orientations: &[Orientation]) -> String {
        let num_experts = self.site.num_experts();
        let mut shapes = Vec::new();
        for orientation in orientations {
            let targeted = |name: &str| self.config.targets_parameter(&parameter_path(source, name));
            for (part, name) in Part::parameters(self.site).into_iter().filter(|(_, name)| targeted(name)) {
                let [mut takes, mut gives] = part.features(self.site);
                if *orientation == Orientation::Reversed {
                    (takes, gives) = (gives, takes);
                }
                shapes.push(format!("[{num_experts} * rank, {takes}] and [{gives}, rank * {num_experts}] of {name}"));
            }
        }
        shapes.join(" or ")
    }
}

/// Path of the parameter `name`.
fn parameter_path(source: Source<'_>, name: &str) -> String {
    format!("{}.{name}", wrapped(source.path).0)
}

/// The path of the experts in a path of theirs, and how many parameters were wrapped after this one.
fn wrapped(path: &str) -> (&str, usize) {
    let experts = path.trim_end_matches(".base_layer");
    (experts, path.len() - experts.len())
}
