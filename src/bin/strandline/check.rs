//! `strandline check`: the gate for CI. Reads reports, compares them with what is allowed, exits by it.

use crate::check_rules::{self as rules, Budget, Growth, Suppression};
use crate::{check_forms, code, files};
use clap::Args;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use strandline::ledger::{Class, Frame};
use strandline::report::model::Finding;
use strandline::report::{Report, Verdict, text, units};

/// A difference of peaks below this is noise. Bytes.
const PEAK_NOISE: u64 = 1 << 20;

/// Arguments of `strandline check`.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0 all is as allowed, 3 something is not, 5 a run was too short to say, 2 the \
                        command line or a file is not what it must be."
)]
pub struct Check {
    /// Reports, or folders that hold reports (each is checked)
    #[arg(value_name = "DIR|FILE", default_value = "strandline-out")]
    paths: Vec<PathBuf>,
    /// The most that all findings of a run together may grow by [default: 0 B/step, unless --baseline is given]
    #[arg(long, value_name = "BYTES/step|epoch", value_parser = rules::growth)]
    max_growth: Option<Growth>,
    /// The most live bytes of the sites that match, as model.py:17=512MiB (may be given more than once)
    #[arg(long, value_name = "SITE=BYTES", value_parser = rules::budget)]
    budget: Vec<Budget>,
    /// Findings that are known: leak:PATTERN lines, as for LeakSanitizer (may be given more than once)
    #[arg(long, value_name = "FILE")]
    suppressions: Vec<PathBuf>,
    /// An earlier report (or folder of the ranks' reports) to compare with
    #[arg(long, value_name = "FILE|DIR")]
    baseline: Option<PathBuf>,
    /// Fail if a finding is new or grows faster than in the baseline, or a peak is higher
    #[arg(long, requires = "baseline")]
    fail_on_increase: bool,
    /// How much more than in the baseline is the same
    #[arg(long, value_name = "PERCENT", default_value_t = 10.0, requires = "baseline")]
    tolerance: f64,
    /// A run that was too short to say is no failure
    #[arg(long)]
    allow_undecided: bool,
    /// Also write the results as JUnit XML
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Also print GitHub annotations (::error file=…)
    #[arg(long)]
    github: bool,
}

/// Why a check failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Growth,
    Budget,
    Increase,
    Undecided,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Growth => "growth",
            Kind::Budget => "budget",
            Kind::Increase => "increase",
            Kind::Undecided => "undecided",
        }
    }
}

/// One thing that was found to be wrong.
pub struct Problem {
    pub text: String,
    pub place: Option<(String, u32)>,
}

/// One check of one report.
pub struct Test {
    pub kind: Kind,
    pub name: String,
    /// What was found, in one line.
    pub found: String,
    /// None: as allowed.
    pub problems: Vec<Problem>,
}

/// All checks of one report.
pub struct Suite {
    pub name: String,
    pub facts: String,
    pub tests: Vec<Test>,
    pub notes: Vec<String>,
}

impl Check {
    /// Checks, prints, exits by it.
    pub fn run(self) -> Result<ExitCode, String> {
        let mut known = Vec::new();
        for path in &self.suppressions {
            known.extend(rules::suppressions(path)?);
        }
        if !(0.0..=1000.0).contains(&self.tolerance) {
            return Err(format!("--tolerance {}: a percentage from 0 to 1000 is meant", self.tolerance));
        }
        let baseline = self.baseline.as_deref().map(files::reports).transpose()?;
        let mut found = Vec::new();
        for path in &self.paths {
            found.extend(files::reports(path)?);
        }
        let mut suites = Vec::new();
        for files::Found { path, report } in &found {
            let before = match &baseline {
                Some(all) => Some(counterpart(all, report)?),
                None => None,
            };
            suites.push(self.check(path.display().to_string(), report, before, &mut known));
        }
        let mut out = check_forms::text(&suites);
        for unused in known.iter().filter(|known| known.used == 0) {
            out += &format!("  note  leak:{} suppressed nothing\n", unused.pattern);
        }
        let failed = |undecided: bool| {
            let tests = suites.iter().flat_map(|suite| &suite.tests);
            tests.filter(|t| !t.problems.is_empty() && (t.kind == Kind::Undecided) == undecided).count()
        };
        let all: usize = suites.iter().map(|suite| suite.tests.len()).sum();
        let reports = units::plural(suites.len() as u64, "report");
        let (wrong, undecided) = (failed(false), failed(true));
        let (word, code) = match (wrong, undecided) {
            (0, 0) => ("passed", code::OK),
            (0, _) => ("UNDECIDED", code::UNDECIDED),
            _ => ("FAILED", code::LEAK),
        };
        out += &format!("{word}: {} of {all} checks in {reports} as allowed\n", all - wrong - undecided);
        files::print(&out)?;
        if self.github {
            files::print(&check_forms::github(
                &suites,
                std::env::var_os("GITHUB_WORKSPACE").map(PathBuf::from),
            ))?;
        }
        if let Some(path) = &self.junit {
            std::fs::write(path, check_forms::junit(&suites))
                .map_err(|error| format!("--junit {}: {error}", path.display()))?;
        }
        Ok(ExitCode::from(code))
    }

    fn check(
        &self,
        name: String,
        report: &Report,
        before: Option<&Report>,
        known: &mut [Suppression],
    ) -> Suite {
        let mut suppressed = 0u64;
        let mut open: Vec<&Finding> = Vec::new();
        for finding in &report.findings {
            match known.iter_mut().find(|known| rules::matches_finding(&known.pattern, finding)) {
                Some(known) => {
                    known.used += 1;
                    suppressed += 1;
                }
                None => open.push(finding),
            }
        }
        let (apart, leaks): (Vec<&Finding>, Vec<&Finding>) =
            open.iter().partition(|finding| finding.class == Class::Fragmentation);
        let mut tests = Vec::new();
        let limit = match (self.max_growth, before) {
            (None, Some(_)) => None,
            (given, _) => Some(given.unwrap_or(Growth { bytes: 0.0, per_epoch: false })),
        };
        if let Some(limit) = limit {
            if report.verdict == Verdict::Undecided && !self.allow_undecided {
                tests.push(Test {
                    kind: Kind::Undecided,
                    name: format!("grows by at most {limit}"),
                    found: report.reason.clone(),
                    problems: vec![Problem { text: report.reason.clone(), place: None }],
                });
            } else {
                tests.push(grows(report, &leaks, limit, suppressed));
            }
        }
        tests.extend(self.budget.iter().map(|budget| spends(report, budget)));
        let mut notes = Vec::new();
        if let Some(before) = before {
            let test = increases(report, &leaks, before, self.tolerance / 100.0);
            if self.fail_on_increase {
                tests.push(test);
            } else {
                notes.extend(test.problems.into_iter().map(|p| format!("against the baseline: {}", p.text)));
            }
        }
        if suppressed > 0 {
            notes.push(format!("{} suppressed", units::plural(suppressed, "finding")));
        }
        notes.extend(
            apart.iter().map(|finding| format!("fragmentation, not checked here: {}", finding.evidence)),
        );
        let facts = format!(
            "rank {}, {}, verdict {}",
            report.run.rank,
            units::plural(report.run.steps, "step"),
            report.verdict.name()
        );
        Suite { name, facts, tests, notes }
    }
}

/// The report of the same rank among those of the baseline.
fn counterpart<'a>(all: &'a [files::Found], report: &Report) -> Result<&'a Report, String> {
    let same: Vec<&files::Found> = if all.len() == 1 {
        all.iter().collect()
    } else {
        all.iter().filter(|f| f.report.run.rank == report.run.rank).collect()
    };
    match same[..] {
        [found] => Ok(&found.report),
        [] => Err(format!("--baseline: no report of rank {} in it", report.run.rank)),
        [first, second, ..] => Err(format!(
            "--baseline: two reports of rank {} ({} and {}); name the one that is meant",
            report.run.rank,
            first.path.display(),
            second.path.display()
        )),
    }
}

/// What a finding adds per step or epoch. What is kept once counts as its bytes over the run.
fn rate(report: &Report, finding: &Finding, per_epoch: bool) -> f64 {
    let steps = report.run.steps.max(1) as f64;
    let per_step = if finding.class == Class::OneOff {
        finding.live_bytes as f64 / steps
    } else {
        finding.bytes_per_step
    };
    match (per_epoch, finding.class) {
        (false, _) => per_step,
        (true, Class::PerEpoch) => finding.bytes_per_epoch,
        // A run without epochs is one.
        (true, _) => per_step * steps / report.run.epochs.max(1) as f64,
    }
}

fn grows(report: &Report, leaks: &[&Finding], limit: Growth, suppressed: u64) -> Test {
    let total: f64 = leaks.iter().map(|finding| rate(report, finding, limit.per_epoch)).sum();
    // Nothing is allowed: then no finding is, however it rounds.
    let wrong = total > limit.bytes || (limit.bytes == 0.0 && !leaks.is_empty());
    let found = Growth { bytes: total, ..limit };
    Test {
        kind: Kind::Growth,
        name: format!("grows by at most {limit}"),
        found: match (leaks.is_empty(), suppressed) {
            (false, _) => format!("grows by {found}"),
            // What was not seen long enough may accumulate all the same.
            (true, _) if !report.undecided.is_empty() => {
                let open = report.undecided.len() as u64;
                format!("no leak is known, {} undecided", units::plural(open, "growth"))
            }
            (true, 0) => "nothing accumulates".to_owned(),
            (true, _) => "nothing accumulates but what is suppressed".to_owned(),
        },
        problems: if wrong { leaks.iter().map(|finding| problem(finding)).collect() } else { Vec::new() },
    }
}

/// A finding in one line, and the line of the user's that it is about.
fn problem(finding: &Finding) -> Problem {
    let mut said = format!("{} {}", text::rate(finding), finding.class.name());
    if let Some(at) = &finding.allocated_at {
        said += &format!(", allocated at {}", place(at));
    }
    if let Some(held) = &finding.held_by {
        said += &format!(", held by {}", held.path);
    }
    if let Some(kept) = &finding.kept_at {
        said += &format!(", kept alive at {}:{} ({})", kept.file, kept.line, kept.code.trim());
    }
    said += &format!("; {}", finding.fix);
    let line = finding.kept_at.as_ref().map(|kept| (kept.file.clone(), kept.line));
    Problem {
        text: said,
        place: line.or_else(|| finding.allocated_at.as_ref().map(|at| (at.file.clone(), at.line))),
    }
}

fn place(frame: &Frame) -> String {
    format!("{}:{} in {}", frame.file, frame.line, frame.function)
}

fn spends(report: &Report, budget: &Budget) -> Test {
    let sites: Vec<_> = report
        .sites
        .iter()
        .filter(|site| {
            site.allocated_at.iter().chain(&site.stack).any(|frame| rules::matches_frame(&budget.site, frame))
        })
        .collect();
    let bytes: u64 = sites.iter().map(|site| site.live_bytes).sum();
    let name = format!("{} holds at most {}", budget.site, units::bytes(budget.bytes));
    let found = match sites.len() {
        0 => format!("none of the {} matches", units::plural(report.sites.len() as u64, "listed site")),
        many => format!("{} in {}", units::bytes(bytes as f64), units::plural(many as u64, "site")),
    };
    let wrong = bytes as f64 > budget.bytes;
    let problem = wrong.then(|| {
        let largest =
            sites.iter().max_by_key(|site| site.live_bytes).and_then(|site| site.allocated_at.as_ref());
        let at =
            largest.map_or_else(String::new, |frame| format!(", most of it allocated at {}", place(frame)));
        Problem { text: format!("{found}{at}"), place: largest.map(|frame| (frame.file.clone(), frame.line)) }
    });
    Test { kind: Kind::Budget, name, found, problems: problem.into_iter().collect() }
}

/// Lines move from version to version, so a finding is known again by its class, file and function.
fn rates<'a>(
    report: &Report,
    findings: impl Iterator<Item = &'a Finding>,
) -> BTreeMap<(String, String, String), (f64, &'a Finding)> {
    let mut all = BTreeMap::new();
    for finding in findings.filter(|finding| finding.class != Class::Fragmentation) {
        let at = finding.allocated_at.as_ref();
        let file = at.map_or("", |at| at.file.rsplit('/').next().unwrap_or_default());
        let key = (
            finding.class.name().to_owned(),
            file.to_owned(),
            at.map_or_else(String::new, |at| at.function.clone()),
        );
        all.entry(key).or_insert((0.0, finding)).0 += rate(report, finding, false);
    }
    all
}

fn increases(report: &Report, leaks: &[&Finding], before: &Report, tolerance: f64) -> Test {
    let mut problems = Vec::new();
    let old = rates(before, before.findings.iter());
    for (key, (now, finding)) in rates(report, leaks.iter().copied()) {
        let said = problem(finding);
        match old.get(&key) {
            None => problems.push(Problem { text: format!("new: {}", said.text), ..said }),
            Some((then, _)) if now > then * (1.0 + tolerance) + 1.0 => problems
                .push(Problem { text: format!("was +{}/step: {}", units::bytes(*then), said.text), ..said }),
            Some(_) => {}
        }
    }
    for device in &report.devices {
        let Some(then) = before.devices.iter().find(|then| then.device == device.device) else { continue };
        let most = then.peak_bytes as f64 * (1.0 + tolerance);
        if device.peak_bytes as f64 > most && device.peak_bytes > then.peak_bytes + PEAK_NOISE {
            let name =
                if device.device < 0 { "the host".to_owned() } else { format!("device {}", device.device) };
            problems.push(Problem {
                text: format!(
                    "the peak of {name} was {} and is {}",
                    units::bytes(then.peak_bytes as f64),
                    units::bytes(device.peak_bytes as f64)
                ),
                place: None,
            });
        }
    }
    let found = match problems.len() {
        0 => "nothing is".to_owned(),
        many => format!("{many} worse"),
    };
    Test { kind: Kind::Increase, name: "no worse than the baseline".to_owned(), found, problems }
}
