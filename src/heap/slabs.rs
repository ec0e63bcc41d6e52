//! How slabs come and go: made of free ranges of their arena, given back when they are empty.
//!
//! It knows where a slab lies, not what is in it. Invariant: at most one empty slab of a class waits in a lane.

use super::arena::{RUNS, arena_number, lane_of};
use super::block::{NONE, State};
use super::slab::run_for;
use super::stats::SMALL;
use super::{Driver, Heap};

impl<D: Driver> Heap<D> {
    /// Makes a slab of a class out of free memory of the lane; none if there is no room for one.
    pub(super) fn make_slab(&mut self, lane: usize, class: usize) -> Option<u32> {
        let size = self.classes.size(class);
        let run = run_for(size);
        // Everything in this arena is a multiple of the unit, so everything is aligned.
        let id = self.lanes[lane].arenas[RUNS].bins.best(&self.blocks, run)?;
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
        lane.arenas[RUNS].taken += 1;
        self.slabs.link(&mut lane.arenas[SMALL].slabs[class], slab);
        Some(slab)
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
        lane.arenas[RUNS].taken -= 1;
        self.slabs.retire(id);
        self.space.set_slab(segment, base, size, None);
        self.release_range(run, clock);
    }

    /// Gives the empty slabs of a lane back; whether there were any.
    pub(super) fn retire_empty_slabs(&mut self, lane: usize) -> bool {
        let mut any = false;
        for class in 0..self.classes.count() {
            let slab = self.lanes[lane].arenas[SMALL].empty[class];
            if slab != NONE {
                self.retire_slab(slab);
                any = true;
            }
        }
        any
    }
}
