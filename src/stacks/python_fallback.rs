//! Python frames through the public API alone, for interpreters whose layout is not known.
//!
//! Must not know any offset. Works only while the thread holds the GIL, and is slower (microseconds):
//! names are compared by content, because nothing else tells two code objects at one address apart.
//! Invariant: the thread's pending exception and every reference count are as before.

use std::ffi::CStr;
use std::ptr::null_mut;

use super::python::{Api, Object};
use super::python_walk::{Named, Walked};
use super::raw::{self, RawFrame};

/// An owned reference.
pub struct Owned<'a> {
    api: &'a Api,
    pub object: Object,
}

impl<'a> Owned<'a> {
    /// Takes over a new reference; `None` for null, with Python's exception cleared.
    ///
    /// # Safety
    /// `object` is null or a new reference, and the GIL is held as long as the result lives.
    pub unsafe fn new(api: &'a Api, object: Object) -> Option<Owned<'a>> {
        if object.is_null() {
            // SAFETY: the GIL is held.
            unsafe { (api.PyErr_Clear)() };
            return None;
        }
        Some(Owned { api, object })
    }

    pub fn attribute(&self, name: &CStr) -> Option<Owned<'a>> {
        // SAFETY: the object is alive and the GIL held (`new`); the result is a new reference or null.
        unsafe { Owned::new(self.api, (self.api.PyObject_GetAttrString)(self.object, name.as_ptr())) }
    }

    pub fn text(&self) -> Option<String> {
        let mut length = 0isize;
        // SAFETY: the object is alive and the GIL held; the result lives as long as the object.
        unsafe {
            let start = (self.api.PyUnicode_AsUTF8AndSize)(self.object, &raw mut length);
            if start.is_null() {
                (self.api.PyErr_Clear)();
                return None;
            }
            let bytes = std::slice::from_raw_parts(start.cast::<u8>(), usize::try_from(length).ok()?);
            Some(String::from_utf8_lossy(bytes).into_owned())
        }
    }

    pub fn number(&self) -> Option<i64> {
        // SAFETY: the object is alive and the GIL held; an exception is cleared.
        unsafe {
            let number = (self.api.PyLong_AsLong)(self.object);
            if number == -1 {
                (self.api.PyErr_Clear)();
            }
            Some(number)
        }
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is ours and the GIL is held (`new`).
        unsafe { (self.api.Py_DecRef)(self.object) };
    }
}

/// Puts the pending exception aside, because most of the API may not be called with one set.
pub struct Exception<'a> {
    api: &'a Api,
    parts: [Object; 3],
}

impl<'a> Exception<'a> {
    /// # Safety
    /// The GIL is held until the result is dropped.
    pub unsafe fn aside(api: &'a Api) -> Exception<'a> {
        let mut parts = [null_mut(); 3];
        let [kind, value, trace] = &mut parts;
        // SAFETY: three places for three references.
        unsafe { (api.PyErr_Fetch)(kind, value, trace) };
        Exception { api, parts }
    }
}

impl Drop for Exception<'_> {
    fn drop(&mut self) {
        let [kind, value, trace] = self.parts;
        // SAFETY: gives back what PyErr_Fetch gave; the GIL is held (`aside`).
        unsafe { (self.api.PyErr_Restore)(kind, value, trace) };
    }
}

/// The chain of frames, innermost first, as (code, line).
///
/// # Safety
/// The GIL is held.
pub unsafe fn chain<'a>(api: &'a Api, depth: usize, mut each: impl FnMut(&Owned<'a>, i32) -> bool) {
    // SAFETY: the GIL is held; PyEval_GetFrame lends, so a reference is taken; the others are new.
    unsafe {
        let current = (api.PyEval_GetFrame)();
        if current.is_null() {
            return;
        }
        (api.Py_IncRef)(current);
        let mut frame = Owned::new(api, current);
        for _ in 0..=depth {
            let Some(now) = frame else { return };
            let line = (api.PyFrame_GetLineNumber)(now.object);
            let Some(code) = Owned::new(api, (api.PyFrame_GetCode)(now.object)) else { return };
            if !each(&code, line) {
                return;
            }
            frame = Owned::new(api, (api.PyFrame_GetBack)(now.object));
        }
    }
}

/// File and function of a code object.
pub fn names(code: &Owned<'_>) -> Option<(String, String)> {
    let function = code.attribute(c"co_qualname").or_else(|| code.attribute(c"co_name"))?;
    Some((code.attribute(c"co_filename")?.text()?, function.text()?))
}

/// As `python_walk::walk`, only with the GIL. The instruction's place is its line.
pub fn walk(api: &Api, depth: usize, out: &mut [RawFrame]) -> Walked {
    // SAFETY: may be called by any thread that has a state.
    if unsafe { (api.PyGILState_Check)() } == 0 {
        return Walked::default();
    }
    let mut frames = 0;
    // SAFETY: the GIL is held, and nothing here gives it up.
    unsafe {
        let _exception = Exception::aside(api);
        chain(api, depth, |code, line| {
            let Some(slot) = out.get_mut(frames) else { return false };
            *slot = if frames < depth { raw(code, line) } else { RawFrame::cut() };
            frames += 1;
            frames <= depth
        });
    }
    Walked { frames, hash: raw::hash(&out[..frames]) }
}

fn raw(code: &Owned<'_>, line: i32) -> RawFrame {
    let print = names(code).map_or(0, |(file, function)| {
        let bytes = file.bytes().chain([0]).chain(function.bytes());
        bytes.fold(0x811c_9dc5u32, |print, byte| (print ^ u32::from(byte)).wrapping_mul(0x0100_0193))
    });
    RawFrame::python(code.object as u64, line, print)
}

/// Names a frame of the last [`walk`]: looked for on the chain again, which also proves it alive.
pub fn name(api: &Api, frame: RawFrame) -> Option<Named> {
    const DEEPEST: usize = 100_000;
    let mut found = None;
    // SAFETY: may be called by any thread that has a state.
    if unsafe { (api.PyGILState_Check)() } == 0 {
        return None;
    }
    // SAFETY: the GIL is held, and nothing here gives it up.
    unsafe {
        let _exception = Exception::aside(api);
        chain(api, DEEPEST, |code, line| {
            if code.object as u64 == frame.place && line == frame.offset() {
                found = names(code).map(|(file, function)| Named {
                    file,
                    function,
                    line: u32::try_from(line).unwrap_or(0),
                });
            }
            found.is_none()
        });
    }
    found
}
