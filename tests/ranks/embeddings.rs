//! Embeddings: whole on every rank, or split by vocabulary.

use aril::{
    adapter::ModuleKind,
    cpu::{LoraEmbedding, MatrixMut, Workspace},
    model::{ModelSpec, SpecError, TpRank},
    routing::Batch,
};

use crate::{
    common::{adapters::adapter, cpu::slots},
    numbers::{SLOTS, TOKENS, delta, group, module},
};

const HIDDEN: usize = 6;

/// Checks an embedding on all ranks of a group: the sum of the ranks' deltas, or each of them, is the whole one.
/// Returns whether the vocabulary can be divided.
fn check(vocab: usize, padded: Option<usize>, size: usize) -> bool {
    let mut spec = ModelSpec::new();
    let id = match padded {
        Some(padded) => spec.vocab_parallel_embedding("embed", vocab, padded, HIDDEN).unwrap(),
        None => spec.embedding("embed", vocab, HIDDEN).unwrap(),
    };
    let rows = padded.unwrap_or(vocab);
    if padded.is_some() && !rows.is_multiple_of(size) {
        for rank in 0..size {
            let error = spec.shard(TpRank::new(rank, size).unwrap()).unwrap_err();
            assert_eq!(error, SpecError::Uneven { path: "embed".into(), features: rows, shards: size, size });
            assert!(error.to_string().starts_with("`embed`"));
        }
        return false;
    }
    let lora = module(ModuleKind::Embedding, "embed", vocab, HIDDEN);
    let ranks = group(&spec, size, &adapter(std::slice::from_ref(&lora)));
    let mut held_by = vec![0; vocab];
    for weights in &ranks {
        weights.model()[id].range().for_each(|row| held_by[row] += 1);
    }
    assert!(held_by.iter().all(|&ranks| ranks == if padded.is_some() { 1 } else { size }));
    // Every id, three at a time, one that is padding, and some that no model has.
    let beyond = [rows - 1, rows, rows + 1];
    let all: Vec<usize> = (0..vocab.next_multiple_of(TOKENS)).chain(beyond).collect();
    for ids in all.chunks(TOKENS) {
        let mut sum = vec![0.0; TOKENS * HIDDEN];
        for weights in &ranks {
            let first = weights.model()[id].range().start;
            let local: Vec<i32> = ids.iter().map(|&id| id as i32 - first as i32).collect();
            let mut y = vec![0.0; TOKENS * HIDDEN];
            let mut workspace = Workspace::default();
            let slots = slots(weights, SLOTS);
            let mut step = weights.step(&Batch::new(&slots), &mut workspace).unwrap();
            let y_matrix = MatrixMut::new(&mut y, TOKENS, HIDDEN).unwrap();
            LoraEmbedding::new(weights, id).unwrap().add_delta(&mut step, &local, y_matrix).unwrap();
            if padded.is_some() {
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += y);
            } else {
                sum = y;
            }
        }
        for ((&id, slot), sum) in ids.iter().zip(SLOTS).zip(sum.chunks(HIDDEN)) {
            let one_hot: Vec<f32> = (0..vocab).map(|row| f32::from(u8::from(row == id))).collect();
            let expected = if slot >= 0 { delta(&lora, &one_hot) } else { vec![0.0; HIDDEN] };
            assert_eq!(sum, expected, "id {id} of {vocab}, {size} ranks");
        }
    }
    true
}

#[test]
fn whole_on_every_rank() {
    assert!((1..=16).all(|size| check(20, None, size)));
}

#[test]
fn vocabulary_parallel() {
    let (mut even, mut uneven) = (0, 0);
    for size in 1..=16 {
        // Without padding, with some, and with so much that the last ranks hold nothing.
        for (vocab, padded) in
            [(24, 24), (5 * size, 5 * size), (70, 72), (67, 67_usize.next_multiple_of(size)), (3, 4 * size)]
        {
            if check(vocab, Some(padded), size) { even += 1 } else { uneven += 1 }
        }
    }
    assert!(even >= 16 && uneven >= 16, "{even} even, {uneven} uneven");
}

#[test]
fn vocabularies_that_cannot_be_padded_are_refused() {
    let mut spec = ModelSpec::new();
    let padding = SpecError::Padding { module: "embed".into(), vocab: 9, padded: 8 };
    assert_eq!(spec.vocab_parallel_embedding("embed", 9, 8, 4), Err(padding));
    let features = |features| Err(SpecError::Features { path: "embed".into(), features });
    assert_eq!(spec.vocab_parallel_embedding("embed", 9, 1 << 31, 4), features(1 << 31));
    assert_eq!(spec.vocab_parallel_embedding("embed", 0, 8, 4), features(0));
    assert_eq!(spec.vocab_parallel_embedding("embed", 9, 16, 0), features(0));
    assert_eq!(spec.shard(TpRank::SINGLE).unwrap().num_entries(), 0);
}
