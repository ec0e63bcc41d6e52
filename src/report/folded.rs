//! Folded stacks: one line per site, outermost frame first, and its bytes; for flamegraph.pl and its kin.
//!
//! Must not know: files.
//! Invariant: one space separates the stack from the number, one semicolon each frame from the next; the
//! numbers sum up to what the sites listed hold.

use super::model::{Report, Site};
use super::text::base;
use crate::ledger::Frame;
use std::fmt::Write;

/// Which blocks of a site count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Which {
    /// All that were alive at the last step.
    #[default]
    Live,
    /// Those that outlived the step of their birth.
    Survivors,
}

impl Which {
    /// Bytes and blocks of `site` in a run of `steps` steps.
    pub fn of(self, site: &Site, steps: u64) -> (u64, u64) {
        match self {
            Which::Live => (site.live_bytes, site.live_blocks),
            Which::Survivors => site
                .generations
                .iter()
                .filter(|generation| u64::from(generation.first) < steps.saturating_sub(1))
                .fold((0, 0), |sum, generation| (sum.0 + generation.bytes, sum.1 + generation.blocks)),
        }
    }
}

/// A frame in one line: "forward (model.py:17)".
pub fn frame(frame: &Frame) -> String {
    let clean = |text: &str| -> String {
        text.chars().map(|c| if c == ';' || c.is_control() || c.is_whitespace() { '_' } else { c }).collect()
    };
    let (function, file) = (clean(&frame.function), clean(base(&frame.file)));
    match (file.is_empty(), frame.line) {
        (true, _) => function,
        (_, 0) => format!("{function}_({file})"),
        (_, line) => format!("{function}_({file}:{line})"),
    }
}

/// The report's sites as folded stacks. Where a report has several devices, a stack begins with its device.
pub fn folded(report: &Report, which: Which) -> String {
    let several = report.devices.len() > 1;
    let mut out = String::new();
    for site in &report.sites {
        let (bytes, _) = which.of(site, report.run.steps);
        if bytes == 0 {
            continue;
        }
        let mut stack: Vec<String> = Vec::with_capacity(site.stack.len() + 1);
        if several {
            stack.push(device(site.device));
        }
        stack.extend(site.stack.iter().rev().map(frame));
        if stack.is_empty() {
            stack.push("no_stack".to_owned());
        }
        let _ = writeln!(out, "{} {bytes}", stack.join(";"));
    }
    out
}

/// "host" or "device_0".
pub fn device(number: i64) -> String {
    if number < 0 { "host".to_owned() } else { format!("device_{number}") }
}
