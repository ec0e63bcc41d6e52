//! Checkpoints of pools: what torch's `getCheckpointState` and `setCheckpointPoolState` come down to.
//!
//! Called by cuda/torch_checkpoint.cpp, and declared alike in cuda/torch_shim.h. Must not know: what is in a
//! state. Invariants: as in `calls.rs`; a state is dropped once.

use std::any::Any;
use std::ffi::{c_char, c_int, c_void};

use super::calls::{OK, inactive, refuse};
use super::{PoolId, Refusal, guarded, profiler};
use crate::driver::Address;

/// What a pool had handed out, in the service's own form.
pub type PoolState = Box<dyn Any + Send + Sync>;

/// What putting a pool back did: addresses, and bytes as they were requested. A block that was there before and is
/// again is in both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// The blocks that the pool had handed out.
    pub freed: Vec<(Address, u64)>,
    /// Those that it has handed out now.
    pub allocated: Vec<(Address, u64)>,
}

/// Addresses in memory of `malloc`.
#[repr(C)]
struct Addresses {
    first: *mut Address,
    count: usize,
}

impl Addresses {
    /// None if there is no memory for them.
    fn of(blocks: &[(Address, u64)]) -> Option<Addresses> {
        // SAFETY: `malloc` gives room for the addresses (of one at least), or null.
        unsafe {
            let first = libc::malloc(blocks.len().max(1) * size_of::<Address>()).cast::<Address>();
            if first.is_null() {
                return None;
            }
            for (index, block) in blocks.iter().enumerate() {
                first.add(index).write(block.0);
            }
            Some(Addresses { first, count: blocks.len() })
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_checkpoint(
    device: c_int,
    first: u64,
    second: u64,
    state: *mut *mut c_void,
    message: *mut *mut c_char,
) -> c_int {
    let taken = guarded("a checkpoint", |service| service.checkpoint(device, PoolId(first, second)));
    match taken.unwrap_or_else(inactive) {
        Ok(taken) => {
            // SAFETY: C++ passes the address of a pointer of its own.
            unsafe { *state = Box::into_raw(Box::new(taken)).cast() };
            OK
        }
        Err(refusal) => refuse(refusal, message),
    }
}

/// Gives a state back.
#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_drop_checkpoint(state: *mut c_void) {
    guarded("a checkpoint", |_| {
        // SAFETY: C++ got the state from `strandline_internal_checkpoint` and gives it back once.
        drop(unsafe { Box::from_raw(state.cast::<PoolState>()) });
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strandline_internal_restore(
    device: c_int,
    state: *const c_void,
    freed: *mut Addresses,
    allocated: *mut Addresses,
    message: *mut *mut c_char,
) -> c_int {
    let restored = guarded("restoring a pool", |service| {
        // SAFETY: C++ keeps the state that it got from `strandline_internal_checkpoint` for as long as this call.
        let restored = service.restore(device, unsafe { &*state.cast::<PoolState>() })?;
        profiler::exchanged(service, device, &restored);
        let lists = Addresses::of(&restored.freed).zip(Addresses::of(&restored.allocated));
        lists.ok_or_else(|| Refusal::Failed("strandline: no host memory for the blocks of a pool".into()))
    });
    match restored.unwrap_or_else(inactive) {
        Ok(lists) => {
            // SAFETY: C++ passes the addresses of two structures of its own.
            unsafe { (*freed, *allocated) = lists };
            OK
        }
        Err(refusal) => refuse(refusal, message),
    }
}
