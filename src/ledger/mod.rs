//! Leak accounting.
#![forbid(unsafe_code)]
