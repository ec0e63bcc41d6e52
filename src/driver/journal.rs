//! Which ranges a driver mapped and took away, kept while somebody wants to know (snapshots' traces).
//!
//! Must not know: the heap. Invariant: off, it costs one relaxed load; on, it is bounded: whoever asked
//! for it takes the entries out at every event, and what nobody took is dropped.

use super::Address;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Entries kept for whoever takes them.
const MOST: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Memory appeared in a reserved range.
    Mapped,
    Unmapped,
    /// A plain segment.
    Allocated,
    Deallocated,
}

/// A change of what lies behind a range of addresses. Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub change: Change,
    pub at: Address,
    pub size: u64,
}

#[derive(Debug, Default)]
pub struct Journal {
    on: AtomicBool,
    entries: Mutex<Vec<Entry>>,
}

impl Journal {
    /// Starts or stops keeping entries; what was kept is forgotten.
    pub fn keep(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
        self.entries.lock().clear();
    }

    #[inline]
    pub fn note(&self, change: Change, at: Address, size: u64) {
        if self.on.load(Ordering::Relaxed) {
            let mut entries = self.entries.lock();
            if entries.len() < MOST {
                entries.push(Entry { change, at, size });
            }
        }
    }

    /// What was noted since the last time.
    pub fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut self.entries.lock())
    }
}
