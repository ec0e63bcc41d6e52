//! Replacing the methods of torch's allocator object.
//!
//! `CUDAPluggableAllocator` keeps a process-wide mutex and map, and throws for statistics, IPC and pools.
//! Once our object is torch's allocator, it gets a copy of its class's vtable in which the slots that we
//! know are ours. Nothing is exported under torch's names: other objects of the class (a `MemPool` with a
//! plug-in of its own) and processes in which strandline is not the allocator are not touched at all.
//!
//! A slot is recognised by what lies in it, never by its number: by the exported name of the method that
//! it points to, or, for the defaults of the base class, which are not exported, by the text of the error
//! that the default throws. A name holds the argument types, so a method with another signature is not
//! recognised, and stays torch's. Must not know: the heap. Invariant: the copy differs from the original
//! in recognised slots only.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Mutex;

mod image;

use self::image::Image;

/// What was replaced, and what was not, with the reason.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub replaced: Vec<&'static str>,
    pub declined: Vec<(&'static str, &'static str)>,
}

/// How a slot is recognised.
enum Slot {
    /// The method's mangled name after that of the class.
    Exported(&'static str),
    /// The same, up to the argument list: for a method whose arguments we do not read, or only the first.
    ExportedPrefix(&'static str),
    /// A default of the base class, which throws "… does not yet support" this.
    Default(&'static str),
}

struct Method {
    name: &'static str,
    slot: Slot,
    ours: unsafe extern "C" fn(),
}

const CLASS: &str = "5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator";
const VTABLE: &CStr = c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";
const CURRENT: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";

/// The versions whose `DeviceStats` is ours: the first and the last were compared by
/// tests/cuda_layouts.cpp. In others Python answers for the statistics.
const STATS_LAYOUT: std::ops::RangeInclusive<(c_int, c_int)> = (2, 8)..=(2, 11);

/// From here on `setUseOnOOM` says whether; before, calling it meant yes.
const USE_ON_OOM_SAYS_WHETHER: (c_int, c_int) = (2, 11);

unsafe extern "C" {
    static mut strandline_cxx_get_device: *mut c_void;
    static mut strandline_cxx_current_stream: *mut c_void;
    static mut strandline_cxx_raw_stream: *mut c_void;
    static mut strandline_cxx_own_memcpy: *mut c_void;
    static mut strandline_cxx_own_enable_peer: *mut c_void;
    fn strandline_method_allocate();
    fn strandline_method_raw_alloc();
    fn strandline_method_raw_alloc_with_stream();
    fn strandline_method_raw_delete();
    fn strandline_method_raw_deleter();
    fn strandline_method_get_memory_fraction();
    fn strandline_method_cache_info();
    fn strandline_method_get_device_stats();
    fn strandline_method_reset_peak();
    fn strandline_method_reset_accumulated();
    fn strandline_method_empty_cache();
    fn strandline_method_empty_all();
    fn strandline_method_record_history();
    fn strandline_method_is_history_enabled();
    fn strandline_method_attach_observer();
    fn strandline_method_get_pool_use_count();
    fn strandline_method_create_or_incref_pool();
    fn strandline_method_set_use_on_oom();
    fn strandline_method_ignore_use_on_oom();
    fn strandline_method_check_pool_live();
    fn strandline_method_get_checkpoint_state();
    fn strandline_method_set_checkpoint_pool_state();
    fn strandline_method_enable_peer();
    fn strandline_method_memcpy_async();
    fn strandline_method_share_ipc();
    fn strandline_method_open_ipc();
}

const ALLOCATION: [&str; 5] = ["allocate", "raw_alloc", "raw_alloc_with_stream", "raw_delete", "raw_deleter"];

fn methods(version: (c_int, c_int)) -> Vec<Method> {
    let use_on_oom = if version >= USE_ON_OOM_SAYS_WHETHER {
        strandline_method_set_use_on_oom
    } else {
        strandline_method_ignore_use_on_oom
    };
    use Slot::{Default, Exported, ExportedPrefix};
    let method = |name, slot, ours| Method { name, slot, ours };
    vec![
        method("allocate", Exported("8allocateEm"), strandline_method_allocate),
        method("raw_alloc", Exported("9raw_allocEm"), strandline_method_raw_alloc),
        method(
            "raw_alloc_with_stream",
            Exported("21raw_alloc_with_streamEmP11CUstream_st"),
            strandline_method_raw_alloc_with_stream,
        ),
        method("raw_delete", Exported("10raw_deleteEPv"), strandline_method_raw_delete),
        method("raw_deleter", Exported("11raw_deleterEv"), strandline_method_raw_deleter),
        method("getMemoryFraction", Exported("17getMemoryFractionEa"), strandline_method_get_memory_fraction),
        method("cacheInfo", Exported("9cacheInfoEaPm"), strandline_method_cache_info),
        method("getDeviceStats", Exported("14getDeviceStatsEa"), strandline_method_get_device_stats),
        method("resetPeakStats", Exported("14resetPeakStatsEa"), strandline_method_reset_peak),
        method(
            "resetAccumulatedStats",
            Exported("21resetAccumulatedStatsEa"),
            strandline_method_reset_accumulated,
        ),
        method("emptyCache", Exported("10emptyCacheESt4pairIyyE"), strandline_method_empty_cache),
        method("emptyCache", Exported("10emptyCacheEv"), strandline_method_empty_all),
        // bool enabled, a function, size_t entries, …: the rest is not read.
        method(
            "recordHistory",
            ExportedPrefix("13recordHistoryEbPFSt10shared_ptrIN3c1015GatheredContextEEvEm"),
            strandline_method_record_history,
        ),
        method(
            "attachOutOfMemoryObserver",
            ExportedPrefix("25attachOutOfMemoryObserverESt8functionIFvl"),
            strandline_method_attach_observer,
        ),
        method(
            "getCheckpointState",
            Exported("18getCheckpointStateEaSt4pairIyyE"),
            strandline_method_get_checkpoint_state,
        ),
        method(
            "setCheckpointPoolState",
            Exported(
                "22setCheckpointPoolStateEaSt10shared_ptrIN3c104cuda20CUDACachingAllocator14AllocatorStateEE",
            ),
            strandline_method_set_checkpoint_pool_state,
        ),
        method("enablePeerAccess", Exported("16enablePeerAccessEaa"), strandline_method_enable_peer),
        method(
            "memcpyAsync",
            Exported("11memcpyAsyncEPviPKvimP11CUstream_stb"),
            strandline_method_memcpy_async,
        ),
        method("shareIpcHandle", Exported("14shareIpcHandleEPv"), strandline_method_share_ipc),
        method(
            "getIpcDevPtr",
            Exported("12getIpcDevPtrENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"),
            strandline_method_open_ipc,
        ),
        method("isHistoryEnabled", Default("recordHistory"), strandline_method_is_history_enabled),
        method("getPoolUseCount", Default("getPoolUseCount"), strandline_method_get_pool_use_count),
        method("createOrIncrefPool", Default("createOrIncrefPool"), strandline_method_create_or_incref_pool),
        method("setUseOnOOM", Default("setUseOnOOM"), use_on_oom),
        method(
            "checkPoolLiveAllocations",
            Default("checkPoolLiveAllocations"),
            strandline_method_check_pool_live,
        ),
    ]
}

/// An open library of torch; null if it is not loaded.
fn loaded(name: &CStr) -> *mut c_void {
    // SAFETY: a name; nothing is loaded by this.
    unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
}

fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    if library.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: an open library's handle.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

/// Gives torch's current allocator object, which must be an unmodified pluggable one, our methods. Called
/// once, after the swap and before CUDA is initialised; a second call changes nothing.
pub fn replace(version: (c_int, c_int)) -> Result<Report, String> {
    static DONE: Mutex<bool> = Mutex::new(false);
    let mut done = DONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *done {
        return Err("the methods were replaced before".into());
    }
    let c10_cuda = loaded(c"libc10_cuda.so");
    let torch_cuda = loaded(c"libtorch_cuda.so");
    let current = symbol(c10_cuda, CURRENT).cast::<*mut *mut *const usize>();
    let table = symbol(torch_cuda, VTABLE).cast::<usize>().cast_const();
    if current.is_null() || table.is_null() {
        return Err("this torch does not show its allocator".into());
    }
    // SAFETY: the symbol is torch's `std::atomic<CUDAAllocator *>`; the object starts with its vtable's
    // address.
    let object: *mut *const usize = unsafe { *current }.cast();
    // SAFETY: the vtable has two words before its functions.
    let functions = unsafe { table.add(2) };
    // SAFETY: `object` is null or torch's allocator.
    if object.is_null() || unsafe { *object } != functions {
        return Err("torch's current allocator is not a CUDAPluggableAllocator".into());
    }
    let words = image::symbol_size(table.cast())? / size_of::<usize>();
    // SAFETY: the symbol's size was read from the symbol table.
    let original = unsafe { std::slice::from_raw_parts(table, words) };

    let mut report = Report::default();
    let copy = patched(original, version, &mut report)?;
    let copy = Box::leak(copy.into_boxed_slice());
    // SAFETY: the object lives as long as the process; CUDA is not initialised yet, so no other thread
    // calls it; the copy is never freed.
    unsafe { *object = copy.as_ptr().add(2) };
    *done = true;
    Ok(report)
}

/// A copy of the vtable with our methods in it.
fn patched(original: &[usize], version: (c_int, c_int), report: &mut Report) -> Result<Vec<usize>, String> {
    let image = Image::containing(original.as_ptr().cast())?;
    let slots: Vec<(String, Option<String>)> = original[2..]
        .iter()
        .map(|&slot| match image::name_at(slot as *const c_void) {
            Some(name) => (method_name(&name).to_owned(), None),
            None => (String::new(), image.unsupported_feature(slot)),
        })
        .collect();
    let can_allocate = bind_torch(&slots, original);
    let mut copy = original.to_vec();
    for method in methods(version) {
        let found = slots.iter().position(|(name, feature)| match method.slot {
            Slot::Exported(wanted) => name == wanted,
            Slot::ExportedPrefix(wanted) => name.starts_with(wanted),
            Slot::Default(wanted) => feature.as_deref() == Some(wanted),
        });
        let why = match found {
            None => Some("this torch has no such method, or with other arguments"),
            Some(_) if ALLOCATION.contains(&method.name) && !can_allocate => {
                Some("torch's current device and stream cannot be asked for")
            }
            Some(_) if method.name == "getDeviceStats" && !STATS_LAYOUT.contains(&version) => {
                Some("the layout of this version's statistics was not checked")
            }
            Some(_) => None,
        };
        match (found, why) {
            (Some(slot), None) => {
                copy[2 + slot] = method.ours as usize;
                report.replaced.push(method.name);
            }
            // Of the two forms of emptyCache one is there.
            (_, Some(_)) if method.name == "emptyCache" && report.replaced.contains(&"emptyCache") => {}
            (_, Some(why)) => report.declined.push((method.name, why)),
            (None, None) => {}
        }
    }
    report.declined.retain(|(name, _)| !report.replaced.contains(name));
    // Allocating and freeing go together: one torch's and one ours would lose every block.
    let all = ALLOCATION.iter().filter(|name| report.replaced.contains(name)).count();
    if all != 0 && all != ALLOCATION.len() {
        return Err("only some of torch's allocation methods were recognised".into());
    }
    Ok(copy)
}

/// Finds what our methods call in torch. Answers whether allocation methods can be replaced.
fn bind_torch(slots: &[(String, Option<String>)], original: &[usize]) -> bool {
    let c10_cuda = loaded(c"libc10_cuda.so");
    let own = |wanted: &str| {
        slots
            .iter()
            .position(|(name, _)| name == wanted)
            .map_or(std::ptr::null_mut(), |slot| original[2 + slot] as *mut c_void)
    };
    // SAFETY: written once, under the lock of `replace`, before any method of ours can be called.
    unsafe {
        strandline_cxx_get_device = symbol(c10_cuda, c"_ZN3c104cuda9GetDeviceEPa");
        strandline_cxx_current_stream = symbol(c10_cuda, c"_ZN3c104cuda20getCurrentCUDAStreamEa");
        strandline_cxx_raw_stream = symbol(c10_cuda, c"_ZNK3c104cuda10CUDAStream6streamEv");
        strandline_cxx_own_memcpy = own("11memcpyAsyncEPviPKvimP11CUstream_stb");
        strandline_cxx_own_enable_peer = own("16enablePeerAccessEaa");
        !strandline_cxx_get_device.is_null()
            && !strandline_cxx_current_stream.is_null()
            && !strandline_cxx_raw_stream.is_null()
    }
}

/// Of a mangled name of the class, what comes after the class; else nothing.
fn method_name(mangled: &str) -> &str {
    let Some(rest) = mangled.strip_prefix("_ZN") else { return "" };
    let rest = rest.strip_prefix('K').unwrap_or(rest);
    rest.strip_prefix(CLASS).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_class_are_recognised() {
        let prefix = "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator";
        assert_eq!(method_name(&format!("{prefix}9raw_allocEm")), "9raw_allocEm");
        assert_eq!(method_name(&format!("_ZNK{}11raw_deleterEv", &prefix[3..])), "11raw_deleterEv");
        assert_eq!(method_name("_ZN5torch4cuda22CUDAPluggableAllocator19getCurrentAllocatorEv"), "");
        assert_eq!(method_name("malloc"), "");
    }

    #[test]
    fn without_torch_nothing_is_replaced() {
        assert!(replace((2, 11)).is_err());
        assert!(symbol(std::ptr::null_mut(), c"x").is_null());
    }
}
