//! Puts a report together from the run, the devices' views and the judge.
//!
//! Must not know: forms, files, locks.
//! Invariant: the verdict follows from the findings; "not a leak, because" is said of what was suspected.

use super::describe;
use super::model::{NotLeak, Report, Run, SCHEMA, Site, Undecided};
use super::summing;
use super::view::{DeviceView, SiteView};
use crate::ledger::{Case, Class, Clock, Judge, Shape, State, Symbols};
use serde_json::{Map, Value};

/// Most entries under "not leaks".
const NOT_LEAKS: usize = 12;

/// One device's part: its view and what the allocator says (the keys of torch.cuda.memory_stats()).
#[derive(Clone, Debug, Default)]
pub struct DevicePart {
    pub view: DeviceView,
    pub stats: Map<String, Value>,
}

/// The report. `run.steps`, `run.epochs` and `run.step_seconds` are filled in from judge and clock.
pub fn assemble(
    mut run: Run,
    parts: Vec<DevicePart>,
    judge: &Judge,
    clock: &Clock,
    symbols: &dyn Symbols,
) -> Report {
    run.steps = run.steps.max(u64::from(judge.steps()));
    run.epochs = run.epochs.max(clock.epochs());
    run.step_seconds = run.step_seconds.or_else(|| clock.step_seconds());
    let mut findings: Vec<_> = judge
        .findings()
        .iter()
        .filter(|finding| finding.is_open())
        .map(|found| (found, describe::finding(judge, found, symbols, clock)))
        .collect();
    for (found, finding) in &mut findings {
        let part = parts.iter().find(|part| part.view.device.device == finding.device);
        let site = match &found.fragmentation {
            Some(seen) => part.zip(seen.site).and_then(|(part, site)| find(part, |view| view.number == site)),
            None => finding
                .sites_in_finding
                .first()
                .and_then(|lead| part.and_then(|part| find(part, |view| view.stack == lead.stack_id))),
        };
        let Some(site) = site else { continue };
        finding.phase = clock.phase_name(site.phase);
        finding.series = site.history.clone();
        if found.fragmentation.is_some() {
            finding.allocated_at = symbols.allocated_at(site.stack);
            finding.stack = symbols.frames(site.stack);
        }
    }
    let mut findings: Vec<_> = findings.into_iter().map(|(_, finding)| finding).collect();
    findings.sort_by(|a, b| {
        (a.class == Class::Fragmentation)
            .cmp(&(b.class == Class::Fragmentation))
            .then(b.live_bytes.cmp(&a.live_bytes))
    });
    let undecided = undecided(judge, &parts, symbols);
    let not_leaks = not_leaks(judge, &parts, symbols);
    let (verdict, reason) = summing::verdict(&run, &findings, &undecided, &parts, judge, symbols);
    let mut sites: Vec<Site> =
        parts.iter().flat_map(|part| &part.view.sites).map(|view| site(view, symbols, clock)).collect();
    sites.sort_by_key(|site| std::cmp::Reverse(site.live_bytes));
    let devices = parts
        .into_iter()
        .map(|part| {
            let mut device = part.view.device;
            device.stats = part.stats;
            for (bytes, phase) in device.phases.iter_mut().zip(&part.view.phases) {
                bytes.phase = clock.phase_name(*phase);
            }
            device
        })
        .collect();
    Report {
        schema: SCHEMA,
        verdict,
        reason,
        run,
        devices,
        findings,
        not_leaks,
        undecided,
        remarks: Vec::new(),
        sites,
    }
}

/// Growth that nobody has judged yet: candidates that wait, and sites on their way to one.
fn undecided(judge: &Judge, parts: &[DevicePart], symbols: &dyn Symbols) -> Vec<Undecided> {
    // A case that thins is undecided, whatever was said of it before.
    let judged = |case: &&Case| {
        let open = matches!(&case.state, State::Dismissed { reason, .. } if reason.is_empty());
        // So is one that came once, where more of it came or may come.
        let again = case.pattern.shape == Shape::Burst && (case.may_come_again() || case.settled.is_some());
        !open && (case.is_open() || case.thins.is_none() && !again)
    };
    let known: Vec<(i32, u32)> =
        judge.cases().iter().filter(judged).map(|case| (case.device, case.stack)).collect();
    let mut said: Vec<Undecided> = Vec::new();
    for open in parts.iter().flat_map(|part| &part.view.open) {
        if known.contains(&(open.device, open.stack)) {
            continue;
        }
        let allocated_at = symbols.allocated_at(open.stack);
        let same = |said: &&mut Undecided| said.what == open.what && said.allocated_at == allocated_at;
        if let Some(said) = said.iter_mut().find(same) {
            said.bytes += open.bytes;
            continue;
        }
        said.push(Undecided {
            what: open.what.clone(),
            decides: open.decides.clone(),
            device: i64::from(open.device),
            bytes: open.bytes,
            allocated_at,
        });
    }
    said
}

fn find(part: &DevicePart, which: impl Fn(&SiteView) -> bool) -> Option<&SiteView> {
    part.view.sites.iter().find(|view| which(view))
}

fn site(view: &SiteView, symbols: &dyn Symbols, clock: &Clock) -> Site {
    Site {
        device: i64::from(view.device),
        stack_id: view.stack,
        allocated_at: symbols.allocated_at(view.stack),
        stack: symbols.frames(view.stack),
        live_bytes: view.live_bytes,
        live_blocks: view.live_blocks,
        allocated_bytes: view.born_bytes,
        allocated_blocks: view.born_blocks,
        freed_bytes: view.freed_bytes,
        freed_blocks: view.freed_blocks,
        phase: clock.phase_name(view.phase),
        generations: view.generations.clone(),
        history: view.history.clone(),
    }
}

fn not_leaks(judge: &Judge, parts: &[DevicePart], symbols: &dyn Symbols) -> Vec<NotLeak> {
    let mut said: Vec<NotLeak> = Vec::new();
    // What is undecided is said there.
    let open = |case: &Case| {
        let mut open = parts.iter().flat_map(|part| &part.view.open);
        case.thins.is_some() && open.any(|open| (open.device, open.stack) == (case.device, case.stack))
    };
    let mut stacks = Vec::new();
    for finding in judge.findings() {
        let Some(because) = &finding.withdrawn else { continue };
        if finding.cases.iter().any(|&at| open(&judge.cases()[at])) {
            continue;
        }
        let lead = finding.cases.first().map(|&at| &judge.cases()[at]);
        stacks.extend(finding.cases.iter().map(|&at| judge.cases()[at].stack));
        said.push(NotLeak {
            kind: "withdrawn".to_owned(),
            what: format!(
                "{}, called at step {} and withdrawn",
                finding.class.name(),
                finding.called_at_step
            ),
            because: because.clone(),
            device: i64::from(finding.device),
            bytes: lead.map_or(0, |case| case.live_bytes),
            allocated_at: lead.and_then(|case| symbols.allocated_at(case.stack)),
            withdrawn: true,
        });
    }
    let mut dismissed: Vec<NotLeak> = Vec::new();
    for case in judge.cases() {
        let State::Dismissed { reason, .. } = &case.state else { continue };
        if reason.is_empty() || stacks.contains(&case.stack) || open(case) {
            continue;
        }
        stacks.push(case.stack);
        let place = symbols.allocated_at(case.stack);
        let same = |said: &&mut NotLeak| said.because == *reason && said.allocated_at == place;
        if let Some(said) = dismissed.iter_mut().find(same) {
            said.bytes += case.live_bytes;
            continue;
        }
        let reason_kind = case.answer.as_ref().and_then(|answer| answer.reason.clone());
        dismissed.push(NotLeak {
            kind: reason_kind.unwrap_or_else(|| "settled".to_owned()),
            what: format!("looked like a {} leak", case.pattern.class.name()),
            because: reason.clone(),
            device: i64::from(case.device),
            bytes: case.live_bytes,
            allocated_at: place,
            withdrawn: false,
        });
    }
    dismissed.sort_by_key(|said| std::cmp::Reverse(said.bytes));
    said.extend(dismissed);
    let called: Vec<u32> = judge
        .cases()
        .iter()
        .filter(|case| matches!(case.state, State::Called(_)))
        .map(|case| case.stack)
        .collect();
    for note in parts.iter().flat_map(|part| &part.view.notes) {
        if note.stack.is_some_and(|stack| stacks.contains(&stack) || called.contains(&stack)) {
            continue;
        }
        said.push(NotLeak {
            kind: note.kind.to_owned(),
            what: note.what.clone(),
            because: note.because.clone(),
            device: i64::from(note.device),
            bytes: note.bytes,
            allocated_at: note.stack.and_then(|stack| symbols.allocated_at(stack)),
            withdrawn: false,
        });
    }
    said.truncate(NOT_LEAKS);
    said
}
