//! What can be wrong with an adapter, in the order in which it is found out.

use std::{io, path::PathBuf};

use super::tensor::TensorName;
use crate::{DType, error::SlotError, model::MAX_RANK};

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why an adapter cannot be served. Nothing in an adapter is ever ignored silently: what is not supported is here, by name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    // The files.
    /// The system could not read a file.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The directory has no weights in a format we read.
    #[error("{dir} has neither adapter_model.safetensors nor adapter_model.safetensors.index.json", dir = dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// The weights are there only as a pickle.
    #[error("{path} is a pickle, and reading one executes code: convert it to adapter_model.safetensors", path = path.display())]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A file is not the JSON that it should be.
    #[error("{path} is not valid: {source}", path = path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Source,
    },
    /// A file is not a whole safetensors file.
    #[error("{path} is not a whole safetensors file: {source}", path = path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Source,
    },
    /// The index names something other than a file beside it.
    #[error("{index} names the shard `{shard}`, which is not a file's name", index = index.display())]
    ShardName {
        /// The index.
        index: PathBuf,
        /// What it names.
        shard: String,
    },
    /// The index and a shard disagree on where a tensor is.
    #[error("{index} says that `{tensor}` is {indexed}, but it is {found}", index = index.display())]
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
    #[error("adapter_config.json: `{field}` is {value}, but must be {want}")]
    InvalidField {
        /// The field, or a key inside it.
        field: String,
        /// Its value, as JSON.
        value: String,
        /// What it must be.
        want: &'static str,
    },
    /// A field asks for something that we do not do.
    #[error("adapter_config.json: `{field}` is {value}, which is not supported: {reason}")]
    UnsupportedField {
        /// The field.
        field: String,
        /// Its value, as JSON.
        value: String,
        /// Why not.
        reason: &'static str,
    },
    /// A field of `alpha_pattern` is not a regular expression, or takes too long to match.
    #[error("adapter_config.json: the key `{key}` of alpha_pattern is not usable: {source}")]
    Pattern {
        /// The key.
        key: String,
        /// What is wrong with it.
        source: Source,
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
    #[error("{got} bytes were given for a tensor of {dtype} and the shape {shape:?}")]
    Bytes {
        /// The type given.
        dtype: DType,
        /// The shape given.
        shape: Vec<usize>,
        /// How many bytes were given.
        got: usize,
    },
    /// A factor is not a matrix.
    #[error("{tensor} has the shape {shape:?}; a factor has two dimensions")]
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
    /// The scaling of a module is not an ordinary `f32`.
    #[error(
        "adapter_config.json: the alpha {alpha} of `{module}` at rank {rank} gives a scaling that is no finite number or vanishes"
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
    #[error("the module `{module}` has no place in the model")]
    NoPlace {
        /// The module's path.
        module: String,
    },
    /// The engine's model has several places that a module could mean.
    #[error("the module `{module}` could be {places:?} of the model")]
    Ambiguous {
        /// The module's path.
        module: String,
        /// The paths it could mean.
        places: Vec<String>,
    },
    /// Two modules adapt the same layer: a fused one and one of its parts, or two spellings of one.
    #[error("the modules `{module}` and `{other}` are in the same place of the model")]
    Overlap {
        /// One of them.
        module: String,
        /// The other.
        other: String,
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
    #[error("the module `{module}` is of expert {expert}, but the model has {num_experts} there")]
    NoExpert {
        /// The module's path.
        module: String,
        /// The expert.
        expert: usize,
        /// Experts of the layer.
        num_experts: usize,
    },
    /// The factors of several experts were trained on another model.
    #[error("{tensor} is {a:?} and its B is {b:?}, but the model needs {want}")]
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
    #[error("{tensor} is {a:?} and its B is {b:?}, which can be read in more than one way: {remedy}")]
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
    /// The adapter does not fit the table, or there is no such slot.
    #[error(transparent)]
    Slot(#[from] SlotError),
}
