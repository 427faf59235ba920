//! What an adapter consists of: modules, stacked factors of experts, and weights of the base model.

use super::{
    error::{AdapterError, TensorName},
    tensor::{Factor, Tensor},
};

/// A weight of the base model that an adapter brings: its embedding's or its head's.
#[derive(Debug)]
pub struct BaseWeight {
    pub(super) path: String,
    pub(super) name: TensorName,
    pub(super) tensor: Tensor,
}

impl BaseWeight {
    /// The path of the embedding or head, such as `model.embed_tokens`, as the adapter spells it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The weight.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// One adapted module of an adapter.
#[derive(Debug)]
pub struct Module {
    pub(super) path: String,
    pub(super) kind: ModuleKind,
    pub(super) scaling: f32,
    pub(super) a: Factor,
    pub(super) b: Factor,
}

/// What an adapter takes a module for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ModuleKind {
    /// A matrix multiplication: `lora_A`, `lora_B`.
    Linear,
    /// A table of rows: `lora_embedding_A`, `lora_embedding_B`.
    Embedding,
}

impl Module {
    /// The module's path in the model, such as `model.layers.0.self_attn.q_proj`, as the adapter spells it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What the adapter takes the module for.
    pub fn kind(&self) -> ModuleKind {
        self.kind
    }

    /// The rank of the factors, at least 1.
    pub fn rank(&self) -> usize {
        self.a.rows
    }

    /// α/r, or α/√r for rank-stabilised adapters.
    pub fn scaling(&self) -> f32 {
        self.scaling
    }

    /// Columns of A: the module's whole, unsharded input features, or an embedding's rows.
    pub fn in_features(&self) -> usize {
        self.a.cols
    }

    /// Rows of B: the module's whole, unsharded output features.
    pub fn out_features(&self) -> usize {
        self.b.rows
    }

    /// Reads A, row-major `[rank, in_features]`.
    pub fn a_f32(&self) -> Vec<f32> {
        self.a.tensor.to_f32()
    }

    /// Reads B, row-major `[out_features, rank]`.
    pub fn b_f32(&self) -> Vec<f32> {
        self.b.tensor.to_f32()
    }
}

impl Module {
    /// Fails unless the model's module is of the kind that the factors are of.
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

/// Factors of several experts in one pair of tensors. Only a model says how many experts there are, and so of which rank they are.
#[derive(Debug)]
pub struct Stack {
    pub(super) path: String,
    pub(super) a: (TensorName, Tensor),
    pub(super) b: (TensorName, Tensor),
}

impl Stack {
    /// The path of a module of all experts, such as `model.layers.0.mlp.experts.down_proj`, or, with PEFT's `target_parameters`, of
    /// the experts, less or more some `base_layer`; as the adapter spells it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The shape of A.
    pub fn a_shape(&self) -> &[usize] {
        self.a.1.shape()
    }

    /// The shape of B.
    pub fn b_shape(&self) -> &[usize] {
        self.b.1.shape()
    }
}
