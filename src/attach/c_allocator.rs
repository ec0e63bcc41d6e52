//! The allocator of the C ABI: devices opened, blocks handed out and taken back, for callers without torch.
//!
//! Every function catches panics and answers with a code; what was wrong is kept for `strandline_error`, one
//! text for each thread. Must not know where the caller is written: a block's stack is the thread's Python
//! frames, else its native ones.

use super::abi::bindings::{
    self, STRANDLINE_EDRIVER, STRANDLINE_EINACTIVE, STRANDLINE_EINTERNAL, STRANDLINE_EINVAL,
    STRANDLINE_ENOENT, STRANDLINE_ENOMEM, strandline_counters,
};
use super::abi::{fill, guarded, text};
use super::options::Mode;
use super::process::{self, HOST, State};
use super::served::Served;
use super::torch::Refusal;
use super::{cuda_api, gpu};
use crate::driver::cuda::CudaDriver;
use crate::driver::{Driver, DriverError, Stream};
use crate::heap::{AddressSpace, HeapError};
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_void};

thread_local! {
    static ERROR: RefCell<String> = const { RefCell::new(String::new()) };
    /// Requests that the thread is in, and the step in which the outermost began.
    static REQUESTS: Cell<(u32, Option<u32>)> = const { Cell::new((0, None)) };
}

/// A code, and why.
struct Failure(c_int, String);

type Outcome<T = ()> = Result<T, Failure>;

fn failure<T>(code: c_int, why: impl Into<String>) -> Outcome<T> {
    Err(Failure(code, why.into()))
}

impl From<HeapError> for Failure {
    fn from(error: HeapError) -> Failure {
        let code = match error {
            HeapError::OutOfMemory { .. } => STRANDLINE_ENOMEM,
            HeapError::NotOurs { .. } => STRANDLINE_ENOENT,
            HeapError::Driver(_) => STRANDLINE_EDRIVER,
            HeapError::Pool { .. } | HeapError::Config(_) => STRANDLINE_EINVAL,
        };
        Failure(code, format!("{error}."))
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Failure {
        HeapError::from(error).into()
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        match refusal {
            Refusal::OutOfMemory(why) => Failure(STRANDLINE_ENOMEM, why),
            Refusal::Failed(why) => Failure(STRANDLINE_EDRIVER, why),
        }
    }
}

/// Runs a function of the ABI: its code, with the reason kept.
fn answer(f: impl FnOnce() -> Outcome) -> c_int {
    let fault = || Failure(STRANDLINE_EINTERNAL, "A fault of strandline's own; see stderr.".into());
    match guarded(Err(fault()), f) {
        Ok(()) => 0,
        Err(Failure(code, why)) => {
            keep(why);
            code
        }
    }
}

/// Keeps what `strandline_error` says on this thread.
pub(super) fn keep(why: String) {
    // A thread that is ending has no place for it.
    let _ = ERROR.try_with(|error| *error.borrow_mut() = why);
}

fn state() -> Outcome<&'static State> {
    process::state().ok_or_else(|| {
        let why = if process::is_detached() {
            "strandline is inert in this process: a forked child, or after a fault of its own."
        } else {
            "strandline is not active in this process; call strandline_open first."
        };
        Failure(STRANDLINE_EINACTIVE, why.into())
    })
}

/// Runs `$body` with the device's `Served`, of whichever driver.
macro_rules! with_device {
    ($device:expr, $served:ident => $body:expr) => {{
        let state = state()?;
        if $device == HOST {
            match &state.host {
                Some($served) => $body,
                None => failure(STRANDLINE_ENOENT, "The host is not open (strandline_open(STRANDLINE_HOST, …))."),
            }
        } else {
            match state.gpus.and_then(|gpus| gpus.open().find(|served| served.device() == $device)) {
                Some($served) => $body,
                None => failure(
                    STRANDLINE_ENOENT,
                    format!("GPU {} is not open (strandline_open({0}, …)).", $device),
                ),
            }
        }
    }};
}

/// Runs `$body` with the `Served` that a block belongs to.
macro_rules! with_owner {
    ($at:expr, $state:ident, $served:ident => $body:expr) => {{
        let $state = state()?;
        let at = $at as u64;
        let nobody = || failure(STRANDLINE_ENOENT, format!("{at:#x} is not a block of strandline's."));
        if !AddressSpace::owns(at) {
            nobody()
        } else if let Some($served) = &$state.host {
            $body
        } else {
            match $state.gpus.and_then(|gpus| gpus.owner(at)) {
                Some($served) => $body,
                None => nobody(),
            }
        }
    }};
}

/// The GPU that a block lies on.
fn gpu_of(at: u64) -> Option<(&'static gpu::Gpus, &'static Served<CudaDriver>)> {
    let gpus = process::state()?.gpus?;
    Some((gpus, gpus.owner(at)?))
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_version_number() -> u32 {
    let part = |text: &str| text.parse::<u32>().unwrap_or(0);
    part(env!("CARGO_PKG_VERSION_MAJOR")) * 10_000
        + part(env!("CARGO_PKG_VERSION_MINOR")) * 100
        + part(env!("CARGO_PKG_VERSION_PATCH"))
}

/// See `strandline.h`.
///
/// # Safety
/// `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_error(buffer: *mut c_char, size: usize) -> usize {
    let why = ERROR.try_with(|error| error.borrow().clone()).unwrap_or_default();
    // SAFETY: the caller's contract.
    unsafe { fill(&why, buffer, size) }
}

/// See `strandline.h`.
///
/// # Safety
/// `options` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_open(device: c_int, options: *const c_char) -> c_int {
    // SAFETY: the caller's contract.
    let options = unsafe { text(options) };
    answer(|| open(device, options))
}

fn open(device: c_int, options: Option<&str>) -> Outcome {
    if process::is_detached() {
        return state().map(drop);
    }
    if device < HOST {
        return failure(
            STRANDLINE_EINVAL,
            format!("{device} is no device: a CUDA ordinal, or -1 for the host."),
        );
    }
    let mode = if device == HOST { Mode::Host } else { Mode::Heap };
    let before = process::state().map(State::mode);
    if before != Some(mode) {
        if let (Some(before), true) = (before, before != Some(Mode::Observer) || device == HOST) {
            return failure(
                STRANDLINE_EINVAL,
                format!(
                    "A process accounts host memory or GPUs; this one is in mode {} already.",
                    before.word()
                ),
            );
        }
        if process::state().and_then(|state| state.gpus).is_some_and(super::gpu::Gpus::watches) {
            return failure(
                STRANDLINE_EINVAL,
                "What others allocate on a GPU is watched in this process already: call strandline_open before the \
                 first block of CUDA's own, or run the program with --mode heap.",
            );
        }
        if let Err(process::NotStarted(why)) = process::start(mode as i32, options) {
            return failure(STRANDLINE_EINVAL, why);
        }
        // Where Python's side runs, it has finished by then.
        process::report_at_exit();
    }
    if device == HOST {
        return Ok(());
    }
    let Some(gpus) = state()?.gpus else {
        return failure(STRANDLINE_EINACTIVE, "Another copy of strandline serves this process.");
    };
    let count = crate::driver::cuda::CudaDriver::device_count().map_err(|error| {
        let why = match error {
            DriverError::Unsupported("libcuda.so.1") => "NVIDIA's driver (libcuda.so.1) is not here".into(),
            other => crate::driver::cuda::CudaDriver::describe(&other),
        };
        Failure(STRANDLINE_ENOENT, format!("No GPU can be used: {why}."))
    })?;
    if device >= count {
        return failure(
            STRANDLINE_ENOENT,
            format!("There is no GPU {device}; this process may use {count}."),
        );
    }
    gpus.device(device)?;
    Ok(())
}

/// See `strandline.h`.
///
/// # Safety
/// `block` is null or a place for one pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_malloc(
    device: c_int,
    size: usize,
    stream: *mut c_void,
    block: *mut *mut c_void,
) -> c_int {
    answer(|| {
        if block.is_null() {
            return failure(STRANDLINE_EINVAL, "The place for the block's address is NULL.");
        }
        let state = state()?;
        let (clock, stack) = (state.clock, gpu::stack());
        cuda_api::pulse::before_a_block(state, stack);
        if let (HOST, Some(guard), Some(host)) = (device, &state.guard, &state.host) {
            let at = guard.malloc(state, host, size as u64, Stream(stream as u64), stack)?;
            // SAFETY: the caller's contract.
            unsafe { *block = at as *mut c_void };
            return Ok(());
        }
        let gpu = state.gpus.and_then(|gpus| Some((gpus, gpus.known(device)?)));
        let at = match gpu {
            Some((gpus, served)) => gpus.allocate(served, size as u64, Stream(stream as u64), stack)?,
            None => with_device!(device, served => {
                Ok(served.malloc(size as u64, Stream(stream as u64), stack, clock)?)
            })?,
        };
        // SAFETY: the caller's contract.
        unsafe { *block = at as *mut c_void };
        Ok(())
    })
}

/// See `strandline.h`.
///
/// # Safety
/// Nobody uses the block any more, except work on its stream and on recorded ones.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_free(block: *mut c_void) -> c_int {
    if block.is_null() {
        return 0;
    }
    answer(|| {
        if let Some((guard, host)) = state().ok().and_then(|s| Some((s.guard.as_ref()?, s.host.as_ref()?)))
            && AddressSpace::owns(block as u64)
        {
            return Ok(guard.free(state()?, host, block as u64)?);
        }
        if let Some((gpus, served)) = gpu_of(block as u64) {
            return Ok(gpus.deallocate(served, block as u64)?);
        }
        with_owner!(block, state, served => Ok(served.free(block as u64, state.clock).map(drop)?))
    })
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_record_stream(block: *mut c_void, stream: *mut c_void) -> c_int {
    answer(|| {
        if let Some((gpus, served)) = gpu_of(block as u64) {
            return Ok(gpus.note_use(served, block as u64, Stream(stream as u64))?);
        }
        with_owner!(block, state, served => {
            Ok(served.lock().heap.record_stream(block as u64, Stream(stream as u64))?)
        })
    })
}

/// See `strandline.h`.
///
/// # Safety
/// `requested` and `rounded` are null or places for one size each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_block_size(
    block: *const c_void,
    requested: *mut usize,
    rounded: *mut usize,
) -> c_int {
    answer(|| {
        let guarded = gpu_of(block as u64).and_then(|(gpus, served)| gpus.guarded_size(served, block as u64));
        if let Some(size) = guarded {
            // SAFETY: the caller's contract.
            unsafe {
                put(requested, size as usize);
                put(rounded, size as usize);
            }
            return Ok(());
        }
        let found = with_owner!(block, state, served => Ok(served.lock().heap.block_at(block as u64)))?;
        let Some(found) = found.filter(|found| {
            found.address == block as u64 && found.state == crate::heap::BlockState::Allocated
        }) else {
            return failure(STRANDLINE_ENOENT, format!("No block begins at {block:?}."));
        };
        // SAFETY: the caller's contract.
        unsafe {
            let rear =
                process::state().and_then(|s| s.guard.as_ref()).map_or(0, |_| super::guard::host::REAR);
            put(requested, found.requested.saturating_sub(rear) as usize);
            put(rounded, found.size.saturating_sub(rear) as usize);
        }
        Ok(())
    })
}

/// # Safety
/// `place` is null or a place for one value.
unsafe fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller's contract.
        unsafe { place.write(value) };
    }
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_trim(device: c_int) -> c_int {
    answer(|| {
        if let (Ok(state), true) = (state(), device != HOST)
            && let Some(gpus) = state.gpus
        {
            gpus.let_go();
        }
        with_device!(device, served => { served.lock().heap.trim(); Ok(()) })
    })
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_set_limit(device: c_int, bytes: usize) -> c_int {
    answer(|| {
        with_device!(device, served => {
            served.lock().heap.set_limit((bytes > 0).then_some(bytes as u64));
            Ok(())
        })
    })
}

/// See `strandline.h`.
///
/// # Safety
/// `free_bytes` and `total_bytes` are null or places for one size each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_memory_info(
    device: c_int,
    free_bytes: *mut usize,
    total_bytes: *mut usize,
) -> c_int {
    answer(|| {
        let info = with_device!(device, served => Ok(served.lock().heap.driver().memory_info()?))?;
        // SAFETY: the caller's contract.
        unsafe {
            put(free_bytes, info.free as usize);
            put(total_bytes, info.total as usize);
        }
        Ok(())
    })
}

fn counters<D: Driver>(served: &Served<D>) -> strandline_counters {
    let stats = served.lock().heap.stats();
    strandline_counters {
        allocated_bytes: stats.allocated_bytes.all.current,
        allocated_peak_bytes: stats.allocated_bytes.all.peak,
        requested_bytes: stats.requested_bytes.all.current,
        reserved_bytes: stats.reserved_bytes.all.current,
        reserved_peak_bytes: stats.reserved_bytes.all.peak,
        live_blocks: stats.allocation.all.current,
        mallocs: stats.allocation.all.allocated,
        frees: stats.allocation.all.freed,
        out_of_memory: stats.num_ooms,
    }
}

/// See `strandline.h`.
///
/// # Safety
/// `place` is null or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_get_counters(
    device: c_int,
    place: *mut strandline_counters,
    size: usize,
) -> c_int {
    answer(|| {
        if place.is_null() || size == 0 || !size.is_multiple_of(size_of::<u64>()) {
            return failure(
                STRANDLINE_EINVAL,
                "There is no room for counters: pass sizeof(strandline_counters).",
            );
        }
        let counters = with_device!(device, served => Ok(counters(served)))?;
        let known = size.min(size_of::<strandline_counters>());
        // SAFETY: `known` bytes of both; what a newer header has beyond them is 0.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const counters).cast::<u8>(), place.cast(), known);
            place.cast::<u8>().add(known).write_bytes(0, size - known);
        }
        Ok(())
    })
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_reset_peaks(device: c_int) -> c_int {
    answer(|| with_device!(device, served => { served.lock().heap.reset_peak(); Ok(()) }))
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_request_begin() -> c_int {
    // Its end will be a step: none is guessed from now on.
    cuda_api::pulse::by_hand();
    REQUESTS
        .try_with(|requests| {
            let (depth, began) = requests.get();
            let opens = || guarded(None, || process::state().map(|state| state.clock.request_opens()));
            requests.set((depth.saturating_add(1), if depth == 0 { opens() } else { began }));
            requests.get().0.min(c_int::MAX as u32) as c_int
        })
        .unwrap_or(1)
}

/// See `strandline.h`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_request_end() -> c_int {
    let left = REQUESTS.try_with(|requests| {
        let (depth, began) = requests.get();
        let left = depth.checked_sub(1)?;
        requests.set((left, began));
        Some((left, began))
    });
    let Ok(Some((left, began))) = left else {
        keep("This thread is in no request: strandline_request_begin comes first.".into());
        return STRANDLINE_EINVAL;
    };
    if left == 0 {
        guarded((), || {
            if let Some(state) = process::state() {
                began.into_iter().for_each(|step| state.clock.request_closes(step));
                state.step();
            }
        });
    }
    left.min(c_int::MAX as u32) as c_int
}

/// See `strandline.h`.
///
/// # Safety
/// `buffer` has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_findings(buffer: *mut c_char, size: usize) -> usize {
    let json = guarded(String::from("[]"), || {
        process::state().and_then(State::findings).unwrap_or_else(|| "[]".into())
    });
    // SAFETY: the caller's contract.
    unsafe { fill(&json, buffer, size) }
}

/// See `strandline.h`.
///
/// # Safety
/// None is needed; `extern "C"` as CuPy's `CFunctionAllocator` calls it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_cupy_malloc(
    stream: *mut c_void,
    size: usize,
    device: c_int,
) -> *mut c_void {
    let mut block = std::ptr::null_mut();
    // SAFETY: a place for one pointer.
    match unsafe { strandline_malloc(device, size, stream, &raw mut block) } {
        0 => block,
        _ => std::ptr::null_mut(),
    }
}

/// See `strandline.h`.
///
/// # Safety
/// As for [`strandline_free`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_cupy_free(stream: *mut c_void, block: *mut c_void, _device: c_int) {
    let _ = stream;
    // SAFETY: the caller's contract.
    let code = unsafe { strandline_free(block) };
    if code != 0 && code != STRANDLINE_EINACTIVE {
        guarded((), || {
            super::say(format_args!("a block of CuPy's could not be taken back ({block:?}, {code})"))
        });
    }
}

/// The header and the definitions above cannot drift apart.
const _: () = {
    use bindings as header;
    type Int = c_int;
    type Text = *mut c_char;
    let _ = [header::strandline_version_number as unsafe extern "C" fn() -> u32, strandline_version_number];
    let _ = [header::strandline_error as unsafe extern "C" fn(Text, usize) -> usize, strandline_error];
    let _ = [header::strandline_open as unsafe extern "C" fn(Int, *const c_char) -> Int, strandline_open];
    let _ = [
        header::strandline_malloc as unsafe extern "C" fn(Int, usize, *mut c_void, *mut *mut c_void) -> Int,
        strandline_malloc,
    ];
    let _ = [header::strandline_free as unsafe extern "C" fn(*mut c_void) -> Int, strandline_free];
    let _ = [
        header::strandline_record_stream as unsafe extern "C" fn(*mut c_void, *mut c_void) -> Int,
        strandline_record_stream,
    ];
    let _ = [
        header::strandline_block_size as unsafe extern "C" fn(*const c_void, *mut usize, *mut usize) -> Int,
        strandline_block_size,
    ];
    let _ = [header::strandline_trim as unsafe extern "C" fn(Int) -> Int, strandline_trim];
    let _ = [header::strandline_set_limit as unsafe extern "C" fn(Int, usize) -> Int, strandline_set_limit];
    let _ = [
        header::strandline_memory_info as unsafe extern "C" fn(Int, *mut usize, *mut usize) -> Int,
        strandline_memory_info,
    ];
    let _ = [
        header::strandline_get_counters as unsafe extern "C" fn(Int, *mut strandline_counters, usize) -> Int,
        strandline_get_counters,
    ];
    let _ = [header::strandline_reset_peaks as unsafe extern "C" fn(Int) -> Int, strandline_reset_peaks];
    let _ = [header::strandline_request_begin as unsafe extern "C" fn() -> Int, strandline_request_begin];
    let _ = [header::strandline_request_end as unsafe extern "C" fn() -> Int, strandline_request_end];
    let _ = [
        header::strandline_cupy_malloc as unsafe extern "C" fn(*mut c_void, usize, Int) -> *mut c_void,
        strandline_cupy_malloc,
    ];
    let _ = [
        header::strandline_cupy_free as unsafe extern "C" fn(*mut c_void, *mut c_void, Int),
        strandline_cupy_free,
    ];
    let _ = [header::strandline_findings as unsafe extern "C" fn(Text, usize) -> usize, strandline_findings];
};
