//! Blocks that CUDA itself handed out, and what CUDA's functions ask of the heap.
//!
//! Must not know how a call was seen. Invariant: one device has one ledger. Where our heap serves a device,
//! CUDA's other blocks are entered in its books; where it does not, the device is watched, and is not served
//! from then on (`Gpus::first_use`).

use super::gpu::{DEVICES, Gpus};
use super::process;
use super::watched::Watched;
use crate::driver::cuda::CudaDriver;
use crate::driver::{Address, Driver, DriverError};
use crate::heap::HeapError;
use crate::ledger::Tag;
use crate::stacks::StackId;
use foldhash::fast::FixedState;
use hashbrown::HashMap;
use libc::c_int;

/// Results of the CUDA driver.
mod code {
    pub const INVALID_VALUE: i32 = 1;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const UNKNOWN: i32 = 999;
}

/// CUDA's blocks by their addresses.
pub type Blocks = HashMap<Address, Noted, FixedState>;

/// What is known of a block.
#[derive(Clone, Copy, Debug)]
pub struct Noted {
    device: i32,
    tag: Tag,
    size: u64,
}

impl Gpus {
    /// What is known of a block of CUDA's.
    pub fn notes_of(&self, at: Address) -> Option<Noted> {
        self.foreign.lock().get(&at).copied()
    }

    /// Where a device's blocks are watched: GPUs by number, host memory by its own.
    fn place(&self, device: i32) -> Option<&Watched> {
        let at = match device {
            process::PINNED => DEVICES,
            process::MANAGED => DEVICES + 1,
            device => usize::try_from(device).ok().filter(|n| *n < DEVICES)?,
        };
        Some(self.watched.get(at)?.get_or_init(|| Watched::new(device)))
    }

    /// CUDA handed out a block.
    pub fn handed_out(&self, device: i32, at: Address, size: u64, stack: StackId) {
        let now = self.clock.now();
        // The device is settled under the same lock that `first_use` takes: served or watched, not both.
        let tag = match self.known(device) {
            Some(served) => Some(served.lock().accounts.born(stack.0, size, now)),
            None => {
                let _settled = self.opening.lock();
                match self.known(device) {
                    Some(served) => Some(served.lock().accounts.born(stack.0, size, now)),
                    None => self.place(device).map(|watched| watched.handed_out(at, size, stack, self.clock)),
                }
            }
        };
        if let Some(tag) = tag {
            self.foreign.lock().insert(at, Noted { device, tag, size });
        }
    }

    /// Forgets a block that is about to be given back.
    pub fn forget(&'static self, at: Address) -> Option<(&'static Gpus, Noted)> {
        self.foreign.lock().remove(&at).map(|noted| (self, noted))
    }

    /// A block that was to be given back was not.
    pub fn remember(&self, at: Address, noted: Noted) {
        self.foreign.lock().insert(at, noted);
    }

    /// A block that was forgotten is gone.
    pub fn taken_back(&self, at: Address, noted: Noted) {
        match self.known(noted.device) {
            Some(served) => served.lock().accounts.died(noted.tag, noted.size, self.clock.now()),
            None => {
                if let Some(watched) = self.place(noted.device) {
                    watched.taken_back(at, noted.tag, noted.size, self.clock);
                }
            }
        }
    }

    /// Whether CUDA's blocks of any device are watched.
    pub fn watches(&self) -> bool {
        self.seen().any(|watched| watched.device() >= 0)
    }

    /// Whether the calling thread is in the primary context of a device, which the heap's memory belongs to.
    /// Opens the device.
    pub fn in_primary_context(&self, device: i32) -> bool {
        self.driver(device).is_some_and(|driver| driver.is_current())
    }

    fn driver(&self, device: i32) -> Option<CudaDriver> {
        Some(self.device(device).ok()?.lock().heap.driver().clone())
    }

    /// Waits until the device that a block of the heap lies on has no work left.
    ///
    /// # Errors
    /// The driver's code.
    pub fn synchronize_owner(&self, at: Address) -> Result<(), c_int> {
        let Some(served) = self.owner(at) else { return Err(code::INVALID_VALUE) };
        // Not under the lock: others allocate meanwhile.
        let driver = served.lock().heap.driver().clone();
        driver.synchronize_device().map_err(|error| number(&error))
    }

    /// Takes a block of the heap back.
    ///
    /// # Errors
    /// The driver's code.
    pub fn release(&self, at: Address) -> Result<(), c_int> {
        let Some(served) = self.owner(at) else { return Err(code::INVALID_VALUE) };
        match self.deallocate(served, at) {
            Ok(()) => Ok(()),
            Err(HeapError::Driver(error)) => Err(number(&error)),
            Err(_) => Err(code::INVALID_VALUE),
        }
    }
}

fn number(error: &DriverError) -> c_int {
    match error {
        DriverError::OutOfMemory => code::OUT_OF_MEMORY,
        DriverError::Unsupported(_) => code::NOT_SUPPORTED,
        DriverError::Failed { code, .. } if *code != 0 => *code,
        DriverError::Failed { .. } => code::UNKNOWN,
    }
}
