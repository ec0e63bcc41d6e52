//! The thread of a job that listens on its control socket.
//!
//! The thread has a table of file descriptors of its own: a job that closes what it did not open cannot
//! close ours, a forked child does not inherit them, and the job's own files and pipes are never kept open by
//! us. Hence the rule: this thread only moves bytes. What is asked for is done by the thread of
//! [`super::super::signal`], which shares the job's descriptors; nothing here may call a driver or write a
//! report. All signals are blocked here; Python's GIL is never taken.

use super::{Ask, LONGEST_REQUEST, MOST_CELLS, MOST_SITES, folders, read_request, reply, socket_name};
use crate::attach::{descriptors, metrics, peer, process, say, signal};
use serde_json::{Value, json};
use std::fs::{self, DirBuilder};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Connections at a time; more are sent away.
const CONNECTIONS: usize = 8;
/// A connection on which nothing is asked for so long is closed.
const IDLE: Duration = Duration::from_secs(120);
/// How long what is asked for may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The socket's file, as it was made.
struct File {
    path: PathBuf,
    inode: (u64, u64),
    pid: u32,
}

static FILE: OnceLock<File> = OnceLock::new();
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Begins to listen, in a thread. What goes wrong is said once; the job goes on without a socket.
pub fn start() {
    if let Err(error) = signal::quiet_thread("strandline-ctl", || {
        let _ = catch_unwind(serve);
    }) {
        say(format_args!("no control socket: no thread could be started ({error})"));
    }
    // SAFETY: the handler only looks at statics, and the library is never unloaded.
    unsafe { libc::atexit(stop_at_exit) };
}

/// Removes the socket's file: the run is over.
pub fn stop() {
    STOPPED.store(true, Ordering::SeqCst);
    // A child that was forked has a copy of this memory, but the file is its parent's.
    let Some(file) = FILE.get().filter(|file| file.pid == std::process::id()) else { return };
    if fs::symlink_metadata(&file.path).is_ok_and(|found| (found.dev(), found.ino()) == file.inode) {
        let _ = fs::remove_file(&file.path);
    }
}

extern "C" fn stop_at_exit() {
    let _ = catch_unwind(stop);
}

fn serve() {
    let opened = descriptors::of_this_thread().and_then(|()| open());
    let listener = match opened {
        Ok(listener) => listener,
        Err(why) => {
            // Our stderr is not the job's any more.
            signal::submit(Box::new(move || {
                say(format_args!(
                    "no control socket, so `strandline top` cannot watch this run: {why}; \
                     a signal still asks for a report"
                ));
            }));
            return;
        }
    };
    let mut connections: Vec<Connection> = Vec::new();
    loop {
        let mut watched = vec![descriptors::watch(listener.as_raw_fd(), libc::POLLIN)];
        watched.extend(connections.iter().map(Connection::watch));
        descriptors::poll(&mut watched, 10_000);
        for (connection, seen) in connections.iter_mut().zip(&watched[1..]) {
            if seen.revents != 0 {
                connection.go_on();
            }
        }
        connections.retain(|connection| connection.open && connection.heard.elapsed() < IDLE);
        if watched[0].revents != 0 {
            accept(&listener, &mut connections);
        }
    }
}

/// Makes the socket: aside, and renamed once it listens, so that nobody takes it for a dead one.
fn open() -> Result<UnixListener, String> {
    // SAFETY: cannot fail.
    let uid = unsafe { libc::geteuid() };
    let mut why = String::new();
    for folder in folders(uid, std::env::var_os("XDG_RUNTIME_DIR").as_deref()) {
        match private_folder(&folder, uid).and_then(|()| listen(&folder)) {
            Ok(listener) => {
                remove_dead(&folder);
                return Ok(listener);
            }
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// A folder that only `uid` can enter, or why there is none.
fn private_folder(folder: &Path, uid: u32) -> Result<(), String> {
    let name = folder.display();
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(format!("{name}: {error}")),
        _ => {}
    }
    let found = fs::symlink_metadata(folder).map_err(|error| format!("{name}: {error}"))?;
    if !found.is_dir() || found.uid() != uid || found.mode() & 0o077 != 0 {
        return Err(format!("{name} is not a folder that only this user can enter (mode 0700); remove it"));
    }
    Ok(())
}

fn listen(folder: &Path) -> Result<UnixListener, String> {
    let pid = std::process::id();
    let path = folder.join(socket_name(pid));
    let aside = folder.join(format!(".{pid}.new"));
    let failed = |error: io::Error| format!("{}: {error}", path.display());
    let _ = fs::remove_file(&aside);
    let listener = UnixListener::bind(&aside).map_err(failed)?;
    let made = fs::set_permissions(&aside, fs::Permissions::from_mode(0o600))
        .and_then(|()| listener.set_nonblocking(true))
        .and_then(|()| fs::symlink_metadata(&aside));
    let made = match made.and_then(|made| fs::rename(&aside, &path).map(|()| made)) {
        Ok(made) => made,
        Err(error) => {
            let _ = fs::remove_file(&aside);
            return Err(failed(error));
        }
    };
    let _ = FILE.set(File { path, inode: (made.dev(), made.ino()), pid });
    if STOPPED.load(Ordering::SeqCst) {
        stop();
    }
    Ok(listener)
}

/// Removes the sockets of processes that were killed: nobody listens there.
fn remove_dead(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let socket = path.extension().is_some_and(|end| end == "sock");
        if socket
            && UnixStream::connect(&path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        {
            let _ = fs::remove_file(&path);
        }
    }
}

fn accept(listener: &UnixListener, connections: &mut Vec<Connection>) {
    while let Ok((stream, _)) = listener.accept() {
        // SAFETY: cannot fail.
        let me = unsafe { libc::geteuid() };
        if !peer(&stream).is_ok_and(|who| who.uid == me || who.uid == 0)
            || stream.set_nonblocking(true).is_err()
        {
            continue;
        }
        let mut connection = Connection {
            stream,
            heard: Instant::now(),
            input: Vec::new(),
            output: Vec::new(),
            open: true,
            last: false,
        };
        if connections.len() >= CONNECTIONS {
            connection.send(Err(format!("{CONNECTIONS} others are watching already; close one of them")));
        } else {
            connections.push(connection);
        }
    }
}

/// One who asks.
struct Connection {
    stream: UnixStream,
    heard: Instant,
    input: Vec<u8>,
    /// Waits to be sent; nothing more is read until it is.
    output: Vec<u8>,
    open: bool,
    /// To be closed once everything is sent.
    last: bool,
}

impl Connection {
    fn watch(&self) -> libc::pollfd {
        descriptors::watch(
            self.stream.as_raw_fd(),
            if self.output.is_empty() { libc::POLLIN } else { libc::POLLOUT },
        )
    }

    /// Sends and receives what can be without waiting.
    fn go_on(&mut self) {
        self.heard = Instant::now();
        self.flush();
        if !self.open || !self.output.is_empty() {
            return;
        }
        let mut chunk = [0u8; 1024];
        match self.stream.read(&mut chunk) {
            Ok(0) => self.open = false,
            Ok(length) => self.input.extend_from_slice(&chunk[..length]),
            Err(error) if descriptors::waits(&error) => {}
            Err(_) => self.open = false,
        }
        while let Some(end) =
            self.input.iter().position(|byte| *byte == b'\n').filter(|_| self.output.is_empty())
        {
            let line: Vec<u8> = self.input.drain(..=end).collect();
            self.send(read_request(&line).and_then(perform));
        }
        if self.input.len() > LONGEST_REQUEST {
            self.last = true;
            self.input.clear();
            self.send(Err(format!("a request has at most {LONGEST_REQUEST} bytes")));
        }
    }

    fn send(&mut self, answer: Result<Value, String>) {
        self.output.extend_from_slice(reply(answer).as_bytes());
        self.output.push(b'\n');
        self.flush();
    }

    fn flush(&mut self) {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => self.open = false,
                Ok(sent) => {
                    self.output.drain(..sent);
                    continue;
                }
                Err(error) if descriptors::waits(&error) => {}
                Err(_) => self.open = false,
            }
            return;
        }
        self.open &= !self.last;
    }
}

/// Has the other thread do what is asked for, and waits for its answer.
fn perform(ask: Ask) -> Result<Value, String> {
    let (answer, answered) = std::sync::mpsc::sync_channel(1);
    signal::submit(Box::new(move || {
        let done = catch_unwind(|| answer_of(ask)).unwrap_or_else(|_| Err("an internal fault".to_owned()));
        let _ = answer.try_send(done);
    }));
    answered
        .recv_timeout(PATIENCE)
        .unwrap_or_else(|_| Err("the job is still busy with an earlier report; try again".to_owned()))
}

fn answer_of(ask: Ask) -> Result<Value, String> {
    let state = process::state().ok_or("the job no longer accounts")?;
    match ask {
        Ask::Hello => Ok(json!({
            "pid": std::process::id(),
            "version": env!("CARGO_PKG_VERSION"),
            "mode": state.mode().word(),
            "metrics": metrics::server::url(),
        })),
        Ask::Dump { folder } => {
            state.report_for(folder.as_deref()).map(|path| json!({"path": path.display().to_string()}))
        }
        Ask::Live { sites, cells } => {
            serde_json::to_value(state.live(sites.min(MOST_SITES), cells.min(MOST_CELLS)))
                .map_err(|error| error.to_string())
        }
    }
}
