//! The records of ranges: every byte of a segment belongs to exactly one block.
//!
//! Records lie apart from device memory, which is never touched, and are one cache line each. A block
//! knows its neighbours by address; what its other links mean depends on its state. This file knows no
//! policy. Invariant: neighbours of a segment are contiguous and sum up to the segment.

use std::hint::select_unpredictable;

use super::{Address, Tag};

/// An index into [`Blocks`].
pub(super) type Id = u32;
/// No block, and in other tables nothing either. Its record is nobody's: links may be written there, so that a
/// list's end needs no branch.
pub(super) const NONE: Id = 0;

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
    /// Free: the first half is the bin.
    pub tag: Tag,
    pub prev: Id,
    pub next: Id,
    /// Free: the bin's list. Unmapped: `a` is the place in the arena's list.
    /// Live and pending: `b` is the record of other streams' uses. Slab: `b` is the slab.
    pub a: Id,
    pub b: Id,
    pub segment: u16,
    /// The segment's region.
    pub region: u16,
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
    region: 0,
    arena: 0,
    state: State::Vacant,
};

impl Block {
    #[inline(always)]
    pub(super) fn end(&self) -> Address {
        self.addr + self.size
    }

    pub(super) fn holds(&self, at: Address) -> bool {
        at.wrapping_sub(self.addr) < self.size
    }

    /// Hands the block out; where it lies.
    #[inline(always)]
    pub(super) fn fill(&mut self, requested: u64, tag: Tag) -> (Address, u16) {
        (self.state, self.word, self.tag, self.a, self.b) = (State::Live, requested, tag, NONE, NONE);
        (self.addr, self.region)
    }
}

/// All block records of a heap; vacant ones are used again first.
pub(super) struct Blocks {
    records: Vec<Block>,
    vacant: Id,
}

impl std::ops::Index<Id> for Blocks {
    type Output = Block;
    #[inline(always)]
    fn index(&self, id: Id) -> &Block {
        &self.records[id as usize]
    }
}

impl std::ops::IndexMut<Id> for Blocks {
    #[inline(always)]
    fn index_mut(&mut self, id: Id) -> &mut Block {
        &mut self.records[id as usize]
    }
}

impl Blocks {
    pub(super) fn new() -> Self {
        // Address space only: the pages of the table are touched as blocks come to exist.
        let mut records = Vec::with_capacity(1 << 18);
        records.push(VACANT);
        Blocks { records, vacant: NONE }
    }

    /// The records by their IDs: for who needs several.
    #[inline(always)]
    pub(super) fn records(&self) -> &[Block] {
        &self.records
    }

    #[inline(always)]
    pub(super) fn records_mut(&mut self) -> &mut [Block] {
        &mut self.records
    }

    /// The records, at least one of them vacant, and the first vacant one's ID.
    #[inline(always)]
    pub(super) fn with_vacant(&mut self) -> (&mut [Block], &mut Id) {
        if self.vacant == NONE {
            let id = self.another();
            self.vacate(id);
        }
        (&mut self.records, &mut self.vacant)
    }

    /// The records and the first vacant one's ID.
    #[inline(always)]
    pub(super) fn parts_mut(&mut self) -> (&mut [Block], &mut Id) {
        (&mut self.records, &mut self.vacant)
    }

    /// A vacant record to be filled in by the caller.
    #[inline(always)]
    fn vacant(&mut self) -> Id {
        match self.vacant {
            NONE => self.another(),
            id => {
                self.vacant = self[id].next;
                id
            }
        }
    }

    #[cold]
    fn another(&mut self) -> Id {
        self.records.push(VACANT);
        (self.records.len() - 1) as Id
    }

    #[inline(always)]
    pub(super) fn vacate(&mut self, id: Id) {
        let next = self.vacant;
        let block = &mut self[id];
        block.state = State::Vacant;
        block.next = next;
        self.vacant = id;
    }

    /// The only block of a new segment, which is given with its region.
    pub(super) fn first(
        &mut self,
        addr: Address,
        size: u64,
        (segment, region): (u16, u16),
        arena: u16,
        state: State,
    ) -> Id {
        let id = self.vacant();
        self[id] = Block { addr, size, segment, region, arena, state, ..VACANT };
        id
    }

    /// Cuts a block in two: `id` keeps the first `size` bytes, the returned block (same state and word,
    /// in no list) has the rest.
    pub(super) fn split(&mut self, id: Id, size: u64) -> Id {
        let state = self[id].state;
        let (records, vacant) = self.with_vacant();
        split(records, vacant, id, size, state)
    }

    /// Adds the right neighbour `next` (in no list) to `id`; its record becomes vacant.
    #[inline(always)]
    pub(super) fn absorb(&mut self, id: Id, next: Id) {
        let records = self.records_mut();
        let Block { size, word, next: after, .. } = records[next as usize];
        let block = &mut records[id as usize];
        block.size += size;
        block.word = block.word.max(word);
        block.next = after;
        records[after as usize].prev = id;
        self.vacate(next);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Block)> {
        self.records.iter().enumerate().map(|(id, block)| (id as Id, block))
    }
}

/// [`Blocks::split`] with the parts at hand; a record must be vacant. Nothing is read that may have been written
/// just before in pieces of another size: the processor would wait.
#[inline(always)]
pub(super) fn split(records: &mut [Block], vacant: &mut Id, id: Id, size: u64, state: State) -> Id {
    let rest = *vacant;
    *vacant = records[rest as usize].next;
    let block = &mut records[id as usize];
    let (addr, left) = (block.addr + size, block.size - size);
    let right = Block { addr, size: left, tag: Tag(0, 0), state, prev: id, a: NONE, b: NONE, ..*block };
    block.size = size;
    block.next = rest;
    records[right.next as usize].prev = rest;
    records[rest as usize] = right;
    rest
}

/// Makes a block free, and one with the neighbours that are given (in no list, and not free after `clock`),
/// without a branch; the whole.
#[inline(always)]
pub(super) fn join(
    records: &mut [Block],
    vacant: &mut Id,
    id: Id,
    (left, right): (bool, bool),
    clock: u64,
) -> Id {
    let Block { prev, next, size, .. } = records[id as usize];
    let (before, after) = (&records[prev as usize], &records[next as usize]);
    let of = |is: bool, n: u64| select_unpredictable(is, n, 0);
    let size = size + of(left, before.size) + of(right, after.size);
    let end = select_unpredictable(right, after.next, next);
    let whole = select_unpredictable(left, prev, id);
    // The records that are not needed any more, or nobody's.
    let gone = [select_unpredictable(right, next, NONE), select_unpredictable(left, id, NONE)];
    for gone in gone {
        let record = &mut records[gone as usize];
        record.state = State::Vacant;
        record.next = *vacant;
        *vacant = select_unpredictable(gone == NONE, *vacant, gone);
    }
    records[end as usize].prev = whole;
    let block = &mut records[whole as usize];
    (block.size, block.word, block.next, block.state) = (size, clock, end, State::Free);
    whole
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
        let a = blocks.first(0, 100, (0, 0), 0, State::Free);
        let b = blocks.split(a, 60);
        let c = blocks.split(a, 20);
        assert_eq!((blocks[a].end(), blocks[c].addr, blocks[c].end(), blocks[b].addr), (20, 20, 60, 60));
        assert_eq!((blocks[c].next, blocks[b].prev), (b, c));
        blocks.absorb(c, b);
        blocks.absorb(a, c);
        assert_eq!((blocks[a].size, blocks[a].next), (100, NONE));
    }

    #[test]
    fn a_block_is_joined_with_the_neighbours_that_are_given() {
        for (left, right) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut blocks = Blocks::new();
            let all = blocks.first(0, 4000, (0, 0), 0, State::Free);
            let middle = blocks.split(all, 1000);
            let after = blocks.split(middle, 1000);
            let end = blocks.split(after, 1000);
            blocks[middle].state = State::Live;
            let (records, vacant) = blocks.parts_mut();
            let whole = join(records, vacant, middle, (left, right), 7);
            let size = 1000 * (1 + u64::from(left) + u64::from(right));
            assert_eq!(whole, if left { all } else { middle });
            let Block { addr, size: same, word, prev, next, state, .. } = blocks[whole];
            assert_eq!((addr, same, word, state), (1000 * u64::from(!left), size, 7, State::Free));
            assert_eq!((prev, next), (if left { NONE } else { all }, if right { end } else { after }));
            assert_eq!(blocks[next].prev, whole);
            let vacant = blocks.iter().skip(1).filter(|(_, block)| block.state == State::Vacant).count();
            assert_eq!(vacant, usize::from(left) + usize::from(right));
            // They are used again first.
            for _ in 0..vacant {
                assert!(blocks.vacant() <= end);
            }
            assert!(blocks.vacant() > end);
        }
    }
}
