//! Which devices may reach whose memory.
//!
//! Must not know: blocks, streams, the heap. Mapped memory is invisible to other devices until
//! `cuMemSetAccess` names them, and each name costs some 30 µs per mapping. So a device admits exactly the
//! other devices that this process has opened: a rank of a distributed job, which uses one GPU, pays
//! nothing, and a process that uses several needs no call. Invariant: for any two open devices A and B of
//! this process that can reach each other, every mapping of A admits B. Lock order: `OPEN`, then one
//! device's `mappings`.

use std::sync::{Arc, Weak};

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::context::{Context, check};
use super::symbols::{VirtualMemory, code};
use super::{Mappings, Shared};
use crate::driver::{Address, DriverError, Result};

/// The devices that this process has opened.
static OPEN: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Makes a newly opened device known to the others, and them to it.
pub fn introduce(new: &Arc<Shared>) {
    let mut open = OPEN.lock();
    open.retain(|other| other.strong_count() > 0);
    for other in open.iter().filter_map(Weak::upgrade) {
        // A refusal costs the users of cross-device kernels an error later, and nobody else anything; it
        // must not keep the device from opening.
        let _ = other.admit(&new.context);
        let _ = new.admit(&other.context);
    }
    open.push(Arc::downgrade(new));
}

/// The driver's words for "this device may read and write".
pub fn read_and_write(device: sys::CUdevice) -> sys::CUmemAccessDesc {
    // SAFETY: all-zero is a valid value of this C struct of integers.
    let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
    access.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    access
}

impl Shared {
    /// Lets `peer` reach this device's memory, past and future.
    pub fn admit(&self, peer: &Context) -> Result<()> {
        if peer.device() == self.context.device() || !self.is_reachable_from(peer) {
            return Ok(());
        }
        let Some(virtual_memory) = self.virtual_memory else { return self.admit_to_plain_memory(peer) };
        let access = read_and_write(peer.device());
        let _entered = self.context.enter()?;
        let mut mappings = self.mappings.lock();
        if mappings.access.iter().any(|known| known.location.id == peer.device()) {
            return Ok(());
        }
        for (at, mapping) in &mappings.at {
            // SAFETY: the range is mapped, as long as the lock is held.
            let result = unsafe { (virtual_memory.set_access)(*at, mapping.size as usize, &access, 1) };
            check("cuMemSetAccess", result)?;
        }
        mappings.access.push(access);
        Ok(())
    }

    fn is_reachable_from(&self, peer: &Context) -> bool {
        let Some(can_access) = self.symbols.can_access_peer else { return false };
        let mut can = 0;
        // SAFETY: `can` is a place for one int.
        let result = unsafe { can_access(&mut can, peer.device(), self.context.device()) };
        result == code::SUCCESS && can != 0
    }

    /// Memory of `cuMemAlloc` is opened to a peer's context as a whole.
    fn admit_to_plain_memory(&self, peer: &Context) -> Result<()> {
        let enable = self.symbols.enable_peer.ok_or(DriverError::Unsupported("cuCtxEnablePeerAccess"))?;
        let _entered = peer.enter()?;
        // SAFETY: both contexts are retained; flags must be 0.
        match unsafe { enable(self.context.raw(), 0) } {
            code::PEER_ALREADY_ENABLED => Ok(()),
            result => check("cuCtxEnablePeerAccess", result),
        }
    }
}

impl Mappings {
    /// Grants access to a new mapping: to the device itself, and to every admitted peer.
    pub fn grant(&mut self, virtual_memory: VirtualMemory, at: Address, size: u64) -> Result<()> {
        // SAFETY: the range was just mapped; the descriptors live through the call.
        let result = unsafe {
            (virtual_memory.set_access)(at, size as usize, self.access.as_ptr(), self.access.len())
        };
        check("cuMemSetAccess", result)
    }
}
