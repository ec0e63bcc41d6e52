//! `strandline report`: shows a report that a run has written, or turns it into another form.

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;
use strandline::report::folded::Which;
use strandline::report::text::Colour;
use strandline::report::{
    self, Verdict, csv, flamegraph, folded, html, json, memory_viz, openmetrics, pprof, speedscope, text,
    write,
};

/// A file from this size on gets a progress bar.
const LONG: u64 = 8 << 20;

/// The forms of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For a terminal or a log
    Text,
    /// For programs; the contract is in docs/reports.md
    Json,
    /// One page that opens offline in any browser
    Html,
    /// A flame graph of live bytes as an SVG image
    Flamegraph,
    /// Folded stacks and live bytes, a line each
    Folded,
    /// For speedscope.app
    Speedscope,
    /// For pprof (gzipped profile.proto)
    Pprof,
    /// A torch memory snapshot, for torch's _memory_viz.py and pytorch.org/memory_viz
    #[value(name = "memory_viz", alias = "memory-viz")]
    MemoryViz,
    /// Metrics for Prometheus
    Openmetrics,
    /// The memory over steps as a table
    Csv,
}

impl Format {
    /// What a file of this form is called after the run's name.
    fn extension(self) -> &'static str {
        match self {
            Format::Text => "txt",
            Format::Json => "json",
            Format::Html => "html",
            Format::Flamegraph => "svg",
            Format::Folded => "folded",
            Format::Speedscope => "speedscope.json",
            Format::Pprof => "pb.gz",
            Format::MemoryViz => "pickle",
            Format::Openmetrics => "prom",
            Format::Csv => "csv",
        }
    }

    /// Whether a person at a terminal can read it.
    fn is_for_terminals(self) -> bool {
        !matches!(
            self,
            Format::Html | Format::Flamegraph | Format::Speedscope | Format::Pprof | Format::MemoryViz
        )
    }
}

/// Arguments of `strandline report`.
#[derive(Args)]
pub struct Report {
    /// A report.json, or a folder that holds reports
    #[arg(value_name = "FILE|DIR", default_value = "strandline-out")]
    path: PathBuf,
    /// Show only findings and sites with a frame of this library or package on their stack ("": everything)
    #[arg(long, value_name = "LIB")]
    focus: Option<String>,
    /// The form
    #[arg(long, short, value_enum, default_value = "text")]
    format: Format,
    /// Write to a file instead of stdout; a folder where there are several reports
    #[arg(long, short, value_name = "OUT")]
    output: Option<PathBuf>,
    /// Only blocks that outlived the step of their birth (folded and flamegraph)
    #[arg(long)]
    survivors: bool,
}

impl Report {
    /// Shows or converts every report that the path names.
    pub fn run(self) -> Result<ExitCode, String> {
        if self.survivors && !matches!(self.format, Format::Folded | Format::Flamegraph) {
            return Err(
                "--survivors goes with --format folded and --format flamegraph; the page that --format \
                        html writes has a switch for it"
                    .to_owned(),
            );
        }
        let files = if self.path.is_dir() { reports_in(&self.path, None) } else { vec![self.path.clone()] };
        match (files.as_slice(), &self.output) {
            ([], _) => Err(format!(
                "{}: no report.json in it; run a job first: strandline run --out {} -- CMD",
                self.path.display(),
                self.path.display()
            )),
            (_, None) if self.format == Format::Text => self.print_all(&files),
            ([file], output) => self.one(file, output.as_deref().filter(|out| *out != Path::new("-"))),
            (several, Some(folder)) if folder != Path::new("-") => self.fill_folder(several, folder),
            (several, _) => Err(format!(
                "{}: holds {} reports, and this form takes one: name one of them (for example {}), or a folder \
                 for all of them with -o DIR",
                self.path.display(),
                several.len(),
                several[0].display()
            )),
        }
    }

    fn print_all(&self, files: &[PathBuf]) -> Result<ExitCode, String> {
        let colour = if std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
            Colour::Always
        } else {
            Colour::Never
        };
        for file in files {
            let report = self.focused(read(file)?);
            let shown = format!("{}\n{}\n", file.display(), text::report(&report, colour));
            if !print(shown.as_bytes())? {
                break;
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The report as `--focus` wants it seen.
    fn focused(&self, mut report: report::Report) -> report::Report {
        if let Some(library) = &self.focus {
            report.run.focus.clone_from(library);
        }
        report
    }

    fn one(&self, file: &Path, output: Option<&Path>) -> Result<ExitCode, String> {
        if output.is_none() && !self.format.is_for_terminals() && std::io::stdout().is_terminal() {
            let name = format!("report.{}", self.format.extension());
            return Err(format!("this form is not for a terminal: write it to a file with -o {name}"));
        }
        let report = self.focused(read(file)?);
        let made = self.make(&report)?;
        match output {
            None => print(&made).map(|_| ()),
            Some(out) if out.is_dir() => save(&out.join(name_of(file, self.format)), &made),
            Some(out) => save(out, &made),
        }?;
        Ok(ExitCode::SUCCESS)
    }

    fn fill_folder(&self, files: &[PathBuf], folder: &Path) -> Result<ExitCode, String> {
        if folder.exists() && !folder.is_dir() {
            return Err(format!(
                "-o {}: is a file, and there are {} reports: name a folder",
                folder.display(),
                files.len()
            ));
        }
        let bar = bar(files.len() as u64, files.len() > 8, "{msg:<10} {bar:40} {pos}/{len}  {eta}");
        bar.set_message("converting");
        let mut taken = std::collections::HashSet::new();
        for file in files {
            let report = self.focused(read(file)?);
            let mut name = name_of(file, self.format);
            // Runs of different folders may have one name.
            let mut number = 2;
            while !taken.insert(name.clone()) {
                name = format!("{number}-{}", name_of(file, self.format));
                number += 1;
            }
            save(&folder.join(name), &self.make(&report)?)?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(ExitCode::SUCCESS)
    }

    fn make(&self, report: &report::Report) -> Result<Vec<u8>, String> {
        let which = if self.survivors { Which::Survivors } else { Which::Live };
        Ok(match self.format {
            Format::Text => text::report(report, Colour::Never).into_bytes(),
            Format::Json => (json::to_string(report) + "\n").into_bytes(),
            Format::Html => html::page(report).into_bytes(),
            Format::Flamegraph => flamegraph::svg(report, which).into_bytes(),
            Format::Folded => folded::folded(report, which).into_bytes(),
            Format::Speedscope => speedscope::to_string(report).into_bytes(),
            Format::Pprof => pprof::gzipped(report).map_err(|error| format!("cannot compress: {error}"))?,
            Format::MemoryViz => memory_viz::pickle(report),
            Format::Openmetrics => openmetrics::to_string(report).into_bytes(),
            Format::Csv => csv::series(report).into_bytes(),
        })
    }
}

/// A report's name in a folder of several: that of the folder it lies in ("rank0-4711").
fn name_of(file: &Path, format: Format) -> String {
    let absolute = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let folder = absolute.parent().and_then(Path::file_name).unwrap_or_default();
    format!("{}.{}", folder.to_string_lossy(), format.extension())
}

fn read(path: &Path) -> Result<report::Report, String> {
    let length = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    if length < LONG {
        return json::read(path).map_err(|error| error.to_string());
    }
    let bar = bar(length, true, "{msg:<10} {bar:40} {bytes}/{total_bytes}  {eta}");
    bar.set_message("reading");
    let mut bytes = Vec::with_capacity(length as usize);
    let done = File::open(path).and_then(|file| bar.wrap_read(file).read_to_end(&mut bytes));
    bar.finish_and_clear();
    done.map_err(|error| format!("{}: cannot be read ({error}); check its permissions", path.display()))?;
    json::from_bytes(path, bytes).map_err(|error| error.to_string())
}

/// A bar on a terminal, if what is done takes long; else one that is not seen.
fn bar(length: u64, long: bool, template: &str) -> ProgressBar {
    if !long || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length);
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// False when whoever reads has read enough.
fn print(bytes: &[u8]) -> Result<bool, String> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(format!("cannot write to stdout: {error}")),
        Ok(()) => Ok(true),
    }
}

/// Writes a file aside and renames it; a device or a pipe is written to as it is.
fn save(path: &Path, bytes: &[u8]) -> Result<(), String> {
    let failed = |error: &dyn std::fmt::Display| format!("-o {}: {error}", path.display());
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let done = std::fs::OpenOptions::new().write(true).open(path).and_then(|mut f| f.write_all(bytes));
        return done.map_err(|error| failed(&error));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().ok_or_else(|| failed(&"is no file's name"))?;
    let Some(name) = name.to_str() else { return Err(failed(&"the name is not UTF-8; choose another")) };
    write::file(folder, name, bytes).map(|_| ()).map_err(|error| {
        // The error speaks of the folder that a run is given; here it is the output.
        failed(&error.to_string().replace("--out DIR", "-o OUT"))
    })
}

/// The reports below a folder, written since `since`.
fn reports_in(folder: &Path, since: Option<SystemTime>) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(reports_in(&path, since));
        } else if path.file_name().is_some_and(|n| n == "report.json") {
            let time = entry.metadata().and_then(|m| m.modified()).ok();
            if since.is_none_or(|since| time.is_none_or(|time| time >= since)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Whether a job that began at `since` leaked: by what its processes said (`told`, by number and start), and for those
/// that were not heard by the reports that they left in `out`.
pub fn leaked(told: &HashMap<String, String>, out: &Path, since: SystemTime) -> Result<bool, String> {
    // A file system's clock may be coarser than ours.
    let since = since.checked_sub(std::time::Duration::from_secs(1)).unwrap_or(since);
    let mut leaked = told.values().any(|verdict| verdict == Verdict::Leak.name());
    for file in reports_in(out, Some(since)) {
        match json::read(&file) {
            Ok(report) if !told.contains_key(&report.run.process) => {
                leaked |= report.verdict == Verdict::Leak
            }
            Ok(_) => {}
            // It may be that of a process that was heard.
            Err(error) if told.is_empty() => return Err(error.to_string()),
            Err(error) => eprintln!("strandline: {error}"),
        }
    }
    Ok(leaked)
}
