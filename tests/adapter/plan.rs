//! Adapters and models: the entry and the shape of each module.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use aril::{
    DType,
    adapter::{
        Adapter, AdapterError, ImageEntry, MIN_STAGING_BYTES, SlotImage, Tensor,
        layout::{B, LinearA},
    },
    cpu::WeightTable,
    error::{LoadError, SlotError},
    model::{Experts, Linear, MAX_RANK, Model, ModelSpec, Parallel, Part, Shard, TpRank},
    plan::Capacity,
};
use half::{bf16, f16};

use crate::{
    CONFIG,
    common::adapters::{Lora, parts, tensor},
    load, load_paths, ones, refused,
    toy::TOY,
};

/// A model of square layers at these paths.
fn model(paths: &[&str]) -> Model {
    let mut spec = ModelSpec::new();
    for path in paths {
        spec.linear(Linear::new("", Parallel::Replicated, 8).slice(*path, 8)).unwrap();
    }
    spec.shard(TpRank::SINGLE).unwrap()
}

fn adapter(modules: &[Lora]) -> Adapter {
    let (config, tensors) = parts(8.0, modules);
    Adapter::from_tensors(&config, tensors).unwrap()
}

/// The entries of an adapter with these paths in a model.
fn entries(model: &Model, paths: &[&str]) -> Result<Vec<usize>, AdapterError> {
    let adapter = load_paths(paths)?;
    let image = adapter.plan(model, DType::F32)?;
    Ok(image.entries().iter().map(|entry| entry.entry).collect())
}

fn block(image: &SlotImage<'_>) -> Vec<f32> {
    assert_eq!(image.dtype(), DType::F32);
    let mut block = vec![f32::NAN; image.bytes() / 4];
    image.write_to(bytemuck::cast_slice_mut(&mut block)).unwrap();
    block
}

/// A `[rank, in_features]` and B `[out_features, rank]` of a linear module in a block.
fn factors(block: &[f32], entry: &ImageEntry, in_features: usize, out_features: usize) -> [Vec<f32>; 2] {
    let rank = entry.rank;
    let (a, b) = (LinearA { rank, in_features }, B { out_features, rank });
    let a_row = |row| (0..in_features).map(move |col| block[entry.a_elems + a.at(row, col)]);
    let b_row = |row| (0..rank).map(move |col| block[entry.b_elems + b.at(row, col)]);
    [(0..rank).flat_map(a_row).collect(), (0..out_features).flat_map(b_row).collect()]
}

#[test]
fn any_subset() {
    let (model, table) = TOY.model(0, 1);
    let places = TOY.places(1);
    for path in [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.mlp.up_proj",
        "lm_head",
        "model.embed_tokens",
    ] {
        let place = places.iter().find(|place| place.path == path).unwrap();
        let (inputs, outputs) = (place.in_features, place.out_features);
        let module = if place.is_embedding() {
            Lora::embedding(path, inputs, outputs, 1)
        } else {
            Lora::linear(path, inputs, outputs, 1)
        };
        let adapter = adapter(&[module]);
        let image = adapter.plan(&model, DType::BF16).unwrap();
        assert_eq!(image.entries().iter().map(|entry| entry.entry).collect::<Vec<_>>(), [table[path]]);
        assert_eq!(image.num_entries(), model.num_entries());
    }
}

#[test]
fn zero_factors_are_an_adapter() {
    let adapter = adapter(&[Lora::linear("lm_head", 8, 20, 2)]);
    let (model, _) = TOY.model(0, 1);
    assert!(block(&adapter.plan(&model, DType::F32).unwrap()).iter().all(|&weight| weight == 0.0));
}

#[test]
fn slices_of_different_ranks() {
    let [q, k] = ["q_proj", "k_proj"].map(|slice| format!("model.layers.0.self_attn.{slice}"));
    let adapter =
        adapter(&[Lora::linear(&q, 8, 16, 3).fill(|| 3.0).alpha(6.0), Lora::linear(&k, 8, 4, 1).fill(|| 1.0)]);
    let (model, table) = TOY.model(0, 1);
    let image = adapter.plan(&model, DType::F32).unwrap();
    let entry = |path: &str| image.entries().iter().find(|entry| entry.entry == table[path]).unwrap();
    assert_eq!((entry(&q).rank, entry(&q).scaling), (3, 2.0));
    assert_eq!((entry(&k).rank, entry(&k).scaling), (1, 8.0));
    assert_eq!(image.max_rank(), 3);
    let block = block(&image);
    assert_eq!(factors(&block, entry(&q), 8, 16), [vec![3.0; 3 * 8], vec![3.0; 16 * 3]]);
    assert_eq!(factors(&block, entry(&k), 8, 4), [vec![1.0; 8], vec![1.0; 4]]);
}

#[test]
fn fused_modules() {
    let path = "model.layers.1.self_attn.qkv_proj";
    let mut next = 0.0;
    let fused = Lora::linear(path, 8, 24, 4).fill(|| {
        next += 1.0;
        next
    });
    let adapter = adapter(std::slice::from_ref(&fused));
    for size in [1, 2, 4] {
        for rank in 0..size {
            let (model, table) = TOY.model(rank, size);
            let image = adapter.plan(&model, DType::F32).unwrap();
            let block = block(&image);
            assert_eq!(image.entries().len(), 3);
            // q has 16 rows, k and v 4 each, of 2 heads.
            let shards = size.min(2);
            let head = rank * shards / size;
            for (slice, first, len) in [
                ("q_proj", rank * 16 / size, 16 / size),
                ("k_proj", 16 + head * 4 / shards, 4 / shards),
                ("v_proj", 20 + head * 4 / shards, 4 / shards),
            ] {
                let entry = table[&format!("model.layers.1.self_attn.{slice}")];
                let entry = image.entries().iter().find(|found| found.entry == entry).unwrap();
                assert_eq!((entry.rank, entry.scaling), (4, 2.0));
                // All slices share A.
                assert_eq!(entry.a_elems, 0);
                let [a, b] = factors(&block, entry, 8, len);
                assert_eq!(a, fused.a);
                assert_eq!(b, fused.b[first * 4..][..len * 4]);
            }
        }
    }
    let (model, _) = TOY.model(0, 1);
    let short = Lora::linear(path, 8, 20, 4);
    let (config, tensors) = parts(8.0, &[short]);
    let short = Adapter::from_tensors(&config, tensors).unwrap();
    refused!(short.plan(&model, DType::F32), Shape, "qkv_proj.lora_B", "[20, 4]", "[24, 4]");
}

#[test]
fn a_place_has_one_module() {
    let (model, _) = TOY.model(0, 1);
    let [fused, v] = ["qkv_proj", "v_proj"].map(|slice| format!("model.layers.0.self_attn.{slice}"));
    let both = adapter(&[Lora::linear(&fused, 8, 24, 1), Lora::linear(&v, 8, 4, 1)]);
    refused!(both.plan(&model, DType::F32), Overlap, format!("`{fused}`"), format!("`{v}`"));
    let one = self::model(&["model.layers.0.q_proj"]);
    let twice = entries(&one, &["model.layers.0.q_proj", "model.language_model.layers.0.q_proj"]);
    refused!(twice, Overlap, "`model.layers.0.q_proj`", "`model.language_model.layers.0.q_proj`");
}

#[test]
fn modules_without_a_place() {
    let model = model(&["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]);
    for path in [
        "model.layers.2.self_attn.q_proj",
        "model.layers.00.self_attn.q_proj",
        "model.layers.0.cross_attn.q_proj",
        "model.layers.0.q_proj",
        "layers.0.self_attn.q_proj.inner",
        "model.layers.0.self_attn.wq_proj",
        "model.layers.0.self_attn.q_pro",
        "model.layers.0.self_attn.v_proj",
        "xmodel.layers.0.self_attn.q_proj",
        "encoder.model.layers.0.self_attn.q_proj",
        // Under Meta's own names, weights have another order.
        "layers.0.attention.wq",
        "q_proj",
        "lm_head",
    ] {
        refused!(entries(&model, &[path]), NoPlace, format!("`{path}`"));
        // Nor together with modules that have a place.
        refused!(entries(&model, &[path, "model.layers.1.self_attn.q_proj"]), NoPlace, format!("`{path}`"));
    }
}

#[test]
fn multimodal_paths() {
    let stems =
        ["model", "model.language_model", "language_model.model", "language_model", "model.model", "thinker.model"];
    for ours in stems {
        let path = format!("{ours}.layers.0.self_attn.q_proj");
        let model = model(&["model.visual.layers.0.self_attn.q_proj", &path, "lm_head"]);
        for theirs in stems {
            assert_eq!(
                entries(&model, &[&format!("{theirs}.layers.0.self_attn.q_proj")]).unwrap(),
                [1],
                "{ours} {theirs}"
            );
        }
        assert_eq!(entries(&model, &["layers.0.self_attn.q_proj"]).unwrap(), [1]);
        assert_eq!(entries(&model, &["model.visual.layers.0.self_attn.q_proj"]).unwrap(), [0]);
        refused!(entries(&model, &["visual.blocks.0.self_attn.q_proj"]), NoPlace, "visual");
        refused!(entries(&model, &["vision_tower.layers.0.self_attn.q_proj"]), NoPlace, "vision_tower");
        refused!(entries(&model, &["talker.model.layers.0.self_attn.q_proj"]), NoPlace, "talker");
    }
}

#[test]
fn the_models_own_spelling_comes_first() {
    let model = model(&["language_model.model.layers.0.q_proj", "model.layers.0.q_proj"]);
    assert_eq!(entries(&model, &["model.layers.0.q_proj"]).unwrap(), [1]);
    assert_eq!(entries(&model, &["language_model.model.layers.0.q_proj"]).unwrap(), [0]);
    let unclear = entries(&model, &["layers.0.q_proj"]);
    refused!(
        unclear,
        Ambiguous,
        "`layers.0.q_proj`",
        "language_model.model.layers.0.q_proj",
        "\"model.layers.0.q_proj"
    );
}

#[test]
fn aliases_of_the_head_and_the_embedding() {
    let (model, table) = TOY.model(0, 1);
    let entry = |module: Lora| adapter(&[module]).plan(&model, DType::F32).map(|image| image.entries()[0].entry);
    for alias in ["lm_head", "unembed_tokens", "output", "model.lm_head", "language_model.lm_head", "embed_out"] {
        assert_eq!(entry(Lora::linear(alias, 8, 20, 1)).unwrap(), table["lm_head"], "{alias}");
    }
    for alias in [
        "embed_tokens",
        "model.language_model.embed_tokens",
        "transformer.wte",
        "embeddings",
        "word_embeddings",
        "vocab_emb",
    ] {
        assert_eq!(entry(Lora::embedding(alias, 20, 8, 1)).unwrap(), table["model.embed_tokens"], "{alias}");
    }
    for other in ["model.layers.0.self_attn.output", "encoder.output", "vision.embeddings"] {
        refused!(entry(Lora::linear(other, 8, 20, 1)), NoPlace, format!("`{other}`"));
    }
}

/// PEFT applies them to nothing, whatever their shapes.
#[test]
fn factors_are_for_modules_of_their_kind() {
    let (model, _) = TOY.model(0, 1);
    let head = |[a, b]: [[usize; 2]; 2]| {
        load(CONFIG, [("lm_head.lora_embedding_A", &a[..]), ("lm_head.lora_embedding_B", &b)]).unwrap()
    };
    for shapes in [[[2, 20], [8, 2]], [[2, 8], [21, 2]], [[2, 20], [20, 2]]] {
        let result = head(shapes).plan(&model, DType::F32).map(drop);
        refused!(result, Kind, "`lm_head.lora_embedding_A` belongs to an embedding", "`lm_head` is a linear layer");
    }
    for shapes in [[[2, 8], [20, 2]], [[2, 20], [8, 2]]] {
        let [a, b] = ["A", "B"].map(|side| format!("model.embed_tokens.lora_{side}.weight"));
        let result =
            load(CONFIG, [(&*a, &shapes[0][..]), (&b, &shapes[1])]).unwrap().plan(&model, DType::F32).map(drop);
        refused!(result, Kind, "`model.embed_tokens.lora_A.weight` belongs to a linear layer", "is an embedding");
    }
    let mut spec = ModelSpec::new();
    spec.experts(Experts::new("experts", 2, 8, 8)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let [a, b] = ["A", "B"].map(|side| format!("experts.0.down_proj.lora_embedding_{side}"));
    let result = load(CONFIG, [(&*a, &[2, 8][..]), (&b, &[8, 2])]).unwrap().plan(&model, DType::F32).map(drop);
    refused!(result, Kind, format!("`{a}`"), "is a linear layer");
}

/// As tokenspeed names them.
#[test]
fn factors_of_a_head_may_be_named_like_those_of_an_embedding() {
    let (model, _) = TOY.model(0, 1);
    let image = |names: [&str; 2]| {
        let shapes: [&[usize]; 2] = [&[2, 8], &[20, 2]];
        let adapter = load(CONFIG, names.into_iter().zip(shapes)).unwrap();
        let image = adapter.plan(&model, DType::F32).unwrap();
        let mut block = vec![0; image.bytes()];
        image.write_to(&mut block).unwrap();
        (image.entries().to_vec(), block)
    };
    let named = image(["lm_head.lora_embedding_A", "lm_head.lora_embedding_B"]);
    assert_eq!(named, image(["lm_head.lora_A.weight", "lm_head.lora_B.weight"]));
    // Of a square head nobody knows which it is.
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("", Parallel::Column, 8).vocab("lm_head", 8, 8)).unwrap();
    let square = spec.shard(TpRank::SINGLE).unwrap();
    let names = ["lm_head.lora_embedding_A", "lm_head.lora_embedding_B"].into_iter();
    let result = load(CONFIG, names.zip([&[2_usize, 8][..], &[8, 2]])).unwrap().plan(&square, DType::F32).map(drop);
    refused!(result, Kind, "`lm_head.lora_embedding_A` belongs to an embedding");
}

#[test]
fn shapes_are_the_models() {
    let (model, _) = TOY.model(0, 1);
    let plan = |module: Lora| adapter(&[module]).plan(&model, DType::F32).map(|image| image.bytes());
    let o = "model.layers.0.self_attn.o_proj";
    assert!(plan(Lora::linear(o, 16, 8, 2)).is_ok());
    refused!(plan(Lora::linear(o, 8, 16, 2)), Shape, format!("{o}.lora_A"), "[2, 8]", "[2, 16]");
    refused!(plan(Lora::linear(o, 16, 16, 2)), Shape, format!("{o}.lora_B"), "[16, 2]", "[8, 2]");
    // A rank as large as a dimension, or larger, makes no difference.
    assert!(plan(Lora::linear(o, 16, 8, 16)).is_ok());
    assert!(plan(Lora::linear(o, 16, 8, 40)).is_ok());
    let embed = "model.embed_tokens";
    assert!(plan(Lora::embedding(embed, 20, 8, 2)).is_ok());
    refused!(plan(Lora::embedding(embed, 8, 20, 2)), Shape, "embed_tokens.lora_embedding_A", "[2, 8]", "[2, 20]");
    refused!(plan(Lora::embedding(embed, 24, 8, 2)), Shape, "embed_tokens.lora_embedding_A", "[2, 24]", "[2, 20]");
    refused!(plan(Lora::embedding(embed, 20, 12, 2)), Shape, "embed_tokens.lora_embedding_B", "[12, 2]", "[8, 2]");
    refused!(plan(Lora::linear("lm_head", 8, 24, 2)), Shape, "lm_head.lora_B", "[24, 2]", "[20, 2]");
    // A rank's half of the factors is refused: files hold whole factors.
    let (half, _) = TOY.model(1, 2);
    let sharded = adapter(&[Lora::linear(o, 8, 8, 2)]);
    refused!(sharded.plan(&half, DType::F32), Shape, "[2, 8]", "[2, 16]");
}

#[test]
fn weights_must_be_finite() {
    let (model, _) = TOY.model(0, 1);
    let write = |path: &str, from: DType, to: DType, index: usize, value: f32| {
        let mut module = match path {
            "model.embed_tokens" => Lora::embedding(path, 20, 8, 2),
            _ => Lora::linear(path, 8, 20, 2),
        };
        module.a[index] = value;
        let adapter = adapter(&[module.dtype(from)]);
        let image = adapter.plan(&model, to).unwrap();
        image.write_to(&mut vec![0; image.bytes()])
    };
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let result = write("lm_head", dtype, DType::BF16, 11, value);
            refused!(result, Unrepresentable, "lm_head.lora_A.weight", value.to_string(), "[1, 3]", "bf16");
            let result = write("model.embed_tokens", dtype, DType::F32, 25, value);
            refused!(result, Unrepresentable, "embed_tokens.lora_embedding_A", value.to_string(), "[1, 5]", "f32");
        }
    }
    assert!(write("lm_head", DType::F32, DType::F16, 0, 65504.0).is_ok());
    refused!(write("lm_head", DType::F32, DType::F16, 0, 65520.0), Unrepresentable, "65520", "f16");
    refused!(write("lm_head", DType::BF16, DType::F16, 0, -1e30), Unrepresentable, "[0, 0]", "f16");
    assert!(write("lm_head", DType::F32, DType::BF16, 0, 3e38).is_ok());
    refused!(write("lm_head", DType::F32, DType::BF16, 0, f32::MAX), Unrepresentable, "bf16");
}

/// A handle whose bytes are others each time, or fewer, gives an error or finite weights, never what it had in between.
#[test]
fn weights_that_change_while_they_are_packed() {
    struct Changing {
        same: Vec<u8>,
        other: Vec<u8>,
        calls: AtomicUsize,
        other_at: usize,
    }
    impl AsRef<[u8]> for Changing {
        fn as_ref(&self) -> &[u8] {
            if self.calls.fetch_add(1, Ordering::Relaxed) == self.other_at { &self.other } else { &self.same }
        }
    }
    let model = model(&["m"]);
    let bytes = |value: f32| bytemuck::cast_slice(&[value; 8]).to_vec();
    let mut errors = BTreeMap::new();
    for (what, other) in [("not finite", bytes(f32::NAN)), ("fewer", vec![0; 31])] {
        for other_at in 0..8 {
            let a = Changing { same: bytes(1.0), other: other.clone(), calls: 0.into(), other_at };
            let Ok(a) = Tensor::new(DType::F32, [1, 8], a) else { continue };
            let tensors = [("m.lora_A.weight".to_owned(), a), ("m.lora_B.weight".to_owned(), ones(&[8, 1]))];
            let adapter = Adapter::from_tensors(CONFIG, tensors).unwrap();
            let image = adapter.plan(&model, DType::F32).unwrap();
            let mut block = vec![0.0_f32; image.bytes() / 4];
            match image.write_to(bytemuck::cast_slice_mut(&mut block)) {
                Ok(()) => assert!(block.iter().all(|value| value.is_finite()), "{what} at {other_at}"),
                Err(error) => drop(errors.insert(what, error.to_string())),
            }
        }
    }
    let want = [
        ("fewer", "0 bytes do not match a f32 tensor of shape [1, 8]"),
        ("not finite", "`m.lora_A.weight` has changed while it was packed: its bytes must stay as they are"),
    ];
    assert_eq!(errors.into_iter().collect::<Vec<_>>(), want.map(|(what, error)| (what, error.to_owned())));
}

/// Even if several threads find others.
#[test]
fn the_first_weight_that_is_not_finite_is_named() {
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("", Parallel::Row, 16_384).slice("row", 1)).unwrap();
    spec.linear(Linear::new("", Parallel::Column, 1).slice("column", 16_384)).unwrap();
    let model = spec.shard(TpRank::new(1, 2).unwrap()).unwrap();
    let write = |mut module: Lora, bad: [usize; 3]| {
        let weights = if module.path == "row" { &mut module.a } else { &mut module.b };
        bad.into_iter().for_each(|index| weights[index] = f32::NAN);
        let adapter = adapter(&[module]);
        let image = adapter.plan(&model, DType::BF16).unwrap();
        image.write_to(&mut vec![0; image.bytes()])
    };
    // The first half belongs to another rank.
    let a = write(Lora::linear("row", 16_384, 1, 2), [8_191, 16_000, 16_384 + 8_192]);
    refused!(a, Unrepresentable, "row.lora_A", "[0, 16000]");
    let b = write(Lora::linear("column", 1, 16_384, 2), [2 * 8_191, 2 * 16_000 + 1, 2 * 16_001]);
    refused!(b, Unrepresentable, "column.lora_B", "[16000, 1]");
}

/// Wherever it is: a factor is packed in tasks of 2,048 to 4,096 features, and copied in pieces.
#[test]
fn no_weight_that_is_not_finite_is_missed() {
    const FEATURES: usize = 9_000;
    const OTHERS: usize = 8;
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("", Parallel::Replicated, FEATURES).slice("in", OTHERS)).unwrap();
    spec.linear(Linear::new("", Parallel::Replicated, OTHERS).slice("out", FEATURES)).unwrap();
    spec.embedding("embed", FEATURES, OTHERS).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    // The first, a middle and the last feature of each task of at least 1,024, and of each piece.
    let features: Vec<_> = (0..FEATURES).step_by(1_024).flat_map(|at| [at, at + 500, at + 1_023]).collect();
    let features = features.into_iter().filter(|&at| at < FEATURES).chain([FEATURES - 1]);
    // In turn of the first and the last rank.
    let places: Vec<_> = features.zip([0, 1].into_iter().cycle()).collect();
    for (from, to, rank) in [(DType::BF16, DType::BF16, 2), (DType::F32, DType::F16, 2), (DType::F32, DType::F32, 9)] {
        let modules = [
            Lora::linear("in", FEATURES, OTHERS, rank),
            Lora::linear("out", OTHERS, FEATURES, rank),
            Lora::embedding("embed", FEATURES, OTHERS, rank),
        ];
        for (module, &(feature, of_rank)) in modules.iter().flat_map(|module| places.iter().map(move |at| (module, at)))
        {
            let (mut module, of_rank) = (module.clone().dtype(from), of_rank * (rank - 1));
            let shown = if module.path == "out" {
                module.b[feature * rank + of_rank] = f32::NAN;
                format!("[{feature}, {of_rank}]")
            } else {
                module.a[of_rank * FEATURES + feature] = f32::NAN;
                format!("[{of_rank}, {feature}]")
            };
            let name = format!("{}.lora", module.path);
            let adapter = adapter(&[module]);
            let image = adapter.plan(&model, to).unwrap();
            refused!(image.write_to(&mut vec![0; image.bytes()]), Unrepresentable, name, shown);
            let mut bytes = vec![0; MIN_STAGING_BYTES];
            let mut pieces = image.pieces(MIN_STAGING_BYTES);
            let result = pieces.try_for_each(|piece| piece.write_to(&mut bytes[..piece.range().len()]));
            refused!(result, Unrepresentable, name, shown);
        }
    }
}

#[test]
fn weights_are_rounded_once_to_the_nearest() {
    let model = model(&["x"]);
    let values: [f32; 8] = [1.0, 1.003_906_3, 1.003_906_4, 1.011_718_8, 1e-40, -0.0, 0.1, 65_504.0];
    let tensors =
        [("x.lora_A.weight", tensor(DType::F32, &[1, 8], &values)), ("x.lora_B.weight", crate::ones(&[8, 1]))];
    let adapter = Adapter::from_tensors(CONFIG, tensors.map(|(key, tensor)| (key.to_owned(), tensor))).unwrap();
    let row = |dtype| {
        let image = adapter.plan(&model, dtype).unwrap();
        let mut block = vec![0; image.bytes()];
        image.write_to(&mut block).unwrap();
        block[..8 * dtype.bytes()].to_vec()
    };
    assert_eq!(row(DType::F32), bytemuck::cast_slice::<_, u8>(&values));
    assert_eq!(row(DType::BF16), bytemuck::cast_slice::<_, u8>(&values.map(bf16::from_f32)));
    assert_eq!(row(DType::F16), bytemuck::cast_slice::<_, u8>(&values.map(f16::from_f32)));
    // Ties to even, by hand: 1 + 2⁻⁸ goes down, anything above it up, 1 + 3 · 2⁻⁸ up.
    let by_hand = [0x3f80_u16, 0x3f80, 0x3f81, 0x3f82].map(u16::to_le_bytes).concat();
    assert_eq!(row(DType::BF16)[..8], by_hand);
}

#[test]
fn ranks_beyond_a_table_are_an_error() {
    let (model, _) = TOY.model(0, 1);
    let adapter = adapter(&[Lora::linear("lm_head", 8, 20, 9)]);
    let image = adapter.plan(&model, DType::F32).unwrap();
    let weights = WeightTable::new(&model, DType::F32, Capacity::tokens(1).slots(1).rank(8), image.bytes()).unwrap();
    let error = weights.load(0, &image).unwrap_err();
    assert!(matches!(error, LoadError::Slot(SlotError::Rank { rank: 9, max_rank: 8 })), "{error}");
}

/// An adapter of all modules has the largest image of its rank.
#[test]
fn the_largest_image_has_all_modules() {
    let mut spec = ModelSpec::new();
    let qkv = Linear::new("m", Parallel::Column, 300).slice("q", 400).slice("k", 40).slice("v", 40);
    spec.linear(qkv).unwrap();
    spec.linear(Linear::new("m", Parallel::Row, 400).slice("o", 300)).unwrap();
    spec.embedding("e", 1000, 300).unwrap();
    let linear = [("m.q", 300, 400), ("m.k", 300, 40), ("m.v", 300, 40), ("m.o", 400, 300)];
    for (rank, smaller) in [(1, 1), (20, 9), (256, 248)] {
        let all = |rank| {
            let linear = linear.iter().map(|&(path, input, output)| Lora::linear(path, input, output, rank));
            adapter(&linear.chain([Lora::embedding("e", 1000, 300, rank)]).collect::<Vec<_>>())
        };
        for tp in [TpRank::SINGLE, TpRank::new(0, 4).unwrap(), TpRank::new(3, 4).unwrap()] {
            let shards = [Shard::new(tp), Shard::new(tp).fully_sharded()];
            for model in shards.map(|shard| spec.shard(shard).unwrap()) {
                for dtype in [DType::BF16, DType::F32] {
                    let max = SlotImage::max_bytes(&model, dtype, rank);
                    assert_eq!(all(rank).plan(&model, dtype).unwrap().bytes(), max, "rank {rank}, {model:?}");
                    assert!(all(smaller).plan(&model, dtype).unwrap().bytes() <= max);
                    // No adapter has a larger rank.
                    let [most, any] = [MAX_RANK, usize::MAX].map(|rank| SlotImage::max_bytes(&model, dtype, rank));
                    assert_eq!(most, any);
                }
            }
        }
    }
}

/// For any limit on a piece and any size of factors.
#[test]
fn pieces_are_the_block() {
    let mut spec = ModelSpec::new();
    let mut modules = Vec::new();
    for (i, (inputs, outputs, rank)) in [
        (8, 8, 2),
        (40_000, 300, 9),
        (300, 40_000, 3),
        (8, 8, 1),
        (700, 500, 512),
        // The limit is not a whole number of K tiles of these.
        (9000, 6200, 24),
        (4096, 6144, 48),
        (4100, 4096, 96),
    ]
    .into_iter()
    .enumerate()
    {
        let path = format!("m{i}");
        spec.linear(Linear::new("", Parallel::Replicated, inputs).slice(&path, outputs)).unwrap();
        modules.push(counting(Lora::linear(path, inputs, outputs, rank)));
    }
    spec.embedding("embed", 30_000, 8).unwrap();
    modules.push(counting(Lora::embedding("embed", 30_000, 8, 9)));
    let model = spec.shard(TpRank::SINGLE).unwrap();
    for max_bytes in [MIN_STAGING_BYTES, MIN_STAGING_BYTES + 4_000, 2 * MIN_STAGING_BYTES + 3, usize::MAX] {
        check_pieces(&adapter(&modules).plan(&model, DType::F32).unwrap(), max_bytes);
    }
}

/// Also of a module whose part of B is several ranges of rows, which pieces and tasks cut anywhere, or ends in padding.
#[test]
fn pieces_of_ranges_are_the_block() {
    const PARTS: [usize; 3] = [12_000, 5, 9_000];
    let mut spec = ModelSpec::new();
    let merged = [Part::even(PARTS[0]), Part::replicated(PARTS[1]), Part::heads(2, PARTS[2] / 2)];
    let merged = spec.linear(Linear::new("", Parallel::Column, 8).merged("merged", merged)).unwrap();
    let head = spec.linear(Linear::new("", Parallel::Column, 8).vocab("head", 20_001, 40_000)).unwrap();
    let outputs = PARTS.iter().sum();
    let modules = [("merged", outputs), ("head", 20_001)].map(|(path, out)| counting(Lora::linear(path, 8, out, 24)));
    let adapter = adapter(&modules);
    for rank in 0..2 {
        let model = spec.shard(TpRank::new(rank, 2).unwrap()).unwrap();
        let image = adapter.plan(&model, DType::F32).unwrap();
        for max_bytes in [MIN_STAGING_BYTES, MIN_STAGING_BYTES + 4_000, usize::MAX] {
            check_pieces(&image, max_bytes);
        }
        let block = block(&image);
        let second = PARTS[0] + PARTS[1];
        let rows =
            [rank * 6_000..(rank + 1) * 6_000, PARTS[0]..second, second + rank * 4_500..second + (rank + 1) * 4_500];
        let head_rows = rank * 20_000..if rank == 0 { 20_000 } else { 20_001 };
        for ((site, rows), lora) in
            [(&model[merged], &rows[..]), (&model[head], &[head_rows])].into_iter().zip(&modules)
        {
            let entry = image.entries().iter().find(|entry| entry.entry == site.first_entry()).unwrap();
            let out = site.out_features();
            let [a, b] = factors(&block, entry, 8, out);
            let mut expected: Vec<f32> =
                rows.iter().flat_map(|rows| lora.b[rows.start * 24..rows.end * 24].to_vec()).collect();
            expected.resize(out * 24, 0.0);
            assert!(a == lora.a && b == expected, "{} of rank {rank}", lora.path);
        }
    }
}

/// The first in the order of the tensor, also in a later range of rows.
#[test]
fn a_weight_of_a_later_range_that_is_not_finite_is_named() {
    let mut spec = ModelSpec::new();
    let merged = [Part::even(4), Part::even(4)];
    spec.linear(Linear::new("", Parallel::Column, 8).merged("m", merged)).unwrap();
    let model = spec.shard(TpRank::new(1, 2).unwrap()).unwrap();
    let mut module = Lora::linear("m", 8, 8, 2);
    // Row 5 is of the other rank.
    for (row, column) in [(5, 0), (6, 1), (7, 0)] {
        module.b[row * 2 + column] = f32::NAN;
    }
    let adapter = adapter(&[module]);
    let image = adapter.plan(&model, DType::BF16).unwrap();
    let result = image.write_to(&mut vec![0; image.bytes()]);
    refused!(result, Unrepresentable, "m.lora_B", "[6, 1]");
}

/// If the padded rank is not a power of two, the smallest limit is not a whole number of K tiles.
#[test]
fn the_smallest_pieces_of_any_rank_are_the_block() {
    for (inputs, rank) in [4096, 12_300].into_iter().flat_map(|k| [24, 41, 48, 96].map(|rank| (k, rank))) {
        let mut spec = ModelSpec::new();
        spec.linear(Linear::new("", Parallel::Replicated, inputs).slice("linear", 4099)).unwrap();
        spec.embedding("embed", inputs, 100).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let modules =
            [Lora::linear("linear", inputs, 4099, rank), Lora::embedding("embed", inputs, 100, rank)].map(counting);
        let adapter = adapter(&modules);
        for dtype in [DType::F32, DType::BF16] {
            check_pieces(&adapter.plan(&model, dtype).unwrap(), MIN_STAGING_BYTES);
        }
    }
}

/// Fills a module with values that every element type represents. Neighbours differ, and so do K tiles.
fn counting(module: Lora) -> Lora {
    let mut next = 0_u8;
    module.fill(|| {
        next = (next + 1) % 251;
        next.into()
    })
}

/// Checks that the pieces are the block's bytes in order, and that no two of them fit in one piece.
fn check_pieces(image: &SlotImage<'_>, max_bytes: usize) {
    let mut block = vec![0; image.bytes()];
    image.write_to(&mut block).unwrap();
    let (mut end, mut last) = (0, max_bytes);
    for piece in image.pieces(max_bytes) {
        let range = piece.range();
        assert_eq!(range.start, end);
        assert!(range.len() <= max_bytes && range.len() > max_bytes - last, "{range:?} after {last} of {max_bytes}");
        let mut bytes = vec![0xa5; range.len()];
        piece.write_to(&mut bytes).unwrap();
        assert!(bytes == block[range.clone()], "{range:?} in pieces of {max_bytes}");
        (end, last) = (range.end, range.len());
    }
    assert_eq!(end, block.len());
}
