//! Source lines of native addresses, out of the debugging information of the program's own files.
//!
//! Must not be called while a stack is captured: it reads files. Must not know whose files are worth it: big
//! libraries take seconds. Invariants: a file is mapped once and stays mapped, because what was read of it
//! refers to it; a file without (or with compressed) debugging information has no lines.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use addr2line::Context;
use addr2line::gimli::{Dwarf, EndianSlice, RunTimeEndian, SectionId};
use object::{Object, ObjectSection};
use parking_lot::Mutex;

use super::native_symbols::Mapped;

type Bytes = EndianSlice<'static, RunTimeEndian>;

/// More debugging information than this is not read.
const LARGEST: u64 = 512 << 20;

static KNOWN: Mutex<Option<HashMap<PathBuf, Option<Context<Bytes>>>>> = Mutex::new(None);

/// A function at an address, and the place in the source where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// As the linker knows it.
    pub function: Option<String>,
    pub source: Option<(Arc<str>, u32)>,
}

/// Whether nobody holds what is known for longer than `patience`.
pub fn answers(patience: std::time::Duration) -> bool {
    KNOWN.try_lock_for(patience).is_some()
}

/// What lies at an address as the file's own tables name it (unrelocated): functions that were put into their
/// caller first, then the one that the symbol table knows. Empty where nothing is known.
pub fn lines(path: &Path, address: u64) -> Vec<Line> {
    let mut known = KNOWN.lock();
    let context = known.get_or_insert_default().entry(path.to_owned()).or_insert_with(|| open(path));
    let Some(Ok(mut frames)) = context.as_ref().map(|c| c.find_frames(address).skip_all_loads()) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    while let Ok(Some(frame)) = frames.next() {
        let function = frame.function.and_then(|name| Some(name.raw_name().ok()?.into_owned()));
        let source = frame.location.and_then(|at| Some((at.file?.into(), at.line.filter(|line| *line > 0)?)));
        found.push(Line { function, source });
    }
    found
}

fn open(path: &Path) -> Option<Context<Bytes>> {
    // The program's own path may be relative or gone; the kernel knows it.
    let map = Mapped::open(path).or_else(|| Mapped::open(Path::new("/proc/self/exe")))?;
    let elf = object::File::parse(map.forever()).ok()?;
    let size: u64 =
        elf.sections().filter(|s| s.name().is_ok_and(|n| n.starts_with(".debug_"))).map(|s| s.size()).sum();
    if size == 0 || size > LARGEST {
        return None;
    }
    let endian = if elf.is_little_endian() { RunTimeEndian::Little } else { RunTimeEndian::Big };
    let load = |id: SectionId| -> Result<Bytes, addr2line::gimli::Error> {
        let section = elf.section_by_name(id.name());
        // What is compressed cannot be borrowed from the file.
        let plain = section
            .filter(|s| s.compressed_file_range().is_ok_and(|r| r.format == object::CompressionFormat::None));
        Ok(EndianSlice::new(plain.and_then(|s| s.data().ok()).unwrap_or(&[]), endian))
    };
    Context::from_dwarf(Dwarf::load(load).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_line_of_this_file() {
        let path = std::env::current_exe().unwrap();
        let bytes = Mapped::open(&path).unwrap().forever();
        let elf = object::File::parse(bytes).unwrap();
        use object::ObjectSymbol;
        let own = elf
            .symbols()
            .find(|s| s.name().is_ok_and(|n| n.contains("this_line_of_this_file") && s.size() > 0));
        let found = lines(&path, own.unwrap().address());
        let files: Vec<_> = found.iter().filter_map(|line| line.source.as_ref()).map(|at| &*at.0).collect();
        assert!(
            files.iter().any(|file| file.ends_with("native_lines.rs") || file.ends_with("function.rs")),
            "{found:?}"
        );
        // Functions that the linker dropped lie at 0 in the tables, so not there.
        assert_eq!(lines(&path, u64::MAX / 2), []);
    }
}
