//! Call stacks: captured at every allocation, kept once, named for a report.
//!
//! Must not know the heap, the ledger, reports, or how strandline got into the process. The walk-through:
//! [`capture`] takes the thread's own state (`thread`), lets `python` walk its frames by offsets without
//! the GIL (or `native` unwind, on threads without Python), and looks the raw frames up in the thread's
//! cache. At first sight `intern` copies file, function and line, while the frames are alive, into a
//! `tree` of which a [`StackId`] is one node. [`frames`] reads that back; native frames get their
//! symbols only then.
//!
//! Invariant: a capture never takes the GIL, never blocks on a thread that might hold it, never fails:
//! what cannot be had is [`StackId::NONE`]. Call it with no lock of your own held, because the public
//! API, where that is the method, may run the garbage collector and with it your `free`.

mod intern;
mod lines;
mod native;
mod native_lines;
#[cfg(target_arch = "x86_64")]
mod native_modules;
#[cfg(target_arch = "x86_64")]
mod native_paths;
mod native_symbols;
mod python;
mod python_check;
mod python_fallback;
mod python_layout;
mod python_reuse;
mod python_walk;
mod raw;
mod thread;
mod tree;
mod user;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};

use intern::{Interner, Name};
use native::Walked;
pub use native_symbols::autograd_node;
use python::Python;
pub use python::{Method, Reason};
use raw::RawFrame;
use thread::Local;
use tree::Place;

/// A call stack, as a number that stays true for the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct StackId(pub u32);

impl StackId {
    /// No stack: none was there, or capturing is off.
    pub const NONE: StackId = StackId(0);
    /// A stack that came after [`Options::max_stacks`] others.
    pub const OVERFLOW: StackId = StackId(intern::OVERFLOW);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Python,
    Native,
}

/// One frame of a stack, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// As Python knows it; for a native frame the source file if that is known, else the shared object.
    pub file: Arc<str>,
    /// 0 where it is not known.
    pub line: u32,
    /// Qualified from Python 3.11 on; for a native frame the demangled symbol.
    pub function: Arc<str>,
    pub kind: Kind,
    /// Whether the user wrote it: neither installed, nor generated, nor the standard library.
    pub user: bool,
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Python => write!(f, "{}:{} in {}", self.file, self.line, self.function),
            Kind::Native => write!(f, "{} ({})", self.function, self.file),
        }
    }
}

/// How to capture. The defaults suit a training job.
#[derive(Clone, Debug)]
pub struct Options {
    /// Frames kept of each kind, the innermost ones; at most 256.
    pub max_depth: usize,
    /// Distinct stacks kept; later ones become [`StackId::OVERFLOW`].
    pub max_stacks: usize,
    /// Whether Python frames may be walked by offsets; if not, only the public API is used, with the GIL.
    pub by_offsets: bool,
    /// Whether [`capture`] unwinds native frames on threads that have no Python frames.
    pub native_without_python: bool,
    /// Folders whose files are not the user's: the standard library (`sysconfig`'s `stdlib` and
    /// `platstdlib`) and strandline's own Python files.
    pub library_roots: Vec<String>,
    /// Folders whose files are the user's in any case.
    pub user_roots: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_depth: 64,
            max_stacks: intern::DEFAULT_MAX_STACKS,
            by_offsets: true,
            native_without_python: true,
            library_roots: Vec::new(),
            user_roots: Vec::new(),
        }
    }
}

/// What [`start`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub python: Result<Method, Reason>,
}

/// Figures of the room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Distinct stacks, bounded by [`Options::max_stacks`].
    pub stacks: usize,
    /// Nodes of the tree of callers.
    pub nodes: usize,
    /// Distinct frames.
    pub frames: usize,
    /// Bytes held, all tables together; the threads' caches are not counted.
    pub bytes: usize,
    /// Raw stacks that were seen for the first time, and so cost microseconds.
    pub first_sights: u64,
    /// Raw stacks that became [`StackId::OVERFLOW`].
    pub overflowed: u64,
    /// Raw stacks forgotten to bound memory; seen again, they get the same ID again.
    pub forgotten: u64,
}

static INTERNER: Interner = Interner::new(intern::DEFAULT_MAX_STACKS);
static RULE: RwLock<user::Rule> = RwLock::new(user::Rule::new());
/// Off until [`start`], and for good after [`disable`].
static ON: AtomicBool = AtomicBool::new(false);
static DISABLED: AtomicBool = AtomicBool::new(false);
static NATIVE_UNNAMED: AtomicBool = AtomicBool::new(false);
/// The Python of this process, once it was found.
static PYTHON: OnceLock<Python> = OnceLock::new();
static DEPTH: AtomicUsize = AtomicUsize::new(64);
static NATIVE_WITHOUT_PYTHON: AtomicBool = AtomicBool::new(true);
static STATUS: Mutex<Option<Status>> = Mutex::new(None);

/// Starts capturing. With the GIL held if Python is in the process; from Python code, or from anything
/// that Python called. A second call changes nothing, except that Python is looked for again if there
/// was none at the first.
pub fn start(options: Options) -> Status {
    let by_offsets = options.by_offsets;
    {
        let mut status = STATUS.lock();
        if status.is_none() {
            DEPTH.store(options.max_depth.clamp(1, thread::DEEPEST), Ordering::Relaxed);
            NATIVE_WITHOUT_PYTHON.store(options.native_without_python, Ordering::Relaxed);
            INTERNER.set_max_stacks(options.max_stacks);
            let mut rule = RULE.write();
            rule.set_library_roots(options.library_roots);
            rule.set_user_roots(options.user_roots);
            *status = Some(Status { python: Err(Reason::new("Python was not looked for yet")) });
        }
    }
    if PYTHON.get().is_none() {
        // Without a lock: the self-check runs Python, which may let another thread run.
        let found = python::start(by_offsets);
        let mut status = STATUS.lock();
        match found {
            Ok((python, method)) => {
                if PYTHON.set(python).is_ok() {
                    *status = Some(Status { python: Ok(method) });
                }
            }
            Err(reason) if PYTHON.get().is_none() => *status = Some(Status { python: Err(reason) }),
            Err(_) => {}
        }
    }
    ON.store(!DISABLED.load(Ordering::Relaxed), Ordering::Release);
    STATUS.lock().clone().unwrap_or(Status { python: Err(Reason::new("it is starting just now")) })
}

/// For the child of a fork: from now on every function here does nothing, and touches no lock that
/// another thread of the parent may have held.
pub fn disable() {
    DISABLED.store(true, Ordering::Relaxed);
    ON.store(false, Ordering::Release);
}

/// The calling thread's stack at this moment: its Python frames if it has any, else its native ones.
#[inline]
pub fn capture() -> StackId {
    if !ON.load(Ordering::Relaxed) {
        return StackId::NONE;
    }
    thread::with(|local| {
        let depth = DEPTH.load(Ordering::Relaxed);
        if let Some(python) = PYTHON.get() {
            let walked = python.walk(depth, &mut local.frames);
            if walked.frames != 0 {
                return look_up(local, Some(python), walked.hash, walked.frames);
            }
        }
        if !NATIVE_WITHOUT_PYTHON.load(Ordering::Relaxed) {
            return StackId::NONE;
        }
        let frames = match local.unwinder.walk_or_recall(depth, &mut local.frames) {
            Walked::Known(id) => return StackId(id),
            Walked::Frames(frames) => frames,
        };
        let hash = raw::hash(&local.frames[..frames]);
        let id = look_up(local, None, hash, frames);
        local.unwinder.remember(id.0);
        id
    })
    .unwrap_or(StackId::NONE)
}

/// As [`capture`], but where there are Python frames, too, the native ones come first: those of the C
/// code that Python called last, down to the interpreter.
pub fn capture_with_native() -> StackId {
    if !ON.load(Ordering::Relaxed) {
        return StackId::NONE;
    }
    thread::with(|local| {
        let depth = DEPTH.load(Ordering::Relaxed);
        let python = PYTHON.get();
        let interpreter = python.map_or(0..0, |python| python.interpreter.clone());
        let Local { frames, unwinder, .. } = local;
        // Python first: native frames of a thread without Python are wanted to their end.
        let room = thread::DEEPEST + 1;
        let walked = python.map_or(0, |python| python.walk(depth, &mut frames[room..]).frames);
        let until = if walked == 0 { 0..0 } else { interpreter };
        let native = unwinder.walk(depth, &until, &mut frames[..room]);
        frames.copy_within(room..room + walked, native);
        let hash = raw::hash(&frames[..native + walked]);
        look_up(local, python, hash, native + walked)
    })
    .unwrap_or(StackId::NONE)
}

#[inline]
fn look_up(local: &mut Local, python: Option<&Python>, hash: u64, frames: usize) -> StackId {
    let raw = &local.frames[..frames];
    if let Some(id) = local.cache.get(hash, raw) {
        return StackId(id);
    }
    let (id, stored) = INTERNER.intern(hash, raw, |frame| name(python, frame));
    local.cache.put(hash, id, stored);
    StackId(id)
}

fn name(python: Option<&Python>, frame: RawFrame) -> Name {
    if frame.is_cut() {
        return Name::Cut;
    }
    if frame.is_native() {
        return Name::Native { address: frame.place };
    }
    match python.and_then(|python| python.name(frame)) {
        Some(named) => Name::Python { file: named.file, function: named.function, line: named.line },
        None => Name::Hidden,
    }
}

/// Whether the frames of a stack can be had: nobody holds what that needs for longer than `patience`.
pub fn answers(patience: Duration) -> bool {
    INTERNER.answers(patience) && RULE.try_read_for(patience).is_some()
}

/// Whether the symbols of native frames can be had, likewise. (They need the loader's lock too, which cannot be tried.)
pub fn native_answers(patience: Duration) -> bool {
    native_symbols::answers(patience) && native_lines::answers(patience)
}

/// From now on native frames are shown by their addresses.
pub fn leave_native_unnamed() {
    NATIVE_UNNAMED.store(true, Ordering::Relaxed);
}

/// The frames of a stack, innermost first, with the symbols of native frames looked up now.
pub fn frames(id: StackId) -> Vec<Frame> {
    if DISABLED.load(Ordering::Relaxed) {
        return Vec::new();
    }
    let places = INTERNER.stack(id.0);
    let rule = RULE.read();
    places.into_iter().flat_map(|place| frames_of(&rule, place)).collect()
}

/// The frames of a place: one, or several where the compiler has put functions into their caller.
fn frames_of(rule: &user::Rule, place: Place) -> Vec<Frame> {
    let Place::Native { address } = place else { return vec![frame(rule, place)] };
    if NATIVE_UNNAMED.load(Ordering::Relaxed) {
        return vec![frame(rule, place)];
    }
    let native_symbols::Symbol { file: object, function, at } = native_symbols::symbol(address);
    // Where Python is, the user's lines are Python's.
    let lines = PYTHON.get().is_none() && user::is_user_native(&object, &function);
    let lines = if lines { native_lines::lines(std::path::Path::new(&*object), at) } else { Vec::new() };
    let native = |function: Arc<str>, source: Option<(Arc<str>, u32)>| {
        let user = PYTHON.get().is_none() && user::is_user_native(&object, &function);
        let (file, line) = source.unwrap_or((object.clone(), 0));
        Frame { file, line, function, kind: Kind::Native, user }
    };
    let Some((outermost, inlined)) = lines.split_last() else { return vec![native(function, None)] };
    let named = |line: &native_lines::Line| {
        line.function.as_deref().map_or_else(|| "?".into(), native_symbols::demangle)
    };
    let inlined = inlined.iter().map(|line| native(named(line).into(), line.source.clone()));
    inlined.collect::<Vec<_>>().into_iter().chain([native(function, outermost.source.clone())]).collect()
}

fn frame(rule: &user::Rule, place: Place) -> Frame {
    match place {
        Place::Python { file, function, line } => {
            Frame { user: rule.is_user(&file), file, line, function, kind: Kind::Python }
        }
        // See `frames_of`.
        Place::Native { address } => Frame {
            file: "".into(),
            line: 0,
            function: format!("{address:#x}").into(),
            kind: Kind::Native,
            user: false,
        },
        Place::Cut => Frame {
            file: "<strandline>".into(),
            line: 0,
            function: "(deeper frames were not kept)".into(),
            kind: Kind::Python,
            user: false,
        },
    }
}

/// The frame to blame: the innermost one of the user. A stack without one (a library's own thread) gives
/// its outermost Python frame, which is where the library was entered; a stack without Python gives the
/// autograd node that was running, or else torch's operator, or else its innermost frame.
pub fn allocated_at(id: StackId) -> Option<Frame> {
    let frames = frames(id);
    let innermost = frames.iter().find(|frame| frame.user);
    let outermost = || frames.iter().rev().find(|frame| frame.kind == Kind::Python && frame.line != 0);
    let node = || frames.iter().find(|frame| autograd_node(&frame.function).is_some());
    let operator = || frames.iter().find(|frame| native_symbols::operator(&frame.function).is_some());
    innermost.or_else(outermost).or_else(node).or_else(operator).or(frames.first()).cloned()
}

/// Replaces the folders whose files are the user's in any case (see [`Options::user_roots`]).
pub fn set_user_roots(roots: Vec<String>) {
    if !DISABLED.load(Ordering::Relaxed) {
        RULE.write().set_user_roots(roots);
    }
}

/// For tests: the decoder of Python 3.`minor`'s line tables. `None` if that version is not known, else the
/// line, if the instruction has one.
#[doc(hidden)]
pub fn line_at(minor: u32, table: &[u8], first_line: i32, offset: i32) -> Option<Option<i32>> {
    let format = python_layout::built_in(minor)?.lines;
    Some(lines::line_at(format, table, first_line, offset))
}

pub fn stats() -> Stats {
    if DISABLED.load(Ordering::Relaxed) {
        return Stats::default();
    }
    let figures = INTERNER.figures();
    Stats {
        stacks: figures.stacks,
        nodes: figures.nodes,
        frames: figures.frames,
        bytes: figures.bytes,
        first_sights: figures.first_sights,
        overflowed: figures.refused,
        forgotten: figures.forgotten,
    }
}
