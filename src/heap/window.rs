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

impl<D: Driver> Heap<D> {
    /// The window of the arena that needs the fewest new mappings; of equals the lowest of the first chain.
    pub(super) fn best_window(&mut self, arena: u16, size: u64, free_too: bool, own: Address) -> Option<Window> {
        let unmapped = &self.lanes[lane_of(arena)].arenas[kind_of(arena)].unmapped;
        let mut ids: Vec<Id> = unmapped.iter().take(CANDIDATES).copied().collect();
        if free_too {
            ids.extend(self.lanes[lane_of(arena)].arenas[kind_of(arena)].bins.at_least(&self.blocks, size));
        }
        let mut best: Option<(u64, u64, Window)> = None;
        for id in ids {
            self.windows_around(id, size, own, &mut best);
        }
        best.map(|(.., window)| window)
    }

    fn is_open(&self, id: Id) -> bool {
        id != NONE && matches!(self.blocks[id].state, State::Free | State::Unmapped)
    }

    fn windows_around(&mut self, id: Id, size: u64, own: Address, best: &mut Option<(u64, u64, Window)>) {
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
                    _ => (Page::Present, self.space.piece_at(segment, page).is_some_and(|(id, _)| self.space.wanted(id, self.survey).is_some())),
                };
                let (empty, barred) = sums[sums.len() - 1];
                let cost = match kind {
                    Page::Present | Page::Shadow if wanted => super::grow::var("DAMAGE", 30),
                    Page::Present | Page::Shadow | Page::Barred => 0,
                    Page::Empty => MAP,
                    Page::Stale if (own / PAGE * PAGE..own + size).contains(&page) => REPLACE,
                    Page::Stale => super::grow::var("REPLACE",REPLACE),
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
        let room = if super::grow::var("TIE",1)==1 { end - base } else { 0 };
        let highest = self.space.highest(segment).max(base);
        let small = super::part_of(self.space.segments[segment as usize].arena) == super::stats::SMALL;
        let mut consider = |heap: &mut Self, from: Address| {
            let Some(to) = from.checked_add(size).filter(|&to| to <= end) else { return };
            let (first, last) = ((from - start) / PAGE, (to - start).div_ceil(PAGE).min(count));
            let (before, after) = (sums[first as usize], sums[last as usize]);
            let missing = after.0 - before.0;
            if after.1 > before.1 || best.is_some_and(|(least, smallest, _)| (missing, room) >= (least, smallest)) {
                return;
            }
            let window = Window { segment, from, to };
            if heap.is_distinct(&window) {
                *best = Some((missing, room, window));
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
        match self.space.shadow_at(segment, at) {
            None => (Page::Empty, false),
            Some((id, ..)) if self.space.is_idle(id, self.survey) => {
                (Page::Shadow, self.space.wanted(id, self.survey).is_some())
            }
            Some((_, _, shadow)) if self.is_quiet(shadow) => (Page::Stale, false),
            Some(_) => (Page::Barred, false),
        }
    }

    /// Whether every page of the window is another's.
    pub(super) fn is_distinct(&mut self, window: &Window) -> bool {
        self.search += 1;
        let (from, to) = window.pages();
        let pages = || (from..to).step_by(PAGE as usize);
        for at in pages() {
            if let Some((id, _)) = self.space.piece_at(window.segment, at) {
                self.space.count_in(id, self.search);
            }
        }
        let mut at = from;
        while at < to {
            match self.space.shadow_at(window.segment, at) {
                Some((id, piece, shadow)) => {
                    if self.space.is_idle(id, self.survey) && !self.space.count_in(id, self.search) {
                        return false;
                    }
                    at = shadow.at + piece.size;
                }
                None => at += PAGE,
            }
        }
        true
    }
}
