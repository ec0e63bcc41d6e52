//! A shared object through which tests and benchmarks drive `strandline::stacks` from real interpreters
//! (`ctypes`). Not part of the product.

use std::ffi::{CString, c_char, c_void};
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use strandline::stacks::{self, Kind, Options, StackId};

fn text(text: String) -> *const c_char {
    // Leaked: this is a test's few strings.
    CString::new(text.replace('\0', "\\0")).map_or(std::ptr::null(), |text| text.into_raw())
}

static SEEN: Mutex<Vec<(u32, u32)>> = Mutex::new(Vec::new());

/// Remembers two stacks of this moment: as captured by default, and with native frames.
fn remember() {
    let stacks = (stacks::capture().0, stacks::capture_with_native().0);
    if stacks.0 != 0 {
        SEEN.lock().unwrap_or_else(|error| error.into_inner()).push(stacks);
    }
}

/// `c10::alloc_cpu`, through which torch gets the memory of every CPU tensor: only if the probe is
/// preloaded, and only in a release build (by hand: tests/stacks_torch.py). Without link-time optimisation
/// strandline's own definitions of these two are linked in whole.
#[cfg(not(debug_assertions))]
#[unsafe(export_name = "_ZN3c109alloc_cpuEm")]
pub extern "C" fn probe_alloc_cpu(size: usize) -> *mut c_void {
    remember();
    // SAFETY: 64 is a power of two; torch gives it back through the function below.
    unsafe { libc::memalign(64, size) }
}

/// # Safety
/// `pointer` comes from [`probe_alloc_cpu`].
#[cfg(not(debug_assertions))]
#[unsafe(export_name = "_ZN3c108free_cpuEPv")]
pub unsafe extern "C" fn probe_free_cpu(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe { libc::free(pointer) };
}

/// `cudaMalloc` for torch's CUDAPluggableAllocator.
///
/// # Safety
/// libcudart is loaded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_torch_malloc(size: isize, _device: i32, _stream: *mut c_void) -> *mut c_void {
    let mut pointer = std::ptr::null_mut();
    // SAFETY: the signature is cudaMalloc's.
    unsafe {
        let malloc = libc::dlsym(libc::RTLD_DEFAULT, c"cudaMalloc".as_ptr());
        let malloc: extern "C" fn(*mut *mut c_void, usize) -> i32 = std::mem::transmute(malloc);
        malloc(&raw mut pointer, size as usize);
    }
    remember();
    pointer
}

/// # Safety
/// `pointer` comes from [`probe_torch_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_torch_free(pointer: *mut c_void, _: isize, _: i32, _: *mut c_void) {
    // SAFETY: the signature is cudaFree's.
    unsafe {
        let free = libc::dlsym(libc::RTLD_DEFAULT, c"cudaFree".as_ptr());
        let free: extern "C" fn(*mut c_void) -> i32 = std::mem::transmute(free);
        free(pointer);
    }
}

/// Takes the oldest pair that was remembered; 0 where there is none.
///
/// # Safety
/// `out` has room for two words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_seen(out: *mut [u32; 2]) -> i32 {
    let mut seen = SEEN.lock().unwrap_or_else(|error| error.into_inner());
    if seen.is_empty() {
        return 0;
    }
    let (plain, native) = seen.remove(0);
    // SAFETY: the caller's promise.
    unsafe { out.write([plain, native]) };
    1
}

/// Returns the method in words, or `error: …`.
#[unsafe(no_mangle)]
pub extern "C" fn probe_start(max_depth: usize, max_stacks: usize, by_offsets: bool) -> *const c_char {
    let status = stacks::start(Options { max_depth, max_stacks, by_offsets, ..Options::default() });
    text(match status.python {
        Ok(method) => method.to_string(),
        Err(reason) => format!("error: {reason}"),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn probe_capture() -> u32 {
    stacks::capture().0
}

#[unsafe(no_mangle)]
pub extern "C" fn probe_capture_native() -> u32 {
    stacks::capture_with_native().0
}

/// One frame a line, innermost first: kind, user, line, function, file, separated by tabs.
#[unsafe(no_mangle)]
pub extern "C" fn probe_frames(id: u32) -> *const c_char {
    let frames = stacks::frames(StackId(id));
    let lines = frames.iter().map(|frame| {
        let kind = if frame.kind == Kind::Python { "P" } else { "N" };
        format!("{kind}\t{}\t{}\t{}\t{}", frame.user, frame.line, frame.function, frame.file)
    });
    text(lines.collect::<Vec<_>>().join("\n"))
}

#[unsafe(no_mangle)]
pub extern "C" fn probe_allocated_at(id: u32) -> *const c_char {
    text(stacks::allocated_at(StackId(id)).map_or(String::new(), |frame| frame.to_string()))
}

/// stacks, nodes, frames, bytes, first_sights, overflowed, forgotten
///
/// # Safety
/// `out` has room for seven words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_stats(out: *mut u64) {
    let stats = stacks::stats();
    let words = [
        stats.stacks as u64,
        stats.nodes as u64,
        stats.frames as u64,
        stats.bytes as u64,
        stats.first_sights,
        stats.overflowed,
        stats.forgotten,
    ];
    // SAFETY: the test hands over an array of seven words.
    unsafe { out.cast::<[u64; 7]>().write(words) };
}

#[unsafe(no_mangle)]
pub extern "C" fn probe_disable() {
    stacks::disable();
}

/// Nanoseconds for one capture: the best of `rounds` rounds, each short enough to lie between two
/// interruptions by other processes.
#[unsafe(no_mangle)]
pub extern "C" fn probe_time(rounds: u32, native: bool) -> f64 {
    const TIMES: u32 = 1000;
    let round = || {
        let start = Instant::now();
        for _ in 0..TIMES {
            black_box(if native { stacks::capture_with_native() } else { stacks::capture() });
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(TIMES)
    };
    (0..rounds).map(|_| round()).fold(f64::INFINITY, f64::min)
}

/// # Safety
/// `table` has `length` bytes and `out` room for `count` numbers.
///
/// The line of each of `count` instructions, `step` bytes apart, as the table of Python 3.`minor` says
/// (`i32::MIN` for none); 1 if there is such a table.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_lines(
    minor: u32,
    table: *const u8,
    length: usize,
    first_line: i32,
    step: i32,
    count: usize,
    out: *mut i32,
) -> i32 {
    // SAFETY: the test hands over a bytes object and an array of `count` numbers.
    let (table, out) =
        unsafe { (std::slice::from_raw_parts(table, length), std::slice::from_raw_parts_mut(out, count)) };
    for (index, out) in out.iter_mut().enumerate() {
        match stacks::line_at(minor, table, first_line, index as i32 * step) {
            Some(line) => *out = line.unwrap_or(i32::MIN),
            None => return 0,
        }
    }
    1
}

/// The start routine of a thread: captures and stores the ID.
///
/// # Safety
/// `out` outlives the thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn probe_capture_to(out: *mut u32) -> *mut u32 {
    // SAFETY: the test hands over one word that outlives the thread.
    unsafe { out.write(stacks::capture().0) };
    std::ptr::null_mut()
}
