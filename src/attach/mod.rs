//! How strandline gets into a process, and how it stays out of the way.
//!
//! | file | job |
//! |---|---|
//! | [`options`] | what the environment asks for |
//! | [`conf`] | the one reader of `STRANDLINE_CONF` |
//! | [`spelling`] | what a misspelt word was probably meant to be |
//! | [`voice`] | what is said, on the stderr that the process was started with |
//! | [`preload`] | the symbols that a preloaded library takes the place of |
//! | [`python_boot`] | runs the Python side when `import torch` is seen |
//! | [`python_module`] | `import strandline` before `import torch` |
//! | `python_api` | how Python's C API is reached |
//! | [`python_objects`] | which Python object refers to which, for the search for holders |
//! | [`python_reach`] | what some Python objects lead to, and whether all that refers to it was seen |
//! | [`process`] | the one state of a process: heaps, ledgers, clock, judge |
//! | [`served`] | one device: its heap and its ledger under one lock |
//! | [`gpu`] | the GPUs: torch's questions answered from heaps and ledgers |
//! | [`pool_state`] | pools of CUDA graphs, put back to an earlier state |
//! | [`watched`] | one device whose blocks torch's own allocator hands out |
//! | [`guard`] | overflows and uses of freed memory, where they are looked for |
//! | [`outcome`] | what is written, and what is told at the end of the run |
//! | [`news`] | what is told while the job runs |
//! | [`unwatched`] | the last line of a job in which nothing was watched |
//! | [`siblings`] | whether processes that this one started have reported |
//! | [`verdict`] | the verdict, said to `strandline run --fail-on-leak` |
//! | [`around`] | one of torch's functions called with something before and after it, without a Python frame |
//! | [`abi`] | the C ABI of `include/strandline.h` |
//! | [`c_allocator`] | the C ABI's allocator |
//! | [`cuda_api`] | the allocation functions of CUDA, in programs that know nothing of strandline |
//! | [`foreign`] | blocks that CUDA itself handed out |
//! | [`torch`] | what torch asks of its CUDA allocator |
//! | [`control`] | the socket by which a running job is asked and watched |
//! | [`metrics`] | the address at which a running job answers a scraper |
//! | [`descriptors`] | a table of file descriptors of one thread's own |
//! | [`signal`] | reports on a signal, and before a terminating one |
//! | [`crash`] | the report of a job that crashes |
//! | `semaphore` | what a signal handler may post |
//! | [`fork`] | forked children stay inert |
//! | [`lineage`] | which process this is, and which ones started it |
//! | [`launch`] | passing signals on from `strandline run` |
//!
//! Nothing here may abort, panic across the ABI, take Python's GIL under a lock, or change the job's
//! output, result or exit code.

pub mod abi;
mod addresses;
pub mod around;
pub mod c_allocator;
pub mod conf;
pub mod control;
pub mod crash;
pub mod cuda_api;
pub mod descriptors;
pub mod foreign;
pub mod fork;
pub mod gpu;
pub mod guard;
pub mod history;
pub mod launch;
pub mod lineage;
pub mod metrics;
pub mod news;
pub mod options;
pub mod outcome;
pub mod pool_state;
pub mod preload;
pub mod process;
mod python_api;
pub mod python_boot;
pub mod python_module;
pub mod python_objects;
pub mod python_reach;
mod references;
mod semaphore;
pub mod served;
pub mod siblings;
pub mod signal;
pub mod spelling;
pub mod torch;
pub mod unwatched;
pub mod verdict;
pub mod voice;
pub mod watched;

use std::sync::atomic::AtomicBool;
pub use voice::{say, say_once};

/// A block could not be taken back. Said once; the block stays where it is.
#[cold]
fn fault_of_a_free(error: crate::heap::HeapError) {
    static SAID: AtomicBool = AtomicBool::new(false);
    say_once(&SAID, format_args!("a free could not be done: {error}"));
}

/// The user and process at the other end of a socket.
fn peer(socket: &std::os::unix::net::UnixStream) -> std::io::Result<libc::ucred> {
    use std::os::fd::AsRawFd;
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option fills in one `ucred`, whose size is given.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &mut length,
        )
    };
    if rc == 0 { Ok(who) } else { Err(std::io::Error::last_os_error()) }
}
