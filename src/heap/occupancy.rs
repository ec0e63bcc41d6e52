//! How full the mapped memory is, in a few numbers: the picture of fragmentation that a person watches.
//!
//! It only reads, walks each block once, and allocates nothing per block.

use super::block::{NONE, State};
use super::{Driver, Heap};

/// Mapped memory in address order, cut into cells of equal size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Bytes of one cell; the last may be cut short.
    pub cell_bytes: u64,
    /// Bytes in use of each cell.
    pub used: Vec<u64>,
    /// Bytes mapped.
    pub mapped: u64,
    /// The largest free range, in bytes.
    pub largest_free: u64,
}

impl<D: Driver> Heap<D> {
    /// The occupancy in at most `cells` cells.
    pub fn occupancy(&self, cells: usize) -> Occupancy {
        let mut found = Occupancy::default();
        self.each_range(|size, used| {
            found.mapped += size;
            if used == 0 {
                found.largest_free = found.largest_free.max(size);
            }
        });
        if found.mapped == 0 || cells == 0 {
            return found;
        }
        found.cell_bytes = found.mapped.div_ceil(cells as u64).next_multiple_of(4096);
        found.used = vec![0; found.mapped.div_ceil(found.cell_bytes) as usize];
        let (cell, cells) = (found.cell_bytes, &mut found.used);
        let mut at = 0;
        self.each_range(|size, used| {
            // What a slab holds is spread over it.
            let end = at + size;
            let mut from = at;
            while from < end {
                let to = end.min((from / cell + 1) * cell);
                let share = u128::from(to - from) * u128::from(used) / u128::from(size.max(1));
                cells[(from / cell) as usize] += share as u64;
                from = to;
            }
            at = end;
        });
        found
    }

    /// Calls `f(bytes, bytes in use)` for each mapped range, in address order.
    fn each_range(&self, mut f: impl FnMut(u64, u64)) {
        let mut order: Vec<usize> =
            (0..self.space.segments.len()).filter(|&at| self.space.segments[at].in_use).collect();
        order.sort_by_key(|&at| self.space.segments[at].base);
        for at in order {
            let mut id = self.space.segments[at].first;
            while id != NONE {
                let block = &self.blocks[id];
                match block.state {
                    State::Unmapped => {}
                    State::Live | State::Pending => f(block.size, block.size),
                    State::Slab => {
                        let slab = &self.slabs[block.b];
                        f(block.size, slab.taken() * u64::from(slab.size));
                    }
                    _ => f(block.size, 0),
                }
                id = block.next;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Heap, Stream, Tag};
    use crate::driver::host::HostDriver;

    #[test]
    fn sums_up_to_what_the_heap_says() {
        let mut heap = Heap::new(HostDriver::with_memory(1 << 30), Config::host()).unwrap();
        assert!(heap.occupancy(64).used.is_empty());
        let blocks: Vec<_> = (0..400u64)
            .map(|n| heap.malloc(1000 + n * 7919 % 3_000_000, Stream(0), Tag(0, 0)).unwrap())
            .collect();
        for at in blocks.iter().step_by(2) {
            heap.free(*at).unwrap();
        }
        for cells in [1, 7, 64, 1000] {
            let seen = heap.occupancy(cells);
            let stats = heap.stats();
            assert_eq!(seen.mapped, stats.reserved_bytes.all.current);
            assert!(seen.used.len() <= cells);
            let used: u64 = seen.used.iter().sum();
            let allocated = stats.allocated_bytes.all.current;
            // A share is rounded down once for each cell that a range touches.
            assert!(used <= allocated && allocated - used <= 2000, "{used} of {allocated}");
            assert!(seen.used.iter().all(|&used| used <= seen.cell_bytes));
            assert!(seen.largest_free > 0 && seen.largest_free <= seen.mapped - used);
        }
    }
}
