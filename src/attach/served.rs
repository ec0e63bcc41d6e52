//! One device that is served: its heap and its ledger under one lock.
//!
//! Must not know where requests come from (torch, C, a preloaded symbol). Invariant: a stack is captured
//! before the lock is taken, and nothing that could wait for Python happens under it.

use crate::driver::{Address, Driver, Stream};
use crate::heap::{BlockState, Freed, Heap, HeapError, Seen, Stats, Tag};
use crate::ledger::{self, Accounts, Clock, LiveBlock, Sample};
use crate::report::model::Segment;
use crate::report::segments::SegmentMap;
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
        let at = books.heap.malloc(size, stream, Tag(0, 0))?;
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

    /// How the heap's memory lies, bounded however many blocks there are, and what was left out of it.
    pub fn segment_map(&self) -> (Vec<Segment>, (u64, u64)) {
        let mut map = SegmentMap::default();
        self.heap.walk(|seen| match seen {
            Seen::Segment(segment) => map.segment(segment.address, segment.stream.0, segment.large),
            Seen::Block(block) if block.state == BlockState::Inactive => map.block(block.size, None),
            Seen::Block(block) => {
                let tag = ledger::Tag(block.tag.0, block.tag.1);
                map.block(block.size, Some((self.stack_of(block.tag), tag.step())));
            }
        });
        map.finish()
    }

    /// Now and then, gives memory back that the last steps did not need: a cache over host memory must not
    /// keep from the rest of the job what torch once needed.
    pub fn trim_idle(&mut self, ended: u32, allocated: u64, reserved: u64) {
        self.recent_peak =
            self.recent_peak.max(self.heap.stats().allocated_bytes.all.peak.min(reserved)).max(allocated);
        if ended % TRIM_EVERY != TRIM_EVERY - 1 {
            return;
        }
        let needed = std::mem::take(&mut self.recent_peak);
        if reserved > needed + needed / 4 + TRIM_ROOM {
            self.heap.trim();
        }
    }
}
