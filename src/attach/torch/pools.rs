//! Pools: who uses them, and which streams they serve.
//!
//! Must not know: where a pool's memory lies. Torch counts a pool's users itself in its native allocator
//! and leaves that to a plug-in here: a pool comes to be when it is first named (a capture begins, a
//! `MemPool` is made), and ends when as many have let it go. Invariant: `release_pool` of the service is
//! called exactly when a pool's count falls to zero.

use std::collections::HashMap;
use std::ffi::c_void;

use parking_lot::Mutex;

use super::{PoolId, calls};
use crate::driver::Stream;

static USES: Mutex<Option<HashMap<(i32, PoolId), u32>>> = Mutex::new(None);

/// One more user of a pool.
pub fn hold(device: i32, pool: PoolId) {
    *USES.lock().get_or_insert_with(HashMap::new).entry((device, pool)).or_insert(0) += 1;
}

/// One user fewer; true if it was the last. A pool that nobody held stays as it is.
pub fn let_go(device: i32, pool: PoolId) -> bool {
    let mut uses = USES.lock();
    let Some(uses) = uses.as_mut() else { return false };
    let Some(count) = uses.get_mut(&(device, pool)) else { return false };
    *count -= 1;
    if *count == 0 {
        uses.remove(&(device, pool));
        return true;
    }
    false
}

/// How many users a pool has.
pub fn uses(device: i32, pool: PoolId) -> u32 {
    USES.lock().as_ref().and_then(|uses| uses.get(&(device, pool)).copied()).unwrap_or(0)
}

/// Torch's answer to "does this stream allocate from the pool?": a copy of its `std::function`.
///
/// It asks the driver at most (whether and what the stream captures), or which thread calls; it takes
/// neither the GIL nor memory.
pub struct Filter {
    /// A C++ object of `cuda/torch_shim.cpp`; null accepts every stream.
    raw: *mut c_void,
}

// SAFETY: torch's filters capture a stream, a capture's number or a thread's number by value; torch's own
// allocator calls them from any thread.
unsafe impl Send for Filter {}
// SAFETY: calling the function does not change it.
unsafe impl Sync for Filter {}

impl Filter {
    /// Takes over a filter that the C++ side made.
    ///
    /// # Safety
    /// `raw` is null or came from `strandline_cxx_begin_pool`, and is not used by anybody else.
    pub unsafe fn from_raw(raw: *mut c_void) -> Filter {
        Filter { raw }
    }

    /// Whether allocations on `stream`, by the calling thread, belong to the pool.
    pub fn accepts(&self, stream: Stream) -> bool {
        // SAFETY: `raw` is null or a live filter, as `from_raw` was promised.
        unsafe { calls::strandline_cxx_filter_accepts(self.raw, stream.0 as *mut c_void) }
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        // SAFETY: as above; nobody uses it any more.
        unsafe { calls::strandline_cxx_filter_drop(self.raw) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_ends_with_its_last_user() {
        let pool = PoolId(0, 71);
        assert!(!let_go(5, pool));
        hold(5, pool);
        hold(5, pool);
        assert_eq!(uses(5, pool), 2);
        assert_eq!(uses(6, pool), 0);
        assert!(!let_go(5, pool));
        assert!(let_go(5, pool));
        assert!(!let_go(5, pool));
    }
}
