//! Random adapters, whole and broken, and random bytes.

use std::collections::BTreeMap;

use aril::{
    DType, Element,
    adapter::{Adapter, AdapterError, ImageEntry, ModuleKind, SlotImage},
};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::{
    common::adapters::{Lora, Parts, parts, safetensors_bytes, tensor, write, write_sharded},
    common::fuzz,
    refused,
    toy::{Place, Toy},
};

/// A model, an adapter of it, and the adapter's spelling and storage.
#[derive(Clone, Debug)]
struct Case {
    toy: Toy,
    size: usize,
    /// By module. A fused module stands for all slices of its layer.
    modules: Vec<Lora>,
    lora_alpha: f64,
    prefix: &'static str,
    infix: &'static str,
    storage: Storage,
    dtype: DType,
}

#[derive(Clone, Copy, Debug)]
enum Storage {
    Memory,
    File,
    Shards,
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::BF16), Just(DType::F16), Just(DType::F32)]
}

/// A model and the size of its tensor-parallel group.
fn models() -> impl Strategy<Value = (Toy, usize)> {
    let size = prop_oneof![Just(1_usize), Just(2), Just(4)];
    let part = || prop_oneof![2 => 1..=3_usize, 1 => 1..=40_usize];
    (size, 1..=2_usize, part(), part(), 0..=2_u32, part(), part(), part()).prop_map(
        |(size, layers, hidden, q, kv_heads, head, inter, vocab)| {
            let kv_heads = 1 << kv_heads;
            let [hidden, q, inter, vocab] = [hidden, q, inter, vocab].map(|part| size * part);
            (Toy { layers, hidden, q, kv_heads, kv: kv_heads * head, inter, vocab }, size)
        },
    )
}

/// The rank, type and alpha of a module, if it is adapted.
type Choice = Option<(usize, DType, Option<f64>)>;

fn cases() -> impl Strategy<Value = Case> {
    let alphas = || (1..=64_u32).prop_map(|alpha| f64::from(alpha) / 2.0);
    let choice = proptest::option::of((1..=17_usize, dtypes(), proptest::option::of(alphas())));
    let choices = proptest::collection::vec(choice, 16);
    let fused = proptest::collection::vec(any::<bool>(), 4);
    let prefixes =
        prop_oneof![Just("base_model.model."), Just(""), Just("module.base_model.model."), Just("_orig_mod.")];
    let infixes = prop_oneof![Just(""), Just("default")];
    let storage = prop_oneof![Just(Storage::Memory), Just(Storage::File), Just(Storage::Shards)];
    (models(), choices, fused, alphas(), prefixes, infixes, storage, dtypes(), any::<u32>()).prop_map(
        |((toy, size), choices, fused, lora_alpha, prefix, infix, storage, dtype, seed)| {
            let modules = choose(&toy, &choices, &fused, seed);
            Case { toy, size, modules, lora_alpha, prefix, infix, storage, dtype }
        },
    )
}

fn choose(toy: &Toy, choices: &[Choice], fused: &[bool], mut seed: u32) -> Vec<Lora> {
    let mut value = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(seed >> 16).unwrap()) / 1024.0 - 32.0
    };
    let mut make = |module: &Lora, (rank, dtype, alpha): (usize, DType, Option<f64>)| {
        let new = if module.kind == ModuleKind::Embedding { Lora::embedding } else { Lora::linear };
        let module = new(module.path.clone(), module.in_features, module.out_features, rank);
        Lora { alpha, ..module.dtype(dtype).fill(&mut value) }
    };
    let candidates = candidates(&toy.places(1), fused);
    let chosen = candidates.iter().zip(choices).filter_map(|(module, choice)| Some(make(module, (*choice)?)));
    let modules: Vec<_> = chosen.collect();
    if modules.is_empty() { vec![make(&candidates[0], (2, DType::F32, None))] } else { modules }
}

/// The modules that an adapter may have: a layer's slices, or all of them fused.
fn candidates(mut places: &[Place], fused: &[bool]) -> Vec<Lora> {
    let mut fused = fused.iter();
    let mut candidates = Vec::new();
    while let Some(first) = places.first() {
        let (parent, name) = first.path.rsplit_once('.').unwrap_or(("", &first.path));
        let (slices, fused_name) = match name {
            "q_proj" => (3, "qkv_proj"),
            "gate_proj" => (2, "gate_up_proj"),
            _ => (1, ""),
        };
        let (layer, rest) = places.split_at(slices);
        places = rest;
        if slices > 1 && fused.next() == Some(&true) {
            let out_features = layer.iter().map(|place| place.out_features).sum();
            candidates.push(Lora::linear(format!("{parent}.{fused_name}"), first.in_features, out_features, 0));
            continue;
        }
        candidates.extend(layer.iter().map(|place| {
            let new = if place.is_embedding() { Lora::embedding } else { Lora::linear };
            new(place.path.clone(), place.in_features, place.out_features, 0)
        }));
    }
    candidates
}

/// A factor, row by row, as a block stores it.
type Rows = Vec<Vec<f32>>;

impl Case {
    fn parts(&self) -> Parts {
        let (config, tensors) = parts(self.lora_alpha, &self.modules);
        let respell = |key: String| {
            let key = key.replacen("base_model.model.", self.prefix, 1);
            match (self.infix, key.strip_suffix(".weight")) {
                ("", _) => key,
                (infix, Some(factor)) => format!("{factor}.{infix}.weight"),
                (infix, None) => format!("{key}.{infix}"),
            }
        };
        (config, tensors.into_iter().map(|(key, tensor)| (respell(key), tensor)).collect())
    }

    fn adapter(&self) -> Result<Adapter, AdapterError> {
        let dir = tempfile::tempdir().unwrap();
        let parts = self.parts();
        match self.storage {
            Storage::Memory => return Adapter::from_tensors(&parts.0, parts.1),
            Storage::File => write(dir.path(), &parts),
            Storage::Shards => write_sharded(dir.path(), &parts),
        }
        Adapter::open(dir.path())
    }

    /// A rank's expected slices: path, scaling, and factors.
    fn expected(&self, rank: usize) -> BTreeMap<String, (f32, Rows, Rows)> {
        let places = self.toy.places(self.size);
        let mut expected = BTreeMap::new();
        for module in &self.modules {
            let (parent, name) = module.path.rsplit_once('.').unwrap_or(("", &module.path));
            let slices: &[&str] = match name {
                "qkv_proj" => &["q_proj", "k_proj", "v_proj"],
                "gate_up_proj" => &["gate_proj", "up_proj"],
                name => &[name],
            };
            let mut first_row = 0;
            for slice in slices {
                let path = if parent.is_empty() { (*slice).to_owned() } else { format!("{parent}.{slice}") };
                let place = places.iter().find(|place| place.path == path).unwrap();
                let (inputs, outputs) = place.ranges(rank, self.size);
                let a = |row: usize, col: usize| module.a[row * module.in_features + col];
                let b = |row: usize, col: usize| module.b[(first_row + row) * module.rank + col];
                let a = if place.is_embedding() {
                    inputs.map(|token| (0..module.rank).map(|row| a(row, token)).collect()).collect()
                } else {
                    (0..module.rank).map(|row| inputs.clone().map(|col| a(row, col)).collect()).collect()
                };
                let b = outputs.map(|row| (0..module.rank).map(|col| b(row, col)).collect()).collect();
                let alpha = module.alpha.unwrap_or(self.lora_alpha);
                #[expect(clippy::cast_possible_truncation, reason = "as f32 as the library's")]
                let scaling = (alpha / f64::from(u8::try_from(module.rank).unwrap())) as f32;
                expected.insert(path, (scaling, a, b));
                first_row += place.out_features;
            }
        }
        expected
    }
}

/// The place of an element in a rank's factor by row and column, as kernels read it, computed without the library.
type At = fn(usize, usize, usize) -> usize;

fn linear_a(of_rank: usize, rank: usize, feature: usize) -> usize {
    let lane = feature / 256 * of_rank.div_ceil(8) + rank / 8;
    (lane * 32 + feature % 256 / 8) * 64 + rank % 8 * 8 + feature % 8
}

fn embedding_a(of_rank: usize, id: usize, rank: usize) -> usize {
    id * of_rank.next_multiple_of(8) + rank
}

fn b(of_rank: usize, output: usize, rank: usize) -> usize {
    let o = output % 32;
    let (core, row) = (output % 64 / 32 * 4 + o % 8 / 2, 2 * (o / 8) + o % 2);
    (output / 64 * of_rank.div_ceil(8) + rank / 8) * 512 + core * 64 + row * 8 + rank % 8
}

fn check<T: Element>(case: &Case, rank: usize, image: &SlotImage<'_>) {
    let (model, table) = case.toy.model(rank, case.size);
    let mut block = vec![0xa5; image.bytes()];
    image.write_to(&mut block).unwrap();
    let mut packed = vec![T::default(); block.len() / size_of::<T>()];
    let mut lengths = BTreeMap::new();
    let expected = case.expected(rank);
    assert_eq!(image.entries().len(), expected.len());
    assert_eq!(image.num_entries(), model.num_entries());
    for (path, (scaling, a_rows, b_rows)) in expected {
        let is_its = |entry: &&ImageEntry| entry.entry == table[&path];
        let entry = image.entries().iter().find(is_its).unwrap();
        assert_eq!(entry.scaling, scaling, "{path}");
        assert_eq!(entry.rank, b_rows[0].len(), "{path}");
        let (a, in_features): (At, _) = if path.ends_with("embed_tokens") {
            (embedding_a, a_rows.len())
        } else {
            (linear_a, a_rows[0].len().next_multiple_of(256))
        };
        let out_features = b_rows.len();
        for (begin, rows, at, features) in
            [(entry.a_elems, a_rows, a, in_features), (entry.b_elems, b_rows, b as At, out_features)]
        {
            assert!((begin * size_of::<T>()).is_multiple_of(128), "{path}");
            lengths.insert(begin, entry.rank.next_multiple_of(8) * features.next_multiple_of(64));
            for (row, values) in rows.into_iter().enumerate() {
                for (col, value) in values.into_iter().enumerate() {
                    packed[begin + at(entry.rank, row, col)] = T::from_f32(value);
                }
            }
        }
    }
    assert!(block == bytemuck::cast_slice::<T, u8>(&packed), "an element is not in its place, or padding is not zero");
    let end = lengths.into_iter().fold(0, |end, (begin, length)| {
        assert_eq!(begin, end, "factors overlap or leave gaps");
        begin + length
    });
    assert_eq!(end, packed.len());
}

/// The modules, with those of one slice in place of fused ones.
fn unfused(toy: &Toy, modules: &[Lora]) -> Vec<Lora> {
    let places = toy.places(1);
    let slices = |module: &Lora| -> Vec<Lora> {
        let Some((parent, name)) = module.path.rsplit_once('.') else { return vec![module.clone()] };
        let names: &[&str] = match name {
            "qkv_proj" => &["q_proj", "k_proj", "v_proj"],
            "gate_up_proj" => &["gate_proj", "up_proj"],
            _ => return vec![module.clone()],
        };
        let mut first = 0;
        let slice = |name: &&str| {
            let path = format!("{parent}.{name}");
            let out_features = places.iter().find(|place| place.path == path).unwrap().out_features;
            let rows = first * module.rank..(first + out_features) * module.rank;
            first += out_features;
            Lora { path, out_features, b: module.b[rows].to_vec(), ..module.clone() }
        };
        names.iter().map(slice).collect()
    };
    modules.iter().flat_map(slices).collect()
}

/// The factors of two modules, one after the other along the rank.
fn joined(first: &Lora, second: &Lora) -> Lora {
    let ranks = [first.rank, second.rank];
    let rows = first.b.chunks(ranks[0]).zip(second.b.chunks(ranks[1]));
    let b = rows.flat_map(|(first, second)| [first, second].concat()).collect();
    Lora { rank: ranks[0] + ranks[1], a: [&first.a[..], &second.a].concat(), b, ..first.clone() }
}

/// An adapter, another one of the same ranks with some of its modules, and the adapter that both are with half of each
/// scaling: that of a module of both is α / 2r.
fn two_parts(case: &Case, kept: u32, is_unfused: bool) -> [Case; 3] {
    let reversed = |module: &Lora| {
        let [a, b] = [&module.a, &module.b].map(|values| values.iter().rev().copied().collect());
        Lora { a, b, ..module.clone() }
    };
    let other: Vec<_> = case.modules.iter().map(reversed).collect();
    let mut other = if is_unfused { unfused(&case.toy, &other) } else { other };
    let mut bits = (0..32).map(|bit| kept >> bit & 1 == 1);
    other.retain(|_| bits.next().unwrap_or(true));
    if other.is_empty() {
        other.extend(case.modules.first().map(reversed));
    }
    let halved = |module: &Lora| Lora { alpha: Some(module.alpha.unwrap_or(case.lora_alpha) / 2.0), ..module.clone() };
    let mut rest = unfused(&case.toy, &other);
    let mut both: Vec<_> = unfused(&case.toy, &case.modules)
        .iter()
        .map(|module| match rest.iter().position(|second| second.path == module.path) {
            Some(at) => joined(module, &rest.remove(at)),
            None => halved(module),
        })
        .collect();
    both.extend(rest.iter().map(halved));
    let [first, second] = [case.clone(), Case { modules: other, storage: Storage::File, ..case.clone() }];
    [first, second, Case { modules: both, ..case.clone() }]
}

fn check_of<T: Element>(case: &Case, rank: usize, parts: &[(&Adapter, f32)]) {
    let (model, _) = case.toy.model(rank, case.size);
    let image = SlotImage::combined(parts, &model, T::DTYPE).unwrap();
    assert!(image.bytes() <= SlotImage::max_bytes(&model, T::DTYPE, image.max_rank()));
    check::<T>(case, rank, &image);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Factors of two adapters lie in an image as those of one that has them one after the other along the rank.
    #[test]
    fn combinations_are_naive_packings(case in cases(), kept in any::<u32>(), is_unfused in any::<bool>()) {
        let [first, second, both] = two_parts(&case, kept, is_unfused);
        let [first, second] = [first, second].map(|case| case.adapter().unwrap());
        let parts = [(&first, 0.5), (&second, 0.5)];
        for rank in 0..case.size {
            match case.dtype {
                DType::BF16 => check_of::<bf16>(&both, rank, &parts),
                DType::F16 => check_of::<f16>(&both, rank, &parts),
                _ => check_of::<f32>(&both, rank, &parts),
            }
        }
    }
}

fn check_all_ranks(case: &Case) {
    let adapter = case.adapter().unwrap();
    assert_eq!(adapter.modules().len(), case.modules.len());
    for rank in 0..case.size {
        let (model, _) = case.toy.model(rank, case.size);
        let image = adapter.plan(&model, case.dtype).unwrap();
        assert!(image.bytes() <= SlotImage::max_bytes(&model, case.dtype, image.max_rank()));
        match case.dtype {
            DType::BF16 => check::<bf16>(case, rank, &image),
            DType::F16 => check::<f16>(case, rank, &image),
            _ => check::<f32>(case, rank, &image),
        }
    }
}

/// Factors too large to be packed by one thread.
#[test]
fn large_images_are_naive_packings() {
    let toy = Toy { layers: 1, hidden: 4138, q: 6, kv_heads: 2, kv: 6, inter: 4242, vocab: 5050 };
    let choices = [Some((9, DType::BF16, None)); 9];
    for (size, dtype) in [(1, DType::F32), (1, DType::F16), (2, DType::BF16)] {
        let modules = choose(&toy, &choices, &[true], 1);
        let (prefix, infix, storage) = ("", "", Storage::File);
        check_all_ranks(&Case { toy: toy.clone(), size, modules, lora_alpha: 1.0, prefix, infix, storage, dtype });
    }
}

/// A way to damage an adapter. The numbers choose a module and a place in it.
#[derive(Clone, Debug)]
enum Break {
    DropTensor(prop::sample::Index),
    SwapShape(prop::sample::Index),
    AddKey(&'static str),
    RepeatKey(prop::sample::Index),
    SetField(&'static str),
    DropField(&'static str),
    WrongBase,
    NotFinite(prop::sample::Index, prop::sample::Index, f32),
}

fn breaks() -> impl Strategy<Value = Break> {
    use prop::sample::{Index, select};
    prop_oneof![
        any::<Index>().prop_map(Break::DropTensor),
        any::<Index>().prop_map(Break::SwapShape),
        select(&["lora_C.weight", "weight", "lora_A", "x.lora_A.weight"][..]).prop_map(Break::AddKey),
        any::<Index>().prop_map(Break::RepeatKey),
        select(&["use_dora", "lora_bias", "use_qalora", "use_bdlora", "layer_replication", "tomorrow"][..])
            .prop_map(Break::SetField),
        select(&["peft_type", "lora_alpha"][..]).prop_map(Break::DropField),
        Just(Break::WrongBase),
        (any::<Index>(), any::<Index>(), select(&[f32::NAN, f32::INFINITY][..]))
            .prop_map(|(module, weight, value)| Break::NotFinite(module, weight, value)),
    ]
}

fn load((config, tensors): Parts) -> Result<Adapter, AdapterError> {
    Adapter::from_tensors(&config, tensors)
}

fn break_and_load(case: &Case, how: Break) {
    let (model, _) = case.toy.model(0, 1);
    let (config, mut tensors) = case.parts();
    let mut fields: serde_json::Value = serde_json::from_str(&config).unwrap();
    let fields = fields.as_object_mut().unwrap();
    let plan = |adapter: Adapter| adapter.plan(&model, case.dtype).map(|image| image.bytes());
    match how {
        Break::DropTensor(index) => {
            let index = index.index(tensors.len());
            tensors.remove(index);
            let partner = &tensors[index - index % 2].0.clone();
            refused!(load((config, tensors)), MissingFactor, format!("`{partner}`"));
        }
        Break::SwapShape(index) => {
            let (key, swapped) = tensors.get_mut(index.index(case.modules.len() * 2)).unwrap();
            let (rows, cols) = (swapped.shape()[0], swapped.shape()[1]);
            if rows == cols {
                return;
            }
            *swapped = tensor(swapped.dtype(), &[cols, rows], &vec![0.0; rows * cols]);
            let stem = key.split(".lora").next().unwrap().to_owned();
            let error = load((config, tensors)).and_then(plan).unwrap_err();
            assert!(matches!(error, AdapterError::RankMismatch { .. } | AdapterError::Shape { .. }), "{error:?}");
            assert!(error.to_string().contains(&stem), "{error}");
        }
        Break::AddKey(end) => {
            let key = format!("base_model.model.model.layers.0.nowhere.{end}");
            tensors.push((key.clone(), crate::ones(&[1, 1])));
            let error = load((config, tensors)).and_then(plan).unwrap_err();
            assert!(error.to_string().contains(&key), "{error}");
        }
        Break::RepeatKey(index) => {
            let (key, same) = tensors[index.index(tensors.len())].clone();
            let again = format!("module.{key}");
            tensors.push((again.clone(), same));
            refused!(load((config, tensors)), Duplicate, format!("`{again}`"), format!("`{key}`"));
        }
        Break::SetField(field) => {
            fields.insert(field.to_owned(), true.into());
            refused!(
                load((serde_json::to_string(fields).unwrap(), tensors)),
                UnsupportedField,
                format!("`{field}`"),
                "true"
            );
        }
        Break::DropField(field) => {
            fields.remove(field);
            refused!(load((serde_json::to_string(fields).unwrap(), tensors)), MissingField, format!("`{field}`"));
        }
        Break::WrongBase => {
            let (hidden, q) = (case.toy.hidden + 4, case.toy.q + 4);
            let (other, _) = Toy { hidden, q, ..case.toy.clone() }.model(0, 1);
            let adapter = load((config, tensors)).unwrap();
            refused!(adapter.plan(&other, case.dtype), Shape, "but the model needs");
        }
        Break::NotFinite(module, weight, value) => {
            let mut modules = case.modules.clone();
            let module = &mut modules[module.index(case.modules.len())];
            let weight = weight.index(module.a.len() + module.b.len());
            let a_len = module.a.len();
            *(if weight < a_len { &mut module.a[weight] } else { &mut module.b[weight - a_len] }) = value;
            let path = module.path.clone();
            let adapter = load(parts(case.lora_alpha, &modules)).unwrap();
            let image = adapter.plan(&model, case.dtype).unwrap();
            let result = image.write_to(&mut vec![0; image.bytes()]);
            refused!(result, Unrepresentable, path, value.to_string());
        }
    }
}

proptest! {
    #[test]
    fn images_are_naive_packings(case in cases()) {
        check_all_ranks(&case);
    }

    #[test]
    fn broken_adapters_are_refused(case in cases(), how in breaks()) {
        break_and_load(&case, how);
    }

    /// If one rank refuses to plan, all ranks give the same error.
    #[test]
    fn ranks_agree_on_what_they_refuse(case in cases(), hidden in 1..=3_usize, kv in 1..=2_usize, layers in 1..=2_usize) {
        let toy = Toy { hidden: 4 * hidden, kv: case.toy.kv_heads * kv, layers, ..case.toy.clone() };
        let adapter = case.adapter().unwrap();
        let verdict = |rank| adapter.plan(&toy.model(rank, case.size).0, case.dtype).map(drop).map_err(|e| e.to_string());
        for rank in 1..case.size {
            prop_assert_eq!(verdict(rank), verdict(0));
        }
    }

    #[test]
    fn truncated_and_altered_files_do_not_panic(
        case in cases(),
        len in any::<prop::sample::Index>(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let (config, tensors) = case.parts();
        let mut file = safetensors_bytes(&tensors);
        file.truncate(len.index(file.len()) + 1);
        for (at, byte) in &edits {
            let at = at.index(file.len());
            file[at] = *byte;
        }
        fuzz::load(config.as_bytes(), &file);
        let mut config = config.into_bytes();
        for (at, byte) in edits {
            let at = at.index(config.len());
            config[at] = byte;
        }
        fuzz::load(&config, &safetensors_bytes(&tensors));
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(data in proptest::collection::vec(any::<u8>(), 0..512)) {
        fuzz::run(&data);
    }
}
