//! Checkpoints and adapters to damage.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Map, Value};
use tempfile::TempDir;

/// A folder of files to damage.
pub(crate) struct Files(pub(crate) TempDir);

impl Files {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("there is a place for temporary files"))
    }

    pub(crate) fn copy(&self, from: &Path, name: &str) -> PathBuf {
        let to = self.0.path().join(name);
        fs::create_dir_all(&to).expect("the folder can be made");
        for entry in fs::read_dir(from).expect("the fixture is there") {
            let entry = entry.expect("the fixture can be listed");
            fs::copy(entry.path(), to.join(entry.file_name())).expect("the fixture can be copied");
        }
        to
    }
}

pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let text = fs::read_to_string(path).expect("the file is there");
    let mut value = serde_json::from_str(&text).expect("the file is a JSON object");
    change(&mut value);
    fs::write(path, Value::from(value).to_string()).expect("the file can be written");
}

pub(crate) type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

pub(crate) fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).expect("the file is there");
    let file = SafeTensors::deserialize(&bytes).expect("the file is whole");
    file.iter().map(|(name, view)| (name.into(), (view.dtype(), view.shape().into(), view.data().into()))).collect()
}

pub(crate) fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("the shape is right"))
    });
    safetensors::serialize_to_file(views, None, path).expect("the file can be written");
}
