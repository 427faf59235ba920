//! The files of an adapter's directory.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write as _,
    path::Path,
    process::Command,
    sync::Arc,
};

use aril::{
    DType,
    adapter::{Adapter, AdapterError, Tensor},
    model::{Linear, ModelSpec, Parallel, TpRank},
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    CONFIG,
    common::adapters::{Lora, Parts, parts, safetensors_bytes, write, write_sharded, write_weights},
    refused,
};

const WEIGHTS: &str = "adapter_model.safetensors";
const INDEX: &str = "adapter_model.safetensors.index.json";
const SHARDS: [&str; 2] = ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"];

fn two_modules() -> Parts {
    let mut next = 0.0;
    let mut count = || {
        next += 1.0;
        next
    };
    parts(4.0, &["q_proj", "v_proj"].map(|path| Lora::linear(path, 8, 8, 2).fill(&mut count)))
}

/// A directory with an adapter in one file.
fn whole() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &two_modules());
    dir
}

/// A directory with an adapter in two shards and an index changed by `edit`.
fn sharded(edit: impl FnOnce(&mut Value)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_sharded(dir.path(), &two_modules());
    let index = dir.path().join(INDEX);
    let mut json = serde_json::from_str(&fs::read_to_string(&index).unwrap()).unwrap();
    edit(&mut json);
    fs::write(index, json.to_string()).unwrap();
    dir
}

fn weights(adapter: &Adapter) -> Vec<(&str, Vec<f32>, Vec<f32>)> {
    adapter.modules().iter().map(|module| (module.path(), module.a_f32(), module.b_f32())).collect()
}

/// The adapter in a directory whose files nobody modifies while it is alive.
fn mapped(dir: &Path) -> Result<Adapter, AdapterError> {
    // SAFETY: the folder belongs to one test, which modifies no weight file of an adapter that is alive.
    unsafe { Adapter::map(dir) }
}

#[test]
fn files_and_memory_give_the_same() {
    let (config, tensors) = two_modules();
    let memory = Adapter::from_tensors(&config, tensors).unwrap();
    let file = Adapter::open(whole().path()).unwrap();
    let shards = Adapter::open(sharded(|_| ()).path()).unwrap();
    assert_eq!(weights(&memory), weights(&file));
    assert_eq!(weights(&memory), weights(&shards));
    for dir in [whole(), sharded(|_| ())] {
        assert_eq!(weights(&memory), weights(&mapped(dir.path()).unwrap()));
    }
}

#[test]
fn bytes_may_be_anyones() {
    let (config, tensors) = two_modules();
    let memory = Adapter::from_tensors(&config, tensors.clone()).unwrap();
    let bytes = safetensors_bytes(&tensors);
    let shared: Arc<[u8]> = bytes.clone().into();
    let lasting: &'static [u8] = Box::leak(bytes.clone().into_boxed_slice());
    assert_eq!(weights(&memory), weights(&Adapter::from_safetensors(&config, [bytes]).unwrap()));
    let adapter = Adapter::from_safetensors(&config, [Arc::clone(&shared)]).unwrap();
    assert_eq!(weights(&memory), weights(&adapter));
    assert!(Arc::strong_count(&shared) > 1, "the bytes are shared");
    drop(adapter);
    assert_eq!(Arc::strong_count(&shared), 1);
    assert_eq!(weights(&memory), weights(&Adapter::from_safetensors(&config, [lasting]).unwrap()));
    // Several files, each with a part of the tensors.
    let files = tensors.chunks(3).map(safetensors_bytes);
    assert_eq!(weights(&memory), weights(&Adapter::from_safetensors(&config, files).unwrap()));
    // Tensors that share a buffer, and an engine's own handle.
    struct Handle(Vec<u8>);
    impl AsRef<[u8]> for Handle {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let buffer: Vec<u8> = tensors.iter().flat_map(|(_, tensor)| tensor.bytes()).copied().collect();
    let buffer: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(Handle(buffer));
    let mut end = 0;
    let parts = tensors.iter().map(|(key, tensor)| {
        let start = end;
        end += tensor.bytes().len();
        let part = Tensor::part(tensor.dtype(), tensor.shape(), Arc::clone(&buffer), start..end);
        (key.clone(), part.unwrap())
    });
    assert_eq!(weights(&memory), weights(&Adapter::from_tensors(&config, parts).unwrap()));
    for range in [0..15, 0..17, end - 15..end + 1, usize::MAX - 15..usize::MAX] {
        refused!(Tensor::part(DType::BF16, [1, 8], Arc::clone(&buffer), range), Bytes, "[1, 8]");
    }
    // Also of no bytes.
    assert!(Tensor::part(DType::BF16, [0], Arc::clone(&buffer), end..end).unwrap().bytes().is_empty());
    #[expect(clippy::reversed_empty_ranges, reason = "no range")]
    for range in [end + 1..end + 1, 5..3] {
        refused!(Tensor::part(DType::BF16, [0], Arc::clone(&buffer), range), Bytes, "[0]");
    }
}

#[test]
fn bytes_that_are_not_a_file_are_named() {
    let (config, tensors) = two_modules();
    let bytes = safetensors_bytes(&tensors);
    refused!(Adapter::from_safetensors(&config, [bytes.clone(), bytes[..9].to_vec()]), Safetensors, "file 1");
    refused!(Adapter::from_safetensors(&config, [bytes.clone(), bytes]), Duplicate, "in file 0", "in file 1");
    refused!(Adapter::from_safetensors(&config, [[0; 0]; 0]), Empty, "no factors");
}

/// A mapped file that is overwritten in place would change the adapter, and one that shrinks would kill the process.
#[test]
fn an_open_adapter_does_not_follow_its_files() {
    let dir = whole();
    let adapter = Adapter::open(dir.path()).unwrap();
    let owned = |adapter: &Adapter| weights(adapter).into_iter().map(|(_, a, b)| (a, b)).collect::<Vec<_>>();
    let before = owned(&adapter);
    let mut file = File::options().write(true).open(dir.path().join(WEIGHTS)).unwrap();
    let len = file.metadata().unwrap().len();
    file.write_all(&vec![0x11; usize::try_from(len).unwrap()]).unwrap();
    assert_eq!(owned(&adapter), before);
    file.set_len(0).unwrap();
    assert_eq!(owned(&adapter), before);
}

/// An attacker can make a long file at no cost.
#[test]
fn nothing_is_allocated_for_a_file_that_its_header_does_not_describe() {
    let dir = whole();
    let file = File::options().write(true).open(dir.path().join(WEIGHTS)).unwrap();
    file.set_len(1 << 42).unwrap();
    refused!(Adapter::open(dir.path()), Safetensors, WEIGHTS, "not fully covered");
    let header = r#"{"q.lora_A.weight":{"dtype":"F32","shape":[1,1099511627520],"data_offsets":[0,4398046510080]}}"#;
    fs::write(dir.path().join(WEIGHTS), [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    refused!(Adapter::open(dir.path()), Safetensors, WEIGHTS, "not fully covered");
}

#[test]
fn only_regular_files_are_read() {
    type Open = fn(&Path) -> Result<Adapter, AdapterError>;
    for open in [|dir| Adapter::open(dir), mapped] as [Open; 2] {
        for name in ["adapter_config.json", WEIGHTS, INDEX, SHARDS[0]] {
            let dir = if name == "adapter_config.json" || name == WEIGHTS { whole() } else { sharded(|_| ()) };
            let path = dir.path().join(name);
            fs::remove_file(&path).unwrap();
            assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            refused!(open(dir.path()), Read, name, "not a regular file");
            fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
            refused!(open(dir.path()), Read, name, "not a regular file");
        }
    }
}

#[test]
fn a_text_has_a_limit() {
    let dir = whole();
    File::create(dir.path().join("adapter_config.json")).unwrap().set_len(1 << 40).unwrap();
    refused!(Adapter::open(dir.path()), Read, "adapter_config.json", "4194304");
    let dir = sharded(|_| ());
    File::create(dir.path().join(INDEX)).unwrap().set_len(1 << 40).unwrap();
    refused!(Adapter::open(dir.path()), Read, INDEX, "67108864");
}

#[test]
fn an_open_adapter_outlives_its_files() {
    let dir = whole();
    let adapters = [Adapter::open(dir.path()).unwrap(), mapped(dir.path()).unwrap()];
    let before = adapters.each_ref().map(weights);
    drop(dir);
    assert_eq!(before, adapters.each_ref().map(weights));
}

#[test]
fn other_files_are_ignored() {
    let dir = whole();
    for name in ["added_tokens.json", "tokenizer.json", "README.md", "optimizer.pt", "adapter_model.bin", INDEX] {
        fs::write(dir.path().join(name), "{\"<extra>\": 151936}").unwrap();
    }
    assert!(Adapter::open(dir.path()).is_ok());
}

#[test]
fn missing_files_are_named() {
    let empty = tempfile::tempdir().unwrap();
    refused!(Adapter::open(empty.path()), NoConfig, "has no adapter_config.json");
    refused!(Adapter::open(empty.path().join("nowhere")), Read, "nowhere");
    // PEFT's folder of an adapter that is not named `default`.
    for name in ["b", "a"] {
        fs::create_dir(empty.path().join(name)).unwrap();
        fs::write(empty.path().join(name).join("adapter_config.json"), CONFIG).unwrap();
    }
    refused!(Adapter::open(empty.path()), NoConfig, "has no adapter_config.json, but ", "/a has one");
    // MLX-LM's.
    fs::write(empty.path().join("a/adapter_config.json"), r#"{"fine_tune_type": "lora", "num_layers": 4}"#).unwrap();
    refused!(Adapter::open(empty.path().join("a")), UnsupportedField, "`fine_tune_type`", "MLX-LM");
    fs::write(empty.path().join("adapter_config.json"), CONFIG).unwrap();
    let dir = empty.path().to_str().unwrap();
    refused!(Adapter::open(empty.path()), NoWeights, dir, WEIGHTS, INDEX);
    // A trainer's pickles are not the adapter.
    for name in ["training_args.bin", "optimizer.pt"] {
        fs::write(empty.path().join(name), "pickle").unwrap();
    }
    refused!(Adapter::open(empty.path()), NoWeights, dir, WEIGHTS);
    // Shards without an index do not show whether any is missing.
    write_weights(&empty.path().join(SHARDS[0]), &two_modules().1);
    refused!(Adapter::open(empty.path()), NoWeights, dir, INDEX);
}

#[test]
fn pickles_are_refused() {
    for name in [
        "adapter_model.bin",
        "adapter_model.pt",
        "adapter_model-00001-of-00002.bin",
        "megatron_lora.nemo",
        "model_weights.ckpt",
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("adapter_config.json"), CONFIG).unwrap();
        fs::write(dir.path().join(name), b"cos\nsystem\n(S'exit 1'\ntR.").unwrap();
        refused!(Adapter::open(dir.path()), Pickle, name, "pickle", "execute code");
    }
}

#[test]
fn broken_weight_files() {
    let dir = whole();
    let path = dir.path().join(WEIGHTS);
    let good = fs::read(&path).unwrap();
    let header_bytes = usize::try_from(u64::from_le_bytes(good[..8].try_into().unwrap())).unwrap();
    let with = |range: std::ops::Range<usize>, bytes: &[u8]| {
        let mut file = good.clone();
        file.splice(range, bytes.iter().copied());
        file
    };
    for (bad, reason) in [
        (Vec::new(), "too small"),
        (good[..7].to_vec(), "too small"),
        (good[..8].to_vec(), "invalid header length"),
        (good[..8 + header_bytes / 2].to_vec(), "invalid header length"),
        (good[..good.len() - 1].to_vec(), "not fully covered"),
        ([&good[..], b"x"].concat(), "not fully covered"),
        (with(0..8, &u64::MAX.to_le_bytes()), "too large"),
        (with(0..8, b"\n<xml/> "), "HTML or XML"),
        (with(0..8, b"<\xfftml>  "), "too large"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n".to_vec(), "git lfs pull"),
        (b"<!DOCTYPE html><html>".to_vec(), "HTML or XML"),
        (b"<html>".to_vec(), "HTML or XML"),
        // The lengths of headers of 60 bytes.
        ([&60_u64.to_le_bytes()[..], &[b'x'; 60]].concat(), "invalid JSON"),
        (with(8..9, b"["), "invalid JSON"),
        (with(8..9, &[0xff]), "invalid UTF-8"),
    ] {
        fs::write(&path, bad).unwrap();
        refused!(Adapter::open(dir.path()), Safetensors, WEIGHTS, reason);
        refused!(mapped(dir.path()), Safetensors, WEIGHTS);
    }
}

/// What is saved in the place of a file, by a server or by Git, is named.
#[test]
fn texts_that_stand_for_others_are_named() {
    for name in ["adapter_config.json", INDEX] {
        let dir = sharded(|_| ());
        for (text, what) in [
            ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
            ("\n<!doctype html>", "HTML or XML"),
            ("version", "expected value"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
            refused!(Adapter::open(dir.path()), Json, name, what);
        }
    }
}

#[test]
fn other_element_types_are_refused() {
    let write = |dir: &Path, key: &str, dtype: Dtype| {
        let data = vec![0; 16 * dtype.bitsize() / 8];
        let view = TensorView::new(dtype, vec![2, 8], &data).unwrap();
        fs::write(dir.join(WEIGHTS), safetensors::serialize([(key, view)], None).unwrap()).unwrap();
    };
    let dir = whole();
    for dtype in [Dtype::F8_E8M0, Dtype::F8_E5M2, Dtype::I8, Dtype::U8, Dtype::I64, Dtype::BOOL] {
        write(dir.path(), "q_proj.lora_A.weight", dtype);
        refused!(Adapter::open(dir.path()), DType, "`q_proj.lora_A.weight`", WEIGHTS, format!("{dtype:?}"));
        // The tensor's name is checked before its type.
        write(dir.path(), "q_proj.quant_state", dtype);
        refused!(Adapter::open(dir.path()), UnknownTensor, "`q_proj.quant_state`", WEIGHTS);
        write(dir.path(), "lm_head.base_layer.weight", dtype);
        refused!(Adapter::open(dir.path()), DType, "`lm_head.base_layer.weight`", WEIGHTS, format!("{dtype:?}"));
    }
}

#[test]
fn all_element_types_are_read() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let dir = tempfile::tempdir().unwrap();
        let module = Lora::linear("q_proj", 3, 5, 2).dtype(dtype).fill(|| 1.1);
        write(dir.path(), &parts(2.0, std::slice::from_ref(&module)));
        let adapter = Adapter::open(dir.path()).unwrap();
        assert_eq!(weights(&adapter), [("q_proj", module.a, module.b)]);
    }
}

/// Torch rounds F64 to F32 first, also where a factor is of 16 bits.
#[test]
fn doubles_are_rounded_as_torch_does() {
    let (a, b) = ("q_proj.lora_A.weight", "q_proj.lora_B.weight");
    // The nearest to the second in BF16 is 1 + 2^-7. torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64).to(torch.bfloat16) is 1.
    let special =
        [1.0 + f64::powi(2.0, -24) + f64::powi(2.0, -50), 1.0 + f64::powi(2.0, -8) + f64::powi(2.0, -40), 1e-60];
    let values: Vec<f64> = special.into_iter().chain((3..16_u8).map(|i| f64::from(i) / 8.0)).collect();
    let bytes = |values: &[f64]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let write = |dir: &Path, dtype: Dtype, data: &[u8]| {
        let tensors =
            [(a, vec![2, 8]), (b, vec![8, 2])].map(|(key, shape)| (key, TensorView::new(dtype, shape, data).unwrap()));
        fs::write(dir.join(WEIGHTS), safetensors::serialize(tensors, None).unwrap()).unwrap();
    };
    let (dir, narrow) = (whole(), whole());
    write(dir.path(), Dtype::F64, &bytes(&values));
    let rounded = [1.0 + f32::EPSILON, 1.0 + f32::powi(2.0, -8), 0.0];
    let rounded: Vec<f32> = rounded.into_iter().chain((3..16_u8).map(|i| f32::from(i) / 8.0)).collect();
    write(narrow.path(), Dtype::F32, &rounded.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());

    let adapter = Adapter::open(dir.path()).unwrap();
    assert_eq!(weights(&adapter), [("q_proj", rounded.clone(), rounded)]);
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("", Parallel::Replicated, 8).slice("q_proj", 8)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let image = |adapter: &Adapter| {
            let image = adapter.plan(&model, dtype).unwrap();
            let mut block = vec![0; image.bytes()];
            image.write_to(&mut block).unwrap();
            block
        };
        let want = image(&Adapter::open(narrow.path()).unwrap());
        assert_eq!(image(&adapter), want, "{dtype}");
        assert_eq!(image(&mapped(dir.path()).unwrap()), want, "{dtype}");
    }
    let mut values = values;
    values[9] = 1e300;
    write(dir.path(), Dtype::F64, &bytes(&values));
    let adapter = Adapter::open(dir.path()).unwrap();
    let mut block = vec![0; 1 << 16];
    let image = adapter.plan(&model, DType::F32).unwrap();
    refused!(image.write_to(&mut block[..image.bytes()]), Unrepresentable, "`q_proj.lora_A.weight`", "[1, 1]");
}

/// Every finite F8_E4M3, as `torch.float8_e4m3fn` defines them, mapped or not, and what is no number.
#[test]
fn eight_bits_are_widened_exactly() {
    let (a, b) = ("q_proj.lora_A.weight", "q_proj.lora_B.weight");
    let finite: Vec<u8> = (0..=u8::MAX).filter(|bits| bits & 0x7f != 0x7f).collect();
    let values: Vec<f32> = finite
        .iter()
        .map(|&bits| {
            let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7) / 8.0);
            let magnitude = if exponent == 0 {
                mantissa * f32::powi(2.0, -6)
            } else {
                (1.0 + mantissa) * f32::powi(2.0, exponent - 7)
            };
            if bits & 0x80 == 0 { magnitude } else { -magnitude }
        })
        .collect();
    assert_eq!((values.len(), values[126], values[1]), (254, 448.0, f32::powi(2.0, -9)));
    let mut spec = ModelSpec::new();
    spec.linear(Linear::new("", Parallel::Replicated, 127).slice("q_proj", 127)).unwrap();
    let model = spec.shard(TpRank::SINGLE).unwrap();
    let write = |dir: &Path, dtype: Dtype, data: &[u8]| {
        let shapes = [(a, vec![2, 127]), (b, vec![127, 2])];
        let tensors = shapes.map(|(key, shape)| (key, TensorView::new(dtype, shape, data).unwrap()));
        fs::write(dir.join(WEIGHTS), safetensors::serialize(tensors, None).unwrap()).unwrap();
    };
    let image = |adapter: &Adapter, dtype| {
        let image = adapter.plan(&model, dtype)?;
        let mut block = vec![0; image.bytes()];
        image.write_to(&mut block).map(|()| block)
    };
    let (dir, wide) = (whole(), whole());
    write(dir.path(), Dtype::F8_E4M3, &finite);
    write(wide.path(), Dtype::F32, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
    let adapter = Adapter::open(dir.path()).unwrap();
    assert_eq!(weights(&adapter), [("q_proj", values.clone(), values)]);
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let want = image(&Adapter::open(wide.path()).unwrap(), dtype).unwrap();
        assert_eq!(image(&adapter, dtype).unwrap(), want, "{dtype}");
        assert_eq!(image(&mapped(dir.path()).unwrap(), dtype).unwrap(), want, "{dtype}");
    }
    for bits in [0x7f, 0xff] {
        let mut bytes = finite.clone();
        bytes[130] = bits;
        write(dir.path(), Dtype::F8_E4M3, &bytes);
        let adapter = Adapter::open(dir.path()).unwrap();
        refused!(image(&adapter, DType::F32), Unrepresentable, "`q_proj.lora_A.weight`", "[1, 3]");
    }
}

#[test]
fn an_index_that_is_not_one() {
    refused!(Adapter::open(sharded(|json| *json = json!([])).path()), Json, INDEX);
    refused!(Adapter::open(sharded(|json| *json = json!({"weight_map": 1})).path()), Json, INDEX);
    refused!(Adapter::open(sharded(|json| json["weight_map"] = json!({})).path()), Empty, "no factors");
}

#[test]
fn an_index_and_its_shards_agree() {
    let key = "base_model.model.q_proj.lora_A.weight";
    let moved = sharded(|json| json["weight_map"][key] = json!(SHARDS[1]));
    refused!(Adapter::open(moved.path()), Index, format!("`{key}`"), SHARDS[0], SHARDS[1]);
    let forgotten = sharded(|json| drop(json["weight_map"].as_object_mut().unwrap().remove(key)));
    refused!(Adapter::open(forgotten.path()), Index, format!("`{key}` is nowhere"), SHARDS[0]);
    let invented = sharded(|json| json["weight_map"]["zero"] = json!(SHARDS[1]));
    refused!(Adapter::open(invented.path()), Index, "`zero`", SHARDS[1], "nowhere");
    let missing = sharded(|_| ());
    fs::remove_file(missing.path().join(SHARDS[1])).unwrap();
    refused!(Adapter::open(missing.path()), NoShard, INDEX, format!("`{}`", SHARDS[1]), "missing");
    // The same tensor in both files.
    let twice = sharded(|_| ());
    let (_, tensors) = two_modules();
    write_weights(&twice.path().join(SHARDS[1]), &tensors);
    refused!(Adapter::open(twice.path()), Index, "nowhere", SHARDS[1]);
}

#[test]
fn shards_are_beside_the_index() {
    for shard in ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a/", "./a"] {
        let map: BTreeMap<_, _> = [("q_proj.lora_A.weight", shard)].into();
        let dir = sharded(|json| json["weight_map"] = json!(map));
        refused!(Adapter::open(dir.path()), ShardName, INDEX, format!("`{shard}`"));
    }
}
