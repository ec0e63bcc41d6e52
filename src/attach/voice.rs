//! What strandline says, on the stderr that the process was started with.
//!
//! A job may put a nameless temporary file in the place of stderr for a while, and keep a copy of the real one to
//! put it back (pytest does, around each test): what is said in between would be swallowed, so it goes to that
//! copy. A log file or a pipe in stderr's place is where the job wants such lines. We keep no descriptor of our
//! own: it would hold a pipe open after a daemon closed its own.
//! Must not know what is said. Invariants: nothing here fails, waits for long, or writes to a process that had no
//! stderr; a text that the reader has room for is written whole.

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

/// Remembers which file is stderr; runs when the library is loaded, before the program.
extern "C" fn remember() {
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

/// Whether it is a file that nobody can open by a name.
fn is_nameless(descriptor: c_int) -> bool {
    status_of(descriptor)
        .is_some_and(|found| found.st_mode & libc::S_IFMT == libc::S_IFREG && found.st_nlink == 0)
}

/// Where to write: stderr, or the copy of the real one that the job keeps while a capture is in its place.
fn place() -> Option<c_int> {
    match KNOWN.load(Ordering::Acquire) {
        CLOSED => return None,
        UNKNOWN => return Some(libc::STDERR_FILENO),
        _ => {}
    }
    let real = Some((FILE.0.load(Ordering::Relaxed), FILE.1.load(Ordering::Relaxed)));
    if file_of(libc::STDERR_FILENO) == real || !is_nameless(libc::STDERR_FILENO) {
        return Some(libc::STDERR_FILENO);
    }
    let listed = std::fs::read_dir("/proc/thread-self/fd").into_iter().flatten().flatten();
    let mut numbers = listed.filter_map(|entry| entry.file_name().to_str()?.parse::<c_int>().ok());
    let kept =
        numbers.find(|&number| number > libc::STDERR_FILENO && file_of(number) == real && writable(number));
    Some(kept.unwrap_or(libc::STDERR_FILENO))
}

fn writable(descriptor: c_int) -> bool {
    // SAFETY: a system call with two numbers.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// Waits until a pipe takes [`libc::PIPE_BUF`] bytes without holding us up; not for long, and but once in a row:
/// the caller may have Python's lock, which the thread that empties the pipe may be waiting for.
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
                return true;
            }
            _ if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            _ => return false,
        }
    }
}

/// Writes a text that ends with its line.
pub fn write(text: &str) {
    let Some(place) = place() else { return };
    // In the middle of somebody's line of dots, for example.
    let apart = if place == libc::STDERR_FILENO { String::new() } else { format!("\n{text}") };
    let mut rest = if apart.is_empty() { text.as_bytes() } else { apart.as_bytes() };
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

/// What each of our lines begins with: the rank too, where several write to one terminal.
pub fn prefix() -> &'static str {
    static PREFIX: OnceLock<String> = OnceLock::new();
    PREFIX.get_or_init(|| match options::rank_and_world() {
        (rank, world) if world > 1 => format!("strandline: rank {rank}: "),
        _ => "strandline: ".into(),
    })
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
