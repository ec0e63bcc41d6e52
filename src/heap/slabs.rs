//! Small requests: slots of slabs, and how slabs come and go. They are made of free ranges of their arena, and
//! given back when they are empty.
//!
//! It knows no pages. Invariant: at most one empty slab of a class waits in a lane.

use super::arena::{RUNS, arena_number, lane_of};
use super::block::{Id, NONE, State};
use super::slab::{Slot, SlotState, run_for};
use super::stats::SMALL;
use super::{Address, Driver, Freed, Handed, Heap, HeapError, Stream, Tag};

impl<D: Driver> Heap<D> {
    #[inline]
    pub(super) fn malloc_slot(&mut self, lane: usize, size: u64, tag: Tag) -> Result<Address, HeapError> {
        let class = self.classes.index(size);
        let slab = self.lanes[lane].arenas[SMALL].slabs[class];
        if slab == NONE {
            return self.malloc_loose(lane, class, size, tag);
        }
        Ok(self.take_slot(lane, slab, size, tag))
    }

    /// Takes a slot of a slab of the lane that has a free one.
    #[inline]
    pub(super) fn take_slot(&mut self, lane: usize, id: u32, requested: u64, tag: Tag) -> Address {
        let slab = &mut self.slabs[id];
        let slot = slab.take();
        slab.meta[slot] = Slot::live(requested, tag);
        let (at, size) = (slab.address(slot), u64::from(slab.size));
        if slab.is_full() {
            let class = usize::from(slab.class);
            self.slabs.unlink(&mut self.lanes[lane].arenas[SMALL].slabs[class], id);
        }
        self.stats.handed_out(SMALL, size, requested);
        at
    }

    /// Takes a slot back; none if no slot that is handed out starts at `at`.
    #[inline]
    pub(super) fn free_slot(&mut self, id: u32, at: Address) -> Option<Freed> {
        let slab = &self.slabs[id];
        let slot = slab.slot_of(at);
        let meta = slab.meta.get(slot)?;
        if slab.address(slot) != at || meta.state() != SlotState::Live {
            return None;
        }
        let (size, tag, requested) = (u64::from(slab.size), meta.tag, meta.requested());
        if meta.uses != NONE {
            let stream = self.wait_for(Handed::Slot(id, slot as u16), SMALL, size);
            return Some(Freed { requested, size, stream, tag });
        }
        self.clock += 1;
        self.stats.freed(SMALL, size, requested);
        let stream = self.give_slot(id, slot);
        Some(Freed { requested, size, stream, tag })
    }

    /// Makes a slot free; returns the lane's stream.
    #[inline]
    pub(super) fn give_slot(&mut self, id: u32, slot: usize) -> Stream {
        let slab = &mut self.slabs[id];
        slab.meta[slot].set_state(SlotState::Free);
        let was_full = slab.is_full();
        slab.give(slot);
        let (empty, class, arena) = (slab.is_empty(), usize::from(slab.class), slab.arena);
        let lane = &mut self.lanes[lane_of(arena)];
        lane.last_free = self.clock;
        let stream = lane.stream;
        if was_full {
            self.slabs.link(&mut lane.arenas[SMALL].slabs[class], id);
        }
        if empty {
            self.keep_or_retire(id);
        }
        stream
    }

    /// A slab is empty now: it is kept, unless another one of its class is empty, too. Of what is kept the arena
    /// knows only which it was: whether it has been taken from since, it tells itself.
    fn keep_or_retire(&mut self, id: u32) {
        let slab = &self.slabs[id];
        let kept = &mut self.lanes[lane_of(slab.arena)].arenas[SMALL].empty[usize::from(slab.class)];
        if *kept == id {
            return;
        }
        if *kept == NONE || !self.slabs[*kept].is_empty() {
            *kept = id;
        } else {
            self.retire_slab(id);
        }
    }

    /// Makes a slab of a class out of free memory of the lane; none if there is no room for one.
    pub(super) fn make_slab(&mut self, lane: usize, class: usize) -> Option<u32> {
        let run = run_for(self.classes.size(class));
        // Everything in this arena is a multiple of the unit, so everything is aligned.
        let id = self.lanes[lane].arenas[RUNS].bins.best(&self.blocks, run)?;
        Some(self.cut_up(lane, class, id))
    }

    /// Makes a slab of a class out of the first part of a free range of the lane's that is large enough.
    pub(super) fn cut_up(&mut self, lane: usize, class: usize, id: Id) -> u32 {
        let size = self.classes.size(class);
        let run = run_for(size);
        let runs = self.blocks[id].arena;
        self.unbin(runs, id);
        if self.blocks[id].size > run {
            let rest = self.blocks.split(id, run);
            self.bin(runs, rest);
        }
        let (base, segment) = (self.blocks[id].addr, self.blocks[id].segment);
        let slab = self.slabs.create(base, id, size, arena_number(lane, SMALL), class);
        self.blocks[id].state = State::Slab;
        self.blocks[id].b = slab;
        self.space.set_slab(segment, base, run, Some(slab));
        let lane = &mut self.lanes[lane];
        self.slabs.link(&mut lane.arenas[SMALL].slabs[class], slab);
        slab
    }

    /// Takes the slot at an address; none if no slot begins there or it is not free. Its statistics are the
    /// caller's.
    pub(super) fn take_this_slot(&mut self, id: u32, at: Address, taken: Slot) -> Option<()> {
        let slab = &mut self.slabs[id];
        let slot = slab.slot_of(at);
        if slot >= slab.meta.len() || slab.address(slot) != at || !slab.is_free(slot) {
            return None;
        }
        slab.take_this(slot);
        slab.meta[slot] = taken;
        if slab.is_full() {
            let (class, lane) = (usize::from(slab.class), lane_of(slab.arena));
            self.slabs.unlink(&mut self.lanes[lane].arenas[SMALL].slabs[class], id);
        }
        Some(())
    }

    /// Gives an empty slab's run back to its arena.
    #[cold]
    pub(super) fn retire_slab(&mut self, id: u32) {
        let slab = &self.slabs[id];
        let (base, run, class, arena) = (slab.base, slab.block, usize::from(slab.class), slab.arena);
        let (segment, size) = (self.blocks[run].segment, self.blocks[run].size);
        let lane = &mut self.lanes[lane_of(arena)];
        let clock = lane.last_free;
        let in_arena = &mut lane.arenas[SMALL];
        self.slabs.unlink(&mut in_arena.slabs[class], id);
        if in_arena.empty[class] == id {
            in_arena.empty[class] = NONE;
        }
        self.slabs.retire(id);
        self.space.set_slab(segment, base, size, None);
        self.release_range(run, clock);
    }

    /// Gives the empty slabs of a lane back; whether there were any.
    pub(super) fn retire_empty_slabs(&mut self, lane: usize) -> bool {
        let mut any = false;
        for class in 0..self.classes.count() {
            let slab = self.lanes[lane].arenas[SMALL].empty[class];
            if slab != NONE && self.slabs[slab].is_empty() {
                self.retire_slab(slab);
                any = true;
            }
        }
        any
    }
}
