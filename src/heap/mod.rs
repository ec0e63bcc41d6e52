//! The caching allocator.
#![forbid(unsafe_code)]
