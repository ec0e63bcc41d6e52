//! Guard mode (`--guard`): writes behind a block's end, writes to freed blocks, and blocks freed twice, in host
//! memory.
//!
//! Behind each block lie [`REAR`] bytes of a pattern, which are looked at when the block is freed and at the end of
//! the run. A freed block is filled with a poison (it reads as NaN in every floating type, as -1 in integers) and
//! kept from being handed out again until others have been freed after it; then the poison must be untouched.
//!
//! Must not know who allocates. Invariants: memory held back is bounded ([`HELD_BYTES`], [`HELD_BLOCKS`]); the
//! ledger counts a block's own size, and counts it freed when it is; a fault is said once for each pair of
//! stacks, and nothing of the job changes.

use super::process::{Stacks, State};
use super::served::Served;
use super::{gpu, outcome, say};
use crate::driver::host::HostDriver;
use crate::driver::{Address, Stream};
use crate::heap::{BlockInfo, BlockState, HeapError, Tag};
use crate::ledger::{self, Frame, Symbols};
use crate::stacks::StackId;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{HashSet, VecDeque};

/// Bytes of pattern behind each block.
pub const REAR: u64 = 64;
const PATTERN: u8 = 0xA5;
const POISON: u8 = 0xFF;
/// Freed memory that is held back, at most.
const HELD_BYTES: u64 = 256 << 20;
const HELD_BLOCKS: usize = 1 << 16;
/// Faults that are kept for the report.
const FAULTS: usize = 1000;

/// A freed block that is held back.
#[derive(Clone, Copy, Debug)]
struct Held {
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
    UseAfterFree,
    FreedTwice,
}

/// A fault as it is written to guard.json.
#[derive(Debug, Serialize)]
pub struct Fault {
    what: Wrong,
    /// Bytes of the block, as requested.
    size: u64,
    /// The first byte that was changed, counted from the block's start.
    first: u64,
    /// Bytes that were changed (of the pattern, or of the block).
    changed: u64,
    /// The stack of the allocation, of the free, and of the second free; innermost frame first.
    allocated: Vec<Frame>,
    freed: Vec<Frame>,
    freed_again: Vec<Frame>,
}

/// The guard of the host's memory.
#[derive(Debug, Default)]
pub struct Guard {
    held: Mutex<VecDeque<Held>>,
    held_bytes: std::sync::atomic::AtomicU64,
    said: Mutex<HashSet<(Wrong, u32, u32)>>,
    faults: Mutex<Vec<Fault>>,
}

/// The first byte of a range that is not `byte`, and how many are not.
fn changed(at: Address, size: u64, byte: u8) -> Option<(u64, u64)> {
    // SAFETY: a range of a block of ours that is handed out to us or to the caller of free: mapped memory.
    let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, size as usize) };
    let first = bytes.iter().position(|b| *b != byte)?;
    Some((first as u64, bytes[first..].iter().filter(|b| **b != byte).count() as u64))
}

fn fill(at: Address, size: u64, byte: u8) {
    // SAFETY: as for `changed`; nobody else may touch the range now.
    unsafe { (at as *mut u8).write_bytes(byte, size as usize) };
}

impl Guard {
    /// Hands out a block with a pattern behind it.
    ///
    /// # Errors
    /// The heap's.
    pub fn malloc(
        &self,
        state: &State,
        host: &Served<HostDriver>,
        size: u64,
        stream: Stream,
        stack: StackId,
    ) -> Result<Address, HeapError> {
        let whole = size.saturating_add(REAR);
        let at = {
            let mut books = host.lock();
            let at = books.heap.malloc(whole, stream, Tag(0, 0))?;
            let tag = books.accounts.born(stack.0, size, state.clock.now());
            let _ = books.heap.set_tag(at, Tag(tag.0, tag.1));
            at
        };
        fill(at + size, REAR, PATTERN);
        Ok(at)
    }

    /// Takes a block back: looks at its pattern, poisons it, and holds it back.
    ///
    /// # Errors
    /// [`HeapError::NotOurs`] if no block that is handed out starts at `at`.
    pub fn free(&self, state: &State, host: &Served<HostDriver>, at: Address) -> Result<(), HeapError> {
        let now = gpu::stack();
        let twice = self.held.lock().iter().rev().find(|held| held.at == at).copied();
        if let Some(held) = twice {
            self.fault(Wrong::FreedTwice, held, (0, 0), now);
            return Ok(());
        }
        let held = {
            let mut books = host.lock();
            let block = live(books.heap.block_at(at), at)?;
            let size = block.requested - REAR;
            let born = books.stack_of(block.tag);
            books.accounts.died(ledger::Tag(block.tag.0, block.tag.1), size, state.clock.now());
            // Of no site any more.
            let _ = books.heap.set_tag(at, Tag(u64::MAX, u64::MAX));
            Held { at, size, born, freed: now.0 }
        };
        if let Some((first, count)) = changed(at + held.size, REAR, PATTERN) {
            self.fault(Wrong::Overflow, held, (held.size + first, count), StackId::NONE);
        }
        fill(at, held.size, POISON);
        self.hold(host, held)
    }

    fn hold(&self, host: &Served<HostDriver>, held: Held) -> Result<(), HeapError> {
        use std::sync::atomic::Ordering::Relaxed;
        let mut leaving = Vec::new();
        {
            let mut all = self.held.lock();
            all.push_back(held);
            let mut bytes = self.held_bytes.fetch_add(held.size, Relaxed) + held.size;
            while bytes > HELD_BYTES || all.len() > HELD_BLOCKS {
                let Some(oldest) = all.pop_front() else { break };
                bytes = self.held_bytes.fetch_sub(oldest.size, Relaxed) - oldest.size;
                leaving.push(oldest);
            }
        }
        for held in leaving {
            self.look_at_poison(held);
            host.lock().heap.free(held.at)?;
        }
        Ok(())
    }

    fn look_at_poison(&self, held: Held) {
        if let Some(found) = changed(held.at, held.size, POISON) {
            self.fault(Wrong::UseAfterFree, held, found, StackId::NONE);
        }
    }

    /// Whether nobody holds the guard's own locks for longer than `patience`.
    pub fn answers(&self, patience: std::time::Duration) -> bool {
        self.held.try_lock_for(patience).is_some()
            && self.said.try_lock_for(patience).is_some()
            && self.faults.try_lock_for(patience).is_some()
    }

    /// At the end of the run: what is still held back, and what is still live.
    pub fn look_at_all(&self, host: &Served<HostDriver>) {
        let held: Vec<Held> = self.held.lock().iter().copied().collect();
        let known: HashSet<Address> = held.iter().map(|held| held.at).collect();
        held.into_iter().for_each(|held| self.look_at_poison(held));
        let mut live = Vec::new();
        if let Some(books) = host.books() {
            books.heap.for_each_live(|block| {
                if block.state == BlockState::Allocated && !known.contains(&block.address) {
                    live.push((block.address, block.requested, block.tag));
                }
            });
            let stacks: Vec<u32> = live.iter().map(|(_, _, tag)| books.stack_of(*tag)).collect();
            // Under the lock: none of these is freed meanwhile.
            for ((at, whole, _), born) in live.into_iter().zip(stacks) {
                let size = whole.saturating_sub(REAR);
                if let Some((first, count)) = changed(at + size, REAR, PATTERN) {
                    let held = Held { at, size, born, freed: 0 };
                    self.fault(Wrong::Overflow, held, (size + first, count), StackId::NONE);
                }
            }
        }
    }

    /// The faults as JSON, if there were any.
    pub fn to_json(&self) -> Option<String> {
        let faults = self.faults.lock();
        if faults.is_empty() { None } else { serde_json::to_string_pretty(&*faults).ok() }
    }

    #[cold]
    fn fault(&self, what: Wrong, block: Held, (first, count): (u64, u64), again: StackId) {
        if !self.said.lock().insert((what, block.born, block.freed)) {
            return;
        }
        let fault = Fault {
            what,
            size: block.size,
            first,
            changed: count,
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
}

/// The block, if it is handed out and starts there.
fn live(found: Option<BlockInfo>, at: Address) -> Result<BlockInfo, HeapError> {
    found
        .filter(|block| {
            block.address == at && block.state == BlockState::Allocated && block.requested >= REAR
        })
        .ok_or(HeapError::NotOurs { address: at })
}

impl Fault {
    fn text(&self, stacks: [u32; 3]) -> String {
        let size = outcome::torch_size(self.size);
        let mut text = match self.what {
            Wrong::Overflow => format!(
                "OVERFLOW  {} bytes were written behind the end of a block of {size}, from byte {} on",
                self.changed, self.first
            ),
            Wrong::UseAfterFree => format!(
                "USE AFTER FREE  {} bytes of a block of {size} were written after it was freed, from byte {} on",
                self.changed, self.first
            ),
            Wrong::FreedTwice => format!("FREED TWICE  a block of {size}"),
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
    fn what_is_changed_is_counted_from_the_first() {
        let mut bytes = vec![PATTERN; 64];
        let at = |bytes: &[u8]| bytes.as_ptr() as u64;
        assert_eq!(changed(at(&bytes), 64, PATTERN), None);
        bytes[3] = 0;
        bytes[9] = 1;
        assert_eq!(changed(at(&bytes), 64, PATTERN), Some((3, 2)));
        fill(bytes.as_mut_ptr() as u64, 64, POISON);
        assert_eq!(changed(at(&bytes), 64, POISON), None);
        assert!(f32::from_ne_bytes([POISON; 4]).is_nan() && f64::from_ne_bytes([POISON; 8]).is_nan());
    }
}
