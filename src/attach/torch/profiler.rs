//! Memory events of torch's profiler: watched in observer mode, reported in heap mode.
//!
//! Torch's native allocator says every block to `c10::reportMemoryUsageToProfiler`, which libc10_cuda.so
//! calls through its PLT: a preloaded definition sees them all. Under our heap nobody says anything, so we
//! call the real function ourselves, while a profiler records memory. Must not know: what is done with a
//! block. Invariants: the real function is always called; nothing here takes the GIL (torch holds its
//! allocator's lock) or leaves anything to be dropped on the stack while torch's code runs.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Restored, Service, service};
use crate::driver::Address;

/// `c10::Device` in one register: type in the low byte, index in the next.
type Device = u16;
/// `c10::DeviceType::CUDA`.
const CUDA: u8 = 1;

type Report = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, Device);
type IsRecording = unsafe extern "C-unwind" fn() -> bool;

const REPORT: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";
const IS_RECORDING: &CStr = c"_ZN3c1022memoryProfilingEnabledEv";

static OBSERVING: AtomicBool = AtomicBool::new(false);
static REPORTING: AtomicBool = AtomicBool::new(false);

/// Observer mode: pass the native allocator's blocks to [`Service::observed`] from now on.
pub fn observe(on: bool) {
    OBSERVING.store(on, Ordering::Release);
}

/// Heap mode: a profiler starts (`on`) or has stopped. False where torch cannot be told of blocks. Asking
/// torch at every allocation whether a profiler records would cost tens of nanoseconds each time.
pub fn report_blocks(on: bool) -> bool {
    let possible = real().is_some_and(|real| real.is_recording.is_some());
    REPORTING.store(on && possible, Ordering::Release);
    possible
}

/// Torch's own functions.
struct Real {
    report: Report,
    is_recording: Option<IsRecording>,
}

fn real() -> Option<&'static Real> {
    static REAL: OnceLock<Option<Real>> = OnceLock::new();
    REAL.get_or_init(|| {
        // SAFETY: libc10.so is loaded (or the handle is null); its symbols have the types that
        // c10/core/Allocator.h gives them.
        unsafe {
            let library = libc::dlopen(c"libc10.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            // A torch that is linked otherwise: whatever comes after us.
            let library = if library.is_null() { libc::RTLD_NEXT } else { library };
            let report = libc::dlsym(library, REPORT.as_ptr());
            let is_recording = libc::dlsym(library, IS_RECORDING.as_ptr());
            // A library that found our definition must not be called by it.
            if report.is_null() || report == interposed as *mut c_void {
                return None;
            }
            Some(Real {
                report: std::mem::transmute::<*mut c_void, Report>(report),
                is_recording: std::mem::transmute::<*mut c_void, Option<IsRecording>>(is_recording),
            })
        }
    })
    .as_ref()
}

/// What libc10_cuda.so calls where this library is preloaded, for every block.
///
/// # Safety
/// For torch only.
#[unsafe(export_name = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE")]
pub unsafe extern "C-unwind" fn interposed(
    at: *mut c_void,
    size: i64,
    allocated: usize,
    reserved: usize,
    device: Device,
) {
    if let Some(real) = real() {
        // SAFETY: torch's own function with torch's own arguments.
        unsafe { (real.report)(at, size, allocated, reserved, device) };
    }
    let [kind, index] = device.to_le_bytes();
    if kind == CUDA && OBSERVING.load(Ordering::Acquire) {
        observed(at as u64, size, i32::from(index as i8), allocated as u64, reserved as u64);
    }
}

#[inline(never)]
fn observed(at: Address, size: i64, device: i32, allocated: u64, reserved: u64) {
    super::guarded("observing", |service| service.observed(at, size, device, allocated, reserved));
}

/// Whether torch's profiler records memory on this thread.
#[inline]
fn is_recording() -> bool {
    if !REPORTING.load(Ordering::Relaxed) {
        return false;
    }
    // SAFETY: a function without arguments that reads thread-local state.
    real().and_then(|real| real.is_recording).is_some_and(|is_recording| unsafe { is_recording() })
}

/// Our heap gave a block.
#[inline]
pub fn allocated(at: Address, size: usize, device: i32) {
    if is_recording()
        && let Some(service) = service()
    {
        report(service, at, size as i64, device);
    }
}

/// Our heap is about to take a block back: its size and device, if the profiler wants to know.
#[inline]
pub fn about_to_free(service: &dyn Service, at: Address) -> Option<(u64, i32)> {
    if is_recording() { service.requested_size(at) } else { None }
}

/// Our heap took a block back.
pub fn freed(service: &dyn Service, at: Address, size: u64, device: i32) {
    report(service, at, -(size as i64), device);
}

/// Our heap took blocks of a pool back and gave others.
pub fn exchanged(service: &dyn Service, device: i32, restored: &Restored) {
    if is_recording() {
        restored.freed.iter().for_each(|&(at, size)| report(service, at, -(size as i64), device));
        restored.allocated.iter().for_each(|&(at, size)| report(service, at, size as i64, device));
    }
}

#[cold]
fn report(service: &dyn Service, at: Address, size: i64, device: i32) {
    let Some(real) = real() else { return };
    let (allocated, reserved) = service.totals(device);
    let device = u16::from_le_bytes([CUDA, device as u8]);
    // SAFETY: torch's own function; the address is only noted.
    unsafe { (real.report)(at as *mut c_void, size, allocated as usize, reserved as usize, device) };
}
