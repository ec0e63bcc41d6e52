//! Files of a report: written aside and renamed, so that a reader never sees half of one.
//!
//! Must not know: what they contain.
//! Invariant: files are 0600 unless they are meant for others, folders made here 0700; an error names the path and
//! what to do.

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Why a file was not written.
#[derive(Debug)]
pub struct NotWritten {
    path: PathBuf,
    error: io::Error,
}

impl fmt::Display for NotWritten {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let remedy = match self.error.kind() {
            io::ErrorKind::PermissionDenied => "give a folder you may write to with --out DIR",
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "the disk is full: make room, or choose another with --out DIR"
            }
            io::ErrorKind::ReadOnlyFilesystem => {
                "the file system is read-only: choose another folder with --out DIR"
            }
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "a file is in the way: move it, or choose another folder with --out DIR"
            }
            _ => "choose another folder with --out DIR",
        };
        write!(f, "cannot write {}: {}; {remedy}", self.path.display(), self.error)
    }
}

impl std::error::Error for NotWritten {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// Makes `folder` (0700) if it is not there.
pub fn folder(folder: &Path) -> Result<(), NotWritten> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(|error| NotWritten { path: folder.to_owned(), error })
}

/// Whether files can be written into `folder`, which is made if it is not there: found out by writing one.
pub fn try_folder(folder: &Path) -> Result<(), NotWritten> {
    let tried = file(folder, &format!(".can-write-{}", std::process::id()), b"?");
    let removed =
        tried.and_then(|probe| fs::remove_file(&probe).map_err(|error| NotWritten { path: probe, error }));
    // The file has no meaning to anybody: the folder is what cannot be written.
    removed.map_err(|error| NotWritten { path: folder.to_owned(), ..error })
}

/// Writes `folder/name`, replacing what was there at once.
pub fn file(folder: &Path, name: &str, contents: &[u8]) -> Result<PathBuf, NotWritten> {
    with_mode(folder, name, contents, 0o600)
}

/// Like [`file`], readable for everybody whom the umask lets: for files that another user's program collects.
pub fn public_file(folder: &Path, name: &str, contents: &[u8]) -> Result<PathBuf, NotWritten> {
    with_mode(folder, name, contents, 0o644)
}

fn with_mode(folder: &Path, name: &str, contents: &[u8], mode: u32) -> Result<PathBuf, NotWritten> {
    static ASIDE: AtomicU32 = AtomicU32::new(0);
    self::folder(folder)?;
    let path = folder.join(name);
    let number = ASIDE.fetch_add(1, Ordering::Relaxed);
    let aside = folder.join(format!(".{name}.{}-{number}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&aside)
        .and_then(|mut file| file.write_all(contents))
        .and_then(|()| fs::rename(&aside, &path));
    match written {
        Ok(()) => Ok(path),
        Err(error) => {
            let _ = fs::remove_file(&aside);
            Err(NotWritten { path, error })
        }
    }
}
