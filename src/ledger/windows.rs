//! Stretches of the run: minimum, mean and maximum of what was allocated and reserved; and what each phase
//! allocated and freed.
//!
//! Must not know: sites, judgement.
//! Invariant: at most [`WINDOWS`] stretches of equal length, however long the job runs; every boundary is in one.

use super::clock::PHASE_NUMBERS;
use super::device::DevicePoint;

/// Most stretches.
pub const WINDOWS: usize = 32;

/// Minimum, sum and maximum of one number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    pub least: u64,
    pub sum: u128,
    pub most: u64,
}

impl Range {
    fn of(value: u64) -> Range {
        Range { least: value, sum: value.into(), most: value }
    }

    fn with(self, other: Range) -> Range {
        Range {
            least: self.least.min(other.least),
            sum: self.sum + other.sum,
            most: self.most.max(other.most),
        }
    }
}

/// Neighbouring step boundaries, taken together. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    pub first: u32,
    pub last: u32,
    pub boundaries: u32,
    pub allocated: Range,
    pub reserved: Range,
    pub active: Range,
    /// The highest requested bytes within any step of it.
    pub peak: u64,
    /// Allocation retries in it.
    pub retries: u64,
}

impl Window {
    /// The mean of a number over the window.
    pub fn mean(&self, of: Range) -> u64 {
        (of.sum / u128::from(self.boundaries.max(1))) as u64
    }

    fn with(self, next: Window) -> Window {
        Window {
            first: self.first,
            last: next.last,
            boundaries: self.boundaries + next.boundaries,
            allocated: self.allocated.with(next.allocated),
            reserved: self.reserved.with(next.reserved),
            active: self.active.with(next.active),
            peak: self.peak.max(next.peak),
            retries: self.retries + next.retries,
        }
    }
}

/// All stretches; when there are too many, neighbours are joined and stretches become twice as long.
#[derive(Clone, Debug, Default)]
pub struct Windows {
    windows: Vec<Window>,
    /// Boundaries a window takes; 0 stands for 1.
    length: u32,
    retries: u64,
}

impl Windows {
    pub(super) fn push(&mut self, step: u32, point: &DevicePoint, retries: u64) {
        let one = Window {
            first: step,
            last: step,
            boundaries: 1,
            allocated: Range::of(point.allocated),
            reserved: Range::of(point.reserved),
            active: Range::of(point.active),
            peak: point.peak,
            retries: retries.saturating_sub(std::mem::replace(&mut self.retries, retries)),
        };
        let length = self.length.max(1);
        match self.windows.last_mut() {
            Some(last) if last.boundaries < length => *last = last.with(one),
            _ => {
                if self.windows.len() == WINDOWS {
                    let joined = self
                        .windows
                        .chunks(2)
                        .map(|pair| pair.iter().skip(1).fold(pair[0], |a, b| a.with(*b)));
                    self.windows = joined.collect();
                    self.length = length * 2;
                }
                self.windows.push(one);
            }
        }
    }

    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// The stretches, joined until there are at most `most`.
    pub fn joined(&self, most: usize) -> Vec<Window> {
        let size = self.windows.len().div_ceil(most.max(1)).max(1);
        self.windows.chunks(size).map(|chunk| chunk[1..].iter().fold(chunk[0], |a, b| a.with(*b))).collect()
    }

    pub fn memory_bytes(&self) -> usize {
        self.windows.capacity() * size_of::<Window>()
    }
}

/// What was allocated and freed up to a step boundary: bytes by the phase in which it happened, and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub step: u32,
    pub born: [u64; PHASE_NUMBERS],
    pub freed: [u64; PHASE_NUMBERS],
    pub blocks_born: u64,
    pub blocks_freed: u64,
}

impl Default for Flow {
    fn default() -> Flow {
        Flow { step: 0, born: [0; PHASE_NUMBERS], freed: [0; PHASE_NUMBERS], blocks_born: 0, blocks_freed: 0 }
    }
}

/// Flows at the newest boundary and at two before, so that the recent part of a run (between a half and three
/// quarters of it) can be told from its beginning.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flows {
    marks: [Flow; 2],
    now: Flow,
}

impl Flows {
    pub(super) fn push(&mut self, now: Flow) {
        self.now = now;
        let steps = now.step + 1;
        if steps >= 4 && steps.is_power_of_two() {
            self.marks = [self.marks[1], now];
        }
    }

    /// The steps of the recent part of the run, and what flowed in it; None before there is one.
    pub fn recent(&self) -> Option<(u32, Flow)> {
        let (from, to) = (if self.marks[0].step > 0 { self.marks[0] } else { self.marks[1] }, self.now);
        let steps = to.step.checked_sub(from.step).filter(|steps| *steps > 0 && from.step > 0)?;
        let less = |a: [u64; PHASE_NUMBERS], b: [u64; PHASE_NUMBERS]| std::array::from_fn(|at| a[at] - b[at]);
        let flow = Flow {
            step: to.step,
            born: less(to.born, from.born),
            freed: less(to.freed, from.freed),
            blocks_born: to.blocks_born - from.blocks_born,
            blocks_freed: to.blocks_freed - from.blocks_freed,
        };
        Some((steps, flow))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_boundary_is_in_one_window_however_long_it_runs() {
        let mut windows = Windows::default();
        for step in 0..10_000u32 {
            let point =
                DevicePoint { allocated: u64::from(step), reserved: 7, peak: 9, ..DevicePoint::default() };
            windows.push(step, &point, u64::from(step / 1000));
        }
        let all = windows.windows();
        assert!(all.len() <= WINDOWS && all.len() >= WINDOWS / 2);
        assert_eq!(all.iter().map(|w| w.boundaries).sum::<u32>(), 10_000);
        assert_eq!(all.iter().map(|w| w.retries).sum::<u64>(), 9);
        assert!(all.windows(2).all(|pair| pair[0].last + 1 == pair[1].first));
        let first = all[0];
        assert_eq!((first.allocated.least, first.allocated.most), (0, u64::from(first.last)));
        assert_eq!(first.mean(first.allocated), u64::from(first.last) / 2);
        let few = windows.joined(6);
        assert!(few.len() <= 6 && few.iter().map(|w| w.boundaries).sum::<u32>() == 10_000);
    }

    #[test]
    fn flows_are_those_of_the_recent_part() {
        let mut flows = Flows::default();
        assert_eq!(flows.recent(), None);
        let mut flow = Flow::default();
        for step in 0..100 {
            flow.step = step;
            flow.born[1] += if step < 10 { 1_000_000 } else { 10 };
            flow.freed[2] += 8;
            flow.blocks_born += 3;
            flow.blocks_freed += 2;
            flows.push(flow);
        }
        let (steps, recent) = flows.recent().unwrap();
        assert!((50..=75).contains(&steps), "{steps}");
        assert_eq!(recent.born[1], u64::from(steps) * 10);
        assert_eq!(recent.freed[2], u64::from(steps) * 8);
        assert_eq!(recent.blocks_born - recent.blocks_freed, u64::from(steps));
    }
}
