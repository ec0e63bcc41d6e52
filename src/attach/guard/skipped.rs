//! What a GPU's guard did not look at, and why: said at the end of the run, so that silence is not taken for a proof.

use crate::attach::outcome;

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

fn blocks(n: u64) -> String {
    format!("{n} block{}", if n == 1 { "" } else { "s" })
}

impl Skipped {
    /// In words, if there are any; `most` bytes are the largest block that is held back.
    pub fn text(&self, most: u64) -> Option<String> {
        let mut parts = Vec::new();
        if self.captured > 0 {
            parts.push(format!(
                "{} had no patterns, being allocated while a graph was captured or a pool in use",
                blocks(self.captured)
            ));
        }
        if self.full > 0 {
            parts.push(format!(
                "{} had no patterns, being allocated while much waited on the stream",
                blocks(self.full)
            ));
        }
        if self.per_thread > 0 {
            parts.push(format!("{} of per-thread default streams had no patterns", blocks(self.per_thread)));
        }
        if self.large > 0 {
            let most = outcome::torch_size(most);
            parts.push(format!("{} of more than {most} not held back once freed", blocks(self.large)));
        }
        if self.busy > 0 {
            parts.push(format!(
                "{} not looked at for want of memory or of room for results",
                blocks(self.busy)
            ));
        }
        if self.late > 0 {
            parts.push(format!(
                "{} not looked at, the stream being gone, captured or not done in time",
                blocks(self.late)
            ));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}
