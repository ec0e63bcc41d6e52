//! Larger requests: the first part of the free range that fits best, and how ranges are joined again.
//!
//! It knows no pages. Invariant: no two neighbours are free.

use super::arena::{kind_for, kind_of, lane_of, part_for, part_of};
use super::block::{Block, Id, NONE, State};
use super::fit::GRAIN;
use super::retrace::Request;
use super::size_class::{EAGER_MAX, LOOSE};
use super::stats::SMALL;
use super::{Address, Driver, Freed, Handed, Heap, HeapError, SLAB_MAX, Stream, Tag};

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
        let request = Request { lane, kind: kind_for(size, self.huge_from), size, requested, tag };
        // Asked before the kind, which is a coin's toss.
        if self.lanes[lane].trail.is_some() {
            return self.malloc_on_trail(&request, site);
        }
        self.malloc_fitted(&request)
    }

    #[cold]
    fn malloc_on_trail(&mut self, request: &Request, site: u32) -> Result<Address, HeapError> {
        if request.kind == SMALL { self.malloc_fitted(request) } else { self.malloc_retraced(request, site) }
    }

    #[inline(always)]
    fn malloc_fitted(&mut self, request: &Request) -> Result<Address, HeapError> {
        let &Request { lane, kind, size, requested, tag } = request;
        let bins = &mut self.lanes[lane].arenas[kind].bins;
        let Some(id) = bins.best(&self.blocks, size) else {
            return self.malloc_block_slow(lane, size, requested, tag).map(|id| self.blocks[id].addr);
        };
        Ok(self.take_range(id, request))
    }

    /// Hands out the first part of a free range of the request's own arena.
    #[inline(always)]
    fn take_range(&mut self, id: Id, request: &Request) -> Address {
        let &Request { lane, kind, size, requested, tag } = request;
        if self.plain {
            return self.hand_out(id, size, requested, tag);
        }
        let bins = &mut self.lanes[lane].arenas[kind].bins;
        let (_, (at, region)) = bins.take(&mut self.blocks, id, size, |block| block.fill(requested, tag));
        self.space.set_block(region, at, id);
        self.stats.handed_out(part_for(kind), size, requested);
        at
    }

    /// A request that a slab could serve if there were one with a free slot; one is made if there is company for it.
    #[inline(never)]
    pub(super) fn malloc_loose(
        &mut self,
        lane: usize,
        class: usize,
        requested: u64,
        tag: Tag,
    ) -> Result<Address, HeapError> {
        if requested <= EAGER_MAX || self.lanes[lane].loose[class] >= LOOSE {
            return self.malloc_slot_slow(lane, class, requested, tag);
        }
        let size = requested.next_multiple_of(GRAIN);
        let Some(id) = self.lanes[lane].arenas[SMALL].bins.best(&self.blocks, size) else {
            return self.malloc_loose_slow(lane, size, requested, tag);
        };
        self.lanes[lane].loose[class] += 1;
        Ok(self.take_range(id, &Request { lane, kind: SMALL, size, requested, tag }))
    }

    /// A block is freed that lay outside of slabs although a slab could serve it.
    #[inline]
    pub(super) fn free_loose(&mut self, arena: u16, size: u64) {
        let loose = &mut self.lanes[lane_of(arena)].loose[self.classes.index(size)];
        debug_assert!(*loose > 0);
        *loose = loose.saturating_sub(1);
    }

    /// Takes a block back that no other stream uses, and that is in its region's table no more.
    #[inline(always)]
    pub(super) fn free_block(&mut self, id: Id, block: Block) -> Freed {
        let Block { size, word: requested, tag, arena, a: logged, .. } = block;
        self.clock += 1;
        self.stats.freed(part_of(arena), size, requested);
        if size <= SLAB_MAX {
            self.free_loose(arena, size);
        }
        let stream = self.give_block(id, arena, logged);
        Freed { requested, size, stream, tag }
    }

    /// Takes a block back that other streams use.
    #[cold]
    pub(super) fn free_used(&mut self, id: Id) -> Freed {
        let &Block { size, word: requested, tag, arena, .. } = &self.blocks[id];
        let stream = self.wait_for(Handed::Block(id), part_of(arena), size);
        Freed { requested, size, stream, tag }
    }

    /// Hands out the first `size` bytes of a free range.
    pub(super) fn hand_out(&mut self, id: Id, size: u64, requested: u64, tag: Tag) -> Address {
        let arena = self.blocks[id].arena;
        if self.plain {
            self.count_split(arena, id, false);
        }
        let bins = &mut self.lanes[lane_of(arena)].arenas[kind_of(arena)].bins;
        let (rest, (at, region)) = bins.take(&mut self.blocks, id, size, |block| block.fill(requested, tag));
        if self.plain && rest != NONE {
            self.count_split(arena, rest, true);
        }
        self.space.set_block(region, at, id);
        self.stats.handed_out(part_of(arena), size, requested);
        at
    }

    /// Makes the range of a block free that is in its region's table no more, now; returns the lane's stream.
    #[inline(always)]
    pub(super) fn give_block(&mut self, id: Id, arena: u16, logged: u32) -> Stream {
        let clock = self.clock;
        if self.plain {
            self.uncount_neighbours(id);
        }
        let lane = &mut self.lanes[lane_of(arena)];
        if logged != NONE
            && let Some(trail) = &mut lane.trail
        {
            trail.freed(logged);
        }
        lane.last_free = clock;
        let stream = lane.stream;
        let whole = lane.arenas[kind_of(arena)].bins.give(&mut self.blocks, id, clock);
        if self.plain {
            self.count_split(arena, whole, true);
        }
        stream
    }

    /// Makes a range free that is in no list, and joins it with free neighbours.
    pub(super) fn release_range(&mut self, id: Id, clock: u64) {
        let &Block { arena, prev, next, .. } = &self.blocks[id];
        let clocks = [prev, next].map(|id| &self.blocks[id]).into_iter();
        let clock =
            clocks.filter(|block| block.state == State::Free).fold(clock, |all, block| all.max(block.word));
        if self.plain {
            self.uncount_neighbours(id);
        }
        let whole = self.lanes[lane_of(arena)].arenas[kind_of(arena)].bins.give(&mut self.blocks, id, clock);
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
