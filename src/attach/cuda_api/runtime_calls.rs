//! The functions of `cuda_runtime_api.h` that hand out memory and take it back, under their own names.
//!
//! Must not know how blocks are accounted. Each entry adds the place that it returns to as one more argument
//! and jumps, since which cudart is meant depends on who calls (see [`super::table::RuntimeHook`]). The heap
//! serves below, where cudart asks the driver. Their contracts are CUDA's.
#![allow(non_snake_case)]

use super::table::{self, RuntimeHook};
use super::{Kind, SUCCESS, Seen, born, contained, dying};
use libc::{c_int, c_uint, c_void};

/// `cudaErrorInitializationError`: what is answered where the process has no cudart.
const NOT_INITIALIZED: c_int = 3;

/// An entry: the function of this name, which passes its own caller on after `$count` arguments.
macro_rules! entries {
    ($($name:ident $implementation:ident $register:literal $register_arm:literal ($($argument:ident: $type:ty),*);)*) => {$(
        /// Of `cuda_runtime_api.h`.
        ///
        /// # Safety
        /// The contract of the function of this name.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                concat!("mov ", $register, ", [rsp]"), "jmp {}", sym $implementation);
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(concat!("mov ", $register_arm, ", x30"), "b {}", sym $implementation);
        }
    )*};
}

entries! {
    cudaMalloc malloc "rdx" "x2" (place: *mut *mut c_void, size: usize);
    cudaMallocPitch malloc_pitch "r8" "x4" (place: *mut *mut c_void, pitch: *mut usize, width: usize, height: usize);
    cudaFree free "rsi" "x1" (at: *mut c_void);
    cudaMallocManaged malloc_managed "rcx" "x3" (place: *mut *mut c_void, size: usize, flags: c_uint);
    cudaMallocHost malloc_host "rdx" "x2" (place: *mut *mut c_void, size: usize);
    cudaHostAlloc host_alloc "rcx" "x3" (place: *mut *mut c_void, size: usize, flags: c_uint);
    cudaFreeHost free_host "rsi" "x1" (at: *mut c_void);
    cudaMallocAsync malloc_async "rcx" "x3" (place: *mut *mut c_void, size: usize, stream: *mut c_void);
    cudaMallocAsync_ptsz malloc_async_ptsz "rcx" "x3" (place: *mut *mut c_void, size: usize, stream: *mut c_void);
    cudaMallocFromPoolAsync malloc_from_pool "r8" "x4" (place: *mut *mut c_void, size: usize, pool: *mut c_void, stream: *mut c_void);
    cudaMallocFromPoolAsync_ptsz malloc_from_pool_ptsz "r8" "x4" (place: *mut *mut c_void, size: usize, pool: *mut c_void, stream: *mut c_void);
    cudaFreeAsync free_async "rdx" "x2" (at: *mut c_void, stream: *mut c_void);
    cudaFreeAsync_ptsz free_async_ptsz "rdx" "x2" (at: *mut c_void, stream: *mut c_void);
}

/// Calls the real function of a hook, as the caller would have without us.
macro_rules! real {
    ($hook:expr, $caller:expr, ($($value:expr => $type:ty),*)) => {
        match contained(|| RuntimeHook::real(&$hook, $caller)).flatten() {
            // SAFETY: the address of the real function, whose signature cuda_runtime_api.h gives; the
            // caller's arguments.
            Some(real) => unsafe {
                std::mem::transmute::<usize, unsafe extern "C" fn($($type),*) -> c_int>(real)($($value),*)
            },
            None => NOT_INITIALIZED,
        }
    };
}

/// Tells of a block after the real function was called.
///
/// # Safety
/// `place` is where the call has put the block's address, if `code` is success.
unsafe fn tell(code: c_int, kind: Kind, place: *const *mut c_void, size: usize) -> c_int {
    if code == SUCCESS && !place.is_null() {
        // SAFETY: the caller's contract.
        born(Seen::ByRuntime, kind, unsafe { *place } as u64, size as u64);
    }
    code
}

type Place = *mut *mut c_void;

unsafe extern "C" fn malloc(place: Place, size: usize, caller: usize) -> c_int {
    let code = real!(table::MALLOC, caller, (place => Place, size => usize));
    // SAFETY: cudart has filled the caller's place.
    unsafe { tell(code, Kind::Device, place, size) }
}

unsafe extern "C" fn malloc_pitch(
    place: Place,
    pitch: *mut usize,
    width: usize,
    height: usize,
    caller: usize,
) -> c_int {
    let code = real!(
        table::MALLOC_PITCH, caller,
        (place => Place, pitch => *mut usize, width => usize, height => usize)
    );
    if code != SUCCESS || pitch.is_null() {
        return code;
    }
    // SAFETY: cudart has filled the caller's places.
    unsafe { tell(code, Kind::Device, place, (*pitch).saturating_mul(height)) }
}

unsafe extern "C" fn free(at: *mut c_void, caller: usize) -> c_int {
    dying(at as u64, || real!(table::FREE, caller, (at => *mut c_void)))
}

unsafe extern "C" fn malloc_managed(place: Place, size: usize, flags: c_uint, caller: usize) -> c_int {
    let code = real!(table::MALLOC_MANAGED, caller, (place => Place, size => usize, flags => c_uint));
    // SAFETY: cudart has filled the caller's place.
    unsafe { tell(code, Kind::Managed, place, size) }
}

unsafe extern "C" fn malloc_host(place: Place, size: usize, caller: usize) -> c_int {
    let code = real!(table::MALLOC_HOST, caller, (place => Place, size => usize));
    // SAFETY: cudart has filled the caller's place.
    unsafe { tell(code, Kind::Pinned, place, size) }
}

unsafe extern "C" fn host_alloc(place: Place, size: usize, flags: c_uint, caller: usize) -> c_int {
    let code = real!(table::HOST_ALLOC, caller, (place => Place, size => usize, flags => c_uint));
    // SAFETY: cudart has filled the caller's place.
    unsafe { tell(code, Kind::Pinned, place, size) }
}

unsafe extern "C" fn free_host(at: *mut c_void, caller: usize) -> c_int {
    dying(at as u64, || real!(table::FREE_HOST, caller, (at => *mut c_void)))
}

macro_rules! in_stream_order {
    ($($malloc:ident $malloc_hook:ident, $pool:ident $pool_hook:ident, $free:ident $free_hook:ident;)*) => {$(
        unsafe extern "C" fn $malloc(place: Place, size: usize, stream: *mut c_void, caller: usize) -> c_int {
            let code =
                real!(table::$malloc_hook, caller, (place => Place, size => usize, stream => *mut c_void));
            // SAFETY: cudart has filled the caller's place.
            unsafe { tell(code, Kind::Device, place, size) }
        }

        unsafe extern "C" fn $pool(
            place: Place,
            size: usize,
            pool: *mut c_void,
            stream: *mut c_void,
            caller: usize,
        ) -> c_int {
            let code = real!(
                table::$pool_hook, caller,
                (place => Place, size => usize, pool => *mut c_void, stream => *mut c_void)
            );
            // SAFETY: cudart has filled the caller's place.
            unsafe { tell(code, Kind::Device, place, size) }
        }

        unsafe extern "C" fn $free(at: *mut c_void, stream: *mut c_void, caller: usize) -> c_int {
            dying(at as u64, || real!(table::$free_hook, caller, (at => *mut c_void, stream => *mut c_void)))
        }
    )*};
}

in_stream_order! {
    malloc_async MALLOC_ASYNC, malloc_from_pool MALLOC_FROM_POOL, free_async FREE_ASYNC;
    malloc_async_ptsz MALLOC_ASYNC_PTSZ, malloc_from_pool_ptsz MALLOC_FROM_POOL_PTSZ, free_async_ptsz FREE_ASYNC_PTSZ;
}
