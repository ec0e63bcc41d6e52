//! speedscope's file format: live bytes, survivors and bytes ever allocated, each by call stack and device.
//!
//! Must not know: files.
//! Invariant: every profile's samples and weights are as long as each other, and its end is their sum.

use super::folded::{self, Which};
use super::model::{Report, Site};
use crate::ledger::Frame;
use serde_json::{Value, json};
use std::collections::HashMap;

/// The file.
pub fn to_string(report: &Report) -> String {
    let mut frames = Frames::default();
    let mut profiles = Vec::new();
    let steps = report.run.steps;
    let mut devices: Vec<i64> = report.sites.iter().map(|site| site.device).collect();
    devices.sort_unstable();
    devices.dedup();
    for &device in &devices {
        let sites: Vec<&Site> = report.sites.iter().filter(|site| site.device == device).collect();
        let name = if devices.len() > 1 { format!(", {}", folded::device(device)) } else { String::new() };
        let kinds: [(&str, &dyn Fn(&Site) -> u64); 3] = [
            ("live bytes at the last step", &|site| Which::Live.of(site, steps).0),
            ("survivors of the step of their birth", &|site| Which::Survivors.of(site, steps).0),
            ("bytes ever allocated", &|site| site.allocated_bytes),
        ];
        for (kind, weigh) in kinds {
            profiles.push(profile(&format!("{kind}{name}"), &sites, weigh, &mut frames));
        }
    }
    let file = json!({
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": report.run.command.join(" "),
        "exporter": concat!("strandline@", env!("CARGO_PKG_VERSION")),
        "activeProfileIndex": 0,
        "shared": {"frames": frames.list},
        "profiles": profiles,
    });
    file.to_string()
}

fn profile(name: &str, sites: &[&Site], weigh: &dyn Fn(&Site) -> u64, frames: &mut Frames) -> Value {
    let (mut samples, mut weights) = (Vec::new(), Vec::new());
    for site in sites {
        let weight = weigh(site);
        if weight > 0 {
            let stack: Vec<usize> = site.stack.iter().rev().map(|frame| frames.number(frame)).collect();
            samples.push(stack);
            weights.push(weight);
        }
    }
    json!({
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": weights.iter().sum::<u64>(),
        "samples": samples,
        "weights": weights,
    })
}

#[derive(Default)]
struct Frames {
    list: Vec<Value>,
    numbers: HashMap<(String, u32, String), usize>,
}

impl Frames {
    fn number(&mut self, frame: &Frame) -> usize {
        let key = (frame.file.clone(), frame.line, frame.function.clone());
        let list = &mut self.list;
        *self.numbers.entry(key).or_insert_with(|| {
            let mut value = json!({"name": frame.function});
            if !frame.file.is_empty() {
                value["file"] = json!(frame.file);
            }
            if frame.line > 0 {
                value["line"] = json!(frame.line);
            }
            list.push(value);
            list.len() - 1
        })
    }
}
