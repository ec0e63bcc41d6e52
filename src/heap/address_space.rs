//! Which addresses belong to a heap, answered without a lock.
//!
//! `free` of a pointer that may be anybody's needs this before it takes any lock. The registry is one
//! fixed table for the whole process: slots are written under the heaps' locks and read by everyone.
//! It knows ranges and devices, nothing of blocks. Invariant: what a reader sees in a slot is a range that was
//! registered there.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::atomic::AtomicU64;
use super::slot::RangeSlot;
use crate::driver::Address;

/// Ranges that can be registered at once; a heap over virtual memory needs a handful.
const SLOTS: usize = 8192;

static TABLE: [RangeSlot; SLOTS] = [const {
    RangeSlot {
        version: AtomicU64::new(0),
        base: AtomicU64::new(0),
        end: AtomicU64::new(0),
        device: AtomicU64::new(0),
    }
}; SLOTS];
/// Slots at and above this one were never used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Free slots below `USED`, and the right to change the table.
static FREE: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// The ranges of addresses that the heaps of this process have reserved.
pub struct AddressSpace;

impl AddressSpace {
    /// Whether an address lies in a range that any heap reserved. Takes no lock.
    #[inline]
    pub fn owns(address: Address) -> bool {
        Self::device_of(address).is_some()
    }

    /// The device whose heap reserved the range that the address lies in. Takes no lock.
    #[inline]
    pub fn device_of(address: Address) -> Option<u32> {
        let used = USED.load(Ordering::Acquire);
        TABLE[..used].iter().find_map(|slot| slot.holds(address)).map(|device| device as u32)
    }

    /// Registers a range; false if the table is full.
    pub(super) fn add(base: Address, size: u64, device: u32) -> bool {
        let mut free = FREE.lock();
        let index = match free.pop() {
            Some(index) => index,
            None => {
                let next = USED.load(Ordering::Relaxed);
                if next == SLOTS {
                    return false;
                }
                next
            }
        };
        TABLE[index].set(base, base + size, u64::from(device));
        USED.fetch_max(index + 1, Ordering::Release);
        true
    }

    pub(super) fn remove(base: Address) {
        let mut free = FREE.lock();
        let used = USED.load(Ordering::Relaxed);
        let found = TABLE[..used].iter().position(|slot| {
            slot.end.load(Ordering::Relaxed) != 0 && slot.base.load(Ordering::Relaxed) == base
        });
        if let Some(index) = found {
            TABLE[index].set(0, 0, 0);
            free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_come_and_go() {
        let base = 0x7abc_0000_0000_0000;
        assert!(!AddressSpace::owns(base));
        assert!(AddressSpace::add(base, 4096, 3));
        assert_eq!(AddressSpace::device_of(base), Some(3));
        assert!(AddressSpace::owns(base + 4095) && !AddressSpace::owns(base + 4096));
        AddressSpace::remove(base);
        assert!(!AddressSpace::owns(base));
    }
}
