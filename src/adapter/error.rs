//! What can be wrong with an adapter, in the order in which it is found out.

use std::{fmt, io, path::PathBuf};

use super::{
    pattern::{MAX_REGEXES, MAX_WORK},
    shown::{Cause, Shown, cause},
};
use crate::{DType, model::MAX_RANK};

/// Why an adapter cannot be served. Nothing in an adapter is ever ignored silently: what is not supported is here, by name.
///
/// Each is a sentence on one line, whatever the adapter has for names and values: characters that do not print are escaped in it, and
/// what is long is cut. The fields have all of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    // The files.
    /// The system could not read a file.
    #[error("{path}: {source}", path = Shown(path.display()))]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The directory has no weights in a format we read.
    #[error("{dir} has neither adapter_model.safetensors nor adapter_model.safetensors.index.json", dir = Shown(dir.display()))]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// The weights are there only as a pickle.
    #[error("{path} is a pickle, and reading one executes code: convert it to adapter_model.safetensors", path = Shown(path.display()))]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A file is not the JSON that it should be.
    #[error("{path} is not valid: {source}", path = Shown(path.display()))]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Cause,
    },
    /// A file is not a whole safetensors file.
    #[error("{path} is not a whole safetensors file: {source}", path = Shown(path.display()))]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Cause,
    },
    /// The index names something other than a file beside it.
    #[error("{index} names the shard `{shard}`, which is not a file's name", index = Shown(index.display()), shard = Shown(shard))]
    ShardName {
        /// The index.
        index: PathBuf,
        /// What it names.
        shard: String,
    },
    /// The index and a shard disagree on where a tensor is.
    #[error("{index} says that `{tensor}` is {indexed}, but it is {found}",
        index = Shown(index.display()), tensor = Shown(tensor), indexed = Shown(indexed), found = Shown(found))]
    Index {
        /// The index.
        index: PathBuf,
        /// The tensor's key.
        tensor: String,
        /// The index's opinion.
        indexed: String,
        /// The truth.
        found: String,
    },

    // The configuration.
    /// A field that decides what the weights mean is not there.
    #[error("adapter_config.json has no `{field}`")]
    MissingField {
        /// The field.
        field: &'static str,
    },
    /// A field is of another type or out of range.
    #[error("adapter_config.json: `{field}` is {value}, but must be {want}", field = Shown(field), value = Shown(value))]
    InvalidField {
        /// The field, or a key inside it.
        field: String,
        /// Its value, as JSON.
        value: String,
        /// What it must be.
        want: &'static str,
    },
    /// A field asks for something that we do not do.
    #[error("adapter_config.json: `{field}` is {value}, which is not supported: {reason}",
        field = Shown(field), value = Shown(value))]
    UnsupportedField {
        /// The field.
        field: String,
        /// Its value, as JSON.
        value: String,
        /// Why not.
        reason: &'static str,
    },
    /// A pattern is not a regular expression that Python reads as we do, is too large, or takes too long to match.
    #[error("adapter_config.json: the pattern `{key}` of {field} is not usable: {source}", key = Shown(key))]
    Pattern {
        /// The field that it is in.
        field: &'static str,
        /// The pattern.
        key: String,
        /// What is wrong with it.
        source: Cause,
    },
    /// There are too many regular expressions to keep.
    #[error("adapter_config.json has {regexes} regular expressions; {MAX_REGEXES} are the most, besides plain paths")]
    Regexes {
        /// How many there are in one field or in all.
        regexes: usize,
    },
    /// Matching all patterns with all modules would take too long.
    #[error(
        "adapter_config.json: matching its {patterns} patterns with {modules} modules could take more than {MAX_WORK} steps"
    )]
    Patterns {
        /// Patterns in all fields.
        patterns: usize,
        /// Modules of the adapter.
        modules: u64,
    },

    // The tensors.
    /// A tensor belongs to something that we do not do.
    #[error("{tensor} is {what}, which is not supported")]
    UnsupportedTensor {
        /// The tensor.
        tensor: TensorName,
        /// What it is.
        what: &'static str,
    },
    /// A tensor's key means nothing to us.
    #[error("{tensor} is not a tensor of a LoRA adapter that we know")]
    UnknownTensor {
        /// The tensor.
        tensor: TensorName,
    },
    /// A tensor is of a type that factors do not come in.
    #[error("{tensor} is of type {dtype}; factors are BF16, F16 or F32")]
    DType {
        /// The tensor.
        tensor: TensorName,
        /// Its type, as the file spells it.
        dtype: String,
    },
    /// A tensor made in memory has more or fewer bytes than its shape.
    #[error("{got} bytes were given for a tensor of {dtype} and the shape {shape}", shape = Shown(format_args!("{shape:?}")))]
    Bytes {
        /// The type given.
        dtype: DType,
        /// The shape given.
        shape: Vec<usize>,
        /// How many bytes were given.
        got: usize,
    },
    /// A factor is not a matrix.
    #[error("{tensor} has the shape {shape}; a factor has two dimensions", shape = Shown(format_args!("{shape:?}")))]
    NotMatrix {
        /// The tensor.
        tensor: TensorName,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// Two tensors stand for the same factor.
    #[error("{tensor} and {other} are the same factor of one module")]
    Duplicate {
        /// One of them.
        tensor: TensorName,
        /// The other.
        other: TensorName,
    },
    /// Two factors of one module are of different adapters or of different kinds.
    #[error("{tensor} and {other} are of one module but do not make a pair")]
    Unpaired {
        /// One of them.
        tensor: TensorName,
        /// The other.
        other: TensorName,
    },
    /// A module has only one of its factors.
    #[error("{tensor} has no {missing} beside it")]
    MissingFactor {
        /// The factor that is there.
        tensor: TensorName,
        /// The one that is not, `A` or `B`.
        missing: char,
    },
    /// The factors of a module have different ranks.
    #[error("{tensor} is [{a_rank}, {a_cols}] and its B is [{b_rows}, {b_rank}]: ranks {a_rank} and {b_rank}")]
    RankMismatch {
        /// The factor A.
        tensor: TensorName,
        /// The rows of A.
        a_rank: usize,
        /// The columns of A.
        a_cols: usize,
        /// The rows of B.
        b_rows: usize,
        /// The columns of B.
        b_rank: usize,
    },
    /// A rank is outside what we serve.
    #[error("{tensor} has rank {rank}; ranks are 1 to {MAX_RANK}")]
    Rank {
        /// The factor A.
        tensor: TensorName,
        /// Its rank.
        rank: usize,
    },
    /// The configuration gives a module another rank than its factors have, which PEFT does not load.
    #[error("{tensor} has rank {rank}, but `{field}` in adapter_config.json gives its module {want}")]
    RankField {
        /// The factor A.
        tensor: TensorName,
        /// Its rank.
        rank: usize,
        /// The field, `r` or `rank_pattern`.
        field: &'static str,
        /// The rank that the field gives.
        want: usize,
    },
    /// The configuration says that a module was not trained: PEFT would drop its factors.
    #[error("the module `{module}` is not one that `{field}` in adapter_config.json lets PEFT adapt", module = Shown(module))]
    NotTargeted {
        /// The module's path.
        module: String,
        /// The field: `target_modules`, `exclude_modules`, `layers_to_transform` or `target_parameters`.
        field: &'static str,
    },
    /// The scaling of a module is not an ordinary `f32`.
    #[error(
        "adapter_config.json: the alpha {alpha} of `{module}` at rank {rank} gives a scaling that is no finite number or vanishes",
        module = Shown(module)
    )]
    Scaling {
        /// The module's path.
        module: String,
        /// Its α.
        alpha: f64,
        /// Its rank.
        rank: usize,
    },
    /// The adapter adapts nothing.
    #[error("the adapter has no modules")]
    Empty,

    // The model.
    /// The engine's model has nothing that a module could adapt.
    #[error("the module `{module}` has no place in the model", module = Shown(module))]
    NoPlace {
        /// The module's path.
        module: String,
    },
    /// The engine's model has several places that a module could mean.
    #[error("the module `{module}` could be {places} of the model",
        module = Shown(module), places = Shown(format_args!("{places:?}")))]
    Ambiguous {
        /// The module's path.
        module: String,
        /// The paths it could mean.
        places: Vec<String>,
    },
    /// Two modules adapt the same layer: a fused one and one of its parts, or two spellings of one.
    #[error("the modules `{module}` and `{other}` are in the same place of the model",
        module = Shown(module), other = Shown(other))]
    Overlap {
        /// One of them.
        module: String,
        /// The other.
        other: String,
    },
    /// A factor is of another kind of module than the model's, which PEFT would not give it to.
    #[error("{tensor} is of {got}, but the model's `{module}` is {want}", module = Shown(module))]
    Kind {
        /// The factor.
        tensor: TensorName,
        /// The module's path.
        module: String,
        /// What the factor is of.
        got: &'static str,
        /// What the model has there.
        want: &'static str,
    },
    /// The adapter brings a weight of the base model, which PEFT loads over the base model's.
    #[error(
        "{tensor} is a weight of the base model, which PEFT loads over it: whether it is the same has to be found out first \
         (`Adapter::compare_base_weights`)"
    )]
    BaseWeight {
        /// The weight.
        tensor: TensorName,
    },
    /// The adapter brings a weight of the base model that is not the base model's.
    #[error("{tensor} is not the base model's weight, which an adapter cannot replace")]
    OtherBase {
        /// The weight.
        tensor: TensorName,
    },
    /// A factor was trained on another model.
    #[error("{tensor} is [{rows}, {cols}], but the model needs [{want_rows}, {want_cols}]",
        rows = got[0], cols = got[1], want_rows = want[0], want_cols = want[1])]
    Shape {
        /// The factor.
        tensor: TensorName,
        /// Its shape.
        got: [usize; 2],
        /// The shape that the model needs.
        want: [usize; 2],
    },
    /// A module is of an expert that the engine's model does not have.
    #[error("the module `{module}` is of expert {expert}, but the model has {num_experts} there", module = Shown(module))]
    NoExpert {
        /// The module's path.
        module: String,
        /// The expert.
        expert: usize,
        /// Experts of the layer.
        num_experts: usize,
    },
    /// The factors of several experts were trained on another model.
    #[error("{tensor} is {a} and its B is {b}, but the model needs {want}",
        a = Shown(format_args!("{a:?}")), b = Shown(format_args!("{b:?}")))]
    ExpertShapes {
        /// The factor A.
        tensor: TensorName,
        /// Its shape.
        a: Vec<usize>,
        /// The shape of B.
        b: Vec<usize>,
        /// The shapes that they could have.
        want: String,
    },
    /// The factors of several experts could stand in more than one way.
    #[error("{tensor} is {a} and its B is {b}, which can be read in more than one way: {remedy}",
        a = Shown(format_args!("{a:?}")), b = Shown(format_args!("{b:?}")))]
    AmbiguousExperts {
        /// The factor A.
        tensor: TensorName,
        /// Its shape.
        a: Vec<usize>,
        /// The shape of B.
        b: Vec<usize>,
        /// How to say what they are.
        remedy: &'static str,
    },
    /// A weight is NaN or infinite, or too large for the type that is computed in.
    #[error("{tensor} is {value} at {index:?}, which is not a finite {dtype}")]
    Unrepresentable {
        /// The factor.
        tensor: TensorName,
        /// The weight's place in the tensor.
        index: Vec<usize>,
        /// The weight.
        value: f32,
        /// The type it does not fit.
        dtype: DType,
    },
}

impl AdapterError {
    pub(super) fn json(path: impl Into<PathBuf>, source: &serde_json::Error) -> Self {
        Self::Json { path: path.into(), source: cause(source) }
    }

    pub(super) fn safetensors(path: impl Into<PathBuf>, source: &safetensors::SafeTensorError) -> Self {
        Self::Safetensors { path: path.into(), source: cause(source) }
    }
}

/// A tensor as errors name it: its key, and the file that it is in.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct TensorName {
    /// The key, as the file spells it.
    pub key: String,
    /// The file, or `file N` among the bytes of several; none for a tensor that was passed in memory.
    pub file: Option<PathBuf>,
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", Shown(&self.key))?;
        self.file.as_ref().map_or(Ok(()), |file| write!(f, " in {}", Shown(file.display())))
    }
}
