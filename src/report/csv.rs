//! The series of every device as CSV: a line for each point, bytes as whole numbers.
//!
//! Must not know: files.
//! Invariant: every line has as many fields as the first; the epoch is empty where it is not known.

use super::model::Report;
use std::fmt::Write;

/// The names of the columns.
pub const HEAD: &str = "device,step,epoch,allocated_bytes,reserved_bytes,active_bytes,peak_bytes";

/// The table.
pub fn series(report: &Report) -> String {
    let mut out = format!("{HEAD}\n");
    for device in &report.devices {
        for point in &device.series {
            let began = report.run.epoch_starts.iter().rev().find(|(_, step)| *step <= point.step);
            let epoch = began.map_or_else(String::new, |(epoch, _)| epoch.to_string());
            let _ = writeln!(
                out,
                "{},{},{epoch},{},{},{},{}",
                device.device, point.step, point.allocated, point.reserved, point.active, point.peak
            );
        }
    }
    out
}
