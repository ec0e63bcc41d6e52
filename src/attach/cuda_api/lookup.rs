//! `dlsym` and `cuGetProcAddress`: where CUDA's functions are looked up, they are answered with ours.
//!
//! Must not know what our functions do. Invariant: any other name, and any name in a process that is not
//! followed, is looked up by the real function, which is *jumped* to with the caller's registers: glibc looks
//! at the caller's address (`RTLD_NEXT`), and a failed look-up leaves its own message in `dlerror`.

use super::table::{self, GET_PROC_ADDRESS, GET_PROC_ADDRESS_V2, GET_PROC_ADDRESS_V2_PTSZ, Hook};
use super::{SUCCESS, contained, wanted};
use crate::driver::loader;
use libc::{c_char, c_int, c_void};
use std::ffi::CStr;

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 500;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;

/// What is answered, or where to jump instead.
#[repr(C)]
pub struct Answer {
    pointer: usize,
    jump: usize,
}

extern "C" fn before_dlsym(handle: *mut c_void, name: *const c_char) -> Answer {
    let Some(real) = loader::dlsym() else { return Answer { pointer: 0, jump: 0 } };
    let jump = Answer { pointer: 0, jump: real as usize };
    if name.is_null() {
        return jump;
    }
    // SAFETY: dlsym's contract: a terminated string; the second byte is read only if the first is none of it.
    let of_cuda = unsafe { *name == b'c' as c_char && *name.add(1) == b'u' as c_char };
    if !of_cuda {
        return jump;
    }
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(name) };
    match contained(|| instead(handle, name, real)).flatten() {
        Some(0) => Answer { pointer: 0, jump: 0 },
        found => {
            // Our own look-ups may have failed; whoever asks `dlerror` now asks for his own.
            // SAFETY: may be called at any time.
            unsafe { libc::dlerror() };
            found.map_or(jump, |pointer| Answer { pointer, jump: 0 })
        }
    }
}

/// The answer to a look-up, where it is not the real one's.
fn instead(handle: *mut c_void, name: &CStr, real: loader::Dlsym) -> Option<usize> {
    let hook = table::by_name(name.to_bytes());
    if handle == libc::RTLD_DEFAULT {
        // Our own definitions come first in the global scope: without CUDA in it the answer must be "none".
        let replaced = hook.is_some() || table::RUNTIME.iter().any(|hook| hook.name == name);
        // SAFETY: a terminated name, looked up after this library.
        return (replaced && unsafe { real(libc::RTLD_NEXT, name.as_ptr()) }.is_null()).then_some(0);
    }
    if handle == libc::RTLD_NEXT {
        return None;
    }
    let hook = hook.filter(|_| wanted())?;
    // SAFETY: the caller's handle and a terminated name.
    let found = unsafe { real(handle, name.as_ptr()) } as usize;
    // Only the driver's own function is replaced, not that of another library that stands in for it.
    (found != 0 && Some(found) == hook.real()).then(|| hook.ours())
}

/// `dlsym(3)`.
///
/// # Safety
/// The contract of `dlsym(3)`.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "push rdi", ".cfi_adjust_cfa_offset 8",
        "push rsi", ".cfi_adjust_cfa_offset 8",
        "sub rsp, 8", ".cfi_adjust_cfa_offset 8",
        "call {hook}",
        "add rsp, 8", ".cfi_adjust_cfa_offset -8",
        "pop rsi", ".cfi_adjust_cfa_offset -8",
        "pop rdi", ".cfi_adjust_cfa_offset -8",
        "test rdx, rdx",
        "jnz 2f",
        "ret",
        "2: jmp rdx",
        ".cfi_endproc",
        hook = sym before_dlsym,
    )
}

/// `dlsym(3)`.
///
/// # Safety
/// The contract of `dlsym(3)`.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-32]!",
        ".cfi_def_cfa_offset 32", ".cfi_offset x29, -32", ".cfi_offset x30, -24",
        "stp x0, x1, [sp, #16]",
        "bl {hook}",
        "mov x16, x1", "mov x17, x0", "ldp x0, x1, [sp, #16]", "ldp x29, x30, [sp], #32",
        ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
        "cbnz x16, 2f",
        "mov x0, x17", "ret",
        "2: br x16",
        ".cfi_endproc",
        hook = sym before_dlsym,
    )
}

/// Puts our function in the place of what `cuGetProcAddress` has answered.
///
/// # Safety
/// `symbol` is null or a terminated string; `place` is null or holds what the driver answered.
unsafe fn exchange(symbol: *const c_char, place: *mut *mut c_void, version: c_int, per_thread: bool) {
    if symbol.is_null() || place.is_null() {
        return;
    }
    // SAFETY: the caller's contract.
    let (symbol, answer) = unsafe { (CStr::from_ptr(symbol), *place as usize) };
    if answer == 0 || !symbol.to_bytes().starts_with(b"cu") {
        return;
    }
    let ours = contained(|| {
        if !wanted() {
            return None;
        }
        let hook = table::by_request(symbol.to_str().ok()?, version, per_thread, answer)?;
        hook.learn(answer);
        Some(hook.ours())
    });
    if let Some(ours) = ours.flatten() {
        // SAFETY: the caller's place.
        unsafe { *place = ours as *mut c_void };
    }
}

type V2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

unsafe fn second_version(
    hook: &Hook,
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    let Some(real) = hook.real() else { return NOT_FOUND };
    // SAFETY: the real function's address; the caller's arguments.
    let code = unsafe { std::mem::transmute::<usize, V2>(real)(symbol, place, version, flags, status) };
    if code == SUCCESS {
        let per_thread = flags & PER_THREAD != 0 || std::ptr::eq(hook, &GET_PROC_ADDRESS_V2_PTSZ);
        // SAFETY: the caller's arguments, which the driver has accepted.
        unsafe { exchange(symbol, place, version, per_thread) };
    }
    code
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { second_version(&GET_PROC_ADDRESS_V2, symbol, place, version, flags, status) }
}

/// Of `cuda.h`, for programs built with per-thread default streams.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2_ptsz(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { second_version(&GET_PROC_ADDRESS_V2_PTSZ, symbol, place, version, flags, status) }
}

/// Of `cuda.h`, before CUDA 12.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    place: *mut *mut c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    type V1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> c_int;
    let Some(real) = GET_PROC_ADDRESS.real() else { return NOT_FOUND };
    // SAFETY: the real function's address; the caller's arguments.
    let code = unsafe { std::mem::transmute::<usize, V1>(real)(symbol, place, version, flags) };
    if code == SUCCESS {
        // SAFETY: the caller's arguments, which the driver has accepted.
        unsafe { exchange(symbol, place, version, flags & PER_THREAD != 0) };
    }
    code
}
