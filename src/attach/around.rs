//! Calls something before and after one of torch's functions, from C: no frame of Python of ours then lies
//! between the user's call and torch, so none shows in the user's tracebacks, warnings and debuggers.
//!
//! The Python side makes a built-in function of [`strandline_around`](super::abi::strandline_around) whose `self`
//! is the tuple `(before, original, after)`. Must not know what these do. Invariant: the exception, its
//! traceback and its chain are those of the original; what `before` and `after` raise goes no further.

use super::python_boot::symbol;
use libc::{c_long, c_void};
use std::ffi::CStr;
use std::sync::OnceLock;

/// A `PyObject *`.
type Object = *mut c_void;

/// The functions of CPython's C API that are used here, all of its stable ABI.
struct Python {
    item: extern "C" fn(Object, isize) -> Object,
    call: extern "C" fn(Object, Object, Object) -> Object,
    call_with: unsafe extern "C" fn(Object, ...) -> Object,
    truth: extern "C" fn(c_long) -> Object,
    release: extern "C" fn(Object),
    clear: extern "C" fn(),
    fetch: extern "C" fn(*mut Object, *mut Object, *mut Object),
    restore: extern "C" fn(Object, Object, Object),
}

impl Python {
    fn get() -> Option<&'static Python> {
        static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
        PYTHON.get_or_init(Python::find).as_ref()
    }

    fn find() -> Option<Python> {
        /// # Safety
        /// `F` is the type of the function that CPython documents under `name`.
        unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
            let found = symbol(name)?;
            // SAFETY: the caller's contract; a function pointer has the size of an address.
            (size_of::<F>() == size_of::<Object>()).then(|| unsafe { std::mem::transmute_copy(&found) })
        }
        // SAFETY: the documented signatures of these functions of the stable ABI.
        unsafe {
            Some(Python {
                item: function(c"PyTuple_GetItem")?,
                call: function(c"PyObject_Call")?,
                call_with: function(c"PyObject_CallFunctionObjArgs")?,
                truth: function(c"PyBool_FromLong")?,
                release: function(c"Py_DecRef")?,
                clear: function(c"PyErr_Clear")?,
                fetch: function(c"PyErr_Fetch")?,
                restore: function(c"PyErr_Restore")?,
            })
        }
    }
}

/// Whether this Python has what is needed.
pub fn is_possible() -> bool {
    Python::get().is_some()
}

/// Calls `before(*arguments)`, the original with the same arguments, and `after(token, result, failed)` with
/// what `before` returned; the result is the original's.
pub fn call(three: Object, arguments: Object, keywords: Object) -> Object {
    let Some(py) = Python::get() else { return std::ptr::null_mut() };
    let part = |index| (py.item)(three, index);
    let (before, original, after) = (part(0), part(1), part(2));
    let token = (py.call)(before, arguments, keywords);
    if token.is_null() {
        (py.clear)();
    }
    let result = (py.call)(original, arguments, keywords);
    if token.is_null() {
        return result;
    }
    let (mut kind, mut value, mut trace) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    let failed = result.is_null();
    if failed {
        (py.fetch)(&mut kind, &mut value, &mut trace);
    }
    let failed = (py.truth)(c_long::from(failed));
    // What an original that failed has for a result is that it failed.
    let shown = if result.is_null() { failed } else { result };
    // SAFETY: objects that are alive (borrowed from the tuple, or owned here), and a null at the end.
    let told = unsafe { (py.call_with)(after, token, shown, failed, std::ptr::null_mut::<c_void>()) };
    if told.is_null() {
        (py.clear)();
    } else {
        (py.release)(told);
    }
    (py.release)(failed);
    (py.release)(token);
    if result.is_null() {
        (py.restore)(kind, value, trace);
    }
    result
}
