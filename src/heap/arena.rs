//! Lanes and arenas: who may take memory from where.
//!
//! A *lane* is one stream of one pool; it has five *arenas*: for small, large and huge requests, for those with a planned place, and for the runs of
//! slabs. An arena
//! owns segments, the bins of their free ranges, the list of their ranges without memory, and the lists of
//! slabs with free slots. Memory of a lane is handed only to its stream, unless it is lent or moved.
//! It knows no driver. Invariant: an arena's number is eight times its lane's number plus its kind.

use super::block::{Blocks, Id, NONE, State};
use super::fit::Bins;
use super::slab::SlabId;
use super::stats::{LARGE, SMALL};
use super::trail::Trail;
use super::{SMALL_MAX, Stream};

/// Index of the arena for the largest requests. The indices of the others are those of the statistics.
///
/// Large blocks that stay (a leak, an optimizer's state) would be strewn among the huge ones that come and
/// go; every page moved from around them would leave two broken pages behind.
pub(super) const HUGE: usize = 2;
/// Index of the arena for the runs of slabs.
pub(super) const RUNS: usize = 3;
/// Index of the arena for large requests that are expected to stay.
pub(super) const KEPT: usize = 4;
/// Requests from this size on (after rounding) are huge, once pages have to be moved; before, none is.
/// Bytes.
pub(super) const HUGE_FROM: u64 = 8 << 20;

/// The arena that a block size belongs to, if blocks from `huge` bytes on are huge.
#[inline]
pub(super) fn kind_for(size: u64, huge: u64) -> usize {
    if size <= SMALL_MAX {
        SMALL
    } else if size < huge {
        LARGE
    } else {
        HUGE
    }
}

#[inline]
pub(super) fn arena_number(lane: usize, kind: usize) -> u16 {
    (lane * 8 + kind) as u16
}

#[inline]
pub(super) fn lane_of(arena: u16) -> usize {
    usize::from(arena >> 3)
}

/// The index among a lane's arenas.
#[inline]
pub(super) fn kind_of(arena: u16) -> usize {
    usize::from(arena & 7)
}

/// The part of the statistics, and the kind of region, that a kind of arena belongs to.
#[inline]
pub(super) fn part_for(kind: usize) -> usize {
    const LARGE_ONES: usize = 1 << LARGE | 1 << HUGE | 1 << KEPT;
    const { assert!(SMALL == 0 && LARGE == 1) };
    LARGE_ONES >> kind & 1
}

/// The part of the statistics that an arena counts in.
#[inline]
pub(super) fn part_of(arena: u16) -> usize {
    part_for(kind_of(arena))
}

/// Most size classes that a configuration can give.
const CLASSES: usize = 64;

pub(super) struct Arena {
    pub bins: Bins,
    /// Ranges without memory; a block knows its place here.
    pub unmapped: Vec<Id>,
    pub segments: Vec<u16>,
    /// Per class, the slabs with free slots.
    pub slabs: [SlabId; CLASSES],
    /// Per class, the slab that was empty last. While it is, it is kept, so that one block coming and going does
    /// not make and drop it.
    pub empty: [SlabId; CLASSES],
}

impl Arena {
    fn new() -> Self {
        Arena {
            bins: Bins::new(),
            unmapped: Vec::new(),
            segments: Vec::new(),
            slabs: [NONE; CLASSES],
            empty: [NONE; CLASSES],
        }
    }

    pub(super) fn add_unmapped(&mut self, blocks: &mut Blocks, id: Id) {
        blocks[id].state = State::Unmapped;
        blocks[id].a = self.unmapped.len() as Id;
        self.unmapped.push(id);
    }

    pub(super) fn remove_unmapped(&mut self, blocks: &mut Blocks, id: Id) {
        let place = blocks[id].a as usize;
        self.unmapped.swap_remove(place);
        if let Some(&moved) = self.unmapped.get(place) {
            blocks[moved].a = place as Id;
        }
    }
}

pub(super) struct Lane {
    pub stream: Stream,
    /// Index into the heap's pools; 0 is everybody's.
    pub pool: u32,
    pub arenas: [Arena; 5],
    /// Where its requests lay: once handles had to be moved.
    pub trail: Option<Box<Trail>>,
    /// Per class, the blocks of its arenas that lie outside of slabs although a slab could serve them.
    pub loose: [u32; CLASSES],
    /// The clock at the last free.
    pub last_free: u64,
    /// A released pool: its pages may be taken, but only after the whole device was waited for, because
    /// a graph runs on streams that its memory was not allocated on.
    pub loud: bool,
    /// False when nothing is left of a released pool.
    pub in_use: bool,
}

impl Lane {
    pub(super) fn new(stream: Stream, pool: u32) -> Self {
        Lane {
            stream,
            pool,
            arenas: std::array::from_fn(|_| Arena::new()),
            trail: None,
            loose: [0; CLASSES],
            last_free: 0,
            loud: false,
            in_use: true,
        }
    }
}
