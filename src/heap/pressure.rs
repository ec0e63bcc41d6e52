//! Pressure: what is tried, in order, before a request is refused.
//!
//! ```text
//! finished events ─▶ idle pages (moved), new pages ─▶ other streams' caches ─▶ released pools,
//! a wait for the device ─▶ everything idle given back ─▶ out of memory
//! ```
//!
//! It knows the order, not the mechanisms. Invariant: a refusal leaves the heap as usable as before.

use super::arena::{arena_number, kind_for, lane_of};
use super::block::{Block, Id, NONE};
use super::fit::GRAIN;
use super::grow::Shortage;
use super::stats::SMALL;
use super::{Address, Driver, FITTED_MIN, Heap, HeapError, RUNS, Stream, Tag, run_for};

impl<D: Driver> Heap<D> {
    /// A small request for which there is no slab with a free slot.
    #[cold]
    pub(super) fn malloc_slot_slow(
        &mut self,
        lane: usize,
        class: usize,
        requested: u64,
        tag: Tag,
    ) -> Result<Address, HeapError> {
        if let Some(slab) = self.make_slab(lane, class) {
            return Ok(self.take_slot(lane, slab, requested, tag));
        }
        self.process_events();
        self.retire_empty_slabs(lane);
        let ready = self.lanes[lane].arenas[SMALL].slabs[class];
        if ready != NONE {
            return Ok(self.take_slot(lane, ready, requested, tag));
        }
        if let Some(slab) = self.make_slab(lane, class) {
            return Ok(self.take_slot(lane, slab, requested, tag));
        }
        let alone = requested.next_multiple_of(GRAIN).max(FITTED_MIN);
        match self.grow(arena_number(lane, RUNS), run_for(self.classes.size(class))) {
            Ok(()) => {}
            // One slot is less than a slab: it may still be found.
            Err(Shortage::Memory) => return self.malloc_loose_slow(lane, alone, requested, tag),
            Err(Shortage::Driver(error)) => return Err(error.into()),
        }
        match self.make_slab(lane, class) {
            Some(slab) => Ok(self.take_slot(lane, slab, requested, tag)),
            None => self.malloc_loose_slow(lane, alone, requested, tag),
        }
    }

    /// A request of at most [`SLAB_MAX`](super::SLAB_MAX) bytes that no slab is made for.
    #[cold]
    pub(super) fn malloc_loose_slow(
        &mut self,
        lane: usize,
        size: u64,
        requested: u64,
        tag: Tag,
    ) -> Result<Address, HeapError> {
        let id = self.malloc_block_slow(lane, size, requested, tag)?;
        // It may have been lent by another lane.
        let Block { addr, arena, .. } = self.blocks[id];
        self.lanes[lane_of(arena)].loose[self.classes.index(size)] += 1;
        Ok(addr)
    }

    /// A request that fits into no free range of its arena.
    #[cold]
    pub(super) fn malloc_block_slow(
        &mut self,
        lane: usize,
        size: u64,
        requested: u64,
        tag: Tag,
    ) -> Result<Id, HeapError> {
        let kind = kind_for(size, self.huge_from);
        if size > self.total || self.config.limit.is_some_and(|limit| size > limit) {
            return Err(self.out_of_memory(requested));
        }
        self.process_events();
        if kind == SMALL {
            self.retire_empty_slabs(lane);
        }
        let found = match self.fitting(lane, kind, size) {
            Some(id) => Some(id),
            None => self.grown(lane, kind, size)?,
        };
        if let Some(id) = found {
            self.hand_out(id, size, requested, tag);
            return Ok(id);
        }
        self.stats.num_alloc_retries += 1;
        if let Some(id) = self.lend(lane, kind, size) {
            return Ok(self.hand_out_lent(id, lane, size, requested, tag));
        }
        if let Some(id) = self.after_waiting(lane, kind, size)? {
            self.hand_out(id, size, requested, tag);
            return Ok(id);
        }
        if let Some(id) = self.lend(lane, kind, size) {
            return Ok(self.hand_out_lent(id, lane, size, requested, tag));
        }
        Err(self.out_of_memory(requested))
    }

    pub(super) fn fitting(&self, lane: usize, kind: usize, size: u64) -> Option<Id> {
        self.lanes[lane].arenas[kind].bins.best(&self.blocks, size)
    }

    /// Grows the arena; none if there is no memory.
    fn grown(&mut self, lane: usize, kind: usize, size: u64) -> Result<Option<Id>, HeapError> {
        match self.grow(arena_number(lane, kind), size) {
            Ok(()) => Ok(self.fitting(lane, kind, size)),
            Err(Shortage::Memory) => Ok(None),
            Err(Shortage::Driver(error)) => Err(error.into()),
        }
    }

    /// Waits for everything, so that all idle memory may be moved or given back, and tries again.
    fn after_waiting(&mut self, lane: usize, kind: usize, size: u64) -> Result<Option<Id>, HeapError> {
        self.wait_events();
        self.wait_device();
        self.retire_all_empty_slabs();
        if let Some(id) = self.fitting(lane, kind, size) {
            return Ok(Some(id));
        }
        if let Some(id) = self.grown(lane, kind, size)? {
            return Ok(Some(id));
        }
        // Pieces that are too large for the gap, or plain segments of other sizes: start afresh.
        self.give_back();
        self.sweep_pools();
        self.grown(lane, kind, size)
    }

    pub(super) fn retire_all_empty_slabs(&mut self) {
        for lane in 0..self.lanes.len() {
            self.retire_empty_slabs(lane);
        }
    }

    /// A free range of another stream, which the lane's stream has been made to wait for.
    fn lend(&mut self, lane: usize, kind: usize, size: u64) -> Option<Id> {
        if self.capturing() || self.lanes[lane].pool != 0 {
            return None;
        }
        for other in 0..self.lanes.len() {
            if other == lane || !self.lanes[other].in_use || self.lanes[other].pool != 0 {
                continue;
            }
            if let Some(id) = self.fitting(other, kind, size)
                && self.follow(self.lanes[lane].stream, id)
            {
                return Some(id);
            }
        }
        None
    }

    /// Makes `stream` wait for the work that may still use a free range; false if it cannot.
    fn follow(&mut self, stream: Stream, id: Id) -> bool {
        if self.blocks[id].word <= self.marks.quiet {
            return true;
        }
        let Ok(event) = self.device_event() else { return false };
        self.stats.work.stream_waits += 1;
        let waits = self.driver.stream_wait_event(stream, event).is_ok();
        let _leaked_on_error = self.driver.release_event(event);
        waits
    }

    fn hand_out_lent(&mut self, id: Id, lane: usize, size: u64, requested: u64, tag: Tag) -> Id {
        self.hand_out(id, size, requested, tag);
        let uses = self.pending.new_uses();
        self.pending.uses_mut(uses).lent_to = Some(self.lanes[lane].stream);
        self.blocks[id].b = uses;
        self.stats.work.lent += 1;
        id
    }

    #[cold]
    pub(super) fn out_of_memory(&mut self, requested: u64) -> HeapError {
        self.stats.num_ooms += 1;
        let info = self.driver.memory_info().unwrap_or_default();
        HeapError::OutOfMemory {
            requested,
            allocated: self.stats.allocated_bytes(),
            reserved: self.stats.reserved_bytes.now(),
            in_pools: self.reserved_in_pools(),
            free: info.free,
            left: self.left_to_others(),
            total: info.total,
            limit: self.config.limit,
        }
    }

    fn reserved_in_pools(&self) -> u64 {
        let private = self.lanes.iter().filter(|lane| lane.in_use && lane.pool != 0);
        let arenas = private.flat_map(|lane| &lane.arenas);
        arenas.map(|arena| self.space.mapped_in(&arena.segments)).sum()
    }

    /// Gives all idle memory back to the device (`empty_cache`), after waiting for the streams that may
    /// still use it. Returns the bytes given back. During a capture nothing is given back.
    pub fn trim(&mut self) -> u64 {
        if self.capturing() {
            return 0;
        }
        self.wait_events();
        self.retire_all_empty_slabs();
        let mut loud = false;
        for lane in 0..self.lanes.len() {
            if self.may_take_from(lane) {
                loud |= self.lanes[lane].loud;
            }
        }
        self.hush();
        if loud {
            self.wait_device();
        }
        let bytes = self.give_back();
        self.sweep_pools();
        bytes
    }
}
