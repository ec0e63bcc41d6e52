//! The tables of the text report: each device's memory over the run, by phase and by epoch.
//!
//! Must not know: findings, terminals.
//! Invariant: columns are aligned; a table that says nothing is left out.

use super::model::{Device, Report, Window};
use super::text::Colour;
use super::units;
use crate::ledger::trend;
use std::fmt::Write;

/// Epochs whose peaks are listed: the newest.
const EPOCHS: usize = 8;
/// A trend below this share of the mean, over the whole run, is none.
const FLAT: f64 = 0.01;

/// Everything about the devices' memory.
pub fn memory(out: &mut String, report: &Report, colour: Colour) {
    if report.devices.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{}", colour.paint("memory", "1"));
    let heads = ["device", "allocated", "peak", "reserved", "outside", "live blocks"];
    let _ = writeln!(
        out,
        "  {:<8}{:>12}{:>12}{:>12}{:>12}{:>14}",
        heads[0], heads[1], heads[2], heads[3], heads[4], heads[5]
    );
    for device in &report.devices {
        let last = device.series.last().copied().unwrap_or_default();
        let _ = writeln!(
            out,
            "  {:<8}{:>12}{:>12}{:>12}{:>12}{:>14}",
            name(device),
            size(device.allocated().unwrap_or(0)),
            size(device.peak_bytes),
            size(last.reserved),
            size(device.outside_bytes),
            device.live_blocks
        );
    }
    for device in &report.devices {
        over_the_run(out, device, colour);
        epochs(out, device);
        phases(out, device, colour);
        balance(out, device);
    }
}

fn name(device: &Device) -> String {
    match device.device {
        -3 => "managed".to_owned(),
        -2 => "pinned".to_owned(),
        ..0 => "host".to_owned(),
        number => number.to_string(),
    }
}

fn size(bytes: u64) -> String {
    units::bytes(bytes as f64)
}

/// Allocated and reserved at step boundaries, with their trends.
fn over_the_run(out: &mut String, device: &Device, colour: Colour) {
    if device.windows.len() < 2 {
        return;
    }
    let title = format!("{} over the run, at the ends of steps", name(device));
    let _ = writeln!(out, "\n{}", colour.paint(&title, "1"));
    let _ = writeln!(
        out,
        "  {:<13}{:>32}    {:>32}{:>12}{:>9}",
        "", "allocated: least, mean, most", "reserved: least, mean, most", "peak", "retries"
    );
    for window in &device.windows {
        let row = |three: [u64; 3]| three.map(|value| format!("{:>11}", size(value))).concat();
        let _ = writeln!(
            out,
            "  {:<12}{}   {}{:>12}{:>9}",
            steps(window),
            row(window.allocated),
            row(window.reserved),
            size(window.peak),
            window.retries
        );
    }
    let of = |which: fn(&Window) -> u64| slope(&device.windows, which);
    let _ = writeln!(
        out,
        "  trend: allocated {}, reserved {}, peak {}",
        of(|window| window.allocated[1]),
        of(|window| window.reserved[1]),
        of(|window| window.peak)
    );
}

fn steps(window: &Window) -> String {
    if window.first_step == window.last_step {
        format!("step {}", window.first_step)
    } else {
        format!("{}-{}", window.first_step, window.last_step)
    }
}

/// "flat", "+4.0 MiB/step": over all stretches but the first, which holds the warm-up.
fn slope(windows: &[Window], of: fn(&Window) -> u64) -> String {
    let points: Vec<(f64, f64)> = windows[1..]
        .iter()
        .map(|window| (f64::from(window.first_step + window.last_step) / 2.0, of(window) as f64))
        .collect();
    let Some(slope) = trend::theil_sen(&points) else { return "unknown (too few steps)".to_owned() };
    let mean = points.iter().map(|point| point.1).sum::<f64>() / points.len() as f64;
    let span = points[points.len() - 1].0 - points[0].0;
    if (slope * span).abs() <= FLAT * mean.max(1.0) {
        return "flat".to_owned();
    }
    format!("{}{}/step", if slope < 0.0 { "-" } else { "+" }, units::bytes(slope.abs()))
}

/// The highest bytes in each epoch.
fn epochs(out: &mut String, device: &Device) {
    if device.epoch_peaks.len() < 2 {
        return;
    }
    let shown = &device.epoch_peaks[device.epoch_peaks.len().saturating_sub(EPOCHS)..];
    let peaks: Vec<String> = shown.iter().map(|(epoch, peak)| format!("{epoch}: {}", size(*peak))).collect();
    let more = if shown.len() < device.epoch_peaks.len() { "… " } else { "" };
    let _ = writeln!(out, "  peak by epoch: {more}{}", peaks.join("  "));
}

/// What each phase allocates and frees in a step, lately: what people print by hand before and after each.
fn phases(out: &mut String, device: &Device, colour: Colour) {
    let Some(flow) = device.flow.filter(|flow| flow.steps > 0) else { return };
    let per_step = f64::from(flow.steps);
    let title = format!(
        "{} by phase, per step over the last {}",
        name(device),
        units::plural(flow.steps.into(), "step")
    );
    let _ = writeln!(out, "\n{}", colour.paint(&title, "1"));
    let _ = writeln!(
        out,
        "  {:<12}{:>12}{:>12}{:>16}{:>20}",
        "", "allocated", "freed", "after - before", "live, born in it"
    );
    for phase in &device.phases {
        if phase.recent_allocated == 0 && phase.recent_freed == 0 && phase.live_bytes == 0 {
            continue;
        }
        let change = (phase.recent_allocated as f64 - phase.recent_freed as f64) / per_step;
        let _ = writeln!(
            out,
            "  {:<12}{:>12}{:>12}{:>16}{:>20}",
            phase.phase,
            units::bytes(phase.recent_allocated as f64 / per_step),
            units::bytes(phase.recent_freed as f64 / per_step),
            signed(change),
            size(phase.live_bytes)
        );
    }
}

fn signed(bytes: f64) -> String {
    match bytes {
        change if change >= 1.0 => format!("+{}", units::bytes(change)),
        change if change <= -1.0 => format!("-{}", units::bytes(-change)),
        _ => "0 B".to_owned(),
    }
}

/// Whether the program allocates ever more, or frees too little.
fn balance(out: &mut String, device: &Device) {
    let Some(flow) = device.flow.filter(|flow| flow.steps > 0) else { return };
    let per_step = f64::from(flow.steps);
    let kept = flow.allocated_blocks as f64 - flow.freed_blocks as f64;
    let bytes = flow.allocated_bytes as f64 - flow.freed_bytes as f64;
    let word = if kept / per_step >= 0.05 {
        "frees too little: more is allocated than freed"
    } else if bytes / per_step >= 1.0 && bytes > 0.02 * device.live_bytes as f64 {
        "the same number of blocks, but larger ones"
    } else {
        "in balance"
    };
    let _ = writeln!(
        out,
        "  in all: {:.1} blocks allocated and {:.1} freed per step, {} and {}: {word}",
        flow.allocated_blocks as f64 / per_step,
        flow.freed_blocks as f64 / per_step,
        units::bytes(flow.allocated_bytes as f64 / per_step),
        units::bytes(flow.freed_bytes as f64 / per_step)
    );
}
