//! The functions of `cuda.h` that hand out memory and take it back, under their own names.
//!
//! Must not know how blocks are accounted. Each calls the real function (or the heap), then tells of the
//! block; see [`super`]. Their contracts are CUDA's.
#![allow(non_snake_case)]

use super::table::{self, Hook};
use super::{Kind, SUCCESS, Seen, born, dying, serve, take_back};
use crate::driver::Stream;
use libc::{c_int, c_uint, c_void};

/// `CUDA_ERROR_NOT_INITIALIZED`: what is answered where the process has no driver.
const NOT_INITIALIZED: c_int = 3;
/// What the heap rounds the rows of a pitched block to: the alignment that the driver itself uses.
const PITCH: usize = 512;

/// Calls the real function of a hook with the given types and arguments.
macro_rules! real {
    ($hook:expr, ($($value:expr => $type:ty),*)) => {
        match Hook::real(&$hook) {
            // SAFETY: the address of the real function, whose signature cuda.h gives; the caller's arguments.
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
unsafe fn tell(code: c_int, kind: Kind, place: *const u64, size: usize) -> c_int {
    if code == SUCCESS && !place.is_null() {
        // SAFETY: the caller's contract.
        born(Seen::ByDriver, kind, unsafe { *place }, size as u64);
    }
    code
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(place: *mut u64, size: usize) -> c_int {
    if !place.is_null() && size > 0 {
        match serve(size as u64) {
            Some(Ok(at)) => {
                // SAFETY: the caller's place.
                unsafe { *place = at };
                return SUCCESS;
            }
            Some(Err(code)) => return code,
            None => {}
        }
    }
    let code = real!(table::MEM_ALLOC, (place => *mut u64, size => usize));
    // SAFETY: the driver has filled the caller's place.
    unsafe { tell(code, Kind::Device, place, size) }
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocPitch_v2(
    place: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> c_int {
    let row = width.checked_next_multiple_of(PITCH);
    let whole = row.and_then(|row| row.checked_mul(height)).filter(|size| *size > 0);
    if let (false, false, Some(row), Some(size), 4 | 8 | 16) =
        (place.is_null(), pitch.is_null(), row, whole, element)
    {
        match serve(size as u64) {
            Some(Ok(at)) => {
                // SAFETY: the caller's places.
                unsafe { (*place, *pitch) = (at, row) };
                return SUCCESS;
            }
            Some(Err(code)) => return code,
            None => {}
        }
    }
    let code = real!(
        table::MEM_ALLOC_PITCH,
        (place => *mut u64, pitch => *mut usize, width => usize, height => usize, element => c_uint)
    );
    if code != SUCCESS || pitch.is_null() {
        return code;
    }
    // SAFETY: the driver has filled the caller's places.
    unsafe { tell(code, Kind::Device, place, (*pitch).saturating_mul(height)) }
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(at: u64) -> c_int {
    match take_back(at, None) {
        Some(code) => code,
        None => dying(at, || real!(table::MEM_FREE, (at => u64))),
    }
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocManaged(place: *mut u64, size: usize, flags: c_uint) -> c_int {
    let code = real!(table::MEM_ALLOC_MANAGED, (place => *mut u64, size => usize, flags => c_uint));
    // SAFETY: the driver has filled the caller's place.
    unsafe { tell(code, Kind::Managed, place, size) }
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocHost_v2(place: *mut *mut c_void, size: usize) -> c_int {
    let code = real!(table::MEM_ALLOC_HOST, (place => *mut *mut c_void, size => usize));
    // SAFETY: the driver has filled the caller's place.
    unsafe { tell(code, Kind::Pinned, place.cast(), size) }
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(place: *mut *mut c_void, size: usize, flags: c_uint) -> c_int {
    let code = real!(table::MEM_HOST_ALLOC, (place => *mut *mut c_void, size => usize, flags => c_uint));
    // SAFETY: the driver has filled the caller's place.
    unsafe { tell(code, Kind::Pinned, place.cast(), size) }
}

/// Of `cuda.h`.
///
/// # Safety
/// The contract of the function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(at: *mut c_void) -> c_int {
    dying(at as u64, || real!(table::MEM_FREE_HOST, (at => *mut c_void)))
}

macro_rules! in_stream_order {
    ($($malloc:ident $malloc_hook:ident, $pool:ident $pool_hook:ident, $free:ident $free_hook:ident;)*) => {$(
        /// Of `cuda.h`. Always served by CUDA, whose streams may end before their memory is reused.
        ///
        /// # Safety
        /// The contract of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $malloc(place: *mut u64, size: usize, stream: *mut c_void) -> c_int {
            let code = real!(table::$malloc_hook, (place => *mut u64, size => usize, stream => *mut c_void));
            // SAFETY: the driver has filled the caller's place.
            unsafe { tell(code, Kind::Device, place, size) }
        }

        /// Of `cuda.h`.
        ///
        /// # Safety
        /// The contract of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $pool(
            place: *mut u64,
            size: usize,
            pool: *mut c_void,
            stream: *mut c_void,
        ) -> c_int {
            let code = real!(
                table::$pool_hook,
                (place => *mut u64, size => usize, pool => *mut c_void, stream => *mut c_void)
            );
            // SAFETY: the driver has filled the caller's place.
            unsafe { tell(code, Kind::Device, place, size) }
        }

        /// Of `cuda.h`.
        ///
        /// # Safety
        /// The contract of the function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $free(at: u64, stream: *mut c_void) -> c_int {
            match take_back(at, Some(Stream(stream as u64))) {
                Some(code) => code,
                None => dying(at, || real!(table::$free_hook, (at => u64, stream => *mut c_void))),
            }
        }
    )*};
}

in_stream_order! {
    cuMemAllocAsync MEM_ALLOC_ASYNC, cuMemAllocFromPoolAsync MEM_ALLOC_FROM_POOL, cuMemFreeAsync MEM_FREE_ASYNC;
    cuMemAllocAsync_ptsz MEM_ALLOC_ASYNC_PTSZ, cuMemAllocFromPoolAsync_ptsz MEM_ALLOC_FROM_POOL_PTSZ, cuMemFreeAsync_ptsz MEM_FREE_ASYNC_PTSZ;
}
