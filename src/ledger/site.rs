//! A site: every block with one stack ID on one device. Counters, cohorts and a short history.
//!
//! Must not know: other sites, judgement, frames.
//! Invariant: counters are exact; a site takes at most [`SITE_BYTES`] bytes, however long it lives.

use super::clock::Phase;
use super::cohort::Cohorts;
use super::history::Thinned;

/// Most bytes one site may take, everything included (its entry in the index too).
pub const SITE_BYTES: usize = 1024;
/// Points of a site's history.
pub const HISTORY: usize = 16;
/// A death at this age (in steps) or above counts as late: such a block was kept, not in use.
pub const LATE: u32 = 8;
/// Weight of the newest step in the running mean of bytes allocated per step.
const MEAN_WEIGHT: f32 = 1.0 / 16.0;
const DRIFT_WEIGHT: f32 = 1.0 / 12.0;
/// Steps in which a site allocates the same before it counts as having no trend.
const STEADY: u16 = 24;
/// Steps in which a site must have allocated for its mean to be the usual, and what is clearly more than that.
const USUAL: u16 = 4;
const LARGER: f32 = 1.05;

/// A site's state at a step boundary. Packed to 4 so that a point of history takes 20 bytes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, packed(4))]
pub struct Level {
    pub bytes: u64,
    pub blocks: u32,
    /// Late deaths so far, saturating.
    pub late: u32,
}

/// How live bytes rise from boundary to boundary without ever falling, the number of blocks constant.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rise {
    /// Rises since the last fall.
    pub run: u32,
    /// The boundary before the first of these, its bytes and blocks.
    pub start: u32,
    pub start_bytes: u64,
    pub blocks: u32,
    /// The boundary of the newest rise.
    pub last: u32,
    /// The highest level that was ever left by a fall.
    pub peak: u64,
    /// The sum of the squared steps between rises.
    pub squares: f32,
}

impl Rise {
    /// Whether the rises come in a rhythm, not at irregular intervals.
    pub fn regular(&self) -> bool {
        let mean = (self.last - self.start) as f32 / self.run.max(1) as f32;
        let variance = self.squares / self.run.max(1) as f32 - mean * mean;
        variance <= (0.5 * mean) * (0.5 * mean)
    }
}

/// What a site did in the step that ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Active {
    /// It allocates again and again; and in this step clearly more than usual.
    pub usual: bool,
    pub larger: bool,
    /// Bytes beyond what it usually allocates.
    pub beyond: f32,
}

#[derive(Clone, Debug, Default)]
pub struct Site {
    pub stack: u32,
    pub(super) dirty: bool,
    pub(super) watched: bool,
    /// The phase of the newest birth.
    pub phase: Phase,
    pub live_blocks: u64,
    pub live_bytes: u64,
    /// All births so far.
    pub born_blocks: u64,
    pub born_bytes: u64,
    pub cohorts: Cohorts,
    /// Deaths at an age of [`LATE`] steps or more.
    pub late_blocks: u64,
    /// The step of the newest late death.
    pub last_late: u32,
    /// Its age in steps.
    pub last_age: u32,
    /// Blocks that outlived their step and that Python's garbage collector freed; saturating.
    pub collected: u32,
    /// How often half of the blocks or more died late within one step, and the most blocks before one.
    pub resets: u16,
    pub tooth: u32,
    /// Steps in which it allocated, saturating.
    active: u16,
    /// Of these the newest in a row that allocated just as much as the one before, saturating.
    constant: u16,
    /// The level at the last boundary.
    pub level: Level,
    pub rise: Rise,
    born_before: u64,
    born_last: f32,
    mean: f32,
    /// Between -1 and 1: whether bytes allocated per step keep rising (1) or falling (-1).
    pub drift: f32,
    /// The same of blocks, and their running mean.
    pub more: f32,
    blocks_before: u64,
    mean_blocks: f32,
    pub history: Thinned<Level, HISTORY>,
}

impl Site {
    pub(super) fn new(stack: u32) -> Site {
        Site { stack, ..Site::default() }
    }

    #[inline]
    pub(super) fn born(&mut self, step: u32, size: u64, phase: Phase) {
        self.phase = phase;
        self.handed_out(size);
        self.cohorts.add(step, size);
    }

    /// A block that was born in `step` and had died is there again.
    pub(super) fn revived(&mut self, step: u32, size: u64) {
        self.handed_out(size);
        self.cohorts.add_again(step, size);
    }

    #[inline(always)]
    fn handed_out(&mut self, size: u64) {
        self.live_blocks += 1;
        self.live_bytes += size;
        self.born_blocks += 1;
        self.born_bytes += size;
    }

    #[inline]
    pub(super) fn died(&mut self, born: u32, now: u32, size: u64, collecting: bool) {
        self.live_blocks = self.live_blocks.saturating_sub(1);
        self.live_bytes = self.live_bytes.saturating_sub(size);
        self.cohorts.remove(born, size);
        if now > born {
            self.collected = self.collected.saturating_add(u32::from(collecting));
            if now - born >= LATE {
                self.late_blocks += 1;
                (self.last_late, self.last_age) = (now, now - born);
            }
        }
    }

    /// Deaths so far.
    pub fn freed_blocks(&self) -> u64 {
        self.born_blocks - self.live_blocks
    }

    pub fn freed_bytes(&self) -> u64 {
        self.born_bytes - self.live_bytes
    }

    /// Visits a site that changed in the step that ended. Returns what it allocated in that step, if anything.
    pub(super) fn at_boundary(&mut self, ended: u32) -> Option<Active> {
        let before = self.level;
        let (before_bytes, before_blocks) = (before.bytes, before.blocks);
        self.level = Level {
            bytes: self.live_bytes,
            blocks: self.live_blocks.min(u64::from(u32::MAX)) as u32,
            late: self.late_blocks.min(u64::from(u32::MAX)) as u32,
        };
        let late = self.level.late - before.late;
        if late >= 4 && late >= before_blocks / 2 {
            self.resets = self.resets.saturating_add(1);
            self.tooth = self.tooth.max(before_blocks);
        }
        self.note_rise(ended, before_bytes, before_blocks);
        self.history.push(ended, self.level);
        self.note_drift()
    }

    fn note_rise(&mut self, ended: u32, before_bytes: u64, before_blocks: u32) {
        let level = self.level;
        let bytes = level.bytes;
        if bytes > before_bytes && level.blocks == before_blocks && before_blocks > 0 {
            if self.rise.run == 0 {
                let start = ended.saturating_sub(1);
                self.rise = Rise {
                    start,
                    start_bytes: before_bytes,
                    blocks: before_blocks,
                    last: start,
                    squares: 0.0,
                    ..self.rise
                };
            }
            let gap = (ended - self.rise.last) as f32;
            self.rise.squares += gap * gap;
            self.rise.run += 1;
            self.rise.last = ended;
        } else if bytes < before_bytes || level.blocks != before_blocks {
            if bytes < before_bytes && self.rise.run > 0 {
                self.rise.peak = self.rise.peak.max(before_bytes);
            }
            self.rise.run = 0;
        }
    }

    fn note_drift(&mut self) -> Option<Active> {
        let now = (self.born_bytes - self.born_before) as f32;
        let blocks = (self.born_blocks - self.blocks_before) as f32;
        (self.born_before, self.blocks_before) = (self.born_bytes, self.born_blocks);
        if now == 0.0 {
            return None;
        }
        let usual = self.active >= USUAL;
        let done = Active { usual, larger: usual && now > self.mean * LARGER, beyond: now - self.mean };
        if self.active == 0 {
            (self.mean, self.mean_blocks) = (now, blocks);
        }
        self.active = self.active.saturating_add(1);
        self.constant = if now == self.born_last { self.constant.saturating_add(1) } else { 0 };
        self.born_last = now;
        // A single step up (layers unfrozen, a larger batch from now on) is no trend.
        let steady = self.constant > STEADY;
        let sign = |now: f32, mean: f32| {
            let rises = f32::from(u8::from(now > mean * 1.005)) - f32::from(u8::from(now < mean * 0.995));
            if steady { 0.0 } else { rises }
        };
        self.drift += (sign(now, self.mean) - self.drift) * DRIFT_WEIGHT;
        self.more += (sign(blocks, self.mean_blocks) - self.more) * DRIFT_WEIGHT;
        self.mean += (now - self.mean) * MEAN_WEIGHT;
        self.mean_blocks += (blocks - self.mean_blocks) * MEAN_WEIGHT;
        Some(done)
    }

    /// The newest step in which it allocated, if it did so in `least` steps or more.
    pub(super) fn last_active(&self, least: u16) -> Option<u32> {
        (self.active >= least).then(|| self.cohorts.fresh().last)
    }

    /// Whether the bytes it allocates per step keep rising.
    pub fn trends_up(&self) -> bool {
        self.active >= 8 && self.drift > 0.4
    }

    /// Whether that is so because it allocates ever more blocks, not larger ones.
    pub fn multiplies(&self) -> bool {
        self.trends_up() && self.more > 0.4
    }

    /// Whether it may be part of a finding soon and so is to be looked at.
    pub(super) fn deserves_a_look(&self, ended: u32, device_bytes: u64) -> bool {
        let entries = self.cohorts.len();
        if entries >= 3 || self.rise.run >= 4 {
            return true;
        }
        self.late_blocks == 0
            && self.cohorts.iter().next_back().is_some_and(|newest| {
                ended.saturating_sub(newest.last) <= 40 && newest.bytes >= device_bytes / 256
            })
    }

    pub fn memory_bytes(&self) -> usize {
        size_of::<Site>() + self.cohorts.memory_bytes() + self.history.memory_bytes()
    }
}
