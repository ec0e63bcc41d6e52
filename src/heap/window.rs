//! Windows: where in an arena's addresses a request could lie, and what that would cost.
//!
//! A *chain* is a run of free ranges and ranges without memory. In it, every page is either *present*, or
//! the *shadow* of a handle that lies idle elsewhere and can be called back for nothing, or *empty* (a handle
//! must be mapped), or *stale*: the shadow of a handle that is in use, to be unmapped first. A *window* is a
//! part of a chain as long as the request. The cheapest is chosen; pages that a rival will want count, too,
//! because the rival will have to pay for others then.
//!
//! It chooses and moves nothing. Invariant: what is unmapped for a window is quiet.

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

/// Chains are looked for among this many ranges of an arena.
const CANDIDATES: usize = 512;
/// Pages that one search looks at, at least and at most.
const LEAST_LOOKS: i64 = 1 << 11;
const MOST_LOOKS: i64 = 1 << 17;

/// What it costs to map a handle, and to unmap another before: microseconds on an H200.
const MAP: u64 = 37;
pub(super) const REPLACE: u64 = 57;
/// What it costs on top to replace a mapping that a rival may still want: in a job that never repeats itself,
/// and how much more in one that always does.
const ROBBED: [u64; 2] = [0, 50];
/// The same for a page that a rival wants.
const WANTED: [u64; 2] = [5, 30];

/// A place is mended until that has cost so many times what a new one would.
const MENDED: u64 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Present {
        wanted: bool,
    },
    Shadow {
        wanted: bool,
    },
    Empty,
    Stale,
    /// Stale, but work may still be using the address.
    Barred,
}

/// Where the same request lay before, or 0, and what was paid so far to mend that place.
#[derive(Clone, Copy, Default)]
pub(super) struct Own {
    pub at: Address,
    pub paid: u64,
}

/// What pages cost.
#[derive(Clone, Copy)]
struct Prices {
    wanted: u64,
    robbed: u64,
}

/// One search for a window.
struct Search {
    size: u64,
    /// The pages where the same request lay before.
    own: (Address, Address),
    paid: u64,
    prices: Prices,
    /// What it costs, the room of its chain, and the window itself.
    best: Option<(u64, u64, Window)>,
    looks: i64,
}

/// The pages of a chain, as sums.
struct Chain {
    segment: u16,
    from: Address,
    to: Address,
    /// Before every page: the cost so far, how many are barred, and how many stale.
    sums: Vec<(u64, u64, u64)>,
}

impl<D: Driver> Heap<D> {
    /// The window of the arena that costs least; of equals the one in the smallest chain. `own` tells where
    /// the same request lay before.
    pub(super) fn best_window(&mut self, arena: u16, size: u64, own: Own) -> Option<Window> {
        let steady = self.steadiness();
        let price = |[least, more]: [u64; 2]| least + ((more * steady) >> 10);
        let mut search = Search {
            size,
            own: (own.at / PAGE * PAGE, own.at + size),
            paid: own.paid,
            prices: Prices { wanted: price(WANTED), robbed: price(ROBBED) },
            best: None,
            looks: 0,
        };
        let lists = &self.lanes[lane_of(arena)].arenas[kind_of(arena)];
        // The chains at the ends of segments have room for anything.
        let is_last = |&&id: &&Id| self.blocks[id].next == NONE;
        let mut ids: Vec<Id> = lists.unmapped.iter().filter(is_last).copied().collect();
        ids.extend(lists.unmapped.iter().rev().take(CANDIDATES));
        if self.lanes[lane_of(arena)].trail.is_some() {
            // What is free already may still be the wrong place.
            ids.extend(lists.bins.at_least(&self.blocks, size).take(CANDIDATES));
        }
        let most = self.patience.clamp(LEAST_LOOKS, MOST_LOOKS);
        for id in ids {
            if let Some(chain) = self.chain_around(id, &search) {
                self.search_chain(&chain, &mut search);
            }
            if search.looks > most {
                break;
            }
        }
        self.patience = (self.patience - search.looks).max(-MOST_LOOKS);
        search.best.map(|(.., window)| window)
    }

    fn is(&self, id: Id, state: State) -> bool {
        id != NONE && self.blocks[id].state == state
    }

    fn is_open(&self, id: Id) -> bool {
        self.is(id, State::Free) || self.is(id, State::Unmapped)
    }

    /// The chain that a range belongs to; none unless the range is its first one without memory (or it has
    /// none), so that every chain is looked at once.
    fn chain_around(&self, id: Id, search: &Search) -> Option<Chain> {
        let block = &self.blocks[id];
        if block.state == State::Free
            && (self.is(block.prev, State::Unmapped) || self.is(block.next, State::Unmapped))
        {
            return None;
        }
        let mut first = id;
        while self.is_open(self.blocks[first].prev) {
            first = self.blocks[first].prev;
            if self.blocks[first].state == State::Unmapped {
                return None;
            }
        }
        let (segment, from) = (self.blocks[first].segment, self.blocks[first].addr);
        // Behind the last mapping everything is empty: as much as the request takes is enough.
        let enough = search.size.next_multiple_of(PAGE) + PAGE;
        let highest = self.space.highest(segment);
        let mut chain = Chain { segment, from, to: from, sums: vec![(0, 0, 0)] };
        let (mut page, mut at) = (from / PAGE * PAGE, first);
        while self.is_open(at) {
            let block = &self.blocks[at];
            let unmapped = block.state == State::Unmapped;
            let end = block.end();
            chain.to = if unmapped { end.min(highest.max(block.addr) + enough) } else { end };
            while page < chain.to {
                let (cost, barred, stale) = chain.sums[chain.sums.len() - 1];
                let kind = self.page_kind(segment, page, unmapped);
                let more = match kind {
                    Page::Present { wanted: true } | Page::Shadow { wanted: true } => search.prices.wanted,
                    Page::Present { .. } | Page::Shadow { .. } | Page::Barred => 0,
                    Page::Empty => MAP,
                    Page::Stale if (search.own.0..search.own.1).contains(&page) => REPLACE,
                    Page::Stale => REPLACE + search.prices.robbed,
                };
                let (barred, stale) =
                    (barred + u64::from(kind == Page::Barred), stale + u64::from(kind == Page::Stale));
                chain.sums.push((cost + more, barred, stale));
                page += PAGE;
            }
            if chain.to < end {
                break;
            }
            at = block.next;
        }
        Some(chain)
    }

    fn search_chain(&mut self, chain: &Chain, search: &mut Search) {
        let start = chain.from / PAGE * PAGE;
        let count = chain.sums.len() as u64 - 1;
        let room = chain.to - chain.from;
        search.looks += 2 * count as i64;
        for page in 0..count {
            let from = (start + page * PAGE).max(chain.from);
            let Some(to) = from.checked_add(search.size).filter(|&to| to <= chain.to) else { return };
            let last = (to - start).div_ceil(PAGE);
            let (before, after) = (chain.sums[page as usize], chain.sums[last as usize]);
            let mended = if after.2 > before.2 { search.paid / MENDED } else { 0 };
            let cost = after.0 - before.0 + mended;
            let better =
                |cost: u64| search.best.is_none_or(|(least, small, _)| (cost, room) < (least, small));
            if after.1 > before.1 || !better(cost) {
                continue;
            }
            let window = Window { segment: chain.segment, from, to };
            let doubled = self.doubled(&window);
            if let Some(cost) = doubled.map(|more| cost + more).filter(|&cost| better(cost)) {
                search.best = Some((cost, room, window));
            }
            search.looks += (last - page) as i64;
        }
    }

    fn page_kind(&self, segment: u16, at: Address, unmapped: bool) -> Page {
        if !unmapped {
            let wanted = |id| self.space.is_wanted(id, self.survey);
            return Page::Present {
                wanted: self.space.piece_at(segment, at).is_some_and(|(id, _)| wanted(id)),
            };
        }
        match self.space.shadow_page(segment, at) {
            None => Page::Empty,
            Some((id, _)) if self.space.is_idle(id, self.survey) => {
                Page::Shadow { wanted: self.space.is_wanted(id, self.survey) }
            }
            Some((_, clock)) if self.is_quiet_since(clock) => Page::Stale,
            Some(_) => Page::Barred,
        }
    }

    /// What has to be paid on top where pages of the window count on the same handle; none if that cannot be
    /// mended.
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
            let Some((id, piece, shadow)) = self.space.shadow_at(window.segment, at) else {
                at += PAGE;
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
