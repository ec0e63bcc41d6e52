//! `strandline run`: starts the job with the library preloaded.
//!
//! Without `--fail-on-leak` the command *becomes* the job (exec): same process, same signals, same exit
//! code. With it, the command stays, passes signals on, and exits 3 if the job succeeded but leaked.

use crate::{code, paths, report};
use clap::{Args, ValueEnum};
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use strandline::attach::metrics::Listen;
use strandline::attach::{options, verdict};

/// Where events come from.
#[derive(Clone, Copy, ValueEnum)]
pub enum Mode {
    /// A GPU if there is one (heap), else CPU tensors (host)
    Auto,
    /// strandline's own caching allocator serves the GPU
    Heap,
    /// torch keeps its allocator and strandline watches it
    Observer,
    /// CPU tensors
    Host,
}

/// Arguments of `strandline run`.
#[derive(Args)]
pub struct Run {
    /// Where events come from (default: what STRANDLINE_MODE says, else auto)
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Folder for the reports (default: what STRANDLINE_OUT says, else strandline-out)
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Exit 3 if the job succeeds but leaks
    #[arg(long)]
    pub fail_on_leak: bool,
    /// Write the report every N steps as well
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub every: Option<u32>,
    /// Show only findings and sites with a frame of this library or package on their stack
    #[arg(long, value_name = "LIB")]
    pub focus: Option<String>,
    /// Keep metrics in FILE (OpenMetrics text, for node exporter's textfile collector)
    #[arg(long, value_name = "FILE")]
    pub openmetrics: Option<PathBuf>,
    /// Answer a scraper at http://ADDR:PORT/metrics; only a port: on this host only; 0: any free port
    #[arg(long, value_name = "[ADDR:]PORT")]
    pub openmetrics_listen: Option<Listen>,
    /// Look for writes outside of blocks and to freed ones (modes heap and host)
    #[arg(long)]
    pub guard: bool,
    /// Say nothing on stderr; the report is written all the same
    #[arg(long)]
    pub quiet: bool,
    /// The job
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

impl Run {
    /// Runs the job.
    pub fn run(self) -> Result<ExitCode, String> {
        let mode = self.mode()?;
        let library = paths::library()?;
        let name = self.command.first().ok_or("no job was given")?;
        let Some(program) = paths::program(name) else {
            eprintln!("strandline: {}: command not found", name.to_string_lossy());
            return Ok(ExitCode::from(code::NOT_FOUND));
        };
        let named = std::env::var_os("STRANDLINE_OUT").filter(|out| !out.is_empty()).map(PathBuf::from);
        let out = self.out.clone().or(named).unwrap_or_else(|| "strandline-out".into());
        let out = std::path::absolute(&out).map_err(|e| format!("--out {}: {e}", out.display()))?;
        let mut job = Command::new(program);
        job.arg0(name).args(&self.command[1..]);
        job.env("LD_PRELOAD", preload(&library)?).env("STRANDLINE_OUT", &out);
        job.env("STRANDLINE_MODE", &mode);
        if mode == "off" && self.fail_on_leak {
            eprintln!("strandline: STRANDLINE_MODE=off: nothing is watched, so --fail-on-leak sees no leak");
        }
        if self.guard {
            job.env("STRANDLINE_GUARD", "1");
        }
        if self.quiet {
            job.env("STRANDLINE_QUIET", "1");
        }
        if let Some(every) = self.every {
            job.env("STRANDLINE_EVERY", every.to_string());
        }
        if let Some(library) = &self.focus {
            job.env("STRANDLINE_FOCUS", library);
        }
        let mut settings = Vec::new();
        if let Some(file) = &self.openmetrics {
            settings.push(openmetrics(file)?);
        }
        if let Some(listen) = &self.openmetrics_listen {
            settings.push(format!("openmetrics_listen:{listen}"));
        }
        if !settings.is_empty() {
            let mut conf = std::env::var_os("STRANDLINE_CONF").unwrap_or_default();
            for setting in settings {
                conf.push(",");
                conf.push(setting);
            }
            job.env("STRANDLINE_CONF", conf);
        }
        // What a command around this one has said of its own job is not true of this one.
        for stale in ["STRANDLINE_JOB", "STRANDLINE_LAUNCHER", verdict::VARIABLE] {
            job.env_remove(stale);
        }
        if !self.fail_on_leak {
            job.env("STRANDLINE_JOB", std::process::id().to_string());
            return Ok(could_not_start(name, &job.exec()));
        }
        job.env("STRANDLINE_LAUNCHER", std::process::id().to_string());
        // Without it (no /dev/urandom, no abstract sockets) there are still the reports.
        let listener = verdict::Listener::start().ok();
        if let Some(listener) = &listener {
            job.env(verdict::VARIABLE, listener.place());
        }
        let began = std::time::SystemTime::now();
        let status = match supervise(job) {
            Ok(status) => status,
            Err(error) => return Ok(could_not_start(name, &error)),
        };
        if let Some(signal) = status.signal() {
            return Ok(ExitCode::from(128u8.saturating_add(signal as u8)));
        }
        match status.code() {
            Some(0) => {
                let told = listener.map(verdict::Listener::verdicts).unwrap_or_default();
                let leaked = report::leaked(&told, &out, began)?;
                Ok(if leaked { ExitCode::from(code::LEAK) } else { ExitCode::SUCCESS })
            }
            other => Ok(ExitCode::from(other.unwrap_or(1) as u8)),
        }
    }
}

impl Run {
    /// The word of the mode: what was given, else what the environment says, which is an error where it is no mode.
    fn mode(&self) -> Result<String, String> {
        if let Some(word) = self.mode.and_then(|mode| mode.to_possible_value()) {
            return Ok(word.get_name().to_owned());
        }
        let asked = std::env::var_os("STRANDLINE_MODE").unwrap_or_default();
        let word = options::mode_word(&asked.to_string_lossy());
        word.map(|word| if word.is_empty() { "auto" } else { word }.to_owned())
            .map_err(|fault| format!("STRANDLINE_MODE: {fault}"))
    }
}

/// The value of LD_PRELOAD with our library in front of what is there.
fn preload(library: &std::path::Path) -> Result<OsString, String> {
    if library.as_os_str().as_encoded_bytes().iter().any(|b| b.is_ascii_whitespace() || *b == b':') {
        return Err(format!(
            "the library's path {} holds a space or a colon, which LD_PRELOAD cannot carry; \
             copy it elsewhere and name it in STRANDLINE_LIB",
            library.display()
        ));
    }
    let mut value = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
        value.push(":");
        value.push(others);
    }
    Ok(value)
}

/// The metrics' file as a setting of STRANDLINE_CONF.
fn openmetrics(file: &std::path::Path) -> Result<String, String> {
    let file = std::path::absolute(file).map_err(|e| format!("--openmetrics {}: {e}", file.display()))?;
    match file.to_str() {
        Some(name) if !name.contains(',') => Ok(format!("openmetrics:{name}")),
        _ => Err(format!("--openmetrics {}: the name must be UTF-8 without a comma", file.display())),
    }
}

fn could_not_start(name: &std::ffi::OsStr, error: &std::io::Error) -> ExitCode {
    eprintln!("strandline: {}: {error}", name.to_string_lossy());
    ExitCode::from(if error.kind() == std::io::ErrorKind::NotFound {
        code::NOT_FOUND
    } else {
        code::NOT_EXECUTABLE
    })
}

/// Runs the job as a child and passes terminating signals on to it.
fn supervise(mut job: Command) -> std::io::Result<std::process::ExitStatus> {
    strandline::attach::launch::forward_signals()?;
    let mut child = job.spawn()?;
    strandline::attach::launch::forward_to(child.id());
    child.wait()
}
