//! Where a pool reads an adapter from.

use std::{
    collections::HashSet,
    path::Path,
    sync::{Arc, OnceLock},
};

use crate::{
    DType,
    adapter::{Adapter, AdapterError, Directory, Invocation, Opener, Orientation, Parsed, Planned, SlotImage},
    error::LoadError,
    model::{LinearId, LinearSite, Model},
    pool::PoolError,
    slots::Bounds,
};

/// Where a pool reads an adapter from, checked for one rank of a model. Making a source takes a while; any thread may
/// do so.
#[derive(Clone, Debug)]
pub struct Source {
    kind: Kind,
    model: Model,
    dtype: DType,
    bytes: usize,
    max_rank: usize,
    /// The linear layers that have factors, by their first entry.
    linears: Arc<[usize]>,
    has_trained_rows: bool,
    /// Until an engine takes it.
    invocation: Option<Invocation>,
    /// What the ranks of a group know the adapter by, once it is known; `None` without a group.
    fingerprint: Option<Arc<OnceLock<u64>>>,
}

#[derive(Clone, Debug)]
enum Kind {
    Directory(Directory),
    Memory(Arc<Planned>),
    /// Of several sources, some of which are directories.
    Combined(Arc<[(Source, f32)]>),
}

impl Source {
    /// A directory, as for [`Adapter::open`]. Reads the configuration and the headers of the weight files, and the
    /// factors of experts far enough to find out which of them are equal.
    ///
    /// Each load reads the weights again, into memory, so that nothing done to the files can stop the process. Files
    /// that have been modified or replaced since are an error of the load. The last 64 directories of the process that
    /// were checked or loaded stay parsed and planned, each with its weight file open, unless they have more than
    /// 262,144 modules together, of some 1 KB each. Adapters with [base weights](Adapter::base_weights) must come from
    /// [memory](Self::memory).
    ///
    /// # Errors
    /// As for [`Adapter::open`] and [`Adapter::plan`], except for the values of weights.
    pub fn directory(dir: impl AsRef<Path>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        Self::directory_with(dir, Opener::default(), model, dtype)
    }

    /// Like [`directory`](Self::directory), but opens each file, whenever it is read, with `opener`.
    ///
    /// # Errors
    /// As for [`directory`](Self::directory).
    pub fn directory_with(
        dir: impl AsRef<Path>,
        opener: Opener,
        model: &Model,
        dtype: DType,
    ) -> Result<Self, AdapterError> {
        Self::of_directory(dir.as_ref(), opener, None, model, dtype)
    }

    /// Like [`directory`](Self::directory), for an adapter whose factors of PEFT's `target_parameters` have this
    /// orientation, as for [`Adapter::oriented`].
    ///
    /// # Errors
    /// As for [`directory`](Self::directory).
    #[doc(alias = "is_3d_lora_weight")]
    pub fn oriented_directory(
        dir: impl AsRef<Path>,
        orientation: Orientation,
        model: &Model,
        dtype: DType,
    ) -> Result<Self, AdapterError> {
        Self::of_directory(dir.as_ref(), Opener::default(), Some(orientation), model, dtype)
    }

    fn of_directory(
        dir: &Path,
        opener: Opener,
        orientation: Option<Orientation>,
        model: &Model,
        dtype: DType,
    ) -> Result<Self, AdapterError> {
        let (directory, parsed) = Directory::open(dir, opener, orientation, model, dtype)?;
        let invocation = parsed.adapter().invocation().cloned();
        Ok(Self { invocation, ..Self::new(Kind::Directory(directory), parsed.image()) })
    }

    /// An adapter in memory, such as a trainer sends. It stays there.
    ///
    /// # Errors
    /// As for [`Adapter::plan`].
    pub fn memory(adapter: Arc<Adapter>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        let invocation = adapter.invocation().cloned();
        Ok(Self { invocation, ..Self::of_memory(vec![(adapter, 1.0)], model, dtype)? })
    }

    fn of_memory(parts: Vec<(Arc<Adapter>, f32)>, model: &Model, dtype: DType) -> Result<Self, AdapterError> {
        let planned = Arc::new(Planned::combined(parts, model, dtype)?);
        Ok(Self::new(Kind::Memory(Arc::clone(&planned)), planned.image()))
    }

    /// Up to [`MAX_PARTS`](crate::adapter::MAX_PARTS) adapters that apply together, each multiplied by a scale of its
    /// own, as for [`SlotImage::combined`]. For a pool they are one adapter, which is read as its parts are. The parts
    /// of a combination among them count on their own. The model and the element type are those of the first part.
    ///
    /// # Errors
    /// [`AdapterError::Invocations`] if the parts have different [invocations](Self::take_invocation), or some have
    /// none. Otherwise as for [`SlotImage::combined`], and for [`directory`](Self::directory) if the files of a part
    /// have changed.
    #[doc(alias = "add_weighted_adapter")]
    pub fn combined(parts: impl IntoIterator<Item = (Self, f32)>) -> Result<Self, AdapterError> {
        let parts: Arc<[_]> = parts.into_iter().collect();
        let Some((Self { model, dtype, invocation, .. }, _)) = parts.first() else {
            return Err(AdapterError::Parts { parts: 0 });
        };
        if parts.iter().any(|(part, _)| part.invocation != *invocation) {
            return Err(AdapterError::Invocations);
        }
        let invocation = invocation.clone();
        let held = Held::new(&parts)?;
        let planned = Arc::new(held.plan(model, *dtype)?);
        let kind = if held.files.is_empty() { Kind::Memory(Arc::clone(&planned)) } else { Kind::Combined(parts) };
        Ok(Self { invocation, ..Self::new(kind, planned.image()) })
    }

    /// Holds its adapters, each of which is multiplied by `scale` as well.
    fn hold(&self, scale: f32, held: &mut Held) -> Result<(), AdapterError> {
        match &self.kind {
            Kind::Memory(planned) => {
                held.parts.extend(planned.parts().iter().map(|(adapter, own)| (Arc::clone(adapter), own * scale)));
            }
            Kind::Directory(directory) => {
                let parsed = directory.parsed()?;
                held.parts.push((Arc::clone(parsed.adapter()), scale));
                held.files.push(parsed);
            }
            Kind::Combined(parts) => parts.iter().try_for_each(|(part, own)| part.hold(own * scale, held))?,
        }
        Ok(())
    }

    /// The same adapter, for another rank of the model.
    pub(crate) fn shard(&self, model: &Model) -> Result<Self, AdapterError> {
        let shard = match &self.kind {
            Kind::Memory(planned) => Self::of_memory(planned.parts().to_vec(), model, self.dtype)?,
            Kind::Directory(directory) => {
                let (directory, parsed) = directory.shard(model)?;
                Self::new(Kind::Directory(directory), parsed.image())
            }
            Kind::Combined(parts) => {
                let parts = parts.iter().map(|(part, scale)| Ok((part.shard(model)?, *scale)));
                Self::combined(parts.collect::<Result<Vec<_>, AdapterError>>()?)?
            }
        };
        Ok(Self { invocation: self.invocation.clone(), ..shard })
    }

    fn new(kind: Kind, image: &SlotImage<'_>) -> Self {
        let (model, dtype) = (image.model().clone(), image.dtype());
        let adapted: HashSet<usize> = image.entries().iter().map(|entry| entry.entry).collect();
        let has_factors =
            |site: &&LinearSite| (site.first_entry()..).take(site.slices().len()).any(|entry| adapted.contains(&entry));
        let linears = model.linears().iter().filter(has_factors).map(LinearSite::first_entry).collect();
        Self {
            kind,
            model,
            dtype,
            bytes: image.bytes(),
            max_rank: image.max_rank(),
            linears,
            has_trained_rows: image.has_trained_rows(),
            invocation: None,
            fingerprint: None,
        }
    }

    /// The same, whose reads have fingerprints.
    pub(super) fn of_group(self) -> Self {
        Self { fingerprint: Some(Arc::default()), ..self }
    }

    /// The fingerprint of the adapter; 0 without a group. The first call reads all of it.
    pub(super) fn fingerprint(&self) -> Result<u64, LoadError> {
        let Some(kept) = &self.fingerprint else { return Ok(0) };
        if let Some(fingerprint) = kept.get() {
            return Ok(*fingerprint);
        }
        let fingerprint = self.read_planned(|planned| Ok(planned.fingerprint()?))?;
        Ok(*kept.get_or_init(|| fingerprint))
    }

    /// Size of the adapter's [image](SlotImage::bytes) in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The largest rank.
    pub fn max_rank(&self) -> usize {
        self.max_rank
    }

    /// The tokens from which on the adapter applies, if it does not apply to whole sequences, for an engine that heeds
    /// them. A pool refuses a source whose invocation was not taken. Take that of a combination, and not those of its
    /// parts.
    pub fn take_invocation(&mut self) -> Option<Invocation> {
        self.invocation.take()
    }

    /// Whether the adapter has factors of a linear layer on this rank, such as a router: without any, an engine may
    /// leave out the operation. `false` for a layer of another model.
    pub fn adapts(&self, layer: LinearId) -> bool {
        self.model.linear(layer).is_some_and(|site| self.linears.contains(&site.first_entry()))
    }

    /// Whether the adapter has [trained rows](Adapter::trained_rows), on this rank or another: without any, an engine may
    /// leave out the operations.
    pub fn has_trained_rows(&self) -> bool {
        self.has_trained_rows
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// Rejects a source for another table, and one that does not apply to whole sequences.
    pub(super) fn check(&self, bounds: &Bounds) -> Result<(), PoolError> {
        if let Some(invocation) = &self.invocation {
            let tokens = invocation.tokens().to_vec();
            return Err(LoadError::from(AdapterError::Invocation { tokens }).into());
        }
        Ok(bounds.check(&self.model, self.dtype, self.max_rank)?)
    }

    /// Calls `pack` with the adapter's image, whose weights are read when it is written.
    pub(crate) fn read<R>(&self, pack: impl FnOnce(&SlotImage<'_>) -> Result<R, LoadError>) -> Result<R, LoadError> {
        self.read_planned(|planned| pack(planned.image()))
    }

    fn read_planned<R>(&self, read: impl FnOnce(&Planned) -> Result<R, LoadError>) -> Result<R, LoadError> {
        match &self.kind {
            Kind::Memory(planned) => read(planned),
            Kind::Directory(directory) => directory.read(read),
            Kind::Combined(parts) => {
                let held = Held::new(parts)?;
                let read = read(&held.plan(&self.model, self.dtype)?);
                held.check()?;
                read
            }
        }
    }
}

/// The adapters of a combination, while they are read.
#[derive(Default)]
struct Held {
    parts: Vec<(Arc<Adapter>, f32)>,
    files: Vec<Arc<Parsed>>,
}

impl Held {
    fn new(parts: &[(Source, f32)]) -> Result<Self, AdapterError> {
        let mut held = Self::default();
        parts.iter().try_for_each(|(part, scale)| part.hold(*scale, &mut held))?;
        Ok(held)
    }

    fn plan(&self, model: &Model, dtype: DType) -> Result<Planned, AdapterError> {
        let planned = Planned::combined(self.parts.clone(), model, dtype);
        // The plan of experts reads some of their factors.
        self.check()?;
        planned
    }

    /// Rejects files that have been modified since they were opened.
    fn check(&self) -> Result<(), AdapterError> {
        self.files.iter().try_for_each(|parsed| parsed.check())
    }
}

/// For engines that register it in the pool of a [group](crate::group::GroupPool), or in any other.
impl From<Source> for Result<Source, AdapterError> {
    fn from(source: Source) -> Self {
        Ok(source)
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::{
        fs::{self, OpenOptions},
        path::Path,
        sync::Mutex,
        time::Duration,
    };

    use half::f16;
    use rayon::ThreadPoolBuilder;
    use safetensors::{Dtype, tensor::TensorView};

    use super::*;
    use crate::{
        adapter::Tensor,
        model::{Experts, Linear, ModelSpec, Parallel, Shard, TpRank},
    };

    const WEIGHTS: &str = "adapter_model.safetensors";
    const HIDDEN: usize = 700;
    const HEADS: usize = 520;
    const VOCAB: usize = 1000;

    /// A rank of a layer with three merged modules, a row-parallel one and an embedding.
    fn model(rank: usize, size: usize) -> Model {
        let mut spec = ModelSpec::new();
        let qkv = ["q", "k", "v"]
            .iter()
            .fold(Linear::new("m", Parallel::Column, HIDDEN), |linear, &name| linear.slice(name, HEADS));
        spec.linear(qkv).unwrap();
        spec.linear(Linear::new("m", Parallel::Row, HEADS).slice("o", HIDDEN)).unwrap();
        spec.embedding("e", VOCAB, HIDDEN).unwrap();
        spec.shard(TpRank::new(rank, size).unwrap()).unwrap()
    }

    /// Writes an adapter of all these modules, whose ranks and element types differ.
    fn write(dir: &Path) {
        let modules = [("m.q", HIDDEN, HEADS), ("m.k", HIDDEN, HEADS), ("m.v", HIDDEN, HEADS), ("m.o", HEADS, HIDDEN)];
        let linear = modules.iter().zip([1, 16, 20, 256]).flat_map(|(&(name, input, output), rank)| {
            [(format!("{name}.lora_A.weight"), [rank, input]), (format!("{name}.lora_B.weight"), [output, rank])]
        });
        let embedding = [("e.lora_embedding_A", [12, VOCAB]), ("e.lora_embedding_B", [HIDDEN, 12])];
        let shapes = linear.chain(embedding.map(|(name, shape)| (name.to_owned(), shape)));
        let tensors = shapes.enumerate().map(|(number, (name, shape))| {
            let values = (0..shape[0] * shape[1]).map(|i| ((i * 31 + number * 7) % 1009) as f32 / 64.0 - 7.0);
            let (dtype, bytes) = match number / 2 % 3 {
                0 => (Dtype::BF16, values.flat_map(|value| half::bf16::from_f32(value).to_le_bytes()).collect()),
                1 => (Dtype::F16, values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect()),
                _ => (Dtype::F32, values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()),
            };
            (name, dtype, shape, bytes)
        });
        let tensors: Vec<_> = tensors.collect();
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join(WEIGHTS)).unwrap();
        fs::write(dir.join("adapter_config.json"), r#"{"peft_type": "LORA", "lora_alpha": 1}"#).unwrap();
    }

    #[test]
    fn a_source_knows_the_layers_that_it_adapts() {
        let mut spec = ModelSpec::new();
        let qk = Linear::new("m", Parallel::Column, 4).slice("q", 4).slice("k", 4);
        let [qk, o, router] = [
            qk,
            Linear::new("m", Parallel::Row, 4).slice("o", 4),
            Linear::new("m", Parallel::Replicated, 4).slice("gate", 4),
        ]
        .map(|layer| spec.linear(layer).unwrap());
        let tensors = ["m.k", "m.gate"].map(|path| {
            ["A", "B"].map(|side| {
                let shape = if side == "A" { [1, 4] } else { [4, 1] };
                let tensor = Tensor::new(DType::F32, shape, vec![0; 16]).unwrap();
                (format!("{path}.lora_{side}.weight"), tensor)
            })
        });
        let config = r#"{"peft_type": "LORA", "lora_alpha": 1}"#;
        let adapter = Arc::new(Adapter::from_tensors(config, tensors.into_iter().flatten()).unwrap());
        let foreign = ModelSpec::new().linear(Linear::new("m", Parallel::Column, 4).slice("q", 4)).unwrap();
        for rank in [0, 1] {
            let model = spec.shard(Shard::new(TpRank::new(rank, 2).unwrap()).fully_sharded()).unwrap();
            let source = Source::memory(Arc::clone(&adapter), &model, DType::F32).unwrap();
            assert_eq!([qk, o, router, foreign].map(|layer| source.adapts(layer)), [true, false, true, false]);
        }
    }

    fn packed(source: &Source) -> Vec<u8> {
        let pack = |image: &SlotImage<'_>| {
            let mut block = vec![0xee; image.bytes()];
            image.write_to(&mut block)?;
            Ok(block)
        };
        source.read(pack).unwrap()
    }

    /// Whether its parts are in memory or in directories, on any rank, and if parts are combinations.
    #[test]
    fn a_combination_is_read_as_its_parts() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        dirs.iter().for_each(|dir| write(dir.path()));
        let adapter = Arc::new(Adapter::open(dirs[0].path()).unwrap());
        let whole = model(0, 1);
        let [first, second] = dirs.each_ref().map(|dir| Source::directory(dir.path(), &whole, DType::BF16).unwrap());
        let memory = Source::memory(Arc::clone(&adapter), &whole, DType::BF16).unwrap();
        let inner = Source::combined([(second.clone(), 0.25)]).unwrap();
        let nested = Source::combined([(first.clone(), 0.5), (inner, 2.0)]).unwrap();
        let flat = Source::combined([(first.clone(), 0.5), (second, 0.5)]).unwrap();
        let in_memory = Source::combined([(memory.clone(), 0.5), (memory.clone(), 0.5)]).unwrap();
        assert_eq!([&flat, &nested, &in_memory].map(Source::max_rank), [2 * 256; 3]);
        for (rank, size) in [(0, 1), (1, 4), (3, 4)] {
            let model = model(rank, size);
            let parts = [(&*adapter, 0.5); 2];
            let image = SlotImage::combined(&parts, &model, DType::BF16).unwrap();
            let mut want = vec![0xee; image.bytes()];
            image.write_to(&mut want).unwrap();
            for source in [&flat, &nested, &in_memory] {
                let shard = source.shard(&model).unwrap();
                assert!(packed(&shard) == want, "rank {rank} of {size}");
                assert_eq!(shard.bytes(), want.len());
            }
        }
        let numbers = [&flat, &nested, &in_memory, &memory, &first].map(|source| {
            let source = source.clone().of_group();
            source.fingerprint().unwrap()
        });
        assert!(numbers[0] == numbers[1] && numbers[1] == numbers[2] && numbers[3] == numbers[4]);
        assert_ne!(numbers[0], numbers[3]);
        let other = Source::combined([(memory.clone(), 0.5), (memory.clone(), 0.25)]).unwrap();
        assert_ne!(other.of_group().fingerprint().unwrap(), numbers[2]);
        assert!(matches!(Source::combined([]), Err(AdapterError::Parts { parts: 0 })));
        let many = Source::combined([(flat, 1.0), (nested, 1.0), (in_memory, 1.0)]);
        assert!(matches!(many, Err(AdapterError::Parts { parts: 6 })));
        // A part whose file is another one now is an error of the next read.
        let config = dirs[0].path().join("adapter_config.json");
        let combined = Source::combined([(first, 1.0), (memory, 1.0)]).unwrap();
        fs::write(config, r#"{"peft_type": "LORA", "lora_alpha": 2}"#).unwrap();
        let error = combined.read(|_| Ok(())).unwrap_err();
        assert!(matches!(error, LoadError::Adapter(AdapterError::Changed { .. })), "{error}");
    }

    fn is_kept(source: &Source) -> bool {
        matches!(&source.kind, Kind::Directory(directory) if directory.is_kept())
    }

    /// Whatever the number of threads, and whether the weights are in memory or read while they are packed.
    #[test]
    fn every_way_gives_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let adapter = Adapter::open(dir.path()).unwrap();
        // Other tests keep directories, too, in place of this one.
        let keeps = |_| is_kept(&Source::directory(dir.path(), &model(0, 1), DType::F32).unwrap());
        assert!((0..100).any(keeps));
        for (rank, size) in [(0, 1), (0, 4), (3, 4)] {
            let model = model(rank, size);
            for dtype in [DType::BF16, DType::F16, DType::F32] {
                let image = adapter.plan(&model, dtype).unwrap();
                let mut whole = vec![0xee; image.bytes()];
                image.write_to(&mut whole).unwrap();
                let mut pieces = vec![0xee; image.bytes()];
                for piece in image.pieces(crate::adapter::MIN_STAGING_BYTES) {
                    piece.write_to(&mut pieces[piece.range()]).unwrap();
                }
                assert!(whole == pieces);
                let source = Source::directory(dir.path(), &model, dtype).unwrap();
                assert_eq!(source.bytes(), whole.len());
                for threads in [1, 5] {
                    let threads = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let packed = source.read(|image| {
                        let mut block = vec![0xee; image.bytes()];
                        threads.install(|| image.write_to(&mut block))?;
                        Ok(block)
                    });
                    assert!(packed.unwrap() == whole, "rank {rank} of {size}, {dtype}");
                    // In parts of one factor, of some, and of all of them.
                    for part_bytes in [1, 20_000, usize::MAX] {
                        let parts = Mutex::new(Vec::new());
                        let written = |at, part: &[u8]| {
                            parts.lock().unwrap().push((at, part.to_vec()));
                            Ok(())
                        };
                        let packed = source.read(|image| {
                            let mut block = vec![0xee; image.bytes()];
                            threads.install(|| image.write_in_parts(&mut block, part_bytes, written))?;
                            Ok(block)
                        });
                        assert!(packed.unwrap() == whole, "rank {rank} of {size}, {dtype}");
                        let mut parts = parts.into_inner().unwrap();
                        parts.sort_unstable();
                        assert_eq!(parts.len() == 1, part_bytes == usize::MAX);
                        let mut end = 0;
                        for (at, part) in parts {
                            assert!(at == end && whole[at..].starts_with(&part));
                            end += part.len();
                        }
                        assert_eq!(end, whole.len());
                    }
                }
            }
        }
    }

    const EXPERTS: usize = 5;
    const RANK: usize = 3;
    /// Hidden and inner features.
    const WIDTHS: [usize; 2] = [40, 600];

    /// Matrices of all experts: of how many there are, their shape, and their elements one after the other.
    type Stack = (usize, [usize; 2], Vec<f32>);

    /// A and B of a module. Experts may share one of them, but for its last element if they are `almost` equal.
    fn stacks(module: usize, shared: Option<usize>, almost: bool) -> [Stack; 2] {
        let [input, output] = if module == 2 { [WIDTHS[1], WIDTHS[0]] } else { WIDTHS };
        [[RANK, input], [output, RANK]].map(|shape| {
            let (len, side) = (shape[0] * shape[1], usize::from(shape[1] == RANK));
            let value = |i: usize| ((i * 31 + module * 7 + side * 3) % 1009) as f32 / 64.0 - 7.0;
            let is_shared = shared == Some(side);
            let mut values: Vec<_> = (0..EXPERTS * len).map(|i| value(if is_shared { i % len } else { i })).collect();
            if almost {
                values[EXPERTS * len - 1] += 1.0;
            }
            (EXPERTS, shape, values)
        })
    }

    fn transposed([rows, cols]: [usize; 2], values: &[f32]) -> Vec<f32> {
        (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect()
    }

    /// Names, shapes and elements of tensors.
    type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

    /// Stores the factors of a module, of which all experts have the same A, or B, if one is given. Not every form can
    /// store each.
    type Form = fn(&str, &[Stack; 2], Option<usize>) -> Option<Tensors>;

    const FORMS: [Form; 4] = [
        |name, stacks, _| {
            let of = |(side, (_, shape, values)): (&str, &Stack)| -> Tensors {
                let parts = values.chunks(shape[0] * shape[1]).enumerate();
                let tensor = |(expert, part): (usize, &[f32])| {
                    (format!("mlp.experts.{expert}.{name}.lora_{side}.weight"), shape.to_vec(), part.to_vec())
                };
                parts.map(tensor).collect()
            };
            Some(["A", "B"].into_iter().zip(stacks).flat_map(of).collect())
        },
        |name, stacks, _| {
            let tensor = |(side, (count, shape, values)): (&str, &Stack)| {
                let shape = [&[*count], &shape[..]].concat();
                (format!("mlp.experts.{name}.lora_{side}.weight"), shape, values.clone())
            };
            Some(["A", "B"].into_iter().zip(stacks).map(tensor).collect())
        },
        |name, stacks, _| {
            let name = name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2");
            let tensor = |(side, (count, shape, values)): (&str, &Stack)| {
                let values = values.chunks(shape[0] * shape[1]).flat_map(|part| transposed(*shape, part)).collect();
                (format!("mlp.{name}.lora_{side}.weight"), vec![*count, shape[1], shape[0]], values)
            };
            Some(["A", "B"].into_iter().zip(stacks).map(tensor).collect())
        },
        // One beside the other, rows far apart.
        |name, [a, b], shared| {
            let (a, b) = match shared? {
                0 => {
                    let (count, [rows, cols], values) = b;
                    ((a.1.to_vec(), a.2[..a.1[0] * a.1[1]].to_vec()), (vec![count * rows, *cols], values.clone()))
                }
                _ => {
                    let (count, [rows, cols], values) = a;
                    let row =
                        |row: usize| values.chunks(rows * cols).flat_map(move |part| &part[row * cols..][..*cols]);
                    let values = (0..*rows).flat_map(row).copied().collect();
                    ((vec![*rows, count * cols], values), (b.1.to_vec(), b.2[..b.1[0] * b.1[1]].to_vec()))
                }
            };
            let tensor = |(side, (shape, values))| (format!("mlp.experts.{name}.lora_{side}.weight"), shape, values);
            Some([("A", a), ("B", b)].map(tensor).into())
        },
    ];

    /// Whatever the form of experts, and whether their factors are equal, which a directory is read for.
    #[test]
    fn experts_are_read_in_place() {
        for (form, is_shared, almost) in (0..FORMS.len()).flat_map(|form| {
            [(false, false), (true, false), (true, true)].map(|(is_shared, almost)| (form, is_shared, almost))
        }) {
            let tensors = ["gate_proj", "up_proj", "down_proj"].into_iter().enumerate().map(|(module, name)| {
                let shared = is_shared.then_some(usize::from(module == 2));
                FORMS[form](name, &stacks(module, shared, almost), shared.filter(|_| !almost))
            });
            let Some(tensors) = tensors.collect::<Option<Vec<_>>>() else { continue };
            for dtype in [Dtype::F32, Dtype::F64] {
                let tensors = tensors.iter().flatten().map(|(name, shape, values)| {
                    let bytes: Vec<u8> = match dtype {
                        Dtype::F64 => values.iter().flat_map(|&value| f64::from(value).to_le_bytes()).collect(),
                        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                    };
                    (name, shape, bytes)
                });
                let tensors: Vec<_> = tensors.collect();
                let views = tensors
                    .iter()
                    .map(|(name, shape, bytes)| (name, TensorView::new(dtype, shape.to_vec(), bytes).unwrap()));
                let dir = tempfile::tempdir().unwrap();
                safetensors::serialize_to_file(views, None, &dir.path().join(WEIGHTS)).unwrap();
                fs::write(dir.path().join("adapter_config.json"), r#"{"peft_type": "LORA", "lora_alpha": 1}"#).unwrap();
                let adapter = Adapter::open(dir.path()).unwrap();
                for rank in [TpRank::SINGLE, TpRank::new(1, 2).unwrap()] {
                    let model = experts().shard(rank).unwrap();
                    let image = adapter.plan(&model, DType::F32).unwrap();
                    for (module, shared) in image.shared().iter().enumerate() {
                        let want = [module < 2, module == 2].map(|is_outer| is_outer && is_shared && !almost);
                        let is_shared = [shared.a_elems, shared.b_elems].map(|elems| elems.is_some());
                        assert_eq!(is_shared, want, "form {form}, module {module}");
                    }
                    let mut whole = vec![0xee; image.bytes()];
                    image.write_to(&mut whole).unwrap();
                    let source = Source::directory(dir.path(), &model, DType::F32).unwrap();
                    assert_eq!(source.bytes(), whole.len(), "form {form}");
                    let packed = source.read(|image| {
                        let mut block = vec![0xee; image.bytes()];
                        image.write_to(&mut block)?;
                        Ok(block)
                    });
                    assert!(packed.unwrap() == whole, "form {form}, shared {is_shared}, almost {almost}, {dtype:?}");
                }
            }
        }
    }

    /// A plan is made once, for all loads.
    #[test]
    fn loads_have_one_plan() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let model = model(0, 1);
        let plan = |source: &Source| source.read(|image| Ok(std::ptr::from_ref(image).addr())).unwrap();
        let memory = Source::memory(Arc::new(Adapter::open(dir.path()).unwrap()), &model, DType::F32).unwrap();
        assert_eq!(plan(&memory), plan(&memory.clone()));
        // Other tests keep directories, too, in place of this one.
        let directory = Source::directory(dir.path(), &model, DType::F32).unwrap();
        let is_kept = |_| {
            let first = plan(&directory);
            is_kept(&directory) && plan(&directory) == first
        };
        assert!((0..100).any(is_kept));
    }

    /// Writes the factors of PEFT's `target_parameters`, whose experts lie between each other in one of two tensors,
    /// with `NaN` in these elements of up's B, and returns those of each expert. `gate_up` has its A first, or,
    /// `reversed`, what it gives.
    fn write_parameters(dir: &Path, is_reversed: bool, nans: &[[usize; 3]]) -> Tensors {
        let [hidden, inner] = WIDTHS;
        let value = |seed: usize, at: usize| ((at * 31 + seed * 7) % 1009) as f32 / 64.0 - 7.0;
        let (mut stored, mut of_experts) = (Tensors::new(), Tensors::new());
        for (seed, (path, modules, [input, output])) in [
            ("mlp.experts.base_layer", &["gate_proj", "up_proj"][..], [hidden, 2 * inner]),
            ("mlp.experts", &["down_proj"], [inner, hidden]),
        ]
        .into_iter()
        .enumerate()
        {
            let [takes, gives] = if is_reversed { [output, input] } else { [input, output] };
            let a: Vec<f32> = (0..EXPERTS * RANK * takes).map(|at| value(seed, at)).collect();
            let mut b: Vec<f32> = (0..gives * RANK * EXPERTS).map(|at| value(seed + 2, at)).collect();
            for &[expert, row, rank] in nans.iter().filter(|_| seed == 0) {
                b[((inner + row) * RANK + rank) * EXPERTS + expert] = f32::NAN;
            }
            for expert in 0..EXPERTS {
                // [rank, takes] and [gives, rank], which change places.
                let a = &a[expert * RANK * takes..][..RANK * takes];
                let b: Vec<f32> = b.iter().copied().skip(expert).step_by(EXPERTS).collect();
                let (a, b) = match is_reversed {
                    true => (transposed([gives, RANK], &b), transposed([RANK, takes], a)),
                    false => (a.to_vec(), b),
                };
                for (half, name) in modules.iter().enumerate() {
                    let rows = output / modules.len();
                    let b = b[half * rows * RANK..][..rows * RANK].to_vec();
                    let name = |side: &str| format!("mlp.experts.{expert}.{name}.lora_{side}.weight");
                    of_experts.push((name("A"), vec![RANK, input], a.clone()));
                    of_experts.push((name("B"), vec![rows, RANK], b));
                }
            }
            stored.push((format!("{path}.lora_A.weight"), vec![EXPERTS * RANK, takes], a));
            stored.push((format!("{path}.lora_B.weight"), vec![gives, RANK * EXPERTS], b));
        }
        let stored = stored.iter().map(|(name, shape, values)| (name, shape, bytemuck::cast_slice(values)));
        let views =
            stored.map(|(name, shape, bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &dir.join(WEIGHTS)).unwrap();
        fs::write(dir.join("adapter_config.json"), r#"{"peft_type": "LORA", "lora_alpha": 1}"#).unwrap();
        of_experts
    }

    fn experts() -> ModelSpec {
        let mut spec = ModelSpec::new();
        spec.experts(Experts::new("mlp.experts", EXPERTS, WIDTHS[0], WIDTHS[1]).top_k(1)).unwrap();
        spec
    }

    /// Factors that lie between each other are written together, whatever the number of threads and the parts, as each
    /// is alone.
    #[test]
    fn factors_between_each_other_are_written_as_those_of_each_expert() {
        let dir = tempfile::tempdir().unwrap();
        for (is_reversed, orientation) in [(false, Orientation::Forward), (true, Orientation::Reversed)] {
            let of_experts = write_parameters(dir.path(), is_reversed, &[]).into_iter().map(|(name, shape, values)| {
                (name, Tensor::new(DType::F32, shape, bytemuck::cast_slice(&values).to_vec()).unwrap())
            });
            let of_experts = Adapter::from_tensors(r#"{"peft_type": "LORA", "lora_alpha": 1}"#, of_experts).unwrap();
            let mapped = Adapter::open(dir.path()).unwrap().oriented(orientation);
            for (rank, dtype) in [TpRank::SINGLE, TpRank::new(1, 2).unwrap()]
                .into_iter()
                .flat_map(|rank| [DType::BF16, DType::F32].map(|dtype| (rank, dtype)))
            {
                let model = experts().shard(rank).unwrap();
                let pack = |image: &SlotImage<'_>| {
                    let mut block = vec![0xee; image.bytes()];
                    image.write_to(&mut block)?;
                    Ok(block)
                };
                let want = pack(&of_experts.plan(&model, dtype).unwrap()).unwrap();
                assert!(pack(&mapped.plan(&model, dtype).unwrap()).unwrap() == want, "{orientation:?}");
                let source = Source::oriented_directory(dir.path(), orientation, &model, dtype).unwrap();
                for threads in [1, 5].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().unwrap()) {
                    assert!(threads.install(|| source.read(pack)).unwrap() == want, "{orientation:?}");
                    let parts = Mutex::new(0);
                    let in_parts = |image: &SlotImage<'_>| {
                        let mut block = vec![0xee; image.bytes()];
                        image.write_in_parts(&mut block, 1, |at, part| {
                            assert!(want[at..].starts_with(part));
                            *parts.lock().unwrap() += 1;
                            Ok(())
                        })?;
                        Ok(block)
                    };
                    assert!(threads.install(|| source.read(in_parts)).unwrap() == want, "{orientation:?}");
                    assert!(*parts.lock().unwrap() > 1);
                }
            }
        }
    }

    /// Whichever thread finds an error, that of the first factor of the image is returned.
    #[test]
    fn errors_of_factors_between_each_other_are_those_of_the_first() {
        let dir = tempfile::tempdir().unwrap();
        // The first of them in the file is of a later expert.
        write_parameters(dir.path(), false, &[[3, 0, 0], [1, 599, 2]]);
        let model = experts().shard(TpRank::SINGLE).unwrap();
        let source = Source::oriented_directory(dir.path(), Orientation::Forward, &model, DType::F32).unwrap();
        for threads in [1, 5].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().unwrap()) {
            let pack = |image: &SlotImage<'_>| Ok(image.write_to(&mut vec![0; image.bytes()])?);
            let error = threads.install(|| source.read(pack)).unwrap_err();
            let LoadError::Adapter(AdapterError::Unrepresentable { tensor, index, .. }) = error else { unreachable!() };
            assert_eq!((&*tensor.key, index), ("mlp.experts.base_layer.lora_B.weight", vec![1199, 2 * EXPERTS + 1]));
        }
    }

    /// The factors of square parameters could stand in two ways. Each load uses the one that was given.
    #[test]
    fn a_directory_may_be_given_an_orientation() {
        let dir = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0_u8..48).flat_map(|value| f32::from(value).to_le_bytes()).collect();
        let view = |shape| TensorView::new(Dtype::F32, shape, &bytes).unwrap();
        // Of three experts and rank 2.
        let views = [("e.lora_A.weight", view(vec![6, 8])), ("e.lora_B.weight", view(vec![8, 6]))];
        safetensors::serialize_to_file(views, None, &dir.path().join(WEIGHTS)).unwrap();
        fs::write(dir.path().join("adapter_config.json"), r#"{"peft_type": "LORA", "lora_alpha": 1}"#).unwrap();
        let mut spec = ModelSpec::new();
        spec.experts(Experts::new("e", 3, 8, 8).top_k(1)).unwrap();
        let model = spec.shard(TpRank::SINGLE).unwrap();
        let refusal = Source::directory(dir.path(), &model, DType::F32).unwrap_err();
        assert!(matches!(refusal, AdapterError::AmbiguousExperts { .. }), "{refusal}");
        assert!(refusal.to_string().contains("Source::oriented_directory"), "{refusal}");
        let pack = |image: &SlotImage<'_>| {
            let mut block = vec![0xee; image.bytes()];
            image.write_to(&mut block)?;
            Ok(block)
        };
        let [forward, reversed] = [Orientation::Forward, Orientation::Reversed].map(|orientation| {
            let adapter = Adapter::open(dir.path()).unwrap().oriented(orientation);
            let whole = pack(&adapter.plan(&model, DType::F32).unwrap()).unwrap();
            let source = Source::oriented_directory(dir.path(), orientation, &model, DType::F32).unwrap();
            for _ in 0..2 {
                assert!(source.read(pack).unwrap() == whole, "{orientation:?}");
            }
            assert_eq!(source.bytes(), whole.len());
            whole
        });
        assert!(forward != reversed);
    }

    /// A file that changes while it is packed is an error, even if what was read of it fits together.
    #[test]
    fn files_that_change_while_they_are_packed_are_refused() {
        let modified = |path: &Path| {
            let file = OpenOptions::new().write(true).open(path).unwrap();
            file.set_modified(file.metadata().unwrap().modified().unwrap() + Duration::from_millis(1)).unwrap();
        };
        let truncated = |path: &Path| OpenOptions::new().write(true).open(path).unwrap().set_len(20_000).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for (damage, fails) in [(&modified as &dyn Fn(&Path), false), (&truncated, true)] {
            write(dir.path());
            let source = Source::directory(dir.path(), &model(0, 1), DType::F32).unwrap();
            let mut packed = None;
            let result = source.read(|image| {
                damage(&dir.path().join(WEIGHTS));
                let mut block = vec![0; image.bytes()];
                Ok(packed.insert(image.write_to(&mut block)).is_ok())
            });
            let LoadError::Adapter(AdapterError::Changed { path }) = result.unwrap_err() else { unreachable!() };
            assert!(path.ends_with(WEIGHTS));
            assert_eq!(matches!(packed, Some(Err(AdapterError::Read { .. }))), fails);
        }
    }
}
