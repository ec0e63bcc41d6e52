//! What came after the warm-up and stayed, whoever judged it: so that nobody says that nothing accumulated where
//! something did.
//!
//! Must not know: findings, frames.
//! Invariant: accuses nobody; what comes and goes, or takes the place of something freed, is not counted.

use super::accounts::Accounts;
use super::clock::EpochStart;
use super::cohort::Cohort;
use super::pattern::{self, MATURE, View};
use super::site::Site;

/// Less than this share of what lives, or than so many bytes, is not worth a word.
const SHARE: u64 = 200;
const LEAST: u64 = 1024;

/// What stayed on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stayed {
    pub device: i32,
    /// The step after which it came.
    pub since: u32,
    pub bytes: u64,
    /// Sites, the largest first.
    pub sites: Vec<StayedSite>,
}

/// What stayed of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StayedSite {
    pub stack: u32,
    pub bytes: u64,
    /// The steps in which it came: how many, and the newest.
    pub events: u32,
    pub newest: u32,
    /// Older blocks of the site were freed meanwhile.
    pub replaces: bool,
}

/// What stayed of what was allocated after the warm-up, if it is worth a word.
pub fn stayed(accounts: &Accounts, epochs: &[EpochStart]) -> Option<Stayed> {
    let &(ended, _) = accounts.books().last_point()?;
    let view = View { ended, epochs, books: accounts.books(), sites: accounts.sites(), open_since: None };
    let since = pattern::warm_up_ends(&view);
    let mut sites: Vec<StayedSite> = Vec::new();
    let mut fell = 0;
    for site in accounts.sites() {
        let before = site.history.at(since).map_or(0, |point| point.1.bytes);
        fell += before.saturating_sub(site.level.bytes);
        sites.extend(of(site, since, ended, site.level.bytes.saturating_sub(before)));
    }
    sites.sort_by_key(|site| std::cmp::Reverse(site.bytes));
    let bytes = sites.iter().map(|site| site.bytes).sum::<u64>().saturating_sub(fell);
    let worth = bytes >= LEAST.max(accounts.live_bytes() / SHARE) && !sites.is_empty();
    worth.then(|| Stayed { device: accounts.device(), since, bytes, sites })
}

/// A site's blocks that were born after `since` and outlived their step, no more of them than the site `rose` by.
fn of(site: &Site, since: u32, ended: u32, rose: u64) -> Option<StayedSite> {
    let sawtooth = site.resets > 0 && site.level.blocks <= site.tooth + site.tooth / 8;
    if rose == 0 || sawtooth {
        return None;
    }
    let came: Vec<&Cohort> =
        site.cohorts.iter().filter(|c| c.last > since && c.last + MATURE <= ended).collect();
    // Of old steps that were put together, those that came after it: evenly, as far as anybody knows.
    let after = |c: &Cohort| u64::from(c.last - c.first.max(since + 1) + 1);
    let share = |c: &Cohort| c.bytes * after(c) / u64::from(c.last - c.first + 1);
    let bytes = came.iter().map(|c| share(c)).sum::<u64>().min(rose);
    let newest = came.last()?.last;
    (bytes > 0).then(|| StayedSite {
        stack: site.stack,
        bytes,
        events: came.iter().map(|c| c.events()).sum(),
        newest,
        replaces: site.late_blocks > 0,
    })
}
