//! `strandline doctor`: what would work here, and what to do about what would not.
//!
//! Looks at files and the environment, then runs a training job of twelve steps under the library, as a user
//! would, and looks at the report that it leaves. Must not change anything: what it makes lies in a temporary
//! folder and is removed.

use crate::paths;
use clap::Args;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};
use strandline::driver::cuda::CudaDriver;
use strandline::report::{json, write};

const PROBE: &str = include_str!("doctor_probe.py");
/// How long one program that is run may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Steps of the probe.
const STEPS: u64 = 12;
/// Versions whose insides are known.
const PYTHONS: std::ops::RangeInclusive<u32> = 9..=14;
const TORCHES: std::ops::RangeInclusive<u32> = 8..=11;

/// Arguments of `strandline doctor`.
#[derive(Args)]
#[command(
    after_help = "Exit codes: 0 a job can be run under strandline here, 1 it cannot; each line that is not ok \
                        says what to do."
)]
pub struct Doctor {
    /// The Python that your jobs run with
    #[arg(long, value_name = "PATH", default_value = "python3")]
    python: OsString,
    /// Folder for reports that is to be tried
    #[arg(long, value_name = "DIR", default_value = "strandline-out")]
    out: PathBuf,
}

/// How one thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Ok,
    /// Something is lost, but a job can be run.
    Note,
    Fail,
}

#[derive(Default)]
struct Findings {
    failed: bool,
}

impl Findings {
    /// Prints one line; `remedy` says what to do.
    fn say(&mut self, how: How, what: &str, found: &str, remedy: &str) {
        let word = match how {
            How::Ok => "ok",
            How::Note => "note",
            How::Fail => "FAIL",
        };
        self.failed |= how == How::Fail;
        println!("{word:<5} {what:<12} {found}");
        if how != How::Ok {
            println!("      {:<12} → {remedy}", "");
        }
    }
}

impl Doctor {
    /// Looks at everything, prints a line for each.
    pub fn run(self) -> Result<ExitCode, String> {
        let mut all = Findings::default();
        let library = library(&mut all);
        preload(&mut all);
        limits(&mut all);
        gpu(&mut all);
        folder(&mut all, &self.out);
        if let Some(python) = python(&mut all, &self.python)
            && let Some(library) = library
        {
            probe(&mut all, &python, &library);
        }
        Ok(ExitCode::from(u8::from(all.failed)))
    }
}

fn library(all: &mut Findings) -> Option<PathBuf> {
    let path = match paths::library() {
        Ok(path) => path,
        Err(why) => {
            all.say(How::Fail, "library", &why, "build it (cargo build --release), or pip install the wheel");
            return None;
        }
    };
    // The loader complains on stderr and goes on; a program of its own shows whether it can be preloaded.
    let mut job = Command::new("/bin/sh");
    job.args(["-c", ":"]).env("LD_PRELOAD", &path);
    match run(job) {
        Ok(done) if done.status.success() && done.stderr.is_empty() => {
            all.say(How::Ok, "library", &path.display().to_string(), "");
            Some(path)
        }
        Ok(done) => {
            let said = String::from_utf8_lossy(&done.stderr);
            all.say(
                How::Fail,
                "library",
                &format!("{} cannot be preloaded: {}", path.display(), last_line(&said)),
                "build it on this machine (an older glibc, or a file system mounted noexec, are the usual reasons)",
            );
            None
        }
        Err(why) => {
            all.say(
                How::Fail,
                "library",
                &format!("/bin/sh under the library: {why}"),
                "build it on this machine",
            );
            None
        }
    }
}

fn preload(all: &mut Findings) {
    let given = std::env::var("LD_PRELOAD").unwrap_or_default();
    let system = std::fs::read_to_string("/etc/ld.so.preload").unwrap_or_default();
    let others: Vec<&str> =
        given.split([' ', ':']).chain(system.split_whitespace()).filter(|p| !p.is_empty()).collect();
    let named = |part: &str| others.iter().find(|path| path.contains(part)).copied();
    if let Some(path) = named("libstrandline") {
        let remedy = "unset LD_PRELOAD: strandline run sets it";
        all.say(How::Note, "LD_PRELOAD", &format!("holds {path} already"), remedy);
    } else if let Some(path) = named("san.so").or_else(|| named("libasan")) {
        let remedy =
            "run without the sanitizer: it must be the first library of a process, and so must strandline's";
        all.say(How::Fail, "LD_PRELOAD", &format!("holds a sanitizer: {path}"), remedy);
    } else if others.is_empty() {
        all.say(How::Ok, "LD_PRELOAD", "nothing else is preloaded", "");
    } else {
        let text = format!("{} as well (fine: strandline goes first)", others.join(", "));
        all.say(How::Ok, "LD_PRELOAD", &text, "");
    }
    for (name, what) in [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "torch then asks the driver for every block"),
        ("STRANDLINE_MODE", "it is what jobs get that are preloaded by hand"),
        ("STRANDLINE_LIB", "another library than the one beside the command is used"),
    ] {
        if let Some(value) = std::env::var_os(name) {
            let found = format!("{name}={} is set: {what}", value.display());
            all.say(How::Note, "environment", &found, "unset it unless it is meant");
        }
    }
}

fn limits(all: &mut Findings) {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let space = limits.lines().find_map(|line| line.strip_prefix("Max address space")).unwrap_or_default();
    match space.split_whitespace().next() {
        Some(limit) if limit != "unlimited" => all.say(
            How::Fail,
            "ulimit -v",
            &format!("address space is limited to {limit} bytes, and strandline reserves much more"),
            "ulimit -v unlimited (addresses that are only reserved cost nothing)",
        ),
        _ => all.say(How::Ok, "ulimit -v", "address space is not limited", ""),
    }
}

fn gpu(all: &mut Findings) {
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let version = driver.lines().next().unwrap_or_default().trim().to_owned();
    let devices = std::fs::read_dir("/dev")
        .map(|found| found.flatten().filter(|e| is_gpu(&e.file_name().to_string_lossy())).count())
        .unwrap_or(0);
    if devices == 0 && version.is_empty() && !Path::new("/dev/dxg").exists() {
        all.say(How::Ok, "GPU", "none here: CPU tensors are accounted (mode host)", "");
        return;
    }
    match CudaDriver::device_count() {
        Ok(0) => all.say(
            How::Note,
            "GPU",
            "the driver shows none (CUDA_VISIBLE_DEVICES?): CPU tensors are accounted",
            "unset CUDA_VISIBLE_DEVICES, or start the container with --gpus all",
        ),
        Ok(count) => all.say(How::Ok, "GPU", &format!("{count} by the driver{}", after(&version)), ""),
        Err(error) => all.say(
            How::Note,
            "GPU",
            &format!("the driver does not answer: {}{}", CudaDriver::describe(&error), after(&version)),
            "try nvidia-smi; in a container, start it with --gpus all",
        ),
    }
}

fn is_gpu(name: &str) -> bool {
    name.strip_prefix("nvidia")
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
}

fn after(version: &str) -> String {
    if version.is_empty() { String::new() } else { format!(" ({version})") }
}

fn folder(all: &mut Findings, out: &Path) {
    let there = out.exists();
    let tried = write::file(out, ".strandline-doctor", b"");
    match &tried {
        Ok(path) => {
            let _ = std::fs::remove_file(path);
            all.say(How::Ok, "reports", &format!("{} can be written", out.display()), "");
        }
        Err(error) => all.say(How::Fail, "reports", &error.to_string(), "give another folder with --out DIR"),
    }
    if !there {
        let _ = std::fs::remove_dir(out);
    }
}

const FACTS: &str = "
import json, sys, sysconfig
facts = {'version': list(sys.version_info[:3]), 'name': sys.implementation.name,
         'free': bool(sysconfig.get_config_var('Py_GIL_DISABLED')), 'torch': None, 'cuda': None, 'why': ''}
try:
    import torch
    facts['torch'], facts['cuda'] = torch.__version__, torch.version.cuda
except Exception as error:
    facts['why'] = f'{type(error).__name__}: {error}'
print(json.dumps(facts))
";

fn python(all: &mut Findings, name: &OsString) -> Option<PathBuf> {
    let remedy = "name the Python of your jobs with --python";
    let Some(python) = paths::program(name) else {
        all.say(How::Fail, "Python", &format!("{}: command not found", name.display()), remedy);
        return None;
    };
    let mut job = Command::new(&python);
    job.args(["-c", FACTS]).env_remove("LD_PRELOAD");
    let facts = run(job).and_then(|done| {
        serde_json::from_slice::<serde_json::Value>(&done.stdout)
            .map_err(|_| last_line(&String::from_utf8_lossy(&done.stderr)).to_owned())
    });
    let facts = match facts {
        Ok(facts) => facts,
        Err(why) => {
            all.say(How::Fail, "Python", &format!("{} does not work: {why}", python.display()), remedy);
            return None;
        }
    };
    let number = |at: usize| facts["version"][at].as_u64().unwrap_or(0) as u32;
    let version =
        format!("{} {}.{}.{}", facts["name"].as_str().unwrap_or("?"), number(0), number(1), number(2));
    let known = facts["name"] == "cpython" && number(0) == 3 && PYTHONS.contains(&number(1));
    if !known {
        let remedy = "use CPython 3.9 to 3.14; with others there are no Python stacks";
        all.say(How::Note, "Python", &format!("{version} is not known"), remedy);
    } else if facts["free"] == true {
        let remedy = "use the usual build; without the GIL there are no Python stacks";
        all.say(How::Note, "Python", &format!("{version}, free-threaded"), remedy);
    } else {
        all.say(How::Ok, "Python", &format!("{version} ({})", python.display()), "");
    }
    let Some(torch) = facts["torch"].as_str() else {
        let why = facts["why"].as_str().unwrap_or_default();
        let remedy = "pip install torch there, or name another Python with --python";
        all.say(How::Fail, "torch", &format!("cannot be imported: {}", last_line(why)), remedy);
        return None;
    };
    let mut numbers = torch.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let text =
        format!("{torch}, {}", facts["cuda"].as_str().map_or("without CUDA".into(), |c| format!("CUDA {c}")));
    if (major, TORCHES.contains(&minor)) == (2, true) {
        all.say(How::Ok, "torch", &text, "");
    } else {
        let remedy =
            "2.8 to 2.11 are known; with others some statistics go through Python, see docs/torch.md";
        all.say(How::Note, "torch", &format!("{text}: not compared"), remedy);
    }
    Some(python)
}

/// A job of a few steps, and whether its report is what it must be.
fn probe(all: &mut Findings, python: &Path, library: &Path) {
    let folder = std::env::temp_dir().join(format!("strandline-doctor-{}", std::process::id()));
    let made = write::file(&folder, "probe.py", PROBE.as_bytes());
    let me = std::env::current_exe().map_err(|error| error.to_string());
    let (script, me) = match (made, me) {
        (Ok(script), Ok(me)) => (script, me),
        (Err(error), _) => {
            let remedy = "set TMPDIR to a folder that can be written";
            return all.say(How::Fail, "job", &error.to_string(), remedy);
        }
        (_, Err(why)) => return all.say(How::Fail, "job", &why, "name the command by its whole path"),
    };
    let mut job = Command::new(&me);
    job.args(["run", "--mode", "host", "--out"]).arg(&folder).arg("--").arg(python).arg(&script);
    job.env("STRANDLINE_LIB", library).env("STRANDLINE_COMMAND", &me);
    let done = run(job);
    judge(all, &done, &folder);
    let _ = std::fs::remove_dir_all(&folder);
}

fn judge(all: &mut Findings, done: &Result<Output, String>, folder: &Path) {
    let remedy = "run the job with STRANDLINE_DEBUG=1 and report what it says";
    let done = match done {
        Ok(done) => done,
        Err(why) => return all.say(How::Fail, "job", why, remedy),
    };
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    if !done.status.success() {
        let found = format!("a job of {STEPS} steps ended with {}: {}", done.status, last_line(&err));
        return all.say(How::Fail, "job", &found, remedy);
    }
    let report = std::fs::read_dir(folder).ok().and_then(|entries| {
        let files = entries.flatten().map(|entry| entry.path().join("report.json"));
        files.filter(|path| path.is_file()).find_map(|path| json::read(&path).ok())
    });
    let Some(report) = report else {
        let found = format!("a job of {STEPS} steps left no report: {}", last_line(&err));
        return all.say(How::Fail, "job", &found, remedy);
    };
    if report.run.steps != STEPS {
        let found = format!("{} of {STEPS} steps were seen", report.run.steps);
        return all.say(How::Fail, "job", &found, remedy);
    }
    all.say(How::Ok, "job", &format!("{STEPS} steps were seen, and the report was written"), "");
    let seen =
        |site: &&strandline::report::model::Site| site.stack.iter().any(|frame| frame.function == "leave");
    match report.sites.iter().find(seen) {
        Some(_) => all.say(How::Ok, "stacks", "Python's frames are where they are looked for", ""),
        None => all.say(
            How::Note,
            "stacks",
            &format!("Python's frames were not found: {}", last_line(&err)),
            "findings name no lines then; use CPython 3.9 to 3.14 of python.org, Debian, conda or uv",
        ),
    }
    let dump = out.lines().find_map(|line| line.strip_prefix("dump "));
    match dump {
        Some(said) if said.starts_with("0 ") => {
            all.say(How::Ok, "dump, top", "a running job can be asked and watched", "");
        }
        other => all.say(
            How::Note,
            "dump, top",
            &format!("a running job cannot be asked{}: {}", seccomp(), other.unwrap_or(last_line(&err))),
            "kill -USR2 PID still writes a report; let /tmp or XDG_RUNTIME_DIR be writable, and the container's \
             seccomp profile allow close_range",
        ),
    }
}

fn seccomp() -> &'static str {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let filtered = status.lines().any(|line| line.split_whitespace().eq(["Seccomp:", "2"]));
    if filtered { " (a seccomp filter is in force)" } else { "" }
}

fn last_line(text: &str) -> &str {
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it said nothing")
}

/// Runs a program to its end, no longer than [`PATIENCE`].
fn run(mut job: Command) -> Result<Output, String> {
    let child = job.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| error.to_string())?;
    let (mut out, mut err) = (child.stdout.take(), child.stderr.take());
    let read = |pipe: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || {
            let mut all = Vec::new();
            if let Some(mut pipe) = pipe {
                let _ = pipe.read_to_end(&mut all);
            }
            all
        })
    };
    let out = read(out.take().map(|pipe| Box::new(pipe) as _));
    let err = read(err.take().map(|pipe| Box::new(pipe) as _));
    let began = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if began.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(10)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("did not end within {} s", PATIENCE.as_secs()));
            }
            Err(error) => return Err(error.to_string()),
        }
    };
    let (stdout, stderr) = (out.join().unwrap_or_default(), err.join().unwrap_or_default());
    Ok(Output { status, stdout, stderr })
}
