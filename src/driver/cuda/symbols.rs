//! The CUDA driver's functions, found at run time.
//!
//! Must not know: devices, contexts, the heap. The types are cudarc's; its calls are not used, because
//! they panic where the library or a symbol is missing. Invariant: nothing here panics, and a result code
//! stays a plain `i32` (a code that these bindings do not know must not become an invalid enum).
//! Where a function exists in several versions, the suffixed name (`cuMemAlloc_v2`) is looked up: the
//! suffix is the version, so no `cuGetProcAddress` is needed to pick one.

use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use crate::driver::loader::Library;
use crate::driver::{DriverError, Result};

/// Result codes of the driver that are treated apart.
pub mod code {
    pub const SUCCESS: i32 = 0;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const DEINITIALIZED: i32 = 4;
    pub const NOT_PERMITTED: i32 = 800;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const INVALID_VALUE: i32 = 1;
    pub const INVALID_DEVICE: i32 = 101;
    pub const CONTEXT_IS_DESTROYED: i32 = 709;
    pub const NOT_READY: i32 = 600;
    pub const PEER_ALREADY_ENABLED: i32 = 704;
}

macro_rules! driver_table {
    (required { $($need:ident = $need_name:literal ($($need_arg:ty),*);)* }
     optional { $($may:ident = $may_name:literal ($($may_arg:ty),*);)* }) => {
        /// The functions that every supported driver has, and those that it may lack.
        pub struct Symbols {
            $(pub $need: unsafe extern "C" fn($($need_arg),*) -> i32,)*
            $(pub $may: Option<unsafe extern "C" fn($($may_arg),*) -> i32>,)*
        }

        impl Symbols {
            /// Fills the table from an open library.
            fn resolve(library: *mut c_void) -> Result<Symbols> {
                Ok(Symbols {
                    $($need: {
                        let found = find(library, $need_name)
                            .ok_or(DriverError::Unsupported($need_name))?;
                        // SAFETY: the driver exports this name with this C signature (cuda.h); a
                        // non-null `*mut c_void` has the representation of a function pointer.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($need_arg),*) -> i32>(found)
                        }
                    },)*
                    $($may: find(library, $may_name).map(|found| {
                        // SAFETY: as above.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($may_arg),*) -> i32>(found)
                        }
                    }),)*
                })
            }
        }
    };
}

driver_table! {
    required {
        init = "cuInit" (c_uint);
        device_get = "cuDeviceGet" (*mut sys::CUdevice, c_int);
        device_count = "cuDeviceGetCount" (*mut c_int);
        // The attribute is passed as a plain number: cudarc's enum lacks those of newer drivers.
        device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, sys::CUdevice);
        primary_context_retain = "cuDevicePrimaryCtxRetain" (*mut sys::CUcontext, sys::CUdevice);
        context_current = "cuCtxGetCurrent" (*mut sys::CUcontext);
        context_push = "cuCtxPushCurrent_v2" (sys::CUcontext);
        context_pop = "cuCtxPopCurrent_v2" (*mut sys::CUcontext);
        context_synchronize = "cuCtxSynchronize" ();
        mem_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
        mem_alloc = "cuMemAlloc_v2" (*mut sys::CUdeviceptr, usize);
        mem_free = "cuMemFree_v2" (sys::CUdeviceptr);
        event_create = "cuEventCreate" (*mut sys::CUevent, c_uint);
        event_destroy = "cuEventDestroy_v2" (sys::CUevent);
        event_record = "cuEventRecord" (sys::CUevent, sys::CUstream);
        event_query = "cuEventQuery" (sys::CUevent);
        event_synchronize = "cuEventSynchronize" (sys::CUevent);
        stream_wait_event = "cuStreamWaitEvent" (sys::CUstream, sys::CUevent, c_uint);
        stream_synchronize = "cuStreamSynchronize" (sys::CUstream);
    }
    optional {
        context_record_event = "cuCtxRecordEvent" (sys::CUcontext, sys::CUevent);
        stream_create = "cuStreamCreate" (*mut sys::CUstream, c_uint);
        stream_is_capturing = "cuStreamIsCapturing" (sys::CUstream, *mut c_uint);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode" (*mut c_uint);
        can_access_peer = "cuDeviceCanAccessPeer" (*mut c_int, sys::CUdevice, sys::CUdevice);
        enable_peer = "cuCtxEnablePeerAccess" (sys::CUcontext, c_uint);
        copy_peer = "cuMemcpyPeerAsync"
            (sys::CUdeviceptr, sys::CUcontext, sys::CUdeviceptr, sys::CUcontext, usize, sys::CUstream);
        reserve = "cuMemAddressReserve" (*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, c_ulonglong);
        unreserve = "cuMemAddressFree" (sys::CUdeviceptr, usize);
        create = "cuMemCreate"
            (*mut sys::CUmemGenericAllocationHandle, usize, *const sys::CUmemAllocationProp, c_ulonglong);
        release = "cuMemRelease" (sys::CUmemGenericAllocationHandle);
        map = "cuMemMap" (sys::CUdeviceptr, usize, usize, sys::CUmemGenericAllocationHandle, c_ulonglong);
        unmap = "cuMemUnmap" (sys::CUdeviceptr, usize);
        set_access = "cuMemSetAccess" (sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
        granularity = "cuMemGetAllocationGranularity" (*mut usize, *const sys::CUmemAllocationProp, c_uint);
        export_handle = "cuMemExportToShareableHandle"
            (*mut c_void, sys::CUmemGenericAllocationHandle, c_uint, c_ulonglong);
        import_handle = "cuMemImportFromShareableHandle"
            (*mut sys::CUmemGenericAllocationHandle, *mut c_void, c_uint);
        error_name = "cuGetErrorName" (c_int, *mut *const c_char);
        module_load_data = "cuModuleLoadData" (*mut sys::CUmodule, *const c_void);
        module_get_function = "cuModuleGetFunction" (*mut sys::CUfunction, sys::CUmodule, *const c_char);
        launch_kernel = "cuLaunchKernel"
            (sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, sys::CUstream,
             *mut *mut c_void, *mut *mut c_void);
        host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
        host_address = "cuMemHostGetDevicePointer_v2" (*mut sys::CUdeviceptr, *mut c_void, c_uint);
    }
}

impl Symbols {
    /// The virtual-memory functions, all of them or `None` (a driver before CUDA 10.2).
    pub fn virtual_memory(&self) -> Option<VirtualMemory> {
        Some(VirtualMemory {
            reserve: self.reserve?,
            unreserve: self.unreserve?,
            create: self.create?,
            release: self.release?,
            map: self.map?,
            unmap: self.unmap?,
            set_access: self.set_access?,
            granularity: self.granularity?,
        })
    }

    /// The driver's own name of a result code (`CUDA_ERROR_INVALID_VALUE`), for messages.
    pub fn name_of(&self, result: i32) -> Option<&'static str> {
        let error_name = self.error_name?;
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the driver stores a pointer to a static string, or leaves `text` null.
        let status = unsafe { error_name(result, &mut text) };
        if status != code::SUCCESS || text.is_null() {
            return None;
        }
        // SAFETY: cuGetErrorName returns static, zero-terminated text.
        unsafe { CStr::from_ptr(text) }.to_str().ok()
    }
}

/// The virtual-memory functions of a driver that has all of them.
#[derive(Clone, Copy)]
pub struct VirtualMemory {
    pub reserve: unsafe extern "C" fn(*mut u64, usize, usize, u64, c_ulonglong) -> i32,
    pub unreserve: unsafe extern "C" fn(u64, usize) -> i32,
    pub create: unsafe extern "C" fn(*mut u64, usize, *const sys::CUmemAllocationProp, c_ulonglong) -> i32,
    pub release: unsafe extern "C" fn(u64) -> i32,
    pub map: unsafe extern "C" fn(u64, usize, usize, u64, c_ulonglong) -> i32,
    pub unmap: unsafe extern "C" fn(u64, usize) -> i32,
    pub set_access: unsafe extern "C" fn(u64, usize, *const sys::CUmemAccessDesc, usize) -> i32,
    pub granularity: unsafe extern "C" fn(*mut usize, *const sys::CUmemAllocationProp, c_uint) -> i32,
}

/// Looks a symbol up in an open library.
fn find(library: *mut c_void, name: &str) -> Option<*mut c_void> {
    // SAFETY: `library` is a handle from dlopen that is never closed.
    unsafe { Library::from_raw(library) }.find(&CString::new(name).ok()?)
}

/// Opens the driver library: the copy that the process (torch) already uses, else the system's.
/// `STRANDLINE_LIBCUDA` names another file; the tests put their stand-in there.
fn open() -> Result<*mut c_void> {
    let forced = std::env::var_os("STRANDLINE_LIBCUDA");
    let name = match forced {
        Some(path) => {
            use std::os::unix::ffi::OsStrExt;
            CString::new(path.as_bytes()).map_err(|_| DriverError::Unsupported("STRANDLINE_LIBCUDA"))?
        }
        None => c"libcuda.so.1".to_owned(),
    };
    // SAFETY: `name` is a zero-terminated path; loading the driver runs its own constructors only.
    let library = unsafe {
        let already = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if already.is_null() {
            libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL)
        } else {
            already
        }
    };
    if library.is_null() { Err(DriverError::Unsupported("libcuda.so.1")) } else { Ok(library) }
}

/// The table of this process, filled at first use; the same answer ever after.
pub fn symbols() -> Result<&'static Symbols> {
    static TABLE: OnceLock<Result<Symbols>> = OnceLock::new();
    TABLE.get_or_init(|| Symbols::resolve(open()?)).as_ref().map_err(Clone::clone)
}
