//! Growth that was not seen long enough: what was counted so far, and what would decide it.
//!
//! Must not know: findings, frames.
//! Invariant: accuses nobody; at most [`OPEN`] entries of one device.

use super::accounts::Accounts;
use super::clock::EpochStart;
use super::cohort::Cohort;
use super::pace;
use super::pattern::{self, MATURE, PERIODIC, SPORADIC, STAYED, View, WARM_UP};
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
    let view = View { ended, epochs, books: accounts.books(), sites: accounts.sites(), open_since: None };
    let matters = (accounts.live_bytes() / 200).max(1);
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
    let since = |begins: u32| {
        let old = site.cohorts.iter().filter(|c| c.first >= begins.max(3) && c.last <= upto);
        pattern::bursts(&old.copied().collect::<Vec<Cohort>>(), 1)
    };
    let mut found = since(begins);
    if found.len() == 1 {
        // With one alone, what came before the first epoch ended counts too: it was not once.
        found = since(begins.min(WARM_UP));
    }
    let (first, newest) = (found.first()?, found.last()?);
    let quiet = view.ended - newest.end;
    let gaps = found.windows(2).map(|pair| pair[1].start - pair[0].end.min(pair[1].start));
    let (Some(short), Some(long)) = (gaps.clone().min(), gaps.max()) else {
        // A site may have had as much in use before.
        let before = site.history.points().iter().filter(|point| point.0 < newest.start);
        if before.map(|point| point.1.blocks).max().is_some_and(|most| site.level.blocks <= most) {
            return None;
        }
        return (quiet < STAYED).then(|| {
            (
                format!("allocated in step {} and still there {quiet} steps later", newest.start),
                format!("{STAYED} steps decide whether it stays"),
            )
        });
    };
    if quiet > 2 * long + 2 {
        return None; // it paused for longer than ever
    }
    let steps = view.ended + 1;
    if found.len() < PERIODIC && long * 2 <= short * 3 {
        let gap = (newest.start - first.start) / (found.len() as u32 - 1);
        return Some((
            format!(
                "{} times in {steps} steps something stayed behind, about every {gap} steps",
                found.len()
            ),
            format!("{PERIODIC} times decide it: {} more steps", gap * (PERIODIC - found.len()) as u32),
        ));
    }
    let whole = pace::between(site, 0, view.ended).filter(|pace| pace.fell(true));
    if let Some([before, lately]) = whole.map(|pace| pace.halves) {
        return Some((
            format!(
                "in {} of {steps} steps something stayed behind, ever more rarely ({before:.0} in the first half, \
                 {lately:.0} in the second)",
                (before + lately).round()
            ),
            format!("{steps} more steps decide it: a cache that fills adds ever less, a leak goes on"),
        ));
    }
    let events: u32 = found.iter().map(|burst| burst.steps).sum();
    let decides = match SPORADIC.checked_sub(events as usize) {
        None | Some(0) => "as many times again decide whether it goes on".to_owned(),
        Some(more) => format!("{SPORADIC} times decide it: {more} more"),
    };
    Some((
        format!(
            "{events} times in {steps} steps something stayed behind, at no regular interval, the newest in step {}",
            newest.start
        ),
        decides,
    ))
}
