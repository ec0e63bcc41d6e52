//! The functions of CUDA that are replaced, and where the real ones are.
//!
//! Must not know what is done with a block. tests/test_cuda_names.py compares this list with CUDA's headers.
//! Invariant: an address that is called as the real function is never ours.

use crate::driver::loader::Library;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{driver_calls as driver, lookup, runtime_calls as runtime};

/// The newest version of CUDA whose functions of these names are known to take the arguments given here.
const KNOWN: c_int = 13_999;

/// A function of the driver that is replaced.
pub struct Hook {
    /// As libcuda exports it.
    pub name: &'static CStr,
    /// As `cuGetProcAddress` is asked for it.
    base: &'static str,
    /// The version of CUDA from which on `base` means this function.
    since: c_int,
    /// Whether it is the variant for per-thread default streams.
    per_thread: bool,
    real: AtomicUsize,
}

impl Hook {
    const fn new(name: &'static CStr, base: &'static str, since: c_int, per_thread: bool) -> Hook {
        Hook { name, base, since, per_thread, real: AtomicUsize::new(0) }
    }

    /// The address of the real function; `None` where the process has no libcuda with it.
    pub fn real(&self) -> Option<usize> {
        let known = self.real.load(Ordering::Relaxed);
        if known != 0 {
            return Some(known);
        }
        let found = libcuda().and_then(|library| library.find(self.name));
        // A program that is linked with libcuda under another file's name.
        let found = found.or_else(|| Library::NEXT.find(self.name))? as usize;
        if found == self.ours() {
            return None;
        }
        self.real.store(found, Ordering::Relaxed);
        Some(found)
    }

    /// `cuGetProcAddress` gave this address as the real function; the first one that is known stays.
    pub fn learn(&self, real: usize) {
        if self.real().is_none() && real != self.ours() {
            self.real.store(real, Ordering::Relaxed);
        }
    }

    /// The address of our function.
    pub fn ours(&self) -> usize {
        DRIVER.iter().position(|hook| std::ptr::eq(*hook, self)).map_or(0, |at| OURS[at]())
    }
}

macro_rules! hooks {
    ($($id:ident $name:literal $base:literal $since:literal $per_thread:literal => $ours:expr;)*) => {
        $(pub static $id: Hook = Hook::new($name, $base, $since, $per_thread);)*
        /// Every function of the driver that is replaced.
        pub static DRIVER: &[&Hook] = &[$(&$id),*];
        static OURS: &[fn() -> usize] = &[$(|| $ours as *const () as usize),*];
    };
}

hooks! {
    MEM_ALLOC c"cuMemAlloc_v2" "cuMemAlloc" 3020 false => driver::cuMemAlloc_v2;
    MEM_ALLOC_PITCH c"cuMemAllocPitch_v2" "cuMemAllocPitch" 3020 false => driver::cuMemAllocPitch_v2;
    MEM_FREE c"cuMemFree_v2" "cuMemFree" 3020 false => driver::cuMemFree_v2;
    MEM_ALLOC_MANAGED c"cuMemAllocManaged" "cuMemAllocManaged" 6000 false => driver::cuMemAllocManaged;
    MEM_ALLOC_HOST c"cuMemAllocHost_v2" "cuMemAllocHost" 3020 false => driver::cuMemAllocHost_v2;
    MEM_HOST_ALLOC c"cuMemHostAlloc" "cuMemHostAlloc" 2020 false => driver::cuMemHostAlloc;
    MEM_FREE_HOST c"cuMemFreeHost" "cuMemFreeHost" 2000 false => driver::cuMemFreeHost;
    MEM_ALLOC_ASYNC c"cuMemAllocAsync" "cuMemAllocAsync" 11020 false => driver::cuMemAllocAsync;
    MEM_ALLOC_ASYNC_PTSZ c"cuMemAllocAsync_ptsz" "cuMemAllocAsync" 11020 true => driver::cuMemAllocAsync_ptsz;
    MEM_ALLOC_FROM_POOL c"cuMemAllocFromPoolAsync" "cuMemAllocFromPoolAsync" 11020 false => driver::cuMemAllocFromPoolAsync;
    MEM_ALLOC_FROM_POOL_PTSZ c"cuMemAllocFromPoolAsync_ptsz" "cuMemAllocFromPoolAsync" 11020 true => driver::cuMemAllocFromPoolAsync_ptsz;
    MEM_FREE_ASYNC c"cuMemFreeAsync" "cuMemFreeAsync" 11020 false => driver::cuMemFreeAsync;
    MEM_FREE_ASYNC_PTSZ c"cuMemFreeAsync_ptsz" "cuMemFreeAsync" 11020 true => driver::cuMemFreeAsync_ptsz;
    GET_PROC_ADDRESS_V2 c"cuGetProcAddress_v2" "cuGetProcAddress" 12000 false => lookup::cuGetProcAddress_v2;
    GET_PROC_ADDRESS_V2_PTSZ c"cuGetProcAddress_v2_ptsz" "cuGetProcAddress" 12000 true => lookup::cuGetProcAddress_v2_ptsz;
    GET_PROC_ADDRESS c"cuGetProcAddress" "cuGetProcAddress" 11030 false => lookup::cuGetProcAddress;
}

/// The hook of a name as libcuda exports it.
pub fn by_name(name: &[u8]) -> Option<&'static Hook> {
    DRIVER.iter().copied().find(|hook| hook.name.to_bytes() == name)
}

/// The hook of what `cuGetProcAddress(base, version)` has answered: by the address, where libcuda exports the
/// function, else by what was asked for.
pub fn by_request(base: &str, version: c_int, per_thread: bool, answer: usize) -> Option<&'static Hook> {
    let named = || DRIVER.iter().copied().filter(|hook| hook.base == base);
    if let Some(hook) = named().find(|hook| hook.real() == Some(answer)) {
        return Some(hook);
    }
    // The newest version that the caller may get; the list has newer ones first.
    let fits = |hook: &&Hook| hook.since <= version && hook.per_thread == per_thread;
    named().find(fits).filter(|hook| version <= KNOWN || hook.real().is_none())
}

/// The driver's library, if it is in the process. It is never unloaded.
fn libcuda() -> Option<Library> {
    // Looked for with no lock held: the loader's own may be.
    static FOUND: OnceLock<Loaded> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Some(found.0);
    }
    let found = Library::loaded(c"libcuda.so.1")?;
    let _ = FOUND.set(Loaded(found));
    Some(found)
}

struct Loaded(Library);

// SAFETY: a handle of dlopen may be used on every thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// The device of the calling thread's context.
pub fn current_device() -> Option<i32> {
    static REAL: AtomicUsize = AtomicUsize::new(0);
    let mut real = REAL.load(Ordering::Relaxed);
    if real == 0 {
        let found = libcuda().and_then(|library| library.find(c"cuCtxGetDevice"));
        real = found.or_else(|| Library::NEXT.find(c"cuCtxGetDevice"))? as usize;
        REAL.store(real, Ordering::Relaxed);
    }
    // SAFETY: the driver exports this name with this signature.
    let get: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(real) };
    let mut device = 0;
    // SAFETY: a place for one int.
    (unsafe { get(&mut device) } == super::SUCCESS).then_some(device)
}

/// A function of the runtime that is replaced. There may be several cudarts in a process: which one is meant
/// depends on who calls.
pub struct RuntimeHook {
    pub name: &'static CStr,
    ours: fn() -> usize,
    /// By the place that the call returns to.
    real: Mutex<Option<HashMap<usize, usize>>>,
}

macro_rules! runtime_hooks {
    ($($id:ident $name:literal => $ours:path;)*) => {
        $(pub static $id: RuntimeHook =
            RuntimeHook { name: $name, ours: || $ours as *const () as usize, real: Mutex::new(None) };)*
        /// Every function of the runtime that is replaced.
        pub static RUNTIME: &[&RuntimeHook] = &[$(&$id),*];
    };
}

runtime_hooks! {
    MALLOC c"cudaMalloc" => runtime::cudaMalloc;
    MALLOC_PITCH c"cudaMallocPitch" => runtime::cudaMallocPitch;
    FREE c"cudaFree" => runtime::cudaFree;
    MALLOC_MANAGED c"cudaMallocManaged" => runtime::cudaMallocManaged;
    MALLOC_HOST c"cudaMallocHost" => runtime::cudaMallocHost;
    HOST_ALLOC c"cudaHostAlloc" => runtime::cudaHostAlloc;
    FREE_HOST c"cudaFreeHost" => runtime::cudaFreeHost;
    MALLOC_ASYNC c"cudaMallocAsync" => runtime::cudaMallocAsync;
    MALLOC_ASYNC_PTSZ c"cudaMallocAsync_ptsz" => runtime::cudaMallocAsync_ptsz;
    MALLOC_FROM_POOL c"cudaMallocFromPoolAsync" => runtime::cudaMallocFromPoolAsync;
    MALLOC_FROM_POOL_PTSZ c"cudaMallocFromPoolAsync_ptsz" => runtime::cudaMallocFromPoolAsync_ptsz;
    FREE_ASYNC c"cudaFreeAsync" => runtime::cudaFreeAsync;
    FREE_ASYNC_PTSZ c"cudaFreeAsync_ptsz" => runtime::cudaFreeAsync_ptsz;
}

impl RuntimeHook {
    /// The real function for a caller (a place in its code), as the loader would have found it: the one after
    /// us in the global scope; but if that is a cudart, and the caller has one among its own dependencies (a
    /// library that was opened privately), then that, since the two may be of different versions.
    pub fn real(&self, caller: usize) -> Option<usize> {
        if let Some(known) = self.real.lock().as_ref().and_then(|real| real.get(&caller)) {
            return Some(*known);
        }
        let ours = (self.ours)();
        let look = |library: Library| library.find(self.name).map(|at| at as usize).filter(|at| *at != ours);
        let found = match look(Library::NEXT) {
            Some(global) if !is_cudart(global) => global,
            // For the program itself nothing is found as a library, or the global scope.
            global => object_of(caller).and_then(Library::loaded).and_then(look).or(global)?,
        };
        self.real.lock().get_or_insert_default().insert(caller, found);
        Some(found)
    }
}

/// The file name of the shared object that a place lies in, as the loader keeps it.
fn object_of(place: usize) -> Option<&'static CStr> {
    // SAFETY: an all-zero Dl_info is valid; dladdr fills it in with strings of the loaded object.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let known = libc::dladdr(place as *const c_void, &raw mut info) != 0 && !info.dli_fname.is_null();
        known.then(|| CStr::from_ptr(info.dli_fname))
    }
}

fn is_cudart(place: usize) -> bool {
    object_of(place).is_some_and(|object| {
        object.to_bytes().rsplit(|b| *b == b'/').next().is_some_and(|name| name.starts_with(b"libcudart"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_agree_and_name_different_functions() {
        assert_eq!(DRIVER.len(), OURS.len());
        let mut ours: Vec<usize> = DRIVER.iter().map(|hook| hook.ours()).collect();
        ours.extend(RUNTIME.iter().map(|hook| (hook.ours)()));
        let all = ours.len();
        ours.sort_unstable();
        ours.dedup();
        assert_eq!(ours.len(), all);
        assert!(!ours.contains(&0));
    }

    #[test]
    fn a_request_means_a_version() {
        let name = |base, version, per_thread| {
            by_request(base, version, per_thread, 1).map(|hook| hook.name.to_str().unwrap())
        };
        assert_eq!(name("cuMemAlloc", 3020, false), Some("cuMemAlloc_v2"));
        assert_eq!(name("cuMemAlloc", 2000, false), None);
        assert_eq!(name("cuMemAllocAsync", 13000, true), Some("cuMemAllocAsync_ptsz"));
        assert_eq!(name("cuGetProcAddress", 11030, false), Some("cuGetProcAddress"));
        assert_eq!(name("cuGetProcAddress", 12000, false), Some("cuGetProcAddress_v2"));
        assert_eq!(name("cuLaunchKernel", 12000, false), None);
    }
}
