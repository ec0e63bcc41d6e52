//! The symbols that a preloaded library takes the place of: `dlopen` (to see torch being loaded), torch's
//! `c10::alloc_cpu` and `c10::free_cpu` (to serve CPU tensors) and `_exit` (to write the report of a job
//! that leaves without Python's exit handlers).
//!
//! Invariant: whoever does not use strandline notices nothing. Each definition asks a hook and then
//! *jumps* to the next definition with the caller's registers, so that glibc sees the real caller of
//! `dlopen` (it searches that caller's RUNPATH) and a C++ exception of torch's allocator passes no Rust
//! frame. Must not know what a heap or a ledger is.

use super::{process, python_boot, signal};
use libc::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Finds the definition of `name` that comes after ours, and remembers it in `slot`.
fn next(slot: &AtomicUsize, name: &'static core::ffi::CStr) -> usize {
    let known = slot.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: dlsym with a terminated name; RTLD_NEXT is relative to this library.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
    slot.store(found, Ordering::Relaxed);
    found
}

/// Called before each `dlopen`; returns where to jump.
extern "C" fn before_dlopen(path: *const c_char, _flags: c_int) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if !path.is_null() {
        // SAFETY: dlopen's contract: a terminated string.
        let path = unsafe { core::ffi::CStr::from_ptr(path) };
        python_boot::seen(path.to_bytes());
    }
    match next(&NEXT, c"dlopen") {
        0 => no_dlopen as *const () as usize,
        found => found,
    }
}

extern "C" fn no_dlopen(_path: *const c_char, _flags: c_int) -> *mut c_void {
    std::ptr::null_mut()
}

/// What an allocation hook answers: a pointer, or where to jump instead.
#[repr(C)]
pub struct Served {
    pointer: usize,
    jump: usize,
}

/// The handle of libc10.so, which is loaded privately (RTLD_NEXT does not find it).
fn torch_symbol(slot: &AtomicUsize, name: &'static core::ffi::CStr) -> usize {
    let known = slot.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: RTLD_NOLOAD only looks; the names are terminated. The handle is kept: libc10 is never unloaded.
    let found = unsafe {
        let c10 = libc::dlopen(c"libc10.so".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if c10.is_null() { 0 } else { libc::dlsym(c10, name.as_ptr()) as usize }
    };
    let found = if found == 0 { next(slot, name) } else { found };
    slot.store(found, Ordering::Relaxed);
    found
}

extern "C" fn before_alloc_cpu(size: usize) -> Served {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if let Some(pointer) = process::host_malloc(size) {
        return Served { pointer, jump: 0 };
    }
    Served { pointer: 0, jump: torch_symbol(&NEXT, c"_ZN3c109alloc_cpuEm") }
}

extern "C" fn before_free_cpu(pointer: *mut c_void) -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    if process::host_free(pointer as usize) {
        return 0;
    }
    torch_symbol(&NEXT, c"_ZN3c108free_cpuEPv")
}

#[cfg(target_arch = "x86_64")]
mod entry {
    use core::arch::naked_asm;

    /// # Safety
    /// The contract of `dlopen(3)`.
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn dlopen(path: *const libc::c_char, flags: libc::c_int) -> *mut libc::c_void {
        naked_asm!(
            ".cfi_startproc",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "push rsi", ".cfi_adjust_cfa_offset 8",
            "sub rsp, 8", ".cfi_adjust_cfa_offset 8",
            "call {hook}",
            "add rsp, 8", ".cfi_adjust_cfa_offset -8",
            "pop rsi", ".cfi_adjust_cfa_offset -8",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "jmp rax",
            ".cfi_endproc",
            hook = sym super::before_dlopen,
        )
    }

    /// `c10::alloc_cpu(size_t)`.
    ///
    /// # Safety
    /// Called by torch only; may throw through, never from, this function.
    #[unsafe(naked)]
    #[unsafe(export_name = "_ZN3c109alloc_cpuEm")]
    pub unsafe extern "C" fn alloc_cpu(size: usize) -> *mut libc::c_void {
        naked_asm!(
            ".cfi_startproc",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "call {hook}",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "test rdx, rdx",
            "jnz 2f",
            "ret",
            "2: jmp rdx",
            ".cfi_endproc",
            hook = sym super::before_alloc_cpu,
        )
    }

    /// `c10::free_cpu(void*)`.
    ///
    /// # Safety
    /// Called by torch only, with a pointer of `alloc_cpu`.
    #[unsafe(naked)]
    #[unsafe(export_name = "_ZN3c108free_cpuEPv")]
    pub unsafe extern "C" fn free_cpu(pointer: *mut libc::c_void) {
        naked_asm!(
            ".cfi_startproc",
            "push rdi", ".cfi_adjust_cfa_offset 8",
            "call {hook}",
            "pop rdi", ".cfi_adjust_cfa_offset -8",
            "test rax, rax",
            "jnz 2f",
            "ret",
            "2: jmp rax",
            ".cfi_endproc",
            hook = sym super::before_free_cpu,
        )
    }
}

#[cfg(target_arch = "aarch64")]
mod entry {
    use core::arch::naked_asm;

    /// # Safety
    /// The contract of `dlopen(3)`.
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn dlopen(path: *const libc::c_char, flags: libc::c_int) -> *mut libc::c_void {
        naked_asm!(
            ".cfi_startproc",
            "stp x29, x30, [sp, #-32]!",
            ".cfi_def_cfa_offset 32", ".cfi_offset x29, -32", ".cfi_offset x30, -24",
            "stp x0, x1, [sp, #16]",
            "bl {hook}",
            "mov x16, x0", "ldp x0, x1, [sp, #16]", "ldp x29, x30, [sp], #32",
            ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
            "br x16",
            ".cfi_endproc",
            hook = sym super::before_dlopen,
        )
    }

    /// `c10::alloc_cpu(size_t)`.
    ///
    /// # Safety
    /// Called by torch only; may throw through, never from, this function.
    #[unsafe(naked)]
    #[unsafe(export_name = "_ZN3c109alloc_cpuEm")]
    pub unsafe extern "C" fn alloc_cpu(size: usize) -> *mut libc::c_void {
        naked_asm!(
            ".cfi_startproc",
            "stp x29, x30, [sp, #-32]!",
            ".cfi_def_cfa_offset 32", ".cfi_offset x29, -32", ".cfi_offset x30, -24",
            "str x0, [sp, #16]",
            "bl {hook}",
            "mov x16, x1", "ldr x2, [sp, #16]", "ldp x29, x30, [sp], #32",
            ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
            "cbnz x16, 2f",
            "ret",
            "2: mov x0, x2", "br x16",
            ".cfi_endproc",
            hook = sym super::before_alloc_cpu,
        )
    }

    /// `c10::free_cpu(void*)`.
    ///
    /// # Safety
    /// Called by torch only, with a pointer of `alloc_cpu`.
    #[unsafe(naked)]
    #[unsafe(export_name = "_ZN3c108free_cpuEPv")]
    pub unsafe extern "C" fn free_cpu(pointer: *mut libc::c_void) {
        naked_asm!(
            ".cfi_startproc",
            "stp x29, x30, [sp, #-32]!",
            ".cfi_def_cfa_offset 32", ".cfi_offset x29, -32", ".cfi_offset x30, -24",
            "str x0, [sp, #16]",
            "bl {hook}",
            "mov x16, x0", "ldr x0, [sp, #16]", "ldp x29, x30, [sp], #32",
            ".cfi_def_cfa_offset 0", ".cfi_restore x29", ".cfi_restore x30",
            "cbnz x16, 2f",
            "ret",
            "2: br x16",
            ".cfi_endproc",
            hook = sym super::before_free_cpu,
        )
    }
}

/// `_exit(2)`: the report of a job that leaves by `os._exit` is written first, in the process that
/// accounts only (a child of `vfork` shares our memory but not our pid).
///
/// # Safety
/// Always safe to call; does not return.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _exit(code: c_int) -> ! {
    signal::leave();
    loop {
        // SAFETY: exit_group takes a status and does not return.
        unsafe { libc::syscall(libc::SYS_exit_group, code as libc::c_long) };
    }
}
