//! Lanes and arenas: who may take memory from where.
//!
//! A *lane* is one stream of one pool; it has two *arenas*, for small and for large requests. An arena
//! owns segments, the bins of their free ranges, the list of their ranges without memory, and the lists of
//! slabs with free slots. Memory of a lane is handed only to its stream, unless it is lent or moved.
//! It knows no driver. Invariant: an arena's number is twice its lane's number plus its kind.

use super::Stream;
use super::block::{Blocks, Id, NONE, State};
use super::fit::Bins;
use super::slab::SlabId;
use super::stream::Marks;

/// Most size classes that a configuration can give.
const CLASSES: usize = 64;

pub(super) struct Arena {
    pub bins: Bins,
    /// Ranges without memory; a block knows its place here.
    pub unmapped: Vec<Id>,
    pub segments: Vec<u16>,
    /// Per class, the slabs with free slots.
    pub slabs: [SlabId; CLASSES],
    /// Per class, an empty slab that is kept so that one block coming and going does not make and drop it.
    pub empty: [SlabId; CLASSES],
    /// Blocks, slots and slabs that are not free, pending ones included.
    pub taken: u64,
}

impl Arena {
    fn new() -> Self {
        Arena {
            bins: Bins::new(),
            unmapped: Vec::new(),
            segments: Vec::new(),
            slabs: [NONE; CLASSES],
            empty: [NONE; CLASSES],
            taken: 0,
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
    pub arenas: [Arena; 2],
    pub marks: Marks,
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
            arenas: [Arena::new(), Arena::new()],
            marks: Marks::default(),
            last_free: 0,
            loud: false,
            in_use: true,
        }
    }
}
