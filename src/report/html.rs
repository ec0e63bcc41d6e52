//! A report as one HTML page that opens offline: the page's own files (`html/`) with the report's data in it.
//!
//! Must not know: where the page is written, how it is drawn.
//! Invariants: nothing of a report can become markup or script (data is escaped here, and set as text by the
//! page); the page stays below [`MOST_BYTES`] whatever the report holds, and says what it left out.

use super::model::{Generation, Report, Segment, SeriesPoint, Site};
use super::text::{self, Colour};
use super::units;
use crate::ledger::Frame;
use serde_json::{Value, json};
use std::collections::HashMap;

/// The size that no page exceeds.
pub const MOST_BYTES: usize = 5 << 20;

const PAGE: &str = include_str!("html/page.html");
const STYLE: &str = include_str!("html/style.css");
const SCRIPT: &[&str] = &[
    include_str!("html/base.js"),
    include_str!("html/words.js"),
    include_str!("html/memory.js"),
    include_str!("html/flame.js"),
    include_str!("html/generations.js"),
    include_str!("html/segments.js"),
    include_str!("html/sites.js"),
    include_str!("html/main.js"),
];

/// How much of each kind is shown.
#[derive(Clone, Copy)]
struct Caps {
    sites: usize,
    findings: usize,
    not_leaks: usize,
    devices: usize,
    points: usize,
    history: usize,
    generations: usize,
    stack: usize,
    /// Of all devices together.
    runs: usize,
    /// Bytes of frames; a stack that does not fit any more is left out.
    frame_bytes: usize,
    /// Characters of one text.
    text: usize,
}

impl Caps {
    /// Each halving halves everything: a report that no job of ours writes may need it.
    fn halved(times: u32) -> Caps {
        let cap = |most: usize| (most >> times).max(2);
        Caps {
            sites: cap(500),
            findings: cap(60),
            not_leaks: cap(60),
            devices: cap(64),
            points: cap(512),
            history: cap(64),
            generations: cap(64),
            stack: cap(128),
            runs: cap(8_192),
            frame_bytes: cap(1 << 20),
            text: cap(1_000),
        }
    }
}

/// The page.
pub fn page(report: &Report) -> String {
    let fits = |data: &String| data.len() < MOST_BYTES - (512 << 10);
    let mut made = (0..10).map(|halvings| escape_json(&data(report, Caps::halved(halvings)).to_string()));
    let data = made.find(fits).unwrap_or_else(|| "null".to_owned());
    let said = escape_html(&cut(&text::report(report, Colour::Never), 20_000));
    let program = report.run.command.iter().find(|word| word.ends_with(".py"));
    let program = program.or(report.run.command.first()).map_or("a run", |word| text::base(word));
    let title = escape_html(&cut(&format!("{}: {program} (strandline)", report.verdict.name()), 200));
    let script = format!("(() => {{\n\"use strict\";\n{}\n}})();", SCRIPT.join("\n"));
    let mut page = String::with_capacity(data.len() + script.len() + STYLE.len() + said.len() + 4096);
    let mut rest = PAGE;
    while let Some((before, name, after)) = placeholder(rest) {
        page.push_str(before);
        page.push_str(match name {
            "version" => env!("CARGO_PKG_VERSION"),
            "title" => &title,
            "style" => STYLE.trim_end(),
            "text" => &said,
            "data" => &data,
            "script" => &script,
            _ => "",
        });
        rest = after;
    }
    page.push_str(rest);
    page
}

/// What lies before the next `{{name}}`, the name, and what follows.
fn placeholder(page: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = page.split_once("{{")?;
    let (name, after) = rest.split_once("}}")?;
    Some((before, name, after))
}

/// JSON for a `<script>` element: no character in it can end the element or begin a comment.
fn escape_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len() + json.len() / 16);
    for c in json.chars() {
        match c {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            c => out.push(c),
        }
    }
    out
}

fn escape_html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\0' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// Files and frames, each once.
struct Frames<'a> {
    caps: Caps,
    files: Vec<&'a str>,
    file_numbers: HashMap<&'a str, usize>,
    frames: Vec<(usize, u32, String, u8)>,
    numbers: HashMap<(&'a str, u32, &'a str), usize>,
    bytes: usize,
    left_out: usize,
}

impl<'a> Frames<'a> {
    fn new(caps: Caps) -> Frames<'a> {
        Frames {
            caps,
            files: Vec::new(),
            file_numbers: HashMap::new(),
            frames: Vec::new(),
            numbers: HashMap::new(),
            bytes: 0,
            left_out: 0,
        }
    }

    fn stack(&mut self, stack: &'a [Frame]) -> Vec<usize> {
        if self.bytes > self.caps.frame_bytes {
            self.left_out += usize::from(!stack.is_empty());
            return Vec::new();
        }
        // Of a deep stack the middle is left out: the innermost frames and the outermost say most.
        let most = self.caps.stack;
        let middle = if stack.len() > most { most * 3 / 4..stack.len() - most / 4 } else { 0..0 };
        let kept = stack.iter().enumerate().filter(|(at, _)| !middle.contains(at));
        kept.map(|(_, frame)| self.frame(frame)).collect()
    }

    fn frame(&mut self, frame: &'a Frame) -> usize {
        let key = (frame.file.as_str(), frame.line, frame.function.as_str());
        if let Some(&number) = self.numbers.get(&key) {
            return number;
        }
        let files = &mut self.files;
        let bytes = &mut self.bytes;
        let text = self.caps.text;
        let file = *self.file_numbers.entry(&frame.file).or_insert_with(|| {
            *bytes += frame.file.len().min(text);
            files.push(&frame.file);
            files.len() - 1
        });
        let kind = if frame.user { 1 } else { 2 * u8::from(frame.kind == "native") };
        let function = cut(&frame.function, text);
        self.bytes += function.len() + 24;
        self.frames.push((file, frame.line, function, kind));
        self.numbers.insert(key, self.frames.len() - 1);
        self.frames.len() - 1
    }
}

/// What the page's script is given.
fn data(report: &Report, caps: Caps) -> Value {
    let mut left_out = Vec::new();
    let mut cap = |count: usize, most: usize, what: &str| {
        if count > most {
            let left = units::plural((count - most) as u64, what);
            left_out.push(format!("{left}: the {most} largest are shown"));
        }
        count.min(most)
    };
    let findings = &report.findings[..cap(report.findings.len(), caps.findings, "finding")];
    let sites = &report.sites[..cap(report.sites.len(), caps.sites, "site")];
    let not_leaks = &report.not_leaks[..cap(report.not_leaks.len(), caps.not_leaks, "explanation")];
    let devices = &report.devices[..cap(report.devices.len(), caps.devices, "device")];
    let mut frames = Frames::new(caps);
    let findings: Vec<Value> = findings
        .iter()
        .map(|finding| {
            let mut bare = finding.clone();
            bare.stack = Vec::new();
            bare.births = Vec::new();
            bare.sites_in_finding.truncate(caps.sites);
            let mut value = serde_json::to_value(&bare).unwrap_or_default();
            value["stack"] = json!(frames.stack(&finding.stack));
            value["series"] = json!(thin(&finding.series, caps.history));
            value
        })
        .collect();
    let sites: Vec<Value> = sites.iter().map(|site| site_data(site, &mut frames)).collect();
    if frames.left_out > 0 {
        let stacks = units::plural(frames.left_out as u64, "call stack");
        left_out.push(format!("{stacks} of the smaller sites; report.json has them"));
    }
    let mut room = caps.runs;
    let devices: Vec<Value> = devices
        .iter()
        .map(|device| {
            let runs: usize = device.segments.iter().map(|segment| segment.runs.len()).sum();
            let shown = runs <= room;
            if shown {
                room -= runs;
            } else {
                left_out.push(format!("the segment map of device {} ({runs} runs)", device.device));
            }
            if device.series.len() > caps.points {
                left_out.push(format!(
                    "device {}: {} points of the curve are drawn as {} or fewer, peaks kept",
                    device.device,
                    device.series.len(),
                    caps.points
                ));
            }
            json!({
                "device": device.device,
                "outside_bytes": device.outside_bytes,
                "total_bytes": device.total_bytes,
                "live_bytes": device.live_bytes,
                "live_blocks": device.live_blocks,
                "sites": device.sites,
                "peak_bytes": device.peak_bytes,
                "peak_step": device.peak_step,
                "phases": device.phases,
                "series": thin_series(&device.series, caps.points),
                "segments": if shown { device.segments.iter().map(segment).collect() } else { Vec::new() },
                "segments_left_out": device.segments_left_out,
            })
        })
        .collect();
    let run = &report.run;
    let mut value = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "verdict": report.verdict,
        "reason": report.reason,
        "run": {
            "command": run.command.iter().take(64).collect::<Vec<_>>(),
            "pid": run.pid,
            "rank": run.rank,
            "world_size": run.world_size,
            "mode": run.mode,
            "steps": run.steps,
            "epochs": run.epochs,
            "step_seconds": run.step_seconds,
            "written": run.written,
            "time": run.time,
            "epoch_starts": run.epoch_starts.iter().rev().take(256).rev().collect::<Vec<_>>(),
            "validations": run.validations.iter().rev().take(256).rev().collect::<Vec<_>>(),
        },
        "files": frames.files,
        "findings": findings,
        "devices": devices,
        "not_leaks": not_leaks,
        "sites": sites,
        "left_out": left_out,
    });
    value["frames"] = json!(frames.frames);
    shorten(&mut value, caps.text);
    value
}

fn site_data<'a>(site: &'a Site, frames: &mut Frames<'a>) -> Value {
    json!({
        "device": site.device,
        "stack_id": site.stack_id,
        "allocated_at": site.allocated_at,
        "stack": frames.stack(&site.stack),
        "live_bytes": site.live_bytes,
        "live_blocks": site.live_blocks,
        "allocated_bytes": site.allocated_bytes,
        "allocated_blocks": site.allocated_blocks,
        "phase": site.phase,
        "generations": thin_generations(&site.generations, frames.caps.generations),
        "history": thin(&site.history, frames.caps.history),
    })
}

fn segment(segment: &Segment) -> Value {
    json!({
        "size": segment.size,
        "stream": segment.stream,
        "large": segment.large,
        "runs": segment.runs,
    })
}

/// Every n-th item and the last.
fn thin<T: Copy>(items: &[T], most: usize) -> Vec<T> {
    let every = items.len().div_ceil(most).max(1);
    let mut kept: Vec<T> = items.iter().step_by(every).copied().collect();
    if every > 1 && !(items.len() - 1).is_multiple_of(every) {
        kept.extend(items.last());
    }
    kept
}

/// As many points as are drawn; the peak of each is the highest of those that it stands for.
fn thin_series(series: &[SeriesPoint], most: usize) -> Vec<SeriesPoint> {
    let every = if series.len() > most { series.len().div_ceil(most - 1) } else { 1 };
    let peak = |points: &[SeriesPoint]| points.iter().map(|point| point.peak).max().unwrap_or(0);
    let mut kept: Vec<SeriesPoint> =
        series.chunks(every).map(|points| SeriesPoint { peak: peak(points), ..points[0] }).collect();
    if every > 1
        && let (Some(last), Some(drawn)) = (series.last(), kept.last())
        && drawn.step < last.step
    {
        kept.push(*last);
    }
    kept
}

/// Neighbours joined until there are few enough.
fn thin_generations(generations: &[Generation], most: usize) -> Vec<Generation> {
    let every = generations.len().div_ceil(most).max(1);
    let join = |all: &[Generation]| Generation {
        first: all[0].first,
        last: all[all.len() - 1].last,
        blocks: all.iter().map(|generation| generation.blocks).sum(),
        bytes: all.iter().map(|generation| generation.bytes).sum(),
    };
    generations.chunks(every).map(join).collect()
}

/// Cuts every text that is too long.
fn shorten(value: &mut Value, most: usize) {
    match value {
        Value::String(text) if text.len() > most => *text = cut(text, most),
        Value::Array(items) => items.iter_mut().for_each(|item| shorten(item, most)),
        Value::Object(map) => map.values_mut().for_each(|value| shorten(value, most)),
        _ => {}
    }
}
