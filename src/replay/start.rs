//! What was there before a history's first event: a history may begin late (recording was switched on in the
//! middle, or the ring buffer of `max_entries` was full and lost its oldest entries).
//!
//! Must not know: how the recording allocator splits blocks; any other allocator.
//! Invariant: whatever is freed in the history, or alive at its end, was allocated in it or is listed here.

use super::recording::{Action, BlockState, Device};
use hashbrown::HashMap;
use serde::Serialize;

/// A block that was alive before the first event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Early {
    pub address: u64,
    pub requested: u64,
    pub stream: u64,
    /// Known only if the block is still alive at the end; else 0.
    pub stack: u32,
    /// Given back before the first event, but not reusable yet.
    pub pending: bool,
}

/// The state of a device at its first event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Sorted by address.
    pub blocks: Vec<Early>,
    pub reserved: u64,
    pub oddities: Oddities,
}

/// Events that contradict those before them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Oddities {
    /// Allocations at an address that was never freed.
    pub allocated_twice: u64,
    /// Frees whose size is not the allocation's.
    pub sizes_differ: u64,
}

impl Start {
    /// Whether the history reaches back to the device's first allocation.
    pub fn is_whole(&self) -> bool {
        self.blocks.is_empty() && self.reserved == 0
    }

    /// Requested bytes in use at the first event.
    pub fn requested(&self) -> u64 {
        self.blocks.iter().filter(|block| !block.pending).map(|block| block.requested).sum()
    }
}

/// Finds out what a device held before its first event.
pub fn before(device: &Device, streams: &[u64]) -> Start {
    let mut start = Start::default();
    let stream = |number: u16| streams.get(number as usize).copied().unwrap_or(0);
    let mut live: HashMap<u64, u64> = HashMap::new();
    let mut pending: HashMap<u64, u64> = HashMap::new();
    // How far the segments' bytes fall below where they began, and where they end.
    let (mut level, mut lowest) = (0i128, 0i128);
    for event in &device.events {
        let early = |pending| Early {
            address: event.address,
            requested: event.size,
            stream: stream(event.stream),
            stack: 0,
            pending,
        };
        match event.action {
            Action::Alloc => {
                if live.insert(event.address, event.size).is_some() {
                    start.oddities.allocated_twice += 1;
                }
            }
            Action::FreeRequested => {
                match live.remove(&event.address) {
                    Some(size) => start.oddities.sizes_differ += u64::from(size != event.size),
                    None => start.blocks.push(early(false)),
                }
                pending.insert(event.address, event.size);
            }
            Action::FreeCompleted => {
                if pending.remove(&event.address).is_none() {
                    start.blocks.push(early(true));
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => level += i128::from(event.size),
            Action::SegmentFree | Action::SegmentUnmap => {
                level -= i128::from(event.size);
                lowest = lowest.min(level);
            }
            Action::Snapshot | Action::OutOfMemory => {}
        }
    }
    for segment in &device.segments {
        for block in &segment.blocks {
            let known = match block.state {
                BlockState::Allocated => live.contains_key(&block.address),
                BlockState::PendingFree => pending.contains_key(&block.address),
                BlockState::Inactive => true,
            };
            if !known {
                start.blocks.push(Early {
                    address: block.address,
                    requested: block.requested,
                    stream: segment.stream,
                    stack: block.stack,
                    pending: block.state == BlockState::PendingFree,
                });
            }
        }
    }
    start.blocks.sort_by_key(|block| block.address);
    let at_end: i128 = device.segments.iter().map(|segment| i128::from(segment.size)).sum();
    start.reserved = u64::try_from((at_end - level).max(-lowest)).unwrap_or(0);
    start
}

#[cfg(test)]
mod tests {
    use super::super::recording::{Block, Event, Segment};
    use super::*;

    fn event(action: Action, address: u64, size: u64) -> Event {
        Event { time_us: 0, address, size, stack: 0, stream: 0, action }
    }

    #[test]
    fn finds_what_was_there_before() {
        let events = vec![
            event(Action::FreeCompleted, 0x100, 10),
            event(Action::FreeRequested, 0x200, 20),
            event(Action::FreeCompleted, 0x200, 20),
            event(Action::SegmentFree, 0x9000, 4096),
            event(Action::Alloc, 0x300, 30),
        ];
        let block = |address, state| Block { address, size: 512, requested: 40, stack: 3, state };
        let segments = vec![Segment {
            address: 0x300,
            size: 8192,
            stream: 7,
            expandable: false,
            blocks: vec![
                block(0x300, BlockState::Allocated),
                block(0x500, BlockState::Allocated),
                block(0x700, BlockState::Inactive),
            ],
        }];
        let start = before(&Device { index: 0, events, segments }, &[0]);
        assert_eq!(start.reserved, 8192 + 4096);
        assert!(!start.is_whole());
        let told: Vec<_> =
            start.blocks.iter().map(|b| (b.address, b.requested, b.stack, b.pending)).collect();
        assert_eq!(told, [(0x100, 10, 0, true), (0x200, 20, 0, false), (0x500, 40, 3, false)]);
        assert_eq!(start.requested(), 60);
    }

    #[test]
    fn a_whole_history_begins_with_nothing() {
        let events = vec![event(Action::SegmentAlloc, 0x1000, 4096), event(Action::Alloc, 0x1000, 100)];
        let start = before(&Device { index: 0, events, segments: Vec::new() }, &[0]);
        assert!(start.is_whole());
    }
}
