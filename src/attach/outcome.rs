//! What is written: reports, metrics; and what is told at the end of the run.
//!
//! Must not know how events arise. Invariants: a report is one consistent judgement of the last step
//! boundary; nothing is said on stdout; a folder that cannot be written is said once, at the start if it is so
//! then; the end is told once, wherever reports can be written or not.

use super::gpu::Gpus;
use super::news::News;
use super::options::{self, Options};
use super::process::{Stacks, State};
use super::served::Served;
use super::{lineage, say, say_once, siblings, verdict, voice};
use crate::driver::Driver;
use crate::heap::Stats;
use crate::ledger;
use crate::report::{self, DevicePart, DeviceView, Run};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A process that is not the job itself reports only if it did this much (launchers import torch too).
const BLOCKS_WORTH_A_REPORT: u64 = 1000;

/// Steps between two writings of the metrics.
const METRICS_EVERY: u32 = 10;

/// Where things are told.
pub struct Outcome {
    /// What the user named, which the folders of all processes lie in, and this process's own.
    pub(super) out: PathBuf,
    pub(super) folder: PathBuf,
    rank: (i32, i32),
    /// What started this process: as it was at the start, since launchers in between may end.
    launched_by: Vec<String>,
    pub(super) main: bool,
    pub(super) colour: report::text::Colour,
    pub(super) writing: Mutex<()>,
    pub(super) news: News,
    /// Reports of that folder that were asked for.
    asked: AtomicU64,
    finished: AtomicBool,
    /// The end was told: `finished` is set before that.
    pub(super) told: AtomicBool,
    cannot: AtomicBool,
    /// Where metrics go, and the second (since the start) in which they were asked for last.
    metrics: Option<PathBuf>,
    metrics_asked: AtomicU64,
}

/// Why a report is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The run is over.
    Exit,
    /// A signal, the C ABI, or `--every`.
    Asked,
    /// A finding was called.
    Finding,
    /// The device's memory is used up.
    OutOfMemory,
    /// A signal that ends the job at once (see `crash`).
    Crash,
}

impl Reason {
    fn word(self) -> &'static str {
        match self {
            Reason::Exit => "exit",
            Reason::Asked => "asked",
            Reason::Finding => "finding",
            Reason::OutOfMemory => "out of memory",
            Reason::Crash => "crash",
        }
    }
}

impl Outcome {
    /// Decides where this process's reports lie.
    pub fn new(options: &Options) -> Self {
        here();
        let rank = options::rank_and_world();
        let out = options.out.clone().unwrap_or_else(|| PathBuf::from("strandline-out"));
        let out = std::path::absolute(&out).unwrap_or(out);
        Outcome {
            folder: out.join(format!("rank{}-{}", rank.0, std::process::id())),
            out,
            rank,
            launched_by: lineage::ancestors(),
            main: asked_to_run().unwrap_or(true),
            colour: colour(),
            writing: Mutex::new(()),
            news: News::default(),
            asked: AtomicU64::new(0),
            finished: AtomicBool::new(false),
            told: AtomicBool::new(false),
            cannot: AtomicBool::new(false),
            metrics: options.openmetrics.as_ref().map(|file| metrics_file(file, rank)),
            metrics_asked: AtomicU64::new(0),
        }
    }

    /// At the start: says at once if no report will be written, not after hours.
    pub(super) fn look_at_folder(&self) {
        if !self.main {
            return;
        }
        if let Err(error) = report::write::try_folder(&self.out) {
            say_once(
                &self.cannot,
                format_args!("{error}. Without that, there are only the lines on stderr, and no report"),
            );
        }
    }
}

/// The file of one rank: of several, each has its own ("job.prom", "job-rank3.prom").
fn metrics_file(file: &Path, (rank, world): (i32, i32)) -> PathBuf {
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    if world <= 1 {
        return file;
    }
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let extension = file.extension().unwrap_or_default().to_string_lossy();
    let dot = if extension.is_empty() { "" } else { "." };
    file.with_file_name(format!("{stem}-rank{rank}{dot}{extension}"))
}

/// Whether this is the process that `strandline run` was asked to run; nothing where nobody says so.
pub(super) fn asked_to_run() -> Option<bool> {
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u32>().ok());
    match (number("STRANDLINE_JOB"), number("STRANDLINE_LAUNCHER")) {
        (Some(job), _) => Some(job == std::process::id()),
        (_, Some(launcher)) => Some(launcher == std::os::unix::process::parent_id()),
        _ => None,
    }
}

fn colour() -> report::text::Colour {
    use std::io::IsTerminal;
    let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    if !plain && std::io::stderr().is_terminal() {
        report::text::Colour::Always
    } else {
        report::text::Colour::Never
    }
}

impl State {
    /// Says a remark that is new.
    pub(super) fn tell(&self, remark: &report::model::Remark) {
        if !self.options.quiet {
            voice::tell(&report::text::remark(remark, self.outcome.colour));
        }
    }

    /// Writes the report now; false if it could not be written (said once).
    pub fn report(&self, folder: Option<&Path>) -> bool {
        self.write(Reason::Asked, folder).1
    }

    /// Writes the report now for one who waits for the answer: its file, or why there is none.
    pub(super) fn report_for(&self, folder: Option<&Path>) -> Result<PathBuf, String> {
        if self.outcome.finished.load(Ordering::SeqCst) {
            return Err(format!(
                "the run is over; its report: {}",
                self.outcome.folder.join("report.json").display()
            ));
        }
        let (_, written) = self.put(Reason::Asked, folder);
        written.map_err(|error| error.to_string())
    }

    /// The findings of this moment as the report shows them, as a JSON array.
    pub fn findings(&self) -> Option<String> {
        serde_json::to_string(&self.assemble(Reason::Asked).findings).ok()
    }

    /// The end of the run: judges what waits, writes the last report, says where it is. Once.
    pub fn finish(&self) -> bool {
        if self.outcome.finished.swap(true, Ordering::SeqCst) {
            return true;
        }
        let written = self.tell_end();
        self.outcome.told.store(true, Ordering::SeqCst);
        written
    }

    fn tell_end(&self) -> bool {
        super::control::server::stop();
        self.judge.lock().finish();
        self.tell_news();
        if let (Some(guard), Some(host)) = (&self.guard, &self.host) {
            guard.look_at_all(host);
        }
        let finish_guards = || {
            if let Some(gpus) = self.gpus {
                gpus.finish_guards(self.options.quiet);
            }
        };
        let steps = self.judge.lock().steps();
        let did_little = self.did_little(steps);
        if !self.outcome.main && did_little {
            finish_guards();
            return true;
        }
        let (out, folder) = (&self.outcome.out, &self.outcome.folder);
        if did_little && siblings::have_reported(out, Some(folder)).unwrap_or(false) {
            // A launcher, whose ranks have told what there is to tell.
            finish_guards();
            return true;
        }
        let (report, written) = self.write(Reason::Exit, None);
        // Behind the report: this waits for the GPUs, and whoever has no patience may end the process meanwhile.
        finish_guards();
        if written {
            let _one_at_a_time = self.outcome.writing.lock();
            if let Err(error) = self.write_faults(folder) {
                say_once(&self.outcome.cannot, format_args!("{error}"));
            }
        }
        if !self.outcome.main && steps == 0 {
            return written;
        }
        self.save_metrics(&report);
        if !self.options.quiet {
            let place = if written {
                format!("report: {}", from_here(&folder.join("report.html")).display())
            } else {
                format!("no report, {} cannot be written", from_here(folder).display())
            };
            let faults = self.faults().map_or(0, super::guard::Faults::count);
            let guarded = match faults {
                0 => String::new(),
                _ => format!("; guard mode found {} (above)", report::units::plural(faults, "memory fault")),
            };
            say(format_args!("{}: {}{guarded}; {place}", report.verdict.name(), report.reason));
        }
        written
    }

    /// Whether this process has done next to nothing in so many steps.
    pub(super) fn did_little(&self, steps: u32) -> bool {
        steps == 0 && self.blocks_served() < BLOCKS_WORTH_A_REPORT
    }

    /// Whether somebody who watches this process has something to see: a launcher makes no steps, and neither
    /// does a worker that was spawned, though it may allocate.
    pub(super) fn is_worth_watching(&self) -> bool {
        let steps = self.clock.now().step;
        steps > 0 || self.outcome.main && !self.did_little(steps)
    }

    fn blocks_served(&self) -> u64 {
        let host = self.host.as_ref().and_then(Served::stats);
        let gpus = self.gpus.into_iter().flat_map(Gpus::open).filter_map(Served::stats);
        host.into_iter().chain(gpus).map(|stats| stats.allocation.all.allocated).sum()
    }

    /// For the message of an out-of-memory error: the findings, and who has most of the device's memory. The
    /// report is written as well, since the job may not live to write another.
    pub(super) fn who_has_the_memory(&self, device: i32) -> String {
        let (report, _) = self.write(Reason::OutOfMemory, None);
        let mut text = String::new();
        let here = |at: &Option<ledger::Frame>| {
            at.as_ref().map_or("an unknown place".to_owned(), |f| {
                format!("{}:{} in {}", report::text::base(&f.file), f.line, f.function)
            })
        };
        for finding in report.findings.iter().filter(|f| f.device == i64::from(device)).take(3) {
            text += &format!(
                "\nstrandline: {} leak, {} allocated at {}",
                finding.class.name(),
                torch_size(finding.live_bytes),
                here(&finding.allocated_at)
            );
            if let Some(kept) = &finding.kept_at {
                let file = report::text::base(&kept.file);
                text += &format!(", kept alive at {file}:{} ({})", kept.line, kept.code);
            }
            text.push('.');
        }
        let mut sites: Vec<_> = report.sites.iter().filter(|site| site.device == i64::from(device)).collect();
        sites.sort_by_key(|site| std::cmp::Reverse(site.live_bytes));
        if !sites.is_empty() {
            text += "\nMost of the memory at the last step, by the line that allocated it:";
        }
        for site in sites.iter().take(5) {
            text += &format!(
                "\n  {:>12} in {} blocks  {}",
                torch_size(site.live_bytes),
                site.live_blocks,
                here(&site.allocated_at)
            );
        }
        text
    }

    /// Puts the report together and writes it. Returns it, and whether it was written (said once if not).
    pub(super) fn write(&self, why: Reason, folder: Option<&Path>) -> (report::Report, bool) {
        let (report, written) = self.put(why, folder);
        verdict::tell(report.verdict.name());
        if let Err(error) = &written {
            say_once(&self.outcome.cannot, format_args!("{error}"));
        }
        (report, written.is_ok())
    }

    /// At a step boundary: has metrics written by another thread, every [`METRICS_EVERY`] steps and not more
    /// often than once in a second.
    pub(super) fn ask_for_metrics(&self, ended: u32) {
        if self.outcome.metrics.is_none() || !(ended + 1).is_multiple_of(METRICS_EVERY) {
            return;
        }
        let second = self.began.elapsed().as_secs() + 1;
        if self.outcome.metrics_asked.swap(second, Ordering::Relaxed) != second {
            super::signal::ask_for_metrics();
        }
    }

    /// Writes the metrics of now.
    pub(super) fn write_metrics(&self) {
        let _one_at_a_time = self.outcome.writing.lock();
        if !self.outcome.finished.load(Ordering::SeqCst) {
            self.save_metrics(&self.assemble(Reason::Asked));
        }
    }

    /// The metrics of now as text, for one who asks; nothing when the run is over.
    pub(super) fn metrics(&self) -> Option<String> {
        let over = self.outcome.finished.load(Ordering::SeqCst);
        (!over).then(|| report::openmetrics::to_string(&self.assemble(Reason::Asked)))
    }

    pub(super) fn save_metrics(&self, report: &report::Report) {
        static CANNOT: AtomicBool = AtomicBool::new(false);
        let Some(path) = &self.outcome.metrics else { return };
        let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str()))
        else {
            return say_once(&CANNOT, format_args!("openmetrics: {} names no file", path.display()));
        };
        let text = report::openmetrics::to_string(report);
        if let Err(error) = report::write::public_file(folder, name, text.as_bytes()) {
            let error = error.to_string().replace("--out DIR", "--openmetrics FILE");
            say_once(&CANNOT, format_args!("{error}"));
        }
    }

    /// As `write`, but says nothing. Returns the path of the JSON.
    fn put(
        &self,
        why: Reason,
        folder: Option<&Path>,
    ) -> (report::Report, Result<PathBuf, report::write::NotWritten>) {
        if let Some(gpus) = self.gpus {
            gpus.look_at_guards();
        }
        let _one_at_a_time = self.outcome.writing.lock();
        if why == Reason::Asked && folder.is_none() {
            self.outcome.asked.fetch_add(1, Ordering::Relaxed);
        }
        let report = self.assemble(why);
        let written = self.write_files(&report, folder.unwrap_or(&self.outcome.folder));
        (report, written)
    }

    /// Writes the files of a report. Returns the path of the JSON.
    pub(super) fn write_files(
        &self,
        report: &report::Report,
        folder: &Path,
    ) -> Result<PathBuf, report::write::NotWritten> {
        let json = report::json::to_string(report);
        let text = report::text::report(report, report::text::Colour::Never);
        report::write::file(folder, "report.json", json.as_bytes())
            .and_then(|path| report::write::file(folder, "report.txt", text.as_bytes()).map(|_| path))
            .and_then(|path| {
                report::write::file(folder, "report.html", report::html::page(report).as_bytes())
                    .map(|_| path)
            })
            .and_then(|path| self.write_faults(folder).map(|()| path))
    }

    fn write_faults(&self, folder: &Path) -> Result<(), report::write::NotWritten> {
        match self.faults().and_then(super::guard::Faults::to_json) {
            Some(faults) => report::write::file(folder, "guard.json", faults.as_bytes()).map(drop),
            None => Ok(()),
        }
    }

    /// What guard mode has found, where it is on.
    pub(super) fn faults(&self) -> Option<&super::guard::Faults> {
        let host = self.guard.as_ref().map(|guard| &guard.faults);
        host.or_else(|| Some(&self.gpus?.guards.as_ref()?.faults))
    }

    pub(super) fn assemble(&self, why: Reason) -> report::Report {
        self.assemble_with(why, &Stacks)
    }

    /// The same, with the frames of stacks as `symbols` knows them.
    pub(super) fn assemble_with(&self, why: Reason, symbols: &dyn ledger::Symbols) -> report::Report {
        let mut parts = self.parts(&|device| self.judge.lock().wanted(device), self.clock);
        if let (Some(part), Some(note)) = (parts.first_mut(), self.host_memory.lock().note()) {
            part.view.notes.push(note);
        }
        let run = self.run(why, self.clock);
        let remarks = self.remarks.lock().clone();
        let judge = self.judge.lock();
        let report = report::assemble(run, parts, &judge, self.clock, symbols);
        report.with_remarks(remarks)
    }

    /// The devices, each copied under its lock; those whose lock is not to be had are left out.
    pub(super) fn parts(&self, wanted: &dyn Fn(i32) -> Vec<u32>, clock: &ledger::Clock) -> Vec<DevicePart> {
        let epochs = clock.epoch_starts();
        let mut parts = Vec::new();
        if let Some(host) = &self.host {
            parts.extend(part_of(host, &wanted(super::process::HOST), &epochs));
        }
        for served in self.gpus.into_iter().flat_map(Gpus::open) {
            parts.extend(part_of(served, &wanted(served.device()), &epochs));
        }
        for watched in self.gpus.into_iter().flat_map(Gpus::seen) {
            let wanted = wanted(watched.device());
            let view =
                watched.notes().map(|notes| DeviceView::with_epochs(&notes.accounts, &wanted, &epochs));
            parts.extend(view.map(|view| DevicePart { view, stats: serde_json::Map::new() }));
        }
        parts
    }

    /// The run, as a report names it.
    pub(super) fn run(&self, why: Reason, clock: &ledger::Clock) -> Run {
        Run {
            command: self.command.clone(),
            pid: std::process::id(),
            process: lineage::own(),
            launched_by: self.outcome.launched_by.clone(),
            rank: self.outcome.rank.0.into(),
            world_size: self.outcome.rank.1.into(),
            mode: self.mode().word().into(),
            written: why.word().into(),
            forked: super::fork::children(),
            asked: self.outcome.asked.load(Ordering::Relaxed),
            focus: self.options.focus.clone().unwrap_or_default(),
            time: std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .ok()
                .map(|d| d.as_secs()),
            epoch_starts: clock.epoch_starts().iter().map(|start| (start.epoch, start.step)).collect(),
            validations: clock.validations(),
            ..Run::default()
        }
    }
}

/// A device that is served, copied for a report. The lock is held for the copy only.
fn part_of<D: Driver>(
    served: &Served<D>,
    wanted: &[u32],
    epochs: &[ledger::clock::EpochStart],
) -> Option<DevicePart> {
    let books = served.books()?;
    let mut view = DeviceView::with_epochs(&books.accounts, wanted, epochs);
    (view.device.segments, view.device.segments_left_out) = books.segment_map();
    let stats = books.heap.stats();
    drop(books);
    Some(DevicePart { view, stats: stats_as_json(&stats) })
}

/// The keys of `torch.cuda.memory_stats()` as a JSON object.
pub(super) fn stats_as_json(stats: &Stats) -> serde_json::Map<String, serde_json::Value> {
    stats.flat().into_iter().map(|(key, value)| (key, value.into())).collect()
}

/// Bytes as torch's own out-of-memory message shows them.
pub fn torch_size(bytes: u64) -> String {
    let b = bytes as f64;
    match bytes {
        0..1024 => format!("{bytes} bytes"),
        1024..0x10_0000 => format!("{:.2} KiB", b / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.2} MiB", b / 1048576.0),
        _ => format!("{:.2} GiB", b / 1073741824.0),
    }
}

/// The working directory that the job was started in, which is also that of whoever reads what is said.
fn here() -> Option<&'static Path> {
    static HERE: OnceLock<Option<PathBuf>> = OnceLock::new();
    HERE.get_or_init(|| std::env::current_dir().ok()).as_deref()
}

/// A path as one would type it: relative where it lies below that directory.
pub(super) fn from_here(path: &Path) -> PathBuf {
    here().and_then(|here| path.strip_prefix(here).ok()).unwrap_or(path).to_owned()
}
