// Made from include/strandline.h by `make bindings`; do not edit.

pub const STRANDLINE_ABI_VERSION: i32 = 1;
pub const STRANDLINE_VERSION_MAJOR: i32 = 0;
pub const STRANDLINE_VERSION_MINOR: i32 = 1;
pub const STRANDLINE_VERSION_PATCH: i32 = 0;
pub const STRANDLINE_VERSION: i32 = 100;
pub const STRANDLINE_EINVAL: i32 = -1;
pub const STRANDLINE_EINACTIVE: i32 = -2;
pub const STRANDLINE_ENOENT: i32 = -3;
pub const STRANDLINE_EIO: i32 = -4;
pub const STRANDLINE_ENOMEM: i32 = -5;
pub const STRANDLINE_EINTERNAL: i32 = -6;
pub const STRANDLINE_EDRIVER: i32 = -7;
pub const STRANDLINE_MODE_OFF: i32 = 0;
pub const STRANDLINE_MODE_HEAP: i32 = 1;
pub const STRANDLINE_MODE_OBSERVER: i32 = 2;
pub const STRANDLINE_MODE_HOST: i32 = 3;
pub const STRANDLINE_PHASE_OTHER: i32 = 0;
pub const STRANDLINE_PHASE_FORWARD: i32 = 1;
pub const STRANDLINE_PHASE_BACKWARD: i32 = 2;
pub const STRANDLINE_PHASE_OPTIMIZER: i32 = 3;
pub const STRANDLINE_PHASE_VALIDATION: i32 = 4;
pub const STRANDLINE_HOST: i32 = -1;
unsafe extern "C" {
    pub fn strandline_abi_version() -> u32;
}
unsafe extern "C" {
    pub fn strandline_version_number() -> u32;
}
unsafe extern "C" {
    pub fn strandline_version() -> *const ::std::os::raw::c_char;
}
unsafe extern "C" {
    pub fn strandline_error(buffer: *mut ::std::os::raw::c_char, size: usize) -> usize;
}
unsafe extern "C" {
    pub fn strandline_start(
        mode: ::std::os::raw::c_int,
        options: *const ::std::os::raw::c_char,
    ) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_mode() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_step() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_epoch() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_phase(phase: ::std::os::raw::c_int) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_phase_of(name: *const ::std::os::raw::c_char) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_request_begin() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_request_end() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_report(folder: *const ::std::os::raw::c_char) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_findings(buffer: *mut ::std::os::raw::c_char, size: usize) -> usize;
}
unsafe extern "C" {
    pub fn strandline_finish() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_open(
        device: ::std::os::raw::c_int,
        options: *const ::std::os::raw::c_char,
    ) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_malloc(
        device: ::std::os::raw::c_int,
        size: usize,
        stream: *mut ::std::os::raw::c_void,
        block: *mut *mut ::std::os::raw::c_void,
    ) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_free(block: *mut ::std::os::raw::c_void) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_record_stream(
        block: *mut ::std::os::raw::c_void,
        stream: *mut ::std::os::raw::c_void,
    ) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_block_size(
        block: *const ::std::os::raw::c_void,
        requested: *mut usize,
        rounded: *mut usize,
    ) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_trim(device: ::std::os::raw::c_int) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_set_limit(device: ::std::os::raw::c_int, bytes: usize) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_memory_info(
        device: ::std::os::raw::c_int,
        free_bytes: *mut usize,
        total_bytes: *mut usize,
    ) -> ::std::os::raw::c_int;
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct strandline_counters {
    pub allocated_bytes: u64,
    pub allocated_peak_bytes: u64,
    pub requested_bytes: u64,
    pub reserved_bytes: u64,
    pub reserved_peak_bytes: u64,
    pub live_blocks: u64,
    pub mallocs: u64,
    pub frees: u64,
    pub out_of_memory: u64,
}
unsafe extern "C" {
    pub fn strandline_get_counters(
        device: ::std::os::raw::c_int,
        counters: *mut strandline_counters,
        size: usize,
    ) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_reset_peaks(device: ::std::os::raw::c_int) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_stats(
        device: ::std::os::raw::c_int,
        buffer: *mut ::std::os::raw::c_char,
        size: usize,
    ) -> usize;
}
unsafe extern "C" {
    pub fn strandline_cupy_malloc(
        stream: *mut ::std::os::raw::c_void,
        size: usize,
        device: ::std::os::raw::c_int,
    ) -> *mut ::std::os::raw::c_void;
}
unsafe extern "C" {
    pub fn strandline_cupy_free(
        stream: *mut ::std::os::raw::c_void,
        block: *mut ::std::os::raw::c_void,
        device: ::std::os::raw::c_int,
    );
}
unsafe extern "C" {
    pub fn strandline_candidates(buffer: *mut ::std::os::raw::c_char, size: usize) -> usize;
}
unsafe extern "C" {
    pub fn strandline_explain(id: u64, answer: *const ::std::os::raw::c_char) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_collecting(on: ::std::os::raw::c_int) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_remark(remark: *const ::std::os::raw::c_char) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_say(line: *const ::std::os::raw::c_char) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_around(
        self_: *mut ::std::os::raw::c_void,
        arguments: *mut ::std::os::raw::c_void,
        keywords: *mut ::std::os::raw::c_void,
    ) -> *mut ::std::os::raw::c_void;
}
unsafe extern "C" {
    pub fn strandline_python_source(module: *const ::std::os::raw::c_char) -> *const ::std::os::raw::c_char;
}
unsafe extern "C" {
    pub fn strandline_torch_malloc(
        size: usize,
        device: ::std::os::raw::c_int,
        stream: *mut ::std::os::raw::c_void,
    ) -> *mut ::std::os::raw::c_void;
}
unsafe extern "C" {
    pub fn strandline_torch_free(
        block: *mut ::std::os::raw::c_void,
        size: usize,
        device: ::std::os::raw::c_int,
        stream: *mut ::std::os::raw::c_void,
    );
}
unsafe extern "C" {
    pub fn strandline_torch_init(device_count: ::std::os::raw::c_int);
}
unsafe extern "C" {
    pub fn strandline_torch_reset();
}
unsafe extern "C" {
    pub fn strandline_torch_memory_fraction(fraction: f64, device: ::std::os::raw::c_int);
}
unsafe extern "C" {
    pub fn strandline_torch_base_alloc(
        block: *mut ::std::os::raw::c_void,
        size: *mut usize,
    ) -> *mut ::std::os::raw::c_void;
}
unsafe extern "C" {
    pub fn strandline_torch_record_stream(
        block: *mut ::std::os::raw::c_void,
        stream: *mut ::std::os::raw::c_void,
    );
}
unsafe extern "C" {
    pub fn strandline_torch_end_allocate_to_pool(
        device: ::std::os::raw::c_int,
        pool_first: u64,
        pool_second: u64,
    );
}
unsafe extern "C" {
    pub fn strandline_torch_release_pool(device: ::std::os::raw::c_int, pool_first: u64, pool_second: u64);
}
