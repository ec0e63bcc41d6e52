//! Why a recording could not be read, in words for the person who gave the file.
//!
//! Must not know: which format was being read.
//! Invariant: a message says where in the (uncompressed) file, unless the file as a whole is foreign.

use std::fmt;
use std::io;

/// Why a recording could not be read.
#[derive(Debug)]
pub enum Error {
    /// The operating system or the decompressor gave up.
    Io { offset: u64, error: io::Error },
    /// The file ends in the middle of something.
    Cut { offset: u64, within: &'static str },
    /// The bytes at `offset` are not what they must be.
    Corrupt { offset: u64, what: String },
    /// The file is something else.
    Foreign(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { offset, error } => write!(f, "cannot be read beyond byte {offset}: {error}"),
            Error::Cut { offset, within } => {
                write!(f, "is cut short: it ends at byte {offset}, in the middle of {within}")
            }
            Error::Corrupt { offset, what } => write!(f, "is corrupt at byte {offset}: {what}"),
            Error::Foreign(what) => write!(f, "is not a snapshot: {what}"),
        }
    }
}

impl std::error::Error for Error {}

/// Shorthand for what every reader returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;
