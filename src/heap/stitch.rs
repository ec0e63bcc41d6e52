//! Stitching: how handles that lie idle come to where memory is needed.
//!
//! Where the driver can map one handle at several addresses, a handle that moves keeps its old mapping as a
//! *shadow*: no unmapping is needed, so nothing has to be quiet within one stream, and the way back is free.
//! Elsewhere it is unmapped there and mapped here.
//!
//! It knows when a page is quiet, not why it is needed. Invariants: only whole handles inside free ranges
//! move, and quiet ones unless they stay with their stream; an address is unmapped only when it is quiet.

use std::cmp::Reverse;

use super::block::{Block, Id, NONE, State};
use super::chain::Window;
use super::grow::Shortage;
use super::retrace::{EARNED_BY_MOVE, PATIENCE};
use super::segment::{Found, HandleId, PAGE, Piece, Shadow};
use super::{Address, Driver, DriverError, Heap, kind_of, lane_of};

/// The handles that a survey found idle, each with the clock at the last free there.
pub(super) struct Idle {
    pub handles: Vec<(u64, HandleId)>,
    /// What will be missed least comes last.
    pub sorted: bool,
    /// The host has waited for them.
    pub waited: bool,
}

/// Memory that came to where it is needed: its pages, and the clock at the last free of it.
struct Come {
    from: Address,
    to: Address,
    clock: u64,
}

/// Most shadows of one handle.
const SHADOWS: usize = 64;

impl<D: Driver> Heap<D> {
    /// Begins a new survey: nothing is known to be idle or wanted.
    pub(super) fn begin_survey(&mut self) {
        self.survey += 1;
    }

    /// Notes which handles are in the places of the latest request's rivals.
    pub(super) fn find_wanted(&mut self, lane: usize) {
        let Some(trail) = self.lanes[lane].trail.take() else { return };
        // Most lay there in both steps, and in the segment of the one before.
        self.places.clear();
        let mut segment = None;
        for (at, size) in trail.rivals().filter(|&(_, size)| size >= PAGE) {
            if !self.places.insert((at, size)) {
                continue;
            }
            let holds = |&index: &u16| self.space.segments[index as usize].contains(at);
            segment = segment.filter(holds).or_else(|| {
                let mut segments = self.lanes[lane].arenas.iter().flat_map(|arena| &arena.segments);
                segments.find(|&index| holds(index)).copied()
            });
            if let Some(segment) = segment {
                self.space.note_wanted(segment, at, at + size, self.survey);
            }
        }
        self.lanes[lane].trail = Some(trail);
    }

    /// Finds all handles that lie idle and may be taken: for `lane` (which needs no quiet for its own, if
    /// they need not be unmapped), or to be destroyed.
    pub(super) fn find_idle(&mut self, lane: Option<usize>) -> Idle {
        let mut found: Vec<(u64, HandleId)> = Vec::new();
        for index in 0..self.lanes.len() {
            if !self.may_take_from(index) {
                continue;
            }
            let own = self.aliases && lane == Some(index);
            let lane = &self.lanes[index];
            if !own && lane.loud {
                continue;
            }
            for arena in &lane.arenas {
                for id in arena.bins.at_least(&self.blocks, PAGE) {
                    let block = &self.blocks[id];
                    if !own && block.word > self.marks.quiet {
                        continue;
                    }
                    let mut at = block.addr.next_multiple_of(PAGE);
                    while at + PAGE <= block.end()
                        && let Some((id, piece)) = self.space.piece_at(block.segment, at)
                    {
                        if piece.at >= block.addr && piece.at + piece.size <= block.end() {
                            self.space.note_idle(id, self.survey);
                            found.push((block.word, id));
                        }
                        at = piece.at + piece.size;
                    }
                }
            }
        }
        Idle { handles: found, sorted: false, waited: false }
    }

    /// Bytes of the idle handles that no rival wants.
    pub(super) fn unwanted(&self, idle: &Idle) -> u64 {
        let unwanted = idle.handles.iter().filter(|&&(_, id)| !self.space.is_wanted(id, self.survey));
        unwanted.filter_map(|&(_, id)| self.space.piece(id)).map(|piece| piece.size).sum()
    }

    /// The idle handle that will be missed least, of at most `largest` bytes and outside the window: one that
    /// no rival wants, and of those what lay idle longest.
    pub(super) fn take_idle(&mut self, window: &Window, largest: u64, idle: &mut Idle) -> Option<HandleId> {
        if !idle.sorted {
            idle.sorted = true;
            // Stable: what was used together stays together.
            let key = |&(word, id): &(u64, HandleId)| (!self.space.is_wanted(id, self.survey), Reverse(word));
            idle.handles.sort_by_key(key);
        }
        let (from, to) = window.pages();
        let place = idle.handles.iter().rposition(|&(_, id)| {
            let fits = |piece: Piece| {
                let inside = piece.at < to && from < piece.at + piece.size;
                piece.size <= largest && !(inside && piece.segment == window.segment)
            };
            self.space.is_idle(id, self.survey) && self.space.piece(id).is_some_and(fits)
        })?;
        Some(idle.handles.remove(place).1)
    }

    /// Waits on the host until the handle that is idle longest is quiet; false if there is none or it could
    /// not be waited for.
    pub(super) fn wait_for_idle(&mut self, window: &Window) -> bool {
        let mut oldest: Option<(u64, usize)> = None;
        for lane in 0..self.lanes.len() {
            if !self.may_take_from(lane) {
                continue;
            }
            for arena in &self.lanes[lane].arenas {
                for id in arena.bins.at_least(&self.blocks, PAGE) {
                    let block = &self.blocks[id];
                    let outside = block.segment != window.segment
                        || block.end() <= window.from
                        || block.addr >= window.to;
                    if outside && oldest.is_none_or(|(word, _)| block.word < word) {
                        oldest = Some((block.word, lane));
                    }
                }
            }
        }
        let Some((_, lane)) = oldest else { return false };
        if self.lanes[lane].loud { self.wait_device() } else { self.hush() }
    }

    /// What is present in the window stays there.
    pub(super) fn keep_present(&mut self, window: &Window) {
        let (mut at, to) = window.pages();
        while at < to {
            if let Some((id, _)) = self.space.piece_at(window.segment, at) {
                self.space.note_idle(id, 0);
            }
            at = self.space.stretch(window.segment, at, to).1;
        }
    }

    /// Calls idle handles back to their shadows in the window and unmaps the other shadows there. No handle is
    /// idle that is present in the window.
    pub(super) fn call_back(&mut self, window: &Window) -> Result<(), Shortage> {
        let mut come = Come { from: 0, to: 0, clock: 0 };
        let done = self.call_back_to(window, &mut come);
        self.receive(window.segment, &come)?;
        done
    }

    /// The same; what came last is not free memory yet.
    fn call_back_to(&mut self, window: &Window, come: &mut Come) -> Result<(), Shortage> {
        let (mut at, to) = window.pages();
        let mut ids = Vec::new();
        while at < to {
            let Some((id, piece, shadow)) = self.space.shadow_at(window.segment, at) else {
                at = self.space.stretch(window.segment, at, to).1;
                continue;
            };
            at = shadow.at + piece.size;
            if !self.space.is_idle(id, self.survey) {
                self.unmap_shadow(id, shadow)?;
                continue;
            }
            if come.to != shadow.at {
                self.receive(window.segment, come)?;
                *come = Come { from: shadow.at, to: shadow.at, clock: 0 };
            }
            let Some(block) = self.free_holder(piece.segment, piece.at) else { return Err(Shortage::Memory) };
            // What lies there in the same order comes at once.
            let (free, mut end) = (self.blocks[block].end(), piece.at + piece.size);
            ids.clear();
            ids.push(id);
            while at < to
                && let Some((id, next, shadow)) = self.space.shadow_at(window.segment, at)
                && (next.segment, next.at, shadow.at) == (piece.segment, end, at)
                && end + next.size <= free
                && self.space.is_idle(id, self.survey)
            {
                (at, end) = (at + next.size, end + next.size);
                ids.push(id);
            }
            self.stats.work.called_back += ids.len() as u64;
            let clock = self.bring(&ids, block, window.segment, shadow.at);
            (come.to, come.clock) = (at, come.clock.max(clock));
        }
        Ok(())
    }

    /// Makes memory that came free.
    fn receive(&mut self, segment: u16, come: &Come) -> Result<(), Shortage> {
        if come.from == come.to {
            return Ok(());
        }
        self.occupy(segment, come.from, come.to - come.from, come.clock)
    }

    /// Maps an idle handle at an empty place; its size.
    pub(super) fn stitch(&mut self, id: HandleId, segment: u16, at: Address) -> Result<u64, Shortage> {
        let Some(Piece { handle, size, at: old, segment: from }) = self.space.piece(id) else {
            return Err(Shortage::Memory);
        };
        if self.aliases {
            let Some(block) = self.free_holder(from, old) else { return Err(Shortage::Memory) };
            self.make_room_for_a_shadow(id);
            self.stats.work.maps += 1;
            self.driver.map(at, size, handle)?;
            let clock = self.bring(&[id], block, segment, at);
            self.occupy(segment, at, size, clock)?;
        } else {
            self.unmap_piece(id)?;
            self.put_new(segment, at, handle, size)?;
        }
        self.stats.work.stitched += 1;
        self.patience = (self.patience + EARNED_BY_MOVE).min(PATIENCE);
        self.stats.work.stitched_bytes += size;
        let lane = lane_of(self.space.segments[segment as usize].arena);
        self.retrace_if_due(lane);
        Ok(size)
    }

    /// Unmaps the handle's oldest shadow that is quiet, if it has as many as it may have.
    fn make_room_for_a_shadow(&mut self, id: HandleId) {
        let shadows = self.space.shadows_of(id);
        if shadows.len() >= SHADOWS
            && let Some(&oldest) = shadows.iter().find(|&&shadow| self.is_quiet(shadow))
        {
            // One shadow too many does no harm.
            let _stays_on_error = self.unmap_shadow(id, oldest);
        }
    }

    /// Makes handles that lie in a free range, one behind the other, present in the same order where they are
    /// mapped, too. The clock at the last free of that memory, which is not free there yet.
    fn bring(&mut self, ids: &[HandleId], block: Id, segment: u16, at: Address) -> u64 {
        let piece = |id: &HandleId| self.space.piece(*id);
        let Some(first) = ids.first().and_then(piece) else { return 0 };
        let size = ids.iter().filter_map(piece).map(|piece| piece.size).sum();
        let Block { arena: from, segment: left, word: clock, .. } = self.blocks[block];
        self.vacate(block, first.at, size);
        let mut to = at;
        for &id in ids {
            self.space.note_idle(id, 0);
            to += self.space.shift(id, segment, to, clock);
        }
        let arena = self.space.segments[segment as usize].arena;
        if left != segment {
            self.uncount_mapped(from, left, size);
            self.count_mapped(arena, segment, size);
        }
        // What stays with its stream is as quiet as it was; what comes from another stream is quiet.
        if lane_of(from) == lane_of(arena) { clock } else { 0 }
    }

    /// Turns a part of a free range into one without memory.
    fn vacate(&mut self, block: Id, at: Address, size: u64) {
        let arena = self.blocks[block].arena;
        self.unbin(arena, block);
        let mut middle = block;
        if self.blocks[block].addr < at {
            middle = self.blocks.split(block, at - self.blocks[block].addr);
            self.bin(arena, block);
        }
        if self.blocks[middle].size > size {
            let rest = self.blocks.split(middle, size);
            self.bin(arena, rest);
        }
        self.lose(arena, middle);
    }

    /// Turns a range without memory into a free one.
    pub(super) fn occupy(
        &mut self,
        segment: u16,
        at: Address,
        size: u64,
        clock: u64,
    ) -> Result<(), Shortage> {
        let arena = self.space.segments[segment as usize].arena;
        let unmapped = self.holder(segment, at).filter(|&id| self.blocks[id].state == State::Unmapped);
        let Some(id) = unmapped else { return Err(Shortage::Memory) };
        let mut middle = id;
        if at > self.blocks[id].addr {
            middle = self.blocks.split(id, at - self.blocks[id].addr);
            self.bin_again(self.blocks[id].prev);
        } else {
            self.unlist_unmapped(arena, id);
        }
        if self.blocks[middle].size > size {
            let rest = self.blocks.split(middle, size);
            self.list_unmapped(arena, rest);
        }
        self.release_range(middle, clock);
        Ok(())
    }

    /// Unmaps an idle handle everywhere. What is left of it on failure stays as it was.
    pub(super) fn unmap_piece(&mut self, id: HandleId) -> Result<(), DriverError> {
        for shadow in self.space.shadows_of(id).to_vec() {
            self.unmap_shadow(id, shadow)?;
        }
        let Some(Piece { at, size, segment, .. }) = self.space.piece(id) else { return Ok(()) };
        self.stats.work.unmaps += 1;
        self.driver.unmap(at, size)?;
        if let Some(block) = self.free_holder(segment, at) {
            let arena = self.blocks[block].arena;
            self.vacate(block, at, size);
            self.space.displace(id);
            self.uncount_mapped(arena, segment, size);
        }
        Ok(())
    }

    pub(super) fn unmap_shadow(&mut self, id: HandleId, shadow: Shadow) -> Result<(), DriverError> {
        let Some(Piece { size, .. }) = self.space.piece(id) else { return Ok(()) };
        self.stats.work.unmaps += 1;
        self.driver.unmap(shadow.at, size)?;
        self.space.fade(id, shadow);
        Ok(())
    }

    /// Makes a range in no list unmapped and joins it with unmapped neighbours.
    fn lose(&mut self, arena: u16, id: Id) {
        let (prev, next) = (self.blocks[id].prev, self.blocks[id].next);
        if self.is(next, State::Unmapped) {
            self.unlist_unmapped(arena, next);
            self.blocks.absorb(id, next);
        }
        let mut whole = id;
        if self.is(prev, State::Unmapped) {
            self.blocks.absorb(prev, id);
            whole = prev;
        } else {
            self.list_unmapped(arena, id);
        }
        self.bin_again(self.blocks[whole].prev);
    }

    /// What follows a range is another than before: if it is free, it may belong into another bin.
    fn bin_again(&mut self, id: Id) {
        if self.is(id, State::Free) {
            let arena = self.blocks[id].arena;
            self.unbin(arena, id);
            self.bin(arena, id);
        }
    }

    /// Lists a range without memory, and names it in the region's table.
    pub(super) fn list_unmapped(&mut self, arena: u16, id: Id) {
        self.lanes[lane_of(arena)].arenas[kind_of(arena)].add_unmapped(&mut self.blocks, id);
        let Block { region, addr, .. } = self.blocks[id];
        self.space.set_block(region, addr, id);
    }

    fn unlist_unmapped(&mut self, arena: u16, id: Id) {
        self.lanes[lane_of(arena)].arenas[kind_of(arena)].remove_unmapped(&mut self.blocks, id);
        let Block { region, addr, .. } = self.blocks[id];
        self.space.clear(region, addr);
    }

    /// The free range of a segment that an address lies in.
    pub(super) fn free_holder(&self, segment: u16, at: Address) -> Option<Id> {
        self.holder(segment, at).filter(|&id| self.blocks[id].state == State::Free)
    }

    /// The block of a segment that an address lies in.
    pub(super) fn holder(&self, segment: u16, at: Address) -> Option<Id> {
        let first = self.space.segments[segment as usize].first;
        let start = |strictly| match self.space.find_before(segment, at, strictly) {
            Found::Block(id) => id,
            Found::Slab(slab) => self.slabs[slab].block,
            Found::Nothing => first,
        };
        let mut id = start(false);
        if self.blocks[id].addr > at {
            id = start(true);
        }
        while self.blocks[id].end() <= at {
            id = self.blocks[id].next;
            if id == NONE {
                return None;
            }
        }
        Some(id)
    }
}
