//! The control socket: how another process of the same user asks a running job for a report, or watches it.
//!
//! | file | job |
//! |---|---|
//! | `control.rs` | the protocol, and where sockets lie |
//! | [`server`] | the thread in the job that listens |
//! | [`live`] | what a job answers to who watches it |
//! | [`client`] | the asking side; used by the command only |
//!
//! One request is one line of JSON, and so is its reply; a connection may carry several, one after the other.
//! Invariants: a socket lies in a folder of mode 0700 that belongs to the job's user; who asks is the same
//! user or root; no request makes the listening thread wait for Python.

pub mod client;
pub mod live;
pub mod server;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The version of the protocol.
pub const VERSION: u32 = 1;
/// The longest request, in bytes.
pub const LONGEST_REQUEST: usize = 8192;
/// The most sites that [`Ask::Live`] answers with, and cells of its map.
pub const MOST_SITES: usize = 200;
pub const MOST_CELLS: usize = 1024;

/// What may be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "lowercase")]
pub enum Ask {
    /// Who are you?
    Hello,
    /// Write a report now, into `folder` (an absolute path) or the run's own.
    Dump {
        #[serde(default)]
        folder: Option<PathBuf>,
    },
    /// The state of the run as it is now.
    Live {
        #[serde(default)]
        sites: usize,
        #[serde(default)]
        cells: usize,
    },
}

#[derive(Serialize)]
struct Request<'a> {
    strandline: u32,
    #[serde(flatten)]
    ask: &'a Ask,
}

#[derive(Debug, Serialize, Deserialize)]
struct Reply {
    strandline: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ok: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A request as it is sent, without the end of the line.
pub fn request(ask: &Ask) -> String {
    serde_json::to_string(&Request { strandline: VERSION, ask }).unwrap_or_default()
}

/// A request as it was received.
pub fn read_request(line: &[u8]) -> Result<Ask, String> {
    let value: Value =
        serde_json::from_slice(line).map_err(|error| format!("a request is one line of JSON: {error}"))?;
    match value.get("strandline").and_then(Value::as_u64) {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => {
            return Err(format!(
                "the job speaks version {VERSION} of the protocol, not {version}; \
                 use the strandline that the job was started with"
            ));
        }
        None => return Err("a request has the key \"strandline\", the version of the protocol".to_owned()),
    }
    let ask: Ask = serde_json::from_value(value).map_err(|error| format!("not understood: {error}"))?;
    match &ask {
        Ask::Dump { folder: Some(folder) } if !folder.is_absolute() => {
            Err(format!("folder must be an absolute path, not {}", folder.display()))
        }
        _ => Ok(ask),
    }
}

/// A reply as it is sent, without the end of the line.
pub fn reply(answer: Result<Value, String>) -> String {
    let (ok, error) = match answer {
        Ok(value) => (Some(value), None),
        Err(error) => (None, Some(error)),
    };
    serde_json::to_string(&Reply { strandline: VERSION, ok, error }).unwrap_or_default()
}

/// A reply as it was received.
pub fn read_reply(line: &str) -> Result<Value, String> {
    let reply: Reply = serde_json::from_str(line).map_err(|error| {
        format!("the job's answer is not understood ({error}); is it another strandline?")
    })?;
    match (reply.ok, reply.error) {
        (_, Some(error)) => Err(error),
        (Some(value), None) => Ok(value),
        (None, None) => Err("the job's answer is empty".to_owned()),
    }
}

/// The folders in which a user's sockets may lie, the preferred one first. `runtime` is XDG_RUNTIME_DIR.
pub fn folders(uid: u32, runtime: Option<&OsStr>) -> Vec<PathBuf> {
    let runtime = runtime.map(Path::new).filter(|path| path.is_absolute() && path.is_dir());
    let own = runtime.map(|path| path.join("strandline"));
    own.into_iter().chain([PathBuf::from(format!("/tmp/strandline-{uid}"))]).collect()
}

/// The name of a process's socket in its folder. `pid` is the number that the process itself knows.
pub fn socket_name(pid: u32) -> String {
    format!("{pid}.sock")
}

/// The user and process at the other end of a socket.
pub(super) fn peer(socket: &std::os::unix::net::UnixStream) -> std::io::Result<libc::ucred> {
    use std::os::fd::AsRawFd;
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the option fills in one `ucred`, whose size is given.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &mut length,
        )
    };
    if rc == 0 { Ok(who) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_read_back() {
        for ask in [
            Ask::Hello,
            Ask::Dump { folder: None },
            Ask::Dump { folder: Some("/a b/c".into()) },
            Ask::Live { sites: 3, cells: 9 },
        ] {
            assert_eq!(read_request(request(&ask).as_bytes()), Ok(ask));
        }
    }

    #[test]
    fn what_is_no_request_is_refused_with_its_reason() {
        for (line, part) in [
            ("", "one line of JSON"),
            ("{\"ask\":\"hello\"}", "the key \"strandline\""),
            ("{\"strandline\":2,\"ask\":\"hello\"}", "version 1 of the protocol, not 2"),
            ("{\"strandline\":1,\"ask\":\"format\"}", "not understood"),
            ("{\"strandline\":1,\"ask\":\"dump\",\"folder\":\"here\"}", "absolute"),
            ("{\"strandline\":1}", "not understood"),
            ("[1,2]", "the key"),
        ] {
            let said = read_request(line.as_bytes()).unwrap_err();
            assert!(said.contains(part), "{line}: {said}");
        }
    }

    #[test]
    fn replies_read_back() {
        assert_eq!(read_reply(&reply(Ok(Value::from(7)))), Ok(Value::from(7)));
        assert_eq!(read_reply(&reply(Err("no".into()))), Err("no".into()));
        assert!(read_reply("x").is_err());
    }

    #[test]
    fn a_runtime_folder_is_taken_only_if_it_is_one() {
        assert_eq!(folders(7, None), [PathBuf::from("/tmp/strandline-7")]);
        assert_eq!(folders(7, Some(OsStr::new("relative"))).len(), 1);
        assert_eq!(folders(7, Some(OsStr::new("/nowhere/at/all"))).len(), 1);
        assert_eq!(
            folders(7, Some(OsStr::new("/"))),
            [PathBuf::from("/strandline"), "/tmp/strandline-7".into()]
        );
    }
}
