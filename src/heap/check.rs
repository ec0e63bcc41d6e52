//! All invariants of a heap in one place; tests call it after every operation.
//!
//! It only reads, and takes time in proportion to the heap.

use super::arena::{arena_number, kind_of};
use super::block::{NONE, State};
use super::fit::Bins;
use super::segment::{Found, PAGE};
use super::slab::SlotState;
use super::stats::{LARGE, SMALL};
use super::{Driver, Heap, SLAB_MAX, SMALL_MAX, lane_of, part_of};

macro_rules! ensure {
    ($condition:expr, $($words:tt)+) => {
        if !$condition {
            return Err(format!($($words)+));
        }
    };
}

/// What the blocks of a heap add up to, per kind.
#[derive(Default)]
struct Sums {
    live: [u64; 2],
    live_bytes: [u64; 2],
    pending: [u64; 2],
    pending_bytes: [u64; 2],
    requested: [u64; 2],
    mapped: [u64; 2],
    segments: [u64; 2],
}

impl<D: Driver> Heap<D> {
    /// Checks every invariant of the heap.
    ///
    /// # Errors
    /// The first one that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let mut sums = Sums::default();
        for index in 0..self.space.segments.len() as u16 {
            if self.space.segments[index as usize].in_use {
                self.check_segment(index, &mut sums)?;
            }
        }
        for lane in (0..self.lanes.len()).filter(|&lane| self.lanes[lane].in_use) {
            self.check_lane(lane)?;
        }
        self.check_shadows()?;
        self.check_sums(&sums)
    }

    /// A shadow lies where there is no memory, and is named there; nothing else is named.
    fn check_shadows(&self) -> Result<(), String> {
        let (mut named, mut shadows_found) = (0, 0);
        for (id, piece, shadows) in self.space.pieces() {
            named += (1 + shadows.len() as u64) * (piece.size / PAGE);
            shadows_found += shadows.len();
            ensure!(
                self.aliases || shadows.is_empty(),
                "handle {id} has shadows on a device without aliases"
            );
            for shadow in shadows {
                for at in (shadow.at..shadow.at + piece.size).step_by(PAGE as usize) {
                    let found = self.space.shadow_at(shadow.segment, at);
                    let right = found.is_some_and(|(other, _, found)| (other, found.at) == (id, shadow.at));
                    ensure!(right, "the shadow of handle {id} at {at:#x} is {found:?}");
                    let clock = self.space.stretch(shadow.segment, at, at + PAGE).0.map(|(_, clock)| clock);
                    ensure!(clock == Some(shadow.clock), "the shadow's clock at {at:#x} is {clock:?}");
                    if self.space.segments[shadow.segment as usize].in_use {
                        let block = self.holder(shadow.segment, at).map(|block| self.blocks[block].state);
                        ensure!(block == Some(State::Unmapped), "a shadow at {at:#x} lies in {block:?}");
                    }
                }
            }
        }
        ensure!(named == self.space.named(), "{named} pages are mapped, not {}", self.space.named());
        ensure!(shadows_found == self.space.shadows, "{shadows_found} shadows, not {}", self.space.shadows);
        Ok(())
    }

    /// Neighbours are contiguous, joined where they can be, and agree with tables, pages and lists.
    fn check_segment(&self, index: u16, sums: &mut Sums) -> Result<(), String> {
        let segment = &self.space.segments[index as usize];
        let kind = part_of(segment.arena);
        let (mut id, mut at, mut before, mut mapped) = (segment.first, segment.base, None, 0);
        let mut prev = NONE;
        while id != NONE {
            let block = &self.blocks[id];
            ensure!(
                block.addr == at && block.prev == prev,
                "block {id} at {:#x} does not follow",
                block.addr
            );
            ensure!((block.segment, block.arena) == (index, segment.arena), "block {id} is astray");
            ensure!(
                block.size > 0 && block.size.is_multiple_of(super::GRAIN),
                "block {id} has {} bytes",
                block.size
            );
            let joined = matches!(block.state, State::Free | State::Unmapped) && before == Some(block.state);
            ensure!(!joined, "block {id} is not joined with the one before");
            if block.state == State::Unmapped {
                let whole = block.addr.is_multiple_of(PAGE) && block.size.is_multiple_of(PAGE);
                ensure!(whole, "block {id} unmaps half a page");
            } else {
                mapped += block.size;
            }
            if !segment.plain {
                self.check_pages(index, id)?;
            }
            match block.state {
                State::Live | State::Pending => {
                    ensure!(self.space.find(at) == Found::Block(id), "block {id} is not in the table");
                    ensure!(block.word <= block.size, "block {id} is smaller than asked for");
                    ensure!(
                        (block.size <= SMALL_MAX) == (kind_of(segment.arena) == SMALL),
                        "block {id} in the wrong arena"
                    );
                    let count = u64::from(block.state == State::Live);
                    sums.live[kind] += count;
                    sums.live_bytes[kind] += count * block.size;
                    sums.pending[kind] += 1 - count;
                    sums.pending_bytes[kind] += (1 - count) * block.size;
                    sums.requested[kind] += block.word;
                }
                State::Slab => self.check_slab(block.b, id, sums)?,
                State::Free => ensure!(Bins::is_known(&self.blocks, id), "block {id} does not know its bin"),
                State::Unmapped => {
                    ensure!(self.space.find(at) == Found::Block(id), "range {id} is not in the table");
                }
                State::Vacant => return Err(format!("block {id} is vacant")),
            }
            (before, prev, at, id) = (Some(block.state), id, block.end(), block.next);
        }
        for (granule, found) in self.space.named_in(index) {
            let right = match found {
                Found::Block(id) => {
                    let block = &self.blocks[id];
                    block.segment == index
                        && granule.contains(&block.addr)
                        && matches!(block.state, State::Live | State::Pending | State::Unmapped)
                }
                Found::Slab(slab) => self.blocks[self.slabs[slab].block].holds(granule.start),
                Found::Nothing => true,
            };
            ensure!(right, "the table names {found:?} at {granule:x?}");
        }
        ensure!(at == segment.end(), "segment {index} ends at {at:#x}, not {:#x}", segment.end());
        ensure!(mapped == segment.mapped, "segment {index} maps {mapped}, not {}", segment.mapped);
        sums.mapped[kind] += mapped;
        sums.segments[kind] += u64::from(mapped > 0);
        Ok(())
    }

    /// Every page of a block has memory, or none has.
    fn check_pages(&self, segment: u16, id: u32) -> Result<(), String> {
        let block = &self.blocks[id];
        let mut at = block.addr;
        // Unmapped ranges can span terabytes; their ends must do.
        let probes = if block.state == State::Unmapped {
            vec![block.addr, block.end() - PAGE]
        } else {
            let mut probes = Vec::new();
            while at < block.end() {
                probes.push(at);
                at = at / PAGE * PAGE + PAGE;
            }
            probes
        };
        for at in probes {
            let piece = self.space.piece_at(segment, at);
            let wanted = block.state != State::Unmapped;
            ensure!(piece.is_some() == wanted, "page {at:#x} of block {id} ({:?})", block.state);
            if let Some((_, piece)) = piece {
                let inside = piece.segment == segment && (piece.at..piece.at + piece.size).contains(&at);
                ensure!(inside, "page {at:#x} names a handle that is elsewhere");
            }
        }
        Ok(())
    }

    fn check_slab(&self, index: u32, block: u32, sums: &mut Sums) -> Result<(), String> {
        let slab = &self.slabs[index];
        ensure!(slab.exists && slab.block == block, "slab {index} and block {block} disagree");
        ensure!(slab.base == self.blocks[block].addr, "slab {index} lies elsewhere");
        let mut free = 0;
        for (slot, meta) in slab.meta.iter().enumerate() {
            ensure!(slab.is_free(slot) == (meta.state() == SlotState::Free), "slot {slot} of slab {index}");
            ensure!(
                self.space.find(slab.address(slot)) == Found::Slab(index),
                "slab {index} not in the table"
            );
            if meta.state() == SlotState::Free {
                free += 1;
                continue;
            }
            ensure!(meta.requested() <= u64::from(slab.size), "slot {slot} of slab {index} is too small");
            let count = u64::from(meta.state() == SlotState::Live);
            let size = u64::from(slab.size);
            sums.live[SMALL] += count;
            sums.live_bytes[SMALL] += count * size;
            sums.pending[SMALL] += 1 - count;
            sums.pending_bytes[SMALL] += (1 - count) * size;
            sums.requested[SMALL] += meta.requested();
        }
        ensure!(free == slab.free, "slab {index} has {free} free slots, not {}", slab.free);
        Ok(())
    }

    /// Lists and bins hold exactly what they should.
    fn check_lane(&self, index: usize) -> Result<(), String> {
        let lane = &self.lanes[index];
        for (kind, arena) in lane.arenas.iter().enumerate() {
            let number = arena_number(index, kind);
            let mut binned: Vec<u32> = arena.bins.at_least(&self.blocks, super::GRAIN).collect();
            binned.sort_unstable();
            let of_state = |state: State| {
                move |(id, block): (u32, &super::block::Block)| {
                    (block.state == state && block.arena == number).then_some(id)
                }
            };
            let free: Vec<u32> = self.blocks.iter().filter_map(of_state(State::Free)).collect();
            ensure!(binned == free, "bins of arena {number}: {binned:?}, free: {free:?}");
            let mut listed = arena.unmapped.clone();
            listed.sort_unstable();
            let unmapped: Vec<u32> = self.blocks.iter().filter_map(of_state(State::Unmapped)).collect();
            ensure!(listed == unmapped, "unmapped of arena {number}: {listed:?}, not {unmapped:?}");
            for (place, &id) in arena.unmapped.iter().enumerate() {
                ensure!(self.blocks[id].a as usize == place, "block {id} does not know its place");
            }
            self.check_slab_lists(number)?;
        }
        let mut loose = lane.loose.map(|_| 0);
        for (_, block) in self.blocks.iter() {
            let handed = matches!(block.state, State::Live | State::Pending) && block.size <= SLAB_MAX;
            if handed && lane_of(block.arena) == index {
                loose[self.classes.index(block.size)] += 1;
            }
        }
        ensure!(loose == lane.loose, "lane {index} has {loose:?} loose blocks, not {:?}", lane.loose);
        Ok(())
    }

    fn check_slab_lists(&self, arena: u16) -> Result<(), String> {
        let lists = &self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        for (class, &head) in lists.slabs.iter().enumerate() {
            let (mut listed, mut slab) = (Vec::new(), head);
            while slab != NONE {
                listed.push(slab);
                slab = self.slabs[slab].next;
            }
            listed.sort_unstable();
            let open = self
                .slabs
                .iter()
                .filter(|(_, slab)| slab.arena == arena && usize::from(slab.class) == class && slab.free > 0);
            let open: Vec<u32> = open.map(|(id, _)| id).collect();
            ensure!(listed == open, "slabs of class {class}: {listed:?}, not {open:?}");
            let empty: Vec<u32> = open.iter().copied().filter(|&id| self.slabs[id].is_empty()).collect();
            let kept = Some(lists.empty[class]).filter(|&id| id != NONE && self.slabs[id].is_empty());
            let known: Vec<u32> = kept.into_iter().collect();
            ensure!(empty == known, "empty slabs of class {class}: {empty:?}, not {known:?}");
        }
        Ok(())
    }

    /// The statistics are what the blocks add up to, and no page is lost.
    fn check_sums(&self, sums: &Sums) -> Result<(), String> {
        let stats = self.stats.snapshot();
        for kind in [SMALL, LARGE] {
            for (name, split, expected) in [
                ("allocation", &stats.allocation, sums.live[kind]),
                ("allocated_bytes", &stats.allocated_bytes, sums.live_bytes[kind]),
                ("active", &stats.active, sums.live[kind] + sums.pending[kind]),
                ("active_bytes", &stats.active_bytes, sums.live_bytes[kind] + sums.pending_bytes[kind]),
                ("requested_bytes", &stats.requested_bytes, sums.requested[kind]),
                ("reserved_bytes", &stats.reserved_bytes, sums.mapped[kind]),
                ("segment", &stats.segment, sums.segments[kind]),
            ] {
                let part = if kind == SMALL { &split.small_pool } else { &split.large_pool };
                ensure!(part.current == expected, "{name}[{kind}] is {}, not {expected}", part.current);
            }
        }
        let pending = sums.pending[SMALL] + sums.pending[LARGE];
        ensure!(self.pending.blocks as u64 == pending, "{} pending, not {pending}", self.pending.blocks);
        let spare: u64 = self.space.spare.iter().map(|&(_, size)| size).sum();
        let mapped = sums.mapped[SMALL] + sums.mapped[LARGE];
        ensure!(mapped + spare == self.space.physical, "{mapped} + {spare} of {}", self.space.physical);
        Ok(())
    }
}
