//! The command: one file per verb. Knows the environment variables that the library reads and the report
//! that it writes; must not know a heap or a ledger.

mod check;
mod check_forms;
mod check_rules;
mod demo;
mod diff;
mod doctor;
mod dump;
mod files;
mod merge;
mod paths;
mod replay;
mod report;
mod run;
mod top;
mod top_draw;
mod top_model;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Exit codes of the command itself; `run` passes the job's own code on.
mod code {
    /// All is well.
    pub const OK: u8 = 0;
    /// The job succeeded but leaked (`--fail-on-leak`), or `check` found what is not allowed.
    pub const LEAK: u8 = 3;
    /// The command line, a file or the set-up is not what it must be.
    pub const USAGE: u8 = 2;
    /// A replayed job does not fit into the memory that `--limit` names.
    pub const DOES_NOT_FIT: u8 = 4;
    /// A run was too short for `check` to say.
    pub const UNDECIDED: u8 = 5;
    /// The job's program was found but could not be started (as a shell says).
    pub const NOT_EXECUTABLE: u8 = 126;
    /// The job's program was not found (as a shell says).
    pub const NOT_FOUND: u8 = 127;
}

/// Finds the memory that a training job leaks: where it was allocated, who holds it, and what to change.
#[derive(Parser)]
#[command(name = "strandline", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run a job under strandline and report what leaks; the job's exit code is passed on
    Run(run::Run),
    /// Run a small training job that really leaks, and show the finding
    Demo(demo::Demo),
    /// Replay a torch memory snapshot: its leaks, and its peak under strandline's heap
    Replay(replay::Replay),
    /// Show a report that a run has written
    Report(report::Report),
    /// Have a running job write its report now
    Dump(dump::Dump),
    /// Watch a running job in the terminal
    Top(top::Top),
    /// Compare two reports: what grew, by site
    Diff(diff::Diff),
    /// Put the reports of all ranks together: totals, skew, common findings once
    Merge(merge::Merge),
    /// The gate for CI: exit 3 if a run grew by more than is allowed
    Check(check::Check),
    /// Say what would work here, and what to do about what would not
    Doctor(doctor::Doctor),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.verb {
        Verb::Run(run) => run.run(),
        Verb::Demo(demo) => demo.run(),
        Verb::Replay(replay) => replay.run(),
        Verb::Report(report) => report.run(),
        Verb::Dump(dump) => dump.run(),
        Verb::Top(top) => top.run(),
        Verb::Diff(diff) => diff.run(),
        Verb::Merge(merge) => merge.run(),
        Verb::Check(check) => check.run(),
        Verb::Doctor(doctor) => doctor.run(),
    };
    done.unwrap_or_else(|error| {
        eprintln!("strandline: {error}");
        ExitCode::from(code::USAGE)
    })
}
