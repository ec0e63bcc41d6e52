//! How `strandline run --fail-on-leak` hears what became of the job, wherever reports can be written: each process
//! of the job says its verdict to a socket of the command.
//!
//! The socket is a datagram socket in the abstract namespace: it needs no file system, no descriptor in the job
//! and no privileges, and whoever speaks to it is not held up. Its name and a secret are in the job's environment;
//! what does not bring the secret is not heard. A job in a network namespace of its own is not heard either:
//! then its reports count.

use super::lineage;
use std::collections::HashMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

/// Names the socket and the secret to the job: `NAME:SECRET`.
pub const VARIABLE: &str = "STRANDLINE_VERDICT";
/// Said by the command to itself, so that its thread ends.
const END: &str = "end";
/// Tries, a hundredth of a second apart, while the command has not yet read what others said.
const TRIES: u32 = 200;

/// Tells the command that waits for this job what this process's verdict is, as of now. False if nobody waits.
pub fn tell(verdict: &str) -> bool {
    let Some((name, secret)) = place().and_then(|place| place.split_once(':')) else { return false };
    send(name, secret, &format!("{} {verdict}", lineage::own())).is_ok()
}

/// The value of [`VARIABLE`], as it was when the library was loaded: the verdict is told by threads that must not look
/// into the environment while others of the job change it.
fn place() -> Option<&'static str> {
    static PLACE: OnceLock<Option<String>> = OnceLock::new();
    PLACE.get_or_init(|| std::env::var(VARIABLE).ok()).as_deref()
}

extern "C" fn remember() {
    let _ = std::panic::catch_unwind(place);
}

// SAFETY: the loader calls the functions of this section with three arguments that `remember` ignores.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = remember;

fn send(name: &str, secret: &str, words: &str) -> std::io::Result<()> {
    let to = SocketAddr::from_abstract_name(name)?;
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    let mut tries = TRIES;
    loop {
        match socket.send_to_addr(format!("{secret} {words}").as_bytes(), &to) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && tries > 0 => {
                tries -= 1;
                std::thread::sleep(Duration::from_millis(10));
            }
            other => return other.map(drop),
        }
    }
}

/// The command's side.
pub struct Listener {
    name: String,
    secret: String,
    heard: JoinHandle<HashMap<String, String>>,
}

impl Listener {
    /// Begins to listen.
    pub fn start() -> std::io::Result<Listener> {
        let name = format!("strandline-{}-{:x}", std::process::id(), random()?);
        let secret = format!("{:032x}", random()?);
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        let expected = secret.clone();
        let heard = std::thread::Builder::new().spawn(move || listen(&socket, &expected))?;
        Ok(Listener { name, secret, heard })
    }

    /// The value of [`VARIABLE`] for the job.
    pub fn place(&self) -> String {
        format!("{}:{}", self.name, self.secret)
    }

    /// The last verdict of each process, by what it goes by (see `lineage`). Call it when the job is over.
    pub fn verdicts(self) -> HashMap<String, String> {
        // What the job has said lies before this in the socket's queue.
        match send(&self.name, &self.secret, END) {
            Ok(()) => self.heard.join().unwrap_or_default(),
            Err(_) => HashMap::new(),
        }
    }
}

fn listen(socket: &UnixDatagram, secret: &str) -> HashMap<String, String> {
    let mut verdicts = HashMap::new();
    let mut buffer = [0; 256];
    loop {
        let Ok(length) = socket.recv(&mut buffer) else {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let text = std::str::from_utf8(&buffer[..length]).unwrap_or_default();
        let Some(words) = text.strip_prefix(secret).map(str::trim_start) else { continue };
        if words == END {
            return verdicts;
        }
        if let Some((process, verdict)) = words.split_once(' ') {
            verdicts.insert(process.to_owned(), verdict.to_owned());
        }
    }
}

fn random() -> std::io::Result<u128> {
    use std::io::Read;
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u128::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_verdict_of_each_process_is_heard_and_strangers_are_not() {
        let listener = Listener::start().expect("a socket");
        let (name, secret) = (listener.name.clone(), listener.secret.clone());
        for words in ["7:1 leak", "8:1 clean", "7:1 clean", "9:1 leak", "9:2 clean", "nonsense"] {
            send(&name, &secret, words).expect("sent");
        }
        send(&name, "guessed", "11:1 leak").expect("sent");
        let several: Vec<_> = (0..100)
            .map(|n| {
                let (name, secret) = (name.clone(), secret.clone());
                std::thread::spawn(move || send(&name, &secret, &format!("{}:1 undecided", 100 + n)))
            })
            .collect();
        assert!(several.into_iter().all(|sent| sent.join().is_ok_and(|sent| sent.is_ok())));
        let heard = listener.verdicts();
        let of = |process| heard.get(process).map(String::as_str);
        assert_eq!((of("7:1"), of("8:1"), of("11:1")), (Some("clean"), Some("clean"), None));
        // A number that was used again is another process.
        assert_eq!((of("9:1"), of("9:2")), (Some("leak"), Some("clean")));
        assert_eq!(heard.len(), 104);
    }
}
