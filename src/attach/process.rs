//! The one state of a process: its devices, clock and judge, and what the entry points do with them.
//!
//! Invariants: the state is made once and never freed (frees may come after every destructor); no lock is
//! held while a stack is captured or while Python runs; in a forked child nothing but a look at an address
//! range is done.
//!
//! Locks are taken in this order, any of them may be left out: the writing of a report, the candidates, the
//! judge, a device (one at a time), and what clock and stacks lock inside their own functions. So nobody who
//! holds a device, and with it every thread that allocates, waits for a report that is being put together.
//! Callers may hold Python's GIL, or torch's allocator lock in observer mode: neither is ever taken here.

use super::gpu::Gpus;
use super::guard::host::Guard;
use super::options::{self, Mode, Options};
use super::outcome::{self, Outcome};
use super::served::Served;
use super::watched::Watched;
use super::{control, crash, fork, metrics, python_boot, say, say_once, signal};
use crate::driver::Stream;
use crate::driver::host::HostDriver;
use crate::heap::{AddressSpace, Config, Heap, HeapError};
use crate::ledger::host_memory::HostMemory;
use crate::ledger::{self, Accounts, Clock, Judge, LiveBlock, Phase, Sample};
use crate::report::model::Remark;
use crate::stacks;
use parking_lot::Mutex;
use serde::Deserialize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::time::Instant;

/// Steps between two looks at the process's own memory.
const HOST_EVERY: u32 = 32;
/// Most remarks of one process.
const REMARKS: usize = 32;

/// The number of the host among the devices.
pub const HOST: i32 = -1;
/// The number of pinned host memory (`cudaHostAlloc`) among the devices.
pub const PINNED: i32 = -2;
/// The number of managed memory (`cudaMallocManaged`) among the devices.
pub const MANAGED: i32 = -3;

static STATE: AtomicPtr<State> = AtomicPtr::new(std::ptr::null_mut());
/// Set in forked children, and after a fault of our own: nothing is served any more.
static DETACHED: AtomicBool = AtomicBool::new(false);
/// A fault of our own: the books may be half changed and are not touched again.
static FAULTED: AtomicBool = AtomicBool::new(false);
/// The process that accounts; a child of `vfork` shares our memory but not our pid.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Everything that a process which accounts has.
pub struct State {
    mode: AtomicI32,
    pub(super) options: Options,
    pub(super) command: Vec<String>,
    pub(super) clock: &'static Clock,
    pub(super) judge: Mutex<Judge>,
    pub(super) host: Option<Served<HostDriver>>,
    /// Of the host's memory, where it was asked for.
    pub(super) guard: Option<Guard>,
    pub(super) gpus: Option<&'static Gpus>,
    pub(super) outcome: Outcome,
    pub(super) began: Instant,
    /// The process's memory over the run.
    pub(super) host_memory: Mutex<HostMemory>,
    /// What the Python side had to say besides findings.
    pub(super) remarks: Mutex<Vec<Remark>>,
    /// Candidates taken from the judge and not yet fetched whole by the caller.
    candidates: Mutex<Option<String>>,
}

/// Accounting did not begin: why, in a sentence. What has to do with this machine is said on stderr too.
#[derive(Debug)]
pub struct NotStarted(pub String);

impl NotStarted {
    /// What is said on stderr, as a sentence.
    fn because(why: &str) -> NotStarted {
        NotStarted(format!("{}{}.", why[..1].to_uppercase(), &why[1..]))
    }
}

/// What `strandline_start` may be told.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Told {
    out: Option<PathBuf>,
    quiet: Option<bool>,
    every: Option<u32>,
    focus: Option<String>,
    guard: Option<bool>,
    command: Option<Vec<String>>,
    library_roots: Vec<String>,
    user_roots: Vec<String>,
}

/// The state, where this process accounts.
#[inline]
pub fn state() -> Option<&'static State> {
    if DETACHED.load(Ordering::Relaxed) {
        return None;
    }
    // SAFETY: null, or a box that `start` leaked; never freed or changed except through its own locks.
    unsafe { STATE.load(Ordering::Acquire).as_ref() }
}

/// Whether accounting ever began in this process.
pub fn was_started() -> bool {
    !STATE.load(Ordering::Acquire).is_null()
}

/// From now on this process serves and watches nothing (a forked child, or a fault of our own).
pub fn detach() {
    DETACHED.store(true, Ordering::SeqCst);
    stacks::disable();
}

/// Whether this process was detached.
pub fn is_detached() -> bool {
    DETACHED.load(Ordering::Relaxed)
}

/// Whether strandline has given up in this process, by a fault of its own.
pub fn is_faulted() -> bool {
    FAULTED.load(Ordering::Relaxed)
}

/// Begins accounting; a second call with the same mode does nothing.
pub fn start(mode: i32, told: Option<&str>) -> Result<(), NotStarted> {
    let Some(mode) = Mode::from_abi(mode) else {
        return Err(NotStarted(format!("{mode} is no STRANDLINE_MODE_*.")));
    };
    if let Some(state) = state() {
        // CUDA's own blocks were seen before torch came: its heap cannot take over devices that are watched.
        if state.mode() == Mode::Observer && mode == Mode::Heap && !state.gpus.is_some_and(Gpus::watches) {
            state.mode.store(mode as i32, Ordering::Relaxed);
        }
        // Where torch will not swap its allocator, it can still be watched.
        if state.mode() == Mode::Heap && mode == Mode::Observer {
            state.mode.store(mode as i32, Ordering::Relaxed);
        }
        if state.mode() == mode {
            return Ok(());
        }
        let word = state.mode().word();
        return Err(NotStarted(format!("Accounting began in mode {word} already, which cannot be changed.")));
    }
    if mode == Mode::Off || is_detached() || !python_boot::first_copy() {
        return Ok(());
    }
    let told: Told = match told.map(serde_json::from_str).transpose() {
        Ok(told) => told.unwrap_or_default(),
        Err(error) => {
            let why = format!("the options are not the JSON object of strandline.h: {error}");
            say(format_args!("{why}"));
            return Err(NotStarted::because(&why));
        }
    };
    super::voice::learn_rank();
    let (mut options, wrong) = Options::from_env();
    for line in wrong {
        say(format_args!("{line}"));
    }
    options.out = told.out.or(options.out);
    options.quiet = told.quiet.unwrap_or(options.quiet);
    options.every = told.every.unwrap_or(options.every);
    options.focus = told.focus.or(options.focus);
    options.guard = told.guard.unwrap_or(options.guard);
    if options.guard && mode == Mode::Observer {
        say(format_args!("guard mode needs strandline's own heap: it has no effect in mode observer"));
    }
    let host = if mode == Mode::Host { Some(serve_host()?) } else { None };
    let stacks = stacks::Options {
        library_roots: told.library_roots,
        user_roots: told.user_roots,
        // On autograd's own threads the forward line comes first; see `gpu`.
        native_without_python: mode == Mode::Host,
        ..stacks::Options::default()
    };
    if let Err(reason) = stacks::start(stacks).python {
        if python_boot::gil_is_held() {
            say(format_args!("no Python stacks: {reason}"));
        } else if python_boot::symbol(c"Py_IsInitialized").is_some() {
            LOOKS_LEFT.store(LOOKS, Ordering::Relaxed);
            python_boot::once_with_the_gil(look_for_python_again);
        }
    }
    let (asked, listens, at_crash) = (options.signal, options.control, options.crash);
    let (scraped, quiet) = (options.openmetrics_listen, options.quiet);
    // Both are leaked: frees may come after every destructor.
    let clock: &'static Clock = Box::leak(Box::new(Clock::new()));
    let gpus: Option<&'static Gpus> =
        (mode != Mode::Host).then(|| &*Box::leak(Box::new(Gpus::new(clock, options.guard))));
    let state = Box::new(State {
        mode: AtomicI32::new(mode as i32),
        outcome: Outcome::new(&options),
        guard: (options.guard && host.is_some()).then(Guard::default),
        options,
        command: told.command.unwrap_or_else(options::command_line),
        clock,
        judge: Mutex::new(Judge::new()),
        host,
        gpus,
        began: Instant::now(),
        host_memory: Mutex::new(HostMemory::default()),
        remarks: Mutex::new(Vec::new()),
        candidates: Mutex::new(None),
    });
    state.outcome.look_at_folder();
    // SAFETY: getpid cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::SeqCst);
    fork::guard();
    let made = Box::into_raw(state);
    if STATE.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: another thread was first; nobody else has seen this box.
        drop(unsafe { Box::from_raw(made) });
        return Ok(());
    }
    if let Some(gpus) = gpus {
        super::torch::install(gpus);
    }
    match signal::start(asked) {
        Err(reason) => say(format_args!("{reason}")),
        Ok(()) if listens => control::server::start(),
        Ok(()) => {}
    }
    if at_crash && let Err(reason) = crash::start() {
        say(format_args!("{reason}"));
    }
    if let Some(listen) = scraped {
        metrics::server::start(listen, quiet);
    }
    Ok(())
}

/// How often Python is looked for after a start without the GIL (a library that allocates with it released).
const LOOKS: u32 = 1000;
static LOOKS_LEFT: AtomicU32 = AtomicU32::new(0);

/// Looks for Python again where the start came without the GIL and this thread has it.
#[inline]
pub fn look_for_python_again() {
    if LOOKS_LEFT.load(Ordering::Relaxed) == 0 || !python_boot::gil_is_held() {
        return;
    }
    let left = LOOKS_LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    if left.is_ok() && stacks::start(stacks::Options::default()).python.is_ok() {
        LOOKS_LEFT.store(0, Ordering::Relaxed);
    }
}

fn serve_host() -> Result<Served<HostDriver>, NotStarted> {
    let driver = HostDriver::with_memory(physical_memory());
    match Heap::new(driver, Config::host()) {
        Ok(heap) => Ok(Served::new(HOST, heap, None)),
        Err(error) => {
            let why = format!(
                "host memory cannot be reserved ({error}); an address-space limit (ulimit -v) is the usual reason"
            );
            say(format_args!("{why}. The job runs without strandline"));
            Err(NotStarted::because(&why))
        }
    }
}

/// Bytes of memory of this machine.
fn physical_memory() -> u64 {
    // SAFETY: sysconf takes a number and has no other effect.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    (pages.max(0) as u64).saturating_mul(page.max(4096) as u64)
}

/// Resident bytes of this process that are its own (not files'), as the kernel says.
fn resident_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = text.split_ascii_whitespace().skip(1).map(|number| number.parse::<u64>().ok());
    let (resident, shared) = (pages.next()??, pages.next()??);
    Some(resident.saturating_sub(shared) * 4096)
}

/// Serves `c10::alloc_cpu`; `None` sends the request on to torch's own.
#[inline]
pub fn host_malloc(size: usize) -> Option<usize> {
    let state = state()?;
    let host = state.host.as_ref()?;
    if size == 0 || size > isize::MAX as usize {
        return None;
    }
    let served = contained(|| match &state.guard {
        None => host.malloc(size as u64, Stream(0), stacks::capture(), state.clock),
        Some(guard) => guard.malloc(state, host, size as u64, Stream(0), stacks::capture()),
    });
    match served? {
        Ok(at) => Some(at as usize),
        // torch's own way fails with torch's own message, or succeeds where our limit is not its limit.
        Err(HeapError::OutOfMemory { .. }) => None,
        Err(error) => {
            static SAID: AtomicBool = AtomicBool::new(false);
            say_once(&SAID, format_args!("{error}; such memory comes from the system and is not accounted"));
            None
        }
    }
}

/// Serves `c10::free_cpu`; `false` sends the pointer on to torch's own.
#[inline]
pub fn host_free(pointer: usize) -> bool {
    if pointer == 0 || !AddressSpace::owns(pointer as u64) {
        return false;
    }
    let Some(state) = state() else { return true };
    let Some(host) = state.host.as_ref() else { return false };
    let done = contained(|| match &state.guard {
        None => host.free(pointer as u64, state.clock).map(drop),
        Some(guard) => guard.free(state, host, pointer as u64),
    });
    if let Some(Err(error)) = done {
        super::fault_of_a_free(error);
    }
    true
}

/// Runs `f`; a panic in it is a fault of ours: said, and from then on the process is left alone.
#[inline]
fn contained<T>(f: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|_| fault("the host's memory")).ok()
}

#[cold]
pub(super) fn fault(place: &str) {
    detach();
    if !FAULTED.swap(true, Ordering::SeqCst) {
        say(format_args!(
            "internal fault in {place}, please report it; the job goes on without strandline (its further GPU \
             memory comes straight from the driver, which is slow)"
        ));
    }
}

/// A report was asked for by a signal.
pub fn report_on_request() {
    if let Some(state) = state() {
        state.report(None);
    }
}

/// Something is to be told.
pub fn tell_noted() {
    if let Some(state) = state() {
        state.tell_noted();
    }
}

/// A step ended for which metrics are due.
pub fn publish_metrics() {
    if let Some(state) = state() {
        state.write_metrics();
    }
}

/// Arranges that the report is written when the process exits: for programs in which Python's side does not run,
/// whose exit handler does it otherwise. What a destructor of the program frees after that is no news.
pub fn report_at_exit() {
    extern "C" fn at_exit() {
        leaving();
    }
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler may run at any time, and the library stays mapped until the process ends.
        if unsafe { libc::atexit(at_exit) } != 0 {
            say(format_args!("no report will be written at the exit; call strandline_finish() for it"));
        }
    });
}

/// The process is about to leave without Python's exit handlers.
pub fn leaving() {
    // SAFETY: getpid cannot fail.
    let here = unsafe { libc::getpid() } == OWNER.load(Ordering::Relaxed);
    if let Some(state) = state().filter(|_| here) {
        let _ = catch_unwind(AssertUnwindSafe(|| state.finish()));
    }
}

impl State {
    /// Where events come from.
    pub fn mode(&self) -> Mode {
        Mode::from_abi(self.mode.load(Ordering::Relaxed)).unwrap_or(Mode::Off)
    }

    /// A step ended. Returns how many candidates wait for an explanation.
    pub fn step(&self) -> usize {
        // The judge's lock is the boundary's: of several threads that end steps none goes on to the next one before
        // this one is filed, or blocks would be judged that are born after it.
        let mut judge = self.judge.lock();
        let ended = self.clock.end_step(self.began.elapsed().as_nanos() as u64);
        let now = self.clock.now();
        let mut waiting = 0;
        if ended.is_multiple_of(HOST_EVERY) {
            self.note_host_memory(ended);
        }
        let mut end_step = |accounts: &mut Accounts, sample: &Sample| {
            accounts.boundary(ended, now.epoch, sample);
            waiting = judge.look(accounts, self.clock);
        };
        if let Some(mut books) = self.host.as_ref().and_then(Served::books) {
            let sample = books.sample();
            end_step(&mut books.accounts, &sample);
            contained(|| books.trim_idle(ended, sample.allocated, sample.reserved));
        }
        for mut books in self.gpus.into_iter().flat_map(Gpus::open).filter_map(Served::books) {
            let sample = books.sample();
            end_step(&mut books.accounts, &sample);
        }
        for mut notes in self.gpus.into_iter().flat_map(Gpus::seen).filter_map(Watched::notes) {
            let sample = notes.sample();
            end_step(&mut notes.accounts, &sample);
        }
        drop(judge);
        if let Some(gpus) = self.gpus {
            gpus.look_at_guards();
        }
        self.note_news();
        if self.options.every > 0 && (ended + 1).is_multiple_of(self.options.every) {
            self.report(None);
        }
        self.ask_for_metrics(ended);
        waiting
    }

    fn note_host_memory(&self, ended: u32) {
        let Some(resident) = resident_memory() else { return };
        let tensors =
            self.host.as_ref().and_then(Served::stats).map_or(0, |stats| stats.reserved_bytes.all.current);
        self.host_memory.lock().push(ended, resident, tensors);
    }

    /// A new epoch began.
    pub fn epoch(&self) {
        self.clock.begin_epoch();
    }

    /// Enters a phase; returns the one that was in force, or nothing for a number that is no phase.
    pub fn phase(&self, phase: i32) -> Option<i32> {
        let phase = u32::try_from(phase).ok().and_then(Phase::from_number)?;
        Some(self.clock.enter(phase).number() as i32)
    }

    /// The number of the phase of a name; that of "other" where the program has named too many.
    pub fn phase_of(&self, name: &str) -> i32 {
        self.clock.phase_of(name).unwrap_or_default().number() as i32
    }

    /// The candidates as JSON: taken from the judge once, kept until they were fetched whole.
    pub fn candidates(&self, fetch: impl FnOnce(&str) -> bool) {
        let mut kept = self.candidates.lock();
        let json = kept.take().unwrap_or_else(|| self.take_candidates());
        if !fetch(&json) {
            *kept = Some(json);
        }
    }

    fn take_candidates(&self) -> String {
        let (taken, ended) = {
            let mut judge = self.judge.lock();
            (judge.take_candidates(), judge.steps().saturating_sub(1))
        };
        if taken.is_empty() {
            return "[]".into();
        }
        ledger::wire::candidates_to_json(&taken, ended, &Stacks, &mut |device, site| {
            self.blocks_of(device, site)
        })
    }

    fn blocks_of(&self, device: i32, site: u32) -> Vec<LiveBlock> {
        if device == HOST {
            return self.host.as_ref().and_then(Served::books).map(|b| b.blocks_of(site)).unwrap_or_default();
        }
        let Some(gpus) = self.gpus else { return Vec::new() };
        let served = gpus.open().find(|served| served.device() == device).and_then(Served::books);
        if let Some(books) = served {
            let blocks = books.blocks_of(site);
            drop(books);
            return gpus.as_users_know(device, blocks);
        }
        let watched = gpus.seen().find(|watched| watched.device() == device).and_then(Watched::notes);
        watched.map(|notes| notes.blocks_of(site)).unwrap_or_default()
    }

    /// Takes an answer; false when no candidate has this id.
    pub fn explain(&self, id: u64, answer: &str) -> bool {
        let done = self.judge.lock().explain_json(id, answer);
        if let Err(ledger::wire::Refused::NotJson(error)) = &done {
            static SAID: AtomicBool = AtomicBool::new(false);
            say_once(&SAID, format_args!("an explanation is not the JSON of strandline.h: {error}"));
        }
        self.note_news();
        done.is_ok()
    }

    /// Takes something worth knowing, as JSON, and says it when it is new; false when it is not the JSON of
    /// strandline.h.
    pub fn remark(&self, remark: &str) -> bool {
        let remark: Remark = match serde_json::from_str(remark) {
            Ok(remark) => remark,
            Err(error) => {
                static SAID: AtomicBool = AtomicBool::new(false);
                say_once(&SAID, format_args!("a remark is not the JSON of strandline.h: {error}"));
                return false;
            }
        };
        let mut remarks = self.remarks.lock();
        let known = remarks.iter().any(|known| known.kind == remark.kind && known.what == remark.what);
        if !known && remarks.len() < REMARKS {
            self.tell(&remark);
            remarks.push(remark);
        }
        true
    }

    /// Statistics of a device as a JSON object.
    pub fn stats(&self, device: i32) -> Option<String> {
        let stats = if device == HOST {
            self.host.as_ref()?.stats()?
        } else {
            self.gpus?.open().find(|served| served.device() == device)?.stats()?
        };
        serde_json::to_string(&outcome::stats_as_json(&stats)).ok()
    }
}

/// The ledger's view of the process's stacks.
pub struct Stacks;

impl Stacks {
    fn frame(frame: stacks::Frame) -> ledger::Frame {
        ledger::Frame {
            file: frame.file.to_string(),
            line: frame.line,
            function: frame.function.to_string(),
            kind: if frame.kind == stacks::Kind::Python { "python".into() } else { "native".into() },
            user: frame.user,
        }
    }
}

impl ledger::Symbols for Stacks {
    fn frames(&self, stack: u32) -> Vec<ledger::Frame> {
        stacks::frames(stacks::StackId(stack)).into_iter().map(Stacks::frame).collect()
    }

    fn allocated_at(&self, stack: u32) -> Option<ledger::Frame> {
        stacks::allocated_at(stacks::StackId(stack)).map(Stacks::frame)
    }
}
