//! Requests that are given a place that they had before: the heap's side of [`trail`](super::trail).
//!
//! A job that has to move memory gets a trail. From then on, a large request lies where the same request lay
//! a step ago, or two: there the handles are mapped already. One that is expected to stay goes where such
//! requests lie together, because every page that stays breaks up the places that it was part of.
//!
//! It knows memory and where a request should lie, not why. Invariant: a place is used only if it is free and
//! every handle that is missing there lies idle.

use super::arena::{HUGE, HUGE_FROM, KEPT, arena_number};
use super::block::{Id, NONE, State};
use super::chain::Window;
use super::grow::MOVES_TO_SETTLE;
use super::trail::Trail;
use super::window::{Own, REPLACE};
use super::{Address, Driver, Heap, HeapError, Tag, lane_of};

/// So many places where a request lay before are tried.
const PLACES: usize = 4;
/// In so many earlier requests they are looked for.
const LOOKS: usize = 4 * PLACES;
/// Looks at pages that a heap has to spend when it begins to retrace, and that each request earns it: in a job
/// that never repeats itself, and how many more in one that always does. A look takes a nanosecond or two.
pub(super) const PATIENCE: i64 = 1 << 22;
const EARNED: [i64; 2] = [1 << 6, 1 << 13];
/// What each move earns: it takes as long as some tens of thousands of looks, and a better search saves moves.
pub(super) const EARNED_BY_MOVE: i64 = 1 << 14;
/// The share of strays is counted in this unit, over about so many requests.
const WHOLE: u64 = 1 << 20;
const RECENT: u64 = 1 << 8;

/// So many moves, and one more in so many requests, are few.
const FEW_MOVES: u64 = 64;
const REQUESTS_PER_MOVE: u64 = 1024;

/// A request on a lane with a trail.
pub(super) struct Request {
    pub lane: usize,
    pub kind: usize,
    /// Rounded.
    pub size: u64,
    pub requested: u64,
    pub tag: Tag,
}

impl<D: Driver> Heap<D> {
    /// Whether handles had to be moved so much that requests are given the places that they had before.
    pub(super) fn is_retracing(&self) -> bool {
        self.huge_from != u64::MAX
    }

    /// Gives a lane a trail, once as much memory was moved as there is, and often. Many jobs need a few moves
    /// while they warm up and few after: best fit serves them well.
    pub(super) fn retrace_if_due(&mut self, lane: usize) {
        let work = &self.stats.work;
        let often = work.stitched > FEW_MOVES + self.clock / REQUESTS_PER_MOVE;
        if often
            && work.stitched_bytes >= self.space.physical + self.retrace_from
            && self.lanes[lane].pool == 0
        {
            if !self.is_retracing() {
                self.moves_to_settle = work.stitched + MOVES_TO_SETTLE * work.creates;
            }
            self.huge_from = HUGE_FROM;
            self.lanes[lane].trail.get_or_insert_with(|| Box::new(Trail::new()));
        }
    }

    /// Where nothing ever repeats itself, a trail leads nowhere: it is left, for longer each time.
    fn leave_trail_if_lost(&mut self, lane: usize) {
        let leads = self.steadiness() > 0;
        if !self.lanes[lane].trail.as_mut().is_some_and(|trail| trail.is_lost(leads)) {
            return;
        }
        self.lanes[lane].trail = None;
        if self.lanes.iter().all(|lane| lane.trail.is_none()) {
            self.huge_from = u64::MAX;
            self.moves_to_settle = u64::MAX;
            self.strays = 0;
            self.retrace_from = self.stats.work.stitched_bytes.saturating_mul(4);
        }
    }

    /// How much of what was asked for lately had been there before, in 2^-10: 0 from a half on downwards.
    pub(super) fn steadiness(&self) -> u64 {
        WHOLE.saturating_sub(2 * self.strays) >> 10
    }

    #[cold]
    pub(super) fn malloc_retraced(&mut self, request: &Request, site: u32) -> Result<Address, HeapError> {
        let &Request { lane, kind, size, requested, tag } = request;
        // Where nothing repeats itself, searching finds nothing that lasts.
        let earned = EARNED[0] + ((EARNED[1] * self.steadiness() as i64) >> 10);
        self.patience = (self.patience + earned).min(PATIENCE);
        let stays = self.lanes[lane].trail.as_mut().is_some_and(|trail| {
            trail.expect(site, size);
            trail.stays()
        });
        let id = match if stays { self.place_for_long(lane, size) } else { None } {
            Some(id) => Some(id),
            None => self.place_again(lane, kind, size),
        };
        let id = match id.or_else(|| self.fitting(lane, kind, size)) {
            Some(id) => {
                self.hand_out(id, size, requested, tag);
                id
            }
            None => self.malloc_block_slow(lane, size, requested, tag)?,
        };
        let at = self.blocks[id].addr;
        // A block that was lent lies in another lane.
        if lane_of(self.blocks[id].arena) == lane
            && let Some(trail) = &mut self.lanes[lane].trail
        {
            self.blocks[id].a = trail.lies(at);
        }
        self.leave_trail_if_lost(lane);
        Ok(at)
    }

    /// A place among what stays.
    fn place_for_long(&mut self, lane: usize, size: u64) -> Option<Id> {
        if let Some(id) = self.fitting(lane, KEPT, size) {
            return Some(id);
        }
        self.grow(arena_number(lane, KEPT), size).ok()?;
        self.fitting(lane, KEPT, size)
    }

    /// A place that the request had before or, if it is huge, the one that disturbs others least.
    fn place_again(&mut self, lane: usize, kind: usize, size: u64) -> Option<Id> {
        let (place, last) = self.earlier_place(lane, kind, size);
        self.strays -= self.strays / RECENT;
        if place.is_some() {
            self.stats.work.retraced += 1;
            return place;
        }
        self.strays += WHOLE / RECENT;
        if kind != HUGE || self.patience <= 0 || self.plain {
            return None;
        }
        // A place that has to be mended again and again is given up for a new one.
        let paid = self.lanes[lane].trail.as_ref().map_or(0, |trail| trail.paid());
        let own = Own { at: last, paid };
        let replaced = self.stats.work.unmaps;
        let window = self.grow_somewhere(arena_number(lane, kind), size, own).ok()?;
        let replaced = self.stats.work.unmaps - replaced;
        if let Some(trail) = &mut self.lanes[lane].trail {
            trail.pay(if replaced > 0 { paid + replaced * REPLACE } else { 0 });
        }
        self.cut_out(window.segment, window.from).filter(|&id| self.blocks[id].size >= size)
    }

    /// A place that the latest request had before, if one can be had; and the one that it had last, or 0.
    fn earlier_place(&mut self, lane: usize, kind: usize, size: u64) -> (Option<Id>, Address) {
        let mut tried = [0; PLACES];
        let mut count = 0;
        let Some(mut number) = self.lanes[lane].trail.as_ref().map(|trail| trail.latest()) else {
            return (None, 0);
        };
        // The log is large and the last place will mostly do: no more of it is read than that takes.
        for _ in 0..LOOKS {
            let trail = self.lanes[lane].trail.as_ref();
            let Some((earlier, at)) = trail.and_then(|trail| trail.before(number)) else { break };
            number = earlier;
            if at == 0 || tried[..count].contains(&at) {
                continue;
            }
            if let Some(id) = self.take_place(lane, kind, at, size) {
                return (Some(id), at);
            }
            tried[count] = at;
            count += 1;
            if count == PLACES {
                break;
            }
        }
        (None, tried[0])
    }

    /// The free range at a place, with memory everywhere and nothing before it; none if it is not free, or
    /// would cost a call.
    fn take_place(&mut self, lane: usize, kind: usize, at: Address, size: u64) -> Option<Id> {
        let segments = &self.lanes[lane].arenas[kind].segments;
        let segment = *segments.iter().find(|&&index| self.space.segments[index as usize].contains(at))?;
        let window = Window { segment, from: at, to: at.checked_add(size)? };
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
            if id == NONE {
                return None;
            }
        }
        if whole {
            return Some(self.without_front(first, at));
        }
        if !self.can_call_back(lane, &window) {
            return None;
        }
        self.call_back(&window).ok()?;
        self.cut_out(segment, at).filter(|&id| self.blocks[id].size >= size)
    }

    /// The free range that holds an address, without what lies before it.
    pub(super) fn cut_out(&mut self, segment: u16, at: Address) -> Option<Id> {
        let id = self.free_holder(segment, at)?;
        Some(self.without_front(id, at))
    }

    /// A free range without what lies before an address in it.
    fn without_front(&mut self, id: Id, at: Address) -> Id {
        let before = at - self.blocks[id].addr;
        if before == 0 {
            return id;
        }
        let arena = self.blocks[id].arena;
        self.unbin(arena, id);
        let place = self.blocks.split(id, before);
        self.bin(arena, id);
        self.bin(arena, place);
        place
    }

    /// Whether every page that is missing in the window is the shadow of a handle that lies idle, each of
    /// another.
    fn can_call_back(&mut self, lane: usize, window: &Window) -> bool {
        self.begin_survey();
        self.search += 1;
        let (mut at, to) = window.pages();
        let mut last = NONE;
        while at < to {
            let Some((id, piece, shadow)) = self.space.shadow_at(window.segment, at) else {
                let (present, until) = self.space.stretch(window.segment, at, to);
                if !present.is_some_and(|(id, _)| self.space.count_in(id, self.search)) {
                    return false;
                }
                at = until;
                continue;
            };
            // Mostly the same range as the one before.
            if last == NONE || !self.blocks[last].holds(piece.at) {
                let Some(block) = self.holder(piece.segment, piece.at) else { return false };
                last = block;
            }
            let block = &self.blocks[last];
            let owner = lane_of(block.arena);
            let idle = block.state == State::Free && block.end() >= piece.at + piece.size;
            let own = owner == lane && self.aliases;
            let quiet = own || (!self.lanes[owner].loud && block.word <= self.marks.quiet);
            if !idle || !quiet || !self.may_take_from(owner) || !self.space.count_in(id, self.search) {
                return false;
            }
            self.space.note_idle(id, self.survey);
            at = shadow.at + piece.size;
        }
        true
    }
}
