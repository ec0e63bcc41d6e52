//! `strandline diff`: two reports compared.

use crate::files;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use strandline::report::diff;

/// Arguments of `strandline diff`.
#[derive(Args)]
#[command(after_help = "Exit codes: 0 compared (whatever changed), 2 a report cannot be read.")]
pub struct Diff {
    /// A report.json, or a folder that holds one
    a: PathBuf,
    /// The one to compare with it
    b: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Diff {
    /// Reads both, prints what changed.
    pub fn run(self) -> Result<ExitCode, String> {
        let (a, b) = (files::one(&self.a)?, files::one(&self.b)?);
        let diff = diff::diff(&a.report, &b.report);
        if self.json {
            let text = serde_json::to_string_pretty(&diff).map_err(|error| error.to_string())?;
            files::print(&(text + "\n"))?;
        } else {
            files::print(&format!("a  {}\nb  {}\n{}", a.path.display(), b.path.display(), diff.text()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
