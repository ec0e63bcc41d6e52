//! One report model, one file per form.
//!
//! | file | job |
//! |---|---|
//! | [`model`] | the model, and the JSON contract |
//! | [`view`] | what is copied of a device while it is locked |
//! | [`describe`] | a finding in words and numbers |
//! | [`device_notes`] | what a device's own numbers say is no leak |
//! | [`assemble`] | the whole report |
//! | `summing` | the verdict and its one line |
//! | [`focus`] | what of a report concerns one library |
//! | [`segments`] | the segment map, bounded |
//! | [`json`], [`text`], [`tables`] (of the text), [`html`], [`openmetrics`] | forms that the library writes |
//! | [`folded`], [`flamegraph`], [`speedscope`], [`pprof`], [`memory_viz`], [`csv`] | forms that only the command writes |
//! | [`live`] | a run at this moment, in short |
//! | [`diff`], [`merge`] | two reports compared; all ranks put together |
//! | [`units`] | numbers as people read them |
//! | [`write`](mod@write) | files |
//!
//! Must not know: where events come from.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod csv;
pub mod describe;
pub mod device_notes;
pub mod diff;
pub mod flamegraph;
pub mod focus;
pub mod folded;
pub mod html;
pub mod json;
pub mod live;
pub mod memory_viz;
pub mod merge;
pub mod model;
pub mod openmetrics;
pub mod pprof;
pub mod segments;
pub mod speedscope;
mod summing;
pub mod tables;
pub mod text;
pub mod units;
pub mod view;
pub mod write;

pub use assemble::{DevicePart, assemble};
pub use model::{Report, Run, Verdict};
pub use view::DeviceView;
