//! The plain C functions that torch's `CUDAPluggableAllocator` takes, by name or by address.
//!
//! Must not know: the heap. `strandline_torch_malloc` and `…_begin_allocate_to_pool` are C++ behind a jump:
//! the first throws `torch.OutOfMemoryError`, the second receives a `std::function`; a jump leaves no frame
//! of Rust on the stack. Invariant: all of these do nothing before a service is installed.

use std::ffi::{c_int, c_void};

use super::{PoolId, calls, guarded, pools};
use crate::driver::Stream;

/// Memory for `size` bytes; throws `c10::OutOfMemoryError` if there is none (C++).
///
/// # Safety
/// For torch, or another caller that lets C++ exceptions pass.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_torch_malloc(
    size: usize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!("jmp {}", sym calls::strandline_cxx_malloc);
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!("b {}", sym calls::strandline_cxx_malloc);
}

/// Takes memory back. Torch also says what it knows of the block; we know it ourselves.
///
/// # Safety
/// `at` came from `strandline_torch_malloc` and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_torch_free(
    at: *mut c_void,
    _size: usize,
    _device: c_int,
    _stream: *mut c_void,
) {
    // SAFETY: as promised to this function.
    unsafe { calls::strandline_internal_free(at) };
}

/// CUDA is being initialised; 0 comes once when the allocator object is made.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_init(device_count: c_int) {
    guarded("init", |service| service.devices(device_count));
}

/// `torch.cuda.empty_cache()`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_reset() {
    guarded("empty_cache", |service| service.empty_cache(None));
}

/// `torch.cuda.set_per_process_memory_fraction`.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_memory_fraction(fraction: f64, device: c_int) {
    guarded("the memory fraction", |service| service.set_memory_fraction(fraction, device));
}

/// The segment of an address, and its size.
///
/// # Safety
/// `size` is null or a place for one `size_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_torch_base_alloc(at: *mut c_void, size: *mut usize) -> *mut c_void {
    let base = guarded("base_alloc", |service| service.base_allocation(at as u64)).flatten();
    let Some((start, bytes)) = base else { return at };
    if !size.is_null() {
        // SAFETY: as promised to this function.
        unsafe { *size = bytes as usize };
    }
    start as *mut c_void
}

/// `Tensor.record_stream`, NCCL, prefetching loaders.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_record_stream(at: *mut c_void, stream: *mut c_void) {
    if !at.is_null() {
        guarded("record_stream", |service| service.record_stream(at as u64, Stream(stream as u64)));
    }
}

/// A capture begins, or a `MemPool` is put to use: `void(int, MempoolId_t, std::function<bool(cudaStream_t)>)`.
///
/// # Safety
/// For torch only: the last argument is a C++ object.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strandline_torch_begin_allocate_to_pool() {
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!("jmp {}", sym calls::strandline_cxx_begin_pool);
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!("b {}", sym calls::strandline_cxx_begin_pool);
}

/// `MempoolId_t` is a pair of integers, which are passed in two registers.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_end_allocate_to_pool(device: c_int, first: u64, second: u64) {
    guarded("end_pool", |service| service.end_pool(device, PoolId(first, second)));
}

/// One user of the pool is gone.
#[unsafe(no_mangle)]
pub extern "C" fn strandline_torch_release_pool(device: c_int, first: u64, second: u64) {
    if pools::let_go(device, PoolId(first, second)) {
        guarded("release_pool", |service| service.release_pool(device, PoolId(first, second)));
    }
}
