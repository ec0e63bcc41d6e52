//! Free ranges in bins: best fit in constant time.
//!
//! Two levels, as in TLSF: 32 bins per doubling of the size, and a bitmap of the bins that are not empty.
//! The bin of the size and the next non-empty one are looked through, at most [`LOOKS`] blocks, for the
//! smallest that fits (the lowest address among equals); that is the true best fit unless a bin is long.
//! It knows block records, no pages. Invariant: a block is in the list of the bin of its size.

use super::block::{Blocks, Id, NONE};

/// Sizes are multiples of this. Bytes.
pub(super) const GRAIN: u64 = 512;
const GRAIN_SHIFT: u32 = GRAIN.trailing_zeros();
const LEVELS: usize = 40;
const SUBS: usize = 32;
const LOOKS: usize = 8;

pub(super) struct Bins {
    levels: u64,
    subs: [u32; LEVELS],
    heads: Box<[Id]>,
}

#[inline]
fn bin_of(size: u64) -> (usize, usize) {
    let units = size >> GRAIN_SHIFT;
    if units < 32 {
        return (0, units as usize);
    }
    let log = units.ilog2();
    ((log - 4) as usize, ((units >> (log - 5)) & 31) as usize)
}

impl Bins {
    pub(super) fn new() -> Self {
        Bins { levels: 0, subs: [0; LEVELS], heads: vec![NONE; LEVELS * SUBS].into_boxed_slice() }
    }

    #[inline]
    pub(super) fn insert(&mut self, blocks: &mut Blocks, id: Id) {
        let (level, sub) = bin_of(blocks[id].size);
        let head = std::mem::replace(&mut self.heads[level * SUBS + sub], id);
        let block = &mut blocks[id];
        block.a = NONE;
        block.b = head;
        if head != NONE {
            blocks[head].a = id;
        } else {
            self.subs[level] |= 1 << sub;
            self.levels |= 1 << level;
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, blocks: &mut Blocks, id: Id) {
        let (before, after, size) = (blocks[id].a, blocks[id].b, blocks[id].size);
        if after != NONE {
            blocks[after].a = before;
        }
        if before != NONE {
            blocks[before].b = after;
            return;
        }
        let (level, sub) = bin_of(size);
        self.heads[level * SUBS + sub] = after;
        if after == NONE {
            self.subs[level] &= !(1 << sub);
            if self.subs[level] == 0 {
                self.levels &= !(1 << level);
            }
        }
    }

    /// The smallest free block of at least `size` bytes, as far as the bins tell.
    #[inline]
    pub(super) fn best(&self, blocks: &Blocks, size: u64) -> Option<Id> {
        let (level, sub) = bin_of(size);
        if self.subs[level] & (1 << sub) != 0
            && let Some(found) = self.smallest(blocks, self.heads[level * SUBS + sub], size)
        {
            return Some(found);
        }
        let (level, sub) = self.above(level, sub)?;
        self.smallest(blocks, self.heads[level * SUBS + sub], size)
    }

    /// The next bin after (`level`, `sub`) that is not empty.
    #[inline]
    fn above(&self, level: usize, sub: usize) -> Option<(usize, usize)> {
        let rest = self.subs[level] & (u32::MAX << sub << 1);
        if rest != 0 {
            return Some((level, rest.trailing_zeros() as usize));
        }
        let levels = self.levels & (u64::MAX << level << 1);
        if levels == 0 {
            return None;
        }
        let level = levels.trailing_zeros() as usize;
        Some((level, self.subs[level].trailing_zeros() as usize))
    }

    #[inline]
    fn smallest(&self, blocks: &Blocks, head: Id, size: u64) -> Option<Id> {
        let mut best: Option<(u64, u64, Id)> = None;
        let mut id = head;
        for _ in 0..LOOKS {
            let block = &blocks[id];
            if block.size >= size {
                let this = (block.size, block.addr, id);
                if best.is_none_or(|best| this < best) {
                    best = Some(this);
                }
            }
            id = block.b;
            if id == NONE {
                return best.map(|best| best.2);
            }
        }
        // A long bin: go on only until something fits at all.
        while best.is_none() && id != NONE {
            if blocks[id].size >= size {
                return Some(id);
            }
            id = blocks[id].b;
        }
        best.map(|best| best.2)
    }

    /// Every free block of at least `size` bytes, smaller bins first.
    pub(super) fn at_least<'a>(&'a self, blocks: &'a Blocks, size: u64) -> impl Iterator<Item = Id> + 'a {
        let (level, sub) = bin_of(size);
        let mut bin =
            if self.subs[level] & (1 << sub) != 0 { Some((level, sub)) } else { self.above(level, sub) };
        let mut id = bin.map_or(NONE, |(level, sub)| self.heads[level * SUBS + sub]);
        std::iter::from_fn(move || {
            loop {
                if id == NONE {
                    let (level, sub) = bin?;
                    bin = self.above(level, sub);
                    let (level, sub) = bin?;
                    id = self.heads[level * SUBS + sub];
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::block::State;

    #[test]
    fn best_fit_is_the_smallest_that_fits() {
        let mut blocks = Blocks::new();
        let mut bins = Bins::new();
        let sizes: Vec<u64> = (0..200u64).map(|i| (1 + i * i * 37 % 5000) * GRAIN).collect();
        let mut addr = 0;
        for &size in &sizes {
            let id = blocks.first(addr, size, 0, 0, State::Free);
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
    fn emptied_bins_are_not_found() {
        let mut blocks = Blocks::new();
        let mut bins = Bins::new();
        let ids: Vec<Id> =
            (1..100).map(|i| blocks.first(i << 32, i * 40 * GRAIN, 0, 0, State::Free)).collect();
        for &id in &ids {
            bins.insert(&mut blocks, id);
        }
        for &id in &ids {
            bins.remove(&mut blocks, id);
        }
        assert_eq!(bins.best(&blocks, GRAIN), None);
        assert_eq!((bins.levels, bins.subs), (0, [0; LEVELS]));
    }
}
