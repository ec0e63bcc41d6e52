//! Requests that are given the place that they had last time: the heap's side of [`trail`](super::trail).
//!
//! It knows memory and where a request should lie, not why. Invariant: a place is used only if it is free
//! and every handle that is missing there lies idle.

use super::arena::{KEPT, arena_number};
use super::block::{Id, State};
use super::segment::PAGE;
use super::window::Window;
use super::{Address, Driver, Heap, HeapError, Tag, kind_of, lane_of};

/// So many places where a request lay before are tried.
const PLACES: usize = 4;

impl<D: Driver> Heap<D> {
    /// A request on a lane with a trail.
    pub(super) fn malloc_retraced(
        &mut self,
        lane: usize,
        kind: usize,
        site: u32,
        size: u64,
        requested: u64,
        tag: Tag,
    ) -> Result<Address, HeapError> {
        self.patience += super::grow::var("EARN",64) as i64;
        let mut places = [0; PLACES];
        let (mut known, mut count) = (false, 0);
        if let Some(trail) = &mut self.lanes[lane].trail {
            known = trail.expect(site, size);
            for at in trail.earlier().take(4 * PLACES) {
                if count < PLACES && !places[..count].contains(&at) {
                    places[count] = at;
                    count += 1;
                }
            }
        }
        let stays = super::grow::var("KEPT",1)==1 && self.lanes[lane].trail.as_ref().is_some_and(|trail| trail.stays());
        if stays {
            self.stats.work.kept += 1; if super::grow::var("TRACE",0)>0 && self.clock > super::grow::var("TRACE",0) { println!("  kept {:.1}MB physical {} peak {}", size as f64/1048576.0, self.space.physical>>20, self.stats.active_bytes.peak()>>20); }
            let id = match self.fitting(lane, KEPT, size) {
                Some(id) => Some(id),
                None => match self.grow(arena_number(lane, KEPT), size) { Ok(()) => self.fitting(lane, KEPT, size), _ => None },
            };
            if let Some(id) = id {
                self.hand_out(id, size, requested, tag);
                let at = self.blocks[id].addr;
                if let Some(trail) = &mut self.lanes[lane].trail {
                    self.blocks[id].a = trail.lies(at);
                }
                return Ok(at);
            }
        }
        let place = places[..count].iter().find_map(|&at| self.take_place(lane, kind, at, size));
        if known { if place.is_some() { self.stats.work.hits += 1 } else { self.stats.work.missed += 1 } } else { self.stats.work.unknown += 1 }
        let hit = place.is_some(); self.strays -= self.strays / 256; if !hit { self.strays += (1 << 20) / 256; } let calls0=self.stats.work.maps+self.stats.work.unmaps;
        let place = match place {
            None if self.patience > 0 && size >= super::grow::var("SEARCHFROM",8<<20) => self.grown_at(lane, kind, size, &places[..count]),
            place => place,
        };
        if super::grow::var("TRACE",0)>0 && !hit && self.clock > super::grow::var("TRACE",0) { let calls=self.stats.work.maps+self.stats.work.unmaps; println!("  miss {:.1}MB known {known} kind {kind} places {count} calls {}", size as f64/1048576.0, calls-calls0); }
        let id = match place.or_else(|| self.fitting(lane, kind, size)) {
            Some(id) => {
                self.hand_out(id, size, requested, tag);
                id
            }
            None => self.malloc_block_slow(lane, size, requested, tag)?,
        };
        let at = self.blocks[id].addr;
        if let Some(trail) = &mut self.lanes[lane].trail {
            self.blocks[id].a = trail.lies(at);
        }
        Ok(at)
    }

    fn grown_at(&mut self, lane: usize, kind: usize, size: u64, places: &[Address]) -> Option<Id> {
        let window = self.grow_somewhere(arena_number(lane, kind), size, places).ok()?;
        self.cut_out(window.segment, window.from)
    }

    /// The free range at a place, with memory everywhere and nothing before it; none if it is not free, or
    /// would cost a call.
    fn take_place(&mut self, lane: usize, kind: usize, at: Address, size: u64) -> Option<Id> {
        let segments = &self.lanes[lane].arenas[kind].segments;
        let segment = *segments.iter().find(|&&segment| {
            let segment = &self.space.segments[segment as usize];
            (segment.base..segment.end()).contains(&at)
        })?;
        let window = Window { segment, from: at, to: at + size };
        let first = self.holder(segment, at)?;
        let (mut id, mut whole) = (first, true);
        loop {
            match self.blocks[id].state {
                State::Free => {}
                State::Unmapped => whole = false,
                _ => return None,
            }
            if self.blocks[id].end() >= window.to {
                break;
            }
            id = self.blocks[id].next;
            if id == super::NONE {
                return None;
            }
        }
        if !whole {
            if !self.can_call_back(lane, &window) {
                return None;
            }
            self.call_back(&window).ok()?;
        }
        self.cut_out(segment, at)
    }

    /// The free range that holds an address, without what lies before it.
    fn cut_out(&mut self, segment: u16, at: Address) -> Option<Id> {
        let id = self.holder(segment, at)?;
        let before = at - self.blocks[id].addr;
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

    /// Whether every page that is missing in the window is the shadow of a handle that lies idle.
    fn can_call_back(&mut self, lane: usize, window: &Window) -> bool {
        self.survey += 1;
        let (mut at, to) = window.pages();
        while at < to {
            if self.space.piece_at(window.segment, at).is_some() {
                at += PAGE;
                continue;
            }
            let Some((id, piece, shadow)) = self.space.shadow_at(window.segment, at) else { return false };
            self.space.note_idle(id, self.survey);
            let Some(block) = self.holder(piece.segment, piece.at) else { return false };
            let block = &self.blocks[block];
            let owner = lane_of(block.arena);
            let idle = block.state == State::Free && block.end() >= piece.at + piece.size;
            let own = owner == lane && self.aliases;
            let quiet = own || (!self.lanes[owner].loud && block.word <= self.lanes[owner].marks.quiet);
            if !idle || !quiet || !self.may_take_from(owner) {
                return false;
            }
            at = shadow.at + piece.size;
        }
        self.doubled(window) == Some(0)
    }
}
