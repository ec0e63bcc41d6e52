//! One device that is served: its heap and its ledger under one lock.
//!
//! Must not know where requests come from (torch, C, a preloaded symbol). Invariant: a stack is captured
//! before the lock is taken, and nothing that could wait for Python happens under it.

use crate::driver::{Address, Driver, Stream};
use crate::heap::{Freed, Heap, HeapError, Stats, Tag};
use crate::ledger::{self, Accounts, Clock, LiveBlock, Sample};
use crate::stacks::StackId;
use parking_lot::{Mutex, MutexGuard};
use std::time::Duration;

/// How long a report may wait for a device's lock before it gives up.
const PATIENCE: Duration = Duration::from_secs(2);

/// Steps between looks at whether idle memory should be given back, and the room that is left.
const TRIM_EVERY: u32 = 64;
const TRIM_ROOM: u64 = 64 << 20;

/// The heap and the ledger of one device.
pub struct Books<D: Driver> {
    /// Serves the blocks.
    pub heap: Heap<D>,
    /// Knows about them.
    pub accounts: Accounts,
    recent_peak: u64,
    total: Option<u64>,
}

/// A device and the lock around its books.
pub struct Served<D: Driver> {
    device: i32,
    total: Option<u64>,
    books: Mutex<Books<D>>,
}

impl<D: Driver> Served<D> {
    /// Serves a device (-1 is the host) from `heap`.
    /// `total` is the device's memory in bytes, where running out of it can be foreseen.
    pub fn new(device: i32, heap: Heap<D>, total: Option<u64>) -> Self {
        let books = Books { heap, accounts: Accounts::new(device), recent_peak: 0, total };
        Served { device, total, books: Mutex::new(books) }
    }

    /// The device's memory in bytes.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// The device's number; -1 is the host.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Hands out a block and enters it under its stack and generation.
    #[inline]
    pub fn malloc(
        &self,
        size: u64,
        stream: Stream,
        stack: StackId,
        clock: &Clock,
    ) -> Result<Address, HeapError> {
        let mut books = self.books.lock();
        let at = books.heap.malloc_from(stack.0, size, stream, Tag(0, 0))?;
        let tag = books.accounts.born(stack.0, size, clock.now());
        // The block was handed out a line above and nobody else knows it yet, so it is there.
        let _ = books.heap.set_tag(at, Tag(tag.0, tag.1));
        Ok(at)
    }

    /// Takes a block back.
    #[inline]
    pub fn free(&self, at: Address, clock: &Clock) -> Result<Freed, HeapError> {
        let mut books = self.books.lock();
        let freed = books.heap.free(at)?;
        books.accounts.died(ledger::Tag(freed.tag.0, freed.tag.1), freed.requested, clock.now());
        Ok(freed)
    }

    /// The books, however long that takes: for what torch asks.
    pub fn lock(&self) -> MutexGuard<'_, Books<D>> {
        self.books.lock()
    }

    /// The books, for as long as the guard lives; `None` if the lock was not to be had in time.
    pub fn books(&self) -> Option<MutexGuard<'_, Books<D>>> {
        self.books.try_lock_for(PATIENCE)
    }

    /// The device's statistics.
    pub fn stats(&self) -> Option<Stats> {
        self.books().map(|books| books.heap.stats())
    }
}

impl<D: Driver> Books<D> {
    /// What the ledger is told about the device at a step boundary.
    pub fn sample(&self) -> Sample {
        let stats = self.heap.stats();
        Sample {
            allocated: stats.allocated_bytes.all.current,
            reserved: stats.reserved_bytes.all.current,
            active: stats.active_bytes.all.current,
            total: self.total,
            ..Sample::default()
        }
    }

    /// The stack of a block, by its tag.
    pub fn stack_of(&self, tag: Tag) -> u32 {
        self.accounts.site(ledger::Tag(tag.0, tag.1).site()).map_or(0, |site| site.stack)
    }

    /// The live blocks of a site.
    pub fn blocks_of(&self, site: u32) -> Vec<LiveBlock> {
        let mut found = Vec::new();
        self.heap.for_each_live(|block| {
            let tag = ledger::Tag(block.tag.0, block.tag.1);
            if tag.site() == site {
                found.push(LiveBlock { address: block.address, size: block.requested, tag });
            }
        });
        found
    }

    /// Now and then, gives memory back that the last steps did not need: a cache over host memory must not
    /// keep from the rest of the job what torch once needed.
    pub fn trim_idle(&mut self, ended: u32, allocated: u64, reserved: u64) {
        self.recent_peak = self.recent_peak.max(self.heap.take_recent_peak()).max(allocated);
        if ended % TRIM_EVERY != TRIM_EVERY - 1 {
            return;
        }
        let needed = std::mem::take(&mut self.recent_peak);
        if reserved > needed + needed / 4 + TRIM_ROOM {
            self.heap.trim();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::host::BooksDriver;
    use crate::heap::Config;

    const MIB: u64 = 1 << 20;

    fn served() -> Served<BooksDriver> {
        let heap = Heap::new(BooksDriver::with_memory(8 << 30), Config::host()).expect("a heap");
        Served::new(-1, heap, None)
    }

    /// Steps that each need `peak` bytes for a while, and look for idle memory at their end.
    fn steps(served: &Served<BooksDriver>, steps: std::ops::Range<u32>, peak: u64) {
        let clock = Clock::new();
        for ended in steps {
            let at = served.malloc(peak, Stream(0), StackId(1), &clock).expect("memory");
            served.free(at, &clock).expect("a live block");
            let mut books = served.lock();
            let (allocated, reserved) = (books.heap.allocated(), books.heap.reserved());
            books.trim_idle(ended, allocated, reserved);
        }
    }

    #[test]
    fn what_the_last_steps_did_not_need_is_given_back() {
        let served = served();
        steps(&served, 0..TRIM_EVERY, 1000 * MIB);
        assert!(served.lock().heap.reserved() >= 1000 * MIB, "needed all the time");
        steps(&served, TRIM_EVERY..2 * TRIM_EVERY, 10 * MIB);
        let reserved = served.lock().heap.reserved();
        assert!(reserved <= 100 * MIB, "{reserved} bytes are kept for 10 MiB");
    }

    #[test]
    fn what_every_step_needs_for_a_while_stays() {
        let served = served();
        steps(&served, 0..4 * TRIM_EVERY, 1000 * MIB);
        let calls = served.lock().heap.stats().work.memory_calls();
        steps(&served, 4 * TRIM_EVERY..8 * TRIM_EVERY, 1000 * MIB);
        assert_eq!(served.lock().heap.stats().work.memory_calls(), calls, "nothing went or came");
    }

    #[test]
    fn a_users_reset_of_the_peaks_does_not_hide_what_is_needed() {
        let served = served();
        let clock = Clock::new();
        for ended in 0..2 * TRIM_EVERY {
            let at = served.malloc(1000 * MIB, Stream(0), StackId(1), &clock).expect("memory");
            served.free(at, &clock).expect("a live block");
            let mut books = served.lock();
            books.heap.reset_peak();
            let (allocated, reserved) = (books.heap.allocated(), books.heap.reserved());
            books.trim_idle(ended, allocated, reserved);
        }
        assert!(served.lock().heap.reserved() >= 1000 * MIB);
    }
}
