//! `strandline dump`: has a running job write its report now.
//!
//! By the control socket if it answers, else by the signal that the job's strandline handles; never by a
//! signal that nobody there waits for.

use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use strandline::attach::control::Ask;
use strandline::attach::control::client::{Client, Process, Refused};
use strandline::report::{Run, json, write};

/// How long a job may take to write its report.
const PATIENCE: Duration = Duration::from_secs(60);

/// Arguments of `strandline dump`.
#[derive(Args)]
#[command(
    after_help = "Prints the path of the report.json on stdout.\n\nExit codes: 0 written, 2 not (the reason is on stderr)."
)]
pub struct Dump {
    /// The job's process
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: u32,
    /// Folder for the report; the run's own by default
    #[arg(short = 'o', long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Ask by signal even if the job has a control socket
    #[arg(long)]
    signal: bool,
}

impl Dump {
    /// Asks, waits, prints the path.
    pub fn run(self) -> Result<ExitCode, String> {
        let out =
            self.out.as_deref().map(std::path::absolute).transpose().map_err(|e| format!("--out: {e}"))?;
        let process = Process::look(self.pid).map_err(|refused| refused.to_string())?;
        let path = if self.signal {
            by_signal(&process, out.as_deref())?
        } else {
            match Client::connect(&process) {
                Ok(client) => by_socket(client, &process, out.as_deref())?,
                Err(Refused::NoSocket(..)) => by_signal(&process, out.as_deref())?,
                Err(refused) => return Err(refused.to_string()),
            }
        };
        println!("{}", path.display());
        Ok(ExitCode::SUCCESS)
    }
}

fn by_socket(mut client: Client, process: &Process, out: Option<&Path>) -> Result<PathBuf, String> {
    if out.is_some_and(|out| out.to_str().is_none()) {
        return Err(
            "--out is not UTF-8, which the control socket cannot carry; choose another name".to_owned()
        );
    }
    let ask = Ask::Dump { folder: out.map(Path::to_owned) };
    let answer = client.ask(&ask, PATIENCE).map_err(|refused| refused.to_string())?;
    let path = answer["path"].as_str().ok_or("the job's answer names no report")?;
    // A job in a container names a path of its own file system.
    let path = PathBuf::from(path);
    let outside = Path::new("/proc").join(process.pid.to_string()).join("root");
    let outside = outside.join(path.strip_prefix("/").unwrap_or(&path));
    Ok(if !path.exists() && outside.exists() { outside } else { path })
}

/// What tells one writing of a file from the next.
type Mark = Option<(u64, i64, i64)>;

fn mark(path: &Path) -> Mark {
    use std::os::unix::fs::MetadataExt;
    let found = std::fs::metadata(path).ok()?;
    Some((found.ino(), found.mtime(), found.mtime_nsec()))
}

fn by_signal(process: &Process, out: Option<&Path>) -> Result<PathBuf, String> {
    let pid = process.pid;
    let Some(signal) = process.signal else {
        return Err(format!(
            "process {pid} has no control socket that answers, and no signal asks it for a report (the job handles \
             SIGUSR2 itself, or STRANDLINE_SIGNAL is none); its report is written at the end"
        ));
    };
    let report = || process.report_folder().map(|folder| folder.join("report.json"));
    let before = report().map(|path| mark(&path)).unwrap_or_default();
    let asked = report().and_then(|path| json::read(&path).ok()).map_or(0, |report| report.run.asked);
    strandline::attach::launch::send(pid, signal)
        .map_err(|error| format!("signal {signal} cannot be sent to process {pid}: {error}"))?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        // The folder may be made by this very report.
        if let Some(path) = report() {
            let now = mark(&path);
            // A report of a finding may have been begun before the signal came; or it has replaced the one asked for.
            let answers = |run: &Run| run.written != "finding" || run.asked > asked;
            if now.is_some() && now != before && json::read(&path).is_ok_and(|report| answers(&report.run)) {
                return out.map_or(Ok(path.clone()), |out| copy(&path, out));
            }
        }
        if !process.lives() {
            return Err(Refused::Dead(pid).to_string());
        }
        if Instant::now() > deadline {
            return Err(format!(
                "signal {signal} was sent to process {pid}, but no new report was seen within {} s; a program that \
                 chose its own folder (strandline.install(out=…)) writes it there",
                PATIENCE.as_secs()
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A signal carries no folder, so the report is copied.
fn copy(path: &Path, out: &Path) -> Result<PathBuf, String> {
    let contents = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    write::file(out, "report.json", &contents).map_err(|error| error.to_string())
}
