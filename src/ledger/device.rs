//! The books of one device at step boundaries: allocated, reserved, peaks; what the judge compares a site with.
//!
//! Must not know: single blocks, judgement.
//! Invariant: bounded however long the job runs; recent boundaries are exact, older ones thinned.

use super::clock::Phase;
use super::history::Thinned;
use super::site::Site;
use super::trend;
use super::windows::{Flow, Flows, Windows};

/// Boundaries whose mature bytes are remembered exactly.
const RECENT: usize = 64;
/// Points of the device's series.
pub const SERIES: usize = 64;
/// Points of the finer series that a report shows.
const SHOWN: usize = 256;
const EPOCHS: usize = 64;
/// Steps with a highest need so far that are remembered.
const RECORDS: usize = 32;
/// Sites remembered as those whose blocks made reserved memory grow.
const CREDITED: usize = 8;

/// What the allocator says of a device at a step boundary, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    pub allocated: u64,
    pub reserved: u64,
    pub active: u64,
    /// The device's memory, when known.
    pub total: Option<u64>,
    /// Memory of the device that this allocator did not hand out (other processes, libraries).
    pub outside: u64,
    /// How often the allocator had to free its cache and try again.
    pub retries: u64,
}

/// What happened on a device up to a step boundary.
pub(super) struct Boundary<'a> {
    pub ended: u32,
    pub epoch: u32,
    pub sample: &'a Sample,
    /// The highest requested bytes within the step, and the phase of it.
    pub high: (u64, Phase),
    /// Live bytes now.
    pub live: u64,
    pub mature: u64,
    pub active: u32,
    pub trending: u32,
    /// Of these, sites that allocate ever more blocks.
    pub multiplying: u32,
    /// Many of the usual sites allocated more than usual, as they do for a larger input.
    pub by_input: bool,
    /// The stack of the site that allocated most beyond its usual.
    pub most: Option<u32>,
    /// So do many of the sites whose newest birth was in neither backward nor optimizer.
    pub larger: bool,
    pub flow: Flow,
}

/// A step that needed more memory for itself than any before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    pub step: u32,
    /// What it needed beyond what lived before and after it.
    pub need: u64,
    pub phase: Phase,
    /// Most of what usually allocates needed more, as for a larger input.
    pub by_input: bool,
    /// The stack that allocated most beyond its usual.
    pub stack: Option<u32>,
}

/// One point of the device's series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DevicePoint {
    pub allocated: u64,
    pub reserved: u64,
    pub active: u64,
    /// The highest requested bytes within the step.
    pub peak: u64,
}

#[derive(Clone, Debug, Default)]
pub struct DeviceBooks {
    series: Thinned<DevicePoint, SERIES>,
    shown: Thinned<DevicePoint, SHOWN>,
    last: Sample,
    last_point: (u32, DevicePoint),
    mature: Vec<u64>,
    boundaries: u32,
    /// The highest requested bytes, by epoch (the newest epochs) and over all.
    epochs: Vec<(u32, u64)>,
    peak: u64,
    peak_step: u32,
    /// The newest step that needed more than all before, and how many of those there were.
    record: Option<Record>,
    records: u32,
    /// The steps of the first [`RECORDS`] of them.
    record_steps: Vec<u32>,
    /// Live bytes at the last boundary; what the program made before the first belongs to no step.
    live_before: Option<u64>,
    windows: Windows,
    flows: Flows,
    /// Memory outside the allocator when it was first known, and the lowest since.
    outside: Option<(u64, u64)>,
    /// The share of active sites whose bytes per step keep rising, smoothed, and their number now.
    pub trending_share: f32,
    pub trending: u32,
    /// The share of these that allocate ever more blocks, not larger ones; smoothed.
    pub multiplying_share: f32,
    /// Many sites of neither backward nor optimizer are among them: what an input makes larger shows there first.
    pub larger: bool,
    most_reserved: u64,
    credits: Vec<(u32, u64)>,
}

impl DeviceBooks {
    pub(super) fn boundary(&mut self, at: &Boundary) {
        let Boundary { ended, epoch, sample, high: (peak, phase), mature, active, trending, .. } = *at;
        self.boundaries += 1;
        self.last = *sample;
        let point = DevicePoint {
            allocated: sample.allocated,
            reserved: sample.reserved,
            active: sample.active,
            peak: peak.max(sample.allocated),
        };
        self.last_point = (ended, point);
        self.series.push(ended, point);
        self.shown.push_merging(ended, point, |kept, other| kept.peak = kept.peak.max(other.peak));
        if self.mature.is_empty() {
            self.mature.resize(RECENT, 0);
        }
        self.mature[ended as usize % RECENT] = mature;
        if peak > self.peak {
            (self.peak, self.peak_step) = (peak, ended);
        }
        let before = self.live_before.replace(at.live).unwrap_or(at.live);
        // Neither what stays nor what an earlier step left and this one frees is its need.
        let need = peak.saturating_sub(at.live.max(before));
        let most = self.record.map_or(0, |record| record.need);
        if need > most + most / 100 {
            let (by_input, stack) = (at.by_input, at.most);
            self.record = Some(Record { step: ended, need, phase, by_input, stack });
            self.records += 1;
            if self.record_steps.len() < RECORDS {
                self.record_steps.push(ended);
            }
        }
        self.windows.push(ended, &point, sample.retries);
        self.flows.push(at.flow);
        if sample.outside > 0 {
            let (first, least) = self.outside.unwrap_or((sample.outside, sample.outside));
            self.outside = Some((first, least.min(sample.outside)));
        }
        match self.epochs.last_mut() {
            Some(last) if last.0 == epoch => last.1 = last.1.max(peak),
            _ => {
                if self.epochs.len() == EPOCHS {
                    self.epochs.remove(1); // the first epoch is never forgotten
                }
                self.epochs.push((epoch, peak));
            }
        }
        if active > 0 {
            self.trending_share += (trending as f32 / active as f32 - self.trending_share) / 4.0;
        }
        if trending > 0 {
            let share = at.multiplying as f32 / trending as f32;
            self.multiplying_share += (share - self.multiplying_share) / 4.0;
        }
        self.trending = trending;
        self.larger = at.larger;
    }

    /// Reserved memory rose in this step: notes the site that keeps the largest block of it.
    pub(super) fn credit_reserved(&mut self, ended: u32, reserved: u64, sites: &[Site], dirty: &[u32]) {
        let rise = reserved.saturating_sub(self.most_reserved);
        self.most_reserved = self.most_reserved.max(reserved);
        if rise == 0 || ended == 0 {
            return;
        }
        let size = |site: u32| {
            let fresh = sites[site as usize].cohorts.fresh();
            if fresh.last == ended && fresh.blocks > 0 { fresh.bytes / u64::from(fresh.blocks) } else { 0 }
        };
        let Some(&site) = dirty.iter().max_by_key(|&&site| size(site)) else { return };
        if size(site) == 0 {
            return;
        }
        if let Some(credit) = self.credits.iter_mut().find(|credit| credit.0 == site) {
            credit.1 += rise;
        } else if self.credits.len() < CREDITED {
            self.credits.push((site, rise));
        } else if let Some(least) = self.credits.iter_mut().min_by_key(|credit| credit.1) {
            // Misra and Gries: a site that matters outlives the competition for the last place.
            if least.1 <= rise {
                *least = (site, rise);
            } else {
                least.1 -= rise;
            }
        }
    }

    /// The site whose blocks most often came with new reserved memory.
    pub fn reserving_site(&self) -> Option<u32> {
        self.credits.iter().max_by_key(|credit| credit.1).map(|credit| credit.0)
    }

    /// Live bytes at the end of `step` that were then at least two steps old; known for recent steps.
    pub fn mature_at(&self, step: u32) -> Option<u64> {
        let known = step <= self.last_point.0 && self.last_point.0 - step < RECENT as u32;
        known.then(|| self.mature.get(step as usize % RECENT).copied()).flatten()
    }

    pub fn series(&self) -> &[(u32, DevicePoint)] {
        self.series.points()
    }

    /// The same, finer: the peak of a point is the highest of all steps up to the next point.
    pub fn shown(&self) -> &[(u32, DevicePoint)] {
        self.shown.points()
    }

    /// The newest boundary, whether or not the thinned series holds it.
    pub fn last_point(&self) -> Option<&(u32, DevicePoint)> {
        (self.boundaries > 0).then_some(&self.last_point)
    }

    pub fn last_sample(&self) -> &Sample {
        &self.last
    }

    pub fn boundaries(&self) -> u32 {
        self.boundaries
    }

    /// The highest requested bytes and the step of it.
    pub fn peak(&self) -> (u64, u32) {
        (self.peak, self.peak_step)
    }

    /// The newest step that needed more for itself than all before, and how many of those there were.
    pub fn record(&self) -> Option<(Record, u32)> {
        self.record.map(|record| (record, self.records))
    }

    /// Whether those steps become ever rarer, as the highest of numbers in random order do.
    pub fn records_thin_out(&self) -> bool {
        let steps: Vec<(f64, f64)> = self.record_steps.iter().map(|step| (f64::from(*step), 1.0)).collect();
        trend::laplace(&steps, 0.0, f64::from(self.last_point.0)) < -1.0
    }

    /// Minimum, mean and maximum of what was allocated and reserved, in stretches of the run.
    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    /// What was allocated and freed, by phase.
    pub fn flows(&self) -> &Flows {
        &self.flows
    }

    /// Memory outside the allocator when it was first known.
    pub fn outside_at_first(&self) -> Option<u64> {
        self.outside.map(|(first, _)| first)
    }

    /// `(epoch, peak)` of the first and the newest epochs.
    pub fn epoch_peaks(&self) -> &[(u32, u64)] {
        &self.epochs
    }

    pub fn memory_bytes(&self) -> usize {
        self.series.memory_bytes()
            + self.shown.memory_bytes()
            + self.mature.capacity() * 8
            + self.epochs.capacity() * 16
            + CREDITED * 16
            + self.record_steps.capacity() * 4
            + self.windows.memory_bytes()
    }
}
