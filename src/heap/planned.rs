//! Requests with a planned place: the heap's side of [`plan`](super::plan).
//!
//! A lane follows plans only after pages had to be moved, and only outside private pools. Its planned
//! places lie in a segment of their own, as large as the device, so that nothing else is ever in the way.
//! It knows memory and where a request should lie, not why. Invariant: a place is used only if it is free.

use super::arena::{HUGE_FROM, arena_number};
use super::block::{Id, NONE, State};
use super::grow::Window;
use super::plan::Planner;
use super::segment::{Found, PAGE};
use super::{Address, Driver, Heap, HeapError, PLANNED, Tag, kind_for};

impl<D: Driver> Heap<D> {
    /// A large request on a lane that has a planner.
    pub(super) fn malloc_planned(
        &mut self,
        lane: usize,
        size: u64,
        requested: u64,
        tag: Tag,
    ) -> Result<Address, HeapError> {
        let Some(planner) = &mut self.lanes[lane].planner else {
            return self.malloc_block_slow(lane, size, requested, tag).map(|id| self.blocks[id].addr);
        };
        let number = planner.request(size);
        let offset = planner.place(size);
        let followed = planner.is_followed();
        let place = offset.and_then(|offset| self.take_place(lane, offset, size));
        if offset.is_some()
            && place.is_none()
            && let Some(planner) = &mut self.lanes[lane].planner
        {
            planner.blocked += 1;
        }
        let id = match place {
            Some(id) => Some(id),
            // Memory of a plan that is not followed is anybody's.
            None => self
                .fitting(lane, kind_for(size, self.huge_from), size)
                .or_else(|| if followed { None } else { self.fitting(lane, PLANNED, size) }),
        };
        let id = match id {
            Some(id) => {
                self.hand_out(id, size, requested, tag);
                id
            }
            None => self.malloc_block_slow(lane, size, requested, tag)?,
        };
        self.blocks[id].a = number;
        if self.lanes[lane].planner.as_ref().is_some_and(|planner| planner.is_due() || planner.is_blocked()) {
            self.improve_plan(lane);
        }
        Ok(self.blocks[id].addr)
    }

    /// Notes that pages had to be moved for a lane.
    pub(super) fn note_moves(&mut self, lane: usize, moved: u64) {
        // Many jobs need a few moves while they warm up and none after: best fit serves them well. The
        // others are known by how much they move.
        if self.stats.work.stitched_bytes < self.space.physical {
            return;
        }
        self.huge_from = HUGE_FROM;
        let lane = &mut self.lanes[lane];
        if lane.pool == 0 {
            lane.planner.get_or_insert_with(|| Box::new(Planner::new())).moved += moved;
        }
    }

    #[cold]
    fn improve_plan(&mut self, lane: usize) {
        let room = self.total / PAGE * PAGE;
        let taken = self.taken_places(lane);
        let Some(planner) = &mut self.lanes[lane].planner else { return };
        if planner.is_blocked() {
            planner.mend(&taken);
        }
        let made = planner.is_due() && planner.make(room, &taken);
        if made && self.lanes[lane].arenas[PLANNED].segments.is_empty() {
            // Without addresses the plan is never followed.
            let _no_addresses = self.new_segment(arena_number(lane, PLANNED), room);
        }
    }

    /// The blocks that lie among the planned places: offset, size and number of each.
    fn taken_places(&self, lane: usize) -> Vec<(u64, u64, u32)> {
        let mut taken = Vec::new();
        if let Some(&segment) = self.lanes[lane].arenas[PLANNED].segments.first() {
            let segment = &self.space.segments[segment as usize];
            let mut id = segment.first;
            while id != NONE {
                let block = &self.blocks[id];
                if matches!(block.state, State::Live | State::Pending) {
                    taken.push((block.addr - segment.base, block.size, block.a));
                }
                id = block.next;
            }
        }
        taken
    }

    /// The free range at a planned place, with memory everywhere and nothing before it; none if the place
    /// is taken or memory is short.
    fn take_place(&mut self, lane: usize, offset: u64, size: u64) -> Option<Id> {
        let segment = *self.lanes[lane].arenas[PLANNED].segments.first()?;
        let from = self.space.segments[segment as usize].base + offset;
        let to = from + size;
        let id = self.holder(segment, from)?;
        let (mut at, mut unmapped) = (id, NONE);
        loop {
            match self.blocks[at].state {
                State::Free => {}
                State::Unmapped if unmapped == NONE => unmapped = at,
                State::Unmapped => {}
                _ => return None,
            }
            if self.blocks[at].end() >= to {
                break;
            }
            at = self.blocks[at].next;
            if at == NONE {
                return None;
            }
        }
        if unmapped != NONE {
            let map_from = self.blocks[unmapped].addr.max(from / PAGE * PAGE);
            self.fill(Window { segment, from, to, unmapped, map_from }, size).ok()?;
        }
        let id = self.holder(segment, from)?;
        let before = from - self.blocks[id].addr;
        if before == 0 {
            return Some(id);
        }
        let arena = self.blocks[id].arena;
        self.unbin(arena, id);
        let place = self.blocks.split(id, before);
        self.bin(arena, id);
        self.bin(arena, place);
        Some(place)
    }

    /// The block of a segment that an address lies in.
    fn holder(&self, segment: u16, at: Address) -> Option<Id> {
        let entry = &self.space.segments[segment as usize];
        let mut id = match self.space.find_before(segment, at, true) {
            Found::Block(id) => id,
            _ => entry.first,
        };
        while self.blocks[id].end() <= at {
            id = self.blocks[id].next;
            if id == NONE {
                return None;
            }
        }
        Some(id)
    }
}
