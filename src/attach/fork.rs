//! Forked children stay inert: they did not ask for strandline, and locks may be held by threads that do
//! not exist in them. A child frees nothing of ours and allocates nothing from us; blocks that it
//! inherited stay readable and writable (private memory, copied on write).

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

/// Children that were forked since accounting began.
static CHILDREN: AtomicU64 = AtomicU64::new(0);

/// Arranges that children of `fork` are inert. Called when accounting begins; once.
pub fn guard() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only stores to atomics and is never unloaded (the library stays mapped).
        let rc = unsafe { libc::pthread_atfork(None, Some(in_parent), Some(in_child)) };
        if rc != 0 {
            super::say(format_args!(
                "pthread_atfork failed ({rc}): forked children are told apart by their pid"
            ));
        }
    });
}

/// How many children were forked since accounting began. What they do is not watched.
pub fn children() -> u64 {
    CHILDREN.load(Ordering::Relaxed)
}

extern "C" fn in_parent() {
    CHILDREN.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn in_child() {
    super::process::detach();
}
