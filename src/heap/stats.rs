//! Statistics, with exactly the meaning that PyTorch's `torch.cuda.memory_stats()` gives them.
//!
//! *allocated* counts blocks until they are freed, *active* and *requested* until no stream can use them
//! any more, *reserved* is mapped memory. Sizes are in bytes. As for PyTorch's expandable segments,
//! `inactive_split` stays 0 where memory is mapped: whole free pages there can always be given back; it
//! counts free parts of plain segments. It knows numbers only. Invariants: peaks are never below the
//! present value; `current = allocated - freed` since the last reset's present value.

use super::gauge::{Gauge, Tally, Waiting};
use crate::driver::cost::{Call, Cost};

/// Index into the per-pool arrays: requests of at most 1 MiB.
pub(super) const SMALL: usize = 0;
/// Index into the per-pool arrays: larger requests.
pub(super) const LARGE: usize = 1;

/// One statistic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    pub current: u64,
    pub peak: u64,
    /// Sum of all increases since the last reset.
    pub allocated: u64,
    /// Sum of all decreases since the last reset.
    pub freed: u64,
}

/// One statistic of the whole heap and of its two parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Split {
    pub all: Stat,
    /// Requests of at most 1 MiB.
    pub small_pool: Stat,
    pub large_pool: Stat,
}

/// What the heap asked of the driver, and what it did to avoid asking.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverWork {
    pub reserves: u64,
    pub creates: u64,
    pub destroys: u64,
    pub maps: u64,
    pub unmaps: u64,
    pub events_recorded: u64,
    pub events_queried: u64,
    pub stream_waits: u64,
    /// Waits of the host for a stream.
    pub host_waits: u64,
    /// Handles that were moved from a hole to where memory was needed.
    pub stitched: u64,
    /// Bytes of those handles.
    pub stitched_bytes: u64,
    /// Handles that came back, without a call, to where they had been mapped before.
    pub called_back: u64,
    /// Requests that got a place that they had before.
    pub retraced: u64,

    /// Blocks served from another stream's cache.
    pub lent: u64,
}

impl DriverWork {
    /// Calls that make, move or give back memory: the expensive ones.
    pub fn memory_calls(&self) -> u64 {
        self.reserves + self.creates + self.destroys + self.maps + self.unmaps
    }
}

/// The running statistics of a heap.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ledgers {
    handed: Tally,
    waiting: Waiting,
    waiting_bytes: Waiting,
    pub segment: Gauge,
    pub reserved_bytes: Gauge,
    pub inactive_split: Gauge,
    pub inactive_split_bytes: Gauge,
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    pub num_sync_all_streams: u64,
    pub work: DriverWork,
    /// The most active bytes before the peaks were reset.
    before_reset: u64,
}

impl Ledgers {
    /// A block was handed out.
    #[inline]
    pub(super) fn handed_out(&mut self, part: usize, size: u64, requested: u64) {
        if self.handed.add(part, size, requested) {
            self.raise();
        }
    }

    /// There may be a new peak. While something waits, this is asked at every block.
    #[cold]
    fn raise(&mut self) {
        self.handed.raise();
        if self.waiting.now() != 0 {
            self.waiting.raise(&self.handed.blocks());
            self.waiting_bytes.raise(&self.handed.bytes());
        }
    }

    /// A block was freed by its user, and can be used again at once.
    #[inline]
    pub(super) fn freed(&mut self, part: usize, size: u64, requested: u64) {
        self.handed.sub(part, size, requested);
    }

    /// A block was freed by its user, and is still in use on other streams.
    pub(super) fn began_to_wait(&mut self, part: usize, size: u64) {
        self.handed.sub_block(part, size);
        self.waiting.add(part, 1);
        self.waiting_bytes.add(part, size);
        self.handed.watch(true);
    }

    /// A block that waited can be used again.
    pub(super) fn waited(&mut self, part: usize, size: u64, requested: u64) {
        self.handed.sub_requested(part, requested);
        self.waiting.sub(part, 1);
        self.waiting_bytes.sub(part, size);
        self.handed.watch(self.waiting.now() != 0);
    }

    fn gauges(&mut self) -> [&mut Gauge; 4] {
        [
            &mut self.segment,
            &mut self.reserved_bytes,
            &mut self.inactive_split,
            &mut self.inactive_split_bytes,
        ]
    }

    /// Bytes that are handed out.
    #[inline]
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.handed.bytes_now()
    }

    /// The most active bytes ever, whatever was reset.
    pub(super) fn highest_active(&self) -> u64 {
        self.handed.bytes_peak().max(self.waiting_bytes.highest()).max(self.before_reset)
    }

    /// Bytes that are handed out or still in use.
    pub(super) fn active_bytes(&self) -> u64 {
        self.allocated_bytes() + self.waiting_bytes.now()
    }

    /// The most allocated bytes since the last call, whatever was reset.
    pub(super) fn take_recent_peak(&mut self) -> u64 {
        self.handed.take_recent_peak()
    }

    pub(super) fn reset_peak(&mut self) {
        self.before_reset = self.highest_active();
        self.handed.reset_peak();
        self.gauges().into_iter().for_each(Gauge::reset_peak);
        self.waiting.reset_peak(&self.handed.blocks());
        self.waiting_bytes.reset_peak(&self.handed.bytes());
    }

    pub(super) fn reset_accumulated(&mut self) {
        self.handed.reset_accumulated();
        self.gauges().into_iter().for_each(Gauge::reset_accumulated);
        self.waiting.reset_accumulated();
        self.waiting_bytes.reset_accumulated();
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
    }

    pub(super) fn snapshot(&self) -> Stats {
        let (blocks, bytes) = (self.handed.blocks(), self.handed.bytes());
        Stats {
            allocation: blocks.split(),
            segment: self.segment.split(),
            active: blocks.with(&self.waiting),
            inactive_split: self.inactive_split.split(),
            allocated_bytes: bytes.split(),
            reserved_bytes: self.reserved_bytes.split(),
            active_bytes: bytes.with(&self.waiting_bytes),
            inactive_split_bytes: self.inactive_split_bytes.split(),
            requested_bytes: self.handed.requested().split(),
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_sync_all_streams: self.num_sync_all_streams,
            work: self.work,
            driver: Default::default(),
        }
    }
}

/// The statistics of a heap at one moment: every key of `torch.cuda.memory_stats()`, and our own count
/// of the driver's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub allocation: Split,
    pub segment: Split,
    pub active: Split,
    pub inactive_split: Split,
    pub allocated_bytes: Split,
    pub reserved_bytes: Split,
    pub active_bytes: Split,
    pub inactive_split_bytes: Split,
    pub requested_bytes: Split,
    /// Mallocs that had to flush caches and try again.
    pub num_alloc_retries: u64,
    pub num_ooms: u64,
    pub num_sync_all_streams: u64,
    pub work: DriverWork,
    /// What the driver's calls cost, in the order of [`Call::ALL`]; zeros where that is not counted.
    pub driver: [Cost; Call::ALL.len()],
}

impl Stats {
    /// Calls `f` with every key of `torch.cuda.memory_stats()` (`max_split_size` is -1: unlimited), then
    /// with ours, which begin with `strandline.`.
    pub fn for_each(&self, mut f: impl FnMut(&str, i64)) {
        let groups = [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ];
        let mut stat = |name: &str, stat: &Stat| {
            f(&format!("{name}.current"), stat.current as i64);
            f(&format!("{name}.peak"), stat.peak as i64);
            f(&format!("{name}.allocated"), stat.allocated as i64);
            f(&format!("{name}.freed"), stat.freed as i64);
        };
        for (name, split) in groups {
            stat(&format!("{name}.all"), &split.all);
            stat(&format!("{name}.small_pool"), &split.small_pool);
            stat(&format!("{name}.large_pool"), &split.large_pool);
        }
        stat("oversize_allocations", &Stat::default());
        stat("oversize_segments", &Stat::default());
        let work = &self.work;
        for (name, value) in [
            ("num_alloc_retries", self.num_alloc_retries as i64),
            ("num_ooms", self.num_ooms as i64),
            ("num_sync_all_streams", self.num_sync_all_streams as i64),
            ("num_device_alloc", work.creates as i64),
            ("num_device_free", work.destroys as i64),
            ("max_split_size", -1),
            ("strandline.maps", work.maps as i64),
            ("strandline.unmaps", work.unmaps as i64),
            ("strandline.stitched", work.stitched as i64),
            ("strandline.stitched_bytes", work.stitched_bytes as i64),
            ("strandline.called_back", work.called_back as i64),
            ("strandline.retraced", work.retraced as i64),
            ("strandline.lent", work.lent as i64),
            ("strandline.host_waits", work.host_waits as i64),
            ("strandline.stream_waits", work.stream_waits as i64),
            ("strandline.events_recorded", work.events_recorded as i64),
            ("strandline.events_queried", work.events_queried as i64),
        ] {
            f(name, value);
        }
        for ((_, call), cost) in Call::ALL.iter().zip(&self.driver).filter(|(_, cost)| cost.calls > 0) {
            f(&format!("strandline.driver.{call}.calls"), cost.calls as i64);
            f(&format!("strandline.driver.{call}.us"), (cost.nanoseconds / 1000) as i64);
            f(&format!("strandline.driver.{call}.longest_us"), (cost.longest / 1000) as i64);
        }
    }

    /// The same as a list.
    pub fn flat(&self) -> Vec<(String, i64)> {
        let mut keys = Vec::with_capacity(180);
        self.for_each(|name, value| keys.push((name.to_owned(), value)));
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_is_what_five_gauges_of_its_own_would_say() {
        let mut ledgers = Ledgers::default();
        let (mut active, mut bytes) = (Gauge::default(), Gauge::default());
        let mut random = 1u64;
        let (mut live, mut waiting) = (Vec::new(), Vec::new());
        for step in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (draw, part, size) = (random >> 60, (random >> 40 & 1) as usize, random >> 32 & 0xffff);
            match draw {
                0..=5 => {
                    ledgers.handed_out(part, size, size);
                    active.add(part, 1);
                    bytes.add(part, size);
                    live.push((part, size));
                }
                6..=9 => {
                    if let Some((part, size)) = live.pop() {
                        ledgers.freed(part, size, size);
                        active.sub(part, 1);
                        bytes.sub(part, size);
                    }
                }
                10..=12 => {
                    if let Some((part, size)) = live.pop() {
                        ledgers.began_to_wait(part, size);
                        waiting.push((part, size));
                    }
                }
                _ => {
                    // All at once, so that there are times when nothing waits.
                    for (part, size) in waiting.drain(..) {
                        ledgers.waited(part, size, size);
                        active.sub(part, 1);
                        bytes.sub(part, size);
                    }
                }
            }
            if step % 997 == 0 {
                ledgers.reset_peak();
                active.reset_peak();
                bytes.reset_peak();
            }
            if step % 1499 == 0 {
                ledgers.reset_accumulated();
                active.reset_accumulated();
                bytes.reset_accumulated();
            }
            let stats = ledgers.snapshot();
            assert_eq!((stats.active, stats.active_bytes), (active.split(), bytes.split()), "step {step}");
            assert_eq!(ledgers.active_bytes(), bytes.now());
        }
    }

    #[test]
    fn every_key_of_torch_is_there_once() {
        let mut names: Vec<String> = Stats::default().flat().into_iter().map(|(name, _)| name).collect();
        let torch = names.iter().filter(|name| !name.starts_with("strandline.")).count();
        assert_eq!(torch, 108 + 8 + 6);
        names.sort();
        names.dedup();
        assert_eq!(names.len(), Stats::default().flat().len());
    }
}
