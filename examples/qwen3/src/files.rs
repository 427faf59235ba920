//! Reading input files and writing the output file safely, whatever the paths point to.
//!
//! Invariant: only regular files are read, text only up to a limit. The output replaces nothing.

use std::{
    fs::{self, File, Metadata},
    io::{self, Read as _, Write as _},
    os::unix::fs::FileExt as _,
    path::Path,
};

use crate::error::{Context, Result, bail};

/// Opens a regular file. A pipe or a device may never end.
///
/// # Errors
///
/// If it is something else than a regular file or a pointer of Git LFS, or cannot be opened.
pub fn open(path: &Path) -> Result<File> {
    let regular = |metadata: Metadata| match metadata.is_file() {
        true => Ok(()),
        false => Err(io::Error::other("it is not a regular file")),
    };
    // Check before opening, because opening a pipe waits for its other end.
    fs::metadata(path).and_then(regular).context(path.display())?;
    let file = File::open(path).context(path.display())?;
    file.metadata().and_then(regular).context(path.display())?;
    let pointer = b"version https://git-lfs";
    let mut first = [0; 23];
    if file.read_at(&mut first, 0).is_ok() && first == *pointer {
        bail!("{}: it is a pointer of Git LFS, which `git lfs pull` replaces by the file", path.display());
    }
    Ok(file)
}

/// Reads a text of at most `max_mib` MiB.
///
/// # Errors
///
/// If the file is longer, cannot be read, or is not UTF-8.
pub fn read_text(path: &Path, max_mib: u64) -> Result<String> {
    let file = open(path)?;
    let bytes = file.metadata().context(path.display())?.len();
    if bytes > max_mib << 20 {
        bail!("{}: it has {bytes} bytes; {max_mib} MiB are the most", path.display());
    }
    let mut text = String::new();
    file.take(max_mib << 20).read_to_string(&mut text).context(path.display())?;
    Ok(text)
}

/// Refuses an output that is there already.
pub(crate) fn check_output(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(_) => bail!("{}: it is there, and is not replaced", path.display()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).context(path.display()),
    }
}

/// Writes a file that is not there yet.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    File::create_new(path).and_then(|mut file| file.write_all(bytes)).context(path.display())
}
