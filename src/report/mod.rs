//! One report model, one file per form.
//!
//! | file | job |
//! |---|---|
//! | [`model`] | the model, and the JSON contract |
//! | [`view`] | what is copied of a device while it is locked |
//! | [`describe`] | a finding in words and numbers |
//! | [`assemble`] | the whole report |
//! | [`json`], [`text`] | forms |
//! | [`live`] | a run at this moment, in short |
//! | [`diff`], [`merge`] | two reports compared; all ranks put together |
//! | [`units`] | numbers as people read them |
//! | [`write`](mod@write) | files |
//!
//! Must not know: where events come from.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod describe;
pub mod diff;
pub mod json;
pub mod live;
pub mod merge;
pub mod model;
pub mod text;
pub mod units;
pub mod view;
pub mod write;

pub use assemble::{DevicePart, assemble};
pub use model::{Report, Run, Verdict};
pub use view::DeviceView;
