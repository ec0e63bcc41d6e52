//! CUDA programs that know nothing of strandline: the allocation functions of the CUDA driver and runtime,
//! taken the place of by a preloaded library.
//!
//! | file | job |
//! |---|---|
//! | `cuda_api.rs` | whether this process is followed; what happens to a block |
//! | `cuda_api/table.rs` | the functions that are replaced, and where the real ones are |
//! | `cuda_api/lookup.rs` | `dlsym` and `cuGetProcAddress`, which answer with our functions |
//! | `cuda_api/driver_calls.rs` | the functions of `cuda.h` |
//! | `cuda_api/runtime_calls.rs` | the functions of `cuda_runtime_api.h` |
//! | `cuda_api/pulse.rs` | steps of a program that has no optimizer to tell them |
//!
//! A cudart, shared or linked into the program, asks libcuda for its functions by `dlsym` and
//! `cuGetProcAddress`, so the driver's functions see everything; the runtime's functions are replaced where a
//! program calls them through its PLT, in case a cudart reaches the driver by another way. A block that both
//! have seen is entered once: by its address.
//!
//! Invariants: the real function is called with what the caller gave, unless the heap serves; its answer is
//! passed on; nothing is done in a process that was not asked for by `STRANDLINE_MODE` (set by
//! `strandline run`), in a forked child, or once torch was imported (torch's allocator is followed then, and
//! its segments must not be counted as well).

pub mod driver_calls;
pub mod lookup;
pub mod pulse;
pub mod runtime_calls;
pub mod table;

use super::conf::Conf;
use super::gpu::Gpus;
use super::process::{self, State};
use super::torch::{Refusal, Service};
use super::{options, options::Mode, python_boot, say, say_once};
use crate::driver::{Address, Stream};
use crate::heap::AddressSpace;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// `CUDA_SUCCESS` and `cudaSuccess`.
pub const SUCCESS: c_int = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: c_int = 2;

/// What kind of memory a call hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of the current device.
    Device,
    /// Host memory that the GPU can reach (`cudaHostAlloc`).
    Pinned,
    /// Memory that moves between host and device (`cudaMallocManaged`).
    Managed,
}

impl Kind {
    /// The number of the device in reports; `device` is the current one.
    fn account(self, device: i32) -> i32 {
        match self {
            Kind::Device => device,
            Kind::Pinned => process::PINNED,
            Kind::Managed => process::MANAGED,
        }
    }
}

/// What the environment asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Asked {
    Unknown,
    Nothing,
    /// Blocks are watched; CUDA serves them.
    Observe,
    /// The heap serves what `cudaMalloc` and `cuMemAlloc` ask for.
    Serve,
}

fn asked() -> Asked {
    static ASKED: AtomicU8 = AtomicU8::new(Asked::Unknown as u8);
    match ASKED.load(Ordering::Relaxed) {
        known if known == Asked::Nothing as u8 => Asked::Nothing,
        known if known == Asked::Observe as u8 => Asked::Observe,
        known if known == Asked::Serve as u8 => Asked::Serve,
        _ => {
            let word = options::mode_word(&std::env::var("STRANDLINE_MODE").unwrap_or_default());
            // In a program with Python, its side says so.
            if let Err(fault) = &word
                && python_boot::symbol(c"Py_IsInitialized").is_none()
            {
                static SAID: AtomicBool = AtomicBool::new(false);
                say_once(&SAID, format_args!("STRANDLINE_MODE: {fault}; auto is used"));
            }
            let mode = word.unwrap_or("auto");
            let asked = read(mode, Conf::of_this_process().serve_cuda);
            ASKED.store(asked as u8, Ordering::Relaxed);
            asked
        }
    }
}

/// What `STRANDLINE_MODE` and the key `serve_cuda` of `STRANDLINE_CONF` mean for CUDA's functions. Watching is
/// the default: CUDA's own memory can be shared with other processes by `cudaIpcGetMemHandle`, a heap's not.
fn read(mode: &str, serve: Option<bool>) -> Asked {
    match mode {
        "auto" | "observer" => serve.filter(|&serve| serve).map_or(Asked::Observe, |_| Asked::Serve),
        "heap" => serve.filter(|&serve| !serve).map_or(Asked::Serve, |_| Asked::Observe),
        _ => Asked::Nothing,
    }
}

/// Whether CUDA's functions are to be replaced where they are looked up.
pub fn wanted() -> bool {
    asked() != Asked::Nothing && !python_boot::torch_was_seen() && !process::is_detached()
}

/// The state, if blocks of CUDA's functions are accounted in this process; begins the accounting.
fn following() -> Option<(&'static State, &'static Gpus)> {
    if !wanted() {
        return None;
    }
    static BEGIN: Once = Once::new();
    if process::state().is_none() {
        BEGIN.call_once(begin);
    }
    let state = process::state()?;
    let gpus = state.gpus?;
    // The first call may have come without the GIL, or before Python began.
    process::look_for_python_again();
    Some((state, gpus))
}

/// Whether the heap serves the device's memory.
fn serving() -> Option<&'static Gpus> {
    if asked() != Asked::Serve { None } else { following().map(|(_, gpus)| gpus) }
}

#[cold]
fn begin() {
    if !python_boot::first_copy() {
        return;
    }
    let mode = if asked() == Asked::Serve { Mode::Heap } else { Mode::Observer };
    if process::start(mode as i32, None).is_ok() {
        process::report_at_exit();
    }
}

/// Runs what is ours; a fault of ours ends the accounting, not the job. The caller's errno is as it was.
fn contained<T>(f: impl FnOnce() -> T) -> Option<T> {
    let _errno = super::abi::Errno::keep();
    catch_unwind(AssertUnwindSafe(f)).map_err(|_| process::fault("CUDA's functions")).ok()
}

/// Which of CUDA's functions has handed out a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    /// The driver's: the block is new, whatever was at its address before (a reset context takes its blocks with it).
    ByDriver,
    /// The runtime's: mostly the driver's function has seen the block already.
    ByRuntime,
}

/// CUDA handed out a block.
fn born(seen: Seen, kind: Kind, at: Address, size: u64) {
    if at == 0 || size == 0 {
        return;
    }
    contained(|| {
        let Some((state, gpus)) = following() else { return };
        if AddressSpace::owns(at) {
            return;
        }
        match seen {
            Seen::ByRuntime if gpus.notes_of(at).is_some() => return,
            Seen::ByRuntime => {}
            Seen::ByDriver => {
                if let Some((gpus, gone)) = gpus.forget(at) {
                    gpus.taken_back(at, gone);
                }
            }
        }
        let stack = super::gpu::stack();
        pulse::before_a_block(state, stack);
        let device = if kind == Kind::Device { table::current_device().unwrap_or(0) } else { 0 };
        gpus.handed_out(kind.account(device), at, size, stack);
    });
}

/// Runs a call that gives a block back. The block is forgotten before the call, because its address may be
/// handed out anew at once; if the call fails, it is remembered again.
fn dying(at: Address, call: impl FnOnce() -> c_int) -> c_int {
    let known = if at == 0 || process::is_detached() {
        None
    } else {
        contained(|| process::state().and_then(|state| state.gpus).and_then(|gpus| gpus.forget(at))).flatten()
    };
    let code = call();
    if let Some((gpus, noted)) = known {
        contained(|| if code == SUCCESS { gpus.taken_back(at, noted) } else { gpus.remember(at, noted) });
    }
    code
}

/// A block of the heap for the current device, if the heap serves; `None`: CUDA shall serve it.
fn serve(size: u64) -> Option<Result<Address, c_int>> {
    let gpus = serving()?;
    contained(|| {
        let (state, _) = following()?;
        let device = table::current_device()?;
        // Memory of the heap belongs to the primary context; a program's own contexts are served by CUDA.
        if !gpus.in_primary_context(device) {
            return None;
        }
        pulse::before_a_block(state, super::gpu::stack());
        match gpus.malloc(usize::try_from(size).ok()?, device, Stream(0)) {
            Ok(at) => {
                gpus.settle_guard(device);
                Some(Ok(at))
            }
            Err(Refusal::OutOfMemory(_)) => Some(Err(OUT_OF_MEMORY)),
            Err(Refusal::Failed(why)) => {
                static SAID: Once = Once::new();
                SAID.call_once(|| say(format_args!("{why} CUDA serves this memory itself.")));
                None
            }
        }
    })
    .flatten()
}

/// Takes a block of the heap back; `None` if the address is not the heap's. `after` is the stream in whose
/// order that happens; without one it happens, as `cudaFree` promises, after all work of the device.
fn take_back(at: Address, after: Option<Stream>) -> Option<c_int> {
    if !AddressSpace::owns(at) {
        return None;
    }
    let Some(gpus) = process::state().and_then(|state| state.gpus) else {
        // A forked child, or a fault of ours: what the heap handed out stays where it is.
        return Some(SUCCESS);
    };
    let code = contained(|| match after {
        Some(stream) => {
            gpus.record_stream(at, stream);
            gpus.release(at)
        }
        None => gpus.synchronize_owner(at).and_then(|()| gpus.release(at)),
    });
    Some(code.map_or(SUCCESS, |done| done.err().unwrap_or(SUCCESS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watching_is_the_default_and_only_where_it_was_asked_for() {
        assert_eq!(read("", None), Asked::Nothing);
        assert_eq!(read("off", Some(true)), Asked::Nothing);
        assert_eq!(read("host", None), Asked::Nothing);
        assert_eq!(read("auto", None), Asked::Observe);
        assert_eq!(read("observer", Some(false)), Asked::Observe);
        assert_eq!(read("auto", Some(true)), Asked::Serve);
        assert_eq!(read("heap", None), Asked::Serve);
        assert_eq!(read("heap", Some(false)), Asked::Observe);
    }
}
