//! A replay's outcome as one JSON object and as text.
//!
//! Must not know: files, terminals.
//! Invariant: sizes are bytes; where several devices took part, the figures above them are their sums.

use super::recording::{Form, Recording};
use super::run::{DeviceOutcome, Outcome};
use crate::heap::Preset;
use crate::report::model::Finding;
use crate::report::text::{self, Colour};
use crate::report::units;
use serde_json::{Value, json};
use std::fmt::Write;

/// Version of the JSON object.
const SCHEMA: u32 = 1;

/// GMLake's definition: the share of reserved memory, at its peak, that was never active at once.
pub fn fragmentation(active_peak: u64, reserved_peak: u64) -> f64 {
    if reserved_peak == 0 { 0.0 } else { (1.0 - active_peak as f64 / reserved_peak as f64).max(0.0) }
}

/// Sums over all devices.
struct Sums<'a>(&'a [DeviceOutcome]);

impl Sums<'_> {
    fn of(&self, figure: impl Fn(&DeviceOutcome) -> u64) -> u64 {
        self.0.iter().map(figure).sum()
    }

    fn us(&self, figure: impl Fn(&DeviceOutcome) -> f64) -> f64 {
        self.0.iter().map(figure).sum()
    }

    fn recorded_fragmentation(&self) -> f64 {
        fragmentation(self.of(|d| d.recorded.active_peak), self.of(|d| d.recorded.reserved_peak))
    }

    fn fragmentation(&self) -> f64 {
        fragmentation(self.of(|d| d.figures.active_peak), self.of(|d| d.figures.reserved_peak))
    }
}

/// The outcome as one JSON object.
pub fn json(outcome: &Outcome, recording: &Recording, file: &str, preset: Preset) -> Value {
    let devices: Vec<Value> = outcome.devices.iter().map(|device| device_json(device, recording)).collect();
    let mut all = figures_json(&outcome.devices);
    let more = json!({
        "schema": SCHEMA,
        "file": file,
        "form": recording.form,
        "preset": preset.name(),
        "events": recording.events(),
        "complete": outcome.devices.iter().all(|device| device.start.is_whole()),
        "notes": outcome.notes,
        "settings": recording.settings,
        "steps": outcome.steps.count(),
        "steps_by": outcome.steps.source,
        "epochs": outcome.report.run.epochs,
        "verdict": outcome.report.verdict,
        "reason": outcome.report.reason,
        "findings": outcome.report.findings,
        "not_leaks": outcome.report.not_leaks,
        "devices": devices,
    });
    if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
        all.extend(more);
    }
    all
}

/// What is said of each device and of all.
fn figures_json(devices: &[DeviceOutcome]) -> Value {
    let sums = Sums(devices);
    json!({
        "requested_peak": sums.of(|d| d.recorded.requested_peak),
        "active_peak": sums.of(|d| d.recorded.active_peak),
        "active_peak_exact": devices.iter().all(|d| d.recorded.active_exact),
        "reserved_peak": sums.of(|d| d.figures.reserved_peak),
        "recorded_reserved_peak": sums.of(|d| d.recorded.reserved_peak),
        "heap_active_peak": sums.of(|d| d.figures.active_peak),
        "fragmentation": sums.fragmentation(),
        "recorded_fragmentation": sums.recorded_fragmentation(),
        "allocations": sums.of(|d| d.recorded.allocations),
        "driver_calls": sums.of(|d| d.tally.memory_calls()),
        "driver_us": sums.us(|d| d.tally.microseconds),
        "late_driver_calls_per_step": sums.us(|d| d.late_calls),
        "recorded_driver_calls": sums.of(|d| d.recorded.driver_calls),
        "recorded_driver_us": sums.us(|d| d.recorded_us),
        "refusals": sums.of(|d| d.refusals),
        "refused": devices.iter().find_map(|d| d.refused.clone()),
        "out_of_memory": devices.iter().flat_map(|d| &d.out_of_memory).collect::<Vec<_>>(),
    })
}

fn device_json(device: &DeviceOutcome, recording: &Recording) -> Value {
    let mut all = figures_json(std::slice::from_ref(device));
    let events = recording.devices.iter().find(|known| known.index == device.device);
    let more = json!({
        "device": device.device,
        "events": events.map_or(0, |known| known.events.len()),
        "blocks_before_history": device.start.blocks.len(),
        "bytes_before_history": device.start.requested(),
        "reserved_before_history": device.start.reserved,
        "driver": device.tally,
    });
    if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
        all.extend(more);
    }
    all
}

/// The outcome for people.
pub fn text(outcome: &Outcome, recording: &Recording, file: &str, preset: Preset, colour: Colour) -> String {
    let mut out = String::new();
    let form = match recording.form {
        Form::Snapshot => "torch snapshot",
        Form::Segments => "torch snapshot without history",
        Form::Trace => "strandline trace",
    };
    let devices: Vec<String> = outcome.devices.iter().map(|device| device.device.to_string()).collect();
    let _ = writeln!(
        out,
        "{file}: {form}, {} events, device {}, {}, {}",
        grouped(recording.events() as u64),
        if devices.is_empty() { "none".to_owned() } else { devices.join(" and ") },
        units::plural(recording.streams.len() as u64, "stream"),
        duration(recording),
    );
    let _ = writeln!(out);
    table(&mut out, outcome, preset);
    let _ = writeln!(out);
    if outcome.steps.count() > 0 {
        let epochs = match outcome.report.run.epochs {
            0 => String::new(),
            epochs => format!(", {}", units::plural(epochs, "epoch")),
        };
        let steps = outcome.steps.count() as u64;
        let _ = writeln!(out, "{}{epochs}, found {}", units::plural(steps, "step"), outcome.steps.said());
    }
    for note in &outcome.notes {
        let _ = writeln!(out, "note: {note}");
    }
    incidents(&mut out, outcome);
    let _ = writeln!(out);
    let report = &outcome.report;
    let _ = writeln!(out, "strandline: {}  {}", report.verdict.name().to_uppercase(), report.reason);
    for finding in &report.findings {
        let _ = write!(out, "\n{}", text::finding(&without_holder(finding), colour));
    }
    for not in report.not_leaks.iter().take(6) {
        let place =
            not.allocated_at.as_ref().map_or_else(String::new, |at| format!(" ({}:{})", at.file, at.line));
        let size = units::bytes(not.bytes as f64);
        let _ = writeln!(out, "not a leak: {}, {size}{place}, because {}", not.what, not.because);
    }
    out
}

/// A recording tells nothing about Python's references.
fn without_holder(finding: &Finding) -> Finding {
    let mut finding = finding.clone();
    let holder = finding.held_by.get_or_insert_default();
    if holder.path.is_empty() {
        holder.path = "(a recording does not tell; `strandline run` does)".to_owned();
    }
    finding
}

fn table(out: &mut String, outcome: &Outcome, preset: Preset) {
    let sums = Sums(&outcome.devices);
    let mut row = |what: &str, recorded: &str, strandline: &str, remark: &str| {
        let line = format!("{what:<16}{recorded:>18}{strandline:>18}   {remark}");
        let _ = writeln!(out, "{}", line.trim_end());
    };
    let other = match preset {
        Preset::Lean => "a job is served so with STRANDLINE_CONF=preset:lean; else as --preset speed shows",
        Preset::Speed => "as a job is served by default",
    };
    row("", "recorded", &format!("strandline, {}", preset.name()), other);
    let requested = mib(sums.of(|d| d.recorded.requested_peak));
    row("peak requested", &requested, &requested, "");
    let (recorded, own) = (sums.of(|d| d.recorded.active_peak), sums.of(|d| d.figures.active_peak));
    row("peak active", &mib(recorded), &mib(own), "");
    let (recorded, own) = (sums.of(|d| d.recorded.reserved_peak), sums.of(|d| d.figures.reserved_peak));
    let change = if recorded > 0 { 100.0 * (own as f64 / recorded as f64 - 1.0) } else { 0.0 };
    row("peak reserved", &mib(recorded), &mib(own), &format!("{change:+.1} %"));
    row(
        "fragmentation",
        &percent(sums.recorded_fragmentation()),
        &percent(sums.fragmentation()),
        "1 − peak active ÷ peak reserved",
    );
    let (recorded, own) = (sums.of(|d| d.recorded.driver_calls), sums.of(|d| d.tally.memory_calls()));
    row("driver calls", &grouped(recorded), &grouped(own), "that make, move or give back memory");
    let (recorded, own) = (sums.us(|d| d.recorded_us), sums.us(|d| d.tally.microseconds));
    row("  their cost", &milliseconds(recorded), &milliseconds(own), "at the prices of an H200");
}

/// Out of memory, then and now.
fn incidents(out: &mut String, outcome: &Outcome) {
    for told in outcome.devices.iter().flat_map(|device| &device.out_of_memory).take(4) {
        let fits = if told.would_fit { "it would have fitted" } else { "it would not have fitted either" };
        let _ = writeln!(
            out,
            "the job ran out of memory on device {}: {} were asked for, {} reserved, {} free on the device; here {} \
             were reserved then: {fits}",
            told.device,
            units::bytes(told.size as f64),
            units::bytes(told.recorded_reserved as f64),
            units::bytes(told.device_free as f64),
            units::bytes(told.reserved as f64),
        );
    }
    for device in &outcome.devices {
        let Some(refused) = &device.refused else { continue };
        let _ = writeln!(
            out,
            "does not fit on device {}: {} refused, the first of {} in step {} ({})",
            device.device,
            units::plural(device.refusals, "request"),
            units::bytes(refused.size as f64),
            refused.step,
            refused.why,
        );
    }
}

fn duration(recording: &Recording) -> String {
    let times = || recording.devices.iter().flat_map(|device| &device.events).map(|event| event.time_us);
    match (times().min(), times().max()) {
        (Some(first), Some(last)) if last > first => units::duration((last - first) as f64 * 1e-6),
        _ => "no times".to_owned(),
    }
}

fn mib(bytes: u64) -> String {
    let tenths = (bytes as f64 / (1u64 << 20) as f64 * 10.0).round() as u64;
    format!("{}.{} MiB", grouped(tenths / 10), tenths % 10)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn milliseconds(us: f64) -> String {
    format!("{:.1} ms", us / 1000.0)
}

/// 1234567 as "1,234,567".
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(mib(4_443_033_616), "4,237.2 MiB");
        assert_eq!(fragmentation(0, 0), 0.0);
        assert_eq!(fragmentation(3, 4), 0.25);
    }
}
