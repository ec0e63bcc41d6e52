//! The verdict of a run and its one line: what was found, or why what accumulated is not called a leak.
//!
//! Must not know: forms, files, locks.
//! Invariant: never says that nothing accumulated where the books show that something did.

use super::assemble::DevicePart;
use super::model::{Finding, Run, Undecided, Verdict};
use super::{text, units};
use crate::ledger::stayed::Stayed;
use crate::ledger::{Case, Class, Frame, Judge, Shape, State, Symbols};

/// Fewer steps than this decide nothing.
const LEAST_STEPS: u64 = 10;
/// Steps after which a site that accumulates has been called.
const RIPE: u64 = 40;

/// The verdict, and its reason in one line.
pub(super) fn verdict(
    run: &Run,
    findings: &[Finding],
    undecided: &[Undecided],
    parts: &[DevicePart],
    judge: &Judge,
    symbols: &dyn Symbols,
) -> (Verdict, String) {
    if let Some(first) = findings.first() {
        return found(first, findings);
    }
    let steps = units::plural(run.steps, "step");
    if run.steps == 0 {
        return (Verdict::Undecided, no_step(run));
    }
    if run.steps < LEAST_STEPS {
        return (Verdict::Undecided, format!("only {steps} seen; at least {RIPE} decide"));
    }
    let unripe = parts.iter().find_map(|part| part.view.unripe).filter(|_| run.steps < RIPE);
    if let Some(stack) = unripe {
        let place = symbols.allocated_at(stack).map_or_else(|| "one site".to_owned(), |at| line_of(&at));
        let why = format!(
            "{place} left blocks behind in most of the {steps} seen; {RIPE} steps decide whether it goes on"
        );
        return (Verdict::Undecided, why);
    }
    let stayed = parts
        .iter()
        .filter_map(|part| part.view.stayed.as_ref())
        .filter(|stayed| {
            let lead = stayed.sites.first().and_then(|site| symbols.allocated_at(site.stack));
            !undecided.iter().any(|open| open.allocated_at == lead && open.device == i64::from(stayed.device))
        })
        .max_by_key(|stayed| stayed.bytes);
    if undecided.is_empty() && stayed.is_none() {
        return (Verdict::Clean, format!("nothing accumulated in {steps}"));
    }
    let mut reason = format!("no leak in {steps}");
    if let Some(open) = undecided.first() {
        let at = open.allocated_at.as_ref().map_or_else(String::new, |at| format!("{}, ", line_of(at)));
        reason += &format!(
            "; {} undecided: {at}{}; {}",
            units::plural(undecided.len() as u64, "growth"),
            open.what,
            open.decides
        );
    }
    if let Some(stayed) = stayed {
        reason += &format!("; {}", of_what_stayed(stayed, parts, judge, symbols));
    }
    (Verdict::Clean, reason)
}

/// Why nothing can be said of a run in which no step was seen.
fn no_step(run: &Run) -> String {
    let so = "no step was seen, so nothing can be said of growth";
    if run.mode == "replay" {
        return format!("{so}: the recording has neither an optimizer's steps nor a period");
    }
    if run.forked > 0 {
        let children = if run.forked == 1 { "child" } else { "children" };
        return format!(
            "{so}; this process forked {} {children}, in which nothing is watched: start them with spawn, or train here",
            run.forked
        );
    }
    format!(
        "{so}: train with a torch optimizer, or call strandline.step() (in C strandline_step()) once per iteration"
    )
}

fn found(first: &Finding, findings: &[Finding]) -> (Verdict, String) {
    let leaks = findings.iter().filter(|finding| finding.class != Class::Fragmentation).count();
    let place = first
        .allocated_at
        .as_ref()
        .map_or_else(String::new, |at| format!(", allocated at {} in {}", line_of(at), at.function));
    let also = if leaks > 0 && leaks < findings.len() { "; memory is fragmented too" } else { "" };
    let verdict = if leaks > 0 { Verdict::Leak } else { Verdict::Fragmentation };
    let number = units::plural(findings.len() as u64, "finding");
    let what = text::rate(first);
    (verdict, format!("{number}: {} {what}{place}{also}", first.class.name()))
}

/// "24.0 KiB that came after step 20 stayed (train.py:7 and 2 more lines) and is no leak: parameter …".
fn of_what_stayed(stayed: &Stayed, parts: &[DevicePart], judge: &Judge, symbols: &dyn Symbols) -> String {
    let mut lines: Vec<String> = Vec::new();
    for place in
        stayed.sites.iter().filter_map(|site| symbols.allocated_at(site.stack)).map(|at| line_of(&at))
    {
        if !lines.contains(&place) {
            lines.push(place);
        }
    }
    let place = match lines.as_slice() {
        [] => String::new(),
        [one] => format!(" ({one})"),
        [one, rest @ ..] => format!(" ({one} and {})", units::plural(rest.len() as u64, "more line")),
    };
    let size = units::bytes(stayed.bytes as f64);
    let why = why(stayed, parts, judge);
    format!("{size} that came after step {} stayed{place} {why}", stayed.since)
}

/// Why the largest site of what stayed is not called.
fn why(stayed: &Stayed, parts: &[DevicePart], judge: &Judge) -> String {
    let Some(lead) = stayed.sites.first() else { return String::new() };
    let same = |case: &&Case| (case.device, case.stack) == (stayed.device, lead.stack);
    let case = judge.cases().iter().rev().find(same);
    // That a single burst was freed, or may come again, says nothing of what came after it.
    let of_one = |case: &&Case| {
        let single = case.may_come_again() || matches!(case.state, State::Withdrawn { .. });
        case.pattern.shape == Shape::Burst && single && case.pattern.last < lead.newest
    };
    let case = case.filter(|case| !of_one(case));
    let alone = case.is_some_and(Case::may_come_again);
    let reason = case.and_then(|case| match &case.state {
        State::Dismissed { reason, .. } => Some(reason.clone()),
        State::Withdrawn { finding, .. } => judge.findings()[*finding].withdrawn.clone(),
        _ => None,
    });
    if let Some(reason) = reason.as_ref().filter(|reason| !reason.is_empty()) {
        let verdict = if alone { "is not called" } else { "is no leak" };
        return format!("and {verdict}: {reason}");
    }
    // What a step needed for itself is not what stayed.
    let of_peaks = |kind: &str| kind == "other-work";
    let mut notes = parts.iter().flat_map(|part| &part.view.notes).filter(|note| !of_peaks(note.kind));
    if let Some(note) = notes.find(|note| (note.device, note.stack) == (stayed.device, Some(lead.stack))) {
        return format!("and is no leak: {}", note.because);
    }
    match lead.events {
        _ if lead.replaces => format!(
            "and is not called: it takes the place of what is freed meanwhile, the newest is of step {}",
            lead.newest
        ),
        1 => format!("and is not called: it came once, in step {}", lead.newest),
        events => {
            format!("and is not called: it came in {events} steps, the newest is step {}", lead.newest)
        }
    }
}

fn line_of(frame: &Frame) -> String {
    format!("{}:{}", text::base(&frame.file), frame.line)
}
