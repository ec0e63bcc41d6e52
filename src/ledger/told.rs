//! What was said of a finding, and whether it is so different by now that it must be said anew.
//!
//! Must not know: words, streams, how a finding comes about.
//! Invariant: a finding is said at most [`SAID`] times, however often it changes.

use super::findings::{Case, Finding, State};
use super::pattern::Class;

/// A finding is said anew, at most so often in all, when its class changed or it became so many times as fast, and
/// not sooner than so many steps after it was said.
const SAID: u8 = 3;
const FASTER: f64 = 4.0;
const SAY_AGAIN: u32 = 8;

/// What was said of a finding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Told {
    pub class: Class,
    bytes_per_step: f64,
    /// The step in which it was said, and how often something was.
    step: u32,
    times: u8,
}

/// Findings said before that are of another class now, or much faster, with what was said of them. Once the job is
/// over, whatever differs; before, not while candidates wait that may change it again.
pub(super) fn changed(
    findings: &mut [Finding],
    cases: &[Case],
    ended: u32,
    finished: bool,
) -> Vec<(Finding, Told)> {
    let waits = |case: &Case| matches!(case.state, State::Waiting(_) | State::Asked(_) | State::Answered(_));
    if !finished && cases.iter().any(waits) {
        return Vec::new();
    }
    let mut changed = Vec::new();
    for finding in findings.iter_mut().filter(|found| !found.fresh && found.is_open()) {
        let Some(told) = finding.told else { continue };
        let faster = finding.bytes_per_step(cases) > FASTER * told.bytes_per_step;
        let differs = finding.class != told.class || faster;
        if differs && told.times < SAID && (finished || ended >= told.step + SAY_AGAIN) {
            finding.note_told(cases, ended);
            changed.push((finding.clone(), told));
        }
    }
    changed
}

impl Finding {
    fn bytes_per_step(&self, cases: &[Case]) -> f64 {
        self.cases.iter().map(|&at| cases[at].pattern.bytes_per_step).sum()
    }

    pub(super) fn note_told(&mut self, cases: &[Case], step: u32) {
        let times = self.told.map_or(0, |told| told.times).saturating_add(1);
        let bytes_per_step = self.bytes_per_step(cases);
        self.told = Some(Told { class: self.class, bytes_per_step, step, times });
    }
}
