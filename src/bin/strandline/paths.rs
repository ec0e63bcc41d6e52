//! Where the library lies, and how a program is found on PATH.

use std::path::{Path, PathBuf};

const LIBRARY: &str = "libstrandline.so";

/// The library to preload: `STRANDLINE_LIB`, else beside the command, in `../lib`, or in a wheel's package.
pub fn library() -> Result<PathBuf, String> {
    if let Some(given) = std::env::var_os("STRANDLINE_LIB") {
        let path = PathBuf::from(given);
        return match path.canonicalize() {
            Ok(path) if path.is_file() => Ok(path),
            _ => Err(format!(
                "STRANDLINE_LIB={} is not a file; name the {LIBRARY} that was built",
                path.display()
            )),
        };
    }
    let me = std::env::current_exe()
        .and_then(|p| p.canonicalize())
        .map_err(|e| format!("cannot find myself: {e}"))?;
    let folder = me.parent().unwrap_or(Path::new("/"));
    let places =
        [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY), folder.join("deps").join(LIBRARY)];
    places.iter().find_map(|p| p.canonicalize().ok().filter(|p| p.is_file())).ok_or_else(|| {
        format!(
            "{LIBRARY} is neither beside {} nor in ../lib; build it (cargo build --release) or name it in STRANDLINE_LIB",
            me.display()
        )
    })
}

/// What a shell would run for `program`: a path as it is, a bare name by PATH.
pub fn program(program: &std::ffi::OsStr) -> Option<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 || program.as_encoded_bytes().contains(&b'/') {
        return path.exists().then(|| path.to_path_buf());
    }
    let found = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&found).map(|folder| folder.join(path)).find(|file| file.is_file())
}
