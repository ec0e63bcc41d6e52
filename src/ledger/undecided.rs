//! Growth that was not seen long enough: what was counted so far, and what would decide it.
//!
//! Must not know: findings, frames.
//! Invariant: accuses nobody; at most [`OPEN`] entries of one device.

use super::accounts::Accounts;
use super::clock::EpochStart;
use super::cohort::Cohort;
use super::pattern::{self, MATURE, PERIODIC, STAYED, View};
use super::site::Site;

/// Most entries of one device.
pub const OPEN: usize = 8;

/// Growth of one site that was not seen long enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    pub device: i32,
    pub stack: u32,
    pub what: String,
    pub decides: String,
    pub bytes: u64,
}

/// Growth that is undecided when the report is written, most bytes first.
pub fn open(accounts: &Accounts, epochs: &[EpochStart]) -> Vec<Open> {
    let Some(&(ended, _)) = accounts.books().last_point() else { return Vec::new() };
    let view = View { ended, epochs, books: accounts.books(), sites: accounts.sites() };
    let matters = (accounts.live_bytes() / 50).max(1);
    let mut found: Vec<Open> = Vec::new();
    for site in accounts.sites().iter().filter(|site| site.level.bytes > 0) {
        let bytes: u64 = site.cohorts.iter().filter(|c| c.first >= 3).map(|c| c.bytes).sum();
        if bytes < matters {
            continue;
        }
        if let Some((what, decides)) = unripe(site, &view) {
            found.push(Open { device: accounts.device(), stack: site.stack, what, decides, bytes });
        }
    }
    found.sort_by_key(|open| std::cmp::Reverse(open.bytes));
    found.truncate(OPEN);
    found
}

/// A site that may be on its way to a finding and was not seen long enough: what was counted, what decides.
fn unripe(site: &Site, view: &View) -> Option<(String, String)> {
    if site.late_blocks > 0 || site.resets > 0 {
        return None;
    }
    let upto = view.ended.checked_sub(MATURE + 1)?;
    let begins = pattern::warm_up_ends(view).min(view.ended / 2);
    let old: Vec<Cohort> =
        site.cohorts.iter().filter(|c| c.first >= begins.max(3) && c.last <= upto).copied().collect();
    let found = pattern::bursts(&old, 1);
    let (first, newest) = (found.first()?, found.last()?);
    let quiet = view.ended - newest.end;
    match found.len() {
        1 if quiet < STAYED => Some((
            format!("allocated in step {} and still there {quiet} steps later", newest.start),
            format!("{STAYED} steps decide whether it stays"),
        )),
        2..PERIODIC if newest.start > first.start => {
            let gap = (newest.start - first.start) / (found.len() as u32 - 1);
            (quiet <= 2 * gap + 2).then(|| {
                (
                    format!(
                        "{} times in {} steps something stayed behind, about every {gap} steps",
                        found.len(),
                        view.ended + 1
                    ),
                    format!(
                        "{PERIODIC} times decide it: {} more steps",
                        gap * (PERIODIC - found.len()) as u32
                    ),
                )
            })
        }
        _ => None,
    }
}
