//! At what pace survivors come: it holds, or new ones become ever rarer, as where a cache fills.
//!
//! Must not know: findings, holders.
//! Invariant: pure functions of a site's cohorts; what came after the newest event counts only where it is asked for.

use super::cohort::Cohort;
use super::pattern::MATURE;
use super::site::Site;
use super::trend;

/// Events below which nothing is said of their pace.
const LEAST: f64 = 8.0;
/// A call waits, or is taken back, when chance alone would make a pace fall so far this rarely (in standard errors).
const WAITS: f64 = -0.8;
const TAKEN_BACK: f64 = -3.3;
/// Below this it is not called.
const NOT_CALLED: f64 = -1.7;
/// The same of what was taken back: it is called again only when its pace holds.
const STILL: (f64, f64) = (-1.0, 0.9);
/// A gap of so many steps, and of so many usual ones, is a pause if events come as before after it, so many of them.
const PAUSE: (f64, f64) = (20.0, 4.0);
const RESUMED: (f64, f64) = (5.0, 0.8);
/// The second half has fewer than this share of the first half's events.
const FALLEN: f64 = 2.0 / 3.0;

/// The pace of a site's survivors over a stretch of the run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pace {
    /// Laplace's statistic, by the number of steps that could have had an event.
    pub z: f64,
    /// Events in the first half of the stretch, and in the second.
    pub halves: [f64; 2],
}

impl Pace {
    /// Whether a call is better put off a little: chance explains it, and so does a cache.
    pub fn is_doubtful(&self) -> bool {
        self.z < WAITS
    }

    pub fn thins(&self) -> bool {
        self.z < NOT_CALLED
    }

    /// Whether what was called is taken back: far beyond chance, and by much. `before`: it was taken back already.
    pub fn fell(&self, before: bool) -> bool {
        let (least, share) = if before { STILL } else { (TAKEN_BACK, FALLEN) };
        self.halves[0] + self.halves[1] >= LEAST && self.z < least && self.halves[1] < share * self.halves[0]
    }
}

/// Survivors born after `since`, up to `ended`.
pub(super) fn pace(site: &Site, since: u32, ended: u32) -> Pace {
    of(site.cohorts.iter().filter(|c| c.first > since && c.last + MATURE <= ended), since, ended)
}

/// The same over the whole run, its first step too.
pub(super) fn whole(site: &Site, ended: u32) -> Pace {
    of(site.cohorts.iter().filter(|c| c.last + MATURE <= ended), 0, ended)
}

/// Survivors born between the first event since `first` and the newest: a stop alone makes no pace fall.
pub(super) fn between(site: &Site, first: u32, ended: u32) -> Option<Pace> {
    let within = |c: &&Cohort| c.last >= first && c.last + MATURE <= ended;
    let from = site.cohorts.iter().find(within)?.first;
    let to = site.cohorts.iter().rev().find(within)?.first;
    if to <= from + 1 || paused(site.cohorts.iter().filter(within), from, to) {
        return None;
    }
    Some(of(site.cohorts.iter().filter(|c| within(c) && c.last < to), from, to))
}

/// Whether events between `from` and `to` ceased for a while and then came at nearly their pace before.
fn paused<'a>(cohorts: impl Iterator<Item = &'a Cohort>, from: u32, to: u32) -> bool {
    let all: Vec<&Cohort> = cohorts.collect();
    let Some(at) = (1..all.len()).max_by_key(|&at| all[at].first - all[at - 1].last) else { return false };
    let events = |part: &[&Cohort]| part.iter().map(|c| f64::from(c.events())).sum::<f64>();
    let (before, after) = (events(&all[..at]), events(&all[at..]));
    let (until, again) = (all[at - 1].last, all[at].first);
    let earlier = f64::from(until - from + 1) / before;
    let gap = f64::from(again - until);
    gap > PAUSE.0.max(PAUSE.1 * earlier)
        && after >= RESUMED.0
        && after / f64::from(to - again + 1) >= RESUMED.1 / earlier
}

fn of<'a>(cohorts: impl Iterator<Item = &'a Cohort>, from: u32, to: u32) -> Pace {
    let (from, to) = (f64::from(from), f64::from(to));
    let half = (from + to) / 2.0;
    let mut halves = [0.0, 0.0];
    let mut events = Vec::new();
    for cohort in cohorts {
        let (first, last) = (f64::from(cohort.first), f64::from(cohort.last));
        let count = f64::from(cohort.events());
        // An old cohort may span both halves: each has its part.
        let early = ((half.floor() + 1.0 - first) / (last + 1.0 - first)).clamp(0.0, 1.0);
        halves[0] += count * early;
        halves[1] += count * (1.0 - early);
        events.push(((first + last) / 2.0, count));
    }
    let share = (halves[0] + halves[1]) / (to - from).max(1.0);
    // One event a step at most: the more steps have one, the less their mean can wander.
    let free = (1.0 - share).max(0.0).sqrt();
    let z = if share >= 1.0 { 0.0 } else { trend::laplace(&events, from, to) / free };
    Pace { z, halves }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Phase;

    fn site(births: impl Iterator<Item = u32>) -> Site {
        let mut site = Site::new(1);
        births.for_each(|step| site.born(step, 512, Phase::Other));
        site
    }

    #[test]
    fn a_stop_is_no_fall_and_thinning_is() {
        let steady = site(0..100);
        assert!(!between(&steady, 0, 150).unwrap().fell(false));
        assert!(pace(&steady, 0, 150).thins(), "up to the end of the run, it did");
        let thinning = site((0..100).filter(|step| step % (1 + step / 15) == 0));
        assert!(between(&thinning, 0, 102).unwrap().fell(false));
    }

    #[test]
    fn a_pause_is_no_fall() {
        assert_eq!(between(&site((0..120).chain(220..230)), 0, 233), None);
        let filling = site((0..40).chain([55, 80, 81, 130]));
        assert!(between(&filling, 0, 133).unwrap().fell(false));
    }

    #[test]
    fn a_long_cohort_belongs_to_both_halves() {
        // At every step at first, at nearly every one later: the oldest cohort spans more than a half.
        for steps in [1_000, 5_000, 20_000] {
            let site = site((0..steps).filter(|step| step % 30 != 29 || *step < steps / 10));
            let pace = between(&site, 0, steps + 2).unwrap();
            assert!(!pace.fell(false), "{pace:?}");
            assert!((pace.halves[0] - pace.halves[1]).abs() < 0.1 * f64::from(steps), "{pace:?}");
        }
    }

    #[test]
    fn few_events_or_none_say_nothing() {
        assert_eq!(between(&site([3].into_iter()), 0, 90), None);
        assert!(!between(&site([1, 2, 30].into_iter()), 0, 90).unwrap().fell(false));
    }
}
