//! The start-up self-check: does the offset walk see what the public API sees?
//!
//! Must not know which versions exist; it is handed layouts and keeps the first that is true. It runs a
//! few lines of Python (nested calls, a generator, a callback from C, a name outside ASCII, a call that
//! spans lines) that call back into Rust, and compares there, frame by frame: code object, line, file,
//! function. Invariant: while a layout is not yet known to be true, memory is read through the kernel
//! (`Checked`), so that a false one ends in a sentence and not in a crash.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use super::python::{Object, Python, Reason};
use super::python_fallback::{Exception, Owned, chain, names};
use super::python_layout::Layout;
use super::python_walk::{Checked, Memory, Types, name, walk};
use super::raw::RawFrame;

const PROGRAM: &CStr = c"
def pl\xC3\xA4tze(call):
    def inner(value):
        return call(
            value
        )
    class Caller:
        def __init__(self, value):
            self.got = inner(value)
    def generate():
        for value in (1, 2):
            yield Caller(value).got
    return list(map(lambda each: each, generate()))
pl\xC3\xA4tze(strandline_check)
";
const FILE: &CStr = c"<strandline self-check>";
const DEPTH: usize = 64;

/// What the callback needs and what it found; a thread-local because Python hands it on by no argument.
struct Trial {
    python: *const Python,
    layouts: Vec<Layout>,
    /// For each layout the first thing that was wrong.
    wrong: Vec<Option<String>>,
    calls: usize,
}

thread_local! {
    static TRIAL: RefCell<Option<Trial>> = const { RefCell::new(None) };
}

/// `PyMethodDef`, part of the stable ABI.
#[repr(C)]
struct MethodDef {
    name: *const c_char,
    function: unsafe extern "C" fn(Object, Object) -> Object,
    flags: c_int,
    doc: *const c_char,
}

// SAFETY: the pointers are to constants.
unsafe impl Sync for MethodDef {}

const METH_O: c_int = 8;
/// Must outlive the function object, which keeps its address.
static METHOD: MethodDef =
    MethodDef { name: c"strandline_check".as_ptr(), function: callback, flags: METH_O, doc: c"".as_ptr() };

/// The first of `layouts` that agrees with the public API.
///
/// # Errors
/// What was wrong with the last one.
pub fn first_true(python: &Python, layouts: &[Layout]) -> Result<Layout, Reason> {
    if python.types.code == 0 || python.types.text == 0 || python.types.bytes == 0 {
        return Err(Reason::new("Python's built-in types are not exported"));
    }
    let wrong = vec![None; layouts.len()];
    let trial = Trial { python, layouts: layouts.to_vec(), wrong, calls: 0 };
    TRIAL.with(|place| *place.borrow_mut() = Some(trial));
    // SAFETY: `python::start` is called with the GIL held.
    let ran = unsafe { run(python) };
    let trial = TRIAL.with(|place| place.borrow_mut().take());
    let Some(trial) = trial.filter(|trial| ran && trial.calls == 2) else {
        return Err(Reason::new("the self-check of its frames could not be run"));
    };
    let verdicts = trial.layouts.iter().zip(&trial.wrong);
    let mut last = Reason::new("no layout is known for it");
    for (layout, wrong) in verdicts {
        match wrong {
            None => return Ok(*layout),
            Some(what) => last = Reason::new(format!("the self-check of its frames failed: {what}")),
        }
    }
    Err(last)
}

/// Runs the program; says whether it ran to its end.
///
/// # Safety
/// The GIL is held.
unsafe fn run(python: &Python) -> bool {
    const FILE_INPUT: c_int = 257;
    let api = &python.api;
    // SAFETY: the GIL is held; every object is owned by an `Owned` or lent (builtins).
    unsafe {
        let _exception = Exception::aside(api);
        let own = |object: Object| Owned::new(api, object);
        let Some(code) = own((api.Py_CompileString)(PROGRAM.as_ptr(), FILE.as_ptr(), FILE_INPUT)) else {
            return false;
        };
        let Some(scope) = own((api.PyDict_New)()) else { return false };
        let method = (&raw const METHOD).cast_mut().cast::<c_void>();
        let Some(function) = own((api.PyCFunction_NewEx)(method, null_mut(), null_mut())) else {
            return false;
        };
        let set = |name: &CStr, object: Object| {
            (api.PyDict_SetItemString)(scope.object, name.as_ptr(), object) == 0
        };
        if !set(c"strandline_check", function.object) || !set(c"__builtins__", (api.PyEval_GetBuiltins)()) {
            return false;
        }
        own((api.PyEval_EvalCode)(code.object, scope.object, scope.object)).is_some()
    }
}

unsafe extern "C" fn callback(_: Object, argument: Object) -> Object {
    TRIAL.with(|place| {
        let Ok(mut place) = place.try_borrow_mut() else { return };
        let Some(trial) = place.as_mut() else { return };
        trial.calls += 1;
        // SAFETY: `first_true` lends it for as long as the program runs.
        let python = unsafe { &*trial.python };
        for (layout, wrong) in trial.layouts.iter().zip(&mut trial.wrong) {
            if wrong.is_none() {
                // SAFETY: Python called, so the GIL is held.
                *wrong = unsafe { compare(python, layout) }.err();
            }
        }
        // SAFETY: the argument is lent; the caller expects a new reference.
        unsafe { (python.api.Py_IncRef)(argument) };
    });
    argument
}

/// Compares the chain of the calling thread, seen both ways.
///
/// # Safety
/// The GIL is held.
unsafe fn compare(python: &Python, layout: &Layout) -> Result<(), String> {
    let api = &python.api;
    let memory = Checked::new().ok_or("no pipe could be made to read memory safely")?;
    // SAFETY: the GIL is held, so both answer.
    let (own, current) = unsafe { ((api.PyGILState_GetThisThreadState)(), (api.PyThreadState_Get)()) };
    if own != current {
        return Err("this thread runs in a sub-interpreter".into());
    }
    let mut out = [RawFrame::default(); DEPTH + 1];
    // SAFETY: the state is this thread's; `Checked` survives a false layout.
    let walked = unsafe { walk(&memory, layout, current as u64, DEPTH, &mut out) };
    let seen: Vec<_> = out[..walked.frames]
        .iter()
        .take(DEPTH)
        // SAFETY: as above.
        .filter_map(|frame| Some((frame.place, unsafe { named(&memory, layout, &python.types, *frame) }?)))
        .collect();
    let mut index = 0;
    let mut verdict = Ok(());
    // SAFETY: the GIL is held. `aside` is not needed: `run` put the exception aside.
    unsafe {
        chain(api, DEPTH - 1, |code, line| {
            verdict = one(seen.get(index), code, line);
            index += 1;
            verdict.is_ok()
        });
    }
    verdict?;
    if index < 5 {
        return Err(format!("the public API showed {index} frames of at least 5"));
    }
    if index < DEPTH && seen.len() != index {
        return Err(format!("{} frames were walked where there are {index}", seen.len()));
    }
    Ok(())
}

unsafe fn named<M: Memory>(
    memory: &M,
    layout: &Layout,
    types: &Types,
    frame: RawFrame,
) -> Option<(String, String, u32)> {
    // SAFETY: the caller's promise, passed on.
    let named = unsafe { name(memory, layout, types, frame) }?;
    Some((named.file, named.function, named.line))
}

/// One frame, as walked against as told.
fn one(seen: Option<&(u64, (String, String, u32))>, code: &Owned<'_>, line: i32) -> Result<(), String> {
    let Some((address, (file, function, walked_line))) = seen else {
        return Err("the walk ended too early".into());
    };
    if *address != code.object as u64 {
        return Err("the walk saw another code object".into());
    }
    let (told_file, told_function) = names(code).ok_or("a code object would not tell its names")?;
    if *file != told_file {
        return Err(format!("the walk read the file {file:?} where it is {told_file:?}"));
    }
    // Before 3.11 a code object has no qualified name that could be read by offset.
    if *function != told_function {
        return Err(format!("the walk read the function {function:?} where it is {told_function:?}"));
    }
    if line >= 0 && *walked_line != line as u32 {
        return Err(format!("the walk read line {walked_line} where it is {line} ({file}, {function})"));
    }
    let first = code.attribute(c"co_firstlineno").and_then(|number| number.number());
    if first.is_none() {
        return Err("a code object would not tell its first line".into());
    }
    Ok(())
}
