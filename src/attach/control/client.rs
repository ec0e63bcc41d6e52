//! The asking side of the control socket, and what can be known of a process from outside. Used by the
//! command only, never inside a job.
//!
//! Invariant: no signal is sent to a process unless one of its threads says that strandline handles it.

use super::{Ask, folders, peer, read_reply, request, socket_name};
use crate::attach::signal::THREAD;
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a process cannot be asked.
#[derive(Debug)]
pub enum Refused {
    /// There is no such process, or only what is left of it.
    Dead(u32),
    /// It belongs to another user (named by number) and we are not root.
    Foreign(u32, u32),
    /// The library is not in it.
    Without(u32),
    /// The library is in it but does nothing: torch was not imported, or it is a forked child.
    Asleep(u32),
    /// It accounts, but its socket does not answer.
    NoSocket(u32, String),
    /// It answered that it cannot, or will not.
    Said(String),
    /// It was lost while it was asked.
    Lost(u32, io::Error),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Refused::Dead(pid) => write!(
                f,
                "there is no process {pid} (any more); its last report, if it left one, is in \
                 strandline-out/rank<R>-{pid}"
            ),
            Refused::Foreign(pid, uid) => {
                write!(f, "process {pid} belongs to another user ({uid}); ask as that user, or as root")
            }
            Refused::Without(pid) => {
                write!(f, "process {pid} does not run under strandline; start it with: strandline run -- CMD")
            }
            Refused::Asleep(pid) => write!(
                f,
                "libstrandline is in process {pid} but does not account there: torch is not imported yet, or it \
                 is a forked child, or its mode is off; name the process that trains"
            ),
            Refused::NoSocket(pid, why) => write!(
                f,
                "process {pid} has no control socket that answers ({why}); a report can be asked for by signal: \
                 strandline dump --signal {pid}"
            ),
            Refused::Said(why) => f.write_str(why),
            Refused::Lost(pid, error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    write!(f, "process {pid} does not answer in time; is it stopped (Ctrl-Z, a debugger)?")
                }
                _ => write!(f, "process {pid} ended, or closed the connection ({error})"),
            },
        }
    }
}

impl std::error::Error for Refused {}

/// A process that accounts, seen from outside.
#[derive(Clone, Debug)]
pub struct Process {
    /// The number by which we know it.
    pub pid: u32,
    /// The number by which it knows itself (another one in a container).
    pub own_pid: u32,
    uid: u32,
    /// The signal that strandline handles there.
    pub signal: Option<i32>,
}

impl Process {
    /// Looks at process `pid`.
    pub fn look(pid: u32) -> Result<Process, Refused> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let uid = fs::metadata(&folder).map_err(|_| Refused::Dead(pid))?.uid();
        let status = fs::read_to_string(folder.join("status")).map_err(|_| Refused::Dead(pid))?;
        let line =
            |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
        if line("State:").starts_with(['Z', 'X']) {
            return Err(Refused::Dead(pid));
        }
        if line("Tgid:").parse() != Ok(pid) {
            return Err(Refused::Dead(pid)); // a thread's number
        }
        // SAFETY: cannot fail.
        let me = unsafe { libc::geteuid() };
        // A process that may not be looked into (no dump) belongs to root in /proc; the line is right.
        let real = line("Uid:").split_whitespace().nth(1).and_then(|uid| uid.parse().ok()).unwrap_or(uid);
        if me != 0 && me != real {
            return Err(Refused::Foreign(pid, real));
        }
        let names: Vec<String> = fs::read_dir(folder.join("task"))
            .map(|tasks| {
                let others = tasks.flatten().filter(|task| task.file_name() != *pid.to_string());
                others.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).collect()
            })
            .unwrap_or_default();
        let ours = names.iter().map(|name| name.trim()).filter(|name| name.starts_with(THREAD));
        let numbers: Vec<Option<i32>> =
            ours.map(|name| name[THREAD.len()..].strip_prefix('-').and_then(|n| n.parse().ok())).collect();
        if numbers.is_empty() {
            let maps = fs::read(folder.join("maps")).unwrap_or_default();
            let there = maps.windows(LIBRARY.len()).any(|part| part == LIBRARY);
            return Err(if there { Refused::Asleep(pid) } else { Refused::Without(pid) });
        }
        let own_pid = line("NSpid:").split_whitespace().last().and_then(|n| n.parse().ok()).unwrap_or(pid);
        Ok(Process { pid, own_pid, uid: real, signal: numbers.into_iter().flatten().next() })
    }

    /// Whether it is still there.
    pub fn lives(&self) -> bool {
        !matches!(Process::look(self.pid), Err(Refused::Dead(_)))
    }

    /// A variable of the environment that it was started with.
    pub fn variable(&self, name: &str) -> Option<OsString> {
        let all = fs::read(format!("/proc/{}/environ", self.pid)).ok()?;
        all.split(|byte| *byte == 0)
            .find_map(|pair| pair.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
            .map(|value| OsString::from_vec(value.to_vec()))
    }

    /// The folder in which its reports lie unless its program says otherwise: known from outside only if it
    /// was started by `strandline run` or the environment.
    pub fn report_folder(&self) -> Option<PathBuf> {
        let here = fs::read_link(format!("/proc/{}/cwd", self.pid)).ok();
        let out = self
            .variable("STRANDLINE_OUT")
            .filter(|out| !out.is_empty())
            .map_or_else(|| PathBuf::from("strandline-out"), PathBuf::from);
        let out = if out.is_absolute() { out } else { here?.join(out) };
        let end = format!("-{}", self.own_pid);
        fs::read_dir(out).ok()?.flatten().map(|entry| entry.path()).find(|path| {
            let name = path.file_name().map(OsStr::as_bytes).unwrap_or_default();
            name.starts_with(b"rank") && name.ends_with(end.as_bytes())
        })
    }

    /// Where its socket may lie: by its own environment, ours, the usual place, and in its own file system
    /// if it lives in a container.
    fn places(&self) -> Vec<PathBuf> {
        let mut runtimes: Vec<OsString> = Vec::new();
        runtimes.extend(self.variable("XDG_RUNTIME_DIR"));
        runtimes.extend(std::env::var_os("XDG_RUNTIME_DIR"));
        runtimes.push(format!("/run/user/{}", self.uid).into());
        let mut places: Vec<PathBuf> = Vec::new();
        for runtime in runtimes {
            for folder in folders(self.uid, Some(&runtime)) {
                let place = folder.join(socket_name(self.own_pid));
                if !places.contains(&place) {
                    places.push(place);
                }
            }
        }
        // The folder of last resort comes after every other.
        places.sort_by_key(|place| place.starts_with("/tmp"));
        let root = format!("/proc/{}/root", self.pid);
        let inside = |place: &PathBuf| Path::new(&root).join(place.strip_prefix("/").unwrap_or(place));
        let others: Vec<PathBuf> = places.iter().map(inside).collect();
        places.extend(others);
        places
    }
}

const LIBRARY: &[u8] = b"libstrandline.so";

/// A connection to a job.
pub struct Client {
    pid: u32,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to a process's socket.
    pub fn connect(process: &Process) -> Result<Client, Refused> {
        let mut why = "there is none".to_owned();
        for place in process.places() {
            let stream = match UnixStream::connect(&place) {
                Ok(stream) => stream,
                Err(error) => {
                    if error.kind() != io::ErrorKind::NotFound {
                        why = format!("{}: {error}", place.display());
                    }
                    continue;
                }
            };
            // A socket in /tmp proves nothing; who listens does.
            match peer(&stream) {
                Ok(who) if who.uid == process.uid || who.uid == 0 => {}
                _ => {
                    why = format!("{}: another user listens there", place.display());
                    continue;
                }
            }
            let mut client = Client { pid: process.pid, stream: BufReader::new(stream) };
            match client.ask(&Ask::Hello, Duration::from_secs(60)) {
                Ok(hello) if hello["pid"].as_u64() == Some(u64::from(process.own_pid)) => return Ok(client),
                Ok(_) => why = format!("{}: another process listens there", place.display()),
                Err(Refused::Said(said)) => return Err(Refused::Said(said)),
                Err(Refused::Lost(_, error)) => why = format!("{}: {error}", place.display()),
                Err(other) => return Err(other),
            }
        }
        Err(Refused::NoSocket(process.pid, why))
    }

    /// Asks one thing and waits for the answer.
    pub fn ask(&mut self, ask: &Ask, patience: Duration) -> Result<Value, Refused> {
        let pid = self.pid;
        let lost = |error| Refused::Lost(pid, error);
        let stream = self.stream.get_ref();
        stream.set_read_timeout(Some(patience)).map_err(lost)?;
        stream.set_write_timeout(Some(patience)).map_err(lost)?;
        let line = request(ask) + "\n";
        self.stream.get_mut().write_all(line.as_bytes()).map_err(lost)?;
        let mut answer = String::new();
        match self.stream.read_line(&mut answer) {
            Ok(_) if answer.ends_with('\n') => read_reply(&answer).map_err(Refused::Said),
            Ok(_) => Err(lost(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(lost(error)),
        }
    }
}
