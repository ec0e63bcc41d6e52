//! How Python's C API is reached: nothing links to Python, every function is found at run time.
//!
//! Must not know what it is used for. (Stack capture has functions of its own: it must not know this module.)

use super::python_boot::symbol;
use libc::{c_char, c_int, c_void};
use std::ffi::CStr;

/// A `PyObject *`.
pub(super) type Object = *mut c_void;

/// A function of Python's, if this process has it.
///
/// # Safety
/// `F` is the type of the function that CPython documents under `name`.
pub(super) unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    let found = symbol(name)?;
    // SAFETY: the caller's contract; a function pointer has the size of an address.
    (size_of::<F>() == size_of::<Object>()).then(|| unsafe { std::mem::transmute_copy(&found) })
}

/// Whether Python is initialised; it may be asked at any time.
pub(super) fn is_initialized() -> bool {
    // SAFETY: the documented signature.
    unsafe { function::<extern "C" fn() -> c_int>(c"Py_IsInitialized") }.is_some_and(|asked| asked() != 0)
}

/// Whether this thread holds Python's lock. Python must be initialised.
pub(super) fn holds_lock() -> bool {
    // SAFETY: the documented signature.
    unsafe { function::<extern "C" fn() -> c_int>(c"PyGILState_Check") }.is_some_and(|asked| asked() == 1)
}

/// Sets an error of Python's: of the class that a variable of this name holds, with a text. The caller holds
/// Python's lock.
pub(super) fn raise(class: &CStr, text: &CStr) {
    // SAFETY: the documented signature.
    let set = unsafe { function::<extern "C" fn(Object, *const c_char)>(c"PyErr_SetString") };
    if let (Some(set), Some(class)) = (set, symbol(class)) {
        // SAFETY: the variable is Python's own, and set since it was initialised.
        set(unsafe { *class.cast::<Object>() }, text.as_ptr());
    }
}
