//! Handles by which another process opens a block's memory.
//!
//! Must not know: how memory is exported or mapped. A handle is text that torch carries to the other
//! process; it names this process, the device, and a descriptor and size for each piece of memory. The
//! other process fetches the descriptors from [`server`]. Invariant: pieces that are opened several times
//! are mapped once, and unmapped when the last user has closed them.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::{Refusal, Service};
use crate::driver::Address;

mod server;

/// A block's memory, ready to be opened by another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shared {
    pub device: i32,
    /// Where the block begins in the first piece. Bytes.
    pub offset: u64,
    /// Each piece's descriptor in this process (it stays open as long as the block lives) and size.
    pub pieces: Vec<(i32, u64)>,
}

/// What a handle says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Handle {
    /// Where the sender's descriptors are served.
    server: String,
    device: i32,
    pieces: Vec<(i32, u64)>,
}

const PREFIX: &str = "strandline1";

impl Handle {
    fn to_text(&self) -> String {
        let pieces: Vec<String> = self.pieces.iter().map(|(file, size)| format!("{file}:{size}")).collect();
        format!("{PREFIX};{};{};{}", self.server, self.device, pieces.join(","))
    }

    fn parse(text: &[u8]) -> Option<Handle> {
        let mut parts = std::str::from_utf8(text).ok()?.split(';');
        if parts.next()? != PREFIX {
            return None;
        }
        let server = parts.next()?.to_owned();
        let device = parts.next()?.parse().ok()?;
        let pieces = parts
            .next()?
            .split(',')
            .map(|piece| {
                let (file, size) = piece.split_once(':')?;
                Some((file.parse().ok()?, size.parse().ok()?))
            })
            .collect::<Option<Vec<_>>>()?;
        (parts.next().is_none() && !pieces.is_empty()).then_some(Handle { server, device, pieces })
    }
}

/// The handle of shared memory; starts serving descriptors.
pub fn encode(shared: &Shared) -> Result<Vec<u8>, Refusal> {
    let server = server::name().map_err(|error| {
        Refusal::Failed(format!("strandline cannot share a CUDA tensor with another process: {error}."))
    })?;
    for (file, _) in &shared.pieces {
        server::offer(*file);
    }
    let handle = Handle { server, device: shared.device, pieces: shared.pieces.clone() };
    Ok(handle.to_text().into_bytes())
}

/// A handle's text → where its memory is mapped here, and how many use it.
type Opened = HashMap<Vec<u8>, (Address, u32)>;

/// Memory of other processes that is mapped here.
static OPEN: Mutex<Option<Opened>> = Mutex::new(None);

/// Opens the memory that a handle names: its start in this process.
pub fn open(service: &dyn Service, text: &[u8]) -> Result<Address, Refusal> {
    let mut open = OPEN.lock();
    let open = open.get_or_insert_with(HashMap::new);
    if let Some((at, users)) = open.get_mut(text) {
        *users += 1;
        return Ok(*at);
    }
    let Some(handle) = Handle::parse(text) else {
        return Err(Refusal::Failed(
            "This CUDA tensor was shared by a process that does not run under strandline's heap; \
             start both under it, or both with --mode observer."
                .into(),
        ));
    };
    let files = server::fetch(&handle.server, &handle.pieces.iter().map(|piece| piece.0).collect::<Vec<_>>())
        .map_err(|error| Refusal::Failed(format!("strandline cannot open a shared CUDA tensor: {error}.")))?;
    let pieces: Vec<(i32, u64)> =
        files.iter().zip(&handle.pieces).map(|(file, (_, size))| (file.number(), *size)).collect();
    let at = service.open_shared(handle.device, &pieces)?;
    open.insert(text.to_vec(), (at, 1));
    Ok(at)
}

/// One user of opened memory is gone.
pub fn close(service: &dyn Service, at: Address) {
    let mut open = OPEN.lock();
    let Some(open) = open.as_mut() else { return };
    let Some(text) = open.iter().find(|(_, (there, _))| *there == at).map(|(text, _)| text.clone()) else {
        return;
    };
    let Some((_, users)) = open.get_mut(&text) else { return };
    *users -= 1;
    if *users == 0 {
        open.remove(&text);
        service.close_shared(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn handles_survive_the_journey() {
        let handle = Handle { server: "x-1".into(), device: 3, pieces: vec![(7, 2 << 20), (9, 64 << 20)] };
        assert_eq!(Handle::parse(handle.to_text().as_bytes()), Some(handle));
    }

    #[test]
    fn foreign_handles_are_refused() {
        for text in [
            "",
            "strandline1",
            "strandline1;s;0;",
            "strandline1;s;0;1:2;x",
            "other;s;0;1:2",
            "strandline1;s;0;1",
        ] {
            assert_eq!(Handle::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Handle::parse(&[0xff; 64]), None);
    }

    #[test]
    fn descriptors_are_fetched_from_the_server() {
        let file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut &file, b"tide").unwrap();
        let name = server::name().unwrap();
        assert!(server::fetch(&name, &[file.as_raw_fd()]).is_err(), "only what was offered is served");
        server::offer(file.as_raw_fd());
        let fetched = server::fetch(&name, &[file.as_raw_fd(), file.as_raw_fd()]).unwrap();
        assert_eq!(fetched.len(), 2);
        let mut text = [0u8; 4];
        // SAFETY: reads four bytes from an open descriptor into room for four.
        let read = unsafe { libc::pread(fetched[1].number(), text.as_mut_ptr().cast(), 4, 0) };
        assert_eq!((read, &text), (4, b"tide"));
        server::withdraw(file.as_raw_fd());
        assert!(server::fetch(&name, &[file.as_raw_fd()]).is_err(), "what is closed is no longer served");
    }
}
