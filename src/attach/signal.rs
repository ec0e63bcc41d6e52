//! Reports on a signal, and before the job is ended by a signal or leaves by `_exit`.
//!
//! The handler notes the signal and posts a semaphore (no file descriptor: a job may close those that it did
//! not open); a thread of ours, with every signal blocked, does the work. The previous handler is called
//! after ours. A terminating signal that nobody handles (SIGTERM; SIGHUP of a terminal that is gone) is handled so
//! that the report is written first; then it is sent again with its default action, so the job dies of it
//! as it would have. Must not allocate, lock or call Python in the handler.

use super::semaphore::Semaphore;
use crossbeam::queue::SegQueue;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, AtomicUsize, Ordering};

/// Counts what waits for the thread.
static WORK: Semaphore = Semaphore::new();
/// The signals that wait, one bit each.
static SIGNALS: AtomicU64 = AtomicU64::new(0);
/// The signal that asks for a report; SIGHUP ends no job then.
static ASKED: AtomicI32 = AtomicI32::new(0);
/// Whether metrics are to be written.
static METRICS: AtomicBool = AtomicBool::new(false);
/// Whether something is to be told.
static NEWS: AtomicBool = AtomicBool::new(false);
/// Whether the thread is there to do the work.
static SERVING: AtomicBool = AtomicBool::new(false);
/// How far the report before `_exit` is.
static LEAVING: AtomicU8 = AtomicU8::new(STAYS);
const STAYS: u8 = 0;
const LEAVES: u8 = 1;
const LEFT: u8 = 2;
static OWNER: AtomicI32 = AtomicI32::new(0);
static PREVIOUS: [AtomicUsize; 65] = [const { AtomicUsize::new(0) }; 65];
static STARTED: OnceLock<()> = OnceLock::new();

/// The name of our threads; the one that handles a signal has its number behind a hyphen, so that
/// `strandline dump` knows which one it may send.
pub const THREAD: &str = "strandline";

/// What others want done by the thread; not touched by the handler. Without a lock: the thread may have to write
/// the last report while a handler that leaves by `_exit` holds up one who was just about to put work in.
type Work = Box<dyn FnOnce() + Send>;
static QUEUE: SegQueue<Work> = SegQueue::new();

/// How long the end of the job may be put off for its last report.
const LAST_REPORT_SECONDS: u32 = 5;
/// Signals that end the job, after a last report, if nobody else handles or ignores them.
const ENDS: [i32; 2] = [libc::SIGTERM, libc::SIGHUP];

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: only async-signal-safe calls; errno is put back. In a forked child, whose pid differs, nothing
    // of ours runs except the previous handler.
    unsafe {
        let errno = *libc::__errno_location();
        let ours = libc::getpid() == OWNER.load(Ordering::Relaxed) && SERVING.load(Ordering::Relaxed);
        if ours {
            SIGNALS.fetch_or(bit(signal), Ordering::Release);
            WORK.post();
        }
        let previous = PREVIOUS.get(signal as usize).map_or(0, |p| p.load(Ordering::Relaxed));
        match previous {
            libc::SIG_IGN => {}
            libc::SIG_DFL if !ours => {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
            libc::SIG_DFL => {}
            action => {
                let action: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                    std::mem::transmute(action);
                action(signal, info, context);
            }
        }
        *libc::__errno_location() = errno;
    }
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1).clamp(0, 63)
}

/// Installs our handler for `signal` if nobody else handles it. Returns whether it was free.
fn take_if_free(signal: i32) -> bool {
    // SAFETY: sigaction with valid pointers; the structures are plain data.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(signal, std::ptr::null(), &mut old) != 0 || old.sa_sigaction != libc::SIG_DFL {
            return false;
        }
        install(signal)
    }
}

/// Installs our handler for `signal`; the one that was there is called after it.
fn install(signal: i32) -> bool {
    // SAFETY: as above; the handler keeps to what a signal handler may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut old: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        if libc::sigaction(signal, std::ptr::null(), &mut old) != 0 {
            return false;
        }
        if !matches!(old.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
            // The job's own handler is chained: system calls are interrupted, and signals held back, as it wants.
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | (old.sa_flags & libc::SA_RESTART);
            action.sa_mask = old.sa_mask;
        }
        if let Some(slot) = PREVIOUS.get(signal as usize) {
            slot.store(old.sa_sigaction, Ordering::Relaxed);
        }
        libc::sigaction(signal, &action, std::ptr::null_mut()) == 0
    }
}

/// Begins to listen: `asked` is the user's signal (`Some(0)`: none; `None`: SIGUSR2 if nobody has it).
/// Returns a sentence about what could not be done.
pub fn start(asked: Option<i32>) -> Result<(), String> {
    if STARTED.set(()).is_err() {
        return Ok(());
    }
    // Nobody uses it before SERVING is set.
    if !WORK.make() {
        return Err("no semaphore could be made, so no report on a signal".into());
    }
    // SAFETY: getpid cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    spawn()?;
    SERVING.store(true, Ordering::Release);
    let taken = match asked {
        Some(0) => None,
        Some(signal) => Some(signal).filter(|&signal| install(signal)),
        None => Some(libc::SIGUSR2).filter(|&signal| take_if_free(signal)),
    };
    let free = taken.is_some() || matches!(asked, None | Some(0));
    if let Some(signal) = taken {
        ASKED.store(signal, Ordering::Relaxed);
        submit(Box::new(move || name_thread(signal)));
    }
    for signal in ENDS.into_iter().filter(|&signal| taken != Some(signal)) {
        take_if_free(signal);
    }
    if free { Ok(()) } else { Err(format!("signal {} cannot be handled", asked.unwrap_or(0))) }
}

/// Starts the thread that writes reports.
fn spawn() -> Result<(), String> {
    quiet_thread(THREAD, serve)
        .map_err(|e| format!("no thread could be started ({e}), so no report on a signal"))
}

/// Starts a thread of ours, with every signal blocked in it.
pub(super) fn quiet_thread(name: &str, run: fn()) -> std::io::Result<()> {
    // SAFETY: signal sets are plain data; the mask of this thread is put back below.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    };
    let thread = std::thread::Builder::new().name(name.into()).stack_size(1 << 20).spawn(run);
    // SAFETY: the mask saved above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut()) };
    thread.map(drop)
}

/// Says by the calling thread's name which signal asks for a report.
fn name_thread(signal: i32) {
    if let Ok(name) = std::ffi::CString::new(format!("{THREAD}-{signal}")) {
        // SAFETY: a terminated name of less than 16 bytes.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    }
}

/// Has the thread do `work`, after what waits already. Not for signal handlers.
pub(super) fn submit(work: Work) {
    QUEUE.push(work);
    if SERVING.load(Ordering::Acquire) {
        WORK.post();
    }
}

fn serve() {
    loop {
        WORK.wait();
        let signals = SIGNALS.swap(0, Ordering::AcqRel);
        let asked = ASKED.load(Ordering::Relaxed);
        let ends = |signal: &i32| *signal == libc::SIGTERM || *signal != asked;
        if let Some(signal) = ENDS.into_iter().filter(ends).find(|&signal| signals & bit(signal) != 0) {
            end_with(signal);
        } else if signals != 0 {
            let _ = std::panic::catch_unwind(super::process::report_on_request);
        }
        if NEWS.swap(false, Ordering::AcqRel) {
            let _ = std::panic::catch_unwind(super::process::tell_noted);
        }
        if METRICS.swap(false, Ordering::AcqRel) {
            let _ = std::panic::catch_unwind(super::process::publish_metrics);
        }
        if let Some(work) = QUEUE.pop() {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        }
        if LEAVING.load(Ordering::Acquire) == LEAVES {
            let _ = std::panic::catch_unwind(super::process::leaving);
            LEAVING.store(LEFT, Ordering::Release);
        }
    }
}

/// Has what is noted told by our thread; false if there is none. Returns at once.
pub(super) fn ask_to_tell() -> bool {
    ask(&NEWS)
}

/// Has our thread do what a flag stands for, once; false if there is no thread.
fn ask(flag: &AtomicBool) -> bool {
    let serves = SERVING.load(Ordering::Acquire);
    if serves && !flag.swap(true, Ordering::AcqRel) {
        WORK.post();
    }
    serves
}

/// Has the metrics written by our thread. Returns at once.
pub fn ask_for_metrics() {
    ask(&METRICS);
}

/// Writes the last report before `_exit`, which may be called in a signal handler while the thread that it
/// interrupted holds any lock: so the work is done by our thread, and waited for no longer than a while.
pub fn leave() {
    // SAFETY: getpid cannot fail.
    let here = unsafe { libc::getpid() } == OWNER.load(Ordering::Relaxed);
    if !here || super::process::state().is_none() {
        return;
    }
    if !SERVING.load(Ordering::Acquire) {
        return super::process::leaving();
    }
    if LEAVING.compare_exchange(STAYS, LEAVES, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return;
    }
    const PAUSES: u32 = 2000;
    let pause = libc::timespec {
        tv_sec: 0,
        tv_nsec: i64::from(LAST_REPORT_SECONDS) * 1_000_000_000 / i64::from(PAUSES),
    };
    WORK.post();
    for _ in 0..PAUSES {
        if LEAVING.load(Ordering::Acquire) == LEFT {
            return;
        }
        // SAFETY: nanosleep with a valid time.
        unsafe { libc::nanosleep(&pause, std::ptr::null_mut()) };
    }
}

/// Writes the last report, then lets the signal do what it does by default.
fn end_with(signal: i32) {
    let (done, wait) = std::sync::mpsc::channel();
    let writer = std::thread::Builder::new().name("strandline".into()).spawn(move || {
        let _ = std::panic::catch_unwind(super::process::leaving);
        let _ = done.send(());
    });
    if writer.is_ok() {
        let _ = wait.recv_timeout(std::time::Duration::from_secs(LAST_REPORT_SECONDS.into()));
    }
    // SAFETY: the default action of a signal that had its default action, sent to ourselves as a whole.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::kill(libc::getpid(), signal);
    }
}
