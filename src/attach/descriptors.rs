//! A table of file descriptors of one thread's own: a job that closes what it did not open cannot close what is in
//! it, and a forked child does not inherit it.
//!
//! Must not know what the thread does with it. Invariant: nothing of the job's stays open in it.

use std::{fs, io};

/// Gives this thread a table of descriptors of its own, with /dev/null as 0, 1 and 2.
pub fn of_this_thread() -> Result<(), String> {
    // SAFETY: the system call closes descriptors in a table that it first makes this thread's own; nothing
    // of Rust's in this thread holds one.
    let rc = unsafe { libc::syscall(libc::SYS_close_range, 0u32, u32::MAX, libc::CLOSE_RANGE_UNSHARE) };
    if rc != 0 {
        close_one_by_one()?;
    }
    for _ in 0..3 {
        // SAFETY: a terminated path. The descriptor is the lowest free one, and stays open.
        if unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) } < 0 {
            return Err(format!("/dev/null cannot be opened ({})", io::Error::last_os_error()));
        }
    }
    Ok(())
}

/// The same for kernels before 5.9.
fn close_one_by_one() -> Result<(), String> {
    // SAFETY: affects this thread's table of descriptors only.
    if unsafe { libc::unshare(libc::CLONE_FILES) } != 0 {
        return Err(format!(
            "a thread may not have file descriptors of its own here ({})",
            io::Error::last_os_error()
        ));
    }
    let listed =
        fs::read_dir("/proc/thread-self/fd").map_err(|error| format!("/proc is needed ({error})"))?;
    let numbers: Vec<i32> = listed.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    for number in numbers {
        // SAFETY: in this thread's own table, where nothing of ours is open; the folder was just closed.
        unsafe { libc::close(number) };
    }
    Ok(())
}

/// What `poll` is to wait for.
pub fn watch(fd: i32, events: i16) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}

/// Waits until one of them is ready, for at most `milliseconds`. A poll that fails is not tried again at once.
pub fn poll(watched: &mut [libc::pollfd], milliseconds: i32) {
    // SAFETY: the slice lives through the call.
    let ready = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, milliseconds) };
    if ready < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

/// Whether there is nothing to be had or sent just now.
pub fn waits(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
