//! Layers of real models on which other libraries have failed.

use aril::{
    DType,
    adapter::{ModuleKind, SlotImage, layout::B},
    model::{Linear, LinearId, Model, ModelSpec, Parallel, TpRank},
};

use crate::{
    common::adapters::{Lora, adapter},
    numbers::{RANK, module},
};

const HIDDEN: usize = 2048;
const HEAD_DIM: usize = 256;
const Q_HEADS: usize = 16;
const KV_HEADS: usize = 2;
/// Each head of q has an output gate.
const Q: usize = Q_HEADS * 2 * HEAD_DIM;
const KV: usize = KV_HEADS * HEAD_DIM;

/// The full attention of Qwen3.5-35B-A3B: q and its gates have 8192 features, k and v two heads of 256 each.
fn attention() -> (ModelSpec, LinearId) {
    let mut spec = ModelSpec::new();
    let layer = Linear::new("self_attn", Parallel::Column, HIDDEN).heads("q_proj", Q_HEADS, 2 * HEAD_DIM);
    let layer = layer.kv_heads("k_proj", KV_HEADS, HEAD_DIM).kv_heads("v_proj", KV_HEADS, HEAD_DIM);
    let id = spec.linear(layer.fused("qkv_proj")).unwrap();
    (spec, id)
}

/// B of a slice in a rank's image, `[out, rank]`.
fn packed_b(image: &SlotImage<'_>, model: &Model, id: LinearId, slice: usize) -> Vec<f32> {
    let mut block = vec![0_f32; image.bytes() / 4];
    image.write_to(bytemuck::cast_slice_mut(&mut block)).unwrap();
    let site = &model[id];
    let entry = image.entries().iter().find(|entry| entry.entry == site.first_entry() + slice).unwrap();
    let layout = B { out_features: site.slices()[slice].out_features(), rank: RANK };
    let at = |row, col| block[entry.b_elems + layout.at(row, col)];
    (0..layout.out_features)
        .flat_map(|row| (0..RANK).map(move |col| (row, col)))
        .map(|(row, col)| at(row, col))
        .collect()
}

/// Checks the rows of q, k and v on each rank of a group, in adapters of the three modules and of the fused one.
fn check(size: usize, [q_rows, kv_rows]: [usize; 2], first_of_kv: impl Fn(usize) -> usize) {
    let (spec, id) = attention();
    let separate = [("q_proj", Q), ("k_proj", KV), ("v_proj", KV)]
        .map(|(name, out)| module(ModuleKind::Linear, &format!("self_attn.{name}"), HIDDEN, out));
    let fused = module(ModuleKind::Linear, "self_attn.qkv_proj", HIDDEN, Q + 2 * KV);
    for rank in 0..size {
        let model = spec.shard(TpRank::new(rank, size).unwrap()).unwrap();
        let (first_q, first_kv) = (rank * q_rows, first_of_kv(rank));
        let rows = [first_q..first_q + q_rows, first_kv..first_kv + kv_rows, first_kv..first_kv + kv_rows];
        assert_eq!(model[id].out_features(), q_rows + 2 * kv_rows);
        let check = |loras: &[Lora], of_slice: &dyn Fn(usize) -> (usize, usize)| {
            let adapter = adapter(loras);
            let image = adapter.plan(&model, DType::F32).unwrap();
            for (slice, rows) in rows.iter().enumerate() {
                assert_eq!(model[id].slices()[slice].ranges(), std::slice::from_ref(rows));
                let (lora, first) = of_slice(slice);
                let b = &loras[lora].b[(first + rows.start) * RANK..(first + rows.end) * RANK];
                assert!(packed_b(&image, &model, id, slice) == b, "slice {slice} of rank {rank}");
            }
        };
        check(&separate, &|slice| (slice, 0));
        check(std::slice::from_ref(&fused), &|slice| (0, [0, Q, Q + KV][slice]));
    }
}

/// 512 rows of q, and all 256 of one head of k and of v: 1024. The sixteenth part of all rows is 576, which leaves room
/// for none of v.
#[test]
fn sixteen_ranks_of_two_key_value_heads() {
    assert_eq!((Q + 2 * KV) / 16, 576);
    check(16, [512, 256], |rank| rank / 8 * 256);
}

/// Four heads of q with their gates, and one head of k and of v, which two ranks hold.
#[test]
fn four_ranks_of_two_key_value_heads() {
    check(4, [2048, 256], |rank| rank / 2 * 256);
}

#[test]
fn as_many_ranks_as_key_value_heads_or_fewer() {
    check(1, [8192, 512], |_| 0);
    check(2, [4096, 256], |rank| rank * 256);
}
