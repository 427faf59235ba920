//! Directories of adapters that stay parsed, for loads that come again.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use super::{
    error::AdapterError,
    experts::Orientation,
    files::{Access, Opened, Opener, Stamp},
    image::SlotImage,
    open::Adapter,
    planned::Planned,
};
use crate::{DType, error::LoadError, model::Model};

/// Directories that stay parsed, of the whole process. All of them have one open file each.
const KEPT: usize = 64;

/// The modules of these directories, of which each takes some 1 KB.
const KEPT_MODULES: usize = 1 << 18;

/// The directories that stay parsed, from the least recently used one on, and their modules.
static RECENT: Mutex<VecDeque<(Weak<Kept>, usize)>> = Mutex::new(VecDeque::new());

/// What is left of a directory that was parsed.
type Kept = Mutex<Option<Arc<Parsed>>>;

/// A directory whose adapter has been checked for one rank of a model, and is read later.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    opener: Opener,
    orientation: Option<Orientation>,
    model: Model,
    dtype: DType,
    files: Vec<Stamp>,
    kept: Arc<Kept>,
}

/// An adapter with its image, and all files of its directory.
#[derive(Debug)]
pub(crate) struct Parsed {
    planned: Planned,
    adapter: Arc<Adapter>,
    files: Arc<[Opened]>,
}

impl Directory {
    /// Reads the configuration and the headers of the weight files, and plans the image.
    pub(crate) fn open(
        path: &Path,
        opener: Opener,
        orientation: Option<Orientation>,
        model: &Model,
        dtype: DType,
    ) -> Result<(Self, Arc<Parsed>), AdapterError> {
        let (adapter, files) = load(path, &opener, orientation)?;
        let stamps = files.iter().map(|file| file.stamp.clone()).collect();
        let parsed = Parsed::plan(&adapter, &files, model, dtype)?;
        let (path, model) = (path.to_owned(), model.clone());
        let kept = Arc::default();
        let directory = Self { path, opener, orientation, model, dtype, files: stamps, kept };
        directory.keep(&parsed);
        Ok((directory, parsed))
    }

    /// The same directory, for another rank of the model.
    pub(crate) fn shard(&self, model: &Model) -> Result<(Self, Arc<Parsed>), AdapterError> {
        let own = self.parsed()?;
        let parsed = Parsed::plan(own.adapter(), &own.files, model, self.dtype)?;
        let directory = Self { model: model.clone(), kept: Arc::default(), ..self.clone() };
        directory.keep(&parsed);
        Ok((directory, parsed))
    }

    /// Calls `read` with the adapter and its image. Rejects files that are not those that were checked, or are modified
    /// meanwhile.
    pub(crate) fn read<R>(&self, read: impl FnOnce(&Planned) -> Result<R, LoadError>) -> Result<R, LoadError> {
        let parsed = self.parsed()?;
        let read = read(&parsed.planned);
        parsed.check()?;
        read
    }

    /// The adapter of the files that were checked. Each of its weights is read when it is written. It stays for the next
    /// read.
    pub(crate) fn parsed(&self) -> Result<Arc<Parsed>, AdapterError> {
        let kept = lock(&self.kept).take();
        // What was changed gives the errors of any other damage.
        let kept = kept.filter(|parsed| parsed.files.iter().all(Opened::is_in_place));
        let parsed = kept.map_or_else(|| self.parse(), Ok)?;
        self.keep(&parsed);
        Ok(parsed)
    }

    fn parse(&self) -> Result<Arc<Parsed>, AdapterError> {
        let (adapter, files) = load(&self.path, &self.opener, self.orientation)?;
        match files.iter().find(|file| !self.files.contains(&file.stamp)) {
            Some(file) => Err(AdapterError::Changed { path: file.stamp.path.clone() }),
            None => Parsed::plan(&adapter, &files, &self.model, self.dtype),
        }
    }

    /// Keeps what was parsed for the next read, in place of the least recently used directory.
    fn keep(&self, parsed: &Arc<Parsed>) {
        // With an index, another file may take its place.
        if parsed.files.len() > 2 {
            return;
        }
        *lock(&self.kept) = Some(Arc::clone(parsed));
        let kept = Arc::downgrade(&self.kept);
        // Stacks are of many modules, and a rank may have few of an adapter's.
        let modules = parsed.adapter().modules().len().max(parsed.image().entries().len());
        let mut recent = lock(&RECENT);
        recent.retain(|(other, _)| !other.ptr_eq(&kept) && other.strong_count() > 0);
        recent.push_back((kept, modules));
        let stay = num_kept(recent.iter().rev().map(|(_, modules)| *modules));
        let gone = recent.len() - stay;
        let oldest: Vec<_> = recent.drain(..gone).collect();
        drop(recent);
        oldest.iter().filter_map(|(oldest, _)| oldest.upgrade()).for_each(|oldest| drop(lock(&oldest).take()));
    }

    /// Whether the directory stays parsed.
    #[cfg(test)]
    pub(crate) fn is_kept(&self) -> bool {
        lock(&self.kept).is_some()
    }
}

impl Parsed {
    fn plan(
        adapter: &Arc<Adapter>,
        files: &Arc<[Opened]>,
        model: &Model,
        dtype: DType,
    ) -> Result<Arc<Self>, AdapterError> {
        let planned = Planned::new(Arc::clone(adapter), model, dtype);
        // The plan of experts reads some of their factors.
        files.iter().try_for_each(Opened::check)?;
        Ok(Arc::new(Self { planned: planned?, adapter: Arc::clone(adapter), files: Arc::clone(files) }))
    }

    pub(crate) fn image(&self) -> &SlotImage<'_> {
        self.planned.image()
    }

    /// The adapter in the directory.
    pub(crate) fn adapter(&self) -> &Arc<Adapter> {
        &self.adapter
    }

    /// Rejects files that have been modified since they were opened.
    pub(crate) fn check(&self) -> Result<(), AdapterError> {
        self.files.iter().try_for_each(Opened::check)
    }
}

/// The adapter in a directory, and all files of it.
fn load(
    path: &Path,
    opener: &Opener,
    orientation: Option<Orientation>,
) -> Result<(Arc<Adapter>, Arc<[Opened]>), AdapterError> {
    let (adapter, files) = Adapter::load(path, Access::InPlace, opener)?;
    Ok((Arc::new(Adapter { orientation, ..adapter }), files.into()))
}

/// How many directories stay parsed, of those with these numbers of modules, from the most recently used one on.
fn num_kept(modules: impl Iterator<Item = usize>) -> usize {
    let totals = modules.scan(0, |total, modules| {
        *total += modules;
        Some(*total)
    });
    totals.take(KEPT).take_while(|total| *total <= KEPT_MODULES).count()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave what they hold half-changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::{
        fs::{self, File},
        io::Write as _,
        time::Duration,
    };

    use super::*;
    use crate::model::{Linear, ModelSpec, Parallel, TpRank};

    const CONFIG: &str = "adapter_config.json";
    const WEIGHTS: &str = "adapter_model.safetensors";

    fn write(dir: &Path) {
        fs::write(dir.join(CONFIG), r#"{"peft_type": "LORA", "lora_alpha": 1}"#).unwrap();
        let ones = bytemuck::cast_slice(&[1.0_f32; 16]);
        let view = |shape| safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, ones).unwrap();
        let views = [("m.lora_A.weight", view(vec![8, 2])), ("m.lora_B.weight", view(vec![2, 8]))];
        safetensors::serialize_to_file(views, None, &dir.join(WEIGHTS)).unwrap();
    }

    /// A model of the module that `write` writes.
    fn model(rank: TpRank) -> Model {
        let mut spec = ModelSpec::new();
        spec.linear(Linear::new("", Parallel::Column, 2).slice("m", 2)).unwrap();
        spec.shard(rank).unwrap()
    }

    fn open(dir: &Path) -> Directory {
        Directory::open(dir, Opener::default(), None, &model(TpRank::SINGLE), DType::F32).unwrap().0
    }

    /// A file that is changed, replaced or gone is an error of the next read, whether or not the directory is parsed
    /// anew for it.
    #[test]
    fn changes_between_reads_are_refused() {
        let touch = |path: &Path| {
            let file = File::options().write(true).open(path).unwrap();
            file.set_modified(file.metadata().unwrap().modified().unwrap() + Duration::from_millis(1)).unwrap();
        };
        let replace = |path: &Path| {
            fs::copy(path, path.with_extension("new")).unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        };
        // As `rsync -t` does.
        let replace_with_time = |path: &Path| {
            let modified = fs::metadata(path).unwrap().modified().unwrap();
            replace(path);
            File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
        };
        let lengthen = |path: &Path| {
            let modified = fs::metadata(path).unwrap().modified().unwrap();
            let mut file = File::options().append(true).open(path).unwrap();
            file.write_all(b" ").unwrap();
            file.set_modified(modified).unwrap();
        };
        let remove = |path: &Path| fs::remove_file(path).unwrap();
        // As Kubernetes updates a volume.
        let link = |path: &Path| {
            fs::copy(path, path.with_extension("new")).unwrap();
            remove(path);
            std::os::unix::fs::symlink(path.with_extension("new"), path).unwrap();
        };
        let changes: [&dyn Fn(&Path); 6] = [&touch, &replace, &replace_with_time, &lengthen, &remove, &link];
        for (file, change, keeps) in [CONFIG, WEIGHTS]
            .iter()
            .flat_map(|file| changes.iter().flat_map(move |change| [true, false].map(|keeps| (file, change, keeps))))
        {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path());
            let directory = open(dir.path());
            directory.read(|_| Ok(())).unwrap();
            assert!(directory.is_kept());
            if !keeps {
                lock(&directory.kept).take();
            }
            change(&dir.path().join(file));
            for _ in 0..2 {
                let error = directory.read(|_| Ok(())).unwrap_err();
                let LoadError::Adapter(
                    AdapterError::Changed { .. }
                    | AdapterError::Read { .. }
                    | AdapterError::NoConfig { .. }
                    | AdapterError::NoWeights { .. }
                    | AdapterError::Safetensors { .. },
                ) = error
                else {
                    unreachable!("{error}")
                };
                assert!(!directory.is_kept());
            }
        }
    }

    /// A single file would be read instead of the index, so that one put beside it is a change of the directory.
    #[test]
    fn a_file_beside_an_index_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let shard = "adapter_model-00001-of-00001.safetensors";
        fs::rename(dir.path().join(WEIGHTS), dir.path().join(shard)).unwrap();
        let map = ["m.lora_A.weight", "m.lora_B.weight"].map(|key| format!(r#""{key}": "{shard}""#)).join(", ");
        let index = format!(r#"{{"weight_map": {{{map}}}}}"#);
        fs::write(dir.path().join(format!("{WEIGHTS}.index.json")), index).unwrap();
        let directory = open(dir.path());
        directory.read(|_| Ok(())).unwrap();
        fs::copy(dir.path().join(shard), dir.path().join(WEIGHTS)).unwrap();
        let error = directory.read(|_| Ok(())).unwrap_err();
        assert!(matches!(error, LoadError::Adapter(AdapterError::Changed { .. })), "{error}");
    }

    /// Elements that are converted when they are packed are those that are converted at once, also where a rank has the
    /// last of them alone.
    #[test]
    fn elements_are_converted_in_place() {
        let doubles: Vec<u8> = (0..16).flat_map(|i| (f64::from(i) / 7.0).to_le_bytes()).collect();
        let bytes: Vec<u8> = (0..16).map(|i| 11 * i).collect();
        for (dtype, values) in [(safetensors::Dtype::F64, doubles), (safetensors::Dtype::F8_E4M3, bytes)] {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path());
            let view = |shape| safetensors::tensor::TensorView::new(dtype, shape, &values).unwrap();
            let views = [("m.lora_A.weight", view(vec![8, 2])), ("m.lora_B.weight", view(vec![2, 8]))];
            safetensors::serialize_to_file(views, None, &dir.path().join(WEIGHTS)).unwrap();
            let write = |planned: &Planned| {
                let image = planned.image();
                let mut block = vec![0; image.bytes()];
                image.write_to(&mut block)?;
                Ok(block)
            };
            let (whole, at_once) = (open(dir.path()), Arc::new(Adapter::open(dir.path()).unwrap()));
            let packed = whole.read(write).unwrap();
            for rank in [TpRank::SINGLE, TpRank::new(0, 2).unwrap(), TpRank::new(1, 2).unwrap()] {
                let (directory, _) = whole.shard(&model(rank)).unwrap();
                let at_once = Planned::new(Arc::clone(&at_once), &model(rank), DType::F32).unwrap();
                assert_eq!(directory.read(write).unwrap(), write(&at_once).unwrap(), "{dtype:?}");
                // Each has a plan of its own.
                assert_eq!(whole.read(write).unwrap(), packed);
            }
        }
    }

    #[test]
    fn few_directories_stay_of_many_modules() {
        assert_eq!(num_kept([1; KEPT + 1].into_iter()), KEPT);
        assert_eq!(num_kept([KEPT_MODULES - 2, 1, 1, 1].into_iter()), 3);
        assert_eq!(num_kept([KEPT_MODULES + 1, 1].into_iter()), 0);
    }

    /// However many directories there are, few of them stay parsed, and the others are parsed again.
    #[test]
    fn few_directories_stay_parsed() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let directories: Vec<_> = (0..KEPT + 10).map(|_| open(dir.path())).collect();
        assert!(directories.iter().filter(|directory| directory.is_kept()).count() <= KEPT);
        assert!(!directories[0].is_kept());
        directories[0].read(|_| Ok(())).unwrap();
        assert!(directories.iter().filter(|directory| directory.is_kept()).count() <= KEPT);
    }
}
