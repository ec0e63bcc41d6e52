//! What kind of file is this? By its first bytes, never by its name.
//!
//! Must not know: what a recording is used for.
//! Invariant: a foreign file is named for what it is, as far as its first bytes tell.

use super::error::{Error, Result};
use super::input::Input;
use super::recording::Recording;
use super::{snapshot, trace};
use flate2::read::MultiGzDecoder;
use std::io::Read;

const GZIP: &[u8] = &[0x1f, 0x8b];
/// Kinds of files that are taken for recordings, by their first bytes.
const FOREIGN: &[(&[u8], &str)] = &[
    (b"PK\x03\x04", "it is a zip archive (a torch.save checkpoint?), not a memory snapshot"),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd; decompress it first (zstd -d)"),
    (b"\xfd7zXZ", "it is compressed by xz; decompress it first (xz -d)"),
    (b"BZh", "it is compressed by bzip2; decompress it first (bzip2 -d)"),
    (b"\x7fELF", "it is a program"),
    (b"{", "it is JSON (a profiler's trace?), not a memory snapshot"),
    (b"[", "it is JSON (a list), not a memory snapshot"),
    (b"<", "it is HTML (a memory_viz page?); give the pickle that it was made from"),
];

/// Reads a recording: a torch snapshot or a strandline trace, plain or compressed by gzip.
pub fn read(source: impl Read) -> Result<Recording> {
    let mut outer = Input::new(source);
    if outer.peek(2)? == GZIP {
        let mut inner = Input::new(MultiGzDecoder::new(outer));
        return read_plain(&mut inner);
    }
    read_plain(&mut outer)
}

fn read_plain<R: Read>(input: &mut Input<R>) -> Result<Recording> {
    let first = input.peek(8)?;
    if first.is_empty() {
        return Err(Error::Foreign("it is empty".to_owned()));
    }
    if first.starts_with(GZIP) {
        return Err(Error::Foreign("it is compressed twice".to_owned()));
    }
    if let Some((_, what)) = FOREIGN.iter().find(|(magic, _)| first.starts_with(magic)) {
        return Err(Error::Foreign((*what).to_owned()));
    }
    if first.starts_with(&trace::MAGIC[..7]) {
        return trace::read(input);
    }
    snapshot::read(input)
}
