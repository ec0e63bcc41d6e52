//! One registered range of addresses, read without a lock while it changes.
//!
//! A sequence lock: the version is odd while the range changes, and a reader believes what it read only if the
//! version was even before and is the same afterwards. There is one writer at a time (the table's lock sees to
//! that). A reader that meets a change says no: the range that changes has no live block.
//!
//! Must not know the table. It is built on whatever atomics its parent names, so that `tests/heap_loom.rs` can
//! run it in every interleaving. Invariant: no reader sees a mixture of two ranges.

use super::atomic::{AtomicU64, Ordering};

pub(super) struct RangeSlot {
    pub version: AtomicU64,
    pub base: AtomicU64,
    /// Exclusive; 0 while the slot is free.
    pub end: AtomicU64,
    pub device: AtomicU64,
}

impl RangeSlot {
    /// The device of the range, if it holds the address.
    #[inline]
    pub(super) fn holds(&self, address: u64) -> Option<u64> {
        let version = self.version.load(Ordering::Acquire);
        // Whoever reads a new value here reads a new version below: the values are written after it.
        let end = self.end.load(Ordering::Acquire);
        let base = self.base.load(Ordering::Acquire);
        if address >= end || address < base {
            return None;
        }
        let device = self.device.load(Ordering::Acquire);
        let settled = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        settled.then_some(device)
    }

    /// Changes the range; an `end` of 0 frees the slot. One writer at a time.
    pub(super) fn set(&self, base: u64, end: u64, device: u64) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        self.base.store(base, Ordering::Release);
        self.device.store(device, Ordering::Release);
        self.end.store(end, Ordering::Release);
        self.version.store(version + 2, Ordering::Release);
    }
}
