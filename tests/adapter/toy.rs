//! A small model with every kind of layer, and each rank's expected part of it, computed without the library.

use std::{collections::HashMap, ops::Range};

use aril::model::{Linear, Model, ModelSpec, Parallel, TpRank};

/// The sizes of a model; all of them divide over the ranks, except the key-value heads.
#[derive(Clone, Debug)]
pub(crate) struct Toy {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) q: usize,
    pub(crate) kv_heads: usize,
    pub(crate) kv: usize,
    pub(crate) inter: usize,
    pub(crate) vocab: usize,
}

pub(crate) const TOY: Toy = Toy { layers: 2, hidden: 8, q: 16, kv_heads: 2, kv: 4, inter: 12, vocab: 20 };

/// A module of the model.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) path: String,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    cut: Cut,
}

#[derive(Clone, Copy, Debug)]
enum Cut {
    Rows { shards: usize },
    Columns,
    Table,
}

impl Place {
    pub(crate) fn is_embedding(&self) -> bool {
        matches!(self.cut, Cut::Table)
    }

    /// The columns of A and the rows of B that a rank needs.
    pub(crate) fn ranges(&self, rank: usize, size: usize) -> (Range<usize>, Range<usize>) {
        let part = |whole: usize, index: usize, parts: usize| index * whole / parts..(index + 1) * whole / parts;
        let (inputs, outputs) = (0..self.in_features, 0..self.out_features);
        match self.cut {
            Cut::Rows { shards } => (inputs, part(self.out_features, rank * shards / size, shards)),
            Cut::Columns => (part(self.in_features, rank, size), outputs),
            Cut::Table => (inputs, outputs),
        }
    }
}

impl Toy {
    /// The model of a rank, and the table entry of every module.
    pub(crate) fn model(&self, rank: usize, size: usize) -> (Model, HashMap<String, usize>) {
        let mut spec = ModelSpec::new();
        let mut layers = Vec::new();
        for layer in 0..self.layers {
            let [attn, mlp] = ["self_attn", "mlp"].map(|part| format!("model.layers.{layer}.{part}"));
            layers.push(
                Linear::new(&attn, Parallel::Column, self.hidden)
                    .slice("q_proj", self.q)
                    .kv_heads("k_proj", self.kv_heads, self.kv / self.kv_heads)
                    .kv_heads("v_proj", self.kv_heads, self.kv / self.kv_heads)
                    .fused("qkv_proj"),
            );
            layers.push(Linear::new(attn, Parallel::Row, self.q).slice("o_proj", self.hidden));
            layers.push(
                Linear::new(&mlp, Parallel::Column, self.hidden)
                    .slice("gate_proj", self.inter)
                    .slice("up_proj", self.inter)
                    .fused("gate_up_proj"),
            );
            layers.push(Linear::new(mlp, Parallel::Row, self.inter).slice("down_proj", self.hidden));
        }
        layers.push(Linear::new("", Parallel::Column, self.hidden).slice("lm_head", self.vocab));
        let ids: Vec<_> = layers.into_iter().map(|layer| spec.linear(layer).unwrap()).collect();
        let embedding = spec.embedding("model.embed_tokens", self.vocab, self.hidden).unwrap();
        let model = spec.shard(TpRank::new(rank, size).unwrap()).unwrap();
        let mut entries = HashMap::new();
        for id in ids {
            for (slice, entry) in model[id].slices().iter().zip(model[id].first_entry()..) {
                entries.insert(slice.module().to_owned(), entry);
            }
        }
        entries.insert("model.embed_tokens".to_owned(), model[embedding].entry());
        (model, entries)
    }

    /// Every module, in the order of the model, with the ranks' parts for a group of `size`.
    pub(crate) fn places(&self, size: usize) -> Vec<Place> {
        let shards = self.kv_heads.min(size);
        let mut places = Vec::new();
        let mut place = |path: String, in_features, out_features, cut| {
            places.push(Place { path, in_features, out_features, cut });
        };
        for layer in 0..self.layers {
            let [attn, mlp] = ["self_attn", "mlp"].map(|part| format!("model.layers.{layer}.{part}"));
            place(format!("{attn}.q_proj"), self.hidden, self.q, Cut::Rows { shards: size });
            place(format!("{attn}.k_proj"), self.hidden, self.kv, Cut::Rows { shards });
            place(format!("{attn}.v_proj"), self.hidden, self.kv, Cut::Rows { shards });
            place(format!("{attn}.o_proj"), self.q, self.hidden, Cut::Columns);
            place(format!("{mlp}.gate_proj"), self.hidden, self.inter, Cut::Rows { shards: size });
            place(format!("{mlp}.up_proj"), self.hidden, self.inter, Cut::Rows { shards: size });
            place(format!("{mlp}.down_proj"), self.inter, self.hidden, Cut::Columns);
        }
        place("lm_head".to_owned(), self.hidden, self.vocab, Cut::Rows { shards: size });
        place("model.embed_tokens".to_owned(), self.vocab, self.hidden, Cut::Table);
        places
    }
}
