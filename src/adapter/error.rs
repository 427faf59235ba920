//! Errors of adapters, in the order in which they are detected.

use std::{fmt, io, path::PathBuf};

use safetensors::SafeTensorError;

use super::{
    escaped::Escaped,
    pattern::{MAX_REGEX_BYTES, MAX_REGEXES, MAX_WORK},
    place::MAX_PARTS,
};
use crate::{DType, model::MAX_RANK};

/// An adapter that is malformed or not supported. Every tensor and every field is used or rejected by name.
///
/// Messages are one line. Names and values from the adapter are escaped if they are not printable, and shortened if
/// they are long; the fields hold them in full.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    // The files.
    /// A file cannot be read.
    #[error("cannot read {path}: {error}", path = Escaped(path.display()))]
    Read {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The memory of a device cannot be read.
    #[error("cannot read a tensor in device memory: {error}")]
    ReadBack {
        /// The driver's error.
        error: io::Error,
    },
    /// A file is not the one that was checked before: it was replaced, or modified.
    #[error("{path} has changed since it was checked", path = Escaped(path.display()))]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A weight had no finite value when it was packed, and has one now.
    #[error("{tensor} has changed while it was packed: its bytes must stay as they are")]
    Changing {
        /// The factor.
        tensor: TensorName,
    },
    /// The directory has no configuration. PEFT saves an adapter that is not named `default` in a folder of that name.
    #[error("{dir} has no adapter_config.json{found}", dir = Escaped(dir.display()),
        found = inside.as_ref().map_or(String::new(), |inside| format!(", but {} has one", Escaped(inside.display()))))]
    NoConfig {
        /// The directory.
        dir: PathBuf,
        /// The first of its folders that has one.
        inside: Option<PathBuf>,
    },
    /// The directory has no safetensors weights.
    #[error(
        "{dir} has neither adapter_model.safetensors nor adapter_model.safetensors.index.json",
        dir = Escaped(dir.display())
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// The weights exist only as a pickle, which could execute code when loaded.
    #[error(
        "{path} is a pickle, which could execute code: convert it to adapter_model.safetensors",
        path = Escaped(path.display())
    )]
    Pickle {
        /// The file.
        path: PathBuf,
    },
    /// A file is not valid JSON, or not of the expected form.
    #[error("{path} is not valid JSON of the expected form: {reason}", path = Escaped(path.display()))]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message, escaped and shortened.
        reason: String,
    },
    /// A file is not a complete safetensors file.
    #[error("{path} is not a complete safetensors file: {reason}", path = Escaped(path.display()))]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The parser's message, escaped and shortened.
        reason: String,
    },
    /// The index names a shard that does not exist.
    #[error(
        "{index} names the shard `{shard}`, which is missing",
        index = Escaped(index.display()),
        shard = Escaped(shard)
    )]
    NoShard {
        /// The index.
        index: PathBuf,
        /// The name in the index.
        shard: String,
    },
    /// The index names a shard that is not a plain file name.
    #[error(
        "{index} names the shard `{shard}`, which must be a plain file name",
        index = Escaped(index.display()),
        shard = Escaped(shard)
    )]
    ShardName {
        /// The index.
        index: PathBuf,
        /// The name in the index.
        shard: String,
    },
    /// The index and a shard disagree about the location of a tensor.
    #[error("{index} says that `{tensor}` is {indexed}, but it is {found}",
        index = Escaped(index.display()), tensor = Escaped(tensor), indexed = Escaped(indexed), found = Escaped(found))]
    Index {
        /// The index.
        index: PathBuf,
        /// Key of the tensor.
        tensor: String,
        /// Location according to the index.
        indexed: String,
        /// Actual location.
        found: String,
    },

    // The configuration.
    /// A required field is missing.
    #[error("adapter_config.json has no `{field}`")]
    MissingField {
        /// The field.
        field: &'static str,
    },
    /// A field has the wrong type or is out of range.
    #[error(
        "adapter_config.json: `{field}` is {value}, but must be {want}",
        field = Escaped(field),
        value = Escaped(value)
    )]
    InvalidField {
        /// The field, or a key inside it.
        field: String,
        /// The value, as JSON.
        value: String,
        /// The allowed values.
        want: &'static str,
    },
    /// A field requests an unsupported feature.
    #[error("adapter_config.json: `{field}` is {value}, which is not supported: {reason}",
        field = Escaped(field), value = Escaped(value))]
    UnsupportedField {
        /// The field.
        field: String,
        /// The value, as JSON.
        value: String,
        /// Why it is not supported.
        reason: &'static str,
    },
    /// A pattern is not a regular expression that Python and this crate interpret alike, is too large, or takes too
    /// long to match.
    #[error("adapter_config.json: the pattern `{key}` in `{field}` is not supported: {reason}", key = Escaped(key))]
    Pattern {
        /// The field of the pattern.
        field: &'static str,
        /// The pattern.
        key: String,
        /// The reason.
        reason: String,
    },
    /// The configuration has more or longer regular expressions than allowed.
    #[error(
        "adapter_config.json has {regexes} regular expressions of {bytes} bytes besides plain paths, but must have at \
         most {MAX_REGEXES} of {MAX_REGEX_BYTES}"
    )]
    Regexes {
        /// Number of regular expressions in all fields.
        regexes: usize,
        /// Their length.
        bytes: usize,
    },
    /// Matching all patterns with all modules takes too long.
    #[error(
        "adapter_config.json: matching {patterns} patterns with {modules} modules takes more than {MAX_WORK} steps"
    )]
    Patterns {
        /// Patterns in all fields.
        patterns: usize,
        /// Modules of the adapter.
        modules: usize,
    },

    // The tensors.
    /// A tensor belongs to an unsupported feature.
    #[error("{tensor} is {what}, which is not supported")]
    UnsupportedTensor {
        /// The tensor.
        tensor: TensorName,
        /// What the tensor is.
        what: &'static str,
    },
    /// The key of a tensor is unknown.
    #[error("{tensor} is not a known tensor of a LoRA adapter")]
    UnknownTensor {
        /// The tensor.
        tensor: TensorName,
    },
    /// The element type of a tensor is not supported.
    #[error("{tensor} has element type {dtype}, but must have BF16, F16, F32, F64 or F8_E4M3")]
    DType {
        /// The tensor.
        tensor: TensorName,
        /// Its element type, as the file spells it.
        dtype: String,
    },
    /// The number of bytes does not match the shape and element type.
    #[error("{got} bytes do not match a {dtype} tensor of shape {shape}", shape = Escaped(format_args!("{shape:?}")))]
    Bytes {
        /// The element type given.
        dtype: DType,
        /// The shape given.
        shape: Vec<usize>,
        /// The number of bytes given.
        got: usize,
    },
    /// A factor does not have two dimensions.
    #[error(
        "{tensor} has shape {shape}, but a factor must have two dimensions",
        shape = Escaped(format_args!("{shape:?}"))
    )]
    NotMatrix {
        /// The tensor.
        tensor: TensorName,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A factor is a placeholder without elements, as DeepSpeed's ZeRO-3 leaves them.
    #[error(
        "{tensor} is empty: the trainer did not gather the weights before it saved them, as happens with DeepSpeed \
         ZeRO-3"
    )]
    Ungathered {
        /// The tensor.
        tensor: TensorName,
    },
    /// Two tensors are the same factor.
    #[error("{tensor} and {other} are the same factor of one module")]
    Duplicate {
        /// The first tensor.
        tensor: TensorName,
        /// The second tensor.
        other: TensorName,
    },
    /// The names of two factors are those of different adapters, or one of them names none.
    #[error("{tensor} and {other} are of different adapters")]
    Adapters {
        /// The second factor.
        tensor: TensorName,
        /// The first factor.
        other: TensorName,
    },
    /// The two factors of a module differ in kind.
    #[error("{tensor} and {other} belong to one module but are not a pair")]
    Unpaired {
        /// The first tensor.
        tensor: TensorName,
        /// The second tensor.
        other: TensorName,
    },
    /// A module has only one factor.
    #[error("{tensor} has no matching {missing}")]
    MissingFactor {
        /// The factor present.
        tensor: TensorName,
        /// The missing factor, `A` or `B`.
        missing: char,
    },
    /// A and B have different ranks.
    #[error(
        "{tensor} is [{a_rank}, {a_cols}] and its B is [{b_rows}, {b_rank}]: the ranks {a_rank} and {b_rank} differ"
    )]
    RankMismatch {
        /// The factor A.
        tensor: TensorName,
        /// Rows of A.
        a_rank: usize,
        /// Columns of A.
        a_cols: usize,
        /// Rows of B.
        b_rows: usize,
        /// Columns of B.
        b_rank: usize,
    },
    /// A rank is outside 1 to [`MAX_RANK`].
    #[error("{tensor} has rank {rank}, but must have 1 to {MAX_RANK}")]
    Rank {
        /// The factor A.
        tensor: TensorName,
        /// Its rank.
        rank: usize,
    },
    /// A factor does not have the rank that the configuration gives its module. PEFT does not load such adapters.
    #[error("{tensor} has rank {rank}, but `{field}` in adapter_config.json requires {want}")]
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
    /// The configuration excludes a module that has factors. PEFT would drop them.
    #[error(
        "the module `{module}` has factors, but `{field}` in adapter_config.json excludes it",
        module = Escaped(module)
    )]
    NotTargeted {
        /// Path of the module.
        module: String,
        /// The field: `target_modules`, `exclude_modules`, `layers_to_transform` or `target_parameters`.
        field: &'static str,
    },
    /// The configuration ties the head to the embedding, and their factors differ. PEFT would give both the same ones.
    #[error("{tensor} and {other} differ, but `ensure_weight_tying` in adapter_config.json ties them")]
    Untied {
        /// The factor A of the head.
        tensor: TensorName,
        /// The factor A of the embedding.
        other: TensorName,
    },
    /// PEFT does not compute factors of this module from an invocation on.
    #[error(
        "{tensor} is of an embedding or a mixture of experts, which PEFT does not adapt with `alora_invocation_tokens`"
    )]
    NotInvocable {
        /// The factor A.
        tensor: TensorName,
    },
    /// `trainable_token_indices` names a module without rows, or none for rows, or PEFT would do something else.
    #[error("{tensor} has rows that cannot be used: {reason}")]
    Rows {
        /// The rows.
        tensor: TensorName,
        /// Why not.
        reason: &'static str,
    },
    /// `trainable_token_indices` has ids of a module of which there are no rows.
    #[error("`trainable_token_indices` in adapter_config.json has {ids} ids of `{module}`, which has no rows",
        module = Escaped(module))]
    NoRows {
        /// The module in the field, or `embed_tokens` for a list.
        module: String,
        /// Its ids.
        ids: usize,
    },
    /// `modules_to_save` has a module of which there is no weight.
    #[error("`modules_to_save` in adapter_config.json has `{module}`, which has no weight", module = Escaped(module))]
    NoWeight {
        /// The module in the field.
        module: String,
    },
    /// The scaling of a module is not a normal `f32`.
    #[error(
        "adapter_config.json: alpha {alpha} of `{module}` at rank {rank} gives a scaling that is not a normal f32",
        module = Escaped(module)
    )]
    Scaling {
        /// Path of the module.
        module: String,
        /// Its α.
        alpha: f64,
        /// Its rank.
        rank: usize,
    },
    /// The adapter has neither factors nor trained rows.
    #[error("the adapter has no factors")]
    Empty,

    // The model.
    /// No module of the model matches a module's path.
    #[error("the model has no module `{module}`", module = Escaped(module))]
    NoPlace {
        /// Path of the module.
        module: String,
    },
    /// Several modules of the model match a module's path.
    #[error("the module `{module}` matches several modules of the model: {places}",
        module = Escaped(module), places = Escaped(format_args!("{places:?}")))]
    Ambiguous {
        /// Path of the module.
        module: String,
        /// Paths of the matching modules.
        places: Vec<String>,
    },
    /// Two modules match the same module of the model: a fused module and one of its parts, or two spellings of one
    /// path.
    #[error("the modules `{module}` and `{other}` match the same module of the model",
        module = Escaped(module), other = Escaped(other))]
    Overlap {
        /// Path of the first module.
        module: String,
        /// Path of the second module.
        other: String,
    },
    /// A factor is of another kind than the model's module. PEFT would drop it.
    #[error("{tensor} belongs to {got}, but the model's `{module}` is {want}", module = Escaped(module))]
    Kind {
        /// The factor.
        tensor: TensorName,
        /// Path of the module.
        module: String,
        /// The factor's kind.
        got: &'static str,
        /// The kind of the model's module.
        want: &'static str,
    },
    /// The adapter has a copy of a base weight that was not compared. PEFT would load it over the base model's.
    #[error(
        "{tensor} is a copy of a base weight that has not been compared with the base model's: call \
         `Adapter::compare_base_weights`"
    )]
    BaseWeight {
        /// The weight.
        tensor: TensorName,
    },
    /// The adapter's copy of a base weight differs from the base model's.
    #[error("{tensor} differs from the base model's weight, which an adapter cannot replace")]
    OtherBase {
        /// The weight.
        tensor: TensorName,
    },
    /// The adapter does not apply to whole sequences.
    #[error(
        "`alora_invocation_tokens` is {tokens}: the adapter applies from these tokens of a prompt on, which this \
         engine does not look for (`take_invocation`)",
        tokens = Escaped(format_args!("{tokens:?}"))
    )]
    Invocation {
        /// The tokens from which on it applies.
        tokens: Vec<u32>,
    },
    /// A trained row is of no token of the model.
    #[error("{tensor} has a row of token {id}, but the model has {vocab} tokens")]
    NoToken {
        /// The rows.
        tensor: TensorName,
        /// The id.
        id: u32,
        /// The model's rows.
        vocab: usize,
    },
    /// The shape of a factor does not match the model.
    #[error("{tensor} is [{rows}, {cols}], but the model needs [{want_rows}, {want_cols}]",
        rows = got[0], cols = got[1], want_rows = want[0], want_cols = want[1])]
    Shape {
        /// The factor.
        tensor: TensorName,
        /// Its shape.
        got: [usize; 2],
        /// The required shape.
        want: [usize; 2],
    },
    /// The model has no expert with this index.
    #[error(
        "the module `{module}` is of expert {expert}, but the layer has {num_experts} experts",
        module = Escaped(module)
    )]
    NoExpert {
        /// Path of the module.
        module: String,
        /// Index of the expert.
        expert: usize,
        /// Experts of the layer.
        num_experts: usize,
    },
    /// The shapes of expert factors do not match the model.
    #[error("{tensor} is {a} and its B is {b}, but the model needs {want}",
        a = Escaped(format_args!("{a:?}")), b = Escaped(format_args!("{b:?}")))]
    ExpertShapes {
        /// The factor A.
        tensor: TensorName,
        /// Its shape.
        a: Vec<usize>,
        /// Shape of B.
        b: Vec<usize>,
        /// The allowed shapes.
        want: String,
    },
    /// The shapes of expert factors match the model in more than one way.
    #[error("{tensor} is {a} and its B is {b}, which is ambiguous: {remedy}",
        a = Escaped(format_args!("{a:?}")), b = Escaped(format_args!("{b:?}")))]
    AmbiguousExperts {
        /// The factor A.
        tensor: TensorName,
        /// Its shape.
        a: Vec<usize>,
        /// Shape of B.
        b: Vec<usize>,
        /// How to resolve the ambiguity.
        remedy: &'static str,
    },
    // Combinations.
    /// A combination has no adapters, or too many.
    #[error("a combination of {parts} adapters is not supported: it must have 1 to {MAX_PARTS}")]
    Parts {
        /// Its adapters.
        parts: usize,
    },
    /// The parts of a combination apply from different tokens on, or some to whole sequences.
    #[error("adapters cannot be combined whose `alora_invocation_tokens` differ, or of which only some have them")]
    Invocations,
    /// A scale is NaN or infinite.
    #[error("adapter {part} of a combination has the scale {scale}, but must have a finite one")]
    PartScale {
        /// Index of the adapter in the combination.
        part: usize,
        /// The scale.
        scale: f32,
    },
    /// A scale times the scaling of a module is not a normal `f32`.
    #[error(
        "the scaling {scaling} of `{module}`, times the scale {scale} of its adapter, is not a normal f32",
        module = Escaped(module)
    )]
    CombinedScaling {
        /// Path of the module.
        module: String,
        /// Its scaling.
        scaling: f32,
        /// The adapter's scale.
        scale: f32,
    },
    /// The ranks of a module are together too large.
    #[error(
        "the adapters of a combination have together rank {rank} for `{module}`, but must have at most {MAX_RANK}",
        module = Escaped(module)
    )]
    CombinedRank {
        /// Path of the module, as the first adapter that is too much spells it.
        module: String,
        /// The ranks of the adapters up to that one.
        rank: usize,
    },
    /// A weight, in a combination times what its adapter is multiplied by, is NaN or infinite, or rounds to an
    /// infinity.
    #[error("{tensor} is {value} at {index:?}, which has no finite value in {dtype}")]
    Unrepresentable {
        /// The factor.
        tensor: TensorName,
        /// Index of the weight in the tensor.
        index: Vec<usize>,
        /// The weight.
        value: f32,
        /// The target element type.
        dtype: DType,
    },
}

impl AdapterError {
    /// An error of a JSON file with this text.
    pub(super) fn json(path: impl Into<PathBuf>, text: &str, error: &serde_json::Error) -> Self {
        let reason = stand_in(text.as_bytes()).map_or_else(|| Escaped(error).to_string(), str::to_owned);
        Self::Json { path: path.into(), reason }
    }

    /// An error of a safetensors file that begins with these bytes.
    pub(super) fn safetensors(path: impl Into<PathBuf>, bytes: &[u8], error: &SafeTensorError) -> Self {
        let is_length = !matches!(error, SafeTensorError::HeaderTooLarge | SafeTensorError::HeaderTooSmall);
        let reason = stand_in(bytes).filter(|_| !is_length);
        Self::Safetensors {
            path: path.into(),
            reason: reason.map_or_else(|| Escaped(error).to_string(), str::to_owned),
        }
    }
}

/// What a file is that begins with these bytes, if something else was saved in its place.
fn stand_in(bytes: &[u8]) -> Option<&'static str> {
    let first = bytes.trim_ascii_start();
    if first.starts_with(b"version ") {
        Some("it is a pointer of Git LFS, which `git lfs pull` replaces by the file")
    } else if first.starts_with(b"<") && bytes.iter().take(size_of::<u64>()).all(u8::is_ascii) {
        Some("it is a page of HTML or XML, such as a server's error")
    } else {
        None
    }
}

/// Name of a tensor: its key and its file.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct TensorName {
    /// The key, as the file spells it.
    pub key: String,
    /// The file, or `file N` for [`Adapter::from_safetensors`](super::Adapter::from_safetensors). `None` for tensors
    /// passed in memory.
    pub file: Option<PathBuf>,
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", Escaped(&self.key))?;
        self.file.as_ref().map_or(Ok(()), |file| write!(f, " in {}", Escaped(file.display())))
    }
}
