//! The process's own memory over the run, without what tensors have: growth there is no tensor's.
//!
//! Must not know: how memory is read, devices.
//! Invariant: bounded; a note never accuses.

use super::history::Thinned;
use super::notes::Note;
use super::{pattern, trend};

/// Points of the series.
const POINTS: usize = 48;
const LEAST_POINTS: usize = 8;
/// Growth that is worth a word, and its share of the memory.
const MATTERS: u64 = 64 << 20;
const SHARE: u64 = 20;

/// Resident bytes of the process at some step boundaries, less what the tensors' heap has reserved there.
#[derive(Debug, Default)]
pub struct HostMemory {
    series: Thinned<u64, POINTS>,
}

impl HostMemory {
    /// `resident` bytes at the end of `step`, of which `tensors` are reserved for tensors.
    pub fn push(&mut self, step: u32, resident: u64, tensors: u64) {
        self.series.push(step, resident.saturating_sub(tensors));
    }

    /// Says so when the process grows steadily and its tensors are not why.
    pub fn note(&self) -> Option<Note> {
        let points: Vec<&(u32, u64)> =
            self.series.points().iter().filter(|p| p.0 >= pattern::WARM_UP).collect();
        let (first, last) = (points.first()?, points.last()?);
        let rose = last.1.saturating_sub(first.1);
        let levels: Vec<f64> = points.iter().map(|point| point.1 as f64).collect();
        let (tau, z) = trend::mann_kendall(&levels);
        let lately = last.1.saturating_sub(points[points.len() * 2 / 3].1);
        let grows = rose >= MATTERS.max(first.1 / SHARE) && tau > 0.7 && z > 2.5 && lately * 6 >= rose;
        (points.len() >= LEAST_POINTS && grows).then(|| Note {
            kind: "host-memory",
            what: format!(
                "the process's own memory grew by {} MiB from step {} to step {}, besides its tensors",
                rose >> 20,
                first.0,
                last.0
            ),
            because: "no tensor has it: Python objects, graph nodes, data loading or libraries; a profiler of host \
                      memory (memray) follows those"
                .to_owned(),
            bytes: rose,
            ..Note::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(of: impl Fn(u32) -> u64) -> Option<Note> {
        let mut memory = HostMemory::default();
        (0..20).for_each(|n| memory.push(n * 32, 1 << 30 | of(n), 1 << 29));
        memory.note()
    }

    #[test]
    fn steady_growth_is_said_and_a_plateau_is_not() {
        let note = run(|n| u64::from(n) * (16 << 20)).unwrap();
        assert!(note.what.contains("288 MiB from step 32 to step 608"), "{}", note.what);
        assert_eq!(run(|n| u64::from(n.min(3)) * (64 << 20)), None);
        assert_eq!(run(|n| u64::from(n % 2) * (128 << 20)), None);
        assert_eq!(run(|n| u64::from(n) << 10), None);
    }
}
