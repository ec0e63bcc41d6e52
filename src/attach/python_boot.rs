//! Runs the Python side when `import torch` is seen, without changing a line of the job. (`import strandline` before
//! that is the business of `python_module`.)
//!
//! The moment is torch's own `dlopen` of its extension module: Python is initialised, the thread holds the
//! GIL, and CUDA has not been touched. All of Python is found at run time; a process without Python, or
//! without torch, never gets past the look at a file name. Must not know torch's internals: that is the
//! Python side's business, whose sources are part of this library.

use super::python_api::{function, holds_lock, is_initialized};
use libc::{c_char, c_int, c_void};
use std::ffi::{CStr, CString};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

include!(concat!(env!("OUT_DIR"), "/python_sources.rs"));

const BOOT: &str = include_str!("boot.py");

/// A symbol of the process, from any library that is globally visible.
pub(super) fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: dlsym with a terminated name.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Whether a path is torch's extension module: `…/torch/_C.cpython-….so`.
fn is_torch_extension(path: &[u8]) -> bool {
    let split = path.iter().rposition(|b| *b == b'/').map_or(0, |at| at + 1);
    let (folder, name) = path.split_at(split);
    name.starts_with(b"_C.") && folder.ends_with(b"torch/")
}

static TORCH: AtomicBool = AtomicBool::new(false);
/// Whether the Python side has been begun, because torch is here.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// Whether torch was imported, or is just being imported.
pub(super) fn torch_was_seen() -> bool {
    TORCH.load(Ordering::Relaxed)
}

/// Called with each path given to `dlopen`.
pub(super) fn seen(path: &[u8]) {
    if is_torch_extension(path) {
        TORCH.store(true, Ordering::Relaxed);
    }
    if !is_torch_extension(path) || BEGUN.load(Ordering::Relaxed) || !first_copy() {
        return;
    }
    if std::env::var_os("STRANDLINE_MODE").is_some_and(|mode| mode == "off") || super::process::is_detached()
    {
        return;
    }
    if !BEGUN.swap(true, Ordering::SeqCst) {
        let _ = std::panic::catch_unwind(run);
    }
}

/// Whether Python runs in this process and this thread holds its lock.
pub(super) fn gil_is_held() -> bool {
    is_initialized() && holds_lock()
}

/// Has Python's main thread call `what` when it comes round to it: for what needs Python's lock, from a thread
/// that does not have it. The last one that was asked for is called.
pub(super) fn once_with_the_gil(what: fn()) {
    static WHAT: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn pending(_: *mut c_void) -> c_int {
        let what = WHAT.swap(0, Ordering::AcqRel);
        if what != 0 {
            // SAFETY: only function pointers of this type are stored.
            let what = unsafe { std::mem::transmute::<usize, fn()>(what) };
            let _ = std::panic::catch_unwind(what);
        }
        0
    }
    type Add = extern "C" fn(extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
    // SAFETY: the documented signature.
    let Some(add) = unsafe { function::<Add>(c"Py_AddPendingCall") }.filter(|_| is_initialized()) else {
        return;
    };
    WHAT.store(what as usize, Ordering::Release);
    // From any thread, without Python's lock.
    add(pending, std::ptr::null_mut());
}

/// Whether this is the copy of the library that serves the process (a job may be preloaded twice).
pub(super) fn first_copy() -> bool {
    symbol(c"strandline_abi_version")
        .is_none_or(|at| std::ptr::eq(at, super::abi::strandline_abi_version as *const c_void))
}

/// Runs the boot code. The caller holds Python's lock.
pub(super) fn run() {
    static SAID: AtomicBool = AtomicBool::new(false);
    // SAFETY: the documented signature.
    let found = unsafe { function::<extern "C" fn(*const c_char) -> c_int>(c"PyRun_SimpleString") };
    let Some(run) = found else {
        return super::say_once(
            &SAID,
            format_args!(
                "this Python hides its C API, so torch cannot be followed here; \
                 call strandline.install() at the top of the script instead"
            ),
        );
    };
    if !gil_is_held() {
        return super::say_once(
            &SAID,
            format_args!(
                "torch is being loaded outside of a Python import; call strandline.install() before using it"
            ),
        );
    }
    if let Ok(code) = CString::new(BOOT) {
        run(code.as_ptr());
    }
}

/// The source of a module of the Python package (`""` for the package itself), for the boot code's importer.
pub(super) fn source(module: &str) -> Option<&'static CStr> {
    static TEXTS: OnceLock<Vec<(&'static str, CString)>> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        PYTHON_SOURCES.iter().filter_map(|(name, text)| Some((*name, CString::new(*text).ok()?))).collect()
    });
    texts.iter().find(|(name, _)| *name == module).map(|(_, text)| text.as_c_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_torch_s_extension_is_meant() {
        assert!(is_torch_extension(b"/v/site-packages/torch/_C.cpython-311-x86_64-linux-gnu.so"));
        assert!(is_torch_extension(b"torch/_C.abi3.so"));
        assert!(!is_torch_extension(b"/v/site-packages/torchvision/_C.so"));
        assert!(!is_torch_extension(b"/v/torch/lib/libtorch.so"));
        assert!(!is_torch_extension(b"_C.so"));
        assert!(!is_torch_extension(b""));
    }

    #[test]
    fn the_package_is_embedded() {
        assert!(source("").is_some_and(|s| !s.is_empty()));
        assert!(source("no_such_module").is_none());
        assert!(source("pytest_plugin").is_none());
    }
}
