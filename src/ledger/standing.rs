//! Whether a site that once accumulated still does: it grows, stopped, replaces, or was freed.
//!
//! Must not know: findings, stages of the program.
//! Invariant: a pure function of the accounts.

use super::kept;
use super::pattern::{MATURE, Pattern, Shape, View};
use super::site::Site;
use super::trend;

/// Fewer events than this tell their mean gap badly.
const FEW: u32 = 10;

/// Whether a site that once accumulated still does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Growing,
    /// Nothing new stayed since the step.
    Stopped(u32),
    /// New blocks replace old ones.
    Replaces,
    /// Most of it was freed.
    Freed,
}

/// Where a site stands that was recognised as `pattern`; `most` is the most blocks it had since.
pub fn standing(site: &Site, pattern: &Pattern, most: u64, view: &View) -> Standing {
    let ended = view.ended;
    if pattern.shape == Shape::Regrow {
        let quiet = ended.saturating_sub(site.rise.last.max(pattern.last));
        if site.level.bytes * 2 < most {
            return Standing::Freed;
        }
        let long = (8.0 * pattern.period).max(20.0).max(0.2 * f64::from(ended - pattern.first));
        return if f64::from(quiet) > long { Standing::Stopped(ended - quiet) } else { Standing::Growing };
    }
    let held = kept::held(site, pattern, ended);
    if held.blocks * 2 < most {
        return Standing::Freed;
    }
    if pattern.shape == Shape::Burst {
        return if held.bytes * 2 < pattern.bytes { Standing::Freed } else { Standing::Growing };
    }
    if site.cohorts.is_empty() {
        return Standing::Freed;
    }
    let span = f64::from(ended.saturating_sub(pattern.first));
    let newest = site.cohorts.iter().rev().find(|c| c.last + MATURE <= ended).map_or(0, |c| c.last);
    let (gaps, least) = match pattern.shape {
        // Of a few random gaps the mean is no good estimate.
        Shape::Irregular if pattern.events < FEW => (14.0, 40.0),
        Shape::Irregular => (9.0, 40.0),
        _ => (3.5, 20.0),
    };
    if f64::from(ended - newest) > (gaps * pattern.period).max(least).max(0.2 * span) {
        return Standing::Stopped(newest);
    }
    let since = site.history.at(pattern.first).map_or(0, |point| point.1.late);
    let alive: u64 =
        site.cohorts.iter().filter(|c| c.last >= pattern.first).map(|c| u64::from(c.blocks)).sum();
    if f64::from(site.level.late - since) > 0.6 * alive as f64 && !rising(site, pattern.first) {
        return Standing::Replaces;
    }
    let window = (3.5 * pattern.period).max(12.0).max(0.1 * span);
    let Some(then) = ended.checked_sub(window as u32).and_then(|step| site.history.at(step)) else {
        return Standing::Growing;
    };
    let (blocks, late_then, bytes_then) = (then.1.blocks, then.1.late, then.1.bytes);
    let late = f64::from(site.level.late - late_then);
    let rose = f64::from(site.level.blocks) - f64::from(blocks);
    if late < 3.0 || rose > 0.15 * late {
        return Standing::Growing;
    }
    // Sizes may rise while their number does not; bounded in blocks is bounded enough when old ones leave.
    let more = site.level.bytes as f64 > 1.3 * bytes_then as f64;
    if more && rising(site, then.0) { Standing::Growing } else { Standing::Replaces }
}

/// Whether live bytes kept rising since a step, as far as the history shows.
fn rising(site: &Site, from: u32) -> bool {
    let points = site.history.points().iter().filter(|p| p.0 >= from);
    let levels: Vec<f64> = points.map(|p| p.1.bytes as f64).collect();
    levels.len() >= 5 && trend::mann_kendall(&levels).0 > 0.8
}
