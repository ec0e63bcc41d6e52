//! Windows: where in an arena's addresses a request could lie, and what that would take.
//!
//! A *chain* is a run of free ranges and ranges without memory. In it, every page is either *present*, or a
//! *shadow* whose handle lies idle elsewhere and can be called back for nothing, or *empty* (a handle must
//! be mapped), or *barred*: the shadow of a handle that is in use. A *window* is a part of a chain as long
//! as the request, without barred pages; the best one has the fewest empty pages.
//!
//! It chooses and moves nothing. Invariant: no handle is counted on twice in one window.

use super::block::{Id, NONE, State};
use super::segment::PAGE;
use super::{Address, Driver, Heap, kind_of, lane_of};

/// Where a request will lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub segment: u16,
    pub from: Address,
    pub to: Address,
}

impl Window {
    /// The pages that the window touches.
    pub(super) fn pages(&self) -> (Address, Address) {
        (self.from / PAGE * PAGE, self.to.next_multiple_of(PAGE))
    }
}

/// Chains are looked for among this many unmapped ranges of an arena.
const CANDIDATES: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Present,
    Shadow,
    Empty,
    /// Barred, but no work can be using the address: another handle can be mapped there.
    Stale,
    Barred,
}

/// What a new mapping and what the replacing of an old one cost, in microseconds on an H200.
const MAP: u64 = 37;
const REPLACE: u64 = 57;

/// Pages that one search looks at, at least and at most.
const LEAST_LOOKS: i64 = 1 << 11;
const MOST_LOOKS: i64 = 1 << 17;

/// One search for a window.
struct Search {
    size: u64,
    own: Address,
    /// What it costs, the room of its chain, and the window itself.
    best: Option<(u64, u64, Window)>,
    looks: i64,
}

impl<D: Driver> Heap<D> {
    /// The window of the arena that costs least; of equals the one in the smallest chain. `everywhere`: free
    /// ranges without neighbours count, too. `own` is where the same request lay before, or 0.
    pub(super) fn best_window(
        &mut self,
        arena: u16,
        size: u64,
        everywhere: bool,
        own: Address,
    ) -> Option<Window> {
        let mut search = Search { size, own, best: None, looks: 0 };
        let lists = &self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        // The chains at the ends of segments have room for anything.
        let is_last = |&&id: &&Id| self.blocks[id].next == NONE;
        let mut ids: Vec<Id> = lists.unmapped.iter().filter(is_last).copied().collect();
        ids.extend(lists.unmapped.iter().rev().take(CANDIDATES));
        if everywhere {
            ids.extend(lists.bins.at_least(&self.blocks, size).take(CANDIDATES));
        }
        let most = self.patience.clamp(LEAST_LOOKS, MOST_LOOKS);
        for id in ids {
            self.windows_around(id, &mut search);
            if search.looks > most {
                break;
            }
        }
        self.patience = (self.patience - search.looks).max(-MOST_LOOKS);
        search.best.map(|(.., window)| window)
    }

    /// The cheapest of the places where a request lay before, if it is cheaper than a new one.
    pub(super) fn best_place(&mut self, arena: u16, size: u64, places: &[Address]) -> Option<Window> {
        let mut best: Option<(u64, Window)> = None;
        for &from in places {
            let Some(segment) = self.segment_of(arena, from) else { continue };
            let window = Window { segment, from, to: from + size };
            let Some(cost) = self.cost_of(&window) else { continue };
            let Some(cost) = self.doubled(&window).map(|more| cost + more) else { continue };
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, window));
            }
        }
        let afresh = size.div_ceil(PAGE) * MAP;
        best.filter(|&(cost, _)| cost <= afresh / 100 * super::grow::var("REPAIR", 75)).map(|(_, window)| window)
    }

    /// The segment of an arena that an address lies in.
    pub(super) fn segment_of(&self, arena: u16, at: Address) -> Option<u16> {
        let segments = &self.lanes[lane_of(arena)].arenas[kind_of(arena)].segments;
        segments.iter().copied().find(|&segment| {
            let segment = &self.space.segments[segment as usize];
            (segment.base..segment.end()).contains(&at)
        })
    }

    /// What a window costs; none if it is not free.
    fn cost_of(&self, window: &Window) -> Option<u64> {
        let mut id = self.holder(window.segment, window.from)?;
        let (mut cost, mut page) = (0, window.pages().0);
        loop {
            let block = &self.blocks[id];
            let until = block.end().min(window.to);
            match block.state {
                State::Free => page = until.next_multiple_of(PAGE),
                State::Unmapped => {
                    while page < until {
                        cost += match self.page_kind(window.segment, page).0 {
                            Page::Present | Page::Shadow => 0,
                            Page::Empty => MAP,
                            Page::Stale => REPLACE,
                            Page::Barred => return None,
                        };
                        page += PAGE;
                    }
                }
                _ => return None,
            }
            if block.end() >= window.to {
                return Some(cost);
            }
            id = block.next;
            if id == NONE {
                return None;
            }
        }
    }

    fn is_open(&self, id: Id) -> bool {
        id != NONE && matches!(self.blocks[id].state, State::Free | State::Unmapped)
    }

    fn windows_around(&mut self, id: Id, search: &mut Search) {
        let (size, own) = (search.size, search.own);
        // The chain is looked at once, from its first unmapped range.
        let mut first = id;
        if self.blocks[id].state == State::Free {
            let open = |id: Id| id != NONE && self.blocks[id].state == State::Unmapped;
            if open(self.blocks[id].prev) || open(self.blocks[id].next) {
                return;
            }
        }
        while self.is_open(self.blocks[first].prev) {
            first = self.blocks[first].prev;
            if self.blocks[first].state == State::Unmapped {
                return;
            }
        }
        let segment = self.blocks[first].segment;
        let base = self.blocks[first].addr;
        let wanted = size.next_multiple_of(PAGE) / PAGE * 2 + 1;
        let steady = (1u64 << 20).saturating_sub(super::grow::var("STRAY",4) * self.strays);
        let damage = super::grow::var("DLOW",10) + (super::grow::var("DAMAGE",25) * steady >> 20);
        let replace = REPLACE + (super::grow::var("REPL",50) * steady >> 20);
        // Before every page: how many empty and barred ones there were.
        let mut sums: Vec<(u64, u64)> = vec![(0, 0)];
        let start = base / PAGE * PAGE;
        let (mut at, mut end) = (first, base);
        while self.is_open(at) {
            let block = &self.blocks[at];
            end = block.end();
            let mut page = start + (sums.len() as u64 - 1) * PAGE;
            let stop = match block.state {
                State::Unmapped => end.min(self.space.highest(segment).max(block.addr) + wanted * PAGE),
                _ => end,
            };
            while page < stop {
                let (kind, wanted) = match block.state {
                    State::Unmapped => self.page_kind(segment, page),
                    _ => (Page::Present, self.space.piece_at(segment, page).is_some_and(|(id, _)| self.space.wanted(id, self.survey))),
                };
                let (empty, barred) = sums[sums.len() - 1];
                let cost = match kind {
                    Page::Present | Page::Shadow if wanted => damage,
                    Page::Present | Page::Shadow | Page::Barred => 0,
                    Page::Empty => MAP,
                    Page::Stale if (own / PAGE * PAGE..own + size).contains(&page) => REPLACE,
                    Page::Stale => replace,
                };
                sums.push((empty + cost, barred + u64::from(kind == Page::Barred)));
                page += PAGE;
            }
            if stop < end {
                end = stop;
                break;
            }
            at = block.next;
        }
        let count = sums.len() as u64 - 1;
        search.looks += 2 * count as i64;
        let room = if super::grow::var("TIE",1)==1 { end - base } else { 0 };
        let highest = self.space.highest(segment).max(base);
        let small = super::part_of(self.space.segments[segment as usize].arena) == super::stats::SMALL;
        let mut consider = |heap: &mut Self, from: Address| {
            let Some(to) = from.checked_add(size).filter(|&to| to <= end) else { return };
            let (first, last) = ((from - start) / PAGE, (to - start).div_ceil(PAGE).min(count));
            let (before, after) = (sums[first as usize], sums[last as usize]);
            let missing = after.0 - before.0;
            if after.1 > before.1 || search.best.is_some_and(|(least, smallest, _)| (missing, room) >= (least, smallest)) {
                return;
            }
            let window = Window { segment, from, to };
            search.looks += (last - first) as i64;
            let Some(missing) = heap.doubled(&window).map(|more| missing + more) else { return };
            if search.best.is_none_or(|(least, smallest, _)| (missing, room) < (least, smallest)) {
                search.best = Some((missing, room, window));
            }
        };
        consider(self, base);
        let spaced = super::grow::var("SPACE",0)>0 && size >= super::grow::var("SPACEFROM",8<<20) && !small;
        if spaced && end > highest { consider(self, highest + (size * super::grow::var("SPACE",0) / 100).next_multiple_of(PAGE)) }
        for page in 0..count {
            if spaced && start + page*PAGE >= highest { break }
            let from = start + page * PAGE;
            if from > base {
                consider(self, from);
            }
        }
    }

    fn page_kind(&self, segment: u16, at: Address) -> (Page, bool) {
        match self.space.shadow_page(segment, at) {
            None => (Page::Empty, false),
            Some((id, _)) if self.space.is_idle(id, self.survey) => {
                (Page::Shadow, self.space.wanted(id, self.survey))
            }
            Some((_, clock)) => {
                let lane = lane_of(self.space.segments[segment as usize].arena);
                let quiet = clock <= self.lanes[lane].marks.quiet;
                (if quiet { Page::Stale } else { Page::Barred }, false)
            }
        }
    }

    /// What has to be paid on top for pages of the window that count on the same handle; none if that cannot
    /// be mended.
    pub(super) fn doubled(&mut self, window: &Window) -> Option<u64> {
        self.search += 1;
        let (from, to) = window.pages();
        for at in (from..to).step_by(PAGE as usize) {
            if let Some((id, _)) = self.space.piece_at(window.segment, at) {
                self.space.count_in(id, self.search);
            }
        }
        let (mut at, mut more) = (from, 0);
        while at < to {
            match self.space.shadow_at(window.segment, at) {
                Some((id, piece, shadow)) => {
                    if self.space.is_idle(id, self.survey) && !self.space.count_in(id, self.search) {
                        if !self.is_quiet(shadow) {
                            return None;
                        }
                        more += piece.size / PAGE * REPLACE;
                    }
                    at = shadow.at + piece.size;
                }
                None => at += PAGE,
            }
        }
        Some(more)
    }
}
