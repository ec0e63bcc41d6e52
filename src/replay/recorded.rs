//! The figures of the allocator that made the recording: its peaks, from its own events.
//!
//! torch's histories tell requested sizes, not block sizes. Those follow from its rules for splitting
//! (`c10/cuda/CUDACachingAllocator.cpp`) applied to the recorded addresses.
//!
//! Must not know: any allocator but the recorded one.
//! Invariant: requested and reserved are exact for what the history tells; active is exact while every
//! block lies where the rules say, else (`active_exact` is false) at least the rounded sizes.

use super::recording::{Action, Device, Settings};
use super::start::Start;
use hashbrown::HashMap;
use serde::Serialize;
use std::collections::BTreeMap;

const SMALLEST: u64 = 512;
const SMALL: u64 = 1 << 20;

/// Peaks of one device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Recorded {
    pub requested_peak: u64,
    /// Block sizes, until no stream works on the block any more.
    pub active_peak: u64,
    pub active_exact: bool,
    pub reserved_peak: u64,
    pub allocations: u64,
    /// How often the recorded allocator asked the driver for memory or gave it back.
    pub driver_calls: u64,
    pub out_of_memory: u64,
}

#[derive(Clone, Copy)]
struct Piece {
    size: u64,
    free: bool,
    /// Begins a segment: never merged with what lies below.
    first: bool,
}

/// The recorded allocator's blocks, by address.
struct Pieces<'a> {
    settings: &'a Settings,
    pieces: BTreeMap<u64, Piece>,
    /// Bytes of each block in use.
    active: HashMap<u64, u64>,
    exact: bool,
}

/// Computes the recorded figures of a device.
pub fn figures(device: &Device, start: &Start, settings: &Settings) -> Recorded {
    let mut pieces =
        Pieces { settings, pieces: BTreeMap::new(), active: HashMap::new(), exact: start.is_whole() };
    let mut recorded = Recorded::default();
    let (mut requested, mut reserved) = (start.requested(), start.reserved);
    let mut active = 0u64;
    let mut live: HashMap<u64, u64> = HashMap::new();
    for block in &start.blocks {
        let size = round(block.requested, settings);
        pieces.active.insert(block.address, size);
        active = active.saturating_add(size);
        if !block.pending {
            live.insert(block.address, block.requested);
        }
    }
    (recorded.requested_peak, recorded.active_peak, recorded.reserved_peak) = (requested, active, reserved);
    for event in &device.events {
        match event.action {
            Action::Alloc => {
                let replaced = live.insert(event.address, event.size).unwrap_or(0);
                requested = requested.saturating_sub(replaced).saturating_add(event.size);
                active = active.saturating_add(pieces.alloc(event.address, event.size));
                recorded.requested_peak = recorded.requested_peak.max(requested);
                recorded.active_peak = recorded.active_peak.max(active);
                recorded.allocations += 1;
            }
            Action::FreeRequested => {
                requested = requested.saturating_sub(live.remove(&event.address).unwrap_or(0))
            }
            Action::FreeCompleted => active = active.saturating_sub(pieces.free(event.address)),
            Action::SegmentAlloc | Action::SegmentMap => {
                reserved = reserved.saturating_add(event.size);
                recorded.reserved_peak = recorded.reserved_peak.max(reserved);
                recorded.driver_calls += 1;
                pieces.grow(event.address, event.size, event.action == Action::SegmentAlloc);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                reserved = reserved.saturating_sub(event.size);
                recorded.driver_calls += 1;
                pieces.shrink(event.address, event.size);
            }
            Action::OutOfMemory => recorded.out_of_memory += 1,
            Action::Snapshot => {}
        }
    }
    if device.events.is_empty() {
        // Only the end is known: block sizes are told.
        let blocks = device.segments.iter().flat_map(|segment| &segment.blocks);
        recorded.active_peak = blocks
            .filter(|block| block.state != super::recording::BlockState::Inactive)
            .map(|block| block.size)
            .sum();
        pieces.exact = true;
    }
    recorded.active_exact = pieces.exact;
    recorded
}

/// The size that a request is rounded to.
fn round(size: u64, settings: &Settings) -> u64 {
    if size < SMALLEST {
        return SMALLEST;
    }
    // The entry of the power of two (in MiB) at or below the size, bounded by the first and last.
    let power = 1 << (63 - (size >> 20).max(1).leading_zeros());
    let rounding = &settings.roundup_power2_divisions;
    let entry = rounding.iter().rev().find(|(known, _)| *known <= power).or(rounding.first());
    if let Some((_, divisions)) = entry
        && *divisions > 1
        && size > SMALLEST.saturating_mul(*divisions)
    {
        let below = 1u64 << (63 - size.leading_zeros());
        if size == below {
            return size;
        }
        let part = (below / divisions.next_power_of_two()).max(1);
        return size.checked_next_multiple_of(part).unwrap_or(size);
    }
    size.checked_next_multiple_of(SMALLEST).unwrap_or(size)
}

impl Pieces<'_> {
    /// A block was handed out at `address`; returns its bytes.
    fn alloc(&mut self, address: u64, requested: u64) -> u64 {
        let rounded = round(requested, self.settings);
        let size = match self.pieces.get_mut(&address) {
            Some(piece) if piece.free && piece.size >= rounded => {
                let rest = piece.size - rounded;
                let split = if rounded <= SMALL || self.settings.expandable_segments {
                    rest >= SMALLEST
                } else {
                    rest > SMALL && self.settings.max_split_size.is_none_or(|most| rounded < most)
                };
                piece.free = false;
                if split {
                    piece.size = rounded;
                    self.pieces.insert(
                        address.wrapping_add(rounded),
                        Piece { size: rest, free: true, first: false },
                    );
                    rounded
                } else {
                    piece.size
                }
            }
            _ => {
                self.exact = false;
                rounded
            }
        };
        self.active.insert(address, size);
        size
    }

    /// The block at `address` became reusable; returns its bytes.
    fn free(&mut self, address: u64) -> u64 {
        let Some(size) = self.active.remove(&address) else { return 0 };
        if let Some(piece) = self.pieces.get_mut(&address) {
            piece.free = true;
            self.merge(address);
        }
        size
    }

    /// Unites the free piece at `address` with its free neighbours.
    fn merge(&mut self, address: u64) {
        let Some(mut piece) = self.pieces.get(&address).copied() else { return };
        let end = address.saturating_add(piece.size);
        if let Some(next) = self.pieces.get(&end).copied()
            && next.free
            && !next.first
        {
            self.pieces.remove(&end);
            piece.size += next.size;
        }
        let mut at = address;
        if !piece.first
            && let Some((below, before)) = self.pieces.range(..address).next_back().map(|(a, p)| (*a, *p))
            && before.free
            && below.saturating_add(before.size) == address
        {
            self.pieces.remove(&address);
            piece = Piece { size: before.size + piece.size, ..before };
            at = below;
        }
        self.pieces.insert(at, piece);
    }

    /// Memory was added: a segment of its own, or more of an expandable one.
    fn grow(&mut self, address: u64, size: u64, own: bool) {
        self.pieces.insert(address, Piece { size, free: true, first: own });
        if !own {
            self.merge(address);
        }
    }

    /// Memory went away.
    fn shrink(&mut self, address: u64, size: u64) {
        let Some((at, piece)) = self.pieces.range(..=address).next_back().map(|(a, p)| (*a, *p)) else {
            return;
        };
        let (end, gone) = (at.saturating_add(piece.size), address.saturating_add(size));
        if !piece.free || gone > end {
            self.exact = self.exact && !piece.free;
            return;
        }
        self.pieces.remove(&at);
        if at < address {
            self.pieces.insert(at, Piece { size: address - at, ..piece });
        }
        if gone < end {
            self.pieces.insert(gone, Piece { size: end - gone, free: true, first: false });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::recording::Event;
    use super::*;

    fn run(settings: &Settings, events: &[(Action, u64, u64)]) -> Recorded {
        let events = events
            .iter()
            .map(|&(action, address, size)| Event { time_us: 0, address, size, stack: 0, stream: 0, action })
            .collect();
        figures(&Device { index: 0, events, segments: Vec::new() }, &Start::default(), settings)
    }

    #[test]
    fn a_large_block_keeps_what_is_not_worth_splitting() {
        const MIB: u64 = 1 << 20;
        let told = run(
            &Settings::default(),
            &[
                (Action::SegmentAlloc, 0x1000_0000, 20 * MIB),
                (Action::Alloc, 0x1000_0000, 18 * MIB + 1),
                (Action::Alloc, 0x1000_0000 + 18 * MIB + 512, 100),
            ],
        );
        // The first leaves 2 MiB less 512 bytes, which is split off; the second is small.
        assert_eq!(told.active_peak, 18 * MIB + 512 + 512);
        assert!(told.active_exact);
        let told = run(
            &Settings::default(),
            &[(Action::SegmentAlloc, 0x1000_0000, 20 * MIB), (Action::Alloc, 0x1000_0000, 19 * MIB)],
        );
        assert_eq!((told.requested_peak, told.active_peak), (19 * MIB, 20 * MIB));
        let expandable = Settings { expandable_segments: true, ..Settings::default() };
        let told = run(
            &expandable,
            &[
                (Action::SegmentMap, 0x1000_0000, 20 * MIB),
                (Action::Alloc, 0x1000_0000, 19 * MIB),
                (Action::SegmentMap, 0x1000_0000 + 20 * MIB, 20 * MIB),
                (Action::Alloc, 0x1000_0000 + 19 * MIB, 21 * MIB),
            ],
        );
        assert_eq!((told.active_peak, told.reserved_peak, told.active_exact), (40 * MIB, 40 * MIB, true));
    }

    #[test]
    fn rounds_as_it_was_told_to() {
        let plain = Settings::default();
        assert_eq!([0, 1, 512, 513].map(|size| round(size, &plain)), [512, 512, 512, 1024]);
        let divided = Settings { roundup_power2_divisions: vec![(1, 4), (2, 0)], ..Settings::default() };
        assert_eq!(round(1200 << 10, &divided), 1280 << 10);
        assert_eq!(round((3 << 20) + 5, &divided), (3 << 20) + 512);
    }
}
