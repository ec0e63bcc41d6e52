//! Recognises how a site's survivors accumulate: steadily, at regular or irregular intervals, once, or as one
//! block that regrows.
//!
//! Must not know: findings, holders, what was said before.
//! Invariant: judges survivors (blocks that outlived their birth by two boundaries), never the sawtooth inside
//! a step; a pure function of the accounts and the clock.

use super::clock::EpochStart;
use super::cohort::Cohort;
use super::device::DeviceBooks;
use super::kept;
use super::pace::{self, Pace};
use super::site::Site;
use super::trend;
use serde::{Deserialize, Serialize};

/// A survivor is judged from the second boundary after that of its birth.
pub const MATURE: u32 = 2;
/// Steps in the window for per-iteration leaks, and how many of them must have been covered before a call.
const WINDOW: u32 = 24;
const SPAN: u32 = 22;
/// Steps that a call waits for the end of the first epoch, where epochs are known.
const FIRST_EPOCH: u32 = 32;
/// Steps that a call waits where fewer and fewer of them leave something behind.
const PATIENT_SPAN: u32 = 30;
/// The least share of the window's steps that leave a block behind.
const SHARE: f64 = 0.55;
/// Bursts before a regular rhythm is called, and before an irregular one is.
pub(super) const PERIODIC: usize = 4;
pub(super) const SPORADIC: usize = 5;
/// Fewer gaps than this are a rhythm only where they are nearly the same, this share apart: chance makes a few alike.
const FEW_GAPS: usize = 6;
const NEARLY: f64 = 0.08;
/// A second burst counts when it stayed for so many steps and has this share of the first one's bytes.
const AGAIN: u32 = 8;
const AGAIN_SHARE: u64 = 4;
/// Steps before an irregular rhythm is told from the irregularities of a beginning.
const SETTLING: u32 = 28;
/// Gaps shorter than this belong to the loop itself (two or three optimizers).
const SHORT_PERIOD: f64 = 4.0;
/// Steps at a run's start in which what stays is warm-up, and the share of a longer run.
pub const WARM_UP: u32 = 20;
const WARM_UP_SHARE: f64 = 0.1;
/// Steps that a single burst must have stayed.
pub(super) const STAYED: u32 = 18;
/// Consecutive rises of one block before it is called regrowing.
const RISES: u32 = 20;

/// The class of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    PerIteration,
    PerEpoch,
    Sporadic,
    OneOff,
    Fragmentation,
}

impl Class {
    pub fn name(self) -> &'static str {
        match self {
            Class::PerIteration => "per-iteration",
            Class::PerEpoch => "per-epoch",
            Class::Sporadic => "sporadic",
            Class::OneOff => "one-off",
            Class::Fragmentation => "fragmentation",
        }
    }
}

/// How the survivors came about, finer than the class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Steady,
    Regrow,
    Periodic { by_epoch: bool },
    Irregular,
    Burst,
}

/// What was recognised in one site.
#[derive(Clone, Debug, PartialEq)]
pub struct Pattern {
    pub class: Class,
    pub shape: Shape,
    /// First and newest event (step).
    pub first: u32,
    pub last: u32,
    /// Events (steady: steps; else bursts) that left something that is still alive.
    pub events: u32,
    /// Steps between events.
    pub period: f64,
    pub bytes_per_step: f64,
    /// Events differ in size: the rate is a mean.
    pub uneven: bool,
    /// Bytes of the survivors (burst: of the burst).
    pub bytes: u64,
    /// How sure the statistics are, 0..1.
    pub strength: f64,
    /// The newest birth steps of survivors, rising.
    pub births: Vec<u32>,
    /// "`hits` of the last `of` steps left a block behind", counted exactly.
    pub hits: u32,
    pub of: u32,
}

/// What a site is judged against.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The step that ended.
    pub ended: u32,
    pub epochs: &'a [EpochStart],
    pub books: &'a DeviceBooks,
    /// Every site of the device.
    pub sites: &'a [Site],
    /// The step in which the oldest request began that is open: what was made since may still be in use.
    pub open_since: Option<u32>,
}

/// A run of survivors born in neighbouring steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Burst {
    pub start: u32,
    pub end: u32,
    pub steps: u32,
    bytes: u64,
}

/// What a site shows, if anything.
pub fn recognise(site: &Site, view: &View) -> Option<Pattern> {
    if let Some(pattern) = regrow(site, view) {
        return Some(pattern);
    }
    let upto = view.ended.checked_sub(MATURE)?;
    let old: Vec<Cohort> = site.cohorts.iter().filter(|c| c.last <= upto).copied().collect();
    let newest = old.last()?;
    // Nothing new for long: whatever it was, it does not accumulate now. A burst is the exception.
    let bursts = bursts(&old, 1);
    let steady = if first_epoch_may_clear(view) { None } else { steady(site, &old, upto) };
    steady
        .or_else(|| periodic(site, view))
        .or_else(|| irregular(site, &bursts, view))
        .or_else(|| (view.ended - newest.last >= STAYED).then(|| burst(site, &old, view)).flatten())
}

pub(super) fn bursts(old: &[Cohort], join: u32) -> Vec<Burst> {
    let mut found: Vec<Burst> = Vec::with_capacity(old.len());
    for cohort in old {
        match found.last_mut() {
            Some(burst) if cohort.first - burst.end <= join => {
                burst.end = cohort.last;
                burst.steps += cohort.events();
                burst.bytes += cohort.bytes;
            }
            _ => found.push(Burst {
                start: cohort.first,
                end: cohort.last,
                steps: cohort.events(),
                bytes: cohort.bytes,
            }),
        }
    }
    found
}

fn births(old: &[Cohort]) -> Vec<u32> {
    old.iter().map(|c| c.last).collect()
}

/// Whether the level rose by most of what was born since `first` and is still alive: false where new blocks
/// only replace old ones.
fn accumulates(site: &Site, first: u32, old: &[Cohort]) -> bool {
    let born: f64 = old.iter().filter(|c| c.last >= first).map(|c| f64::from(c.blocks)).sum();
    let before = match first.checked_sub(1).and_then(|step| site.history.at(step)) {
        Some(point) => (point.1.blocks, point.1.late),
        None => (0, 0),
    };
    let rose = f64::from(site.level.blocks) - f64::from(before.0);
    let late = f64::from(site.level.late - before.1);
    if rose >= 0.5 * born && late <= 0.34 * born {
        // Where blocks are known to die late, only a level never seen before counts as growth.
        let history = site.history.points().iter().filter(|p| p.0 < first);
        let high = history.map(|p| p.1.blocks).max().unwrap_or(0);
        return site.late_blocks as f64 <= 0.5 * born
            || f64::from(site.level.blocks) >= 1.3 * f64::from(high);
    }
    // Long-lived blocks that come and go at a site that also leaks: the level itself must keep rising.
    let levels: Vec<f64> = site.history.points().iter().map(|p| f64::from(p.1.blocks)).collect();
    let third = levels.len() * 2 / 3;
    levels.len() >= 10
        && trend::mann_kendall(&levels).0 > 0.92
        && trend::mann_kendall(&levels[third..]).0 > 0.8
        && rose > 0.0
}

/// The pace of the births of survivors, and whether they thin out. What begins with the run may be a cache that
/// fills: there every event counts, the first too, and less is tolerated.
fn thinning(site: &Site, first: u32, ended: u32) -> (Pace, bool) {
    if site.cohorts.iter().next().is_some_and(|c| c.first <= 3) {
        let pace = pace::whole(site, ended);
        return (pace, pace.z < -1.2);
    }
    let pace = pace::pace(site, first, ended);
    (pace, pace.thins())
}

/// How many times the usual evidence a site must show: more where blocks are known to die late.
fn doubt(site: &Site, events: u32) -> usize {
    if site.late_blocks * 2 > u64::from(events) { 2 } else { 1 }
}

/// A site that once lost most of its blocks must grow beyond what it had then.
fn outgrew_resets(site: &Site) -> bool {
    site.resets == 0 || f64::from(site.level.blocks) > 1.5 * f64::from(site.tooth)
}

fn steady(site: &Site, old: &[Cohort], upto: u32) -> Option<Pattern> {
    let from = (upto + 1).saturating_sub(WINDOW);
    let newest = old.last()?;
    if upto + 1 - old[0].first < SPAN || upto - newest.last > 6 {
        return None;
    }
    let hits_in = |from: u32, to: u32| -> f64 {
        let within = old.iter().filter(|c| c.last >= from && c.first < to);
        within
            .map(|c| {
                let inside = f64::from((c.last + 1).min(to) - c.first.max(from));
                f64::from(c.events()) * inside / f64::from(c.last - c.first + 1)
            })
            .sum()
    };
    let hits = hits_in(from, upto + 1);
    // The window must be covered, not only its end.
    if hits_in(from, from + WINDOW / 3) < 1.9 {
        return None;
    }
    let share = hits / f64::from(upto + 1 - from);
    if share < SHARE && !(share >= 0.3 && short_rhythm(old)) {
        return None;
    }
    // Nearly every step is a leak at any pace; else the pace must hold.
    let pace = pace::pace(site, old[0].first, upto + MATURE);
    let early = upto + 1 - old[0].first < PATIENT_SPAN;
    let thins = share < 0.9 && (pace.thins() || early && pace.is_doubtful());
    if thins || !outgrew_resets(site) || !accumulates(site, from, old) {
        return None;
    }
    let first = old[0].first;
    let events: u32 = old.iter().map(|c| c.events()).sum();
    let bytes: u64 = old.iter().map(|c| c.bytes).sum();
    // A merged cohort may begin before the window: only its part within counts.
    let within = |c: &Cohort| {
        let inside = c.last + 1 - c.first.max(from).min(c.last + 1);
        c.bytes as f64 * f64::from(inside) / f64::from(c.last - c.first + 1)
    };
    let begins = from.max(first);
    let simple = old.iter().map(within).sum::<f64>() / f64::from(upto + 1 - begins);
    let share_now = share.min(1.0);
    let (hits_recent, of) = recent_hits(old, upto);
    Some(Pattern {
        class: Class::PerIteration,
        shape: Shape::Steady,
        first,
        last: newest.last,
        events,
        period: 1.0 / share_now.max(0.01),
        bytes_per_step: history_slope(site, first).filter(|slope| *slope > 0.0).unwrap_or(simple),
        uneven: kept::each(&old.iter().map(|c| (c.bytes, c.events())).collect::<Vec<_>>()).1,
        bytes,
        strength: (0.5 + 0.5 * share_now) * (1.0 - 2f64.powf(-hits / 6.0)),
        births: births(old),
        hits: hits_recent,
        of,
    })
}

/// How many of the last steps left a block behind, over the longest stretch of at most 200 steps that the
/// table knows exactly.
fn recent_hits(old: &[Cohort], upto: u32) -> (u32, u32) {
    let start = old.iter().position(|c| upto - c.first < 200).unwrap_or(old.len() - 1);
    let hits = old[start..].iter().map(|c| c.events()).sum();
    (hits, upto - old[start].first + 1)
}

/// In a first epoch that is still short: what it gathers may be dropped at its end. An epoch that began later
/// is the second, since torch's hooks see the first one end and not begin.
fn first_epoch_may_clear(view: &View) -> bool {
    matches!(view.epochs, [only] if only.step <= 1 && view.ended < only.step + FIRST_EPOCH)
}

/// The newest events come every second or third step.
fn short_rhythm(old: &[Cohort]) -> bool {
    let starts: Vec<f64> =
        old.iter().rev().filter(|c| c.first == c.last).take(9).map(|c| f64::from(c.first)).collect();
    let gaps: Vec<f64> = starts.windows(2).map(|pair| pair[0] - pair[1]).collect();
    gaps.len() >= 5
        && trend::mean_and_cv(&gaps).is_some_and(|(mean, cv)| (mean < SHORT_PERIOD - 0.5) && cv < 0.35)
}

/// Theil–Sen slope of live bytes over the history since `first`.
fn history_slope(site: &Site, first: u32) -> Option<f64> {
    let points: Vec<(f64, f64)> = site
        .history
        .points()
        .iter()
        .filter(|p| p.0 >= first)
        .map(|p| (f64::from(p.0), { p.1.bytes } as f64))
        .collect();
    if points.len() < 5 { None } else { trend::theil_sen(&points) }
}

/// The typical gap, if most gaps are it or a small multiple of it.
fn rhythm(gaps: &[f64]) -> Option<f64> {
    if gaps.len() < PERIODIC - 1 {
        return None;
    }
    let period = trend::median(&mut gaps.to_vec())?;
    let close = |gap: f64, times: f64| (gap - period * times).abs() <= (0.2 * period).max(1.0);
    let once = gaps.iter().filter(|gap| close(**gap, 1.0)).count();
    let fits = gaps.iter().filter(|gap| (1..=3).any(|times| close(**gap, f64::from(times)))).count();
    let all = gaps.len() as f64;
    (once as f64 >= 0.75 * all || once as f64 >= 0.6 * all && fits as f64 >= 0.9 * all).then_some(period)
}

/// The same where chance does not explain it: few gaps must be nearly the same.
fn sure_rhythm(gaps: &[f64]) -> Option<f64> {
    let period = rhythm(gaps)?;
    let near = |gap: f64| (gap - period).abs() <= (NEARLY * period).max(1.0);
    (gaps.len() >= FEW_GAPS || gaps.iter().all(|gap| near(*gap))).then_some(period)
}

/// Every second or third step, without exception.
fn every_few(gaps: &[f64]) -> bool {
    gaps.len() >= PERIODIC - 1 && gaps[0] < SHORT_PERIOD && gaps.iter().all(|gap| *gap == gaps[0])
}

/// Bursts of which each lies in an epoch of its own, at about the same place in it, in nearly every epoch.
fn aligned(bursts: &[Burst], epochs: &[EpochStart]) -> Option<f64> {
    let known: Vec<(usize, u32)> = bursts
        .iter()
        .filter_map(|burst| {
            let at = epochs.iter().rposition(|epoch| epoch.step <= burst.start)?;
            Some((at, burst.start - epochs[at].step))
        })
        .collect();
    if known.len() < PERIODIC || known.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return None;
    }
    let (first, last) = (known[0].0, known[known.len() - 1].0);
    let length = f64::from(epochs[last].step - epochs[first].step) / (last - first) as f64;
    let offsets: Vec<u32> = known.iter().map(|k| k.1).collect();
    let spread = f64::from(offsets.iter().max()? - offsets.iter().min()?);
    let filled = known.len() as f64 / (last - first + 1) as f64;
    (length >= SHORT_PERIOD && filled >= 0.75 && spread <= (0.2 * length).max(2.0)).then_some(length)
}

/// The mean length of recent epochs in steps, when at least two whole ones are known.
fn epoch_length(epochs: &[EpochStart]) -> Option<f64> {
    let (first, last) = (epochs.first()?, epochs.last()?);
    (epochs.len() >= 3).then(|| f64::from(last.step - first.step) / (epochs.len() - 1) as f64)
}

fn periodic(site: &Site, view: &View) -> Option<Pattern> {
    // The rhythm of the older ones vouches for the newest: one boundary is age enough.
    let grown: Vec<Cohort> = site.cohorts.iter().filter(|c| c.last < view.ended).copied().collect();
    let bursts = &bursts(&grown, 1)[..];
    if bursts.len() < PERIODIC || bursts.len() < PERIODIC * doubt(site, bursts.len() as u32) {
        return None;
    }
    let newest = bursts.last()?;
    let starts: Vec<f64> = bursts.iter().map(|burst| f64::from(burst.start)).collect();
    let gaps: Vec<f64> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let recent = &gaps[gaps.len().saturating_sub(8)..];
    let by_epoch = aligned(&bursts[bursts.len().saturating_sub(8)..], view.epochs);
    let period = by_epoch.or_else(|| sure_rhythm(recent))?;
    let quiet = f64::from(view.ended - newest.start);
    if by_epoch.is_none() && period < SHORT_PERIOD * 1.5 && bursts.len() < PERIODIC + 2 {
        return None;
    }
    if period < SHORT_PERIOD - 0.5 || quiet > 1.8 * period + 2.0 {
        return None;
    }
    let first = bursts[bursts.len().saturating_sub(9)].start;
    if thinning(site, first, view.ended).1 {
        return None;
    }
    let old: Vec<Cohort> = grown.iter().filter(|c| c.last >= first).copied().collect();
    if !outgrew_resets(site) || !accumulates(site, first, &old) {
        return None;
    }
    // Several times within an epoch is the loop's own rhythm (an interval, several optimizers).
    let often = by_epoch.is_none() && epoch_length(view.epochs).is_some_and(|length| period < 0.55 * length);
    let cv = trend::mean_and_cv(recent).map_or(1.0, |(_, cv)| cv);
    Some(Pattern {
        class: if often { Class::PerIteration } else { Class::PerEpoch },
        shape: Shape::Periodic { by_epoch: by_epoch.is_some() },
        strength: (1.0 - cv.min(0.5)) * (1.0 - 2f64.powf(-(bursts.len() as f64) / 2.0)),
        ..from_bursts(bursts, period, &old, view.ended)
    })
}

fn irregular(site: &Site, bursts: &[Burst], view: &View) -> Option<Pattern> {
    let skip = bursts.iter().take_while(|burst| burst.end < 2).count();
    let bursts = &bursts[skip..];
    let events: u32 = bursts.iter().map(|burst| burst.steps).sum();
    if view.ended < SETTLING
        || bursts.len() + 1 < SPORADIC
        || (events as usize) < SPORADIC * doubt(site, events)
    {
        return None;
    }
    let (first, newest) = (bursts[0], bursts[bursts.len() - 1]);
    let from = f64::from(first.start);
    let gaps: Vec<f64> = bursts.windows(2).map(|pair| f64::from(pair[1].start - pair[0].start)).collect();
    let recent = &gaps[gaps.len().saturating_sub(8)..];
    // What may be a rhythm waits for one event more, not longer.
    let regular = if bursts.len() <= SPORADIC { rhythm(recent) } else { sure_rhythm(recent) };
    let regular = regular.is_some_and(|period| period >= SHORT_PERIOD) || every_few(recent);
    let (pace, thins) = thinning(site, first.start, view.ended);
    let quiet = f64::from(view.ended - newest.end);
    if regular || thins || quiet > 0.4 * (f64::from(view.ended) - from) {
        return None;
    }
    let old: Vec<Cohort> = site
        .cohorts
        .iter()
        .filter(|c| c.last + MATURE <= view.ended && c.last >= first.start)
        .copied()
        .collect();
    if !outgrew_resets(site) || !accumulates(site, first.start, &old) {
        return None;
    }
    let period = f64::from(newest.start - first.start) / (bursts.len() - 1) as f64;
    let found = from_bursts(bursts, period, &old, view.ended);
    // That nothing came since the newest belongs to the rate.
    let since = f64::from(view.ended - first.start) / f64::from(found.events.max(1));
    Some(Pattern {
        class: Class::Sporadic,
        shape: Shape::Irregular,
        strength: (1.0 - 2f64.powf(-(bursts.len() as f64) / 3.0)) * (1.0 + pace.z.clamp(-3.0, 0.0) / 4.0),
        bytes_per_step: found.bytes_per_step * period.max(1.0) / period.max(since).max(1.0),
        ..found
    })
}

fn from_bursts(bursts: &[Burst], period: f64, old: &[Cohort], ended: u32) -> Pattern {
    let (first, newest) = (bursts[0], bursts[bursts.len() - 1]);
    let bytes: u64 = bursts.iter().map(|burst| burst.bytes).sum();
    let times = |b: &Burst| if b.end - b.start > 2 { b.steps } else { 1 };
    let events: u32 = bursts.iter().map(times).sum();
    // What the newest steps still use would count as theirs.
    let ripe: Vec<(u64, u32)> =
        bursts.iter().filter(|b| b.end + MATURE <= ended).map(|b| (b.bytes, times(b))).collect();
    let (each, uneven) = kept::each(&ripe);
    Pattern {
        class: Class::PerEpoch,
        shape: Shape::Irregular,
        first: first.start,
        last: newest.start,
        events,
        period,
        bytes_per_step: each / period.max(1.0),
        uneven,
        bytes,
        strength: 0.0,
        births: births(old),
        hits: events,
        of: newest.start - first.start + 1,
    }
}

/// Steps in which what is allocated and stays counts as warm-up.
pub fn warm_up_ends(view: &View) -> u32 {
    let share = (f64::from(view.ended) * WARM_UP_SHARE) as u32;
    let first_epoch = match view.epochs {
        [first, second, ..] if first.epoch <= 1 => second.step + 1,
        _ => 0,
    };
    WARM_UP.max(share).max(first_epoch.min(view.ended / 2))
}

fn burst(site: &Site, old: &[Cohort], view: &View) -> Option<Pattern> {
    let later: Vec<Cohort> = old.iter().filter(|c| c.last >= 3).copied().collect();
    let found = bursts(&later, 3);
    let [burst] = found.as_slice() else { return None };
    if view.open_since.is_some_and(|open| burst.end >= open) {
        return None; // a request that is open may still use it
    }
    if site.late_blocks > 0 || burst.start < warm_up_ends(view) || burst.end - burst.start > 8 {
        return None;
    }
    let stayed = f64::from(view.ended - burst.end);
    Some(Pattern {
        class: Class::OneOff,
        shape: Shape::Burst,
        first: burst.start,
        last: burst.end,
        events: 1,
        period: stayed,
        bytes_per_step: 0.0,
        uneven: false,
        bytes: burst.bytes,
        strength: 0.5 + 0.4 * (stayed / 100.0).min(1.0),
        births: births(&later),
        hits: 1,
        of: 1,
    })
}

/// The step in which a site whose single burst is known left as much behind once more, apart from it.
pub(super) fn came_again(site: &Site, burst: &Pattern, ended: u32) -> Option<u32> {
    let apart = |c: &&Cohort| c.first > burst.last + 3 && c.last + AGAIN <= ended;
    let again = site.cohorts.iter().find(|c| apart(c) && c.bytes * AGAIN_SHARE >= burst.bytes);
    again.map(|c| c.first)
}

fn regrow(site: &Site, view: &View) -> Option<Pattern> {
    let rise = &site.rise;
    if rise.run < 6 || site.level.blocks != rise.blocks {
        return None;
    }
    let span = f64::from(rise.last - rise.start);
    let gap = span / f64::from(rise.run);
    let enough = rise.run >= RISES || gap >= SHORT_PERIOD && rise.run >= 6;
    let bytes = site.level.bytes;
    let grown = bytes - rise.start_bytes;
    let stale = f64::from(view.ended - rise.last) > (2.5 * gap).max(6.0);
    if !enough || stale || grown * 2 < rise.start_bytes || bytes * 2 < rise.peak * 3 {
        return None;
    }
    // What regrows is made anew each time; where most of it is older, the sizes follow the input.
    let anew = site.cohorts.iter().filter(|c| c.last + 1 >= rise.last).map(|c| c.bytes).sum::<u64>();
    if anew * 2 < bytes || grows_with_input(view.books) {
        return None;
    }
    Some(Pattern {
        class: if gap < SHORT_PERIOD {
            Class::PerIteration
        } else if rise.regular() {
            Class::PerEpoch
        } else {
            Class::Sporadic
        },
        shape: Shape::Regrow,
        first: rise.start,
        last: rise.last,
        events: rise.run,
        period: gap,
        bytes_per_step: grown as f64 / span.max(1.0),
        uneven: false,
        bytes,
        strength: 1.0 - 2f64.powf(-f64::from(rise.run) / 8.0),
        births: vec![rise.last],
        hits: rise.run,
        of: rise.last - rise.start,
    })
}

/// Most of what the program allocates per step keeps growing: longer sequences, larger images. Where only backward
/// and optimizer need more, layers were unfrozen.
pub fn grows_with_input(books: &DeviceBooks) -> bool {
    books.larger && books.trending > 3 && books.trending_share > 0.2
}
