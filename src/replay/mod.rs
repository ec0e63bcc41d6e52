//! Recorded runs, read and replayed: what would this job have needed under another allocator, and did it leak?
//!
//! | file | job |
//! |---|---|
//! | [`input`], [`error`] | bytes with their place in the file; what is said when they are wrong |
//! | [`objects`], [`pickle`] | a pickle of plain data, read without executing anything |
//! | [`collect`], [`snapshot`] | a torch snapshot becomes a [`recording`] |
//! | [`recording`] | the model: events, stacks, segments, annotations |
//! | [`start`], [`recorded`] | what was there before the first event; the figures of the recording allocator |
//! | [`clock`], [`period`] | where steps end |
//! | [`subject`], [`price`] | the allocator a recording is replayed through; what its driver calls cost |
//! | [`play`], [`run`] | one device, and the whole recording, replayed and judged |
//! | [`symbols`] | stacks as ledger and report ask for them |
//! | [`trace`] | strandline's own form of a recording |
//! | [`summary`] | the outcome as JSON and as text |
//! | [`file`] | what kind of file is this? |
//!
//! Nothing here allocates device memory or knows a process other than by its file.
#![forbid(unsafe_code)]

pub mod clock;
pub mod collect;
pub mod error;
pub mod file;
pub mod input;
pub mod objects;
pub mod period;
pub mod pickle;
pub mod play;
pub mod price;
pub mod recorded;
pub mod recording;
pub mod run;
pub mod snapshot;
pub mod start;
pub mod subject;
pub mod summary;
pub mod symbols;
pub mod trace;
