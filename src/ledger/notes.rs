//! What grew and is no leak: the noteworthy sites that settled, return, or follow the input.
//!
//! Must not know: findings, frames.
//! Invariant: a note never accuses; at most [`NOTES`] of them.

use super::accounts::Accounts;
use super::pattern;
use super::site::Site;

/// Most notes of one device.
pub const NOTES: usize = 8;
/// Blocks freed by the garbage collector before cycles are worth a word.
const CYCLES: u32 = 6;

/// Something that grew and is no leak. `kind` is one of the reasons of docs/findings.md.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Note {
    pub kind: &'static str,
    pub device: i32,
    /// The site's stack, if it is about one site.
    pub stack: Option<u32>,
    pub what: String,
    pub because: String,
    pub bytes: u64,
}

/// The notes of one device, most bytes first.
pub fn notes(accounts: &Accounts) -> Vec<Note> {
    let books = accounts.books();
    let Some(&(ended, last)) = books.last_point() else { return Vec::new() };
    let device = accounts.device();
    let matters = (accounts.live_bytes() / 50).max(1);
    let mut notes = Vec::new();
    let mut warm_up = 0;
    for site in accounts.sites() {
        let early: u64 = site.cohorts.iter().filter(|c| c.last < 3).map(|c| c.bytes).sum();
        if ended > pattern::WARM_UP {
            warm_up += early;
        }
        if let Some(note) = cycles(site).or_else(|| settled(site, ended)) {
            let bytes = note.bytes.max(site.level.bytes).max(early);
            if bytes >= matters {
                notes.push(Note { device, stack: Some(site.stack), bytes, ..note });
            }
        }
    }
    if warm_up >= matters {
        notes.push(Note {
            kind: "warm-up",
            device,
            what: "allocated in the first three steps and kept since".to_owned(),
            because: "it came once: parameters, gradients, optimizer state, workspaces".to_owned(),
            bytes: warm_up,
            ..Note::default()
        });
    }
    if pattern::grows_with_input(books) {
        let share = 100.0 * books.trending_share;
        let (kind, because) = if books.multiplying_share > 0.5 {
            (
                "growing-work",
                format!(
                    "a step does ever more: {share:.0} % of the sites that allocate make more blocks each time, of the \
                     same size (layers that were added, a loop that runs longer), and all of it is freed again"
                ),
            )
        } else {
            (
                "growing-input",
                format!(
                    "it follows the input: {share:.0} % of the sites that allocate need more each time, and all of it \
                     is freed again"
                ),
            )
        };
        notes.push(Note {
            kind,
            device,
            what: "the peak of each step keeps growing".to_owned(),
            because,
            bytes: last.peak,
            ..Note::default()
        });
    }
    notes.sort_by_key(|note| std::cmp::Reverse(note.bytes));
    notes.truncate(NOTES);
    notes
}

/// Blocks that only the garbage collector freed.
fn cycles(site: &Site) -> Option<Note> {
    let many = site.collected >= CYCLES
        && u64::from(site.collected) * 2 >= site.freed_blocks().min(site.late_blocks.max(1));
    many.then(|| {
        let each = site.born_bytes / site.born_blocks.max(1);
        let waits = u64::from(site.tooth.max(site.level.blocks)).max(1);
        Note {
            kind: "gc",
            what: format!("reference cycles: {} blocks were freed by the garbage collector alone", site.collected),
            because: format!(
                "it comes and goes with gc, up to {waits} blocks at a time; gc.collect() frees it at once, breaking the \
                 cycle makes it unnecessary"
            ),
            bytes: each * waits,
            ..Note::default()
        }
    })
}

/// The stack of a site that left blocks behind in most steps, where too few steps were seen to call it.
pub fn unripe(accounts: &Accounts) -> Option<u32> {
    let (ended, _) = *accounts.books().last_point()?;
    let events = |site: &Site| -> u32 {
        let mature = site.cohorts.iter().filter(|c| c.last + pattern::MATURE <= ended);
        mature.map(|c| c.events()).sum()
    };
    accounts
        .sites()
        .iter()
        .filter(|site| site.late_blocks == 0 && site.resets == 0)
        .map(|site| (events(site), site))
        .filter(|(events, _)| *events >= 5 && events * 2 >= ended.saturating_sub(pattern::MATURE))
        .max_by_key(|(_, site)| site.level.bytes)
        .map(|(_, site)| site.stack)
}

fn settled(site: &Site, ended: u32) -> Option<Note> {
    let note = |kind, what, because| Note { kind, what, because, ..Note::default() };
    let blocks = site.level.blocks;
    if site.resets > 0 && site.tooth >= 8 {
        return Some(note(
            "sawtooth",
            format!("grew to {} blocks, again and again", { site.tooth }),
            format!("it was freed each time ({} times)", site.resets),
        ));
    }
    // The program may have gone on after the last boundary.
    let later: Vec<u32> =
        site.cohorts.iter().filter(|c| c.last >= 3 && c.last <= ended).map(|c| c.last).collect();
    let (first, newest) = (*later.first()?, *later.last()?);
    if site.late_blocks >= 3 && blocks >= 4 && later.len() >= 3 && ended.saturating_sub(site.last_late) < 20 {
        return Some(note(
            "replaces",
            format!("filled to {} blocks", { blocks }),
            format!(
                "new ones replace the oldest ({} so far, the last at an age of {} steps)",
                site.late_blocks, site.last_age
            ),
        ));
    }
    let span = f64::from(newest - first);
    (later.len() >= 3 && f64::from(ended.saturating_sub(newest)) > span.max(20.0) / 2.0 + 10.0).then(|| {
        note(
            "settled",
            format!("grew between step {first} and step {newest}"),
            format!("it settled: nothing more stayed in the {} steps since", ended - newest),
        )
    })
}
