//! How strandline gets into a process.
pub mod torch;
