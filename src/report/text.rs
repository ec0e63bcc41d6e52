//! A report as text, for terminals and logs: the short form of one new finding, and the whole report.
//!
//! Must not know: terminals; colours are used only if asked for.
//! Invariant: every line but the first of a finding is indented; labels are aligned.

use super::model::{Finding, Remark, Report, Verdict};
use super::{focus, tables, units};
use crate::ledger::{Class, Frame};
use std::fmt::Write;

const SITES: usize = 10;
const NOT_LEAKS: usize = 8;
const LABEL: usize = 14;
/// Lines named of the sites that share a cause.
const LISTED: usize = 6;

/// Whether to use ANSI colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Colour {
    #[default]
    Never,
    Always,
}

impl Colour {
    pub(super) fn paint(self, text: &str, code: &str) -> String {
        match self {
            Colour::Never => text.to_owned(),
            Colour::Always => format!("\x1b[{code}m{text}\x1b[0m"),
        }
    }
}

/// "+4.0 MiB/step", "+1.5 MiB/epoch on average" where they differ in size, "214.0 MiB once".
pub fn rate(finding: &Finding) -> String {
    let mean = if finding.uneven { " on average" } else { "" };
    match finding.class {
        Class::PerIteration => format!("+{}/step{mean}", units::bytes(finding.bytes_per_step)),
        Class::PerEpoch if finding.per.ends_with("steps") => {
            format!("+{} every {}{mean}", units::bytes(finding.bytes_per_epoch), finding.per)
        }
        Class::PerEpoch => format!("+{}/epoch{mean}", units::bytes(finding.bytes_per_epoch)),
        Class::Sporadic => format!("+{}/step on average", units::bytes(finding.bytes_per_step)),
        Class::OneOff => format!("{} once", units::bytes(finding.live_bytes as f64)),
        Class::Fragmentation => format!("+{}/step reserved", units::bytes(finding.bytes_per_step)),
    }
}

/// A finding as it is printed when it is new.
pub fn finding(finding: &Finding, colour: Colour) -> String {
    let mut out = String::new();
    let word = if finding.class == Class::Fragmentation { "FRAGMENTATION" } else { "LEAK" };
    let class = if finding.class == Class::Fragmentation {
        String::new()
    } else {
        format!("  {}", finding.class.name())
    };
    let mut because = finding.evidence.clone();
    if let Some(forecast) = &finding.forecast {
        let _ = write!(because, "; out of memory in about {} steps", units::count(forecast.steps));
        if let Some(seconds) = forecast.seconds {
            let _ = write!(because, ", {}", units::duration(seconds));
        }
    }
    let _ =
        writeln!(out, "strandline: {}{class}  {}  ({because})", colour.paint(word, "1;31"), rate(finding));
    // Nothing of it may be alive any more: the stage that kept it is over.
    let size = if finding.live_blocks == 0 {
        String::new()
    } else {
        let blocks = units::plural(finding.live_blocks, "live block");
        format!("({blocks}, {})", units::bytes(finding.live_bytes as f64))
    };
    let place = place(&finding.stack, finding.allocated_at.as_ref());
    if finding.class == Class::Fragmentation {
        line(&mut out, "pushed by", &place);
    } else {
        line(&mut out, "allocated at", &format!("{place:<58}  {size}"));
        let more = finding.sites_in_finding.len().saturating_sub(1) as u64;
        if more > 0 {
            let places = finding.sites_in_finding[1..].iter().filter_map(|site| site.allocated_at.as_ref());
            let sites = units::plural(more, "more site");
            line(&mut out, "and", &format!("{sites} of the same cause: {}", short_list(places)));
        }
        match &finding.held_by {
            Some(holder) => line(&mut out, "held by", &holder.path),
            // A program without Python has no holders to be named.
            None if finding.stack.iter().all(|frame| frame.kind == "native") && !finding.stack.is_empty() => {
            }
            None if !finding.holder_note.is_empty() => line(&mut out, "held by", &finding.holder_note),
            None => line(&mut out, "held by", "C++ or unknown (no Python object was found)"),
        }
        if let Some(kept) = &finding.kept_at {
            line(
                &mut out,
                "kept alive at",
                &format!("{}:{}    {}", base(&kept.file), kept.line, kept.code.trim()),
            );
        }
    }
    if let Some(word) = released_by(finding) {
        line(&mut out, "released by", &word);
    }
    line(&mut out, "fix", &finding.fix);
    out
}

/// That a finding which is printed anew was printed before, and as what.
pub fn said_before(finding: &Finding, class: Class) -> String {
    let mut out = String::new();
    let as_what = if class == finding.class { "and is much faster than that" } else { "and is none" };
    line(
        &mut out,
        "instead of",
        &format!("{}, called at step {}: it was said before {as_what}", class.name(), finding.called_at_step),
    );
    out
}

/// That a finding which was printed stands no longer.
pub fn taken_back(finding: &Finding, because: &str, colour: Colour) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "strandline: {}  {}, called at step {}: {because}",
        colour.paint("TAKEN BACK", "1;32"),
        finding.class.name(),
        finding.called_at_step
    );
    line(&mut out, "allocated at", &place(&finding.stack, finding.allocated_at.as_ref()));
    if let Some(holder) = &finding.held_by {
        line(&mut out, "held by", &holder.path);
    }
    out
}

/// What gives the memory back now, where something does.
fn released_by(finding: &Finding) -> Option<String> {
    let size = units::bytes(finding.live_bytes as f64);
    match finding.released_by.as_str() {
        "gc" => Some(format!("gc.collect(): it would free these {size} now")),
        "synchronize" => Some(format!("torch.cuda.synchronize(): {size} wait for another stream")),
        "empty_cache" if finding.class != Class::Fragmentation => {
            Some(format!("torch.cuda.empty_cache() gives back {size}"))
        }
        _ => None,
    }
}

fn line(out: &mut String, label: &str, text: &str) {
    let _ = writeln!(out, "  {label:<LABEL$}{}", text.trim_end());
}

/// "model.py:17, 18, train.py:42", each line once, the rest counted.
fn short_list<'a>(frames: impl Iterator<Item = &'a Frame>) -> String {
    let mut places: Vec<(&str, u32)> = Vec::new();
    for frame in frames {
        let place = (base(&frame.file), frame.line);
        if !places.contains(&place) {
            places.push(place);
        }
    }
    if places.is_empty() {
        return "in no line of yours".to_owned();
    }
    let more = places.len().saturating_sub(LISTED);
    places.truncate(LISTED);
    places.sort_unstable();
    let mut out = String::new();
    for (at, (file, line)) in places.iter().enumerate() {
        match at.checked_sub(1).map(|before| places[before].0) {
            Some(before) if before == *file => {
                let _ = write!(out, ", {line}");
            }
            Some(_) => {
                let _ = write!(out, ", {file}:{line}");
            }
            None => {
                let _ = write!(out, "{file}:{line}");
            }
        }
    }
    if more > 0 {
        let _ = write!(out, " and {more} more");
    }
    out
}

/// The name of a file without its folders.
pub fn base(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

fn short(frame: &Frame) -> String {
    // A native frame has a file, the shared object, and no line.
    if frame.line == 0 {
        base(&frame.file).to_owned()
    } else {
        format!("{}:{}", base(&frame.file), frame.line)
    }
}

/// "train.py:42 in train_step > model.py:17 in forward": the user's frames, the innermost last.
fn place(stack: &[Frame], allocated_at: Option<&Frame>) -> String {
    let mut frames: Vec<&Frame> = stack.iter().filter(|frame| frame.user).take(2).collect();
    if frames.is_empty() {
        frames.extend(allocated_at.or(stack.first()));
    }
    frames.reverse();
    let shown: Vec<String> =
        frames.iter().map(|frame| format!("{} in {}", short(frame), frame.function)).collect();
    if shown.is_empty() { "an unknown place (no stack)".to_owned() } else { shown.join(" > ") }
}

/// That a report was written while the run went on, and why.
fn interim(written: &str) -> Option<&'static str> {
    match written {
        "finding" => Some("written at a finding, while it ran"),
        "asked" => Some("written on request, while it ran"),
        "out of memory" => Some("written at an out-of-memory error, while it ran"),
        _ => None,
    }
}

/// The whole report.
pub fn report(report: &Report, colour: Colour) -> String {
    let mut out = String::new();
    let code = match report.verdict {
        Verdict::Clean => "1;32",
        Verdict::Undecided => "1;33",
        Verdict::Leak | Verdict::Fragmentation => "1;31",
    };
    let verdict = report.verdict.name().to_uppercase();
    let _ = writeln!(out, "strandline: {}  {}", colour.paint(&verdict, code), report.reason);
    let run = &report.run;
    let mut facts = vec![units::plural(run.steps, "step")];
    if run.epochs > 0 {
        facts.push(units::plural(run.epochs, "epoch"));
    }
    if !run.mode.is_empty() {
        facts.push(format!("mode {}", run.mode));
    }
    if run.world_size > 1 {
        facts.push(format!("rank {} of {}", run.rank, run.world_size));
    }
    facts.push(format!("process {}", run.pid));
    facts.extend(interim(&run.written).map(str::to_owned));
    let _ = writeln!(out, "  {}: {}", run.command.join(" "), facts.join(", "));
    if !run.focus.is_empty() {
        let (focused, hidden) = focus::focus(report, &run.focus);
        let _ = writeln!(
            out,
            "  focus on {}: {} and {} without a frame of it are hidden",
            run.focus,
            units::plural(hidden.findings as u64, "finding"),
            units::plural(hidden.sites as u64, "site")
        );
        return body(out, &focused, colour);
    }
    body(out, report, colour)
}

fn body(mut out: String, report: &Report, colour: Colour) -> String {
    for found in &report.findings {
        out.push('\n');
        out.push_str(&finding(found, colour));
        let _ = writeln!(
            out,
            "  {:<LABEL$}{} % sure, called at step {}; see {GUIDE}#{}",
            "confidence",
            (found.confidence * 100.0).round(),
            found.called_at_step,
            found.class.name()
        );
    }
    for said in &report.remarks {
        out.push('\n');
        out.push_str(&remark(said, colour));
    }
    if !report.not_leaks.is_empty() {
        let _ = writeln!(out, "\n{}", colour.paint("not leaks", "1"));
        for not in report.not_leaks.iter().take(NOT_LEAKS) {
            let place =
                not.allocated_at.as_ref().map_or_else(String::new, |frame| format!("{}  ", short(frame)));
            let _ = writeln!(
                out,
                "  {:>10}  {place}{}: {}",
                units::bytes(not.bytes as f64),
                not.what,
                not.because
            );
        }
    }
    if !report.undecided.is_empty() {
        let _ = writeln!(out, "\n{}", colour.paint("undecided", "1"));
        for open in report.undecided.iter().take(NOT_LEAKS) {
            let place =
                open.allocated_at.as_ref().map_or_else(String::new, |frame| format!("{}  ", short(frame)));
            let _ = writeln!(
                out,
                "  {:>10}  {place}{}; {}",
                units::bytes(open.bytes as f64),
                open.what,
                open.decides
            );
        }
    }
    tables::memory(&mut out, report, colour);
    sites(&mut out, report, colour);
    let _ = writeln!(out, "\nwhat the words mean, and what to do: {GUIDE}");
    out
}

/// Where classes and reasons are explained.
pub const GUIDE: &str = "docs/findings.md";

/// A remark as it is printed when it is new.
pub fn remark(remark: &Remark, colour: Colour) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "strandline: {}  {}", colour.paint("NOTE", "1;33"), remark.what);
    line(&mut out, "because", &remark.because);
    if !remark.fix.is_empty() {
        line(&mut out, "fix", &remark.fix);
    }
    out
}

fn sites(out: &mut String, report: &Report, colour: Colour) {
    if report.sites.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{}", colour.paint("largest sites at the last step", "1"));
    for site in report.sites.iter().take(SITES) {
        let born = match (site.generations.first(), site.generations.last()) {
            (Some(first), Some(last)) if first.first != last.last => {
                format!("born in steps {}-{}", first.first, last.last)
            }
            (Some(first), _) => format!("born in step {}", first.first),
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "  {:>10}  {:>13}  {}  {born}",
            units::bytes(site.live_bytes as f64),
            units::plural(site.live_blocks, "block"),
            place(&site.stack, site.allocated_at.as_ref())
        );
    }
}
