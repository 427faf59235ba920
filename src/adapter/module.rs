//! The parts of an adapter: modules, stacked expert factors and weights of the base model.

use super::{
    error::{AdapterError, TensorName},
    tensor::{Factor, Tensor},
};

/// A copy of the base model's embedding or head weight in an adapter.
#[derive(Debug)]
pub struct BaseWeight {
    pub(super) path: String,
    pub(super) name: TensorName,
    pub(super) tensor: Tensor,
}

impl BaseWeight {
    /// Path of the embedding or head as the adapter spells it, such as `model.embed_tokens`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The weight.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Rows of an embedding or head that an adapter has in the place of the base model's: some of them
/// (`trainable_token_indices`), or all (`modules_to_save`).
#[derive(Debug)]
pub struct TrainedRows {
    pub(super) path: String,
    /// Ascending.
    pub(super) ids: Vec<u32>,
    /// The row of each id in `rows`.
    pub(super) places: Vec<usize>,
    pub(super) rows: Factor,
    /// Whether they are the whole matrix.
    pub(super) is_whole: bool,
    /// Whether a head that is tied to the embedding has them, too.
    pub(super) is_tied: bool,
    /// Whether the configuration says the same ids of the head, which has no rows.
    pub(super) needs_tied: bool,
}

impl TrainedRows {
    /// Path of the embedding or head as the adapter spells it, such as `model.embed_tokens`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The token ids, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Whether a head that the model ties to the embedding has the embedding's rows, too, if it has none of its own.
    pub fn is_tied(&self) -> bool {
        self.is_tied
    }

    /// Features of a row.
    pub fn hidden(&self) -> usize {
        self.rows.cols
    }

    /// The rows of [`ids`](Self::ids) as `f32`.
    pub fn rows(&self) -> impl Iterator<Item = Vec<f32>> {
        let (values, hidden) = (self.rows.tensor.to_f32(), self.rows.cols);
        self.places.iter().map(move |&row| values[row * hidden..][..hidden].to_vec())
    }
}

/// One adapted module.
#[derive(Debug)]
pub struct Module {
    pub(super) path: String,
    pub(super) kind: ModuleKind,
    pub(super) scaling: f32,
    pub(super) a: Factor,
    pub(super) b: Factor,
}

/// The kind of a module, by the names of its tensors.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ModuleKind {
    /// A linear layer: `lora_A`, `lora_B`.
    Linear,
    /// An embedding: `lora_embedding_A`, `lora_embedding_B`.
    Embedding,
}

impl Module {
    /// Path of the module as the adapter spells it, such as `model.layers.0.self_attn.q_proj`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The kind of the module.
    pub fn kind(&self) -> ModuleKind {
        self.kind
    }

    /// The rank, at least 1.
    pub fn rank(&self) -> usize {
        self.a.rows
    }

    /// The scaling: α/r, or α/√r for rank-stabilised adapters.
    pub fn scaling(&self) -> f32 {
        self.scaling
    }

    /// Columns of A: the unsharded input features, or the rows of an embedding.
    pub fn in_features(&self) -> usize {
        self.a.cols
    }

    /// Rows of B: the unsharded output features.
    pub fn out_features(&self) -> usize {
        self.b.rows
    }

    /// A as `f32`, `[rank, in_features]`, row-major.
    pub fn a_f32(&self) -> Vec<f32> {
        self.a.tensor.to_f32()
    }

    /// B as `f32`, `[out_features, rank]`, row-major.
    pub fn b_f32(&self) -> Vec<f32> {
        self.b.tensor.to_f32()
    }
}

impl Module {
    /// Whether the factors of a head are those of an embedding, with A and B exchanged.
    pub(super) fn is_transpose_of(&self, embedding: &Self) -> Result<bool, AdapterError> {
        let [a, b] = [&embedding.b, &embedding.a].map(|factor| factor.view().transposed());
        Ok(self.a.view().same(&a)? && self.b.view().same(&b)?)
    }

    /// Rejects factors of another kind than the model's module.
    pub(super) fn expect_kind(&self, want: ModuleKind) -> Result<(), AdapterError> {
        if self.kind == want {
            return Ok(());
        }
        let name = |kind| match kind {
            ModuleKind::Linear => "a linear layer",
            ModuleKind::Embedding => "an embedding",
        };
        let (tensor, module) = (self.a.name.clone(), self.path.clone());
        Err(AdapterError::Kind { tensor, module, got: name(self.kind), want: name(want) })
    }
}

/// The factors of several experts in one pair of tensors. Their rank depends on the number of experts, which only a
/// model knows.
#[derive(Debug)]
pub struct Stack {
    pub(super) path: String,
    pub(super) a: (TensorName, Tensor),
    pub(super) b: (TensorName, Tensor),
}

impl Stack {
    /// Path as the adapter spells it: of a module of all experts, such as `model.layers.0.mlp.experts.down_proj`; or,
    /// for PEFT's `target_parameters`, of the experts themselves, possibly with `base_layer` components.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Shape of A.
    pub fn a_shape(&self) -> &[usize] {
        self.a.1.shape()
    }

    /// Shape of B.
    pub fn b_shape(&self) -> &[usize] {
        self.b.1.shape()
    }
}
