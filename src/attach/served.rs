//! One device that is served: its heap and its ledger under one lock.
//!
//! Must not know where requests come from (torch, C, a preloaded symbol). Invariant: a stack is captured
//! before the lock is taken, and nothing that could wait for Python happens under it.

use super::history::{Context, History, Wish};
use crate::driver::{Address, Driver, Stream};
use crate::heap::{BlockState, Checkpoint, Freed, Heap, HeapError, Restored, Seen, Stats, Tag};
use crate::ledger::{self, Accounts, Clock, LiveBlock, Sample};
use crate::report::model::Segment;
use crate::report::segments::SegmentMap;
use crate::stacks::{self, StackId};
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// What of `Served::recording` means what: events are kept; allocations have stacks; frees and segments, too;
/// with native frames.
const RECORDING: u8 = 1;
const ALLOC_STACKS: u8 = 2;
const FREE_STACKS: u8 = 4;
const NATIVE_STACKS: u8 = 8;

/// How long a report may wait for a device's lock before it gives up: usually, and when the process is about to die.
const PATIENCE: Duration = Duration::from_secs(2);
const LAST_PATIENCE: Duration = Duration::from_millis(250);
static LAST: AtomicBool = AtomicBool::new(false);

/// From now on a report waits for no device for long.
pub(super) fn hurry() {
    LAST.store(true, Ordering::Relaxed);
}

/// How long a report may wait for a device's lock.
pub(super) fn patience() -> Duration {
    if LAST.load(Ordering::Relaxed) { LAST_PATIENCE } else { PATIENCE }
}

/// Steps between looks at whether idle memory should be given back, and the room that is left.
const TRIM_EVERY: u32 = 64;
const TRIM_ROOM: u64 = 64 << 20;

/// The heap and the ledger of one device.
pub struct Books<D: Driver> {
    /// Serves the blocks.
    pub heap: Heap<D>,
    /// Knows about them.
    pub accounts: Accounts,
    /// Past events, while somebody wants them.
    history: Option<Box<History>>,
    recent_peak: u64,
    total: Option<u64>,
}

/// A device and the lock around its books.
pub struct Served<D: Driver> {
    device: i32,
    total: Option<u64>,
    recording: AtomicU8,
    books: Mutex<Books<D>>,
}

impl<D: Driver> Served<D> {
    /// Serves a device (-1 is the host) from `heap`.
    /// `total` is the device's memory in bytes, where running out of it can be foreseen.
    pub fn new(device: i32, heap: Heap<D>, total: Option<u64>) -> Self {
        let books = Books { heap, accounts: Accounts::new(device), history: None, recent_peak: 0, total };
        Served { device, total, recording: AtomicU8::new(0), books: Mutex::new(books) }
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
        self.malloc_within(size, (0, 0), stream, stack, clock)
    }

    /// Hands out a block with `around` so many bytes before and behind it, which are not accounted. Returns where the
    /// first of those begin.
    #[inline(always)]
    pub fn malloc_within(
        &self,
        size: u64,
        (front, rear): (u64, u64),
        stream: Stream,
        stack: StackId,
        clock: &Clock,
    ) -> Result<Address, HeapError> {
        let traced = self.trace_stack(ALLOC_STACKS);
        let mut books = self.books.lock();
        let whole = size.saturating_add(front + rear);
        let tag = books.accounts.expect(stack.0, clock.now());
        let at = match books.heap.malloc_from(stack.0, whole, stream, Tag(tag.0, tag.1)) {
            Ok(at) => at,
            Err(mut error) => {
                if let HeapError::OutOfMemory { free, requested, .. } = &mut error {
                    *requested = size;
                    let (free, size) = (*free, *requested);
                    books.record(stream, traced, |history| history.refused(free, size, stream, traced));
                }
                return Err(error);
            }
        };
        books.record(stream, traced, |history| history.allocated(at + front, size, stream, traced));
        books.accounts.enter(tag, size);
        Ok(at)
    }

    /// Takes a block back.
    #[inline]
    pub fn free(&self, at: Address, clock: &Clock) -> Result<Freed, HeapError> {
        let traced = self.trace_stack(FREE_STACKS);
        let mut books = self.books.lock();
        let freed = books.heap.free(at)?;
        if books.history.is_some() {
            books.record_free(at, &freed, traced);
        }
        books.accounts.died(ledger::Tag(freed.tag.0, freed.tag.1), freed.requested, clock.now());
        Ok(freed)
    }

    /// Enters a block of `size` bytes at `at` as freed, but keeps the heap's block at `base`, which it lies in, from
    /// being handed out.
    pub fn retire(
        &self,
        base: Address,
        at: Address,
        size: u64,
        stream: Stream,
        clock: &Clock,
    ) -> Result<(), HeapError> {
        let traced = self.trace_stack(FREE_STACKS);
        let mut books = self.books.lock();
        // Of no site any more.
        let tag = std::mem::replace(books.heap.tag_mut(base)?, Tag(u64::MAX, u64::MAX));
        books.record(stream, traced, |history| history.freed(at, size, stream, false, traced));
        books.accounts.died(ledger::Tag(tag.0, tag.1), size, clock.now());
        Ok(())
    }

    /// Puts a pool back to what it had handed out, and enters what is gone and what came back.
    pub fn restore(&self, checkpoint: &Checkpoint, clock: &Clock) -> Result<Restored, HeapError> {
        let traced = self.trace_stack(FREE_STACKS);
        let mut books = self.books.lock();
        let restored = books.heap.restore(checkpoint)?;
        for block in restored.gone() {
            books.record(block.stream, traced, |history| {
                history.freed(block.address, block.requested, block.stream, false, traced);
            });
            books.accounts.died(ledger::Tag(block.tag.0, block.tag.1), block.requested, clock.now());
        }
        for block in restored.back() {
            let born = StackId(books.stack_of(block.tag));
            books.record(block.stream, born, |history| {
                history.allocated(block.address, block.requested, block.stream, born);
            });
            books.accounts.revived(ledger::Tag(block.tag.0, block.tag.1), block.requested, clock.now());
        }
        Ok(restored)
    }

    /// Gives all idle memory back to the device.
    pub fn trim(&self) {
        let traced = self.trace_stack(FREE_STACKS);
        let mut books = self.books.lock();
        books.heap.trim();
        books.record(Stream(0), traced, |_| ());
    }

    /// Starts, changes or stops the keeping of past events.
    pub fn record_history(&self, wish: &Wish) {
        let mut bits = 0;
        if wish.enabled {
            let bit = |wanted: bool, bit: u8| if wanted { bit } else { 0 };
            bits = RECORDING
                | bit(wish.context >= Context::Alloc, ALLOC_STACKS)
                | bit(wish.context == Context::All, FREE_STACKS)
                | bit(wish.native, NATIVE_STACKS);
        }
        let mut books = self.books.lock();
        if let Some(journal) = books.heap.driver().journal() {
            journal.keep(wish.enabled);
        }
        match (&mut books.history, wish.enabled) {
            // As torch's own: what was recorded is gone.
            (history, false) => *history = None,
            (history, true) => history.get_or_insert_default().keep(wish.entries, wish.clear),
        }
        self.recording.store(bits, Ordering::Relaxed);
    }

    /// The stack for the history, if it is wanted. Before the lock: it may run Python's garbage collector.
    #[inline]
    fn trace_stack(&self, what: u8) -> StackId {
        match self.recording.load(Ordering::Relaxed) {
            0 => StackId::NONE,
            bits if bits & what == 0 => StackId::NONE,
            bits if bits & NATIVE_STACKS != 0 => stacks::capture_with_native(),
            _ => stacks::capture(),
        }
    }

    /// The books, however long that takes: for what torch asks.
    pub fn lock(&self) -> MutexGuard<'_, Books<D>> {
        self.books.lock()
    }

    /// The books, for as long as the guard lives; `None` if the lock was not to be had in time.
    pub fn books(&self) -> Option<MutexGuard<'_, Books<D>>> {
        self.books.try_lock_for(patience())
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
            retries: stats.num_alloc_retries,
            ..Sample::default()
        }
    }

    /// Adds to the history, first what the driver mapped and unmapped for it.
    #[inline]
    fn record(&mut self, stream: Stream, stack: StackId, add: impl FnOnce(&mut History)) {
        if let Some(history) = &mut self.history {
            if let Some(journal) = self.heap.driver().journal() {
                history.mapped(&journal.take(), stream, stack);
            }
            add(history);
        }
    }

    #[cold]
    fn record_free(&mut self, at: Address, freed: &Freed, stack: StackId) {
        let waits = self.heap.block_at(at).is_some_and(|block| block.state == BlockState::PendingFree);
        self.record(freed.stream, stack, |history| {
            history.freed(at, freed.requested, freed.stream, waits, stack);
        });
    }

    /// The events so far, for a snapshot.
    pub fn history(&mut self) -> Vec<super::history::Event> {
        let Some(history) = &mut self.history else { return Vec::new() };
        let heap = &self.heap;
        history.settle(|at| heap.block_at(at).is_none_or(|block| block.state != BlockState::PendingFree));
        history.events().copied().collect()
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
                map.block(block.size, Some((tag.site(), tag.step())));
            }
        });
        map.finish(|site| self.accounts.site(site).map_or(0, |site| site.stack))
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
    use crate::heap::{Config, PoolId};

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
    fn a_pool_that_is_put_back_has_no_survivors() {
        let (served, clock, id) = (served(), Clock::new(), PoolId(0, 1));
        served.lock().heap.begin_pool(id, Box::new(|_| true)).expect("a pool");
        let malloc = |size, stack| served.malloc(size, Stream(0), StackId(stack), &clock).expect("memory");
        let (stays, comes_back) = (malloc(1000, 1), malloc(MIB, 2));
        let checkpoint = served.lock().heap.checkpoint(id).expect("a pool");
        for _ in 0..20 {
            let ended = clock.end_step(1);
            served.lock().accounts.boundary(ended, 0, &Sample::default());
        }
        served.free(comes_back, &clock).expect("a live block");
        malloc(3 * MIB, 3);
        for _ in 0..10 {
            let restored = served.restore(&checkpoint, &clock).expect("a pool that is held");
            assert_eq!(restored.allocated.len(), 2);
            let books = served.lock();
            books.accounts.check();
            books.heap.check().expect("a sound heap");
            assert_eq!((books.accounts.live_blocks(), books.accounts.live_bytes()), (2, 1000 + MIB));
            let site =
                |stack| &books.accounts.sites()[books.accounts.site_of(stack).expect("a site") as usize];
            assert_eq!([1, 2, 3].map(|stack| site(stack).born_blocks), [1, 2, 1], "each move counts once");
            for stack in [1, 2] {
                let born: Vec<(u32, u32)> = site(stack).cohorts.iter().map(|c| (c.first, c.last)).collect();
                assert_eq!(born, [(0, 0)], "they are of the step that they were born in");
            }
        }
        served.free(stays, &clock).expect("a live block");
        served.free(comes_back, &clock).expect("a live block");
        assert_eq!(served.lock().accounts.live_blocks(), 0);
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
