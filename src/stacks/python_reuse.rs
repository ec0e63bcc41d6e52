//! Notices when a code object dies, so that another one at the same address is not taken for it.
//!
//! Must not know what frames are. Only for Python 3.9 to 3.11: later versions number their code objects
//! (`co_version`). Nothing within an old code object tells it from its successor: all its parts are
//! freed with it and come back at the same addresses, in the same sizes. So the type's deallocator is
//! replaced by one that counts and then calls the old one. Invariant: the count of an address's bucket
//! has changed if a code object at that address was freed in between.

use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::python::Object;

/// Buckets: a collision costs a stack a second first sight (microseconds), never a wrong answer.
const BUCKETS: usize = 4096;
static DEATHS: [AtomicU32; BUCKETS] = [const { AtomicU32::new(0) }; BUCKETS];
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Offset of `tp_dealloc` in a `PyTypeObject`: the same since Python 2.
const DEALLOC: usize = 48;

#[inline(always)]
fn bucket(code: u64) -> &'static AtomicU32 {
    // Objects are 16 bytes apart at least; code objects are some hundred bytes long.
    &DEATHS[((code >> 4) ^ (code >> 16)) as usize % BUCKETS]
}

/// How many code objects of this address's bucket have died.
#[inline(always)]
pub fn deaths(code: u64) -> u32 {
    bucket(code).load(Ordering::Relaxed)
}

unsafe extern "C" fn dealloc(code: Object) {
    bucket(code as u64).fetch_add(1, Ordering::Relaxed);
    let next = NEXT.load(Ordering::Relaxed);
    // SAFETY: `watch` stored the type's own deallocator before it put this one in its place.
    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Object)>(next)(code) };
}

/// Puts the counting deallocator in place, once; says whether it is there.
///
/// # Safety
/// `code_type` is the address of `PyCode_Type` of Python 3.9 to 3.11, and the GIL is held. This library
/// must stay loaded: nothing takes the deallocator out again.
pub unsafe fn watch(code_type: u64) -> bool {
    // SAFETY: the slot lies within the type, which is a writable static; with the GIL held nobody frees
    // a code object meanwhile.
    unsafe {
        let slot = (code_type as usize + DEALLOC) as *mut *mut c_void;
        let current = slot.read();
        if current == dealloc as *mut c_void {
            return true;
        }
        let mut info: libc::Dl_info = std::mem::zeroed();
        // Whatever else this word may be, it is not a function of a loaded file: then leave it.
        if current.is_null() || libc::dladdr(current, &raw mut info) == 0 {
            return false;
        }
        NEXT.store(current, Ordering::Relaxed);
        slot.write(dealloc as *mut c_void);
    }
    true
}
