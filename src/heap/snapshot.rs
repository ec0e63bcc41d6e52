//! The heap as others may see it: blocks, and segments in address order.
//!
//! A run of mapped memory without a gap is one segment here, as in PyTorch's snapshots: its blocks are
//! contiguous, in order, and sum up to it. It only reads.

use super::block::{Block, Id, NONE, State};
use super::segment::PAGE;
use super::slab::SlotState;
use super::stats::LARGE;
use super::{Address, Driver, Heap, PoolId, Stream, Tag, lane_of, part_of};

/// What a block is to its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Handed out.
    Allocated,
    /// Freed, but other streams may still use it.
    PendingFree,
    /// Nobody's.
    Inactive,
}

/// One block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    pub address: Address,
    /// Bytes of the block.
    pub size: u64,
    /// Bytes asked for; 0 for an inactive block.
    pub requested: u64,
    /// The stream that it was handed to; of an inactive block, the segment's.
    pub stream: Stream,
    pub tag: Tag,
    pub pool: PoolId,
    pub state: BlockState,
}

/// A run of mapped memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    pub address: Address,
    /// Bytes; the sum of the blocks.
    pub size: u64,
    pub stream: Stream,
    pub pool: PoolId,
    /// For requests above 1 MiB.
    pub large: bool,
    /// Memory is mapped into it as it grows.
    pub expandable: bool,
    /// In address order, without gaps.
    pub blocks: Vec<BlockInfo>,
}

impl SegmentInfo {
    /// Bytes in blocks that are handed out.
    pub fn allocated(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Allocated { block.size } else { 0 })
    }

    /// Bytes in blocks that are handed out or pending.
    pub fn active(&self) -> u64 {
        self.sum(|block| if block.state == BlockState::Inactive { 0 } else { block.size })
    }

    /// Bytes asked for in blocks that are handed out or pending.
    pub fn requested(&self) -> u64 {
        self.sum(|block| block.requested)
    }

    fn sum(&self, of: impl Fn(&BlockInfo) -> u64) -> u64 {
        self.blocks.iter().map(of).sum()
    }
}

/// What [`Heap::walk`] comes by.
#[derive(Debug)]
pub enum Seen {
    /// A run of mapped memory begins; its blocks follow, and its size is their sum.
    Segment(SegmentInfo),
    /// The next block of that run.
    Block(BlockInfo),
}

impl<D: Driver> Heap<D> {
    /// The block that an address lies in, handed out or pending; an address inside one counts.
    pub fn block_at(&self, address: Address) -> Option<BlockInfo> {
        // The table is walked only inside mapped memory: elsewhere the next block may be far away.
        let mut segments = self.space.segments.iter();
        let mapped = segments.position(|segment| segment.in_use && segment.contains(address))?;
        if !self.space.segments[mapped].plain {
            self.space.piece_at(mapped as u16, address)?;
        }
        let id = self.holder(mapped as u16, address)?;
        match self.blocks[id].state {
            State::Live | State::Pending => Some(self.block_info(id)),
            State::Slab => {
                let id = self.blocks[id].b;
                let slab = &self.slabs[id];
                let slot = slab.slot_of(address);
                let taken = slab.meta.get(slot).is_some_and(|meta| meta.state() != SlotState::Free);
                taken.then(|| self.slot_info(id, slot))
            }
            _ => None,
        }
    }

    /// Calls `f` with every block that is handed out or pending, in no particular order.
    pub fn for_each_live(&self, mut f: impl FnMut(BlockInfo)) {
        for (id, block) in self.blocks.iter() {
            if matches!(block.state, State::Live | State::Pending) {
                f(self.block_info(id));
            }
        }
        for (id, slab) in self.slabs.iter() {
            for (slot, meta) in slab.meta.iter().enumerate() {
                if meta.state() != SlotState::Free {
                    f(self.slot_info(id, slot));
                }
            }
        }
    }

    /// Every run of mapped memory with its blocks, by address.
    pub fn segments(&self) -> Vec<SegmentInfo> {
        let mut all: Vec<SegmentInfo> = Vec::new();
        self.walk(|seen| match seen {
            Seen::Segment(segment) => all.push(segment),
            Seen::Block(block) => {
                let Some(segment) = all.last_mut() else { return };
                segment.size += block.size;
                segment.blocks.push(block);
            }
        });
        all.sort_by_key(|segment| segment.address);
        all
    }

    /// Calls `f` with every run of mapped memory, in no particular order, and after each with its blocks in
    /// the order of their addresses. Allocates nothing: this is how a heap of a million blocks is looked at
    /// while its user waits.
    pub fn walk(&self, mut f: impl FnMut(Seen)) {
        for segment in self.space.segments.iter().filter(|segment| segment.in_use) {
            let lane = &self.lanes[lane_of(segment.arena)];
            let mut inside = false;
            let mut id = segment.first;
            while id != NONE {
                let block = &self.blocks[id];
                if block.state == State::Unmapped {
                    inside = false;
                } else {
                    if !inside {
                        f(Seen::Segment(SegmentInfo {
                            address: block.addr,
                            size: 0,
                            stream: lane.stream,
                            pool: self.pools.list[lane.pool as usize].id,
                            large: part_of(segment.arena) == LARGE,
                            expandable: !segment.plain,
                            blocks: Vec::new(),
                        }));
                    }
                    inside = true;
                    self.each_block(id, &mut |block| f(Seen::Block(block)));
                }
                id = block.next;
            }
        }
    }

    fn each_block(&self, id: Id, f: &mut impl FnMut(BlockInfo)) {
        let block = &self.blocks[id];
        if block.state != State::Slab {
            return f(self.block_info(id));
        }
        let slab = &self.slabs[block.b];
        let mut gap = slab.base;
        for slot in 0..slab.meta.len() {
            if slab.meta[slot].state() == SlotState::Free {
                continue;
            }
            let info = self.slot_info(block.b, slot);
            if info.address > gap {
                f(self.inactive(block, gap, info.address));
            }
            gap = info.address + info.size;
            f(info);
        }
        if block.end() > gap {
            f(self.inactive(block, gap, block.end()));
        }
    }

    fn inactive(&self, block: &Block, from: Address, to: Address) -> BlockInfo {
        let lane = &self.lanes[lane_of(block.arena)];
        BlockInfo {
            address: from,
            size: to - from,
            requested: 0,
            stream: lane.stream,
            tag: Tag::default(),
            pool: self.pools.list[lane.pool as usize].id,
            state: BlockState::Inactive,
        }
    }

    pub(super) fn block_info(&self, id: Id) -> BlockInfo {
        let block = &self.blocks[id];
        let state = match block.state {
            State::Live => BlockState::Allocated,
            State::Pending => BlockState::PendingFree,
            _ => return self.inactive(block, block.addr, block.end()),
        };
        BlockInfo {
            requested: block.word,
            stream: self.stream_of(super::Handed::Block(id)),
            tag: block.tag,
            state,
            ..self.inactive(block, block.addr, block.end())
        }
    }

    pub(super) fn slot_info(&self, id: u32, slot: usize) -> BlockInfo {
        let slab = &self.slabs[id];
        let (at, meta) = (slab.address(slot), &slab.meta[slot]);
        BlockInfo {
            requested: meta.requested(),
            stream: self.stream_of(super::Handed::Slot(id, slot as u16)),
            tag: meta.tag,
            state: match meta.state() {
                SlotState::Live => BlockState::Allocated,
                SlotState::Pending => BlockState::PendingFree,
                SlotState::Free => BlockState::Inactive,
            },
            ..self.inactive(&self.blocks[slab.block], at, at + u64::from(slab.size))
        }
    }

    /// Bytes of whole pages that lie idle: what [`trim`](Self::trim) could give back, once quiet.
    pub fn idle(&self) -> u64 {
        let mut bytes = 0;
        for (index, lane) in self.lanes.iter().enumerate().filter(|(_, lane)| lane.in_use) {
            if !self.may_take_from(index) {
                continue;
            }
            for id in lane.arenas.iter().flat_map(|arena| arena.bins.at_least(&self.blocks, PAGE)) {
                let block = &self.blocks[id];
                let first = block.addr.next_multiple_of(PAGE);
                bytes += (block.end() / PAGE * PAGE).saturating_sub(first);
            }
        }
        bytes
    }
}
