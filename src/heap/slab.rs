//! Slabs: runs cut into equal slots, with one bit per slot.
//!
//! A slab is one block of an arena's segment (state `Slab`); small requests take and give back slots
//! without touching the segment. It knows slots, no streams and no pages. Invariants: a bit is set exactly
//! when its slot is free; a slab is in its class's list exactly when it has a free slot.

use super::block::{Id, NONE};
use super::{Address, Tag};

/// Runs are multiples of this and aligned to it, in bytes.
pub(super) const RUN_UNIT: u64 = 64 << 10;

/// The size of the run for slots of a size, in bytes: at least eight slots.
pub(super) fn run_for(slot: u64) -> u64 {
    if slot <= 8 << 10 {
        RUN_UNIT
    } else if slot <= 32 << 10 {
        4 * RUN_UNIT
    } else {
        8 * RUN_UNIT
    }
}

const WORDS: usize = 16;

/// An index into [`Slabs`].
pub(super) type SlabId = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    Free,
    Live,
    Pending,
}

#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub tag: Tag,
    /// The record of other streams' uses.
    pub uses: Id,
    /// The requested size, and the state in the upper bits.
    word: u32,
}

const STATE_SHIFT: u32 = 24;
const FREE_SLOT: Slot = Slot { tag: Tag(0, 0), uses: NONE, word: 0 };

impl Slot {
    #[inline]
    pub(super) fn live(requested: u64, tag: Tag) -> Self {
        Slot { tag, uses: NONE, word: requested as u32 | (SlotState::Live as u32) << STATE_SHIFT }
    }

    #[inline]
    pub(super) fn requested(&self) -> u64 {
        u64::from(self.word & ((1 << STATE_SHIFT) - 1))
    }

    #[inline]
    pub(super) fn state(&self) -> SlotState {
        match self.word >> STATE_SHIFT {
            0 => SlotState::Free,
            1 => SlotState::Live,
            _ => SlotState::Pending,
        }
    }

    #[inline]
    pub(super) fn set_state(&mut self, state: SlotState) {
        self.word = self.requested() as u32 | (state as u32) << STATE_SHIFT;
    }
}

/// What every malloc and free reads is one cache line, with the bits of the first 64 slots: most slabs have no
/// more.
#[repr(C, align(64))]
pub(super) struct Slab {
    pub base: Address,
    /// One for each slot.
    pub meta: Vec<Slot>,
    pub size: u32,
    /// 2^36 ÷ size, rounded up: division by multiplication, exact for slots of 64 bytes to 64 KiB in a run of
    /// at most 512 KiB.
    inverse: u32,
    pub prev: SlabId,
    pub next: SlabId,
    pub arena: u16,
    pub free: u16,
    /// Which words of `bits` are not 0.
    words: u16,
    pub class: u8,
    /// False for a record that waits to be used again.
    pub exists: bool,
    bits: [u64; WORDS],
    /// The block that the slab is.
    pub block: Id,
}

const INVERSE_SHIFT: u32 = 36;

/// What [`NONE`] names: links may be written there.
const NOBODYS: Slab = Slab {
    base: 0,
    meta: Vec::new(),
    size: 0,
    inverse: 0,
    block: NONE,
    prev: NONE,
    next: NONE,
    arena: 0,
    free: 0,
    words: 0,
    class: 0,
    exists: false,
    bits: [0; WORDS],
};

impl Slab {
    /// Takes the lowest free slot; the slab must have one.
    #[inline]
    pub(super) fn take(&mut self) -> usize {
        // Read as wide as it was written: else the processor would wait for what was written just before.
        let word = u32::from(self.words).trailing_zeros() as usize % WORDS;
        let bits = self.bits[word];
        let rest = bits & bits.wrapping_sub(1);
        self.bits[word] = rest;
        self.words &= !(u16::from(rest == 0) << word);
        self.free -= 1;
        word * 64 + bits.trailing_zeros() as usize
    }

    /// Takes a slot that is free.
    pub(super) fn take_this(&mut self, slot: usize) {
        let word = slot / 64 % WORDS;
        self.bits[word] &= !(1 << (slot % 64));
        self.words &= !(u16::from(self.bits[word] == 0) << word);
        self.free -= 1;
    }

    #[inline]
    pub(super) fn give(&mut self, slot: usize) {
        let word = slot / 64 % WORDS;
        self.bits[word] |= 1 << (slot % 64);
        self.words |= 1 << word;
        self.free += 1;
    }

    /// Slots that are taken.
    pub(super) fn taken(&self) -> u64 {
        self.meta.len() as u64 - u64::from(self.free)
    }

    /// The slot that an address of the run lies in; in the run's unused tail one that there is not.
    #[inline]
    pub(super) fn slot_of(&self, at: Address) -> usize {
        (((at - self.base) * u64::from(self.inverse)) >> INVERSE_SHIFT) as usize
    }

    #[inline]
    pub(super) fn address(&self, slot: usize) -> Address {
        self.base + slot as u64 * u64::from(self.size)
    }

    pub(super) fn is_free(&self, slot: usize) -> bool {
        self.bits[slot / 64] & (1 << (slot % 64)) != 0
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free == 0
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        usize::from(self.free) == self.meta.len()
    }
}

/// All slabs of a heap, and the lists of those with free slots.
pub(super) struct Slabs {
    records: Vec<Slab>,
    vacant: SlabId,
}

impl std::ops::Index<SlabId> for Slabs {
    type Output = Slab;
    #[inline]
    fn index(&self, id: SlabId) -> &Slab {
        &self.records[id as usize]
    }
}

impl std::ops::IndexMut<SlabId> for Slabs {
    #[inline]
    fn index_mut(&mut self, id: SlabId) -> &mut Slab {
        &mut self.records[id as usize]
    }
}

impl Slabs {
    pub(super) fn new() -> Self {
        Slabs { records: vec![NOBODYS], vacant: NONE }
    }

    /// A slab over the block at `base`; it is in no list yet. Records and their slots are used again.
    pub(super) fn create(&mut self, base: Address, block: Id, size: u64, arena: u16, class: usize) -> SlabId {
        let slots = (run_for(size) / size) as u16;
        let (id, mut meta) = match self.vacant {
            NONE => (self.records.len() as SlabId, Vec::new()),
            id => {
                self.vacant = self[id].next;
                (id, std::mem::take(&mut self[id].meta))
            }
        };
        meta.clear();
        meta.resize(slots as usize, FREE_SLOT);
        let mut bits = [0; WORDS];
        for (word, bits) in bits.iter_mut().enumerate() {
            let rest = usize::from(slots).saturating_sub(word * 64);
            *bits = if rest >= 64 { u64::MAX } else { (1 << rest) - 1 };
        }
        let slab = Slab {
            base,
            size: size as u32,
            inverse: (1u64 << INVERSE_SHIFT).div_ceil(size) as u32,
            free: slots,
            arena,
            class: class as u8,
            block,
            prev: NONE,
            next: NONE,
            words: ((1u32 << slots.div_ceil(64)) - 1) as u16,
            exists: true,
            bits,
            meta,
        };
        if id as usize == self.records.len() {
            self.records.push(slab);
        } else {
            self[id] = slab;
        }
        id
    }

    /// Gives an empty slab's record back; it must be in no list.
    pub(super) fn retire(&mut self, id: SlabId) {
        let next = self.vacant;
        let slab = &mut self[id];
        slab.exists = false;
        slab.next = next;
        self.vacant = id;
    }

    #[inline]
    pub(super) fn link(&mut self, head: &mut SlabId, id: SlabId) {
        let next = std::mem::replace(head, id);
        let slab = &mut self[id];
        (slab.prev, slab.next) = (NONE, next);
        self[next].prev = id;
    }

    #[inline]
    pub(super) fn unlink(&mut self, head: &mut SlabId, id: SlabId) {
        let Slab { prev, next, .. } = self[id];
        self[next].prev = prev;
        self[prev].next = next;
        if prev == NONE {
            *head = next;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SlabId, &Slab)> {
        self.records.iter().enumerate().filter(|(_, slab)| slab.exists).map(|(id, slab)| (id as SlabId, slab))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::size_class::Classes;

    #[test]
    fn every_slot_is_taken_once_and_found_again() {
        for minimum in [64, 512] {
            let classes = Classes::new(minimum);
            for class in 0..classes.count() {
                let mut slabs = Slabs::new();
                let id = slabs.create(1 << 40, 1, classes.size(class), 0, class);
                let slab = &mut slabs[id];
                for expected in 0..slab.meta.len() {
                    assert_eq!(slab.take(), expected);
                    let at = slab.address(expected);
                    assert_eq!(slab.slot_of(at), expected);
                    assert_eq!(slab.slot_of(at + u64::from(slab.size) - 1), expected);
                }
                assert!(slab.is_full() && slab.words == 0);
                let run = run_for(classes.size(class));
                assert_eq!(slab.slot_of(slab.base + run - 1), ((run - 1) / classes.size(class)) as usize);
                assert!(slab.taken() * u64::from(slab.size) <= run);
                slab.give(3);
                assert!(slab.is_free(3) && !slab.is_free(2));
                assert_eq!(slab.take(), 3);
            }
        }
    }

    #[test]
    fn what_malloc_and_free_read_is_one_cache_line() {
        assert_eq!((std::mem::offset_of!(Slab, bits), std::mem::size_of::<Slab>()), (56, 192));
    }

    #[test]
    fn a_run_wastes_little_of_its_tail() {
        let classes = Classes::new(512);
        for class in 0..classes.count() {
            let run = run_for(classes.size(class));
            let tail = run % classes.size(class);
            assert!(tail * 10 < run, "class of {} leaves {tail}", classes.size(class));
        }
    }
}
