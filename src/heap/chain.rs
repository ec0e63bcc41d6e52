//! Chains: free ranges and ranges without memory that follow each other, as sums of what their pages cost.
//!
//! It knows pages and costs, neither blocks nor handles. Invariant: runs follow each other without gaps, and
//! the last one is empty and stands behind the last page.

use super::Address;
use super::block::Id;
use super::segment::PAGE;

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

/// What pages cost, how many of them are barred and how many stale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub cost: u64,
    pub barred: u64,
    pub stale: u64,
    /// Pages of handles that a rival wants.
    pub wanted: u64,
}

/// Pages of a chain that follow each other and are of one kind.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Its first page; pages are counted from the chain's first.
    first: u64,
    /// Each of its pages.
    each: Sum,
    /// All pages of the chain before it.
    before: Sum,
}

impl Run {
    /// All pages of the chain before `page`, which lies in the run or behind it.
    fn until(&self, page: u64) -> Sum {
        let (Sum { cost, barred, stale, wanted }, count) = (self.before, page - self.first);
        Sum {
            cost: cost + count * self.each.cost,
            barred: barred + count * self.each.barred,
            stale: stale + count * self.each.stale,
            wanted: wanted + count * self.each.wanted,
        }
    }
}

/// Where a chain lies.
pub(super) struct Span {
    pub segment: u16,
    /// Its first range.
    pub first: Id,
    pub from: Address,
    pub to: Address,
    /// It reaches to the end of its segment, where there is room for anything.
    pub last: bool,
}

impl Span {
    pub(super) fn room(&self) -> u64 {
        self.to - self.from
    }
}

/// The pages of a chain.
#[derive(Default)]
pub(super) struct Chain {
    segment: u16,
    from: Address,
    to: Address,
    runs: Vec<Run>,
}

impl Chain {
    /// Begins with another chain; its pages are not known yet.
    pub(super) fn begin(&mut self, span: &Span) {
        (self.segment, self.from, self.to) = (span.segment, span.from, span.to);
        self.runs.clear();
        self.runs.push(Run { first: 0, each: Sum::default(), before: Sum::default() });
    }

    /// Adds pages of one kind, up to the address `until`.
    pub(super) fn extend(&mut self, until: Address, each: Sum) {
        let page = (until - self.start()) / PAGE;
        let Some(last) = self.runs.last_mut() else { return };
        let before = Run { each, ..*last }.until(page);
        last.each = each;
        if let [.., previous, last] = self.runs[..]
            && previous.each == last.each
        {
            self.runs.pop();
        }
        self.runs.push(Run { first: page, each: Sum::default(), before });
    }

    pub(super) fn runs(&self) -> usize {
        self.runs.len()
    }

    pub(super) fn room(&self) -> u64 {
        self.to - self.from
    }

    /// The address of its first page.
    fn start(&self) -> Address {
        self.from / PAGE * PAGE
    }

    /// The last page on which a window of `size` bytes may begin; none if there is no room for it.
    pub(super) fn last_place(&self, size: u64) -> Option<u64> {
        self.room().checked_sub(size).map(|rest| (self.from - self.start() + rest) / PAGE)
    }
}

/// A place in a chain: the runs that a window begins and ends in. It moves on only.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    begins: usize,
    ends: usize,
}

impl Place {
    /// The window of `size` bytes that begins on a page, and what its pages amount to.
    pub(super) fn window(&mut self, chain: &Chain, page: u64, size: u64) -> (Window, Sum) {
        let from = (chain.start() + page * PAGE).max(chain.from);
        let end = (from + size - chain.start()).div_ceil(PAGE);
        let reach = |run: &mut usize, page: u64| {
            while chain.runs.get(*run + 1).is_some_and(|next| next.first <= page) {
                *run += 1;
            }
            chain.runs[*run].until(page)
        };
        let (before, after) = (reach(&mut self.begins, page), reach(&mut self.ends, end));
        let sum = Sum {
            cost: after.cost - before.cost,
            barred: after.barred - before.barred,
            stale: after.stale - before.stale,
            wanted: after.wanted - before.wanted,
        };
        (Window { segment: chain.segment, from, to: from + size }, sum)
    }

    /// The next page at which a window begins with another run, or from which on it ends in another: until then
    /// costs change evenly.
    pub(super) fn turns(&self, chain: &Chain, page: u64, size: u64) -> u64 {
        if page == 0 && chain.from > chain.start() {
            return 1;
        }
        let pages = size.div_ceil(PAGE);
        let begins = chain.runs.get(self.begins + 1).map_or(u64::MAX, |run| run.first);
        let mut ends = chain.runs[self.ends..].iter().map(|run| run.first.saturating_sub(pages));
        begins.min(ends.find(|&end| end > page).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sum() -> impl Strategy<Value = Sum> {
        prop_oneof![
            (0..3u64).prop_map(|cost| Sum { cost: 10 * cost, wanted: cost / 2, ..Sum::default() }),
            Just(Sum { barred: 1, ..Sum::default() }),
            Just(Sum { cost: 57, stale: 1, ..Sum::default() }),
        ]
    }

    proptest! {
        #[test]
        fn sums_are_those_of_the_pages(
            runs in prop::collection::vec((sum(), 1..9u64), 1..20),
            offset in 0..4u64,
            size in 1..40u64,
        ) {
            let (quarter, base) = (PAGE / 4, 7 * PAGE);
            let pages: Vec<Sum> = runs.iter().flat_map(|&(each, count)| vec![each; count as usize]).collect();
            let (from, to) = (base + offset * quarter, base + pages.len() as u64 * PAGE);
            let mut chain = Chain::default();
            chain.begin(&Span { segment: 3, first: 0, from, to, last: false });
            let mut at = base;
            for (each, count) in runs {
                at += count * PAGE;
                chain.extend(at, each);
            }
            let size = size * quarter;
            let highest = chain.last_place(size);
            prop_assert_eq!(highest.is_none(), to - from < size);
            let mut place = Place::default();
            let mut costs = Vec::new();
            for page in 0..highest.map_or(0, |highest| highest + 1) {
                let (window, sum) = place.window(&chain, page, size);
                prop_assert!(window.from >= from && window.to == window.from + size && window.to <= to);
                let touched = ((window.from - base) / PAGE) as usize..(window.to - base).div_ceil(PAGE) as usize;
                let total = |of: fn(&Sum) -> u64| pages[touched.clone()].iter().map(of).sum::<u64>();
                prop_assert_eq!(sum, Sum {
                    cost: total(|sum| sum.cost),
                    barred: total(|sum| sum.barred),
                    stale: total(|sum| sum.stale),
                    wanted: total(|sum| sum.wanted),
                });
                costs.push((sum.cost, place.turns(&chain, page, size)));
            }
            // Between two turns no cost is below both.
            for (page, &(cost, turn)) in costs.iter().enumerate() {
                let turn = (turn as usize).min(costs.len() - 1);
                let least = cost.min(costs[turn].0);
                let mut between = costs.iter().take(turn).skip(page);
                prop_assert!(between.all(|&(other, _)| other >= least), "{costs:?}");
            }
        }
    }
}
