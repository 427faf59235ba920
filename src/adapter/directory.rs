use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use super::{
    error::AdapterError,
    experts::Orientation,
    files::{Access, Opened, Opener, Stamp},
    open::Adapter,
};
use crate::error::LoadError;

/// Directories that stay parsed, of the whole process. All of them have one open file each.
const KEPT: usize = 64;

/// The modules and stacks of these directories, of which each takes some 1 KB.
const KEPT_MODULES: usize = 1 << 16;

/// The directories that stay parsed, from the least recently used one on, and their modules and stacks.
static RECENT: Mutex<VecDeque<(Weak<Kept>, usize)>> = Mutex::new(VecDeque::new());

/// What is left of a directory that was parsed.
type Kept = Mutex<Option<Arc<Parsed>>>;

/// A directory whose adapter has been checked, and is read later.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    opener: Opener,
    orientation: Option<Orientation>,
    files: Vec<Stamp>,
    kept: Arc<Kept>,
}

/// An adapter whose weights are read from open files, and all files of its directory.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) adapter: Adapter,
    files: Vec<Opened>,
}

impl Directory {
    /// Reads the configuration and the headers of the weight files. Returns the adapter without its weights, to be planned.
    pub(crate) fn open(
        path: &Path,
        opener: Opener,
        orientation: Option<Orientation>,
    ) -> Result<(Self, Arc<Parsed>), AdapterError> {
        let parsed = Parsed::load(path, &opener, orientation, Access::InPlace)?;
        let files = parsed.files.iter().map(|file| file.stamp.clone()).collect();
        Ok((Self { path: path.to_owned(), opener, orientation, files, kept: Arc::default() }, parsed))
    }

    /// Calls `pack` with the adapter. Rejects files that are not those that were checked, or are modified meanwhile.
    ///
    /// With `whole`, the weights are in memory. Otherwise each is read when it is written.
    pub(crate) fn read<R>(
        &self,
        whole: bool,
        pack: impl FnOnce(&Adapter) -> Result<R, LoadError>,
    ) -> Result<R, LoadError> {
        let parsed = self.parsed(whole)?;
        if !whole {
            self.keep(&parsed);
        }
        let packed = pack(&parsed.adapter);
        parsed.files.iter().try_for_each(Opened::check)?;
        packed
    }

    /// The adapter of the files that were checked.
    pub(crate) fn parsed(&self, whole: bool) -> Result<Arc<Parsed>, AdapterError> {
        let kept = lock(&self.kept).take().filter(|_| !whole);
        // What was changed gives the errors of any other damage.
        if let Some(parsed) = kept.filter(|parsed| parsed.files.iter().all(Opened::is_in_place)) {
            return Ok(parsed);
        }
        let access = if whole { Access::Copy } else { Access::InPlace };
        let parsed = Parsed::load(&self.path, &self.opener, self.orientation, access)?;
        match parsed.files.iter().find(|file| !self.files.contains(&file.stamp)) {
            Some(file) => Err(AdapterError::Changed { path: file.stamp.path.clone() }),
            None => Ok(parsed),
        }
    }

    /// Keeps what was parsed for the next read, in place of the least recently used directory.
    pub(crate) fn keep(&self, parsed: &Arc<Parsed>) {
        // With an index, another file may take its place.
        if parsed.files.len() > 2 {
            return;
        }
        *lock(&self.kept) = Some(Arc::clone(parsed));
        let kept = Arc::downgrade(&self.kept);
        let mut recent = lock(&RECENT);
        recent.retain(|(other, _)| !other.ptr_eq(&kept) && other.strong_count() > 0);
        recent.push_back((kept, parsed.adapter.modules().len() + parsed.adapter.stacks().len()));
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
    fn load(
        path: &Path,
        opener: &Opener,
        orientation: Option<Orientation>,
        access: Access,
    ) -> Result<Arc<Self>, AdapterError> {
        let (adapter, files) = Adapter::load(path, access, opener)?;
        Ok(Arc::new(Self { adapter: Adapter { orientation, ..adapter }, files }))
    }
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
    use crate::{
        DType,
        model::{Linear, ModelSpec, Parallel, TpRank},
    };

    const CONFIG: &str = "adapter_config.json";
    const WEIGHTS: &str = "adapter_model.safetensors";

    fn write(dir: &Path) {
        fs::write(dir.join(CONFIG), r#"{"peft_type": "LORA", "lora_alpha": 1}"#).unwrap();
        let ones = bytemuck::cast_slice(&[1.0_f32; 16]);
        let view = |shape| safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, ones).unwrap();
        let views = [("m.lora_A.weight", view(vec![8, 2])), ("m.lora_B.weight", view(vec![2, 8]))];
        safetensors::serialize_to_file(views, None, &dir.join(WEIGHTS)).unwrap();
    }

    /// A file that is changed, replaced or gone is an error of the next read, whether or not the directory is parsed anew for it.
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
        let changes: [&dyn Fn(&Path); 5] = [&touch, &replace, &replace_with_time, &lengthen, &remove];
        for (file, change, keeps) in [CONFIG, WEIGHTS]
            .iter()
            .flat_map(|file| changes.iter().flat_map(move |change| [true, false].map(|keeps| (file, change, keeps))))
        {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path());
            let (directory, parsed) = Directory::open(dir.path(), Opener::default(), None).unwrap();
            if keeps {
                directory.keep(&parsed);
            }
            assert_eq!(directory.is_kept(), keeps);
            directory.read(false, |_| Ok(())).unwrap();
            assert!(directory.is_kept());
            if !keeps {
                lock(&directory.kept).take();
            }
            change(&dir.path().join(file));
            for _ in 0..2 {
                let error = directory.read(false, |_| Ok(())).unwrap_err();
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
        for keeps in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            write(dir.path());
            let shard = "adapter_model-00001-of-00001.safetensors";
            fs::rename(dir.path().join(WEIGHTS), dir.path().join(shard)).unwrap();
            let map = ["m.lora_A.weight", "m.lora_B.weight"].map(|key| format!(r#""{key}": "{shard}""#)).join(", ");
            let index = format!(r#"{{"weight_map": {{{map}}}}}"#);
            fs::write(dir.path().join(format!("{WEIGHTS}.index.json")), index).unwrap();
            let (directory, parsed) = Directory::open(dir.path(), Opener::default(), None).unwrap();
            if keeps {
                directory.keep(&parsed);
            }
            directory.read(false, |_| Ok(())).unwrap();
            fs::copy(dir.path().join(shard), dir.path().join(WEIGHTS)).unwrap();
            let error = directory.read(false, |_| Ok(())).unwrap_err();
            assert!(matches!(error, LoadError::Adapter(AdapterError::Changed { .. })), "{error}");
        }
    }

    /// Doubles that are read when they are packed are those that are read at once, also where a rank has the last of them alone.
    #[test]
    fn doubles_are_read_in_place() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let values: Vec<u8> = (0..16).flat_map(|i| (f64::from(i) / 7.0).to_le_bytes()).collect();
        let view = |shape| safetensors::tensor::TensorView::new(safetensors::Dtype::F64, shape, &values).unwrap();
        let views = [("m.lora_A.weight", view(vec![8, 2])), ("m.lora_B.weight", view(vec![2, 8]))];
        safetensors::serialize_to_file(views, None, &dir.path().join(WEIGHTS)).unwrap();
        let mut spec = ModelSpec::new();
        spec.linear(Linear::new("", Parallel::Column, 2).slice("m", 2)).unwrap();
        let image = |adapter: &Adapter, rank: TpRank| {
            let image = adapter.plan(&spec.shard(rank).unwrap(), DType::F32).unwrap();
            let mut block = vec![0; image.bytes()];
            image.write_to(&mut block).unwrap();
            block
        };
        let (_, parsed) = Directory::open(dir.path(), Opener::default(), None).unwrap();
        let at_once = Adapter::open(dir.path()).unwrap();
        for rank in [TpRank::SINGLE, TpRank::new(0, 2).unwrap(), TpRank::new(1, 2).unwrap()] {
            assert_eq!(image(&parsed.adapter, rank), image(&at_once, rank));
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
        let directories: Vec<_> = (0..KEPT + 10)
            .map(|_| {
                let (directory, parsed) = Directory::open(dir.path(), Opener::default(), None).unwrap();
                directory.keep(&parsed);
                directory
            })
            .collect();
        assert!(directories.iter().filter(|directory| directory.is_kept()).count() <= KEPT);
        assert!(!directories[0].is_kept());
        directories[0].read(false, |_| Ok(())).unwrap();
        assert!(directories.iter().filter(|directory| directory.is_kept()).count() <= KEPT);
    }
}
