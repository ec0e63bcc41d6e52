//! Guard mode (`--guard`): writes outside of live blocks, writes to freed ones, and blocks freed twice.
//!
//! | file | job |
//! |---|---|
//! | `guard.rs` | what was found: said once, and written to guard.json |
//! | `guard/host.rs` | host memory, looked at by this process |
//! | `guard/device.rs` | one GPU's memory, looked at by kernels in the order of its streams |
//! | `guard/device/last.rs` | what it looks at when the run is over |
//! | `guard/checks.rs` | launches whose findings are not in yet |
//! | `guard/skipped.rs` | how many blocks a GPU's guard did not look at |
//! | `guard/gpus.rs` | the GPUs that are guarded, and what torch or C asks of them |
//!
//! Around each block lies a pattern, which is looked at when the block is freed and at the end of the run. A freed
//! block is filled with a poison (it reads as NaN in every floating type, as -1 in integers) and kept from being
//! handed out again until others have been freed after it; then the poison must be untouched.
//!
//! Must not know who allocates. Invariants: memory held back is bounded; the ledger counts a block's own size, and
//! counts it freed when it is; a fault is said once for each pair of stacks, and nothing of the job changes.

mod checks;
pub mod device;
pub mod gpus;
pub mod host;
mod skipped;

use super::process::Stacks;
use super::served::patience;
use super::{outcome, say};
use crate::driver::Address;
use crate::ledger::{Frame, Symbols};
use crate::stacks::StackId;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::HashSet;
use std::time::Duration;

const PATTERN: u8 = 0xA5;
const POISON: u8 = 0xFF;
/// Faults that are kept for the report.
const FAULTS: usize = 1000;

/// A block that was looked at: as its user knows it, and the stacks of its allocation and its free.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    at: Address,
    size: u64,
    born: u32,
    freed: u32,
}

/// What was done wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Wrong {
    Overflow,
    Underflow,
    UseAfterFree,
    FreedTwice,
}

/// Bytes that are not what they should be: the first, counted from the block's start, and how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    first: i64,
    count: u64,
}

/// A fault as it is written to guard.json.
#[derive(Debug, Serialize)]
struct Fault {
    what: Wrong,
    /// -1 is the host.
    device: i32,
    /// Bytes of the block, as requested.
    size: u64,
    /// The first byte that was changed, counted from the block's start.
    first: i64,
    /// Bytes that were changed (of the pattern, or of the block).
    changed: u64,
    /// The stack of the allocation, of the free, and of the second free; innermost frame first.
    allocated: Vec<Frame>,
    freed: Vec<Frame>,
    freed_again: Vec<Frame>,
}

/// Everything that was found.
#[derive(Debug, Default)]
pub struct Faults {
    said: Mutex<HashSet<(Wrong, u32, u32)>>,
    faults: Mutex<Vec<Fault>>,
}

impl Faults {
    /// Says a fault and keeps it for the report, if it is new. `again` is the stack of a second free.
    #[cold]
    pub fn add(&self, device: i32, what: Wrong, block: Block, changed: Changed, again: StackId) {
        if !self.said.lock().insert((what, block.born, block.freed)) {
            return;
        }
        let fault = Fault {
            what,
            device,
            size: block.size,
            first: changed.first,
            changed: changed.count,
            allocated: Stacks.frames(block.born),
            freed: Stacks.frames(block.freed),
            freed_again: Stacks.frames(again.0),
        };
        say(format_args!("{}", fault.text([block.born, block.freed, again.0])));
        let mut faults = self.faults.lock();
        if faults.len() < FAULTS {
            faults.push(fault);
        }
    }

    /// Whether nobody holds the locks for longer than `patience`.
    pub fn answers(&self, patience: Duration) -> bool {
        self.said.try_lock_for(patience).is_some() && self.faults.try_lock_for(patience).is_some()
    }

    /// How many were found.
    pub fn count(&self) -> u64 {
        self.said.lock().len() as u64
    }

    /// The faults as JSON, if there were any and they are to be had in time.
    pub fn to_json(&self) -> Option<String> {
        let faults = self.faults.try_lock_for(patience())?;
        if faults.is_empty() { None } else { serde_json::to_string_pretty(&*faults).ok() }
    }
}

impl Fault {
    fn text(&self, stacks: [u32; 3]) -> String {
        let changed = match self.changed {
            1 => "1 byte was".to_owned(),
            many => format!("{many} bytes were"),
        };
        let mut block = format!("a block of {}", outcome::torch_size(self.size));
        if self.device >= 0 {
            block += &format!(" on GPU {}", self.device);
        }
        let mut text = match self.what {
            Wrong::Overflow => {
                format!("OVERFLOW  {changed} written behind the end of {block}, from byte {} on", self.first)
            }
            Wrong::Underflow => format!(
                "UNDERFLOW  {changed} written before the start of {block}, from byte {} on",
                self.first
            ),
            Wrong::UseAfterFree => format!(
                "USE AFTER FREE  {changed} written in {block} after it was freed, from byte {} on",
                self.first
            ),
            Wrong::FreedTwice => format!("FREED TWICE  {block}"),
        };
        for (label, stack) in ["allocated at", "freed at", "freed again at"].into_iter().zip(stacks) {
            if let Some(frame) = Stacks.allocated_at(stack) {
                text += &format!("\n  {label:<16}{}:{} in {}", frame.file, frame.line, frame.function);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_that_are_not_to_be_had_are_left_out() {
        let faults = Faults::default();
        let fault = Fault {
            what: Wrong::Overflow,
            device: 0,
            size: 1,
            first: 1,
            changed: 1,
            allocated: Vec::new(),
            freed: Vec::new(),
            freed_again: Vec::new(),
        };
        faults.faults.lock().push(fault);
        assert!(faults.to_json().is_some_and(|text| text.contains("overflow")));
        let _a_thread_that_crashed_holds_it = faults.faults.lock();
        assert_eq!(faults.to_json(), None);
        assert!(!faults.answers(Duration::ZERO));
    }
}
