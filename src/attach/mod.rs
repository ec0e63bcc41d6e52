//! How strandline gets into a process.
