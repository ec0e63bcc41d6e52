//! OpenMetrics text: what a scraper should know of a run, as gauges.
//!
//! Must not know: files, sockets.
//! Invariant: readable as OpenMetrics and as Prometheus' older text format (which node exporter's textfile
//! collector reads), so only gauges; a metric's samples stand together; the last line is `# EOF`.

use super::model::{Device, Finding, Report};
use crate::ledger::Class;
use std::fmt::Write;

/// Sites shown of each device: a label per site is a series per site on the scraper's side.
const SITES: usize = 10;

struct Text {
    out: String,
    /// Labels that every sample has.
    common: String,
}

impl Text {
    fn metric(&mut self, name: &str, unit: &str, help: &str) {
        let _ = writeln!(self.out, "# TYPE {name} gauge");
        if !unit.is_empty() {
            let _ = writeln!(self.out, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.out, "# HELP {name} {help}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let mut shown = self.common.clone();
        for (label, value) in labels {
            let _ = write!(shown, ",{label}=\"{}\"", escape(value));
        }
        let value = if value.is_finite() { value } else { 0.0 };
        let _ = writeln!(self.out, "{name}{{{shown}}} {value}");
    }
}

/// The metrics of a report.
pub fn to_string(report: &Report) -> String {
    let common = format!("rank=\"{}\",pid=\"{}\"", report.run.rank, report.run.pid);
    let mut text = Text { out: String::new(), common };
    let verdict = report.verdict.name();
    text.metric("strandline_run", "", "1; the labels say what run this is and what its verdict is.");
    text.sample(
        "strandline_run",
        &[("mode", &report.run.mode), ("verdict", verdict), ("version", env!("CARGO_PKG_VERSION"))],
        1.0,
    );
    text.metric("strandline_steps", "", "Steps that the run has made.");
    text.sample("strandline_steps", &[], report.run.steps as f64);
    text.metric("strandline_epochs", "", "Epochs that the run has begun.");
    text.sample("strandline_epochs", &[], report.run.epochs as f64);
    if let Some(seconds) = report.run.step_seconds {
        text.metric("strandline_step_seconds", "seconds", "Median duration of recent steps.");
        text.sample("strandline_step_seconds", &[], seconds);
    }
    devices(&mut text, report);
    findings(&mut text, report);
    sites(&mut text, report);
    text.out.push_str("# EOF\n");
    text.out
}

fn devices(text: &mut Text, report: &Report) {
    let last = |device: &Device| device.series.last().copied();
    let kinds: [(&str, &str, &dyn Fn(&Device) -> Option<u64>); 8] = [
        ("allocated_bytes", "Bytes in blocks that are handed out, at the last step.", &|d| {
            Some(last(d)?.allocated)
        }),
        ("reserved_bytes", "Bytes that the allocator holds, at the last step.", &|d| Some(last(d)?.reserved)),
        ("active_bytes", "Bytes in use or pending for another stream, at the last step.", &|d| {
            Some(last(d)?.active)
        }),
        ("peak_bytes", "The highest requested bytes so far.", &|d| Some(d.peak_bytes)),
        ("live_bytes", "Bytes requested in live blocks.", &|d| Some(d.live_bytes)),
        ("live_blocks", "Live blocks.", &|d| Some(d.live_blocks)),
        ("sites", "Call stacks that have allocated.", &|d| Some(d.sites)),
        ("outside_bytes", "Bytes of the device that this allocator did not hand out.", &|d| {
            Some(d.outside_bytes)
        }),
    ];
    for (kind, help, of) in kinds {
        let found: Vec<(String, u64)> =
            report.devices.iter().filter_map(|d| Some((name(d.device), of(d)?))).collect();
        if found.is_empty() {
            continue;
        }
        let metric = format!("strandline_{kind}");
        text.metric(&metric, if kind.ends_with("_bytes") { "bytes" } else { "" }, help);
        for (device, value) in found {
            text.sample(&metric, &[("device", &device)], value as f64);
        }
    }
}

fn findings(text: &mut Text, report: &Report) {
    let classes =
        [Class::PerIteration, Class::PerEpoch, Class::Sporadic, Class::OneOff, Class::Fragmentation];
    text.metric("strandline_findings", "", "Findings that stand, by class.");
    for class in classes {
        let count = report.findings.iter().filter(|finding| finding.class == class).count();
        text.sample("strandline_findings", &[("class", class.name())], count as f64);
    }
    if report.findings.is_empty() {
        return;
    }
    let kinds: [(&str, &str, &dyn Fn(&Finding) -> f64); 2] = [
        ("strandline_finding_live_bytes", "Live bytes of a finding.", &|f| f.live_bytes as f64),
        ("strandline_finding_growth_bytes", "Bytes that a finding gains per step.", &|f| f.bytes_per_step),
    ];
    for (metric, help, of) in kinds {
        text.metric(metric, "bytes", help);
        for finding in &report.findings {
            let id = finding.id.to_string();
            let at = finding.allocated_at.as_ref();
            let at = at.map_or_else(String::new, |frame| format!("{}:{}", frame.file, frame.line));
            let labels = [
                ("device", name(finding.device)),
                ("finding", id),
                ("class", finding.class.name().to_owned()),
                ("allocated_at", at),
            ];
            let labels: Vec<(&str, &str)> = labels.iter().map(|(k, v)| (*k, v.as_str())).collect();
            text.sample(metric, &labels, of(finding));
        }
    }
}

fn sites(text: &mut Text, report: &Report) {
    let mut shown = Vec::new();
    for device in &report.devices {
        shown.extend(report.sites.iter().filter(|site| site.device == device.device).take(SITES));
    }
    if shown.is_empty() {
        return;
    }
    let metric = "strandline_site_live_bytes";
    text.metric(metric, "bytes", "Live bytes of the largest sites, at the last step.");
    for site in shown {
        let at = site.allocated_at.as_ref();
        let at = at.map_or_else(String::new, |frame| format!("{}:{}", frame.file, frame.line));
        let (device, stack) = (name(site.device), site.stack_id.to_string());
        let labels = [("device", device.as_str()), ("stack", &stack), ("allocated_at", &at)];
        text.sample(metric, &labels, site.live_bytes as f64);
    }
}

fn name(device: i64) -> String {
    if device < 0 { "host".to_owned() } else { device.to_string() }
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
