//! Forked children stay inert: they did not ask for strandline, and locks may be held by threads that do
//! not exist in them. A child frees nothing of ours and allocates nothing from us; blocks that it
//! inherited stay readable and writable (private memory, copied on write).

use std::sync::Once;

/// Arranges that children of `fork` are inert. Called when accounting begins; once.
pub fn guard() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler only stores to atomics and is never unloaded (the library stays mapped).
        let rc = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if rc != 0 {
            super::say(format_args!(
                "pthread_atfork failed ({rc}): forked children are told apart by their pid"
            ));
        }
    });
}

extern "C" fn in_child() {
    super::process::detach();
}
