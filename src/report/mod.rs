//! One report model, one file per form.
//!
//! | file | job |
//! |---|---|
//! | [`model`] | the model, and the JSON contract |
//! | [`view`] | what is copied of a device while it is locked |
//! | [`describe`] | a finding in words and numbers |
//! | [`device_notes`] | what a device's own numbers say is no leak |
//! | [`assemble`] | the whole report |
//! | [`focus`] | what of a report concerns one library |
//! | [`json`], [`text`], [`tables`] (of the text) | forms |
//! | [`units`] | numbers as people read them |
//! | [`write`](mod@write) | files |
//!
//! Must not know: where events come from.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod describe;
pub mod device_notes;
pub mod focus;
pub mod json;
pub mod model;
pub mod tables;
pub mod text;
pub mod units;
pub mod view;
pub mod write;

pub use assemble::{DevicePart, assemble};
pub use model::{Report, Run, Verdict};
pub use view::DeviceView;
