//! Calls something before and after one of torch's functions, from C: no frame of Python of ours then lies
//! between the user's call and torch, so none shows in the user's tracebacks, warnings and debuggers.
//!
//! The Python side makes a built-in function of [`strandline_around`](super::abi::strandline_around) whose `self`
//! is the tuple `(before, original, after)`. Must not know what these do. Invariant: the exception, its
//! traceback and its chain are those of the original; what `before` and `after` raise of their own goes no
//! further. What is no `Exception` passes: Python runs the handlers of signals wherever its code runs, also in
//! these two, and a KeyboardInterrupt that comes then is meant for the job.

use super::python_api::{Object, function, raise};
use super::python_boot::symbol;
use libc::{c_int, c_long, c_void};
use std::sync::OnceLock;

/// The functions of CPython's C API that are used here, all of its stable ABI.
struct Python {
    item: extern "C" fn(Object, isize) -> Object,
    call: extern "C" fn(Object, Object, Object) -> Object,
    call_with: unsafe extern "C" fn(Object, ...) -> Object,
    truth: extern "C" fn(c_long) -> Object,
    release: extern "C" fn(Object),
    clear: extern "C" fn(),
    matches: extern "C" fn(Object) -> c_int,
    normalize: extern "C" fn(*mut Object, *mut Object, *mut Object),
    set_context: extern "C" fn(Object, Object),
    set_trace: extern "C" fn(Object, Object) -> c_int,
    /// The variable that holds the class `Exception`.
    exception: *const Object,
    fetch: extern "C" fn(*mut Object, *mut Object, *mut Object),
    restore: extern "C" fn(Object, Object, Object),
}

// SAFETY: functions, and a variable that Python sets once, before any of our code is called by it.
unsafe impl Send for Python {}
// SAFETY: as above.
unsafe impl Sync for Python {}

impl Python {
    fn get() -> Option<&'static Python> {
        static PYTHON: OnceLock<Option<Python>> = OnceLock::new();
        PYTHON.get_or_init(Python::find).as_ref()
    }

    fn find() -> Option<Python> {
        // SAFETY: the documented signatures of these functions of the stable ABI.
        unsafe {
            Some(Python {
                item: function(c"PyTuple_GetItem")?,
                call: function(c"PyObject_Call")?,
                call_with: function(c"PyObject_CallFunctionObjArgs")?,
                truth: function(c"PyBool_FromLong")?,
                release: function(c"Py_DecRef")?,
                clear: function(c"PyErr_Clear")?,
                matches: function(c"PyErr_ExceptionMatches")?,
                normalize: function(c"PyErr_NormalizeException")?,
                set_context: function(c"PyException_SetContext")?,
                set_trace: function(c"PyException_SetTraceback")?,
                exception: symbol(c"PyExc_Exception")?.cast::<Object>(),
                fetch: function(c"PyErr_Fetch")?,
                restore: function(c"PyErr_Restore")?,
            })
        }
    }

    /// Takes an error of ours away, if it is an `Exception`. False: another one is set, and the job is to get it.
    fn forgets(&self) -> bool {
        // SAFETY: the variable is Python's own, and set since it was initialised.
        if (self.matches)(unsafe { *self.exception }) == 0 {
            return false;
        }
        (self.clear)();
        true
    }

    /// The error that is set, taken away: with it an exception that is an object, and has its traceback.
    fn take(&self) -> Object {
        let (mut kind, mut value, mut trace) = NO_ERROR;
        (self.fetch)(&mut kind, &mut value, &mut trace);
        (self.normalize)(&mut kind, &mut value, &mut trace);
        if !trace.is_null() && !value.is_null() {
            (self.set_trace)(value, trace);
        }
        (self.release)(kind);
        (self.release)(trace);
        value
    }

    /// Gives the error that is set another one as its context.
    fn chain(&self, earlier: (Object, Object, Object)) {
        let (mut kind, mut value, mut trace) = NO_ERROR;
        (self.fetch)(&mut kind, &mut value, &mut trace);
        (self.normalize)(&mut kind, &mut value, &mut trace);
        (self.restore)(earlier.0, earlier.1, earlier.2);
        let earlier = self.take();
        if value.is_null() || std::ptr::eq(value, earlier) {
            (self.release)(earlier);
        } else {
            // Takes over the reference.
            (self.set_context)(value, earlier);
        }
        (self.restore)(kind, value, trace);
    }
}

const NO_ERROR: (Object, Object, Object) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());

/// Whether this Python has what is needed.
pub fn is_possible() -> bool {
    Python::get().is_some()
}

/// Calls `before(*arguments)`, the original with the same arguments, and `after(token, result, failed)` with
/// what `before` returned; the result is the original's. Null, and Python's error is set, where one of them raised
/// what goes further.
pub fn call(three: Object, arguments: Object, keywords: Object) -> Object {
    let Some(py) = Python::get() else { return std::ptr::null_mut() };
    let part = |index| (py.item)(three, index);
    let (before, original, after) = (part(0), part(1), part(2));
    let token = (py.call)(before, arguments, keywords);
    if token.is_null() && !py.forgets() {
        return std::ptr::null_mut();
    }
    let result = (py.call)(original, arguments, keywords);
    if token.is_null() {
        return result;
    }
    let (mut kind, mut value, mut trace) = NO_ERROR;
    let failed = result.is_null();
    if failed {
        (py.fetch)(&mut kind, &mut value, &mut trace);
    }
    let failed = (py.truth)(c_long::from(failed));
    // What an original that failed has for a result is that it failed.
    let shown = if result.is_null() { failed } else { result };
    // SAFETY: objects that are alive (borrowed from the tuple, or owned here), and a null at the end.
    let told = unsafe { (py.call_with)(after, token, shown, failed, std::ptr::null_mut::<c_void>()) };
    let forgotten = !told.is_null() || py.forgets();
    (py.release)(told);
    (py.release)(failed);
    (py.release)(token);
    if forgotten {
        if result.is_null() {
            (py.restore)(kind, value, trace);
        }
        return result;
    }
    if result.is_null() {
        py.chain((kind, value, trace));
    }
    (py.release)(result);
    std::ptr::null_mut()
}

/// Sets an error of Python's for a fault of ours: a function that answers with null must have one.
pub fn fault() {
    raise(c"PyExc_SystemError", c"strandline: internal fault, please report it");
}
