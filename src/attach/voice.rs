//! What strandline says, on the stderr that the process was started with.
//!
//! A job may put a nameless temporary file in the place of stderr for a while, and keep a copy of the real one to
//! put it back (pytest does, around each test): what is said in between would be swallowed, so it goes to that
//! copy. A log file or a pipe in stderr's place is where the job wants such lines; but a job that closed stderr may
//! have its data under that number since. We keep no descriptor of our own: it would hold a pipe open after a daemon
//! closed its own.
//! Must not know what is said. Invariants: nothing here fails, waits for long, raises a signal, or writes to a
//! process that had no stderr; a text that the reader has room for is written whole.

use super::options;
use libc::c_int;
use std::fmt::Arguments;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, Ordering};

/// The file that was stderr when this library was loaded, and whether there was one.
static FILE: (AtomicU64, AtomicU64) = (AtomicU64::new(0), AtomicU64::new(0));
static KNOWN: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const THERE: u8 = 1;
const CLOSED: u8 = 2;

/// How long a full pipe is waited for.
const PATIENCE_MILLISECONDS: c_int = 2000;

/// Remembers which file is stderr, and the rank; runs when the library is loaded, before the program.
extern "C" fn remember() {
    let _ = std::panic::catch_unwind(|| RANK_AT_LOAD.get_or_init(rank));
    match file_of(libc::STDERR_FILENO) {
        Some((device, inode)) => {
            FILE.0.store(device, Ordering::Relaxed);
            FILE.1.store(inode, Ordering::Relaxed);
            KNOWN.store(THERE, Ordering::Release);
        }
        None => KNOWN.store(CLOSED, Ordering::Release),
    }
}

// SAFETY: the loader calls the functions of this section with three arguments that `remember` ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = remember;

/// What a descriptor stands for.
fn status_of(descriptor: c_int) -> Option<libc::stat> {
    // SAFETY: the structure is plain data that fstat fills in.
    unsafe {
        let mut found: libc::stat = std::mem::zeroed();
        (libc::fstat(descriptor, &mut found) == 0).then_some(found)
    }
}

/// Its device and inode.
fn file_of(descriptor: c_int) -> Option<(u64, u64)> {
    status_of(descriptor).map(|found| (found.st_dev, found.st_ino))
}

/// Whether what the job has put in the place of stderr is for lines like ours: a pipe, a terminal, a log. A file is a
/// log if it is written at its end only, or stdout goes there too; one without a name is a capture.
fn is_for_lines(descriptor: c_int) -> bool {
    let Some(found) = status_of(descriptor) else { return false };
    match found.st_mode & libc::S_IFMT {
        libc::S_IFIFO | libc::S_IFCHR => true,
        libc::S_IFREG if found.st_nlink > 0 => {
            flags_of(descriptor) & libc::O_APPEND != 0
                || file_of(libc::STDOUT_FILENO) == Some((found.st_dev, found.st_ino))
        }
        _ => false,
    }
}

/// Where to write: stderr, or the copy of the real one that the job keeps while something else is in its place.
fn place() -> Option<c_int> {
    match KNOWN.load(Ordering::Acquire) {
        CLOSED => return None,
        UNKNOWN => return Some(libc::STDERR_FILENO),
        _ => {}
    }
    let real = Some((FILE.0.load(Ordering::Relaxed), FILE.1.load(Ordering::Relaxed)));
    if file_of(libc::STDERR_FILENO) == real || is_for_lines(libc::STDERR_FILENO) {
        return Some(libc::STDERR_FILENO);
    }
    let listed = std::fs::read_dir("/proc/thread-self/fd").into_iter().flatten().flatten();
    let mut numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<c_int>().ok());
    numbers.find(|&number| number > libc::STDERR_FILENO && file_of(number) == real && writable(number))
}

fn writable(descriptor: c_int) -> bool {
    flags_of(descriptor) & libc::O_ACCMODE != libc::O_RDONLY
}

/// How a descriptor was opened; for none that is open, as if for reading.
fn flags_of(descriptor: c_int) -> c_int {
    // SAFETY: a system call with two numbers.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    if flags < 0 { libc::O_RDONLY } else { flags }
}

/// Waits until a pipe takes [`libc::PIPE_BUF`] bytes without holding us up; false if nobody reads it. It does not
/// wait for long, and only once in a row: the caller may have Python's lock, which the thread that empties the pipe
/// may be waiting for.
fn has_room(descriptor: c_int) -> bool {
    static PATIENCE: AtomicI32 = AtomicI32::new(PATIENCE_MILLISECONDS);
    let mut watched = libc::pollfd { fd: descriptor, events: libc::POLLOUT, revents: 0 };
    loop {
        // SAFETY: one structure, which lives through the call.
        match unsafe { libc::poll(&mut watched, 1, PATIENCE.load(Ordering::Relaxed)) } {
            0 => {
                PATIENCE.store(0, Ordering::Relaxed);
                return false;
            }
            ready if ready > 0 => {
                PATIENCE.store(PATIENCE_MILLISECONDS, Ordering::Relaxed);
                return watched.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) == 0;
            }
            _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
}

/// Holds SIGPIPE back in this thread: the reader may go between a look at the pipe and a write to it, and the job,
/// which did not write, must not die of it. What our writes have raised is taken away again.
struct NoSigpipe {
    before: libc::sigset_t,
    /// Whether one waited before, which is the job's own.
    waited: bool,
}

impl NoSigpipe {
    fn hold() -> NoSigpipe {
        // SAFETY: signal sets are plain data that these functions fill in.
        unsafe {
            let (mut before, mut waiting) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigpending(&mut waiting);
            libc::pthread_sigmask(libc::SIG_BLOCK, &sigpipe(), &mut before);
            NoSigpipe { before, waited: libc::sigismember(&waiting, libc::SIGPIPE) == 1 }
        }
    }
}

impl Drop for NoSigpipe {
    fn drop(&mut self) {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: valid sets and a valid time; the mask is the one that was saved.
        unsafe {
            if !self.waited {
                while libc::sigtimedwait(&sigpipe(), std::ptr::null_mut(), &now) == -1
                    && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted
                {
                }
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
        }
    }
}

fn sigpipe() -> libc::sigset_t {
    // SAFETY: a signal set is plain data that these functions fill in.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGPIPE);
        set
    }
}

/// Writes a text that ends with its line.
pub fn write(text: &str) {
    let Some(place) = place() else { return };
    let _held = NoSigpipe::hold();
    // In the middle of somebody's line of dots, for example.
    let apart = (place != libc::STDERR_FILENO).then(|| format!("\n{text}"));
    let mut rest = apart.as_deref().unwrap_or(text).as_bytes();
    while !rest.is_empty() && has_room(place) {
        let part = &rest[..rest.len().min(libc::PIPE_BUF)];
        // SAFETY: the buffer lives through the call.
        let written = unsafe { libc::write(place, part.as_ptr().cast(), part.len()) };
        match usize::try_from(written) {
            Ok(written) if written > 0 => rest = &rest[written.min(rest.len())..],
            _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

/// Writes a line in a signal handler, whatever the interrupted thread holds: to stderr if that is still the file that
/// it was, and has room for it.
pub fn write_in_handler(line: &[u8]) {
    let real = (FILE.0.load(Ordering::Relaxed), FILE.1.load(Ordering::Relaxed));
    if KNOWN.load(Ordering::Acquire) != THERE || file_of(libc::STDERR_FILENO) != Some(real) {
        return;
    }
    let mut watched = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: async-signal-safe system calls; structure and buffer live through them.
    unsafe {
        if libc::poll(&mut watched, 1, 0) == 1 && watched.revents == libc::POLLOUT {
            libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
        }
    }
}

/// The rank as our lines name it, when the library was loaded and when accounting began: the environment is read at
/// these times, and not when something is said, which may be while another thread of the job changes it.
static RANK_AT_LOAD: OnceLock<String> = OnceLock::new();
static RANK_AT_START: OnceLock<String> = OnceLock::new();

fn rank() -> String {
    match options::rank_and_world() {
        (rank, world) if world > 1 => format!("strandline: rank {rank}: "),
        _ => "strandline: ".into(),
    }
}

/// Reads the rank again: accounting begins.
pub fn learn_rank() {
    RANK_AT_START.get_or_init(rank);
}

/// What each of our lines begins with: the rank too, where several write to one terminal.
pub fn prefix() -> &'static str {
    RANK_AT_START.get().or_else(|| RANK_AT_LOAD.get()).map_or("strandline: ", String::as_str)
}

/// Says a text of `report::text`, whose first line begins with our name.
pub fn tell(text: &str) {
    match text.strip_prefix("strandline: ") {
        Some(rest) => write(&format!("{}{rest}", prefix())),
        None => write(text),
    }
}

/// Says one line.
pub fn say(line: Arguments<'_>) {
    write(&format!("{}{line}\n", prefix()));
}

/// Says `line` the first time only; `said` is the caller's own static.
pub fn say_once(said: &AtomicBool, line: Arguments<'_>) {
    if !said.swap(true, Ordering::Relaxed) {
        say(line);
    }
}
