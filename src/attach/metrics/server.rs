//! The thread of a job that listens for scrapers.
//!
//! As the control socket's, it has a table of file descriptors of its own (a forked child does not inherit the port)
//! and only moves bytes: the text is made by the thread of [`signal`], at most once a second. It begins when the
//! process has done something that is worth watching, so that a launcher or a worker does not take the port.
//! Invariants: connections, and what each may hold, are bounded; each has a time by which it must have asked and one
//! by which it must have read its answer.

use super::Listen;
use super::http::{self, LONGEST_HEAD, Read, Refusal};
use crate::attach::{descriptors, options, process, say, signal};
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::panic::catch_unwind;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Connections at a time; where more come, the one that has been there for longest makes room.
const CONNECTIONS: usize = 16;
/// How long a request may take to come …
const ASKING: Duration = Duration::from_secs(5);
/// … its answer to go …
const ANSWERING: Duration = Duration::from_secs(10);
/// … and the other side to hang up.
const LINGERING: Duration = Duration::from_secs(1);
/// How old a text may be that is sent again.
const FRESH: Duration = Duration::from_secs(1);
/// How long a text is waited for.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two looks at whether the process has done something yet.
const LOOK_EVERY: Duration = Duration::from_millis(200);

static ASKED: OnceLock<(Listen, u16, bool)> = OnceLock::new();
static URL: OnceLock<String> = OnceLock::new();

/// Where the metrics of this process are, once something listens there.
pub fn url() -> Option<&'static str> {
    URL.get().map(String::as_str)
}

/// Begins to listen, in a thread, when there is something to tell. What goes wrong is said once; the job goes on.
pub fn start(listen: Listen, quiet: bool) {
    // The environment is read now: later, other threads of the job may change it.
    if ASKED.set((listen, options::local_rank(), quiet)).is_err() {
        return;
    }
    if let Err(error) = signal::quiet_thread("strandline-http", || {
        let _ = catch_unwind(serve);
    }) {
        say(format_args!("metrics are not served: no thread could be started ({error})"));
    }
}

fn serve() {
    let Some(&(listen, local_rank, quiet)) = ASKED.get() else { return };
    while !process::state().is_some_and(|state| state.is_worth_watching()) {
        if process::is_detached() {
            return;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let opened = descriptors::of_this_thread().and_then(|()| open(listen, local_rank));
    let (listener, address) = match opened {
        Ok(opened) => opened,
        Err(why) => return tell(format!("metrics are not served: {why}")),
    };
    let url = URL.get_or_init(|| format!("http://{address}/metrics"));
    let here_only = address.ip().is_loopback();
    if !here_only {
        tell(format!("metrics: {url} (whoever reaches this address can read them)"));
    } else if !quiet {
        tell(format!("metrics: {url}"));
    }
    answer(&listener, here_only);
}

/// Says a line by the other thread: our stderr is not the job's.
fn tell(line: String) {
    signal::submit(Box::new(move || say(format_args!("{line}"))));
}

fn open(listen: Listen, local_rank: u16) -> Result<(TcpListener, SocketAddr), String> {
    let Some(address) = listen.of_rank(local_rank) else {
        return Err(format!("there is no port {listen} + {local_rank} (the local rank); name a lower one"));
    };
    let opened = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    opened.map_err(|error| {
        let remedy = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another process listens there; name another port, or 0 for any free one (of several processes on a \
                 host each takes PORT + LOCAL_RANK, if its launcher sets that)"
            }
            io::ErrorKind::PermissionDenied => "name a port above 1023",
            io::ErrorKind::AddrNotAvailable => "this host has no such address",
            _ => "name another address with --openmetrics-listen [ADDR:]PORT",
        };
        format!("{address}: {error}; {remedy}")
    })
}

fn answer(listener: &TcpListener, here_only: bool) {
    let mut connections: Vec<Connection> = Vec::new();
    let mut source = Source::default();
    loop {
        let mut watched = vec![descriptors::watch(listener.as_raw_fd(), libc::POLLIN)];
        watched.extend(connections.iter().map(Connection::watch));
        let now = Instant::now();
        let next = connections.iter().map(|c| c.until.saturating_duration_since(now)).min();
        let wait = next.unwrap_or(Duration::from_secs(60)).as_millis() as i32 + 1;
        descriptors::poll(&mut watched, wait);
        for (connection, seen) in connections.iter_mut().zip(&watched[1..]) {
            if seen.revents != 0 {
                connection.go_on(&mut source, here_only);
            }
        }
        let now = Instant::now();
        connections.retain(|connection| connection.stage != Stage::Over && now < connection.until);
        if watched[0].revents != 0 {
            accept(listener, &mut connections);
        }
    }
}

fn accept(listener: &TcpListener, connections: &mut Vec<Connection>) {
    // Not more at a time than there is room for: those that are there have their turn in between.
    for _ in 0..CONNECTIONS {
        match listener.accept() {
            Ok((stream, _)) if stream.set_nonblocking(true).is_ok() => {
                if connections.len() >= CONNECTIONS {
                    connections.remove(0);
                }
                connections.push(Connection {
                    stream,
                    stage: Stage::Asking,
                    until: Instant::now() + ASKING,
                    input: Vec::new(),
                    output: Vec::new(),
                    sent: 0,
                });
            }
            Ok(_) => {}
            Err(error) if descriptors::waits(&error) => return,
            // It hung up before we came.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            // No descriptor or no memory: what waits is not lost.
            Err(_) => return std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

/// The text of the metrics: made by the other thread, and kept for a moment.
#[derive(Default)]
struct Source {
    text: Option<(Instant, Arc<str>)>,
    /// Asked for and not here yet: never more than one at a time.
    pending: Option<Receiver<(Instant, String)>>,
}

impl Source {
    /// The metrics as of now, or nothing if they are not to be had in time.
    fn get(&mut self) -> Option<Arc<str>> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some((_, text)) = self.text.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
                return Some(text.clone());
            }
            let pending = self.pending.get_or_insert_with(|| {
                let (answer, answered) = sync_channel(1);
                signal::submit(Box::new(move || {
                    if let Some(text) = process::state().and_then(|state| state.metrics()) {
                        let _ = answer.try_send((Instant::now(), text));
                    }
                }));
                answered
            });
            match pending.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((made, text)) => {
                    self.pending = None;
                    self.text = Some((made, text.into()));
                }
                Err(RecvTimeoutError::Timeout) => return None,
                // The run is over.
                Err(RecvTimeoutError::Disconnected) => {
                    self.pending = None;
                    return None;
                }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Asking,
    Answering,
    /// Everything is sent; closed when the other side has hung up, so that it gets to read what was sent.
    Lingering,
    Over,
}

/// One who asks.
struct Connection {
    stream: TcpStream,
    stage: Stage,
    /// By when this stage must be over.
    until: Instant,
    input: Vec<u8>,
    output: Vec<u8>,
    sent: usize,
}

impl Connection {
    fn watch(&self) -> libc::pollfd {
        let answering = self.stage == Stage::Answering;
        descriptors::watch(self.stream.as_raw_fd(), if answering { libc::POLLOUT } else { libc::POLLIN })
    }

    /// Receives and sends what can be without waiting.
    fn go_on(&mut self, source: &mut Source, here_only: bool) {
        if self.stage == Stage::Asking {
            self.receive(source, here_only);
        }
        if self.stage == Stage::Answering {
            self.send();
        }
        if self.stage == Stage::Lingering {
            self.hear_out();
        }
    }

    fn receive(&mut self, source: &mut Source, here_only: bool) {
        let mut chunk = [0u8; 2048];
        match self.stream.read(&mut chunk) {
            Ok(0) => self.stage = Stage::Over,
            Ok(length) => self.input.extend_from_slice(&chunk[..length]),
            Err(error) if descriptors::waits(&error) => return,
            Err(_) => self.stage = Stage::Over,
        }
        if self.stage == Stage::Over {
            return;
        }
        debug_assert!(self.input.len() <= LONGEST_HEAD + chunk.len());
        self.output = match http::read(&self.input, here_only) {
            Read::More => return,
            Read::Refused(why, body) => http::refusal(why, body),
            Read::Metrics(body) => match source.get() {
                Some(text) => http::metrics(&text, body),
                None => http::refusal(Refusal::Unavailable, body),
            },
        };
        self.input = Vec::new();
        self.stage = Stage::Answering;
        self.until = Instant::now() + ANSWERING;
    }

    fn send(&mut self) {
        while self.sent < self.output.len() {
            match self.stream.write(&self.output[self.sent..]) {
                Ok(sent) if sent > 0 => self.sent += sent,
                Err(error) if descriptors::waits(&error) => return,
                _ => {
                    self.stage = Stage::Over;
                    return;
                }
            }
        }
        self.output = Vec::new();
        self.stage =
            if self.stream.shutdown(Shutdown::Write).is_ok() { Stage::Lingering } else { Stage::Over };
        self.until = Instant::now() + LINGERING;
    }

    /// Takes in what still comes, for as long as the stage may last.
    fn hear_out(&mut self) {
        let mut chunk = [0u8; 2048];
        match self.stream.read(&mut chunk) {
            Ok(length) if length > 0 => {}
            Err(error) if descriptors::waits(&error) => {}
            _ => self.stage = Stage::Over,
        }
    }
}
