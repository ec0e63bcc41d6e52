//! What the C++ side (`cuda/`) calls, and what it offers to Rust. Declared alike in cuda/torch_shim.h.
//!
//! Must not know: the heap. Invariants: no function unwinds (each is guarded), and every text that is
//! handed out comes from `malloc`, because C++ frees it.

use std::ffi::{c_char, c_int, c_long, c_void};

use super::{Filter, PoolId, Refusal, Stats, guarded, pools, profiler, share};
use crate::attach::history::{Context, Wish};
use crate::driver::Stream;

/// Statuses, as in cuda/torch_shim.h.
pub(super) const OK: c_int = 0;
const OUT_OF_MEMORY: c_int = 1;
const FAILED: c_int = 2;

unsafe extern "C" {
    pub fn strandline_cxx_malloc(size: usize, device: c_int, stream: *mut c_void) -> *mut c_void;
    pub fn strandline_cxx_begin_pool();
    pub fn strandline_cxx_filter_accepts(filter: *const c_void, stream: *mut c_void) -> bool;
    pub fn strandline_cxx_filter_drop(filter: *mut c_void);
}

/// Text in memory of `malloc`; null if there is none left.
pub fn handed_out(text: &[u8]) -> *mut c_char {
    // SAFETY: `malloc` gives room for the text and its end, or null.
    unsafe {
        let place = libc::malloc(text.len() + 1).cast::<u8>();
        if !place.is_null() {
            place.copy_from_nonoverlapping(text.as_ptr(), text.len());
            place.add(text.len()).write(0);
        }
        place.cast()
    }
}

/// Says a refusal to C++: the status, and the text through `message`.
pub(super) fn refuse(refusal: Refusal, message: *mut *mut c_char) -> c_int {
    let (status, text) = match refusal {
        Refusal::OutOfMemory(text) => (OUT_OF_MEMORY, text),
        Refusal::Failed(text) => (FAILED, text),
    };
    // SAFETY: C++ passes the address of a pointer of its own.
    unsafe { *message = handed_out(text.as_bytes()) };
    status
}

/// The answer where [`guarded`] had none.
pub(super) fn inactive<T>() -> Result<T, Refusal> {
    let text =
        "strandline's allocator failed by a fault of its own (see stderr), or is not active in this process.";
    Err(Refusal::Failed(text.into()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_malloc(
    size: usize,
    device: c_int,
    stream: *mut c_void,
    out: *mut *mut c_void,
    message: *mut *mut c_char,
) -> c_int {
    let ask = || guarded("malloc", |service| service.malloc(size, device, Stream(stream as u64)));
    // After a fault the service serves from elsewhere: the job shall not notice.
    match ask().or_else(ask).unwrap_or_else(inactive) {
        Ok(at) => {
            profiler::allocated(at, size, device);
            // SAFETY: C++ passes the address of a pointer of its own.
            unsafe { *out = at as *mut c_void };
            OK
        }
        Err(refusal) => refuse(refusal, message),
    }
}

/// The deleter of torch's tensors.
///
/// # Safety
/// `at` is null or a live address of `strandline_internal_malloc`, and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_internal_free(at: *mut c_void) {
    if at.is_null() {
        return;
    }
    guarded("free", |service| {
        let block = profiler::about_to_free(service, at as u64);
        service.free(at as u64);
        if let Some((size, device)) = block {
            profiler::freed(service, at as u64, size, device);
        }
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_stats(device: c_int, out: *mut Stats) -> c_int {
    // A device that was never used has statistics too: all zero, as torch's own.
    let stats = guarded("statistics", |service| service.stats(device).unwrap_or_default());
    match stats {
        Some(stats) => {
            // SAFETY: `out` is room for torch's DeviceStats, whose layout `methods` has checked to be ours.
            unsafe { out.write(stats) };
            OK
        }
        None => FAILED,
    }
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_reset_peak(device: c_int) {
    guarded("statistics", |service| service.reset_peak(device));
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_reset_accumulated(device: c_int) {
    guarded("statistics", |service| service.reset_accumulated(device));
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_memory_fraction(device: c_int) -> f64 {
    guarded("the memory fraction", |service| service.memory_fraction(device)).unwrap_or(1.0)
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_largest_available(device: c_int) -> usize {
    guarded("cacheInfo", |service| service.largest_available(device) as usize).unwrap_or(0)
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_empty_cache(first: u64, second: u64) {
    let pool = (first, second) != (0, 0);
    guarded("empty_cache", |service| service.empty_cache(pool.then_some(PoolId(first, second))));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_begin_pool(
    device: c_int,
    first: u64,
    second: u64,
    filter: *mut c_void,
) {
    // SAFETY: C++ made the filter for this call and forgets it.
    let filter = unsafe { Filter::from_raw(filter) };
    guarded("begin_pool", |service| {
        if service.begin_pool(device, PoolId(first, second), filter) {
            pools::hold(device, PoolId(first, second));
        }
    });
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_hold_pool(device: c_int, first: u64, second: u64) {
    pools::hold(device, PoolId(first, second));
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_pool_uses(device: c_int, first: u64, second: u64) -> c_int {
    pools::uses(device, PoolId(first, second)) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_pool_holds(
    device: c_int,
    first: u64,
    second: u64,
    blocks: *const u64,
    count: usize,
) -> c_int {
    // SAFETY: C++ passes `count` addresses.
    let mut expected = unsafe { std::slice::from_raw_parts(blocks, count) }.to_vec();
    let live = guarded("the pool's blocks", |service| service.pool_blocks(device, PoolId(first, second)));
    match live.flatten() {
        Some(mut live) => {
            live.sort_unstable();
            expected.sort_unstable();
            c_int::from(live == expected)
        }
        None => -1,
    }
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_record_history(enabled: c_int, entries: usize) {
    // C++ callers' further arguments differ between versions and are not read.
    super::queries::record_history(&Wish {
        enabled: enabled != 0,
        context: Context::All,
        native: false,
        entries,
        clear: false,
    });
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_history_enabled() -> c_int {
    c_int::from(super::queries::history_enabled())
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_enable_peer(device: c_int, peer: c_int) {
    guarded("enable_peer", |service| {
        if let Err(Refusal::Failed(text) | Refusal::OutOfMemory(text)) = service.enable_peer(device, peer) {
            super::complain_once(&text);
        }
    });
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_copy_between(
    to: u64,
    to_device: c_int,
    from: u64,
    from_device: c_int,
    size: usize,
    stream: u64,
) -> c_int {
    let copied = guarded("a copy between devices", |service| {
        service.copy_between((to, to_device), (from, from_device), size as u64, Stream(stream))
    });
    match copied.unwrap_or_else(inactive) {
        Ok(()) => OK,
        Err(Refusal::Failed(text) | Refusal::OutOfMemory(text)) => {
            super::complain_once(&text);
            FAILED
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_share(
    at: u64,
    offset: *mut c_long,
    handle: *mut *mut c_char,
    length: *mut usize,
    message: *mut *mut c_char,
) -> c_int {
    let shared = guarded("sharing", |service| {
        let shared = service.share(at)?;
        Ok((shared.offset, share::encode(&shared)?))
    });
    match shared.unwrap_or_else(inactive) {
        Ok((start, text)) => {
            // SAFETY: C++ passes the addresses of variables of its own.
            unsafe {
                *offset = start as c_long;
                *length = text.len();
                *handle = handed_out(&text);
            }
            OK
        }
        Err(refusal) => refuse(refusal, message),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_open_shared(
    handle: *const u8,
    length: usize,
    at: *mut *mut c_void,
    message: *mut *mut c_char,
) -> c_int {
    // SAFETY: C++ passes a std::string's text and length.
    let handle = unsafe { std::slice::from_raw_parts(handle, length) };
    let opened = guarded("opening shared memory", |service| share::open(service, handle));
    match opened.unwrap_or_else(inactive) {
        Ok(address) => {
            // SAFETY: C++ passes the address of a pointer of its own.
            unsafe { *at = address as *mut c_void };
            OK
        }
        Err(refusal) => refuse(refusal, message),
    }
}

#[unsafe(no_mangle)]
extern "C" fn strandline_internal_close_shared(at: u64) {
    guarded("closing shared memory", |service| share::close(service, at));
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_memory_info(device: c_int, free: *mut usize, total: *mut usize) {
    let info = guarded("memory_info", |service| service.memory_info(device)).flatten().unwrap_or_default();
    // SAFETY: C++ passes the addresses of two size_t of its own.
    unsafe {
        *free = info.free as usize;
        *total = info.total as usize;
    }
}
