//! Two reports compared: what grew, by site, device and finding.
//!
//! Must not know: files, terminals.
//! Invariant: a site is known again by the line that allocates it; one whose line moved, by its function if
//! that is unambiguous. A report lists the largest sites only, so "absent" means "less than the smallest".

use super::model::{Finding, Report, Site};
use super::{text, units};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Sites shown as text.
const SHOWN: usize = 20;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diff {
    pub a: Side,
    pub b: Side,
    pub devices: Vec<DeviceChange>,
    /// Sites that changed, the largest change first.
    pub sites: Vec<SiteChange>,
    pub findings: Vec<FindingChange>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Side {
    pub verdict: String,
    pub steps: u64,
    pub pid: u32,
    pub rank: i64,
    pub time: Option<u64>,
    /// A site that this report does not list has at most so many live bytes; by device.
    pub unlisted_at_most: BTreeMap<i64, u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DeviceChange {
    pub device: i64,
    /// At the last step boundary; None where it is not known.
    pub live_bytes: [Option<u64>; 2],
    pub live_blocks: [u64; 2],
    pub peak_bytes: [u64; 2],
    pub reserved_bytes: [u64; 2],
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SiteChange {
    pub device: i64,
    pub file: String,
    pub function: String,
    /// Lines in a and b; None where the report does not list the site.
    pub lines: [Option<u32>; 2],
    pub live_bytes: [Option<u64>; 2],
    pub live_blocks: [Option<u64>; 2],
    /// b minus a; what is not listed counts as 0.
    pub change_bytes: i64,
    pub change_blocks: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FindingChange {
    /// "new", "gone" or "both".
    pub change: String,
    pub class: String,
    pub allocated_at: String,
    pub bytes_per_step: [Option<f64>; 2],
    pub live_bytes: [Option<u64>; 2],
}

/// What changed from `a` to `b`.
pub fn diff(a: &Report, b: &Report) -> Diff {
    Diff { a: side(a), b: side(b), devices: devices(a, b), sites: sites(a, b), findings: findings(a, b) }
}

fn side(report: &Report) -> Side {
    let mut least: BTreeMap<i64, u64> = BTreeMap::new();
    for device in &report.devices {
        let listed: Vec<u64> = report
            .sites
            .iter()
            .filter(|site| site.device == device.device)
            .map(|site| site.live_bytes)
            .collect();
        let all = device.sites <= listed.len() as u64;
        least.insert(device.device, if all { 0 } else { listed.iter().copied().min().unwrap_or(u64::MAX) });
    }
    Side {
        verdict: report.verdict.name().to_owned(),
        steps: report.run.steps,
        pid: report.run.pid,
        rank: report.run.rank,
        time: report.run.time,
        unlisted_at_most: least,
    }
}

fn devices(a: &Report, b: &Report) -> Vec<DeviceChange> {
    let numbers: BTreeSet<i64> = a.devices.iter().chain(&b.devices).map(|device| device.device).collect();
    let of = |report: &Report, number| report.devices.iter().find(|device| device.device == number).cloned();
    numbers
        .into_iter()
        .map(|number| {
            let [x, y] = [of(a, number), of(b, number)].map(Option::unwrap_or_default);
            let reserved = |d: &super::model::Device| d.series.last().map_or(0, |point| point.reserved);
            DeviceChange {
                device: number,
                live_bytes: [x.allocated(), y.allocated()],
                live_blocks: [x.live_blocks, y.live_blocks],
                peak_bytes: [x.peak_bytes, y.peak_bytes],
                reserved_bytes: [reserved(&x), reserved(&y)],
            }
        })
        .collect()
}

/// Where a site's blocks come from: device, file, function, line.
type Place = (i64, String, String, u32);

fn place(site: &Site) -> Place {
    match site.allocated_at.as_ref().or(site.stack.first()) {
        Some(frame) => (site.device, frame.file.clone(), frame.function.clone(), frame.line),
        None => (site.device, String::new(), "an unknown place".to_owned(), 0),
    }
}

fn by_place(report: &Report) -> BTreeMap<Place, (u64, u64)> {
    let mut all: BTreeMap<Place, (u64, u64)> = BTreeMap::new();
    for site in &report.sites {
        let sum = all.entry(place(site)).or_default();
        sum.0 += site.live_bytes;
        sum.1 += site.live_blocks;
    }
    all
}

fn sites(a: &Report, b: &Report) -> Vec<SiteChange> {
    let (mut old, mut new) = (by_place(a), by_place(b));
    let mut pairs: Vec<(Option<Place>, Option<Place>)> = Vec::new();
    let both: Vec<Place> = old.keys().filter(|place| new.contains_key(*place)).cloned().collect();
    let (was, is) = (old.clone(), new.clone());
    for place in both {
        old.remove(&place);
        new.remove(&place);
        pairs.push((Some(place.clone()), Some(place)));
    }
    // A line that moved: the only one left of its function on both sides.
    let function = |place: &Place| (place.0, base(&place.1).to_owned(), place.2.clone());
    for place in old.keys().cloned().collect::<Vec<_>>() {
        let here = old.keys().filter(|other| function(other) == function(&place)).count();
        let there: Vec<Place> =
            new.keys().filter(|other| function(other) == function(&place)).cloned().collect();
        if let (1, [moved]) = (here, &there[..]) {
            old.remove(&place);
            new.remove(moved);
            pairs.push((Some(place), Some(moved.clone())));
        }
    }
    pairs.extend(old.into_keys().map(|place| (Some(place), None)));
    pairs.extend(new.into_keys().map(|place| (None, Some(place))));
    let mut changes: Vec<SiteChange> = pairs
        .into_iter()
        .filter_map(|(x, y)| {
            let named = y.as_ref().or(x.as_ref())?;
            let before = x.as_ref().and_then(|place| was.get(place));
            let after = y.as_ref().and_then(|place| is.get(place));
            let minus = |y: u64, x: u64| {
                (i128::from(y) - i128::from(x)).clamp(i64::MIN.into(), i64::MAX.into()) as i64
            };
            let bytes = [before, after].map(|sum| sum.map(|sum| sum.0));
            let blocks = [before, after].map(|sum| sum.map(|sum| sum.1));
            Some(SiteChange {
                device: named.0,
                file: named.1.clone(),
                function: named.2.clone(),
                lines: [x.as_ref().map(|place| place.3), y.as_ref().map(|place| place.3)],
                live_bytes: bytes,
                live_blocks: blocks,
                change_bytes: minus(bytes[1].unwrap_or(0), bytes[0].unwrap_or(0)),
                change_blocks: minus(blocks[1].unwrap_or(0), blocks[0].unwrap_or(0)),
            })
        })
        .filter(|change| change.change_bytes != 0 || change.change_blocks != 0)
        .collect();
    changes
        .sort_by_key(|change| (std::cmp::Reverse(change.change_bytes.unsigned_abs()), change.file.clone()));
    changes
}

fn base(file: &str) -> &str {
    text::base(file)
}

fn findings(a: &Report, b: &Report) -> Vec<FindingChange> {
    let key = |finding: &Finding| {
        let at = finding.allocated_at.as_ref();
        let at =
            at.map_or_else(|| "nowhere".to_owned(), |at| format!("{} in {}", base(&at.file), at.function));
        (finding.class.name().to_owned(), at)
    };
    let sum = |report: &Report| {
        let mut all: BTreeMap<(String, String), (f64, u64)> = BTreeMap::new();
        for finding in &report.findings {
            let sum = all.entry(key(finding)).or_default();
            sum.0 += finding.bytes_per_step;
            sum.1 += finding.live_bytes;
        }
        all
    };
    let (old, new) = (sum(a), sum(b));
    let keys: BTreeSet<_> = old.keys().chain(new.keys()).cloned().collect();
    keys.into_iter()
        .map(|key| {
            let both = [old.get(&key), new.get(&key)];
            let change = match both {
                [None, _] => "new",
                [_, None] => "gone",
                _ => "both",
            };
            FindingChange {
                change: change.to_owned(),
                class: key.0,
                allocated_at: key.1,
                bytes_per_step: both.map(|sum| sum.map(|sum| sum.0)),
                live_bytes: both.map(|sum| sum.map(|sum| sum.1)),
            }
        })
        .collect()
}

/// "+4.0 MiB", "-512 B".
fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "+" };
    format!("{sign}{}", units::bytes(bytes.unsigned_abs() as f64))
}

impl Diff {
    /// The differences as text.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let (a, b) = (&self.a, &self.b);
        let _ = writeln!(out, "  {:<14}{:>14}{:>14}", "", "a", "b");
        let _ = writeln!(out, "  {:<14}{:>14}{:>14}", "verdict", a.verdict, b.verdict);
        let _ = writeln!(out, "  {:<14}{:>14}{:>14}", "steps", a.steps, b.steps);
        for device in &self.devices {
            let name =
                if device.device < 0 { "host".to_owned() } else { format!("device {}", device.device) };
            for (what, values) in [
                ("live", device.live_bytes),
                ("peak", device.peak_bytes.map(Some)),
                ("reserved", device.reserved_bytes.map(Some)),
            ] {
                let change = match values {
                    [Some(x), Some(y)] => signed(y as i64 - x as i64),
                    _ => String::new(),
                };
                let [x, y] = values
                    .map(|value| value.map_or("unknown".to_owned(), |bytes| units::bytes(bytes as f64)));
                let row = format!("  {:<14}{x:>14}{y:>14}{change:>14}", format!("{name} {what}"));
                let _ = writeln!(out, "{}", row.trim_end());
            }
        }
        if !self.findings.is_empty() {
            let _ = writeln!(out, "\nfindings");
        }
        for finding in &self.findings {
            let rate = |rate: Option<f64>| {
                rate.map_or("-".to_owned(), |rate| format!("+{}/step", units::bytes(rate)))
            };
            let [x, y] = finding.bytes_per_step.map(rate);
            let _ = writeln!(
                out,
                "  {:<5}{x:>17}{y:>17}  {}  {}",
                finding.change, finding.class, finding.allocated_at
            );
        }
        if self.sites.is_empty() {
            let _ = writeln!(out, "\nno listed site changed");
            return out;
        }
        let _ = writeln!(out, "\n  {:>11}{:>10}{:>12}{:>12}  site", "change", "blocks", "a", "b");
        for site in self.sites.iter().take(SHOWN) {
            let size = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| units::bytes(bytes as f64));
            let [x, y] = site.live_bytes.map(size);
            let line = site.lines[1].or(site.lines[0]).unwrap_or(0);
            let moved = match site.lines {
                [Some(x), Some(y)] if x != y => format!("  (was line {x})"),
                _ => String::new(),
            };
            let _ = writeln!(
                out,
                "  {:>11}{:>+10}{x:>12}{y:>12}  {}:{line} in {}{moved}",
                signed(site.change_bytes),
                site.change_blocks,
                base(&site.file),
                site.function
            );
        }
        if self.sites.len() > SHOWN {
            let _ = writeln!(
                out,
                "  … and {} (--json lists all)",
                units::plural((self.sites.len() - SHOWN) as u64, "more site")
            );
        }
        let most = a.unlisted_at_most.values().chain(b.unlisted_at_most.values()).copied().max().unwrap_or(0);
        if most > 0 && self.sites.iter().any(|site| site.live_bytes.contains(&None)) {
            let _ = writeln!(
                out,
                "  -: not among the largest sites, which are the ones that a report lists (at most {})",
                units::bytes(most as f64)
            );
        }
        out
    }
}
