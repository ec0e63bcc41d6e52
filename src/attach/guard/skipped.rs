//! What a GPU's guard did not look at, and why: said at the end of the run, so that silence is not taken for a proof.

use crate::attach::outcome;
use crate::report::units;

/// Blocks that were not looked at, by the reason.
#[derive(Default)]
pub struct Skipped {
    /// Handed out while a graph was captured or a pool recorded to: no patterns.
    pub captured: u64,
    /// Handed out while its stream had too many launches in flight: no patterns.
    pub full: u64,
    /// Handed out for each thread's own default stream, which no other thread can name: no patterns.
    pub per_thread: u64,
    /// Too large to be held back: no poison.
    pub large: u64,
    /// Memory was wanted, or all slots were lent.
    pub busy: u64,
    /// Of streams that are gone, that capture, or that were not done in time at the end of the run.
    pub late: u64,
}

impl Skipped {
    /// In words, if there are any; `most` bytes are the largest block that is held back.
    pub fn text(&self, most: u64) -> Option<String> {
        let large = format!("of more than {} not held back once freed", outcome::torch_size(most));
        let parts = [
            (self.captured, "had no patterns, being allocated while a graph was captured or a pool in use"),
            (self.full, "had no patterns, being allocated while much waited on the stream"),
            (self.per_thread, "of per-thread default streams had no patterns"),
            (self.large, &*large),
            (self.busy, "not looked at for want of memory or of room for results"),
            (self.late, "not looked at, the stream being gone, captured or not done in time"),
        ];
        let parts = parts.iter().filter(|(blocks, _)| *blocks > 0);
        let said: Vec<String> =
            parts.map(|(blocks, why)| format!("{} {why}", units::plural(*blocks, "block"))).collect();
        (!said.is_empty()).then(|| said.join("; "))
    }
}
