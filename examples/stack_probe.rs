//! A shared object through which tests and benchmarks drive `strandline::stacks` from real interpreters
//! (`ctypes`). Not part of the product.

use std::ffi::{CString, c_char};
use std::hint::black_box;
use std::time::Instant;

use strandline::stacks::{self, Kind, Options, StackId};

fn text(text: String) -> *const c_char {
    // Leaked: this is a test's few strings.
    CString::new(text.replace('\0', "\\0")).map_or(std::ptr::null(), |text| text.into_raw())
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
