//! Reports on a signal, and before a signal that ends the job.
//!
//! The handler writes one byte into a pipe; a thread of ours, with every signal blocked, does the work. The
//! previous handler is called after ours. A terminating signal that nobody handles (SIGTERM) is handled so
//! that the report is written first; then it is sent again with its default action, so the job dies of it
//! as it would have. Must not allocate, lock or call Python in the handler.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

static PIPE: AtomicI32 = AtomicI32::new(-1);
static OWNER: AtomicI32 = AtomicI32::new(0);
static PREVIOUS: [AtomicUsize; 65] = [const { AtomicUsize::new(0) }; 65];
static STARTED: OnceLock<()> = OnceLock::new();

/// How long the end of the job may be put off for its last report.
const LAST_REPORT_SECONDS: u32 = 5;

extern "C" fn handler(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: only async-signal-safe calls; errno is put back. In a forked child, whose pid differs, nothing
    // of ours runs except the previous handler.
    unsafe {
        let errno = *libc::__errno_location();
        let pipe = PIPE.load(Ordering::Relaxed);
        let ours = libc::getpid() == OWNER.load(Ordering::Relaxed) && pipe >= 0;
        if ours {
            let byte = signal as u8;
            libc::write(pipe, (&raw const byte).cast(), 1);
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
    let mut ends = [0i32; 2];
    // SAFETY: pipe2 with room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
        return Err("no pipe could be made, so no report on a signal".into());
    }
    // The reading end blocks; only the handler must not.
    // SAFETY: fcntl on our own descriptor.
    unsafe { libc::fcntl(ends[0], libc::F_SETFL, 0) };
    // SAFETY: getpid cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Relaxed);
    PIPE.store(ends[1], Ordering::Relaxed);
    spawn(ends[0])?;
    let free = match asked {
        Some(0) => true,
        Some(signal) => install(signal),
        None => {
            take_if_free(libc::SIGUSR2);
            true
        }
    };
    take_if_free(libc::SIGTERM);
    if free { Ok(()) } else { Err(format!("signal {} cannot be handled", asked.unwrap_or(0))) }
}

/// Starts the thread that writes reports, with every signal blocked in it.
fn spawn(pipe: i32) -> Result<(), String> {
    // SAFETY: signal sets are plain data; the mask of this thread is put back below.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    };
    let thread =
        std::thread::Builder::new().name("strandline".into()).stack_size(1 << 20).spawn(move || serve(pipe));
    // SAFETY: the mask saved above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut()) };
    thread.map(drop).map_err(|e| format!("no thread could be started ({e}), so no report on a signal"))
}

fn serve(pipe: i32) {
    loop {
        let mut byte = 0u8;
        // SAFETY: one byte into a live buffer.
        let got = unsafe { libc::read(pipe, (&raw mut byte).cast(), 1) };
        if got == 0 {
            return;
        }
        if got < 0 {
            // SAFETY: errno of this thread.
            if unsafe { *libc::__errno_location() } == libc::EINTR {
                continue;
            }
            return;
        }
        let signal = i32::from(byte);
        if signal == libc::SIGTERM {
            end_with(signal);
        } else {
            let _ = std::panic::catch_unwind(super::process::report_on_request);
        }
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
