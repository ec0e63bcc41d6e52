//! A finding of the judge as a finding of the report: its evidence in a sentence, its rate, its forecast.
//!
//! Must not know: locks, files, colours.
//! Invariant: says only what was counted; a forecast only where the device's memory is known.

use super::model::{Finding, Forecast, SiteInFinding};
use super::units;
use crate::ledger::{
    Case, Class, Clock, Judge, Pattern, Phase, Shape, Symbols, findings, fragmentation::Fragmentation,
};

/// The finding as a report shows it. Needs no device's lock.
pub fn finding(judge: &Judge, found: &findings::Finding, symbols: &dyn Symbols, clock: &Clock) -> Finding {
    match &found.fragmentation {
        Some(seen) => fragmentation(judge, found, seen, clock),
        None => leak(judge, found, symbols, clock),
    }
}

fn leak(judge: &Judge, found: &findings::Finding, symbols: &dyn Symbols, clock: &Clock) -> Finding {
    let cases: Vec<&Case> = found.cases.iter().map(|&at| &judge.cases()[at]).collect();
    let places: Vec<_> = cases.iter().map(|case| symbols.allocated_at(case.stack)).collect();
    // The largest site leads, unless only a smaller one shows a line of the user's.
    let lead = places.iter().position(Option::is_some).unwrap_or(0);
    let mut order: Vec<usize> = (0..cases.len()).collect();
    order[..=lead.min(cases.len().saturating_sub(1))].rotate_right(1);
    let leading = cases[order[0]];
    let answer = order.iter().filter_map(|&at| cases[at].answer.as_ref()).find(|a| a.names_a_holder());
    let answer = answer.or(leading.answer.as_ref()).cloned().unwrap_or_default();
    let pattern = &leading.pattern;
    let live_bytes = cases.iter().map(|case| case.live_bytes).sum();
    let per_step: f64 = cases.iter().map(|case| case.pattern.bytes_per_step).sum();
    let differing = cases.iter().filter(|case| case.pattern.uneven);
    let uneven: f64 = differing.map(|case| case.pattern.bytes_per_step).sum();
    let epoch = epoch_length(clock);
    let per_epoch = match pattern.shape {
        Shape::Periodic { .. } if found.class == Class::PerEpoch => per_step * pattern.period,
        Shape::Regrow if found.class == Class::PerEpoch => per_step * pattern.period,
        _ => per_step * epoch.unwrap_or(0.0),
    };
    Finding {
        class: found.class,
        confidence: confidence(leading, answer.names_a_holder()),
        device: i64::from(found.device),
        live_bytes,
        live_blocks: cases.iter().map(|case| case.live_blocks).sum(),
        bytes_per_step: per_step,
        bytes_per_epoch: per_epoch,
        uneven: uneven * 10.0 > per_step,
        evidence: evidence(leading, judge.steps()) + &over(&cases),
        released_by: answer.released_by.clone().unwrap_or_else(|| "unknown".to_owned()),
        allocated_at: places[order[0]].clone(),
        stack: symbols.frames(leading.stack),
        called_at_step: found.called_at_step,
        fix: answer.fix.clone().filter(|fix| !fix.is_empty()).unwrap_or_else(|| {
            let stack = symbols.frames(leading.stack);
            let native = !stack.is_empty() && stack.iter().all(|frame| frame.kind == "native");
            if native { NATIVE_FIX.to_owned() } else { fix(pattern.shape).to_owned() }
        }),
        held_by: answer.held_by,
        holder_note: String::new(),
        kept_at: answer.kept_at,
        id: found.id,
        shape: crate::ledger::wire::shape_name(pattern.shape).to_owned(),
        phase: clock.phase_name(Phase::default()),
        first_step: pattern.first,
        last_step: pattern.last,
        forecast: forecast(judge, found.device, per_step, clock).filter(|_| leading.over.is_none()),
        per: per(pattern),
        bounded: answer.bounded,
        births: pattern.births.clone(),
        sites_in_finding: order
            .iter()
            .map(|&at| SiteInFinding {
                class: cases[at].pattern.class,
                live_bytes: cases[at].live_bytes,
                live_blocks: cases[at].live_blocks,
                bytes_per_step: cases[at].pattern.bytes_per_step,
                allocated_at: places[at].clone(),
                stack_id: cases[at].stack,
            })
            .collect(),
        series: Vec::new(),
    }
}

fn fragmentation(judge: &Judge, found: &findings::Finding, seen: &Fragmentation, clock: &Clock) -> Finding {
    Finding {
        class: Class::Fragmentation,
        confidence: (0.6 + 0.4 * seen.tau.clamp(0.0, 1.0)).min(0.99),
        device: i64::from(found.device),
        live_bytes: seen.reserved.saturating_sub(seen.in_use),
        live_blocks: 0,
        bytes_per_step: seen.bytes_per_step,
        bytes_per_epoch: seen.bytes_per_step * epoch_length(clock).unwrap_or(0.0),
        uneven: false,
        evidence: format!(
            "reserved memory grew to {} since step {} while at most {} were in use at a time",
            units::bytes(seen.reserved as f64),
            seen.since,
            units::bytes(seen.in_use as f64)
        ),
        released_by: "empty_cache".to_owned(),
        allocated_at: None,
        stack: Vec::new(),
        called_at_step: found.called_at_step,
        held_by: None,
        holder_note: String::new(),
        kept_at: None,
        fix: "every block is larger than the ones freed before it, so none fits: let strandline's heap serve the \
              device (--mode heap), or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            .to_owned(),
        id: found.id,
        shape: "reserved".to_owned(),
        phase: clock.phase_name(Phase::default()),
        first_step: seen.since,
        last_step: judge.steps().saturating_sub(1),
        forecast: forecast(judge, found.device, seen.bytes_per_step, clock),
        per: "step".to_owned(),
        bounded: None,
        births: Vec::new(),
        sites_in_finding: Vec::new(),
        series: Vec::new(),
    }
}

fn epoch_length(clock: &Clock) -> Option<f64> {
    let starts = clock.epoch_starts();
    let (first, last) = (starts.first()?, starts.last()?);
    (starts.len() >= 3).then(|| f64::from(last.step - first.step) / (starts.len() - 1) as f64)
}

fn confidence(case: &Case, held: bool) -> f64 {
    let sure = case.pattern.strength.clamp(0.0, 1.0);
    let sure = if held { sure.sqrt() } else { sure * 0.9 };
    (sure * 1000.0).round() / 1000.0
}

/// What was counted, in a sentence.
fn evidence(case: &Case, steps: u32) -> String {
    let pattern = &case.pattern;
    let events = u64::from(pattern.events);
    let births: Vec<String> = pattern.births.iter().map(u32::to_string).collect();
    let shown = &births[births.len().saturating_sub(6)..];
    match pattern.shape {
        Shape::Steady => {
            format!("{} of the last {} steps left a block behind", pattern.hits, pattern.of)
        }
        Shape::Regrow => format!(
            "one tensor regrows: replaced by a larger one {} times since step {}, and now {}",
            pattern.events,
            pattern.first,
            units::bytes(case.live_bytes as f64)
        ),
        Shape::Periodic { by_epoch: true } => {
            format!(
                "{} left blocks behind, the newest in step {}",
                units::plural(events, "epoch"),
                pattern.last
            )
        }
        Shape::Periodic { by_epoch: false } => format!(
            "{} left blocks behind, one every {:.0} steps (the newest in step {})",
            units::plural(events, "burst"),
            pattern.period,
            pattern.last
        ),
        Shape::Irregular => format!(
            "blocks were left behind {} since step {}, at no regular interval (steps {})",
            units::plural(events, "time"),
            pattern.first,
            shown.join(", ")
        ),
        Shape::Burst => format!(
            "retained once, in step {}, and kept in the {} steps since: bounded, it does not grow",
            pattern.first,
            steps.saturating_sub(pattern.last + 1)
        ),
    }
}

/// That the stage is over in which it grew, and what became of it.
fn over(cases: &[&Case]) -> String {
    let Some(step) = cases[0].over else { return String::new() };
    let most_bytes: u64 = cases.iter().map(|case| case.most_bytes).sum();
    let live: u64 = cases.iter().map(|case| case.live_bytes).sum();
    let most = units::bytes(most_bytes as f64);
    if live * 2 < most_bytes {
        format!(", until that stage of the program ended: {most} were freed in step {step} and not before")
    } else {
        format!(", until that stage of the program ended in step {step}: {most} are still held")
    }
}

/// What a per-epoch rate counts by: epochs where they were seen, else the steps of its rhythm.
fn per(pattern: &Pattern) -> String {
    match (pattern.class, pattern.shape) {
        (Class::PerEpoch, Shape::Periodic { by_epoch: false } | Shape::Regrow) => {
            format!("{:.0} steps", pattern.period)
        }
        (Class::PerEpoch, _) => "epoch".to_owned(),
        _ => "step".to_owned(),
    }
}

/// What to do in programs without Python, whose references nobody can follow.
const NATIVE_FIX: &str =
    "nothing frees these blocks: free each when it is no longer needed, or bound what keeps them";

/// What to do when nobody named a holder.
fn fix(shape: Shape) -> &'static str {
    match shape {
        Shape::Regrow => {
            "it is copied into a larger one each time: collect the pieces in a list, move them to the CPU, or \
             allocate it once at its final size"
        }
        Shape::Burst => "drop the reference when it is no longer needed (del, or set it to None)",
        _ => {
            "no Python object was found that holds it: look for C++ holders (saved tensors of a graph kept alive, \
             ctx attributes, streams that never finish)"
        }
    }
}

fn forecast(judge: &Judge, device: i32, per_step: f64, clock: &Clock) -> Option<Forecast> {
    let room = judge.room(device)?;
    if per_step < 1.0 {
        return None;
    }
    let steps = (room as f64 / per_step) as u64;
    Some(Forecast {
        at_step: u64::from(judge.steps()) + steps,
        steps,
        seconds: clock.step_seconds().map(|seconds| seconds * steps as f64),
    })
}
