//! Passing signals on from `strandline run` to the job. Used by the command only, never inside a job.

use std::sync::atomic::{AtomicI32, Ordering};

static CHILD: AtomicI32 = AtomicI32::new(0);
static PENDING: AtomicI32 = AtomicI32::new(0);

extern "C" fn forward(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // From the terminal (SI_KERNEL) the job gets these two by itself.
    let terminal = matches!(signal, libc::SIGINT | libc::SIGQUIT);
    // SAFETY: the kernel passes the signal's information.
    if terminal && !info.is_null() && unsafe { (*info).si_code } > 0 {
        return;
    }
    let child = CHILD.load(Ordering::SeqCst);
    if child > 0 {
        // SAFETY: kill is async-signal-safe; the pid is our own child's.
        unsafe { libc::kill(child, signal) };
    } else {
        PENDING.store(signal, Ordering::SeqCst);
    }
}

/// Handles the signals that a launcher or scheduler sends: they are for the job. SIGINT and SIGQUIT of a
/// terminal reach the job by themselves (same process group) and are passed on only where a process sent
/// them. What was ignored before (nohup, a shell's background job) stays ignored, here and in the job, which
/// inherits the default actions of the others, not these.
pub fn forward_signals() -> std::io::Result<()> {
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: sigaction with a valid structure; handlers, unlike SIG_IGN, are reset in the job by exec.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut old) == 0 && old.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            let mut new: libc::sigaction = std::mem::zeroed();
            new.sa_sigaction = forward as *const () as usize;
            new.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
            libc::sigemptyset(&mut new.sa_mask);
            if libc::sigaction(signal, &new, std::ptr::null_mut()) != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Names the job, and passes on what came before it was there.
pub fn forward_to(child: u32) {
    CHILD.store(child as i32, Ordering::SeqCst);
    let pending = PENDING.swap(0, Ordering::SeqCst);
    if pending != 0 {
        // SAFETY: our own child's pid.
        unsafe { libc::kill(child as i32, pending) };
    }
}

/// Sends a signal to a process; `strandline dump` knows that its strandline handles it.
pub fn send(pid: u32, signal: i32) -> std::io::Result<()> {
    let pid = i32::try_from(pid).map_err(|_| std::io::ErrorKind::InvalidInput)?;
    // SAFETY: a system call with two numbers.
    if unsafe { libc::kill(pid, signal) } == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
