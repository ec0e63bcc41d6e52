//! `strandline merge`: the reports of all ranks of a job put together.

use crate::files;
use clap::Args;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use strandline::report::merge;
use strandline::report::text::Colour;

/// Arguments of `strandline merge`.
#[derive(Args)]
#[command(after_help = "Exit codes: 0 put together (whatever the verdict), 2 a report cannot be read.")]
pub struct Merge {
    /// The folder that all ranks wrote to (or several, one of each node)
    #[arg(value_name = "DIR", default_value = "strandline-out")]
    paths: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Merge {
    /// Reads all, prints one.
    pub fn run(self) -> Result<ExitCode, String> {
        let mut reports = Vec::new();
        for path in &self.paths {
            reports.extend(files::reports(path)?.into_iter().map(|found| found.report));
        }
        let merged = merge::merge(reports);
        if self.json {
            let text = serde_json::to_string_pretty(&merged).map_err(|error| error.to_string())?;
            files::print(&(text + "\n"))?;
        } else {
            let plain = !std::io::stdout().is_terminal() || std::env::var_os("NO_COLOR").is_some();
            files::print(&merged.text(if plain { Colour::Never } else { Colour::Always }))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
