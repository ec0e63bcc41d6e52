//! A copy of what a report needs of one device's accounts, taken quickly while the device is locked.
//!
//! Must not know: frames, findings.
//! Invariant: sites stand as they were at the last step boundary, so that what the end of the program frees
//! changes nothing; before the first boundary, as they are.

use super::device_notes;
use super::model::{Device, Flow, Generation, PhaseBytes, SeriesPoint, Window};
use crate::ledger::clock::EpochStart;
use crate::ledger::notes::{self, Note};
use crate::ledger::stayed::{self, Stayed};
use crate::ledger::undecided::{self, Open};
use crate::ledger::{Accounts, PHASE_NUMBERS, PHASES, Phase};

/// Sites a report lists of one device.
pub const TOP_SITES: usize = 128;
/// Stretches of the run that a report lists.
const WINDOWS: usize = 8;

/// Sites of findings that it lists besides, the largest of them: a job in which everything leaks has as many
/// as it has call stacks.
pub const WANTED: usize = 128;

/// One device, copied.
#[derive(Clone, Debug, Default)]
pub struct DeviceView {
    pub device: Device,
    /// The phases of `device.phases`, in the same order: who knows the program's names puts them there.
    pub phases: Vec<Phase>,
    pub sites: Vec<SiteView>,
    pub notes: Vec<Note>,
    /// Growth that is undecided.
    pub open: Vec<Open>,
    /// What came after the warm-up and stayed.
    pub stayed: Option<Stayed>,
    /// A site that seems to accumulate, seen too briefly to say.
    pub unripe: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct SiteView {
    pub device: i32,
    pub number: u32,
    pub stack: u32,
    pub phase: Phase,
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub born_bytes: u64,
    pub born_blocks: u64,
    pub freed_bytes: u64,
    pub freed_blocks: u64,
    pub generations: Vec<Generation>,
    pub history: Vec<(u32, u64, u64)>,
}

impl DeviceView {
    /// Copies the largest sites, and those that `wanted` names (the sites of findings).
    pub fn of(accounts: &Accounts, wanted: &[u32]) -> DeviceView {
        DeviceView::with_epochs(accounts, wanted, &[])
    }

    /// The same, for a run whose epochs are known.
    pub fn with_epochs(accounts: &Accounts, wanted: &[u32], epochs: &[EpochStart]) -> DeviceView {
        let books = accounts.books();
        let began = books.boundaries() > 0;
        let size = |number: u32| {
            let site = &accounts.sites()[number as usize];
            if began { site.level.bytes } else { site.live_bytes }
        };
        let mut order: Vec<u32> = (0..accounts.sites().len() as u32).collect();
        if order.len() > TOP_SITES {
            order.select_nth_unstable_by_key(TOP_SITES, |&number| std::cmp::Reverse(size(number)));
            order.truncate(TOP_SITES);
        }
        order.retain(|&number| size(number) > 0);
        let mut missing: Vec<u32> = wanted.iter().copied().filter(|number| !order.contains(number)).collect();
        missing.retain(|&number| accounts.site(number).is_some());
        missing.sort_by_key(|&number| std::cmp::Reverse(size(number)));
        missing.truncate(WANTED);
        order.extend(missing);
        order.sort_by_key(|&number| std::cmp::Reverse(size(number)));
        // Of the program's own, those in which something was allocated.
        let own = (PHASES.len()..PHASE_NUMBERS).filter(|&number| accounts.phase_born()[number] > 0);
        let own = own.filter_map(|number| Phase::from_number(number as u32));
        let phases: Vec<Phase> = PHASES.into_iter().chain(own).collect();
        DeviceView {
            device: device(accounts, &phases),
            phases,
            sites: order.into_iter().map(|number| site(accounts, number, began)).collect(),
            notes: notes::notes(accounts).into_iter().chain(device_notes::notes(accounts)).collect(),
            open: undecided::open(accounts, epochs),
            stayed: stayed::stayed(accounts, epochs),
            unripe: notes::unripe(accounts),
        }
    }
}

fn device(accounts: &Accounts, phases: &[Phase]) -> Device {
    let books = accounts.books();
    let (peak_bytes, peak_step) = books.peak();
    let point = |p: &(u32, crate::ledger::device::DevicePoint)| SeriesPoint {
        step: p.0,
        allocated: p.1.allocated,
        reserved: p.1.reserved,
        active: p.1.active,
        peak: p.1.peak,
    };
    let mut series: Vec<SeriesPoint> = books.shown().iter().map(point).collect();
    if let Some(last) = books.last_point().map(point)
        && series.last().is_some_and(|point| point.step < last.step)
    {
        series.push(last);
    }
    let flow = books.flows().recent();
    Device {
        device: i64::from(accounts.device()),
        outside_bytes: books.last_sample().outside,
        total_bytes: books.last_sample().total,
        live_bytes: accounts.live_bytes(),
        live_blocks: accounts.live_blocks(),
        sites: accounts.sites().len() as u64,
        peak_bytes,
        peak_step: u64::from(peak_step),
        epoch_peaks: books.epoch_peaks().to_vec(),
        phases: phases
            .iter()
            .map(|phase| phase.number())
            .map(|number| PhaseBytes {
                phase: String::new(),
                live_bytes: accounts.phase_live()[number],
                allocated_bytes: accounts.phase_born()[number],
                recent_allocated: flow.map_or(0, |(_, flow)| flow.born[number]),
                recent_freed: flow.map_or(0, |(_, flow)| flow.freed[number]),
            })
            .collect(),
        series,
        windows: books.windows().joined(WINDOWS).iter().map(window).collect(),
        flow: flow.map(|(steps, flow)| Flow {
            steps,
            allocated_blocks: flow.blocks_born,
            freed_blocks: flow.blocks_freed,
            allocated_bytes: flow.born.iter().sum(),
            freed_bytes: flow.freed.iter().sum(),
        }),
        ..Device::default()
    }
}

fn window(window: &crate::ledger::windows::Window) -> Window {
    let three = |of: crate::ledger::windows::Range| [of.least, window.mean(of), of.most];
    Window {
        first_step: window.first,
        last_step: window.last,
        allocated: three(window.allocated),
        reserved: three(window.reserved),
        active: three(window.active),
        peak: window.peak,
        retries: window.retries,
    }
}

fn site(accounts: &Accounts, number: u32, began: bool) -> SiteView {
    let site = &accounts.sites()[number as usize];
    let (live_bytes, live_blocks) = if began {
        (site.level.bytes, u64::from(site.level.blocks))
    } else {
        (site.live_bytes, site.live_blocks)
    };
    SiteView {
        device: accounts.device(),
        number,
        stack: site.stack,
        phase: site.phase,
        live_bytes,
        live_blocks,
        born_bytes: site.born_bytes,
        born_blocks: site.born_blocks,
        freed_bytes: site.freed_bytes(),
        freed_blocks: site.freed_blocks(),
        generations: site
            .cohorts
            .iter()
            .map(|c| Generation { first: c.first, last: c.last, blocks: u64::from(c.blocks), bytes: c.bytes })
            .collect(),
        history: site.history.points().iter().map(|p| (p.0, p.1.bytes, u64::from(p.1.blocks))).collect(),
    }
}
