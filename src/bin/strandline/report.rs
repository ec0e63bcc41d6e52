//! `strandline report`: shows a report that a run has written.

use clap::Args;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;
use strandline::report::text::Colour;
use strandline::report::{Verdict, json, text};

/// Arguments of `strandline report`.
#[derive(Args)]
pub struct Report {
    /// A report.json, or a folder that holds reports (each is shown)
    #[arg(value_name = "FILE|DIR", default_value = "strandline-out")]
    path: PathBuf,
    /// Show only findings and sites with a frame of this library or package on their stack ("": everything)
    #[arg(long, value_name = "LIB")]
    focus: Option<String>,
}

impl Report {
    /// Prints every report that the path names.
    pub fn run(self) -> Result<ExitCode, String> {
        let colour = if std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
            Colour::Always
        } else {
            Colour::Never
        };
        let files = if self.path.is_dir() { reports_in(&self.path, None) } else { vec![self.path.clone()] };
        if files.is_empty() {
            return Err(format!(
                "{}: no report.json in it; run a job first: strandline run --out {} -- CMD",
                self.path.display(),
                self.path.display()
            ));
        }
        for file in &files {
            let mut report = json::read(file).map_err(|e| e.to_string())?;
            if let Some(library) = &self.focus {
                report.run.focus.clone_from(library);
            }
            println!("{}\n{}", file.display(), text::report(&report, colour));
        }
        Ok(ExitCode::SUCCESS)
    }
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

/// Whether a job that began at `since` leaked, by the reports that it left in `out`.
pub fn leaked_since(out: &Path, since: SystemTime) -> Result<bool, String> {
    // A file system's clock may be coarser than ours.
    let since = since.checked_sub(std::time::Duration::from_secs(1)).unwrap_or(since);
    let mut leaked = false;
    for file in reports_in(out, Some(since)) {
        leaked |= json::read(&file).map_err(|e| e.to_string())?.verdict == Verdict::Leak;
    }
    Ok(leaked)
}
