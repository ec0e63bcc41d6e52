//! Stitching: how handles that lie idle come to where memory is needed.
//!
//! Where the driver can map one handle at several addresses, a handle that moves keeps its old mapping as a
//! *shadow*: no unmapping is needed, so nothing has to be quiet within one stream, and the way back is free.
//! Elsewhere it is unmapped there and mapped here.
//!
//! It knows when a page is quiet, not why it is needed. Invariants: only whole handles inside free ranges
//! move, and quiet ones unless they stay with their stream; an address is unmapped only when it is quiet.

use std::cmp::Reverse;

use super::block::{Id, NONE, State};
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

    /// Calls handles back to their shadows in the window.
    pub(super) fn call_back(&mut self, window: &Window) -> Result<(), Shortage> {
        let (from, to) = window.pages();
        let mut at = from;
        while at < to {
            if let Some((id, _)) = self.space.piece_at(window.segment, at) {
                self.space.note_idle(id, 0);
            }
            at = self.space.stretch(window.segment, at, to).1;
        }
        let mut ids = Vec::new();
        at = from;
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
            // What lies there in the same order, in one free range, comes at once.
            let free = self.holder(piece.segment, piece.at).map_or(0, |block| self.blocks[block].end());
            let mut end = piece.at + piece.size;
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
            self.bring(&ids, window.segment, shadow.at)?;
        }
        Ok(())
    }

    /// Maps an idle handle at an empty place; its size.
    pub(super) fn stitch(&mut self, id: HandleId, segment: u16, at: Address) -> Result<u64, Shortage> {
        let Some(Piece { handle, size, .. }) = self.space.piece(id) else { return Err(Shortage::Memory) };
        if self.aliases {
            self.make_room_for_a_shadow(id);
            self.stats.work.maps += 1;
            self.driver.map(at, size, handle)?;
            self.bring(&[id], segment, at)?;
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

    /// Makes idle handles that lie in one free range, one behind the other, present in the same order where they
    /// are mapped, too.
    fn bring(&mut self, ids: &[HandleId], segment: u16, at: Address) -> Result<(), Shortage> {
        let piece = |id: &HandleId| self.space.piece(*id);
        let Some(first) = ids.first().and_then(piece) else { return Err(Shortage::Memory) };
        let size = ids.iter().filter_map(piece).map(|piece| piece.size).sum();
        let left = first.segment;
        let Some((from, clock)) = self.vacate(left, first.at, size) else { return Err(Shortage::Memory) };
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
        let same = lane_of(from) == lane_of(arena);
        self.occupy(segment, at, size, if same { clock } else { 0 })
    }

    /// Turns a part of a free range into one without memory: its arena, and the clock at the last free in it.
    fn vacate(&mut self, segment: u16, at: Address, size: u64) -> Option<(u16, u64)> {
        let block = self.holder(segment, at).filter(|&id| self.blocks[id].state == State::Free)?;
        let (arena, clock) = (self.blocks[block].arena, self.blocks[block].word);
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
        Some((arena, clock))
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
        let list = &mut self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        let mut middle = id;
        if at > self.blocks[id].addr {
            middle = self.blocks.split(id, at - self.blocks[id].addr);
        } else {
            list.remove_unmapped(&mut self.blocks, id);
        }
        if self.blocks[middle].size > size {
            let rest = self.blocks.split(middle, size);
            list.add_unmapped(&mut self.blocks, rest);
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
        if let Some((arena, _)) = self.vacate(segment, at, size) {
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
        let list = &mut self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        let (prev, next) = (self.blocks[id].prev, self.blocks[id].next);
        if next != NONE && self.blocks[next].state == State::Unmapped {
            list.remove_unmapped(&mut self.blocks, next);
            self.blocks.absorb(id, next);
        }
        if prev != NONE && self.blocks[prev].state == State::Unmapped {
            self.blocks.absorb(prev, id);
        } else {
            list.add_unmapped(&mut self.blocks, id);
        }
    }

    /// The block of a segment that an address lies in.
    pub(super) fn holder(&self, segment: u16, at: Address) -> Option<Id> {
        let entry = &self.space.segments[segment as usize];
        let mut found = self.space.find_before(segment, at, true, self.space.near(segment, at));
        let mut start = entry.first;
        if found == Found::Nothing {
            // Where nothing is handed out for long, there are mostly ranges without memory.
            let arena = &self.lanes[lane_of(entry.arena)].arenas[kind_of(entry.arena)];
            let below = arena.unmapped_at.range(entry.base..=at).next_back();
            found = self.space.find_before(segment, at, true, below.map_or(0, |(&from, _)| from));
            start = below.map_or(start, |(_, &id)| id);
        }
        let mut id = match found {
            Found::Block(id) => id,
            Found::Slab(slab) => self.slabs[slab].block,
            Found::Nothing => start,
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
