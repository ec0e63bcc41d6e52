//! strandline: a CUDA caching allocator that knows, for every live block, where it was allocated, in
//! which step, epoch and phase it was born, and who keeps it alive.
//!
//! The map of the house. Imports run downwards only:
//!
//! ```text
//! bin ─▶ report ─▶ ledger ─▶ stacks          (what is known)
//! attach ─▶ heap ─▶ driver                   (what is done)
//! attach ─▶ ledger
//! replay ─▶ heap, ledger
//! ```
//!
//! | room | job |
//! |---|---|
//! | [`driver`] | the seam: what the heap asks of a device |
//! | [`heap`] | the caching allocator |
//! | [`ledger`] | leak accounting: clock, sites, trends, findings |
//! | [`stacks`] | call stacks: capture, intern, symbolize |
//! | [`report`] | one report model, one file per form |
//! | [`replay`] | recorded traces and torch snapshots, read and replayed |
//! | [`attach`] | how all of this gets into a stranger's process |
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod attach;
#[allow(unsafe_code)]
pub mod driver;
pub mod heap;
pub mod ledger;
pub mod replay;
pub mod report;
#[allow(unsafe_code)]
pub mod stacks;
