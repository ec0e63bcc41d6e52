//! Reports that a path names, for the verbs that read them.

use std::path::{Path, PathBuf};
use strandline::report::{Report, json};

/// A report and where it lies.
pub struct Found {
    pub path: PathBuf,
    pub report: Report,
}

/// Every report that `path` names: a report.json, or those below a folder (never none).
pub fn reports(path: &Path) -> Result<Vec<Found>, String> {
    let mut files = Vec::new();
    if path.is_dir() {
        below(path, &mut files).map_err(|error| format!("{}: {error}", path.display()))?;
        files.sort();
        if files.is_empty() {
            return Err(format!(
                "{0}: no report.json in it; run a job first: strandline run --out {0} -- CMD",
                path.display()
            ));
        }
    } else {
        files.push(path.to_owned());
    }
    files
        .into_iter()
        .map(|path| json::read(&path).map(|report| Found { path, report }).map_err(|error| error.to_string()))
        .collect()
}

/// The one report that `path` names.
pub fn one(path: &Path) -> Result<Found, String> {
    let mut found = reports(path)?;
    if found.len() > 1 {
        let names: Vec<String> = found.iter().take(4).map(|f| f.path.display().to_string()).collect();
        return Err(format!(
            "{}: holds {} reports; name one of them ({}, …), or put them together: strandline merge {}",
            path.display(),
            found.len(),
            names.join(", "),
            path.display()
        ));
    }
    found.pop().ok_or_else(|| format!("{}: no report", path.display()))
}

fn below(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        // A link may lead around in a circle.
        if entry.file_type()?.is_dir() {
            below(&entry.path(), files)?;
        } else if entry.file_name() == "report.json" {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// Writes text or JSON to stdout; a reader that has read enough is no error.
pub fn print(text: &str) -> Result<(), String> {
    use std::io::Write;
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(format!("cannot write: {error}")),
        _ => Ok(()),
    }
}
