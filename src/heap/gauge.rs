//! Running statistics: gauges of one number, and the tally of what every malloc and free counts.
//!
//! It knows numbers only, not what they count. Invariants: peaks are never below the present value;
//! `current = allocated - freed` since the last reset's present value.

use super::stats::{LARGE, SMALL, Split, Stat};

/// A running statistic. What can be derived is not kept.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gauge {
    now: [u64; 2],
    peak: [u64; 3],
    freed: [u64; 2],
    base: [u64; 2],
}

impl Gauge {
    #[inline]
    pub(super) fn add(&mut self, part: usize, n: u64) {
        self.now[part] += n;
        if self.now[part] > self.peak[part] || self.now() > self.peak[2] {
            self.raise(part);
        }
    }

    /// A new peak: rare once a job repeats itself.
    #[cold]
    fn raise(&mut self, part: usize) {
        self.peak[part] = self.peak[part].max(self.now[part]);
        self.peak[2] = self.peak[2].max(self.now());
    }

    #[inline]
    pub(super) fn sub(&mut self, part: usize, n: u64) {
        self.now[part] -= n;
        self.freed[part] += n;
    }

    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.now[0] + self.now[1]
    }

    pub(super) fn reset_peak(&mut self) {
        self.peak = [self.now[0], self.now[1], self.now()];
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.base = self.now;
        self.freed = [0; 2];
    }

    /// The statistic of what is handed out or waits: this is that of what is handed out.
    pub(super) fn with(&self, waiting: &Waiting) -> Split {
        let stat = |stat: Stat, peak: u64, waiting: u64, base: u64| Stat {
            current: stat.current + waiting,
            peak: stat.peak.max(peak),
            allocated: stat.allocated,
            freed: stat.freed + base - waiting,
        };
        let (of, Waiting { now, peak, base }) = (self.split(), waiting);
        Split {
            all: stat(of.all, peak[2], now[0] + now[1], base[0] + base[1]),
            small_pool: stat(of.small_pool, peak[SMALL], now[SMALL], base[SMALL]),
            large_pool: stat(of.large_pool, peak[LARGE], now[LARGE], base[LARGE]),
        }
    }

    pub(super) fn split(&self) -> Split {
        let part = |part: usize| Stat {
            current: self.now[part],
            peak: self.peak[part],
            allocated: self.now[part] + self.freed[part] - self.base[part],
            freed: self.freed[part],
        };
        let (small_pool, large_pool) = (part(SMALL), part(LARGE));
        let all = Stat {
            current: self.now(),
            peak: self.peak[2],
            allocated: small_pool.allocated + large_pool.allocated,
            freed: small_pool.freed + large_pool.freed,
        };
        Split { all, small_pool, large_pool }
    }
}

/// What was freed by its user and is still in use on other streams. Together with what is handed out it is
/// *active*. Nothing waits for most of the time, and then the peaks of both are the same; only while something
/// waits is the peak of the sum kept here.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Waiting {
    now: [u64; 2],
    /// Of the sum, while something waited.
    peak: [u64; 3],
    base: [u64; 2],
}

impl Waiting {
    pub(super) fn raise(&mut self, gauge: &Gauge) {
        let sum = [SMALL, LARGE].map(|part| gauge.now[part] + self.now[part]);
        for (peak, now) in self.peak.iter_mut().zip([sum[0], sum[1], sum[0] + sum[1]]) {
            *peak = now.max(*peak);
        }
    }

    pub(super) fn reset_peak(&mut self, gauge: &Gauge) {
        self.peak = [0; 3];
        self.raise(gauge);
    }

    #[inline]
    pub(super) fn now(&self) -> u64 {
        self.now[0] + self.now[1]
    }

    /// The peak of the sum, while something waited.
    pub(super) fn highest(&self) -> u64 {
        self.peak[2]
    }

    pub(super) fn add(&mut self, part: usize, n: u64) {
        self.now[part] += n;
    }

    pub(super) fn sub(&mut self, part: usize, n: u64) {
        self.now[part] -= n;
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.base = self.now;
    }
}

/// The numbers of a tally: blocks, their bytes, and the bytes asked for.
const NUMBERS: usize = 3;
const BLOCKS: usize = 0;
const BYTES: usize = 1;
const REQUESTED: usize = 2;

/// Gauges that change together at every malloc and free. Only sums are kept there, and how far the peaks are:
/// as long as no peak can have been reached, none is looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    /// Of each part, the sums of all increases and decreases.
    added: [[u64; NUMBERS]; 2],
    freed: [[u64; NUMBERS]; 2],
    /// How many more blocks each part, and the whole, can have before a peak.
    blocks_left: [i64; 3],
    /// How many more bytes can come, whatever they count as, before a peak of a part or of the whole: at least.
    bytes_left: [i64; 2],
    /// Every new block is to be treated as if it made a peak.
    watched: bool,
    peak: [[u64; NUMBERS]; 3],
    /// The most bytes since somebody last asked for it.
    recent: u64,
    /// The sums at the last reset.
    base: [[[u64; NUMBERS]; 2]; 2],
}

impl Tally {
    /// One more block, of `size` bytes, of which no more than all were asked for. Whether there may be a new peak:
    /// then [`raise`](Self::raise) must follow.
    #[inline(always)]
    #[must_use]
    pub(super) fn add(&mut self, part: usize, size: u64, requested: u64) -> bool {
        let part = part % 2;
        self.added[part][BLOCKS] += 1;
        self.added[part][BYTES] += size;
        self.added[part][REQUESTED] += requested;
        self.blocks_left[part] -= 1;
        self.blocks_left[2] -= 1;
        self.bytes_left[0] -= size as i64;
        self.bytes_left[1] -= size as i64;
        self.blocks_left[part] | self.blocks_left[2] | self.bytes_left[part] < 0
    }

    /// One block less.
    #[inline(always)]
    pub(super) fn sub(&mut self, part: usize, size: u64, requested: u64) {
        self.sub_block(part, size);
        self.sub_requested(part, requested);
        // All numbers of bytes have fallen by as much, or more.
        self.bytes_left[part % 2] += requested as i64;
    }

    /// One block less, while what was asked for stays.
    #[inline(always)]
    pub(super) fn sub_block(&mut self, part: usize, size: u64) {
        let part = part % 2;
        self.freed[part][BLOCKS] += 1;
        self.freed[part][BYTES] += size;
        self.blocks_left[part] += 1;
        self.blocks_left[2] += 1;
    }

    #[inline(always)]
    pub(super) fn sub_requested(&mut self, part: usize, requested: u64) {
        self.freed[part % 2][REQUESTED] += requested;
    }

    /// A number of both parts and of the whole.
    fn now(&self, number: usize) -> [u64; 3] {
        let [small, large] = [0, 1].map(|part| self.added[part][number] - self.freed[part][number]);
        [small, large, small + large]
    }

    /// There may be a new peak: rare once a job repeats itself.
    #[cold]
    pub(super) fn raise(&mut self) {
        for number in 0..NUMBERS {
            let now = self.now(number);
            for (peak, now) in self.peak.iter_mut().zip(now) {
                peak[number] = peak[number].max(now);
            }
        }
        self.recent = self.recent.max(self.bytes_now());
        self.measure();
    }

    /// Finds out how far the peaks are.
    fn measure(&mut self) {
        let [blocks, bytes, requested] = [BLOCKS, BYTES, REQUESTED].map(|number| {
            let now = self.now(number);
            std::array::from_fn::<_, 3, _>(|part| (self.peak[part][number] - now[part]) as i64)
        });
        let all = bytes[2].min(requested[2]).min((self.recent - self.bytes_now()) as i64);
        self.blocks_left = blocks;
        if self.watched {
            self.blocks_left[2] = i64::MIN / 2;
        }
        self.bytes_left = [0, 1].map(|part| bytes[part].min(requested[part]).min(all));
    }

    /// From now on, or no longer, every new block is treated as if it made a peak.
    pub(super) fn watch(&mut self, watched: bool) {
        if self.watched != watched {
            self.watched = watched;
            self.measure();
        }
    }

    /// One of the numbers as a gauge of its own.
    fn gauge(&self, number: usize) -> Gauge {
        let of = |parts: [[u64; NUMBERS]; 2]| parts.map(|numbers| numbers[number]);
        let (freed, [base_added, base_freed]) = (of(self.freed), self.base.map(of));
        let [small, large, _] = self.now(number);
        Gauge {
            now: [small, large],
            peak: self.peak.map(|numbers| numbers[number]),
            freed: [0, 1].map(|part| freed[part] - base_freed[part]),
            base: [0, 1].map(|part| base_added[part] - base_freed[part]),
        }
    }

    pub(super) fn blocks(&self) -> Gauge {
        self.gauge(BLOCKS)
    }

    pub(super) fn bytes(&self) -> Gauge {
        self.gauge(BYTES)
    }

    pub(super) fn requested(&self) -> Gauge {
        self.gauge(REQUESTED)
    }

    #[inline]
    pub(super) fn bytes_now(&self) -> u64 {
        self.now(BYTES)[2]
    }

    pub(super) fn bytes_peak(&self) -> u64 {
        self.peak[2][BYTES]
    }

    /// The most bytes since the last call.
    pub(super) fn take_recent_peak(&mut self) -> u64 {
        let now = self.bytes_now();
        let recent = std::mem::replace(&mut self.recent, now);
        self.measure();
        recent
    }

    /// Sets every peak but the recent one to the present value.
    pub(super) fn reset_peak(&mut self) {
        for number in 0..NUMBERS {
            let now = self.now(number);
            for (peak, now) in self.peak.iter_mut().zip(now) {
                peak[number] = now;
            }
        }
        self.measure();
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.base = [self.added, self.freed];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_keeps_peaks_and_sums() {
        let mut gauge = Gauge::default();
        gauge.add(SMALL, 5);
        gauge.add(LARGE, 7);
        gauge.sub(SMALL, 5);
        gauge.add(LARGE, 1);
        let split = gauge.split();
        assert_eq!(split.all, Stat { current: 8, peak: 12, allocated: 13, freed: 5 });
        assert_eq!(split.small_pool, Stat { current: 0, peak: 5, allocated: 5, freed: 5 });
        gauge.reset_peak();
        gauge.reset_accumulated();
        assert_eq!(gauge.split().all, Stat { current: 8, peak: 8, allocated: 0, freed: 0 });
        gauge.sub(LARGE, 8);
        assert_eq!(gauge.split().all, Stat { current: 0, peak: 8, allocated: 0, freed: 8 });
    }

    #[test]
    fn a_tally_is_what_its_gauges_would_be() {
        let mut tally = Tally::default();
        let mut gauges = [Gauge::default(); 3];
        let (mut live, mut recent, mut random) = (Vec::new(), 0, 1u64);
        for step in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (draw, part, size) = (random >> 60, (random >> 40 & 1) as usize, random >> 32 & 0xffff);
            if draw < 8 {
                let numbers = [1, size, size / 2];
                if tally.add(part, size, size / 2) {
                    tally.raise();
                }
                gauges.iter_mut().zip(numbers).for_each(|(gauge, n)| gauge.add(part, n));
                live.push((part, numbers));
            } else if let Some((part, numbers)) = live.pop() {
                tally.sub(part, numbers[1], numbers[2]);
                gauges.iter_mut().zip(numbers).for_each(|(gauge, n)| gauge.sub(part, n));
            }
            recent = gauges[BYTES].now().max(recent);
            if step % 1709 == 0 {
                tally.watch(step % 2 == 0);
            }
            if step % 997 == 0 {
                tally.reset_peak();
                gauges.iter_mut().for_each(Gauge::reset_peak);
            }
            if step % 1499 == 0 {
                tally.reset_accumulated();
                gauges.iter_mut().for_each(Gauge::reset_accumulated);
            }
            if step % 733 == 0 {
                assert_eq!(tally.take_recent_peak(), recent, "step {step}");
                recent = gauges[BYTES].now();
            }
            for (number, gauge) in gauges.iter().enumerate() {
                assert_eq!(tally.gauge(number).split(), gauge.split(), "number {number}, step {step}");
            }
            assert_eq!((tally.bytes_now(), tally.bytes_peak()), (gauges[BYTES].now(), gauges[BYTES].peak[2]));
        }
    }
}
