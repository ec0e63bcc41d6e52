//! A whole recording replayed: every device through an allocator, and through the ledger step by step.
//!
//! Must not know: file formats, forms of reports.
//! Invariant: the ledger sees the recorded program and its allocator's figures; the allocator under test
//! changes nothing about the findings.

use super::clock::{self, Steps};
use super::play::{OutOfMemory, Player, Refused, Watch};
use super::price::Tally;
use super::recorded::{self, Recorded};
use super::recording::Recording;
use super::start::{self, Start};
use super::subject::{Figures, Subject};
use super::symbols::{self, RecordedSymbols};
use crate::ledger::{Accounts, Class, Clock, Frame, Judge, Now, Phase, Sample, Tag};
use crate::report::{self, DevicePart, DeviceView, Report};
use serde_json::{Map, Value, json};

/// What a replay found out about one device.
#[derive(Clone, Debug)]
pub struct DeviceOutcome {
    pub device: i32,
    pub start: Start,
    pub recorded: Recorded,
    /// What the recorded allocator's driver calls cost.
    pub recorded_us: f64,
    pub figures: Figures,
    pub tally: Tally,
    /// Memory calls of the driver per step, in the last third of the steps.
    pub late_calls: f64,
    pub out_of_memory: Vec<OutOfMemory>,
    pub refused: Option<Refused>,
    pub refusals: u64,
}

/// What a replay found out.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub devices: Vec<DeviceOutcome>,
    pub steps: Steps,
    pub report: Report,
    /// What the recording cannot tell.
    pub notes: Vec<String>,
}

/// The books of one device.
struct Books<'a> {
    accounts: Accounts,
    phases: &'a [Phase],
    now: Now,
}

impl Watch for Books<'_> {
    fn born(&mut self, stack: u32, requested: u64) -> (u64, u64) {
        let phase = self.phases.get(stack as usize).copied().unwrap_or_default();
        let Tag(a, b) = self.accounts.born(stack, requested, Now { phase, ..self.now });
        (a, b)
    }

    fn died(&mut self, (a, b): (u64, u64), requested: u64) {
        self.accounts.died(Tag(a, b), requested, self.now);
    }
}

/// Replays a recording; `subject` makes an allocator for each device, `progress` is told how many events
/// are done.
///
/// # Errors
/// If an allocator cannot be made, or errs.
pub fn replay<S: Subject>(
    recording: &Recording,
    total: Option<u64>,
    mut subject: impl FnMut(i32) -> Result<S, String>,
    mut progress: impl FnMut(u64),
) -> Result<Outcome, String> {
    let steps = clock::steps(recording);
    let phases = symbols::phases(&recording.stacks);
    let clock = Clock::new();
    let mut judge = Judge::without_answers();
    let mut runs = Vec::new();
    for device in &recording.devices {
        let start = start::before(device, &recording.streams);
        let recorded = recorded::figures(device, &start, &recording.settings);
        let mut books = Books { accounts: Accounts::new(device.index), phases: &phases, now: Now::default() };
        let player = Player::begin(recording, device, &start, subject(device.index)?, &mut books)?;
        runs.push((player, books, start, recorded));
    }
    let (mut done, mut epochs) = (0, steps.epochs.iter().peekable());
    let third = steps.count() - steps.count() / 3;
    // Calls before the last third of the steps, and before what comes after the last step.
    let mut calls = vec![(0, 0); runs.len()];
    for step in 0..=steps.count() {
        while epochs.next_if(|begun| **begun <= step).is_some() {
            clock.begin_epoch();
        }
        for (at, (player, books, ..)) in runs.iter_mut().enumerate() {
            let from = if step == 0 { 0 } else { steps.ends[at][step - 1] };
            let end = steps.ends[at].get(step).copied().unwrap_or(usize::MAX);
            books.now = clock.now();
            player.until(end, step, books)?;
            let so_far = player.subject().tally().memory_calls();
            if step < third {
                calls[at].0 = so_far;
            }
            if step < steps.count() {
                calls[at].1 = so_far;
            }
            done += end.min(recording.devices[at].events.len()).saturating_sub(from) as u64;
        }
        progress(done);
        let Some(time_us) = steps.times_us.get(step) else { break };
        let ended = clock.end_step(time_us.saturating_mul(1000));
        for (player, books, ..) in &mut runs {
            let sample = Sample {
                allocated: player.requested(),
                reserved: player.recorded_reserved(),
                active: player.active(),
                total,
                ..Sample::default()
            };
            books.accounts.boundary(ended, clock.now().epoch, &sample);
            judge.look(&mut books.accounts, &clock);
        }
    }
    judge.finish();
    let (mut devices, mut parts) = (Vec::new(), Vec::new());
    for ((player, books, start, recorded), calls) in runs.into_iter().zip(calls) {
        let view = DeviceView::of(&books.accounts, &judge.wanted(books.accounts.device()));
        parts.push(DevicePart { view, stats: stats(&recorded) });
        devices.push(DeviceOutcome {
            device: books.accounts.device(),
            start,
            recorded,
            recorded_us: player.recorded_us(),
            figures: player.subject().figures(),
            tally: player.subject().tally(),
            late_calls: calls.1.saturating_sub(calls.0) as f64 / (steps.count() - third).max(1) as f64,
            out_of_memory: player.out_of_memory,
            refused: player.refused,
            refusals: player.refusals,
        });
    }
    let run = report::Run { mode: "replay".to_owned(), ..report::Run::default() };
    let mut report = report::assemble(run, parts, &judge, &clock, &RecordedSymbols(recording));
    for finding in &mut report.findings {
        if finding.class != Class::Fragmentation && finding.held_by.is_none() {
            finding.fix = fix(finding.allocated_at.as_ref());
        }
    }
    let notes = notes(recording, &devices, &steps);
    Ok(Outcome { devices, steps, report, notes })
}

/// What can be said where nobody could look for the holder.
fn fix(allocated_at: Option<&Frame>) -> String {
    let what = allocated_at
        .map_or_else(|| "these blocks".to_owned(), |at| format!("what {}:{} makes", at.file, at.line));
    format!("look for what keeps {what}; `strandline run` names the holder, a recording cannot")
}

/// The keys of torch's statistics that a recording tells.
fn stats(recorded: &Recorded) -> Map<String, Value> {
    let told = json!({
        "requested_bytes.all.peak": recorded.requested_peak,
        "active_bytes.all.peak": recorded.active_peak,
        "reserved_bytes.all.peak": recorded.reserved_peak,
        "allocation.all.allocated": recorded.allocations,
        "num_ooms": recorded.out_of_memory,
    });
    match told {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// What the recording cannot tell.
fn notes(recording: &Recording, devices: &[DeviceOutcome], steps: &Steps) -> Vec<String> {
    let mut notes = recording.notes.clone();
    for outcome in devices {
        let (start, device) = (&outcome.start, outcome.device);
        let blocks = start.blocks.len() as u64;
        if !start.is_whole() && recording.events() > 0 {
            let sites = start.blocks.iter().filter(|block| block.stack == 0).count() as u64;
            notes.push(format!(
                "device {device}: the history does not reach back to the start: {} ({}) and {} reserved were there \
                 before its first event; where {} of them were allocated is not told, and peaks before are not \
                 known",
                report::units::plural(blocks, "block"),
                report::units::bytes(start.requested() as f64),
                report::units::bytes(start.reserved as f64),
                report::units::count(sites),
            ));
        }
        if !outcome.recorded.active_exact {
            notes.push(format!(
                "device {device}: the recording's active peak is a lower bound (block sizes are not told)"
            ));
        }
        let odd = start.oddities;
        if odd != start::Oddities::default() {
            notes.push(format!(
                "device {device}: the history contradicts itself: {} allocations at addresses in use, {} frees of \
                 another size",
                odd.allocated_twice, odd.sizes_differ
            ));
        }
    }
    if steps.source == clock::Source::Nothing && recording.events() > 0 {
        notes.push(steps.said());
    }
    notes
}
