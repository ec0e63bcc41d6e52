//! The lock-free part of the heap (`src/heap/slot.rs`) in every interleaving of a reader and a writer.

mod atomic {
    pub use loom::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../src/heap/slot.rs"]
#[allow(dead_code)]
mod slot;

use atomic::AtomicU64;
use loom::sync::Arc;
use slot::RangeSlot;

/// Changes a slot from one range (begin, end, device) to another while somebody looks up the addresses.
fn every_interleaving(before: (u64, u64, u64), after: (u64, u64, u64), addresses: &'static [u64]) {
    loom::model(move || {
        let slot = Arc::new(RangeSlot {
            version: AtomicU64::new(0),
            base: AtomicU64::new(before.0),
            end: AtomicU64::new(before.1),
            device: AtomicU64::new(before.2),
        });
        let changed = slot.clone();
        let writer = loom::thread::spawn(move || {
            changed.set(0, 0, 0);
            changed.set(after.0, after.1, after.2);
        });
        for &address in addresses {
            let found = slot.holds(address);
            let right =
                |range: (u64, u64, u64)| (range.0..range.1).contains(&address) && found == Some(range.2);
            assert!(found.is_none() || right(before) || right(after), "{address} belongs to {found:?}");
        }
        writer.join().expect("the writer");
        for &address in addresses {
            assert_eq!(slot.holds(address), (after.0..after.1).contains(&address).then_some(after.2));
        }
    });
}

#[test]
fn no_reader_sees_a_mixture_of_two_ranges() {
    // Between the new begin and the old end lies what was in neither.
    every_interleaving((100, 200, 1), (10, 20, 2), &[50]);
    every_interleaving((100, 200, 1), (10, 20, 2), &[150]);
}

#[test]
fn nor_where_both_end_at_the_same_address() {
    every_interleaving((100, 200, 1), (150, 200, 2), &[120]);
    every_interleaving((150, 200, 1), (100, 200, 2), &[120]);
    every_interleaving((150, 200, 1), (100, 200, 2), &[160]);
}
