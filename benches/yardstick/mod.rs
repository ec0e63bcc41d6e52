//! PyTorch's own caching algorithm, as a yardstick: the native one and the one of expandable segments.
//!
//! After c10/cuda/CUDACachingAllocator.cpp of torch 2.11, in our words: blocks of 512 bytes and more in sorted
//! sets per pool, best fit by (stream, size, address); small requests (up to 1 MiB) in segments of 2 MiB, up to
//! 10 MiB in segments of 20 MiB, others in segments of their own rounded to 2 MiB; a block is split if 512
//! bytes (small) or more than 1 MiB (large) would be left; neighbours join when freed. With expandable segments
//! there is one segment per stream and pool, which grows at its end by pieces of 2 or 20 MiB and of which the
//! free end is used up first. Streams' events, garbage collection and rounding by powers of two (off by
//! default) are left out; so is what follows a failed `cudaMalloc`.
//!
//! Must not know our heap. Invariant: live blocks do not overlap.

use std::collections::BTreeSet;

use hashbrown::HashMap;
use strandline::driver::{Address, Driver, Result, Stream};

const MIB: u64 = 1 << 20;
const SMALL: u64 = MIB;
/// Addresses of one expandable segment, in bytes: more than any job here needs.
const EXPANDABLE: u64 = 512 << 30;

#[derive(Clone, Copy)]
struct Block {
    size: u64,
    stream: u64,
    small: bool,
    free: bool,
    prev: Option<Address>,
    next: Option<Address>,
}

struct Expandable {
    end: Address,
    last: Option<Address>,
}

/// PyTorch's algorithm over one of our drivers.
pub struct Yardstick<D> {
    driver: D,
    expandable: bool,
    blocks: HashMap<Address, Block, foldhash::fast::FixedState>,
    /// Free blocks, large and small: stream, size, address.
    free: [BTreeSet<(u64, u64, Address)>; 2],
    segments: HashMap<(u64, bool), Expandable, foldhash::fast::FixedState>,
    pub reserved: u64,
    pub reserved_peak: u64,
}

impl<D: Driver> Yardstick<D> {
    pub fn new(driver: D, expandable: bool) -> Self {
        Yardstick {
            driver,
            expandable,
            blocks: HashMap::default(),
            free: [BTreeSet::new(), BTreeSet::new()],
            segments: HashMap::default(),
            reserved: 0,
            reserved_peak: 0,
        }
    }

    /// # Errors
    /// If the driver has no memory left.
    #[inline]
    pub fn malloc(&mut self, size: u64, stream: Stream) -> Result<Address> {
        let size = size.max(1).next_multiple_of(512);
        let small = size <= SMALL;
        let pool = &self.free[usize::from(small)];
        let found = pool.range((stream.0, size, 0)..).next().copied().filter(|found| found.0 == stream.0);
        // Torch does not hand out a part of a large block that leaves too much, but only if a limit is set.
        let at = match found {
            Some((_, _, at)) => at,
            None if self.expandable => self.expand(size, stream.0, small)?,
            None => self.segment(size, stream.0, small)?,
        };
        self.take(at, size);
        Ok(at)
    }

    /// # Panics
    /// If no live block starts there.
    #[inline]
    pub fn free(&mut self, at: Address) {
        let mut at = at;
        let mut block = self.blocks[&at];
        assert!(!block.free, "{at:#x} is free already");
        if let Some((next, after)) = block.next.map(|next| (next, self.blocks[&next])).filter(|(_, b)| b.free)
        {
            self.free[usize::from(after.small)].remove(&(after.stream, after.size, next));
            self.blocks.remove(&next);
            (block.size, block.next) = (block.size + after.size, after.next);
        }
        if let Some((prev, before)) =
            block.prev.map(|prev| (prev, self.blocks[&prev])).filter(|(_, b)| b.free)
        {
            self.free[usize::from(before.small)].remove(&(before.stream, before.size, prev));
            self.blocks.remove(&at);
            (block.size, block.prev, at) = (block.size + before.size, before.prev, prev);
        }
        block.free = true;
        self.place(at, block);
    }

    /// Enters a block, and into its neighbour and its segment where it lies.
    #[inline]
    fn place(&mut self, at: Address, block: Block) {
        match block.next {
            Some(next) => {
                if let Some(next) = self.blocks.get_mut(&next) {
                    next.prev = Some(at);
                }
            }
            None if self.expandable => {
                if let Some(segment) = self.segments.get_mut(&(block.stream, block.small)) {
                    segment.last = Some(at);
                }
            }
            None => {}
        }
        if block.free {
            self.free[usize::from(block.small)].insert((block.stream, block.size, at));
        }
        self.blocks.insert(at, block);
    }

    /// Hands out the beginning of a free block.
    #[inline]
    fn take(&mut self, at: Address, size: u64) {
        let mut block = self.blocks[&at];
        self.free[usize::from(block.small)].remove(&(block.stream, block.size, at));
        let left = block.size - size;
        let split = if block.small || self.expandable { left >= 512 } else { left > SMALL };
        block.free = false;
        if split {
            let rest = Block { size: left, free: true, prev: Some(at), ..block };
            self.place(at + size, rest);
            (block.size, block.next) = (size, Some(at + size));
        }
        self.place(at, block);
    }

    fn count(&mut self, bytes: u64) {
        self.reserved += bytes;
        self.reserved_peak = self.reserved_peak.max(self.reserved);
    }

    fn segment(&mut self, size: u64, stream: u64, small: bool) -> Result<Address> {
        let bytes = match size {
            _ if small => 2 * MIB,
            ..10_485_760 => 20 * MIB,
            _ => size.next_multiple_of(2 * MIB),
        };
        let at = self.driver.allocate(bytes)?;
        self.count(bytes);
        self.place(at, Block { size: bytes, stream, small, free: true, prev: None, next: None });
        Ok(at)
    }

    fn expand(&mut self, size: u64, stream: u64, small: bool) -> Result<Address> {
        let key = (stream, small);
        if !self.segments.contains_key(&key) {
            let end = self.driver.reserve(EXPANDABLE)?;
            self.segments.insert(key, Expandable { end, last: None });
        }
        let (end, last) = (self.segments[&key].end, self.segments[&key].last);
        let tail = last.map(|at| (at, self.blocks[&at])).filter(|(_, block)| block.free);
        let piece = if small { 2 * MIB } else { 20 * MIB };
        let missing = size - tail.map_or(0, |(_, block)| block.size);
        let bytes = missing.next_multiple_of(piece);
        for at in (end..end + bytes).step_by(piece as usize) {
            let handle = self.driver.create(piece)?;
            self.driver.map(at, piece, handle)?;
        }
        self.count(bytes);
        if let Some(segment) = self.segments.get_mut(&key) {
            segment.end += bytes;
        }
        let (at, block) = match tail {
            Some((at, block)) => {
                self.free[usize::from(small)].remove(&(stream, block.size, at));
                (at, Block { size: block.size + bytes, ..block })
            }
            None => {
                if let Some(last) = last.and_then(|last| self.blocks.get_mut(&last)) {
                    last.next = Some(end);
                }
                (end, Block { size: bytes, stream, small, free: true, prev: last, next: None })
            }
        };
        self.place(at, block);
        Ok(at)
    }
}
