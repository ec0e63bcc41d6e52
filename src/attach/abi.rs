//! The C ABI: the functions of `include/strandline.h`.
//!
//! Every function catches panics and answers with a code. The declarations in [`bindings`] are made from
//! the header; the assignments at the end of this file fail to compile when a definition here differs.

use super::process::{self, State};
use super::{around, c_allocator, cuda_api, python_boot, say, say_once};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;

#[allow(missing_docs, non_camel_case_types, dead_code, unreachable_pub)]
pub mod bindings {
    //! What the header declares.
    include!("bindings.rs");
}

use bindings::{
    STRANDLINE_EINACTIVE, STRANDLINE_EINTERNAL, STRANDLINE_EINVAL, STRANDLINE_EIO, STRANDLINE_ENOENT,
};

/// Puts the caller's errno back when it goes.
pub(super) struct Errno(c_int);

impl Errno {
    pub(super) fn keep() -> Errno {
        // SAFETY: the thread's own errno.
        Errno(unsafe { *libc::__errno_location() })
    }
}

impl Drop for Errno {
    fn drop(&mut self) {
        // SAFETY: the thread's own errno.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

/// Runs `f`; a panic becomes `fault`, said once. The caller's errno is as it was.
pub(super) fn guarded<T>(fault: T, f: impl FnOnce() -> T) -> T {
    static SAID: AtomicBool = AtomicBool::new(false);
    let _errno = Errno::keep();
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let what = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("unknown");
        say_once(&SAID, format_args!("internal fault, please report it: {what}; the job goes on"));
        fault
    })
}

fn active(f: impl FnOnce(&'static State) -> c_int) -> c_int {
    let code = guarded(STRANDLINE_EINTERNAL, || process::state().map_or(STRANDLINE_EINACTIVE, f));
    if code < 0 {
        c_allocator::keep(why(code).into());
    }
    code
}

/// A code in words, where nothing more is known.
fn why(code: c_int) -> &'static str {
    match code {
        STRANDLINE_EINVAL => "An argument is not what the function takes.",
        STRANDLINE_EINACTIVE => {
            "strandline is not active in this process; call strandline_open or strandline_start first."
        }
        STRANDLINE_ENOENT => "There is no such thing.",
        STRANDLINE_EIO => "A file could not be written, for the reason on stderr.",
        _ => "A fault of strandline's own; see stderr.",
    }
}

/// # Safety
/// `text` is null or a terminated string.
pub(super) unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's contract.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

/// Copies `text` into a C buffer and returns its length.
///
/// # Safety
/// `buffer` has room for `size` bytes, or `size` is 0.
pub(super) unsafe fn fill(text: &str, buffer: *mut c_char, size: usize) -> usize {
    if size > 0 && !buffer.is_null() {
        let n = text.len().min(size - 1);
        // SAFETY: n + 1 <= size bytes are written.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), n);
            *buffer.add(n) = 0;
        }
    }
    text.len()
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_abi_version() -> u32 {
    bindings::STRANDLINE_ABI_VERSION as u32
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// See `strandline.h`.
///
/// # Safety
/// `options` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_start(mode: c_int, options: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let options = unsafe { text(options) };
    guarded(STRANDLINE_EINTERNAL, || match process::start(mode, options) {
        Ok(()) => 0,
        Err(process::NotStarted(why)) => {
            c_allocator::keep(why);
            STRANDLINE_EINVAL
        }
    })
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_mode() -> c_int {
    guarded(0, || process::state().map_or(0, |state| state.mode() as c_int))
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_step() -> c_int {
    cuda_api::pulse::by_hand();
    active(|state| state.step() as c_int)
}

/// For the Python side, whose requests may change threads: one begins. Returns its step for
/// `strandline_internal_request_closes`, which comes before the step that its end is; negative where nothing is watched.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_internal_request_opens() -> i64 {
    guarded(-1, || process::state().map_or(-1, |state| state.clock.request_opens().into()))
}

/// For the Python side: a request that began in `step` ended.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_internal_request_closes(step: i64) {
    guarded((), || {
        if let (Some(state), Ok(step)) = (process::state(), step.try_into()) {
            state.clock.request_closes(step);
        }
    });
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_epoch() -> c_int {
    active(|state| {
        state.epoch();
        0
    })
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_phase(phase: c_int) -> c_int {
    active(|state| state.phase(phase).unwrap_or(STRANDLINE_EINVAL))
}

/// See `strandline.h`.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_phase_of(name: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let Some(name) = unsafe { text(name) }.filter(|name| !name.trim().is_empty()) else {
        return STRANDLINE_EINVAL;
    };
    active(|state| state.phase_of(name))
}

/// See `strandline.h`.
///
/// # Safety
/// `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_candidates(buffer: *mut c_char, size: usize) -> usize {
    let mut length = 0;
    guarded((), || {
        if let Some(state) = process::state() {
            state.candidates(|json| {
                // SAFETY: the caller's contract.
                length = unsafe { fill(json, buffer, size) };
                length < size
            });
        }
    });
    length
}

/// See `strandline.h`.
///
/// # Safety
/// `answer` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_explain(id: u64, answer: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let Some(answer) = (unsafe { text(answer) }) else {
        return STRANDLINE_EINVAL;
    };
    active(|state| if state.explain(id, answer) { 0 } else { STRANDLINE_ENOENT })
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_collecting(on: c_int) -> c_int {
    active(|state| {
        state.clock.collecting(on != 0);
        0
    })
}

/// See `strandline.h`.
///
/// # Safety
/// `remark` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_remark(remark: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let Some(remark) = (unsafe { text(remark) }) else {
        return STRANDLINE_EINVAL;
    };
    active(|state| if state.remark(remark) { 0 } else { STRANDLINE_EINVAL })
}

/// See `strandline.h`.
///
/// # Safety
/// `folder` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_report(folder: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let folder = unsafe { text(folder) };
    active(|state| if state.report(folder.map(std::path::Path::new)) { 0 } else { STRANDLINE_EIO })
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_finish() -> c_int {
    active(|state| if state.finish() { 0 } else { STRANDLINE_EIO })
}

/// See `strandline.h`.
///
/// # Safety
/// `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_stats(device: c_int, buffer: *mut c_char, size: usize) -> usize {
    let json = guarded(String::from("{}"), || {
        process::state().and_then(|state| state.stats(device)).unwrap_or_else(|| "{}".into())
    });
    // SAFETY: the caller's contract.
    guarded(0, || unsafe { fill(&json, buffer, size) })
}

/// See `strandline.h`.
///
/// # Safety
/// `line` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_say(line: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let Some(line) = (unsafe { text(line) }) else {
        return STRANDLINE_EINVAL;
    };
    guarded(STRANDLINE_EINTERNAL, || {
        say(format_args!("{line}"));
        0
    })
}

/// See `strandline.h`.
///
/// # Safety
/// Called by Python, which holds its lock and gives a tuple of three for `me`, or with null for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_around(
    me: *mut c_void,
    arguments: *mut c_void,
    keywords: *mut c_void,
) -> *mut c_void {
    if me.is_null() {
        let place = strandline_around as *const () as *mut c_void;
        return if guarded(false, around::is_possible) { place } else { std::ptr::null_mut() };
    }
    guarded(None, || Some(around::call(me, arguments, keywords))).unwrap_or_else(|| {
        guarded((), around::fault);
        std::ptr::null_mut()
    })
}

/// See `strandline.h`.
///
/// # Safety
/// `module` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_python_source(module: *const c_char) -> *const c_char {
    // SAFETY: the caller's contract.
    let module = unsafe { text(module) };
    guarded(std::ptr::null(), || {
        module.and_then(python_boot::source).map_or(std::ptr::null(), |source| source.as_ptr())
    })
}

/// The header and the definitions above cannot drift apart.
const _: () = {
    use bindings as header;
    let _ = [header::strandline_abi_version as unsafe extern "C" fn() -> u32, strandline_abi_version];
    let _ = [header::strandline_version as unsafe extern "C" fn() -> *const c_char, strandline_version];
    let _ =
        [header::strandline_start as unsafe extern "C" fn(c_int, *const c_char) -> c_int, strandline_start];
    let _ = [header::strandline_mode as unsafe extern "C" fn() -> c_int, strandline_mode];
    let _ = [header::strandline_step as unsafe extern "C" fn() -> c_int, strandline_step];
    let _ = [header::strandline_epoch as unsafe extern "C" fn() -> c_int, strandline_epoch];
    let _ = [header::strandline_phase as unsafe extern "C" fn(c_int) -> c_int, strandline_phase];
    let _ =
        [header::strandline_phase_of as unsafe extern "C" fn(*const c_char) -> c_int, strandline_phase_of];
    let _ = [
        header::strandline_candidates as unsafe extern "C" fn(*mut c_char, usize) -> usize,
        strandline_candidates,
    ];
    let _ =
        [header::strandline_explain as unsafe extern "C" fn(u64, *const c_char) -> c_int, strandline_explain];
    let _ = [header::strandline_collecting as unsafe extern "C" fn(c_int) -> c_int, strandline_collecting];
    let _ = [header::strandline_remark as unsafe extern "C" fn(*const c_char) -> c_int, strandline_remark];
    let _ = [header::strandline_report as unsafe extern "C" fn(*const c_char) -> c_int, strandline_report];
    let _ = [header::strandline_finish as unsafe extern "C" fn() -> c_int, strandline_finish];
    let _ = [
        header::strandline_stats as unsafe extern "C" fn(c_int, *mut c_char, usize) -> usize,
        strandline_stats,
    ];
    let _ = [header::strandline_say as unsafe extern "C" fn(*const c_char) -> c_int, strandline_say];
    let _ = [
        header::strandline_around
            as unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void) -> *mut c_void,
        strandline_around,
    ];
    let _ = [
        header::strandline_python_source as unsafe extern "C" fn(*const c_char) -> *const c_char,
        strandline_python_source,
    ];
};
