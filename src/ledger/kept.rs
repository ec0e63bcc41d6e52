//! What a case keeps: its live blocks without those that the newest steps still use; and what an event leaves behind.
//!
//! Must not know: findings, holders.
//! Invariant: pure functions of a site's cohorts; a block that is in use is not taken for one that is kept.

use super::cohort::Cohort;
use super::pattern::{MATURE, Pattern, Shape};
use super::site::Site;
use super::trend;

/// Sizes of events that differ by no more than this share are the same.
const SAME: f64 = 0.05;
/// The share of events that must have the same size for it to be theirs.
const MOST: f64 = 0.75;

/// Blocks and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub blocks: u64,
    pub bytes: u64,
}

impl Held {
    fn of<'a>(cohorts: impl Iterator<Item = &'a Cohort>) -> Held {
        cohorts.fold(Held::default(), |sum, c| Held {
            blocks: sum.blocks + u64::from(c.blocks),
            bytes: sum.bytes + c.bytes,
        })
    }
}

/// What of the site's live blocks the case keeps at the boundary of step `ended`.
pub(super) fn held(site: &Site, pattern: &Pattern, ended: u32) -> Held {
    let young = |c: &&Cohort| c.last + MATURE > ended;
    // Of the newest steps' blocks those are part of it that came with an event, as many as one leaves behind.
    let newest = match pattern.shape {
        Shape::Regrow => return Held { blocks: u64::from(site.level.blocks), bytes: site.level.bytes },
        Shape::Burst => {
            let of = |c: &&Cohort| c.last >= pattern.first && c.first <= pattern.last;
            return Held::of(site.cohorts.iter().filter(of));
        }
        Shape::Steady => 0..u32::MAX,
        Shape::Periodic { .. } => pattern.last..pattern.last.saturating_add(2),
        Shape::Irregular => 0..0,
    };
    let mut sum = Held::of(site.cohorts.iter().filter(|c| !young(c)));
    let events: u32 = site.cohorts.iter().filter(|c| !young(c)).map(Cohort::events).sum();
    let each = sum.blocks.div_ceil(u64::from(events.max(1)));
    for cohort in site.cohorts.iter().filter(|c| young(c) && newest.contains(&c.first)) {
        let blocks = u64::from(cohort.blocks).min(each);
        sum.blocks += blocks;
        sum.bytes += cohort.bytes * blocks / u64::from(cohort.blocks);
    }
    sum
}

/// What an event leaves behind in bytes, and whether events differ in that: their own size where most have the same,
/// else the mean. `events`: bytes, and how many events they are of.
pub(super) fn each(events: &[(u64, u32)]) -> (f64, bool) {
    let single = |event: &&(u64, u32)| event.1 == 1;
    let mut sizes: Vec<f64> = events.iter().filter(single).map(|event| event.0 as f64).collect();
    let bytes: u64 = events.iter().map(|event| event.0).sum();
    let count: u32 = events.iter().map(|event| event.1).sum();
    let mean = bytes as f64 / f64::from(count.max(1));
    let Some(middle) = trend::median(&mut sizes) else { return (mean, false) };
    let same = sizes.iter().filter(|size| (**size - middle).abs() <= SAME * middle).count();
    if same as f64 >= MOST * sizes.len() as f64 { (middle, false) } else { (mean, true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_differs_is_no_mean() {
        assert_eq!(each(&[(100, 1), (100, 1), (100, 1), (150, 1)]), (100.0, false));
        assert_eq!(each(&[(100, 1), (300, 1), (100, 1), (300, 1)]), (200.0, true));
        assert_eq!(each(&[(1000, 10)]), (100.0, false));
    }
}
