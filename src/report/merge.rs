//! The reports of all ranks of a job, put together: totals, who differs and by which site, common findings
//! once.
//!
//! Must not know: files, terminals.
//! Invariant: one report a rank counts, the newest; a rank without a report is named.

use super::model::{Finding, Report, Site};
use super::{text, units};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// Ranks shown as text; more are counted.
const SHOWN: usize = 64;
/// A peak that lies so far above the median is a skew; and so many bytes.
const SKEW: f64 = 1.05;
const SKEW_BYTES: u64 = 1 << 20;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Merged {
    pub verdict: String,
    pub world_size: i64,
    pub ranks: Vec<Rank>,
    /// Ranks that the job has and that left no report.
    pub missing: Vec<i64>,
    /// Older reports of ranks that have a newer one.
    pub superseded: usize,
    pub totals: Totals,
    pub skew: Vec<Skew>,
    pub findings: Vec<Common>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub peak_bytes: u64,
    pub reserved_bytes: u64,
    pub bytes_per_step: f64,
}

/// One device of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rank {
    pub rank: i64,
    pub device: i64,
    pub pid: u32,
    pub verdict: String,
    pub steps: u64,
    /// At the last step boundary; None where it is not known.
    pub live_bytes: Option<u64>,
    pub peak_bytes: u64,
    pub reserved_bytes: u64,
    /// Of this device's findings.
    pub bytes_per_step: f64,
}

/// A rank that differs from the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Skew {
    /// "peak", "growth" or "steps".
    pub what: String,
    pub rank: i64,
    pub device: i64,
    pub value: f64,
    /// Of all ranks.
    pub median: f64,
    /// The site that explains most of the difference in live bytes, and its bytes here and in the median.
    pub site: Option<SkewSite>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SkewSite {
    pub file: String,
    pub line: u32,
    pub function: String,
    pub live_bytes: u64,
    pub median_bytes: u64,
}

/// A finding, and the ranks that have it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Common {
    pub ranks: Vec<i64>,
    /// Of all these ranks together.
    pub live_bytes: u64,
    pub bytes_per_step: f64,
    /// As the first of them has it.
    pub finding: Finding,
}

/// Puts reports together.
pub fn merge(reports: Vec<Report>) -> Merged {
    let given = reports.len();
    let mut newest: BTreeMap<i64, Report> = BTreeMap::new();
    for report in reports {
        let newer = newest.get(&report.run.rank).is_none_or(|known| report.run.time >= known.run.time);
        if newer {
            newest.insert(report.run.rank, report);
        }
    }
    let world_size = newest.values().map(|report| report.run.world_size).max().unwrap_or(0);
    let ranks: Vec<Rank> = newest.values().flat_map(ranks_of).collect();
    let mut totals = Totals::default();
    for rank in &ranks {
        totals.live_bytes += rank.live_bytes.unwrap_or(0);
        totals.peak_bytes += rank.peak_bytes;
        totals.reserved_bytes += rank.reserved_bytes;
        totals.bytes_per_step += rank.bytes_per_step;
    }
    totals.live_blocks = newest.values().flat_map(|r| &r.devices).map(|device| device.live_blocks).sum();
    let verdicts: BTreeSet<&str> = newest.values().map(|report| report.verdict.name()).collect();
    let verdict = ["leak", "fragmentation", "undecided", "clean"].into_iter().find(|v| verdicts.contains(v));
    Merged {
        verdict: verdict.unwrap_or("undecided").to_owned(),
        world_size,
        missing: (0..world_size.min(1 << 20)).filter(|rank| !newest.contains_key(rank)).collect(),
        superseded: given - newest.len(),
        totals,
        skew: skew(&newest, &ranks),
        findings: common(&newest),
        ranks,
    }
}

fn ranks_of(report: &Report) -> Vec<Rank> {
    report
        .devices
        .iter()
        .map(|device| Rank {
            rank: report.run.rank,
            device: device.device,
            pid: report.run.pid,
            verdict: report.verdict.name().to_owned(),
            steps: report.run.steps,
            live_bytes: device.allocated(),
            peak_bytes: device.peak_bytes,
            reserved_bytes: device.series.last().map_or(0, |point| point.reserved),
            bytes_per_step: report
                .findings
                .iter()
                .filter(|finding| finding.device == device.device)
                .map(|finding| finding.bytes_per_step)
                .sum(),
        })
        .collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => 0.0,
        // Of two, the smaller one: else nobody of two could stand out.
        _ => values[(n - 1) / 2],
    }
}

fn skew(reports: &BTreeMap<i64, Report>, ranks: &[Rank]) -> Vec<Skew> {
    let mut found = Vec::new();
    if reports.len() < 2 {
        return found;
    }
    let all = |of: fn(&Rank) -> f64| median(ranks.iter().map(of).collect());
    let highest = |of: fn(&Rank) -> f64| ranks.iter().max_by(|a, b| of(a).total_cmp(&of(b)));
    let peak: fn(&Rank) -> f64 = |rank| rank.peak_bytes as f64;
    let growth: fn(&Rank) -> f64 = |rank| rank.bytes_per_step;
    for (what, of) in [("peak", peak), ("growth", growth)] {
        let middle = all(of);
        let Some(most) = highest(of) else { continue };
        let value = of(most);
        let enough = if what == "peak" { value - middle >= SKEW_BYTES as f64 } else { value - middle >= 1.0 };
        if enough && value > middle * SKEW {
            let site = explained_by(reports, most);
            found.push(Skew {
                what: what.to_owned(),
                rank: most.rank,
                device: most.device,
                value,
                median: middle,
                site,
            });
        }
    }
    let steps: fn(&Rank) -> f64 = |rank| rank.steps as f64;
    let middle = all(steps);
    if let Some(last) = ranks.iter().min_by_key(|rank| rank.steps)
        && (last.steps as f64) < middle * 0.95
        && middle - last.steps as f64 > 1.0
    {
        found.push(Skew {
            what: "steps".to_owned(),
            rank: last.rank,
            device: last.device,
            value: last.steps as f64,
            median: middle,
            site: None,
        });
    }
    found
}

type Place = (String, u32, String);

fn places<'a>(sites: impl Iterator<Item = &'a Site>) -> BTreeMap<Place, u64> {
    let mut all = BTreeMap::new();
    for site in sites {
        if let Some(frame) = site.allocated_at.as_ref().or(site.stack.first()) {
            *all.entry((frame.file.clone(), frame.line, frame.function.clone())).or_insert(0) +=
                site.live_bytes;
        }
    }
    all
}

/// The site that has the most more on `most` than on the median rank.
fn explained_by(reports: &BTreeMap<i64, Report>, most: &Rank) -> Option<SkewSite> {
    let here = places(reports.get(&most.rank)?.sites.iter().filter(|site| site.device == most.device));
    let others: Vec<BTreeMap<Place, u64>> = reports
        .iter()
        .filter(|(rank, _)| **rank != most.rank)
        .map(|(_, report)| places(report.sites.iter()))
        .collect();
    let median_of = |place: &Place| {
        median(others.iter().map(|sites| sites.get(place).copied().unwrap_or(0) as f64).collect()) as u64
    };
    let (place, live_bytes, median_bytes) = here
        .into_iter()
        .map(|(place, bytes)| {
            let median = median_of(&place);
            (place, bytes, median)
        })
        .max_by_key(|(_, bytes, median)| bytes.saturating_sub(*median))?;
    (live_bytes > median_bytes).then_some(SkewSite {
        file: place.0,
        line: place.1,
        function: place.2,
        live_bytes,
        median_bytes,
    })
}

fn common(reports: &BTreeMap<i64, Report>) -> Vec<Common> {
    let mut all: Vec<Common> = Vec::new();
    let place = |finding: &Finding| finding.allocated_at.as_ref().map(|at| (at.file.clone(), at.line));
    let kept = |finding: &Finding| finding.kept_at.as_ref().map(|at| (at.file.clone(), at.line));
    for (rank, report) in reports {
        for finding in &report.findings {
            let same = |known: &&mut Common| {
                known.finding.class == finding.class
                    && place(&known.finding) == place(finding)
                    && kept(&known.finding) == kept(finding)
            };
            if let Some(known) = all.iter_mut().find(same) {
                if !known.ranks.contains(rank) {
                    known.ranks.push(*rank);
                }
                known.live_bytes += finding.live_bytes;
                known.bytes_per_step += finding.bytes_per_step;
            } else {
                all.push(Common {
                    ranks: vec![*rank],
                    live_bytes: finding.live_bytes,
                    bytes_per_step: finding.bytes_per_step,
                    finding: finding.clone(),
                });
            }
        }
    }
    all.sort_by_key(|one| std::cmp::Reverse(one.live_bytes));
    all
}

/// "0-3, 5".
pub fn ranges(numbers: &[i64]) -> String {
    let mut out = String::new();
    let mut at = 0;
    while at < numbers.len() {
        let first = at;
        while at + 1 < numbers.len() && numbers[at + 1] == numbers[at] + 1 {
            at += 1;
        }
        let comma = if out.is_empty() { "" } else { ", " };
        let _ = match at - first {
            0 => write!(out, "{comma}{}", numbers[first]),
            _ => write!(out, "{comma}{}-{}", numbers[first], numbers[at]),
        };
        at += 1;
    }
    out
}

impl Merged {
    /// All of it as text.
    pub fn text(&self, colour: text::Colour) -> String {
        let mut out = String::new();
        let reports: BTreeSet<i64> = self.ranks.iter().map(|rank| rank.rank).collect();
        let _ = writeln!(
            out,
            "strandline: {}  {} of {}",
            self.verdict.to_uppercase(),
            units::plural(reports.len() as u64, "report"),
            units::plural(self.world_size.max(1) as u64, "rank")
        );
        if !self.missing.is_empty() {
            let _ = writeln!(out, "  no report of rank {}", ranges(&self.missing));
        }
        if self.superseded > 0 {
            let older = units::plural(self.superseded as u64, "older report");
            let _ = writeln!(out, "  {older} of the same ranks left out (the newest counts)");
        }
        for common in &self.findings {
            let mut finding = common.finding.clone();
            finding.evidence = format!(
                "rank {}{}; {}",
                ranges(&common.ranks),
                if common.ranks.len() > 1 {
                    format!(", together {} live", units::bytes(common.live_bytes as f64))
                } else {
                    String::new()
                },
                finding.evidence
            );
            out.push('\n');
            out += &text::finding(&finding, colour);
        }
        let _ = writeln!(
            out,
            "\n  {:<6}{:<8}{:<15}{:>8}{:>12}{:>12}{:>12}{:>17}",
            "rank", "device", "verdict", "steps", "live", "peak", "reserved", "growth"
        );
        let row = |out: &mut String, name: &str, device: &str, verdict: &str, steps: &str, r: &Rank| {
            let _ = writeln!(
                out,
                "  {name:<6}{device:<8}{verdict:<15}{steps:>8}{:>12}{:>12}{:>12}{:>17}",
                r.live_bytes.map_or("unknown".to_owned(), |bytes| units::bytes(bytes as f64)),
                units::bytes(r.peak_bytes as f64),
                units::bytes(r.reserved_bytes as f64),
                if r.bytes_per_step > 0.0 {
                    format!("+{}/step", units::bytes(r.bytes_per_step))
                } else {
                    "-".into()
                }
            );
        };
        for rank in self.ranks.iter().take(SHOWN) {
            let device = if rank.device < 0 { "host".to_owned() } else { rank.device.to_string() };
            row(&mut out, &rank.rank.to_string(), &device, &rank.verdict, &rank.steps.to_string(), rank);
        }
        if self.ranks.len() > SHOWN {
            let _ = writeln!(out, "  … and {} more (--json lists all)", self.ranks.len() - SHOWN);
        }
        let totals = Rank {
            live_bytes: self.ranks.iter().any(|r| r.live_bytes.is_some()).then_some(self.totals.live_bytes),
            peak_bytes: self.totals.peak_bytes,
            reserved_bytes: self.totals.reserved_bytes,
            bytes_per_step: self.totals.bytes_per_step,
            ..Rank::default()
        };
        row(&mut out, "all", "", "", "", &totals);
        for skew in &self.skew {
            let value = |value: f64| match skew.what.as_str() {
                "steps" => format!("{value:.0}"),
                "growth" => format!("+{}/step", units::bytes(value)),
                _ => units::bytes(value),
            };
            let device = if skew.device < 0 { "host".to_owned() } else { format!("device {}", skew.device) };
            let _ = writeln!(
                out,
                "\n  skew  rank {} ({device}): {} {}, the median is {}",
                skew.rank,
                skew.what,
                value(skew.value),
                value(skew.median)
            );
            if let Some(site) = &skew.site {
                let _ = writeln!(
                    out,
                    "        most of it at {}:{} in {} ({} live here, {} on the others' median)",
                    text::base(&site.file),
                    site.line,
                    site.function,
                    units::bytes(site.live_bytes as f64),
                    units::bytes(site.median_bytes as f64)
                );
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_in_ranges() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
    }

    #[test]
    fn the_median_of_two_is_the_smaller() {
        assert_eq!(median(vec![9.0, 1.0]), 1.0);
        assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
        assert_eq!(median(vec![]), 0.0);
    }
}
