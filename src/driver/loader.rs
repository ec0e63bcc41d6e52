//! The loader's own `dlsym`, whoever stands in front of it.
//!
//! strandline itself may stand in front of `dlsym` (a preloaded library does, see `attach::cuda_api`), so
//! what is looked up inside the library must not go that way round. Must not know CUDA.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// `dlsym(3)`.
pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The versions under which glibc exports `dlsym`: the one that every glibc of this processor has comes first,
/// because a look-up that fails leaves a message in `dlerror`.
#[cfg(target_arch = "x86_64")]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.2.5", c"GLIBC_2.34"];
#[cfg(not(target_arch = "x86_64"))]
const VERSIONS: [&CStr; 2] = [c"GLIBC_2.17", c"GLIBC_2.34"];

/// glibc's `dlsym`; `None` only where there is no glibc.
pub fn dlsym() -> Option<Dlsym> {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    let mut found = FOUND.load(Ordering::Relaxed);
    if found == 0 {
        found = VERSIONS
            .iter()
            // SAFETY: terminated names; RTLD_NEXT is relative to this library.
            .map(|version| unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) })
            .find(|found| !found.is_null())? as usize;
        FOUND.store(found, Ordering::Relaxed);
    }
    // SAFETY: the address of glibc's dlsym, whose signature this is.
    Some(unsafe { std::mem::transmute::<usize, Dlsym>(found) })
}

/// A place to look in.
#[derive(Clone, Copy, Debug)]
pub struct Library(*mut c_void);

impl Library {
    /// Whatever comes after this library in the global scope.
    pub const NEXT: Library = Library(libc::RTLD_NEXT);

    /// A library that is loaded already, with its dependencies. The handle is kept for good.
    pub fn loaded(name: &CStr) -> Option<Library> {
        // SAFETY: a terminated name; RTLD_NOLOAD only looks.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        (!handle.is_null()).then_some(Library(handle))
    }

    /// # Safety
    /// `handle` came from `dlopen` and is never closed.
    pub unsafe fn from_raw(handle: *mut c_void) -> Library {
        Library(handle)
    }

    /// The address of `name`.
    pub fn find(self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open handle or RTLD_NEXT; a terminated name.
        let found = unsafe { dlsym()?(self.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_what_is_there() {
        let libc = Library::loaded(c"libc.so.6").unwrap();
        assert!(libc.find(c"getpid").is_some() && Library::NEXT.find(c"getpid").is_some());
        assert!(libc.find(c"no_such_function_anywhere").is_none());
        assert!(Library::loaded(c"libno_such_library.so").is_none());
    }
}
