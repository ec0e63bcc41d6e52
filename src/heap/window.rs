//! Windows: where in an arena's addresses a request could lie, and what that would cost.
//!
//! A *chain* is a run of free ranges and ranges without memory. In it, every page is either *present*, or
//! the *shadow* of a handle that lies idle elsewhere and can be called back without a call, or *empty* (a handle
//! must be mapped), or *stale*: the shadow of a handle that is in use, to be unmapped first. A *window* is a
//! part of a chain as long as the request. The cheapest is chosen; pages that a rival will want count, too,
//! because the rival will have to pay for others then.
//!
//! It chooses and moves nothing. Invariant: what is unmapped for a window is quiet.

use super::arena::KEPT;
use super::block::{Id, NONE, State};
use super::chain::{Chain, Place, Span, Sum, Window};
use super::segment::PAGE;
use super::{Address, Driver, Heap, kind_of, lane_of};

/// Chains are looked for among this many ranges of an arena.
const CANDIDATES: usize = 512;
/// What the pages that one search looks at may count for, at least and at most; a look takes a nanosecond or two.
const LEAST_LOOKS: i64 = 1 << 11;
const MOST_LOOKS: i64 = 1 << 17;
/// Looks that a range of a chain counts for, a run of its pages, and a window whose handles are counted in, with
/// one more for so many of its pages.
const LOOKS_OF_A_BLOCK: i64 = 4;
const LOOKS_OF_A_RUN: i64 = 8;
const LOOKS_OF_A_WINDOW: i64 = 16;
const PAGES_OF_A_LOOK: u64 = 4;

/// What it costs to map a handle and to unmap another before: microseconds on an H200.
pub(super) const REPLACE: u64 = 57;
/// What it costs on top to replace a mapping that a rival may still want: in a job that never repeats itself,
/// and how much more in one that always does.
const ROBBED: [u64; 2] = [0, 50];
/// The same for a page that a rival wants: more than a page of another handle costs, if there is one.
const WANTED: [u64; 2] = [5, 60];
/// The same for an idle handle that would be taken from the others for good.
const TAKEN: u64 = 37;

/// A place is mended until that has cost so many times what a new one would.
const MENDED: u64 = 3;

/// Where the same request lay before, or 0, and what was paid so far to mend that place.
#[derive(Clone, Copy, Default)]
pub(super) struct Own {
    pub at: Address,
    pub paid: u64,
}

/// Memory that a request can have without taking what a rival wants; bytes.
#[derive(Clone, Copy)]
pub(super) struct Supply {
    /// May be made anew.
    pub fresh: u64,
    /// Lies idle.
    pub unwanted: u64,
}

/// What pages cost on top.
#[derive(Clone, Copy)]
struct Prices {
    map: u64,
    wanted: u64,
    robbed: u64,
    /// A shadow whose handle would be taken from the others for good, while new memory may be made.
    taken: u64,
}

/// One search for a window.
struct Search {
    size: u64,
    /// The pages where the same request lay before.
    own: (Address, Address),
    paid: u64,
    /// Pages that can be had without taking what a rival wants.
    spare: u64,
    prices: Prices,
    /// What it costs, the room of its chain, and the window itself.
    best: Option<(u64, u64, Window)>,
    looks: i64,
}

impl<D: Driver> Heap<D> {
    /// The window of the arena that costs least; of equals the one in the smallest chain. `own` tells where
    /// the same request lay before.
    pub(super) fn best_window(&mut self, arena: u16, size: u64, own: Own, supply: Supply) -> Option<Window> {
        let steady = self.steadiness();
        let price = |[least, more]: [u64; 2]| least + ((more * steady) >> 10);
        let is_fresh = size.next_multiple_of(PAGE) <= supply.fresh;
        let mut search = Search {
            size,
            own: (own.at / PAGE * PAGE, (own.at + size).next_multiple_of(PAGE)),
            paid: own.paid,
            spare: (supply.fresh + supply.unwanted) / PAGE,
            prices: Prices {
                map: self.config.map_cost,
                wanted: price(WANTED),
                robbed: price(ROBBED),
                taken: if is_fresh && kind_of(arena) == KEPT { TAKEN } else { 0 },
            },
            best: None,
            looks: 0,
        };
        let (mut spans, mut chain) = (std::mem::take(&mut self.spans), std::mem::take(&mut self.chain));
        search.looks = self.find_spans(arena, size, &mut spans);
        // What costs nothing in a small chain spares the larger ones.
        spans.sort_by_key(Span::room);
        let most = self.patience.clamp(LEAST_LOOKS, MOST_LOOKS);
        for span in spans.drain(..) {
            if search.best.is_some_and(|(least, small, _)| least == 0 && span.room() >= small) {
                break;
            }
            if search.looks <= most || span.last || search.best.is_none() {
                self.fill_chain(&mut chain, &span, &mut search);
                self.search_chain(&chain, &mut search);
            }
        }
        (self.spans, self.chain) = (spans, chain);
        self.patience = (self.patience - search.looks).max(-MOST_LOOKS);
        search.best.map(|(.., window)| window)
    }

    /// Finds the chains of an arena that have room for a request; what that counts for.
    fn find_spans(&self, arena: u16, size: u64, spans: &mut Vec<Span>) -> i64 {
        let lists = &self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        let mut looks = 0;
        let mut add = |id| spans.extend(self.span_around(id, size, &mut looks));
        let is_last = |&&id: &&Id| self.blocks[id].next == NONE;
        // The chains at the ends of segments have room for anything.
        lists.unmapped.iter().filter(is_last).copied().for_each(&mut add);
        let others = lists.unmapped.iter().rev().filter(|id| !is_last(id));
        others.take(CANDIDATES).copied().for_each(&mut add);
        if self.lanes[lane_of(arena)].trail.is_some() {
            // What is free already may still be the wrong place.
            lists.bins.at_least(&self.blocks, size).take(CANDIDATES).for_each(&mut add);
        }
        looks
    }

    pub(super) fn is(&self, id: Id, state: State) -> bool {
        id != NONE && self.blocks[id].state == state
    }

    fn is_open(&self, id: Id) -> bool {
        self.is(id, State::Free) || self.is(id, State::Unmapped)
    }

    /// The chain that a range belongs to; none unless the range is its first one without memory (or it has
    /// none), so that every chain is looked at once, or if it has too little room.
    fn span_around(&self, id: Id, size: u64, looks: &mut i64) -> Option<Span> {
        let block = &self.blocks[id];
        if block.state == State::Free
            && (self.is(block.prev, State::Unmapped) || self.is(block.next, State::Unmapped))
        {
            return None;
        }
        let mut first = id;
        while self.is_open(self.blocks[first].prev) {
            first = self.blocks[first].prev;
            *looks += LOOKS_OF_A_BLOCK;
            if self.blocks[first].state == State::Unmapped {
                return None;
            }
        }
        let (segment, from) = (self.blocks[first].segment, self.blocks[first].addr);
        // Behind the last mapping everything is empty: as much as the request takes is enough.
        let enough = size.next_multiple_of(PAGE) + PAGE;
        let highest = self.space.highest(segment);
        let (mut at, mut to, mut last) = (first, from, false);
        while self.is_open(at) {
            let block = &self.blocks[at];
            *looks += LOOKS_OF_A_BLOCK;
            to = block.end();
            let empty = highest.max(block.addr) + enough;
            if block.state == State::Unmapped && to > empty {
                (to, last) = (empty, true);
                break;
            }
            at = block.next;
        }
        last |= at == NONE;
        (to - from >= size).then_some(Span { segment, first, from, to, last })
    }

    /// Finds out what the pages of a chain cost.
    fn fill_chain(&self, chain: &mut Chain, span: &Span, search: &mut Search) {
        chain.begin(span);
        let (mut page, mut at) = (span.from / PAGE * PAGE, span.first);
        while page < span.to {
            let block = &self.blocks[at];
            let to = block.end().min(span.to).next_multiple_of(PAGE);
            while page < to {
                let unmapped = block.state == State::Unmapped;
                let (each, until) = self.pages_at((span.segment, page), to, unmapped, search);
                page = until;
                chain.extend(page, each);
            }
            at = block.next;
        }
        search.looks += LOOKS_OF_A_RUN * chain.runs() as i64;
    }

    /// What the pages at an address of a segment cost, which are of one kind up to the address returned.
    fn pages_at(
        &self,
        (segment, at): (u16, Address),
        to: Address,
        unmapped: bool,
        search: &Search,
    ) -> (Sum, Address) {
        let Prices { map, wanted, robbed, taken } = search.prices;
        let costs = |cost| Sum { cost, ..Sum::default() };
        let (mapped, until) = self.space.stretch(segment, at, to);
        let Some((id, clock)) = mapped else { return (costs(map), until) };
        if !unmapped || self.space.is_idle(id, self.survey) {
            let is_wanted = self.space.is_wanted(id, self.survey);
            let cost = if is_wanted { wanted } else { 0 } + if unmapped { taken } else { 0 };
            return (Sum { cost, wanted: u64::from(is_wanted), ..Sum::default() }, until);
        }
        if !self.is_quiet_since(clock) {
            return (Sum { barred: 1, ..Sum::default() }, until);
        }
        let (own, end) = search.own;
        let (cost, until) = match at {
            at if at < own => (REPLACE + robbed, until.min(own)),
            at if at < end => (REPLACE, until.min(end)),
            _ => (REPLACE + robbed, until),
        };
        (Sum { cost, stale: 1, ..Sum::default() }, until)
    }

    /// Finds the best window of a chain. Costs change evenly from one page to the next but at a few: what lies
    /// between two of them is looked at only if one of them is good enough.
    fn search_chain(&mut self, chain: &Chain, search: &mut Search) {
        let room = chain.room();
        let Some(last) = chain.last_place(search.size) else { return };
        let better = |cost: u64, search: &Search| {
            search.best.is_none_or(|(least, small, _)| (cost, room) < (least, small))
        };
        let (mut place, mut page) = (Place::default(), 0);
        loop {
            let (window, sum) = place.window(chain, page, search.size);
            let (first, end) = window.pages();
            // Where nothing else is left, what is not there is taken from rivals, too.
            let robbed = ((end - first) / PAGE - sum.wanted).saturating_sub(search.spare);
            let mended = if sum.stale > 0 { search.paid / MENDED } else { 0 };
            let cost = sum.cost + robbed * search.prices.wanted + mended;
            if sum.barred == 0 && better(cost, search) {
                search.looks += LOOKS_OF_A_WINDOW + (search.size / PAGE / PAGES_OF_A_LOOK) as i64;
                let doubled = self.doubled(&window);
                if let Some(cost) = doubled.map(|more| cost + more).filter(|&cost| better(cost, search)) {
                    search.best = Some((cost, room, window));
                }
            }
            if page >= last {
                return;
            }
            let (turn, mut there) = (place.turns(chain, page, search.size).min(last), place);
            let (_, ahead) = there.window(chain, turn, search.size);
            if better(sum.cost.min(ahead.cost), search) {
                page += 1;
                search.looks += 1;
            } else {
                (page, place) = (turn, there);
            }
        }
    }

    /// What has to be paid on top where pages of the window count on the same handle; none if that cannot be
    /// mended.
    fn doubled(&mut self, window: &Window) -> Option<u64> {
        self.search += 1;
        let (from, to) = window.pages();
        let mut at = from;
        while at < to {
            let (mapped, until) = self.space.stretch(window.segment, at, to);
            if let Some((id, _)) = mapped
                && self.space.piece_at(window.segment, at).is_some()
            {
                self.space.count_in(id, self.search);
            }
            at = until;
        }
        let (mut at, mut more) = (from, 0);
        while at < to {
            let Some((id, piece, shadow)) = self.space.shadow_at(window.segment, at) else {
                at = self.space.stretch(window.segment, at, to).1;
                continue;
            };
            if self.space.is_idle(id, self.survey) && !self.space.count_in(id, self.search) {
                if !self.is_quiet(shadow) {
                    return None;
                }
                more += piece.size / PAGE * REPLACE;
            }
            at = shadow.at + piece.size;
        }
        Some(more)
    }
}
