//! The folder below which clients name adapters.
//!
//! Invariant: no file outside it is opened, wherever links lead when, and whoever changes them meanwhile.

use std::{
    fs::File,
    io,
    os::fd::OwnedFd,
    path::{self, Component, Path, PathBuf},
    sync::Arc,
};

use aril::adapter::Opener;
use rustix::{
    fs::{Mode, OFlags, ResolveFlags, open, openat2},
    io::Errno,
};

use super::error::{ApiError, ApiResult};

/// What is said of anything else.
const OUTSIDE: &str = "is not below the server's --lora-root";

/// The folder, which stays open.
#[derive(Clone, Debug)]
pub(super) struct Root {
    /// As it was given, absolute. It may lead through links.
    given: PathBuf,
    /// Without links.
    path: PathBuf,
    folder: Arc<OwnedFd>,
}

impl Root {
    pub(super) fn open(given: &Path) -> io::Result<Self> {
        let path = given.canonicalize()?;
        let folder = open(&path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let root = Self { given: path::absolute(given)?, path, folder: Arc::new(folder) };
        // Systems without `openat2` say so now.
        root.beneath(Path::new("."), OFlags::PATH)?;
        Ok(root)
    }

    /// Its path without links.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder that a client names, by a path below the root or by an absolute one.
    pub(super) fn folder(&self, named: &Path) -> ApiResult<PathBuf> {
        let missing = |error| ApiError::of_file(&error, format!("No adapter found for '{}'.", named.display()));
        let below =
            [&self.given, &self.path].into_iter().find_map(|root| named.strip_prefix(root).ok()).unwrap_or(named);
        // Before anything is looked at: the answer does not tell what is elsewhere.
        if !below.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            return Err(ApiError::bad_request(format!("'{}' {OUTSIDE}.", named.display())));
        }
        let dir = self.path.join(below);
        if !dir.canonicalize().map_err(missing)?.starts_with(&self.path) {
            return Err(ApiError::bad_request(format!("'{}' {OUTSIDE}.", named.display())));
        }
        Ok(dir)
    }

    /// Opens files whose paths lead below the root.
    pub(super) fn opener(&self) -> Opener {
        let root = self.clone();
        Opener::new(move |path| root.open_file(path))
    }

    fn open_file(&self, path: &Path) -> io::Result<File> {
        // Links may lead to anything below the root, also by absolute paths. What they lead to has none.
        let real = path.canonicalize()?;
        let below = real.strip_prefix(&self.path).map_err(|_| io::Error::other(format!("it {OUTSIDE}")))?;
        // A pipe is opened without waiting for its other end.
        self.beneath(below, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY).map(File::from)
    }

    /// Opens what a path leads to without a link, and without leaving the root.
    fn beneath(&self, below: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        openat2(&self.folder, below, flags | OFlags::CLOEXEC, Mode::empty(), resolve).map_err(|error| match error {
            Errno::LOOP | Errno::XDEV | Errno::AGAIN => io::Error::other("what leads to it changes meanwhile"),
            error => error.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::symlink,
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::*;

    /// A link that changes all the time never leads out of the root.
    #[test]
    fn a_link_that_is_flipped_stays_below() {
        let dir = tempfile::tempdir().expect("there is a place for temporary files");
        let dir = dir.path().canonicalize().expect("it is there");
        let [inside, outside] = ["root/inside", "outside"].map(|name| dir.join(name));
        for (folder, text) in [(&inside, "inside"), (&outside, "outside")] {
            fs::create_dir_all(folder).expect("a folder can be made");
            fs::write(folder.join("file"), text).expect("a file can be written");
        }
        let root = Root::open(&dir.join("root")).expect("the root is a folder");
        let (link, next, is_done) = (dir.join("root/link"), dir.join("root/next"), AtomicBool::new(false));
        symlink(&inside, &link).expect("a link can be made");
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    for folder in [&outside, &inside] {
                        symlink(folder, &next).expect("a link can be made");
                        fs::rename(&next, &link).expect("a link can be replaced");
                    }
                }
            });
            let mut opened = 0;
            for _ in 0..20_000 {
                let Ok(file) = root.open_file(&link.join("file")) else { continue };
                opened += 1;
                assert_eq!(io::read_to_string(file).expect("it is read"), "inside");
            }
            is_done.store(true, Ordering::Relaxed);
            assert!(opened > 0, "the link never led below");
        });
    }
}
