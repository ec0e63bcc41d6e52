//! Makes `import strandline` work before torch is imported, in any Python that the library is preloaded into.
//!
//! Python is given a built-in module of that name before it begins: of all that its C API allows at that time, this
//! alone is surely released by the allocator that it was made with (an audit hook is not: with `-X dev` Python
//! dies of it at its end). Nothing of ours runs until a job imports the name. Then the boot code makes the embedded
//! package importable and turns the built-in module's spec into that of the package, whose code Python goes on to
//! load. Must not know what the package does.

use super::options::command_line;
use super::python_api::{Object, function, is_initialized, raise};
use super::python_boot::{first_copy, run, symbol};
use libc::{c_char, c_int, c_void};
use std::cell::UnsafeCell;
use std::ffi::CStr;

/// CPython's `PyModuleDef`, with the head that objects have where neither threads are free nor references traced.
#[repr(C)]
struct Definition {
    references: isize,
    kind: Object,
    init: usize,
    index: isize,
    copy: Object,
    name: *const c_char,
    doc: *const c_char,
    size: isize,
    methods: *const c_void,
    slots: *const Slot,
    traverse: usize,
    clear: usize,
    free: usize,
}

/// CPython's `PyModuleDef_Slot`.
#[repr(C)]
struct Slot {
    what: c_int,
    value: *const c_void,
}

/// `Py_mod_create`.
const CREATE: c_int = 1;

struct Shared<T>(UnsafeCell<T>);

// SAFETY: only Python touches what is in here, with its lock held.
unsafe impl<T> Sync for Shared<T> {}

static SLOTS: Shared<[Slot; 2]> = Shared(UnsafeCell::new([
    Slot { what: CREATE, value: create as *const () as *const c_void },
    Slot { what: 0, value: std::ptr::null() },
]));

static DEFINITION: Shared<Definition> = Shared(UnsafeCell::new(Definition {
    references: 1,
    kind: std::ptr::null_mut(),
    init: 0,
    index: 0,
    copy: std::ptr::null_mut(),
    name: c"strandline".as_ptr(),
    doc: std::ptr::null(),
    size: 0,
    methods: std::ptr::null(),
    slots: SLOTS.0.get().cast(),
    traverse: 0,
    clear: 0,
    free: 0,
}));

/// What Python calls for a built-in module that is imported: answers with the definition, for it to be made in two
/// phases.
extern "C" fn begin() -> Object {
    // SAFETY: the documented signature.
    let init = unsafe { function::<extern "C" fn(*mut Definition) -> Object>(c"PyModuleDef_Init") };
    init.map_or(std::ptr::null_mut(), |init| init(DEFINITION.0.get()))
}

/// Makes the module of a spec. Python holds its lock.
extern "C" fn create(spec: Object, _: *mut Definition) -> Object {
    let made = std::panic::catch_unwind(|| made(spec)).ok().flatten();
    made.unwrap_or_else(|| {
        raise(c"PyExc_ModuleNotFoundError", c"No module named 'strandline'");
        std::ptr::null_mut()
    })
}

/// Has the boot code's importer adopt the spec; the importer is the first of `sys.meta_path` then. Nothing, and no
/// error in Python, if that is not so.
fn made(spec: Object) -> Option<Object> {
    type Call = unsafe extern "C" fn(Object, *const c_char, *const c_char, ...) -> Object;
    // SAFETY: the documented signatures of these functions of the stable ABI.
    let (get, item, call, clear) = unsafe {
        (
            function::<extern "C" fn(*const c_char) -> Object>(c"PySys_GetObject")?,
            function::<extern "C" fn(Object, isize) -> Object>(c"PyList_GetItem")?,
            function::<Call>(c"PyObject_CallMethod")?,
            function::<extern "C" fn()>(c"PyErr_Clear")?,
        )
    };
    run();
    // The first two answer with borrowed references, which live through the call of a method.
    let finders = get(c"meta_path".as_ptr());
    let first = if finders.is_null() { finders } else { item(finders, 0) };
    let module = if first.is_null() {
        first
    } else {
        // SAFETY: the format names one object, which is alive.
        unsafe { call(first, c"adopt".as_ptr(), c"(O)".as_ptr(), spec) }
    };
    if module.is_null() {
        clear();
        return None;
    }
    Some(module)
}

/// Whether this Python's objects have the head of [`Definition`]: else the package is there once torch is.
fn has_plain_objects() -> bool {
    // SAFETY: the documented signature; it may be called before Python is initialised and answers with a static.
    let version = unsafe {
        function::<extern "C" fn() -> *const c_char>(c"Py_GetVersion").map(|get| CStr::from_ptr(get()))
    };
    version.is_some_and(|version| !version.to_string_lossy().contains("free-threading"))
        && symbol(c"_Py_PrintReferences").is_none()
}

/// Whether Python was asked to run the installed package (`python -m strandline …`): a built-in module has no code to
/// run and would hide it. Only Python's own options count, which stand before the script.
fn is_to_be_run(arguments: &[String]) -> bool {
    let mut rest = arguments.iter().skip(1).map(String::as_str);
    while let Some(argument) = rest.next() {
        match argument.strip_prefix('-') {
            Some("W" | "X" | "-check-hash-based-pycs") => drop(rest.next()),
            Some(long) if long.starts_with('-') => {}
            Some(flags) if flags.contains('c') && !flags.starts_with(['W', 'X']) => return false,
            Some(flags) if flags.ends_with('m') && !flags.starts_with(['W', 'X']) => {
                return rest.next() == Some("strandline");
            }
            Some("mstrandline") => return true,
            Some(flags) if !flags.is_empty() => {}
            _ => return false, // the script
        }
    }
    false
}

/// Gives Python the module; runs when the library is loaded, before Python begins.
extern "C" fn offer() {
    type Append = extern "C" fn(*const c_char, extern "C" fn() -> Object) -> c_int;
    let off = std::env::var_os("STRANDLINE_MODE").is_some_and(|mode| mode == "off");
    // SAFETY: the documented signature.
    let Some(append) = (unsafe { function::<Append>(c"PyImport_AppendInittab") }) else { return };
    // Python 3.8 and newer: the others have no torch that is supported.
    if off || !first_copy() || symbol(c"PySys_AddAuditHook").is_none() || !has_plain_objects() {
        return;
    }
    // Only before Python begins; the name, which is kept, is a static.
    if symbol(c"Py_IsInitialized").is_some() && !is_initialized() && !is_to_be_run(&command_line()) {
        append(c"strandline".as_ptr(), begin);
    }
}

// SAFETY: the loader calls the functions of this section with three arguments that `offer` ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = offer;

#[cfg(test)]
mod tests {
    use super::is_to_be_run;

    #[test]
    fn the_installed_package_may_be_run() {
        let told = |line: &str| is_to_be_run(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(told("python -m strandline report run"));
        assert!(told("python -Im strandline"));
        assert!(told("python -mstrandline") && told("python -X dev -W error -m strandline"));
        assert!(!told("python train.py -m strandline") && !told("python -c code -m strandline"));
        assert!(!told("python -m strandline.other"));
        assert!(!told("python train.py --m strandline"));
        assert!(!told("python train.py strandline -m"));
    }
}
