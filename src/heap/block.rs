//! The records of ranges: every byte of a segment belongs to exactly one block.
//!
//! Records lie apart from device memory, which is never touched, and are one cache line each. A block
//! knows its neighbours by address; what its other links mean depends on its state. This file knows no
//! policy. Invariant: neighbours of a segment are contiguous and sum up to the segment.

use super::{Address, Tag};

/// An index into [`Blocks`].
pub(super) type Id = u32;
pub(super) const NONE: Id = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// A record that describes nothing.
    Vacant,
    /// Addresses without memory. Whole pages.
    Unmapped,
    /// Memory that nobody has; in the arena's bins.
    Free,
    /// Handed out.
    Live,
    /// Freed, but another stream may still use it.
    Pending,
    /// Cut into slots.
    Slab,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Block {
    pub addr: Address,
    pub size: u64,
    /// Live and pending: the requested size. Free: the clock at the last free in it.
    pub word: u64,
    pub tag: Tag,
    pub prev: Id,
    pub next: Id,
    /// Free: the bin's list. Unmapped: `a` is the place in the arena's list.
    /// Live and pending: `b` is the record of other streams' uses. Slab: `b` is the slab.
    pub a: Id,
    pub b: Id,
    pub segment: u16,
    pub arena: u16,
    pub state: State,
}

const VACANT: Block = Block {
    addr: 0,
    size: 0,
    word: 0,
    tag: Tag(0, 0),
    prev: NONE,
    next: NONE,
    a: NONE,
    b: NONE,
    segment: 0,
    arena: 0,
    state: State::Vacant,
};

impl Block {
    #[inline]
    pub(super) fn end(&self) -> Address {
        self.addr + self.size
    }
}

/// All block records of a heap; vacant ones are used again first.
pub(super) struct Blocks {
    records: Vec<Block>,
    vacant: Id,
}

impl std::ops::Index<Id> for Blocks {
    type Output = Block;
    #[inline]
    fn index(&self, id: Id) -> &Block {
        &self.records[id as usize]
    }
}

impl std::ops::IndexMut<Id> for Blocks {
    #[inline]
    fn index_mut(&mut self, id: Id) -> &mut Block {
        &mut self.records[id as usize]
    }
}

impl Blocks {
    pub(super) fn new() -> Self {
        // Address space only: the pages of the table are touched as blocks come to exist.
        Blocks { records: Vec::with_capacity(1 << 18), vacant: NONE }
    }

    /// A vacant record to be filled in by the caller.
    #[inline]
    fn vacant(&mut self) -> Id {
        match self.vacant {
            NONE => {
                self.records.push(VACANT);
                (self.records.len() - 1) as Id
            }
            id => {
                self.vacant = self[id].next;
                id
            }
        }
    }

    pub(super) fn vacate(&mut self, id: Id) {
        let next = self.vacant;
        let block = &mut self[id];
        block.state = State::Vacant;
        block.next = next;
        self.vacant = id;
    }

    /// The only block of a new segment.
    pub(super) fn first(&mut self, addr: Address, size: u64, segment: u16, arena: u16, state: State) -> Id {
        let id = self.vacant();
        self[id] = Block { addr, size, segment, arena, state, ..VACANT };
        id
    }

    /// Cuts a block in two: `id` keeps the first `size` bytes, the returned block (same state and word,
    /// in no list) has the rest.
    #[inline]
    pub(super) fn split(&mut self, id: Id, size: u64) -> Id {
        let rest = self.vacant();
        let block = &mut self[id];
        let right =
            Block { addr: block.addr + size, size: block.size - size, prev: id, a: NONE, b: NONE, ..*block };
        block.size = size;
        block.next = rest;
        let after = right.next;
        self[rest] = right;
        if after != NONE {
            self[after].prev = rest;
        }
        rest
    }

    /// Adds the right neighbour `next` (in no list) to `id`; its record becomes vacant.
    #[inline]
    pub(super) fn absorb(&mut self, id: Id, next: Id) {
        let Block { size, word, next: after, .. } = self[next];
        let block = &mut self[id];
        block.size += size;
        block.word = block.word.max(word);
        block.next = after;
        if after != NONE {
            self[after].prev = id;
        }
        self.vacate(next);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Block)> {
        self.records.iter().enumerate().map(|(id, block)| (id as Id, block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_cache_line() {
        assert_eq!(std::mem::size_of::<Block>(), 64);
    }

    #[test]
    fn split_and_absorb_are_inverse() {
        let mut blocks = Blocks::new();
        let a = blocks.first(0, 100, 0, 0, State::Free);
        let b = blocks.split(a, 60);
        let c = blocks.split(a, 20);
        assert_eq!((blocks[a].end(), blocks[c].addr, blocks[c].end(), blocks[b].addr), (20, 20, 60, 60));
        assert_eq!((blocks[c].next, blocks[b].prev), (b, c));
        blocks.absorb(c, b);
        blocks.absorb(a, c);
        assert_eq!((blocks[a].size, blocks[a].next), (100, NONE));
    }
}
