//! Free ranges in bins: best fit in constant time.
//!
//! 64 bins per doubling of the size, and a bitmap of those that are not empty. The bin of the size and the next
//! non-empty one are looked through, at most [`LOOKS`] blocks, for the smallest that fits (the lowest address
//! among equals); that is the true best fit unless a bin is long. What lies before the end of the memory can
//! grow, so it is as large as need be, and taken last: it has a bin of its own. It knows block records, no
//! pages. Invariant: a block is in the list of the bin of its size or in that of the ends, and knows which.

use std::hint::select_unpredictable;

use super::block::{Block, Blocks, Id, NONE, State, join, split};

/// Sizes are multiples of this. Bytes.
pub(super) const GRAIN: u64 = 512;
const WORDS: usize = 64;
/// More than any size needs.
const BINS: usize = WORDS * 64;
const LOOKS: usize = 8;
/// A bin of no size.
const NO_BIN: usize = BINS - 1;
/// The bin of what lies before the end of an arena's memory.
const END: usize = BINS - 2;

pub(super) struct Bins {
    /// Which bins are not empty.
    bits: [u64; WORDS],
    /// Which of their words were ever used.
    words: u64,
    heads: [Id; BINS],
}

/// The bin of a size: the binary exponent and six more bits, as the number has them in floating point. The bins
/// of the first 64 multiples of the grain have one size each.
#[inline(always)]
fn bin_of(size: u64) -> usize {
    const EXPONENT_AND_SIX: u32 = f64::MANTISSA_DIGITS - 1 - 6;
    const FIRST: usize = ((GRAIN as f64).to_bits() >> EXPONENT_AND_SIX) as usize;
    let bits = (size as i64 as f64).to_bits();
    ((bits >> EXPONENT_AND_SIX) as usize).wrapping_sub(FIRST) % BINS
}

/// The bin of a free block: whether it lies before the end is a coin's toss, too.
#[inline(always)]
fn bin_for(records: &[Block], id: Id) -> usize {
    let block = &records[id as usize];
    let after = &records[block.next as usize];
    let ends = (after.state == State::Unmapped) & (after.next == NONE);
    select_unpredictable(ends, END, bin_of(block.size))
}

impl Bins {
    pub(super) fn new() -> Self {
        Bins { bits: [0; WORDS], words: 0, heads: [NONE; BINS] }
    }

    #[inline(always)]
    pub(super) fn insert(&mut self, blocks: &mut Blocks, id: Id) {
        let records = blocks.records_mut();
        self.link(records, bin_for(records, id), id);
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, blocks: &mut Blocks, id: Id) {
        self.unlink(blocks.records_mut(), id);
    }

    /// Takes the first `size` bytes of a free block out of its bin; `id` is what they are then, and `f` is called
    /// with its record. If that is not all, the rest is back in its bin; it is returned, with what `f` returned.
    #[inline(always)]
    pub(super) fn take<T>(
        &mut self,
        blocks: &mut Blocks,
        id: Id,
        size: u64,
        f: impl FnOnce(&mut Block) -> T,
    ) -> (Id, T) {
        let (records, vacant) = blocks.with_vacant();
        self.unlink(records, id);
        let left = records[id as usize].size - size;
        let mut rest = NONE;
        if left != 0 {
            rest = split(records, vacant, id, size, State::Free);
            self.link(records, bin_for(records, rest), rest);
        }
        (rest, f(&mut records[id as usize]))
    }

    /// Makes a block free and puts it into a bin, joined with its free neighbours; the whole. Which of them are
    /// free is a coin's toss: there is no branch.
    #[inline(always)]
    pub(super) fn give(&mut self, blocks: &mut Blocks, id: Id, clock: u64) -> Id {
        let (records, vacant) = blocks.parts_mut();
        let Block { prev, next, .. } = records[id as usize];
        let left = records[prev as usize].state == State::Free;
        let right = records[next as usize].state == State::Free;
        self.unlink_if(right, records, next);
        self.unlink_if(left, records, prev);
        let whole = join(records, vacant, id, (left, right), clock);
        self.link(records, bin_for(records, whole), whole);
        whole
    }

    #[inline(always)]
    fn link(&mut self, records: &mut [Block], bin: usize, id: Id) {
        let head = std::mem::replace(&mut self.heads[bin], id);
        let block = &mut records[id as usize];
        block.tag.0 = bin as u64;
        (block.a, block.b) = (NONE, head);
        records[head as usize].a = id;
        self.bits[bin / 64] |= 1 << (bin % 64);
        self.words |= 1 << (bin / 64);
    }

    #[inline(always)]
    fn unlink(&mut self, records: &mut [Block], id: Id) {
        let Block { a: before, b: after, tag, .. } = records[id as usize];
        self.tie(records, tag.0 as usize % BINS, before, after);
    }

    /// Takes a block out of its bin if `is` says so; if not, the bin that has no blocks is written to.
    #[inline(always)]
    fn unlink_if(&mut self, is: bool, records: &mut [Block], id: Id) {
        let Block { a, b, tag, .. } = records[id as usize];
        let (before, after) = (select_unpredictable(is, a, NONE), select_unpredictable(is, b, NONE));
        self.tie(records, select_unpredictable(is, tag.0 as usize % BINS, NO_BIN), before, after);
    }

    /// Ties together what lies before and after a block of a bin's list.
    #[inline(always)]
    fn tie(&mut self, records: &mut [Block], bin: usize, before: Id, after: Id) {
        records[after as usize].a = before;
        records[before as usize].b = after;
        let head = select_unpredictable(before == NONE, after, self.heads[bin]);
        self.heads[bin] = head;
        // Without waiting for the head.
        self.bits[bin / 64] &= !(u64::from(before | after == NONE) << (bin % 64));
    }

    /// The smallest free block of at least `size` bytes, as far as the bins tell.
    #[inline(always)]
    pub(super) fn best(&self, blocks: &Blocks, size: u64) -> Option<Id> {
        let records = blocks.records();
        let own = bin_of(size);
        let bin = self.from(own)?;
        let mut found = smallest(records, self.heads[bin], size);
        // Whatever lies in a bin above its own is large enough, but for the ends.
        if found == NONE && bin == own {
            found = smallest(records, self.heads[self.from(own + 1)?], size);
        }
        (found != NONE).then_some(found)
    }

    /// The first bin from `bin` on that is not empty.
    #[inline(always)]
    fn from(&self, bin: usize) -> Option<usize> {
        let mut word = bin / 64 % WORDS;
        let mut bits = self.bits[word] & (u64::MAX << (bin % 64));
        let mut words = self.words & (u64::MAX << word << 1);
        while bits == 0 {
            if words == 0 {
                return None;
            }
            word = words.trailing_zeros() as usize;
            words &= words - 1;
            bits = self.bits[word];
        }
        Some((word * 64 + bits.trailing_zeros() as usize) % BINS)
    }

    /// Whether a free block knows its bin.
    pub(super) fn is_known(blocks: &Blocks, id: Id) -> bool {
        blocks[id].tag.0 as usize == bin_for(blocks.records(), id)
    }

    /// Every free block of at least `size` bytes, smaller bins first.
    pub(super) fn at_least<'a>(&'a self, blocks: &'a Blocks, size: u64) -> impl Iterator<Item = Id> + 'a {
        let mut bin = self.from(bin_of(size));
        let mut id = bin.map_or(NONE, |bin| self.heads[bin]);
        std::iter::from_fn(move || {
            loop {
                if id == NONE {
                    bin = self.from(bin? + 1);
                    id = self.heads[bin?];
                }
                let this = id;
                id = blocks[this].b;
                if blocks[this].size >= size {
                    return Some(this);
                }
            }
        })
    }
}

/// The smallest block of at least `size` bytes of a list, as far as it is looked through.
#[inline(always)]
fn smallest(records: &[Block], head: Id, size: u64) -> Id {
    let (mut best, mut least) = (NONE, (u64::MAX, 0));
    let mut id = head;
    for _ in 0..LOOKS {
        let block = &records[id as usize];
        let this = (block.size, block.addr);
        if block.size >= size && this < least {
            (best, least) = (id, this);
        }
        id = block.b;
        if id == NONE {
            return best;
        }
    }
    // A long list: go on only until something fits at all.
    while best == NONE && id != NONE {
        let block = &records[id as usize];
        if block.size >= size {
            return id;
        }
        id = block.b;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_fit_is_the_smallest_that_fits() {
        let mut blocks = Blocks::new();
        let mut bins = Bins::new();
        let sizes: Vec<u64> = (0..200u64).map(|i| (1 + i * i * 37 % 5000) * GRAIN).collect();
        let mut addr = 0;
        for &size in &sizes {
            let id = blocks.first(addr, size, (0, 0), 0, State::Free);
            addr += size;
            bins.insert(&mut blocks, id);
        }
        for want in (1..5100u64).map(|units| units * GRAIN) {
            let expected = sizes.iter().copied().filter(|&size| size >= want).min();
            assert_eq!(bins.best(&blocks, want).map(|id| blocks[id].size), expected);
            assert_eq!(bins.at_least(&blocks, want).count(), sizes.iter().filter(|&&s| s >= want).count());
        }
    }

    #[test]
    fn what_can_grow_is_taken_last() {
        let (mut blocks, mut bins) = (Blocks::new(), Bins::new());
        let all = blocks.first(0, 100 * GRAIN, (0, 0), 0, State::Unmapped);
        // Free, live, free at the end, no memory.
        let (hole, end) = (all, blocks.split(all, 50 * GRAIN));
        let live = blocks.split(hole, 40 * GRAIN);
        blocks.split(end, 20 * GRAIN);
        blocks[live].state = State::Live;
        for id in [hole, end] {
            blocks[id].state = State::Free;
            bins.insert(&mut blocks, id);
        }
        assert!([hole, end].into_iter().all(|id| Bins::is_known(&blocks, id)));
        let best = |bins: &Bins, units: u64| bins.best(&blocks, units * GRAIN);
        assert_eq!([1, 20, 40].map(|units| best(&bins, units)), [Some(hole); 3]);
        assert_eq!(best(&bins, 41), None);
        assert_eq!(bins.at_least(&blocks, GRAIN).collect::<Vec<_>>(), [hole, end]);
        bins.remove(&mut blocks, hole);
        let best = |bins: &Bins, units: u64| bins.best(&blocks, units * GRAIN);
        assert_eq!([1, 20, 21].map(|units| best(&bins, units)), [Some(end), Some(end), None]);
    }

    #[test]
    fn a_bin_is_a_64th_of_a_doubling() {
        let bin = |units: u64| bin_of(units * GRAIN);
        assert_eq!(bin(1), 0);
        for units in 1..128 {
            assert!(bin(units) < bin(units + 1), "{units} grains share a bin");
        }
        for log in 7..40 {
            for part in 64..128 {
                let (first, last) = (part << (log - 6), ((part + 1) << (log - 6)) - 1);
                assert_eq!((bin(first), bin(last) + 1), (bin(last), bin(last + 1)), "{part} of 2^{log}");
            }
        }
        assert!(bin(1 << 40) < BINS);
    }

    #[test]
    fn what_is_taken_in_pieces_and_given_back_is_whole_again() {
        let (mut blocks, mut bins) = (Blocks::new(), Bins::new());
        let all = blocks.first(0, 1000 * GRAIN, (0, 0), 0, State::Free);
        bins.insert(&mut blocks, all);
        let mut taken = Vec::new();
        while let Some(id) = bins.best(&blocks, (1 + taken.len() as u64) * GRAIN) {
            bins.take(&mut blocks, id, (1 + taken.len() as u64) * GRAIN, |block| block.state = State::Live);
            taken.push(id);
        }
        assert_eq!(taken.len(), 44);
        // Every third first, so that all kinds of neighbours occur.
        for (_, id) in (0..3).flat_map(|first| taken.iter().enumerate().skip(first).step_by(3)) {
            bins.give(&mut blocks, *id, 0);
        }
        let whole = bins.best(&blocks, 1000 * GRAIN).expect("one range");
        assert_eq!((blocks[whole].addr, blocks[whole].size), (0, 1000 * GRAIN));
        assert_eq!(bins.at_least(&blocks, GRAIN).count(), 1);
    }

    #[test]
    fn emptied_bins_are_not_found() {
        let mut blocks = Blocks::new();
        let mut bins = Bins::new();
        let ids: Vec<Id> =
            (1..100).map(|i| blocks.first(i << 32, i * 40 * GRAIN, (0, 0), 0, State::Free)).collect();
        for &id in &ids {
            bins.insert(&mut blocks, id);
        }
        for &id in &ids {
            bins.remove(&mut blocks, id);
        }
        assert_eq!(bins.best(&blocks, GRAIN), None);
        assert_eq!(bins.bits, [0; WORDS]);
    }
}
