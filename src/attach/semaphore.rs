//! A semaphore in a static, which a signal handler may post.
//!
//! Must not know who waits for what. Invariant: [`Semaphore::post`] is async-signal-safe, and needs no file
//! descriptor (a job may close those that it did not open).

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

/// A semaphore; to be made before it is used.
pub struct Semaphore(UnsafeCell<MaybeUninit<libc::sem_t>>);

// SAFETY: the functions of sem_overview(7) may be called from any thread at any time.
unsafe impl Sync for Semaphore {}

impl Semaphore {
    /// One that is not made yet.
    pub const fn new() -> Semaphore {
        Semaphore(UnsafeCell::new(MaybeUninit::uninit()))
    }

    fn at(&self) -> *mut libc::sem_t {
        self.0.get().cast()
    }

    /// Makes it, with nothing to be had. False if there is none to be had from the system.
    #[must_use]
    pub fn make(&'static self) -> bool {
        // SAFETY: it lies in a static; callers make it once, before anybody posts or waits.
        unsafe { libc::sem_init(self.at(), 0, 0) == 0 }
    }

    /// Adds one.
    pub fn post(&'static self) {
        // SAFETY: it was made before whoever posts could come to know it.
        unsafe { libc::sem_post(self.at()) };
    }

    /// Waits for one, and takes it.
    pub fn wait(&'static self) {
        // SAFETY: as above. It is interrupted by a debugger only: our threads block every signal.
        while unsafe { libc::sem_wait(self.at()) } != 0 {}
    }
}
