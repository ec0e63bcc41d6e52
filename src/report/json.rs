//! A report as JSON, written and read back.
//!
//! Must not know: where files lie.
//! Invariant: what is written reads back equal; a text that is no report is refused with its reason.

use super::model::{Report, SCHEMA};
use std::fmt;
use std::path::Path;

pub fn to_string(report: &Report) -> String {
    serde_json::to_string_pretty(report).unwrap_or_else(|_| "{}".to_owned())
}

/// Why a file was not read as a report.
#[derive(Debug)]
pub struct Unreadable {
    path: String,
    why: Why,
}

#[derive(Debug)]
enum Why {
    Io(std::io::Error),
    Truncated,
    Foreign(String),
    Newer(u64),
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let path = &self.path;
        match &self.why {
            Why::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
                write!(f, "{path}: no such file; reports lie in strandline-out/rank<R>-<pid>/report.json")
            }
            Why::Io(error) if error.kind() == std::io::ErrorKind::IsADirectory => {
                write!(f, "{path}: is a folder; give the report.json in it")
            }
            Why::Io(error) => write!(f, "{path}: cannot be read ({error}); check its permissions"),
            Why::Truncated => write!(
                f,
                "{path}: ends in the middle, so its writer was interrupted or the disk was full; let the job write it again (strandline dump PID) or rerun it"
            ),
            Why::Foreign(what) => {
                write!(
                    f,
                    "{path}: is not a strandline report ({what}); give the report.json that a run wrote"
                )
            }
            Why::Newer(schema) => write!(
                f,
                "{path}: has schema {schema}, this program reads {SCHEMA}; use the strandline that wrote it, or a newer one"
            ),
        }
    }
}

impl std::error::Error for Unreadable {}

pub fn read(path: &Path) -> Result<Report, Unreadable> {
    match std::fs::read(path) {
        Ok(bytes) => from_bytes(path, bytes),
        Err(error) => Err(Unreadable { path: path.display().to_string(), why: Why::Io(error) }),
    }
}

/// The report in `bytes`, which were read from `path`.
pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Report, Unreadable> {
    let text = String::from_utf8(bytes).map_err(|_| Why::Foreign("not text".to_owned()));
    text.and_then(|text| parse(&text)).map_err(|why| Unreadable { path: path.display().to_string(), why })
}

fn parse(text: &str) -> Result<Report, Why> {
    if text.trim().is_empty() {
        return Err(Why::Truncated);
    }
    let value: serde_json::Value = serde_json::from_str(text)
        .map_err(|error| if error.is_eof() { Why::Truncated } else { Why::Foreign(error.to_string()) })?;
    match value.get("schema").and_then(serde_json::Value::as_u64) {
        None => return Err(Why::Foreign("no \"schema\"".to_owned())),
        Some(schema) if schema > u64::from(SCHEMA) => return Err(Why::Newer(schema)),
        Some(_) => {}
    }
    serde_json::from_value(value).map_err(|error| Why::Foreign(error.to_string()))
}
