//! The segment map: which parts of the mapped memory are in use, in a bounded number of runs.
//!
//! Must not know: heaps, frames.
//! Invariant: bytes and bytes in use are exact for every segment that is listed; what is not listed is
//! counted. Runs are single blocks and gaps as long as there is room for them; beyond that, neighbours within
//! a segment are joined until each run is as long as a grain that grows with the heap.

use super::model::{BlockRun, Segment};

/// Most runs of one device.
pub const RUNS: usize = 1024;
/// Most segments of one device.
pub const SEGMENTS: usize = 256;
/// Runs are collected up to this many before neighbours are joined.
const ROOM: usize = 4 * RUNS;

/// A run, and the bytes of the block that lent it its stack and step.
#[derive(Clone, Copy, Debug, Default)]
struct Draft {
    run: BlockRun,
    lender: u64,
}

impl Draft {
    fn join(&mut self, next: &Draft) {
        let BlockRun(bytes, used, stack, step) = next.run;
        self.run.0 += bytes;
        self.run.1 += used;
        if used > 0 && self.lender > 0 && self.run.2 == stack {
            self.lender += next.lender;
        } else if next.lender > self.lender {
            (self.run.2, self.run.3, self.lender) = (stack, step, next.lender);
        }
    }
}

#[derive(Debug, Default)]
struct Part {
    address: u64,
    stream: u64,
    large: bool,
    size: u64,
    runs: Vec<Draft>,
}

/// Built from segments, each followed by its blocks.
#[derive(Debug, Default)]
pub struct SegmentMap {
    parts: Vec<Part>,
    runs: usize,
    grain: u64,
    left_out: (u64, u64),
}

impl SegmentMap {
    /// A segment begins.
    pub fn segment(&mut self, address: u64, stream: u64, large: bool) {
        if self.parts.len() >= 2 * SEGMENTS {
            self.drop_small();
        }
        self.parts.push(Part { address, stream, large, ..Part::default() });
    }

    /// The segment's next block: its bytes, and if it is in use a number that its stack is found by and the step
    /// of its birth.
    #[inline]
    pub fn block(&mut self, bytes: u64, of: Option<(u32, u32)>) {
        let Some(part) = self.parts.last_mut() else { return };
        part.size += bytes;
        let next = match of {
            Some((stack, step)) => Draft { run: BlockRun(bytes, bytes, stack, step), lender: bytes },
            None => Draft { run: BlockRun(bytes, 0, 0, 0), lender: 0 },
        };
        match part.runs.last_mut() {
            Some(last) if last.run.0 < self.grain => last.join(&next),
            _ => {
                part.runs.push(next);
                self.runs += 1;
                if self.runs > ROOM {
                    self.coarsen(RUNS);
                }
            }
        }
    }

    /// Joins neighbours until there are at most `most` runs (or one for each segment).
    fn coarsen(&mut self, most: usize) {
        let all: u64 = self.parts.iter().map(|part| part.size).sum();
        while self.runs > most && self.grain < all {
            self.grain = (self.grain * 2).max(512).max((all / most as u64).next_power_of_two() / 4);
            for part in &mut self.parts {
                let grain = self.grain;
                part.runs.dedup_by(|next, last| {
                    let joins = last.run.0 < grain;
                    if joins {
                        last.join(next);
                    }
                    joins
                });
            }
            self.runs = self.parts.iter().map(|part| part.runs.len()).sum();
        }
    }

    fn drop_small(&mut self) {
        if self.parts.len() <= SEGMENTS {
            return;
        }
        self.parts.sort_by_key(|part| std::cmp::Reverse(part.size));
        for part in self.parts.drain(SEGMENTS..) {
            self.left_out.0 += 1;
            self.left_out.1 += part.size;
        }
        self.runs = self.parts.iter().map(|part| part.runs.len()).sum();
    }

    /// The segments by address, with stack IDs as `stack` finds them by the blocks' numbers (there are few runs
    /// but many blocks); how many were left out, and their bytes.
    pub fn finish(mut self, stack: impl Fn(u32) -> u32) -> (Vec<Segment>, (u64, u64)) {
        self.drop_small();
        self.coarsen(RUNS);
        self.parts.sort_by_key(|part| part.address);
        let run = |run: BlockRun| if run.1 > 0 { BlockRun(run.0, run.1, stack(run.2), run.3) } else { run };
        let segment = |part: Part| Segment {
            address: part.address,
            size: part.size,
            stream: part.stream,
            large: part.large,
            runs: part.runs.into_iter().map(|draft| run(draft.run)).collect(),
        };
        (self.parts.into_iter().map(segment).collect(), self.left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_heap_is_shown_block_by_block() {
        let mut map = SegmentMap::default();
        map.segment(4096, 7, true);
        map.block(512, Some((3, 9)));
        map.block(1024, None);
        map.segment(1024, 0, false);
        map.block(2048, Some((4, 1)));
        let (segments, left_out) = map.finish(|number| number);
        assert_eq!(left_out, (0, 0));
        assert_eq!(segments[1].runs, [BlockRun(512, 512, 3, 9), BlockRun(1024, 0, 0, 0)]);
        assert_eq!((segments[0].address, segments[1].size, segments[1].stream), (1024, 1536, 7));
    }

    #[test]
    fn a_large_heap_stays_bounded_and_exact() {
        let mut map = SegmentMap::default();
        let mut expected = Vec::new();
        for segment in 0..40u64 {
            map.segment(segment << 32, 0, false);
            let (mut size, mut used) = (0, 0);
            for block in 0..25_000u64 {
                let bytes = 512 + block % 7 * 512;
                let of = (block % 3 > 0).then_some((1 + (block / 12_500) as u32, block as u32));
                map.block(bytes, of);
                size += bytes;
                used += if of.is_some() { bytes } else { 0 };
            }
            expected.push((size, used));
        }
        let (segments, left_out) = map.finish(|number| number);
        let runs: usize = segments.iter().map(|segment| segment.runs.len()).sum();
        assert!((RUNS / 8..=RUNS).contains(&runs), "{runs}");
        assert_eq!(left_out, (0, 0));
        for (segment, (size, used)) in segments.iter().zip(expected) {
            assert_eq!(segment.size, size);
            assert_eq!(segment.runs.iter().map(|run| run.0).sum::<u64>(), size);
            assert_eq!(segment.runs.iter().map(|run| run.1).sum::<u64>(), used);
            // The first half of a segment is one site's, the second another's.
            assert_eq!((segment.runs[0].2, segment.runs[segment.runs.len() - 1].2), (1, 2));
        }
    }

    #[test]
    fn many_segments_leave_the_smallest_out_and_count_them() {
        let mut map = SegmentMap::default();
        for segment in 0..2_000u64 {
            map.segment(segment << 24, 0, false);
            map.block(512 * (1 + segment), Some((1, 0)));
        }
        let (segments, left_out) = map.finish(|number| number);
        assert_eq!((segments.len(), left_out.0), (SEGMENTS, 2_000 - SEGMENTS as u64));
        let bytes: u64 = segments.iter().map(|segment| segment.size).sum();
        assert_eq!(bytes + left_out.1, (1..=2_000).map(|n| 512 * n).sum::<u64>());
    }
}
