//! The report of a job that crashes: of SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT (which `abort`, a failed
//! assertion, an uncaught C++ exception and NCCL's watchdog end in).
//!
//! | file | job |
//! |---|---|
//! | `crash.rs` | the thread that waits for a crash |
//! | [`handler`] | what the crashed thread does: it wakes that thread, waits, and dies as it would have |
//! | [`report`] | what can be written while the crashed thread holds who knows which lock |
//!
//! The thread does nothing else all the time: the one of [`super::signal`] may be in the middle of a report, and wait
//! for what the crashed thread holds. Must not know Python. Invariants: the job dies of the same signal, with the same
//! information, as without us; within [`LIMIT_SECONDS`]; at once in a forked child, or if nobody waits for a crash.

pub mod handler;
mod report;

use super::semaphore::Semaphore;
use super::{process, say, signal};
use std::sync::OnceLock;
use std::time::Duration;

/// How long the death of the job may be put off for its report.
pub const LIMIT_SECONDS: i64 = 5;

/// Posted by a crash.
static CRASHED: Semaphore = Semaphore::new();

/// Arranges that a crash is reported. Returns a sentence about why it is not.
pub fn start() -> Result<(), String> {
    static STARTED: OnceLock<()> = OnceLock::new();
    if STARTED.set(()).is_err() {
        return Ok(());
    }
    if !CRASHED.make() {
        return Err("no semaphore could be made, so no report at a crash".into());
    }
    signal::quiet_thread("strandline-end", wait)
        .map_err(|error| format!("no thread could be started ({error}), so no report at a crash"))?;
    handler::install();
    Ok(())
}

/// Has the things made that this thread needs once and the loader's lock is taken for (thread-locals with a destructor):
/// a thread that crashes while a library is loaded holds that lock.
fn make_ready() {
    // Locked by this very thread, so that it is waited for.
    let lock = parking_lot::Mutex::new(());
    let _held = lock.lock();
    drop(lock.try_lock_for(Duration::from_millis(1)));
}

fn wait() {
    make_ready();
    handler::this_thread_writes();
    loop {
        CRASHED.wait();
        let Some(crash) = handler::crash() else { continue };
        let written = std::panic::catch_unwind(|| {
            if let Some(state) = process::state() {
                state.crashed(&crash);
            }
        });
        if written.is_err() {
            say(format_args!("internal fault while the report of a crash ({}) was written", crash.name()));
        }
        handler::written();
    }
}
