//! Fragmentation: reserved memory grows while what is in use does not.
//!
//! Must not know: sites, segments, holders.
//! Invariant: growth that follows a growing peak (larger inputs) is none.

use super::device::DeviceBooks;
use super::trend;

/// Growth of the peak that makes growth of reserved memory a matter of the input.
const INPUT_GROWS: f64 = 1.25;
/// Reserved memory must outgrow what is in use by this much before it matters.
const MATTERS: u64 = 64 << 20;
const LEAST_BOUNDARIES: u32 = 40;

/// How reserved memory grew.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fragmentation {
    pub reserved: u64,
    pub allocated: u64,
    /// The highest bytes in use within recent steps.
    pub in_use: u64,
    pub bytes_per_step: f64,
    pub since: u32,
    pub tau: f64,
    pub site: Option<u32>,
}

/// Looks at the device's series.
pub fn recognise(books: &DeviceBooks) -> Option<Fragmentation> {
    if books.boundaries() < LEAST_BOUNDARIES {
        return None;
    }
    let mut points = books.series().to_vec();
    let last = *books.last_point()?;
    if points.last().is_some_and(|point| point.0 < last.0) {
        points.push(last);
    }
    let recent = &points[points.len() / 3..];
    let (first, last) = (recent.first()?, recent.last()?);
    let rose = last.1.reserved.saturating_sub(first.1.reserved);
    let in_use = |range: &[(u32, super::device::DevicePoint)]| {
        let mut peaks: Vec<f64> = range.iter().map(|point| point.1.peak as f64).collect();
        trend::median(&mut peaks).unwrap_or(0.0)
    };
    let quarter = (recent.len() / 4).max(1);
    let used_before = in_use(&recent[..quarter]);
    let used_now = in_use(&recent[recent.len() - quarter..]);
    let idle: Vec<f64> = recent.iter().map(|p| p.1.reserved as f64 - p.1.peak as f64).collect();
    let (tau, z) = trend::mann_kendall(&idle);
    let lately = last.1.reserved.saturating_sub(recent[recent.len() * 2 / 3].1.reserved);
    let line: Vec<(f64, f64)> =
        recent.iter().zip(&idle).map(|(point, idle)| (f64::from(point.0), *idle)).collect();
    let slope = trend::theil_sen(&line)?;
    let grows = rose >= MATTERS.max(last.1.reserved / 10) && lately * 6 >= rose && tau > 0.6 && z > 3.0;
    let apart = used_now - used_before < 0.25 * rose as f64
        && used_now < INPUT_GROWS * used_before
        && last.1.reserved as f64 > 1.5 * used_now;
    (grows && apart && slope > 0.0).then_some(Fragmentation {
        reserved: last.1.reserved,
        allocated: last.1.allocated,
        in_use: used_now as u64,
        bytes_per_step: slope,
        since: first.0,
        tau,
        site: books.reserving_site(),
    })
}
