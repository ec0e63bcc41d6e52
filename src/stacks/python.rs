//! Finds Python in the process and decides how its frames are captured: by offsets, by the public API
//! while the GIL is held, or not at all.
//!
//! Must not know what a capture is for. Nothing links to Python: every function is found by `dlsym`.
//! Invariant: the offset walk is used only after it agreed with the public API on a chain made for that
//! purpose (`python_check`), so an interpreter that merely resembles a known one is declined.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;

use super::python_check;
use super::python_fallback;
use super::python_layout::{self, DEBUG_WORDS, Layout};
use super::python_reuse;
use super::python_walk::{Direct, Named, Types, Walked, name, walk};
use super::raw::RawFrame;

/// How Python frames are captured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Method {
    /// By offsets, with or without the GIL.
    Offsets { version: String },
    /// Through the public API, only while the thread holds the GIL; why not by offsets.
    PublicApi { version: String, because: Reason },
}

/// Why something is not done: a sentence that can be shown to the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(pub String);

impl Reason {
    pub fn new(text: impl Into<String>) -> Reason {
        Reason(text.into())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Offsets { version } => write!(f, "Python {version}, by offsets (no GIL needed)"),
            Method::PublicApi { version, because } => {
                write!(f, "Python {version}, by its public API and only with the GIL, because {because}")
            }
        }
    }
}

pub type Object = *mut c_void;

/// Declares the functions of Python that are called, and finds them.
macro_rules! api {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Python's functions, by their names in C.
        #[allow(non_snake_case)]
        #[derive(Clone, Copy)]
        pub struct Api { $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)* }

        #[allow(non_snake_case)]
        impl Api {
            /// # Errors
            /// The name of the function that this Python does not have.
            fn find() -> Result<Api, &'static str> {
                $(let $name = symbol(concat!(stringify!($name), "\0")).ok_or(stringify!($name))?;)*
                // SAFETY: each address is that of the C function of this name, whose signature is as
                // declared in every CPython from 3.9 on.
                Ok(unsafe { Api { $($name: std::mem::transmute::<*mut c_void, _>($name),)* } })
            }
        }
    };
}

api! {
    Py_IsInitialized: fn() -> c_int;
    Py_GetVersion: fn() -> *const c_char;
    PyGILState_Check: fn() -> c_int;
    PyGILState_GetThisThreadState: fn() -> *mut c_void;
    PyThreadState_Get: fn() -> *mut c_void;
    PyEval_GetFrame: fn() -> Object;
    PyFrame_GetCode: fn(Object) -> Object;
    PyFrame_GetBack: fn(Object) -> Object;
    PyFrame_GetLineNumber: fn(Object) -> c_int;
    PyObject_GetAttrString: fn(Object, *const c_char) -> Object;
    PyUnicode_AsUTF8AndSize: fn(Object, *mut isize) -> *const c_char;
    PyLong_AsLong: fn(Object) -> std::ffi::c_long;
    Py_IncRef: fn(Object);
    Py_DecRef: fn(Object);
    PyErr_Fetch: fn(*mut Object, *mut Object, *mut Object);
    PyErr_Restore: fn(Object, Object, Object);
    PyErr_Clear: fn();
    Py_CompileString: fn(*const c_char, *const c_char, c_int) -> Object;
    PyEval_EvalCode: fn(Object, Object, Object) -> Object;
    PyEval_GetBuiltins: fn() -> Object;
    PyDict_New: fn() -> Object;
    PyDict_SetItemString: fn(Object, *const c_char, Object) -> c_int;
    PyCFunction_NewEx: fn(*mut c_void, Object, Object) -> Object;
}

fn symbol(name: &'static str) -> Option<*mut c_void> {
    debug_assert!(name.ends_with('\0'));
    // SAFETY: the name ends with a zero byte; RTLD_DEFAULT searches what the process has loaded.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr().cast()) };
    (!address.is_null()).then_some(address)
}

/// The range of `_PyEval_EvalFrameDefault`; empty if it is not exported with its size.
fn interpreter() -> std::ops::Range<u64> {
    const WITH_SYMBOL: c_int = 1;
    let Some(start) = symbol("_PyEval_EvalFrameDefault\0") else { return 0..0 };
    // SAFETY: zero is a valid Dl_info; with this flag dladdr1 stores a pointer to the ELF symbol, which
    // stays while the object is loaded.
    let size = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let mut entry = std::ptr::null_mut::<c_void>();
        let found = libc::dladdr1(start, &raw mut info, &raw mut entry, WITH_SYMBOL) != 0;
        if found && !entry.is_null() { (*entry.cast::<libc::Elf64_Sym>()).st_size } else { 0 }
    };
    start as u64..start as u64 + size
}

/// A Python that was found and a way to capture its frames.
pub struct Python {
    pub api: Api,
    pub types: Types,
    /// The code of the bytecode interpreter's loop: the border between C called from Python and Python.
    pub interpreter: std::ops::Range<u64>,
    /// The true layout, or why there is none.
    pub layout: Result<Layout, Reason>,
}

/// Finds Python and settles the method. Call with the GIL held.
///
/// # Errors
/// Why no Python frames will be captured at all.
pub fn start(by_offsets: bool) -> Result<(Python, Method), Reason> {
    let api = Api::find().map_err(|missing| {
        Reason::new(format!("this process has no Python that can be called ({missing} is not exported)"))
    })?;
    // SAFETY: both may be called at any time.
    if unsafe { (api.Py_IsInitialized)() == 0 || (api.PyGILState_Check)() == 0 } {
        return Err(Reason::new("Python was not running in this thread when strandline started"));
    }
    // SAFETY: Py_GetVersion returns a static string.
    let banner = unsafe { CStr::from_ptr((api.Py_GetVersion)()) }.to_string_lossy().into_owned();
    let types = Types {
        code: symbol("PyCode_Type\0").map_or(0, |address| address as u64),
        text: symbol("PyUnicode_Type\0").map_or(0, |address| address as u64),
        bytes: symbol("PyBytes_Type\0").map_or(0, |address| address as u64),
    };
    let version = banner.split_whitespace().next().unwrap_or("?").to_owned();
    let mut python = Python { api, types, interpreter: interpreter(), layout: Err(Reason::new("")) };
    let wanted = by_offsets.then_some(()).ok_or_else(|| Reason::new("that was asked for"));
    python.layout = wanted
        .and_then(|()| candidates(&banner))
        .and_then(|layouts| python_check::first_true(&python, &layouts))
        .and_then(|layout| told_apart(layout, types.code));
    match &python.layout {
        Ok(_) => Ok((python, Method::Offsets { version })),
        Err(because) => {
            let because = because.clone();
            Ok((python, Method::PublicApi { version, because }))
        }
    }
}

/// The layouts that this interpreter may have, likeliest first.
fn candidates(banner: &str) -> Result<Vec<Layout>, Reason> {
    if banner.contains("free-threading") {
        return Err(Reason::new(
            "this is a free-threaded build of Python, whose frames cannot be walked safely",
        ));
    }
    if cfg!(not(all(target_os = "linux", target_pointer_width = "64"))) {
        return Err(Reason::new("the offsets of Python's frames are known for 64-bit Linux only"));
    }
    let minor = banner
        .strip_prefix("3.")
        .and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok())
        .unwrap_or(0);
    let table = python_layout::built_in(minor).ok_or_else(|| {
        let version = banner.split_whitespace().next().unwrap_or("?");
        Reason::new(format!("the frames of Python {version} are not known (3.9 to 3.14 are)"))
    })?;
    let stated = if minor >= 13 {
        let runtime = symbol("_PyRuntime\0")
            .ok_or_else(|| Reason::new("_PyRuntime, which states the offsets, is not exported"))?;
        let version = symbol("Py_Version\0").ok_or_else(|| Reason::new("Py_Version is not exported"))?;
        // SAFETY: Py_Version is a constant unsigned long; _PyRuntime is larger than any version's debug
        // offsets (hundreds of kilobytes) and its first words never change after start-up.
        let (version, words) = unsafe {
            (*version.cast::<std::ffi::c_ulong>(), runtime.cast::<[u64; DEBUG_WORDS]>().read_unaligned())
        };
        python_layout::from_debug_offsets(&words, version, &table).map_err(Reason)?
    } else {
        table
    };
    let with = |kind_shift: &u32| {
        let mut layout = stated;
        layout.text.kind_shift = *kind_shift;
        layout
    };
    Ok(python_layout::kind_shifts(minor).iter().map(with).collect())
}

/// The layout, if code objects that follow each other at one address can be told apart.
fn told_apart(layout: Layout, code_type: u64) -> Result<Layout, Reason> {
    // SAFETY: the GIL is held (`start`), and the layout was found true, so this is a Python before 3.12.
    if layout.code.version.is_some() || unsafe { python_reuse::watch(code_type) } {
        return Ok(layout);
    }
    Err(Reason::new("the end of its code objects cannot be watched"))
}

impl Python {
    /// The calling thread's Python frames, innermost first; none if it has none or they cannot be had.
    /// `out` must have room for `depth` + 1.
    #[inline]
    pub fn walk(&self, depth: usize, out: &mut [RawFrame]) -> Walked {
        // SAFETY: may be called by any thread at any time; null where the thread has no state.
        let thread = unsafe { (self.api.PyGILState_GetThisThreadState)() } as u64;
        if thread == 0 {
            return Walked::default();
        }
        match &self.layout {
            // SAFETY: the state is this thread's own, and the layout passed the self-check.
            Ok(layout) => unsafe { walk(&Direct, layout, thread, depth, out) },
            Err(_) => python_fallback::walk(&self.api, depth, out),
        }
    }

    /// Names a frame that the last walk of this thread returned, before the thread runs Python again.
    pub fn name(&self, frame: RawFrame) -> Option<Named> {
        match &self.layout {
            // SAFETY: the frame is on this thread's chain now; the layout passed the self-check.
            Ok(layout) => unsafe { name(&Direct, layout, &self.types, frame) },
            Err(_) => python_fallback::name(&self.api, frame),
        }
    }
}
