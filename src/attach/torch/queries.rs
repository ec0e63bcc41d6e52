//! What the Python side (`python/strandline/_torch_cuda.py`) asks by ctypes.
//!
//! Must not know: Python. Answers are JSON in memory of `malloc`, which the caller gives back through
//! [`strandline_torch_free_text`]; null means that strandline is not the allocator of this process.
//! Invariant: none of these needs the GIL or holds a lock while it returns.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use super::{PoolId, autograd, calls, guarded, methods, profiler};
use crate::attach::history::{Context, Wish};

static HISTORY: AtomicBool = AtomicBool::new(false);

/// Starts or stops keeping past events for snapshots.
pub fn record_history(wish: &Wish) {
    HISTORY.store(wish.enabled, Ordering::Release);
    guarded("record_history", |service| service.record_history(wish));
}

/// Whether past events are kept for snapshots.
pub fn history_enabled() -> bool {
    HISTORY.load(Ordering::Acquire)
}

/// A JSON value as text for C; null for none.
fn text(json: Option<String>) -> *mut c_char {
    json.map_or(std::ptr::null_mut(), |json| calls::handed_out(json.as_bytes()))
}

/// `torch._C._cuda_memoryStats(device)`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_stats(device: c_int) -> *mut c_char {
    text(guarded("statistics", |service| service.stats(device).unwrap_or_default().to_json().to_string()))
}

/// `torch._C._cuda_memorySnapshot`, without the parts that Python adds: segments and device_traces.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_snapshot(first: u64, second: u64, traces: c_int) -> *mut c_char {
    let pool = (first, second) != (0, 0);
    let snapshot = guarded("the snapshot", |service| {
        let snapshot = service.snapshot(pool.then_some(PoolId(first, second)), traces != 0);
        serde_json::to_string(&snapshot).ok()
    });
    text(snapshot.flatten())
}

/// Gives back what one of these functions returned.
///
/// # Safety
/// `text` is null or came from a function of this file, and is given back once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_torch_free_text(text: *mut c_char) {
    // SAFETY: memory of `malloc`, or null.
    unsafe { libc::free(text.cast()) };
}

#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_reset_peak(device: c_int) {
    guarded("statistics", |service| service.reset_peak(device));
}

#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_reset_accumulated(device: c_int) {
    guarded("statistics", |service| service.reset_accumulated(device));
}

#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_get_memory_fraction(device: c_int) -> f64 {
    guarded("the memory fraction", |service| service.memory_fraction(device)).unwrap_or(1.0)
}

/// `context`: 0 never, 1 live blocks, 2 allocations, 3 frees and segments, too.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_record_history(
    enabled: c_int,
    context: c_int,
    native: c_int,
    entries: u64,
    clear: c_int,
) {
    let context = match context {
        0 => Context::Never,
        1 => Context::State,
        2 => Context::Alloc,
        _ => Context::All,
    };
    let entries = usize::try_from(entries).unwrap_or(usize::MAX);
    record_history(&Wish { enabled: enabled != 0, context, native: native != 0, entries, clear: clear != 0 });
}

#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_history_enabled() -> c_int {
    c_int::from(history_enabled())
}

/// `torch.cuda.caching_allocator_enable`: blocks come from the cache (1), or each from the driver (0).
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_enable_cache(on: c_int) {
    guarded("enable_cache", |service| service.enable_cache(on != 0));
}

/// Observer mode: pass on what torch's own allocator does (1), or no longer (0).
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_observe(on: c_int) {
    profiler::observe(on != 0);
}

/// Heap mode: a profiler starts (1) or has stopped (0): it is told of our blocks meanwhile. Answers 1, or 0
/// where this torch cannot be told.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_report_to_profiler(on: c_int) -> c_int {
    c_int::from(profiler::report_blocks(on != 0))
}

/// Starts to link backward allocations with forward stacks, after comparing what is read of an autograd node
/// with the number that torch says it has. 1, or 0 where they differ.
///
/// # Safety
/// `node` is the address of a live C++ `torch::autograd::Node` that this thread made.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_torch_autograd(node: *const c_void, sequence: u64) -> c_int {
    // SAFETY: as promised to this function.
    c_int::from(unsafe { autograd::start(node, sequence) })
}

/// Replaces the methods of the current allocator object of torch `major.minor`, which must be ours:
/// `{"replaced": [names], "declined": [[name, reason]], "error": text or null}`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_replace_methods(major: c_int, minor: c_int) -> *mut c_char {
    let outcome = guarded("replacing methods", |_| methods::replace((major, minor)));
    let json = match outcome {
        Some(Ok(report)) => serde_json::json!({
            "replaced": report.replaced, "declined": report.declined, "error": null,
        }),
        Some(Err(error)) => serde_json::json!({ "replaced": [], "declined": [], "error": error }),
        None => serde_json::json!({ "replaced": [], "declined": [], "error": "strandline is not active" }),
    };
    text(Some(json.to_string()))
}
