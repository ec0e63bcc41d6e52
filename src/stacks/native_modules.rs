//! The shared objects of the process with their unwind tables, as framehop wants them.
//!
//! Must not know about stacks. The tables are not copied: they lie in the mapped files themselves, and
//! only those of objects that have code on the stack being unwound are read, which cannot be unloaded
//! meanwhile. Invariant: a list is used only while the loader's counters say that it is current.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use framehop::x86_64::UnwinderX86_64;
use framehop::{ExplicitModuleSectionInfo, Module, MustNotAllocateDuringUnwind, Unwinder};
use parking_lot::{Mutex, RwLock};

type Tables = UnwinderX86_64<&'static [u8], MustNotAllocateDuringUnwind>;

/// How often the loader has loaded and unloaded something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    adds: u64,
    subs: u64,
}

/// One state of the process.
pub struct Modules {
    pub counters: Counters,
    pub tables: Tables,
    /// Code of this library itself, whose frames nobody wants to see; empty if it is the program.
    pub own: (u64, u64),
    known: Vec<(u64, Module<&'static [u8]>)>,
}

static CURRENT: RwLock<Option<Arc<Modules>>> = RwLock::new(None);
static REBUILD: Mutex<()> = Mutex::new(());

/// The loader's counters; some tens of nanoseconds.
pub fn counters() -> Counters {
    unsafe extern "C" fn first(info: *mut libc::dl_phdr_info, size: usize, out: *mut c_void) -> c_int {
        if size >= size_of::<libc::dl_phdr_info>() {
            // SAFETY: the loader lends `info` for the call, and `out` is the caller's `Counters`.
            unsafe {
                let counters = Counters { adds: (*info).dlpi_adds, subs: (*info).dlpi_subs };
                out.cast::<Counters>().write(counters);
            }
        }
        1
    }
    let mut counters = Counters::default();
    // SAFETY: `first` writes to `counters` only, and returns at the first object.
    unsafe { libc::dl_iterate_phdr(Some(first), (&raw mut counters).cast()) };
    counters
}

/// The list for these counters, made anew if the loader has moved on. Allocates; not for the hot path.
#[cold]
pub fn current(counters: Counters) -> Arc<Modules> {
    let fresh = || CURRENT.read().as_ref().filter(|modules| modules.counters == counters).cloned();
    if let Some(modules) = fresh() {
        return modules;
    }
    let _one_at_a_time = REBUILD.lock();
    if let Some(modules) = fresh() {
        return modules;
    }
    let old = CURRENT.read().clone();
    let modules = Arc::new(build(old.as_deref()));
    *CURRENT.write() = Some(modules.clone());
    modules
}

/// What `dl_iterate_phdr` says of one object.
struct Object {
    base: u64,
    name: String,
    segments: Vec<libc::Elf64_Phdr>,
}

fn build(old: Option<&Modules>) -> Modules {
    unsafe extern "C" fn each(info: *mut libc::dl_phdr_info, _: usize, out: *mut c_void) -> c_int {
        // SAFETY: the loader lends `info` and its program headers for the call; `out` is `found` below.
        unsafe {
            let (info, out) = (&*info, &mut *out.cast::<(Counters, Vec<Object>)>());
            out.0 = Counters { adds: info.dlpi_adds, subs: info.dlpi_subs };
            let name = if info.dlpi_name.is_null() {
                String::new()
            } else {
                std::ffi::CStr::from_ptr(info.dlpi_name).to_string_lossy().into_owned()
            };
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            out.1.push(Object { base: info.dlpi_addr, name, segments: headers.to_vec() });
        }
        0
    }
    let mut found = (Counters::default(), Vec::<Object>::new());
    // SAFETY: `each` writes to `found` only.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut found).cast()) };
    let (counters, objects) = found;

    let unloaded = old.is_none_or(|old| old.counters.subs != counters.subs);
    let mut tables = Tables::new();
    let mut known = Vec::with_capacity(objects.len());
    let mut own = (0, 0);
    let here = build as *const () as u64;
    for (index, object) in objects.into_iter().enumerate() {
        let Some((start, end)) = object.code() else { continue };
        if index != 0 && (start..end).contains(&here) {
            own = (start, end);
        }
        // While nothing was unloaded, an address still means the same object.
        let again = old.filter(|_| !unloaded).and_then(|old| {
            let known = old.known.binary_search_by_key(&start, |(start, _)| *start).ok()?;
            Some(old.known[known].1.clone())
        });
        let Some(module) = again.or_else(|| object.module()) else { continue };
        tables.add_module(module.clone());
        known.push((start, module));
    }
    known.sort_by_key(|(start, _)| *start);
    Modules { counters, tables, own, known }
}

impl Object {
    /// The range of the executable segment.
    fn code(&self) -> Option<(u64, u64)> {
        let code = self.segments.iter().find(|s| s.p_type == libc::PT_LOAD && s.p_flags & libc::PF_X != 0)?;
        Some((self.base + code.p_vaddr, self.base + code.p_vaddr + code.p_memsz))
    }

    /// Memory of this object from `address` (unrelocated) to the end of the segment that holds it.
    fn memory(&self, address: u64) -> Option<&'static [u8]> {
        let segment = self.segments.iter().find(|s| {
            s.p_type == libc::PT_LOAD
                && s.p_flags & libc::PF_R != 0
                && (s.p_vaddr..s.p_vaddr + s.p_filesz).contains(&address)
        })?;
        let length = (segment.p_vaddr + segment.p_filesz - address) as usize;
        // SAFETY: a readable segment is mapped for its whole file size while the object is loaded. The
        // lifetime is a promise of this file's head: the bytes are read only while it is.
        Some(unsafe { std::slice::from_raw_parts((self.base + address) as *const u8, length) })
    }

    fn module(&self) -> Option<Module<&'static [u8]>> {
        let index = self.segments.iter().find(|s| s.p_type == libc::PT_GNU_EH_FRAME)?;
        let index_at = index.p_vaddr;
        let index_bytes = self.memory(index_at)?.get(..index.p_memsz as usize)?;
        let frames_at = eh_frame_address(index_bytes, index_at)?;
        let frames = self.memory(frames_at)?;
        let (start, end) = self.code()?;
        let code_at = start - self.base;
        let code = self.memory(code_at);
        let sections = ExplicitModuleSectionInfo {
            base_svma: 0,
            text_svma: Some(code_at..end - self.base),
            text: code,
            eh_frame_svma: Some(frames_at..frames_at + frames.len() as u64),
            eh_frame: Some(frames),
            eh_frame_hdr_svma: Some(index_at..index_at + index_bytes.len() as u64),
            eh_frame_hdr: Some(index_bytes),
            ..ExplicitModuleSectionInfo::default()
        };
        Some(Module::new(self.name.clone(), start..end, self.base, sections))
    }
}

/// Where `.eh_frame` begins, as `.eh_frame_hdr` (at `at`) says. Only the encodings that linkers write.
fn eh_frame_address(index: &[u8], at: u64) -> Option<u64> {
    const VERSION: u8 = 1;
    const PC_RELATIVE_4_BYTES: [u8; 2] = [0x1b, 0x0b];
    if index.len() < 12 || index[0] != VERSION || !PC_RELATIVE_4_BYTES.contains(&index[1]) {
        return None;
    }
    let offset = i32::from_le_bytes([index[4], index[5], index[6], index[7]]);
    at.checked_add(4)?.checked_add_signed(offset.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_and_its_libraries_are_found() {
        let modules = current(counters());
        let here = build as *const () as u64;
        let libc = libc::malloc as *const () as u64;
        for address in [here, libc] {
            assert!(modules.known.iter().any(|(_, module)| module.avma_range().contains(&address)));
        }
        assert_eq!(modules.own, (0, 0), "the test is the program itself");
        assert!(Arc::ptr_eq(&modules, &current(modules.counters)));
    }

    #[test]
    fn the_index_states_where_the_frames_begin() {
        let index = [1, 0x1b, 3, 0x3b, 0xfc, 0xff, 0xff, 0xff, 0, 0, 0, 0];
        assert_eq!(eh_frame_address(&index, 0x1000), Some(0x1000));
        assert_eq!(eh_frame_address(&index[..8], 0x1000), None);
        assert_eq!(eh_frame_address(&[9; 12], 0x1000), None);
    }
}
