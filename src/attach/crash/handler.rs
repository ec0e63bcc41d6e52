//! What a thread does that crashes: it has the report written, waits for it, and dies as it would have.
//!
//! Installed where a signal has its default action, or Python's faulthandler (which prints its tracebacks after us, and
//! would otherwise keep us from seeing most crashes); a handler of the job's own, set before or after, is left alone.
//! To hand over, the old action is put back. A fault of the instruction is then left to happen again, so that the kernel
//! sees the same fault at the same place; any other signal is sent again, to this thread, with what it came with.
//! Must not allocate, lock, or call Python. Invariants: a thread waits for no longer than the limit, once, and not at
//! all in a forked child, in the thread that writes, or if it crashes here (every signal is blocked then, and the
//! kernel ends a process whose blocked signal is a fault).

use super::{CRASHED, LIMIT_SECONDS};
use crate::attach::voice;
use libc::{c_int, c_void};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering};

/// The signals of a crash, and their names.
const SIGNALS: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGABRT, "SIGABRT"),
];

/// A crash, as the handler saw it.
#[derive(Clone, Copy, Debug)]
pub struct Crash {
    pub signal: c_int,
    /// The thread.
    pub thread: i32,
    code: c_int,
    /// An address or a process, by the code.
    detail: u64,
}

impl Crash {
    /// The signal's name.
    pub fn name(&self) -> &'static str {
        name(self.signal)
    }

    /// The address of a fault.
    pub fn address(&self) -> Option<u64> {
        // The kernel does not know it for a general protection fault.
        (is_fault(self.signal, self.code) && self.code != SI_KERNEL).then_some(self.detail)
    }

    /// The process that sent the signal, if it was another one.
    pub fn sent_by(&self) -> Option<u32> {
        let sender = u32::try_from(self.detail).ok().filter(|_| self.code == libc::SI_USER)?;
        (sender != std::process::id()).then_some(sender)
    }
}

fn name(signal: c_int) -> &'static str {
    SIGNALS.iter().find(|known| known.0 == signal).map_or("a signal", |known| known.1)
}

const SI_KERNEL: c_int = 0x80;
/// Of the kernel's auxiliary vector: what it needs of a stack for handlers.
const AT_MINSIGSTKSZ: libc::c_ulong = 51;

/// Whether the kernel says that the instruction could not be done, and it would happen again.
fn is_fault(signal: c_int, code: c_int) -> bool {
    signal != libc::SIGABRT && code > 0 && !(signal == libc::SIGBUS && code == libc::BUS_MCEERR_AO)
}

/// The process that the handlers are for.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// The thread that writes.
static WRITER: AtomicI32 = AtomicI32::new(0);

/// How far the one report is.
static STAGE: AtomicU8 = AtomicU8::new(NONE);
const NONE: u8 = 0;
/// A thread describes its crash.
const CLAIMED: u8 = 1;
const ASKED: u8 = 2;
const OVER: u8 = 3;

static SIGNAL: AtomicI32 = AtomicI32::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static THREAD: AtomicI32 = AtomicI32::new(0);
static DETAIL: AtomicU64 = AtomicU64::new(0);

/// The action that a signal had before.
struct Old {
    known: AtomicBool,
    action: UnsafeCell<MaybeUninit<libc::sigaction>>,
}

// SAFETY: written before `known` is set and the handler installed, and only read after that.
unsafe impl Sync for Old {}

static OLD: [Old; SIGNALS.len()] =
    [const { Old { known: AtomicBool::new(false), action: UnsafeCell::new(MaybeUninit::uninit()) } };
        SIGNALS.len()];

extern "C" fn crashed(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: async-signal-safe calls only; the kernel lends `info`; errno is put back.
    unsafe {
        let errno = *libc::__errno_location();
        if libc::getpid() == OWNER.load(Ordering::Relaxed) {
            have_it_written(signal, info);
        }
        hand_over(signal, info);
        *libc::__errno_location() = errno;
    }
}

/// Has the report written, by the first thread that comes here, and waits for that.
///
/// # Safety
/// `info` is null or what the kernel passed to the handler.
unsafe fn have_it_written(signal: c_int, info: *const libc::siginfo_t) {
    // SAFETY: a system call without arguments.
    let me = unsafe { libc::gettid() };
    if me == WRITER.load(Ordering::Relaxed) {
        return;
    }
    if STAGE.compare_exchange(NONE, CLAIMED, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        let code = if info.is_null() {
            libc::SI_USER
        } else {
            // SAFETY: the caller's contract.
            unsafe { (*info).si_code }
        };
        let detail = match code {
            // SAFETY: the kernel filled in an address for these codes, and a process for these.
            _ if !info.is_null() && is_fault(signal, code) => unsafe { (*info).si_addr() as u64 },
            // SAFETY: as above.
            libc::SI_USER if !info.is_null() => unsafe { (*info).si_pid() as u64 },
            _ => 0,
        };
        SIGNAL.store(signal, Ordering::Relaxed);
        CODE.store(code, Ordering::Relaxed);
        DETAIL.store(detail, Ordering::Relaxed);
        THREAD.store(me, Ordering::Relaxed);
        STAGE.store(ASKED, Ordering::Release);
        CRASHED.post();
    } else if THREAD.load(Ordering::Relaxed) == me {
        return; // it has waited already, or crashes while it waits
    }
    let until = seconds() + LIMIT_SECONDS;
    let pause = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    while STAGE.load(Ordering::Acquire) != OVER {
        if seconds() >= until {
            return too_late(signal);
        }
        // SAFETY: nanosleep with a valid time.
        unsafe { libc::nanosleep(&pause, std::ptr::null_mut()) };
    }
}

/// Whole seconds of a steady clock.
fn seconds() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid structure; async-signal-safe.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec
}

/// The report did not come in time. Said once.
fn too_late(signal: c_int) {
    if STAGE.swap(OVER, Ordering::AcqRel) == OVER {
        return;
    }
    let mut line = [0u8; 160];
    let mut length = 0;
    let parts = [
        "strandline: crash (",
        name(signal),
        "): no report could be written within 5 seconds (the crashed thread holds what that needs)\n",
    ];
    const _: () = assert!(LIMIT_SECONDS == 5, "the text says so");
    for byte in parts.iter().flat_map(|part| part.bytes()).take(line.len()) {
        line[length] = byte;
        length += 1;
    }
    voice::write_in_handler(&line[..length]);
}

/// Puts the old action back and sees to it that the signal comes again.
///
/// # Safety
/// As for the handler.
unsafe fn hand_over(signal: c_int, info: *mut libc::siginfo_t) {
    // SAFETY: async-signal-safe system calls with valid structures; an old action was written before it is known.
    unsafe {
        let old = SIGNALS.iter().zip(&OLD).find(|((known, _), _)| *known == signal).map(|(_, old)| old);
        match old.filter(|old| old.known.load(Ordering::Acquire)) {
            Some(old) => libc::sigaction(signal, (*old.action.get()).as_ptr(), std::ptr::null_mut()),
            None => {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, &default, std::ptr::null_mut())
            }
        };
        if !info.is_null() && is_fault(signal, (*info).si_code) {
            return;
        }
        let (process, thread) = (libc::getpid(), libc::gettid());
        if info.is_null() || libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, info) != 0 {
            libc::syscall(libc::SYS_tgkill, process, thread, signal);
        }
    }
}

/// Installs the handler for each signal that has its default action or faulthandler's.
pub(super) fn install() {
    // SAFETY: getpid cannot fail.
    OWNER.store(unsafe { libc::getpid() }, Ordering::SeqCst);
    give_main_thread_a_stack();
    for ((signal, _), old) in SIGNALS.iter().zip(&OLD) {
        // SAFETY: sigaction with valid structures, which are plain data. The handler keeps to what a handler may do. The
        // old action is written here only, before anybody reads it.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(*signal, std::ptr::null(), &mut before) != 0
                || before.sa_sigaction != libc::SIG_DFL && !is_faulthandlers(&before)
            {
                continue;
            }
            (*old.action.get()).write(before);
            old.known.store(true, Ordering::Release);
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = crashed as *const () as usize;
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigfillset(&mut ours.sa_mask);
            libc::sigaction(*signal, &ours, std::ptr::null_mut());
        }
    }
}

/// Whether an action is that of Python's faulthandler: of the same library as Python, and with a flag that no handler
/// of Python's signal module has.
fn is_faulthandlers(action: &libc::sigaction) -> bool {
    let module = |address: *const c_void| {
        // SAFETY: an all-zero Dl_info is valid; dladdr fills it in and only looks at the address's number.
        unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            (libc::dladdr(address, &raw mut info) != 0).then_some(info.dli_fbase)
        }
    };
    // SAFETY: a terminated name.
    let python = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"Py_IsInitialized".as_ptr()) };
    action.sa_flags & libc::SA_NODEFER != 0
        && action.sa_flags & libc::SA_SIGINFO == 0
        && action.sa_sigaction != libc::SIG_IGN
        && !python.is_null()
        && module(action.sa_sigaction as *const c_void).is_some_and(|there| module(python) == Some(there))
}

/// Gives the main thread a stack for handlers, if this is that thread and it has none: it may crash because its own is
/// used up.
fn give_main_thread_a_stack() {
    // SAFETY: system calls with valid structures. The mapping is new, and stays for the rest of the process's life; its
    // lowest page is left without access.
    unsafe {
        let mut old: libc::stack_t = std::mem::zeroed();
        if libc::gettid() != libc::getpid()
            || libc::sigaltstack(std::ptr::null(), &mut old) != 0
            || old.ss_flags & libc::SS_DISABLE == 0
        {
            return;
        }
        // What the kernel puts there is larger on processors with more registers.
        let frame = (libc::getauxval(AT_MINSIGSTKSZ) as usize).max(libc::MINSIGSTKSZ);
        let page = libc::sysconf(libc::_SC_PAGESIZE).max(4096) as usize;
        let size = (frame + 32768).next_multiple_of(page);
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let at = libc::mmap(std::ptr::null_mut(), page + size, libc::PROT_NONE, kind, -1, 0);
        if at == libc::MAP_FAILED {
            return;
        }
        let stack = at.byte_add(page);
        let ours = libc::stack_t { ss_sp: stack, ss_flags: 0, ss_size: size };
        if libc::mprotect(stack, size, libc::PROT_READ | libc::PROT_WRITE) != 0
            || libc::sigaltstack(&ours, std::ptr::null_mut()) != 0
        {
            libc::munmap(at, page + size);
        }
    }
}

/// The calling thread is the one that writes: if it crashes, nobody is waited for.
pub(super) fn this_thread_writes() {
    // SAFETY: a system call without arguments.
    WRITER.store(unsafe { libc::gettid() }, Ordering::Release);
}

/// The crash that is to be reported.
pub(super) fn crash() -> Option<Crash> {
    (STAGE.load(Ordering::Acquire) == ASKED).then(|| Crash {
        signal: SIGNAL.load(Ordering::Relaxed),
        thread: THREAD.load(Ordering::Relaxed),
        code: CODE.load(Ordering::Relaxed),
        detail: DETAIL.load(Ordering::Relaxed),
    })
}

/// The report is written, or cannot be: who waits may go on.
pub(super) fn written() {
    STAGE.store(OVER, Ordering::Release);
}
