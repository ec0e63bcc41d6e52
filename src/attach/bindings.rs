// Made from include/strandline.h by `make bindings`; do not edit.

pub const STRANDLINE_ABI_VERSION: i32 = 1;
pub const STRANDLINE_EINVAL: i32 = -1;
pub const STRANDLINE_EINACTIVE: i32 = -2;
pub const STRANDLINE_ENOENT: i32 = -3;
pub const STRANDLINE_EIO: i32 = -4;
pub const STRANDLINE_ENOMEM: i32 = -5;
pub const STRANDLINE_EINTERNAL: i32 = -6;
pub const STRANDLINE_MODE_OFF: i32 = 0;
pub const STRANDLINE_MODE_HEAP: i32 = 1;
pub const STRANDLINE_MODE_OBSERVER: i32 = 2;
pub const STRANDLINE_MODE_HOST: i32 = 3;
pub const STRANDLINE_PHASE_OTHER: i32 = 0;
pub const STRANDLINE_PHASE_FORWARD: i32 = 1;
pub const STRANDLINE_PHASE_BACKWARD: i32 = 2;
pub const STRANDLINE_PHASE_OPTIMIZER: i32 = 3;
pub const STRANDLINE_PHASE_VALIDATION: i32 = 4;
unsafe extern "C" {
    pub fn strandline_abi_version() -> u32;
}
unsafe extern "C" {
    pub fn strandline_version() -> *const ::std::os::raw::c_char;
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
    pub fn strandline_trim() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_report(folder: *const ::std::os::raw::c_char) -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_finish() -> ::std::os::raw::c_int;
}
unsafe extern "C" {
    pub fn strandline_stats(
        device: ::std::os::raw::c_int,
        buffer: *mut ::std::os::raw::c_char,
        size: usize,
    ) -> usize;
}
unsafe extern "C" {
    pub fn strandline_python_source(module: *const ::std::os::raw::c_char) -> *const ::std::os::raw::c_char;
}
