//! Larger requests: the first part of the free range that fits best, and how ranges are joined again.
//!
//! It knows no pages. Invariant: no two neighbours are free.

use super::arena::{arena_number, kind_for, kind_of, lane_of, part_for, part_of};
use super::block::{Id, NONE, State};
use super::fit::GRAIN;
use super::retrace::Request;
use super::stats::SMALL;
use super::{Address, Driver, Freed, Handed, Heap, HeapError, Stream, Tag};

impl<D: Driver> Heap<D> {
    #[inline(always)]
    pub(super) fn malloc_block(
        &mut self,
        lane: usize,
        site: u32,
        requested: u64,
        tag: Tag,
    ) -> Result<Address, HeapError> {
        if requested > self.largest {
            return Err(self.out_of_memory(requested));
        }
        let size = requested.next_multiple_of(GRAIN);
        let kind = kind_for(size, self.huge_from);
        if kind != SMALL && self.lanes[lane].trail.is_some() {
            return self.malloc_retraced(&Request { lane, kind, size, requested, tag }, site);
        }
        match self.lanes[lane].arenas[kind].bins.best(&self.blocks, size) {
            Some(id) => Ok(self.hand_out_of(lane, kind, id, size, requested, tag)),
            None => self.malloc_block_slow(lane, size, requested, tag).map(|id| self.blocks[id].addr),
        }
    }

    /// Takes a block back; none if no block that is handed out starts at `at`.
    #[inline(always)]
    pub(super) fn free_block(&mut self, id: Id, at: Address) -> Option<Freed> {
        let block = &self.blocks[id];
        if block.addr != at || block.state != State::Live {
            return None;
        }
        let (size, requested, tag, part) = (block.size, block.word, block.tag, part_of(block.arena));
        if block.b != NONE {
            let stream = self.wait_for(Handed::Block(id), part, size);
            return Some(Freed { requested, size, stream, tag });
        }
        self.clock += 1;
        self.stats.freed(part, size, requested);
        let stream = self.give_block(id);
        Some(Freed { requested, size, stream, tag })
    }

    /// Hands out the first `size` bytes of a free range.
    pub(super) fn hand_out(&mut self, id: Id, size: u64, requested: u64, tag: Tag) -> Address {
        let arena = self.blocks[id].arena;
        self.hand_out_of(lane_of(arena), kind_of(arena), id, size, requested, tag)
    }

    /// The same for a range of an arena that is known.
    #[inline(always)]
    fn hand_out_of(
        &mut self,
        lane: usize,
        kind: usize,
        id: Id,
        size: u64,
        requested: u64,
        tag: Tag,
    ) -> Address {
        if self.plain {
            self.count_split(arena_number(lane, kind), id, false);
        }
        let rest = self.lanes[lane].arenas[kind].bins.take(&mut self.blocks, id, size);
        if self.plain && rest != NONE {
            self.count_split(arena_number(lane, kind), rest, true);
        }
        let block = &mut self.blocks[id];
        block.state = State::Live;
        block.word = requested;
        block.tag = tag;
        (block.a, block.b) = (NONE, NONE);
        let (at, region) = (block.addr, block.region);
        self.space.set_block(region, at, id);
        self.stats.handed_out(part_for(kind), size, requested);
        at
    }

    /// Makes a block's range free; returns the lane's stream.
    #[inline(always)]
    pub(super) fn give_block(&mut self, id: Id) -> Stream {
        let block = &self.blocks[id];
        let (arena, logged) = (block.arena, block.a);
        self.space.clear(block.region, block.addr);
        let lane = &mut self.lanes[lane_of(arena)];
        if logged != NONE
            && let Some(trail) = &mut lane.trail
        {
            trail.freed(logged);
        }
        lane.last_free = self.clock;
        let stream = lane.stream;
        self.release_range(id, self.clock);
        stream
    }

    /// Makes a range free that is in no list, and joins it with free neighbours.
    #[inline(always)]
    pub(super) fn release_range(&mut self, id: Id, clock: u64) {
        let block = &mut self.blocks[id];
        block.state = State::Free;
        block.word = clock;
        let arena = block.arena;
        if self.plain {
            self.uncount_neighbours(id);
        }
        let whole = self.lanes[lane_of(arena)].arenas[kind_of(arena)].bins.give(&mut self.blocks, id);
        if self.plain {
            self.count_split(arena, whole, true);
        }
    }

    /// What is free around a range of a plain segment is about to be joined with it.
    #[cold]
    fn uncount_neighbours(&mut self, id: Id) {
        let block = &self.blocks[id];
        let (arena, neighbours) = (block.arena, [block.prev, block.next]);
        for id in neighbours {
            if self.blocks[id].state == State::Free {
                self.count_split(arena, id, false);
            }
        }
    }

    /// Puts a free range into its arena's bins.
    pub(super) fn bin(&mut self, arena: u16, id: Id) {
        if self.plain {
            self.count_split(arena, id, true);
        }
        self.lanes[lane_of(arena)].arenas[kind_of(arena)].bins.insert(&mut self.blocks, id);
    }

    pub(super) fn unbin(&mut self, arena: u16, id: Id) {
        if self.plain {
            self.count_split(arena, id, false);
        }
        self.lanes[lane_of(arena)].arenas[kind_of(arena)].bins.remove(&mut self.blocks, id);
    }

    /// A free part of a plain segment is what PyTorch calls an inactive split.
    #[cold]
    fn count_split(&mut self, arena: u16, id: Id, add: bool) {
        let block = &self.blocks[id];
        if block.prev == NONE && block.next == NONE {
            return;
        }
        let (part, size) = (part_of(arena), block.size);
        if add {
            self.stats.inactive_split.add(part, 1);
            self.stats.inactive_split_bytes.add(part, size);
        } else {
            self.stats.inactive_split.sub(part, 1);
            self.stats.inactive_split_bytes.sub(part, size);
        }
    }
}
