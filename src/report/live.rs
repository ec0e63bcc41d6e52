//! The state of a run as one who watches it sees it: much smaller than a report, and of this moment.
//!
//! Must not know: who asks, how it is drawn.
//! Invariant: bounded by what was asked for; sites and findings stand as at the last step boundary.

use super::model::{Report, Site};
use crate::ledger::Frame;
use serde::{Deserialize, Serialize};

/// One moment of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Live {
    pub pid: u32,
    pub rank: i64,
    pub world_size: i64,
    pub mode: String,
    pub command: Vec<String>,
    /// Seconds since accounting began.
    pub seconds: f64,
    pub steps: u64,
    pub epoch: u64,
    pub phase: String,
    /// The median duration of recent steps.
    pub step_seconds: Option<f64>,
    pub verdict: String,
    pub reason: String,
    /// Where a scraper may ask for metrics.
    pub metrics: Option<String>,
    pub devices: Vec<LiveDevice>,
    pub sites: Vec<LiveSite>,
    pub findings: Vec<LiveFinding>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveDevice {
    /// -1 is the host.
    pub device: i64,
    /// Now, in bytes.
    pub allocated: u64,
    pub reserved: u64,
    pub peak: u64,
    pub live_blocks: u64,
    pub total: Option<u64>,
    /// `[step, allocated, reserved]` at step boundaries.
    pub series: Vec<(u32, u64, u64)>,
    /// Mapped memory in address order: percent in use of each cell. Empty where torch allocates.
    pub map: Vec<u8>,
    pub cell_bytes: u64,
    pub largest_free: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveSite {
    pub device: i64,
    pub stack_id: u32,
    pub allocated_at: Option<Frame>,
    pub phase: String,
    pub live_bytes: u64,
    pub live_blocks: u64,
    /// Over the newer half of its history.
    pub bytes_per_step: f64,
    /// The step in which the oldest live block was born.
    pub oldest: Option<u32>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveFinding {
    pub class: String,
    pub device: i64,
    /// "+4.0 MiB/step".
    pub rate: String,
    pub live_bytes: u64,
    pub allocated_at: Option<Frame>,
    pub held_by: String,
    pub kept_at: String,
    pub fix: String,
}

impl Live {
    /// What a report says, in short. The devices' present figures are filled in by who has them.
    pub fn of(report: Report, sites: usize) -> Live {
        let run = report.run;
        let steps = run.steps;
        Live {
            pid: run.pid,
            rank: run.rank,
            world_size: run.world_size,
            mode: run.mode,
            command: run.command,
            steps,
            epoch: run.epochs,
            step_seconds: run.step_seconds,
            verdict: report.verdict.name().to_owned(),
            reason: report.reason,
            devices: report
                .devices
                .iter()
                .map(|device| {
                    let last = device.series.last().copied().unwrap_or_default();
                    LiveDevice {
                        device: device.device,
                        allocated: last.allocated,
                        reserved: last.reserved,
                        peak: device.peak_bytes,
                        live_blocks: device.live_blocks,
                        total: device.total_bytes,
                        series: device.series.iter().map(|p| (p.step, p.allocated, p.reserved)).collect(),
                        ..LiveDevice::default()
                    }
                })
                .collect(),
            sites: report.sites.iter().take(sites).map(|site| live_site(site, steps)).collect(),
            findings: report
                .findings
                .iter()
                .map(|found| LiveFinding {
                    class: found.class.name().to_owned(),
                    device: found.device,
                    rate: super::text::rate(found),
                    live_bytes: found.live_bytes,
                    allocated_at: found.allocated_at.clone(),
                    held_by: found.held_by.as_ref().map(|held| held.path.clone()).unwrap_or_default(),
                    kept_at: found.kept_at.as_ref().map_or_else(String::new, |kept| {
                        format!("{}:{}  {}", super::text::base(&kept.file), kept.line, kept.code.trim())
                    }),
                    fix: found.fix.clone(),
                })
                .collect(),
            ..Live::default()
        }
    }
}

fn live_site(site: &Site, steps: u64) -> LiveSite {
    let now = steps.saturating_sub(1);
    let first = site.history.first().map_or(now, |point| u64::from(point.0));
    let middle = first + now.saturating_sub(first) / 2;
    // The level at the middle of its life, or its first one.
    let then = site.history.iter().rev().find(|point| u64::from(point.0) <= middle).or(site.history.first());
    let bytes_per_step = then.map_or(0.0, |&(step, bytes, _)| {
        let passed = now.saturating_sub(u64::from(step));
        if passed == 0 { 0.0 } else { (site.live_bytes as f64 - bytes as f64) / passed as f64 }
    });
    LiveSite {
        device: site.device,
        stack_id: site.stack_id,
        allocated_at: site.allocated_at.clone().or_else(|| site.stack.first().cloned()),
        phase: site.phase.clone(),
        live_bytes: site.live_bytes,
        live_blocks: site.live_blocks,
        bytes_per_step,
        oldest: site.generations.iter().map(|generation| generation.first).min(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_that_of_the_newer_half() {
        let history = vec![(0, 1000, 1), (10, 1000, 1), (20, 1000, 1), (30, 2000, 11), (40, 3000, 21)];
        let site = Site { live_bytes: 3000, history, ..Site::default() };
        assert_eq!(live_site(&site, 41).bytes_per_step, 100.0);
        let flat = Site { live_bytes: 1000, history: vec![(0, 1000, 1)], ..Site::default() };
        assert_eq!(live_site(&flat, 400).bytes_per_step, 0.0);
        assert_eq!(live_site(&Site::default(), 0).bytes_per_step, 0.0);
    }
}
